"""Policy of the agent: the reaction to each event in each state. Pure.

`TRANSITIONS` lists every transition. An event that has no entry for the current state raises
InvalidTransitionError. `stop_procedure.py` describes how a group of workers is stopped.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeVar

import attrs

from ..errors import InvalidTransitionError, RendezvousConfigError
from ..rendezvous import store_layout
from ..rendezvous.blame import FailureKind
from ..rendezvous.membership import Change, ChangeKind
from ..rendezvous.store_layout import encode as encode
from ..workers.exits import WorkerExit
from ..workers.interface import RESIZE, RESTART, StopNotice
from ..workers.spec import WorkerState

Value = TypeVar("Value")


class AgentState(enum.Enum):
    """State of an agent."""

    JOINING = "joining"  # waits for a generation, no worker is in a group
    RUNNING = "running"  # the workers of a generation run
    STOPPING = "stopping"  # workers are being stopped, the node joins the next generation
    FINISHED = "finished"  # all workers of this node succeeded, those of other nodes still run
    ENDING = "ending"  # workers are being stopped, the run ends
    ENDED = "ended"


@attrs.frozen
class RunOutcome:
    """The outcome of an agent's run, and the reason."""

    state: WorkerState
    reason: str
    signal: int = 0  # the signal that stopped the node, or 0
    evicted: bool = False  # the job continues without this node
    is_unfit: bool = False  # the node failed its check, or the job has excluded its host
    ends_job: bool = False  # no other node continues the job

    @property
    def lets_workers_save(self) -> bool:
        """True if the run ends by a drain, or because an operator stops the job."""
        is_request = self.state is WorkerState.STOPPED and not self.signal
        return self.state is WorkerState.DRAINED or is_request


@attrs.frozen
class SupervisorState:
    """The agent's state, and what it must remember for later transitions."""

    state: AgentState = AgentState.JOINING
    running_ranks: frozenset[int] = frozenset()  # local ranks in the group that have not exited
    outcome: RunOutcome | None = None  # set once the run ends
    # Local ranks that run in no group and wait for one: retained from the last group, or new.
    standby_ranks: frozenset[int] = frozenset()
    # Standby workers start before this node joins, while the other nodes train.
    is_prestarting: bool = False
    # The workers are stopped to be replaced, so that none may continue in the next group.
    must_restart: bool = False
    # The workers are stopped although no failure and no loss has ended the generation.
    is_planned: bool = False


class AgentEvent:
    """Something that has happened.

    The field `can_regroup` of some events is True if a worker of the group can join another one.
    """


class AgentCommand:
    """Something that the agent shall do."""


Transition = tuple[SupervisorState, tuple[AgentCommand, ...]]


# Events.


@attrs.frozen
class GenerationFormed(AgentEvent):
    """This node is a member of a generation."""

    local_ranks: frozenset[int]  # workers of the generation
    standby_ranks: frozenset[int] = frozenset()  # workers that the generation has no place for


@attrs.frozen
class PeersStillTraining(AgentEvent):
    """Other nodes train with workers that can regroup, so workers here can start before joining."""

    local_ranks: frozenset[int]


@attrs.frozen
class RendezvousEnded(AgentEvent):
    """This node takes part in no further generation."""

    outcome: RunOutcome


@attrs.frozen
class WorkerStartFailed(AgentEvent):
    """Some workers could not be started."""

    reason: str
    can_regroup: bool = False


@attrs.frozen
class WorkerExited(AgentEvent):
    """A worker has exited, by itself or because it was stopped."""

    exit: WorkerExit
    exited_before_saving: bool = False  # it failed or was killed after it had a stop notice
    stop_call_undecided: bool = False  # the remaining workers cannot agree on a stop call any more
    exited_in_group: bool = False  # it had not left its group, and had received no signal
    can_regroup: bool = False


@attrs.frozen
class HangDetected(AgentEvent, AgentCommand):
    """Workers make no progress."""

    reason: str
    inactive_since: float = 0.0
    stacks: str = ""  # of the slowest rank, if it is on this node
    node_rank: int = -1  # group rank of the node whose worker hangs; -1 if the evidence names none
    host: str = ""  # name of that node's host
    can_regroup: bool = False


