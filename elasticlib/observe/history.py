"""History of a job: values that its events add up to, and the cost of each recovery. Pure.

Times are job seconds: 0 is the first event of the run, and nodes whose clocks differ are placed on
one axis by the generations that they started together.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..rendezvous.membership import GenerationTrigger as GenerationTrigger
from .event import TimelineEvent


class JobState(enum.Enum):
    """State of a job, or of a node in its job, as status, metrics and reports show it."""

    WAITING = "WAITING"  # fewer nodes than the minimum
    RENDEZVOUS = "RENDEZVOUS"  # for the first generation, or for one after a loss
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"  # after a failure
    RESIZING = "RESIZING"  # nodes join or leave on purpose
    DRAINING = "DRAINING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    DRAINED = "DRAINED"  # a node that had time to save before it left
    STOPPED = "STOPPED"  # stopped by a signal or an operator

    @property
    def is_finished(self) -> bool:
        return self in FINISHED_STATES


FINISHED_STATES = (JobState.SUCCEEDED, JobState.FAILED, JobState.DRAINED, JobState.STOPPED)
ACTIVE_STATES = (
    *(JobState.DRAINING, JobState.RESTARTING, JobState.RESIZING),
    *(JobState.RENDEZVOUS, JobState.WAITING, JobState.RUNNING),
)
"""States in order of priority: the state of a job is the first one that a node is in."""


@attrs.frozen
class NodeParticipation:
    """The last known state of a node in its job."""

    state: JobState
    is_alive: bool  # as far as is known
    expelled: bool = False  # the job continues without this node


def job_state(members: Sequence[NodeParticipation]) -> JobState | None:
    """Return the state of a job from those of its nodes.

    Args:
        members: the nodes of the last generation; at least one.

    Returns:
        The state, or None if the agents are gone and did not report how the job finished.
    """
    for final in (JobState.SUCCEEDED, JobState.FAILED):
        # Each ends the job for all nodes, unless the node was expelled.
        if any(member.state is final and not member.expelled for member in members):
            return final
    active = {m.state for m in members if m.is_alive and not m.state.is_finished}
    if active:
        return next(state for state in ACTIVE_STATES if state in active)
    states = {member.state for member in members}
    if not all(state.is_finished for state in states):
        return None
    return next(
        (s for s in (JobState.FAILED, JobState.DRAINED, JobState.STOPPED) if s in states), None
    )


PHASES: Mapping[str, str] = {
    "detection": "from the fault until an agent noticed it",
    "shutdown": "until all workers had exited",
    "imports": "until the node had imported torch and other modules that workers need",
    "rendezvous": "until the next generation was settled",
    "startup": "until the script restored its state, completed a step, or finished without one",
    "restore": "until the state was restored",
    "stalled": "later pauses between steps, far longer than the usual step time",
    "repeated": "repeating steps that had been completed before",
}
"""Phases of the time that is not spent on productive steps, in order, and what each is."""


@attrs.frozen
class RecoveryCost:
    """Seconds from a fault until training continues, by phase, and what is lost later.

    A phase is None if it is not known. `detection` is known for a hang, and where the survivors
    of a lost node completed no step until they noticed the loss.
    """

    detection: float | None = None
    shutdown: float | None = None
    imports: float | None = None
    rendezvous: float | None = None
    startup: float | None = None
    restore: float | None = None
    stalled: float | None = None
    repeated: float | None = None
    repeated_steps: int = 0

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each known phase, in order."""
        known = {name: getattr(self, name) for name in PHASES}
        if not self.repeated_steps:
            known["repeated"] = None
        return {name: max(0.0, value) for name, value in known.items() if value is not None}

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def lost_after_first_step(self) -> float:
        return (self.stalled or 0.0) + (self.repeated or 0.0)

    def plus(self, other: RecoveryCost) -> RecoveryCost:
        """Return the sum of two costs; a phase is known if it is known in one of them."""

        def total(name: str) -> float | None:
            values = [getattr(cost, name) for cost in (self, other)]
            known = [value for value in values if value is not None]
            return sum(known) if known else None

        sums: dict[str, Any] = {name: total(name) for name in PHASES}
        return RecoveryCost(**sums, repeated_steps=self.repeated_steps + other.repeated_steps)


