"""A job as its events show it: which nodes ran when, what was lost and why, and what that cost.

All times here are job seconds: 0 is the first event of all, and nodes whose clocks differ are
laid on one axis by the generations that they began together.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..rendezvous.membership import GenerationTrigger as GenerationTrigger
from .event import Mark


class JobState(enum.Enum):
    """What a job, or a node's part in it, is doing; the words that status, metrics and reports use.

    WAITING: for nodes, below the minimum. RENDEZVOUS: the first generation is being settled, or
    one after a loss. RESTARTING: after a failure. RESIZING: nodes come or go on purpose.
    DRAINED: the end of a node that had time to save; STOPPED: of one that a signal ended.
    """

    WAITING = "WAITING"
    RENDEZVOUS = "RENDEZVOUS"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    RESIZING = "RESIZING"
    DRAINING = "DRAINING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    DRAINED = "DRAINED"
    STOPPED = "STOPPED"

    @property
    def over(self) -> bool:
        """Whether it is an end."""
        return self in (
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.DRAINED,
            JobState.STOPPED,
        )


BUSY = (
    *(JobState.DRAINING, JobState.RESTARTING, JobState.RESIZING),
    *(JobState.RENDEZVOUS, JobState.WAITING, JobState.RUNNING),
)
"""Of nodes that differ, the first of these says what the job is doing."""


@attrs.frozen
class Part:
    """A node's in its job: its last known state; whether its agent lives, as far as is known; and
    whether it was expelled, so that its end is not the job's."""

    state: JobState
    lives: bool
    expelled: bool = False


def job_state(members: Sequence[Part]) -> JobState | None:
    """What a job is doing, by what nodes wrote down; None where agents are gone that did not say
    how it ended. members: of its last generation; there is one at least."""
    for final in (JobState.SUCCEEDED, JobState.FAILED):
        # Each ends the job for all, but for the node that is expelled.
        if any(one.state is final and not one.expelled for one in members):
            return final
    living = {one.state for one in members if one.lives and not one.state.over}
    if living:
        return next(state for state in BUSY if state in living)
    states = {one.state for one in members}
    ends = (JobState.FAILED, JobState.DRAINED, JobState.STOPPED)
    return next(s for s in ends if s in states) if all(s.over for s in states) else None


PHASES: Mapping[str, str] = {
    "detect": "until an agent knew of it",
    "stop": "until no worker was left",
    "imports": "until the node had imported torch and what else it needs to start workers",
    "rendezvous": "until the next generation was settled",
    "start": "until the script asked for its state, made a step, or ended without one",
    "restore": "until the state was restored",
    "stalled": "later, without a step for much longer than steps take",
    "redone": "repeating steps that were done before",
}
"""Of the time that does not go into steps that count, in order."""


