"""What one agent's events come to, folded as they come: the one fold, of which all else are views.

The fold is of one node, live in its agent or read back from a file, and bounded however long the
run is, but for one entry a generation, which who folds may take away. All times are those of the
events, by the node's own monotonic clock; nothing here compares nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Generic, TypeVar

import attrs

from ..workers.interface import NO_STEP, Heartbeat
from .event import Event, Mark
from .history import (
    PHASES,
    Cost,
    Generation,
    GenerationTrigger,
    JobState,
    Ledger,
    NodeGeneration,
    Pace,
    as_start,
    stall,
)

_ENDS = {
    "succeeded": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "stopped": JobState.STOPPED,
    "drained": JobState.DRAINED,
}


def end_state(word: str) -> JobState:
    """Of the `state` that `run.ended` tells; FAILED for a word that nobody knows."""
    return _ENDS.get(word, JobState.FAILED)


@attrs.frozen
class WorkerStatus:
    """name: such as `pid 123`. step, saved: its last. silent: seconds since it last gave a sign of
    life. per_second: its steps. None where it is not known."""

    rank: int
    local_rank: int
    name: str
    running: bool = True
    step: int | None = None
    per_second: float | None = None
    silent: float | None = None
    saved: int | None = None


@attrs.frozen
class NodeStatus:
    """since: when this state began, by the node's monotonic clock, as `at` of an event. step,
    per_second: of its slowest worker, by its events; the workers' own are newer. expelled: it
    has ended, and the job goes on without it."""

    run: str
    node: str
    host: str = ""
    pid: int = 0
    slots: int = 0
    state: JobState = JobState.RENDEZVOUS
    since: float = 0.0
    began: float = 0.0
    generation: int = 0
    node_rank: int | None = None
    nodes: int = 0
    world: int = 0
    restarts: int = 0
    max_restarts: int | None = None
    reason: str = ""
    saved: int | None = None
    snapshot: int | None = None
    step: int | None = None
    per_second: float | None = None
    expelled: bool = False
    workers: tuple[WorkerStatus, ...] = ()


def after(status: NodeStatus, event: Event) -> NodeStatus:
    """The status once this has happened; a kind that says nothing of it changes nothing."""
    now = attrs.evolve(status, generation=event.generation, **_named(event))
    if event.kind == "worker.began" and event.rank is not None:
        local, name = event.count("local_rank") or 0, event.text("name")
        return _with(now, WorkerStatus(event.rank, local, name))
    if event.kind == "worker.ended":
        gone = (w for w in now.workers if w.rank == event.rank)
        return _with(now, *(attrs.evolve(worker, running=False) for worker in gone))
    step = event.count("step")
    if event.kind in ("saved", "snapshot") and step is not None:
        kept: dict[str, Any] = {event.kind: step}
        return attrs.evolve(now, **kept)
    if event.kind in ("training.began", "steps"):
        return attrs.evolve(now, step=step, per_second=event.seconds("per_second"))
    state = _state(status.state, event)
    if event.kind == "generation.began":
        now = attrs.evolve(now, workers=(), step=None, per_second=None)
    reason = event.text(_REASONS.get(event.kind, "")) or now.reason
    if state is status.state:
        return attrs.evolve(now, reason=reason)
    return attrs.evolve(now, state=state, since=event.at, reason=reason)


_TAKEN: Mapping[str, tuple[str, ...]] = {
    "run.began": ("host", "pid", "slots"),
    "generation.began": ("node_rank", "nodes", "world", "restarts", "max_restarts"),
}


def _named(event: Event) -> dict[str, Any]:
    """What this event tells under the names that a status has for it."""
    found: dict[str, Any] = {}
    for key in _TAKEN.get(event.kind, ()):
        value = event.text(key) if key == "host" else event.count(key)
        if value is not None:
            found[key] = value
    if event.kind == "run.ended":
        found["expelled"] = event.says("expelled")
    return found


_REASONS: Mapping[str, str] = {
    "rendezvous.began": "why",
    "generation.began": "cause",
    "failure": "reason",
    "drain.asked": "why",
    "run.ended": "reason",
}


def _state(state: JobState, event: Event) -> JobState:
    if event.kind == "run.ended":
        return end_state(event.text("state"))
    if event.kind == "generation.began":
        return JobState.RUNNING
    if event.kind == "drain.asked":
        return JobState.DRAINING
    if event.kind == "failure":
        return JobState.RESTARTING
    if event.kind == "stopping" and state is JobState.RUNNING:
        # Whom nobody gave notice must start again for a failure or a loss elsewhere.
        return JobState.RESIZING if event.text("why") else JobState.RESTARTING
    if event.kind == "rendezvous.began" and state is JobState.RUNNING:
        return JobState.RENDEZVOUS
    return state


def _with(status: NodeStatus, *workers: WorkerStatus) -> NodeStatus:
    changed = {worker.rank for worker in workers}
    kept = (worker for worker in status.workers if worker.rank not in changed)
    return attrs.evolve(
        status, workers=tuple(sorted((*kept, *workers), key=lambda worker: worker.rank))
    )


def with_heartbeats(
    status: NodeStatus, heartbeats: Mapping[int, Heartbeat], now: float
) -> NodeStatus:
    """The same with its workers' heartbeats, by local rank; now: by this machine's clock."""
    found, kept = [], []
    for worker in status.workers:
        heartbeat = heartbeats.get(worker.local_rank)
        if heartbeat is not None and heartbeat.last_snapshot_step != NO_STEP:
            kept.append(heartbeat.last_snapshot_step)
        if heartbeat is None or not heartbeat.is_attached:
            found.append(worker)
            continue
        durations = sorted(heartbeat.step_durations)
        middle = durations[len(durations) // 2] if durations else 0.0
        per_second = 1 / middle if middle > 0 else None
        if per_second is not None and stall(now - heartbeat.last_step_at, 0, middle):
            per_second = 0.0
        worker = attrs.evolve(
            worker,
            step=None if heartbeat.step == NO_STEP else heartbeat.step,
            per_second=per_second,
            silent=max(0.0, now - heartbeat.last_activity_at)
            if heartbeat.last_activity_at
            else None,
            saved=None if heartbeat.last_saved_step == NO_STEP else heartbeat.last_saved_step,
        )
        found.append(worker)
    # Of a state in parts each worker keeps its own, and it is whole once the last of them has.
    snapshot = min(kept, default=status.snapshot)
    return attrs.evolve(status, workers=tuple(found), snapshot=snapshot)


Item = TypeVar("Item")

PACES = 2_000
MARKS = 2_000
FEWER: Mapping[str, int] = {"saved": 500, "snapshot": 500, "worker.ended": 250}
"""So many are kept of each agent: evenly spread ones where there were more. MARKS is for each kind
but those of FEWER; `worker.ended` has so many for each worker of the node, since all of them may
end each time in the same order."""
WORKERS = 64
"""That have so many each; if there are more, they share."""

DEAREST = 4
"""Generations that are remembered with their causes, of all that were live."""
_IN_STATE = (
    *("run.began", "rendezvous.began", "generation.began", "failure"),
    *("stopping", "drain.asked", "run.ended"),
)
_IN_NO_GENERATION = ("run.began", "generation.began", "lost")


def begun(event: Event, sought: float | None) -> NodeGeneration:
    """What `generation.began` says."""
    return NodeGeneration(
        node=event.node,
        number=event.generation,
        began=event.at,
        wall=event.wall,
        nodes=event.count("nodes") or 1,
        world=event.count("world") or 1,
        restarts=event.count("restarts") or 0,
        max_restarts=event.count("max_restarts"),
        node_rank=event.count("node_rank") or 0,
        ranks=event.pair("ranks") or (0, 0),
        cause=event.text("cause"),
        why=next((why for why in GenerationTrigger if why.value == event.text("why")), None),
        sought=None if sought is None else min(sought, event.at),
        imports=event.seconds("imports") or 0.0,
    )


def amended(generation: NodeGeneration, event: Event) -> NodeGeneration:
    """The same once this has happened in it; a kind that says nothing of it changes nothing."""
    at = event.at
    if event.kind in ("saved", "snapshot"):
        total = getattr(generation, event.kind) + (event.count("count") or 0)
        return attrs.evolve(generation, **{event.kind: total})
    silent = event.seconds("silent")
    if event.kind in ("training.began", "steps"):
        return _worked(generation, event, at, silent or 0.0)
    if event.kind == "restored":
        took, after = (event.seconds(name) for name in ("seconds", "after"))
        if took is not None and after is not None:
            at = min(at, generation.began + after + took)
        step = event.count("step")
        return attrs.evolve(generation, restored=at, restore_seconds=took, restored_step=step)
    if event.kind in ("failure", "stopping", "rendezvous.began") and silent is not None:
        generation = attrs.evolve(generation, silent=max(silent, generation.silent or 0.0))
    if event.kind == "failure":
        return attrs.evolve(_troubled(generation, at), failed=True)
    if event.kind == "stopping":
        asked = generation.asked or bool(event.text("why"))
        return attrs.evolve(_troubled(generation, at), asked=asked)
    if event.kind == "drain.asked":
        return attrs.evolve(_troubled(generation, at), asked=True)
    if event.kind == "worker.ended":
        generation = attrs.evolve(generation, left=at)
        return generation if event.as_it_should else _troubled(generation, at)
    if event.kind == "stopped":
        return attrs.evolve(generation, over=generation.over or at, gone=at)
    if event.kind == "rendezvous.began":
        asked = generation.asked or event.says("planned")
        return _ended(attrs.evolve(_troubled(generation, at), asked=asked), at)
    if event.kind == "run.ended":
        return _ended(generation, at if generation.left is None else generation.left)
    return generation


def _troubled(generation: NodeGeneration, at: float) -> NodeGeneration:
    return generation if generation.trouble is not None else attrs.evolve(generation, trouble=at)


def _ended(generation: NodeGeneration, at: float) -> NodeGeneration:
    gone = at if generation.gone is None else generation.gone
    return attrs.evolve(generation, over=generation.over or at, gone=gone)


def _worked(generation: NodeGeneration, event: Event, at: float, silent: float) -> NodeGeneration:
    """A step was made: the first of the generation, or the last before now."""
    step = event.count("step")
    if step is None:
        return generation
    if event.kind == "training.began":
        took = event.seconds("seconds")
        done = at if took is None else min(at, generation.began + took)
        generation = attrs.evolve(generation, trained=done, first_step=step)
    else:
        # Who was silent for long before the look had made its step by then.
        done = max(generation.began, at - silent)
    if generation.trained is None:
        generation = attrs.evolve(generation, trained=done, first_step=_first(generation, step))
    done = max(done, generation.trained or done)
    if generation.last_step is None or generation.last_at is None:
        return attrs.evolve(generation, last_step=step, last_at=done)
    steps = step - generation.last_step
    if steps < 0:
        return generation
    idle = stall(done - generation.last_at, steps, generation.seconds_per_step) if steps else 0.0
    return attrs.evolve(generation, last_step=step, last_at=done, stalled=generation.stalled + idle)


def _first(generation: NodeGeneration, step: int) -> int:
    """Where the first step itself is not known, it follows the one that was restored."""
    return step if generation.restored_step is None else min(step, generation.restored_step + 1)


class Thinned(Generic[Item]):
    """A bounded choice of many things that come in order: every one up to `limit`; then each
    second one, then each fourth, and so on. The first and the last are always there."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._every = 1
        self._kept: list[Item] = []
        self._last: list[Item] = []
        self.seen = 0

    def add(self, item: Item) -> None:
        if self._limit <= 0:
            return
        if self.seen % self._every == 0:
            self._kept.append(item)
            self._last = []
        else:
            self._last = [item]
        self.seen += 1
        if len(self._kept) > self._limit:
            if not len(self._kept) % 2:
                self._last = self._kept[-1:]
            self._kept = self._kept[::2]
            self._every *= 2

    @property
    def items(self) -> tuple[Item, ...]:
        return (*self._kept, *self._last)

    @property
    def left_out(self) -> int:
        """How many came that are not kept."""
        return self.seen - len(self.items)


