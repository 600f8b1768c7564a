"""Registry of the runs of this machine and user: a bounded number of records in one directory.

Each agent has a record, a directory `<run id>_<random>`, which contains its `events.jsonl` or a
link to it. The record appears by one rename, with its lock taken, and the agent keeps the lock
until it exits. Records of finished runs can therefore be removed, and never one of a live agent.
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
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from ..clock import wall
from ..dir_lock import LOCK_FILE, DirLock, is_locked
from ..errors import RunNotFoundError
from ..options import NO_ID
from .event import Event, decode
from .event_kinds import MAX_EVENT_BYTES, RunStarted
from .formatting import format_list

log = logging.getLogger("elasticlib.observe")

EVENTS_FILE = "events.jsonl"
UNFINISHED_PREFIX = ".new-"
UNFINISHED_TTL_S = 3600.0  # an unfinished record that is older belongs to a killed agent
MAX_NAME_LENGTH = 200
MAX_FINISHED_RECORDS = 50
MAX_LISTED_RUNS = 10


def runs_dir() -> Path:
    """Return the directory of this user's records, below the temporary directory (TMPDIR)."""
    return Path(tempfile.gettempdir()) / f"elasticlib-runs-{os.geteuid()}"


def check_ownership(directory: Path) -> None:
    """Check that no other user has created the directory or put a link in its place.

    Raises:
        PermissionError: it belongs to another user, or is no directory.
    """
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(
            f"{directory} is not a directory of this user: remove it, or set TMPDIR"
        )


# -- writing ---------------------------------------------------------------------------------------


class RunRegistration:
    """The record of one agent while it runs.

    Args:
        run_id: id of the job.
        events: the event file, if it is not in the record; the record gets a link to it.
        directory: directory of all records; this user's by default.

    Raises:
        OSError: the record cannot be created, or its directory belongs to another user.
    """

    def __init__(
        self, run_id: str, events: Path | None = None, *, directory: Path | None = None
    ) -> None:
        directory = directory or runs_dir()
        with contextlib.suppress(FileExistsError):
            directory.mkdir(0o700)
        check_ownership(directory)
        directory.chmod(0o700)
        new = Path(tempfile.mkdtemp(prefix=UNFINISHED_PREFIX, dir=directory))
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, new, ignore_errors=True)
            self._lock = undo.enter_context(contextlib.closing(DirLock(new)))
            if events is not None:
                (new / EVENTS_FILE).symlink_to(events.absolute())
            self.path = directory / f"{_safe_name(run_id)}_{new.name[len(UNFINISHED_PREFIX) :]}"
            new.rename(self.path)
            undo.pop_all()
        self.events = events or self.path / EVENTS_FILE

    def close(self) -> None:
        """Mark the run as finished. Its record remains until there are many newer ones."""
        self._lock.close()


def remove_old_records(directory: Path, max_finished: int = MAX_FINISHED_RECORDS) -> None:
    """Remove all but the newest records of finished runs, and old unfinished records.

    A lock that was released is never taken again, so a finished record remains finished.

    Raises:
        OSError: the directory cannot be read.
    """
    paths = list(directory.iterdir())
    records = [path for path in paths if not path.name.startswith(".")]
    if len(records) > max_finished:
        finished = [path for path in records if not is_alive(path)]
        for path in sorted(finished, key=_created_at, reverse=True)[max_finished:]:
            shutil.rmtree(path, ignore_errors=True)
    for path in paths:
        is_unfinished = path.name.startswith(UNFINISHED_PREFIX)
        if is_unfinished and _created_at(path) < wall() - UNFINISHED_TTL_S and not is_alive(path):
            shutil.rmtree(path, ignore_errors=True)


def _created_at(path: Path) -> float:
    for candidate in (path / LOCK_FILE, path):
        with contextlib.suppress(OSError):
            return candidate.lstat().st_mtime
    return 0.0


def _safe_name(run_id: str) -> str:
    name = re.sub(r"[^\w.-]", "_", run_id, flags=re.ASCII)[:MAX_NAME_LENGTH].lstrip(".")
    return name or "_"


# -- reading ---------------------------------------------------------------------------------------


@attrs.frozen
class RunRecord:
    """The event file of one agent, and what its first event says."""

    events: Path
    run: str  # empty if it is not known
    started_at: float  # seconds since 1970
    finished_at: float  # infinite while the agent is alive
    endpoint: str = ""  # rendezvous endpoint, if it is known

    @property
    def is_alive(self) -> bool:
        return self.finished_at == math.inf


