"""What an agent does about each event in each state. Pure.

`TABLE` is the whole of it: an event that has no entry for the state is an InvalidTransitionError.
How a group of workers is stopped is in `stopping.py`.
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
from ..workers.exit import WorkerExit
from ..workers.interface import RESIZE, Notice
from ..workers.spec import WorkerState

Value = TypeVar("Value")


class State(enum.Enum):
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
class Outcome:
    """How the agent's run ends, and why; `signal` is a number where one ended it. expelled: the job
    goes on without this node."""

    state: WorkerState
    reason: str
    signal: int = 0
    expelled: bool = False


@attrs.frozen
class Supervision:
    """The state, with what it must remember: whose end is awaited, and how it will all end.

    spare: workers here that are in no group (by local rank), and wait for a place in the next:
    those kept from the last one, and newcomers. ahead: there are only newcomers, and the other
    nodes go on without this one until they are ready.
    """

    state: State = State.JOINING
    awaited: frozenset[int] = frozenset()
    outcome: Outcome | None = None
    spare: frozenset[int] = frozenset()
    ahead: bool = False


class Event:
    """Something has happened.

    keeps, of those that may end a generation: whether a worker here that is in its group can go on
    in another.
    """


class Command:
    """Something is to be done; the other machines of the agent have such, too."""


# Events.


@attrs.frozen
class Settled(Event):
    """This node is a member of a generation, with workers of these local ranks; newcomers: of
    these there are others, which are to be let in once they are ready."""

    local_ranks: frozenset[int]
    newcomers: frozenset[int] = frozenset()


@attrs.frozen
class OthersGoOn(Event):
    """The job has workers that are kept, but none here: workers of these local ranks can be started
    before this node is let in."""

    local_ranks: frozenset[int]


@attrs.frozen
class JoinEnded(Event):
    """There will be no generation for this node."""

    outcome: Outcome


@attrs.frozen
class StartFailed(Event):
    """The workers could not all be started."""

    reason: str
    keeps: bool = False


@attrs.frozen
class WorkerEnded(Event):
    """A worker ended by itself, or because it was stopped.

    unsaved: it failed, or was killed by others, when it was to save and end. alone: and the others
    have not agreed yet where to stop, so that they will not.
    """

    exit: WorkerExit
    unsaved: bool = False
    alone: bool = False
    keeps: bool = False


@attrs.frozen
class Hung(Event, Command):
    """Workers have been silent for too long, since then; what can be known is in the reason.
    stacks: where the slowest rank stands, if it is one of ours."""

    reason: str
    since: float = 0.0
    stacks: str = ""
    keeps: bool = False


@attrs.frozen
class GroupStopped(Event, Command):
    """The stopping ladder has come to its end; `left` names what would not die, and `spare` the
    workers that are in no group any more, but run."""

    left: str = ""
    spare: frozenset[int] = frozenset()


@attrs.frozen
class Changed(Event):
    """The generation that this node holds is over, or the job is."""

    change: Change
    keeps: bool = False


@attrs.frozen
class Broke(Event):
    """This node cannot go on: a part of the agent has ended, or it can start no workers at all.

    `reason` says which.
    """

    reason: str


@attrs.frozen
class SignalArrived(Event):
    """The agent itself was asked to end."""

    number: int
    name: str


@attrs.frozen
class DrainAsked(Event):
    """This node was asked to have its workers save, and to leave; `why` is for its workers."""

    number: int
    name: str
    why: str


# Commands.


@attrs.frozen
class Join(Command):
    """Ask for the next generation: no workers here are at work."""


@attrs.frozen
class ReportSlots(Command):
    """Tell with how many workers this node comes to the next generation."""


@attrs.frozen
class StartWorkers(Command):
    """Start those of the generation that has just settled."""


@attrs.frozen
class StartAhead(Command):
    """Start workers that are in no group, while the other nodes go on."""


@attrs.frozen
class StopWorkers(Command):
    """Begin the stopping ladder; where there is a reason to save, by telling it to the workers."""

    notice: str = ""


@attrs.frozen
class Regroup(Command):
    """Have the workers leave their group, which is over, and go on in another; whoever does not
    leave it in time is sent up the stopping ladder."""


@attrs.frozen
class LeaveGroup(Command):
    """Tell the workers that their group is over."""


@attrs.frozen
class KeepNone(Command):
    """No worker will go on in another group: those that wait for a place are to end, too."""


@attrs.frozen
class HurryWorkers(Command):
    """Go on to the ladder's next rung now."""


@attrs.frozen
class StopSooner(Command):
    """Of those who have been told to save and end: give them this notice instead, if it leaves
    them less time; without one, do not wait for them any more."""

    notice: str = ""


@attrs.frozen
class ReportFailure(Command):
    """Tell that workers failed; killed: a signal from outside ended the worker."""

    reason: str
    killed: bool = False


