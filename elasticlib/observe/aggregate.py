"""Aggregate: folds the events of one agent into its state, live or while reading a file. Pure.

This is the only fold over events: status, metrics, exit summary and report are views of it. Times
are those of the node's monotonic clock; nothing here compares nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import attrs

from ..workers.interface import NO_STEP, RESTART, Heartbeat
from . import event_kinds as kinds
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
SAVE_KINDS = (kinds.CheckpointSaved.kind_name, kinds.SnapshotTaken.kind_name)
# They change only the workers and steps of a status, which a reader of files does not need.
_OF_WORKERS = (
    *(kinds.WorkerStarted, kinds.WorkerExited, kinds.StateSaved),
    *(kinds.TrainingStarted, kinds.Progress),
)


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
    status = attrs.evolve(status, generation=event.generation)
    body = event.body
    match body:
        case kinds.RunStarted():
            pid, slots = body.pid or 0, body.slots or 0
            return attrs.evolve(status, host=body.host, pid=pid, slots=slots)
        case kinds.RendezvousStarted():
            is_lost = status.state is JobState.RUNNING
            state = JobState.RENDEZVOUS if is_lost else status.state
            return _enter_state(status, event, state, body.reason)
        case kinds.GenerationStarted():
            return _enter_state(_join(status, body), event, JobState.RUNNING, body.reason)
        case kinds.WorkerStarted() if event.rank is not None:
            return _update_workers(
                status, WorkerStatus(event.rank, body.local_rank or 0, body.name)
            )
        case kinds.WorkerExited():
            exited = (worker for worker in status.workers if worker.rank == event.rank)
            return _update_workers(status, *(attrs.evolve(x, running=False) for x in exited))
        case kinds.CheckpointSaved() if body.step is not None:
            return attrs.evolve(status, checkpoint_step=body.step)
        case kinds.SnapshotTaken() if body.step is not None:
            return attrs.evolve(status, snapshot_step=body.step)
        case kinds.TrainingStarted():
            return attrs.evolve(status, step=body.step, steps_per_second=None)
        case kinds.Progress():
            return attrs.evolve(status, step=body.step, steps_per_second=body.steps_per_second)
        case kinds.DrainRequested():
            return _enter_state(status, event, JobState.DRAINING, body.reason)
        case kinds.Failure():
            return _enter_state(status, event, JobState.RESTARTING, body.reason)
        case kinds.Stopping() if status.state is JobState.RUNNING:
            # Without a notice, the workers stop because of a failure or a loss elsewhere.
            is_restart = body.notice in ("", RESTART)
            state = JobState.RESTARTING if is_restart else JobState.RESIZING
            return _enter_state(status, event, state)
        case kinds.RunFinished():
            status = attrs.evolve(status, expelled=body.expelled)
            return _enter_state(status, event, finished_state(body.state), body.reason)
    return status


def _enter_state(status: NodeStatus, event: Event, state: JobState, reason: str = "") -> NodeStatus:
    since = status.state_since if state is status.state else event.monotonic
    reason = reason or status.reason
    return attrs.evolve(status, state=state, state_since=since, reason=reason)


def _join(status: NodeStatus, body: kinds.GenerationStarted) -> NodeStatus:
    """Return the status of a member of the generation. What is not known stays as it was."""
    names = ("node_rank", "node_count", "world_size", "restarts", "max_restarts")
    reported = {name: value for name in names if (value := getattr(body, name)) is not None}
    return attrs.evolve(status, workers=(), step=None, steps_per_second=None, **reported)


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


def new_generation(
    event: Event, body: kinds.GenerationStarted, rendezvous_started_at: float | None
) -> NodeGeneration:
    """Return the generation that a `generation.started` event reports."""
    since = rendezvous_started_at
    return NodeGeneration(
        node=event.node,
        number=event.generation,
        started_at=event.monotonic,
        timestamp=event.timestamp,
        incarnation=body.incarnation,
        node_count=body.node_count or 1,
        world_size=body.world_size or 1,
        restarts=body.restarts or 0,
        max_restarts=body.max_restarts,
        node_rank=body.node_rank or 0,
        ranks=body.ranks or (0, 0),
        reason=body.reason,
        trigger=next((why for why in GenerationTrigger if why.value == body.trigger), None),
        rendezvous_started_at=None if since is None else min(since, event.monotonic),
        import_seconds=body.import_seconds or 0.0,
    )


def update_generation(generation: NodeGeneration, event: Event) -> NodeGeneration:
    """Return the generation after an event in it."""
    at, body = event.monotonic, event.body
    match body:
        case kinds.CheckpointSaved():
            return attrs.evolve(generation, num_saves=generation.num_saves + (body.count or 0))
        case kinds.SnapshotTaken():
            total = generation.num_snapshots + (body.count or 0)
            return attrs.evolve(generation, num_snapshots=total)
        case kinds.TrainingStarted():
            return _record_first_step(generation, at, body)
        case kinds.Progress():
            done_at = max(generation.started_at, at - (body.seconds_since_heartbeat or 0.0))
            return _record_step(generation, body.step, done_at)
        case kinds.StateRestored():
            seconds = body.duration_seconds
            if seconds is not None and body.delay_seconds is not None:
                at = min(at, generation.started_at + body.delay_seconds + seconds)
            return attrs.evolve(
                generation, restored_at=at, restore_seconds=seconds, restored_step=body.step
            )
        case kinds.Failure():
            silence = body.seconds_since_heartbeat
            if silence is not None:
                silence = max(silence, generation.undetected_seconds or 0.0)
                generation = attrs.evolve(generation, undetected_seconds=silence)
            return attrs.evolve(_mark_disrupted(generation, at), has_failed=True)
        case kinds.Stopping():
            return _mark_disrupted(generation, at, is_planned=bool(body.notice))
        case kinds.DrainRequested():
            return _mark_disrupted(generation, at, is_planned=True)
        case kinds.RendezvousStarted():
            generation = _mark_disrupted(generation, at, is_planned=body.is_planned)
            return _mark_ended(generation, at)
        case kinds.WorkerExited():
            generation = attrs.evolve(generation, last_exit_at=at)
            return generation if body.is_expected else _mark_disrupted(generation, at)
        case kinds.Stopped():
            stopped_at = generation.stopped_at or at
            return attrs.evolve(generation, stopped_at=stopped_at, all_exited_at=at)
        case kinds.RunFinished():
            last = generation.last_exit_at
            return _mark_ended(generation, at if last is None else last)
    return generation


def _mark_disrupted(
    generation: NodeGeneration, at: float, *, is_planned: bool = False
) -> NodeGeneration:
    """Record the time of the first sign that the generation ends; later ones are ignored."""
    first = at if generation.disrupted_at is None else generation.disrupted_at
    planned = generation.is_planned or is_planned
    return attrs.evolve(generation, disrupted_at=first, is_planned=planned)


def _mark_ended(generation: NodeGeneration, at: float) -> NodeGeneration:
    exited_at = at if generation.all_exited_at is None else generation.all_exited_at
    return attrs.evolve(generation, stopped_at=generation.stopped_at or at, all_exited_at=exited_at)


def _record_first_step(
    generation: NodeGeneration, at: float, body: kinds.TrainingStarted
) -> NodeGeneration:
    if body.step is None:
        return generation
    duration = body.duration_seconds
    done_at = at if duration is None else min(at, generation.started_at + duration)
    generation = attrs.evolve(
        generation, first_step_at=done_at, first_step=body.step, slow_imports=body.slow_imports
    )
    return _record_step(generation, body.step, done_at)


def _record_step(generation: NodeGeneration, step: int | None, done_at: float) -> NodeGeneration:
    """Record the last step that was completed before an event."""
    if step is None:
        return generation
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
        self.start = kinds.RunStarted()
        self.end: kinds.RunFinished | None = None
        self.ended_at = 0.0  # once there is an `end`
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
        body = event.body
        if not self._keeps_samples or not isinstance(body, _OF_WORKERS):
            self.status = apply_event(self.status, event)
        match body:
            case kinds.RunStarted():
                self.start = body
            case kinds.GenerationStarted():
                if event.generation:
                    self._start_generation(event, body)
            case kinds.EventsDropped():
                self.dropped_events += body.count or 0
            case _:
                self._update_generation(event)
        match body:
            case kinds.RunFinished():
                self.end, self.ended_at = body, event.monotonic
            case kinds.RendezvousStarted():
                self._rendezvous_started_at = event.monotonic
            case kinds.Failure():
                kind = body.failure_kind or "ordinary"
                self.failures = {**self.failures, kind: self.failures.get(kind, 0) + 1}
            case kinds.StateSaved() if body.step is not None:
                self.last_saves = {**self.last_saves, event.kind: (event.monotonic, body.step)}
        if isinstance(body, kinds.Progress) and body.step is not None:
            self._add_progress(event, body, body.step)
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

    def _start_generation(self, event: Event, body: kinds.GenerationStarted) -> None:
        if self.generations and self.generations[-1].stopped_at is None:
            # No event reports how the previous generation finished, but it must have.
            last = self.generations[-1]
            end = attrs.evolve(event, body=kinds.RendezvousStarted())
            self.generations[-1] = update_generation(last, end)
        self.generations.append(new_generation(event, body, self._rendezvous_started_at))
        self._rendezvous_started_at = None

    def _update_generation(self, event: Event) -> None:
        # The last reading of a generation's workers may follow the start of the next generation.
        for index in (-1, -2)[: len(self.generations)]:
            if self.generations[index].number == event.generation:
                self.generations[index] = update_generation(self.generations[index], event)
                return

    def _add_progress(self, event: Event, body: kinds.Progress, step: int) -> None:
        self.last_progress = ProgressSample(
            event.monotonic,
            self.node,
            event.generation,
            step,
            steps_per_second=body.steps_per_second,
            loss=body.loss,
            samples_per_second=body.samples_per_second,
        )
        self.progress.add(self.last_progress)

    def _add_to_timeline(self, event: Event) -> None:
        shown = event.on_timeline
        if shown is not None:
            body, group = event.body, 0
            if isinstance(body, kinds.WorkerExited):
                group = (body.local_rank or 0) % MAX_WORKERS_APART
            limit = MAX_EVENTS_BY_KIND.get(event.kind, MAX_EVENTS)
            self._timeline.setdefault((event.kind, group), Downsampled(limit)).add(shown)
