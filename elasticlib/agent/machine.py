"""The agent's machine: what it does when something happens, in each phase. Pure.

`handle` is the only function that decides. It takes the state, one event and the time, and returns
the next state and the effects. `TABLE` has a method for each phase and each kind of event. The kind
says what an event means in the present state.

**Stopping.** Who has to end, and which signal or request each of them must have got, follows from
the state: `must_end` and `wanted`. Whatever happens while workers are being stopped, `_Turn.settle`
sends the difference between this and what was sent before. A stop has stages: a notice to save or
to leave the group at a step that all nodes agree on; the request to leave the group, for workers
that can continue in another one; SIGTERM; SIGKILL. Each stage ends when nobody has to end any more,
or by time.

**Agreement.** With a notice, all ranks of the job stop at the same call of `should_stop`. Each node
proposes the first call at which its own workers can still stop, and the largest one counts. No
worker has passed that call: each one was blocked in an earlier call, or will call again. Ranks
count their calls alike, because they make their steps together.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ..constants import GIVE_UP_COUNT
from ..options import HangLimits
from ..rendezvous.blame import Evidence, FailureDetails, FailureKind
from ..rendezvous.interface import (
    Joined,
    MembershipChanged,
    PeerMessages,
    Publish,
    RendezvousInfo,
    Report,
    ReportKind,
    Topic,
)
from ..rendezvous.membership import Change, ChangeKind
from ..workers.exits import WorkerExit
from ..workers.interface import DRAIN, RESIZE, RESTART, StopHow, StopNotice, WorkerView
from ..workers.spec import WorkerState, choose_local_ranks
from .hang_detector import HangDetector, HangFinding
from .messages import (
    Action,
    ComponentFailed,
    DumpStacks,
    Effect,
    Event,
    Finish,
    Finished,
    Join,
    Meaning,
    NodeReady,
    Notify,
    Prepare,
    Requested,
    RunOutcome,
    SignalReceived,
    StacksCollected,
    StartWorkers,
    StopWorkers,
    Tick,
    WorkerExited,
    WorkersSeen,
)
from .stop_agreement import (
    ANY_CALL,
    NO_CALL,
    StopProposal,
    agree,
    decode_proposal,
    encode_proposal,
    most_urgent,
)

# With a deadline, this part of the time is for workers to save or to end. Then they are killed.
SAVE_FRACTION = 0.75
NEVER = float("inf")


class Phase(enum.Enum):
    """A phase of the agent's run."""

    JOINING = "joining"  # it waits for a generation; no worker is in a group
    ACTIVE = "active"  # it is in a generation: its workers train, or have succeeded
    STOPPING = "stopping"  # workers are being stopped, for another generation or for the end
    CLOSING = "closing"  # the last state is being saved; no worker is alive
    ENDED = "ended"


@attrs.frozen
class Limits:
    """The options, as far as the machine needs them."""

    local_world_size: int = 1
    checkpoint_grace: float = 30.0  # seconds in which notified workers save and exit
    regroup_grace: float = 10.0  # seconds in which workers leave a group that is over
    shutdown_timeout: float = 30.0  # seconds between SIGTERM and SIGKILL
    kill_timeout: float = 10.0  # seconds that a worker may exist after SIGKILL
    finish_timeout: float = 660.0  # seconds for the last save
    checks_node: bool = False  # this node is checked before it joins, and after a failure
    can_offer_slots: bool = True  # the rendezvous takes fewer workers than `local_world_size`
    hang: HangLimits | None = None  # None: workers that hang are not looked for
    host: str = ""


@attrs.frozen
class Alive:
    """A worker that was started, and has not exited."""

    start: int  # the number of its start
    is_member: bool  # of the group of the generation


@attrs.frozen
class Stop:
    """The stop that is in progress."""

    stage: StopHow
    ends_at: float  # of the stage
    notice: StopNotice | None = None  # what notified workers got
    own: StopProposal | None = None  # what this node has published
    agreement: StopProposal | None = None  # of all nodes
    sent: Mapping[int, tuple[StopHow, str]] = attrs.field(factory=dict)  # by local rank
    why: str = ""  # why the stage has begun, for the log


@attrs.frozen
class MachineState:
    """All that the machine remembers. Only `handle` makes another one."""

    phase: Phase = Phase.JOINING
    attempt: int = 0  # number of the last Join; events of earlier ones do not count
    start: int = -1  # number of the last StartWorkers, which count from 0
    generation: RendezvousInfo | None = None  # that this node is in
    alive: Mapping[int, Alive] = attrs.field(factory=dict)  # by local rank
    view: Mapping[int, WorkerView] = attrs.field(factory=dict)  # of these workers, when last seen
    exits: tuple[WorkerExit, ...] = ()  # of the generation, in order
    stop: Stop | None = None  # only while stopping
    hang: HangDetector | None = None  # only while active
    overdue: Mapping[int, float] = attrs.field(factory=dict)  # when failed workers are killed
    outcome: RunOutcome | None = None  # how the run ends
    kill_at: float = NEVER  # when workers are killed, because this node must leave
    finish_ends_at: float = NEVER
    proposals: Mapping[int, StopProposal] = attrs.field(factory=dict)  # by node rank
    are_peers_reachable: bool = True
    reported: tuple[int, bool] | None = None  # slots and retained, as the rendezvous knows them
    last_end: str = ""  # why the last generation of this node has ended
    is_prepared: bool = False  # the imports are done
    needs_check: bool = False  # before the next Join
    is_prestarting: bool = False  # standby workers start while the other nodes train
    can_regroup: bool = False  # the rendezvous knows that workers here can regroup
    takes_notices: bool = False  # a worker of some node has called `should_stop`
    has_stepped: bool = False  # a member of this generation has made a step
    has_succeeded: bool = False  # all members of this generation have
    must_restart: bool = False  # no worker may continue in the next generation
    is_restart_requested: bool = False  # somebody wants the workers of this generation to restart


