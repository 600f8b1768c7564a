"""Where the time of a recovery went: read from a story whose times are known."""

from __future__ import annotations

import pytest

from elasticlib.observe.event import Event
from soak.ledger import Generation, read_generation
from soak.phases import PHASES, quantile, recovery


def told(kind: str, at: float, generation: int, node: str = "a") -> Event:
    return Event(kind, "soak", node, generation, 0.0, at)


def generation(number: int, resumed: int, at: float, *done: tuple[int, float]) -> Generation:
    """One rank's, which restored within half a second, until `at`."""
    lines: list[dict[str, object]] = [{"resumed": resumed, "seconds": 0.5, "at": at}]
    for step, end in done:
        lines.append({"step": step, "indices": [], "epoch": 0, "world": 1, "at": end - 0.25})
        lines.append({"done": step, "at": end})
    return read_generation(number, {0: lines})


STRUCK = generation(4, 0, 1.0, (7, 9.0), (8, 10.0))
EVENTS = [
    told("steps", 10.5, 4),
    told("worker.ended", 11.0, 4),
    told("stopping", 11.25, 4),
    told("stopping", 11.5, 4, "b"),
    told("stopped", 12.0, 4),
    told("rendezvous.began", 12.0, 4),
    told("generation.began", 13.0, 5),
    told("generation.began", 13.25, 5, "b"),
    told("stopped", 20.0, 5),
]


def test_a_recovery_is_cut_where_one_phase_ends_and_the_next_begins() -> None:
    found = recovery(10.25, 9, EVENTS, [STRUCK, generation(5, 7, 15.0, (8, 15.5), (9, 16.0))])
    assert found is not None
    assert (found.total, found.pause, found.generation) == (16.0 - 10.25, 6.0, 5)
    lengths = {"detect": 0.75, "stop": 1.0, "rendezvous": 1.25, "start": 1.25, "restore": 0.5}
    assert found.seconds == {**lengths, "redone": 1.0}
    assert tuple(found.seconds) == PHASES
    assert sum(found.seconds.values()) == pytest.approx(found.total)


def test_a_generation_that_did_no_step_is_part_of_the_way_to_the_next() -> None:
    events = [*EVENTS, told("worker.ended", 14.0, 5), told("generation.began", 15.0, 6)]
    found = recovery(
        10.25, 9, events, [STRUCK, generation(5, 8, 13.5), generation(6, 8, 16.0, (9, 17.0))]
    )
    assert found is not None
    assert found.generation == 6
    assert found.seconds["stop"] == 3.0


def test_what_restarts_nothing_has_a_total_and_no_phases() -> None:
    slow = generation(4, 0, 1.0, (7, 9.0), (8, 12.0))
    found = recovery(9.5, 8, [], [slow])
    assert found is not None
    assert (found.total, found.pause, found.seconds) == (2.5, 3.0, {})


def test_a_step_that_was_kept_before_it_was_told_of_needs_not_be_done_again() -> None:
    found = recovery(10.25, 9, EVENTS, [STRUCK, generation(5, 9, 15.0, (10, 16.0))])
    assert found is not None
    assert found.total == 5.75


def test_a_job_that_never_did_the_step_has_not_recovered() -> None:
    assert recovery(10.25, 9, EVENTS, [STRUCK, generation(5, 7, 15.0, (8, 15.5))]) is None


def test_quantiles_are_values_that_were_there() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert quantile([], 0.5) == 0.0
