"""Rules for drains, for delayed restarts and for the restart budget of `reconcile`."""

from __future__ import annotations

import attrs
import pytest

from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.blame import Evidence, FailureKind
from elasticlib.rendezvous.interface import ChangeKind
from elasticlib.rendezvous.membership import (
    GenerationTrigger,
    JobPhase,
    Membership,
    NodeRecord,
    end_generation,
    form_generation,
)
from elasticlib.rendezvous.node_intent import NodeIntent
from elasticlib.rendezvous.reconcile import (
    MAX_UNDELAYED_RESTARTS,
    QUICK_FAILURE_S,
    RESTART_DELAY_S,
    LeaderView,
    ReconcileResult,
    reconcile,
)

SETTINGS = RendezvousSettings(1, 4, max_restarts=9, restart_window=60.0)
A, B, C = (NodeRecord(id=f"{name}-1", host=name, address="127.0.0.1", slots=1) for name in "abc")


def create_generation(
    *members: NodeRecord, settings: RendezvousSettings = SETTINGS, **fields: object
) -> Membership:
    document = form_generation(Membership(settings, "one"), members, charged=False, nonce="m")
    return attrs.evolve(document, **fields)


def decide(document: Membership, *live: NodeRecord, **fields: object) -> ReconcileResult:
    seen = LeaderView(live[0].id, document.settings, document, live, nonce="next", wall_time="now")
    return reconcile(attrs.evolve(seen, **fields))


def decide_membership(document: Membership, *live: NodeRecord, **fields: object) -> Membership:
    decision = decide(document, *live, **fields)
    assert decision.new_membership is not None, decision.reason
    return decision.new_membership


def mark_stopped(*members: NodeRecord) -> list[NodeRecord]:
    return [attrs.evolve(member, stopped_membership_id="1.m") for member in members]


def mark_failed(member: NodeRecord, *, killed: bool = False) -> NodeRecord:
    return attrs.evolve(
        member,
        evidence=Evidence(
            FailureKind.KILLED if killed else FailureKind.RAISED, f"{member.host} broke"
        ),
        evidence_of="1.m",
    )


# -- drains ----------------------------------------------------------------------------------------


def mark_draining(member: NodeRecord) -> NodeRecord:
    return attrs.evolve(member, membership_id="1.m", may_run_workers=True, drain_reason="SIGUSR2")


def test_a_draining_member_ends_the_generation_as_planned() -> None:
    after = decide_membership(create_generation(A, B), A, mark_draining(B))
    assert (after.phase, after.reason, after.is_planned) == (
        JobPhase.FORMING,
        "b drains (SIGUSR2)",
        True,
    )
    for member in (A, B):
        intent = NodeIntent(
            attrs.evolve(member, membership_id="1.m", may_run_workers=True), remembered_state=after
        )
        change = intent.change(after)
        assert change is not None
        assert (change.kind, change.reason) == (ChangeKind.RESIZE, "b drains (SIGUSR2)")


def test_the_next_generation_waits_for_the_draining_node_to_stop_and_excludes_it() -> None:
    opened = decide_membership(create_generation(A, B), A, mark_draining(B))
    waits = decide(opened, *mark_stopped(A), mark_draining(B))
    assert waits.new_membership is None
    assert waits.reason == "waiting for b to stop the workers of generation 1"
    on = decide_membership(opened, *mark_stopped(A), left_ids=frozenset({B.id}))
    assert (on.phase, on.members, on.restarts) == (JobPhase.ACTIVE, tuple(mark_stopped(A)), 0)
    assert not on.is_planned


def test_a_node_that_drains_is_no_candidate() -> None:
    opened = decide_membership(create_generation(A, B), A, mark_draining(B))
    (stopped,) = mark_stopped(attrs.evolve(B, drain_reason="SIGUSR2"))
    assert [m.host for m in decide_membership(opened, *mark_stopped(A), stopped).members] == ["a"]
    joining = attrs.evolve(C, drain_reason="SIGUSR2")
    assert (
        decide(
            create_generation(A), A, joining, since_last_arrival_s=9.0, phase_age_s=99.0
        ).new_membership
        is None
    )


def test_a_finished_node_can_drain_without_ending_the_generation() -> None:
    waits = decide(create_generation(A, B), A, mark_draining(B), finished_ids=frozenset({B.id}))
    assert (waits.new_membership, waits.reason) == (None, "1 of 2 nodes are done")


