"""From the files of events of a run's agents to its history: nothing is asked of them but what each
told, so files may be missing, damaged, end anywhere, or hold several launches of one run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import attrs

from ..errors import ConfigError
from .event import LONGEST, Event, decode
from .history import (
    Generation,
    History,
    JobState,
    Ledger,
    Mark,
    NodeEnd,
    NodeGeneration,
    NodeStory,
    Pace,
    Stay,
    as_start,
)
from .runs import find_runs
from .story import AgentLog, end_state


class EventsFile:
    """Iterated over, it gives the file's events in their order, as many as are there by then.

    unread: lines so far that were none: damaged, longer than an event can be, or of another
    version. cut: whether the file ends within a line, as it does when its writer was killed; that
    line is not counted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.unread = 0
        self.cut = False

    def __iter__(self) -> Iterator[Event]:
        self.unread, self.cut = 0, False
        with open(self.path, "rb") as file:
            while line := file.readline(LONGEST + 1):
                if not line.endswith(b"\n"):
                    if len(line) <= LONGEST:
                        # Its writer is at it, or was killed; the rest would pass for a line.
                        self.cut = True
                        return
                    self.cut = not _passed_over(file)
                    self.unread += not self.cut
                    continue
                try:
                    yield decode(line)
                except ValueError:
                    self.unread += 1


def _passed_over(file: BinaryIO) -> bool:
    """Whether the line that this file is in ends; it is too long to be an event."""
    while line := file.readline(LONGEST + 1):
        if line.endswith(b"\n"):
            return True
    return False


def read_history(run: str | os.PathLike[str] = "") -> History:
    """A run's history, from the events of all its agents that are found here.

    run: its id; or a path: a file of events, a run's record, or a folder of logs, of one node or of
    several. If left out, this user's newest run here that goes on, or if none does the newest.

    Raises:
        NoSuchRun: there is none; the error lists what there is.
        ConfigError: its events cannot be read.
    """
    return read_files(find_runs(run))


def read_files(paths: Iterable[str | os.PathLike[str]]) -> History:
    """The history that these files tell together; each is read once, by however many names it is
    given, in bounded memory.

    Raises:
        ConfigError: one cannot be read, or there is no event in any of them.
    """
    named = {os.path.realpath(path): os.fspath(path) for path in paths}
    files = [EventsFile(path) for path in sorted(named.values())]
    try:
        history = history_of({file.path: file for file in files})
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    unread = sum(file.unread for file in files)
    if not history.nodes:
        where = ", ".join(file.path for file in files) or "no file at all"
        raise ConfigError(f"a history is read of events, got {where} with {unread} other lines")
    return attrs.evolve(history, unread=unread)


_BUSY = (
    *(JobState.RESTARTING, JobState.DRAINING, JobState.RESIZING),
    *(JobState.RENDEZVOUS, JobState.WAITING, JobState.RUNNING),
)
"""Of nodes that differ, the first of these says what the job is doing."""
_FINAL = (JobState.SUCCEEDED, JobState.FAILED, JobState.PREEMPTED, JobState.STOPPED)


def history_of(files: Mapping[str, Iterable[Event]]) -> History:
    """What these events tell, by the file that they stand in, in whatever order the files are.

    An agent that began under the name of one before it is another node here, `NAME (2)`.
    """
    logs = [log for events in files.values() for log in _logs(events)]
    logs = [log for log in logs if log.began is not None]
    if not logs:
        return History("", 0.0, 0.0, JobState.WAITING)
    aligned = align([log.lives for log in logs], [log.clock for log in logs])
    return _Reader(logs, aligned).history()


def _logs(events: Iterable[Event]) -> list[AgentLog]:
    """Those of one file: an agent's events begin with `run.began`, unless its head is lost."""
    found: list[AgentLog] = []
    last: dict[str, AgentLog] = {}
    for event in events:
        if event.kind == "run.began" or event.node not in last:
            last[event.node] = AgentLog()
            found.append(last[event.node])
        last[event.node].fold(event)
    return found


