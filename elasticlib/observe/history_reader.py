"""Reads the event files of a run's agents and combines them into the history of the job.

Files may be missing, damaged, truncated anywhere, or hold several starts of one run.
"""

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
from .aggregate import SAVE_KINDS, NodeAggregate, finished_state
from .event import Event, TimelineEvent
from .event_kinds import RunStarted
from .formatting import format_list
from .history import (
    Generation,
    History,
    JobState,
    NodeExit,
    NodeGeneration,
    NodeHistory,
    NodeMembership,
    NodeParticipation,
    ProgressSample,
    RecoveryCostCalculator,
    count_as_startup,
    job_state,
)
from .journal import EventFile
from .runs import AliveAgents, earlier_launches, find_runs

log = logging.getLogger("elasticlib.observe")

RunName = str | os.PathLike[str]
MAX_NAMED_FILES = 16

_NODE_TIMES = (
    *("started_at", "rendezvous_started_at", "disrupted_at", "stopped_at", "all_exited_at"),
    *("last_exit_at", "restored_at", "first_step_at", "last_step_at"),
)
"""Fields of NodeGeneration that are times of the node."""

Timed = TypeVar("Timed", TimelineEvent, ProgressSample)
GenerationKey = tuple[int, int]  # index of the agent, and of the generation in its list


def read_history(run: RunName | Iterable[RunName] = "") -> History:
    """Return the history of a run from the events of its agents on this machine.

    Args:
        run: id of the run; or a path: an event file, the record of a run, or a log directory of
            one or several nodes. Several of these, such as files fetched from other nodes, are
            read as one run. Default: this user's newest running job, or else the newest job.

    Raises:
        RunNotFoundError: there is no such run; the error lists the runs that exist.
        ConfigError: the events cannot be read.
    """
    names = [run] if isinstance(run, (str, os.PathLike)) else list(run)
    files = [path for name in names for path in find_runs(name)]
    for name in names:
        if earlier := [str(path) for path in earlier_launches(name) if path not in files]:
            message = "%s was launched before, for example by a requeue; its earlier events: %s"
            log.warning(message, name, format_list(earlier, MAX_NAMED_FILES))
    return read_files(files)


def read_files(paths: Iterable[RunName]) -> History:
    """Return the history of event files, reading each once, in bounded memory.

    Raises:
        ConfigError: a file cannot be read, or there is no event in any of them.
    """
    named = {os.path.realpath(path): os.fspath(path) for path in paths}
    files = [EventFile(path) for path in sorted(named.values())]
    try:
        history = history_of({file.path: file for file in files}, AliveAgents().is_known_dead)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
    invalid_lines = sum(file.invalid_lines for file in files)
    if not history.nodes:
        where = ", ".join(file.path for file in files) or "no files"
        raise ConfigError(f"no events in {where} ({invalid_lines} lines are something else)")
    return attrs.evolve(history, invalid_lines=invalid_lines)


def history_of(
    files: Mapping[str, Iterable[Event]],
    is_known_dead: Callable[[str, RunStarted], bool] = lambda _file, _start: False,
) -> History:
    """Return the history of a job from the events in several files.

    An agent whose node has the name of an earlier one is shown as `NAME (2)`.

    Args:
        files: events by file, in any order of the files.
        is_known_dead: returns True if the agent of a file, which starts with this event, is known
            to be gone.
    """
    found = [(file, agent) for file, events in files.items() for agent in _agents_in(events)]
    found = [(file, agent) for file, agent in found if agent.started_at is not None]
    dead = [agent.end is None and is_known_dead(f, agent.start) for f, agent in found]
    return combine([agent for _, agent in found], dead)


def history_of_node(agent: NodeAggregate) -> History:
    """Return the history of a job as far as one agent knows it. Thread-safe."""
    return combine([agent] if agent.started_at is not None else [], [False])


def combine(agents: Sequence[NodeAggregate], dead: Sequence[bool]) -> History:
    """Combine what the agents of a job have recorded into the history of the job.

    Args:
        agents: the agents of the job; each has at least one event.
        dead: for each agent, True if it is gone without reporting an end.
    """
    if not agents:
        return History("", 0.0, 0.0, JobState.WAITING)
    # An agent may still apply events in another thread.
    generations = [tuple(agent.generations) for agent in agents]
    aligned = align(generations, [agent.clock_offset for agent in agents])
    numbers = {key: number for number, keys in aligned.generations.items() for key in keys}
    starts = zip(agents, aligned.offsets, strict=True)
    start_timestamp = min((agent.started_at or 0.0) + offset for agent, offset in starts)
    placed = [
        _PlacedAgent(
            agent,
            aligned.offsets[index] - start_timestamp,
            name,
            generations[index],
            [numbers[index, i] for i in range(len(generations[index]))],
            dead[index],
        )
        for index, (agent, name) in enumerate(zip(agents, _unique_names(agents), strict=True))
    ]
    return _JobHistory(placed, start_timestamp, aligned).build()