Transition = tuple[MachineState, tuple[Effect, ...]]


def begin(limits: Limits) -> Transition:
    """Return the first state, and the first effects."""
    state = MachineState(
        attempt=1, needs_check=limits.checks_node, reported=(limits.local_world_size, False)
    )
    return state, (Prepare(limits.checks_node),)


def handle(state: MachineState, event: Event, now: float, limits: Limits) -> Transition:
    """Return the next state and the effects of an event.

    Args:
        state: the present state.
        event: what has happened.
        now: the time, in seconds of the agent's clock.
        limits: the options.

    Raises:
        KeyError: the table has no row for this event in this phase.
    """
    if _is_stale(state, event):
        return state, ()
    turn = _Turn(state, now, limits)
    if isinstance(event, WorkersSeen):
        turn.see(event.view)
    elif isinstance(event, WorkerExited):
        event = attrs.evolve(event, exit=after_others(event.exit, state.exits))
    TABLE[state.phase, event_kind(state, event)](turn, event)
    turn.report()
    if state.phase is Phase.ACTIVE and turn.state.phase is not Phase.ACTIVE:
        turn.set(last_end=describe(event, turn.effects))
    return turn.state, tuple(turn.effects)


def due_at(state: MachineState) -> float:
    """Return when the machine needs a Tick."""
    times = [state.finish_ends_at, *state.overdue.values()]
    if state.stop is not None:
        times.append(state.stop.ends_at)
    if state.hang is not None and not state.overdue:
        times.append(state.hang.due_at)
    return min(times)


def _is_stale(state: MachineState, event: Event) -> bool:
    """Return whether an event belongs to an earlier generation, or to an earlier start."""
    if state.phase is Phase.ENDED:
        return True
    if isinstance(event, WorkerExited):
        alive = state.alive.get(event.exit.local_rank)
        return alive is None or alive.start != event.start
    if isinstance(event, MembershipChanged) and event.change.kind.is_final:
        return False  # This node may have asked for another generation meanwhile.
    if isinstance(event, (Joined, MembershipChanged, PeerMessages, StacksCollected)):
        return event.attempt != state.attempt
    return False


# -- kinds of events -------------------------------------------------------------------------------


class EventKind(enum.Enum):
    """The meaning of an event in the present state."""

    READY = "ready"
    UNFIT = "unfit"
    JOINED = "joined"
    OVER_FINAL = "over:final"  # this node takes part in no further generation
    OVER_PLANNED = "over:planned"  # nodes change, or all workers restart; no worker has failed
    OVER_BROKEN = "over:broken"  # a worker has failed, or a node is lost
    EXIT_OK = "exit:ok"
    EXIT_FAILED = "exit:failed"
    EXIT_UNFIT = "exit:unfit"
    EXIT_STANDBY = "exit:standby"
    SEEN = "seen"
    SIGNAL_END = "signal:end"
    SIGNAL_AGAIN = "signal:again"  # the end of the run has begun
    SIGNAL_INTERRUPT = "signal:interrupt"  # SIGINT, when the end of the run has begun
    LEAVE = "leave"  # a drain of this node, or a stop of the job
    ASK_RESTART = "ask:restart"
    FAILED = "failed"
    PEERS = "peers"
    STACKS = "stacks"
    FINISHED = "finished"
    TICK = "tick"


def event_kind(state: MachineState, event: Event) -> EventKind:
    """Return what an event means in a state."""
    match event:
        case NodeReady(unfit=unfit):
            return EventKind.UNFIT if unfit else EventKind.READY
        case MembershipChanged(change=change):
            if change.kind.is_final:
                return EventKind.OVER_FINAL
            return EventKind.OVER_PLANNED if change.kind.is_planned else EventKind.OVER_BROKEN
        case WorkerExited():
            return _kind_of_exit(state, event)
        case SignalReceived():
            return _kind_of_signal(state, event)
        case Requested(action=action):
            return EventKind.ASK_RESTART if action is Action.RESTART else EventKind.LEAVE
    return _KINDS[type(event)]


_KINDS: dict[type, EventKind] = {
    Joined: EventKind.JOINED,
    WorkersSeen: EventKind.SEEN,
    ComponentFailed: EventKind.FAILED,
    PeerMessages: EventKind.PEERS,
    StacksCollected: EventKind.STACKS,
    Finished: EventKind.FINISHED,
    Tick: EventKind.TICK,
}


def _kind_of_exit(state: MachineState, event: WorkerExited) -> EventKind:
    if not state.alive[event.exit.local_rank].is_member:
        return EventKind.EXIT_STANDBY
    if event.unfit:
        return EventKind.EXIT_UNFIT
    return EventKind.EXIT_OK if event.exit.succeeded else EventKind.EXIT_FAILED


