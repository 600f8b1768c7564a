"""Where checkpoints lie: what must be possible in any folder of them, on a disk, and behind a URL.

Names are relative, with `/` in them. Whatever fails is an OSError; a commit is data first, each
file new and durable before the next begins, and one small file put last.

On a disk a file is there whole or not at all, whenever the machine or we die: each file is synced
before its name counts, and each name by syncing its folder; what is replaced is replaced by a
rename. All system calls that change anything go through `Disk`. Behind a URL there is no rename and
no lock: object stores put a file whole or not at all, and only one job may write at a time.

Large files are read and summed by several threads at once: a CRC-32 takes longer than a copy, and
neither needs Python's lock. Each thread reads a segment, sums each piece of it while that is still
in its core's cache, and goes on to the next one. The checksum of the file is that of the segments'
sums.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

from ..clock import monotonic
from ..errors import CheckpointError
from ..foreign import opened
from ..threads import helper

T = TypeVar("T")

CHUNK = 16 << 20
"""Bytes that are read or written at once: large, so that a disk streams, and few calls are made."""

PIECE = 1 << 20
"""Bytes that are read at once and then summed, while they are in a core's cache."""

MAX_SMALL = 64 << 20
"""Bytes of a small file, such as a manifest of a hundred thousand parts."""

SEGMENT = 8 << 20
"""Bytes that one thread reads and sums before it takes the next ones. Each segment has a CRC-32,
so another value here changes the checksums of files."""
READERS = min(8, len(os.sched_getaffinity(0)))
"""At most so many threads read at once: they keep up with any disk, and with memory."""
BESIDE = 2
"""So many threads sum what is being written, which takes longer than to read it."""

LOCK = ".lock"
LOCK_TIMEOUT = 60.0
"""Seconds; it is held for as long as a commit's last step and deletions take."""
LOCK_POLL = 0.05
MAKES = 100
"""So often a folder is made that goes again before there is a file in it."""

_ASIDE = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{8}\.partial", re.DOTALL)
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_ALL, _SYNC_FILE_RANGE_WRITE = ctypes.c_int64(0), 2

Fill: TypeAlias = Callable[[int, memoryview, Callable[[memoryview], None]], int]
"""Reads from a byte on into a buffer, and shows each piece as soon as it is there; how many bytes,
none only at the end. See `Place.read_into`."""


def no_news(_chunk: memoryview) -> None:
    """Nobody wants to see the bytes as they come."""


def aside_name(target: str, token: int) -> str:
    """A hidden name that no checkpoint has, under which `target` is written before it is whole;
    `token` tells apart those who write it."""
    return f".{target}.{token % 2**32:08x}.partial"


def target_of(name: str) -> str | None:
    """The name that the file `name` was being written for; None if it is no such file."""
    match = _ASIDE.fullmatch(name)
    return match["target"] if match else None


# -- checksums: pure -------------------------------------------------------------------------------


def checksum(data: memoryview) -> int:
    """Return the checksum of a file's bytes: see `checksum_of`."""
    starts = range(0, len(data), SEGMENT)
    return checksum_of(zlib.crc32(data[at : at + SEGMENT]) for at in starts)


def checksum_of(segments: Iterable[int]) -> int:
    """Return the checksum of a file: the CRC-32 of the CRC-32s of its segments.

    Several threads can compute it, because each segment of `SEGMENT` bytes has a CRC-32 of its own.

    Args:
        segments: their CRC-32s, in order.
    """
    return zlib.crc32(b"".join(crc32.to_bytes(4, "little") for crc32 in segments))


# -- a place ---------------------------------------------------------------------------------------


class NotAFile(OSError):
    """A file is larger than any file of its kind can be. No disk has failed, so reading it again
    gives the same answer."""


