"""A warning if the workers train from the start although a step was saved."""

from __future__ import annotations

import logging

import pytest
from made_events import make_event

from elasticlib.launch.observability import MissingRestoreWarning
from elasticlib.observe.step_monitor import StepMonitor
from elasticlib.workers.interface import NO_STEP, Heartbeat


def record(warning: MissingRestoreWarning, kind: str, generation: int, **facts: object) -> None:
    warning.on_event(make_event(kind, "run", "node", generation, 0.0, 0.0, None, facts))


def start_generation(warning: MissingRestoreWarning, generation: int, *started_in: int) -> None:
    """Record the start of a generation whose workers were started in these attempts."""
    record(warning, "generation.started", generation, attempt=generation)
    for attempt in started_in:
        record(warning, "worker.started", generation, attempt=attempt)


def test_script_that_does_not_restore_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warning = MissingRestoreWarning()
    start_generation(warning, 1, 1, 1)
    record(warning, "training.started", 1, step=1)
    record(warning, "checkpoint.saved", 1, step=5, count=1)
    start_generation(warning, 2, 2, 2)
    record(warning, "training.started", 2, step=1)
    assert "training restarted at step 1 although step 5 was saved" in caplog.text


@pytest.mark.parametrize("is_restored", [False, True])
def test_retained_workers_need_not_restore(
    caplog: pytest.LogCaptureFixture, is_restored: bool
) -> None:
    caplog.set_level(logging.WARNING)
    warning = MissingRestoreWarning()
    start_generation(warning, 1, 1, 1)
    record(warning, "training.started", 1, step=106)
    record(warning, "snapshot.taken", 1, step=108, count=3)
    # All workers that had finished step 108 were killed, and generation 2 failed at once.
    start_generation(warning, 2, 2, 2)
    if is_restored:
        record(warning, "state.restored", 2, step=105)
        start_generation(warning, 3, 2, 2)
    else:
        start_generation(warning, 3, 2, 3)
    record(warning, "training.started", 3, step=106)
    assert "does the script call" not in caplog.text


def beat(*, at: float, step: int, num_snapshots: int) -> Heartbeat:
    """Return the heartbeat of a worker that has completed all steps up to this one."""
    return Heartbeat(
        num_steps=step,
        step=step if step else NO_STEP,
        first_step=1 if step else NO_STEP,
        first_at=1.0 if step else 0.0,
        last_step_at=at if step else 0.0,
        last_activity_at=at,
        num_snapshots=num_snapshots,
        last_snapshot_step=step if num_snapshots else NO_STEP,
    )


def test_save_before_the_slowest_worker_has_its_first_step_is_no_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    warning, monitor, kinds = MissingRestoreWarning(), StepMonitor(0.0), []
    start_generation(warning, 1, 1, 1)
    # Rank 0 takes a snapshot in its first step, which rank 1 completes 14 seconds later.
    for now, slow_step in ((11.0, 0), (15.0, 1)):
        fast = beat(at=1.0, step=1, num_snapshots=1)
        slow = beat(at=now, step=slow_step, num_snapshots=0)
        monitor, events = monitor.read(now, {0: fast, 1: slow})
        for body in events:
            record(warning, body.kind, 1, **body.data)
            kinds.append(body.kind)
    assert kinds.index("snapshot.taken") < kinds.index("training.started")
    assert "does the script call" not in caplog.text
    # The snapshot counts for the workers of the next generation.
    start_generation(warning, 2, 2, 2)
    record(warning, "training.started", 2, step=1)
    assert "training restarted at step 1 although step 1 was saved" in caplog.text
