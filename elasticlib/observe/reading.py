"""From the files of events of a run's agents to its history. Nobody is asked for more, so files may
be missing, damaged, end anywhere, or hold several launches of one run."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from statistics import median_low
from typing import Any, TypeVar

import attrs

from ..errors import ConfigError
from .event import Event, Mark
from .history import (
    Generation,
    History,
    JobState,
    Ledger,
    NodeEnd,
    NodeGeneration,
    NodeStory,
    Pace,
    Part,
    Stay,
    as_start,
    job_state,
)
from .journal import EventsFile
from .runs import Living, earlier_launches, find_runs
from .story import AgentLog, end_state
from .wording import some

log = logging.getLogger("elasticlib.observe")

Name = str | os.PathLike[str]
MOST_FILES = 16
"""Of earlier launches, that are named."""


def read_history(run: Name | Iterable[Name] = "") -> History:
    """A run's history, from the events of all its agents that are found here.

    run: its id; or a path: a file of events, a run's record, or a folder of logs, of one node or of
    several; several of these, such as the files that were fetched from its nodes, are read as one
    run. If left out, this user's newest running job here, or else the newest.

    Raises:
        RunNotFoundError: there is none; the error lists what there is.
        ConfigError: its events cannot be read.
    """
    names = [run] if isinstance(run, (str, os.PathLike)) else list(run)
    files = [path for name in names for path in find_runs(name)]
    for name in names:
        if earlier := [str(path) for path in earlier_launches(name) if path not in files]:
            said = "%s was launched before, as by a requeue; its earlier events: %s"
            log.warning(said, name, some(earlier, MOST_FILES))
    return read_files(files)


def read_files(paths: Iterable[Name]) -> History:
    """The history that these files make together; each is read once, by however many names it is
    given, in bounded memory.

    Raises:
        ConfigError: one cannot be read, or there is no event in any of them.
    """
    named = {os.path.realpath(path): os.fspath(path) for path in paths}
    files = [EventsFile(path) for path in sorted(named.values())]
    try:
        history = history_of({file.path: file for file in files}, Living().lacks)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    unread = sum(file.unread for file in files)
    if not history.nodes:
        where = ", ".join(file.path for file in files) or "no file at all"
        raise ConfigError(f"a history is read of events, got {where} with {unread} other lines")
    return attrs.evolve(history, unread=unread)


_TIMES = ("began", "sought", "trouble", "over", "gone", "left", "restored", "trained", "last_at")
"""Of a NodeGeneration."""

Timed = TypeVar("Timed", Mark, Pace)


def history_of(
    files: Mapping[str, Iterable[Event]],
    gone: Callable[[str, Event], bool] = lambda _file, _launch: False,
) -> History:
    """The history of these events, by the file that they stand in, in whatever order the files are.
    gone: whether the agent that wrote a file, beginning with this event, is known to live no more.

    An agent that began under the name of one before it is another node here, `NAME (2)`.
    """
    found = [(file, log) for file, events in files.items() for log in _logs(events)]
    found = [(file, log) for file, log in found if log.began is not None]
    logs = [log for _, log in found]
    if not logs:
        return History("", 0.0, 0.0, JobState.WAITING)
    aligned = align([log.lives for log in logs], [log.clock for log in logs])
    numbers = {key: number for number, keys in aligned.generations.items() for key in keys}
    wall = min((log.began or 0.0) + by for log, by in zip(logs, aligned.offsets, strict=True))
    agents = [
        _Agent(
            log,
            aligned.offsets[s] - wall,
            name,
            [numbers[s, i] for i in range(len(log.lives))],
            log.end is None and gone(file, log.launch),
        )
        for s, ((file, log), name) in enumerate(zip(found, _names(logs), strict=True))
    ]
    return _Job(agents, wall, aligned).history()


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


def _names(logs: Iterable[AgentLog]) -> Iterator[str]:
    """Of each its node's, which several agents may have had."""
    counts = Counter[str]()
    for log in logs:
        counts[log.node] += 1
        yield log.node if counts[log.node] == 1 else f"{log.node} ({counts[log.node]})"


