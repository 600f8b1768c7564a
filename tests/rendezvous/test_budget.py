"""What a failure costs, what a drain is, and when the membership may change: rule by rule."""

from __future__ import annotations

import attrs
import pytest

from elasticlib.rendezvous.decide import (
    FREE_RESTARTS,
    QUICK_FAILURE_S,
    RESTART_DELAY_S,
    Decision,
    Intent,
    View,
    decide,
)
from elasticlib.rendezvous.document import (
    Document,
    Limits,
    Node,
    Phase,
    reopen,
    settle,
)
from elasticlib.rendezvous.interface import ChangeKind

LIMITS = Limits(1, 4, max_restarts=9, restart_window=60.0)
A, B, C = (Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=1) for name in "abc")


def settled(*members: Node, limits: Limits = LIMITS, **fields: object) -> Document:
    document = settle(Document(limits, "one"), members, charged=False, nonce="m")
    return attrs.evolve(document, **fields)


def next_of(document: Document, *live: Node, **fields: object) -> Decision:
    seen = View(live[0].id, document.limits, document, live, nonce="next", today="now")
    return decide(attrs.evolve(seen, **fields))


def written(document: Document, *live: Node, **fields: object) -> Document:
    decision = next_of(document, *live, **fields)
    assert decision.write is not None, decision.reason
    return decision.write


def waiting(*members: Node) -> list[Node]:
    return [attrs.evolve(member, stopped="1.m") for member in members]


def failed(member: Node, *, killed: bool = False) -> Node:
    return attrs.evolve(
        member, claim=f"{member.host} broke", claim_membership="1.m", claim_killed=killed
    )


# -- drains ----------------------------------------------------------------------------------------


def drained(member: Node) -> Node:
    return attrs.evolve(member, membership="1.m", runs=True, draining="SIGUSR2")


def test_a_member_that_drains_ends_the_generation_on_purpose() -> None:
    after = written(settled(A, B), A, drained(B))
    assert (after.phase, after.cause, after.planned) == (Phase.OPEN, "b drains (SIGUSR2)", True)
    for member in (A, B):
        intent = Intent(attrs.evolve(member, membership="1.m", runs=True), memory=after)
        change = intent.change(after)
        assert change is not None
        assert (change.kind, change.reason) == (ChangeKind.RESIZE, "b drains (SIGUSR2)")


def test_the_next_generation_waits_until_who_drains_has_saved_and_is_without_it() -> None:
    opened = written(settled(A, B), A, drained(B))
    waits = next_of(opened, *waiting(A), drained(B))
    assert waits.write is None
    assert waits.reason == "waiting for b to stop the workers of generation 1"
    on = written(opened, *waiting(A))
    assert (on.phase, on.members, on.restarts) == (Phase.SETTLED, tuple(waiting(A)), 0)
    assert not on.planned


def test_a_node_that_drains_is_no_candidate() -> None:
    opened = written(settled(A, B), A, drained(B))
    (stopped,) = waiting(attrs.evolve(B, draining="SIGUSR2"))
    assert [m.host for m in written(opened, *waiting(A), stopped).members] == ["a"]
    newcomer = attrs.evolve(C, draining="SIGUSR2")
    assert next_of(settled(A), A, newcomer, quiet=9.0, stands=99.0).write is None


def test_who_is_done_may_drain_without_ending_the_others_generation() -> None:
    waits = next_of(settled(A, B), A, drained(B), finished=frozenset({B.id}))
    assert (waits.write, waits.reason) == (None, "1 of 2 nodes are done")


def test_a_failure_is_told_before_a_drain_and_stops_all_without_a_notice() -> None:
    after = written(settled(A, B), failed(A), drained(B))
    assert (after.cause, after.planned) == ("a: a broke", False)