@attrs.frozen
class WorkersStopped(AgentEvent, AgentCommand):
    """The stop procedure has finished."""

    unkillable: str = ""  # names of workers that survived SIGKILL
    standby_ranks: frozenset[int] = frozenset()  # workers that left their group and still run


@attrs.frozen
class MembershipChanged(AgentEvent):
    """The current generation is over, or the job is."""

    change: Change
    can_regroup: bool = False


@attrs.frozen
class ComponentFailed(AgentEvent):
    """This node cannot continue: a thread of the agent failed, or it cannot start any worker."""

    reason: str


@attrs.frozen
class SignalReceived(AgentEvent):
    """The agent received a signal that ends its run, or another one after the run began to end."""

    number: int
    name: str
    is_interrupt: bool = False  # SIGINT, by which a user skips to the next step of a stop


@attrs.frozen
class DrainRequested(AgentEvent):
    """The agent shall leave the job after its workers have saved: by a signal, or a request."""

    number: int  # of the signal, or 0
    name: str  # of the signal, or of what requests it
    notice_reason: str
    ends_job: bool = False  # all nodes leave, and the job is over


# Commands.


@attrs.frozen
class StartRendezvous(AgentCommand):
    """Join the next generation."""


@attrs.frozen
class ReportSlots(AgentCommand):
    """Report how many workers this node offers for the next generation."""


@attrs.frozen
class StartWorkers(AgentCommand):
    """Start the workers of the generation that has just formed."""


@attrs.frozen
class PrestartWorkers(AgentCommand):
    """Start workers in no group, while the other nodes train."""


@attrs.frozen
class StopWorkers(AgentCommand):
    """Begin the stop procedure, with a notice of this reason if it is not empty."""

    notice: str = ""


@attrs.frozen
class Regroup(AgentCommand):
    """Begin the stop procedure for workers that leave their group and wait for the next one."""


@attrs.frozen
class LeaveGroup(AgentCommand):
    """Make the workers leave their group, because the generation is over."""


@attrs.frozen
class CancelRegroup(AgentCommand):
    """Also stop the workers that have left their group and wait for the next one."""


@attrs.frozen
class EscalateStop(AgentCommand):
    """Continue with the next stage of the stop procedure now."""


@attrs.frozen
class ShortenNotice(AgentCommand):
    """Make the workers' notice more urgent or shorter. Empty: end their time to save now."""

    notice: str = ""


@attrs.frozen
class ReportFailure(AgentCommand):
    """Report a failure of workers to the rendezvous."""

    reason: str
    kind: FailureKind = FailureKind.RAISED
    hung_node_rank: int = -1  # group rank of the node that hangs, if the kind is HUNG


@attrs.frozen
class ReportDrain(AgentCommand):
    """Report to the other nodes that this node leaves as soon as its workers have saved."""

    reason: str
    ends_job: bool = False  # all other nodes shall leave as well


@attrs.frozen
class ReportSuccess(AgentCommand):
    """Report that all workers of this node succeeded."""


@attrs.frozen
class Publish(AgentCommand):
    """Publish a value under a key of a topic for the other nodes of the generation."""

    topic: str
    key: str
    value: bytes
    only_if_absent: bool = False  # keep a value that exists already


@attrs.frozen
class Subscribe(AgentCommand):
    """Receive what all nodes have published under this topic, now and after each change."""

    topic: str


@attrs.frozen
class StopAtCall(AgentCommand):
    """Make all workers stop at this call of `should_stop`. None: only replace their notice."""

    call: int | None
    notice: StopNotice


@attrs.frozen
class SignalWorkers(AgentCommand):
    """Send SIGTERM, or SIGKILL with `force`, to the workers that have not stopped."""

    log_message: str = ""
    force: bool = False


# Transitions.


def outcome_of(
    event: RendezvousEnded | MembershipChanged | ComponentFailed | SignalReceived | DrainRequested,
) -> RunOutcome:
    """Return how this node's run ends after an event that ends it."""
    if isinstance(event, RendezvousEnded):
        return event.outcome
    if isinstance(event, ComponentFailed):
        return RunOutcome(WorkerState.FAILED, event.reason)
    if isinstance(event, MembershipChanged):
        return end_of_job(event.change)
    is_drain = isinstance(event, DrainRequested) and not event.ends_job
    state = WorkerState.DRAINED if is_drain else WorkerState.STOPPED
    ends_job = isinstance(event, DrainRequested) and event.ends_job
    return RunOutcome(state, f"received {event.name}", event.number, ends_job=ends_job)