@attrs.frozen
class NodeGeneration:
    """A generation as one node saw it; times are those of the node, or job seconds."""

    node: str
    number: int
    started_at: float  # the workers were started
    timestamp: float  # the same, in seconds since 1970
    incarnation: str = ""
    node_count: int = 1
    world_size: int = 1
    restarts: int = 0
    node_rank: int = 0
    ranks: tuple[int, int] = (0, 0)
    reason: str = ""
    trigger: GenerationTrigger | None = None  # None if it is not known
    rendezvous_started_at: float | None = None
    import_seconds: float = 0.0  # between `rendezvous_started_at` and `started_at`
    disrupted_at: float | None = None  # first sign of its end, unless it finished normally
    stopped_at: float | None = None  # no worker works any more
    all_exited_at: float | None = None
    last_exit_at: float | None = None
    undetected_seconds: float | None = (
        None  # before `disrupted_at`, during which a fault was not noticed
    )
    has_failed: bool = False  # workers of this node failed
    is_planned: bool = False  # it ends on purpose
    restored_at: float | None = None
    restore_seconds: float | None = None
    restored_step: int | None = None
    first_step_at: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    last_step_at: float | None = None
    slow_imports: Mapping[str, float] = attrs.field(factory=dict)  # seconds by module
    stalled_seconds: float = 0.0  # between steps, far more than these usually take
    num_saves: int = 0
    num_snapshots: int = 0

    @property
    def seconds_per_step(self) -> float | None:
        """Average time of a step, without stalls; None if too little is known."""
        if self.first_step_at is None or self.last_step_at is None:
            return None
        if self.first_step is None or self.last_step is None:
            return None
        steps = self.last_step - self.first_step
        seconds = self.last_step_at - self.first_step_at - self.stalled_seconds
        return seconds / steps if steps > 0 and seconds > 0 else None


@attrs.frozen
class NodeMembership:
    """The time that a node spent in one generation."""

    node: str
    generation: int
    node_rank: int
    ranks: tuple[int, int]
    started_at: float
    finished_at: float | None = None  # None while it lasts


@attrs.frozen
class Generation:
    """A generation of a job."""

    number: int
    trigger: GenerationTrigger
    reason: str  # as the log has it
    started_at: float
    finished_at: float | None
    node_count: int
    world_size: int
    restarts: int
    first_step_at: float | None = None  # end of the first step
    first_step: int | None = None
    last_step: int | None = None
    cost: RecoveryCost = attrs.field(factory=RecoveryCost)  # of the way to this generation


@attrs.frozen
class ProgressSample:
    """Progress of one node's workers at one time: a `progress` event, or one of its losses."""

    at: float
    node: str
    generation: int
    step: int
    steps_per_second: float | None = None
    loss: float | None = None  # may be infinite or NaN
    samples_per_second: float | None = None


@attrs.frozen
class NodeExit:
    """The end of a node's part in its job."""

    at: float
    state: JobState  # one of FINISHED_STATES
    reason: str
    exit_code: int


@attrs.frozen
class NodeHistory:
    """History of a node."""

    node: str
    host: str
    started_at: float  # first event
    last_event_at: float
    slots: int
    exit: NodeExit | None = None
    pid: int | None = None
    log_dir: str = ""  # empty if logs are not kept
    command: str = ""
    settings: Mapping[str, str] = attrs.field(factory=dict)
    versions: Mapping[str, str] = attrs.field(factory=dict)
    dropped_events: int = 0
    is_lost: bool = False  # it left without reporting an end
    num_failures: int = 0  # including those omitted from the timeline


