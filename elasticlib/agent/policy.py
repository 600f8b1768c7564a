"""What an agent does about each event in each state, and how it stops a group of workers. Pure.

`TABLE` is the whole of the first: an event that has no entry for the state is an IllegalTransition.
`Stopping` is the ladder, and the call at which all ranks stop: each node says the first call of
`should_stop` at which its own workers all can stop; the last of these is one that no worker has
passed, whatever collectives tie them together, for each of them has been held before it or will ask
again. Ranks count their calls alike, as they take their steps together. Whoever does not stop there
climbs the ladder, by the time alone.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import attrs

from ..errors import IllegalTransition
from ..foreign import read_json
from ..rendezvous.document import Change, ChangeKind, FailureKind
from ..workers.exit import WorkerExit
from ..workers.interface import DRAIN, PREEMPTED, REASONS, RESIZE, Notice
from ..workers.spec import Ladder, Rung, WorkerState

Value = TypeVar("Value")


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


def _ends(stop: type[StopWorkers | StopSooner]) -> Callable[..., Step]:
    """This node's run ends, once its workers have been stopped like this."""

    def ends(now: Supervision, event: SignalArrived | Broke | DrainAsked) -> Step:
        if not isinstance(event, DrainAsked):
            return _end(now, event), (stop(),)
        # The others hear of it before our workers stop, so that all stop at one step.
        return _end(now, event), (ReportDraining(event.name), stop(event.why))

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
    return (_end(now, event) if event.change.kind.final else now), ()


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