def find_runs(name: str | os.PathLike[str] = "", *, directory: Path | None = None) -> list[Path]:
    """Return the event files of one run, one per agent, in order of their start.

    Of several launches with one id, the newest running one is chosen, or else the newest one.
    Records belong to one launch if their times overlap and, for jobs without an id, if they have
    the same endpoint. A warning names other jobs that could be meant.

    Args:
        name: id of a run, or the name of a record; a record, a log directory of one or several
            runs, or an event file; empty for any run. An id takes precedence.
        directory: directory of the records; this user's by default.

    Raises:
        RunNotFoundError: there is no such run; the error lists the runs that exist.
    """
    directory, text = directory or _own_directory(), os.fspath(name)
    known = known_runs(directory)
    found = [record for record in known if text in ("", record.run)]
    if not found and text:
        is_path = os.sep in text or text in (os.curdir, os.pardir)
        found = ([] if is_path else _records_at(directory / text)) or _records_at(Path(text))
    if not found:
        raise RunNotFoundError(_not_found_message(text, directory, known))
    launch = _newest_launch(found)
    _warn_of_other_jobs(launch, found, is_named=bool(text))
    return [record.events for record in launch]


def launch_members(
    events: Iterable[str | os.PathLike[str]], *, directory: Path | None = None
) -> list[Path]:
    """Return the event files of the launch to which these files belong.

    The files are found in the directory of records, so agents that have joined later are
    included. The result is empty if none of the given files is in a record there.
    """
    files, known = {os.path.realpath(path) for path in events}, known_runs(directory)
    launch = [record for record in known if os.path.realpath(record.events) in files]
    return [record.events for record in _with_overlapping(launch, known)] if launch else []


def earlier_launches(name: str | os.PathLike[str], *, directory: Path | None = None) -> list[Path]:
    """Return the event files of the launches of a run id before the one that `find_runs` chooses.

    The files are in order of their start. There are none if `name` is not the id of a job.
    """
    run = os.fspath(name)
    found = [record for record in known_runs(directory) if record.run == run != NO_ID and run]
    launch = _newest_launch(found) if found else []
    older = [r for r in found if r not in launch and is_same_job(r, launch[0])]
    return [record.events for record in sorted(older, key=lambda record: record.started_at)]


class AliveAgents:
    """Determines which agents are alive, by the locks of their records and by process ids.

    Nothing is known of agents on other machines.
    """

    def __init__(self) -> None:
        records: list[RunRecord] = []
        with contextlib.suppress(RunNotFoundError):
            records = known_runs()
        self._is_alive = {os.path.realpath(r.events): r.is_alive for r in records}

    def is_known_alive(self, events: str | os.PathLike[str]) -> bool:
        """Return True if the agent that writes this file holds the lock of its record."""
        return self._is_alive.get(os.path.realpath(events), False)

    def is_known_dead(self, events: str | os.PathLike[str], start: RunStarted) -> bool:
        """Return True if the agent that wrote this `run.started` event is known to be gone."""
        alive = self._is_alive.get(os.path.realpath(events))
        if alive is not None:
            return not alive
        pid = start.pid or 0
        is_local = start.host == socket.gethostname() and pid > 0
        return is_local and not os.path.exists(f"/proc/{pid}")


def is_alive(record: Path) -> bool:
    """Return True if the agent of a record holds its lock, or if this cannot be determined."""
    try:
        return bool(is_locked(record))
    except OSError:
        return True


