"""The quorum for a store that may move: which part of a generation may continue."""

from __future__ import annotations

import attrs
import pytest
from test_reconcile import A, B, C, D, E, holding, node, settled, view, waiting

from elasticlib.rendezvous.membership import (
    JobPhase,
    Membership,
    NodeRecord,
    RendezvousSettings,
    end_generation,
    evict,
)
from elasticlib.rendezvous.reconcile import ReconcileResult, reconcile

ANY = RendezvousSettings(1, 5, max_restarts=1, last_call_timeout=2.0)
QUORUM = attrs.evolve(ANY, quorum=True)
FOUR, FIVE = (A, B, C, D), (A, B, C, D, E)


def stands(*members: NodeRecord, settings: RendezvousSettings = QUORUM) -> Membership:
    return settled(*members, settings=settings)


def is_over(*members: NodeRecord, settings: RendezvousSettings = QUORUM) -> Membership:
    return end_generation(stands(*members, settings=settings), "d left")


def check_stuck(decision: ReconcileResult, *out_of_reach: str) -> None:
    """Check that the nodes wait for the others by name, for any time."""
    assert (decision.new_membership, decision.requeue_after_s, decision.is_blocked) == (
        None,
        None,
        True,
    )
    assert decision.reason.startswith(f"{', '.join(out_of_reach)} of the ")
    assert "half must be here" in decision.reason
    assert "--rdzv-conf quorum=any" in decision.reason


# -- while a generation stands -----------------------------------------------------------------


def test_half_of_a_generation_can_end_it_without_the_other_half() -> None:
    opened = reconcile(view(stands(*FOUR), A, B)).new_membership
    assert opened is not None
    assert (opened.phase, opened.reason) == (
        JobPhase.FORMING,
        "c, d were lost (killed, or cut off)",
    )


def test_less_than_half_of_a_generation_waits_and_gives_the_reason() -> None:
    check_stuck(reconcile(view(stands(*FOUR), A)), "b", "c", "d")
    check_stuck(reconcile(view(stands(*FIVE), A, B)), "c", "d", "e")


def test_joining_nodes_do_not_count_for_the_quorum() -> None:
    new = [node(f"new{number}") for number in range(3)]
    check_stuck(reconcile(view(stands(*FOUR), A, *new)), "b", "c", "d")


def test_nodes_that_left_count_for_the_quorum() -> None:
    gone = frozenset({B.id, C.id})
    opened = reconcile(view(stands(*FIVE), A, left_ids=gone)).new_membership
    assert opened is not None
    assert opened.reason == "b, c left; d, e were lost (killed, or cut off)"
    check_stuck(
        reconcile(view(stands(*FIVE), A, left_ids=frozenset({B.id}))), "b", "c", "d and 1 more"
    )


def test_finished_nodes_count_for_the_quorum() -> None:
    done = frozenset({B.id, C.id})
    opened = reconcile(view(stands(*FIVE), A, finished_ids=done)).new_membership
    assert opened is not None
    assert opened.reason == "d, e were lost (killed, or cut off)"
    check_stuck(reconcile(view(stands(*FIVE), A, finished_ids=frozenset({B.id}))), "c", "d", "e")


def test_the_last_node_of_a_finished_job_is_not_blocked() -> None:
    done = frozenset({B.id, C.id, D.id})
    decision = reconcile(view(stands(*FOUR), A, finished_ids=done))
    assert (decision.new_membership, decision.is_blocked) == (None, False)
    assert decision.reason == "3 of 4 nodes are done"


def test_evicted_nodes_count_for_the_quorum() -> None:
    document = stands(*FIVE)
    for member in (B, C):
        document = evict(document, [member.id], document.member_ids)
    opened = reconcile(view(document, A)).new_membership
    assert opened is not None
    assert opened.phase is JobPhase.FORMING


def test_nodes_outside_the_generation_do_not_count_for_the_quorum() -> None:
    strangers = frozenset({"x-1", "y-1", "z-1"})
    document = attrs.evolve(stands(*FOUR), evicted=tuple(strangers))
    check_stuck(
        reconcile(view(document, A, left_ids=strangers, finished_ids=strangers)), "b", "c", "d"
    )


def test_nodes_that_may_return_are_awaited_before_the_job_is_blocked() -> None:
    decision = reconcile(view(stands(*FOUR), A, return_grace_s=1.5))
    assert (decision.new_membership, decision.requeue_after_s, decision.is_blocked) == (
        None,
        1.5,
        False,
    )