def end_of_job(change: Change) -> RunOutcome:
    """Return the outcome of this node's run after a final change."""
    kind = change.kind
    state = {
        ChangeKind.SUCCEEDED: WorkerState.SUCCEEDED,
        ChangeKind.STOPPED: WorkerState.STOPPED,
    }.get(kind, WorkerState.FAILED)
    return RunOutcome(
        state,
        change.reason,
        evicted=kind.job_continues,
        is_unfit=kind is ChangeKind.EXCLUDED,
        ends_job=not kind.job_continues and kind is not ChangeKind.STORE_LOST,
    )


def _ignore(now: SupervisorState, _event: object) -> Transition:
    return now, ()


def _begin_ending(
    now: SupervisorState,
    event: RendezvousEnded | MembershipChanged | ComponentFailed | SignalReceived | DrainRequested,
) -> SupervisorState:
    return attrs.evolve(now, state=AgentState.ENDING, outcome=outcome_of(event))


# While no worker is in a group.


def _start_workers(_now: SupervisorState, event: GenerationFormed) -> Transition:
    now = SupervisorState(
        AgentState.RUNNING, running_ranks=event.local_ranks, standby_ranks=event.standby_ranks
    )
    return now, (StartWorkers(),)


def _prestart(now: SupervisorState, event: PeersStillTraining) -> Transition:
    now = attrs.evolve(now, standby_ranks=event.local_ranks, is_prestarting=True)
    return now, (PrestartWorkers(),)


def _on_prestart_failed(now: SupervisorState, _event: WorkerStartFailed) -> Transition:
    # The workers are started again once this node is a member. Then a failure is charged.
    return attrs.evolve(now, is_prestarting=False), (ReportSlots(),)


def _end_without_group(
    now: SupervisorState,
    event: RendezvousEnded | ComponentFailed | SignalReceived | DrainRequested,
) -> Transition:
    if now.standby_ranks:
        return _begin_ending(now, event), (StopWorkers(),)
    return SupervisorState(AgentState.ENDED, outcome=outcome_of(event)), ()


def _on_standby_worker_exited(now: SupervisorState, event: WorkerExited) -> Transition:
    standby = now.standby_ranks - {event.exit.local_rank}
    is_prestarting = now.is_prestarting and bool(standby)
    now = attrs.evolve(now, standby_ranks=standby, is_prestarting=is_prestarting)
    return now, (ReportSlots(),) if now.state is AgentState.JOINING else ()


# While workers run.


def _on_worker_exited(now: SupervisorState, event: WorkerExited) -> Transition:
    exited = {event.exit.local_rank}
    now = attrs.evolve(
        now, running_ranks=now.running_ranks - exited, standby_ranks=now.standby_ranks - exited
    )
    if not event.exit.succeeded:
        failure = ReportFailure(event.exit.describe(), event.exit.root_failure.failure_kind)
        return _report_failure_and_stop(now, failure, can_regroup=event.can_regroup)
    if now.running_ranks:
        return now, ()
    finished = SupervisorState(AgentState.FINISHED, standby_ranks=now.standby_ranks)
    return finished, (ReportSuccess(),)


def _on_start_failure(now: SupervisorState, event: WorkerStartFailed) -> Transition:
    return _report_failure_and_stop(now, ReportFailure(event.reason), can_regroup=event.can_regroup)


def _on_hang(now: SupervisorState, event: HangDetected) -> Transition:
    kind = FailureKind.STALLED if event.node_rank < 0 else FailureKind.HUNG
    failure = ReportFailure(event.reason, kind, event.node_rank)
    return _report_failure_and_stop(now, failure, can_regroup=event.can_regroup)


def _report_failure_and_stop(
    now: SupervisorState, failure: ReportFailure, *, can_regroup: bool
) -> Transition:
    # The failure is reported before the stop, so that the other nodes stop at the same time.
    stop = Regroup() if can_regroup else StopWorkers()
    return attrs.evolve(now, state=AgentState.STOPPING), (failure, stop)