class _Reader:
    """Of logs that are laid on one axis."""

    def __init__(self, logs: Sequence[AgentLog], aligned: Aligned) -> None:
        self._logs = logs
        self._wall = min(
            (s.began or 0.0) + offset for s, offset in zip(logs, aligned.offsets, strict=True)
        )
        self._shifts = [offset - self._wall for offset in aligned.offsets]
        self._until = max(s.seen + by for s, by in zip(logs, self._shifts, strict=True))
        self._names = _names([log.node for log in logs])
        self._aligned = aligned
        self._lives = {
            number: [_moved(logs[s].lives[i], self._shifts[s], self._names[s]) for s, i in keys]
            for number, keys in aligned.generations.items()
        }
        self._numbers = {
            key: number for number, keys in aligned.generations.items() for key in keys
        }
        self._silence()

    def history(self) -> History:
        generations = self._generations()
        teller, state = self._told_last()
        newest = generations[-1] if generations else None
        limits = [life.max_restarts for lives in self._lives.values() for life in lives]
        return History(
            run=self._logs[0].status.run,
            wall=self._wall,
            until=self._until,
            state=state,
            nodes=self._stories(state),
            stays=self._stays(generations, state),
            generations=generations,
            marks=tuple(sorted(self._each_mark(), key=_at)),
            paces=tuple(sorted(self._each_pace(), key=_at)),
            restarts=0 if newest is None else newest.restarts,
            max_restarts=next((limit for limit in reversed(limits) if limit is not None), None),
            reason=teller.status.reason,
            cause=_cause(teller),
            saved=self._newest([log.saved for log in self._logs]),
            snapshot=self._newest([log.snapshot for log in self._logs]),
            left_out=sum(log.left_out for log in self._logs),
            kept={kind: self._kept(kind) for kind in ("saved", "snapshot") if self._thinned(kind)},
        )

    def _generations(self) -> tuple[Generation, ...]:
        ledger, numbers, found = Ledger(), list(self._lives), []
        for index, number in enumerate(numbers):
            lives = self._lives[number]
            following = None
            if index + 1 < len(numbers):
                following = min(life.began for life in self._lives[numbers[index + 1]])
            launched = None
            if number in self._aligned.launches:
                launched = min(self._begun(s) for s, _ in self._aligned.generations[number])
            made = ledger.add(
                number, lives, launched=launched, following=following, until=self._until
            )
            found.append(made)
        if any(made.trained is not None for made in found):
            found = [as_start(made, self._until) for made in found]
        return tuple(found)

    def _thinned(self, kind: str) -> bool:
        return any(log.thinned(kind) for log in self._logs)

    def _kept(self, kind: str) -> int:
        """How many steps; each node of a generation may tell of the same."""
        return sum(max(getattr(x, kind) for x in lives) for lives in self._lives.values())

    def _silence(self) -> None:
        """A node that went without a word had been silent until its lease was over, at most: its
        peers' last step was its own, too. Where no steps are told nothing is claimed."""
        for s in filter(self._lost, range(len(self._logs))):
            number = self._numbers[(s, len(self._logs[s].lives) - 1)]
            lease = self._logs[s].launch.seconds("lease")
            lives = self._lives[number]
            known = min((x.trouble for x in lives if x.trouble is not None), default=None)
            worked = max((x.last_at for x in lives if x.last_at is not None), default=None)
            if lease is None or known is None or worked is None:
                continue
            seen = max(worked, self._logs[s].seen + self._shifts[s])
            silent = max(0.0, min(lease, known - seen))
            self._lives[number] = [
                attrs.evolve(x, silent=silent) if x.node == self._names[s] else x for x in lives
            ]

    def _begun(self, s: int) -> float:
        return (self._logs[s].began or 0.0) + self._shifts[s]

    def _stays(self, generations: Sequence[Generation], state: JobState) -> tuple[Stay, ...]:
        ends = {generation.number: generation.ended for generation in generations}
        over = None if not state.over else self._until
        found = []
        for number, lives in self._lives.items():
            for life in lives:
                told = life.over if life.gone is None else life.gone
                # Whoever did not tell of its end had it at that of all.
                end = next((x for x in (told, ends[number], over) if x is not None), None)
                ended = None if end is None else max(life.began, end)
                place = (life.node, number, life.node_rank, life.ranks)
                found.append(Stay(*place, began=life.began, ended=ended))
        return tuple(sorted(found, key=lambda stay: (stay.generation, stay.node_rank)))

    def _stories(self, state: JobState) -> tuple[NodeStory, ...]:
        """Whoever told that it waits for a place says no more, and is lost only if it stays silent
        at the end, too."""
        found = []
        for s, log in enumerate(self._logs):
            waits = not state.over and bool(log.lives) and log.lives[-1].gone is not None
            found.append(self._story(s, lost=self._lost(s) and not waits))
        return tuple(sorted(found, key=_began))

    def _story(self, s: int, *, lost: bool) -> NodeStory:
        log, by = self._logs[s], self._shifts[s]
        told = log.launch
        return NodeStory(
            node=self._names[s],
            host=told.text("host"),
            began=self._begun(s),
            seen=log.seen + by,
            slots=told.count("slots") or 0,
            end=None if log.end is None else _end(log.end, by),
            pid=told.count("pid"),
            lost=lost,
            folder=told.text("logs"),
            settings=told.texts("settings"),
            versions=told.texts("versions"),
            events_lost=log.events_lost,
            failures=log.failures,
        )

    def _lost(self, s: int) -> bool:
        """Whether the others went on without it, and it has not said that it ends."""
        log = self._logs[s]
        if log.end is not None or not log.lives:
            return False
        mine = self._numbers[(s, len(log.lives) - 1)]
        seen = log.seen + self._shifts[s]
        return any(
            number > mine and min(life.began for life in lives) > seen
            for number, lives in self._lives.items()
        )

    def _told_last(self) -> tuple[AgentLog, JobState]:
        """What the job was doing last, and the agent that tells why."""
        newest = max(self._lives, default=None)
        members = list(range(len(self._logs)))
        if newest is not None:
            members = [s for s, _ in self._aligned.generations[newest]]
        ends = [(self._logs[s], _end_state(self._logs[s])) for s in members]
        for wanted in (JobState.SUCCEEDED, JobState.FAILED):
            # Each ends the job for all, but for the node that is told to leave it.
            said = [s for s, state in ends if state is wanted and not _sent_away(s)]
            if said:
                return max(said, key=_with_cause), wanted
        here = [log for log, state in ends if state is None]
        for state in _BUSY:
            busy = [log for log in here if log.status.state is state]
            if busy:
                return busy[0], state
        over = [log for log, _ in ends]
        for wanted in _FINAL:
            said = [log for log, state in ends if state is wanted]
            if said:
                return max(said, key=_with_cause), wanted
        return over[0], over[0].status.state

    def _each_mark(self) -> Iterable[Mark]:
        for s, log in enumerate(self._logs):
            for mark in log.marks:
                yield attrs.evolve(mark, at=mark.at + self._shifts[s], node=self._names[s])

    def _each_pace(self) -> Iterable[Pace]:
        for s, log in enumerate(self._logs):
            here = {life.number: self._numbers[(s, i)] for i, life in enumerate(log.lives)}
            for pace in (*log.paces.items, *log.losses.items):
                yield attrs.evolve(
                    pace,
                    at=pace.at + self._shifts[s],
                    node=self._names[s],
                    generation=here.get(pace.generation, pace.generation),
                )

    def _newest(self, told: Sequence[tuple[float, int] | None]) -> int | None:
        """What was told last, by any."""
        known = [
            (found[0] + by, found[1])
            for found, by in zip(told, self._shifts, strict=True)
            if found is not None
        ]
        return max(known)[1] if known else None