@attrs.frozen
class Cost:
    """Seconds from a fault to training that goes on, by phase, and what is lost after it; None
    where it is not known. Steps that are done after a notice are no part of it.

    PHASES says what each is until. detect is known where an agent can tell: the silence before a
    hang, and the time since the last step of those who go on without a lost node. redone: steps
    done again, and redone_seconds what they took.
    """

    detect: float | None = None
    stop: float | None = None
    imports: float | None = None
    rendezvous: float | None = None
    start: float | None = None
    restore: float | None = None
    stalled: float | None = None
    redone: int = 0
    redone_seconds: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, in order, of those that are known."""
        known = {name: getattr(self, name) for name in PHASES}
        known["redone"] = self.redone_seconds if self.redone else None
        return {name: max(0.0, value) for name, value in known.items() if value is not None}

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.phases.values())

    @property
    def wasted(self) -> float:
        """Of this, what was lost after the first step."""
        return (self.stalled or 0.0) + self.redone_seconds


@attrs.frozen
class NodeGeneration:
    """One generation as one node lived it, by the node's own times or on an axis of many nodes.

    began: its workers were started. sought: the rendezvous for it began, or None. why: it was
    sought, None where that is not known.

    trouble: the first sign that it would not last, None if it ended well. over: nobody works any
    more, for whatever reason. gone: no worker was left. left: the last worker's end. silent:
    seconds before `trouble` in which something was wrong and nobody knew. failed: workers of this
    node failed; asked: it ends on purpose. trained: the end of the first step, as exactly as
    it is known; last_at: that of the last. stalled: seconds between steps that were far more than
    these take. saved, snapshot: how many steps were kept so.
    """

    node: str
    number: int
    began: float
    wall: float
    nodes: int = 1
    world: int = 1
    restarts: int = 0
    max_restarts: int | None = None
    node_rank: int = 0
    ranks: tuple[int, int] = (0, 0)
    cause: str = ""
    why: GenerationTrigger | None = None
    sought: float | None = None
    imports: float = 0.0  # seconds of imports between `sought` and `began`
    trouble: float | None = None
    over: float | None = None
    gone: float | None = None
    silent: float | None = None
    failed: bool = False
    asked: bool = False
    left: float | None = None
    restored: float | None = None
    restore_seconds: float | None = None
    restored_step: int | None = None
    trained: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    last_at: float | None = None
    stalled: float = 0.0
    saved: int = 0
    snapshot: int = 0

    @property
    def seconds_per_step(self) -> float | None:
        """The pace of all of it but for stalls; None where too little is known."""
        if self.trained is None or self.last_at is None:
            return None
        if self.first_step is None or self.last_step is None:
            return None
        steps = self.last_step - self.first_step
        took = self.last_at - self.trained - self.stalled
        return took / steps if steps > 0 and took > 0 else None


@attrs.frozen
class Stay:
    """A node in one generation: its place there, from `began` to `ended` (None: it is there)."""

    node: str
    generation: int
    node_rank: int
    ranks: tuple[int, int]
    began: float
    ended: float | None = None


@attrs.frozen
class Generation:
    """cause: the sentence that stands in the log. trained: the first step's end, or None.
    first_step and last_step: the first and last that are known, or None. cost: of getting to it."""

    number: int
    why: GenerationTrigger
    cause: str
    began: float
    ended: float | None
    nodes: int
    world: int
    restarts: int
    trained: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    cost: Cost = attrs.field(factory=Cost)


@attrs.frozen
class Pace:
    """Where one node's workers were at one moment: an event of `steps`. The loss may
    be no number."""

    at: float
    node: str
    generation: int
    step: int
    per_second: float | None = None
    loss: float | None = None
    samples_per_second: float | None = None


@attrs.frozen
class NodeEnd:
    """How a node's part ended; state is an end of `JobState`."""

    at: float
    state: JobState
    reason: str
    exit_code: int


@attrs.frozen
class NodeStory:
    """What is known of a node. began, seen: its first and last event. lost: whether it went
    without a word, as others tell, or its machine does. folder: of its logs, empty if none is
    kept. failures: how many it reported, those too whose marks were left out."""

    node: str
    host: str
    began: float
    seen: float
    slots: int
    end: NodeEnd | None = None
    pid: int | None = None
    folder: str = ""
    settings: Mapping[str, str] = attrs.field(factory=dict)
    versions: Mapping[str, str] = attrs.field(factory=dict)
    events_lost: int = 0
    lost: bool = False
    failures: int = 0


@attrs.frozen
class History:
    """All that the events of a run tell, in order of time.

    wall: seconds since 1970 at 0. until: the last event of all. state: of the job: its end, or
    what it was doing last; None where its agents ended without a word. unread: lines of the files
    that could not be read; left_out: marks and paces that are not here, as there were so many that
    evenly spread ones stand for them. kept: how many checkpoints were `saved` and how many times a
    `snapshot` was taken; the marks are a sample of them.
    """

    run: str
    wall: float
    until: float
    state: JobState | None
    nodes: tuple[NodeStory, ...] = ()
    stays: tuple[Stay, ...] = ()
    generations: tuple[Generation, ...] = ()
    marks: tuple[Mark, ...] = ()
    paces: tuple[Pace, ...] = ()
    restarts: int = 0
    max_restarts: int | None = None
    reason: str = ""
    cause: Mapping[str, Any] | None = None
    saved: int | None = None
    snapshot: int | None = None
    unread: int = 0
    left_out: int = 0
    kept: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state is None or self.state.over

    @property
    def failures(self) -> int:
        """How many there were, those too that were left out of the marks."""
        marks = sum(mark.kind == "failure" for mark in self.marks)
        return max(marks, sum(node.failures for node in self.nodes))

    @property
    def goodput(self) -> float | None:
        """The part of all time in which steps were made that count: neither waiting, nor stalled,
        nor done again. None where workers report no steps."""
        trained = 0.0
        for generation in self.generations:
            if generation.trained is not None:
                end = self.until if generation.ended is None else generation.ended
                trained += max(0.0, end - generation.trained) - generation.cost.wasted
        known = any(generation.trained is not None for generation in self.generations)
        return max(0.0, trained / self.until) if known and self.until > 0 else None

    @property
    def lost(self) -> float | None:
        """Seconds of all the other time; None where workers report no steps."""
        return None if self.goodput is None else self.until * max(0.0, 1.0 - self.goodput)


