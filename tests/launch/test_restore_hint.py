"""A warning if the workers train from the start although a step was saved."""

from __future__ import annotations

import logging

import pytest

from elasticlib.launch.observability import MissingRestoreWarning
from elasticlib.observe.event import Event


def record(warning: MissingRestoreWarning, kind: str, generation: int, **facts: object) -> None:
    warning.on_event(Event(kind, "run", "node", generation, 0.0, 0.0, None, facts))


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
