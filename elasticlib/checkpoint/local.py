"""A folder of checkpoints: what must be possible wherever it lies, and one on a disk.

Names are relative, with `/` in them. Whatever fails is an OSError; a commit is data first, each
file new and durable before the next begins, and one small file put last.

On a disk a file is there whole or not at all, whenever the machine or we die: each file is synced
before its name counts, and each name by syncing its folder; what is replaced is replaced by a
rename. All system calls that change anything go through `Disk`.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import fcntl
import io
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from ..clock import monotonic
from ..foreign import opened
from .manifest import aside_name
from .summing import READERS, no_news

log = logging.getLogger("elasticlib.checkpoint")

CHUNK = 16 << 20
"""Bytes that are read or written at once: large, so that a disk streams, and few calls are made."""

PIECE = 1 << 20
"""Bytes that are read at once and then summed, while they are in a core's cache."""

MAX_SMALL = 64 << 20
"""Bytes of a small file, such as a manifest of a hundred thousand parts."""

LOCK = ".lock"
LOCK_TIMEOUT = 60.0
"""Seconds; it is held for as long as a commit's last step and deletions take."""
LOCK_POLL = 0.05
MAKES = 100
"""So often a folder is made that goes again before there is a file in it."""

_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_ALL, _SYNC_FILE_RANGE_WRITE = ctypes.c_int64(0), 2


class NotAFile(OSError):
    """Something else stands where a file belongs (a folder, a pipe), or one that is far too large.
    It was looked at: no disk has failed, and it will not be another thing the next time."""


class Place(abc.ABC):
    """One folder, and the folders in it. name: for messages."""

    name: str
    readers = 1
    """How many threads may call `read_into` at once, for one file or for several."""

    @abc.abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Keep other writers out, if that is possible here; makes the folder."""

    @abc.abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders in it; none if it is not there."""

    def is_linked(self, folder: str) -> bool:  # noqa: ARG002 - most know no links
        """Whether a folder in it is a link to another place: it is read like any other, and what
        lies there is never written or deleted."""
        return False

    @abc.abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder in it (`""` for itself) with their bytes; none if not there."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """A small file whole; None if it is not there. Raises NotAFile where nothing can be read
        as one; it never waits for what may not come, as of a pipe."""

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
        with contextlib.ExitStack() as stack:
            # A handle of its own each time: two of our threads keep each other out, too.
            try:
                flags = os.O_RDWR | os.O_CREAT
                handle = stack.enter_context(opened(path, flags, mode=0o644))
            except PermissionError:
                if not os.path.exists(path):
                    raise
                # Another user made it. Whoever may read it can lock it, if the disk is local.
                handle = stack.enter_context(opened(path))
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
                return sorted(entry.name for entry in entries if _is_folder(entry))
        except FileNotFoundError:
            return []

    def is_linked(self, folder: str) -> bool:
        return os.path.islink(self._path(folder))

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
            with _opened(self._path(name)) as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_SMALL:
                    raise NotAFile(f"{name} has {size} bytes, at most {MAX_SMALL} are read of it")
                return file.readall()
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
        with _opened(self._path(name)) as file:
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
        if folder != self.name and os.path.islink(folder):
            self._unlink_folder(folder)
        self._write(self._created(path, folder), path, data)
        self._sync_folder(folder)

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        folder, base = os.path.split(path)
        aside = os.path.join(folder, aside_name(base, secrets.randbits(32)))
        self._write(self._disk.create(aside), aside, memoryview(data))
        with self._or_removed(aside):
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

    def _unlink_folder(self, folder: str) -> None:
        """Take a link away that stands where a folder of ours belongs; what it leads to stays."""
        log.warning("%s leads to %s: a folder takes its place", folder, os.path.realpath(folder))
        # Another rank may have been here already.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            self._disk.remove(folder)
            self._sync_folder(self.name)

    def _created(self, path: str, folder: str) -> int:
        """A new file in a folder, which whoever clears up may take away while it is empty."""
        for _ in range(MAKES):
            self._make(folder)
            with contextlib.suppress(FileNotFoundError):
                return self._disk.create(path)
        raise FileNotFoundError(errno.ENOENT, f"it was taken away {MAKES} times", folder)

    def _write(self, handle: int, path: str, data: memoryview) -> None:
        with self._or_removed(path):
            try:
                done = 0
                while done < len(data):
                    count = self._disk.write(handle, data[done : done + CHUNK])
                    if not count:
                        raise OSError(errno.EIO, "write() returned 0 bytes", path)
                    done += count
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


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return True  # a link in a circle, or to where we may not look: to read it says why


def _opened(path: str) -> io.FileIO:
    """To read. Raises NotAFile; whoever opens a pipe else waits for its other end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotAFile(f"{path} is no file")
    return io.FileIO(handle, "rb")


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
