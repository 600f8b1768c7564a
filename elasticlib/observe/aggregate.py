"""Aggregate: folds the events of one agent into its state, live or while reading a file. Pure.

This is the only fold over events: status, metrics, exit summary and report are views of it. Times
are those of the node's monotonic clock; nothing here compares nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import attrs

from ..workers.interface import NO_STEP, RESTART, Heartbeat
from .event import Event, TimelineEvent
from .history import GenerationTrigger, JobState, NodeGeneration, ProgressSample, stall_seconds

MAX_SAMPLES = 2_000  # progress samples of an agent, and losses, that are kept
MAX_EVENTS = 2_000  # timeline events of one kind that are kept
MAX_EVENTS_BY_KIND: Mapping[str, int] = {
    "checkpoint.saved": 500,
    "snapshot.taken": 500,
    "worker.exited": 250,  # for each worker, because all may exit each time in the same order
}
MAX_WORKERS_APART = 64  # more workers share their limits
SAVE_KINDS = ("checkpoint.saved", "snapshot.taken")

_STATE_KINDS = (
    *("run.started", "rendezvous.started", "generation.started", "failure"),
    *("stopping", "drain.requested", "run.finished"),
)
_KINDS_WITHOUT_GENERATION = ("run.started", "generation.started", "events.dropped")


def finished_state(name: str) -> JobState:
    """Return the state that a `run.finished` event reports; FAILED for an unknown name."""
    states = {
        "succeeded": JobState.SUCCEEDED,
        "stopped": JobState.STOPPED,
        "drained": JobState.DRAINED,
    }
    return states.get(name, JobState.FAILED)


# -- status of a node ------------------------------------------------------------------------------


@attrs.frozen
class WorkerStatus:
    """Status of a worker; None where a value is not known."""

    rank: int
    local_rank: int
    name: str  # such as pid 123
    running: bool = True
    step: int | None = None  # last completed step
    steps_per_second: float | None = None
    seconds_since_heartbeat: float | None = None
    checkpoint_step: int | None = None


@attrs.frozen
class NodeStatus:
    """Status of a node, by its events; the heartbeats of its workers are newer."""

    run: str
    node: str
    host: str = ""
    pid: int = 0
    slots: int = 0
    state: JobState = JobState.RENDEZVOUS
    state_since: float = 0.0
    started_at: float = 0.0
    generation: int = 0
    node_rank: int | None = None
    node_count: int = 0
    world_size: int = 0
    restarts: int = 0
    max_restarts: int | None = None
    reason: str = ""
    checkpoint_step: int | None = None
    snapshot_step: int | None = None
    step: int | None = None  # of the slowest worker
    steps_per_second: float | None = None
    expelled: bool = False  # the job continues without it
    workers: tuple[WorkerStatus, ...] = ()


def apply_event(status: NodeStatus, event: Event) -> NodeStatus:
    """Return the status after an event."""
    status = attrs.evolve(status, generation=event.generation, **_reported_fields(event))
    step = event.count("step")
    if event.kind == "worker.started" and event.rank is not None:
        local_rank, name = event.count("local_rank") or 0, event.text("name")
        return _update_workers(status, WorkerStatus(event.rank, local_rank, name))
    if event.kind == "worker.exited":
        exited = (worker for worker in status.workers if worker.rank == event.rank)
        return _update_workers(status, *(attrs.evolve(x, running=False) for x in exited))
    if event.kind == "checkpoint.saved" and step is not None:
        return attrs.evolve(status, checkpoint_step=step)
    if event.kind == "snapshot.taken" and step is not None:
        return attrs.evolve(status, snapshot_step=step)
    if event.kind in ("training.started", "progress"):
        speed = event.seconds("steps_per_second")
        return attrs.evolve(status, step=step, steps_per_second=speed)
    state = _next_state(status.state, event)
    if event.kind == "generation.started":
        status = attrs.evolve(status, workers=(), step=None, steps_per_second=None)
    reason = status.reason
    if event.kind in _STATE_KINDS and event.kind not in ("run.started", "stopping"):
        reason = event.text("reason") or reason
    if state is status.state:
        return attrs.evolve(status, reason=reason)
    return attrs.evolve(status, state=state, state_since=event.monotonic, reason=reason)


_REPORTED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "run.started": ("host", "pid", "slots"),
    "generation.started": (*("node_rank", "node_count", "world_size", "restarts", "max_restarts"),),
}


def _reported_fields(event: Event) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in _REPORTED_FIELDS.get(event.kind, ()):
        value = event.text(name) if name == "host" else event.count(name)
        if value is not None:
            fields[name] = value
    if event.kind == "run.finished":
        fields["expelled"] = event.is_true("expelled")
    return fields


def _next_state(state: JobState, event: Event) -> JobState:
    match event.kind:
        case "run.finished":
            return finished_state(event.text("state"))
        case "generation.started":
            return JobState.RUNNING
        case "drain.requested":
            return JobState.DRAINING
        case "failure":
            return JobState.RESTARTING
        case "stopping" if state is JobState.RUNNING:
            # Without a notice, the workers stop because of a failure or a loss elsewhere.
            is_restart = event.text("notice") in ("", RESTART)
            return JobState.RESTARTING if is_restart else JobState.RESIZING
        case "rendezvous.started" if state is JobState.RUNNING:
            return JobState.RENDEZVOUS
    return state


def _update_workers(status: NodeStatus, *workers: WorkerStatus) -> NodeStatus:
    changed = {worker.rank for worker in workers}
    others = (worker for worker in status.workers if worker.rank not in changed)
    ordered = sorted((*others, *workers), key=lambda worker: worker.rank)
    return attrs.evolve(status, workers=tuple(ordered))


def with_heartbeats(
    status: NodeStatus, heartbeats: Mapping[int, Heartbeat], now: float
) -> NodeStatus:
    """Return the status with the steps, rates and ages of heartbeats, which are by local rank."""
    workers, snapshot_steps = [], []
    for worker in status.workers:
        beat = heartbeats.get(worker.local_rank)
        if beat is not None and beat.last_snapshot_step != NO_STEP:
            snapshot_steps.append(beat.last_snapshot_step)
        if beat is None or not beat.is_attached:
            workers.append(worker)
            continue
        durations = sorted(beat.step_durations)
        median = durations[len(durations) // 2] if durations else 0.0
        speed = 1 / median if median > 0 else None
        if speed is not None and stall_seconds(now - beat.last_step_at, 0, median):
            speed = 0.0
        worker = attrs.evolve(
            worker,
            step=None if beat.step == NO_STEP else beat.step,
            steps_per_second=speed,
            seconds_since_heartbeat=max(0.0, now - beat.last_activity_at)
            if beat.last_activity_at
            else None,
            checkpoint_step=None if beat.last_saved_step == NO_STEP else beat.last_saved_step,
        )
        workers.append(worker)
    # A snapshot of a sharded state is complete once the last worker has its part.
    snapshot_step = min(snapshot_steps, default=status.snapshot_step)
    return attrs.evolve(status, workers=tuple(workers), snapshot_step=snapshot_step)


# -- one generation on one node --------------------------------------------------------------------


def new_generation(event: Event, rendezvous_started_at: float | None) -> NodeGeneration:
    """Return the generation that a `generation.started` event reports."""
    since = rendezvous_started_at
    return NodeGeneration(
        node=event.node,
        number=event.generation,
        started_at=event.monotonic,
        timestamp=event.timestamp,
        incarnation=event.text("incarnation"),
        node_count=event.count("node_count") or 1,
        world_size=event.count("world_size") or 1,
        restarts=event.count("restarts") or 0,
        node_rank=event.count("node_rank") or 0,
        ranks=event.pair("ranks") or (0, 0),
        reason=event.text("reason"),
        trigger=next(
            (why for why in GenerationTrigger if why.value == event.text("trigger")), None
        ),
        rendezvous_started_at=None if since is None else min(since, event.monotonic),
        import_seconds=event.seconds("import_seconds") or 0.0,
    )


def update_generation(generation: NodeGeneration, event: Event) -> NodeGeneration:
    """Return the generation after an event in it."""
    at, kind = event.monotonic, event.kind
    match kind:
        case "checkpoint.saved":
            total = generation.num_saves + (event.count("count") or 0)
            return attrs.evolve(generation, num_saves=total)
        case "snapshot.taken":
            total = generation.num_snapshots + (event.count("count") or 0)
            return attrs.evolve(generation, num_snapshots=total)
        case "training.started" | "progress":
            return _record_step(generation, event)
        case "state.restored":
            duration, delay = event.seconds("duration_seconds"), event.seconds("delay_seconds")
            if duration is not None and delay is not None:
                at = min(at, generation.started_at + delay + duration)
            step = event.count("step")
            return attrs.evolve(
                generation, restored_at=at, restore_seconds=duration, restored_step=step
            )
        case "failure":
            silence = event.seconds("seconds_since_heartbeat")
            if silence is not None:
                silence = max(silence, generation.undetected_seconds or 0.0)
                generation = attrs.evolve(generation, undetected_seconds=silence)
            return attrs.evolve(_mark_disrupted(generation, at), has_failed=True)
        case "stopping" | "drain.requested" | "rendezvous.started":
            notice = event.text("notice") if kind == "stopping" else kind == "drain.requested"
            is_planned = generation.is_planned or bool(notice) or event.is_true("is_planned")
            generation = attrs.evolve(_mark_disrupted(generation, at), is_planned=is_planned)
            return _mark_ended(generation, at) if kind == "rendezvous.started" else generation
        case "worker.exited":
            generation = attrs.evolve(generation, last_exit_at=at)
            return generation if event.is_expected_exit else _mark_disrupted(generation, at)
        case "stopped":
            stopped_at = generation.stopped_at or at
            return attrs.evolve(generation, stopped_at=stopped_at, all_exited_at=at)
        case "run.finished":
            return _mark_ended(
                generation, at if generation.last_exit_at is None else generation.last_exit_at
            )
    return generation


def _mark_disrupted(generation: NodeGeneration, at: float) -> NodeGeneration:
    """Record the time of the first sign that the generation ends; later ones are ignored."""
    if generation.disrupted_at is not None:
        return generation
    return attrs.evolve(generation, disrupted_at=at)


def _mark_ended(generation: NodeGeneration, at: float) -> NodeGeneration:
    exited_at = at if generation.all_exited_at is None else generation.all_exited_at
    return attrs.evolve(generation, stopped_at=generation.stopped_at or at, all_exited_at=exited_at)


def _record_step(generation: NodeGeneration, event: Event) -> NodeGeneration:
    """Record the first step of the generation, or the last step before this event."""
    step = event.count("step")
    if step is None:
        return generation
    at, started_at = event.monotonic, generation.started_at
    if event.kind == "training.started":
        duration = event.seconds("duration_seconds")
        done_at = at if duration is None else min(at, started_at + duration)
        generation = attrs.evolve(
            generation,
            first_step_at=done_at,
            first_step=step,
            slow_imports=event.seconds_by_name("slow_imports"),
        )
    else:
        silence = event.seconds("seconds_since_heartbeat") or 0.0
        done_at = max(started_at, at - silence)
    if generation.first_step_at is None:
        # The first step itself is not known; it follows the restored one.
        first = step
        if generation.restored_step is not None:
            first = min(step, generation.restored_step + 1)
        generation = attrs.evolve(generation, first_step_at=done_at, first_step=first)
    done_at = max(done_at, generation.first_step_at or done_at)
    if generation.last_step is None or generation.last_step_at is None:
        return attrs.evolve(generation, last_step=step, last_step_at=done_at)
    steps = step - generation.last_step
    if steps < 0:
        return generation
    stalled = generation.stalled_seconds
    if steps:
        elapsed = done_at - generation.last_step_at
        stalled += stall_seconds(elapsed, steps, generation.seconds_per_step)
    return attrs.evolve(generation, last_step=step, last_step_at=done_at, stalled_seconds=stalled)


# -- everything about one agent --------------------------------------------------------------------

Item = TypeVar("Item")


class Downsampled(Generic[Item]):
    """Keeps up to `limit` items, evenly spaced: every second one, every fourth one, and so on.

    The first and the last item are always kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._step = 1  # every so many items are kept
        self._kept: list[Item] = []
        self._last: list[Item] = []  # the last item, if it is not in `_kept`
        self.num_added = 0

    def add(self, item: Item) -> None:
        if self._limit <= 0:
            return
        if self.num_added % self._step == 0:
            self._kept.append(item)
            self._last = []
        else:
            self._last = [item]
        self.num_added += 1
        if len(self._kept) > self._limit:
            if not len(self._kept) % 2:
                self._last = self._kept[-1:]
            self._kept = self._kept[::2]
            self._step *= 2

    @property
    def items(self) -> tuple[Item, ...]:
        return (*self._kept, *self._last)

    @property
    def num_omitted(self) -> int:
        return self.num_added - len(self.items)


