"""A folder in memory that workers are told of and that outlives them: it goes with their agent.

Each start of the workers has a folder of its own in it, numbered as they come: an era. Where it is
removed meanwhile, as by a system that clears up after its users, it is made anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..held_folder import FolderLock, try_to_hold

log = logging.getLogger("elasticlib.workers")

SHARED_MEMORY = "/dev/shm"
PREFIX = "elasticlib-memory-"


class SharedFolder:
    """One agent's; there is none on the disk or in memory before it is asked for.

    listed, unlisted: told of the folder, so that it goes with us even if we are killed.
    """

    def __init__(self, listed: Callable[[str], None], unlisted: Callable[[str], None]) -> None:
        self._listed = listed
        self._unlisted = unlisted
        self._path: Path | None = None
        self._inode = 0
        self._lock: FolderLock | None = None

    @property
    def made(self) -> Path | None:
        """The folder, if there is one."""
        return self._path

    def era(self, number: int) -> Path:
        """The folder of this start of the workers. Raises OSError."""
        made = self._made_path()
        folder = made / str(number)
        if not folder.exists():
            for earlier in made.iterdir():
                with contextlib.suppress(OSError):
                    earlier.rmdir()  # those in which there is something stay
            folder.mkdir(exist_ok=True)
        return folder

    def remove(self) -> None:
        """Leave nothing behind; harmless if there is nothing."""
        path, self._path = self._path, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
            self._let_go()
            self._unlisted(str(path))

    def _made_path(self) -> Path:
        path = self._path
        if path is None:
            return self._take(_make())
        if _inode_of(path) == self._inode:
            return path
        log.warning(
            "%s was removed while this job runs, and with it the snapshots in memory: it is made "
            "anew (logind does so when its user logs out, without RemoveIPC=no)",
            path,
        )
        return self._take(self._made_again(path))

    def _made_again(self, path: Path) -> Path:
        """In the same place, where workers may make it anew as well, if nobody else is there."""
        with contextlib.suppress(OSError):
            path.mkdir(0o700)
        if _inode_of(path):
            return path
        self._unlisted(str(path))
        return _make()

    def _take(self, path: Path) -> Path:
        self._let_go()
        self._path, self._inode = path, _inode_of(path)
        self._lock = try_to_hold(path)
        self._listed(str(path))
        return path

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def _make() -> Path:
    usable = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY if usable else None))
    except OSError:
        # Shared memory may be full, of what DataLoaders keep there.
        return Path(tempfile.mkdtemp(prefix=PREFIX))


def _inode_of(folder: Path) -> int:
    """0 where there is no folder, or somebody else's."""
    try:
        found = folder.lstat()
    except OSError:
        return 0
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return found.st_ino if own else 0
