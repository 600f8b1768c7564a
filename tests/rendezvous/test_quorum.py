"""The quorum rule: which part of a generation may continue if the store can move."""

from __future__ import annotations

import attrs
import pytest
from sample_memberships import (
    A,
    B,
    C,
    D,
    E,
    create_generation,
    create_node,
    decide,
    mark_running,
    mark_stopped,
    with_failure,
)

from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.membership import JobPhase, Membership, NodeRecord, end_generation, evict
from elasticlib.rendezvous.reconcile import ReconcileResult

ANY = RendezvousSettings(1, 5, max_restarts=1, last_call_timeout=2.0)
QUORUM = attrs.evolve(ANY, quorum=True)
FOUR, FIVE = (A, B, C, D), (A, B, C, D, E)


def create_active(*members: NodeRecord, settings: RendezvousSettings = QUORUM) -> Membership:
    return create_generation(*members, settings=settings)


def create_forming(*members: NodeRecord, settings: RendezvousSettings = QUORUM) -> Membership:
    return end_generation(create_active(*members, settings=settings), "d left")


def assert_blocked(decision: ReconcileResult, *missing: str) -> None:
    """Check that the job is blocked without a deadline, and that the reason names the others."""
    assert (decision.new_membership, decision.requeue_after_s, decision.is_blocked) == (
        None,
        None,
        True,
    )
    assert decision.reason.startswith(f"{', '.join(missing)} of the ")
    assert "half must be here" in decision.reason
    assert "--rdzv-conf quorum=any" in decision.reason


# -- while a generation is active --------------------------------------------------------------


def test_half_of_a_generation_can_end_it_without_the_other_half() -> None:
    opened = decide(create_active(*FOUR), A, B).new_membership
    assert opened is not None
    assert (opened.phase, opened.reason) == (
        JobPhase.FORMING,
        "c, d were lost (killed, or cut off)",
    )


def test_less_than_half_of_a_generation_waits_and_gives_the_reason() -> None:
    assert_blocked(decide(create_active(*FOUR), A), "b", "c", "d")
    assert_blocked(decide(create_active(*FIVE), A, B), "c", "d", "e")


def test_joining_nodes_do_not_count_for_the_quorum() -> None:
    joining = [create_node(f"new{number}") for number in range(3)]
    assert_blocked(decide(create_active(*FOUR), A, *joining), "b", "c", "d")


def test_nodes_that_left_count_for_the_quorum() -> None:
    left_ids = frozenset({B.id, C.id})
    opened = decide(create_active(*FIVE), A, left_ids=left_ids).new_membership
    assert opened is not None
    assert opened.reason == "b, c left; d, e were lost (killed, or cut off)"
    assert_blocked(
        decide(create_active(*FIVE), A, left_ids=frozenset({B.id})), "b", "c", "d and 1 more"
    )


def test_finished_nodes_count_for_the_quorum() -> None:
    finished_ids = frozenset({B.id, C.id})
    opened = decide(create_active(*FIVE), A, finished_ids=finished_ids).new_membership
    assert opened is not None
    assert opened.reason == "d, e were lost (killed, or cut off)"
    assert_blocked(decide(create_active(*FIVE), A, finished_ids=frozenset({B.id})), "c", "d", "e")


def test_the_last_node_of_a_finished_job_is_not_blocked() -> None:
    finished_ids = frozenset({B.id, C.id, D.id})
    decision = decide(create_active(*FOUR), A, finished_ids=finished_ids)
    assert (decision.new_membership, decision.is_blocked) == (None, False)
    assert decision.reason == "3 of 4 nodes are done"


def test_evicted_nodes_count_for_the_quorum() -> None:
    document = create_active(*FIVE)
    for member in (B, C):
        document = evict(document, [member.id], document.member_ids)
    opened = decide(document, A).new_membership
    assert opened is not None
    assert opened.phase is JobPhase.FORMING


def test_nodes_outside_the_generation_do_not_count_for_the_quorum() -> None:
    strangers = frozenset({"x-1", "y-1", "z-1"})
    document = attrs.evolve(create_active(*FOUR), evicted=tuple(strangers))
    assert_blocked(decide(document, A, left_ids=strangers, finished_ids=strangers), "b", "c", "d")


def test_nodes_that_may_return_are_awaited_before_the_job_is_blocked() -> None:
    decision = decide(create_active(*FOUR), A, return_grace_s=1.5)
    assert (decision.new_membership, decision.requeue_after_s, decision.is_blocked) == (
        None,
        1.5,
        False,
    )


