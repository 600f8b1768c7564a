"""Each rule of `reconcile`, and its invariants for random documents and views."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_memberships import (
    SETTINGS,
    A,
    B,
    C,
    D,
    E,
    create_generation,
    create_node,
    create_view,
    decide,
    failed_by,
    mark_running,
    mark_stopped,
    with_failure,
)

from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.bad_nodes import ExcludedHost, FirstFailure
from elasticlib.rendezvous.blame import Evidence, FailureKind
from elasticlib.rendezvous.membership import (
    GenerationTrigger,
    JobAction,
    JobEnd,
    JobPhase,
    JobRequest,
    Leader,
    Membership,
    NodeRecord,
    end_generation,
    form_generation,
    with_members,
)
from elasticlib.rendezvous.node_intent import NodeIntent
from elasticlib.rendezvous.rank_assignment import order_members
from elasticlib.rendezvous.reconcile import LeaderView, num_nodes_waiting, reconcile


def test_the_first_node_writes_the_settings() -> None:
    assert decide(None, A).new_membership == Membership(SETTINGS, "next")


def test_no_generation_is_formed_below_min_nodes() -> None:
    decision = decide(Membership(SETTINGS), A, since_last_arrival_s=1e9)
    assert decision.new_membership is None
    assert decision.reason == "1 of at least 2 nodes are here"


def test_the_last_call_waits_for_arrivals_and_returns_the_next_poll() -> None:
    decision = decide(Membership(SETTINGS), A, B, since_last_arrival_s=0.5)
    assert decision.new_membership is None
    assert decision.requeue_after_s == 1.5


def test_the_last_call_ends_at_once_at_the_maximum() -> None:
    written = decide(Membership(SETTINGS), A, B, C, D, since_last_arrival_s=0.0).new_membership
    assert written is not None
    assert (written.phase, written.generation, len(written.members)) == (JobPhase.ACTIVE, 1, 4)


def test_a_generation_is_formed_after_the_last_call() -> None:
    written = decide(Membership(SETTINGS), B, A, since_last_arrival_s=2.0).new_membership
    assert written is not None
    assert written.members == (A, B)


def test_any_leader_notices_a_lost_member() -> None:
    decision = reconcile(attrs.evolve(create_view(create_generation(A, B, C), B, C), node_id=B.id))
    assert decision.new_membership is not None
    assert (decision.new_membership.phase, decision.new_membership.reason) == (
        JobPhase.FORMING,
        "a was lost (killed, or cut off)",
    )


def test_the_trigger_of_a_generation_does_not_depend_on_the_text_of_its_reason() -> None:
    # Names of nodes and messages of failures contain the words of other reasons.
    active = create_generation(A, B, C)
    a, b, c = mark_running(active)
    failed = with_failure(a, "ValueError: no batches left")
    drains = attrs.evolve(a, drain_reason="no node left")
    again = attrs.evolve(a, stopped_membership_id=active.membership_id)
    nodes_of_trigger = {
        GenerationTrigger.FAILURE: [(failed, b, c)],
        GenerationTrigger.NODE_LOSS: [(b, c), (failed, b), (again, b, c)],
        GenerationTrigger.RESIZE: [(drains, b, c), (a, b, c, create_node("no batches left"))],
    }
    for trigger, examples in nodes_of_trigger.items():
        for live in examples:
            written = decide(active, *live, since_last_arrival_s=9.0).new_membership
            assert written is not None
            assert (written.phase, written.trigger) == (JobPhase.FORMING, trigger), written.reason
    written = decide(Membership(SETTINGS), A, B, since_last_arrival_s=2.0).new_membership
    assert written is not None
    assert written.trigger is GenerationTrigger.START


def with_request(member: NodeRecord, action: JobAction, made_in: str = "1.m") -> NodeRecord:
    """Return the record of a node that has received an operator's request in this generation."""
    return attrs.evolve(member, request=JobRequest(action, "a request from ann", made_in))