def _finished_changed(_now: Supervision, event: Changed | Broke) -> Step:
    change = event.change if isinstance(event, Changed) else Change(ChangeKind.LOST, event.reason)
    if not change.kind.final:
        return Supervision(State.JOINING), (Join(),)
    outcome = end_of_job(change)
    if change.kind is ChangeKind.LOST:
        said = f"this node's workers succeeded; the others' end is unknown: {change.reason}"
        outcome = Outcome(WorkerState.SUCCEEDED, said)
    return Supervision(State.ENDED, outcome=outcome), ()


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
    (_S.RUNNING, SignalArrived): _ends(StopWorkers),
    (_S.RUNNING, Broke): _ends(StopWorkers),
    (_S.RUNNING, DrainAsked): _ends(StopWorkers),
    (_S.STOPPING, WorkerEnded): _stopping_ended,
    (_S.STOPPING, GroupStopped): _stopped,
    (_S.STOPPING, Changed): _stopping_changed,
    (_S.STOPPING, SignalArrived): _ends(StopSooner),
    (_S.STOPPING, Broke): _ends(StopSooner),
    (_S.STOPPING, DrainAsked): _ends(StopSooner),
    (_S.FINISHED, Changed): _finished_changed,
    (_S.FINISHED, SignalArrived): _finish,
    (_S.FINISHED, Broke): _finished_changed,
    (_S.FINISHED, DrainAsked): _finish,
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
        IllegalTransition: the table has no entry for this event in this state.
    """
    transition = TABLE.get((now.state, type(event)))
    if transition is None:
        raise IllegalTransition(
            f"{type(event).__name__} cannot happen while {now.state.value}: {event}"
        )
    return transition(now, event)


# What nodes post for one another is JSON, of which nobody's is trusted.


def encode(value: object) -> bytes:
    return json.dumps(value).encode()


def read(data: bytes) -> Any:
    """What JSON says; None where it is none."""
    try:
        return read_json(data)
    except ValueError:
        return None


_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "tuple[int, ...]": (list,),
}


def decode(kind: type[Value], said: Any) -> Value | None:
    """A value of this attrs class, or None: another version may post others. Fields that are not
    known here are skipped, and those left out are as by default."""
    if not isinstance(said, dict):
        return None
    fields = [field for field in attrs.fields(kind) if field.name in said]  # type: ignore[arg-type]
    if any(type(said[field.name]) not in _TYPES[str(field.type)] for field in fields):
        return None
    try:
        return kind(**{field.name: said[field.name] for field in fields})
    except (TypeError, ValueError):
        return None


# How one group of workers is stopped.

STOP = "stop/"
"""What is posted under it: the needs of the nodes, each under its rank."""
_URGENCY = (PREEMPTED, DRAIN, RESIZE)


@attrs.frozen
class Need:
    """What one node says. call: the first at which it can stop; None if its workers do not ask.
    reason: as in a notice; seconds: that are left to it."""

    call: int | None
    reason: str = RESIZE
    seconds: float = 0.0


NO_CALL = Need(None)
"""Said where workers are stopped without a notice, so that the other nodes wait for nothing."""
ANY_CALL = Need(1, RESIZE, 1e6)
"""Said where all workers have succeeded, and can stop wherever the others do."""


def agreed(needs: Mapping[int, Need], nodes: int) -> Need | None:
    """What all stop at, once all nodes (by rank) have spoken; None while some have not.

    Its call is None where there can be no such call. The reason is the most urgent that a node
    has, and the time is the shortest.
    """
    if any(need.call is None for need in needs.values()):
        return NO_CALL
    if len(needs) < nodes:
        return None
    calls = [need.call for need in needs.values() if need.call is not None]
    return Need(
        max(calls),
        more_urgent(*(need.reason for need in needs.values())),
        min(need.seconds for need in needs.values()),
    )


def more_urgent(*reasons: str) -> str:
    """The most urgent of these."""
    return min(reasons, key=_URGENCY.index)


def decode_need(data: bytes) -> Need:
    """What cannot be read is no agreement."""
    need = decode(Need, read(data))
    if need is None or need.reason not in REASONS:
        return NO_CALL
    return attrs.evolve(need, seconds=max(0.0, need.seconds))


def post_need(node: int, need: Need) -> Post:
    """Tell the other nodes, unless this one has said something before."""
    return Post(STOP, str(node), encode(attrs.asdict(need)), first=True)


Climb = tuple["Stopping", tuple[Command, ...]]


@attrs.frozen
class Stopping:
    """One group on its way out; each method takes an event, with the time at which it came.

    ladder: as it is climbed. node: the rank of this one of so many nodes; reachable: whether the
    others can be told. since: when the climb began. notice: what the workers were last given; None
    where they are stopped without. deadline: until when they may agree on a call. said: what this
    node told the others of it; needs: what all nodes have said; outcome: what came of it, None
    until then.
    """

    ladder: Ladder
    node: int = 0
    nodes: int = 1
    reachable: bool = False
    agrees: bool = False
    since: float = 0.0
    rung: Rung = Rung.NOTICE
    hurried: bool = False
    notice: Notice | None = None
    deadline: float = 0.0
    said: Need | None = None
    outcome: Need | None = None
    needs: Mapping[int, Need] = attrs.field(factory=dict)

    @property
    def noticing(self) -> bool:
        """Whether the workers have a notice, and may save and end by themselves."""
        return self.notice is not None and self.rung is Rung.NOTICE

    @property
    def agreeing(self) -> bool:
        """Whether they have a notice and are to agree at which call to stop, and have not yet."""
        return self.agrees and self.notice is not None and self.outcome is None

    @property
    def asking(self) -> bool:
        """Whether it is still to be found out at which call the workers here can stop."""
        return self.agreeing and self.said is None

    def left(self, now: float) -> float:
        """Seconds until the next rung."""
        return self.ladder.left(now - self.since)

    def begin(self, now: float, notice: Notice | None) -> Climb:
        """Start to climb; the workers have just heard the notice, or are stopped without."""
        if notice is None:
            plain = self.ladder.noticed(0.0)
            stopping = attrs.evolve(self, ladder=plain, since=now, rung=Rung.TERM)
            return stopping, (EndWorkers(), *self._tell(NO_CALL))
        stopping = attrs.evolve(
            self,
            ladder=self.ladder.noticed(notice.seconds),
            since=now,
            notice=notice,
            deadline=now + notice.seconds,
        )
        # Whether others have saved, and wait for ours, is of use where ours wait for a save.
        hears = self.agrees and notice.after_save and self._with_others
        return stopping, (Gather(STOP),) if hears else ()

    def sooner(self, now: float, notice: Notice | None) -> Climb:
        """Those with a notice get this one, if it leaves them less time; None: they get no more.

        The more urgent reason and the shorter time hold, unless the other nodes have been told
        already, who would go by another answer.
        """
        if self.notice is None or self.rung is not Rung.NOTICE:
            return self, ()
        if notice is None:
            return self.hurry(now), ()
        left, reason = self.left(now), more_urgent(self.notice.reason, notice.reason)
        notice = attrs.evolve(notice, seconds=min(left, notice.seconds), reason=reason)
        stopping = attrs.evolve(
            self,
            since=self.since - (left - notice.seconds),
            notice=notice,
            deadline=min(self.deadline, now + notice.seconds),
        )
        return stopping, (StopAt(None, notice),)

    def hurry(self, now: float) -> Stopping:
        """Do without what is left of this rung: a notice becomes SIGTERM, that SIGKILL."""
        if self.rung >= Rung.KILL:
            return self
        return attrs.evolve(self, hurried=True, since=self.since - self.left(now))

    def heard(self, posts: Mapping[str, bytes] | None) -> Stopping:
        """This is what the nodes have posted; None: they cannot be asked."""
        if posts is None:
            return attrs.evolve(self, reachable=False)
        needs = {int(rank): decode_need(value) for rank, value in posts.items()}
        return attrs.evolve(self, needs=needs)

    def look(self, now: float, running: Collection[str], call: int | None) -> Climb:
        """Time goes by; `running` names the workers, who can stop at `call`, if it is known."""
        stopping, agreeing = self._agree(now, call)
        stopping, climbing = stopping._climb(now, ", ".join(running))
        return stopping, (*agreeing, *climbing)

    def _agree(self, now: float, call: int | None) -> Climb:
        if self.notice is None or not self.agreeing:
            return self, ()
        lost = now >= self.deadline or (self.nodes > 1 and not self.reachable)
        said = self.said
        telling: tuple[Command, ...] = ()
        if said is None and call is not None and not lost:
            said = Need(call, self.notice.reason, self.deadline - now)
            telling = self._tell(said)
        found = said if self.nodes == 1 else agreed(self.needs, self.nodes)
        if said is None or found is None:
            found = NO_CALL if lost else None
        stopping = attrs.evolve(self, said=said, outcome=found)
        if found is None:
            return stopping, telling
        if found.call is not None:
            return stopping, (*telling, StopAt(found.call, Notice(found.reason, found.seconds)))
        return (stopping.hurry(now) if self.noticing else stopping), telling

    def _climb(self, now: float, running: str) -> Climb:
        if not running:
            return self, (GroupStopped(),)
        rung = self.ladder.rung(now - self.since)
        commands: list[Command] = []
        if self.rung < Rung.TERM <= rung:
            why = "still there after they were asked to save"
            if self.outcome == NO_CALL:
                why = "the workers cannot all stop at one step"
            commands.append(EndWorkers(f"{why}, sending SIGTERM: {running}"))
        if self.rung < Rung.KILL <= rung:
            waited = (
                "when it had to stop at once" if self.hurried else f"after {self.ladder.grace:g} s"
            )
            commands.append(EndWorkers(f"still there {waited}, killing: {running}", force=True))
        if rung is Rung.GIVE_UP:
            commands.append(GroupStopped(left=running))
        return attrs.evolve(self, rung=rung), tuple(commands)

    @property
    def _with_others(self) -> bool:
        return self.nodes > 1 and self.reachable

    def _tell(self, need: Need) -> tuple[Command, ...]:
        return (post_need(self.node, need), Gather(STOP)) if self._with_others else ()
