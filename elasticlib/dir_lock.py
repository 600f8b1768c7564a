"""Lock of a directory that its owner keeps for as long as it runs.

Another process can thus see whether the directory is in use, even from another PID namespace, where
the process of the owner is not visible. Two files are locked. The first is the directory itself,
which systemd-tmpfiles does not clean while it is locked. The second is a file in it, because some
file systems cannot lock a directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

LOCK_FILE = "agent"  # the name of the locked file; it contains the pid of the owner, for people


class DirLock:
    """Exclusive lock of a directory, held until `close` is called or the process exits.

    Raises:
        OSError: Another process has locked the directory, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._pid = os.getpid()
        self._fds: list[int] = []
        try:
            with contextlib.suppress(OSError):
                self._lock(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(path / LOCK_FILE, flags, 0o600)
            self._lock(file)
        except OSError:
            self.close()
            raise
        with contextlib.suppress(OSError):  # The disk may be full.
            os.write(file, f"{self._pid}\n".encode())

    def _lock(self, fd: int) -> None:
        self._fds.append(fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Unlock the directory. Closing twice is harmless."""
        fds, self._fds = self._fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                if os.getpid() == self._pid:
                    # A child that was forked without an exec has the descriptor open as well.
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)


def try_lock_dir(path: Path) -> DirLock | None:
    """Return a lock of a directory of this process, or None if it cannot be locked.

    Without a lock, other processes cannot see that the directory is in use. It then has no lock
    file either, so that they do not take it for an abandoned one.
    """
    try:
        return DirLock(path)
    except OSError:
        with contextlib.suppress(OSError):
            (path / LOCK_FILE).unlink()
        return None


def close_lock(lock: DirLock | None) -> None:
    """Unlock a directory that `try_lock_dir` could perhaps lock."""
    if lock is not None:
        lock.close()


def is_locked(path: Path) -> bool | None:
    """Return whether a running process has locked a directory, or None if it has no lock file.

    Raises:
        OSError: The directory cannot be read.
    """
    dir_locked, file_locked = _has_flock(path), _has_flock(path / LOCK_FILE)
    return True if dir_locked else file_locked


def _has_flock(path: Path) -> bool | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