def test_a_failure_in_a_minority_does_not_start_a_generation() -> None:
    failed = with_failure(A, "its peer vanished")
    assert_blocked(decide(create_active(*FOUR), failed), "b", "c", "d")


# -- while the next generation is formed -------------------------------------------------------


def test_half_of_the_nodes_can_form_the_next_generation_but_not_less() -> None:
    written = decide(create_forming(*FOUR), mark_stopped(A), mark_stopped(B)).new_membership
    assert written is not None
    assert (written.phase, [m.host for m in written.members]) == (JobPhase.ACTIVE, ["a", "b"])
    assert_blocked(decide(create_forming(*FOUR), mark_stopped(A)), "b", "c", "d")


def test_the_next_generation_does_not_wait_for_nodes_that_left() -> None:
    left_ids = frozenset({C.id, D.id, E.id})
    written = decide(create_forming(*FIVE), mark_stopped(A), left_ids=left_ids).new_membership
    assert written is not None
    assert [m.host for m in written.members] == ["a"]


def test_one_of_two_nodes_can_continue_after_the_other_is_evicted() -> None:
    failed = end_generation(attrs.evolve(create_active(A, B), restarts=1), "b: boom")
    evicted = evict(failed, [B.id], failed.member_ids)
    written = decide(evicted, mark_stopped(A)).new_membership
    assert written is not None
    assert [m.host for m in written.members] == ["a"]


def test_a_minority_with_joining_nodes_never_forms_a_generation() -> None:
    joining = [create_node(f"new{number}") for number in range(4)]
    assert_blocked(
        decide(create_forming(*FOUR), mark_stopped(A), *joining, since_last_arrival_s=1e9),
        "b",
        "c",
        "d",
    )


def test_the_first_generation_needs_more_than_half_of_max_nodes() -> None:
    """Nodes of a first generation cannot know whether the job continues elsewhere."""
    settings = attrs.evolve(QUORUM, min_nodes=1, max_nodes=4)
    too_few = decide(Membership(settings, "one"), A, B, since_last_arrival_s=9.0)
    assert (too_few.new_membership, too_few.is_blocked) == (None, True)
    assert "quorum=any" in too_few.reason
    written = decide(Membership(settings, "one"), A, B, C, since_last_arrival_s=9.0).new_membership
    assert written is not None
    assert written.generation == 1


def test_finished_nodes_count_while_the_next_generation_is_formed() -> None:
    finished_ids = frozenset({B.id, C.id})
    assert (
        decide(create_forming(*FIVE), mark_stopped(A), finished_ids=finished_ids).new_membership
        is not None
    )


# -- a store that has lost the generation ------------------------------------------------------


@pytest.mark.parametrize(
    ("num_present", "is_restored"), [(1, False), (2, False), (3, True), (4, True)]
)
def test_restoring_a_lost_generation_needs_more_than_half_of_its_nodes(
    num_present: int, is_restored: bool
) -> None:
    document = create_active(*FOUR)
    decision = decide(None, *mark_running(document)[:num_present], remembered_state=document.state)
    assert (decision.new_membership is not None, decision.is_blocked) == (
        is_restored,
        not is_restored,
    )
    if not is_restored:
        assert (
            f"{num_present} of 4 of its nodes are here, and more than half must be"
            in decision.reason
        )
        assert "--rdzv-conf quorum=any" in decision.reason


def test_two_parts_with_different_stores_never_both_continue() -> None:
    """Nodes at the old store need half of the generation, and nodes elsewhere more than half."""
    for size in range(1, 6):
        document = create_active(*FIVE[:size])
        for staying in range(size + 1):
            stay = (
                decide(document, *FIVE[:staying])
                if staying
                else ReconcileResult("", is_blocked=True)
            )
            went = mark_running(document)[staying:]
            go = decide(None, *went, remembered_state=document.state) if went else stay
            if went and staying:
                assert stay.is_blocked or go.is_blocked, (size, staying)


# -- without a quorum ----------------------------------------------------------------------------


def test_any_node_can_continue_without_a_quorum() -> None:
    for document in (create_active(*FIVE, settings=ANY), create_forming(*FIVE, settings=ANY)):
        one = A if document.phase is JobPhase.ACTIVE else mark_stopped(A)
        decision = decide(document, one, left_ids=frozenset({B.id}))
        assert decision.new_membership is not None
        assert not decision.is_blocked
    document = create_active(*FIVE, settings=ANY)
    assert (
        decide(None, *mark_running(document)[:1], remembered_state=document.state).new_membership
        is not None
    )
