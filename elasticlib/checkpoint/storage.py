"""Storage of checkpoints: the file operations that a commit needs, on a disk and behind a URL.

`LocalStorage` is a directory of a file system. After a crash or a loss of power, each file in it is
complete or absent: a file is synced before its name counts, a name is synced with its directory,
and `replace` renames a complete file. `DiskCalls` makes all system calls that change the disk.

`FsspecStorage` is a directory behind a URL. Object stores store a file completely or not at all,
but they have no rename and no lock, so only one job may write to a URL at a time.

A data file is written and read in segments of 8 MiB. Each segment has a CRC-32, which is computed
while the segment is in the processor's cache. The checksum of the data is the CRC-32 of these
values, so that several threads can read a file and verify it. It follows the data, as the last
eight bytes of the file. Apart from that, this module does not interpret the contents.
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
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from ..clock import monotonic
from ..errors import CheckpointError
from ..threads import daemon_thread, only_logged, run_with_limit
from ..untrusted import open_regular_file

T = TypeVar("T")
OnChunk: TypeAlias = Callable[[memoryview], None]

Checksum: TypeAlias = int
"""The checksum of data: the CRC-32 of the CRC-32 values of their segments."""

CHECKSUM_BYTES = 8  # at the end of a data file: its checksum, as hexadecimal digits

SEGMENT_BYTES = 8 << 20  # Another value changes the checksums of files.
CACHED_SEGMENTS = 8  # The page cache keeps so many segments of a file that is being written.
READ_BYTES = 1 << 20  # One read: its bytes are still in the processor's cache for the CRC-32.
MAX_SMALL_FILE_BYTES = 64 << 20  # A manifest of 100,000 parts is smaller.
MAX_READER_THREADS = min(8, len(os.sched_getaffinity(0)))  # Eight saturate any disk.

LOCK_NAME = ".lock"
LOCK_TIMEOUT_S = 60.0  # A writer holds the lock while it commits and deletes, which takes seconds.
LOCK_POLL_INTERVAL_S = 0.05

# One call of fsspec, which transfers at most a segment. Closing a file may transfer all of it.
FSSPEC_TIMEOUT_S = 120.0
FSSPEC_CLOSE_BYTES_PER_S = 10 << 20

MAX_CREATE_ATTEMPTS = 100  # A concurrent pruner may delete a directory that has no file yet.

_TEMP_NAME = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{8}\.partial", re.DOTALL)
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_WHOLE_FILE, _SYNC_FILE_RANGE_WRITE = ctypes.c_int64(0), 2


def ignore_chunk(_chunk: memoryview) -> None:
    """Do nothing with a chunk that was read."""


def temp_name(target: str, token: int) -> str:
    """Return the hidden name under which a writer with this token writes `target`."""
    return f".{target}.{token % 2**32:08x}.partial"


def claim_name(target: str) -> str:
    """Return the hidden name under which `CheckpointStorage.put` writes `target`."""
    return temp_name(target, 0)


def temp_target(name: str) -> str | None:
    """Return the file that the temporary file `name` replaces, or None if it is another file."""
    match = _TEMP_NAME.fullmatch(name)
    return match["target"] if match else None


class FileTooLargeError(OSError):
    """A file is larger than any file of its kind. The disk works, so a retry does not help."""


class CheckpointStorage(abc.ABC):
    """A directory of checkpoints. Names are relative to it, with `/` between their parts.

    Each operation raises OSError if it fails. Reads may run in several threads at once.
    """

    name: str  # the path or URL, for messages
    max_readers = 1  # how many threads may call `read_into` at once
    shows_growth = False  # whether the size of a claim shows how much of the file was written

    @abc.abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Exclude other writers while the block runs, and create the directory.

        `FsspecStorage` does neither.
        """

    @abc.abstractmethod
    def list_folders(self) -> list[str]:
        """Return the names of the subdirectories. The list is empty if the directory is missing."""

    def is_link(self, folder: str) -> bool:
        """Return whether a subdirectory is a link, behind which nothing may be deleted."""
        del folder
        return False

    @abc.abstractmethod
    def list_files(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file in a subdirectory, by the name of the file.

        The subdirectory `""` is the directory itself. A missing one has no files.
        """

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file, or None if it does not exist.

        Raises:
            FileTooLargeError: the file has more than `MAX_SMALL_FILE_BYTES`.
            IrregularFileError: a pipe, a device or a directory has this name.
        """

    @abc.abstractmethod
    def read_into(
        self,
        name: str,
        buffer: memoryview,
        *,
        start: int = 0,
        on_chunk: OnChunk = ignore_chunk,
    ) -> int:
        """Read a file into `buffer`, until the buffer is full or the file ends.

        Args:
            name: the file.
            buffer: receives the bytes.
            start: offset in the file.
            on_chunk: receives each part of the buffer as soon as it is filled, in order.

        Returns:
            How many bytes were read.
        """

    @abc.abstractmethod
    def write(self, name: str, data: memoryview) -> Checksum:
        """Write a new data file durably: `data`, and after them their checksum.

        Create the directory of the file. Remove the file if this fails.

        Returns:
            The checksum of the data, as `checksum` computes it. The file ends with
            `encode_checksum` of it.
        """

    @abc.abstractmethod
    def put(self, name: str, data: memoryview) -> bool:
        """Write a new data file as `write` does, unless it exists, or another process writes it.

        A file `claim_name` in the same directory tells others that the file is being written. It
        disappears when the file is complete, or if this fails. If the process is killed, it stays.

        Returns:
            Whether the file was written.
        """

    @abc.abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Create or replace a file durably and atomically, in a directory that exists."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file durably. Do nothing if it does not exist."""

    @abc.abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Remove an empty directory. Do nothing if it does not exist, or is not empty."""

    def remove_tree(self, folder: str, first: str) -> None:
        """Remove a subdirectory and the files in it.

        What is no file in it, such as a pipe or a directory, stays, and so does the subdirectory.

        Args:
            folder: the subdirectory.
            first: the file that is removed before the others, durably.
        """
        files = self.list_files(folder)
        for name in [first, *(name for name in files if name != first)]:
            if name in files:
                self.remove(f"{folder}/{name}")
        self.remove_folder(folder)


def resolve_location(
    location: str | os.PathLike[str] | CheckpointStorage,
) -> str | CheckpointStorage:
    """Return the absolute path of a directory, in which `~` is expanded.

    A URL and a storage are returned as they are.
    """
    if isinstance(location, CheckpointStorage):
        return location
    text = os.fspath(location)
    scheme, is_url, path = text.partition("://")
    if is_url and scheme not in ("file", "local"):
        return text
    return os.path.abspath(os.path.expanduser(path if is_url else text))


def open_storage(location: str | os.PathLike[str] | CheckpointStorage) -> CheckpointStorage:
    """Return the storage at a path or URL. A storage is returned as it is.

    Raises:
        CheckpointError: the URL cannot be opened.
    """
    location = resolve_location(location)
    if isinstance(location, CheckpointStorage):
        return location
    return FsspecStorage(location) if "://" in location else LocalStorage(location)


# -- a directory of a file system ------------------------------------------------------------------


class DiskCalls:
    """The system calls that change a disk, one method each. Tests replace them."""

    def create(self, path: str) -> int:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: memoryview) -> int:
        count = os.write(handle, data)
        if count == SEGMENT_BYTES and _sync_file_range is not None:
            # The disk starts to write this segment now, not at the sync, which reports errors.
            _sync_file_range(handle, _WHOLE_FILE, _WHOLE_FILE, _SYNC_FILE_RANGE_WRITE)
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


class LocalStorage(CheckpointStorage):
    """A directory of a file system, local or on a network."""

    max_readers = MAX_READER_THREADS
    shows_growth = True

    def __init__(self, folder: str | os.PathLike[str], calls: DiskCalls | None = None) -> None:
        self.name = os.path.abspath(os.fspath(folder))
        self._calls = calls or DiskCalls()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        self._make_folder(self.name)
        path = os.path.join(self.name, LOCK_NAME)
        # Each call opens the file, so that two threads of this process exclude each other, too.
        with open_regular_file(path, os.O_RDWR | os.O_CREAT, mode=0o666) as handle:
            _wait_for_lock(handle, path)
            try:
                yield
            finally:
                # Closing the handle is not enough: a process that was forked meanwhile, such as a
                # DataLoader's worker, has the handle, too, and would keep the lock.
                fcntl.flock(handle, fcntl.LOCK_UN)

    def list_folders(self) -> list[str]:
        try:
            with os.scandir(self.name) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def is_link(self, folder: str) -> bool:
        return os.path.islink(self._path(folder))

    def list_files(self, folder: str) -> dict[str, int]:
        sizes = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path(folder)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def read(self, name: str) -> bytes | None:
        try:
            with open_regular_file(self._path(name), follow_link=True) as handle:
                size = os.fstat(handle).st_size
                if size > MAX_SMALL_FILE_BYTES:
                    limit = MAX_SMALL_FILE_BYTES
                    raise FileTooLargeError(f"{name} has {size} bytes, which is more than {limit}")
                with open(handle, "rb", closefd=False) as file:
                    return file.read(size)
        except FileNotFoundError:
            return None

    def read_into(
        self,
        name: str,
        buffer: memoryview,
        *,
        start: int = 0,
        on_chunk: OnChunk = ignore_chunk,
    ) -> int:
        with open_regular_file(self._path(name), follow_link=True) as handle:
            return read_handle_into(handle, buffer, start, on_chunk)

    def write(self, name: str, data: memoryview) -> Checksum:
        path = self._path(name)
        folder = os.path.dirname(path)
        handle = self._create(path, folder)
        with self._removed_on_error(path):
            result = self._fill(handle, data)
        self._sync_folder(folder)
        return result

    def put(self, name: str, data: memoryview) -> bool:
        path = self._path(name)
        folder, base = os.path.split(path)
        claim = os.path.join(folder, claim_name(base))
        try:
            handle = self._create(claim, folder)
        except FileExistsError:
            return False
        with self._removed_on_error(claim):
            # The process that had the claim before may have renamed it since then.
            if os.path.exists(path):
                os.close(handle)
                self._calls.remove(claim)
                return False
            self._fill(handle, data)
            self._calls.rename(claim, path)
        self._sync_folder(folder)
        return True

    def _fill(self, handle: int, data: memoryview) -> Checksum:
        """Write data and their checksum to a new file, sync and close it."""
        with _FollowingChecksum(len(data)) as checksum_thread, self._synced(handle):
            for number, segment in enumerate(split_into_segments(data)):
                self._write_all(handle, segment)
                checksum_thread.add(segment)
                _release_page_cache(handle, number - CACHED_SEGMENTS)
            result = checksum_thread.result()
            self._write_all(handle, memoryview(encode_checksum(result)))
        return result

    def replace(self, name: str, data: bytes | memoryview) -> None:
        path = self._path(name)
        folder, base = os.path.split(path)
        temp = os.path.join(folder, temp_name(base, secrets.randbits(32)))
        handle = self._calls.create(temp)
        with self._removed_on_error(temp):
            with self._synced(handle):
                self._write_all(handle, memoryview(data))
            self._calls.rename(temp, path)
        self._sync_folder(folder)

    def remove(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            self._calls.remove(path)
            self._sync_folder(os.path.dirname(path))

    def remove_folder(self, folder: str) -> None:
        try:
            self._calls.remove_folder(self._path(folder))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

    def remove_tree(self, folder: str, first: str) -> None:
        files = self.list_files(folder)
        if first in files:
            self.remove(f"{folder}/{first}")
        # Without its first file the directory means nothing, so the others need no sync.
        for name in files.keys() - {first}:
            with contextlib.suppress(FileNotFoundError):
                self._calls.remove(self._path(f"{folder}/{name}"))
        self.remove_folder(folder)

    def _path(self, name: str) -> str:
        return os.path.join(self.name, name)

    def _make_folder(self, path: str) -> None:
        """Create a directory and its parents durably, unless they exist."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent != path:
            self._make_folder(parent)
        with contextlib.suppress(FileExistsError):
            self._calls.make_folder(path)
            self._sync_folder(parent)

    def _create(self, path: str, folder: str) -> int:
        """Create a file, and its directory as often as a concurrent pruner deletes it."""
        for _ in range(MAX_CREATE_ATTEMPTS):
            self._make_folder(folder)
            with contextlib.suppress(FileNotFoundError):
                return self._calls.create(path)
        message = f"another process deleted the directory {MAX_CREATE_ATTEMPTS} times"
        raise FileNotFoundError(errno.ENOENT, message, folder)

    def _write_all(self, handle: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = self._calls.write(handle, data[done : done + SEGMENT_BYTES])
            if not count:
                raise OSError(errno.EIO, "write() returned 0 bytes", self.name)
            done += count

    @contextlib.contextmanager
    def _synced(self, handle: int) -> Iterator[None]:
        """Sync a file after the block, release its pages in the page cache, and close it."""
        try:
            yield
            self._calls.sync(handle)
            # The training's data and the next save need the memory more than this file does.
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _removed_on_error(self, path: str) -> Iterator[None]:
        """Remove the file if the block raises."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                self._calls.remove(path)
            raise

    def _sync_folder(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._calls.sync(handle)
        finally:
            os.close(handle)


def _release_page_cache(handle: int, number: int) -> None:
    """Release the page cache of a segment that the disk has written by now."""
    if number >= 0:
        os.posix_fadvise(handle, number * SEGMENT_BYTES, SEGMENT_BYTES, os.POSIX_FADV_DONTNEED)


class _FollowingChecksum:
    """The checksum of a file, which a thread computes behind the writes. Not thread-safe.

    Both `write` and zlib release the interpreter's lock, so the checksum takes little time of its
    own if a second core is free. A file of one segment needs no thread.
    """

    def __init__(self, size: int) -> None:
        self._segments: SimpleQueue[memoryview | None] = SimpleQueue()
        self._crcs: list[int] = []
        self._num_segments = 0  # how many were added
        self._thread: threading.Thread | None = None
        if size > SEGMENT_BYTES:
            # Where no more threads can be started, the caller's thread computes the checksum.
            with contextlib.suppress(RuntimeError, MemoryError):
                # `result` notices that a checksum is missing.
                thread = daemon_thread(self._run, "elasticlib-checksum", only_logged)
                thread.start()
                self._thread = thread

    def __enter__(self) -> _FollowingChecksum:
        return self

    def __exit__(self, *_: object) -> None:
        self._segments.put(None)

    def add(self, segment: memoryview) -> None:
        """Add the next segment."""
        self._num_segments += 1
        if self._thread is not None:
            self._segments.put(segment)
        else:
            self._crcs.append(zlib.crc32(segment))

    def result(self) -> int:
        """Return the checksum of all segments."""
        self._segments.put(None)
        if self._thread is not None:
            self._thread.join()
        if len(self._crcs) != self._num_segments:
            raise OSError(errno.EIO, "the thread that computes the checksum of the file has failed")
        return combine_segment_crcs(self._crcs)

    def _run(self) -> None:
        while (segment := self._segments.get()) is not None:
            self._crcs.append(zlib.crc32(segment))


def _wait_for_lock(handle: int, path: str) -> None:
    """Wait for the lock. Raise OSError after `LOCK_TIMEOUT_S`.

    The kernel releases the lock when its holder exits.
    """
    deadline, pause = monotonic() + LOCK_TIMEOUT_S, threading.Event()
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_locked = isinstance(error, BlockingIOError)
            if not is_locked or monotonic() > deadline:
                reason = f"another writer holds it for {LOCK_TIMEOUT_S:g} s" if is_locked else error
                raise OSError(errno.EAGAIN, f"{path} could not be locked: {reason}") from error
        pause.wait(LOCK_POLL_INTERVAL_S)


# -- a directory behind a URL ----------------------------------------------------------------------


class FsspecStorage(CheckpointStorage):
    """A directory that fsspec reaches, which the extra `fsspec` installs.

    Only one job may write to it at a time: it has no lock, so fencing is not enforced.

    Libraries behind fsspec may wait for an answer forever. So each call of fsspec runs in a thread
    of its own, and raises TimeoutError (an OSError) when its limit expires.

    Args:
        url: the URL.
        timeout_s: limit of each call in seconds. Closing a file has a second more for each 10 MiB.

    Raises:
        CheckpointError: the URL cannot be opened.
    """

    max_readers = 8

    def __init__(self, url: str, *, timeout_s: float = FSSPEC_TIMEOUT_S) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            raise CheckpointError(
                f"{url} needs fsspec and its package for this URL: pip install 'elasticlib[fsspec]'"
            ) from error
        self.name, self._timeout_s = url, timeout_s
        try:
            self._fs: Any
            self._fs, self._root = self._call("", url_to_fs, url)
        except Exception as error:
            raise CheckpointError(f"{url} cannot be opened: {error}") from error

    def lock(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def list_folders(self) -> list[str]:
        rows = self._list("")
        return sorted(_base_name(row["name"]) for row in rows if row["type"] == "directory")

    def list_files(self, folder: str) -> dict[str, int]:
        rows = self._list(folder)
        return {_base_name(row["name"]): int(row["size"]) for row in rows if row["type"] == "file"}

    def read(self, name: str) -> bytes | None:
        with self._os_errors(name):
            try:
                return bytes(self._call(name, self._fs.cat_file, self._path(name)))
            except FileNotFoundError:
                return None

    def read_into(
        self,
        name: str,
        buffer: memoryview,
        *,
        start: int = 0,
        on_chunk: OnChunk = ignore_chunk,
    ) -> int:
        done = 0
        with self._os_errors(name):
            for segment in split_into_segments(buffer):
                limits = {"start": start + done, "end": start + done + len(segment)}
                data = self._call(name, self._fs.cat_file, self._path(name), **limits)
                segment[: len(data)] = data
                on_chunk(segment[: len(data)])
                done += len(data)
                if len(data) < len(segment):
                    break
        return done

    def write(self, name: str, data: memoryview) -> Checksum:
        path = self._path(name)
        with self._os_errors(name):
            self._make_folder(name)
            try:
                result = combine_segment_crcs(self._write_segments(name, data))
                self._fs.invalidate_cache()
                size = self._call(name, self._fs.info, path)["size"]
                if size != len(data) + CHECKSUM_BYTES:
                    written = len(data) + CHECKSUM_BYTES
                    raise OSError(f"{written} bytes were written, but the file has {size}")
            except TimeoutError:
                raise  # Another call would not be answered either.
            except BaseException:
                with contextlib.suppress(Exception):
                    self._call(name, self._fs.rm_file, path)
                raise
        return result

    def put(self, name: str, data: memoryview) -> bool:
        folder, _, base = name.rpartition("/")
        claim = claim_name(base)
        if self.list_files(folder).keys() & {base, claim}:
            return False
        self.replace(f"{folder}/{claim}", b"an agent writes this file")
        try:
            self.write(name, data)
        finally:
            self.remove(f"{folder}/{claim}")
        return True

    def replace(self, name: str, data: bytes) -> None:
        with self._os_errors(name):
            self._make_folder(name)
            self._call(name, self._fs.pipe_file, self._path(name), data)

    def remove(self, name: str) -> None:
        with self._os_errors(name), contextlib.suppress(FileNotFoundError):
            self._call(name, self._fs.rm_file, self._path(name))

    def remove_folder(self, folder: str) -> None:
        # In most object stores a directory exists only while it has files.
        with contextlib.suppress(Exception):
            self._call(folder, self._fs.rmdir, self._path(folder))

    def _list(self, folder: str) -> list[dict[str, Any]]:
        with self._os_errors(folder):
            self._fs.invalidate_cache()
            try:
                return list(self._call(folder, self._fs.ls, self._path(folder), detail=True))
            except FileNotFoundError:
                return []

    def _make_folder(self, name: str) -> None:
        """Create the directory of a file, where the object store has directories."""
        folder = self._path(name).rpartition("/")[0]
        self._call(name, self._fs.makedirs, folder, exist_ok=True)

    def _write_segments(self, name: str, data: memoryview) -> list[int]:
        """Write a file and its checksum, and return the CRC-32 of each segment."""
        file, crcs = self._call(name, self._fs.open, self._path(name), "wb"), []
        close_s = self._timeout_s + len(data) / FSSPEC_CLOSE_BYTES_PER_S
        try:
            for segment in split_into_segments(data):
                self._call(name, file.write, segment)
                crcs.append(zlib.crc32(segment))
            self._call(name, file.write, encode_checksum(combine_segment_crcs(crcs)))
        except TimeoutError:
            raise
        except BaseException:
            with contextlib.suppress(Exception):
                self._call(name, file.close, limit_s=close_s)
            raise
        self._call(name, file.close, limit_s=close_s)
        return crcs

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        limit_s: float | None = None,
        **options: Any,
    ) -> Any:
        """Return the result of a function of fsspec that is called for a file or directory.

        Raises:
            TimeoutError: it has not returned within the limit.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        try:
            return run_with_limit(partial(function, *args, **options), limit_s, "elasticlib-fsspec")
        except TimeoutError as error:
            what = getattr(function, "__name__", "a call")
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"{self.name}/{name}: {what} was not answered ({error}): check the network and the"
                " object store",
            ) from error

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    @contextlib.contextmanager
    def _os_errors(self, name: str) -> Iterator[None]:
        """Translate the errors of this file system's library to OSError."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.name}/{name}: {type(error).__name__}: {error}") from error


def _base_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


# -- checksums -------------------------------------------------------------------------------------


def split_into_segments(data: memoryview) -> Iterator[memoryview]:
    """Yield the segments of a file's bytes, in order."""
    for start in range(0, len(data), SEGMENT_BYTES):
        yield data[start : start + SEGMENT_BYTES]


def combine_segment_crcs(crcs: Iterable[int]) -> Checksum:
    """Return the checksum of a file from the CRC-32 of each of its segments, in order."""
    return zlib.crc32(b"".join(crc.to_bytes(4, "little") for crc in crcs))


def checksum(data: memoryview) -> Checksum:
    """Return the checksum of data."""
    return combine_segment_crcs(map(zlib.crc32, split_into_segments(data)))


def encode_checksum(value: Checksum) -> bytes:
    """Return a checksum as the `CHECKSUM_BYTES` bytes at the end of a data file."""
    return b"%08x" % value


class RunningChecksum:
    """The checksum of data that are added in chunks, none of which is in two segments."""

    def __init__(self) -> None:
        self._crcs: list[int] = []
        self._num_bytes = 0

    def add(self, chunk: bytes | memoryview) -> None:
        """Add the next chunk."""
        if not self._num_bytes % SEGMENT_BYTES:
            self._crcs.append(0)
        self._crcs[-1] = zlib.crc32(chunk, self._crcs[-1])
        self._num_bytes += len(chunk)

    def encode(self) -> bytes:
        """Return the checksum of all chunks as `encode_checksum` does."""
        return encode_checksum(combine_segment_crcs(self._crcs))


def new_memory(size: int) -> mmap.mmap:
    """Return `size` bytes of zeroed memory, which is freed with its last reference."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # The first access to memory is faster in pages of 2 MiB than in pages of 4 KiB.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_handle_into(handle: int, buffer: memoryview, start: int, on_chunk: OnChunk) -> int:
    """Read an open file from the offset `start`; see `CheckpointStorage.read_into`."""
    done = 0
    while done < len(buffer):
        count = os.preadv(handle, [buffer[done : done + READ_BYTES]], start + done)
        if not count:
            break
        on_chunk(buffer[done : done + count])
        done += count
    return done


def read_with_checksum(
    read: Callable[[memoryview, int, OnChunk], int],
    size: int,
    into: memoryview | None = None,
    *,
    max_threads: int = 1,
    on_chunk: OnChunk = ignore_chunk,
) -> tuple[int, Checksum, bytes]:
    """Read the first `size` bytes of a data file, and compute the checksum of all but the last 8.

    Args:
        read: reads into a buffer from an offset, as `CheckpointStorage.read_into` does. Several
            threads call it at once, each for another segment.
        size: the size of the file.
        into: receives the bytes. Without it they are only checked.
        max_threads: how many threads read at once.
        on_chunk: receives each chunk, from one thread at a time, in any order.

    Returns:
        The number of bytes that were read, which is less than `size` only if the file is shorter;
        the checksum of the data; and the last 8 bytes, which must be the same checksum.
    """
    size -= CHECKSUM_BYTES
    last = max(0, (size - 1) // SEGMENT_BYTES * SEGMENT_BYTES)  # The end is read with this segment.
    end = b""
    lock = threading.Lock()
    local = threading.local()  # Each thread that only checks uses one buffer for all its segments.

    def read_segment(start: int) -> tuple[int, int]:
        nonlocal end
        crc, num_read = 0, 0
        num_data = min(SEGMENT_BYTES, size - start)
        length = num_data + (CHECKSUM_BYTES if start == last else 0)
        if into is not None:
            buffer = into[start : start + length]
        else:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(new_memory(min(SEGMENT_BYTES, size) + CHECKSUM_BYTES))
            buffer = local.buffer[:length]

        def add_chunk(chunk: memoryview) -> None:
            nonlocal crc, num_read
            crc = zlib.crc32(chunk[: max(0, num_data - num_read)], crc)
            num_read += len(chunk)
            with lock:
                on_chunk(chunk)

        count = read(buffer, start, add_chunk)
        if start == last:
            end = bytes(buffer[num_data:count])
        return count, crc

    results = _map_in_threads(read_segment, range(0, last + 1, SEGMENT_BYTES), max_threads)
    return sum(count for count, _ in results), combine_segment_crcs(crc for _, crc in results), end


def _map_in_threads(act: Callable[[int], T], items: range, max_threads: int) -> list[T]:
    """Call `act` for each item, in this thread and others. Return the results in order.

    Raises:
        BaseException: the first error of any thread, once all threads have finished.
    """
    remaining = iter(items)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for item in remaining:
                if errors:
                    return
                results[item] = act(item)
        except BaseException as error:
            errors.append(error)

    threads = [
        daemon_thread(work, "elasticlib-read", only_logged)
        for _ in range(min(max_threads, len(items)) - 1)
    ]
    for thread in threads:
        # Where no more threads can be started, the others do all the work.
        with contextlib.suppress(RuntimeError, MemoryError):
            thread.start()
    work()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
    return [results[item] for item in items]