def test_a_failure_outweighs_a_drain_and_stops_all_without_a_notice() -> None:
    after = decide_membership(create_generation(A, B), mark_failed(A), mark_draining(B))
    assert (after.reason, after.is_planned) == ("a: a broke", False)


def test_a_failure_during_a_resize_is_charged() -> None:
    joining = attrs.evolve(C, stopped_membership_id="")
    resized = decide_membership(
        create_generation(A, B), A, B, joining, since_last_arrival_s=99.0, phase_age_s=99.0
    )
    assert resized.is_planned
    failed = decide_membership(resized, mark_failed(A), *mark_stopped(B), joining)
    assert (failed.reason, failed.is_planned) == ("a: a broke", True)
    (stopped,) = mark_stopped(mark_failed(A))
    view = (stopped, *mark_stopped(B), joining)
    after = decide_membership(failed, *view, since_last_arrival_s=99.0)
    assert (after.phase, after.restarts) == (JobPhase.ACTIVE, 1)
    ended = attrs.evolve(failed, restarts=9)
    refused = decide_membership(ended, *view)
    assert A.id in refused.evicted


def test_a_failed_collective_during_a_resize_is_not_charged() -> None:
    opened = decide_membership(create_generation(A, B), A, mark_draining(B))
    collective = attrs.evolve(
        A, evidence=Evidence(FailureKind.COLLECTIVE, "closed by peer"), evidence_of="1.m"
    )
    assert decide(opened, collective, mark_draining(B)).new_membership is None


@pytest.mark.parametrize("is_stop", [False, True])
def test_a_node_that_is_killed_during_a_planned_stop_is_not_awaited(is_stop: bool) -> None:
    opened = decide_membership(create_generation(A, B, C), A, B, mark_draining(C))
    stop_reason = "a stop request" if is_stop else ""
    opened = attrs.evolve(opened, stop_reason=stop_reason)
    # A node that leaves on purpose has told the others how far it is.
    assert decide(opened, A, B, left_ids=frozenset({C.id})).new_membership is None
    lost = decide_membership(opened, A, mark_draining(C))
    assert (lost.phase, lost.is_planned, lost.trigger, lost.stop_reason) == (
        JobPhase.FORMING,
        False,
        GenerationTrigger.NODE_LOSS,
        stop_reason,
    )
    # The workers of the others wait for a step that all agree on. They hear that there is none.
    waiting = NodeIntent(
        attrs.evolve(A, membership_id="1.m", may_run_workers=True), remembered_state=opened
    )
    before, after = waiting.change(opened), waiting.change(lost)
    assert before is not None
    assert after is not None
    assert (before.kind, after.kind) == (ChangeKind.RESIZE, ChangeKind.GENERATION_ENDED)
    assert after.reason == "b was lost (killed, or cut off)"
    assert decide(lost, A, mark_draining(C)).new_membership is None
    again = decide_membership(lost, *mark_stopped(A), left_ids=frozenset({C.id}))
    assert (again.phase, again.restarts) == (JobPhase.STOPPED if is_stop else JobPhase.ACTIVE, 0)


def test_a_node_that_is_lost_with_the_store_during_a_planned_stop_has_time_to_return() -> None:
    opened = decide_membership(create_generation(A, B, C), A, B, mark_draining(C))
    waits = decide(opened, A, mark_draining(C), return_grace_s=1.5)
    assert (waits.new_membership, waits.requeue_after_s) == (None, 1.5)


def test_a_node_that_missed_a_resize_is_notified_of_the_end_of_its_generation() -> None:
    later = attrs.evolve(create_generation(A), generation=2, membership_id="2.m", is_planned=True)
    change = NodeIntent(
        attrs.evolve(B, membership_id="1.m", may_run_workers=True), remembered_state=later
    ).change(later)
    assert change is not None
    assert change.kind is ChangeKind.GENERATION_ENDED


# -- quick failures in a row -----------------------------------------------------------------------


def after_failures(*ages_s: float, killed: bool = False) -> Membership:
    document = create_generation(A, B)
    for seconds in ages_s:
        document = attrs.evolve(document, phase=JobPhase.ACTIVE)
        document = decide_membership(
            document, A, mark_failed(B, killed=killed), phase_age_s=seconds
        )
    return document