def _kind_of_signal(state: MachineState, event: SignalReceived) -> EventKind:
    if state.outcome is not None:
        # The first signal has decided. Batch systems repeat each one; a user repeats SIGINT.
        is_interrupt = event.meaning is Meaning.INTERRUPT
        return EventKind.SIGNAL_INTERRUPT if is_interrupt else EventKind.SIGNAL_AGAIN
    # While the script is still loading, or no worker runs, nothing has to be saved. But the node
    # is as wanted as later, so its scheduler must requeue it.
    takes_notices = state.takes_notices or can_be_notified(state)
    is_drain = event.meaning is Meaning.DRAIN
    if is_drain or (event.meaning is Meaning.DRAIN_IF_NOTICED and takes_notices):
        return EventKind.LEAVE
    return EventKind.SIGNAL_END


# -- what follows from a state ---------------------------------------------------------------------


def members(state: MachineState) -> frozenset[int]:
    """Return the local ranks of the workers that are alive and in the group."""
    return frozenset(local for local, worker in state.alive.items() if worker.is_member)


def view_of(state: MachineState, local: int) -> WorkerView:
    """Return what is known of a worker; before it was seen, nothing is."""
    return state.view.get(local, _UNSEEN)


_UNSEEN = WorkerView()


def can_be_notified(state: MachineState) -> bool:
    """Return whether a member takes notices, now or soon."""
    return any(view_of(state, local).takes_notices for local in members(state))


def may_regroup(state: MachineState) -> bool:
    """Return whether workers may continue in the next generation instead of being restarted."""
    if state.outcome or state.must_restart:
        return False
    group = members(state)
    if not group:
        return bool(state.alive)
    return any(view_of(state, local).can_regroup for local in group)


def must_end(state: MachineState) -> frozenset[int]:
    """Return who has to end, or to leave the group, before the stop is over."""
    if state.outcome or state.must_restart:
        return frozenset(state.alive)
    return frozenset(n for n in members(state) if not view_of(state, n).has_left)


def wanted(state: MachineState, stop: Stop) -> Iterator[tuple[int, StopHow, str]]:
    """Yield each worker that has to end, and what must have been sent to it."""
    group, may_stay = members(state), may_regroup(state)
    for local in sorted(must_end(state)):
        view = view_of(state, local)
        how, reason = stop.stage, ""
        if how is StopHow.NOTICE:
            is_notified = local in group and not view.has_left and stop.notice is not None
            how = StopHow.NOTICE if is_notified else StopHow.TERM
            reason = stop.notice.reason if is_notified and stop.notice else ""
        elif how is StopHow.LEAVE:
            how = StopHow.LEAVE if may_stay and view.can_regroup else StopHow.TERM
        yield local, how, reason


def offered_slots(state: MachineState, limits: Limits) -> tuple[int, bool] | None:
    """Return the workers that this node offers, and whether they are retained. None: as before.

    A node offers all of its workers while it joins, and its members while it is active. Standby
    workers are added once all of them are ready, so that one resize admits them together.
    """
    standby = {n for n, worker in state.alive.items() if not worker.is_member}
    ready = {local for local in standby if view_of(state, local).is_ready}
    if state.phase is Phase.JOINING:
        if state.is_prestarting:
            return (len(ready) if ready == standby else 0), False
        return (len(ready) or limits.local_world_size), bool(ready)
    if state.phase is Phase.ACTIVE and standby and state.generation is not None:
        size = state.generation.assignment.local_world_size
        are_all_here = len(members(state)) == size and ready == standby
        was_retained = state.reported is not None and state.reported[1]
        return size + (len(ready) if are_all_here else 0), was_retained
    return None


def after_others(exit_: WorkerExit, earlier: Sequence[WorkerExit]) -> WorkerExit:
    """Return an exit with the ranks of this node that had exited with success before."""
    left = tuple(sorted(one.rank for one in earlier if one.succeeded))
    return attrs.evolve(exit_, ranks_left_before=left)


def evidence_of(exit_: WorkerExit) -> Evidence:
    """Return what the failure of a worker is evidence of."""
    failure, left = exit_.root_failure, exit_.ranks_left_before
    kind, rank = failure.failure_kind, failure.rank
    if kind is FailureKind.COLLECTIVE and left:
        kind, rank = FailureKind.LEFT, left[0]
    return Evidence(kind, exit_.describe(), rank, failure.failed_at)


def details_of(exit_: WorkerExit) -> FailureDetails:
    """Return what else is known of a failure."""
    failure = exit_.root_failure
    return FailureDetails(
        rank=failure.rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        returncode=failure.returncode,
        message=failure.message,
        traceback=failure.traceback,
        stderr_tail=failure.stderr_tail,
        log_dir=failure.log_dir,
    )


def is_own_failure(exit_: WorkerExit) -> bool:
    """Return whether a worker that was to stop failed by itself, and not because of the stop."""
    failure = exit_.root_failure
    if not failure.has_failed:
        return False
    return attrs.evolve(failure, stop_was_requested=False).failure_kind.names_host


def describe(event: Event, effects: Sequence[Effect]) -> str:
    """Return why a generation ends, in one line."""
    for effect in effects:
        if isinstance(effect, Report) and effect.kind is ReportKind.FAILURE:
            return effect.reason
    match event:
        case WorkerExited():
            return event.exit.describe()
        case MembershipChanged():
            return event.change.reason
        case ComponentFailed():
            return event.reason
        case SignalReceived():
            return event.name
        case Requested():
            return event.source
    return type(event).__name__


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


# -- one turn --------------------------------------------------------------------------------------