def test_a_requested_restart_opens_a_planned_generation_that_uses_no_restart() -> None:
    membership = create_generation(A, B)
    for live in ((with_request(A, JobAction.RESTART), B), (A, with_request(B, JobAction.RESTART))):
        opened = decide(membership, *live).new_membership
        assert opened is not None
        assert (opened.phase, opened.trigger, opened.is_planned, opened.reason) == (
            JobPhase.FORMING,
            GenerationTrigger.RESTART,
            True,
            "a request from ann",
        )
        stopped = [mark_stopped(node) for node in live]
        formed = decide(opened, *stopped).new_membership
        assert formed is not None
        assert (formed.generation, formed.restarts, formed.trigger) == (
            2,
            0,
            GenerationTrigger.RESTART,
        )
        assert not any(member.request for member in formed.members)
        # The record may still contain the request, which is for the last generation only.
        again = decide(attrs.evolve(formed, membership_id="2.x"), *live)
        assert again.new_membership is None


def test_a_restart_that_no_member_requests_is_ignored() -> None:
    outside = with_request(C, JobAction.RESTART, "")
    full = attrs.evolve(SETTINGS, max_nodes=2)
    decision = decide(create_generation(A, B, settings=full), A, B, outside)
    assert decision.new_membership is None


def test_a_requested_stop_ends_the_job_once_all_workers_have_stopped() -> None:
    stopping = attrs.evolve(with_request(A, JobAction.STOP), drain_reason="a request from ann")
    opened = decide(create_generation(A, B, C), stopping, B, C).new_membership
    assert opened is not None
    assert (opened.phase, opened.is_planned, opened.stop_reason) == (
        JobPhase.FORMING,
        True,
        "a request from ann",
    )
    # B is also saving, and C has missed the request and waits for the next generation.
    decision = decide(opened, B, mark_stopped(C), left_ids=frozenset({A.id}))
    assert decision.new_membership is None
    assert "waiting for b to stop" in decision.reason
    result = decide(opened, mark_stopped(C), left_ids=frozenset({A.id, B.id})).new_membership
    assert result is not None
    assert (result.phase, result.reason) == (JobPhase.STOPPED, "a request from ann")


@pytest.mark.parametrize("has_no_other_node", [True, False])
def test_a_stop_that_is_requested_while_a_generation_forms_ends_the_job(
    has_no_other_node: bool,
) -> None:
    forming = end_generation(create_generation(A, B), "a failed", failed_by(A, "why"))
    stopping = with_request(A, JobAction.STOP)
    noted = decide(forming, stopping, mark_stopped(B)).new_membership
    assert noted is not None
    assert (noted.phase, noted.stop_reason) == (JobPhase.FORMING, "a request from ann")
    live = (mark_stopped(B),) if has_no_other_node else (mark_stopped(B), D)
    result = decide(noted, *live, since_last_arrival_s=9.0).new_membership
    assert result is not None
    assert result.phase is JobPhase.STOPPED


def test_survivors_regroup_without_a_last_call_and_without_using_a_restart() -> None:
    failure = failed_by(A, "its peer vanished")
    document = end_generation(
        create_generation(A, B, C), "c left", failure, trigger=GenerationTrigger.NODE_LOSS
    )
    written = decide(
        document, mark_stopped(A), mark_stopped(B), since_last_arrival_s=0.0
    ).new_membership
    assert written is not None
    assert (written.generation, written.restarts, len(written.members)) == (2, 0, 2)


def test_a_node_loss_that_is_noticed_after_a_failure_is_the_reason() -> None:
    failed = with_failure(A, "its peer vanished")
    opened = decide(create_generation(A, B), failed, B).new_membership
    assert opened is not None
    assert (opened.reason, opened.trigger) == ("a: its peer vanished", GenerationTrigger.FAILURE)
    known = decide(opened, mark_stopped(failed)).new_membership
    assert known is not None
    assert (known.reason, known.trigger) == (
        "b was lost (killed, or cut off)",
        GenerationTrigger.NODE_LOSS,
    )
    decision = decide(known, mark_stopped(failed))
    reason = "1 of at least 2 nodes are here; b was lost (killed, or cut off)"
    assert (decision.reason, decision.new_membership) == (reason, None)
    again = decide(known, mark_stopped(failed), C, since_last_arrival_s=9.0).new_membership
    assert again is not None
    assert (again.reason, again.trigger, again.restarts) == (
        known.reason,
        GenerationTrigger.NODE_LOSS,
        0,
    )


