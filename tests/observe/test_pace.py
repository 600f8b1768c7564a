"""What is told of training between two looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib.observe.event import KINDS
from elasticlib.observe.step_watch import Known, Look, beginnings, progress
from elasticlib.workers.interface import Heartbeat


def beat(step: int, *, at: float = 0.0, steps: int = 1, **more: Any) -> Heartbeat:
    return Heartbeat(step=step, steps=steps, at=at, alive=at, attached=True, **more)


def looked(*looks: Look) -> list[tuple[str, dict[str, Any]]]:
    """What is told at the last of these."""
    known, found = Known(), []
    for look in looks:
        known, begun = beginnings(known, look)
        known, moved = progress(known, look)
        found = begun + moved
    for kind, facts in found:
        assert set(facts) == set(KINDS[kind])
    return found


def steps(
    step: int,
    per_second: float | None = None,
    silent: float = 0.0,
    loss: float | None = None,
    samples_per_second: float | None = None,
) -> tuple[str, dict[str, Any]]:
    facts = {"step": step, "per_second": per_second, "silent": silent, "loss": loss}
    return "steps", {**facts, "samples_per_second": samples_per_second}


QUIET = Heartbeat(attached=True)


@pytest.mark.parametrize(
    ("before", "now", "events"),
    [
        (Look(0, 0.0), Look(1, 10.0, {0: QUIET}), []),
        # Between the moments of the steps, not of the looks.
        (
            Look(1, 3.0, {0: beat(5), 1: beat(6)}),
            Look(1, 13.0, {0: beat(25, at=10.0), 1: beat(26, at=9.5)}),
            [steps(25, 2.0, silent=3.5)],
        ),
        (Look(1, 0.0, {0: beat(5)}), Look(1, 10.0, {0: beat(5)}), []),
        # Another generation begins behind where the one before was.
        (Look(1, 0.0, {0: beat(9)}), Look(2, 10.0, {0: beat(9, at=10.0)}), [steps(9)]),
        (
            Look(1, 0.0, {0: beat(5, saved=4)}),
            Look(1, 10.0, {0: beat(5, saved=5), 1: QUIET}),
            [("saved", {"step": 5})],
        ),
        # Who has saved is gone, and what is saved is not.
        (Look(1, 0.0, {0: beat(5, saved=5), 1: beat(5)}), Look(1, 10.0, {1: beat(5)}), []),
        # A state in parts is whole once the last has its own.
        (
            Look(1, 0.0, {0: beat(5, snapshot=4), 1: beat(5, snapshot=4)}),
            Look(1, 10.0, {0: beat(5, snapshot=5), 1: beat(5, snapshot=4)}),
            [],
        ),
        (
            Look(1, 0.0, {0: beat(5, snapshot=4), 1: QUIET}),
            Look(1, 10.0, {0: beat(5, snapshot=5), 1: QUIET}),
            [("snapshot", {"step": 5})],
        ),
        # Of several losses the lowest rank's; of samples all.
        (
            Look(1, 0.0, {0: beat(0), 1: beat(0, loss=9.0)}),
            Look(
                1,
                10.0,
                {
                    2: beat(20, at=10.0, loss=2.0, samples=40.0, steps=5, first_at=2.0),
                    1: beat(20, at=10.0, loss=1.0, samples=100.0),
                },
            ),
            [steps(20, 2.0, loss=1.0, samples_per_second=14.0)],
        ),
    ],
)
def test_what_has_moved_is_told_and_nothing_else(
    before: Look, now: Look, events: list[tuple[str, dict[str, object]]]
) -> None:
    known, _ = progress(Known(), before)
    assert progress(known, now)[1] == events


def test_a_generation_that_is_over_before_a_second_look_has_told_its_pace() -> None:
    last = beat(30, at=14.0, steps=21, first_step=10, first_at=4.0, samples=210.0)
    _, told = progress(Known(), Look(1, 14.0, {0: last}))
    assert told == [steps(30, 2.0, samples_per_second=20.0)]


def first(step: int, at: float, steps: int = 1) -> Heartbeat:
    return beat(step, at=at, steps=steps, first_step=step, first_at=at)


@pytest.mark.parametrize(
    ("beats", "final", "told"),
    [
        ({0: first(7, 103.0), 1: first(7, 105.0)}, False, [("training.began", 5.0)]),
        # The other's first step is still to come,
        ({0: first(7, 103.0), 1: QUIET}, False, []),
        # or never to come,
        ({0: first(7, 103.0, steps=2), 1: QUIET}, False, [("training.began", 3.0)]),
        ({0: first(7, 103.0), 1: QUIET}, True, [("training.began", 3.0)]),
        # or it has not come so far as to be heard of, or never is.
        ({0: first(7, 103.0), 1: Heartbeat()}, False, []),
        ({0: first(7, 103.0, steps=2), 1: Heartbeat()}, False, [("training.began", 3.0)]),
        # A worker of another version does not tell of its first step.
        ({0: beat(7, at=103.0)}, False, []),
    ],
)
def test_training_begins_with_the_first_step_of_the_last_worker(
    beats: dict[int, Heartbeat], final: bool, told: list[tuple[str, float]]
) -> None:
    known, events = beginnings(Known(), Look(3, 106.0, beats, began=100.0, final=final))
    assert [(kind, facts["seconds"]) for kind, facts in events] == told
    if told:
        assert beginnings(known, Look(3, 107.0, beats, began=100.0, final=True))[1] == []


def restored(source: str, began: float, ended: float, times: int = 1) -> Heartbeat:
    state: Any = SimpleNamespace(step=40, source=source, began=began, ended=ended)
    return Heartbeat(attached=True, restored=state, restores=times)


def test_a_state_is_taken_up_once_the_last_worker_has_it() -> None:
    one, two = restored("memory", 101.0, 104.0), restored("peer", 102.0, 104.5)
    known, events = beginnings(Known(), Look(2, 105.0, {0: one, 1: QUIET}, began=100.0))
    assert events == []
    known, events = beginnings(known, Look(2, 105.0, {0: one, 1: two}, began=100.0))
    said = {"step": 40, "source": "peer", "seconds": 2.5, "after": 2.0}
    assert events == [("restored", said)]
    known, events = beginnings(known, Look(2, 106.0, {0: one, 1: two}, began=100.0))
    assert events == []
    # Whoever has them take up another one within a generation is told of as well.
    again = {0: restored("disk", 110.0, 111.0, 2), 1: restored("disk", 110.0, 112.0, 2)}
    _, events = beginnings(known, Look(2, 113.0, again, began=100.0))
    assert [facts["source"] for _, facts in events] == ["disk"]


def test_what_one_worker_takes_up_for_all_is_told_when_they_train() -> None:
    one = restored("disk", 101.0, 104.0)
    trains = {0: one, 1: first(41, 105.0, steps=2)}
    told = looked(Look(2, 104.0, {0: one, 1: QUIET}), Look(2, 106.0, trains, began=100.0))
    assert [kind for kind, _ in told] == ["restored", "training.began", "steps"]
