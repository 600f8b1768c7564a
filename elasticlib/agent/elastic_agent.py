"""ElasticAgent: supervises the workers of one node.

The agent is one loop, in the thread that calls `run`. It takes an event, asks the machine
(`machine.handle`) what to do, and executes the effects in their order. An effect returns nothing:
its owner answers with a later event. The owners are the ports: `Workers` runs the processes,
`Membership` is the rendezvous, `Snapshots` keeps and saves states, and the `RunObserver` reports.
Nothing in the loop blocks; other threads only post events.
"""

from __future__ import annotations

import logging
import queue
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from functools import partial

from ..clock import Clock, monotonic
from ..errors import ConfigError, ElasticError, format_error, require_not_none
from ..observe.journal import Journal
from ..options import AgentOptions, RendezvousSettings
from ..rendezvous.interface import Membership, Publish, RendezvousHandler, Report
from ..signal_inbox import SignalInbox
from ..signals import signal_name
from ..threads import Latch, daemon_thread
from ..workers.exits import WorkerExit
from ..workers.interface import DRAIN, PREEMPTED, Workers, WorkerView
from ..workers.spec import (
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    assign_worker_ranks,
    make_standby_group,
    make_standby_workers,
)
from .blocking_membership import BlockingMembership
from .interface import RunResult, SnapshotService
from .machine import Limits, MachineState, Phase, begin, due_at, handle
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
from .run_observer import RunObserver
from .snapshots import Snapshots

log = logging.getLogger("elasticlib.agent")

# Python runs a signal handler only after the main thread returns from its wait. The signal does not
# interrupt the wait if it arrives just before it, or if another thread receives it. So waits of the
# main thread are not longer than this.
SIGNAL_POLL_INTERVAL_S = 0.2
CHECK_END_TIMEOUT_S = 5.0  # a node check that was told to end, and kills its processes first
VIEW_INTERVAL_S = 1.0  # what the workers show is read at least so often
# The methods that a subclass of torch's SimpleElasticAgent overrides.
TORCH_HOOKS = ("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown", "_invoke_run")
FINAL_WRITE = "the final write of snapshots"
UPLOADS = "the wait for processes that workers have started"
UPLOADS_POLL_S = 0.1  # between looks at the signals during that wait

OnTurn = Callable[[Event, MachineState, MachineState, tuple[Effect, ...]], object]
# A function that checks this node, such as `NodeCheck`. The agent calls it in a thread, with a
# function that returns True once the check must end. The result is why workers must not run on this
# node, or an empty text.
CheckNode = Callable[[Callable[[], bool]], str]