def test_a_lost_node_that_reported_a_failure_keeps_its_failure_as_reason() -> None:
    opened = end_generation(
        create_generation(A, B), "b: out of memory", failed_by(B, "out of memory")
    )
    assert decide(opened, mark_stopped(A)).new_membership is None


def test_a_node_that_is_stopping_its_workers_is_awaited() -> None:
    decision = decide(end_generation(create_generation(A, B), "x"), mark_stopped(A), B)
    assert decision.new_membership is None
    assert decision.reason == "waiting for b to stop the workers of generation 1"


def test_a_failure_uses_a_restart_if_all_members_are_present() -> None:
    failed = with_failure(B, "exit code 1")
    opened = decide(create_generation(A, B), A, failed).new_membership
    assert opened is not None
    assert opened.verdict == failed_by(B, "exit code 1")
    again = decide(opened, mark_stopped(A), mark_stopped(failed)).new_membership
    assert again is not None
    assert (again.generation, again.restarts) == (2, 1)


def test_the_earliest_reported_failure_is_the_reason() -> None:
    first = with_failure(B, "first")
    second = with_failure(A, "second")
    opened = decide(create_generation(A, B), first, second).new_membership
    assert opened is not None
    assert opened.verdict == failed_by(B, "first")


def test_a_failure_of_an_earlier_generation_is_ignored() -> None:
    old = with_failure(B, "exit code 1")
    document = attrs.evolve(create_generation(A, B), generation=2, membership_id="2.m")
    assert decide(document, A, old).new_membership is None


def test_the_failed_node_is_evicted_after_the_last_restart_if_the_others_suffice() -> None:
    document = end_generation(create_generation(A, B, C, restarts=1), "x", failed_by(C, "boom"))
    evicted = decide(document, mark_stopped(A), mark_stopped(B), mark_stopped(C)).new_membership
    assert evicted is not None
    assert evicted.evicted == (C.id,)
    on = decide(evicted, mark_stopped(A), mark_stopped(B), mark_stopped(C)).new_membership
    assert on is not None
    assert [m.host for m in on.members] == ["a", "b"]
    assert on.restarts == 1


def test_the_job_fails_after_the_last_restart_if_the_others_do_not_suffice() -> None:
    document = end_generation(create_generation(A, B, restarts=1), "x", failed_by(B, "boom"))
    finished = decide(document, mark_stopped(A), mark_stopped(B)).new_membership
    assert finished is not None
    assert finished.phase is JobPhase.FAILED
    assert finished.reason == "b: boom (1 of 1 restarts used)"


def test_joining_nodes_wait_for_the_last_call_while_members_train() -> None:
    assert decide(create_generation(A, B), A, B, C, since_last_arrival_s=1.0).new_membership is None
    opened = decide(create_generation(A, B), A, B, C, since_last_arrival_s=2.0).new_membership
    assert opened is not None
    assert opened.reason == "c joined"


def test_a_member_with_another_number_of_workers_resizes_the_job_at_once() -> None:
    short = create_generation(attrs.evolve(A, slots=1), B)
    two = attrs.evolve(A, slots=2)
    opened = decide(short, two, B).new_membership
    assert opened is not None
    assert (opened.reason, opened.is_planned, opened.verdict) == (
        "a has 2 workers ready",
        True,
        None,
    )
    both = [mark_stopped(two), mark_stopped(B)]
    again = decide(opened, *both).new_membership
    assert again is not None
    assert ([m.slots for m in again.members], again.restarts) == ([2, B.slots], 0)
    # A failure takes precedence over a resize, and a job with a finished node is not resized.
    failed = with_failure(B, "exit code 1")
    charged = decide(short, two, failed).new_membership
    assert charged is not None
    assert charged.verdict is not None
    assert decide(short, two, B, finished_ids=frozenset({B.id})).new_membership is None


