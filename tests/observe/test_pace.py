"""What is told of steps between two looks."""

from __future__ import annotations

import pytest

from elasticlib.observe.pace import Look, told
from elasticlib.workers.beat import Beat


def beat(step: int, *, at: float = 0.0, saved: int = -1) -> Beat:
    return Beat(step=step, steps=1, at=at, alive=at, saved=saved, attached=True)


QUIET = Beat(attached=True)


@pytest.mark.parametrize(
    ("before", "now", "events"),
    [
        (Look(0, 0.0), Look(1, 10.0, {0: QUIET}), []),
        (
            Look(1, 0.0, {0: beat(5), 1: beat(6)}),
            Look(1, 10.0, {0: beat(25, at=9.0), 1: beat(26, at=9.5)}),
            [("steps", {"step": 25, "per_second": 2.0, "silent": 1.0})],
        ),
        (Look(1, 0.0, {0: beat(5)}), Look(1, 10.0, {0: beat(5)}), []),
        # Another generation begins behind where the one before was.
        (
            Look(1, 0.0, {0: beat(9)}),
            Look(2, 10.0, {0: beat(9, at=10.0)}),
            [("steps", {"step": 9, "per_second": None, "silent": 0.0})],
        ),
        (
            Look(1, 0.0, {0: beat(5, saved=4)}),
            Look(1, 10.0, {0: beat(5, saved=5), 1: QUIET}),
            [("saved", {"step": 5})],
        ),
    ],
)
def test_what_has_moved_is_told_and_nothing_else(
    before: Look, now: Look, events: list[tuple[str, dict[str, object]]]
) -> None:
    assert told(before, now) == events