def test_the_first_restarts_are_not_delayed() -> None:
    opened = after_failures(*[1.0] * MAX_UNDELAYED_RESTARTS)
    assert decide_membership(opened, *mark_stopped(A, mark_failed(B))).phase is JobPhase.ACTIVE


@pytest.mark.parametrize("count", [MAX_UNDELAYED_RESTARTS + 1, 30])
def test_later_restarts_are_delayed_by_a_constant(count: int) -> None:
    opened = after_failures(*[1.0] * count)
    waits = decide(opened, *mark_stopped(A, mark_failed(B)), phase_age_s=0.1)
    assert (waits.new_membership, waits.requeue_after_s) == (None, RESTART_DELAY_S - 0.1)
    assert waits.reason == (
        f"the last {count} generations failed within 10 s each: the restart is delayed by 5 s"
    )
    on = decide_membership(opened, *mark_stopped(A, mark_failed(B)), phase_age_s=RESTART_DELAY_S)
    assert (on.phase, on.restarts) == (JobPhase.ACTIVE, 1)


def test_a_failure_after_a_longer_run_resets_the_count_of_quick_failures() -> None:
    assert after_failures(1.0, 1.0, 1.0, QUICK_FAILURE_S).quick_failure_count == 0


def test_a_longer_run_that_ends_for_another_reason_resets_the_count_too() -> None:
    document = create_generation(A, B, quick_failure_count=5)
    assert decide_membership(document, A, phase_age_s=QUICK_FAILURE_S).quick_failure_count == 0
    assert decide_membership(document, A, phase_age_s=QUICK_FAILURE_S / 2).quick_failure_count == 5


def test_restarts_of_killed_workers_are_not_delayed() -> None:
    opened = after_failures(*[0.1] * 20, killed=True)
    assert (
        decide_membership(opened, *mark_stopped(A, mark_failed(B, killed=True))).phase
        is JobPhase.ACTIVE
    )


def test_the_restart_of_a_killed_worker_is_not_delayed_after_quick_failures_either() -> None:
    document = attrs.evolve(after_failures(*[1.0] * 9), phase=JobPhase.ACTIVE)
    opened = decide_membership(document, A, mark_failed(B, killed=True), phase_age_s=1.0)
    assert opened.quick_failure_count == 9
    assert decide_membership(opened, *mark_stopped(A, B)).phase is JobPhase.ACTIVE


def test_a_resize_is_never_delayed() -> None:
    opened = after_failures(*[1.0] * 9)
    assert decide_membership(opened, *mark_stopped(A)).phase is JobPhase.ACTIVE


def test_the_last_failure_of_the_budget_is_handled_without_a_delay() -> None:
    opened = attrs.evolve(after_failures(*[1.0] * 9), restarts=9)
    assert decide_membership(opened, *mark_stopped(A, mark_failed(B))).evicted == (B.id,)


# -- what time brings ------------------------------------------------------------------------------


def test_restarts_are_reset_after_the_restart_window() -> None:
    document = create_generation(A, B, restarts=3, quick_failure_count=1)
    waits = decide(document, A, B, phase_age_s=20.0)
    assert (waits.new_membership, waits.requeue_after_s) == (None, 40.0)
    after = decide_membership(document, A, B, phase_age_s=60.0)
    assert after == attrs.evolve(document, restarts=0, quick_failure_count=0)
    # Once: what is forgiven needs no second write.
    assert decide(after, A, B, phase_age_s=99.0).new_membership is None


def test_restarts_are_never_reset_without_a_restart_window() -> None:
    settings = attrs.evolve(SETTINGS, restart_window=0.0)
    assert (
        decide(
            create_generation(A, settings=settings, restarts=3), A, phase_age_s=1e9
        ).new_membership
        is None
    )


def test_the_next_poll_is_due_at_the_earlier_deadline() -> None:
    waits = decide(
        create_generation(A, restarts=1), A, B, since_last_arrival_s=0.5, phase_age_s=10.0
    )
    assert waits.requeue_after_s == SETTINGS.last_call_timeout - 0.5
    waits = decide(
        create_generation(A, restarts=1), A, B, since_last_arrival_s=0.5, phase_age_s=59.0
    )
    assert waits.requeue_after_s == 1.0


def test_ending_a_planned_generation_resets_is_planned() -> None:
    document = attrs.evolve(create_generation(A, B), is_planned=True)
    assert not end_generation(document, "x").is_planned
