"""A temporary folder whose owner holds a lock in it for as long as it lives.

So that who finds it knows whether it is in use, also from another PID namespace, where the owner's
process is not to be seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

LOCK = "agent"


def hold(folder: Path) -> int:
    """Lock it until the file that is returned is closed; -1 where that cannot be."""
    lock = -1
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        let_go(lock)
        return -1
    return lock


def let_go(lock: int) -> None:
    """Of what `hold` returned."""
    if lock >= 0:
        with contextlib.suppress(OSError):
            os.close(lock)


def is_left(folder: Path) -> bool | None:
    """Whether its owner is gone; None where nothing says so, as in those of older versions."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
