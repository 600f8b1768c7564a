"""What is told of training: between two looks, when the next is due, and at what cost."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from elasticlib.observe.event import KINDS, Event, decode, encode
from elasticlib.observe.step_monitor import MAX_INTERVAL_S, MIN_INTERVAL_S, StepMonitor
from elasticlib.workers.context import WorkerContext
from elasticlib.workers.interface import Heartbeat, RestoreReport
from elasticlib.workers.worker_channel import WorkerChannel


def beat(step: int, *, at: float = 0.0, steps: int = 1, **more: Any) -> Heartbeat:
    return Heartbeat(
        step=step, num_steps=steps, last_step_at=at, last_activity_at=at, is_attached=True, **more
    )


Told = list[tuple[str, dict[str, Any]]]
Beats = dict[int, Heartbeat]


def looked(
    *looks: tuple[float, Beats], began: float = 0.0, final: bool = True
) -> tuple[StepMonitor, Told]:
    """What is told at the last of these, and the watch then."""
    watch, found = StepMonitor(began), Told()
    for now, beats in looks:
        watch, found = watch.read(now, beats, is_final=final)
    for kind, facts in found:
        assert set(facts) == set(KINDS[kind])
    return watch, found


def steps(
    step: int,
    per_second: float | None = None,
    silent: float = 0.0,
    loss: float | None = None,
    samples_per_second: float | None = None,
) -> tuple[str, dict[str, Any]]:
    facts = {"step": step, "steps_per_second": per_second, "loss": loss}
    more = {"seconds_since_heartbeat": silent, "samples_per_second": samples_per_second}
    return "progress", {**facts, **more}


QUIET = Heartbeat(is_attached=True)


@pytest.mark.parametrize(
    ("before", "now", "events"),
    [
        ((0.0, {}), (10.0, {0: QUIET}), []),
        # Between the moments of the steps, not of the looks.
        (
            (3.0, {0: beat(5), 1: beat(6)}),
            (13.0, {0: beat(25, at=10.0), 1: beat(26, at=9.5)}),
            [steps(25, 2.0, silent=3.5)],
        ),
        ((0.0, {0: beat(5)}), (10.0, {0: beat(5)}), []),
        (
            (0.0, {0: beat(5, last_saved_step=1, num_saves=1)}),
            (10.0, {0: beat(5, last_saved_step=5, num_saves=5), 1: QUIET}),
            [("checkpoint.saved", {"step": 5, "count": 4})],
        ),
        # The worker that saved has ended; its checkpoint still exists.
        ((0.0, {0: beat(5, last_saved_step=5, num_saves=1), 1: beat(5)}), (10.0, {1: beat(5)}), []),
        # A sharded snapshot is complete once the last worker has kept its part.
        (
            (0.0, {n: beat(5, last_snapshot_step=4, num_snapshots=2) for n in (0, 1)}),
            (
                10.0,
                {
                    0: beat(5, last_snapshot_step=5, num_snapshots=3),
                    1: beat(5, last_snapshot_step=4, num_snapshots=2),
                },
            ),
            [],
        ),
        (
            (0.0, {0: beat(5, last_snapshot_step=4, num_snapshots=4), 1: QUIET}),
            (10.0, {0: beat(5, last_snapshot_step=97, num_snapshots=97), 1: QUIET}),
            [("snapshot.taken", {"step": 97, "count": 93})],
        ),
        # Of several losses the lowest rank's; of samples all.
        (
            (0.0, {0: beat(0), 1: beat(0, loss=9.0)}),
            (
                10.0,
                {
                    2: beat(20, at=10.0, loss=2.0, num_samples=40.0, steps=5, first_at=2.0),
                    1: beat(20, at=10.0, loss=1.0, num_samples=100.0),
                },
            ),
            [steps(20, 2.0, loss=1.0, samples_per_second=14.0)],
        ),
    ],
)
def test_what_has_moved_is_told_and_nothing_else(
    before: tuple[float, Beats], now: tuple[float, Beats], events: Told
) -> None:
    _, found = looked(before, now)
    assert [told for told in found if told[0] != "training.started"] == events


def test_a_generation_that_is_over_before_a_second_look_has_told_its_pace() -> None:
    last = beat(30, at=14.0, steps=21, first_step=10, first_at=4.0, num_samples=210.0)
    _, told = looked((14.0, {0: last}))
    assert told[1:] == [steps(30, 2.0, samples_per_second=20.0)]


def first(step: int, at: float, steps: int = 1) -> Heartbeat:
    return beat(step, at=at, steps=steps, first_step=step, first_at=at)


@pytest.mark.parametrize(
    ("beats", "final", "told"),
    [
        ({0: first(7, 103.0), 1: first(7, 105.0)}, False, [("training.started", 5.0)]),
        # The other's first step is still to come,
        ({0: first(7, 103.0), 1: QUIET}, False, []),
        # or never to come,
        ({0: first(7, 103.0, steps=2), 1: QUIET}, False, [("training.started", 3.0)]),
        ({0: first(7, 103.0), 1: QUIET}, True, [("training.started", 3.0)]),
        # or it has not come so far as to be heard of, or never is.
        ({0: first(7, 103.0), 1: Heartbeat()}, False, []),
        ({0: first(7, 103.0, steps=2), 1: Heartbeat()}, False, [("training.started", 3.0)]),
    ],
)
def test_training_begins_with_the_first_step_of_the_last_worker(
    beats: dict[int, Heartbeat], final: bool, told: list[tuple[str, float]]
) -> None:
    watch, events = looked((106.0, beats), began=100.0, final=final)
    begun = [
        (kind, facts["duration_seconds"]) for kind, facts in events if kind == "training.started"
    ]
    assert begun == told
    if told:
        assert "training.started" not in dict(watch.read(107.0, beats, is_final=True)[1])


def restored(source: str, began: float, ended: float, times: int = 1) -> Heartbeat:
    state = RestoreReport(40, source, began, ended)
    return Heartbeat(is_attached=True, last_restore=state, num_restores=times)


def test_a_state_is_taken_up_once_the_last_worker_has_it() -> None:
    one, two = restored("memory", 101.0, 104.0), restored("peer", 102.0, 104.5)
    watch, events = StepMonitor(100.0).read(105.0, {0: one, 1: QUIET})
    assert events == []
    watch, events = watch.read(105.0, {0: one, 1: two})
    said = {"step": 40, "source": "peer", "duration_seconds": 2.5, "delay_seconds": 2.0}
    assert events == [("state.restored", said)]
    watch, events = watch.read(106.0, {0: one, 1: two})
    assert events == []
    # Whoever has them take up another one within a generation is told of as well.
    again = {0: restored("disk", 110.0, 111.0, 2), 1: restored("disk", 110.0, 112.0, 2)}
    _, events = watch.read(113.0, again)
    assert [facts["source"] for _, facts in events] == ["disk"]


def test_what_one_worker_takes_up_for_all_is_told_when_they_train() -> None:
    one = restored("disk", 101.0, 104.0)
    trains = {0: one, 1: first(41, 105.0, steps=2)}
    watch, told = looked((104.0, {0: one, 1: QUIET}), began=100.0, final=False)
    assert told == []
    _, told = watch.read(111.0, trains)
    assert [kind for kind, _ in told] == ["state.restored", "training.started", "progress"]


def test_that_training_has_begun_is_looked_for_soon_and_how_far_it_is_ever_less_often() -> None:
    watch, now, lines, looks = StepMonitor(100.0), 100.0, [], 0
    beats: Beats = {0: QUIET}
    while now < 150.0:
        now, looks = watch.due_at, looks + 1
        if now >= 103.0:
            beats = {0: beat(int(now), at=now, steps=2, first_step=103, first_at=103.0)}
        watch, told = watch.read(now, beats)
        lines += [(kind, now) for kind, _ in told]
    assert lines[0] == ("training.started", 103.0)
    told_at = [at for kind, at in lines if kind == "progress"]
    assert told_at == [104.0, 105.0, 107.0, 111.0, 119.0, 129.0, 139.0, 149.0, 159.0]
    assert looks == 4 + len(told_at), "once a second until then, and only for lines from then on"
    assert (MIN_INTERVAL_S, MAX_INTERVAL_S) == (1.0, 10.0)


def test_loss_of_the_lowest_rank_that_reports_one_is_written_as_it_is() -> None:
    channels = [WorkerChannel.create() for _ in range(3)]
    channels[0].report_step(5, 1.0)
    channels[1].report_step(5, 1.5, math.nan)
    channels[2].report_step(5, 1.5, 7.0)
    beats = {local: channel.heartbeat() for local, channel in enumerate(channels)}
    _, told = StepMonitor(0.0).read(2.0, beats, is_final=True)
    facts = next(facts for kind, facts in told if kind == "progress")
    event = decode(encode(Event("progress", "job", "n", 1, 0.0, 2.0, None, facts)))
    assert repr(event.value("loss")) == "nan"
    for channel in channels:
        channel.close()


def test_at_rest_a_look_a_second_at_eight_workers_takes_less_than_a_thousandth_of_a_core() -> None:
    channels = [WorkerChannel.create() for _ in range(8)]
    for channel in channels:
        WorkerContext(channel).report_restored(1)
    watch, began = StepMonitor(0.0), time.process_time()
    for _ in range(200):
        watch, _ = watch.read(1.0, {local: one.heartbeat() for local, one in enumerate(channels)})
    assert (time.process_time() - began) / 200 < 1e-3
    for channel in channels:
        channel.close()