@attrs.frozen
class History:
    """History of a run, in order of time."""

    run: str  #: id of the job
    start_timestamp: float  #: seconds since 1970 at job second 0
    duration_seconds: float  #: until the last event
    state: JobState | None  #: None if its agents are gone and did not report its end
    nodes: tuple[NodeHistory, ...] = ()
    memberships: tuple[NodeMembership, ...] = ()  #: of each node in each generation
    generations: tuple[Generation, ...] = ()
    timeline: tuple[TimelineEvent, ...] = ()  #: events that the report shows
    progress: tuple[ProgressSample, ...] = ()  #: steps and rates over time
    restarts: int = 0  #: restarts after failures
    max_restarts: int | None = None  #: restart budget, None if it is not known
    reason: str = ""  #: reason of the last state
    root_cause: Mapping[str, Any] | None = None  #: fields of the `RootCause` of a failed run
    checkpoint_step: int | None = None  #: step of the last checkpoint
    snapshot_step: int | None = None  #: step of the last complete snapshot
    invalid_lines: int = 0  #: lines of the files that could not be read
    omitted_events: int = 0  #: not in `timeline` and `progress`, which hold evenly spaced ones
    save_counts: Mapping[str, int] = attrs.field(factory=dict)  #: checkpoints, snapshots by kind

    @property
    def is_finished(self) -> bool:
        """True if the run has ended, or if its state is unknown."""
        return self.state is None or self.state.is_finished

    @property
    def num_failures(self) -> int:
        """Number of failures, including those omitted from the timeline."""
        shown = sum(event.kind == "failure" for event in self.timeline)
        return max(shown, sum(node.num_failures for node in self.nodes))

    @property
    def productive_seconds(self) -> float | None:
        """Time spent on steps that were kept; None if workers report no steps."""
        trained = [made for made in self.generations if made.first_step_at is not None]
        if not trained:
            return None
        total = 0.0
        for made in trained:
            end = self.duration_seconds if made.finished_at is None else made.finished_at
            total += max(0.0, end - (made.first_step_at or 0.0)) - made.cost.lost_after_first_step
        return total

    @property
    def goodput(self) -> float | None:
        """Share of all time spent on steps that were kept; None if workers report no steps."""
        productive = self.productive_seconds
        if productive is None or self.duration_seconds <= 0:
            return None
        return max(0.0, min(1.0, productive / self.duration_seconds))

    @property
    def lost_seconds(self) -> float | None:
        """Time that was not spent on steps that were kept; None if workers report no steps."""
        return None if self.goodput is None else self.duration_seconds * (1.0 - self.goodput)


# -- cost of recoveries ----------------------------------------------------------------------------


@attrs.frozen
class _GenerationEnd:
    """The end of a generation, on the axis of the job."""

    fault_at: float  # first fault, or the last step if it was stopped on purpose
    detected_at: float
    all_exited_at: float
    may_be_undetected: bool  # the fault may have happened before an agent noticed it


