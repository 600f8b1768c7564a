"""A folder whose owner holds a lock in it for as long as it lives.

So that who finds it knows whether it is in use, also from another PID namespace, where the owner's
process is not to be seen. The folder itself is locked, which nobody removes alone (and which some
cleaners of temporary folders leave alone for that), and a file in it, for file systems that lock
no folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

LOCK = "agent"
"""The file that is locked; its text is its owner's pid, for people to read."""


class FolderLock:
    """Held until it is closed, or its process has ended. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._held: list[int] = []
        try:
            with contextlib.suppress(OSError):
                self._hold(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(folder / LOCK, flags, 0o600)
            self._hold(file)
        except OSError:
            self.close()
            raise
        with contextlib.suppress(OSError):  # a full disk
            os.write(file, f"{self._pid}\n".encode())

    def _hold(self, handle: int) -> None:
        self._held.append(handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Let go; closing twice is harmless."""
        held, self._held = self._held, []
        for handle in held:
            with contextlib.suppress(OSError):
                if os.getpid() == self._pid:
                    # A child that was forked without an exec has this open, too.
                    fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)


def try_to_hold(folder: Path) -> FolderLock | None:
    """None where that cannot be: nothing says then whether the folder is in use."""
    try:
        return FolderLock(folder)
    except OSError:
        return None


def is_held(folder: Path) -> bool | None:
    """Whether its owner lives; None where there is no lock, which never had one to tell of.

    Raises:
        OSError: it cannot be looked at.
    """
    found = [_is_locked(path) for path in (folder, folder / LOCK)]
    return True if True in found else found[1]


def _is_locked(path: Path) -> bool | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
