"""What a node's events add up to, as histories of what it tells."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elasticlib.observe.counts import BUCKETS, Counts, Durations, counted
from elasticlib.observe.event import KINDS, Event
from elasticlib.observe.metrics import FAMILIES, Moment, samples
from elasticlib.observe.story import NodeStatus


def told(*events: tuple[float, str, dict[str, Any]]) -> Counts:
    counts = Counts()
    for at, kind, facts in events:
        counts = counted(counts, Event(kind, "job", "n1", 1, 1e9 + at, at, None, facts))
    return counts


def began(at: float, seconds: float, restarts: int) -> tuple[float, str, dict[str, Any]]:
    return (at, "generation.began", {"seconds": seconds, "restarts": restarts})


FAULT = (
    began(1.0, 1.0, 0),
    (3.0, "training.began", {"step": 0, "seconds": 2.0}),
    (10.0, "steps", {"step": 69, "per_second": 10.0, "loss": 0.5}),
    (20.0, "worker.ended", {"ok": False, "stopped": False}),
    (20.5, "failure", {"failure": "killed", "silent": 0.25}),
    (20.6, "stopping", {"why": ""}),
    (21.6, "stopped", {"seconds": 1.0}),
    (21.7, "rendezvous.began", {"why": "killed"}),
    began(22.0, 0.4, 1),
    (24.0, "restored", {"step": 49, "seconds": 0.5}),
    (25.0, "training.began", {"step": 50, "seconds": 3.0}),
)


def test_a_fault_costs_what_its_phases_took_and_the_steps_that_are_made_again() -> None:
    counts = told(*FAULT)
    assert counts.failures == {"killed": 1}
    assert (counts.restarts, counts.generations, counts.redone) == (1, 2, 20)
    assert counts.lost == pytest.approx(
        {
            "detect": 0.25,
            "stop": 1.6,
            "rendezvous": 1.4,
            "start": 2.0 + 2.5,
            "restore": 0.5,
            "redone": 2.0,
        }
    )


def test_a_generation_that_ends_before_a_step_was_a_start_where_steps_are_told() -> None:
    crash = (
        began(1.0, 1.0, 0),
        (3.0, "restored", {"step": 49, "seconds": 0.5}),
        (61.0, "failure", {"failure": "hang", "silent": 40.0}),
        (61.0, "stopping", {"why": ""}),
        (62.0, "stopped", {"seconds": 1.0}),
        (62.0, "rendezvous.began", {"why": "hangs"}),
        began(63.0, 1.0, 1),
    )
    known = {"detect": 40.0, "stop": 1.0, "rendezvous": 2.0, "restore": 0.5}
    assert told(*crash).lost == pytest.approx(known)
    trained = told(*crash, (65.0, "training.began", {"step": 50, "seconds": 2.0}))
    assert trained.lost == pytest.approx({**known, "start": 60.0 - 40.0 - 0.5 + 2.0})
    assert sum(trained.lost.values()) == pytest.approx(65.0)


def test_steps_that_are_done_after_a_notice_are_neither_lost_nor_part_of_a_recovery() -> None:
    counts = told(
        began(1.0, 1.0, 0),
        (3.0, "training.began", {"step": 1, "seconds": 2.0}),
        (20.0, "stopping", {"why": "resize", "seconds": 600.0}),
        (320.0, "stopped", {"seconds": 300.0}),
        (320.1, "steps", {"step": 400, "per_second": 1.0, "silent": 0.6}),
        (320.1, "rendezvous.began", {"why": "n2 joined", "planned": True}),
        began(321.0, 1.0, 0),
    )
    assert counts.lost == pytest.approx({"rendezvous": 2.0, "start": 2.0, "stop": 0.5})
    assert (counts.started.count, counts.started.seconds) == (1, pytest.approx(1.5))


def test_a_recovery_is_counted_from_its_first_sign_until_started_and_until_trained() -> None:
    counts = told(*FAULT)
    assert (counts.started.count, counts.started.seconds) == (1, 2.0)
    assert (counts.trained.count, counts.trained.seconds) == (1, 5.0)


def test_a_first_start_and_an_end_are_no_recoveries() -> None:
    counts = told(began(1.0, 1.0, 0), (9.0, "worker.ended", {"ok": True}))
    assert (counts.started.count, counts.trained.count, counts.broken) == (0, 0, None)


def test_restarts_that_are_earned_back_stay_counted() -> None:
    counts = told(*(began(float(n), 0.0, charged) for n, charged in enumerate((0, 1, 2, 0, 1))))
    assert counts.restarts == 3


@given(st.lists(st.floats(0, 1000), max_size=30))
def test_a_histogram_holds_each_duration_in_all_buckets_that_are_wide_enough(
    seconds: list[float],
) -> None:
    durations = Durations()
    for one in seconds:
        durations = durations.plus(one)
    assert durations.count == len(seconds)
    want = tuple(sum(one <= most for one in seconds) for most in BUCKETS)
    assert durations.within == want


FACTS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3))


@example([(0.0, "generation.began", {"seconds": float("nan")}), (0.0, "drain.asked", {})])
@given(
    st.lists(
        st.tuples(
            st.floats(0, 100),
            st.sampled_from(sorted(KINDS)),
            st.dictionaries(
                st.sampled_from(["seconds", "restarts", "step", "per_second", "silent", "ok"]),
                FACTS,
            ),
        ),
        max_size=12,
    )
)
def test_no_event_however_odd_stops_the_counting_or_takes_anything_back(
    events: list[tuple[float, str, dict[str, Any]]],
) -> None:
    counts = Counts()
    for at, kind, facts in events:
        before = counts
        counts = counted(counts, Event(kind, "job", "n1", 1, at, at, None, facts))
        assert counts.restarts >= before.restarts
        assert counts.redone >= before.redone
        assert all(counts.lost.get(name, 0.0) >= value for name, value in before.lost.items())
        assert sum(counts.failures.values()) >= sum(before.failures.values())
    for sample in samples(Moment(NodeStatus("job", "n1"), counts)):
        assert len(sample.labels) == len(FAMILIES[sample.family].labels)
