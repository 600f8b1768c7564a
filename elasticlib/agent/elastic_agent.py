"""ElasticAgent: supervises the workers of one node.

The agent is one event loop, in the thread that calls `run`. It also handles the events of the
workers (`event_loop.py`). Other threads only put messages into its inbox. An iteration polls what
depends on the time, takes a message, converts it to an event, calls `policy.transition`, and
executes its commands. The path of a worker's exit:
`_step`, `_to_event`, `_on_worker_exit`, `_react`, `_execute`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import attrs

from ..clock import Clock, monotonic
from ..errors import (
    ConfigError,
    ElasticError,
    RendezvousClosedError,
    format_error,
    require_not_none,
)
from ..event_loop import EventLoop
from ..observe.journal import Journal
from ..rendezvous.blame import FailureKind
from ..rendezvous.interface import RendezvousHandler, RendezvousInfo, check_restart_budget
from ..rendezvous.membership import Change, ChangeKind
from ..signal_inbox import SignalInbox
from ..signals import signal_name
from ..threads import Latch, daemon_thread
from ..workers.exits import WorkerExit
from ..workers.interface import DRAIN, PREEMPTED, Workers
from ..workers.spec import (
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    assign_worker_ranks,
    make_standby_group,
    make_standby_workers,
)
from . import policy
from .blocking_rendezvous import BlockingHandlerThread
from .ending_workers import EndingWorkers, KillFailedWorker, ReportEnding
from .group_stopper import GroupStopper
from .hang_detector import HANG_TOPIC, DumpStacks, HangDetector
from .interface import RootCause, RunResult, SnapshotService
from .options import SIGNAL_POLL_INTERVAL_S, AgentOptions
from .peer_exchange import PeerExchange, PeerMessages
from .policy import AgentCommand, AgentEvent, AgentState, RunOutcome, SupervisorState
from .run_reporter import (
    ROOT_CAUSE_TOPIC,
    RunReporter,
    merge_root_cause,
    publish_failed_ranks,
    publish_root_cause,
    root_cause_of,
    summary,
)
from .slot_reporter import SlotReporter
from .stop_procedure import STOP_AT_ANY_CALL, StopTimeouts, propose_stop

log = logging.getLogger("elasticlib.agent")

WORKER_START_TIMEOUT_S = 120.0  # starting workers blocks the event loop for up to this long
SNAPSHOT_FLUSH_TIMEOUT_S = 660.0  # writing snapshots at the end blocks it for up to this long
ROOT_CAUSE_TIMEOUT_S = 3.0  # wait for the other nodes' messages about the root cause
STANDBY_POLL_INTERVAL_S = 0.02  # while standby workers are starting
CHECK_END_TIMEOUT_S = 5.0  # a node check that was told to end, and kills its processes first


# Messages to the event loop, in addition to those of the rendezvous and the peer exchange.


@attrs.frozen
class PrepareFinished:
    """This node has passed its check, and its imports are done: its workers can start at once."""

    peers_can_regroup: bool = False  # the job is running with workers that can regroup


@attrs.frozen
class NodeCheckFailed:
    """The check of this node has found that workers must not run here."""

    reason: str


@attrs.frozen
class WorkerExitNotice:
    """A worker has exited."""

    local_rank: int


@attrs.frozen
class StacksDumped:
    """The workers have written their stacks."""

    stacks: Mapping[int, str]


@attrs.frozen
class SignalNotice:
    """The agent has received a signal."""

    number: int


@attrs.frozen
class DrainRequest:
    """A request that this node leaves the job, by the deadline if there is one."""

    source: str
    reason: str
    deadline: float | None  # on the agent's clock
    ends_job: bool = False  # all nodes leave


@attrs.frozen
class RestartRequest:
    """A request to restart all workers of a generation."""

    source: str
    generation: int


@attrs.frozen
class ControlNotice:
    """An operator requests an action. It is only recorded; another message executes it."""

    action: str
    by: str


# Messages that are valid for one rendezvous only. An exit is valid for one start of workers.
AttemptMessage = (
    RendezvousInfo | Change | Exception | NodeCheckFailed | WorkerExitNotice | StacksDumped
)
InboxMessage = (
    AttemptMessage
    | PrepareFinished
    | SignalNotice
    | DrainRequest
    | RestartRequest
    | ControlNotice
    | PeerMessages
    | policy.ComponentFailed
)


class ElasticAgent:
    """Supervises the workers of one node until the job is over, or the node leaves it.

    A `Workers` object starts, observes and stops the workers: `LocalWorkers` runs processes on this
    machine, and a subclass of your own may run them elsewhere. The agent handles errors of its
    methods as follows. A `ConfigError` of `start` ends the run of this node, because a restart
    would fail in the same way. Another `ElasticError` of `start`, such as `WorkerStartError`,
    counts as a failure of the workers. An `ElasticError` or `OSError` of `prepare` is ignored,
    because `start` will raise it again. Any other exception ends the run.
    `elasticlib.testing.AgentContract` tests these promises.

    Args:
        spec: what to run.
        handler: the rendezvous. The agent shuts it down at the end of the run.
        workers: runs the workers. The agent closes it at the end of the run.
        max_restarts: how many restarts this agent allows after failures, if the handler does not
            count restarts for the whole job. The default is the handler's number, or 0.
        stop_timeouts: time limits of the stages in which workers are stopped.
        monitor_interval: seconds between polls of a handler that cannot report changes.
        options: which signals the agent handles, how long workers may save, and what checks this
            node.
        snapshot_service: stores the workers' snapshots over all generations, such as
            `NodeSnapshotService`. Without it, workers restore from their own node's memory only,
            and no snapshot is written to the disk if the job ends early.
        journal: receives every event. A journal that raises is disabled.
        clock: the time source.

    Raises:
        ConfigError: the settings contradict each other, or those of the handler.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        handler: RendezvousHandler,
        workers: Workers,
        *,
        max_restarts: int | None = None,
        stop_timeouts: StopTimeouts | None = None,
        monitor_interval: float = 0.1,
        options: AgentOptions | None = None,
        snapshot_service: SnapshotService | None = None,
        journal: Journal | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if max_restarts is not None and max_restarts < 0:
            raise ConfigError(f"max_restarts must be at least 0, got {max_restarts}")
        handler.check_agent(slots=spec.local_world_size, max_restarts=max_restarts)
        self.workers = workers
        self._spec = spec
        self._handler = handler
        self._snapshot_service = snapshot_service
        self._max_restarts = max_restarts
        self._options = options or AgentOptions()
        if self._options.hang_limits is not None and not workers.reports_heartbeats:
            raise ConfigError(
                f"hang (--hang-timeout) needs workers that report their steps, and "
                f"{type(workers).__name__} does not support it: leave it out"
            )
        self._clock = clock
        self._host = socket.gethostname()
        self._loop = workers.event_loop or EventLoop()
        # Each message with the number of its attempt, or None if it is always valid.
        self._inbox: deque[tuple[int | None, InboxMessage]] = deque()
        self._reporter = RunReporter(self._host, workers, journal, clock)
        self._slots = SlotReporter(handler, workers, spec.local_world_size)
        self._peers = PeerExchange(self._post, self.fail, clock)
        self._stopper = GroupStopper(workers, stop_timeouts or StopTimeouts(), self._options, clock)
        self._blocking_handler = BlockingHandlerThread(
            handler, monitor_interval, self._post_for_attempt, self.fail
        )

        # State of the event loop. No other thread changes it.
        self._has_run = False  # `run` was called
        self._progress_at = clock()  # last progress of the loop
        self._now = SupervisorState()  # state of the policy
        self._info: RendezvousInfo | None = None  # current generation, None before the first
        self._group: WorkerGroup | None = None  # workers of the current generation
        self._hang_detector: HangDetector | None = None  # None while no group is observed
        # Workers of the group that have ended their program.
        self._ending = EndingWorkers((stop_timeouts or StopTimeouts()).shutdown_timeout)
        self._is_prepared = False  # the imports are done
        self._needs_check = self._options.check_node is not None  # before this node joins
        self._check_end: Latch | None = None  # set once the last check has ended
        self._attempt = 0  # number of rendezvous
        self._num_starts = 0  # number of starts of workers
        self._start_numbers: dict[int, int] = {}  # the start of each worker, by local rank
        self._own_restarts = 0  # restarts that the handler does not count
        self._script_takes_notices = False  # a worker of some node has called `should_stop`
        self._restart_generation = 0  # whose workers an operator wants to restart; 0: none
        self._has_warned_no_steps = False
        # Counts and keeps signals from now on. The loop reads them once `run` was called.
        self.signals = SignalInbox()
        self.signals.forward_to(lambda number: self._post(SignalNotice(number)))

    # -- for any thread -----------------------------------------------------------------------

    def handle_signal(self, number: int) -> None:
        """React as if the process had received this signal. Thread-safe.

        A program that runs its agent outside the main thread needs this method, because Python
        delivers signals only to the main thread.

        Args:
            number: one of the signals that `options` name.
        """
        self.signals.put(number)

    def request_drain(
        self, source: str, *, reason: str = PREEMPTED, time_left_s: float | None = None
    ) -> None:
        """Make the workers save and this node leave the job, as on a drain signal. Thread-safe.

        Args:
            source: what requests it, for logs and events, such as "a preemption notice".
            reason: what `should_stop()` returns to the workers: "preempted" or "drain".
            time_left_s: seconds from now until this node must have left. The time to save and the
                timeouts of the signals are shortened if they do not fit into it.

        Raises:
            ConfigError: `reason` is neither "preempted" nor "drain".
        """
        if reason not in (PREEMPTED, DRAIN):
            raise ConfigError(f"reason must be {PREEMPTED!r} or {DRAIN!r}, got {reason!r}")
        deadline = None if time_left_s is None else self._clock() + time_left_s
        self._post(DrainRequest(source, reason, deadline))

    def request_stop(self, source: str) -> None:
        """Make the workers save and the job end, for all its nodes. Thread-safe.

        The other nodes stop their workers at the same step, and form no further generation. With a
        handler that does not support this, only this node leaves.

        Args:
            source: what requests it, for logs and events.
        """
        self._post(DrainRequest(source, DRAIN, None, ends_job=True))

    def request_restart(self, source: str, generation: int) -> None:
        """Make all workers of the job save and restart. Thread-safe.

        No restart is charged to the budget. Nothing happens if this node's workers do not run in
        that generation, and only a warning is logged if the handler does not support it.

        Args:
            source: what requests it, for logs and events.
            generation: the number of the generation whose workers are restarted.
        """
        self._post(RestartRequest(source, generation))

    def fail(self, reason: str) -> None:
        """Make this node stop its workers and fail, because it cannot continue. Thread-safe.

        Args:
            reason: why, as one sentence; it becomes the reason of the result.
        """
        self._post(policy.ComponentFailed(reason))

    def record_control(self, action: str, by: str) -> None:
        """Log and record as an event that an operator has requested an action. Thread-safe.

        The action itself is requested by a separate call, such as `request_drain`.

        Args:
            action: what is requested: "drain", "stop" or "restart".
            by: the operator.
        """
        self._post(ControlNotice(action, by))

    def stalled_s(self) -> float:
        """Return the seconds since the last progress of the event loop; 0 after the run."""
        is_over = self._now.state is AgentState.ENDED
        return 0.0 if is_over else max(0.0, self._clock() - self._progress_at)

    @property
    def state(self) -> AgentState:
        """The state of the agent. Thread-safe."""
        return self._now.state

    def get_worker_group(self) -> WorkerGroup | None:
        """Return the workers of the current generation, or None before the first generation."""
        return self._group

    def _post(self, message: InboxMessage) -> None:
        self._inbox.append((None, message))
        self._loop.wake()

    def _post_for_attempt(self, attempt: int, message: AttemptMessage) -> None:
        self._inbox.append((attempt, message))
        self._loop.wake()

    # -- the run ------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Take part in the job until it is over for this node. Blocks.

        An agent runs once, because it closes its handler and its workers at the end.

        Returns:
            The result. A failure of the job is in the result, and raises nothing.

        Raises:
            ElasticError: `run` was called before.
        """
        if self._has_run:
            raise ElasticError(
                "ElasticAgent.run was called again, but an agent runs once: create a new "
                "ElasticAgent, handler and workers for another run"
            )
        self._has_run = True
        cause = None
        self._reporter.on_run_started()
        with self.signals.captured(self._options.handled_signals):
            try:
                self._mark_progress()
                self._loop.adopt()
                with contextlib.suppress(ElasticError, OSError):  # `start` raises it again
                    self.workers.prepare(self._spec)
                self._execute([policy.StartRendezvous()])
                while self._now.state is not AgentState.ENDED:
                    self._step()
                cause = self._find_root_cause()
            except Exception as error:
                log.exception(
                    "the agent's event loop failed: this node stops its workers and fails"
                )
                outcome = RunOutcome(WorkerState.FAILED, format_error(error))
                self._now = SupervisorState(AgentState.ENDED, outcome=outcome)
            finally:
                self._close()
        unexpected = RunOutcome(WorkerState.FAILED, "the agent ended unexpectedly")
        return self._reporter.finish(self._now.outcome or unexpected, cause)

    def start(self, group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
        """Start the workers of a group; see `Workers.start`. A subclass may observe the call."""
        self.workers.start(group, on_exit)

    def reap(self, local_rank: int) -> WorkerExit:
        """Return how a worker exited; see `Workers.reap`. A subclass may observe the call."""
        return self.workers.reap(local_rank)

    def _step(self) -> None:
        """Run one iteration of the event loop."""
        self._mark_progress()
        self._poll()
        if self._now.state is AgentState.ENDED:
            return
        if not self._loop.run_until(lambda: self._inbox, self._poll_interval_s()):
            return
        attempt, message = self._inbox.popleft()
        current = self._attempt
        if isinstance(message, WorkerExitNotice):
            current = self._start_numbers.get(message.local_rank, self._num_starts - 1)
        event = self._to_event(message) if attempt in (None, current) else None
        if event is not None:
            self._react(event)

    def _mark_progress(self, allowance_s: float = 0.0) -> None:
        """Record that the loop makes progress; the next operation may take `allowance_s` longer."""
        self._progress_at = self._clock()
        self._handler.mark_progress(allowance_s)

    def _react(self, event: AgentEvent) -> None:
        """Change the state according to the policy, and execute its commands."""
        before = self._now.state
        self._now, commands = policy.transition(self._now, event)
        if self._now.state is not before:
            if before in (AgentState.RUNNING, AgentState.FINISHED):
                self._reporter.on_workers_idle(event)
            if self._hang_detector is not None and not isinstance(event, policy.HangDetected):
                # Another node may have found the same hang first.
                self._reporter.log_stacks(self._hang_detector.stack_report())
            self._hang_detector = None
            log.debug("%s -> %s: %s", before.value, self._now.state.value, summary(event))
        self._execute(commands)

    def _poll(self) -> None:
        """React to the time, and to what workers report in shared memory."""
        now = self._clock()
        if self._stopper.is_stopping:
            self._execute(self._stopper.poll(self._regroup_grace_s))
        elif not self._poll_ending_workers(now):
            self._poll_hang_detector(now)
        if self._now.state is AgentState.JOINING:
            self._blocking_handler.log_progress(now, self._reporter.reason)
        self._report_slots()
        self._find_script_takes_notices()
        self._reporter.report_steps()

    def _poll_ending_workers(self, now: float) -> bool:
        """React to workers that have ended their program. Return True if one of them has failed.

        Then the other workers may wait for it, and do not hang.
        """
        if self._now.state is not AgentState.RUNNING:
            return False
        ending = {
            local: exit_
            for local, exit_ in self.workers.ending_workers().items()
            if local in self._now.running_ranks
        }
        self._ending, commands = self._ending.poll(now, ending, self._now.running_ranks)
        self._execute(commands)
        return any(exit_.returncode for exit_ in ending.values())

    def _poll_hang_detector(self, now: float) -> None:
        detector = self._hang_detector
        if detector is None or (detector.suspect is None and now < detector.next_poll_at):
            return
        heartbeats = self.workers.heartbeats()
        members = {local: heartbeats[local] for local in detector.ranks if local in heartbeats}
        self._hang_detector, commands = detector.poll(now, members)
        if not self._has_warned_no_steps and (text := detector.no_steps_warning(now, members)):
            self._has_warned_no_steps = True
            log.warning("%s", text)
        self._execute(commands)

    def _poll_interval_s(self) -> float:
        """Return after how many seconds the next poll is due."""
        due_s, detector = SIGNAL_POLL_INTERVAL_S, self._hang_detector
        if self._stopper.is_stopping:
            due_s = self._stopper.poll_interval_s()
        elif self._now.standby_ranks and not all(self.workers.standby_ranks().values()):
            due_s = STANDBY_POLL_INTERVAL_S
        elif detector is not None and detector.suspect is None:
            due_s = max(0.0, detector.next_poll_at - self._clock())
        return min(SIGNAL_POLL_INTERVAL_S, due_s)

    # -- messages become events -----------------------------------------------------------------

    def _to_event(self, message: InboxMessage) -> AgentEvent | None:
        """Convert a message to an event of the policy, or handle it here and return None."""
        match message:
            case PrepareFinished(peers_can_regroup):
                self._needs_check = False
                if not self._is_prepared:
                    self._is_prepared = True
                    self._reporter.on_prepared()
                    self._slots.set_peers_can_regroup(peers_can_regroup)
                if self._now.state is AgentState.JOINING:
                    self._join()
            case NodeCheckFailed(reason) if self._now.state is AgentState.JOINING:
                outcome = RunOutcome(WorkerState.FAILED, reason, evicted=True, is_unfit=True)
                return policy.RendezvousEnded(outcome)
            case RendezvousInfo():
                return self._on_generation(message)
            case Change():
                self._reporter.on_change(message)
                change = self._apply_restart_request(message)
                return policy.MembershipChanged(change, self._can_regroup())
            case Exception():
                return self._on_rendezvous_error(message)
            case WorkerExitNotice(local_rank):
                return self._on_worker_exit(local_rank)
            case SignalNotice(number):
                return self._on_signal(number)
            case DrainRequest(source, reason, deadline, ends_job):
                if deadline is not None:
                    self._execute(self._stopper.set_deadline(deadline))
                return self._on_drain(0, source, reason, ends_job=ends_job)
            case RestartRequest():
                self._on_restart(message)
            case ControlNotice(action, by):
                self._reporter.on_control(action, by)
            case PeerMessages(prefix, topic, messages) if prefix == self._peers.prefix:
                self._execute(self._stopper.on_messages(topic, messages))
                if topic == HANG_TOPIC and self._hang_detector is not None:
                    self._hang_detector = self._hang_detector.on_peer_reports(messages or {})
            case StacksDumped(stacks) if self._hang_detector is not None:
                ranks = self._hang_detector.ranks
                own = {local: text for local, text in stacks.items() if local in ranks}
                self._hang_detector, commands = self._hang_detector.on_stacks(self._clock(), own)
                self._execute(commands)
            case policy.ComponentFailed():
                return message
        return None

    def _on_generation(self, info: RendezvousInfo) -> AgentEvent:
        check_restart_budget(self._max_restarts, info.max_restarts)
        self._info = info
        members = self._slots.members(info.assignment)
        return policy.GenerationFormed(members, self._all_local_ranks - members)

    def _on_rendezvous_error(self, error: Exception) -> AgentEvent:
        if self._now.state is not AgentState.JOINING:
            change = Change(ChangeKind.STORE_LOST, format_error(error))
            return policy.MembershipChanged(change, self._slots.can_regroup())
        end = getattr(error, "change", None)
        if isinstance(error, RendezvousClosedError) and isinstance(end, Change):
            self._reporter.on_change(end)
            return policy.RendezvousEnded(policy.end_of_job(end))
        self._reporter.lost_node_not_replaced = getattr(error, "is_node_loss", False)
        reason = format_error(error)
        if self._info is not None and not self._reporter.lost_node_not_replaced:
            # The failure that led to the rendezvous is more important than its timeout.
            last = self._reporter.reason
            reason = f"{last}; then this node could not join another generation: {reason}"
        return policy.RendezvousEnded(RunOutcome(WorkerState.FAILED, reason))

    def _on_worker_exit(self, local_rank: int) -> AgentEvent | None:
        if local_rank not in self.workers.running():
            return None
        was_standby = local_rank in self.workers.standby_ranks()
        if local_rank in self.workers.regroupable_ranks():
            self._slots.report_can_regroup()
        exit_ = self._reporter.add_exits_before(self.reap(local_rank))
        is_unsaved, is_undecided = self._stopper.is_unsaved(exit_, was_standby=was_standby)
        is_stopping = self._now.state is not AgentState.RUNNING
        failure = self._reporter.on_worker_exited(exit_, is_stopping=is_stopping)
        if failure is not None and not was_standby:
            kind = failure.failure_kind
            generation = 0 if self._info is None else self._info.generation
            cause = root_cause_of(failure, self._host, generation)
            self._peers.publish(publish_root_cause(cause, kind))
            if self._now.state is AgentState.STOPPING and not self._now.is_planned:
                self._handler.report_evidence(failure.describe(), kind=kind)
        return policy.WorkerExited(
            exit_,
            exited_before_saving=is_unsaved,
            stop_call_undecided=is_undecided,
            exited_in_group=not (was_standby or self._stopper.has_sent_signals),
            can_regroup=self._can_regroup(),
        )

    def _on_signal(self, number: int) -> AgentEvent:
        options, name = self._options, signal_name(number)
        received = policy.SignalReceived(number, name, is_interrupt=number == signal.SIGINT)
        if self._now.outcome is not None:
            # The first signal has decided. This one is no request to save any more.
            return received
        reason = options.drain_reason(number)
        is_drain = number in options.drain_signals
        if is_drain or (number in options.notice_signals and self._lets_script_save(reason)):
            return self._on_drain(number, name, reason)
        return received

    def _on_drain(
        self, number: int, name: str, reason: str, *, ends_job: bool = False
    ) -> AgentEvent:
        self._reporter.on_drain(name, reason)
        return policy.DrainRequested(number, name, reason, ends_job)

    def _on_restart(self, request: RestartRequest) -> None:
        info = self._info
        is_running = self._now.state is AgentState.RUNNING
        if not is_running or info is None or info.generation != request.generation:
            return
        if self._handler.report_restart(request.source):
            self._restart_generation = info.generation
        else:
            log.warning(
                "%s does not support a restart on request: the workers continue",
                type(self._handler).__name__,
            )

    def _apply_restart_request(self, change: Change) -> Change:
        """Convert a resize to a restart if an operator has requested one in this generation.

        The leader may have begun the resize before it read the request. Workers that can regroup
        would then continue instead of being restarted.
        """
        if self._is_restart_requested() and change.kind is ChangeKind.RESIZE:
            return attrs.evolve(change, kind=ChangeKind.RESTART)
        return change

    def _is_restart_requested(self) -> bool:
        """Return True if an operator has asked to restart the workers of this generation."""
        return self._info is not None and self._info.generation == self._restart_generation

    def _can_regroup(self) -> bool:
        """Return True if workers here can regroup, and no operator has requested their restart.

        A failure may end the generation before the leader has read that request.
        """
        return not self._is_restart_requested() and self._slots.can_regroup()

    def _find_script_takes_notices(self) -> None:
        """Find out whether the script calls `should_stop`, and tell the other nodes once."""
        if self._script_takes_notices:
            return
        if self._handler.peers_take_notices():
            self._script_takes_notices = True
            log.debug("the script takes notices on another node: SIGTERM drains this node, too")
        elif self.workers.takes_notices():
            self._script_takes_notices = True
            self._handler.report_takes_notices()

    def _lets_script_save(self, reason: str) -> bool:
        """Return True if SIGTERM is a drain: the workers have a notice, or the script takes them.

        While the script is still loading, or no worker runs, nothing has to be saved. But the node
        is as wanted as later, so its scheduler must requeue it.
        """
        return self._ensure_notified(reason) or self._script_takes_notices

    def _ensure_notified(self, reason: str) -> bool:
        """Give running workers a stop notice. Return True if the workers have one or may save."""
        if self._now.state is AgentState.RUNNING:
            notice = self._options.make_notice(reason)
            return notice is not None and self._stopper.notify(notice)
        return self._now.state is AgentState.STOPPING and self._stopper.is_notified

    # -- commands -----------------------------------------------------------------------------

    def _execute(self, commands: Iterable[AgentCommand]) -> None:
        for command in commands:
            self._mark_progress()
            self._execute_one(command)

    def _execute_one(self, command: AgentCommand) -> None:
        match command:
            case policy.StartRendezvous():
                self._start_rendezvous()
            case policy.StartWorkers():
                self._start_workers()
            case policy.PrestartWorkers():
                self._prestart_workers()
            case policy.ReportSlots():
                self._report_slots()
            case policy.StopWorkers() | policy.Regroup():
                self._begin_stop(command)
            case policy.LeaveGroup():
                self.workers.leave_group()
            case policy.CancelRegroup():
                self._stopper.cancel_regroup()
            case policy.ShortenNotice():
                self._execute(self._stopper.shorten_notice(command))
            case policy.EscalateStop():
                self._stopper.escalate()
            case policy.StopAtCall():
                self._stopper.stop_at_call(command)
            case policy.SignalWorkers():
                self._stopper.signal_workers(command)
            case policy.WorkersStopped():
                self._on_workers_stopped(command)
            case ReportEnding(text):
                log.warning("%s", text)
            case KillFailedWorker(local_rank, text):
                log.warning("%s", text)
                self.workers.stop((local_rank,), force=True)
            case policy.ReportFailure():
                self._report_failure(command)
            case policy.ReportDrain(reason, ends_job):
                report = self._handler.report_stop if ends_job else self._handler.report_drain
                report(reason)
            case policy.ReportSuccess():
                self._report_success()
            case policy.Publish():
                self._peers.publish(command)
            case policy.Subscribe(topic):
                self._peers.subscribe(topic)
            case DumpStacks():
                self._start_stack_dump()
            case policy.HangDetected():
                cause = self._reporter.on_hang(command)
                kind = FailureKind.STALLED if command.node_rank < 0 else FailureKind.HUNG
                self._peers.publish(publish_root_cause(cause, kind))
                self._react(attrs.evolve(command, can_regroup=self._can_regroup()))
            case _:
                raise TypeError(f"unknown command: {command!r}")

    def _start_rendezvous(self) -> None:
        self._attempt += 1
        self._reporter.on_rendezvous_started()
        if self._snapshot_service is not None:
            self._snapshot_service.on_workers_stopped()
        self._join()

    def _join(self) -> None:
        """Ask for the next generation, or first prepare or check this node if that is due.

        A thread prepares and checks the node, and its PrepareFinished repeats this call. The other
        nodes must not stop their workers for a node that cannot start its own at once. If the
        workers of the other nodes can regroup, this node starts its workers before it joins.
        """
        callback = partial(self._post_for_attempt, self._attempt)
        if not self._is_prepared or self._needs_check:
            work = partial(self._prepare, callback, self._is_prepared)
            self._check_end = Latch() if self._needs_check else None
            daemon_thread(work, "agent-prepare", self.fail).start()
            return
        if self._slots.should_prestart(self._info):
            self._react(policy.PeersStillTraining(self._all_local_ranks))
        self._report_slots()
        if not self._handler.start_join(callback):
            self._blocking_handler.join(self._attempt, self._clock())

    def _prepare(self, callback: Callable[[AttemptMessage], None], is_prepared: bool) -> None:
        """Check this node, and wait until it can start workers without delay.

        Runs in a thread of its own. A node that is prepared already is only checked.
        """
        reason = self._run_check()
        if reason:
            callback(NodeCheckFailed(reason))
            return
        peers_can_regroup = False
        try:
            if not is_prepared:
                self._handler.prepare()
                self.workers.wait_until_prepared()
                peers_can_regroup = self._handler.peers_can_regroup()
        except Exception as error:
            callback(error)
        else:
            self._post(PrepareFinished(peers_can_regroup))

    def _run_check(self) -> str:
        """Check this node, but no longer than the run. Return why it is unfit, or an empty text."""
        check_node, check_end = self._options.check_node, self._check_end
        if check_node is None or check_end is None:
            return ""
        started_at = self._clock()
        try:
            reason = check_node(lambda: self._now.outcome is not None)
        except Exception as error:
            log.exception("the check of this node failed")
            reason = f"the check of this node failed: {format_error(error)}"
        finally:
            check_end.set()
        if not reason:
            log.info("the check of this node passed in %.2f s", self._clock() - started_at)
        return reason

    def _report_slots(self) -> None:
        self._slots.update(self._now, len(self._group.workers) if self._group else 0)

    def _prestart_workers(self) -> None:
        run_id = self._handler.get_run_id()
        group = make_standby_group(self._spec, self._all_local_ranks, run_id, self._num_starts)
        self._reporter.on_prestart(group)
        failure = self._start_group(group)
        if failure is not None:
            self._react(failure)

    def _start_workers(self) -> None:
        info = require_not_none(self._info, "the generation")
        self._mark_progress(WORKER_START_TIMEOUT_S)
        self._stopper.on_group_started()
        self._ending = EndingWorkers(self._ending.timeout_s)
        self._peers.start_generation(info)
        group = self._group = self._make_group(info)
        self._reporter.on_workers_starting(info, group)
        if self._snapshot_service is not None:
            self._snapshot_service.on_workers_starting(info, group)
        failure = self._start_group(group)
        self._reporter.on_workers_started(group, self.workers.running(), self._start_numbers)
        if failure is not None:
            cause = self._reporter.on_failure_without_exit(failure.reason)
            self._peers.publish(publish_root_cause(cause, FailureKind.RAISED))
            self._react(failure)
        elif self._options.hang_limits is not None:
            self._hang_detector = HangDetector(
                self._options.hang_limits,
                self._host,
                {worker.local_rank: worker.rank for worker in group.workers},
                node_rank=info.rank,
                num_peers=info.world_size - 1 if self._peers.prefix else 0,
                started_at=self._clock(),
            )

    def _start_group(
        self, group: WorkerGroup
    ) -> policy.WorkerStartFailed | policy.ComponentFailed | None:
        """Start the workers of the group that are not running. Return the failure, if any."""
        self._mark_progress(WORKER_START_TIMEOUT_S)
        self._num_starts += 1
        number, running = group.attempt, self.workers.running().keys()
        for worker in (*group.workers, *group.standby_workers):
            if worker.local_rank not in running:
                self._start_numbers[worker.local_rank] = number

        def on_exit(local_rank: int) -> None:
            self._post_for_attempt(number, WorkerExitNotice(local_rank))

        try:
            self.start(group, on_exit)
        except ConfigError as error:
            # This node cannot run such workers, so a restart would fail in the same way.
            return policy.ComponentFailed(str(error))
        except ElasticError as error:
            return policy.WorkerStartFailed(str(error), self._slots.can_regroup())
        return None

    def _make_group(self, info: RendezvousInfo) -> WorkerGroup:
        store, own_budget = info.bootstrap_store_info, self._max_restarts or 0
        return WorkerGroup(
            spec=self._spec,
            workers=assign_worker_ranks(info.assignment, self._now.running_ranks),
            standby_workers=make_standby_workers(info.assignment, self._now.standby_ranks),
            run_id=info.run_id,
            generation=info.generation,
            group_rank=info.rank,
            group_world_size=info.world_size,
            master_addr=store.master_addr,
            master_port=store.master_port,
            restarts=info.restarts + self._own_restarts,
            max_restarts=own_budget if info.max_restarts is None else info.max_restarts,
            use_agent_store=self._handler.use_agent_store,
            attempt=self._num_starts,
            incarnation=info.incarnation,
        )

    @property
    def _all_local_ranks(self) -> frozenset[int]:
        return frozenset(range(self._spec.local_world_size))

    def _begin_stop(self, command: policy.StopWorkers | policy.Regroup) -> None:
        notice, commands = self._stopper.begin(
            command,
            self._info,
            has_peers=bool(self._peers.prefix),
            regroup_grace_s=self._regroup_grace_s(),
        )
        self._reporter.on_stop_started(notice)
        self._execute(commands)

    def _regroup_grace_s(self) -> float:
        """Return how long workers have to leave their group, or 0 if none can or may regroup."""
        # The job may have ended since the stop began, because a failure was one too many.
        if self._now.state is not AgentState.STOPPING or self._now.must_restart:
            return 0.0
        return self._options.regroup_grace if self._can_regroup() else 0.0

    def _on_workers_stopped(self, event: policy.WorkersStopped) -> None:
        self._stopper.finish()
        self._reporter.on_stop_finished(event)
        self._react(attrs.evolve(event, standby_ranks=frozenset(self.workers.standby_ranks())))

    def _report_failure(self, failure: policy.ReportFailure) -> None:
        reason, budget = failure.reason, self._max_restarts or 0
        self._needs_check = self._options.check_node is not None
        self._reporter.on_failure(failure)
        kind, hung_node_rank = failure.kind, failure.hung_node_rank
        if self._handler.report_failure(reason, kind=kind, hung_node_rank=hung_node_rank):
            return
        # This rendezvous lets each agent count restarts.
        self._own_restarts += 1
        if self._own_restarts <= budget:
            return
        try:
            # Without it, the other nodes would wait for this one until their join timeout.
            self._handler.set_closed()
        except Exception as error:
            log.warning(
                "cannot end the job for the other nodes, which wait until their join timeout: %s",
                format_error(error),
            )
        reason = f"{reason} ({budget} of {budget} restarts used)"
        self._react(policy.MembershipChanged(Change(ChangeKind.FAILED, reason)))

    def _report_success(self) -> None:
        info = require_not_none(self._info, "the generation")
        self._peers.publish(propose_stop(info.rank, STOP_AT_ANY_CALL))
        if self._handler.report_success():
            return
        if info.world_size > 1:
            log.info(
                "%s has no report_success: this node leaves without waiting for the other nodes; "
                "if workers of another node fail later, the job restarts without this node",
                type(self._handler).__name__,
            )
        self._react(policy.MembershipChanged(Change(ChangeKind.SUCCEEDED, "this node is done")))

    def _start_stack_dump(self) -> None:
        """Start a thread that collects the stacks of the workers, which takes about a second."""
        attempt = self._attempt

        def dump() -> None:
            stacks = self.workers.dump_stacks(self.workers.running(), save=True)
            self._post_for_attempt(attempt, StacksDumped(stacks))

        daemon_thread(dump, "agent-stacks", self.fail).start()

    # -- the end of the run -------------------------------------------------------------------

    def _find_root_cause(self) -> RootCause | None:
        """Return the root cause over all nodes, or this node's own if they do not answer in time.

        Return None if the run has not failed, or if this node knows no cause.
        """
        outcome, info, own = self._now.outcome, self._info, self._reporter.local_root_cause()
        if outcome is None or outcome.state is not WorkerState.FAILED or info is None:
            return None
        failed = self._reporter.failed_ranks
        if not self._peers.prefix or not (failed or self._reporter.failed_on_other_node):
            return own
        if failed:
            self._peers.publish(publish_failed_ranks(info.rank, failed))
        self._peers.subscribe(ROOT_CAUSE_TOPIC)
        deadline = self._clock() + ROOT_CAUSE_TIMEOUT_S
        self._mark_progress(ROOT_CAUSE_TIMEOUT_S)
        while self._loop.run_until(lambda: self._inbox, deadline - self._clock()):
            _, message = self._inbox.popleft()
            if isinstance(message, PeerMessages) and message.topic == ROOT_CAUSE_TOPIC:
                if message.messages is None:
                    return own
                if (cause := merge_root_cause(message.messages)) is not None:
                    return cause
        log.info(
            "no node reported an earlier failure within %g s: the root cause is this node's own",
            ROOT_CAUSE_TIMEOUT_S,
        )
        return own

    def _close(self) -> None:
        """Close every part of the agent, even if another part fails to close."""
        # Snapshots are written before the node leaves the rendezvous: nodes that continue may need
        # them.
        steps: tuple[tuple[Callable[[], Any], float], ...] = (
            (self._wait_for_check_end, CHECK_END_TIMEOUT_S),
            (self._peers.close, 0.0),
            (self.workers.kill_and_wait, 0.0),
            (self._wait_for_background_processes, self._options.checkpoint_grace),
            (self._close_snapshot_service, SNAPSHOT_FLUSH_TIMEOUT_S),
            (self.workers.close, 0.0),
            (self._handler.shutdown, 0.0),
            (self._blocking_handler.close, 0.0),
            (self._loop.close, 0.0),
            (self._loop.release, 0.0),
        )
        for close, allowance_s in steps:
            try:
                self._mark_progress(allowance_s)
                close()
            except Exception:
                log.exception("a part of the agent could not be closed; the other parts are closed")

    def _wait_for_background_processes(self) -> None:
        """Give what succeeded workers have started in the background time to end.

        If the job has not succeeded, there is no wait: the node may have little time left, and new
        workers may need what the processes use.
        """
        outcome = self._now.outcome
        if outcome is not None and outcome.state is WorkerState.SUCCEEDED:
            work = "the wait for processes that workers have started"
            give_up_reason = partial(self.signals.reason_to_give_up, work, log.warning)
            self.workers.wait_for_background_processes(
                self._options.checkpoint_grace, give_up_reason
            )

    def _wait_for_check_end(self) -> None:
        if self._check_end is not None and not self._check_end.wait(CHECK_END_TIMEOUT_S):
            log.warning("the check of this node did not end within %g s", CHECK_END_TIMEOUT_S)

    def _close_snapshot_service(self) -> None:
        outcome, service = self._now.outcome, self._snapshot_service
        if service is None:
            return
        succeeded = outcome is not None and outcome.state is WorkerState.SUCCEEDED
        work = "the final write of snapshots"
        is_last_node = self._info is not None and self._info.world_size == 1
        if is_last_node or (outcome is not None and outcome.ends_job):
            service.on_job_ended()
        unsaved = service.close(
            flush=not succeeded,
            cancel_reason=partial(self.signals.reason_to_give_up, work, log.warning),
        )
        self._reporter.unsaved_reason = unsaved
        self._reporter.saved_step = service.saved_step
        if unsaved:
            log.warning("%s", unsaved)