def test_members_with_retained_workers_continue_without_a_node_that_has_none_yet() -> None:
    opened = attrs.evolve(end_generation(create_generation(A, B, C), "boom", failed_by(C, "boom")))
    starting = attrs.evolve(mark_stopped(C), slots=0)
    retained = [attrs.evolve(mark_stopped(one), has_retained_workers=True) for one in (A, B)]
    smaller = decide(opened, *retained, starting).new_membership
    assert smaller is not None
    assert [member.id for member in smaller.members] == [A.id, B.id]
    assert smaller.restarts == 1, "the failed node is present, so the failure uses a restart"
    # Nodes without retained workers wait, so that all nodes start together.
    patient = decide(opened, mark_stopped(A), mark_stopped(B), starting)
    assert (patient.new_membership, patient.reason) == (
        None,
        "waiting for the workers of c to start",
    )
    # Fewer than min_nodes nodes do not continue.
    two = end_generation(create_generation(A, C), "boom", failed_by(C, "boom"))
    few = decide(two, retained[0], starting)
    assert (few.new_membership, few.reason) == (None, "1 of at least 2 nodes are here")


def test_a_joining_node_is_admitted_when_it_reports_its_workers() -> None:
    active, starting = create_generation(A, B), attrs.evolve(C, slots=0)
    before = create_view(active, A, B, starting, since_last_arrival_s=9.0)
    assert reconcile(before).new_membership is None
    assert num_nodes_waiting(before) == 0
    ready = create_view(active, A, B, C, since_last_arrival_s=9.0)
    assert num_nodes_waiting(ready) == 1
    opened = reconcile(ready).new_membership
    assert opened is not None
    assert opened.is_planned
    assert (
        decide(
            opened, mark_stopped(A), mark_stopped(B), starting, since_last_arrival_s=0.0
        ).new_membership
        is not None
    )


def test_surplus_nodes_are_spares_and_change_nothing() -> None:
    decision = decide(create_generation(A, B, C, D), A, B, C, D, E, since_last_arrival_s=9.0)
    assert decision.new_membership is None
    assert decision.reason == "generation 1 is active, 1 spare"


def test_a_node_whose_old_workers_may_still_run_is_not_admitted() -> None:
    stale = attrs.evolve(C, membership_id="3.m", may_run_workers=True)
    assert (
        decide(create_generation(A, B), A, B, stale, since_last_arrival_s=9.0).new_membership
        is None
    )


def test_the_job_succeeds_when_all_nodes_have_and_admits_none_after_the_first() -> None:
    document = create_generation(A, B)
    assert (
        decide(
            document, A, B, C, finished_ids=frozenset({A.id}), since_last_arrival_s=9.0
        ).new_membership
        is None
    )
    finished = decide(document, A, B, finished_ids=frozenset({A.id, B.id})).new_membership
    assert finished is not None
    assert finished.phase is JobPhase.SUCCEEDED


def test_a_finished_node_that_left_is_not_lost() -> None:
    assert decide(create_generation(A, B), B, finished_ids=frozenset({A.id})).new_membership is None


def test_a_member_that_joins_again_starts_a_new_generation_for_all() -> None:
    opened = decide(create_generation(A, B), mark_stopped(A), B).new_membership
    assert opened is not None
    assert opened.phase is JobPhase.FORMING


def test_nodes_are_sorted_by_number_with_survivors_first() -> None:
    ten, two = create_node("node10"), create_node("node2")
    assert order_members(Membership(SETTINGS), [ten, two]) == (two, ten)
    assert order_members(create_generation(ten, A), [two, ten]) == (ten, two)


def test_a_node_is_named_by_its_host_unless_others_share_it() -> None:
    twin = attrs.evolve(B, host="a")
    opened = decide(create_generation(A, twin), A).new_membership
    assert opened is not None
    assert opened.reason == "b-1 was lost (killed, or cut off)"


def test_a_rank_hint_orders_joining_nodes() -> None:
    first, second = create_node("z", rank_hint=0), create_node("y", rank_hint=1)
    assert order_members(Membership(SETTINGS), [second, A, first]) == (first, second, A)


def test_static_nodes_get_their_ranks_and_a_duplicate_waits() -> None:
    settings = RendezvousSettings(2, 2, last_call_timeout=0.0, has_fixed_ranks=True)
    one, zero, double = (
        create_node("a", rank_hint=1),
        create_node("b", rank_hint=0),
        create_node("c", rank_hint=1),
    )
    assert (
        decide(Membership(settings), one, double, since_last_arrival_s=9.0).new_membership is None
    )
    written = decide(
        Membership(settings), one, double, zero, since_last_arrival_s=9.0
    ).new_membership
    assert written is not None
    assert written.members == (zero, one)