class _Turn:
    """The handling of one event: the state as it becomes, and the effects so far."""

    def __init__(self, state: MachineState, now: float, limits: Limits) -> None:
        self.state, self.now, self.limits = state, now, limits
        self.effects: list[Effect] = []

    def set(self, **changes: Any) -> None:
        self.state = attrs.evolve(self.state, **changes)

    def emit(self, *effects: Effect) -> None:
        self.effects += effects

    def publish(self, topic: Topic, value: bytes = b"") -> None:
        if self.num_nodes > 1:
            self.emit(Publish(topic, value))

    @property
    def num_nodes(self) -> int:
        return 1 if self.state.generation is None else self.state.generation.world_size

    # What is noted in each turn

    def see(self, view: Mapping[int, WorkerView]) -> None:
        """Note what the workers show."""
        state = self.state
        known = {local: one for local, one in view.items() if local in state.alive}
        group = members(state)
        steps = (known[n].heartbeat for n in group if n in known)
        has_stepped = any(beat is not None and beat.num_steps > 0 for beat in steps)
        self.set(view=known, has_stepped=state.has_stepped or has_stepped)
        if not state.takes_notices and any(one.has_called_should_stop for one in known.values()):
            self.set(takes_notices=True)
            self.emit(Report(ReportKind.TAKES_NOTICES))
            self.publish(Topic.NOTICES)

    def report(self) -> None:
        """Report what the rendezvous does not know yet."""
        state = self.state
        can_regroup = any(view_of(state, local).can_regroup for local in members(state))
        if state.phase is Phase.ACTIVE and can_regroup and not state.can_regroup:
            self.set(can_regroup=True)
            self.emit(Report(ReportKind.CAN_REGROUP))
        offered = offered_slots(state, self.limits)
        if offered is not None and offered != state.reported and self.limits.can_offer_slots:
            self.set(reported=offered)
            report = Report(ReportKind.SLOTS, slots=offered[0], is_retained=offered[1])
            # The offer is known before this node joins.
            at = next((i for i, one in enumerate(self.effects) if isinstance(one, Join)), None)
            self.effects.insert(len(self.effects) if at is None else at, report)

    def remove(self, exit_: WorkerExit) -> None:
        """Note that a worker has exited."""
        local = exit_.local_rank
        is_member = self.state.alive[local].is_member
        alive = {n: worker for n, worker in self.state.alive.items() if n != local}
        self.set(
            alive=alive,
            view={n: one for n, one in self.state.view.items() if n != local},
            overdue={n: at for n, at in self.state.overdue.items() if n != local},
            exits=(*self.state.exits, exit_) if is_member else self.state.exits,
            is_prestarting=self.state.is_prestarting and bool(alive),
        )

    # Joining

    def on_ready(self, event: NodeReady) -> None:
        self.set(is_prepared=True, needs_check=False)
        if event.takes_notices:
            self.set(takes_notices=True)
        self.join(peers_train=event.peers_train)

    def join(self, *, peers_train: bool) -> None:
        """Join. If the other nodes train, start the workers before, and offer none until then."""
        if peers_train and not self.state.alive and self.limits.can_offer_slots:
            everyone = range(self.limits.local_world_size)
            self.start_workers((), tuple(everyone))
            self.set(is_prestarting=True)
        self.emit(Join(self.state.attempt))

    def rejoin(self) -> None:
        """Join the next generation, after the check of this node if that is due."""
        state = self.state
        # A group gives the state of the job to its new members before its first step. Until then,
        # the newest snapshot may be in the memory of this node alone.
        peers_train = state.can_regroup and state.has_stepped and self.num_nodes > 1
        alive = {n: attrs.evolve(one, is_member=False) for n, one in state.alive.items()}
        self.set(
            phase=Phase.JOINING,
            generation=None,
            stop=None,
            alive=alive,
            overdue={},
            attempt=state.attempt + 1,
            must_restart=False,
            is_prestarting=False,
        )
        if state.needs_check:
            self.emit(Prepare(check=True))
        else:
            self.join(peers_train=peers_train)

    def start_workers(self, group: tuple[int, ...], standby: tuple[int, ...]) -> None:
        start, before = self.state.start + 1, self.state.alive
        alive = {
            local: Alive(before[local].start if local in before else start, local in group)
            for local in (*group, *standby)
        }
        # What was seen of workers that continue belongs to their last group.
        view = {
            local: attrs.evolve(
                one, is_ready=False, has_left=False, group_failed=False, stop_call=None
            )
            for local, one in self.state.view.items()
            if local in alive
        }
        self.set(start=start, alive=alive, view=view)
        self.emit(StartWorkers(start, group, standby))

    def on_joined(self, event: Joined) -> None:
        slots, size = event.generation.assignment.local_world_size, self.limits.local_world_size
        if not 1 <= slots <= size or (slots < size and not self.limits.can_offer_slots):
            reason = (
                f"the rendezvous registered this node with {slots} slots, but its worker spec has "
                f"{size} workers: give both the same number"
            )
            return self.end(RunOutcome(WorkerState.FAILED, reason))
        ready = {local: view_of(self.state, local).is_ready for local in self.state.alive}
        group = tuple(choose_local_ranks(slots, ready, size))
        self.set(
            phase=Phase.ACTIVE,
            generation=event.generation,
            exits=(),
            proposals={},
            are_peers_reachable=True,
            is_prestarting=False,
            has_stepped=False,
            has_succeeded=False,
            is_restart_requested=False,
        )
        self.start_workers(group, tuple(n for n in range(size) if n not in group))
        if self.state.takes_notices:
            self.publish(Topic.NOTICES)
        if self.limits.hang is not None:
            first = event.generation.assignment.first_rank
            self.set(
                hang=HangDetector(
                    self.limits.hang,
                    self.limits.host,
                    {local: first + index for index, local in enumerate(group)},
                    node_rank=event.generation.rank,
                    num_peers=self.num_nodes - 1,
                    started_at=self.now,
                )
            )
        return None

    # The ends of a generation

    def on_exit_ok(self, event: WorkerExited) -> None:
        self.remove(event.exit)
        if not members(self.state):
            self.set(has_succeeded=True, hang=None)
            self.emit(Report(ReportKind.SUCCESS))
            self.publish(Topic.STOP, encode_proposal(ANY_CALL))

    def on_exit_failed(self, event: WorkerExited) -> None:
        evidence = evidence_of(event.exit)
        self.remove(event.exit)
        self.report_failure(event.exit.describe(), evidence, details_of(event.exit))
        self.begin_stop()

    def report_failure(
        self, reason: str, evidence: Evidence, details: FailureDetails | None = None
    ) -> None:
        self.set(needs_check=self.limits.checks_node)
        self.emit(Report(ReportKind.FAILURE, reason, evidence=evidence, details=details))

    def on_exit_standby(self, event: WorkerExited) -> None:
        self.remove(event.exit)

    def on_standby_failed(self, event: WorkerExited) -> None:
        """Restart a replacement that has failed while the group trains, as any failed worker."""
        if event.exit.succeeded or self.state.has_succeeded:
            self.remove(event.exit)
        else:
            self.on_exit_failed(event)

    def on_over(self, event: MembershipChanged) -> None:
        kind = event.change.kind
        self.set(must_restart=kind is ChangeKind.RESTART)
        notice = RESTART if self.state.must_restart or self.state.is_restart_requested else RESIZE
        self.begin_stop(notice if kind.is_planned else "")

    def on_final(self, event: MembershipChanged) -> None:
        outcome = end_of_job(event.change)
        if event.error is not None and self.state.phase is Phase.JOINING:
            outcome = RunOutcome(WorkerState.FAILED, self.why_not_joined(event))
        if self.state.has_succeeded and event.change.kind is ChangeKind.STORE_LOST:
            outcome = self.succeeded_anyway(event.change.reason)
        self.end(outcome)

    def why_not_joined(self, event: MembershipChanged) -> str:
        """Return why this node could not join. The failure that led to it comes first."""
        last, reason = self.state.last_end, event.change.reason
        if not last or getattr(event.error, "is_node_loss", False):
            return reason
        return f"{last}; then this node could not join another generation: {reason}"

    def on_failed(self, event: ComponentFailed) -> None:
        has_succeeded = self.state.phase is Phase.ACTIVE and self.state.has_succeeded
        failed = RunOutcome(WorkerState.FAILED, event.reason)
        self.end(self.succeeded_anyway(event.reason) if has_succeeded else failed)

    def succeeded_anyway(self, reason: str) -> RunOutcome:
        reason = (
            f"this node's workers succeeded; the result of the other nodes is unknown: {reason}"
        )
        return RunOutcome(WorkerState.SUCCEEDED, reason)

    def on_unfit(self, event: NodeReady) -> None:
        self.end(RunOutcome(WorkerState.FAILED, event.unfit, evicted=True, is_unfit=True))

    def on_exit_unfit(self, event: WorkerExited) -> None:
        self.remove(event.exit)
        self.end(RunOutcome(WorkerState.FAILED, event.unfit))

    def on_signal_end(self, event: SignalReceived) -> None:
        self.end(RunOutcome(WorkerState.STOPPED, f"received {event.name}", event.number))

    def on_leave(self, event: SignalReceived | Requested) -> None:
        """End the run after a signal or a request that lets the workers save."""
        if isinstance(event, SignalReceived):
            source, reason, ends_job, number = event.name, "", False, event.number
            reason = "preempted" if event.meaning is Meaning.DRAIN_IF_NOTICED else DRAIN
        else:
            source, reason, number = event.source, event.reason, 0
            ends_job = event.action is Action.STOP
            self.shorten(event.deadline)
        state = WorkerState.STOPPED if ends_job else WorkerState.DRAINED
        outcome = RunOutcome(state, f"received {source}", number, ends_job=ends_job)
        before = self.state.outcome
        if before is not None:
            # A scheduler must not start this node again, because the whole job ends.
            if ends_job and before.state is WorkerState.DRAINED:
                self.set(outcome=outcome)
                self.emit(Report(ReportKind.STOP, source))
            return
        self.emit(Report(ReportKind.STOP if ends_job else ReportKind.DRAIN, source))
        self.end(outcome, notice=reason)

    def shorten(self, deadline: float | None) -> None:
        """Kill the workers in time for a deadline. A later deadline than the present has no effect.

        The stage of a stop that is in progress becomes shorter as well.
        """
        if deadline is None:
            return
        kill_at = min(self.state.kill_at, self.now + SAVE_FRACTION * max(0.0, deadline - self.now))
        self.set(kill_at=kill_at)
        stop = self.state.stop
        if stop is not None and stop.stage < StopHow.KILL:
            self.set(stop=attrs.evolve(stop, ends_at=min(stop.ends_at, kill_at)))

    def on_ask_restart(self, event: Requested) -> None:
        generation = self.state.generation
        if generation is not None and generation.generation == event.generation:
            self.set(is_restart_requested=True)
            self.emit(Report(ReportKind.RESTART, event.source))

    # Stopping

    def begin_stop(self, notice: str = "") -> None:
        """Stop the members, with a notice of this reason if they take notices."""
        must_restart = self.state.must_restart or self.state.is_restart_requested
        self.set(phase=Phase.STOPPING, hang=None, overdue={}, must_restart=must_restart)
        grace = min(self.limits.checkpoint_grace, self.state.kill_at - self.now)
        if notice and grace > 0 and can_be_notified(self.state):
            ends_at = self.now + grace
            self.set(stop=Stop(StopHow.NOTICE, ends_at, StopNotice(notice, grace)))
        else:
            self.enter_leave_or_term("")
        self.settle()

    def next_stage(self, why: str) -> None:
        """Go on with the next stage of the stop."""
        stop = self.state.stop
        if stop is None:
            return
        if stop.stage is StopHow.NOTICE:
            self.enter_leave_or_term(why)
        elif stop.stage is StopHow.LEAVE:
            self.enter_term(why)
        elif stop.stage is StopHow.TERM:
            self.enter(StopHow.KILL, self.now + self.limits.kill_timeout, why)
        else:
            self.give_up()

    def enter_leave_or_term(self, why: str) -> None:
        if may_regroup(self.state) and not self.state.outcome:
            self.publish(Topic.OVER)
            self.enter(StopHow.LEAVE, self.now + self.limits.regroup_grace, why)
        else:
            self.enter_term(why)

    def enter_term(self, why: str) -> None:
        ends_at = min(self.now + self.limits.shutdown_timeout, self.state.kill_at)
        self.enter(StopHow.TERM, ends_at, why)
        if ends_at <= self.now:
            why = "this node must leave now"
            self.enter(StopHow.KILL, self.now + self.limits.kill_timeout, why)

    def enter(self, stage: StopHow, ends_at: float, why: str) -> None:
        before = self.state.stop
        stop = before or Stop(stage, ends_at)
        is_open = stop.agreement is None or stop.agreement == NO_CALL
        # After success, this node has published that it accepts any call.
        if is_open and stop.own != NO_CALL and not self.state.has_succeeded:
            # Otherwise the workers of the other nodes would wait for this node in `should_stop`.
            self.publish(Topic.STOP, encode_proposal(NO_CALL))
            stop = attrs.evolve(stop, own=NO_CALL)
        self.set(stop=attrs.evolve(stop, stage=stage, ends_at=ends_at, why=why))

    def give_up(self) -> None:
        survivors = must_end(self.state)
        names = ", ".join(
            view_of(self.state, n).name or f"local rank {n}" for n in sorted(survivors)
        )
        # Those that had left their group were not asked to end.
        if others := tuple(sorted(self.state.alive.keys() - survivors)):
            self.emit(StopWorkers(others, StopHow.KILL, "the run of this node ends"))
        # This hides the earlier reason, because nothing else reports processes that are left.
        failed = RunOutcome(WorkerState.FAILED, f"these survived SIGKILL: {names}")
        self.set(outcome=failed)
        self.close()

    def end(self, outcome: RunOutcome, notice: str = "") -> None:
        """End the run. Its first cause counts.

        Args:
            outcome: how it ends.
            notice: why the workers may save before they end; empty if they may not.
        """
        if self.state.outcome is None:
            self.set(outcome=outcome)
        stop = self.state.stop
        if self.state.phase is not Phase.STOPPING or stop is None:
            self.set(must_restart=False)
            return self.begin_stop(notice)
        if stop.stage is StopHow.NOTICE and notice and stop.notice is not None:
            grace = min(self.limits.checkpoint_grace, stop.ends_at - self.now)
            reason = most_urgent(stop.notice.reason, notice)
            ends_at = self.now + max(0.0, grace)
            changed = attrs.evolve(
                stop, notice=StopNotice(reason, max(0.0, grace)), ends_at=ends_at
            )
            self.set(stop=changed)
        elif stop.stage in (StopHow.NOTICE, StopHow.LEAVE):
            self.next_stage("")
        return self.settle()

    def settle(self) -> None:
        """Tell each worker that has to end what it does not know yet, or end the stop."""
        state, stop = self.state, self.state.stop
        if state.phase is not Phase.STOPPING or stop is None:
            return
        if not must_end(state):
            self.close() if state.outcome else self.rejoin()
            return
        sent = dict(stop.sent)
        by_how: dict[StopHow, list[int]] = {}
        is_new_notice = False
        for local, how, reason in wanted(state, stop):
            before = sent.get(local)
            if before is not None and before[0] > how:
                continue
            if before != (how, reason):
                sent[local] = (how, reason)
                if how is StopHow.NOTICE:
                    is_new_notice = True
                else:
                    by_how.setdefault(how, []).append(local)
        if is_new_notice and stop.notice is not None:
            call = stop.agreement.call if stop.agreement else None
            self.emit(Notify(stop.notice, call))
        for how, ranks in sorted(by_how.items()):
            self.emit(StopWorkers(tuple(ranks), how, stop.why))
        self.set(stop=attrs.evolve(stop, sent=sent))

    def on_exit_in_stop(self, event: WorkerExited) -> None:
        stop, exit_ = self.state.stop, event.exit
        was_notified = stop is not None and stop.stage is StopHow.NOTICE
        is_member = self.state.alive[exit_.local_rank].is_member
        had_to_exit = self.had_to_exit(exit_.local_rank)
        self.remove(exit_)
        outcome = self.state.outcome
        if is_member and not exit_.succeeded:
            if is_own_failure(exit_) or not had_to_exit:
                own = attrs.evolve(exit_.root_failure, stop_was_requested=False)
                self.report_failure(exit_.describe(), evidence_of(own), details_of(exit_))
            if was_notified and outcome is not None and outcome.lets_workers_save:
                reason = f"{outcome.reason}, but {exit_.describe()} before it had saved"
                self.set(outcome=attrs.evolve(outcome, reason=reason))
            if was_notified and stop is not None and self.is_undecided(stop):
                self.next_stage("a worker failed before all could stop at one step")
        self.settle()

    def had_to_exit(self, local: int) -> bool:
        """Return whether a worker was to exit, and not only to leave its group at some step.

        If it was not, nothing else counts its failure: a script that fails in each group would
        never end.
        """
        stop = self.state.stop
        if stop is None or stop.notice is None or not may_regroup(self.state):
            return True
        return stop.sent.get(local, (StopHow.TERM, ""))[0] > StopHow.LEAVE

    def is_undecided(self, stop: Stop) -> bool:
        """Return whether the nodes cannot agree on a call any more, or workers are to regroup."""
        return stop.agreement is None or may_regroup(self.state)

    def on_exit_unfit_in_stop(self, event: WorkerExited) -> None:
        self.remove(event.exit)
        self.end(RunOutcome(WorkerState.FAILED, event.unfit))

    def on_broken_in_stop(self, _event: MembershipChanged) -> None:
        stop = self.state.stop
        # Once they have agreed on a call, the workers may already save, and are given their time.
        if stop is not None and stop.stage is StopHow.NOTICE and self.is_undecided(stop):
            self.next_stage("a node was lost before all could stop at one step")
        self.settle()

    def on_seen_in_stop(self, _event: WorkersSeen) -> None:
        stop = self.state.stop
        is_notice = stop is not None and stop.stage is StopHow.NOTICE
        has_failed = any(view_of(self.state, n).group_failed for n in members(self.state))
        if is_notice and has_failed and may_regroup(self.state):
            self.next_stage("a collective failed")
        self.negotiate()
        self.settle()

    def on_peers_in_stop(self, event: PeerMessages) -> None:
        self.note_peers(event)
        stop = self.state.stop
        is_notice = stop is not None and stop.stage is StopHow.NOTICE
        if event.topic is Topic.OVER and event.by_rank and is_notice and may_regroup(self.state):
            self.next_stage("a collective failed on another node")
        self.negotiate()
        self.settle()

    def note_peers(self, event: PeerMessages) -> None:
        """Note what the other nodes have published. A proposal that was seen stays."""
        if event.topic is Topic.STOP:
            found = {rank: decode_proposal(data) for rank, data in (event.by_rank or {}).items()}
            self.set(
                proposals={**self.state.proposals, **found},
                are_peers_reachable=event.by_rank is not None,
            )
        elif event.topic is Topic.NOTICES and event.by_rank:
            self.set(takes_notices=True)

    def negotiate(self) -> None:
        """Publish this node's call once it is known, and act on what all nodes have agreed on."""
        stop = self.state.stop
        if stop is None or stop.stage is not StopHow.NOTICE or stop.notice is None:
            return
        if stop.agreement is not None:
            return
        calls = [view_of(self.state, n).stop_call for n in must_end(self.state)]
        known = [call for call in calls if call is not None]
        own = stop.own
        if own is None and known and len(known) == len(calls):
            own = StopProposal(max(known), stop.notice.reason, stop.ends_at - self.now)
            self.publish(Topic.STOP, encode_proposal(own))
        if self.num_nodes > 1:
            rank = self.state.generation.rank if self.state.generation else 0
            proposals = dict(self.state.proposals)
            if own is not None:
                proposals.setdefault(rank, own)
            agreement = agree(proposals, self.num_nodes)
            if not self.state.are_peers_reachable:
                agreement = NO_CALL
        else:
            agreement = own
        self.set(stop=attrs.evolve(stop, own=own, agreement=agreement))
        if agreement is None:
            return
        if agreement.call is None:
            self.next_stage("the workers cannot all stop at one step to save")
            return
        # The workers of a node that leaves save and exit. Workers that regroup continue, whatever
        # the reason of the other nodes is.
        reason = stop.notice.reason if may_regroup(self.state) else agreement.reason
        notice = StopNotice(reason, min(agreement.grace_s, max(0.0, stop.ends_at - self.now)))
        sent = {
            n: (how, reason) if how is StopHow.NOTICE else (how, r)
            for n, (how, r) in stop.sent.items()
        }
        self.set(stop=attrs.evolve(stop, own=own, agreement=agreement, notice=notice, sent=sent))
        self.emit(Notify(notice, agreement.call))

    def on_interrupt_in_stop(self, _event: SignalReceived) -> None:
        self.next_stage("SIGINT arrived")
        self.settle()

    def on_tick_in_stop(self, _event: Tick) -> None:
        stop = self.state.stop
        if stop is not None and self.now >= stop.ends_at:
            self.next_stage(self.reason_for_stage_end(stop))
        self.settle()

    def reason_for_stage_end(self, stop: Stop) -> str:
        if stop.stage is StopHow.NOTICE:
            return "still running after the time to save"
        if stop.stage is StopHow.LEAVE:
            return f"still in their group {self.limits.regroup_grace:g} s after it was over"
        return f"still running {self.limits.shutdown_timeout:g} s after SIGTERM"

    # Active

    def on_seen(self, _event: WorkersSeen) -> None:
        failed = {n for n in self.state.alive if view_of(self.state, n).has_failed}
        due = self.now + self.limits.shutdown_timeout
        self.set(overdue={n: self.state.overdue.get(n, due) for n in failed})
        self.poll_hang()

    def on_tick(self, _event: Tick) -> None:
        late = [n for n, at in self.state.overdue.items() if self.now >= at]
        if late:
            self.set(overdue={**self.state.overdue, **dict.fromkeys(late, NEVER)})
            why = f"failed and still running after {self.limits.shutdown_timeout:g} s"
            self.emit(StopWorkers(tuple(late), StopHow.KILL, why))
        self.poll_hang()

    def on_peers(self, event: PeerMessages) -> None:
        self.note_peers(event)
        if event.topic is Topic.HANG and self.state.hang is not None:
            self.set(hang=self.state.hang.on_peer_reports(event.by_rank or {}))
            self.poll_hang()

    def on_stacks(self, event: StacksCollected) -> None:
        hang = self.state.hang
        if hang is not None:
            own = {n: text for n, text in event.stacks.items() if n in hang.ranks}
            hang, progress = hang.on_stacks(self.now, own)
            self.set(hang=hang)
            self.publish(Topic.HANG, progress)
            self.poll_hang()

    def poll_hang(self) -> None:
        """Look for workers that make no progress. Those that wait for a failed one do not hang."""
        hang = self.state.hang
        if hang is None or self.state.overdue:
            return
        beats = {n: view_of(self.state, n).heartbeat for n in hang.ranks}
        hang, result = hang.poll(self.now, {n: beat for n, beat in beats.items() if beat})
        self.set(hang=hang)
        if isinstance(result, HangFinding):
            # All nodes find the same rank, and each of them speaks about its own workers only.
            is_here = result.node_rank == hang.node_rank
            kind = FailureKind.ELSEWHERE if is_here else FailureKind.COLLECTIVE
            rank = result.rank if is_here else -1
            self.report_failure(result.reason, Evidence(kind, result.reason, rank))
            self.begin_stop()
        elif result:
            self.emit(DumpStacks())

    # Closing

    def close(self) -> None:
        """Save what exists in memory only."""
        outcome = self.state.outcome
        has_succeeded = outcome is not None and outcome.state is WorkerState.SUCCEEDED
        self.set(
            phase=Phase.CLOSING,
            stop=None,
            overdue={},
            finish_ends_at=self.now + self.limits.finish_timeout + self.limits.checkpoint_grace,
        )
        # Only success waits for uploads: otherwise this node may have little time left, or the
        # workers of another run may need what these processes use.
        until = self.now + self.limits.checkpoint_grace if has_succeeded else self.now
        self.emit(Finish(save=not has_succeeded, uploads_until=min(until, self.state.kill_at)))

    def on_interrupt_in_close(self, event: SignalReceived) -> None:
        if event.num_interrupts >= GIVE_UP_COUNT:
            self.emit(Finish(save=False, uploads_until=self.now))

    def on_finished(self, event: Finished) -> None:
        outcome = self.state.outcome
        if event.problem and outcome is not None:
            reason = f"{outcome.reason}; {event.problem}"
            self.set(outcome=attrs.evolve(outcome, reason=reason))
        self.set(phase=Phase.ENDED, finish_ends_at=NEVER)

    def on_tick_in_close(self, _event: Tick) -> None:
        if self.now >= self.state.finish_ends_at:
            self.on_finished(Finished("the last save did not end in time"))

    def on_exit_in_close(self, event: WorkerExited) -> None:
        self.remove(event.exit)

    def ignore(self, _event: Event) -> None:
        """Change nothing."""


