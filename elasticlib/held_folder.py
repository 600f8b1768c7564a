"""A folder whose owner holds a lock in it for as long as it lives.

So that who finds it knows whether it is in use, also from another PID namespace, where the owner's
process is not to be seen.
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
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(folder / LOCK, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise
        with contextlib.suppress(OSError):  # a full disk
            os.write(self._file, f"{self._pid}\n".encode())

    def close(self) -> None:
        """Let go; closing twice is harmless."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                if os.getpid() == self._pid:
                    # A child that was forked without an exec has this open, too.
                    fcntl.flock(file, fcntl.LOCK_UN)
                os.close(file)


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
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
