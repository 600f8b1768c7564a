"""The folders of one agent's run: of its workers' files, and of what they keep in memory."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from ..held_folder import FolderLock, try_to_hold
from .session import Guardian


class RunFolder:
    """`<log_dir>/<run_id>_<random>`, made when first asked for, and in it a folder for each worker
    of each attempt. It stays where somebody asked for it or for the output in it; else it is
    temporary, holds no more than one attempt, and goes with the agent, however that ends.
    """

    def __init__(self, guardian: Guardian, log_dir: str | None, run_id: str, *, kept: bool) -> None:
        self._guardian = guardian
        # The workers are told of it, and may go elsewhere.
        self._log_dir = None if log_dir is None else os.path.abspath(log_dir)
        self._run_id = run_id
        self.kept = kept
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        if self._path is None:
            if self._log_dir is not None:
                os.makedirs(self._log_dir, exist_ok=True)
            safe = self._run_id.replace(os.sep, "_")
            made = tempfile.mkdtemp(prefix=f"{safe}_", dir=self._log_dir)
            self._path = Path(made)
            if not self.kept:
                self._guardian.add(made)
        return self._path

    @property
    def kept_path(self) -> Path | None:
        """The folder, where there is one that stays."""
        return self._path if self.kept else None

    def of(self, attempt: int, local_rank: int) -> Path:
        """The folder of one worker. Raises OSError."""
        folder = self.path / f"attempt_{attempt}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def forget(self, but: int) -> None:
        """Remove what earlier attempts left in a folder that is not for people to look at."""
        if not self.kept:
            for path in self.path.glob("attempt_*"):
                if path.name != f"attempt_{but}":
                    shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """The run is over."""
        if self._path is not None and not self.kept:
            shutil.rmtree(self._path, ignore_errors=True)
            self._guardian.remove(str(self._path))
            self._path = None


log = logging.getLogger("elasticlib.workers")

SHARED_MEMORY = "/dev/shm"
PREFIX = "elasticlib-memory-"


class SharedFolder:
    """A folder in memory that workers are told of and that outlives them: it goes with their agent,
    even if that is killed. There is none before it is asked for.

    Each start of the workers has a folder of its own in it, numbered as they come: an era. Where it
    is removed meanwhile, as by a system that clears up after its users, it is made anew.
    """

    def __init__(self, guardian: Guardian) -> None:
        self._guardian = guardian
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
            self._guardian.remove(str(path))

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
        self._guardian.remove(str(path))
        return _make()

    def _take(self, path: Path) -> Path:
        self._let_go()
        self._path, self._inode = path, _inode_of(path)
        self._lock = try_to_hold(path)
        self._guardian.add(str(path))
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
