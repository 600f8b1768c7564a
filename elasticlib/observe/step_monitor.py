"""Derives events about training progress from two readings of the workers' heartbeats. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ..workers.interface import NO_STEP, RESTORE_SOURCES, Heartbeat
from . import event_kinds as kinds

MAX_INTERVAL_S = 10.0  # between two progress events
MIN_INTERVAL_S = 1.0  # between two progress events, and between readings before training starts

Events = list[kinds.EventBody]


@attrs.frozen
class HeartbeatReading:
    """The heartbeats of all workers of a node at one time."""

    at: float  # by the node's monotonic clock
    beats: Mapping[int, Heartbeat] = attrs.field(factory=dict)  # by local rank
    started_at: float = attrs.field(default=0.0, kw_only=True)  # start of the workers
    is_final: bool = attrs.field(default=False, kw_only=True)  # the workers have exited

    @property
    def with_steps(self) -> list[Heartbeat]:
        """The heartbeats of workers that report steps."""
        return [beat for beat in self.beats.values() if beat.num_steps]

    @property
    def step(self) -> int:
        """The last step that all workers with steps have completed, or NO_STEP."""
        return min((beat.step for beat in self.with_steps), default=NO_STEP)

    @property
    def reached_at(self) -> float:
        """Time at which the last of the workers whose last step is `step` completed it."""
        return max(beat.last_step_at for beat in self.with_steps if beat.step == self.step)

    @property
    def first_step(self) -> tuple[int, float] | None:
        """The first step, and when all workers had completed it; None if there are no steps."""
        beats = self.with_steps
        if not beats:
            return None
        return min(beat.first_step for beat in beats), max(beat.first_at for beat in beats)

    @property
    def slow_imports(self) -> Mapping[str, float]:
        """The slow imports of the worker that was the last to complete its first step."""
        return max(self.with_steps, key=lambda beat: beat.first_at).slow_imports


@attrs.frozen
class StepMonitor:
    """State after the readings of one generation so far. Immutable: `read` returns the next one.

    The fields with defaults are advanced by `read`.
    """

    started_at: float  # start of the workers
    due_at: float = attrs.field(  # time of the next reading
        default=attrs.Factory(lambda self: self.started_at, takes_self=True)
    )
    reported_at: float = attrs.field(  # time of the last progress event, sent or not needed
        default=attrs.Factory(lambda self: self.started_at, takes_self=True)
    )
    restores: int = 0  # restores of each worker
    training_at: float | None = None  # when training was seen to have started
    last_reading: HeartbeatReading | None = None  # basis of the last progress event
    saves: int = 0
    snapshots: int = 0

    def read(
        self, now: float, beats: Mapping[int, Heartbeat], *, is_final: bool = False
    ) -> tuple[StepMonitor, Events]:
        """Return the next monitor and the events that are due.

        Args:
            now: the current monotonic time.
            beats: heartbeats by local rank.
            is_final: the workers have exited, so report everything.
        """
        reading = HeartbeatReading(now, dict(beats), started_at=self.started_at, is_final=is_final)
        monitor, events = self._start_events(reading)
        if is_final or now >= self.reported_at + self._interval:
            monitor, more = attrs.evolve(monitor, reported_at=now)._progress_events(reading)
            events += more
        pause = max(0.0, monitor.reported_at + monitor._interval - now)
        due_at = now + (pause if monitor.training_at is not None else min(MIN_INTERVAL_S, pause))
        return attrs.evolve(monitor, due_at=due_at), events

    @property
    def _interval(self) -> float:
        # The interval is short at first, so that a short run has several samples.
        elapsed = MAX_INTERVAL_S
        if self.training_at is not None:
            elapsed = self.reported_at - self.training_at
        return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, elapsed))

    def _start_events(self, reading: HeartbeatReading) -> tuple[StepMonitor, Events]:
        """Report the restore and the first step, once all workers are past them."""
        monitor, events = self, Events()
        trains = bool(reading.with_steps) and (_all_train(reading) or reading.is_final)
        restores = _num_restores(reading, of_all=not (trains or reading.is_final))
        if restores > monitor.restores:
            monitor = attrs.evolve(monitor, restores=restores)
            events.append(_restored(reading))
        if trains and monitor.training_at is None:
            monitor = attrs.evolve(monitor, training_at=reading.at, reported_at=reading.at)
            if reading.first_step is not None:
                step, at = reading.first_step
                started = kinds.TrainingStarted(
                    step=step,
                    duration_seconds=round(at - reading.started_at, 6),
                    slow_imports=dict(reading.slow_imports),
                )
                events.append(started)
        return monitor, events

    def _progress_events(self, reading: HeartbeatReading) -> tuple[StepMonitor, Events]:
        monitor, events = self, Events()
        before = monitor.last_reading
        if reading.step != NO_STEP and (before is None or reading.step != before.step):
            monitor = attrs.evolve(monitor, last_reading=reading)
            events.append(_progress(before, reading))
        # Each worker keeps its part of a sharded state, so a snapshot is complete once the last
        # worker has its part. A checkpoint is complete when any worker reports it.
        holders = [beat for beat in reading.beats.values() if beat.num_snapshots]
        snapshots = min((beat.num_snapshots for beat in holders), default=0)
        if snapshots > monitor.snapshots:
            step = min(beat.last_snapshot_step for beat in holders)
            events.append(kinds.SnapshotTaken(step=step, count=snapshots - monitor.snapshots))
            monitor = attrs.evolve(monitor, snapshots=snapshots)
        saves = max((beat.num_saves for beat in reading.beats.values()), default=0)
        if saves > monitor.saves:
            step = max(beat.last_saved_step for beat in reading.beats.values())
            events.append(kinds.CheckpointSaved(step=step, count=saves - monitor.saves))
            monitor = attrs.evolve(monitor, saves=saves)
        return monitor, events


def _all_train(reading: HeartbeatReading) -> bool:
    # A worker without a step while another completes its second one does not report steps.
    with_steps = reading.with_steps
    return len(with_steps) == len(reading.beats) or max(beat.num_steps for beat in with_steps) > 1


def _num_restores(reading: HeartbeatReading, *, of_all: bool) -> int:
    """Return how often each worker has restored a state, at least.

    Workers that have restored none are ignored; with `of_all`, the result is 0 if there are any.
    """
    counts = [beat.num_restores if beat.last_restore else 0 for beat in reading.beats.values()]
    known = [count for count in counts if count]
    return 0 if of_all and len(known) < len(counts) else min(known, default=0)


def _restored(reading: HeartbeatReading) -> kinds.StateRestored:
    states = [beat.last_restore for beat in reading.beats.values() if beat.last_restore is not None]
    requested_at = max((state.started_at for state in states), default=reading.started_at)
    done_at = max((state.finished_at for state in states), default=reading.started_at)
    return kinds.StateRestored(
        step=min((state.step for state in states), default=None),
        source=max((state.source for state in states), key=RESTORE_SOURCES.index, default=""),
        duration_seconds=round(max(0.0, done_at - requested_at), 6),
        delay_seconds=round(max(0.0, requested_at - reading.started_at), 6),
    )


def _progress(before: HeartbeatReading | None, now: HeartbeatReading) -> kinds.Progress:
    since = now.first_step if before is None else (before.step, before.reached_at)
    speed = None if since is None else _rate(now.step - since[0], now.reached_at - since[1])
    losses = {local: beat.loss for local, beat in now.beats.items() if beat.loss is not None}
    alive_at = min(beat.last_activity_at for beat in now.with_steps)
    return kinds.Progress(
        step=now.step,
        steps_per_second=speed,
        seconds_since_heartbeat=round(max(0.0, now.at - alive_at), 3),
        loss=losses[min(losses)] if losses else None,
        samples_per_second=_samples_per_second(before, now),
    )


def _samples_per_second(before: HeartbeatReading | None, now: HeartbeatReading) -> float | None:
    rates = []
    for local, beat in now.beats.items():
        old = None if before is None else before.beats.get(local)
        if old is not None and old.num_steps:
            rates.append(
                _rate(beat.num_samples - old.num_samples, beat.last_step_at - old.last_step_at)
            )
        elif beat.num_steps > 1 and beat.first_at:
            # The samples of the first step, an equal part of all, took no measured time.
            after_first = beat.num_samples * (beat.num_steps - 1) / beat.num_steps
            rates.append(_rate(after_first, beat.last_step_at - beat.first_at))
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 3) if known else None


def _rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 3) if count > 0 and seconds > 0 else None
