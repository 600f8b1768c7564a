"""From the events of a run's agents to its history: nothing is asked of them but what each told, so
files may be missing, end anywhere, or hold several launches of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from .clocks import Aligned, align
from .costs import Ledger, as_start
from .event import Event
from .history import (
    Generation,
    History,
    JobState,
    Mark,
    NodeEnd,
    NodeGeneration,
    NodeStory,
    Pace,
    Stay,
)
from .story import AgentLog, end_state

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
            for pace in log.paces.items:
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