def _agents_in(events: Iterable[Event]) -> list[NodeAggregate]:
    """Fold the events of a file by agent. `run.started` or a new node id starts an agent."""
    agents: list[NodeAggregate] = []
    last: dict[str, NodeAggregate] = {}
    for event in events:
        if isinstance(event.body, RunStarted) or event.node not in last:
            last[event.node] = NodeAggregate(keeps_samples=True)
            agents.append(last[event.node])
        last[event.node].apply(event)
    return agents


def _unique_names(agents: Iterable[NodeAggregate]) -> Iterator[str]:
    counts = Counter[str]()
    for agent in agents:
        counts[agent.node] += 1
        number = counts[agent.node]
        yield agent.node if number == 1 else f"{agent.node} ({number})"


@attrs.frozen
class _PlacedAgent:
    """An agent on the axis of the job."""

    aggregate: NodeAggregate
    offset: float  # added to its times to get job seconds
    name: str
    own_generations: Sequence[NodeGeneration]
    numbers: Sequence[int]  # of these generations, in the count of the job
    is_dead: bool  # it is gone and reported no end

    @property
    def started_at(self) -> float:
        return (self.aggregate.started_at or 0.0) + self.offset

    @property
    def last_event_at(self) -> float:
        return self.aggregate.last_event_at + self.offset

    @property
    def participation(self) -> NodeParticipation:
        end = self.aggregate.end
        if end is None:
            return NodeParticipation(self.aggregate.status.state, not self.is_dead)
        return NodeParticipation(finished_state(end.state), not self.is_dead, end.expelled)

    @property
    def root_cause(self) -> Mapping[str, Any] | None:
        end = self.aggregate.end
        return None if end is None else end.root_cause

    def generations(self) -> Iterator[tuple[int, NodeGeneration]]:
        for number, generation in zip(self.numbers, self.own_generations, strict=True):
            times = {name: getattr(generation, name) for name in _NODE_TIMES}
            moved = {name: at + self.offset for name, at in times.items() if at is not None}
            yield number, attrs.evolve(generation, node=self.name, **moved)

    def timeline(self) -> Iterator[TimelineEvent]:
        for event in self.aggregate.timeline:
            yield attrs.evolve(event, at=event.at + self.offset, node=self.name)

    def progress(self) -> Iterator[ProgressSample]:
        pairs = zip(self.own_generations, self.numbers, strict=True)
        numbers = {generation.number: number for generation, number in pairs}
        for sample in self.aggregate.progress.items:
            number = numbers.get(sample.generation, sample.generation)
            at = sample.at + self.offset
            yield attrs.evolve(sample, at=at, node=self.name, generation=number)

    def history(self, *, is_lost: bool) -> NodeHistory:
        start, end, node_exit = self.aggregate.start, self.aggregate.end, None
        if end is not None:
            at, state = self.aggregate.ended_at + self.offset, finished_state(end.state)
            node_exit = NodeExit(at, state, end.reason, end.exit_code or 0)
        return NodeHistory(
            node=self.name,
            host=start.host,
            started_at=self.started_at,
            last_event_at=self.last_event_at,
            slots=start.slots or 0,
            exit=node_exit,
            pid=start.pid,
            log_dir=start.log_dir,
            command=start.command,
            settings=start.settings,
            versions=start.versions,
            dropped_events=self.aggregate.dropped_events,
            is_lost=is_lost,
            num_failures=sum(self.aggregate.failures.values()),
        )


