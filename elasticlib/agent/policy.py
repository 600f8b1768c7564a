"""What an agent does about each event in each state.

`TABLE` is the whole of it: an event that has no entry for the state is an IllegalTransition.
Nothing here acts; a transition returns the next state and the commands to carry out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import attrs

from ..errors import IllegalTransition
from ..rendezvous.document import Change, ChangeKind, FailureKind
from ..workers.exit import WorkerExit
from ..workers.interface import RESIZE
from ..workers.spec import WorkerState


class State(enum.Enum):
    """JOINING: no workers, waiting for a generation. RUNNING: its workers run.

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
    """The state, with what it must remember: whose end is awaited, and how it will all end."""

    state: State = State.JOINING
    awaited: frozenset[int] = frozenset()
    outcome: Outcome | None = None


class Event:
    """Something has happened."""


class Command:
    """Something is to be done; the other machines of the agent have such, too."""


# Events.


@attrs.frozen
class Settled(Event):
    """This node is a member of a generation, with workers of these local ranks."""

    local_ranks: frozenset[int]


@attrs.frozen
class JoinEnded(Event):
    """There will be no generation for this node."""

    outcome: Outcome


@attrs.frozen
class StartFailed(Event):
    """The workers could not all be started."""

    reason: str


@attrs.frozen
class WorkerEnded(Event):
    """A worker ended by itself, or because it was stopped; what kind of failure that is.

    unsaved: it failed, or was killed by others, when it was to save and end. alone: and the others
    have not agreed yet where to stop, so that they will not.
    """

    exit: WorkerExit
    kind: FailureKind = FailureKind.ORDINARY
    unsaved: bool = False
    alone: bool = False


@attrs.frozen
class Hung(Event, Command):
    """Workers have been silent for too long, since then; what can be known is in the reason.
    stacks: where the slowest rank stands, if it is one of ours."""

    reason: str
    since: float = 0.0
    stacks: str = ""


@attrs.frozen
class GroupStopped(Event, Command):
    """The stopping ladder has come to its end; `left` names what would not die."""

    left: str = ""


@attrs.frozen
class Changed(Event):
    """The generation that this node holds is over, or the job is."""

    change: Change


@attrs.frozen
class Broke(Event):
    """A part of the agent, without which it would go on blind, has ended; `reason` says which."""

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
    """Ask for the next generation: no workers are left here."""


@attrs.frozen
class StartWorkers(Command):
    """Start those of the generation that has just settled."""


@attrs.frozen
class StopWorkers(Command):
    """Begin the stopping ladder; where there is a reason to save, by telling it to the workers."""

    notice: str = ""


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
    reason: str
    kind: FailureKind = FailureKind.ORDINARY


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
    return Outcome(WorkerState.FAILED, change.reason, expelled=change.kind.goes_on)


def _stay(now: Supervision, _event: object) -> Step:
    return now, ()


def _start(_now: Supervision, event: Settled) -> Step:
    return Supervision(State.RUNNING, awaited=event.local_ranks), (StartWorkers(),)


def _finish(_now: Supervision, event: JoinEnded | Broke | SignalArrived | DrainAsked) -> Step:
    return Supervision(State.ENDED, outcome=outcome_of(event)), ()


def _end(now: Supervision, event: Changed | Broke | SignalArrived | DrainAsked) -> Supervision:
    return attrs.evolve(now, state=State.ENDING, outcome=outcome_of(event))


# While workers run.


def _worker_ended(now: Supervision, event: WorkerEnded) -> Step:
    now = attrs.evolve(now, awaited=now.awaited - {event.exit.local_rank})
    if not event.exit.ok:
        return _fail(now, event.exit.describe(), event.kind)
    if now.awaited:
        return now, ()
    return Supervision(State.FINISHED), (ReportDone(),)


def _failed(now: Supervision, event: StartFailed | Hung) -> Step:
    return _fail(now, event.reason)


def _fail(now: Supervision, reason: str, kind: FailureKind = FailureKind.ORDINARY) -> Step:
    # The claim goes out before the stop, so that the other nodes stop at the same time.
    return attrs.evolve(now, state=State.STOPPING), (ReportFailure(reason, kind), StopWorkers())


def _running_changed(now: Supervision, event: Changed) -> Step:
    if event.change.kind.final:
        return _end(now, event), (StopWorkers(),)
    # Only a change that nobody was lost or failed for leaves all ranks able to agree.
    notice = RESIZE if event.change.kind is ChangeKind.RESIZE else ""
    return attrs.evolve(now, state=State.STOPPING), (StopWorkers(notice),)


def _running_ends(now: Supervision, event: SignalArrived | Broke) -> Step:
    return _end(now, event), (StopWorkers(),)


