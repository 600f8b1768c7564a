"""Directories of an agent: the log directory of a run, and the directory of snapshots in memory.

The agent locks a temporary directory for as long as it uses it. If all processes of a node are
killed together, nothing of them can remove the directory, so the next agent of the user does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from ..dir_lock import DirLock, close_lock, is_locked, try_lock_dir
from ..errors import ConfigError, format_error
from ..threads import daemon_thread, only_logged, start_thread
from .ledger import Ledger

log = logging.getLogger("elasticlib.workers")

SHARED_MEMORY = "/dev/shm"
MEMORY_PREFIX = "elasticlib-memory-"
RUN_PREFIX = "elasticlib-workers-"
UNLOCKED_PREFIX = "."  # A directory has this name until it is locked, and is not abandoned then.


class RunDir:
    """The directory `<log_dir>/<run_id>_<random>`, with a directory for each worker and attempt.

    It is created when it is first needed. Unless it is kept, it contains only the last attempt, is
    named `elasticlib-workers-<random>`, and is removed when the agent exits or is killed.
    """

    def __init__(self, ledger: Ledger, log_dir: str | None, run_id: str, *, kept: bool) -> None:
        self._ledger = ledger
        # The path is absolute because workers may change their working directory.
        self._log_dir = None if log_dir is None else os.path.abspath(os.path.expanduser(log_dir))
        self._run_id = run_id
        self.kept = kept
        self._path: Path | None = None  # once the directory has been created
        self._lock: DirLock | None = None  # of a directory that is not kept
        self._creating = threading.Lock()  # several threads may need the directory at first

    @property
    def path(self) -> Path:
        """The path of the directory, which is created if necessary.

        Raises:
            ConfigError: the directory cannot be created.
            OSError: the ledger has no place for the directory.
        """
        with self._creating:
            if self._path is None:
                self._path = self._create()
                if not self.kept:
                    self._ledger.add_directory(str(self._path))
            return self._path

    def _create(self) -> Path:
        try:
            if not self.kept:
                path, self._lock = _create_locked(RUN_PREFIX)
                return path
            if self._log_dir is not None:
                os.makedirs(self._log_dir, exist_ok=True)
            safe = self._run_id.replace(os.sep, "_")
            return Path(tempfile.mkdtemp(prefix=f"{safe}_", dir=self._log_dir))
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
        path = self.attempt_dir(attempt) / str(local_rank)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def attempt_dir(self, attempt: int) -> Path:
        """Return the directory of an attempt. Raises ConfigError or OSError."""
        return self.path / f"attempt_{attempt}"

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
            close_lock(self._lock)
            self._ledger.remove_directory(str(self._path))
            self._path = self._lock = None


class SnapshotDir:
    """A directory in memory for the snapshots of all attempts.

    It is created when it is first needed, and removed when the agent exits or is killed. If another
    program removes it, for example logind when its user logs out, it is created again. If all
    processes of the node are killed together, the next agent of the same user removes it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._path: Path | None = None  # once the directory has been created
        self._inode = 0  # of that directory
        self._lock: DirLock | None = None  # locked as long as the directory is in use
        self._has_warned = False  # that the directory cannot be created
        self._cleaner: threading.Thread | None = None  # once `start_cleaning` was called
        self.is_cleaning = False  # this thread runs

    def start_cleaning(self, on_done: Callable[[], object]) -> None:
        """Start a thread that removes abandoned directories, and then calls a function.

        Only the first call does this. Workers should not start before, so that memory is free.

        Raises:
            OSError: the thread cannot be started.
        """

        def clean() -> None:
            try:
                remove_abandoned_dirs()
            finally:
                self.is_cleaning = False
                on_done()

        if self._cleaner is None:
            thread = daemon_thread(clean, "agent-cleans-up", only_logged)
            self.is_cleaning = True
            try:
                start_thread(thread)
            except OSError:
                self.is_cleaning = False
                raise
            self._cleaner = thread

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
            close_lock(self._lock)
            self._lock = None
            self._ledger.remove_directory(str(path))

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
                self._ledger.remove_directory(str(path))
                path = None
        close_lock(self._lock)
        if path is None:
            path, self._lock = _create_in_memory()
        else:
            self._lock = try_lock_dir(path)
        self._path, self._inode = path, _inode_of(path)
        self._ledger.add_directory(str(path))
        return path


def remove_abandoned_dirs() -> None:
    """Remove the directories of agents of this user that were killed with all their processes.

    A running agent has locked its directories. Other PID namespaces see the lock, and not the
    agent: containers may share `/dev/shm`.
    """
    num_bytes, removed = 0, []
    for parent in {SHARED_MEMORY, tempfile.gettempdir()}:
        for path in (*Path(parent).glob(f"{MEMORY_PREFIX}*"), *Path(parent).glob(f"{RUN_PREFIX}*")):
            with contextlib.suppress(OSError):  # Another agent may remove it at the same time.
                if _inode_of(path) and is_locked(path) is False:
                    num_bytes += _remove_abandoned(path)
                    removed.append(str(path))
    if removed:
        log.info(
            "removed %.1f GiB of files that killed agents have left: %s",
            *(num_bytes / (1 << 30), ", ".join(sorted(removed))),
        )


def _remove_abandoned(path: Path) -> int:
    """Remove a directory with its lock file last, and return how many bytes its files occupied.

    If this process is killed before the end, another agent still sees that the directory is
    abandoned.
    """
    num_bytes = sum(file.lstat().st_blocks * 512 for file in path.rglob("*"))
    for folder in path.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    shutil.rmtree(path)
    return num_bytes


def _create_in_memory() -> tuple[Path, DirLock | None]:
    """Create a directory in shared memory, or in TMPDIR if shared memory cannot be used."""
    usable = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    try:
        return _create_locked(MEMORY_PREFIX, SHARED_MEMORY if usable else None)
    except OSError:
        # Shared memory may be full of tensors from DataLoaders.
        return _create_locked(MEMORY_PREFIX)


def _create_locked(prefix: str, parent: str | None = None) -> tuple[Path, DirLock | None]:
    """Create and lock a directory, by default in TMPDIR. It appears under its name when locked."""
    new = Path(tempfile.mkdtemp(prefix=UNLOCKED_PREFIX + prefix, dir=parent))
    lock = try_lock_dir(new)
    return new.rename(new.with_name(new.name.removeprefix(UNLOCKED_PREFIX))), lock


def _inode_of(path: Path) -> int:
    """Return the inode of a directory of this user, or 0 if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    is_own_dir = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return status.st_ino if is_own_dir else 0