def known_runs(directory: Path | None = None) -> list[RunRecord]:
    """Return all records that hold events, the newest first.

    Raises:
        RunNotFoundError: the directory belongs to another user, or cannot be read.
    """
    directory = directory or _own_directory()
    try:
        check_ownership(directory)
        return _records_below(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunNotFoundError(f"cannot read the recorded runs: {error}") from error


def last_event(events: Path) -> Event | None:
    """Return the last readable event of a file, or None; damaged lines are skipped."""
    try:
        with events.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * MAX_EVENT_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    decoded = filter(None, map(_decode, reversed(lines)))
    return next((event for event in decoded if event.is_plausible), None)


def _own_directory() -> Path:
    try:
        return runs_dir()
    except OSError as error:
        raise RunNotFoundError(f"there is no temporary directory: {error.strerror}") from error


def _records_at(path: Path) -> list[RunRecord]:
    """Return the records of a path: an event file, or a directory with one or several records."""
    if os.path.isdir(path):  # does not raise for any text
        record = _read_record(path / EVENTS_FILE)
        try:
            return [record] if record else _records_below(path)
        except OSError as error:
            raise RunNotFoundError(f"cannot read {path}: {error.strerror}") from error
    record = _read_record(path)
    return [record] if record else []


def _records_below(directory: Path) -> list[RunRecord]:
    paths = [path for path in directory.iterdir() if not path.name.startswith(".")]
    found = [record for path in paths if (record := _read_record(path / EVENTS_FILE))]
    return sorted(found, key=lambda record: record.started_at, reverse=True)


def _read_record(events: Path) -> RunRecord | None:
    """Read a record by the first line of its event file; None if the file cannot be read."""
    try:
        if not events.is_file():  # opening a pipe would block
            return None
        modified_at = events.stat().st_mtime
        with events.open("rb") as file:
            first = _decode(file.readline(MAX_EVENT_BYTES + 1))
    except OSError:
        return None
    run, started_at = ("", modified_at) if first is None else (first.run, first.timestamp)
    finished_at = math.inf if is_alive(events.parent) else max(started_at, modified_at)
    endpoint = ""
    if first is not None and isinstance(first.body, RunStarted):
        endpoint = first.body.settings.get("rdzv_endpoint", "")
    return RunRecord(events, run, started_at, finished_at, endpoint)


def _decode(line: bytes) -> Event | None:
    try:
        return decode(line)
    except ValueError:
        return None


def _newest_launch(found: Sequence[RunRecord]) -> list[RunRecord]:
    newest = max(found, key=lambda record: (record.is_alive, record.started_at))
    return _with_overlapping([newest], found)


def _with_overlapping(launch: Sequence[RunRecord], found: Iterable[RunRecord]) -> list[RunRecord]:
    """Add all records of the same job whose times overlap with those of a record in the launch."""
    launch = list(launch)
    rest = [record for record in found if record not in launch and is_same_job(record, launch[0])]
    while overlapping := [r for r in rest if any(_overlaps(r, other) for other in launch)]:
        launch += overlapping
        rest = [record for record in rest if record not in overlapping]
    return sorted(launch, key=lambda record: (record.started_at, record.events))


def is_same_job(record: RunRecord, other: RunRecord) -> bool:
    """Return True if both records can be of one job. Jobs without an id differ by endpoint."""
    return record.run == other.run and (record.run != NO_ID or record.endpoint == other.endpoint)


def _overlaps(record: RunRecord, other: RunRecord) -> bool:
    return record.started_at <= other.finished_at and other.started_at <= record.finished_at


def _warn_of_other_jobs(
    launch: list[RunRecord], found: Iterable[RunRecord], *, is_named: bool
) -> None:
    """Warn of jobs that have the same id and ran at the same time as this launch.

    If the user has named no run, also warn of other running jobs.
    """
    same, alive = list[str](), list[str]()
    for record in found:
        if is_same_job(record, launch[0]):
            continue
        if record.run == launch[0].run and any(_overlaps(record, other) for other in launch):
            same.append(record.events.parent.name)
        elif record.is_alive:
            alive.append(record.events.parent.name if record.run == NO_ID else record.run)
    if same:
        log.warning(
            "several jobs with the id %r ran at the same time; using the newest%s, with endpoint "
            "%s; the others are %s; give each job its own --rdzv-id",
            launch[0].run,
            " running one" if any(record.is_alive for record in launch) else "",
            launch[0].endpoint or "unknown",
            ", ".join(sorted(same)[:MAX_LISTED_RUNS]),
        )
    if alive and not is_named:
        others = format_list(list(dict.fromkeys(alive)), MAX_LISTED_RUNS)
        log.warning(
            "several jobs are running here; showing the newest, %s; to show another, name it: %s",
            launch[0].run,
            others,
        )


def _not_found_message(name: str, directory: Path, known: list[RunRecord]) -> str:
    runs = list(dict.fromkeys(record.run for record in known if record.run))
    alive = {record.run for record in known if record.is_alive}
    shown = [f"{run} (running)" if run in alive else run for run in runs]
    recorded = f"recorded in {directory}: {format_list(shown, MAX_LISTED_RUNS)}"
    if not runs:
        recorded = f"no run of this user is recorded in {directory} (the directory follows TMPDIR)"
    if not name:
        return recorded
    return (
        f"no recorded run {name!r} on this machine ({recorded}); for a run on other machines use: "
        "elasticlib status tcp://HOST:PORT/JOB"
    )
