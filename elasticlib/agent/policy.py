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
from ..workers.exits import WorkerExit
from ..workers.notice import RESIZE


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


class OutcomeKind(enum.Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SIGNALLED = "signalled"
    DRAINED = "drained"


@attrs.frozen
class Outcome:
    """How the agent's run ends, and why; `signal` is a number where one ended it. expelled: the job
    goes on without this node."""

    kind: OutcomeKind
    reason: str
    signal: int = 0
    expelled: bool = False


@attrs.frozen
class Supervision:
    """The state, with what it must remember: whose end is awaited, and how it will all end."""

    state: State = State.JOINING
    awaited: frozenset[int] = frozenset()
    outcome: Outcome | None = None


# Events.


@attrs.frozen
class Settled:
    """This node is a member of a generation, with workers of these local ranks."""

    local_ranks: frozenset[int]


@attrs.frozen
class JoinEnded:
    """There will be no generation for this node."""

    outcome: Outcome


@attrs.frozen
class StartFailed:
    """The workers could not all be started."""

    reason: str


@attrs.frozen
class WorkerEnded:
    """A worker ended by itself, or because it was stopped; what kind of failure that is.

    unsaved: it failed, or was killed by others, when it was to save and end. alone: and the others
    have not agreed yet where to stop, so that they will not.
    """

    exit: WorkerExit
    kind: FailureKind = FailureKind.ORDINARY
    unsaved: bool = False
    alone: bool = False


@attrs.frozen
class Hung:
    """Workers have been silent for too long; what can be known of it is in the reason."""

    reason: str


@attrs.frozen
class GroupStopped:
    """The stopping ladder has come to its end; `left` names what would not die."""

    left: str = ""


@attrs.frozen
class Changed:
    """The generation that this node holds is over, or the job is."""

    change: Change


@attrs.frozen
class Broke:
    """A part of the agent, without which it would go on blind, has ended; `reason` says which."""

    reason: str


@attrs.frozen
class SignalArrived:
    """The agent itself was asked to end."""

    number: int
    name: str


@attrs.frozen
class DrainAsked:
    """This node was asked to have its workers save, and to leave; `why` is for its workers."""

    number: int
    name: str
    why: str


Event = (
    Settled
    | JoinEnded
    | StartFailed
    | WorkerEnded
    | Hung
    | GroupStopped
    | Changed
    | Broke
    | SignalArrived
    | DrainAsked
)


# Commands.


@attrs.frozen
class Join:
    """Ask for the next generation: no workers are left here."""


@attrs.frozen
class StartWorkers:
    """Start those of the generation that has just settled."""


@attrs.frozen
class StopWorkers:
    """Begin the stopping ladder; where there is a reason to save, by telling it to the workers."""

    notice: str = ""


@attrs.frozen
class HurryWorkers:
    """Go on to the ladder's next rung now."""


@attrs.frozen
class StopSooner:
    """Of those who have been told to save and end: give them this notice instead, if it leaves
    them less time; without one, do not wait for them any more."""

    notice: str = ""


@attrs.frozen
class ReportFailure:
    reason: str
    kind: FailureKind = FailureKind.ORDINARY


@attrs.frozen
class ReportDraining:
    """Tell the other nodes that this one leaves as soon as its workers have saved."""

    reason: str


@attrs.frozen
class ReportDone:
    """All workers here succeeded."""


@attrs.frozen
class Finish:
    """Leave the rendezvous, free everything, return the result."""


Action = (
    Join
    | StartWorkers
    | StopWorkers
    | HurryWorkers
    | StopSooner
    | ReportFailure
    | ReportDraining
    | ReportDone
    | Finish
)
Step = tuple[Supervision, tuple[Action, ...]]


def outcome_of(change: Change) -> Outcome:
    """What the end of a job means for this node's run."""
    if change.kind is ChangeKind.SUCCEEDED:
        return Outcome(OutcomeKind.SUCCEEDED, change.reason)
    expelled = change.kind is ChangeKind.EXPELLED
    return Outcome(OutcomeKind.FAILED, change.reason, expelled=expelled)


def _start(_now: Supervision, event: Settled) -> Step:
    running = Supervision(State.RUNNING, awaited=event.local_ranks)
    return running, (StartWorkers(),)


def _finish_now(_now: Supervision, event: JoinEnded) -> Step:
    return Supervision(State.ENDED, outcome=event.outcome), (Finish(),)


def _leave(_now: Supervision, event: SignalArrived | DrainAsked) -> Step:
    return Supervision(State.ENDED, outcome=_asked(event)), (Finish(),)


def _cannot_start(now: Supervision, event: StartFailed) -> Step:
    return _fail(now, event.reason)


def _worker_ended(now: Supervision, event: WorkerEnded) -> Step:
    awaited = now.awaited - {event.exit.local_rank}
    if not event.exit.ok:
        return _fail(attrs.evolve(now, awaited=awaited), event.exit.describe(), event.kind)
    if awaited:
        return attrs.evolve(now, awaited=awaited), ()
    return Supervision(State.FINISHED), (ReportDone(),)


def _fail(now: Supervision, reason: str, kind: FailureKind = FailureKind.ORDINARY) -> Step:
    # The claim goes out before the stop, so that the other nodes stop at the same time.
    return attrs.evolve(now, state=State.STOPPING), (ReportFailure(reason, kind), StopWorkers())


def _running_changed(now: Supervision, event: Changed) -> Step:
    if not event.change.kind.final:
        # Only a change that nobody was lost or failed for leaves all ranks able to agree.
        notice = RESIZE if event.change.kind is ChangeKind.RESIZE else ""
        return attrs.evolve(now, state=State.STOPPING), (StopWorkers(notice),)
    ending = attrs.evolve(now, state=State.ENDING, outcome=outcome_of(event.change))
    return ending, (StopWorkers(),)


def _running_signal(now: Supervision, event: SignalArrived) -> Step:
    ending = attrs.evolve(now, state=State.ENDING, outcome=_asked(event))
    return ending, (StopWorkers(),)


def _running_drain(now: Supervision, event: DrainAsked) -> Step:
    # The others hear of it before our workers stop, so that all stop at one step.
    ending = attrs.evolve(now, state=State.ENDING, outcome=_asked(event))
    return ending, (ReportDraining(event.name), StopWorkers(event.why))


def _hung(now: Supervision, event: Hung) -> Step:
    return _fail(now, event.reason)


def _one_less(now: Supervision, event: WorkerEnded) -> Step:
    now = attrs.evolve(now, awaited=now.awaited - {event.exit.local_rank})
    outcome = now.outcome
    if event.unsaved and outcome is not None and outcome.kind is OutcomeKind.DRAINED:
        # It is a drain all the same, but not one that saved everything.
        reason = f"{outcome.reason}, but {event.exit.describe()} while it was to save"
        now = attrs.evolve(now, outcome=attrs.evolve(outcome, reason=reason))
    return now, (StopSooner(),) if event.alone else ()


def _rejoin(_now: Supervision, event: GroupStopped) -> Step:
    if event.left:
        return Supervision(State.ENDED, outcome=_undying(event)), (Finish(),)
    return Supervision(State.JOINING), (Join(),)


def _stopping_changed(now: Supervision, event: Changed) -> Step:
    if not event.change.kind.final:
        return now, ()
    return attrs.evolve(now, state=State.ENDING, outcome=outcome_of(event.change)), ()


def _stopping_signal(now: Supervision, event: SignalArrived) -> Step:
    return attrs.evolve(now, state=State.ENDING, outcome=_asked(event)), (StopSooner(),)


def _stopping_drain(now: Supervision, event: DrainAsked) -> Step:
    ending = attrs.evolve(now, state=State.ENDING, outcome=_asked(event))
    return ending, (ReportDraining(event.name), StopSooner(event.why))


def _finished_changed(_now: Supervision, event: Changed) -> Step:
    change = event.change
    if not change.kind.final:
        return Supervision(State.JOINING), (Join(),)
    if change.kind is ChangeKind.LOST:
        return _finish_unknown(change.reason)
    return Supervision(State.ENDED, outcome=outcome_of(change)), (Finish(),)


def _end(now: Supervision, event: GroupStopped) -> Step:
    # What would not die is the worse news, and nobody else tells it.
    outcome = _undying(event) if event.left else now.outcome
    return Supervision(State.ENDED, outcome=outcome), (Finish(),)


def _broke_now(_now: Supervision, event: Broke) -> Step:
    return Supervision(State.ENDED, outcome=Outcome(OutcomeKind.FAILED, event.reason)), (Finish(),)


def _running_broke(now: Supervision, event: Broke) -> Step:
    outcome = Outcome(OutcomeKind.FAILED, event.reason)
    return attrs.evolve(now, state=State.ENDING, outcome=outcome), (StopWorkers(),)


def _stopping_broke(now: Supervision, event: Broke) -> Step:
    outcome = Outcome(OutcomeKind.FAILED, event.reason)
    return attrs.evolve(now, state=State.ENDING, outcome=outcome), (StopSooner(),)


def _finished_broke(_now: Supervision, event: Broke) -> Step:
    return _finish_unknown(event.reason)


def _finish_unknown(reason: str) -> Step:
    """Of workers that succeeded, while nobody can say any more what becomes of the others."""
    said = f"this node's workers succeeded; the others' end is unknown: {reason}"
    return Supervision(State.ENDED, outcome=Outcome(OutcomeKind.SUCCEEDED, said)), (Finish(),)


def _stay(now: Supervision, _event: object) -> Step:
    return now, ()


def _hurry(now: Supervision, _event: SignalArrived) -> Step:
    return now, (HurryWorkers(),)


def _asked(event: SignalArrived | DrainAsked) -> Outcome:
    drained = isinstance(event, DrainAsked)
    kind = OutcomeKind.DRAINED if drained else OutcomeKind.SIGNALLED
    return Outcome(kind, f"received {event.name}", event.number)


def _undying(event: GroupStopped) -> Outcome:
    return Outcome(OutcomeKind.FAILED, f"these would not die, even of SIGKILL: {event.left}")


_S = State
TABLE: dict[tuple[State, type], Callable[..., Step]] = {
    (_S.JOINING, Settled): _start,
    (_S.JOINING, JoinEnded): _finish_now,
    (_S.JOINING, SignalArrived): _leave,
    (_S.JOINING, Broke): _broke_now,
    (_S.JOINING, DrainAsked): _leave,
    (_S.RUNNING, StartFailed): _cannot_start,
    (_S.RUNNING, WorkerEnded): _worker_ended,
    (_S.RUNNING, Hung): _hung,
    (_S.RUNNING, Changed): _running_changed,
    (_S.RUNNING, SignalArrived): _running_signal,
    (_S.RUNNING, Broke): _running_broke,
    (_S.RUNNING, DrainAsked): _running_drain,
    (_S.STOPPING, WorkerEnded): _one_less,
    (_S.STOPPING, StartFailed): _stay,
    (_S.STOPPING, Hung): _stay,
    (_S.STOPPING, GroupStopped): _rejoin,
    (_S.STOPPING, Changed): _stopping_changed,
    (_S.STOPPING, SignalArrived): _stopping_signal,
    (_S.STOPPING, Broke): _stopping_broke,
    (_S.STOPPING, DrainAsked): _stopping_drain,
    (_S.FINISHED, Hung): _stay,
    (_S.FINISHED, Changed): _finished_changed,
    (_S.FINISHED, SignalArrived): _leave,
    (_S.FINISHED, Broke): _finished_broke,
    (_S.FINISHED, DrainAsked): _leave,
    (_S.ENDING, WorkerEnded): _one_less,
    (_S.ENDING, StartFailed): _stay,
    (_S.ENDING, Hung): _stay,
    (_S.ENDING, GroupStopped): _end,
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
