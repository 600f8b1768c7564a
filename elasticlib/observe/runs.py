"""Where the runs of this machine and user are found: one folder of records, bounded in number; and
which files hold the lines of a run's workers.

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
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from ..clock import wall
from ..errors import NoSuchRun
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
STREAMS = {"out": ("stdout",), "err": ("stderr",), "both": ("stdout", "stderr")}
CHUNK = 256 * 1024
MOST_WORKERS = 4096
"""Of one node: an event that tells of more is no event of ours."""
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
        NoSuchRun: there is none; the error lists what there is.
    """
    folder, text = folder or _own_folder(), os.fspath(name)
    known = known_runs(folder)
    found = [record for record in known if text in ("", record.run)]
    if not found and text:
        is_path = os.sep in text or text in (os.curdir, os.pardir)
        found = ([] if is_path else _at(folder / text)) or _at(Path(text))
    if not found:
        raise NoSuchRun(_nothing(text, folder, known))
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
        with contextlib.suppress(NoSuchRun):
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
        raise NoSuchRun(f"there is no folder for temporary files: {error.strerror}") from error


def is_living(record: Path) -> bool:
    """Whether the agent of this record is there."""
    try:
        return bool(is_held(record))
    except OSError:  # who cannot look does not say that it is over
        return True


def known_runs(folder: Path | None = None) -> list[Record]:
    """All records that hold events, the newest first. folder: of them; this user's by default.

    Raises:
        NoSuchRun: their folder is somebody else's.
    """
    folder = folder or _own_folder()
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


# -- the files of its workers' lines -------------------------------------------------------------
#
# A node's folder is the one in which its events lie; in it there is one for each attempt, and there
# one for each worker. Which global rank that was is known from the events alone.


@attrs.frozen
class Attempt:
    """One start of a node's workers. first, last: their global ranks. world: of the job's."""

    number: int
    first: int
    last: int
    world: int


@attrs.frozen
class Kept:
    """One worker's stream, of one attempt, in a file that may not be there."""

    path: Path
    rank: int
    node: NodeLogs


class NodeLogs:
    """What is known of one node's logs; `look` takes in what has happened since.

    Args:
        events: its `events.jsonl`, or a link to it.
    """

    def __init__(self, events: Path) -> None:
        self.events = events
        self.run = self.node = self.host = ""
        self.logs: str | None = None
        self.attempts: list[Attempt] = []
        self._folders: dict[tuple[int, int], str] = {}
        """Of the worker of an attempt with that global rank."""
        self.began = self.seen = 0.0
        self._pid = 0
        self._ended = False
        self._read = Tail(events)
        self.look()

    @property
    def folder(self) -> Path:
        """Where the attempts' folders are: also on another machine than the node's own."""
        return self.events.resolve().parent

    @property
    def over(self) -> bool:
        """Whether nothing more is to come: it has ended, or its process here is gone."""
        return self._ended or (self._here and not os.path.exists(f"/proc/{self._pid}"))

    @property
    def _here(self) -> bool:
        return self.host == socket.gethostname() and self._pid > 0

    def with_run_of(self, began: float) -> bool:
        """Whether it was there when another node's part began, in seconds since 1970. (Of other
        machines' nodes no more is known than when their last event was.)"""
        return self.seen >= began or (self._here and not self.over)

    def look(self) -> None:
        """Read what has happened since the last look; lines that nobody can read are skipped."""
        for line in self._read.lines():
            try:
                self._take(decode(line))
            except ValueError:
                continue

    def _take(self, event: Event) -> None:
        self.began, self.seen = self.began or event.wall, event.wall
        if event.kind == "run.began":
            self.run, self.node, self.host = event.run, event.node, event.text("host")
            self._pid = event.count("pid") or 0
            self.logs = event.text("logs") if "logs" in event.facts else None
        elif event.kind == "generation.began":
            first, last = event.pair("ranks") or (0, 0)
            if last - first >= MOST_WORKERS:
                raise ValueError(f"a node has at most {MOST_WORKERS} workers")
            number, world = event.count("attempt"), event.count("world") or 0
            if number is None:
                number = len(self.attempts)
            self.attempts.append(Attempt(number, first, last, world))
        elif event.kind == "worker.began" and self.attempts and event.rank is not None:
            # It may go on from an earlier attempt, and write where it did.
            attempt, local = event.count("attempt"), event.count("local_rank")
            if attempt is not None and local is not None:
                named = (self.attempts[-1].number, event.rank)
                self._folders[named] = f"attempt_{attempt}/{local}"
        elif event.kind == "run.ended":
            self._ended = True

    def kept(self, attempt: Attempt, streams: str) -> Iterator[Kept]:
        """The files of an attempt, rank by rank."""
        for rank in range(attempt.first, attempt.last + 1):
            usual = f"attempt_{attempt.number}/{rank - attempt.first}"
            folder = self.folder / self._folders.get((attempt.number, rank), usual)
            for name in STREAMS[streams]:
                yield Kept(folder / f"{name}.log", rank, self)