def _running_drain(now: Supervision, event: DrainAsked) -> Step:
    # The others hear of it before our workers stop, so that all stop at one step.
    return _end(now, event), (ReportDraining(event.name), StopWorkers(event.why))


# While they are being stopped.


def _one_less(now: Supervision, event: WorkerEnded) -> Step:
    now = attrs.evolve(now, awaited=now.awaited - {event.exit.local_rank})
    outcome = now.outcome
    if event.unsaved and outcome is not None and outcome.state is WorkerState.DRAINED:
        # It is a drain all the same, but not one that saved everything.
        reason = f"{outcome.reason}, but {event.exit.describe()} while it was to save"
        now = attrs.evolve(now, outcome=attrs.evolve(outcome, reason=reason))
    return now, (StopSooner(),) if event.alone else ()


def _stopping_changed(now: Supervision, event: Changed) -> Step:
    return (_end(now, event) if event.change.kind.final else now), ()


def _stopping_ends(now: Supervision, event: SignalArrived | Broke) -> Step:
    return _end(now, event), (StopSooner(),)


def _stopping_drain(now: Supervision, event: DrainAsked) -> Step:
    return _end(now, event), (ReportDraining(event.name), StopSooner(event.why))


def _hurry(now: Supervision, _event: SignalArrived) -> Step:
    return now, (HurryWorkers(),)


def _stopped(now: Supervision, event: GroupStopped) -> Step:
    if event.left:
        # What would not die is the worse news, and nobody else tells it.
        undying = f"these survived SIGKILL: {event.left}"
        return Supervision(State.ENDED, outcome=Outcome(WorkerState.FAILED, undying)), ()
    if now.state is State.STOPPING:
        return Supervision(State.JOINING), (Join(),)
    return Supervision(State.ENDED, outcome=now.outcome), ()


# When all of ours have succeeded.


def _finished_changed(_now: Supervision, event: Changed) -> Step:
    change = event.change
    if not change.kind.final:
        return Supervision(State.JOINING), (Join(),)
    if change.kind is ChangeKind.LOST:
        return _finish_unknown(change.reason)
    return Supervision(State.ENDED, outcome=end_of_job(change)), ()


def _finished_broke(_now: Supervision, event: Broke) -> Step:
    return _finish_unknown(event.reason)


def _finish_unknown(reason: str) -> Step:
    """Of workers that succeeded, while nobody can say any more what becomes of the others."""
    said = f"this node's workers succeeded; the others' end is unknown: {reason}"
    return Supervision(State.ENDED, outcome=Outcome(WorkerState.SUCCEEDED, said)), ()


_S = State
TABLE: dict[tuple[State, type], Callable[..., Step]] = {
    (_S.JOINING, Settled): _start,
    (_S.JOINING, JoinEnded): _finish,
    (_S.JOINING, SignalArrived): _finish,
    (_S.JOINING, Broke): _finish,
    (_S.JOINING, DrainAsked): _finish,
    (_S.RUNNING, StartFailed): _failed,
    (_S.RUNNING, WorkerEnded): _worker_ended,
    (_S.RUNNING, Hung): _failed,
    (_S.RUNNING, Changed): _running_changed,
    (_S.RUNNING, SignalArrived): _running_ends,
    (_S.RUNNING, Broke): _running_ends,
    (_S.RUNNING, DrainAsked): _running_drain,
    (_S.STOPPING, WorkerEnded): _one_less,
    (_S.STOPPING, GroupStopped): _stopped,
    (_S.STOPPING, Changed): _stopping_changed,
    (_S.STOPPING, SignalArrived): _stopping_ends,
    (_S.STOPPING, Broke): _stopping_ends,
    (_S.STOPPING, DrainAsked): _stopping_drain,
    (_S.FINISHED, Changed): _finished_changed,
    (_S.FINISHED, SignalArrived): _finish,
    (_S.FINISHED, Broke): _finished_broke,
    (_S.FINISHED, DrainAsked): _finish,
    (_S.ENDING, WorkerEnded): _one_less,
    (_S.ENDING, GroupStopped): _stopped,
    (_S.ENDING, Changed): _stay,
    (_S.ENDING, SignalArrived): _hurry,
    (_S.ENDING, Broke): _stay,
    (_S.ENDING, DrainAsked): _stay,
}


def react(now: Supervision, event: Event) -> Step:
    """The next state and what to do.

    Raises:
        IllegalTransition: the table has no entry for this event in this state.
    """
    transition = TABLE.get((now.state, type(event)))
    if transition is None:
        raise IllegalTransition(
            f"{type(event).__name__} cannot happen while {now.state.value}: {event}"
        )
    return transition(now, event)