def test_a_failure_in_a_minority_does_not_start_a_generation() -> None:
    failed = attrs.evolve(A, failure_reason="its peer vanished", failed_membership_id="1.m")
    check_stuck(reconcile(view(stands(*FOUR), failed)), "b", "c", "d")


# -- while the next is sought ------------------------------------------------------------------


def test_half_of_the_nodes_can_form_the_next_generation_but_not_less() -> None:
    written = reconcile(view(is_over(*FOUR), waiting(A), waiting(B))).new_membership
    assert written is not None
    assert (written.phase, [m.host for m in written.members]) == (JobPhase.ACTIVE, ["a", "b"])
    check_stuck(reconcile(view(is_over(*FOUR), waiting(A))), "b", "c", "d")


def test_the_next_generation_does_not_wait_for_nodes_that_left() -> None:
    gone = frozenset({C.id, D.id, E.id})
    written = reconcile(view(is_over(*FIVE), waiting(A), left_ids=gone)).new_membership
    assert written is not None
    assert [m.host for m in written.members] == ["a"]


def test_one_of_two_nodes_can_continue_after_the_other_is_evicted() -> None:
    failed = end_generation(attrs.evolve(stands(A, B), restarts=1), "b: boom")
    expelled = evict(failed, [B.id], failed.member_ids)
    written = reconcile(view(expelled, waiting(A))).new_membership
    assert written is not None
    assert [m.host for m in written.members] == ["a"]


def test_a_minority_with_joining_nodes_never_forms_a_generation() -> None:
    new = [node(f"new{number}") for number in range(4)]
    check_stuck(
        reconcile(view(is_over(*FOUR), waiting(A), *new, since_last_arrival_s=1e9)), "b", "c", "d"
    )


def test_the_first_generation_needs_more_than_half_of_max_nodes() -> None:
    """Nodes of a first generation cannot know whether the job continues elsewhere."""
    settings = attrs.evolve(QUORUM, min_nodes=1, max_nodes=4)
    few = reconcile(view(Membership(settings, "one"), A, B, since_last_arrival_s=9.0))
    assert (few.new_membership, few.is_blocked) == (None, True)
    assert "quorum=any" in few.reason
    written = reconcile(
        view(Membership(settings, "one"), A, B, C, since_last_arrival_s=9.0)
    ).new_membership
    assert written is not None
    assert written.generation == 1


def test_finished_nodes_count_while_the_next_generation_is_formed() -> None:
    done = frozenset({B.id, C.id})
    assert reconcile(view(is_over(*FIVE), waiting(A), finished_ids=done)).new_membership is not None


# -- where a store has forgotten it ------------------------------------------------------------


@pytest.mark.parametrize(("here", "enough"), [(1, False), (2, False), (3, True), (4, True)])
def test_restoring_a_lost_generation_needs_more_than_half_of_its_nodes(
    here: int, enough: bool
) -> None:
    document = stands(*FOUR)
    decision = reconcile(view(None, *holding(document)[:here], remembered_state=document.state))
    assert (decision.new_membership is not None, decision.is_blocked) == (enough, not enough)
    if not enough:
        assert f"{here} of 4 of its nodes are here, and more than half must be" in decision.reason
        assert "--rdzv-conf quorum=any" in decision.reason


def test_two_parts_with_different_stores_never_both_continue() -> None:
    """Nodes at the old store need half of the generation, and nodes elsewhere more than half."""
    for size in range(1, 6):
        document = stands(*FIVE[:size])
        for staying in range(size + 1):
            stay = (
                reconcile(view(document, *FIVE[:staying]))
                if staying
                else ReconcileResult("", is_blocked=True)
            )
            went = holding(document)[staying:]
            go = reconcile(view(None, *went, remembered_state=document.state)) if went else stay
            if went and staying:
                assert stay.is_blocked or go.is_blocked, (size, staying)


# -- without ------------------------------------------------------------------------------------


def test_any_node_can_continue_without_a_quorum() -> None:
    for document in (stands(*FIVE, settings=ANY), is_over(*FIVE, settings=ANY)):
        one = A if document.phase is JobPhase.ACTIVE else waiting(A)
        decision = reconcile(view(document, one, left_ids=frozenset({B.id})))
        assert decision.new_membership is not None
        assert not decision.is_blocked
    document = stands(*FIVE, settings=ANY)
    assert (
        reconcile(
            view(None, *holding(document)[:1], remembered_state=document.state)
        ).new_membership
        is not None
    )