# -- the table -------------------------------------------------------------------------------------

# For each kind and phase, the method of `_Turn`: "-" changes nothing, and "x" cannot happen.
_ROWS = """
kind              joining           active            stopping               closing
ready             on_ready          x                 -                      -
unfit             on_unfit          x                 -                      -
joined            on_joined         x                 -                      -
over:final        on_final          on_final          on_final               -
over:planned      x                 on_over           -                      -
over:broken       x                 on_over           on_broken_in_stop      -
exit:ok           x                 on_exit_ok        on_exit_in_stop        on_exit_in_close
exit:failed       x                 on_exit_failed    on_exit_in_stop        on_exit_in_close
exit:unfit        x                 on_exit_unfit     on_exit_unfit_in_stop  on_exit_in_close
exit:standby      on_exit_standby   on_standby_failed on_exit_in_stop        on_exit_in_close
seen              -                 on_seen           on_seen_in_stop        -
signal:end        on_signal_end     on_signal_end     on_signal_end          -
signal:again      x                 x                 -                      -
signal:interrupt  x                 x                 on_interrupt_in_stop   on_interrupt_in_close
leave             on_leave          on_leave          on_leave               -
ask:restart       -                 on_ask_restart    -                      -
failed            on_failed         on_failed         on_failed              -
peers             -                 on_peers          on_peers_in_stop       -
stacks            -                 on_stacks         -                      -
finished          x                 x                 x                      on_finished
tick              -                 on_tick           on_tick_in_stop        on_tick_in_close
"""


def _read_table(text: str) -> dict[tuple[Phase, EventKind], Callable[[_Turn, Any], None]]:
    head, *rows = (line.split() for line in text.strip().splitlines())
    phases = [Phase(name) for name in head[1:]]
    return {
        (phase, EventKind(row[0])): _Turn.ignore if name == "-" else getattr(_Turn, name)
        for row in rows
        for phase, name in zip(phases, row[1:], strict=True)
        if name != "x"
    }


TABLE = _read_table(_ROWS)