def test_who_slept_through_a_resize_hears_of_a_generation_that_it_is_not_in() -> None:
    later = attrs.evolve(settled(A), generation=2, membership="2.m", planned=True)
    change = Intent(attrs.evolve(B, membership="1.m", runs=True), memory=later).change(later)
    assert change is not None
    assert change.kind is ChangeKind.REOPENED


# -- quick failures in a row -----------------------------------------------------------------------


def after_failures(*lived: float, killed: bool = False) -> Document:
    document = settled(A, B)
    for seconds in lived:
        document = attrs.evolve(document, phase=Phase.SETTLED)
        document = written(document, A, failed(B, killed=killed), stands=seconds)
    return document


def test_the_first_restarts_are_not_held_back() -> None:
    opened = after_failures(*[1.0] * FREE_RESTARTS)
    assert written(opened, *waiting(A, failed(B))).phase is Phase.SETTLED


@pytest.mark.parametrize("count", [FREE_RESTARTS + 1, 30])
def test_later_restarts_are_delayed_by_a_constant(count: int) -> None:
    opened = after_failures(*[1.0] * count)
    waits = next_of(opened, *waiting(A, failed(B)), stands=0.1)
    assert (waits.write, waits.again) == (None, RESTART_DELAY_S - 0.1)
    assert waits.reason == (
        f"the last {count} generations failed within 10 s each: the restart is delayed by 5 s"
    )
    on = written(opened, *waiting(A, failed(B)), stands=RESTART_DELAY_S)
    assert (on.phase, on.restarts) == (Phase.SETTLED, 1)


def test_a_generation_that_was_at_work_for_a_while_begins_the_count_anew() -> None:
    assert after_failures(1.0, 1.0, 1.0, QUICK_FAILURE_S).quick == 0


def test_so_does_one_that_ends_for_another_reason_after_a_while() -> None:
    document = settled(A, B, quick=5)
    assert written(document, A, stands=QUICK_FAILURE_S).quick == 0
    assert written(document, A, stands=QUICK_FAILURE_S / 2).quick == 5


def test_who_is_killed_again_and_again_comes_back_at_once() -> None:
    opened = after_failures(*[0.1] * 20, killed=True)
    assert written(opened, *waiting(A, failed(B, killed=True))).phase is Phase.SETTLED


def test_a_resize_is_never_held_back() -> None:
    opened = after_failures(*[1.0] * 9)
    assert written(opened, *waiting(A)).phase is Phase.SETTLED


def test_the_last_failure_that_the_budget_allows_is_told_at_once() -> None:
    opened = attrs.evolve(after_failures(*[1.0] * 9), restarts=9)
    assert written(opened, *waiting(A, failed(B))).expelled == (B.id,)


# -- what time brings ------------------------------------------------------------------------------


def test_a_generation_that_stands_earns_back_the_restarts() -> None:
    document = settled(A, B, restarts=3, quick=1)
    waits = next_of(document, A, B, stands=20.0)
    assert (waits.write, waits.again) == (None, 40.0)
    after = written(document, A, B, stands=60.0)
    assert after == attrs.evolve(document, restarts=0, quick=0)
    # Once: what is forgiven needs no second write.
    assert next_of(after, A, B, stands=99.0).write is None


def test_without_a_window_restarts_count_for_ever() -> None:
    limits = attrs.evolve(LIMITS, restart_window=0.0)
    assert next_of(settled(A, limits=limits, restarts=3), A, stands=1e9).write is None


def test_whichever_comes_first_is_when_to_look_again() -> None:
    waits = next_of(settled(A, restarts=1), A, B, quiet=0.5, stands=10.0)
    assert waits.again == LIMITS.last_call - 0.5
    waits = next_of(settled(A, restarts=1), A, B, quiet=0.5, stands=59.0)
    assert waits.again == 1.0


def test_a_reopened_generation_forgets_that_it_was_planned() -> None:
    document = attrs.evolve(settled(A, B), planned=True)
    assert not reopen(document, "x").planned