class Place(abc.ABC):
    """One folder, and the folders in it. name: for messages."""

    name: str
    readers = 1
    """How many threads may call `read_into` at once, for one file or for several."""

    @abc.abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Keep other writers out while the block runs, and create the folder. A `RemotePlace` does
        neither."""

    @abc.abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders in it; none if it is not there."""

    @abc.abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder in it (`""` for itself) with their bytes; none if not there."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return a whole small file, or None if it does not exist. Raise NotAFile if it is larger
        than MAX_SMALL."""

    @abc.abstractmethod
    def read_into(
        self,
        name: str,
        buffer: memoryview,
        *,
        start: int = 0,
        seen: Callable[[memoryview], None] = no_news,
    ) -> int:
        """Read a file from the byte `start` on into `buffer`, until either ends; how many bytes.

        seen: called with each part of the buffer once it is filled, in order.
        """

    @abc.abstractmethod
    def write(self, name: str, data: memoryview) -> None:
        """Write a new file, durably; makes its folder. Of one that fails nothing is left."""

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Put a small file in the place of what stands there, durably; the folder is there."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Take a file away, to stay away; harmless if it is not there."""

    @abc.abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Take an empty folder away; harmless if it is not there, or not empty."""


# -- on a disk -------------------------------------------------------------------------------------


class Disk:
    """The system calls that change a disk, one method each."""

    def create(self, path: str) -> int:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: memoryview) -> int:
        count = os.write(handle, data)
        if count == CHUNK and _sync_file_range is not None:
            # The disk begins with it while the next is copied, rather than at the sync, which waits
            # until it is there, and says so if it cannot be.
            _sync_file_range(handle, _ALL, _ALL, _SYNC_FILE_RANGE_WRITE)
        return count

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def make_folder(self, path: str) -> None:
        os.mkdir(path)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)


class LocalPlace(Place):
    """A folder that the machine's own system calls reach."""

    readers = READERS

    def __init__(self, folder: str | os.PathLike[str], disk: Disk | None = None) -> None:
        self.name = os.path.abspath(os.fspath(folder))
        self._disk = disk or Disk()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self._make(self.name)
        path = os.path.join(self.name, LOCK)
        # A handle of its own each time: two of our threads keep each other out, too.
        with opened(path, os.O_RDWR | os.O_CREAT, mode=0o644) as handle:
            _lock(handle, path)
            try:
                yield
            finally:
                # Not by closing alone: a process that was forked meanwhile, such as a DataLoader's
                # worker, has the handle, too, and would keep the lock for as long as it lives.
                fcntl.flock(handle, fcntl.LOCK_UN)

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.name) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> dict[str, int]:
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path(folder)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def read(self, name: str) -> bytes | None:
        try:
            with open(self._path(name), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_SMALL:
                    raise NotAFile(f"{name} has {size} bytes, at most {MAX_SMALL} are read of it")
                return file.read(size)
        except FileNotFoundError:
            return None

    def read_into(
        self,
        name: str,
        buffer: memoryview,
        *,
        start: int = 0,
        seen: Callable[[memoryview], None] = no_news,
    ) -> int:
        done = 0
        with open(self._path(name), "rb", buffering=0) as file:
            while done < len(buffer):
                count = os.preadv(file.fileno(), [buffer[done : done + PIECE]], start + done)
                if not count:
                    break
                seen(buffer[done : done + count])
                done += count
        return done

    def write(self, name: str, data: memoryview) -> None:
        path = self._path(name)
        folder = os.path.dirname(path)
        handle = self._created(path, folder)
        with self._or_removed(path), self._synced(handle):
            self._write(handle, name, data)
        self._sync_folder(folder)

    def put(self, name: str, data: bytes | memoryview) -> None:
        path = self._path(name)
        folder, base = os.path.split(path)
        aside = os.path.join(folder, aside_name(base, secrets.randbits(32)))
        handle = self._disk.create(aside)
        with self._or_removed(aside):
            with self._synced(handle):
                self._write(handle, name, memoryview(data))
            self._disk.rename(aside, path)
        self._sync_folder(folder)

    def remove(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(path)
            self._sync_folder(os.path.dirname(path))

    def remove_folder(self, folder: str) -> None:
        try:
            self._disk.remove_folder(self._path(folder))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

    def _path(self, name: str) -> str:
        return os.path.join(self.name, name)

    def _make(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent != path:
            self._make(parent)
        with contextlib.suppress(FileExistsError):
            self._disk.make_folder(path)
            self._sync_folder(parent)

    def _created(self, path: str, folder: str) -> int:
        """A new file in a folder, which whoever clears up may take away while it is empty."""
        for _ in range(MAKES):
            self._make(folder)
            with contextlib.suppress(FileNotFoundError):
                return self._disk.create(path)
        raise FileNotFoundError(errno.ENOENT, f"it was taken away {MAKES} times", folder)

    def _write(self, handle: int, name: str, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = self._disk.write(handle, data[done : done + CHUNK])
            if not count:
                raise OSError(errno.EIO, "write() returned 0 bytes", self._path(name))
            done += count

    @contextlib.contextmanager
    def _synced(self, handle: int) -> Iterator[None]:
        """What is written there is on the disk when the block ends, and the file closed."""
        try:
            yield
            self._disk.sync(handle)
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _or_removed(self, path: str) -> Iterator[None]:
        """Whatever fails, nothing is left of this file."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.remove(path)
            raise

    def _sync_folder(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._disk.sync(handle)
        finally:
            os.close(handle)


def _lock(handle: int, path: str) -> None:
    """Wait for the lock, which ends with its holder, however that ended."""
    deadline, pause = monotonic() + LOCK_TIMEOUT, threading.Event()
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = isinstance(error, BlockingIOError)
            if not held or monotonic() > deadline:
                why = f"somebody has it for {LOCK_TIMEOUT:g} s" if held else error
                raise OSError(errno.EAGAIN, f"{path} could not be locked: {why}") from error
        pause.wait(LOCK_POLL)


# -- behind a URL ----------------------------------------------------------------------------------


class RemotePlace(Place):
    """A folder that fsspec reaches. The extra `fsspec` is imported when one is first used.

    Only one job may write to it at a time: it has no lock, so fencing is not enforced.
    """

    readers = 8

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            raise CheckpointError(
                f"{url} needs fsspec: pip install 'elasticlib[fsspec]', and its part for this URL"
            ) from error
        self.name = url
        try:
            self._fs: Any
            self._fs, self._root = url_to_fs(url)
        except Exception as error:
            raise CheckpointError(f"{url} cannot be opened: {error}") from error

    def locked(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def folders(self) -> list[str]:
        rows = self._list("")
        return sorted(_base(row["name"]) for row in rows if row["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        rows = self._list(folder)
        return {_base(row["name"]): int(row["size"]) for row in rows if row["type"] == "file"}

    def read(self, name: str) -> bytes | None:
        with self._spoken(name):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def read_into(
        self,
        name: str,
        buffer: memoryview,
        *,
        start: int = 0,
        seen: Callable[[memoryview], None] = no_news,
    ) -> int:
        with self._spoken(name):
            for done in range(0, len(buffer), CHUNK):
                part = buffer[done : done + CHUNK]
                begin = start + done
                data = self._fs.cat_file(self._path(name), start=begin, end=begin + len(part))
                part[: len(data)] = data
                seen(part[: len(data)])
                if len(data) < len(part):
                    return done + len(data)
        return len(buffer)

    def write(self, name: str, data: memoryview) -> None:
        path = self._path(name)
        with self._spoken(name):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                with self._fs.open(path, "wb") as file:
                    for start in range(0, len(data), CHUNK):
                        file.write(data[start : start + CHUNK])
                self._fs.invalidate_cache()
                size = self._fs.info(path)["size"]
                if size != len(data):
                    raise OSError(f"{len(data)} bytes were written, and {size} are there")
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(path)
                raise

    def put(self, name: str, data: bytes) -> None:
        with self._spoken(name):
            path = self._path(name)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data)

    def remove(self, name: str) -> None:
        with self._spoken(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def remove_folder(self, folder: str) -> None:
        # Most have no folders but those that hold something.
        with contextlib.suppress(Exception):
            self._fs.rmdir(self._path(folder))

    def _list(self, folder: str) -> list[dict[str, Any]]:
        with self._spoken(folder):
            self._fs.invalidate_cache()
            try:
                return list(self._fs.ls(self._path(folder), detail=True))
            except FileNotFoundError:
                return []

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    @contextlib.contextmanager
    def _spoken(self, name: str) -> Iterator[None]:
        """Each kind of file system has errors of its own: here all are OSError, and say where."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.name}/{name}: {type(error).__name__}: {error}") from error


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


# -- large files, by several threads ---------------------------------------------------------------


def new_memory(size: int) -> mmap.mmap:
    """So many bytes, all zero, that go when nobody refers to them any more."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Touched for the first time, memory costs less in pages of 2 MiB than in those of 4 KiB.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_summed(
    fill: Fill,
    size: int,
    into: memoryview | None = None,
    *,
    threads: int = 1,
    seen: Callable[[memoryview], None] = no_news,
) -> tuple[int, int]:
    """Read `size` bytes. Return how many there were before the end, and their checksum.

    Args:
        fill: called by several threads at once, by each with a segment of its own.
        into: where the bytes go; without it they are read to be summed alone.
        seen: called with each piece that was read, by one thread at a time, in any order.
    """
    lock, own = threading.Lock(), threading.local()

    def spare() -> memoryview:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(new_memory(min(size, SEGMENT)))
        return own.buffer  # type: ignore[no-any-return]

    def segment(number: int) -> tuple[int, int]:
        start, done, summed = number * SEGMENT, 0, 0
        length = min(SEGMENT, size - start)
        target = spare()[:length] if into is None else into[start : start + length]

        def piece(data: memoryview) -> None:
            nonlocal summed
            summed = zlib.crc32(data, summed)
            with lock:
                seen(data)

        while done < length and (count := fill(start + done, target[done:], piece)):
            done += count
        return done, summed

    found = _in_threads(segment, -(-size // SEGMENT), threads)
    whole = sum(1 for count, _ in found if count == SEGMENT)
    there = [(count, crc32) for count, crc32 in found[: whole + 1] if count]
    return sum(count for count, _ in there), checksum_of(crc32 for _, crc32 in there)


def checksum_beside(data: memoryview, act: Callable[[], object]) -> int:
    """Return the checksum of `data`, which must not change: other threads compute it while `act`
    runs."""

    def do(number: int) -> int:
        if number == 0:
            act()
            return 0
        return zlib.crc32(data[(number - 1) * SEGMENT : number * SEGMENT])

    return checksum_of(_in_threads(do, 1 + -(-len(data) // SEGMENT), 1 + BESIDE)[1:])


def _in_threads(act: Callable[[int], T], count: int, threads: int) -> list[T]:
    """What `act` gives for 0 to `count` - 1, in that order, called by this thread and others.

    Raises the first error of them all, once none is at it any more.
    """
    numbers = iter(range(count))
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for number in numbers:
                if errors:
                    return
                found[number] = act(number)
        except BaseException as error:
            errors.append(error)

    others = [helper(work, "elasticlib-sum") for _ in range(min(threads, count) - 1)]
    for thread in others:
        with contextlib.suppress(RuntimeError, MemoryError):  # Fewer threads do it as well.
            thread.start()
    work()
    for thread in others:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(count)]