class Tail:
    """The lines of a file that grows, or is not there yet, as they come.

    chunk: bytes to read at a time, and the longest piece of a line that does not end.
    """

    def __init__(self, path: Path, *, chunk: int = CHUNK) -> None:
        self.path = path
        self._chunk = chunk
        self._at = 0
        self._part = b""

    def skip_to_last(self, count: int) -> None:
        """Begin with the last so many lines of what is there now."""
        try:
            with self.path.open("rb") as file:
                at = end = file.seek(0, os.SEEK_END)
                last = b""
                # One end of a line more than lines: what is before the first of them.
                while count and at > 0 and last.count(b"\n") <= count:
                    size = min(self._chunk, at)
                    at -= size
                    file.seek(at)
                    last = file.read(size) + last
        except OSError:
            return
        ended = last.endswith(b"\n")
        wanted = last.removesuffix(b"\n").split(b"\n")[-count:] if last else []
        self._at = end - sum(len(line) + 1 for line in wanted) + (bool(wanted) and not ended)

    def lines(self) -> Iterator[bytes]:
        """All whole lines since the last call, without their ends; endless ones come in pieces."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self._at:
                self._at, self._part = 0, b""  # it was made anew
            file.seek(self._at)
            while data := file.read(self._chunk):
                self._at += len(data)
                *whole, self._part = (self._part + data).split(b"\n")
                yield from whole
                if len(self._part) > self._chunk:
                    yield self._part
                    self._part = b""

    def rest(self) -> Iterator[bytes]:
        """The line that was begun and not ended, as nothing more is to come."""
        if self._part:
            yield self._part
        self._part = b""


class Neighbours:
    """Finds the nodes of a run whose folders lie beside those of others of it, as in a log
    directory that several machines share.

    A file of another job is dismissed by its first line, once; what an earlier run of the same job
    wrote is read once.
    """

    def __init__(self) -> None:
        self._dismissed: set[Path] = set()
        self._read: dict[Path, NodeLogs] = {}

    def beside(self, found: list[NodeLogs]) -> list[NodeLogs]:
        """These and their neighbours. Jobs of one id may follow one another: others than those that
        ran together with these are left out."""
        nodes = {node.folder: node for node in found}
        began = max((node.began for node in found), default=0.0)
        for parent in {node.folder.parent for node in found if node.logs != ""}:
            for events in sorted(parent.glob(f"*/{EVENTS}")):
                if events.parent in nodes:
                    continue
                other = self._of_run(events, found[0].events)
                if other is not None and other.with_run_of(began):
                    nodes[other.folder] = other
        return sorted(nodes.values(), key=lambda node: (node.began, node.folder))

    def _of_run(self, events: Path, first: Path) -> NodeLogs | None:
        """What these events tell by now, if they are of the job of those."""
        known = self._read.get(events)
        if known is not None:
            known.look()
            return known
        if events in self._dismissed:
            return None
        mine, other = read_record(first), read_record(events)
        if mine is None or other is None or not other.run:
            return None  # its first line may be on its way
        if not of_one_job(mine, other):
            self._dismissed.add(events)
            return None
        return self._read.setdefault(events, NodeLogs(events))