class RecoveryCostCalculator:
    """Combines what nodes saw of each generation, in order, and calculates the recovery costs."""

    def __init__(self) -> None:
        self._before: Sequence[NodeGeneration] = ()  # the previous generation
        self._end: _GenerationEnd | None = None  # its end
        self._min_start = 0.0  # the next generation starts no earlier
        self._newest_step: int | None = None
        self._seconds_per_step: float | None = None  # last known

    def add(
        self,
        number: int,
        parts: Sequence[NodeGeneration],
        *,
        job_started_at: float | None = None,
        next_parts: Sequence[NodeGeneration] = (),
        last_event_at: float,
    ) -> Generation:
        """Return the next generation of the job, with its cost.

        Args:
            number: number of the generation.
            parts: what each node saw of the generation; at least one.
            job_started_at: for the first generation of an incarnation, when the job started.
            next_parts: what nodes saw of the generation after it.
            last_event_at: time of the last event of the run.
        """
        if job_started_at is not None:
            self._before, self._end = (), None
        # The order of generations is known, even if clocks disagree.
        started_at = max(self._min_start, min(part.started_at for part in parts))
        end = _generation_end(parts, started_at, next_parts)
        first_step_at = _latest(part.first_step_at for part in parts)
        first_step_at = None if first_step_at is None else max(started_at, first_step_at)
        first_step, last_step = _first_and_last_step(parts)
        pace = _median(part.seconds_per_step for part in parts)
        finished_at = max(started_at, last_event_at) if end is None else end.fault_at
        cost = self._recovery_cost(parts, started_at, first_step_at, job_started_at)
        num_repeated = self._repeated_steps(first_step, last_step)
        worked = 0.0 if first_step_at is None else max(0.0, finished_at - first_step_at)
        repeated = min(max(0, num_repeated - 1) * (self._seconds_per_step or pace or 0.0), worked)
        stalled = _stalled_seconds(parts, end, finished_at, pace or self._seconds_per_step)
        cost = attrs.evolve(
            cost,
            stalled=min(stalled, worked - repeated) or None,
            repeated=repeated,
            repeated_steps=num_repeated,
        )
        generation = Generation(
            number=number,
            trigger=find_trigger(self._before, parts),
            reason=next((part.reason for part in parts if part.reason), ""),
            started_at=started_at,
            finished_at=None if end is None else end.fault_at,
            node_count=max(part.node_count for part in parts),
            world_size=max(part.world_size for part in parts),
            restarts=max(part.restarts for part in parts),
            first_step_at=None if first_step_at is None else min(first_step_at, finished_at),
            first_step=first_step,
            last_step=last_step,
            cost=cost,
        )
        self._before, self._end = parts, end
        self._min_start = started_at if end is None else end.fault_at
        known = (step for step in (self._newest_step, last_step) if step is not None)
        self._newest_step = max(known, default=None)
        self._seconds_per_step = pace or self._seconds_per_step
        return generation

    def _recovery_cost(
        self,
        parts: Sequence[NodeGeneration],
        started_at: float,
        first_step_at: float | None,
        job_started_at: float | None,
    ) -> RecoveryCost:
        restore = _latest(part.restore_seconds for part in parts)
        restore_started_at = _latest(
            part.restored_at - (part.restore_seconds or 0.0)
            for part in parts
            if part.restored_at is not None
        )
        startup = None
        if first_step_at is not None:
            restore = None if restore is None else min(restore, first_step_at - started_at)
            startup = first_step_at - started_at - (restore or 0.0)
        elif restore_started_at is not None:
            startup = max(0.0, restore_started_at - started_at)
        end = self._end
        if end is None:
            since = job_started_at
            if since is None:
                since = _earliest(part.rendezvous_started_at for part in parts)
            waited = 0.0 if since is None else max(0.0, started_at - since)
            imports = min(waited, max(part.import_seconds for part in parts))
            return RecoveryCost(
                imports=imports or None,
                rendezvous=None if since is None else waited - imports,
                startup=startup,
                restore=restore,
            )
        detected_at = min(end.detected_at, started_at)
        exited_at = min(end.all_exited_at, started_at)
        detection = detected_at - min(end.fault_at, detected_at)
        return RecoveryCost(
            detection=detection if end.may_be_undetected else None,
            shutdown=exited_at - detected_at,
            rendezvous=started_at - exited_at,
            startup=startup,
            restore=restore,
        )

    def _repeated_steps(self, first: int | None, last: int | None) -> int:
        if first is None or last is None or self._newest_step is None:
            return 0
        return max(0, min(self._newest_step, last) - first + 1)


def count_as_startup(made: Generation, last_event_at: float) -> Generation:
    """Return the generation; if it completed no step, all its time except a restore is startup.

    Use it only for a run whose workers report steps.
    """
    if made.first_step_at is not None:
        return made
    end = last_event_at if made.finished_at is None else made.finished_at
    duration = max(0.0, end - made.started_at)
    restore = None if made.cost.restore is None else min(made.cost.restore, duration)
    cost = attrs.evolve(made.cost, startup=duration - (restore or 0.0), restore=restore)
    return attrs.evolve(made, cost=cost)


def find_trigger(
    before: Sequence[NodeGeneration], parts: Sequence[NodeGeneration]
) -> GenerationTrigger:
    """Return the trigger of a generation: as reported, or else by what happened before it."""
    reported = next((part.trigger for part in parts if part.trigger is not None), None)
    if reported is GenerationTrigger.START and before:
        return (
            GenerationTrigger.NODE_LOSS
        )  # the job started again because the content of the store was lost
    if reported is not None:
        return reported
    restarts_before = max((part.restarts for part in before), default=0)
    has_restarted = max(part.restarts for part in parts) > restarts_before
    if has_restarted or any(part.has_failed for part in before):
        return GenerationTrigger.FAILURE
    if not before:
        return GenerationTrigger.START
    return (
        GenerationTrigger.RESIZE
        if any(part.is_planned for part in before)
        else GenerationTrigger.NODE_LOSS
    )