@attrs.frozen
class ReportDraining(Command):
    """Tell the other nodes that this one leaves as soon as its workers have saved."""

    reason: str


@attrs.frozen
class ReportDone(Command):
    """All workers here succeeded."""


@attrs.frozen
class Post(Command):
    """Write a value on the generation's board, for the other nodes to find; first: unless something
    stands there already. Of those under one name, each node has a key."""

    name: str
    key: str
    value: bytes
    first: bool = False


@attrs.frozen
class Gather(Command):
    """Hear what all nodes have posted under this name, now and whenever that changes."""

    name: str


@attrs.frozen
class StopAt(Command):
    """Have all workers stop at this call; None: give them this notice in place of the one that they
    have."""

    call: int | None
    notice: Notice


@attrs.frozen
class EndWorkers(Command):
    """Ask all workers to stop, or end them by force; `why` is for the log, if that need be told."""

    why: str = ""
    force: bool = False


Step = tuple[Supervision, tuple[Command, ...]]


def outcome_of(event: JoinEnded | Changed | Broke | SignalArrived | DrainAsked) -> Outcome:
    """How this node's run ends, where it ends by this."""
    if isinstance(event, JoinEnded):
        return event.outcome
    if isinstance(event, Broke):
        return Outcome(WorkerState.FAILED, event.reason)
    if isinstance(event, Changed):
        return end_of_job(event.change)
    drained = isinstance(event, DrainAsked)
    state = WorkerState.DRAINED if drained else WorkerState.STOPPED
    return Outcome(state, f"received {event.name}", event.number)


def end_of_job(change: Change) -> Outcome:
    """What the end of a job means for this node's run."""
    if change.kind is ChangeKind.SUCCEEDED:
        return Outcome(WorkerState.SUCCEEDED, change.reason)
    return Outcome(WorkerState.FAILED, change.reason, expelled=change.kind.job_continues)


def _stay(now: Supervision, _event: object) -> Step:
    return now, ()


def _start(_now: Supervision, event: Settled) -> Step:
    now = Supervision(State.RUNNING, awaited=event.local_ranks, spare=event.newcomers)
    return now, (StartWorkers(),)


def _start_ahead(now: Supervision, event: OthersGoOn) -> Step:
    return attrs.evolve(now, spare=event.local_ranks, ahead=True), (StartAhead(),)


def _start_ahead_failed(now: Supervision, _event: StartFailed) -> Step:
    # Once this node is let in they are started again, and a failure is charged then.
    return attrs.evolve(now, ahead=False), (ReportSlots(),)


def _finish(now: Supervision, event: JoinEnded | Broke | SignalArrived | DrainAsked) -> Step:
    if now.spare:
        return _end(now, event), (StopWorkers(),)
    return Supervision(State.ENDED, outcome=outcome_of(event)), ()


def _spare_ended(now: Supervision, event: WorkerEnded) -> Step:
    spare = now.spare - {event.exit.local_rank}
    # Where none is left they are started once this node is let in.
    now = attrs.evolve(now, spare=spare, ahead=now.ahead and bool(spare))
    return now, (ReportSlots(),) if now.state is State.JOINING else ()


def _end(
    now: Supervision, event: JoinEnded | Changed | Broke | SignalArrived | DrainAsked
) -> Supervision:
    return attrs.evolve(now, state=State.ENDING, outcome=outcome_of(event))


# While workers run.


def _worker_ended(now: Supervision, event: WorkerEnded) -> Step:
    gone = {event.exit.local_rank}
    now = attrs.evolve(now, awaited=now.awaited - gone, spare=now.spare - gone)
    if not event.exit.ok:
        failure = ReportFailure(event.exit.describe(), event.exit.was_killed)
        return _fail(now, failure, keeps=event.keeps)
    if now.awaited:
        return now, ()
    return Supervision(State.FINISHED, spare=now.spare), (ReportDone(),)


def _failed(now: Supervision, event: StartFailed | Hung) -> Step:
    return _fail(now, ReportFailure(event.reason), keeps=event.keeps)


def _fail(now: Supervision, failure: ReportFailure, *, keeps: bool) -> Step:
    # The claim goes out before the stop, so that the other nodes stop at the same time.
    stopping = attrs.evolve(now, state=State.STOPPING)
    return stopping, (failure, Regroup() if keeps else StopWorkers())


def _running_changed(now: Supervision, event: Changed) -> Step:
    if event.change.kind.is_final:
        return _end(now, event), (StopWorkers(),)
    # Only a change that nobody was lost or failed for leaves all ranks able to agree.
    resizes = event.change.kind is ChangeKind.RESIZE
    stop = Regroup() if event.keeps and not resizes else StopWorkers(RESIZE if resizes else "")
    return attrs.evolve(now, state=State.STOPPING), (stop,)


