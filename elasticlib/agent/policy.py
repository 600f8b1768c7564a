"""What an agent does about each event in each state. Pure.

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
from ..rendezvous.membership import Change, ChangeKind
from ..rendezvous.store_layout import encode as encode
from ..workers.exits import WorkerExit
from ..workers.interface import RESIZE, StopNotice
from ..workers.spec import WorkerState

Value = TypeVar("Value")


class AgentState(enum.Enum):
    """JOINING: no workers are at work, waiting for a generation. RUNNING: its workers run.

    STOPPING: workers are being stopped, to join the next one. FINISHED: all of ours succeeded,
    others still run. ENDING: workers are being stopped, for good. ENDED: over.
    """

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    ENDING = "ending"
    ENDED = "ended"


@attrs.frozen
class RunOutcome:
    """How the agent's run ends, and why; `signal` is a number where one ended it. expelled: the job
    goes on without this node."""

    state: WorkerState
    reason: str
    signal: int = 0
    evicted: bool = False


@attrs.frozen
class SupervisorState:
    """The state, with what it must remember: whose end is awaited, and how it will all end.

    spare: workers here that are in no group (by local rank), and wait for a place in the next:
    those kept from the last one, and newcomers. ahead: there are only newcomers, and the other
    nodes go on without this one until they are ready.
    """

    state: AgentState = AgentState.JOINING
    running_ranks: frozenset[int] = frozenset()
    outcome: RunOutcome | None = None
    standby_ranks: frozenset[int] = frozenset()
    is_prestarting: bool = False


class AgentEvent:
    """Something has happened.

    keeps, of those that may end a generation: whether a worker here that is in its group can go on
    in another.
    """


class AgentCommand:
    """Something is to be done; the other machines of the agent have such, too."""


# Events.


@attrs.frozen
class GenerationFormed(AgentEvent):
    """This node is a member of a generation, with workers of these local ranks; newcomers: of
    these there are others, which are to be let in once they are ready."""

    local_ranks: frozenset[int]
    standby_ranks: frozenset[int] = frozenset()


@attrs.frozen
class PeersStillTraining(AgentEvent):
    """The job has workers that are kept, but none here: workers of these local ranks can be started
    before this node is let in."""

    local_ranks: frozenset[int]


@attrs.frozen
class RendezvousEnded(AgentEvent):
    """There will be no generation for this node."""

    outcome: RunOutcome


@attrs.frozen
class WorkerStartFailed(AgentEvent):
    """The workers could not all be started."""

    reason: str
    can_regroup: bool = False


@attrs.frozen
class WorkerExited(AgentEvent):
    """A worker ended by itself, or because it was stopped.

    unsaved: it failed, or was killed by others, when it was to save and end. alone: and the others
    have not agreed yet where to stop, so that they will not.
    """

    exit: WorkerExit
    exited_before_saving: bool = False
    stop_call_undecided: bool = False
    can_regroup: bool = False


@attrs.frozen
class HangDetected(AgentEvent, AgentCommand):
    """Workers have been silent for too long, since then; what can be known is in the reason.
    stacks: where the slowest rank stands, if it is one of ours."""

    reason: str
    inactive_since: float = 0.0
    stacks: str = ""
    can_regroup: bool = False


@attrs.frozen
class WorkersStopped(AgentEvent, AgentCommand):
    """The stopping ladder has come to its end; `left` names what would not die, and `spare` the
    workers that are in no group any more, but run."""

    unkillable: str = ""
    standby_ranks: frozenset[int] = frozenset()


@attrs.frozen
class MembershipChanged(AgentEvent):
    """The generation that this node holds is over, or the job is."""

    change: Change
    can_regroup: bool = False


@attrs.frozen
class ComponentFailed(AgentEvent):
    """This node cannot go on: a part of the agent has ended, or it can start no workers at all.

    `reason` says which.
    """

    reason: str


@attrs.frozen
class SignalReceived(AgentEvent):
    """The agent itself was asked to end."""

    number: int
    name: str


@attrs.frozen
class DrainRequested(AgentEvent):
    """This node was asked to have its workers save, and to leave; `why` is for its workers."""

    number: int
    name: str
    notice_reason: str


# Commands.


@attrs.frozen
class StartRendezvous(AgentCommand):
    """Ask for the next generation: no workers here are at work."""


@attrs.frozen
class ReportSlots(AgentCommand):
    """Tell with how many workers this node comes to the next generation."""


@attrs.frozen
class StartWorkers(AgentCommand):
    """Start those of the generation that has just settled."""


@attrs.frozen
class PrestartWorkers(AgentCommand):
    """Start workers that are in no group, while the other nodes go on."""


@attrs.frozen
class StopWorkers(AgentCommand):
    """Begin the stopping ladder; where there is a reason to save, by telling it to the workers."""

    notice: str = ""


@attrs.frozen
class Regroup(AgentCommand):
    """Have the workers leave their group, which is over, and go on in another; whoever does not
    leave it in time is sent up the stopping ladder."""


@attrs.frozen
class LeaveGroup(AgentCommand):
    """Tell the workers that their group is over."""


@attrs.frozen
class CancelRegroup(AgentCommand):
    """No worker will go on in another group: those that wait for a place are to end, too."""


@attrs.frozen
class EscalateStop(AgentCommand):
    """Go on to the ladder's next rung now."""