def _generation_end(
    parts: Sequence[NodeGeneration], started_at: float, next_parts: Sequence[NodeGeneration]
) -> _GenerationEnd | None:
    """Return the end of a generation, or None while it is active."""
    disrupted = [part.disrupted_at for part in parts if part.disrupted_at is not None]
    stopped = [part.stopped_at for part in parts if part.stopped_at is not None]
    next_start = _earliest(part.started_at for part in next_parts)
    if not disrupted and next_start is None and len(stopped) < len(parts):
        return None
    detected_at = min(disrupted) if disrupted else max(stopped, default=next_start or started_at)
    # Lost nodes report no exit.
    exited_at = _latest(part.all_exited_at for part in parts)
    exited_at = detected_at if exited_at is None else exited_at
    if next_start is not None:
        detected_at, exited_at = min(detected_at, next_start), min(exited_at, next_start)
    detected_at = max(started_at, detected_at)
    exited_at = max(detected_at, exited_at)
    reported = (part.undetected_seconds for part in parts)
    undetected = _latest((*reported, _undetected_loss(parts, detected_at, next_parts)))
    fault_at = max(started_at, detected_at - (undetected or 0.0))
    # Workers continue after a notice; what they do until they stop is lost only if repeated.
    worked_until = _latest(part.last_step_at for part in parts if part.is_planned)
    if worked_until is not None:
        fault_at = max(fault_at, min(worked_until, exited_at))
    return _GenerationEnd(
        fault_at, max(detected_at, fault_at), exited_at, may_be_undetected=undetected is not None
    )


def _undetected_loss(
    parts: Sequence[NodeGeneration], detected_at: float, next_parts: Sequence[NodeGeneration]
) -> float | None:
    """Return the time between the survivors' last step and the detection of a lost node.

    None if no node was lost, or if the survivors reported no step or a step after the detection.
    """
    if not next_parts or find_trigger(parts, next_parts) is not GenerationTrigger.NODE_LOSS:
        return None
    survivors = {part.node for part in next_parts}
    worked_until = _latest(part.last_step_at for part in parts if part.node in survivors)
    if worked_until is None or worked_until >= detected_at:
        return None
    return detected_at - worked_until


MIN_STALL_S, MIN_STALL_STEPS = 30.0, 20  # a pause must exceed both to count as a stall


def stall_seconds(seconds: float, steps: int, seconds_per_step: float | None) -> float:
    """Return by how much `seconds` exceeds the usual time of `steps` steps; 0 if it is no stall."""
    if seconds_per_step is None:
        return 0.0
    excess = seconds - steps * seconds_per_step
    return excess if excess > max(MIN_STALL_S, MIN_STALL_STEPS * seconds_per_step) else 0.0


def _stalled_seconds(
    parts: Sequence[NodeGeneration],
    end: _GenerationEnd | None,
    finished_at: float,
    seconds_per_step: float | None,
) -> float:
    """Return the stalled time of a generation, between its steps and after the last one."""
    # Nodes of a job advance together, so a step on one of them is a step on all.
    stalled = min(
        (part.stalled_seconds for part in parts if part.last_step_at is not None), default=0.0
    )
    last_step_at = _latest(part.last_step_at for part in parts)
    # A generation without a fault may have had other work after its last step.
    was_disrupted = end is None or any(part.disrupted_at is not None for part in parts)
    if last_step_at is not None and was_disrupted:
        stalled += stall_seconds(finished_at - last_step_at, 0, seconds_per_step)
    return stalled


def _first_and_last_step(parts: Iterable[NodeGeneration]) -> tuple[int | None, int | None]:
    firsts, lasts = [], []
    for part in parts:
        if part.first_step is not None and part.last_step is not None:
            firsts.append(part.first_step)
            lasts.append(max(part.first_step, part.last_step))
    return min(firsts, default=None), max(lasts, default=None)


def _latest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _earliest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _median(values: Iterable[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None
