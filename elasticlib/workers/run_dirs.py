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

from ..dir_lock import DirLock, try_lock_dir
from ..errors import ConfigError, format_error
from .supervisor_client import SupervisorClient

log = logging.getLogger("elasticlib.workers")


class RunDir:
    """The directory `<log_dir>/<run_id>_<random>`, with a directory for each worker and attempt.

    It is created when it is first needed. Unless it is kept, it contains only the last attempt, and
    is removed when the agent exits or is killed.
    """

    def __init__(
        self, supervisor: SupervisorClient, log_dir: str | None, run_id: str, *, kept: bool
    ) -> None:
        self._supervisor = supervisor
        # The path is absolute because workers may change their working directory.
        self._log_dir = None if log_dir is None else os.path.abspath(os.path.expanduser(log_dir))
        self._run_id = run_id
        self.kept = kept
        self._path: Path | None = None  # once the directory has been created

    @property
    def path(self) -> Path:
        """The path of the directory, which is created if necessary.

        Raises:
            ConfigError: the directory cannot be created.
            OSError: the supervisor process cannot be started.
        """
        if self._path is None:
            path = self._create()
            self._path = Path(path)
            if not self.kept:
                self._supervisor.add_directory(path)
        return self._path

    def _create(self) -> str:
        try:
            if self._log_dir is not None:
                os.makedirs(self._log_dir, exist_ok=True)
            safe = self._run_id.replace(os.sep, "_")
            return tempfile.mkdtemp(prefix=f"{safe}_", dir=self._log_dir)
        except OSError as error:
            # `tempdir` is None if no directory is usable.
            where = self._log_dir or tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
            name = "TMPDIR" if self._log_dir is None else "log_dir (--log-dir)"
            other = " (or set log_dir, --log-dir)" if self._log_dir is None else ""
            raise ConfigError(
                f"cannot create the log directory of this run in {where!r}: {error.strerror}; "
                f"{name} must name a directory that exists and is writable for as long as the job "
                f"runs{other}"
            ) from error

    @property
    def kept_path(self) -> Path | None:
        """The path of a directory that is kept and has been created, or None."""
        return self._path if self.kept else None

    def create_worker_dir(self, attempt: int, local_rank: int) -> Path:
        """Create and return the directory of one worker. Raises ConfigError or OSError."""
        path = self.path / f"attempt_{attempt}" / str(local_rank)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def remove_attempts(self, keep: Collection[Path]) -> None:
        """Remove the directories of all attempts except `keep`, unless this directory is kept."""
        if not self.kept:
            for path in self.path.glob("attempt_*"):
                if path not in keep:
                    shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the directory unless it is kept."""
        if self._path is not None and not self.kept:
            shutil.rmtree(self._path, ignore_errors=True)
            self._supervisor.remove_directory(str(self._path))
            self._path = None


SHARED_MEMORY = "/dev/shm"
PREFIX = "elasticlib-memory-"


class SnapshotDir:
    """A directory in memory for the snapshots of all attempts.

    It is created when it is first needed, and removed when the agent exits or is killed. If another
    program removes it, for example logind when its user logs out, it is created again.
    """

    def __init__(self, supervisor: SupervisorClient) -> None:
        self._supervisor = supervisor
        self._path: Path | None = None  # once the directory has been created
        self._inode = 0  # of that directory
        self._lock: DirLock | None = None  # locked as long as the directory is in use
        self._has_warned = False  # that the directory cannot be created

    def attempt_dir(self, number: int) -> Path | None:
        """Return the directory of an attempt, or None if it cannot be created.

        A failure is logged once as a warning, because workers can train without the directory.
        """
        try:
            return self._create_attempt_dir(number)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "workers keep no snapshots in memory from now on, because no directory can be "
                    "created for them (%s); restarted workers resume from the newest checkpoint "
                    "on a disk. Free space and files in %s, or enlarge it (docker: --shm-size)",
                    format_error(error),
                    SHARED_MEMORY,
                )
            return None

    def _create_attempt_dir(self, number: int) -> Path:
        parent = self._path
        if parent is None or _inode_of(parent) != self._inode:
            parent = self._create(parent)
        path = parent / str(number)
        if not path.exists():
            for earlier in parent.iterdir():
                with contextlib.suppress(OSError):  # A directory with snapshots is not empty.
                    earlier.rmdir()
            path.mkdir(exist_ok=True)
        return path

    def remove(self) -> None:
        """Remove the directory if there is one."""
        path, self._path = self._path, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
            self._unlock()
            self._supervisor.remove_directory(str(path))

    def _create(self, path: Path | None) -> Path:
        """Create the directory; `path` is its previous path, or None if it was never created.

        The path is used again unless it belongs to another user now.
        """
        if path is not None:
            log.warning(
                "%s was removed while this job runs, and the snapshots in memory with it; it is "
                "created again (logind removes it when its user logs out, unless RemoveIPC=no)",
                path,
            )
            with contextlib.suppress(OSError):  # A worker may have created it again.
                path.mkdir(0o700)
            if not _inode_of(path):
                self._supervisor.remove_directory(str(path))
                path = None
        path = path or _create_in_memory()
        self._unlock()
        self._path, self._inode, self._lock = path, _inode_of(path), try_lock_dir(path)
        self._supervisor.add_directory(str(path))
        return path

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def _create_in_memory() -> Path:
    """Create a directory in shared memory, or in TMPDIR if shared memory cannot be used."""
    usable = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY if usable else None))
    except OSError:
        # Shared memory may be full of tensors from DataLoaders.
        return Path(tempfile.mkdtemp(prefix=PREFIX))


def _inode_of(path: Path) -> int:
    """Return the inode of a directory of this user, or 0 if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    is_own_dir = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return status.st_ino if is_own_dir else 0