# -- what each generation cost ---------------------------------------------------------------------
#
# Why it was sought and what it cost to get to it, from the lives that nodes had in it and in the
# one before: times on one axis, phases that follow one another without gap or overlap.


@attrs.frozen
class _End:
    """Of a generation: when it went wrong, or made its last step as it was to end; when that was
    known; and when no worker was left. silent: whether it could go wrong before that was known."""

    fault: float
    known: float
    gone: float
    silent: bool


class Ledger:
    """Takes a job's generations in their order, and makes of each what a reader is to know."""

    def __init__(self) -> None:
        self._before: Sequence[NodeGeneration] = ()
        self._end: _End | None = None
        self._floor = 0.0
        self._newest: int | None = None
        self._pace: float | None = None

    def add(
        self,
        number: int,
        lives: Sequence[NodeGeneration],
        *,
        launched: float | None = None,
        following: Sequence[NodeGeneration] = (),
        until: float,
    ) -> Generation:
        """The generation that nodes had these lives in, one of them at least.

        launched: when the job was begun that this is the first generation of; None if it is not.
        following: the lives in the next one, none if it is the last. until: the last event of all.
        """
        if launched is not None:
            self._before, self._end = (), None
        # Of two that are in order no clock can say that they are not.
        began = max(self._floor, min(life.began for life in lives))
        end = _end_of(lives, began, following)
        trained = _latest(life.trained for life in lives)
        trained = None if trained is None else max(began, trained)
        steps = _steps(lives)
        pace = _middle(life.seconds_per_step for life in lives)
        ended = max(began, until) if end is None else end.fault
        cost = self._way_here(lives, began, trained, launched)
        redone = self._redone(steps)
        took = max(0, redone - 1) * (self._pace or pace or 0.0)
        worked = 0.0 if trained is None else max(0.0, ended - trained)
        took = min(took, worked)
        stalled = min(_stalled(lives, end, ended, pace or self._pace), worked - took)
        generation = Generation(
            number=number,
            why=why_of(self._before, lives),
            cause=next((life.cause for life in lives if life.cause), ""),
            began=began,
            ended=None if end is None else end.fault,
            nodes=max(life.nodes for life in lives),
            world=max(life.world for life in lives),
            restarts=max(life.restarts for life in lives),
            trained=None if trained is None else min(trained, ended),
            first_step=steps[0],
            last_step=steps[1],
            cost=attrs.evolve(cost, stalled=stalled or None, redone=redone, redone_seconds=took),
        )
        self._before, self._end = lives, end
        self._floor = began if end is None else end.fault
        self._newest = max((s for s in (self._newest, steps[1]) if s is not None), default=None)
        self._pace = pace or self._pace
        return generation

    def _way_here(
        self,
        lives: Sequence[NodeGeneration],
        began: float,
        trained: float | None,
        launched: float | None,
    ) -> Cost:
        restore = _latest(life.restore_seconds for life in lives)
        asked = _latest(
            life.restored - (life.restore_seconds or 0.0)
            for life in lives
            if life.restored is not None
        )
        start = None
        if trained is not None:
            restore = None if restore is None else min(restore, trained - began)
            start = trained - began - (restore or 0.0)
        elif asked is not None:
            start = max(0.0, asked - began)
        end = self._end
        if end is None:
            sought = launched
            if sought is None:
                sought = min((x.sought for x in lives if x.sought is not None), default=None)
            waited = 0.0 if sought is None else max(0.0, began - sought)
            imports = min(waited, max(life.imports for life in lives))
            return Cost(
                imports=imports or None,
                rendezvous=None if sought is None else waited - imports,
                start=start,
                restore=restore,
            )
        known, gone = min(end.known, began), min(end.gone, began)
        return Cost(
            detect=known - min(end.fault, known) if end.silent else None,
            stop=gone - known,
            rendezvous=began - gone,
            start=start,
            restore=restore,
        )

    def _redone(self, steps: tuple[int | None, int | None]) -> int:
        """How many of these were done before; a step n follows n - 1."""
        first, last = steps
        if first is None or last is None or self._newest is None:
            return 0
        return max(0, min(self._newest, last) - first + 1)