def _names(nodes: Sequence[str]) -> list[str]:
    """Each once, though several agents may have told under it."""
    counts: dict[str, int] = {}
    found = []
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
        found.append(node if counts[node] == 1 else f"{node} ({counts[node]})")
    return found


def _moved(life: NodeGeneration, by: float, name: str) -> NodeGeneration:
    """The same on another axis."""
    times = ("began", "sought", "trouble", "over", "gone", "left", "restored", "trained", "last_at")
    told = {time: getattr(life, time) for time in times}
    return attrs.evolve(
        life, node=name, **{time: at + by for time, at in told.items() if at is not None}
    )


def _end(event: Event, by: float) -> NodeEnd:
    return NodeEnd(
        at=event.at + by,
        state=end_state(event.text("state")),
        reason=event.text("reason"),
        exit_code=event.count("exit_code") or 0,
    )


def _end_state(log: AgentLog) -> JobState | None:
    return None if log.end is None else end_state(log.end.text("state"))


def _sent_away(log: AgentLog) -> bool:
    return log.end is not None and log.end.says("expelled")


def _cause(log: AgentLog) -> Mapping[str, Any] | None:
    cause = None if log.end is None else log.end.facts.get("cause")
    return cause if isinstance(cause, Mapping) else None


def _with_cause(log: AgentLog) -> bool:
    return _cause(log) is not None