class AgentLog:
    """One agent's events; marks and paces have its own times still.

    keep: whether marks and paces are wanted, as for a report, and of the status only the node's
    own state; else all of the status is, and neither of these.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self.node = ""
        self.began: float | None = None
        self.seen = self.wall = 0.0
        self.launch = Event("run.began", "", "", 0, 0.0, 0.0)
        self.end: Event | None = None
        self.status = NodeStatus("", "")
        self.events_lost = 0
        self.lives: list[NodeGeneration] = []
        self.saved: tuple[float, int] | None = None
        self.snapshot: tuple[float, int] | None = None
        self.paces: Thinned[Pace] = Thinned(PACES if keep else 0)
        self.pace: Pace | None = None
        self.failures = 0
        self._keep = keep
        self._marks: dict[tuple[str, int], Thinned[Mark]] = {}
        self._clocks: Thinned[float] = Thinned(64)
        self._sought: float | None = None

    @property
    def clock(self) -> float:
        """Wall clock minus monotonic clock: the median of all events."""
        clocks = sorted(self._clocks.items)
        return clocks[len(clocks) // 2] if clocks else 0.0

    @property
    def marks(self) -> list[Mark]:
        kept = [mark for marks in self._marks.values() for mark in marks.items]
        return sorted(kept, key=lambda mark: mark.at)

    @property
    def left_out(self) -> int:
        """Marks and paces that there were too many of."""
        many: list[Thinned[Any]] = [self.paces, *self._marks.values()]
        return sum(kept.left_out for kept in many)

    def fold(self, event: Event) -> None:
        """Once this has happened, too. What has no time or no generation that can be is passed
        over."""
        if not event.possible:
            return
        self._meet(event)
        if not self._keep or event.kind in _IN_STATE:
            self.status = after(self.status, event)
        if event.kind == "run.began":
            self.launch = event
        elif event.kind == "generation.began" and event.generation:
            self._enter(event)
        elif event.kind == "run.ended":
            self.end = event
        elif event.kind == "lost":
            self.events_lost += event.count("events") or 0
        elif event.kind == "rendezvous.began":
            self._sought = event.at
        step = event.count("step")
        if event.kind in ("saved", "snapshot") and step is not None:
            setattr(self, event.kind, (event.at, step))
        if event.kind not in _IN_NO_GENERATION:
            self._amend(event)
        self._mark(event, step)

    def _meet(self, event: Event) -> None:
        if self.began is None:
            self.node, self.began, self.seen = event.node, event.at, event.at
            self.status = NodeStatus(event.run, event.node, since=event.at, began=event.at)
        self.began = min(self.began, event.at)
        self.seen, self.wall = max(self.seen, event.at), event.wall
        self._clocks.add(event.wall - event.at)

    def _enter(self, event: Event) -> None:
        if self.lives and self.lives[-1].over is None:
            # No event says how that one ended; it has, by now.
            last = self.lives[-1]
            ended = Event("rendezvous.began", event.run, event.node, last.number, 0.0, event.at)
            self.lives[-1] = amended(last, ended)
        self.lives.append(begun(event, self._sought))
        self._sought = None

    def _amend(self, event: Event) -> None:
        """The next one may have begun when a look at the workers says something of a generation."""
        for index in (-1, -2)[: len(self.lives)]:
            if self.lives[index].number == event.generation:
                self.lives[index] = amended(self.lives[index], event)
                return

    def _mark(self, event: Event, step: int | None) -> None:
        kind = event.kind
        if kind == "steps" and step is not None:
            rates = {name: event.seconds(name) for name in ("per_second", "samples_per_second")}
            loss = event.value("loss")
            self.pace = Pace(event.at, self.node, event.generation, step, loss=loss, **rates)
            self.paces.add(self.pace)
            return
        self.failures += kind == "failure"
        if self._keep and (mark := event.mark) is not None:
            place = event.count("local_rank") or 0 if kind == "worker.ended" else 0
            limit = FEWER.get(kind, MARKS)
            self._marks.setdefault((kind, place % WORKERS), Thinned(limit)).add(mark)


BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds of a recovery, at most."""


