"""A warning if the workers train from the start although a step was saved."""

from __future__ import annotations

import logging

import pytest

from elasticlib.launch.observability import MissingRestoreWarning
from elasticlib.observe.event import Event


def hear(hint: MissingRestoreWarning, kind: str, generation: int, **facts: object) -> None:
    hint.hear(Event(kind, "run", "node", generation, 0.0, 0.0, None, facts))


def begin(hint: MissingRestoreWarning, generation: int, *started_in: int) -> None:
    """Let a generation begin, with workers that were started in these attempts."""
    hear(hint, "generation.began", generation, attempt=generation)
    for attempt in started_in:
        hear(hint, "worker.began", generation, attempt=attempt)


def test_script_that_does_not_restore_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    hint = MissingRestoreWarning()
    begin(hint, 1, 1, 1)
    hear(hint, "training.began", 1, step=1)
    hear(hint, "saved", 1, step=5, count=1)
    begin(hint, 2, 2, 2)
    hear(hint, "training.began", 2, step=1)
    assert "training began again at step 1, and step 5 had been saved" in caplog.text


@pytest.mark.parametrize("is_restored", [False, True])
def test_workers_that_are_kept_need_not_restore(
    caplog: pytest.LogCaptureFixture, is_restored: bool
) -> None:
    caplog.set_level(logging.WARNING)
    hint = MissingRestoreWarning()
    begin(hint, 1, 1, 1)
    hear(hint, "training.began", 1, step=106)
    hear(hint, "snapshot", 1, step=108, count=3)
    # All workers that had finished step 108 were killed. The next group ended at once.
    begin(hint, 2, 2, 2)
    if is_restored:
        hear(hint, "restored", 2, step=105)
        begin(hint, 3, 2, 2)
    else:
        begin(hint, 3, 2, 3)
    hear(hint, "training.began", 3, step=106)
    assert "does the script call" not in caplog.text