@attrs.frozen
class ShortenNotice(AgentCommand):
    """Of those who have been told to save and end: give them this notice instead, if it leaves
    them less time; without one, do not wait for them any more."""

    notice: str = ""


@attrs.frozen
class ReportFailure(AgentCommand):
    """Tell that workers failed; killed: a signal from outside ended the worker."""

    reason: str
    killed: bool = False


@attrs.frozen
class ReportDrain(AgentCommand):
    """Tell the other nodes that this one leaves as soon as its workers have saved."""

    reason: str


@attrs.frozen
class ReportSuccess(AgentCommand):
    """All workers here succeeded."""


@attrs.frozen
class Publish(AgentCommand):
    """Write a value on the generation's board, for the other nodes to find; first: unless something
    stands there already. Of those under one name, each node has a key."""

    topic: str
    key: str
    value: bytes
    only_if_absent: bool = False


@attrs.frozen
class Subscribe(AgentCommand):
    """Hear what all nodes have posted under this name, now and whenever that changes."""

    topic: str


@attrs.frozen
class StopAtCall(AgentCommand):
    """Have all workers stop at this call; None: give them this notice in place of the one that they
    have."""

    call: int | None
    notice: StopNotice


@attrs.frozen
class SignalWorkers(AgentCommand):
    """Ask all workers to stop, or end them by force; `why` is for the log, if that need be told."""

    log_message: str = ""
    force: bool = False


Transition = tuple[SupervisorState, tuple[AgentCommand, ...]]


def outcome_of(
    event: RendezvousEnded | MembershipChanged | ComponentFailed | SignalReceived | DrainRequested,
) -> RunOutcome:
    """How this node's run ends, where it ends by this."""
    if isinstance(event, RendezvousEnded):
        return event.outcome
    if isinstance(event, ComponentFailed):
        return RunOutcome(WorkerState.FAILED, event.reason)
    if isinstance(event, MembershipChanged):
        return end_of_job(event.change)
    drained = isinstance(event, DrainRequested)
    state = WorkerState.DRAINED if drained else WorkerState.STOPPED
    return RunOutcome(state, f"received {event.name}", event.number)


def end_of_job(change: Change) -> RunOutcome:
    """What the end of a job means for this node's run."""
    if change.kind is ChangeKind.SUCCEEDED:
        return RunOutcome(WorkerState.SUCCEEDED, change.reason)
    return RunOutcome(WorkerState.FAILED, change.reason, evicted=change.kind.job_continues)


def _stay(now: SupervisorState, _event: object) -> Transition:
    return now, ()


def _start(_now: SupervisorState, event: GenerationFormed) -> Transition:
    now = SupervisorState(
        AgentState.RUNNING, running_ranks=event.local_ranks, standby_ranks=event.standby_ranks
    )
    return now, (StartWorkers(),)


def _start_ahead(now: SupervisorState, event: PeersStillTraining) -> Transition:
    return attrs.evolve(now, standby_ranks=event.local_ranks, is_prestarting=True), (
        PrestartWorkers(),
    )


def _start_ahead_failed(now: SupervisorState, _event: WorkerStartFailed) -> Transition:
    # Once this node is let in they are started again, and a failure is charged then.
    return attrs.evolve(now, is_prestarting=False), (ReportSlots(),)


