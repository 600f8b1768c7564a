"""Each rule of the decision, and what holds for every document and view."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.rendezvous.decide import Intent, View, decide
from elasticlib.rendezvous.decide import waiting as number_waiting
from elasticlib.rendezvous.document import (
    Document,
    Ending,
    Failure,
    Leader,
    Limits,
    Node,
    Phase,
    Why,
    of_members,
    reopen,
    settle,
)
from elasticlib.rendezvous.ranks import in_rank_order

LIMITS = Limits(2, 4, max_restarts=1, last_call=2.0)


def node(name: str, **fields: object) -> Node:
    plain = Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=1)
    return attrs.evolve(plain, **fields)


def settled(*members: Node, limits: Limits = LIMITS, **fields: object) -> Document:
    document = settle(Document(limits, "one"), members, charged=False, nonce="m")
    return attrs.evolve(document, **fields)


def view(document: Document | None, *live: Node, **fields: object) -> View:
    limits = LIMITS if document is None else document.limits
    me = live[0].id if live else "nobody"
    return attrs.evolve(View(me, limits, document, live, nonce="next", today="now"), **fields)


A, B, C, D, E = (node(name) for name in "abcde")


def waiting(member: Node, left: str = "1.m") -> Node:
    return attrs.evolve(member, stopped=left)


def holding(document: Document) -> list[Node]:
    """Its members, as each of them remembers where it is."""
    return [
        attrs.evolve(member, membership=document.membership, rank=rank, runs=True)
        for rank, member in enumerate(document.members)
    ]


def test_the_first_node_writes_the_limits_down() -> None:
    assert decide(view(None, A)).write == Document(LIMITS, "next")


def test_below_the_minimum_nothing_settles() -> None:
    decision = decide(view(Document(LIMITS), A, quiet=1e9))
    assert decision.write is None
    assert decision.reason == "1 of at least 2 nodes are here"


def test_the_last_call_waits_for_quiet_and_says_when_to_look_again() -> None:
    decision = decide(view(Document(LIMITS), A, B, quiet=0.5))
    assert decision.write is None
    assert decision.again == 1.5


def test_the_last_call_ends_at_once_at_the_maximum() -> None:
    written = decide(view(Document(LIMITS), A, B, C, D, quiet=0.0)).write
    assert written is not None
    assert (written.phase, written.generation, len(written.members)) == (Phase.SETTLED, 1, 4)


def test_quiet_settles_what_is_there() -> None:
    written = decide(view(Document(LIMITS), B, A, quiet=2.0)).write
    assert written is not None
    assert written.members == (A, B)


def test_whoever_leads_misses_a_member() -> None:
    decision = decide(attrs.evolve(view(settled(A, B, C), B, C), me=B.id))
    assert decision.write is not None
    assert (decision.write.phase, decision.write.cause) == (
        Phase.OPEN,
        "a was lost (killed, or cut off)",
    )


def test_why_a_generation_ends_is_told_apart_from_its_words() -> None:
    """Whatever a failure, or a node, is called."""
    stands = settled(A, B, C)
    a, b, c = holding(stands)
    failed = attrs.evolve(
        a, claim="ValueError: no batches left", claim_membership=stands.membership
    )
    drains = attrs.evolve(a, draining="nobody left")
    again = attrs.evolve(a, stopped=stands.membership)
    told = {
        Why.FAILURE: [(failed, b, c)],
        Why.LOSS: [(b, c), (failed, b), (again, b, c)],
        Why.RESIZE: [(drains, b, c), (a, b, c, node("no batches left"))],
    }
    for why, lives in told.items():
        for live in lives:
            written = decide(view(stands, *live, quiet=9.0)).write
            assert written is not None
            assert (written.phase, written.why) == (Phase.OPEN, why), written.cause
    written = decide(view(Document(LIMITS), A, B, quiet=2.0)).write
    assert written is not None
    assert written.why is Why.START


def test_survivors_regroup_without_a_last_call_and_without_a_charge() -> None:
    failure = Failure(A.id, "its peer vanished")
    document = reopen(settled(A, B, C), "c left", failure, why=Why.LOSS)
    written = decide(view(document, waiting(A), waiting(B), quiet=0.0)).write
    assert written is not None
    assert (written.generation, written.restarts, len(written.members)) == (2, 0, 2)


def test_a_node_whose_loss_is_known_after_its_peers_failure_is_the_cause() -> None:
    claimed = attrs.evolve(A, claim="its peer vanished", claim_membership="1.m")
    opened = decide(view(settled(A, B), claimed, B)).write
    assert opened is not None
    assert (opened.cause, opened.why) == ("a: its peer vanished", Why.FAILURE)
    known = decide(view(opened, waiting(claimed))).write
    assert known is not None
    assert (known.cause, known.why) == ("b was lost (killed, or cut off)", Why.LOSS)
    decision = decide(view(known, waiting(claimed)))
    reason = "1 of at least 2 nodes are here; b was lost (killed, or cut off)"
    assert (decision.reason, decision.write) == (reason, None)
    again = decide(view(known, waiting(claimed), C, quiet=9.0)).write
    assert again is not None
    assert (again.cause, again.why, again.restarts) == (known.cause, Why.LOSS, 0)


def test_a_node_that_failed_and_is_gone_is_known_by_its_failure() -> None:
    opened = reopen(settled(A, B), "b: out of memory", Failure(B.id, "out of memory"))
    assert decide(view(opened, waiting(A))).write is None


def test_nobody_is_left_out_while_it_stops_its_workers() -> None:
    decision = decide(view(reopen(settled(A, B), "x"), waiting(A), B))
    assert decision.write is None
    assert decision.reason == "waiting for b to stop the workers of generation 1"


def test_a_failure_is_charged_when_all_members_are_still_there() -> None:
    claimed = attrs.evolve(B, claim="exit code 1", claim_membership="1.m")
    opened = decide(view(settled(A, B), A, claimed)).write
    assert opened is not None
    assert opened.failure == Failure(B.id, "exit code 1")
    again = decide(view(opened, waiting(A), waiting(claimed))).write
    assert again is not None
    assert (again.generation, again.restarts) == (2, 1)


def test_the_earliest_claim_is_the_cause() -> None:
    first = attrs.evolve(B, claim="first", claim_membership="1.m")
    second = attrs.evolve(A, claim="second", claim_membership="1.m")
    opened = decide(view(settled(A, B), first, second)).write
    assert opened is not None
    assert opened.failure == Failure(B.id, "first")


def test_an_old_claim_means_nothing_to_a_later_generation() -> None:
    old = attrs.evolve(B, claim="exit code 1", claim_membership="1.m")
    document = attrs.evolve(settled(A, B), generation=2, membership="2.m")
    assert decide(view(document, A, old)).write is None


def test_a_spent_budget_sends_the_failed_node_away_if_the_others_can_go_on() -> None:
    document = reopen(settled(A, B, C, restarts=1), "x", Failure(C.id, "boom"))
    expelled = decide(view(document, waiting(A), waiting(B), waiting(C))).write
    assert expelled is not None
    assert expelled.expelled == (C.id,)
    on = decide(view(expelled, waiting(A), waiting(B), waiting(C))).write
    assert on is not None
    assert [m.host for m in on.members] == ["a", "b"]
    assert on.restarts == 1


def test_a_spent_budget_ends_the_job_if_the_others_cannot() -> None:
    document = reopen(settled(A, B, restarts=1), "x", Failure(B.id, "boom"))
    ended = decide(view(document, waiting(A), waiting(B))).write
    assert ended is not None
    assert ended.phase is Phase.FAILED
    assert ended.cause == "b: boom (1 of 1 restarts used)"


def test_newcomers_wait_out_the_last_call_while_members_train() -> None:
    assert decide(view(settled(A, B), A, B, C, quiet=1.0)).write is None
    opened = decide(view(settled(A, B), A, B, C, quiet=2.0)).write
    assert opened is not None
    assert opened.cause == "c joined"


def test_a_member_with_other_workers_than_it_has_a_seat_for_resizes_the_job_at_once() -> None:
    short = settled(attrs.evolve(A, slots=1), B)
    two = attrs.evolve(A, slots=2)
    opened = decide(view(short, two, B)).write
    assert opened is not None
    assert (opened.cause, opened.planned, opened.failure) == ("a has 2 workers ready", True, None)
    both = [waiting(two), waiting(B)]
    again = decide(view(opened, *both)).write
    assert again is not None
    assert ([m.slots for m in again.members], again.restarts) == ([2, B.slots], 0)
    # What is worse goes first, and who has finished need not start again.
    failed = attrs.evolve(B, claim="exit code 1", claim_membership="1.m")
    charged = decide(view(short, two, failed)).write
    assert charged is not None
    assert charged.failure is not None
    assert decide(view(short, two, B, finished=frozenset({B.id}))).write is None


def test_a_node_without_workers_yet_is_gone_on_without_by_those_that_come_with_kept_ones() -> None:
    opened = attrs.evolve(reopen(settled(A, B, C), "boom", Failure(C.id, "boom")))
    starting = attrs.evolve(waiting(C), slots=0)
    kept = [attrs.evolve(waiting(one), kept=True) for one in (A, B)]
    smaller = decide(view(opened, *kept, starting)).write
    assert smaller is not None
    assert [member.id for member in smaller.members] == [A.id, B.id]
    assert smaller.restarts == 1, "whose failure it was is here, and it is charged"
    # Where nobody is kept from work, they begin together.
    patient = decide(view(opened, waiting(A), waiting(B), starting))
    assert (patient.write, patient.reason) == (None, "waiting for the workers of c to start")
    # And too few do not begin.
    two = reopen(settled(A, C), "boom", Failure(C.id, "boom"))
    few = decide(view(two, kept[0], starting))
    assert (few.write, few.reason) == (None, "1 of at least 2 nodes are here")


def test_a_node_that_comes_is_let_in_when_it_says_with_how_many_workers() -> None:
    stands, starting = settled(A, B), attrs.evolve(C, slots=0)
    here = view(stands, A, B, starting, quiet=9.0)
    assert decide(here).write is None
    assert number_waiting(here) == 0
    ready = view(stands, A, B, C, quiet=9.0)
    assert number_waiting(ready) == 1
    opened = decide(ready).write
    assert opened is not None
    assert opened.planned
    assert decide(view(opened, waiting(A), waiting(B), starting, quiet=0.0)).write is not None


def test_surplus_nodes_are_spares_and_change_nothing() -> None:
    decision = decide(view(settled(A, B, C, D), A, B, C, D, E, quiet=9.0))
    assert decision.write is None
    assert decision.reason == "generation 1 stands, 1 spare"


def test_a_stranger_whose_workers_may_still_run_is_not_let_in() -> None:
    stale = attrs.evolve(C, membership="3.m", runs=True)
    assert decide(view(settled(A, B), A, B, stale, quiet=9.0)).write is None


def test_all_done_is_success_and_nobody_joins_once_one_is_done() -> None:
    document = settled(A, B)
    assert decide(view(document, A, B, C, finished=frozenset({A.id}), quiet=9.0)).write is None
    ended = decide(view(document, A, B, finished=frozenset({A.id, B.id}))).write
    assert ended is not None
    assert ended.phase is Phase.SUCCEEDED


def test_a_done_node_that_has_gone_is_no_loss() -> None:
    assert decide(view(settled(A, B), B, finished=frozenset({A.id}))).write is None


def test_asking_again_starts_a_new_generation_for_all() -> None:
    opened = decide(view(settled(A, B), waiting(A), B)).write
    assert opened is not None
    assert opened.phase is Phase.OPEN


def test_names_sort_as_people_count_and_survivors_stay_in_front() -> None:
    ten, two = node("node10"), node("node2")
    assert in_rank_order(Document(LIMITS), [ten, two]) == (two, ten)
    assert in_rank_order(settled(ten, A), [two, ten]) == (ten, two)


def test_a_node_is_called_by_its_host_unless_others_share_it() -> None:
    twin = attrs.evolve(B, host="a")
    opened = decide(view(settled(A, twin), A)).write
    assert opened is not None
    assert opened.cause == "b-1 was lost (killed, or cut off)"


def test_a_hint_orders_newcomers() -> None:
    first, second = node("z", hint=0), node("y", hint=1)
    assert in_rank_order(Document(LIMITS), [second, A, first]) == (first, second, A)


def test_with_fixed_ranks_each_stands_where_it_asked_and_a_double_waits() -> None:
    limits = Limits(2, 2, last_call=0.0, fixed_ranks=True)
    one, zero, double = node("a", hint=1), node("b", hint=0), node("c", hint=1)
    assert decide(view(Document(limits), one, double, quiet=9.0)).write is None
    written = decide(view(Document(limits), one, double, zero, quiet=9.0)).write
    assert written is not None
    assert written.members == (zero, one)


names = st.sampled_from([f"n{i}" for i in range(7)])
memberships = st.sampled_from(["", "1.m", "2.m"])
some_nodes = st.builds(
    lambda name, left, runs, failed: node(
        name, stopped=left, runs=runs, claim="x" if failed else None, claim_membership=failed
    ),
    names,
    memberships,
    st.booleans(),
    memberships,
)
lives = st.lists(some_nodes, unique_by=lambda n: n.id, max_size=7)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    low = draw(st.integers(1, 4))
    limits = Limits(low, draw(st.integers(low, 6)), draw(st.integers(0, 2)))
    document = Document(limits)
    members = draw(lives)
    if limits.min_nodes <= len(members) <= limits.max_nodes:
        document = settle(document, members, charged=False, nonce="m")
        if draw(st.booleans()):
            failure = draw(st.sampled_from([None, Failure(members[0].id, "x")]))
            document = reopen(document, "x", failure)
    expelled = draw(st.lists(names, max_size=2, unique=True))
    return attrs.evolve(document, expelled=tuple(f"{name}-1" for name in expelled))


@given(documents(), lives, st.floats(0, 5), st.sets(names, max_size=3))
def test_whatever_is_written_keeps_the_promises(
    document: Document, live: list[Node], quiet: float, done: set[str]
) -> None:
    ids = frozenset(f"{name}-1" for name in done) & document.member_ids
    me = live[0].id if live else "nobody"
    seen = View(me, document.limits, document, tuple(live), ids, quiet=quiet, nonce="next")
    after = decide(seen).write
    if after is not None:
        _check(document, after, live)


def _check(before: Document, after: Document, live: list[Node]) -> None:
    assert after != before
    assert after.generation in (before.generation, before.generation + 1)
    assert before.restarts <= after.restarts <= before.limits.max_restarts
    if after.generation == before.generation:
        assert after.members == before.members
        return
    ids = [member.id for member in after.members]
    assert after.membership != before.membership
    assert after.nodes == len(ids)
    assert before.phase is Phase.OPEN
    assert before.limits.min_nodes <= len(ids) <= before.limits.max_nodes
    assert len(set(ids)) == len(ids)
    assert not set(ids) & {*before.expelled, *before.surplus}
    ready = {
        n.id
        for n in live
        if (n.stopped == before.membership if n.id in before.member_ids else not n.runs)
    }
    assert set(ids) <= ready
    survivors = [m.id for m in before.members if m.id in ids]
    assert ids[: len(survivors)] == survivors


# -- what a store has forgotten --------------------------------------------------------------------


def forgotten(document: Document, *live: Node, **fields: object) -> View:
    return view(None, *live, memory=document.state, **fields)


def test_a_forgotten_generation_is_the_same_again_when_all_its_nodes_remember_it() -> None:
    document = settled(A, B)
    a, b = holding(document)
    again = decide(forgotten(document, b, C, a)).write
    assert again == of_members(document.state, (a, b))
    assert again.phase is Phase.SETTLED


def test_those_who_do_not_come_back_are_waited_for_and_then_lost() -> None:
    document = settled(A, B, C)
    a, b, _ = holding(document)
    waits = decide(forgotten(document, a, b, patience=1.5))
    assert (waits.write, waits.again) == (None, 1.5)
    lost = decide(forgotten(document, b, a)).write
    assert lost is not None
    assert (lost.phase, lost.generation, lost.members) == (Phase.OPEN, 1, (a, b))
    assert lost.cause == "1 of 3 nodes was lost with the store"


def test_with_a_quorum_more_than_half_must_remember() -> None:
    limits = attrs.evolve(LIMITS, quorum=True)
    document = settled(A, B, C, D, limits=limits)
    a, b, c, _ = holding(document)
    too_few = decide(forgotten(document, a, b))
    assert too_few.write is None
    assert "2 of 4" in too_few.reason
    assert decide(forgotten(document, a, b, c)).write is not None


def test_a_document_in_which_nothing_came_gives_way_to_what_is_remembered() -> None:
    document = settled(A, B)
    fresh = Document(LIMITS, "two")
    seen = view(fresh, *holding(document), memory=document.state)
    again = decide(seen).write
    assert again is not None
    assert (again.incarnation, again.generation) == ("one", 1)
    other = attrs.evolve(settled(C, D), incarnation="two")
    assert decide(view(other, C, D, *holding(document), memory=document.state)).write is None


def test_a_memory_that_nobody_has_any_more_counts_for_nothing() -> None:
    begun = decide(forgotten(settled(A, B), C)).write
    assert begun == Document(LIMITS, "next")


def test_what_an_absence_of_the_store_ended_is_given_time_to_come_back() -> None:
    waits = decide(view(settled(A, B), A, patience=2.0))
    assert (waits.write, waits.again) == (None, 2.0)
    opened = reopen(settled(A, B, C), "x")
    assert decide(view(opened, waiting(A), waiting(B), patience=1.0)).write is None


# -- after the end ---------------------------------------------------------------------------------


def test_a_new_run_starts_once_no_node_of_the_ended_run_is_alive() -> None:
    ended = attrs.evolve(settled(A, B), phase=Phase.SUCCEEDED)
    new = attrs.evolve(C, came_after="one")
    assert decide(view(ended, A, new)).write is None
    assert decide(view(ended, new, A, came_after="one")).write is None
    # The leader itself may be a node of the ended run that has lost its own lease.
    assert decide(view(ended, new)).write is None
    anew = Document(LIMITS, "next", supersedes="one")
    assert decide(view(ended, new, came_after="one")).write == anew
    # Who slept through all that has nothing to put in its place.
    sleeper = holding(settled(A, B))
    stays = decide(view(anew, C, D, *sleeper, memory=settled(A, B).state, quiet=9.0)).write
    assert stays is not None
    assert stays.incarnation == "next"


def test_a_new_run_starts_if_all_nodes_of_a_running_one_are_lost_but_not_while_a_spare_lives() -> (
    None
):
    left = settled(A, B)
    came = attrs.evolve(C, came_after="one")
    anew = decide(view(left, came, came_after="one")).write
    assert anew == Document(LIMITS, "next", generation=1, supersedes="one")
    kept = decide(view(left, D, came)).write
    assert kept is not None
    assert (kept.incarnation, kept.phase) == ("one", Phase.OPEN)


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED, Phase.ABORTED])
@pytest.mark.parametrize(
    ("alive", "is_part"),
    [
        ([], False),
        ([attrs.evolve(D, came_after="one")], False),
        ([Leader("d", "d", came_after="one")], False),
        ([A], True),
        ([Leader("a", "a")], True),
        ([attrs.evolve(D, came_after="one"), A], True),
    ],
    ids=["nobody", "a new node", "a new leader", "an old node", "an old leader", "new and old"],
)
def test_a_node_that_starts_is_part_of_an_ended_run_only_while_one_of_its_nodes_lives(
    alive: list[Node | Leader], is_part: bool, phase: Phase
) -> None:
    # However many nodes the ended run had, and whether it had room for more.
    for members in ((A, B), (A, B, C, D)):
        ended = attrs.evolve(settled(*members), phase=phase)
        intent = Intent(attrs.evolve(A, id="new-1")).arrive(ended, None, alive)
        change = intent.notice(ended, alive).final_change(ended)
        assert (change is not None) is is_part
        assert intent.node.came_after == ("" if is_part else "one")


def test_the_end_says_who_wrote_it_down_and_when() -> None:
    ended = decide(view(settled(A, B), A, B, finished=frozenset({A.id, B.id}))).write
    assert ended is not None
    assert ended.ending == Ending("a", "now")