@attrs.frozen
class Durations:
    """How many there were, their sum in seconds, and how many of at most each of `BUCKETS`."""

    count: int = 0
    seconds: float = 0.0
    within: tuple[int, ...] = (0,) * len(BUCKETS)

    def plus(self, seconds: float) -> Durations:
        within = (n + (seconds <= most) for n, most in zip(self.within, BUCKETS, strict=True))
        return Durations(self.count + 1, self.seconds + seconds, tuple(within))


@attrs.frozen
class Sums:
    """What one node's events add up to, as far as they have come.

    seconds: from its first event to the last. trained: of these in steps that count; None where no
    step is known. first_step: seconds until the first one's end. counts: of generations.

    lost: phase by phase, of all generations, of a first one that made steps only what stalled; None
    where it is not known. launch: the rest of that first one. dearest: those after the first that
    cost most, in order of time; all of them, where they are few. restarts: after failures, those
    too that were earned back. failures: by kind. started, resumed: recoveries, from the first sign
    of what ended a generation until the next one's workers were started, and until they had all
    made a step.
    """

    seconds: float = 0.0
    trained: float | None = None
    first_step: float | None = None
    counts: Mapping[GenerationTrigger, int] = attrs.field(factory=dict)
    lost: Cost = attrs.field(factory=Cost)
    launch: Cost = attrs.field(factory=Cost)
    dearest: Sequence[Generation] = ()
    restarts: int = 0
    failures: Mapping[str, int] = attrs.field(factory=dict)
    started: Durations = attrs.field(factory=Durations)
    resumed: Durations = attrs.field(factory=Durations)
    saved: int | None = None
    snapshot: int | None = None

    @property
    def generations(self) -> int:
        return sum(self.counts.values())

    @property
    def cost(self) -> Cost:
        """All seconds without a step that counts, the launch's too."""
        return _sum(self.launch, self.lost)

    @property
    def goodput(self) -> float | None:
        """As `History.goodput`, of what this node knows."""
        if self.trained is None or self.seconds <= 0:
            return None
        return max(0.0, min(1.0, self.trained / self.seconds))


