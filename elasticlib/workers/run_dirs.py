"""Directories of an agent: the log directory of a run, and the directory of snapshots in memory."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

from ..errors import ConfigError, describe
from ..held_folder import FolderLock, try_to_hold
from .supervisor_client import SupervisorClient

log = logging.getLogger("elasticlib.workers")


class RunDir:
    """`<log_dir>/<run_id>_<random>`, made when first asked for, and in it a folder for each worker
    of each attempt. It stays where somebody asked for it or for the output in it; else it is
    temporary, holds no more than one attempt, and goes with the agent, however that ends.
    """

    def __init__(
        self, supervisor: SupervisorClient, log_dir: str | None, run_id: str, *, kept: bool
    ) -> None:
        self._supervisor = supervisor
        # The workers are told of it, and may go elsewhere.
        self._log_dir = None if log_dir is None else os.path.abspath(log_dir)
        self._run_id = run_id
        self.kept = kept
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        """The folder. Raises ConfigError if it cannot be created, and OSError."""
        if self._path is None:
            made = self._make()
            self._path = Path(made)
            if not self.kept:
                self._supervisor.add_directory(made)
        return self._path

    def _make(self) -> str:
        try:
            if self._log_dir is not None:
                os.makedirs(self._log_dir, exist_ok=True)
            safe = self._run_id.replace(os.sep, "_")
            return tempfile.mkdtemp(prefix=f"{safe}_", dir=self._log_dir)
        except OSError as error:
            name = "TMPDIR" if self._log_dir is None else "log_dir (--log-dir)"
            other = " (or set log_dir, --log-dir)" if self._log_dir is None else ""
            raise ConfigError(
                f"cannot create the folder of this run in {self._log_dir or tempfile.tempdir!r}: "
                f"{error.strerror}; {name} must name a directory that exists and can be written to "
                f"for as long as the job runs{other}"
            ) from error

    @property
    def kept_path(self) -> Path | None:
        """The folder, where there is one that stays."""
        return self._path if self.kept else None

    def of(self, attempt: int, local_rank: int) -> Path:
        """The folder of one worker. Raises ConfigError or OSError."""
        folder = self.path / f"attempt_{attempt}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def forget(self, but: Collection[Path]) -> None:
        """Remove what earlier attempts left in a folder that is not for people to look at."""
        if not self.kept:
            for path in self.path.glob("attempt_*"):
                if path not in but:
                    shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """The run is over."""
        if self._path is not None and not self.kept:
            shutil.rmtree(self._path, ignore_errors=True)
            self._supervisor.remove_directory(str(self._path))
            self._path = None


SHARED_MEMORY = "/dev/shm"
PREFIX = "elasticlib-memory-"


class SnapshotDir:
    """A folder in memory that workers are told of and that outlives them: it goes with their agent,
    even if that is killed. There is none before it is asked for.

    Each start of the workers has a folder of its own in it, numbered as they come: an era. Where it
    is removed meanwhile, as by a system that clears up after its users, it is made anew.
    """

    def __init__(self, supervisor: SupervisorClient) -> None:
        self._supervisor = supervisor
        self._path: Path | None = None
        self._inode = 0
        self._lock: FolderLock | None = None
        self._has_warned = False

    def attempt_dir(self, number: int) -> Path | None:
        """Return the folder of this start of the workers, or None if it cannot be made.

        Workers can train without it, so that is a warning, once.
        """
        try:
            return self._era(number)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "workers keep no snapshots in memory from now on, because no folder can be "
                    "made for them (%s); workers that are restarted go on from the newest "
                    "checkpoint on a disk. Free space and files in %s, or give it more (docker: "
                    "--shm-size)",
                    describe(error),
                    SHARED_MEMORY,
                )
            return None

    def _era(self, number: int) -> Path:
        made = self._path
        if made is None or _inode_of(made) != self._inode:
            made = self._make(made)
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
            self._supervisor.remove_directory(str(path))

    def _make(self, path: Path | None) -> Path:
        """At this path, where it was before, unless somebody else is there."""
        if path is not None:
            log.warning(
                "%s was removed while this job runs, and the snapshots in memory with it; it is "
                "created again (logind removes it when its user logs out, unless RemoveIPC=no)",
                path,
            )
            with contextlib.suppress(OSError):  # workers may make it anew as well
                path.mkdir(0o700)
            if not _inode_of(path):
                self._supervisor.remove_directory(str(path))
                path = None
        path = path or _made_in_memory()
        self._let_go()
        self._path, self._inode, self._lock = path, _inode_of(path), try_to_hold(path)
        self._supervisor.add_directory(str(path))
        return path

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def _made_in_memory() -> Path:
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