def _began(story: NodeStory) -> float:
    return story.began


def _at(told: Mark | Pace) -> float:
    return told.at


# -- one axis of time -----------------------------------------------------------------------------
#
# What several agents told is laid on one axis by the generations that they began together, and by
# their wall clocks only where they share none. Members of a generation start their workers within a
# moment of one another, whatever their clocks say, so a node whose wall clock is wrong lands right,
# and wall clocks say no more than when it was; but where they are hours apart it must be seen that
# what was begun together lasted as long for both.

APART = 3600.0
"""Seconds by wall clocks within which two that tell of a like generation mean the same one."""
MOMENT, PART = 2.0, 0.01
"""Of those whose wall clocks are further apart: seconds, and part of the time since it began,
within which its end, or another's beginning, came for both, by their own clocks."""

Key = tuple[int, int]
"""A life: the log's place in the sequence, and the life's in the log."""


@attrs.frozen
class Aligned:
    """offsets: what to add to each log's own times for the time of all, in seconds since 1970 by
    the clocks that agree. generations: the lives of each, by its number, in order; where the job
    was begun anew, the count goes on. launches: the numbers at which it was begun."""

    offsets: Sequence[float]
    generations: Mapping[int, Sequence[Key]]
    launches: frozenset[int]


def align(logs: Sequence[Sequence[NodeGeneration]], clocks: Sequence[float]) -> Aligned:
    """logs: the lives that each agent told of, in their order. clocks: of each, its wall clock
    minus its monotonic one."""
    parts = _parts(logs)
    jobs = _together(logs, parts)
    offsets = _offsets(logs, clocks, [keys for job in jobs for keys in job.values()])
    began = {
        id(job): min(logs[s][i].began + offsets[s] for keys in job.values() for s, i in keys)
        for job in jobs
    }
    return _in_order(offsets, sorted(jobs, key=lambda job: began[id(job)]))


def _parts(logs: Sequence[Sequence[NodeGeneration]]) -> dict[Key, Key]:
    """Of each life the first one of its job: where the count begins again, another job did."""
    first = {}
    for s, lives in enumerate(logs):
        head = (s, 0)
        for i, life in enumerate(lives):
            if i and life.number <= lives[i - 1].number:
                head = (s, i)
            first[(s, i)] = head
    return first


def _together(
    logs: Sequence[Sequence[NodeGeneration]], parts: Mapping[Key, Key]
) -> list[dict[int, list[Key]]]:
    """Of each job the lives of its generations, by number, whoever told of them."""
    same: dict[tuple[object, ...], list[Key]] = {}
    for s, lives in enumerate(logs):
        for i, x in enumerate(lives):
            same.setdefault((x.number, x.nodes, x.world, x.restarts, x.cause), []).append((s, i))
    jobs = _Union(parts.values())
    for keys in same.values():
        for group in _by_wall(logs, keys):
            for key in group[1:]:
                jobs.join(parts[group[0]], parts[key])
    found: dict[Key, dict[int, list[Key]]] = {}
    for key, head in parts.items():
        number = logs[key[0]][key[1]].number
        found.setdefault(jobs.of(head), {}).setdefault(number, []).append(key)
    return list(found.values())


