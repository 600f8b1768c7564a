"""Where the store may move: which part of the last generation may go on without the others."""

from __future__ import annotations

import attrs
import pytest
from test_decide import A, B, C, D, E, holding, node, settled, view, waiting

from elasticlib.rendezvous.decide import Decision, decide
from elasticlib.rendezvous.document import Document, Limits, Node, Phase, expel, reopen

ANY = Limits(1, 5, max_restarts=1, last_call=2.0)
QUORUM = attrs.evolve(ANY, quorum=True)
FOUR, FIVE = (A, B, C, D), (A, B, C, D, E)


def stands(*members: Node, limits: Limits = QUORUM) -> Document:
    return settled(*members, limits=limits)


def is_over(*members: Node, limits: Limits = QUORUM) -> Document:
    return reopen(stands(*members, limits=limits), "d left")


def check_stuck(decision: Decision, *out_of_reach: str) -> None:
    """It waits for the others by name, and no time makes it go on."""
    assert (decision.write, decision.again, decision.stuck) == (None, None, True)
    assert decision.reason.startswith(f"{', '.join(out_of_reach)} of the ")
    assert "half must be here" in decision.reason
    assert "--rdzv-conf quorum=any" in decision.reason


# -- while a generation stands -----------------------------------------------------------------


def test_half_of_the_last_generation_misses_the_other_half_where_the_store_is() -> None:
    opened = decide(view(stands(*FOUR), A, B)).write
    assert opened is not None
    assert (opened.phase, opened.cause) == (
        Phase.OPEN,
        "c, d were lost (killed, or cut off)",
    )


def test_less_than_half_misses_nobody_and_says_what_it_waits_for() -> None:
    check_stuck(decide(view(stands(*FOUR), A)), "b", "c", "d")
    check_stuck(decide(view(stands(*FIVE), A, B)), "c", "d", "e")


def test_newcomers_do_not_make_the_half_full() -> None:
    new = [node(f"new{number}") for number in range(3)]
    check_stuck(decide(view(stands(*FOUR), A, *new)), "b", "c", "d")


def test_who_said_that_it_leaves_counts_for_the_half_and_is_missed() -> None:
    gone = frozenset({B.id, C.id})
    opened = decide(view(stands(*FIVE), A, departed=gone)).write
    assert opened is not None
    assert opened.cause == "b, c left; d, e were lost (killed, or cut off)"
    check_stuck(
        decide(view(stands(*FIVE), A, departed=frozenset({B.id}))), "b", "c", "d and 1 more"
    )


def test_who_is_done_counts_for_the_half() -> None:
    done = frozenset({B.id, C.id})
    opened = decide(view(stands(*FIVE), A, finished=done)).write
    assert opened is not None
    assert opened.cause == "d, e were lost (killed, or cut off)"
    check_stuck(decide(view(stands(*FIVE), A, finished=frozenset({B.id}))), "c", "d", "e")


def test_the_last_of_a_job_whose_others_are_done_is_not_stuck() -> None:
    done = frozenset({B.id, C.id, D.id})
    decision = decide(view(stands(*FOUR), A, finished=done))
    assert (decision.write, decision.stuck) == (None, False)
    assert decision.reason == "3 of 4 nodes are done"


def test_who_was_sent_away_counts_for_the_half() -> None:
    document = stands(*FIVE)
    for member in (B, C):
        document = expel(document, [member.id], document.member_ids)
    opened = decide(view(document, A)).write
    assert opened is not None
    assert opened.phase is Phase.OPEN


def test_strangers_that_are_gone_done_or_sent_away_count_for_nothing() -> None:
    strangers = frozenset({"x-1", "y-1", "z-1"})
    document = attrs.evolve(stands(*FOUR), expelled=tuple(strangers))
    check_stuck(decide(view(document, A, departed=strangers, finished=strangers)), "b", "c", "d")


def test_those_who_may_still_come_are_waited_for_before_anybody_is_stuck() -> None:
    decision = decide(view(stands(*FOUR), A, patience=1.5))
    assert (decision.write, decision.again, decision.stuck) == (None, 1.5, False)


