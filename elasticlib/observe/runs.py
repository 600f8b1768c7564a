"""Where the runs of this machine and user are found: one folder of records, bounded in number.

Each agent has a record here, a folder `<run id>_<random>` that names itself by its first line of
events: `events.jsonl` lies in it, or is a link to the one beside the logs that are kept. It becomes
visible in one move, with its agent's lock held, and the agent holds that for as long as it lives:
so records of runs that are over are removed, and never one of an agent that lives.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

import attrs

from ..clock import wall
from ..errors import RunNotFoundError
from ..held_folder import LOCK, FolderLock, is_held
from .event import LONGEST, Event, decode
from .wording import some

log = logging.getLogger("elasticlib.observe")

NEW = ".new-"
NEW_SECONDS = 3600.0
"""After which a record that never became visible is of an agent that was killed meanwhile."""
LONGEST_NAME = 200
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


# -- made ----------------------------------------------------------------------------------------


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
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, new, ignore_errors=True)
            self._lock = undo.enter_context(contextlib.closing(FolderLock(new)))
            if events is not None:
                (new / EVENTS).symlink_to(events.absolute())
            self.path = folder / f"{_safe(run_id)}_{new.name.removeprefix(NEW)}"
            new.rename(self.path)
            undo.pop_all()
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


# -- found ---------------------------------------------------------------------------------------


@attrs.frozen
class Record:
    """One agent's events.

    run: the job's id; empty if nothing says so. began, until: seconds since 1970, of its first and
    its last event; infinite while it lives. endpoint: where the job's nodes meet, if that is known.
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
    those that meet at one endpoint. A warning tells of others at the same time, and of all that run
    where none was named.

    Args:
        name: a run's id or the name of its record; a record, a folder of logs (of one run or of
            several), or a file of events; empty for all runs there are. An id comes first.
        folder: of the records; this user's by default.

    Raises:
        RunNotFoundError: there is none; the error lists what there is.
    """
    folder, text = folder or _own_folder(), os.fspath(name)
    known = known_runs(folder)
    found = [record for record in known if text in ("", record.run)]
    if not found and text:
        is_path = os.sep in text or text in (os.curdir, os.pardir)
        found = ([] if is_path else _at(folder / text)) or _at(Path(text))
    if not found:
        raise RunNotFoundError(_nothing(text, folder, known))
    launch = _newest_launch(found)
    _tell_of_others(launch, found, named=bool(text))
    return [record.events for record in launch]


def earlier_launches(name: str | os.PathLike[str], *, folder: Path | None = None) -> list[Path]:
    """The files of the launches before the one that `find_runs` takes for this run's id, as before
    a requeue; none for what is no id of a job."""
    run = os.fspath(name)
    found = [record for record in known_runs(folder) if record.run == run != NO_ID and run]
    launch = _newest_launch(found) if found else []
    older = [one for one in found if one not in launch and of_one_job(one, launch[0])]
    return [one.events for one in sorted(older, key=lambda one: one.began)]


class Living:
    """Which agents live, by the locks of their records here, and by the processes of this machine;
    of other machines' agents nothing is known."""

    def __init__(self) -> None:
        known: list[Record] = []
        with contextlib.suppress(RunNotFoundError):
            known = known_runs()
        self._living = {os.path.realpath(one.events): one.living for one in known}

    def has(self, events: str | os.PathLike[str]) -> bool:
        """Whether the agent that writes this file holds its record."""
        return self._living.get(os.path.realpath(events), False)

    def lacks(self, events: str | os.PathLike[str], launch: Event) -> bool:
        """Whether the agent that this launch of the file was of is known to be gone."""
        known = self._living.get(os.path.realpath(events))
        pid = launch.count("pid") or 0
        here = launch.text("host") == socket.gethostname() and pid > 0
        return not known if known is not None else here and not os.path.exists(f"/proc/{pid}")


def _own_folder() -> Path:
    try:
        return runs_folder()
    except OSError as error:
        raise RunNotFoundError(
            f"there is no folder for temporary files: {error.strerror}"
        ) from error


def is_living(record: Path) -> bool:
    """Whether the agent of this record is there."""
    try:
        return bool(is_held(record))
    except OSError:  # who cannot look does not say that it is over
        return True


def known_runs(folder: Path | None = None) -> list[Record]:
    """All records that hold events, the newest first. folder: of them; this user's by default.

    Raises:
        RunNotFoundError: their folder is somebody else's.
    """
    folder = folder or _own_folder()
    try:
        check_own(folder)
        return _below(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunNotFoundError(f"runs cannot be looked for: {error}") from error


def _at(path: Path) -> list[Record]:
    """What a path means: a file, a folder with one, or a folder of such folders."""
    if os.path.isdir(path):  # whatever the text is, it does not raise
        record = _read_record(path / EVENTS)
        try:
            return [record] if record else _below(path)
        except OSError as error:
            raise RunNotFoundError(f"{path} cannot be read: {error.strerror}") from error
    record = _read_record(path)
    return [record] if record else []


def _below(folder: Path) -> list[Record]:
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    found = [record for path in paths if (record := _read_record(path / EVENTS))]
    return sorted(found, key=lambda record: record.began, reverse=True)


def _read_record(events: Path) -> Record | None:
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


def last_event(events: Path) -> Event | None:
    """Return the last event of a file that can be read, or None. Lines that are damaged, as where
    the machine lost its power, are skipped."""
    try:
        with events.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * LONGEST))
            lines = file.read().splitlines()
    except OSError:
        return None
    found = filter(None, map(_event, reversed(lines)))
    return next((event for event in found if event.possible), None)


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
    """Whether both can be of one: jobs that were given no id differ by their endpoints."""
    return one.run == other.run and (one.run != NO_ID or one.endpoint == other.endpoint)


def _tell_of_others(launch: list[Record], found: Iterable[Record], *, named: bool) -> None:
    """Of jobs that have the same id as this one, for want of any, and ran at the same time; where
    no run was named, of all that run."""
    same, living = list[str](), list[str]()
    for record in found:
        if of_one_job(record, launch[0]):
            continue
        if record.run == launch[0].run and any(_touch(record, one) for one in launch):
            same.append(record.events.parent.name)
        elif record.living:
            living.append(record.events.parent.name if record.run == NO_ID else record.run)
    if same:
        log.warning(
            "several jobs of the id %r ran at the same time: the newest%s is taken, which meets "
            "at %s; the others are found as %s; --rdzv-id tells them apart",
            launch[0].run,
            " that runs" if any(record.living for record in launch) else "",
            launch[0].endpoint or "no endpoint",
            ", ".join(sorted(same)[:SHOWN]),
        )
    if living and not named:
        others = some(list(dict.fromkeys(living)), SHOWN)
        log.warning(
            "several jobs are running here; showing the newest, %s; to name another: %s",
            launch[0].run,
            others,
        )


def _touch(one: Record, other: Record) -> bool:
    return one.began <= other.until and other.began <= one.until


def _nothing(name: str, folder: Path, known: list[Record]) -> str:
    runs = list(dict.fromkeys(record.run for record in known if record.run))
    living = {record.run for record in known if record.living}
    shown = [f"{run} (running)" if run in living else run for run in runs]
    if not runs:
        have = f"no run of this user is known in {folder}, where elasticrun keeps a record of each"
        have += " run; with another TMPDIR it is another folder"
    else:
        have = f"known in {folder} are {some(shown, SHOWN)}"
    if not name:
        return have
    elsewhere = "; of a run on other machines name its store: elasticlib status HOST:PORT"
    return f"there are no events of a run {name!r}: {have}{elsewhere}"
