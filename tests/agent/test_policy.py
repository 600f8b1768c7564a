"""Every event in every state: what is done about it, or an error that names both."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.agent.policy import (
    TABLE,
    Changed,
    DrainAsked,
    Event,
    GroupStopped,
    Hung,
    HurryWorkers,
    Join,
    JoinEnded,
    KeepNone,
    OthersGoOn,
    Outcome,
    Regroup,
    ReportDone,
    ReportDraining,
    ReportFailure,
    ReportSlots,
    Settled,
    SignalArrived,
    StartAhead,
    StartFailed,
    StartWorkers,
    State,
    StopSooner,
    StopWorkers,
    Supervision,
    WorkerEnded,
    react,
)
from elasticlib.errors import InvalidTransitionError
from elasticlib.rendezvous.interface import Change, ChangeKind
from elasticlib.workers.exit import WorkerExit
from elasticlib.workers.spec import WorkerState

FAILED = Outcome(WorkerState.FAILED, "no more")
TERM = SignalArrived(15, "SIGTERM")
USR2 = DrainAsked(12, "SIGUSR2", "drain")


def ended(local_rank: int, code: int = 0) -> WorkerEnded:
    return WorkerEnded(WorkerExit(local_rank, rank=local_rank, pid=100, returncode=code))


def changed(kind: ChangeKind) -> Changed:
    return Changed(Change(kind, f"because {kind.value}"))


EVENTS: dict[str, Event] = {
    "settled": Settled(frozenset({0, 1})),
    "settled in part": Settled(frozenset({1}), newcomers=frozenset({0})),
    "join ended": JoinEnded(FAILED),
    "start failed": StartFailed("no such file"),
    "worker done": ended(0),
    "worker failed": ended(0, 1),
    "stopped": GroupStopped(),
    "stopped but for": GroupStopped("pid 7"),
    "reopened": changed(ChangeKind.GENERATION_ENDED),
    "job succeeded": changed(ChangeKind.SUCCEEDED),
    "job failed": changed(ChangeKind.FAILED),
    "expelled": changed(ChangeKind.EVICTED),
    "surplus": changed(ChangeKind.NOT_NEEDED),
    "store lost": changed(ChangeKind.STORE_LOST),
    "signal": TERM,
    "drain": USR2,
    "resize": changed(ChangeKind.RESIZE),
    "start failed, keeps": StartFailed("no such file", keeps=True),
    "worker failed, keeps": attrs.evolve(ended(0, 1), keeps=True),
    "hung, keeps": Hung("silent", keeps=True),
    "reopened, keeps": attrs.evolve(changed(ChangeKind.GENERATION_ENDED), keeps=True),
    "resize, keeps": attrs.evolve(changed(ChangeKind.RESIZE), keeps=True),
    "job failed, keeps": attrs.evolve(changed(ChangeKind.FAILED), keeps=True),
    "stopped, with spare": GroupStopped(spare=frozenset({1})),
    "others go on": OthersGoOn(frozenset({0, 1})),
}
NEXT = {
    (State.JOINING, "settled"): (State.RUNNING, [StartWorkers()]),
    (State.JOINING, "settled in part"): (State.RUNNING, [StartWorkers()]),
    (State.JOINING, "worker done"): (State.JOINING, [ReportSlots()]),
    (State.JOINING, "worker failed"): (State.JOINING, [ReportSlots()]),
    (State.JOINING, "worker failed, keeps"): (State.JOINING, [ReportSlots()]),
    (State.JOINING, "others go on"): (State.JOINING, [StartAhead()]),
    (State.JOINING, "start failed"): (State.JOINING, [ReportSlots()]),
    (State.JOINING, "start failed, keeps"): (State.JOINING, [ReportSlots()]),
    (State.JOINING, "join ended"): (State.ENDED, []),
    (State.JOINING, "signal"): (State.ENDED, []),
    (State.JOINING, "drain"): (State.ENDED, []),
    (State.RUNNING, "start failed"): (
        State.STOPPING,
        [ReportFailure("no such file"), StopWorkers()],
    ),
    (State.RUNNING, "worker done"): (State.RUNNING, []),
    (State.RUNNING, "worker failed"): (
        State.STOPPING,
        [
            ReportFailure("worker of rank 0 (local 0, pid 100) exited with code 1"),
            StopWorkers(),
        ],
    ),
    (State.RUNNING, "start failed, keeps"): (
        State.STOPPING,
        [ReportFailure("no such file"), Regroup()],
    ),
    (State.RUNNING, "worker failed, keeps"): (
        State.STOPPING,
        [ReportFailure("worker of rank 0 (local 0, pid 100) exited with code 1"), Regroup()],
    ),
    (State.RUNNING, "hung, keeps"): (State.STOPPING, [ReportFailure("silent"), Regroup()]),
    (State.RUNNING, "reopened"): (State.STOPPING, [StopWorkers()]),
    (State.RUNNING, "reopened, keeps"): (State.STOPPING, [Regroup()]),
    (State.RUNNING, "resize, keeps"): (State.STOPPING, [StopWorkers("resize")]),
    (State.RUNNING, "job failed, keeps"): (State.ENDING, [StopWorkers()]),
    (State.RUNNING, "job succeeded"): (State.ENDING, [StopWorkers()]),
    (State.RUNNING, "job failed"): (State.ENDING, [StopWorkers()]),
    (State.RUNNING, "expelled"): (State.ENDING, [StopWorkers()]),
    (State.RUNNING, "surplus"): (State.ENDING, [StopWorkers()]),
    (State.RUNNING, "store lost"): (State.ENDING, [StopWorkers()]),
    (State.RUNNING, "signal"): (State.ENDING, [StopWorkers()]),
    (State.RUNNING, "drain"): (State.ENDING, [ReportDraining("SIGUSR2"), StopWorkers("drain")]),
    (State.RUNNING, "resize"): (State.STOPPING, [StopWorkers("resize")]),
    (State.STOPPING, "worker done"): (State.STOPPING, []),
    (State.STOPPING, "worker failed"): (State.STOPPING, []),
    (State.STOPPING, "worker failed, keeps"): (State.STOPPING, []),
    (State.STOPPING, "reopened, keeps"): (State.STOPPING, []),
    (State.STOPPING, "resize, keeps"): (State.STOPPING, []),
    (State.STOPPING, "job failed, keeps"): (State.ENDING, [KeepNone()]),
    (State.STOPPING, "stopped, with spare"): (State.JOINING, [Join()]),
    (State.STOPPING, "stopped"): (State.JOINING, [Join()]),
    (State.STOPPING, "stopped but for"): (State.ENDED, []),
    (State.STOPPING, "reopened"): (State.STOPPING, []),
    (State.STOPPING, "job succeeded"): (State.ENDING, [KeepNone()]),
    (State.STOPPING, "job failed"): (State.ENDING, [KeepNone()]),
    (State.STOPPING, "expelled"): (State.ENDING, [KeepNone()]),
    (State.STOPPING, "surplus"): (State.ENDING, [KeepNone()]),
    (State.STOPPING, "store lost"): (State.ENDING, [KeepNone()]),
    (State.STOPPING, "signal"): (State.ENDING, [KeepNone(), StopSooner()]),
    (State.STOPPING, "drain"): (
        State.ENDING,
        [ReportDraining("SIGUSR2"), KeepNone(), StopSooner("drain")],
    ),
    (State.STOPPING, "resize"): (State.STOPPING, []),
    (State.FINISHED, "worker done"): (State.FINISHED, []),
    (State.FINISHED, "worker failed"): (State.FINISHED, []),
    (State.FINISHED, "worker failed, keeps"): (State.FINISHED, []),
    (State.FINISHED, "reopened, keeps"): (State.JOINING, [Join()]),
    (State.FINISHED, "resize, keeps"): (State.JOINING, [Join()]),
    (State.FINISHED, "job failed, keeps"): (State.ENDED, []),
    (State.FINISHED, "reopened"): (State.JOINING, [Join()]),
    (State.FINISHED, "job succeeded"): (State.ENDED, []),
    (State.FINISHED, "job failed"): (State.ENDED, []),
    (State.FINISHED, "expelled"): (State.ENDED, []),
    (State.FINISHED, "surplus"): (State.ENDED, []),
    (State.FINISHED, "store lost"): (State.ENDED, []),
    (State.FINISHED, "signal"): (State.ENDED, []),
    (State.FINISHED, "drain"): (State.ENDED, []),
    (State.FINISHED, "resize"): (State.JOINING, [Join()]),
    (State.ENDING, "settled"): (State.ENDING, []),
    (State.ENDING, "settled in part"): (State.ENDING, []),
    (State.ENDING, "worker failed, keeps"): (State.ENDING, []),
    (State.ENDING, "reopened, keeps"): (State.ENDING, []),
    (State.ENDING, "resize, keeps"): (State.ENDING, []),
    (State.ENDING, "job failed, keeps"): (State.ENDING, []),
    (State.ENDING, "stopped, with spare"): (State.ENDED, []),
    (State.ENDING, "worker done"): (State.ENDING, []),
    (State.ENDING, "worker failed"): (State.ENDING, []),
    (State.ENDING, "stopped"): (State.ENDED, []),
    (State.ENDING, "stopped but for"): (State.ENDED, []),
    (State.ENDING, "reopened"): (State.ENDING, []),
    (State.ENDING, "job succeeded"): (State.ENDING, []),
    (State.ENDING, "job failed"): (State.ENDING, []),
    (State.ENDING, "expelled"): (State.ENDING, []),
    (State.ENDING, "surplus"): (State.ENDING, []),
    (State.ENDING, "store lost"): (State.ENDING, []),
    (State.ENDING, "drain"): (State.ENDING, []),
    (State.ENDING, "resize"): (State.ENDING, []),
    (State.ENDING, "signal"): (State.ENDING, [HurryWorkers()]),
}


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("state", State)
def test_each_event_in_each_state_has_one_answer(state: State, name: str) -> None:
    now = Supervision(state, awaited=frozenset({0, 1}), outcome=FAILED)
    expected = NEXT.get((state, name))
    if expected is None:
        with pytest.raises(
            InvalidTransitionError, match=f"{type(EVENTS[name]).__name__}.*{state.value}"
        ):
            react(now, EVENTS[name])
        return
    after, actions = react(now, EVENTS[name])
    assert (after.state, list(actions)) == expected


def test_a_node_comes_ahead_of_its_workers_until_one_of_them_is_left() -> None:
    now, _ = react(Supervision(), OthersGoOn(frozenset({0, 1})))
    assert now.ahead
    now, _ = react(now, ended(0, 1))
    assert (now.ahead, now.spare) == (True, {1})
    last, _ = react(now, ended(1, 1))
    assert (last.ahead, last.spare) == (False, frozenset())
    assert not react(now, StartFailed("no such file"))[0].ahead
    settled, _ = react(now, Settled(frozenset({0, 1})))
    assert not settled.ahead
    # What was started is ended with the run.
    after, actions = react(now, TERM)
    assert (after.state, actions) == (State.ENDING, (StopWorkers(),))


def test_the_node_is_finished_when_its_last_worker_is_done() -> None:
    now, _ = react(Supervision(), Settled(frozenset({0, 1})))
    now, _ = react(now, ended(0))
    now, actions = react(now, ended(1))
    assert (now.state, actions) == (State.FINISHED, (ReportDone(),))


def test_the_first_reason_to_end_is_the_one_that_is_told() -> None:
    now = Supervision(State.RUNNING, awaited=frozenset({0}))
    now, _ = react(now, changed(ChangeKind.EVICTED))
    now, _ = react(now, TERM)
    now, _ = react(now, GroupStopped())
    assert now.outcome == Outcome(WorkerState.FAILED, "because evicted", expelled=True)


def test_what_would_not_die_is_named_in_the_outcome() -> None:
    now = Supervision(State.ENDING, outcome=FAILED)
    now, _ = react(now, GroupStopped("pid 7"))
    assert now.outcome is not None
    assert "pid 7" in now.outcome.reason


def test_a_node_whose_workers_succeeded_does_not_fail_with_the_store() -> None:
    now, _ = react(Supervision(State.FINISHED), changed(ChangeKind.STORE_LOST))
    assert now.outcome is not None
    assert now.outcome.state is WorkerState.SUCCEEDED


@pytest.mark.parametrize(("code", "killed"), [(2, False), (-9, True)])
def test_a_failure_is_reported_with_whether_the_worker_was_killed(code: int, killed: bool) -> None:
    now = Supervision(State.RUNNING, awaited=frozenset({0}))
    failed = ended(0, code)
    _, actions = react(now, failed)
    assert actions[0] == ReportFailure(failed.exit.describe(), killed)


@pytest.mark.parametrize("state", [State.JOINING, State.RUNNING, State.STOPPING, State.FINISHED])
def test_a_drain_is_told_from_a_signal_in_the_outcome(state: State) -> None:
    now = Supervision(state, awaited=frozenset({0}))
    for event, kind in ((USR2, WorkerState.DRAINED), (TERM, WorkerState.STOPPED)):
        after, _ = react(now, event)
        assert after.outcome is not None
        assert (after.outcome.state, after.outcome.signal) == (kind, event.number)


def test_what_has_begun_as_a_drain_ends_as_one_however_it_is_hurried() -> None:
    now, _ = react(Supervision(State.RUNNING, awaited=frozenset({0})), USR2)
    for event in (changed(ChangeKind.RESIZE), TERM, ended(0, 1), GroupStopped()):
        now, _ = react(now, event)
    assert now.outcome is not None
    assert (now.state, now.outcome.state) == (State.ENDED, WorkerState.DRAINED)


def test_the_table_names_every_state_but_the_last() -> None:
    assert {state for state, _ in TABLE} == set(State) - {State.ENDED}


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=12))
def test_no_history_ends_without_an_outcome_or_leaves_workers_unstopped(names: list[str]) -> None:
    now, running = Supervision(), False
    waiting: frozenset[int] = frozenset()
    for name in names:
        before, event = now.state, EVENTS[name]
        if before is State.ENDING and isinstance(event, GroupStopped) and event.spare:
            continue  # nobody is left out of it who could wait
        try:
            now, actions = react(now, event)
        except InvalidTransitionError:
            continue
        # The ladder's end, and the last worker's success, are how a group comes to have ended.
        if isinstance(event, GroupStopped):
            running, waiting = False, event.spare
        running = running and ReportDone() not in actions
        if isinstance(event, WorkerEnded):
            waiting -= {event.exit.local_rank}
        over = Join() in actions or now.state is State.ENDED
        assert not running or not over, names
        # What waits when all others are done is ended with the run.
        assert not waiting or now.state is not State.ENDED or before is State.FINISHED, names
        if StartWorkers() in actions and isinstance(event, Settled):
            waiting = event.newcomers
        if StartAhead() in actions and isinstance(event, OthersGoOn):
            waiting = event.local_ranks
        running = running or StartWorkers() in actions
        if now.state is State.ENDED:
            assert now.outcome is not None
            return


def test_a_drain_that_did_not_save_everything_says_so() -> None:
    drained = Outcome(WorkerState.DRAINED, "received SIGUSR2", 12)
    now = Supervision(State.ENDING, awaited=frozenset({0, 1}), outcome=drained)
    killed = WorkerEnded(WorkerExit(0, 4, 77, -9), unsaved=True)
    after, actions = react(now, killed)
    assert after.outcome is not None
    assert after.outcome.state is WorkerState.DRAINED
    assert "received SIGUSR2, but worker of rank 4" in after.outcome.reason
    assert actions == ()
    # Before the ranks have agreed where to stop, nobody saves, and nobody needs to be waited for.
    _, actions = react(now, attrs.evolve(killed, alone=True))
    assert actions == (StopSooner(),)