names = st.sampled_from([f"n{i}" for i in range(7)])
memberships = st.sampled_from(["", "1.m", "2.m"])
random_nodes = st.builds(
    lambda name, left, runs, failed, kind, planned: create_node(
        name,
        stopped_membership_id=left,
        may_run_workers=runs,
        evidence=Evidence(kind, "x") if failed else None,
        evidence_of=failed,
        drain_reason=planned,
    ),
    names,
    memberships,
    st.booleans(),
    memberships,
    st.sampled_from(FailureKind),
    st.sampled_from(["", "", "a drain"]),
)
node_lists = st.lists(random_nodes, unique_by=lambda n: n.id, max_size=7)


@st.composite
def documents(draw: st.DrawFn) -> Membership:
    low = draw(st.integers(1, 4))
    settings = RendezvousSettings(low, draw(st.integers(low, 6)), draw(st.integers(0, 2)))
    document = Membership(settings)
    members = draw(node_lists)
    if settings.min_nodes <= len(members) <= settings.max_nodes:
        document = form_generation(document, members, charged=False, nonce="m")
        if draw(st.booleans()):
            failure = draw(st.sampled_from([None, failed_by(members[0], "x")]))
            document = end_generation(document, "x", failure)
            document = attrs.evolve(document, is_planned=draw(st.booleans()))
    evicted = draw(st.lists(names, max_size=2, unique=True))
    failed_first = draw(st.lists(names, max_size=4))
    return attrs.evolve(
        document,
        evicted=tuple(f"{name}-1" for name in evicted),
        excluded_hosts=tuple(ExcludedHost(name, "x") for name in draw(st.sets(names, max_size=2))),
        first_failures=tuple(FirstFailure(n - 3, name) for n, name in enumerate(failed_first)),
    )


@given(documents(), node_lists, st.floats(0, 5), st.sets(names, max_size=3))
def test_every_decision_fulfills_the_invariants(
    document: Membership, live: list[NodeRecord], quiet: float, finished: set[str]
) -> None:
    ids = frozenset(f"{name}-1" for name in finished) & document.member_ids
    me = live[0].id if live else "no-node"
    seen = LeaderView(
        me, document.settings, document, tuple(live), ids, since_last_arrival_s=quiet, nonce="next"
    )
    after = reconcile(seen).new_membership
    if after is not None:
        assert_valid_transition(document, after, live)


def assert_valid_transition(before: Membership, after: Membership, live: list[NodeRecord]) -> None:
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


# -- a store that has lost the job -----------------------------------------------------------------


def create_view_of_empty_store(
    document: Membership, *live: NodeRecord, **fields: object
) -> LeaderView:
    return create_view(None, *live, remembered_state=document.state, **fields)


def test_a_generation_lost_by_the_store_is_restored_from_its_nodes() -> None:
    document = create_generation(A, B)
    a, b = mark_running(document)
    again = reconcile(create_view_of_empty_store(document, b, C, a)).new_membership
    assert again == with_members(document.state, (a, b))
    assert again.phase is JobPhase.ACTIVE


def test_nodes_that_do_not_return_are_awaited_and_then_lost() -> None:
    document = create_generation(A, B, C)
    a, b, _ = mark_running(document)
    waits = reconcile(create_view_of_empty_store(document, a, b, return_grace_s=1.5))
    assert (waits.new_membership, waits.requeue_after_s) == (None, 1.5)
    lost = reconcile(create_view_of_empty_store(document, b, a)).new_membership
    assert lost is not None
    assert (lost.phase, lost.generation, lost.members) == (JobPhase.FORMING, 1, (a, b))
    assert lost.reason == "1 of 3 nodes was lost with the store"