class Story:
    """One node's events as they come: its status, and what they add up to.

    Who folds never waits for who looks, from whatever thread: what these see is replaced as a
    whole.
    """

    def __init__(self) -> None:
        self._log = AgentLog(keep=False)
        self._failures: Mapping[str, int] = {}
        self._totals = _Totals()
        self._seen: tuple[_Totals, Sequence[NodeGeneration]] = (self._totals, ())

    @property
    def status(self) -> NodeStatus:
        """That of the node and its workers, as far as events have it."""
        return self._log.status

    @property
    def pace(self) -> Pace | None:
        """How far the workers were when an event last said so."""
        return self._log.pace

    def fold(self, event: Event) -> None:
        """Once this has happened, too."""
        log = self._log
        log.fold(event)
        if event.kind == "failure":
            kind = event.text("failure") or "ordinary"
            self._failures = {**self._failures, kind: self._failures.get(kind, 0) + 1}
        totals = attrs.evolve(self._totals, began=log.began or 0.0, seen=log.seen)
        # Events of the last two may still come.
        while len(log.lives) > 2:
            totals = totals.plus(log.lives.pop(0), log.lives[:1])
        self._totals = totals
        self._seen = (totals, tuple(log.lives))

    def sums(self) -> Sums:
        """All of it, at any time."""
        totals, lives = self._seen
        for index, one in enumerate(lives):
            totals = totals.plus(one, lives[index + 1 : index + 2])
        status = self.status
        return attrs.evolve(
            totals.sums(), failures=self._failures, saved=status.saved, snapshot=status.snapshot
        )