def _on_membership_changed(now: SupervisorState, event: MembershipChanged) -> Transition:
    if event.change.kind.is_final:
        return _begin_ending(now, event), (StopWorkers(),)
    # All ranks can agree on a stop call only if no node was lost and no worker failed.
    kind = event.change.kind
    if event.can_regroup and not kind.is_planned:
        return attrs.evolve(now, state=AgentState.STOPPING), (Regroup(),)
    must_restart = kind is ChangeKind.RESTART
    notice = RESTART if must_restart else RESIZE if kind.is_planned else ""
    now = attrs.evolve(
        now, state=AgentState.STOPPING, must_restart=must_restart, is_planned=kind.is_planned
    )
    return now, (StopWorkers(notice),)


def _end_run(stop: type[StopWorkers | ShortenNotice]) -> Callable[..., Transition]:
    """Return a transition that ends this node's run and stops its workers by command `stop`."""

    def end_run(
        now: SupervisorState, event: SignalReceived | ComponentFailed | DrainRequested
    ) -> Transition:
        cancel = () if stop is StopWorkers else (CancelRegroup(),)
        if not isinstance(event, DrainRequested):
            return _begin_ending(now, event), (*cancel, stop())
        # The other nodes are informed before the workers stop, so that all stop at one step.
        report = ReportDrain(event.name, event.ends_job)
        commands = (report, *cancel, stop(event.notice_reason))
        return _begin_ending(now, event), commands

    return end_run


# While workers are being stopped.


def _on_exit_while_stopping(now: SupervisorState, event: WorkerExited) -> Transition:
    outcome = now.outcome
    if event.exited_before_saving and outcome is not None and outcome.lets_workers_save:
        # The state does not change, but the reason mentions the worker that did not save.
        reason = f"{outcome.reason}, but {event.exit.describe()} before it had saved"
        now = attrs.evolve(now, outcome=attrs.evolve(outcome, reason=reason))
    commands: tuple[AgentCommand, ...] = (ShortenNotice(),) if event.stop_call_undecided else ()
    has_failed = not event.exit.succeeded and event.exited_in_group and event.can_regroup
    if has_failed and now.is_planned and now.state is AgentState.STOPPING:
        # No worker has to exit for this resize, and nothing else counts its failure: a script that
        # fails in each group would never end.
        failure = ReportFailure(event.exit.describe(), event.exit.root_failure.failure_kind)
        now, commands = attrs.evolve(now, is_planned=False), (failure, *commands)
    return now, commands


def _on_change_while_stopping(now: SupervisorState, event: MembershipChanged) -> Transition:
    return (
        (_begin_ending(now, event), (CancelRegroup(),)) if event.change.kind.is_final else (now, ())
    )


def _on_drain_while_ending(now: SupervisorState, event: DrainRequested) -> Transition:
    """Turn a drain of this node into a stop of the job if the new request ends the job."""
    outcome = now.outcome
    if not event.ends_job or outcome is None or outcome.state is not WorkerState.DRAINED:
        return now, ()
    # A scheduler must not start this node again, because the whole job ends.
    return attrs.evolve(now, outcome=outcome_of(event)), (ReportDrain(event.name, ends_job=True),)


def _on_signal_while_ending(now: SupervisorState, event: SignalReceived) -> Transition:
    # Batch systems repeat every signal except SIGINT, which is how a user interrupts a stop.
    return now, (EscalateStop(),) if event.is_interrupt else ()


def _on_workers_stopped(now: SupervisorState, event: WorkersStopped) -> Transition:
    if event.unkillable:
        # This hides the earlier reason, because nothing else reports processes that are left.
        reason = f"these survived SIGKILL: {event.unkillable}"
        failed = RunOutcome(WorkerState.FAILED, reason)
        return SupervisorState(AgentState.ENDED, outcome=failed), ()
    if now.state is AgentState.STOPPING:
        joining = SupervisorState(AgentState.JOINING, standby_ranks=event.standby_ranks)
        return joining, (StartRendezvous(),)
    return SupervisorState(AgentState.ENDED, outcome=now.outcome), ()