class ElasticAgent:
    """Supervises the workers of one node until the job is over, or the node leaves it.

    A `Workers` object starts, observes and stops the workers: `LocalWorkers` runs processes on this
    machine, and a subclass of your own may run them elsewhere. A `ConfigError` of `start` ends the
    run of this node, because a restart would fail in the same way; another `ElasticError` counts as
    a failure of the workers; any other exception ends the run. `elasticlib.testing.AgentContract`
    tests these promises.

    A subclass may override `execute`, which receives each effect in the agent's thread.

    Args:
        spec: what to run.
        handler: the rendezvous. The agent closes it at the end of the run.
        workers: runs the workers. The agent closes it at the end of the run.
        job: the settings of the job, for a handler that does not count restarts for the whole job.
            A handler that has settings of its own needs none here.
        options: which signals the agent handles, how long workers may save, and when they hang.
        check_node: called before this node first joins, and before it rejoins after its own workers
            failed. If the node does not pass, it takes part in no further generation.
        snapshot_service: stores the workers' snapshots over all generations, such as
            `NodeSnapshotService`. Without it, workers restore from their own node's memory only,
            and no snapshot is written to the disk if the job ends early.
        journal: receives every event. A journal that raises is disabled.
        clock: the time source.

    Raises:
        ConfigError: the settings contradict each other, or those of the handler. Creating a
            subclass with a hook of torch's agent raises it, too.
    """

    def __init_subclass__(cls) -> None:
        """Reject a subclass with methods that only torch's agent calls."""
        super().__init_subclass__()
        unused = ", ".join(name for name in TORCH_HOOKS if name in vars(cls))
        if unused:
            raise ConfigError(
                f"{cls.__name__} defines {unused}, which only torch's agent calls: override "
                "`execute`, or give the agent a subclass of `elasticlib.Workers`"
            )

    def __init__(
        self,
        spec: WorkerSpec,
        handler: RendezvousHandler,
        workers: Workers,
        *,
        job: RendezvousSettings | None = None,
        options: AgentOptions | None = None,
        check_node: CheckNode | None = None,
        snapshot_service: SnapshotService | None = None,
        journal: Journal | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._options, self._check_node = options or AgentOptions(), check_node
        if self._options.hang is not None and not workers.reports_progress:
            raise ConfigError(
                f"hang (--hang-timeout) needs workers that report their steps, and "
                f"{type(workers).__name__} does not support it: leave it out"
            )
        self.workers = workers
        # The handler is kept, because one that is garbage-collected leaves the job.
        self._spec, self._handler, self._clock = spec, handler, clock
        self._membership = _membership_of(handler, spec, job, self._options.monitor_interval)
        # Counts and keeps signals from now on. The loop reads them once `run` was called.
        self.signals = SignalInbox()
        give_up = partial(self.signals.reason_to_give_up, FINAL_WRITE, log.warning)
        self._snapshots = Snapshots(snapshot_service, self._membership, give_up)
        host, shutdown_timeout_s = socket.gethostname(), self._options.shutdown_timeout_s
        self._limits = Limits(
            spec.local_world_size,
            checkpoint_grace=self._options.checkpoint_grace,
            regroup_grace=self._options.regroup_grace,
            shutdown_timeout=shutdown_timeout_s,
            kill_timeout=self._options.kill_timeout,
            checks_node=check_node is not None,
            can_offer_slots=self._membership.takes_slots,
            hang=self._options.hang,
            host=host,
        )
        self._observer = RunObserver(host, journal, clock, shutdown_timeout_s)
        # Events of any thread, in their order. `put` may also be called by a signal handler.
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._state = MachineState()
        self._on_turn: OnTurn = lambda *_: None
        self._has_run = False
        self._turned_at = clock()  # when the loop last made progress
        self._viewed_at = float("-inf")  # when the workers were last looked at
        self._workers_ready, self._unfit = Latch(), ""
        self._check_end: Latch | None = None  # set once the last check of this node has ended
        self._group: WorkerGroup | None = None
        self._finish: Finish | None = None  # the last one
        self.signals.forward_to(self._on_signal)

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
        self.post(Requested(Action.DRAIN, source, reason, deadline))

    def request_stop(self, source: str) -> None:
        """Make the workers save and the job end, for all its nodes. Thread-safe.

        The other nodes stop their workers at the same step, and form no further generation. With a
        handler that does not support this, only this node leaves.

        Args:
            source: what requests it, for logs and events.
        """
        self.post(Requested(Action.STOP, source))

    def request_restart(self, source: str, generation: int) -> None:
        """Make all workers of the job save and restart. Thread-safe.

        No restart is charged to the budget. Nothing happens if this node's workers do not run in
        that generation, and only a warning is logged if the handler does not support it.

        Args:
            source: what requests it, for logs and events.
            generation: the number of the generation whose workers are restarted.
        """
        self.post(Requested(Action.RESTART, source, generation=generation))

    def fail(self, reason: str) -> None:
        """Make this node stop its workers and fail, because it cannot continue. Thread-safe.

        Args:
            reason: why, as one sentence; it becomes the reason of the result.
        """
        self.post(ComponentFailed(reason))

    def stalled_s(self) -> float:
        """Return the seconds since the last progress of the loop; 0 after the run. Thread-safe."""
        is_over = self._state.phase is Phase.ENDED
        return 0.0 if is_over else max(0.0, self._clock() - self._turned_at)

    @property
    def state(self) -> Phase:
        """What the agent is doing. Thread-safe."""
        return self._state.phase

    @property
    def is_leaving(self) -> bool:
        """Whether this node's run ends. Thread-safe."""
        return self._state.outcome is not None

    def view(self) -> Mapping[int, WorkerView]:
        """Return what was last seen of the running workers, by local rank. Thread-safe."""
        return self._state.view

    def dump_stacks(
        self, local_ranks: Collection[int], on_done: Callable[[Mapping[int, str]], None]
    ) -> None:
        """Make workers write their Python stacks. Thread-safe; does not wait.

        Args:
            local_ranks: the workers.
            on_done: receives the stacks by local rank, in any thread. Workers that do not write
                one in time are left out.
        """
        self.workers.dump_stacks(local_ranks, on_done)

    def observe_turns(self, on_turn: OnTurn) -> None:
        """Call a function after each event that the machine has handled, in the agent's thread.

        Args:
            on_turn: receives the event, the state before and after it, and the effects, which are
                not executed yet. It must neither block nor raise.
        """
        self._on_turn = on_turn

    def get_worker_group(self) -> WorkerGroup | None:
        """Return the workers of the current generation, or None before the first generation."""
        return self._group

    def post(self, event: Event) -> None:
        """Let the loop handle an event. Thread-safe."""
        self._inbox.put(event)

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
        with self.signals.captured(self._options.handled_signals):
            try:
                self._begin()
                while self._state.phase is not Phase.ENDED:
                    self._turn()
            except Exception as error:
                log.exception("the agent's loop failed: this node stops its workers and fails")
                outcome = RunOutcome(WorkerState.FAILED, format_error(error))
                self._state = MachineState(Phase.ENDED, outcome=outcome)
            finally:
                self._close()
        return self._observer.finish(self._state)

    def _begin(self) -> None:
        self._turned_at = self._clock()
        self._observer.on_run_started()
        self._membership.open(self.post, lambda: self._turned_at)
        self.workers.prepare(self._spec, self._on_workers_ready, partial(self._inbox.put, None))
        self._state, effects = begin(self._limits)
        self._execute_all(effects)

    def _turn(self) -> None:
        """Wait for something to happen, and react to it."""
        self._turned_at = now = self._clock()
        due = min(due_at(self._state), self._observer.due_at, self._viewed_at + VIEW_INTERVAL_S)
        # Python runs signal handlers only after the main thread returns from a wait.
        timeout = min(SIGNAL_POLL_INTERVAL_S, max(0.0, due - now))
        try:
            event = self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
        except queue.Empty:
            if self._clock() < due:
                return
            event = None
        self._look_at_workers()
        if event is not None:
            self._handle(event)
        if self._clock() >= due_at(self._state):
            self._handle(Tick())

    def _look_at_workers(self) -> None:
        self._viewed_at = self._clock()
        if self._state.alive:
            view = self.workers.view()
            if view != self._state.view:
                self._handle(WorkersSeen(view))
        self._observer.report_steps()
        self._observer.report_ending_workers(self._state)

    def _handle(self, event: Event) -> None:
        before, now = self._state, self._clock()
        self._state, effects = handle(before, event, now, self._limits)
        self._observer.observe(event, before, self._state, effects)
        self._on_turn(event, before, self._state, effects)
        self._execute_all(effects)

    def _execute_all(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            try:
                self.execute(effect)
            except Exception as error:
                log.exception("this node cannot continue")
                reason = format_error(error)
                is_end = isinstance(effect, Finish)
                self.post(Finished(reason) if is_end else ComponentFailed(reason))

    def _on_signal(self, number: int) -> None:
        options = self._options
        if number == signal.SIGINT:
            meaning = Meaning.INTERRUPT
        elif number in options.drain_signals:
            meaning = Meaning.DRAIN
        else:
            is_notice = number in options.notice_signals
            meaning = Meaning.DRAIN_IF_NOTICED if is_notice else Meaning.END
        interrupts = self.signals.num_interrupts
        self.post(SignalReceived(number, signal_name(number), meaning, interrupts))

    # -- effects ------------------------------------------------------------------------------

    def execute(self, effect: Effect) -> None:
        """Execute an effect, in the agent's thread. A subclass may override this.

        An exception ends the run of this node, after its workers have been stopped.
        """
        match effect:
            case Prepare(check):
                self._check_end = Latch() if check else None
                daemon_thread(partial(self._prepare, check), "agent-prepare", self.fail).start()
            case Join(attempt):
                self._snapshots.stopped()
                self._membership.join(attempt)
            case Report():
                self._membership.report(effect)
            case Publish():
                self._membership.publish(effect)
            case StartWorkers():
                self._request_start(effect)
            case Notify(notice, call):
                self.workers.notify(notice, call)
            case StopWorkers(local_ranks, how):
                self.workers.stop(local_ranks, how)
            case DumpStacks():
                on_done = partial(self._on_stacks, self._state.attempt)
                self.workers.dump_stacks(tuple(self._state.alive), on_done, save=True)
            case Finish():
                self._finish_run(effect)

    def _prepare(self, check: bool) -> None:
        """Check this node, and wait until it can start workers without delay; in a thread.

        The other nodes must not stop their workers for a node that cannot start its own at once.
        """
        unfit = self._run_check() if check else ""
        peers_train = takes_notices = False
        if not unfit and not self._state.is_prepared:
            peers_train, takes_notices = self._membership.prepare()
            self._workers_ready.wait()
            if self._unfit:
                self.fail(self._unfit)
                return
        self.post(NodeReady(unfit, peers_train, takes_notices))

    def _run_check(self) -> str:
        """Check this node, but no longer than the run. Return why it is unfit, or an empty text."""
        check_node, check_end = self._check_node, self._check_end
        if check_node is None or check_end is None:
            return ""
        started_at = self._clock()
        try:
            reason = check_node(lambda: self._state.outcome is not None)
        except Exception as error:
            log.exception("the check of this node failed")
            reason = f"the check of this node failed: {format_error(error)}"
        finally:
            check_end.set()
        if not reason:
            log.info("the check of this node passed in %.2f s", self._clock() - started_at)
        return reason

    def _on_workers_ready(self, unfit: str) -> None:
        self._unfit = unfit
        self._workers_ready.set()

    def _on_stacks(self, attempt: int, stacks: Mapping[int, str]) -> None:
        self.post(StacksCollected(attempt, stacks))

    def _request_start(self, effect: StartWorkers) -> None:
        group = self._make_group(effect)
        if group.workers:
            self._group = group
            generation = require_not_none(self._state.generation, "the generation")
            self._snapshots.start(generation, group)
        self._observer.on_start(group)
        started = [n for n, one in self._state.alive.items() if one.start == effect.start]
        exited: set[int] = set()

        def on_exit(exit_: WorkerExit, unfit: str = "") -> None:
            exited.add(exit_.local_rank)
            self.post(WorkerExited(effect.start, exit_, unfit))

        try:
            self.workers.start(group, on_exit)
        except Exception as error:
            may_work_again = isinstance(error, ElasticError) and not isinstance(error, ConfigError)
            unfit = "" if may_work_again else str(error) or format_error(error)
            for local in started:
                if local not in exited:
                    rank = group.worker(local).rank
                    failed = WorkerExit(local, rank, 0, 1, reason=str(error))
                    on_exit(failed, unfit)

    def _make_group(self, effect: StartWorkers) -> WorkerGroup:
        info = self._state.generation
        if info is None:
            run_id = self._membership.run_id
            return make_standby_group(self._spec, effect.standby, run_id, effect.start)
        return WorkerGroup(
            self._spec,
            info,
            assign_worker_ranks(info.assignment, effect.members),
            make_standby_workers(info.assignment, effect.standby),
            effect.start,
        )

    def _finish_run(self, effect: Finish) -> None:
        is_first, self._finish = self._finish is None, effect
        uploads_done = Latch()
        if not is_first:
            # The snapshots read the number of signals themselves.
            self.workers.finish(effect.uploads_until, lambda: None)
            return

        def on_saved(problem: str, step: int | None) -> None:
            while not uploads_done.wait(UPLOADS_POLL_S):
                # The machine gives the wait up. This only announces what each SIGINT does.
                self.signals.reason_to_give_up(UPLOADS, log.warning)
            self.post(Finished(problem, step))

        self.workers.finish(effect.uploads_until, uploads_done.set)
        outcome, info = self._state.outcome, self._state.generation
        is_last = info is not None and info.world_size == 1
        if is_last or (outcome is not None and outcome.ends_job):
            self._snapshots.job_ended()
        self._snapshots.finish(effect, on_saved)

    # -- the end of the run -------------------------------------------------------------------

    def _close(self) -> None:
        """Close every part of the agent, even if another part fails to close."""
        # Nodes that continue may need the snapshots, so they are written before this node leaves.
        steps: tuple[Callable[[], object], ...] = (
            self._workers_ready.set,  # ends the thread that prepares, if it still waits
            self._wait_for_check_end,
            self.workers.close,
            self._snapshots.close,
            self._membership.close,
        )
        for close in steps:
            try:
                self._turned_at = self._clock()
                close()
            except Exception:
                log.exception("a part of the agent could not be closed; the other parts are closed")

    def _wait_for_check_end(self) -> None:
        if self._check_end is not None and not self._check_end.wait(CHECK_END_TIMEOUT_S):
            log.warning("the check of this node did not end within %g s", CHECK_END_TIMEOUT_S)


def _membership_of(
    handler: RendezvousHandler,
    spec: WorkerSpec,
    job: RendezvousSettings | None,
    monitor_interval: float,
) -> Membership:
    """Return the membership of a handler: its own, or threads round its blocking methods."""
    of_handler = getattr(handler, "membership", None)
    if of_handler is not None:
        found: Membership | None
        found = of_handler(slots=spec.local_world_size, job=job)
        if found is not None:
            return found
    return BlockingMembership(handler, job, monitor_interval)
