"""The events that a step monitor derives from heartbeats, the times of its polls and its cost."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import pytest
from made_events import make_event

from elasticlib.observe.event import decode, encode
from elasticlib.observe.event_kinds import EventBody
from elasticlib.observe.step_monitor import MAX_INTERVAL_S, MIN_INTERVAL_S, StepMonitor
from elasticlib.workers.context import WorkerContext
from elasticlib.workers.interface import Heartbeat, RestoreReport
from elasticlib.workers.worker_channel import WorkerChannel


def heartbeat(step: int, *, at: float = 0.0, steps: int = 1, **more: Any) -> Heartbeat:
    return Heartbeat(
        step=step, num_steps=steps, last_step_at=at, last_activity_at=at, is_attached=True, **more
    )


Events = list[tuple[str, dict[str, Any]]]
Heartbeats = dict[int, Heartbeat]


def read_heartbeats(
    *readings: tuple[float, Heartbeats], started_at: float = 0.0, is_final: bool = True
) -> tuple[StepMonitor, Events]:
    """Return the monitor and the events after the last of these readings."""
    monitor, events = StepMonitor(started_at), list[EventBody]()
    for now, heartbeats in readings:
        monitor, events = monitor.read(now, heartbeats, is_final=is_final)
    return monitor, plain(events)


def plain(events: Iterable[EventBody]) -> Events:
    return [(body.kind, dict(body.data)) for body in events]


def progress(
    step: int,
    per_second: float | None = None,
    silence_s: float = 0.0,
    loss: float | None = None,
    samples_per_second: float | None = None,
) -> tuple[str, dict[str, Any]]:
    return "progress", {
        "step": step,
        "steps_per_second": per_second,
        "seconds_since_heartbeat": silence_s,
        "loss": loss,
        "samples_per_second": samples_per_second,
    }


WITHOUT_STEPS = Heartbeat(is_attached=True)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ((0.0, {}), (10.0, {0: WITHOUT_STEPS}), []),
        # The rate is that between the times of the steps, not between the readings.
        (
            (3.0, {0: heartbeat(5), 1: heartbeat(6)}),
            (13.0, {0: heartbeat(25, at=10.0), 1: heartbeat(26, at=9.5)}),
            [progress(25, 2.0, silence_s=3.5)],
        ),
        ((0.0, {0: heartbeat(5)}), (10.0, {0: heartbeat(5)}), []),
        (
            (0.0, {0: heartbeat(5, last_saved_step=1, num_saves=1)}),
            (10.0, {0: heartbeat(5, last_saved_step=5, num_saves=5), 1: WITHOUT_STEPS}),
            [("checkpoint.saved", {"step": 5, "count": 4})],
        ),
        # The worker that saved has exited; its checkpoint still exists.
        (
            (0.0, {0: heartbeat(5, last_saved_step=5, num_saves=1), 1: heartbeat(5)}),
            (10.0, {1: heartbeat(5)}),
            [],
        ),
        # A sharded snapshot is complete once the last worker has stored its part.
        (
            (0.0, {n: heartbeat(5, last_snapshot_step=4, num_snapshots=2) for n in (0, 1)}),
            (
                10.0,
                {
                    0: heartbeat(5, last_snapshot_step=5, num_snapshots=3),
                    1: heartbeat(5, last_snapshot_step=4, num_snapshots=2),
                },
            ),
            [],
        ),
        (
            (0.0, {0: heartbeat(5, last_snapshot_step=4, num_snapshots=4), 1: WITHOUT_STEPS}),
            (10.0, {0: heartbeat(5, last_snapshot_step=97, num_snapshots=97), 1: WITHOUT_STEPS}),
            [("snapshot.taken", {"step": 97, "count": 93})],
        ),
        # The loss is that of the lowest rank, and the samples are those of all ranks.
        (
            (0.0, {0: heartbeat(0), 1: heartbeat(0, loss=9.0)}),
            (
                10.0,
                {
                    2: heartbeat(20, at=10.0, loss=2.0, num_samples=40.0, steps=5, first_at=2.0),
                    1: heartbeat(20, at=10.0, loss=1.0, num_samples=100.0),
                },
            ),
            [progress(20, 2.0, loss=1.0, samples_per_second=14.0)],
        ),
    ],
)
def test_only_what_has_changed_since_the_last_reading_is_recorded(
    before: tuple[float, Heartbeats], now: tuple[float, Heartbeats], expected: Events
) -> None:
    _, events = read_heartbeats(before, now)
    assert [event for event in events if event[0] != "training.started"] == expected


def test_rate_of_a_short_generation_is_recorded_at_its_only_reading() -> None:
    last = heartbeat(30, at=14.0, steps=21, first_step=10, first_at=4.0, num_samples=210.0)
    _, events = read_heartbeats((14.0, {0: last}))
    assert events[1:] == [progress(30, 2.0, samples_per_second=20.0)]


def first_step(step: int, at: float, steps: int = 1) -> Heartbeat:
    """Return the heartbeat of a worker whose first step was this one."""
    return heartbeat(step, at=at, steps=steps, first_step=step, first_at=at)


@pytest.mark.parametrize(
    ("heartbeats", "is_final", "expected"),
    [
        ({0: first_step(7, 103.0), 1: first_step(7, 105.0)}, False, [("training.started", 5.0)]),
        # The second worker may still complete its first step.
        ({0: first_step(7, 103.0), 1: WITHOUT_STEPS}, False, []),
        # The second worker reports no steps, because the first one has already completed two.
        ({0: first_step(7, 103.0, steps=2), 1: WITHOUT_STEPS}, False, [("training.started", 3.0)]),
        ({0: first_step(7, 103.0), 1: WITHOUT_STEPS}, True, [("training.started", 3.0)]),
        # The second worker has not attached to its channel yet, or never does.
        ({0: first_step(7, 103.0), 1: Heartbeat()}, False, []),
        ({0: first_step(7, 103.0, steps=2), 1: Heartbeat()}, False, [("training.started", 3.0)]),
    ],
)
def test_training_starts_with_the_first_step_of_the_slowest_worker(
    heartbeats: Heartbeats, is_final: bool, expected: list[tuple[str, float]]
) -> None:
    monitor, events = read_heartbeats((106.0, heartbeats), started_at=100.0, is_final=is_final)
    started = [
        (kind, data["duration_seconds"]) for kind, data in events if kind == "training.started"
    ]
    assert started == expected
    if expected:
        _, more = monitor.read(107.0, heartbeats, is_final=True)
        assert "training.started" not in dict(plain(more))


def restored(source: str, started_at: float, finished_at: float, count: int = 1) -> Heartbeat:
    """Return the heartbeat of a worker that has restored its state."""
    report = RestoreReport(40, source, started_at, finished_at)
    return Heartbeat(is_attached=True, last_restore=report, num_restores=count)


def test_restore_is_recorded_once_the_last_worker_has_finished() -> None:
    first, second = restored("memory", 101.0, 104.0), restored("peer", 102.0, 104.5)
    monitor, events = StepMonitor(100.0).read(105.0, {0: first, 1: WITHOUT_STEPS})
    assert events == []
    monitor, events = monitor.read(105.0, {0: first, 1: second})
    data = {"step": 40, "source": "peer", "duration_seconds": 2.5, "delay_seconds": 2.0}
    assert plain(events) == [("state.restored", data)]
    monitor, events = monitor.read(106.0, {0: first, 1: second})
    assert events == []
    # A second restore in the same generation is recorded as well.
    restored_twice = {0: restored("disk", 110.0, 111.0, 2), 1: restored("disk", 110.0, 112.0, 2)}
    _, events = monitor.read(113.0, restored_twice)
    assert [data["source"] for _, data in plain(events)] == ["disk"]


def test_restore_by_a_single_worker_is_recorded_when_training_starts() -> None:
    first = restored("disk", 101.0, 104.0)
    monitor, events = read_heartbeats(
        (104.0, {0: first, 1: WITHOUT_STEPS}), started_at=100.0, is_final=False
    )
    assert events == []
    _, events = monitor.read(111.0, {0: first, 1: first_step(41, 105.0, steps=2)})
    assert [body.kind for body in events] == ["state.restored", "training.started", "progress"]


def test_monitor_polls_every_second_until_training_starts_and_then_less_and_less_often() -> None:
    monitor, now, recorded, num_polls = StepMonitor(100.0), 100.0, [], 0
    heartbeats: Heartbeats = {0: WITHOUT_STEPS}
    while now < 150.0:
        now, num_polls = monitor.due_at, num_polls + 1
        if now >= 103.0:
            heartbeats = {0: heartbeat(int(now), at=now, steps=2, first_step=103, first_at=103.0)}
        monitor, events = monitor.read(now, heartbeats)
        recorded += [(body.kind, now) for body in events]
    assert recorded[0] == ("training.started", 103.0)
    times = [at for kind, at in recorded if kind == "progress"]
    assert times == [104.0, 105.0, 107.0, 111.0, 119.0, 129.0, 139.0, 149.0, 159.0]
    # The monitor polls once a second until the first step, and later only for progress events.
    assert num_polls == 4 + len(times)
    assert (MIN_INTERVAL_S, MAX_INTERVAL_S) == (1.0, 10.0)


def test_loss_of_the_lowest_rank_that_reports_one_is_recorded_even_if_it_is_nan() -> None:
    channels = [WorkerChannel.create() for _ in range(3)]
    channels[0].report_step(5, 1.0)
    channels[1].report_step(5, 1.5, math.nan)
    channels[2].report_step(5, 1.5, 7.0)
    heartbeats = {local_rank: channel.heartbeat() for local_rank, channel in enumerate(channels)}
    _, events = StepMonitor(0.0).read(2.0, heartbeats, is_final=True)
    data = next(data for kind, data in plain(events) if kind == "progress")
    event = decode(encode(make_event("progress", "job", "n", 1, 0.0, 2.0, None, data)))
    assert repr(event.body.loss) == "nan"
    for channel in channels:
        channel.close()


def test_poll_of_eight_workers_takes_less_than_a_millisecond_of_cpu_time() -> None:
    channels = [WorkerChannel.create() for _ in range(8)]
    for channel in channels:
        WorkerContext(channel).report_restored(1)
    monitor, start = StepMonitor(0.0), time.process_time()
    for _ in range(200):
        heartbeats = {rank: channel.heartbeat() for rank, channel in enumerate(channels)}
        monitor, _ = monitor.read(1.0, heartbeats)
    assert (time.process_time() - start) / 200 < 1e-3
    for channel in channels:
        channel.close()
