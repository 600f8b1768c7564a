"""A warning if the workers train from the start although a step was saved."""

from __future__ import annotations

import logging

import pytest

from elasticlib.launch.observability import MissingRestoreWarning
from elasticlib.observe.event import Event


def record(hint: MissingRestoreWarning, kind: str, generation: int, **facts: object) -> None:
    hint.on_event(Event(kind, "run", "node", generation, 0.0, 0.0, None, facts))


def start_generation(hint: MissingRestoreWarning, generation: int, *started_in: int) -> None:
    """Let a generation begin, with workers that were started in these attempts."""
    record(hint, "generation.started", generation, attempt=generation)
    for attempt in started_in:
        record(hint, "worker.started", generation, attempt=attempt)


def test_script_that_does_not_restore_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    hint = MissingRestoreWarning()
    start_generation(hint, 1, 1, 1)
    record(hint, "training.started", 1, step=1)
    record(hint, "checkpoint.saved", 1, step=5, count=1)
    start_generation(hint, 2, 2, 2)
    record(hint, "training.started", 2, step=1)
    assert "training restarted at step 1 although step 5 was saved" in caplog.text


@pytest.mark.parametrize("is_restored", [False, True])
def test_workers_that_are_kept_need_not_restore(
    caplog: pytest.LogCaptureFixture, is_restored: bool
) -> None:
    caplog.set_level(logging.WARNING)
    hint = MissingRestoreWarning()
    start_generation(hint, 1, 1, 1)
    record(hint, "training.started", 1, step=106)
    record(hint, "snapshot.taken", 1, step=108, count=3)
    # All workers that had finished step 108 were killed. The next group ended at once.
    start_generation(hint, 2, 2, 2)
    if is_restored:
        record(hint, "state.restored", 2, step=105)
        start_generation(hint, 3, 2, 2)
    else:
        start_generation(hint, 3, 2, 3)
    record(hint, "training.started", 3, step=106)
    assert "does the script call" not in caplog.text
