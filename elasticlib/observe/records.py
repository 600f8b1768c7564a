"""The record that an agent makes of its run, in which others find its events.

It becomes visible in one move, with its agent's lock held, and what is not locked has no agent:
so records of runs that are over are removed, and never one of an agent that lives.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from pathlib import Path

from ..clock import wall
from ..held_folder import LOCK, FolderLock
from .runs import EVENTS, KEPT, check_own, is_living, runs_folder

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
            self._lock = FolderLock(new)
            if events is not None:
                (new / EVENTS).symlink_to(events.absolute())
            self.path = folder / f"{_safe(run_id)}_{new.name.removeprefix(NEW)}"
            new.rename(self.path)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        self.events = events or self.path / EVENTS

    def close(self) -> None:
        """The run is over; its record stays until there are many newer ones."""
        self._lock.close()


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


def _safe(run_id: str) -> str:
    return re.sub(r"[^\w.-]", "_", run_id, flags=re.ASCII)[:LONGEST_NAME].lstrip(".") or "_"