class _JobHistory:
    """Builds the history of a job from agents on one axis."""

    def __init__(
        self, agents: Sequence[_PlacedAgent], start_timestamp: float, aligned: Alignment
    ) -> None:
        self._agents = agents
        self._start_timestamp = start_timestamp
        self._first_numbers = aligned.first_numbers
        self._duration = max(agent.last_event_at for agent in agents)
        self._parts: dict[int, list[NodeGeneration]] = {n: [] for n in aligned.generations}
        for agent in agents:
            for number, generation in agent.generations():
                self._parts[number].append(generation)

    def build(self) -> History:
        generations = self._generations()
        last, state = self._last_agent()
        aggregates = [agent.aggregate for agent in self._agents]
        is_finished = state is None or state.is_finished
        limits = [aggregate.status.max_restarts for aggregate in aggregates]
        num_saves = {kind: self._count_saves(kind) for kind in SAVE_KINDS}
        return History(
            run=aggregates[0].status.run,
            start_timestamp=self._start_timestamp,
            duration_seconds=self._duration,
            state=state,
            nodes=self._nodes(is_finished),
            memberships=self._memberships(generations, is_finished),
            generations=generations,
            timeline=_sorted_by_time(event for agent in self._agents for event in agent.timeline()),
            progress=_sorted_by_time(
                sample for agent in self._agents for sample in agent.progress()
            ),
            restarts=generations[-1].restarts if generations else 0,
            max_restarts=next((limit for limit in reversed(limits) if limit is not None), None),
            reason=last.aggregate.status.reason,
            root_cause=last.root_cause,
            checkpoint_step=self._newest_step("checkpoint.saved"),
            snapshot_step=self._newest_step("snapshot.taken"),
            omitted_events=sum(aggregate.omitted_events for aggregate in aggregates),
            save_counts=num_saves,
        )

    def _generations(self) -> tuple[Generation, ...]:
        calculator, numbers = RecoveryCostCalculator(), list(self._parts)
        generations = []
        for number, next_number in zip_longest(numbers, numbers[1:]):
            job_started_at = None
            if number in self._first_numbers:
                new = (agent for agent in self._agents if agent.numbers[:1] == [number])
                job_started_at = min((agent.started_at for agent in new), default=None)
            generation = calculator.add(
                number,
                self._parts[number],
                job_started_at=job_started_at,
                next_parts=() if next_number is None else self._parts[next_number],
                last_event_at=self._duration,
            )
            generations.append(generation)
        if any(generation.first_step_at is not None for generation in generations):
            generations = [count_as_startup(made, self._duration) for made in generations]
        return tuple(generations)

    def _count_saves(self, kind: str) -> int:
        """Count checkpoints or snapshots: in each generation, those of the node with the most."""
        name = "num_saves" if kind == "checkpoint.saved" else "num_snapshots"
        return sum(max(getattr(part, name) for part in parts) for parts in self._parts.values())

    def _memberships(
        self, generations: Sequence[Generation], is_finished: bool
    ) -> tuple[NodeMembership, ...]:
        ends = {generation.number: generation.finished_at for generation in generations}
        memberships = []
        for number, parts in self._parts.items():
            for part in parts:
                # If a node's own end is not known, the end of the generation or the job is used.
                own = part.stopped_at if part.all_exited_at is None else part.all_exited_at
                candidates = (own, ends[number], self._duration if is_finished else None)
                end = next((at for at in candidates if at is not None), None)
                memberships.append(
                    NodeMembership(
                        part.node,
                        number,
                        part.node_rank,
                        part.ranks,
                        started_at=part.started_at,
                        finished_at=None if end is None else max(part.started_at, end),
                    )
                )
        return tuple(sorted(memberships, key=attrgetter("generation", "node_rank")))

    def _nodes(self, is_finished: bool) -> tuple[NodeHistory, ...]:
        histories = []
        for agent in self._agents:
            generations = agent.own_generations
            # An agent that waits for admission records nothing while it waits.
            may_wait = bool(generations) and generations[-1].all_exited_at is not None
            is_waiting = may_wait and not is_finished
            is_lost = agent.is_dead or (self._was_abandoned(agent) and not is_waiting)
            histories.append(agent.history(is_lost=is_lost))
        return tuple(sorted(histories, key=attrgetter("started_at")))

    def _was_abandoned(self, agent: _PlacedAgent) -> bool:
        """Return True if an agent reported no end and others started a generation without it."""
        if agent.aggregate.end is not None or not agent.numbers:
            return False
        return any(
            number > agent.numbers[-1]
            and min(part.started_at for part in parts) > agent.last_event_at
            for number, parts in self._parts.items()
        )

    def _last_agent(self) -> tuple[_PlacedAgent, JobState | None]:
        """Return the agent that explains the last state of the job, and this state."""
        newest = max(self._parts, default=None)
        members = [a for a in self._agents if newest is None or newest in a.numbers]
        state = job_state([agent.participation for agent in members])
        matching = [agent for agent in members if agent.participation.state is state]
        matching = matching or [max(members, key=attrgetter("last_event_at"))]

        def priority(agent: _PlacedAgent) -> tuple[bool, bool]:
            return not agent.participation.expelled, agent.root_cause is not None

        return max(matching, key=priority), state

    def _newest_step(self, kind: str) -> int | None:
        """Return the step of the last event of this kind that any agent has recorded."""
        saves = [(agent.aggregate.last_saves.get(kind), agent.offset) for agent in self._agents]
        known = [(save[0] + offset, save[1]) for save, offset in saves if save is not None]
        return max(known)[1] if known else None