def _ends(stop: type[StopWorkers | StopSooner]) -> Callable[..., Step]:
    """This node's run ends, once its workers have been stopped like this."""

    def ends(now: Supervision, event: SignalArrived | Broke | DrainAsked) -> Step:
        kept = () if stop is StopWorkers else (KeepNone(),)
        if not isinstance(event, DrainAsked):
            return _end(now, event), (*kept, stop())
        # The others hear of it before our workers stop, so that all stop at one step.
        return _end(now, event), (ReportDraining(event.name), *kept, stop(event.why))

    return ends


# While they are being stopped.


def _stopping_ended(now: Supervision, event: WorkerEnded) -> Step:
    outcome = now.outcome
    if event.unsaved and outcome is not None and outcome.state is WorkerState.DRAINED:
        # It is a drain all the same, but not one that saved everything.
        reason = f"{outcome.reason}, but {event.exit.describe()} while it was to save"
        now = attrs.evolve(now, outcome=attrs.evolve(outcome, reason=reason))
    return now, (StopSooner(),) if event.alone else ()


def _stopping_changed(now: Supervision, event: Changed) -> Step:
    return (_end(now, event), (KeepNone(),)) if event.change.kind.is_final else (now, ())


def _hurry(now: Supervision, _event: SignalArrived) -> Step:
    return now, (HurryWorkers(),)


def _stopped(now: Supervision, event: GroupStopped) -> Step:
    if event.left:
        # What would not die is the worse news, and nobody else tells it.
        undying = f"these survived SIGKILL: {event.left}"
        return Supervision(State.ENDED, outcome=Outcome(WorkerState.FAILED, undying)), ()
    if now.state is State.STOPPING:
        return Supervision(State.JOINING, spare=event.spare), (Join(),)
    return Supervision(State.ENDED, outcome=now.outcome), ()


# When all of ours have succeeded.


def _finished_changed(now: Supervision, event: Changed | Broke) -> Step:
    change = (
        event.change if isinstance(event, Changed) else Change(ChangeKind.STORE_LOST, event.reason)
    )
    if not change.kind.is_final:
        if now.spare:
            return attrs.evolve(now, state=State.STOPPING), (Regroup(),)
        return Supervision(State.JOINING), (Join(),)
    outcome = end_of_job(change)
    if change.kind is ChangeKind.STORE_LOST:
        said = f"this node's workers succeeded; the others' end is unknown: {change.reason}"
        outcome = Outcome(WorkerState.SUCCEEDED, said)
    return Supervision(State.ENDED, outcome=outcome), ()


_S = State
TABLE: dict[tuple[State, type], Callable[..., Step]] = {
    (_S.JOINING, Settled): _start,
    (_S.JOINING, OthersGoOn): _start_ahead,
    (_S.JOINING, StartFailed): _start_ahead_failed,
    (_S.JOINING, JoinEnded): _finish,
    (_S.JOINING, SignalArrived): _finish,
    (_S.JOINING, Broke): _finish,
    (_S.JOINING, DrainAsked): _finish,
    (_S.JOINING, WorkerEnded): _spare_ended,
    (_S.RUNNING, StartFailed): _failed,
    (_S.RUNNING, WorkerEnded): _worker_ended,
    (_S.RUNNING, Hung): _failed,
    (_S.RUNNING, Changed): _running_changed,
    (_S.RUNNING, SignalArrived): _ends(StopWorkers),
    (_S.RUNNING, Broke): _ends(StopWorkers),
    (_S.RUNNING, DrainAsked): _ends(StopWorkers),
    (_S.STOPPING, WorkerEnded): _stopping_ended,
    (_S.STOPPING, GroupStopped): _stopped,
    (_S.STOPPING, Changed): _stopping_changed,
    (_S.STOPPING, SignalArrived): _ends(StopSooner),
    (_S.STOPPING, Broke): _ends(StopSooner),
    (_S.STOPPING, DrainAsked): _ends(StopSooner),
    (_S.FINISHED, WorkerEnded): _spare_ended,
    (_S.FINISHED, Changed): _finished_changed,
    (_S.FINISHED, SignalArrived): _finish,
    (_S.FINISHED, Broke): _finished_changed,
    (_S.FINISHED, DrainAsked): _finish,
    (_S.ENDING, Settled): _stay,
    (_S.ENDING, WorkerEnded): _stopping_ended,
    (_S.ENDING, GroupStopped): _stopped,
    (_S.ENDING, Changed): _stay,
    (_S.ENDING, SignalArrived): _hurry,
    (_S.ENDING, Broke): _stay,
    (_S.ENDING, DrainAsked): _stay,
}


def react(now: Supervision, event: Event) -> Step:
    """The next state and what to do.

    Raises:
        InvalidTransitionError: the table has no entry for this event in this state.
    """
    transition = TABLE.get((now.state, type(event)))
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