def test_with_a_quorum_more_than_half_must_restore_the_generation() -> None:
    settings = attrs.evolve(SETTINGS, quorum=True)
    document = create_generation(A, B, C, D, settings=settings)
    a, b, c, _ = mark_running(document)
    too_few = reconcile(create_view_of_empty_store(document, a, b))
    assert too_few.new_membership is None
    assert "2 of 4" in too_few.reason
    assert reconcile(create_view_of_empty_store(document, a, b, c)).new_membership is not None


def test_an_empty_document_is_replaced_by_a_remembered_generation() -> None:
    document = create_generation(A, B)
    fresh = Membership(SETTINGS, "two")
    seen = create_view(fresh, *mark_running(document), remembered_state=document.state)
    again = reconcile(seen).new_membership
    assert again is not None
    assert (again.incarnation, again.generation) == ("one", 1)
    other = attrs.evolve(create_generation(C, D), incarnation="two")
    assert (
        decide(other, C, D, *mark_running(document), remembered_state=document.state).new_membership
        is None
    )


def test_a_remembered_generation_without_members_is_ignored() -> None:
    written = reconcile(create_view_of_empty_store(create_generation(A, B), C)).new_membership
    assert written == Membership(SETTINGS, "next")


def test_nodes_are_awaited_after_an_outage_of_the_store() -> None:
    waits = decide(create_generation(A, B), A, return_grace_s=2.0)
    assert (waits.new_membership, waits.requeue_after_s) == (None, 2.0)
    opened = end_generation(create_generation(A, B, C), "x")
    assert (
        decide(opened, mark_stopped(A), mark_stopped(B), return_grace_s=1.0).new_membership is None
    )


# -- after the end of a run ------------------------------------------------------------------------


def test_a_new_run_starts_once_no_node_of_the_finished_run_is_alive() -> None:
    finished = attrs.evolve(create_generation(A, B), phase=JobPhase.SUCCEEDED)
    new = attrs.evolve(C, inactive_incarnation="one")
    assert decide(finished, A, new).new_membership is None
    assert decide(finished, new, A, inactive_incarnation="one").new_membership is None
    # The leader itself may be a node of the ended run that has lost its own lease.
    assert decide(finished, new).new_membership is None
    new_run = Membership(SETTINGS, "next", supersedes="one")
    assert decide(finished, new, inactive_incarnation="one").new_membership == new_run
    # A node of the finished run that was paused cannot restore its generation.
    paused = mark_running(create_generation(A, B))
    written = decide(
        new_run,
        C,
        D,
        *paused,
        remembered_state=create_generation(A, B).state,
        since_last_arrival_s=9.0,
    ).new_membership
    assert written is not None
    assert written.incarnation == "next"


def test_a_new_run_starts_if_all_nodes_of_a_running_one_are_lost_but_not_while_a_spare_lives() -> (
    None
):
    left = create_generation(A, B)
    joining = attrs.evolve(C, inactive_incarnation="one")
    new_run = decide(left, joining, inactive_incarnation="one").new_membership
    assert new_run == Membership(SETTINGS, "next", generation=1, supersedes="one")
    retained = decide(left, D, joining).new_membership
    assert retained is not None
    assert (retained.incarnation, retained.phase) == ("one", JobPhase.FORMING)


@pytest.mark.parametrize("phase", [p for p in JobPhase if p.is_terminal])
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
    ids=["no node", "a new node", "a new leader", "an old node", "an old leader", "new and old"],
)
def test_a_starting_node_is_part_of_a_finished_run_only_while_a_node_of_it_is_alive(
    alive: list[NodeRecord | Leader], is_part: bool, phase: JobPhase
) -> None:
    # The result is the same for a full job and for one below max_nodes.
    for members in ((A, B), (A, B, C, D)):
        finished = attrs.evolve(create_generation(*members), phase=phase)
        intent = NodeIntent(attrs.evolve(A, id="new-1")).on_first_read(finished, None, alive)
        change = intent.check_run_alive(finished, alive).final_change(finished)
        assert (change is not None) is is_part
        assert intent.node.inactive_incarnation == ("" if is_part else "one")


def test_the_job_end_names_its_writer_and_its_time() -> None:
    finished = decide(
        create_generation(A, B), A, B, finished_ids=frozenset({A.id, B.id})
    ).new_membership
    assert finished is not None
    assert finished.job_end == JobEnd("a", "now")