def _by_wall(logs: Sequence[Sequence[NodeGeneration]], keys: Sequence[Key]) -> list[list[Key]]:
    """These, like but for their node ranks, as groups that may be of one generation each."""
    groups: list[list[Key]] = []
    taken: list[set[object]] = []
    walls: list[float] = []
    for key in sorted(keys, key=lambda key: logs[key[0]][key[1]].wall):
        life = logs[key[0]][key[1]]
        here = {life.node_rank, f"log {key[0]}"}
        for group, there, wall in zip(groups, taken, walls, strict=True):
            near = life.wall - wall <= APART or _in_step(logs, group[0], key)
            if not here & there and near:
                group.append(key)
                there |= here
                break
        else:
            groups.append([key])
            taken.append(here)
            walls.append(life.wall)
    return groups


def _in_step(logs: Sequence[Sequence[NodeGeneration]], one: Key, other: Key) -> bool:
    """Whether this generation ended, or its neighbour began, after as long a time for both."""
    told = []
    for s, i in (one, other):
        life, found = logs[s][i], {}
        if life.over is not None:
            found["over"] = life.over - life.began
        for near in logs[s][max(0, i - 1) : i + 2]:
            if near.number != life.number:
                found[f"began {near.number}"] = near.began - life.began
        told.append(found)
    pairs = [(told[0][what], told[1][what]) for what in told[0].keys() & told[1].keys()]
    return any(abs(mine - its) <= min(MOMENT, PART * abs(mine)) for mine, its in pairs)


class _Union:
    """Which of some things belong together."""

    def __init__(self, things: Iterable[Key]) -> None:
        self._head = {thing: thing for thing in things}

    def of(self, thing: Key) -> Key:
        while self._head[thing] != thing:
            self._head[thing] = self._head[self._head[thing]]
            thing = self._head[thing]
        return thing

    def join(self, one: Key, other: Key) -> None:
        one, other = sorted((self.of(one), self.of(other)))
        self._head[other] = one


def _offsets(
    logs: Sequence[Sequence[NodeGeneration]],
    clocks: Sequence[float],
    groups: Sequence[Sequence[Key]],
) -> list[float]:
    """Of each log what to add; those that share generations move as one."""
    group_of = {key: g for g, group in enumerate(groups) for key in group}
    when: dict[int, float] = {}
    placed: dict[int, float] = {}
    bodies: list[list[int]] = []
    order = sorted(range(len(logs)), key=lambda s: -len(logs[s]))
    while len(placed) < len(order):
        seed = next(s for s in order if s not in placed)
        body, fresh = [], [(seed, clocks[seed])]
        while fresh:
            for s, offset in fresh:
                body.append(s)
                placed[s] = offset
                for i, life in enumerate(logs[s]):
                    when.setdefault(group_of[(s, i)], life.began + offset)
            fresh = []
            for s in (s for s in order if s not in placed):
                shared = [
                    when[group_of[(s, i)]] - life.began
                    for i, life in enumerate(logs[s])
                    if group_of[(s, i)] in when
                ]
                if shared:
                    fresh.append((s, _median(shared)))
        bodies.append(body)
    for body in bodies:
        # As most of their wall clocks have it.
        shift = _median([clocks[s] - placed[s] for s in body])
        placed.update({s: placed[s] + shift for s in body})
    return [placed[s] for s in range(len(logs))]


def _in_order(offsets: Sequence[float], jobs: Iterable[Mapping[int, Sequence[Key]]]) -> Aligned:
    """One count over all jobs: what is known by number is never put in order by clocks."""
    ordered: dict[int, Sequence[Key]] = {}
    launches: list[dict[int, Sequence[Key]]] = []
    launch: dict[int, Sequence[Key]] = {}
    for job in jobs:
        if not launches or launch.keys() & job.keys():
            # Parts of which no two have a number in common may be of one job, seen by others.
            launch = {}
            launches.append(launch)
        launch.update(job)
    firsts = set()
    for launch in launches:
        before = max(ordered, default=0)
        firsts.add(before + min(launch))
        ordered.update({before + number: launch[number] for number in sorted(launch)})
    return Aligned(offsets, ordered, frozenset(firsts))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
