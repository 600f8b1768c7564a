"""A lock of processes that ends with its holder, however that ended."""

from __future__ import annotations

import inspect
import os

import filelock

_KNOWN = inspect.signature(filelock.FileLock.__init__).parameters


def hard_lock(path: str | os.PathLike[str]) -> filelock.BaseFileLock:
    """One on this file, to be acquired and released.

    Where the file system has no such locks, acquiring it raises OSError or NotImplementedError.
    (Newer versions of filelock would take the existence of a file for the lock there, which stays
    when its holder is killed.)
    """
    if "fallback_to_soft" in _KNOWN:
        return filelock.FileLock(path, fallback_to_soft=False)
    return filelock.FileLock(path)
