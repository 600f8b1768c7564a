"""A lock of processes that ends with its holder, however that ended."""

from __future__ import annotations

import errno
import inspect
import os
import stat
from pathlib import Path

import filelock

_KNOWN = inspect.signature(filelock.FileLock.__init__).parameters


def hard_lock(path: str | os.PathLike[str]) -> filelock.BaseFileLock:
    """One on this file, to be acquired and released.

    Where the file system has no such locks, acquiring it raises OSError or NotImplementedError.
    (Newer versions of filelock would take the existence of a file for the lock there, which stays
    when its holder is killed.)

    Raises:
        OSError: what is there is no file: older versions of filelock would follow a link, and cut
            off what it leads to.
    """
    try:
        mode = Path(path).lstat().st_mode
    except OSError:
        mode = stat.S_IFREG  # it is not there yet, or cannot be reached, which acquiring it says
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a lock is a file of its own, and no link", os.fspath(path))
    if "fallback_to_soft" in _KNOWN:
        return filelock.FileLock(path, fallback_to_soft=False)
    return filelock.FileLock(path)