# After all workers of this node have succeeded.


def _on_change_after_success(
    now: SupervisorState, event: MembershipChanged | ComponentFailed
) -> Transition:
    if isinstance(event, ComponentFailed):
        change = Change(ChangeKind.STORE_LOST, event.reason)
    else:
        change = event.change
    if not change.kind.is_final:
        if now.standby_ranks:
            must_restart = change.kind is ChangeKind.RESTART
            now = attrs.evolve(now, state=AgentState.STOPPING, must_restart=must_restart)
            return now, (StopWorkers() if must_restart else Regroup(),)
        return SupervisorState(AgentState.JOINING), (StartRendezvous(),)
    outcome = end_of_job(change)
    if change.kind is ChangeKind.STORE_LOST:
        reason = "this node's workers succeeded; the result of the other nodes is unknown: "
        outcome = RunOutcome(WorkerState.SUCCEEDED, reason + change.reason)
    return SupervisorState(AgentState.ENDED, outcome=outcome), ()


_S = AgentState
TRANSITIONS: dict[tuple[AgentState, type], Callable[..., Transition]] = {
    (_S.JOINING, GenerationFormed): _start_workers,
    (_S.JOINING, PeersStillTraining): _prestart,
    (_S.JOINING, WorkerStartFailed): _on_prestart_failed,
    (_S.JOINING, RendezvousEnded): _end_without_group,
    (_S.JOINING, SignalReceived): _end_without_group,
    (_S.JOINING, ComponentFailed): _end_without_group,
    (_S.JOINING, DrainRequested): _end_without_group,
    (_S.JOINING, WorkerExited): _on_standby_worker_exited,
    (_S.RUNNING, WorkerStartFailed): _on_start_failure,
    (_S.RUNNING, WorkerExited): _on_worker_exited,
    (_S.RUNNING, HangDetected): _on_hang,
    (_S.RUNNING, MembershipChanged): _on_membership_changed,
    (_S.RUNNING, SignalReceived): _end_run(StopWorkers),
    (_S.RUNNING, ComponentFailed): _end_run(StopWorkers),
    (_S.RUNNING, DrainRequested): _end_run(StopWorkers),
    (_S.STOPPING, WorkerExited): _on_exit_while_stopping,
    (_S.STOPPING, WorkersStopped): _on_workers_stopped,
    (_S.STOPPING, MembershipChanged): _on_change_while_stopping,
    (_S.STOPPING, SignalReceived): _end_run(ShortenNotice),
    (_S.STOPPING, ComponentFailed): _end_run(ShortenNotice),
    (_S.STOPPING, DrainRequested): _end_run(ShortenNotice),
    (_S.FINISHED, WorkerExited): _on_standby_worker_exited,
    (_S.FINISHED, MembershipChanged): _on_change_after_success,
    (_S.FINISHED, SignalReceived): _end_without_group,
    (_S.FINISHED, ComponentFailed): _on_change_after_success,
    (_S.FINISHED, DrainRequested): _end_without_group,
    (_S.ENDING, GenerationFormed): _ignore,
    (_S.ENDING, WorkerExited): _on_exit_while_stopping,
    (_S.ENDING, WorkersStopped): _on_workers_stopped,
    (_S.ENDING, MembershipChanged): _ignore,
    (_S.ENDING, SignalReceived): _on_signal_while_ending,
    (_S.ENDING, ComponentFailed): _ignore,
    (_S.ENDING, DrainRequested): _on_drain_while_ending,
}


def transition(now: SupervisorState, event: AgentEvent) -> Transition:
    """Return the next state, and the commands to execute.

    Raises:
        InvalidTransitionError: the table has no entry for this event in this state.
    """
    function = TRANSITIONS.get((now.state, type(event)))
    if function is None:
        raise InvalidTransitionError(
            f"{type(event).__name__} cannot happen while {now.state.value}: {event}"
        )
    return function(now, event)


def decode(kind: type[Value], data: bytes) -> Value | None:
    """Return the value of a published message, or None if it is not of exactly this type."""
    try:
        return store_layout.decode(kind, data, "a published value")
    except RendezvousConfigError:
        return None
