"""Each rule of `reconcile`, and invariants for every document and view."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.rendezvous.bad_nodes import ExcludedHost, FirstFailure
from elasticlib.rendezvous.membership import (
    GenerationTrigger,
    JobEnd,
    JobPhase,
    Leader,
    Membership,
    NodeFailure,
    NodeRecord,
    RendezvousSettings,
    end_generation,
    form_generation,
    with_members,
)
from elasticlib.rendezvous.node_intent import NodeIntent
from elasticlib.rendezvous.rank_assignment import order_members
from elasticlib.rendezvous.reconcile import LeaderView, reconcile
from elasticlib.rendezvous.reconcile import num_nodes_waiting as number_waiting

LIMITS = RendezvousSettings(2, 4, max_restarts=1, last_call_timeout=2.0)


def node(name: str, **fields: object) -> NodeRecord:
    plain = NodeRecord(id=f"{name}-1", host=name, address="127.0.0.1", slots=1)
    return attrs.evolve(plain, **fields)


def settled(
    *members: NodeRecord, settings: RendezvousSettings = LIMITS, **fields: object
) -> Membership:
    document = form_generation(Membership(settings, "one"), members, charged=False, nonce="m")
    return attrs.evolve(document, **fields)


def view(document: Membership | None, *live: NodeRecord, **fields: object) -> LeaderView:
    settings = LIMITS if document is None else document.settings
    me = live[0].id if live else "nobody"
    return attrs.evolve(
        LeaderView(me, settings, document, live, nonce="next", wall_time="now"), **fields
    )


A, B, C, D, E = (node(name) for name in "abcde")


def waiting(member: NodeRecord, left: str = "1.m") -> NodeRecord:
    return attrs.evolve(member, stopped_membership_id=left)


def holding(document: Membership) -> list[NodeRecord]:
    """Its members, as each of them remembers where it is."""
    return [
        attrs.evolve(
            member, membership_id=document.membership_id, group_rank=rank, may_run_workers=True
        )
        for rank, member in enumerate(document.members)
    ]


def test_the_first_node_writes_the_settings() -> None:
    assert reconcile(view(None, A)).new_membership == Membership(LIMITS, "next")


def test_no_generation_is_formed_below_min_nodes() -> None:
    decision = reconcile(view(Membership(LIMITS), A, since_last_arrival_s=1e9))
    assert decision.new_membership is None
    assert decision.reason == "1 of at least 2 nodes are here"


def test_the_last_call_waits_for_arrivals_and_returns_the_next_poll() -> None:
    decision = reconcile(view(Membership(LIMITS), A, B, since_last_arrival_s=0.5))
    assert decision.new_membership is None
    assert decision.requeue_after_s == 1.5


def test_the_last_call_ends_at_once_at_the_maximum() -> None:
    written = reconcile(
        view(Membership(LIMITS), A, B, C, D, since_last_arrival_s=0.0)
    ).new_membership
    assert written is not None
    assert (written.phase, written.generation, len(written.members)) == (JobPhase.ACTIVE, 1, 4)


def test_a_generation_is_formed_after_the_last_call() -> None:
    written = reconcile(view(Membership(LIMITS), B, A, since_last_arrival_s=2.0)).new_membership
    assert written is not None
    assert written.members == (A, B)


def test_any_leader_notices_a_lost_member() -> None:
    decision = reconcile(attrs.evolve(view(settled(A, B, C), B, C), node_id=B.id))
    assert decision.new_membership is not None
    assert (decision.new_membership.phase, decision.new_membership.reason) == (
        JobPhase.FORMING,
        "a was lost (killed, or cut off)",
    )


def test_the_trigger_of_a_generation_is_recorded_beside_its_reason() -> None:
    """Whatever a failure, or a node, is called."""
    stands = settled(A, B, C)
    a, b, c = holding(stands)
    failed = attrs.evolve(
        a, failure_reason="ValueError: no batches left", failed_membership_id=stands.membership_id
    )
    drains = attrs.evolve(a, drain_reason="nobody left")
    again = attrs.evolve(a, stopped_membership_id=stands.membership_id)
    told = {
        GenerationTrigger.FAILURE: [(failed, b, c)],
        GenerationTrigger.NODE_LOSS: [(b, c), (failed, b), (again, b, c)],
        GenerationTrigger.RESIZE: [(drains, b, c), (a, b, c, node("no batches left"))],
    }
    for why, lives in told.items():
        for live in lives:
            written = reconcile(view(stands, *live, since_last_arrival_s=9.0)).new_membership
            assert written is not None
            assert (written.phase, written.trigger) == (JobPhase.FORMING, why), written.reason
    written = reconcile(view(Membership(LIMITS), A, B, since_last_arrival_s=2.0)).new_membership
    assert written is not None
    assert written.trigger is GenerationTrigger.START


def test_survivors_regroup_without_a_last_call_and_without_using_a_restart() -> None:
    failure = NodeFailure(A.id, "its peer vanished")
    document = end_generation(
        settled(A, B, C), "c left", failure, trigger=GenerationTrigger.NODE_LOSS
    )
    written = reconcile(
        view(document, waiting(A), waiting(B), since_last_arrival_s=0.0)
    ).new_membership
    assert written is not None
    assert (written.generation, written.restarts, len(written.members)) == (2, 0, 2)


def test_a_node_loss_that_is_noticed_after_a_failure_is_the_reason() -> None:
    claimed = attrs.evolve(A, failure_reason="its peer vanished", failed_membership_id="1.m")
    opened = reconcile(view(settled(A, B), claimed, B)).new_membership
    assert opened is not None
    assert (opened.reason, opened.trigger) == ("a: its peer vanished", GenerationTrigger.FAILURE)
    known = reconcile(view(opened, waiting(claimed))).new_membership
    assert known is not None
    assert (known.reason, known.trigger) == (
        "b was lost (killed, or cut off)",
        GenerationTrigger.NODE_LOSS,
    )
    decision = reconcile(view(known, waiting(claimed)))
    reason = "1 of at least 2 nodes are here; b was lost (killed, or cut off)"
    assert (decision.reason, decision.new_membership) == (reason, None)
    again = reconcile(view(known, waiting(claimed), C, since_last_arrival_s=9.0)).new_membership
    assert again is not None
    assert (again.reason, again.trigger, again.restarts) == (
        known.reason,
        GenerationTrigger.NODE_LOSS,
        0,
    )


def test_a_lost_node_that_reported_a_failure_keeps_its_failure_as_reason() -> None:
    opened = end_generation(settled(A, B), "b: out of memory", NodeFailure(B.id, "out of memory"))
    assert reconcile(view(opened, waiting(A))).new_membership is None


def test_a_node_that_is_stopping_its_workers_is_awaited() -> None:
    decision = reconcile(view(end_generation(settled(A, B), "x"), waiting(A), B))
    assert decision.new_membership is None
    assert decision.reason == "waiting for b to stop the workers of generation 1"


def test_a_failure_uses_a_restart_if_all_members_are_present() -> None:
    claimed = attrs.evolve(B, failure_reason="exit code 1", failed_membership_id="1.m")
    opened = reconcile(view(settled(A, B), A, claimed)).new_membership
    assert opened is not None
    assert opened.failure == NodeFailure(B.id, "exit code 1")
    again = reconcile(view(opened, waiting(A), waiting(claimed))).new_membership
    assert again is not None
    assert (again.generation, again.restarts) == (2, 1)


def test_the_earliest_reported_failure_is_the_reason() -> None:
    first = attrs.evolve(B, failure_reason="first", failed_membership_id="1.m")
    second = attrs.evolve(A, failure_reason="second", failed_membership_id="1.m")
    opened = reconcile(view(settled(A, B), first, second)).new_membership
    assert opened is not None
    assert opened.failure == NodeFailure(B.id, "first")


def test_a_failure_of_an_earlier_generation_is_ignored() -> None:
    old = attrs.evolve(B, failure_reason="exit code 1", failed_membership_id="1.m")
    document = attrs.evolve(settled(A, B), generation=2, membership_id="2.m")
    assert reconcile(view(document, A, old)).new_membership is None


def test_the_failed_node_is_evicted_after_the_last_restart_if_the_others_suffice() -> None:
    document = end_generation(settled(A, B, C, restarts=1), "x", NodeFailure(C.id, "boom"))
    expelled = reconcile(view(document, waiting(A), waiting(B), waiting(C))).new_membership
    assert expelled is not None
    assert expelled.evicted == (C.id,)
    on = reconcile(view(expelled, waiting(A), waiting(B), waiting(C))).new_membership
    assert on is not None
    assert [m.host for m in on.members] == ["a", "b"]
    assert on.restarts == 1


def test_the_job_fails_after_the_last_restart_if_the_others_do_not_suffice() -> None:
    document = end_generation(settled(A, B, restarts=1), "x", NodeFailure(B.id, "boom"))
    ended = reconcile(view(document, waiting(A), waiting(B))).new_membership
    assert ended is not None
    assert ended.phase is JobPhase.FAILED
    assert ended.reason == "b: boom (1 of 1 restarts used)"


def test_joining_nodes_wait_for_the_last_call_while_members_train() -> None:
    assert reconcile(view(settled(A, B), A, B, C, since_last_arrival_s=1.0)).new_membership is None
    opened = reconcile(view(settled(A, B), A, B, C, since_last_arrival_s=2.0)).new_membership
    assert opened is not None
    assert opened.reason == "c joined"


def test_a_member_with_another_number_of_workers_resizes_the_job_at_once() -> None:
    short = settled(attrs.evolve(A, slots=1), B)
    two = attrs.evolve(A, slots=2)
    opened = reconcile(view(short, two, B)).new_membership
    assert opened is not None
    assert (opened.reason, opened.is_planned, opened.failure) == (
        "a has 2 workers ready",
        True,
        None,
    )
    both = [waiting(two), waiting(B)]
    again = reconcile(view(opened, *both)).new_membership
    assert again is not None
    assert ([m.slots for m in again.members], again.restarts) == ([2, B.slots], 0)
    # What is worse goes first, and who has finished need not start again.
    failed = attrs.evolve(B, failure_reason="exit code 1", failed_membership_id="1.m")
    charged = reconcile(view(short, two, failed)).new_membership
    assert charged is not None
    assert charged.failure is not None
    assert reconcile(view(short, two, B, finished_ids=frozenset({B.id}))).new_membership is None


def test_members_with_retained_workers_continue_without_a_node_that_has_none_yet() -> None:
    opened = attrs.evolve(end_generation(settled(A, B, C), "boom", NodeFailure(C.id, "boom")))
    starting = attrs.evolve(waiting(C), slots=0)
    kept = [attrs.evolve(waiting(one), has_retained_workers=True) for one in (A, B)]
    smaller = reconcile(view(opened, *kept, starting)).new_membership
    assert smaller is not None
    assert [member.id for member in smaller.members] == [A.id, B.id]
    assert smaller.restarts == 1, "whose failure it was is here, and it is charged"
    # Where nobody is kept from work, they begin together.
    patient = reconcile(view(opened, waiting(A), waiting(B), starting))
    assert (patient.new_membership, patient.reason) == (
        None,
        "waiting for the workers of c to start",
    )
    # And too few do not begin.
    two = end_generation(settled(A, C), "boom", NodeFailure(C.id, "boom"))
    few = reconcile(view(two, kept[0], starting))
    assert (few.new_membership, few.reason) == (None, "1 of at least 2 nodes are here")


def test_a_joining_node_is_admitted_when_it_reports_its_workers() -> None:
    stands, starting = settled(A, B), attrs.evolve(C, slots=0)
    here = view(stands, A, B, starting, since_last_arrival_s=9.0)
    assert reconcile(here).new_membership is None
    assert number_waiting(here) == 0
    ready = view(stands, A, B, C, since_last_arrival_s=9.0)
    assert number_waiting(ready) == 1
    opened = reconcile(ready).new_membership
    assert opened is not None
    assert opened.is_planned
    assert (
        reconcile(
            view(opened, waiting(A), waiting(B), starting, since_last_arrival_s=0.0)
        ).new_membership
        is not None
    )


def test_surplus_nodes_are_spares_and_change_nothing() -> None:
    decision = reconcile(view(settled(A, B, C, D), A, B, C, D, E, since_last_arrival_s=9.0))
    assert decision.new_membership is None
    assert decision.reason == "generation 1 is active, 1 spare"


def test_a_node_whose_old_workers_may_still_run_is_not_admitted() -> None:
    stale = attrs.evolve(C, membership_id="3.m", may_run_workers=True)
    assert (
        reconcile(view(settled(A, B), A, B, stale, since_last_arrival_s=9.0)).new_membership is None
    )


def test_the_job_succeeds_when_all_nodes_have_and_admits_none_after_the_first() -> None:
    document = settled(A, B)
    assert (
        reconcile(
            view(document, A, B, C, finished_ids=frozenset({A.id}), since_last_arrival_s=9.0)
        ).new_membership
        is None
    )
    ended = reconcile(view(document, A, B, finished_ids=frozenset({A.id, B.id}))).new_membership
    assert ended is not None
    assert ended.phase is JobPhase.SUCCEEDED


def test_a_finished_node_that_left_is_not_lost() -> None:
    assert reconcile(view(settled(A, B), B, finished_ids=frozenset({A.id}))).new_membership is None


def test_a_member_that_joins_again_starts_a_new_generation_for_all() -> None:
    opened = reconcile(view(settled(A, B), waiting(A), B)).new_membership
    assert opened is not None
    assert opened.phase is JobPhase.FORMING


def test_nodes_are_sorted_by_number_with_survivors_first() -> None:
    ten, two = node("node10"), node("node2")
    assert order_members(Membership(LIMITS), [ten, two]) == (two, ten)
    assert order_members(settled(ten, A), [two, ten]) == (ten, two)


def test_a_node_is_named_by_its_host_unless_others_share_it() -> None:
    twin = attrs.evolve(B, host="a")
    opened = reconcile(view(settled(A, twin), A)).new_membership
    assert opened is not None
    assert opened.reason == "b-1 was lost (killed, or cut off)"


def test_a_rank_hint_orders_joining_nodes() -> None:
    first, second = node("z", rank_hint=0), node("y", rank_hint=1)
    assert order_members(Membership(LIMITS), [second, A, first]) == (first, second, A)


def test_static_nodes_get_their_ranks_and_a_duplicate_waits() -> None:
    settings = RendezvousSettings(2, 2, last_call_timeout=0.0, has_fixed_ranks=True)
    one, zero, double = node("a", rank_hint=1), node("b", rank_hint=0), node("c", rank_hint=1)
    assert (
        reconcile(view(Membership(settings), one, double, since_last_arrival_s=9.0)).new_membership
        is None
    )
    written = reconcile(
        view(Membership(settings), one, double, zero, since_last_arrival_s=9.0)
    ).new_membership
    assert written is not None
    assert written.members == (zero, one)


names = st.sampled_from([f"n{i}" for i in range(7)])
memberships = st.sampled_from(["", "1.m", "2.m"])
some_nodes = st.builds(
    lambda name, left, runs, failed: node(
        name,
        stopped_membership_id=left,
        may_run_workers=runs,
        failure_reason="x" if failed else None,
        failed_membership_id=failed,
    ),
    names,
    memberships,
    st.booleans(),
    memberships,
)
lives = st.lists(some_nodes, unique_by=lambda n: n.id, max_size=7)


@st.composite
def documents(draw: st.DrawFn) -> Membership:
    low = draw(st.integers(1, 4))
    settings = RendezvousSettings(low, draw(st.integers(low, 6)), draw(st.integers(0, 2)))
    document = Membership(settings)
    members = draw(lives)
    if settings.min_nodes <= len(members) <= settings.max_nodes:
        document = form_generation(document, members, charged=False, nonce="m")
        if draw(st.booleans()):
            failure = draw(st.sampled_from([None, NodeFailure(members[0].id, "x")]))
            document = end_generation(document, "x", failure)
    expelled = draw(st.lists(names, max_size=2, unique=True))
    failed_first = draw(st.lists(names, max_size=4))
    return attrs.evolve(
        document,
        evicted=tuple(f"{name}-1" for name in expelled),
        excluded_hosts=tuple(ExcludedHost(name, "x") for name in draw(st.sets(names, max_size=2))),
        first_failures=tuple(FirstFailure(n - 3, name) for n, name in enumerate(failed_first)),
    )


@given(documents(), lives, st.floats(0, 5), st.sets(names, max_size=3))
def test_every_decision_fulfills_the_invariants(
    document: Membership, live: list[NodeRecord], quiet: float, done: set[str]
) -> None:
    ids = frozenset(f"{name}-1" for name in done) & document.member_ids
    me = live[0].id if live else "nobody"
    seen = LeaderView(
        me, document.settings, document, tuple(live), ids, since_last_arrival_s=quiet, nonce="next"
    )
    after = reconcile(seen).new_membership
    if after is not None:
        _check(document, after, live)


def _check(before: Membership, after: Membership, live: list[NodeRecord]) -> None:
    assert after != before
    assert after.generation in (before.generation, before.generation + 1)
    assert before.restarts <= after.restarts <= before.settings.max_restarts
    assert after.excluded_hosts[: len(before.excluded_hosts)] == before.excluded_hosts
    if after.generation == before.generation:
        assert after.members == before.members
        return
    ids = [member.id for member in after.members]
    assert after.membership_id != before.membership_id
    assert after.num_nodes == len(ids)
    assert before.phase is JobPhase.FORMING
    assert before.settings.min_nodes <= len(ids) <= before.settings.max_nodes
    assert len(set(ids)) == len(ids)
    assert not set(ids) & {*before.evicted, *before.rejected_spares}
    assert not {m.host for m in after.members} & {item.host for item in before.excluded_hosts}
    ready = {
        n.id
        for n in live
        if (
            n.stopped_membership_id == before.membership_id
            if n.id in before.member_ids
            else not n.may_run_workers
        )
    }
    assert set(ids) <= ready
    survivors = [m.id for m in before.members if m.id in ids]
    assert ids[: len(survivors)] == survivors


# -- what a store has forgotten --------------------------------------------------------------------


def forgotten(document: Membership, *live: NodeRecord, **fields: object) -> LeaderView:
    return view(None, *live, remembered_state=document.state, **fields)


def test_a_generation_lost_by_the_store_is_restored_from_its_nodes() -> None:
    document = settled(A, B)
    a, b = holding(document)
    again = reconcile(forgotten(document, b, C, a)).new_membership
    assert again == with_members(document.state, (a, b))
    assert again.phase is JobPhase.ACTIVE


def test_nodes_that_do_not_return_are_awaited_and_then_lost() -> None:
    document = settled(A, B, C)
    a, b, _ = holding(document)
    waits = reconcile(forgotten(document, a, b, return_grace_s=1.5))
    assert (waits.new_membership, waits.requeue_after_s) == (None, 1.5)
    lost = reconcile(forgotten(document, b, a)).new_membership
    assert lost is not None
    assert (lost.phase, lost.generation, lost.members) == (JobPhase.FORMING, 1, (a, b))
    assert lost.reason == "1 of 3 nodes was lost with the store"


def test_with_a_quorum_more_than_half_must_restore_the_generation() -> None:
    settings = attrs.evolve(LIMITS, quorum=True)
    document = settled(A, B, C, D, settings=settings)
    a, b, c, _ = holding(document)
    too_few = reconcile(forgotten(document, a, b))
    assert too_few.new_membership is None
    assert "2 of 4" in too_few.reason
    assert reconcile(forgotten(document, a, b, c)).new_membership is not None


def test_an_empty_document_is_replaced_by_a_remembered_generation() -> None:
    document = settled(A, B)
    fresh = Membership(LIMITS, "two")
    seen = view(fresh, *holding(document), remembered_state=document.state)
    again = reconcile(seen).new_membership
    assert again is not None
    assert (again.incarnation, again.generation) == ("one", 1)
    other = attrs.evolve(settled(C, D), incarnation="two")
    assert (
        reconcile(
            view(other, C, D, *holding(document), remembered_state=document.state)
        ).new_membership
        is None
    )


def test_a_remembered_generation_without_members_is_ignored() -> None:
    begun = reconcile(forgotten(settled(A, B), C)).new_membership
    assert begun == Membership(LIMITS, "next")


def test_nodes_are_awaited_after_an_outage_of_the_store() -> None:
    waits = reconcile(view(settled(A, B), A, return_grace_s=2.0))
    assert (waits.new_membership, waits.requeue_after_s) == (None, 2.0)
    opened = end_generation(settled(A, B, C), "x")
    assert (
        reconcile(view(opened, waiting(A), waiting(B), return_grace_s=1.0)).new_membership is None
    )


# -- after the end ---------------------------------------------------------------------------------


def test_a_new_run_starts_once_no_node_of_the_ended_run_is_alive() -> None:
    ended = attrs.evolve(settled(A, B), phase=JobPhase.SUCCEEDED)
    new = attrs.evolve(C, inactive_incarnation="one")
    assert reconcile(view(ended, A, new)).new_membership is None
    assert reconcile(view(ended, new, A, inactive_incarnation="one")).new_membership is None
    # The leader itself may be a node of the ended run that has lost its own lease.
    assert reconcile(view(ended, new)).new_membership is None
    anew = Membership(LIMITS, "next", supersedes="one")
    assert reconcile(view(ended, new, inactive_incarnation="one")).new_membership == anew
    # Who slept through all that has nothing to put in its place.
    sleeper = holding(settled(A, B))
    stays = reconcile(
        view(anew, C, D, *sleeper, remembered_state=settled(A, B).state, since_last_arrival_s=9.0)
    ).new_membership
    assert stays is not None
    assert stays.incarnation == "next"


def test_a_new_run_starts_if_all_nodes_of_a_running_one_are_lost_but_not_while_a_spare_lives() -> (
    None
):
    left = settled(A, B)
    came = attrs.evolve(C, inactive_incarnation="one")
    anew = reconcile(view(left, came, inactive_incarnation="one")).new_membership
    assert anew == Membership(LIMITS, "next", generation=1, supersedes="one")
    kept = reconcile(view(left, D, came)).new_membership
    assert kept is not None
    assert (kept.incarnation, kept.phase) == ("one", JobPhase.FORMING)


@pytest.mark.parametrize("phase", [JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.ABORTED])
@pytest.mark.parametrize(
    ("alive", "is_part"),
    [
        ([], False),
        ([attrs.evolve(D, inactive_incarnation="one")], False),
        ([Leader("d", "d", inactive_incarnation="one")], False),
        ([A], True),
        ([Leader("a", "a")], True),
        ([attrs.evolve(D, inactive_incarnation="one"), A], True),
    ],
    ids=["nobody", "a new node", "a new leader", "an old node", "an old leader", "new and old"],
)
def test_a_node_that_starts_is_part_of_an_ended_run_only_while_one_of_its_nodes_lives(
    alive: list[NodeRecord | Leader], is_part: bool, phase: JobPhase
) -> None:
    # However many nodes the ended run had, and whether it had room for more.
    for members in ((A, B), (A, B, C, D)):
        ended = attrs.evolve(settled(*members), phase=phase)
        intent = NodeIntent(attrs.evolve(A, id="new-1")).on_first_read(ended, None, alive)
        change = intent.check_run_alive(ended, alive).final_change(ended)
        assert (change is not None) is is_part
        assert intent.node.inactive_incarnation == ("" if is_part else "one")


def test_the_job_end_names_its_writer_and_its_time() -> None:
    ended = reconcile(
        view(settled(A, B), A, B, finished_ids=frozenset({A.id, B.id}))
    ).new_membership
    assert ended is not None
    assert ended.job_end == JobEnd("a", "now")