def _finish(
    now: SupervisorState, event: RendezvousEnded | ComponentFailed | SignalReceived | DrainRequested
) -> Transition:
    if now.standby_ranks:
        return _end(now, event), (StopWorkers(),)
    return SupervisorState(AgentState.ENDED, outcome=outcome_of(event)), ()


def _spare_ended(now: SupervisorState, event: WorkerExited) -> Transition:
    spare = now.standby_ranks - {event.exit.local_rank}
    # Where none is left they are started once this node is let in.
    now = attrs.evolve(now, standby_ranks=spare, is_prestarting=now.is_prestarting and bool(spare))
    return now, (ReportSlots(),) if now.state is AgentState.JOINING else ()


def _end(
    now: SupervisorState,
    event: RendezvousEnded | MembershipChanged | ComponentFailed | SignalReceived | DrainRequested,
) -> SupervisorState:
    return attrs.evolve(now, state=AgentState.ENDING, outcome=outcome_of(event))


# While workers run.


def _worker_ended(now: SupervisorState, event: WorkerExited) -> Transition:
    gone = {event.exit.local_rank}
    now = attrs.evolve(
        now, running_ranks=now.running_ranks - gone, standby_ranks=now.standby_ranks - gone
    )
    if not event.exit.succeeded:
        failure = ReportFailure(event.exit.describe(), event.exit.was_killed)
        return _fail(now, failure, keeps=event.can_regroup)
    if now.running_ranks:
        return now, ()
    return SupervisorState(AgentState.FINISHED, standby_ranks=now.standby_ranks), (ReportSuccess(),)


def _failed(now: SupervisorState, event: WorkerStartFailed | HangDetected) -> Transition:
    return _fail(now, ReportFailure(event.reason), keeps=event.can_regroup)


def _fail(now: SupervisorState, failure: ReportFailure, *, keeps: bool) -> Transition:
    # The claim goes out before the stop, so that the other nodes stop at the same time.
    stopping = attrs.evolve(now, state=AgentState.STOPPING)
    return stopping, (failure, Regroup() if keeps else StopWorkers())


def _running_changed(now: SupervisorState, event: MembershipChanged) -> Transition:
    if event.change.kind.is_final:
        return _end(now, event), (StopWorkers(),)
    # Only a change that nobody was lost or failed for leaves all ranks able to agree.
    resizes = event.change.kind is ChangeKind.RESIZE
    stop = (
        Regroup() if event.can_regroup and not resizes else StopWorkers(RESIZE if resizes else "")
    )
    return attrs.evolve(now, state=AgentState.STOPPING), (stop,)


def _ends(stop: type[StopWorkers | ShortenNotice]) -> Callable[..., Transition]:
    """This node's run ends, once its workers have been stopped like this."""

    def ends(
        now: SupervisorState, event: SignalReceived | ComponentFailed | DrainRequested
    ) -> Transition:
        kept = () if stop is StopWorkers else (CancelRegroup(),)
        if not isinstance(event, DrainRequested):
            return _end(now, event), (*kept, stop())
        # The others hear of it before our workers stop, so that all stop at one step.
        return _end(now, event), (ReportDrain(event.name), *kept, stop(event.notice_reason))

    return ends


# While they are being stopped.


def _stopping_ended(now: SupervisorState, event: WorkerExited) -> Transition:
    outcome = now.outcome
    if event.exited_before_saving and outcome is not None and outcome.state is WorkerState.DRAINED:
        # It is a drain all the same, but not one that saved everything.
        reason = f"{outcome.reason}, but {event.exit.describe()} while it was to save"
        now = attrs.evolve(now, outcome=attrs.evolve(outcome, reason=reason))
    return now, (ShortenNotice(),) if event.stop_call_undecided else ()


def _stopping_changed(now: SupervisorState, event: MembershipChanged) -> Transition:
    return (_end(now, event), (CancelRegroup(),)) if event.change.kind.is_final else (now, ())


def _hurry(now: SupervisorState, _event: SignalReceived) -> Transition:
    return now, (EscalateStop(),)