@attrs.frozen
class _Agent:
    """One agent's log, by: seconds to add to its times for those of the job. numbers: of its
    generations, in the count of all launches. gone: it ended without a word."""

    log: AgentLog
    by: float
    name: str
    numbers: Sequence[int]
    gone: bool

    @property
    def began(self) -> float:
        return (self.log.began or 0.0) + self.by

    @property
    def seen(self) -> float:
        return self.log.seen + self.by

    @property
    def end(self) -> JobState | None:
        return None if self.log.end is None else end_state(self.log.end.text("state"))

    @property
    def part(self) -> Part:
        expelled = self.log.end is not None and self.log.end.says("expelled")
        return Part(self.end or self.log.status.state, not self.gone, expelled)

    @property
    def cause(self) -> Mapping[str, Any] | None:
        """The first failure of the job, as it knows it."""
        cause = None if self.log.end is None else self.log.end.facts.get("cause")
        return cause if isinstance(cause, Mapping) else None

    def generations(self) -> Iterator[tuple[int, NodeGeneration]]:
        """Each with its number, in the job's times."""
        for number, life in zip(self.numbers, self.log.lives, strict=True):
            times = {name: getattr(life, name) for name in _TIMES}
            moved = {name: at + self.by for name, at in times.items() if at is not None}
            yield number, attrs.evolve(life, node=self.name, **moved)

    def marks(self) -> Iterator[Mark]:
        for mark in self.log.marks:
            yield attrs.evolve(mark, at=mark.at + self.by, node=self.name)

    def paces(self) -> Iterator[Pace]:
        pairs = zip(self.log.lives, self.numbers, strict=True)
        numbers = {life.number: number for life, number in pairs}
        for pace in self.log.paces.items:
            number = numbers.get(pace.generation, pace.generation)
            yield attrs.evolve(pace, at=pace.at + self.by, node=self.name, generation=number)

    def story(self, *, lost: bool) -> NodeStory:
        log, launch, end = self.log, self.log.launch, None
        if log.end is not None and self.end is not None:
            code = log.end.count("exit_code") or 0
            end = NodeEnd(log.end.at + self.by, self.end, log.end.text("reason"), code)
        return NodeStory(
            node=self.name,
            host=launch.text("host"),
            began=self.began,
            seen=self.seen,
            slots=launch.count("slots") or 0,
            end=end,
            pid=launch.count("pid"),
            lost=lost,
            folder=launch.text("logs"),
            settings=launch.texts("settings"),
            versions=launch.texts("versions"),
            events_lost=log.events_lost,
            failures=log.failures,
        )


