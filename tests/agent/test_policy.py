"""Every event in every state leads to a transition, or to an error that names both."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.agent.policy import (
    TRANSITIONS,
    AgentEvent,
    AgentState,
    CancelRegroup,
    DrainRequested,
    EscalateStop,
    GenerationFormed,
    HangDetected,
    MembershipChanged,
    PeersStillTraining,
    PrestartWorkers,
    Regroup,
    RendezvousEnded,
    ReportDrain,
    ReportFailure,
    ReportSlots,
    ReportSuccess,
    RunOutcome,
    ShortenNotice,
    SignalReceived,
    StartRendezvous,
    StartWorkers,
    StopWorkers,
    SupervisorState,
    WorkerExited,
    WorkersStopped,
    WorkerStartFailed,
    transition,
)
from elasticlib.errors import InvalidTransitionError
from elasticlib.rendezvous.blame import FailureKind
from elasticlib.rendezvous.interface import Change, ChangeKind
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.spec import WorkerState

FAILED = RunOutcome(WorkerState.FAILED, "no more")
TERM = SignalReceived(15, "SIGTERM")
INT = SignalReceived(2, "SIGINT", is_interrupt=True)
USR2 = DrainRequested(12, "SIGUSR2", "drain")
STOP = DrainRequested(0, "a stop request", "drain", ends_job=True)


def worker_exited(local_rank: int, code: int = 0) -> WorkerExited:
    return WorkerExited(WorkerExit(local_rank, rank=local_rank, pid=100, returncode=code))


def membership_changed(kind: ChangeKind) -> MembershipChanged:
    return MembershipChanged(Change(kind, f"because {kind.value}"))


EVENTS: dict[str, AgentEvent] = {
    "settled": GenerationFormed(frozenset({0, 1})),
    "settled in part": GenerationFormed(frozenset({1}), standby_ranks=frozenset({0})),
    "join ended": RendezvousEnded(FAILED),
    "start failed": WorkerStartFailed("no such file"),
    "worker done": worker_exited(0),
    "worker failed": worker_exited(0, 1),
    "stopped": WorkersStopped(),
    "stopped but for": WorkersStopped("pid 7"),
    "reopened": membership_changed(ChangeKind.GENERATION_ENDED),
    "job succeeded": membership_changed(ChangeKind.SUCCEEDED),
    "job failed": membership_changed(ChangeKind.FAILED),
    "expelled": membership_changed(ChangeKind.EVICTED),
    "surplus": membership_changed(ChangeKind.NOT_NEEDED),
    "store lost": membership_changed(ChangeKind.STORE_LOST),
    "signal": TERM,
    "interrupt": INT,
    "drain": USR2,
    "stop": STOP,
    "resize": membership_changed(ChangeKind.RESIZE),
    "restart": membership_changed(ChangeKind.RESTART),
    "restart, keeps": attrs.evolve(membership_changed(ChangeKind.RESTART), can_regroup=True),
    "start failed, keeps": WorkerStartFailed("no such file", can_regroup=True),
    "worker failed, keeps": attrs.evolve(worker_exited(0, 1), can_regroup=True),
    "hung, keeps": HangDetected("silent", can_regroup=True),
    "reopened, keeps": attrs.evolve(
        membership_changed(ChangeKind.GENERATION_ENDED), can_regroup=True
    ),
    "resize, keeps": attrs.evolve(membership_changed(ChangeKind.RESIZE), can_regroup=True),
    "job failed, keeps": attrs.evolve(membership_changed(ChangeKind.FAILED), can_regroup=True),
    "stopped, with spare": WorkersStopped(standby_ranks=frozenset({1})),
    "others go on": PeersStillTraining(frozenset({0, 1})),
}
NEXT = {
    (AgentState.JOINING, "settled"): (AgentState.RUNNING, [StartWorkers()]),
    (AgentState.JOINING, "settled in part"): (AgentState.RUNNING, [StartWorkers()]),
    (AgentState.JOINING, "worker done"): (AgentState.JOINING, [ReportSlots()]),
    (AgentState.JOINING, "worker failed"): (AgentState.JOINING, [ReportSlots()]),
    (AgentState.JOINING, "worker failed, keeps"): (AgentState.JOINING, [ReportSlots()]),
    (AgentState.JOINING, "others go on"): (AgentState.JOINING, [PrestartWorkers()]),
    (AgentState.JOINING, "start failed"): (AgentState.JOINING, [ReportSlots()]),
    (AgentState.JOINING, "start failed, keeps"): (AgentState.JOINING, [ReportSlots()]),
    (AgentState.JOINING, "join ended"): (AgentState.ENDED, []),
    (AgentState.JOINING, "signal"): (AgentState.ENDED, []),
    (AgentState.JOINING, "interrupt"): (AgentState.ENDED, []),
    (AgentState.JOINING, "drain"): (AgentState.ENDED, []),
    (AgentState.JOINING, "stop"): (AgentState.ENDED, []),
    (AgentState.RUNNING, "start failed"): (
        AgentState.STOPPING,
        [ReportFailure("no such file"), StopWorkers()],
    ),
    (AgentState.RUNNING, "worker done"): (AgentState.RUNNING, []),
    (AgentState.RUNNING, "worker failed"): (
        AgentState.STOPPING,
        [
            ReportFailure("worker of rank 0 (local 0, pid 100) exited with code 1"),
            StopWorkers(),
        ],
    ),
    (AgentState.RUNNING, "start failed, keeps"): (
        AgentState.STOPPING,
        [ReportFailure("no such file"), Regroup()],
    ),
    (AgentState.RUNNING, "worker failed, keeps"): (
        AgentState.STOPPING,
        [ReportFailure("worker of rank 0 (local 0, pid 100) exited with code 1"), Regroup()],
    ),
    (AgentState.RUNNING, "hung, keeps"): (
        AgentState.STOPPING,
        [ReportFailure("silent", FailureKind.STALLED), Regroup()],
    ),
    (AgentState.RUNNING, "reopened"): (AgentState.STOPPING, [StopWorkers()]),
    (AgentState.RUNNING, "reopened, keeps"): (AgentState.STOPPING, [Regroup()]),
    (AgentState.RUNNING, "resize, keeps"): (AgentState.STOPPING, [StopWorkers("resize")]),
    (AgentState.RUNNING, "job failed, keeps"): (AgentState.ENDING, [StopWorkers()]),
    (AgentState.RUNNING, "job succeeded"): (AgentState.ENDING, [StopWorkers()]),
    (AgentState.RUNNING, "job failed"): (AgentState.ENDING, [StopWorkers()]),
    (AgentState.RUNNING, "expelled"): (AgentState.ENDING, [StopWorkers()]),
    (AgentState.RUNNING, "surplus"): (AgentState.ENDING, [StopWorkers()]),
    (AgentState.RUNNING, "store lost"): (AgentState.ENDING, [StopWorkers()]),
    (AgentState.RUNNING, "signal"): (AgentState.ENDING, [StopWorkers()]),
    (AgentState.RUNNING, "interrupt"): (AgentState.ENDING, [StopWorkers()]),
    (AgentState.RUNNING, "drain"): (
        AgentState.ENDING,
        [ReportDrain("SIGUSR2"), StopWorkers("drain")],
    ),
    (AgentState.RUNNING, "stop"): (
        AgentState.ENDING,
        [ReportDrain("a stop request", ends_job=True), StopWorkers("drain")],
    ),
    (AgentState.RUNNING, "resize"): (AgentState.STOPPING, [StopWorkers("resize")]),
    (AgentState.RUNNING, "restart"): (AgentState.STOPPING, [StopWorkers("restart")]),
    (AgentState.RUNNING, "restart, keeps"): (AgentState.STOPPING, [StopWorkers("restart")]),
    (AgentState.STOPPING, "worker done"): (AgentState.STOPPING, []),
    (AgentState.STOPPING, "worker failed"): (AgentState.STOPPING, []),
    (AgentState.STOPPING, "worker failed, keeps"): (AgentState.STOPPING, []),
    (AgentState.STOPPING, "reopened, keeps"): (AgentState.STOPPING, []),
    (AgentState.STOPPING, "resize, keeps"): (AgentState.STOPPING, []),
    (AgentState.STOPPING, "job failed, keeps"): (AgentState.ENDING, [CancelRegroup()]),
    (AgentState.STOPPING, "stopped, with spare"): (AgentState.JOINING, [StartRendezvous()]),
    (AgentState.STOPPING, "stopped"): (AgentState.JOINING, [StartRendezvous()]),
    (AgentState.STOPPING, "stopped but for"): (AgentState.ENDED, []),
    (AgentState.STOPPING, "reopened"): (AgentState.STOPPING, []),
    (AgentState.STOPPING, "job succeeded"): (AgentState.ENDING, [CancelRegroup()]),
    (AgentState.STOPPING, "job failed"): (AgentState.ENDING, [CancelRegroup()]),
    (AgentState.STOPPING, "expelled"): (AgentState.ENDING, [CancelRegroup()]),
    (AgentState.STOPPING, "surplus"): (AgentState.ENDING, [CancelRegroup()]),
    (AgentState.STOPPING, "store lost"): (AgentState.ENDING, [CancelRegroup()]),
    (AgentState.STOPPING, "signal"): (AgentState.ENDING, [CancelRegroup(), ShortenNotice()]),
    (AgentState.STOPPING, "interrupt"): (AgentState.ENDING, [CancelRegroup(), ShortenNotice()]),
    (AgentState.STOPPING, "drain"): (
        AgentState.ENDING,
        [ReportDrain("SIGUSR2"), CancelRegroup(), ShortenNotice("drain")],
    ),
    (AgentState.STOPPING, "stop"): (
        AgentState.ENDING,
        [
            ReportDrain("a stop request", ends_job=True),
            CancelRegroup(),
            ShortenNotice("drain"),
        ],
    ),
    (AgentState.STOPPING, "resize"): (AgentState.STOPPING, []),
    (AgentState.STOPPING, "restart"): (AgentState.STOPPING, []),
    (AgentState.STOPPING, "restart, keeps"): (AgentState.STOPPING, []),
    (AgentState.FINISHED, "worker done"): (AgentState.FINISHED, []),
    (AgentState.FINISHED, "worker failed"): (AgentState.FINISHED, []),
    (AgentState.FINISHED, "worker failed, keeps"): (AgentState.FINISHED, []),
    (AgentState.FINISHED, "reopened, keeps"): (AgentState.JOINING, [StartRendezvous()]),
    (AgentState.FINISHED, "resize, keeps"): (AgentState.JOINING, [StartRendezvous()]),
    (AgentState.FINISHED, "job failed, keeps"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "reopened"): (AgentState.JOINING, [StartRendezvous()]),
    (AgentState.FINISHED, "job succeeded"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "job failed"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "expelled"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "surplus"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "store lost"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "signal"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "interrupt"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "drain"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "stop"): (AgentState.ENDED, []),
    (AgentState.FINISHED, "resize"): (AgentState.JOINING, [StartRendezvous()]),
    (AgentState.FINISHED, "restart"): (AgentState.JOINING, [StartRendezvous()]),
    (AgentState.FINISHED, "restart, keeps"): (AgentState.JOINING, [StartRendezvous()]),
    (AgentState.ENDING, "settled"): (AgentState.ENDING, []),
    (AgentState.ENDING, "settled in part"): (AgentState.ENDING, []),
    (AgentState.ENDING, "worker failed, keeps"): (AgentState.ENDING, []),
    (AgentState.ENDING, "reopened, keeps"): (AgentState.ENDING, []),
    (AgentState.ENDING, "resize, keeps"): (AgentState.ENDING, []),
    (AgentState.ENDING, "job failed, keeps"): (AgentState.ENDING, []),
    (AgentState.ENDING, "stopped, with spare"): (AgentState.ENDED, []),
    (AgentState.ENDING, "worker done"): (AgentState.ENDING, []),
    (AgentState.ENDING, "worker failed"): (AgentState.ENDING, []),
    (AgentState.ENDING, "stopped"): (AgentState.ENDED, []),
    (AgentState.ENDING, "stopped but for"): (AgentState.ENDED, []),
    (AgentState.ENDING, "reopened"): (AgentState.ENDING, []),
    (AgentState.ENDING, "job succeeded"): (AgentState.ENDING, []),
    (AgentState.ENDING, "job failed"): (AgentState.ENDING, []),
    (AgentState.ENDING, "expelled"): (AgentState.ENDING, []),
    (AgentState.ENDING, "surplus"): (AgentState.ENDING, []),
    (AgentState.ENDING, "store lost"): (AgentState.ENDING, []),
    (AgentState.ENDING, "drain"): (AgentState.ENDING, []),
    (AgentState.ENDING, "stop"): (AgentState.ENDING, []),
    (AgentState.ENDING, "resize"): (AgentState.ENDING, []),
    (AgentState.ENDING, "restart"): (AgentState.ENDING, []),
    (AgentState.ENDING, "restart, keeps"): (AgentState.ENDING, []),
    (AgentState.ENDING, "signal"): (AgentState.ENDING, []),
    (AgentState.ENDING, "interrupt"): (AgentState.ENDING, [EscalateStop()]),
}


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("state", AgentState)
def test_each_event_in_each_state_has_one_transition(state: AgentState, name: str) -> None:
    now = SupervisorState(state, running_ranks=frozenset({0, 1}), outcome=FAILED)
    expected = NEXT.get((state, name))
    if expected is None:
        with pytest.raises(
            InvalidTransitionError, match=f"{type(EVENTS[name]).__name__}.*{state.value}"
        ):
            transition(now, EVENTS[name])
        return
    after, actions = transition(now, EVENTS[name])
    assert (after.state, list(actions)) == expected


def test_a_node_joins_before_its_workers_start_unless_one_has_survived() -> None:
    now, _ = transition(SupervisorState(), PeersStillTraining(frozenset({0, 1})))
    assert now.is_prestarting
    now, _ = transition(now, worker_exited(0, 1))
    assert (now.is_prestarting, now.standby_ranks) == (True, {1})
    last, _ = transition(now, worker_exited(1, 1))
    assert (last.is_prestarting, last.standby_ranks) == (False, frozenset())
    assert not transition(now, WorkerStartFailed("no such file"))[0].is_prestarting
    settled, _ = transition(now, GenerationFormed(frozenset({0, 1})))
    assert not settled.is_prestarting
    # Workers that were started are stopped with the run.
    after, actions = transition(now, TERM)
    assert (after.state, actions) == (AgentState.ENDING, (StopWorkers(),))


def test_the_node_is_finished_when_its_last_worker_is_done() -> None:
    now, _ = transition(SupervisorState(), GenerationFormed(frozenset({0, 1})))
    now, _ = transition(now, worker_exited(0))
    now, actions = transition(now, worker_exited(1))
    assert (now.state, actions) == (AgentState.FINISHED, (ReportSuccess(),))


def test_the_first_reason_to_end_is_reported() -> None:
    now = SupervisorState(AgentState.RUNNING, running_ranks=frozenset({0}))
    now, _ = transition(now, membership_changed(ChangeKind.EVICTED))
    now, _ = transition(now, TERM)
    now, _ = transition(now, WorkersStopped())
    assert now.outcome == RunOutcome(WorkerState.FAILED, "because evicted", evicted=True)


def test_an_unkillable_worker_is_named_in_the_outcome() -> None:
    now = SupervisorState(AgentState.ENDING, outcome=FAILED)
    now, _ = transition(now, WorkersStopped("pid 7"))
    assert now.outcome is not None
    assert "pid 7" in now.outcome.reason


def test_a_node_whose_workers_succeeded_does_not_fail_with_the_store() -> None:
    now, _ = transition(
        SupervisorState(AgentState.FINISHED), membership_changed(ChangeKind.STORE_LOST)
    )
    assert now.outcome is not None
    assert now.outcome.state is WorkerState.SUCCEEDED


@pytest.mark.parametrize(
    ("code", "kind"), [(2, FailureKind.RAISED), (-9, FailureKind.KILLED), (-6, FailureKind.CRASHED)]
)
def test_a_failure_is_reported_with_what_happened_to_the_worker(
    code: int, kind: FailureKind
) -> None:
    now = SupervisorState(AgentState.RUNNING, running_ranks=frozenset({0}))
    failed = worker_exited(0, code)
    _, actions = transition(now, failed)
    assert actions[0] == ReportFailure(failed.exit.describe(), kind)


@pytest.mark.parametrize(
    "state", [AgentState.JOINING, AgentState.RUNNING, AgentState.STOPPING, AgentState.FINISHED]
)
def test_the_outcome_distinguishes_a_drain_from_a_stop(state: AgentState) -> None:
    now = SupervisorState(state, running_ranks=frozenset({0}))
    kinds = (
        (USR2, WorkerState.DRAINED),
        (TERM, WorkerState.STOPPED),
        (STOP, WorkerState.STOPPED),
    )
    for event, kind in kinds:
        after, _ = transition(now, event)
        assert after.outcome is not None
        assert (after.outcome.state, after.outcome.signal) == (kind, event.number)


def test_a_drain_ends_as_a_drain_after_further_signals() -> None:
    now, _ = transition(SupervisorState(AgentState.RUNNING, running_ranks=frozenset({0})), USR2)
    for event in (
        membership_changed(ChangeKind.RESIZE),
        TERM,
        worker_exited(0, 1),
        WorkersStopped(),
    ):
        now, _ = transition(now, event)
    assert now.outcome is not None
    assert (now.state, now.outcome.state) == (AgentState.ENDED, WorkerState.DRAINED)


def test_a_drain_is_a_stop_once_the_whole_job_is_stopped() -> None:
    running = SupervisorState(AgentState.RUNNING, running_ranks=frozenset({0}))
    now, _ = transition(running, USR2)
    now, actions = transition(now, STOP)
    assert now.outcome == RunOutcome(WorkerState.STOPPED, "received a stop request", ends_job=True)
    assert actions == (ReportDrain("a stop request", ends_job=True),)
    assert transition(now, USR2) == (now, ()), "a later drain changes nothing"
    # A signal and a failure are more specific than the request.
    for event, state in (
        (TERM, WorkerState.STOPPED),
        (membership_changed(ChangeKind.FAILED), FAILED.state),
    ):
        ending, _ = transition(running, event)
        after, actions = transition(ending, STOP)
        assert after.outcome is not None
        assert (after, actions, after.outcome.state) == (ending, (), state)


def test_workers_that_wait_for_a_place_are_not_kept_for_a_restart() -> None:
    finished = SupervisorState(AgentState.FINISHED, standby_ranks=frozenset({1}))
    after, actions = transition(finished, membership_changed(ChangeKind.RESTART))
    assert (after.state, after.must_restart, actions) == (
        AgentState.STOPPING,
        True,
        (StopWorkers(),),
    )
    joining, _ = transition(after, WorkersStopped())
    assert not joining.must_restart


def test_the_transition_table_has_every_state_except_the_final_one() -> None:
    assert {state for state, _ in TRANSITIONS} == set(AgentState) - {AgentState.ENDED}


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=12))
def test_every_history_ends_with_an_outcome_and_no_running_workers(names: list[str]) -> None:
    now, running = SupervisorState(), False
    waiting: frozenset[int] = frozenset()
    for name in names:
        before, event = now.state, EVENTS[name]
        if (
            before is AgentState.ENDING
            and isinstance(event, WorkersStopped)
            and event.standby_ranks
        ):
            continue  # a history in which a standby worker was stopped too
        try:
            now, actions = transition(now, event)
        except InvalidTransitionError:
            continue
        # A group ends with the stop procedure, or with the success of its last worker.
        if isinstance(event, WorkersStopped):
            running, waiting = False, event.standby_ranks
        running = running and ReportSuccess() not in actions
        if isinstance(event, WorkerExited):
            waiting -= {event.exit.local_rank}
        over = StartRendezvous() in actions or now.state is AgentState.ENDED
        assert not running or not over, names
        # Standby workers are stopped with the run when all others have succeeded.
        assert not waiting or now.state is not AgentState.ENDED or before is AgentState.FINISHED, (
            names
        )
        if StartWorkers() in actions and isinstance(event, GenerationFormed):
            waiting = event.standby_ranks
        if PrestartWorkers() in actions and isinstance(event, PeersStillTraining):
            waiting = event.local_ranks
        running = running or StartWorkers() in actions
        if now.state is AgentState.ENDED:
            assert now.outcome is not None
            return


def test_a_drain_with_an_unsaved_worker_names_it_in_the_reason() -> None:
    drained = RunOutcome(WorkerState.DRAINED, "received SIGUSR2", 12)
    now = SupervisorState(AgentState.ENDING, running_ranks=frozenset({0, 1}), outcome=drained)
    killed = WorkerExited(WorkerExit(0, 4, 77, -9), exited_before_saving=True)
    after, actions = transition(now, killed)
    assert after.outcome is not None
    assert after.outcome.state is WorkerState.DRAINED
    assert "received SIGUSR2, but worker of rank 4" in after.outcome.reason
    assert actions == ()
    # Before the ranks have agreed on a call, no rank saves, so the agent does not wait.
    _, actions = transition(now, attrs.evolve(killed, stop_call_undecided=True))
    assert actions == (ShortenNotice(),)