def _stopped(now: SupervisorState, event: WorkersStopped) -> Transition:
    if event.unkillable:
        # What would not die is the worse news, and nobody else tells it.
        undying = f"these survived SIGKILL: {event.unkillable}"
        return SupervisorState(
            AgentState.ENDED, outcome=RunOutcome(WorkerState.FAILED, undying)
        ), ()
    if now.state is AgentState.STOPPING:
        return SupervisorState(AgentState.JOINING, standby_ranks=event.standby_ranks), (
            StartRendezvous(),
        )
    return SupervisorState(AgentState.ENDED, outcome=now.outcome), ()


# When all of ours have succeeded.


def _finished_changed(
    now: SupervisorState, event: MembershipChanged | ComponentFailed
) -> Transition:
    change = (
        event.change
        if isinstance(event, MembershipChanged)
        else Change(ChangeKind.STORE_LOST, event.reason)
    )
    if not change.kind.is_final:
        if now.standby_ranks:
            return attrs.evolve(now, state=AgentState.STOPPING), (Regroup(),)
        return SupervisorState(AgentState.JOINING), (StartRendezvous(),)
    outcome = end_of_job(change)
    if change.kind is ChangeKind.STORE_LOST:
        said = f"this node's workers succeeded; the others' end is unknown: {change.reason}"
        outcome = RunOutcome(WorkerState.SUCCEEDED, said)
    return SupervisorState(AgentState.ENDED, outcome=outcome), ()


_S = AgentState
TRANSITIONS: dict[tuple[AgentState, type], Callable[..., Transition]] = {
    (_S.JOINING, GenerationFormed): _start,
    (_S.JOINING, PeersStillTraining): _start_ahead,
    (_S.JOINING, WorkerStartFailed): _start_ahead_failed,
    (_S.JOINING, RendezvousEnded): _finish,
    (_S.JOINING, SignalReceived): _finish,
    (_S.JOINING, ComponentFailed): _finish,
    (_S.JOINING, DrainRequested): _finish,
    (_S.JOINING, WorkerExited): _spare_ended,
    (_S.RUNNING, WorkerStartFailed): _failed,
    (_S.RUNNING, WorkerExited): _worker_ended,
    (_S.RUNNING, HangDetected): _failed,
    (_S.RUNNING, MembershipChanged): _running_changed,
    (_S.RUNNING, SignalReceived): _ends(StopWorkers),
    (_S.RUNNING, ComponentFailed): _ends(StopWorkers),
    (_S.RUNNING, DrainRequested): _ends(StopWorkers),
    (_S.STOPPING, WorkerExited): _stopping_ended,
    (_S.STOPPING, WorkersStopped): _stopped,
    (_S.STOPPING, MembershipChanged): _stopping_changed,
    (_S.STOPPING, SignalReceived): _ends(ShortenNotice),
    (_S.STOPPING, ComponentFailed): _ends(ShortenNotice),
    (_S.STOPPING, DrainRequested): _ends(ShortenNotice),
    (_S.FINISHED, WorkerExited): _spare_ended,
    (_S.FINISHED, MembershipChanged): _finished_changed,
    (_S.FINISHED, SignalReceived): _finish,
    (_S.FINISHED, ComponentFailed): _finished_changed,
    (_S.FINISHED, DrainRequested): _finish,
    (_S.ENDING, GenerationFormed): _stay,
    (_S.ENDING, WorkerExited): _stopping_ended,
    (_S.ENDING, WorkersStopped): _stopped,
    (_S.ENDING, MembershipChanged): _stay,
    (_S.ENDING, SignalReceived): _hurry,
    (_S.ENDING, ComponentFailed): _stay,
    (_S.ENDING, DrainRequested): _stay,
}


def transition(now: SupervisorState, event: AgentEvent) -> Transition:
    """The next state and what to do.

    Raises:
        InvalidTransitionError: the table has no entry for this event in this state.
    """
    transition = TRANSITIONS.get((now.state, type(event)))
    if transition is None:
        raise InvalidTransitionError(
            f"{type(event).__name__} cannot happen while {now.state.value}: {event}"
        )
    return transition(now, event)


# Nodes post values for one another as JSON, and trust no such value.


def decode(kind: type[Value], data: bytes) -> Value | None:
    """Return the value that a node has posted, or None if it is none of exactly this type."""
    try:
        return store_layout.decode(kind, data, "a post")
    except RendezvousConfigError:
        return None
