"""The record that an agent makes of its run, in which others find its events.

It becomes visible in one move, with its agent's lock held, and what is not locked has no agent:
so records of runs that are over are removed, and never one of an agent that lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from ..clock import wall
from .journal import FileJournal
from .runs import EVENTS, KEPT, LOCK, check_own, is_living, runs_folder

NEW = ".new-"
NEW_SECONDS = 3600.0
"""After which a record that never became visible is of an agent that was killed meanwhile."""
LONGEST_NAME = 200


class RunRecord:
    """One agent's, from its beginning to its end.

    Args:
        run_id: of the job.
        events: where they are written, if not in the record, which gets a link to them then.
        folder: of all records; this user's by default.

    Raises:
        OSError: there is no place for it, or the place is somebody else's.
    """

    def __init__(
        self, run_id: str, events: Path | None = None, *, folder: Path | None = None
    ) -> None:
        folder = folder or runs_folder()
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        check_own(folder)
        folder.chmod(0o700)
        new = Path(tempfile.mkdtemp(prefix=NEW, dir=folder))
        try:
            self._lock = _locked(new / LOCK)
            if events is not None:
                (new / EVENTS).symlink_to(events.absolute())
            self.path = folder / f"{_safe(run_id)}_{new.name.removeprefix(NEW)}"
            new.rename(self.path)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        self.events = events or self.path / EVENTS
        self._pid = os.getpid()

    def close(self) -> None:
        """The run is over; its record stays until there are many newer ones."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            if os.getpid() == self._pid:
                # A child that was forked without an exec has the lock's descriptor, too.
                fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


class RecordedJournal(FileJournal):
    """Writes into the events of a record, and closes that at its own end."""

    def __init__(self, record: RunRecord, run: str, node: str) -> None:
        super().__init__(record.events, run, node)
        self._record = record

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._record.close()


def remove_old(folder: Path, kept: int = KEPT) -> None:
    """Of the runs that are over all but the newest go. Nobody takes a lock again that was let go,
    so what is over stays so. Raises OSError where the folder cannot be read."""
    paths = list(folder.iterdir())
    records = [path for path in paths if not path.name.startswith(".")]
    if len(records) > kept:
        over = [path for path in records if not is_living(path)]
        for path in sorted(over, key=_began, reverse=True)[kept:]:
            shutil.rmtree(path, ignore_errors=True)
    for path in paths:
        unfinished = path.name.startswith(NEW) and _began(path) < wall() - NEW_SECONDS
        if unfinished and not is_living(path):
            shutil.rmtree(path, ignore_errors=True)


def _began(path: Path) -> float:
    for place in (path / LOCK, path):
        with contextlib.suppress(OSError):
            return place.lstat().st_mtime
    return 0.0


def _locked(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    with contextlib.suppress(OSError):  # a full disk; it is for people to read
        os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _safe(run_id: str) -> str:
    return re.sub(r"[^\w.-]", "_", run_id, flags=re.ASCII)[:LONGEST_NAME].lstrip(".") or "_"
