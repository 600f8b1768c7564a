"""Where the runs of this machine and user are found: one folder of records, bounded in number.

Each agent has a record here, a folder `<run id>_<random>` that names itself by its first line of
events: `events.jsonl` lies in it, or is a link to the one beside the logs that are kept. As long
as the agent lives it holds a lock in it.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

import attrs

from ..errors import NoSuchRun
from ..held_folder import is_held
from .event import LONGEST, Event, decode

log = logging.getLogger("elasticlib.observe")

KEPT = 50
"""So many records of runs that are over stay."""
EVENTS = "events.jsonl"
SHOWN = 10
NO_ID = "none"
"""The id of each job that was given none, so it alone does not say which job it is."""


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
    its last event; infinite while it lives. endpoint: where the job's nodes meet, if it was told.
    """

    events: Path
    run: str
    began: float
    until: float
    endpoint: str = ""

    @property
    def living(self) -> bool:
        """Whether its agent is there."""
        return self.until == math.inf


def find_runs(name: str | os.PathLike[str] = "", *, folder: Path | None = None) -> list[Path]:
    """The files of events of one run, a file an agent, the one that began first in front.

    Of several launches the newest that runs is meant, or where none does the newest: those of one
    id whose times touch, one after the other, are of one launch; of jobs that were given no id,
    those that meet at one endpoint. A warning tells of others at the same time.

    Args:
        name: a run's id or the name of its record; a record, a folder of logs (of one run or of
            several), or a file of events; empty for all runs there are. An id comes first.
        folder: of the records; this user's by default.

    Raises:
        NoSuchRun: there is none; the error lists what there is.
    """
    folder, text = folder or _own_folder(), os.fspath(name)
    known = _records(folder)
    found = [record for record in known if text in ("", record.run)]
    if not found and text:
        is_path = os.sep in text or text in (os.curdir, os.pardir)
        found = ([] if is_path else _at(folder / text)) or _at(Path(text))
    if not found:
        raise NoSuchRun(_nothing(text, folder, known))
    launch = _newest_launch(found)
    _tell_of_others(launch, found)
    return [record.events for record in launch]


def known_runs(*, folder: Path | None = None) -> list[Record]:
    """All records that hold events, the newest first.

    Raises:
        NoSuchRun: their folder is somebody else's.
    """
    return _records(folder or _own_folder())


def _own_folder() -> Path:
    try:
        return runs_folder()
    except OSError as error:
        raise NoSuchRun(f"there is no folder for temporary files: {error.strerror}") from error


def is_living(record: Path) -> bool:
    """Whether the agent of this record is there."""
    try:
        return bool(is_held(record))
    except OSError:  # who cannot look does not say that it is over
        return True


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
    if os.path.isdir(path):  # whatever the text is, it does not raise
        record = read_record(path / EVENTS)
        try:
            return [record] if record else _below(path)
        except OSError as error:
            raise NoSuchRun(f"{path} cannot be read: {error.strerror}") from error
    record = read_record(path)
    return [record] if record else []


def _below(folder: Path) -> list[Record]:
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    found = [record for path in paths if (record := read_record(path / EVENTS))]
    return sorted(found, key=lambda record: record.began, reverse=True)


def read_record(events: Path) -> Record | None:
    """By its first line alone. None where there are no events, or something else of that name."""
    try:
        if not events.is_file():  # opening a pipe would wait
            return None
        last = events.stat().st_mtime
        with events.open("rb") as file:
            first = _event(file.readline(LONGEST + 1))
    except OSError:
        return None
    run, began = ("", last) if first is None else (first.run, first.wall)
    until = math.inf if is_living(events.parent) else max(began, last)
    return Record(events, run, began, until, _endpoint(first))


def _event(line: bytes) -> Event | None:
    try:
        return decode(line)
    except ValueError:
        return None


def _endpoint(first: Event | None) -> str:
    if first is None or first.kind != "run.began":
        return ""
    return first.texts("settings").get("rdzv_endpoint", "")


def _newest_launch(found: Iterable[Record]) -> list[Record]:
    rest = sorted(found, key=lambda record: (record.living, record.began))
    launch = [rest.pop()]
    rest = [record for record in rest if of_one_job(record, launch[0])]
    while touching := [r for r in rest if any(_touch(r, one) for one in launch)]:
        launch += touching
        rest = [record for record in rest if record not in touching]
    return sorted(launch, key=lambda record: (record.began, record.events))


def of_one_job(one: Record, other: Record) -> bool:
    """Whether both can be of one: jobs that were given no id are told apart by their endpoints."""
    return one.run == other.run and (one.run != NO_ID or one.endpoint == other.endpoint)


def _tell_of_others(launch: list[Record], found: Iterable[Record]) -> None:
    """Of jobs that have the same id as this one, for want of any, and ran at the same time."""
    others = sorted(
        record.events.parent.name
        for record in found
        if record.run == launch[0].run
        and not of_one_job(record, launch[0])
        and any(_touch(record, one) for one in launch)
    )
    if others:
        log.warning(
            "several jobs of the id %r ran at the same time: the newest%s is taken, which meets "
            "at %s; the others are found as %s; --rdzv-id tells them apart",
            launch[0].run,
            " that runs" if any(record.living for record in launch) else "",
            launch[0].endpoint or "no endpoint",
            ", ".join(others[:SHOWN]),
        )


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
