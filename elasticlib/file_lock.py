"""Lock between processes that the kernel releases when its owner exits or is killed."""

from __future__ import annotations

import errno
import inspect
import os
import stat
from pathlib import Path

import filelock

_PARAMETERS = inspect.signature(filelock.FileLock.__init__).parameters


def kernel_file_lock(path: str | os.PathLike[str]) -> filelock.BaseFileLock:
    """Return a lock on this file, to be acquired and released by the caller.

    If the file system has no kernel locks, acquiring the lock raises OSError or
    NotImplementedError. Newer versions of filelock would otherwise use the existence of the file as
    the lock, and the file remains when its owner is killed.

    Raises:
        OSError: The path exists and is not a regular file. Older versions of filelock would follow
            a link and truncate its target.
    """
    try:
        mode = Path(path).lstat().st_mode
    except OSError:
        mode = stat.S_IFREG  # It does not exist yet, or acquiring the lock reports the problem.
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a lock must be a regular file, not a link", os.fspath(path))
    if "fallback_to_soft" in _PARAMETERS:
        return filelock.FileLock(path, fallback_to_soft=False)
    return filelock.FileLock(path)