@attrs.frozen
class _Lost:
    """What some generations cost, and the dearest of them."""

    cost: Cost = attrs.field(factory=Cost)
    dearest: Sequence[Generation] = ()

    def plus(self, made: Generation) -> _Lost:
        dearest = sorted((*self.dearest, made), key=lambda one: -one.cost.seconds)
        return _Lost(_sum(self.cost, made.cost), tuple(dearest[:DEAREST]))


@attrs.frozen
class _Totals:
    """Of the generations that have been added. began, seen: the node's first and last event.

    stepless, stepping: what is lost if workers never name a step, and if they do, which may first
    be known of the last generation. charged: the job's restarts, by the last of them.
    """

    began: float = 0.0
    seen: float = 0.0
    ledger: Ledger = attrs.field(factory=Ledger)
    counts: Mapping[GenerationTrigger, int] = attrs.field(factory=dict)
    first: Generation | None = None
    stepless: _Lost = _Lost()
    stepping: _Lost = _Lost()
    trained: float | None = None
    first_step: float | None = None
    restarts: int = 0
    charged: int = 0
    started: Durations = Durations()
    resumed: Durations = Durations()

    def plus(self, generation: NodeGeneration, following: Sequence[NodeGeneration]) -> _Totals:
        """With the next generation. following: the one after it, if there is one."""
        ledger = copy(self.ledger)
        is_first = self.first is None
        made = ledger.add(
            generation.number,
            [generation],
            launched=self.began if is_first else None,
            following=following,
            until=self.seen,
        )
        # Of one that goes on it is not known whether it will have been a start alone.
        whole = made if made.ended is None else as_start(made, self.seen)
        if not is_first:
            stepless, stepping = self.stepless.plus(made), self.stepping.plus(whole)
        else:
            trains = made.trained is not None
            stepless = _Lost()
            stepping = _Lost(Cost(stalled=made.cost.stalled) if trains else whole.cost)
        started, resumed = self._recoveries(made)
        return attrs.evolve(
            self._with_steps(made),
            ledger=ledger,
            counts={**self.counts, made.why: self.counts.get(made.why, 0) + 1},
            first=made if is_first else self.first,
            stepless=stepless,
            stepping=stepping,
            restarts=self.restarts + max(0, generation.restarts - self.charged),
            charged=generation.restarts,
            started=started,
            resumed=resumed,
        )

    def _with_steps(self, made: Generation) -> _Totals:
        if made.trained is None:
            return self
        ended = self.seen if made.ended is None else made.ended
        worked = max(0.0, ended - made.trained) - made.cost.wasted
        first = made.trained - self.began if self.first_step is None else self.first_step
        return attrs.evolve(self, trained=(self.trained or 0.0) + worked, first_step=first)

    def _recoveries(self, made: Generation) -> tuple[Durations, Durations]:
        if made.cost.stop is None or made.cost.rendezvous is None:
            return self.started, self.resumed
        seconds = made.cost.stop + made.cost.rendezvous
        started = self.started.plus(seconds)
        if made.trained is None:
            return started, self.resumed
        return started, self.resumed.plus(seconds + made.trained - made.began)

    def sums(self) -> Sums:
        stepless = self.trained is None
        lost = self.stepless if stepless else self.stepping
        first = self.first
        apart = first is not None and (stepless or first.trained is not None)
        return Sums(
            seconds=self.seen - self.began,
            trained=self.trained,
            first_step=self.first_step,
            counts=self.counts,
            lost=lost.cost,
            launch=attrs.evolve(first.cost, stalled=None) if first and apart else Cost(),
            dearest=tuple(sorted(lost.dearest, key=lambda generation: generation.began)),
            restarts=self.restarts,
            started=self.started,
            resumed=self.resumed,
        )


def _sum(one: Cost, other: Cost) -> Cost:
    def both(name: str) -> float | None:
        known = [value for cost in (one, other) if (value := getattr(cost, name)) is not None]
        return sum(known) if known else None

    times: dict[str, Any] = {name: both(name) for name in PHASES if name != "redone"}
    seconds = one.redone_seconds + other.redone_seconds
    return Cost(**times, redone=one.redone + other.redone, redone_seconds=seconds)