class _Job:
    """Of agents whose logs are laid on one axis."""

    def __init__(self, agents: Sequence[_Agent], wall: float, aligned: Aligned) -> None:
        self._agents = agents
        self._wall = wall
        self._launches = aligned.launches
        self._until = max(agent.seen for agent in agents)
        self._lives: dict[int, list[NodeGeneration]] = {n: [] for n in aligned.generations}
        for agent in agents:
            for number, life in agent.generations():
                self._lives[number].append(life)

    def history(self) -> History:
        generations = self._generations()
        last, state = self._last()
        logs = [agent.log for agent in self._agents]
        limits = [life.max_restarts for lives in self._lives.values() for life in lives]
        return History(
            run=logs[0].status.run,
            wall=self._wall,
            until=self._until,
            state=state,
            nodes=self._stories(state is None or state.over),
            stays=self._stays(generations, state is None or state.over),
            generations=generations,
            marks=_in_time(mark for agent in self._agents for mark in agent.marks()),
            paces=_in_time(pace for agent in self._agents for pace in agent.paces()),
            restarts=generations[-1].restarts if generations else 0,
            max_restarts=next((limit for limit in reversed(limits) if limit is not None), None),
            reason=last.log.status.reason,
            cause=last.cause,
            saved=self._newest([log.saved for log in logs]),
            snapshot=self._newest([log.snapshot for log in logs]),
            left_out=sum(log.left_out for log in logs),
            kept={kind: self._kept(kind) for kind in ("saved", "snapshot")},
        )

    def _generations(self) -> tuple[Generation, ...]:
        ledger, numbers, found = Ledger(), list(self._lives), []
        for number, after in zip_longest(numbers, numbers[1:]):
            launched = None
            if number in self._launches:
                launched = min(agent.began for agent in self._agents if number in agent.numbers)
            made = ledger.add(
                number,
                self._lives[number],
                launched=launched,
                following=() if after is None else self._lives[after],
                until=self._until,
            )
            found.append(made)
        if any(made.trained is not None for made in found):
            found = [as_start(made, self._until) for made in found]
        return tuple(found)

    def _kept(self, kind: str) -> int:
        """Count checkpoints or snapshots; each node of a generation may report the same ones."""
        return sum(max(getattr(x, kind) for x in lives) for lives in self._lives.values())

    def _stays(self, generations: Sequence[Generation], over: bool) -> tuple[Stay, ...]:
        """over: whether the job is."""
        ends = {generation.number: generation.ended for generation in generations}
        last = self._until if over else None
        found = []
        for number, lives in self._lives.items():
            for life in lives:
                own = life.over if life.gone is None else life.gone
                # A node whose own end is not known had it at that of all.
                end = next((x for x in (own, ends[number], last) if x is not None), None)
                ended = None if end is None else max(life.began, end)
                place = (life.node, number, life.node_rank, life.ranks)
                found.append(Stay(*place, began=life.began, ended=ended))
        return tuple(sorted(found, key=lambda stay: (stay.generation, stay.node_rank)))

    def _stories(self, over: bool) -> tuple[NodeStory, ...]:
        """An agent that waits for a place writes nothing more, and is lost only if it is silent at
        the end, too."""
        found = []
        for agent in self._agents:
            lives = agent.log.lives
            waits = not over and bool(lives) and lives[-1].gone is not None
            found.append(agent.story(lost=agent.gone or (self._lost(agent) and not waits)))
        return tuple(sorted(found, key=attrgetter("began")))

    def _lost(self, agent: _Agent) -> bool:
        """Whether the others went on without it, and it has not said that it ends."""
        return (
            agent.log.end is None
            and bool(agent.numbers)
            and any(
                number > agent.numbers[-1] and min(life.began for life in lives) > agent.seen
                for number, lives in self._lives.items()
            )
        )

    def _last(self) -> tuple[_Agent, JobState | None]:
        """What the job was doing last, and the agent that says why."""
        newest = max(self._lives, default=None)
        members = [a for a in self._agents if newest is None or newest in a.numbers]
        state = job_state([agent.part for agent in members])
        telling = [a for a in members if a.part.state is state] or [max(members, key=_seen)]
        return max(telling, key=lambda a: (not a.part.expelled, a.cause is not None)), state

    def _newest(self, kept: Sequence[tuple[float, int] | None]) -> int | None:
        """The step that any agent reported last."""
        pairs = zip(kept, self._agents, strict=True)
        known = [(step[0] + agent.by, step[1]) for step, agent in pairs if step is not None]
        return max(known)[1] if known else None


def _seen(agent: _Agent) -> float:
    return agent.seen


def _in_time(found: Iterable[Timed]) -> tuple[Timed, ...]:
    return tuple(sorted(found, key=attrgetter("at")))


# -- one axis of time -----------------------------------------------------------------------------
#
# The events of several agents are laid on one axis by the generations that they began together,
# and by their wall clocks only where they share none. Members of a generation start their workers
# within a moment of one another, whatever their clocks say. So a node whose wall clock is wrong
# lands right, and wall clocks say no more than when it was; but where they are hours apart it must
# be seen that what was begun together lasted as long for both.

APART = 3600.0
"""Seconds by wall clocks within which two agents with a like generation had the same one."""
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
    """logs: the lives of each agent, in their order. clocks: of each, its wall clock
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
    """Of each job the lives of its generations, by number, of all agents."""
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
    times = []
    for s, i in (one, other):
        life, found = logs[s][i], {}
        if life.over is not None:
            found["over"] = life.over - life.began
        for near in logs[s][max(0, i - 1) : i + 2]:
            if near.number != life.number:
                found[f"began {near.number}"] = near.began - life.began
        times.append(found)
    pairs = [(times[0][what], times[1][what]) for what in times[0].keys() & times[1].keys()]
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
                    fresh.append((s, median_low(shared)))
        bodies.append(body)
    for body in bodies:
        # As most of their wall clocks have it.
        shift = median_low([clocks[s] - placed[s] for s in body])
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
