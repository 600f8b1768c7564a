"""Where the runs of this machine and user are found: one folder of records, bounded in number.

Each agent has a record here, a folder `<run id>_<random>` that names itself by its first line of
events: `events.jsonl` lies in it, or is a link to the one beside the logs that are kept. As long
as the agent lives it holds a lock on `agent` in it.
"""

from __future__ import annotations

import fcntl
import math
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

import attrs

from ..errors import NoSuchRun
from .event import LONGEST, Event, decode

KEPT = 50
"""So many records of runs that are over stay."""
EVENTS = "events.jsonl"
LOCK = "agent"
SHOWN = 10


def runs_folder() -> Path:
    """The one of this user, below the folder for temporary files (TMPDIR)."""
    return Path(tempfile.gettempdir()) / f"elasticlib-runs-{os.geteuid()}"


def check_own(folder: Path) -> None:
    """Raises PermissionError where somebody else has made the folder, or put a link in its place:
    what is read there would be theirs, and what is written, too."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is no folder of this user's own: remove it, or set TMPDIR")


@attrs.frozen
class Record:
    """One agent's events.

    run: the job's id; empty if nothing says so. began, until: seconds since 1970, of its first and
    its last event; infinite while it lives.
    """

    events: Path
    run: str
    began: float
    until: float

    @property
    def living(self) -> bool:
        """Whether its agent is there."""
        return self.until == math.inf


def find_runs(name: str | os.PathLike[str] = "", *, folder: Path | None = None) -> list[Path]:
    """The files of events of one run, a file an agent, the one that began first in front.

    Of several launches with the same id the newest is meant: those whose times touch, one after
    the other, are of one launch.

    Args:
        name: a run's id or the name of its record; a record, a folder of logs (of one run or of
            several), or a file of events; empty for the newest run of all.
        folder: of the records; this user's by default.

    Raises:
        NoSuchRun: there is none; the error lists what there is.
    """
    folder, text = folder or runs_folder(), os.fspath(name)
    known = _records(folder)
    if not text:
        found = known
    elif os.sep in text:
        found = _at(Path(text))
    else:
        by_id = [record for record in known if record.run == text]
        found = by_id or _at(folder / text) or _at(Path(text))
    if not found:
        raise NoSuchRun(_nothing(text, folder, known))
    return [record.events for record in _newest_launch(found)]


def known_runs(*, folder: Path | None = None) -> list[Record]:
    """All records that hold events, the newest first.

    Raises:
        NoSuchRun: their folder is somebody else's.
    """
    return _records(folder or runs_folder())


def is_living(record: Path) -> bool:
    """Whether the agent of this record is there."""
    try:
        lock = os.open(record / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:  # who cannot look does not say that it is over
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _records(folder: Path) -> list[Record]:
    try:
        check_own(folder)
        return _below(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NoSuchRun(f"runs cannot be looked for: {error}") from error


def _at(path: Path) -> list[Record]:
    """What a path means: a file, a folder with one, or a folder of such folders."""
    if path.is_dir():
        record = _read(path / EVENTS)
        return [record] if record else _below(path)
    record = _read(path)
    return [record] if record else []


def _below(folder: Path) -> list[Record]:
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    found = [record for path in paths if (record := _read(path / EVENTS))]
    return sorted(found, key=lambda record: record.began, reverse=True)


def _read(events: Path) -> Record | None:
    """None where there are no events, or something else of that name."""
    try:
        if not events.is_file():  # opening a pipe would wait
            return None
        last = events.stat().st_mtime
        with events.open("rb") as file:
            first = _event(file.readline(LONGEST + 1))
    except OSError:
        return None
    run, began = ("", last) if first is None else (first.run, first.wall)
    return Record(events, run, began, math.inf if is_living(events.parent) else max(began, last))


def _event(line: bytes) -> Event | None:
    try:
        return decode(line)
    except ValueError:
        return None


def _newest_launch(found: Iterable[Record]) -> list[Record]:
    rest = sorted(found, key=lambda record: record.began)
    launch = [rest.pop()]
    rest = [record for record in rest if record.run == launch[0].run]
    while touching := [r for r in rest if any(_touch(r, one) for one in launch)]:
        launch += touching
        rest = [record for record in rest if record not in touching]
    return sorted(launch, key=lambda record: (record.began, record.events))


def _touch(one: Record, other: Record) -> bool:
    return one.began <= other.until and other.began <= one.until


def _nothing(name: str, folder: Path, known: list[Record]) -> str:
    runs = list(dict.fromkeys(record.run for record in known if record.run))
    living = {record.run for record in known if record.living}
    shown = [f"{run} (running)" if run in living else run for run in runs[:SHOWN]]
    more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
    if not runs:
        have = f"no run of this user is known in {folder}, where elasticrun keeps a record of each"
        have += " run unless --no-events is given; with another TMPDIR it is another folder"
    else:
        have = f"known in {folder} are {', '.join(shown)}{more}"
    return f"there are no events of a run {name!r}: {have}" if name else have