def as_start(made: Generation, until: float) -> Generation:
    """The same, of a job whose workers report steps: one that made none was a start in all."""
    if made.trained is not None:
        return made
    lasted = max(0.0, (until if made.ended is None else made.ended) - made.began)
    restore = None if made.cost.restore is None else min(made.cost.restore, lasted)
    cost = attrs.evolve(made.cost, start=lasted - (restore or 0.0), restore=restore)
    return attrs.evolve(made, cost=cost)


def why_of(before: Sequence[NodeGeneration], lives: Sequence[NodeGeneration]) -> GenerationTrigger:
    """Why it was sought, as the rendezvous said; where it did not, by what the nodes did in the one
    before."""
    said = next((life.why for life in lives if life.why is not None), None)
    if said is GenerationTrigger.START and before:
        return GenerationTrigger.NODE_LOSS  # begun anew, as what the store held is gone
    if said is not None:
        return said
    charged = max(x.restarts for x in lives) > max((x.restarts for x in before), default=0)
    if charged or any(life.failed for life in before):
        return GenerationTrigger.FAILURE
    if not before:
        return GenerationTrigger.START
    return (
        GenerationTrigger.RESIZE
        if any(life.asked for life in before)
        else GenerationTrigger.NODE_LOSS
    )


def _end_of(
    lives: Sequence[NodeGeneration], began: float, following: Sequence[NodeGeneration]
) -> _End | None:
    """None while it stands."""
    troubles = [life.trouble for life in lives if life.trouble is not None]
    overs = [life.over for life in lives if life.over is not None]
    next_began = min((life.began for life in following), default=None)
    if not troubles and next_began is None and len(overs) < len(lives):
        return None
    known = min(troubles) if troubles else max(overs, default=next_began or began)
    # Of nodes that were lost nothing is known, and nothing is awaited.
    gone = max((life.gone for life in lives if life.gone is not None), default=known)
    if next_began is not None:
        known, gone = min(known, next_began), min(gone, next_began)
    known = max(began, known)
    gone = max(known, gone)
    silent = _latest((*(life.silent for life in lives), _unnoticed(lives, known, following)))
    fault = max(began, known - (silent or 0.0))
    # Workers go on after a notice: what they did since then is lost only where it is repeated.
    worked = _latest(life.last_at for life in lives if life.asked)
    if worked is not None:
        fault = max(fault, min(worked, gone))
    return _End(fault=fault, known=max(known, fault), gone=gone, silent=silent is not None)


def _unnoticed(
    lives: Sequence[NodeGeneration], known: float, following: Sequence[NodeGeneration]
) -> float | None:
    """Seconds for which nobody knew of a loss: those without whom nothing went on made no step
    since. What the lost node wrote last is older, so that each survivor tells the same alone."""
    if not following or why_of(lives, following) is not GenerationTrigger.NODE_LOSS:
        return None
    went_on = {life.node for life in following}
    worked = _latest(life.last_at for life in lives if life.node in went_on)
    return None if worked is None or worked >= known else known - worked


STALL_SECONDS, STALL_STEPS = 30.0, 20
"""Without a step, beyond the usual time of those that came: more than both of these is a stall."""


def stall(seconds: float, steps: int, pace: float | None) -> float:
    """Of the seconds in which so many steps were made, those in which nothing moved. pace: seconds
    that a step takes; where that is not known, nothing is claimed."""
    if pace is None:
        return 0.0
    more = seconds - steps * pace
    return more if more > max(STALL_SECONDS, STALL_STEPS * pace) else 0.0


def _stalled(
    lives: Sequence[NodeGeneration], end: _End | None, ended: float, pace: float | None
) -> float:
    """The nodes of a job go in step, so what one of them worked all did. Behind its last step
    a generation that ended well may have had something else to do."""
    stalled = min((life.stalled for life in lives if life.last_at is not None), default=0.0)
    last = _latest(life.last_at for life in lives)
    troubled = end is None or any(life.trouble is not None for life in lives)
    return stalled + (stall(ended - last, 0, pace) if last is not None and troubled else 0.0)


def _steps(lives: Iterable[NodeGeneration]) -> tuple[int | None, int | None]:
    firsts, lasts = [], []
    for life in lives:
        if life.first_step is not None and life.last_step is not None:
            firsts.append(life.first_step)
            lasts.append(max(life.first_step, life.last_step))
    return min(firsts, default=None), max(lasts, default=None)


def _latest(found: Iterable[float | None]) -> float | None:
    return max((value for value in found if value is not None), default=None)


def _middle(found: Iterable[float | None]) -> float | None:
    values = sorted(value for value in found if value is not None)
    return values[len(values) // 2] if values else None