def _sorted_by_time(items: Iterable[Timed]) -> tuple[Timed, ...]:
    return tuple(sorted(items, key=attrgetter("at")))


# -- one axis of time ------------------------------------------------------------------------------
#
# Events of several agents are placed on one axis by the generations that they started together:
# members of a generation start their workers at almost the same time, even if their clocks differ.
# Wall clocks are used only between agents that share no generation.


@attrs.frozen
class Alignment:
    """Common times and generation numbers of several agents."""

    offsets: Sequence[float]  # added to an agent's times to get seconds since 1970
    # What each agent saw of a generation. If the job starts again, the count continues.
    generations: Mapping[int, Sequence[GenerationKey]]
    first_numbers: frozenset[int]  # generations with which the job started


def align(agents: Sequence[Sequence[NodeGeneration]], clocks: Sequence[float]) -> Alignment:
    """Align agents by incarnation and number of their generations.

    Args:
        agents: the generations of each agent, in order.
        clocks: for each agent, its wall clock minus its monotonic clock.
    """
    jobs: dict[str, dict[int, list[GenerationKey]]] = {}
    for index, generations in enumerate(agents):
        restarts = 0  # distinguishes starts of a job if its rendezvous reports no incarnation
        for i, generation in enumerate(generations):
            if i and generation.number <= generations[i - 1].number:
                restarts += 1
            job = jobs.setdefault(generation.incarnation or f"start {restarts}", {})
            job.setdefault(generation.number, []).append((index, i))
    offsets = _offsets(agents, clocks, [keys for job in jobs.values() for keys in job.values()])

    def started_at(job: Mapping[int, Sequence[GenerationKey]]) -> float:
        keys = (key for keys in job.values() for key in keys)
        return min(agents[index][i].started_at + offsets[index] for index, i in keys)

    return _number_generations(offsets, sorted(jobs.values(), key=started_at))


def _offsets(
    agents: Sequence[Sequence[NodeGeneration]],
    clocks: Sequence[float],
    groups: Sequence[Sequence[GenerationKey]],
) -> list[float]:
    """Return the offset of each agent; agents that share generations move together."""
    group_of = {key: number for number, group in enumerate(groups) for key in group}
    starts: dict[int, float] = {}  # of groups
    offsets: dict[int, float] = {}
    order = sorted(range(len(agents)), key=lambda index: -len(agents[index]))
    while len(offsets) < len(order):
        seed = next(index for index in order if index not in offsets)
        connected, found = [], [(seed, clocks[seed])]
        while found:
            for index, offset in found:
                connected.append(index)
                offsets[index] = offset
                for i, generation in enumerate(agents[index]):
                    starts.setdefault(group_of[index, i], generation.started_at + offset)
            found = []
            for index in (index for index in order if index not in offsets):
                shared = [
                    starts[group_of[index, i]] - generation.started_at
                    for i, generation in enumerate(agents[index])
                    if group_of[index, i] in starts
                ]
                if shared:
                    found.append((index, median_low(shared)))
        # The wall clock of the majority decides.
        shift = median_low([clocks[index] - offsets[index] for index in connected])
        offsets.update({index: offsets[index] + shift for index in connected})
    return [offsets[index] for index in range(len(agents))]


def _number_generations(
    offsets: Sequence[float], jobs: Iterable[Mapping[int, Sequence[GenerationKey]]]
) -> Alignment:
    """Number the generations of all starts of a job; within one start, clocks are not used."""
    launches: list[dict[int, Sequence[GenerationKey]]] = []
    for job in jobs:
        if not launches or launches[-1].keys() & job.keys():
            launches.append({})
        # An incarnation that continues the count of the previous one belongs to the same start.
        launches[-1].update(job)
    numbered: dict[int, Sequence[GenerationKey]] = {}
    first_numbers = set()
    for launch in launches:
        before = max(numbered, default=0)
        first_numbers.add(before + min(launch))
        numbered.update({before + number: launch[number] for number in sorted(launch)})
    return Alignment(offsets, numbered, frozenset(first_numbers))