class NodeAggregate:
    """The state of one agent, by its events.

    One thread applies events. Any thread may read the attributes: a value is replaced as a whole.

    Args:
        keeps_samples: keep timeline events and progress samples, as a report needs them.
    """

    def __init__(self, *, keeps_samples: bool = False) -> None:
        self.node = ""
        self.started_at: float | None = None  # None before the first event
        self.last_event_at = 0.0
        self.start_event = Event("run.started", "", "", 0, 0.0, 0.0)
        self.end_event: Event | None = None
        self.status = NodeStatus("", "")
        self.generations: list[NodeGeneration] = []
        self.failures: Mapping[str, int] = {}  # by kind
        self.dropped_events = 0
        self.last_saves: Mapping[str, tuple[float, int]] = {}  # time and step, by kind of event
        self.last_progress: ProgressSample | None = None
        self.progress: Downsampled[ProgressSample] = Downsampled(MAX_SAMPLES * keeps_samples)
        self._keeps_samples = keeps_samples
        self._timeline: dict[tuple[str, int], Downsampled[TimelineEvent]] = {}
        self._clock_offsets: Downsampled[float] = Downsampled(64)
        self._rendezvous_started_at: float | None = None  # since the last generation started

    @property
    def clock_offset(self) -> float:
        """Wall clock minus monotonic clock: the median of all events."""
        offsets = sorted(self._clock_offsets.items)
        return offsets[len(offsets) // 2] if offsets else 0.0

    @property
    def timeline(self) -> list[TimelineEvent]:
        events = [event for kept in self._timeline.values() for event in kept.items]
        return sorted(events, key=lambda event: event.at)

    @property
    def omitted_events(self) -> int:
        """Number of timeline events and progress samples that were not kept."""
        kept: list[Downsampled[Any]] = [self.progress, *self._timeline.values()]
        return sum(samples.num_omitted for samples in kept)

    def apply(self, event: Event) -> None:
        """Fold an event; one with an implausible time or generation is ignored."""
        if not event.is_plausible:
            return
        self._track_clock(event)
        if not self._keeps_samples or event.kind in _STATE_KINDS:
            self.status = apply_event(self.status, event)
        match event.kind:
            case "run.started":
                self.start_event = event
            case "generation.started" if event.generation:
                self._start_generation(event)
            case "run.finished":
                self.end_event = event
            case "events.dropped":
                self.dropped_events += event.count("count") or 0
            case "rendezvous.started":
                self._rendezvous_started_at = event.monotonic
            case "failure":
                kind = event.text("failure_kind") or "ordinary"
                self.failures = {**self.failures, kind: self.failures.get(kind, 0) + 1}
        step = event.count("step")
        if event.kind in SAVE_KINDS and step is not None:
            self.last_saves = {**self.last_saves, event.kind: (event.monotonic, step)}
        if event.kind not in _KINDS_WITHOUT_GENERATION:
            self._update_generation(event)
        if event.kind == "progress" and step is not None:
            self._add_progress(event, step)
        elif self._keeps_samples:
            self._add_to_timeline(event)

    def _track_clock(self, event: Event) -> None:
        at = event.monotonic
        if self.started_at is None:
            self.node, self.started_at, self.last_event_at = event.node, at, at
            self.status = NodeStatus(event.run, event.node, state_since=at, started_at=at)
        self.started_at = min(self.started_at, at)
        self.last_event_at = max(self.last_event_at, at)
        self._clock_offsets.add(event.timestamp - at)

    def _start_generation(self, event: Event) -> None:
        if self.generations and self.generations[-1].stopped_at is None:
            # No event reports how the previous generation finished, but it must have.
            last = self.generations[-1]
            end = attrs.evolve(event, kind="rendezvous.started", data={})
            self.generations[-1] = update_generation(last, end)
        self.generations.append(new_generation(event, self._rendezvous_started_at))
        self._rendezvous_started_at = None

    def _update_generation(self, event: Event) -> None:
        # The last reading of a generation's workers may follow the start of the next generation.
        for index in (-1, -2)[: len(self.generations)]:
            if self.generations[index].number == event.generation:
                self.generations[index] = update_generation(self.generations[index], event)
                return

    def _add_progress(self, event: Event, step: int) -> None:
        self.last_progress = ProgressSample(
            event.monotonic,
            self.node,
            event.generation,
            step,
            steps_per_second=event.seconds("steps_per_second"),
            loss=event.value("loss"),
            samples_per_second=event.seconds("samples_per_second"),
        )
        self.progress.add(self.last_progress)

    def _add_to_timeline(self, event: Event) -> None:
        shown = event.on_timeline
        if shown is not None:
            is_exit = event.kind == "worker.exited"
            group = (event.count("local_rank") or 0) % MAX_WORKERS_APART if is_exit else 0
            limit = MAX_EVENTS_BY_KIND.get(event.kind, MAX_EVENTS)
            self._timeline.setdefault((event.kind, group), Downsampled(limit)).add(shown)