def test_a_failure_in_the_lesser_part_makes_no_generation_of_it() -> None:
    failed = attrs.evolve(A, claim="its peer vanished", claim_membership="1.m")
    check_stuck(decide(view(stands(*FOUR), failed)), "b", "c", "d")


# -- while the next is sought ------------------------------------------------------------------


def test_half_settles_the_next_generation_and_less_does_not() -> None:
    written = decide(view(is_over(*FOUR), waiting(A), waiting(B))).write
    assert written is not None
    assert (written.phase, [m.host for m in written.members]) == (Phase.SETTLED, ["a", "b"])
    check_stuck(decide(view(is_over(*FOUR), waiting(A))), "b", "c", "d")


def test_who_said_that_it_leaves_is_not_waited_for_by_those_who_settle() -> None:
    gone = frozenset({C.id, D.id, E.id})
    written = decide(view(is_over(*FIVE), waiting(A), departed=gone)).write
    assert written is not None
    assert [m.host for m in written.members] == ["a"]


def test_a_spent_budget_leaves_enough_of_two_for_one_to_go_on() -> None:
    failed = reopen(attrs.evolve(stands(A, B), restarts=1), "b: boom")
    expelled = expel(failed, [B.id], failed.member_ids)
    written = decide(view(expelled, waiting(A))).write
    assert written is not None
    assert [m.host for m in written.members] == ["a"]


def test_the_lesser_part_settles_nothing_however_long_it_is_quiet_and_many_are_new() -> None:
    new = [node(f"new{number}") for number in range(4)]
    check_stuck(decide(view(is_over(*FOUR), waiting(A), *new, quiet=1e9)), "b", "c", "d")


def test_a_first_generation_needs_more_than_half_of_all_that_may_come() -> None:
    """Whoever remembers nothing cannot know whether the job goes on elsewhere."""
    limits = attrs.evolve(QUORUM, min_nodes=1, max_nodes=4)
    few = decide(view(Document(limits, "one"), A, B, quiet=9.0))
    assert (few.write, few.stuck) == (None, True)
    assert "quorum=any" in few.reason
    written = decide(view(Document(limits, "one"), A, B, C, quiet=9.0)).write
    assert written is not None
    assert written.generation == 1


def test_who_is_done_counts_when_the_others_gather_too() -> None:
    done = frozenset({B.id, C.id})
    assert decide(view(is_over(*FIVE), waiting(A), finished=done)).write is not None


# -- where a store has forgotten it ------------------------------------------------------------


@pytest.mark.parametrize(("here", "enough"), [(1, False), (2, False), (3, True), (4, True)])
def test_where_the_store_has_forgotten_it_half_is_not_enough(here: int, enough: bool) -> None:
    document = stands(*FOUR)
    decision = decide(view(None, *holding(document)[:here], memory=document.state))
    assert (decision.write is not None, decision.stuck) == (enough, not enough)
    if not enough:
        assert f"{here} of 4 of its nodes are here, and more than half must be" in decision.reason
        assert "--rdzv-conf quorum=any" in decision.reason


def test_of_two_stores_no_two_parts_go_on() -> None:
    """Whoever is where the store was needs half, and whoever has gone elsewhere more than half."""
    for size in range(1, 6):
        document = stands(*FIVE[:size])
        for staying in range(size + 1):
            stay = decide(view(document, *FIVE[:staying])) if staying else Decision("", stuck=True)
            went = holding(document)[staying:]
            go = decide(view(None, *went, memory=document.state)) if went else stay
            if went and staying:
                assert stay.stuck or go.stuck, (size, staying)


# -- without ------------------------------------------------------------------------------------


def test_without_a_quorum_any_one_goes_on() -> None:
    for document in (stands(*FIVE, limits=ANY), is_over(*FIVE, limits=ANY)):
        one = A if document.phase is Phase.SETTLED else waiting(A)
        decision = decide(view(document, one, departed=frozenset({B.id})))
        assert decision.write is not None
        assert not decision.stuck
    document = stands(*FIVE, limits=ANY)
    assert decide(view(None, *holding(document)[:1], memory=document.state)).write is not None
