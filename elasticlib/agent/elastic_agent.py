"""The agent: one inbox of events, one loop that owns every machine, and what is done for them.

Everything that happens comes into the inbox as an event, from whatever thread. The loop asks the
policy what is done about it, and between two events has the stopping ladder, the agreement where
to stop and the watch for hangs look at the time; all of these are pure. Nothing else starts, stops
or reports.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import attrs

from ..clock import Clock, monotonic
from ..errors import ConfigError, ElasticError, RendezvousClosedError, describe, present
from ..observe.journal import Journal
from ..rendezvous.interface import RendezvousHandler, RendezvousInfo, check_restart_budget
from ..rendezvous.membership import Change, ChangeKind
from ..signals import signal_name
from ..threads import helper
from ..workers.exits import WorkerExit
from ..workers.interface import StopNotice, Workers
from ..workers.spec import (
    StopTimeouts,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    assign_worker_ranks,
    make_standby_group,
    make_standby_workers,
)
from . import hang_detector as hang
from . import policy
from .blocking_rendezvous import BlockingHandlerThread
from .interface import RootCause, RunResult, SnapshotService
from .options import SIGNAL_POLL_INTERVAL_S, AgentOptions, SignalObserver
from .peer_exchange import PeerExchange, PeerMessages
from .policy import AgentCommand, AgentEvent, AgentState, RunOutcome, SupervisorState
from .run_reporter import (
    CAUSE,
    RunReporter,
    merge_root_cause,
    publish_failed_ranks,
    publish_root_cause,
    summary,
)
from .slot_reporter import SlotReporter
from .stop_procedure import OVER, STOP, STOP_AT_ANY_CALL, StopProcedure, propose_stop

log = logging.getLogger("elasticlib.agent")

WORKER_START_TIMEOUT_S = 120.0
"""That the start of many workers may take, in which the loop does not turn."""
SNAPSHOT_FLUSH_TIMEOUT_S = 660.0
"""That a memory may take at the end to put what it holds where it lasts."""
ROOT_CAUSE_TIMEOUT_S = 3.0
"""For the other nodes' word on why the job failed, which is on its way when it has."""
STOP_POLL_INTERVAL_S = 5e-4
"""Between two looks at workers that are in a step, and are to say where they can stop."""
LEAVE_POLL_INTERVAL_S = 1e-3
"""Between two looks at workers that are to leave their group, and say so in memory alone."""
STANDBY_POLL_INTERVAL_S = 0.02
"""Between two looks whether newcomers are ready."""


# What comes into the inbox, beside what the rendezvous says and what the board has gathered.


@attrs.frozen
class PrepareFinished:
    """A start of workers will not have to wait; others_keep: the job has some that are kept."""

    others_keep: bool = False


@attrs.frozen
class WorkerExitNotice:
    local_rank: int


@attrs.frozen
class StacksDumped:
    """The workers have written their stacks."""

    stacks: Mapping[int, str]


@attrs.frozen
class SignalNotice:
    number: int


AttemptMessage = RendezvousInfo | Change | Exception | WorkerExitNotice | StacksDumped
"""News of one attempt of this node at a generation, and of no other; an exit is of one start of
workers."""
InboxMessage = (
    AttemptMessage | PrepareFinished | SignalNotice | PeerMessages | policy.ComponentFailed
)


class ElasticAgent:
    """Supervises the workers of one node.

    What starts, observes and stops them is an object of a class of `Workers`: `LocalWorkers` runs
    processes of this machine; your own may run them elsewhere. Where it is not said otherwise its
    methods are called by the thread that `run` was called in, one at a time, and nothing else
    happens meanwhile: signals and changes of membership wait. So none of them waits for a worker to
    end. A `ConfigError` from `start` ends the run of this node, because a restart would fail in
    the same way. Another `ElasticError` from `start`, as `WorkerStartError` is, is a failure that
    is charged, and is tried again; one from `prepare`, or an `OSError`, is passed over, as `start`
    will meet it. Whatever else one of them raises ends the run. `elasticlib.testing.AgentContract`
    tests all that is promised here.

    Args:
        spec: what to run.
        handler: the rendezvous; shut down when the run is over.
        workers: runs the workers; closed when the run is over.
        max_restarts: how many restarts this agent allows after failures, if the handler does not
            count restarts for the whole job. The default is 0, or the handler's own number. A
            number that contradicts the handler's is a `ConfigError`.
        ladder: how workers are stopped, on every path.
        interval: seconds between polls of a handler that cannot report changes.
        options: which signals it heeds, and how long workers may save.
        memory: what is kept for the workers over all generations, such as a
            `NodeSnapshotService`. If it is left out, workers still restore from their own node's
            memory, but no other node keeps their snapshots, and none is written to the disk when
            the job ends early.
        journal: is told what happens, and how the workers' steps go on; nobody, if left out. One
            that raises is told no more.
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
        self.workers = workers
        self._spec = spec
        self._handler = handler
        self._snapshot_service = snapshot_service
        if max_restarts is not None and max_restarts < 0:
            raise ConfigError(f"max_restarts must be at least 0, got {max_restarts}")
        handler.check_agent(slots=spec.local_world_size, max_restarts=max_restarts)
        self._max_restarts = max_restarts
        self._options = options or AgentOptions()
        self._stop_timeouts = stop_timeouts or StopTimeouts()
        self._clock = clock
        self._inbox: queue.SimpleQueue[tuple[int | None, InboxMessage]] = queue.SimpleQueue()
        self._host = socket.gethostname()
        self._report = RunReporter(self._host, workers, journal, clock)
        self._slots = SlotReporter(handler, workers, spec.local_world_size)
        self._board = PeerExchange(self._tell, self._broke, clock)
        self._waiter = BlockingHandlerThread(handler, monitor_interval, self._tell_of, self._broke)
        self._turned_at = clock()
        # What the loop owns.
        self._now = SupervisorState()
        self._stopping: StopProcedure | None = None
        self._watch: hang.HangDetector | None = None
        self._attempt = self._started = self._own_restarts = 0
        self._has_run = False
        self._started_in: dict[int, int] = {}
        """The start of workers in which each of them was begun, by its local rank."""
        self._prepared = self._notified = self._said_unseen = self._told_to_end = False
        self._info: RendezvousInfo | None = None
        self._group: WorkerGroup | None = None
        if self._options.hang_limits is not None and not workers.reports_heartbeats:
            raise ConfigError(
                f"hang (--hang-timeout) needs workers that report their steps, and "
                f"{type(workers).__name__} has none of them: leave it out"
            )

    # -- for any thread -----------------------------------------------------------------------

    def handle_signal(self, number: int) -> None:
        """Act as if this signal had arrived: one of those that `options` name.

        For a program that runs its agent in another thread than its main one, which receives no
        signals.
        """
        self._tell(SignalNotice(number))

    def _tell(self, news: InboxMessage) -> None:
        self._inbox.put((None, news))

    def _tell_of(self, attempt: int, news: AttemptMessage) -> None:
        self._inbox.put((attempt, news))

    def _broke(self, reason: str) -> None:
        self._tell(policy.ComponentFailed(reason))

    def stalled_s(self) -> float:
        """Seconds for which the agent's loop has not turned; 0 when it has done its work."""
        over = self._now.state is AgentState.ENDED
        return 0.0 if over else max(0.0, self._clock() - self._turned_at)

    def get_worker_group(self) -> WorkerGroup | None:
        """The group of the generation that this node holds, or None before the first."""
        return self._group

    # -- the run ------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Take part in the job until it is over for this node. A failure of the job is in the
        result, and does not raise.

        An agent runs once, because it closes its handler and its workers at the end.

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
        self._report.on_run_started()
        with SignalObserver(self._options.handled_signals, self.handle_signal):
            try:
                self._mark_progress()
                # What cannot work is said by the start, to which it belongs.
                with contextlib.suppress(ElasticError, OSError):
                    self.workers.prepare(self._spec)
                self._carry_out([policy.StartRendezvous()])
                while self._now.state is not AgentState.ENDED:
                    self._turn()
                cause = self._find_cause()
            except Exception as error:
                # A bug of ours, or a promise broken by a part: still an end with a reason.
                log.exception("the agent's loop failed")
                outcome = RunOutcome(WorkerState.FAILED, describe(error))
                self._now = SupervisorState(AgentState.ENDED, outcome=outcome)
            finally:
                self._clean_up()
        unexpected = RunOutcome(WorkerState.FAILED, "the agent ended unexpectedly")
        return self._report.finish(self._now.outcome or unexpected, cause)

    def start(self, group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
        """Start the workers of a generation; called in a turn of the loop, as `collect` is. A
        subclass may look on at both."""
        self.workers.start(group, on_exit)

    def reap(self, local_rank: int) -> WorkerExit:
        """How a worker of the group ended."""
        return self.workers.reap(local_rank)

    def _mark_progress(self, allowance_s: float = 0.0) -> None:
        """Record that the loop makes progress; the next operation may take `allowance_s` longer."""
        self._turned_at = self._clock()
        self._handler.mark_progress(allowance_s)

    def _clean_up(self) -> None:
        """Each part is closed, whatever became of the one before."""
        closing = (self._board.close, self.workers.kill_and_wait, self._keep, self.workers.close)
        for close in (*closing, self._handler.shutdown, self._waiter.stop):
            try:
                self._mark_progress(SNAPSHOT_FLUSH_TIMEOUT_S if close == self._keep else 0.0)
                close()
            except Exception:
                # How the run ended is known by now, and must still be told.
                log.exception("clearing up after the run failed")

    def _keep(self) -> None:
        """Before the rendezvous is left: who goes on may need what is put where it lasts."""
        outcome = self._now.outcome
        done = outcome is not None and outcome.state is WorkerState.SUCCEEDED
        if self._snapshot_service is None:
            return
        self._told_to_end = bool(outcome and outcome.signal) or bool(self._signals())
        self._report.unsaved_reason = self._snapshot_service.close(
            flush=not done, cancel_reason=self._given_up
        )
        self._report.saved_step = self._snapshot_service.saved_step
        if self._report.unsaved_reason:
            log.warning("%s", self._report.unsaved_reason)

    def _given_up(self) -> str:
        """Return why the final write must end now: a signal has come that told the agent to end,
        and an earlier one had done so before."""
        signals = self._signals()
        if not signals:
            return ""
        name = signal_name(signals[-1])
        if self._told_to_end:
            return f"the agent received {name} again during the final write"
        self._told_to_end = True
        log.warning("received %s during the final write of snapshots: a second one ends it", name)
        return ""

    def _signals(self) -> list[int]:
        """Return the signals that have arrived since the last look and tell the agent to end."""
        numbers = []
        with contextlib.suppress(queue.Empty):
            while True:
                _, news = self._inbox.get_nowait()
                if isinstance(news, SignalNotice) and news.number in self._options.stop_signals:
                    numbers.append(news.number)
        return numbers

    def _find_cause(self) -> RootCause | None:
        """Why the job failed, over all nodes, as far as it can be had in time."""
        outcome, info, own = self._now.outcome, self._info, self._report.local_root_cause()
        if outcome is None or outcome.state is not WorkerState.FAILED or info is None:
            return None
        failed = self._report.failed_ranks
        if not self._board.prefix or not (failed or self._report.failed_on_other_node):
            return own
        if failed:
            self._board.submit(publish_failed_ranks(info.rank, failed))
        self._board.submit(policy.Subscribe(CAUSE))
        deadline = self._clock() + ROOT_CAUSE_TIMEOUT_S
        self._mark_progress(ROOT_CAUSE_TIMEOUT_S)
        with contextlib.suppress(queue.Empty):
            while True:
                _, news = self._inbox.get(timeout=max(0.0, deadline - self._clock()))
                if isinstance(news, PeerMessages) and news.topic == CAUSE:
                    cause = None if news.messages is None else merge_root_cause(news.messages)
                    if cause is not None or news.messages is None:
                        return cause or own
        log.info(
            "the store did not answer within %g s whether another node knows the cause",
            ROOT_CAUSE_TIMEOUT_S,
        )
        return own

    # -- the loop -----------------------------------------------------------------------------

    def _turn(self) -> None:
        self._mark_progress()
        self._look()
        if self._now.state is AgentState.ENDED:
            return
        try:
            attempt, news = self._inbox.get(timeout=self._pause())
        except queue.Empty:
            return
        current = self._attempt
        if isinstance(news, WorkerExitNotice):
            current = self._started_in.get(news.local_rank, self._started - 1)
        event = self._read(news) if attempt in (None, current) else None
        if event is not None:
            self._react(event)

    def _pause(self) -> float:
        """Seconds until something is due without an event."""
        now, due = self._clock(), SIGNAL_POLL_INTERVAL_S
        if self._stopping is not None:
            due = (
                STOP_POLL_INTERVAL_S
                if self._stopping.needs_proposal
                else self._stopping.time_to_next_stage(now)
            )
            due = min(due, LEAVE_POLL_INTERVAL_S) if self._stopping.regroup_grace_s else due
        elif self._now.standby_ranks and not all(self.workers.standby_ranks().values()):
            due = STANDBY_POLL_INTERVAL_S
        elif self._watch is not None and self._watch.suspect is None:
            due = max(0.0, self._watch.next_poll_at - now)
        return min(SIGNAL_POLL_INTERVAL_S, due)

    def _look(self) -> None:
        """Have the machine that is at work look at the time, and at the workers."""
        commands: Iterable[AgentCommand] = ()
        stopping, watch, now = self._stopping, self._watch, self._clock()
        if stopping is not None:
            call = self.workers.earliest_stop_call() if stopping.needs_proposal else None
            breaks: tuple[AgentCommand, ...] = ()
            if not stopping.regroup_grace_s and stopping.is_in_notice:
                # Workers that were still starting when they were asked can leave their group now.
                stopping, breaks = stopping.allow_regroup(self._regroup_grace())
            if (
                stopping.regroup_grace_s
                and stopping.is_in_notice
                and self.workers.has_group_failure()
            ):
                stopping, breaks = stopping.shorten_notice(now, None)
            running = [name for _, name in sorted(self._at_work().items())]
            self._stopping, commands = stopping.poll(self._clock(), running, call)
            commands = (*breaks, *commands)
        elif watch is not None and (watch.suspect is not None or now >= watch.next_poll_at):
            beats = self.workers.heartbeats()
            members = {local: beats[local] for local in watch.ranks if local in beats}
            self._watch, commands = watch.poll(now, members)
            if not self._said_unseen and (unseen := watch.no_steps_warning(now, members)):
                self._said_unseen = True
                log.warning("%s", unseen)
        self._carry_out(commands)
        if self._now.state is AgentState.JOINING:
            self._waiter.remind(now, self._report.reason)
        self._report_slots()
        self._report.report_steps()

    def _at_work(self) -> Mapping[int, str]:
        """The workers that have not stopped: where they are kept, those in a group."""
        running = self.workers.running()
        if self._stopping is not None and self._stopping.regroup_grace_s:
            spare = self.workers.standby_ranks()
            return {local: name for local, name in running.items() if local not in spare}
        return running

    def _react(self, event: AgentEvent) -> None:
        before = self._now.state
        self._now, commands = policy.transition(self._now, event)
        if self._now.state is not before:
            if before in (AgentState.RUNNING, AgentState.FINISHED):
                self._report.on_workers_idle(event)
            if self._watch is not None and not isinstance(event, policy.HangDetected):
                # Another node may have found the same hang first.
                self._report.log_stacks(self._watch.stack_report())
            self._watch = None
            log.debug("%s -> %s: %s", before.value, self._now.state.value, summary(event))
        self._carry_out(commands)

    # -- what has come into the inbox -----------------------------------------------------------

    def _read(self, news: InboxMessage) -> AgentEvent | None:
        """What it means to the policy, if anything."""
        match news:
            case PrepareFinished(others_keep):
                self._prepared = True
                self._report.on_prepared()
                self._slots.set_peers_can_regroup(others_keep=others_keep)
                if self._now.state is AgentState.JOINING:
                    self._join()
            case RendezvousInfo():
                return self._settle(news)
            case Change():
                self._report.on_change(news)
                return policy.MembershipChanged(news, self._slots.can_regroup())
            case Exception():
                return self._fell_through(news)
            case WorkerExitNotice(local_rank):
                return self._collect(local_rank)
            case SignalNotice(number):
                return self._heed(number)
            case PeerMessages(board) if board == self._board.prefix:
                if news.topic == STOP and self._stopping is not None:
                    self._stopping = self._stopping.on_proposals(news.messages)
                if news.topic == OVER and self._stopping is not None:
                    self._stopping, commands = self._stopping.on_group_broken(
                        self._clock(), news.messages or {}
                    )
                    self._carry_out(commands)
                if news.topic == hang.HANG and self._watch is not None:
                    self._watch = self._watch.on_peer_reports(news.messages or {})
            case StacksDumped(dumped) if self._watch is not None:
                ranks = self._watch.ranks
                stacks = {local: text for local, text in dumped.items() if local in ranks}
                self._watch, commands = self._watch.on_stacks(self._clock(), stacks)
                self._carry_out(commands)
            case policy.ComponentFailed():
                return news
        return None

    def _fell_through(self, error: Exception) -> AgentEvent:
        """The rendezvous has no generation for this node, or says so no more of the one it has."""
        if self._now.state is not AgentState.JOINING:
            return policy.MembershipChanged(
                Change(ChangeKind.STORE_LOST, describe(error)), self._slots.can_regroup()
            )
        change = getattr(error, "change", None)
        if isinstance(error, RendezvousClosedError) and isinstance(change, Change):
            self._report.on_change(change)
            return policy.RendezvousEnded(policy.end_of_job(change))
        self._report.lost_node_not_replaced = getattr(error, "lost", False)
        reason = describe(error)
        if self._info is not None and not self._report.lost_node_not_replaced:
            # Otherwise only a timeout would be reported, and not the failure that led to it.
            why = self._report.reason
            reason = f"{why}; then this node could not join another generation: {reason}"
        return policy.RendezvousEnded(RunOutcome(WorkerState.FAILED, reason))

    def _settle(self, info: RendezvousInfo) -> AgentEvent:
        check_restart_budget(self._max_restarts, info.max_restarts)
        self._info = info
        members = self._slots.members(info.assignment)
        return policy.GenerationFormed(
            members, frozenset(range(self._spec.local_world_size)) - members
        )

    def _collect(self, local_rank: int) -> AgentEvent | None:
        if local_rank not in self.workers.running():
            return None
        spare = local_rank in self.workers.standby_ranks()
        if local_rank in self.workers.regroupable_ranks():
            self._slots.report_can_regroup()
        exit_ = self.reap(local_rank)
        stopping = self._stopping
        unsaved = not (stopping is None or not stopping.is_in_notice or exit_.succeeded or spare)
        if unsaved:
            log.warning("failed after it was asked to save and end: %s", exit_.describe())
        cause = self._report.on_worker_exited(
            exit_, supervised=self._now.state is AgentState.RUNNING
        )
        if cause is not None:
            self._board.submit(publish_root_cause(cause))
        alone = (
            unsaved
            and stopping is not None
            and (stopping.is_negotiating or stopping.regroup_grace_s > 0)
        )
        return policy.WorkerExited(exit_, unsaved, alone, self._slots.can_regroup())

    def _heed(self, number: int) -> AgentEvent:
        options, name = self._options, signal_name(number)
        why = options.drain_reason(number)
        if number in options.drain_signals or (
            number in options.notice_signals and self._listens(why)
        ):
            self._report.on_drain(name, why)
            return policy.DrainRequested(number, name, why)
        return policy.SignalReceived(number, name)

    def _listens(self, why: str) -> bool:
        """Whether the workers have been told to save, or can be, which is found by telling them."""
        if self._now.state is AgentState.RUNNING:
            return self._notify(self._options.make_notice(why))
        if self._now.state is AgentState.STOPPING:
            return self._notified
        # Schedulers repeat themselves, and what is being saved is not to be cut short for it.
        outcome = self._now.outcome
        return outcome is not None and outcome.state is WorkerState.DRAINED

    # -- what the machines want done ----------------------------------------------------------

    def _carry_out(self, commands: Iterable[AgentCommand]) -> None:
        for command in commands:
            self._mark_progress()
            _ACTS[type(command)](self, command)

    def _seek(self) -> None:
        self._attempt += 1
        self._report.on_rendezvous_started()
        if self._snapshot_service is not None:
            self._snapshot_service.on_workers_stopped()
        self._join()

    def _join(self) -> None:
        """Ask for the next generation once all that takes its time is prepared: the other nodes do
        not stop their workers for a node that cannot start its own at once. Where theirs are kept,
        they need not even wait for that start."""
        hears = partial(self._tell_of, self._attempt)
        if not self._prepared:
            helper(partial(self._await_prepared, hears), "agent-prepare", self._broke).start()
            return
        if self._slots.should_prestart(self._info):
            everyone = range(self._spec.local_world_size)
            self._react(policy.PeersStillTraining(frozenset(everyone)))
        self._report_slots()
        if not self._handler.start_join(hears):
            self._waiter.join(self._attempt, self._clock())

    def _report_slots(self) -> None:
        self._slots.update(self._now, len(self._group.workers) if self._group else 0)

    def _await_prepared(self, failed: Callable[[Exception], None]) -> None:
        try:
            self._handler.prepare()
            self.workers.wait_until_prepared()
            others_keep = self._handler.peers_can_regroup()
        except Exception as error:
            failed(error)
        else:
            self._tell(PrepareFinished(others_keep))

    def _start_ahead(self) -> None:
        everyone = range(self._spec.local_world_size)
        group = make_standby_group(self._spec, everyone, self._handler.get_run_id(), self._started)
        self._report.on_prestart(group)
        failed = self._begin(group)
        if failed is not None:
            self._react(failed)

    def _begin(
        self, group: WorkerGroup
    ) -> policy.WorkerStartFailed | policy.ComponentFailed | None:
        """Start those workers of the group that do not run yet; return the failure, if any."""
        self._mark_progress(WORKER_START_TIMEOUT_S)
        self._started += 1
        number, kept = group.attempt, self.workers.running().keys()
        for worker in (*group.workers, *group.standby_workers):
            if worker.local_rank not in kept:
                self._started_in[worker.local_rank] = number
        try:
            self.start(
                group, lambda local_rank: self._tell_of(number, WorkerExitNotice(local_rank))
            )
        except ConfigError as error:
            # This node cannot run such workers at all, so a restart would fail in the same way.
            return policy.ComponentFailed(str(error))
        except ElasticError as error:
            return policy.WorkerStartFailed(str(error), self._slots.can_regroup())
        return None

    def _start(self) -> None:
        info = present(self._info, "the generation")
        self._mark_progress(WORKER_START_TIMEOUT_S)
        self._notified = False
        self._board.start_generation(info)
        group = self._group = self._group_of(info)
        self._report.on_workers_starting(info, group)
        if self._snapshot_service is not None:
            self._snapshot_service.on_workers_starting(info, group)
        failed = self._begin(group)
        self._report.on_workers_started(group, self.workers.running(), self._started_in)
        if failed is not None:
            self._board.submit(
                publish_root_cause(self._report.record_failure_without_exit(failed.reason))
            )
            self._react(failed)
        elif self._options.hang_limits is not None:
            self._watch = hang.HangDetector(
                self._options.hang_limits,
                self._host,
                {worker.local_rank: worker.rank for worker in group.workers},
                node_rank=info.rank,
                num_peers=info.world_size - 1 if self._board.prefix else 0,
                started_at=self._clock(),
            )

    def _group_of(self, info: RendezvousInfo) -> WorkerGroup:
        store = info.bootstrap_store_info
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
            # The job's budget if its rendezvous keeps one, else this agent's own.
            max_restarts=self._own_budget if info.max_restarts is None else info.max_restarts,
            use_agent_store=self._handler.use_agent_store,
            attempt=self._started,
            incarnation=info.incarnation,
        )

    @property
    def _own_budget(self) -> int:
        """The restarts that this agent allows if the rendezvous keeps no budget for the job."""
        return self._max_restarts or 0

    def _report_failure(self, failure: policy.ReportFailure) -> None:
        reason, budget = failure.reason, self._own_budget
        self._report.on_failure(failure)
        if self._handler.report_failure(reason, killed=failure.killed):
            return
        self._own_restarts += 1
        if self._own_restarts > budget:
            self._fail_job(f"{reason} ({budget} of {budget} restarts used)")

    def _fail_job(self, reason: str) -> None:
        """End the job, whose rendezvous leaves it to each agent to count restarts."""
        try:
            # The other nodes would wait for this one until their join timeout.
            self._handler.set_closed()
        except Exception as error:
            log.warning("cannot end the job for the other nodes: %s", describe(error))
        self._react(policy.MembershipChanged(Change(ChangeKind.FAILED, reason)))

    def _report_success(self) -> None:
        info = present(self._info, "the generation")
        self._board.submit(propose_stop(info.rank, STOP_AT_ANY_CALL))
        if not self._handler.report_success():
            if info.world_size > 1:
                log.info(
                    "%s has no report_success: this node leaves without waiting for the other "
                    "nodes; workers that fail there from now on are restarted without it, or "
                    "not at all",
                    type(self._handler).__name__,
                )
            self._react(policy.MembershipChanged(Change(ChangeKind.SUCCEEDED, "this node is done")))

    def _begin_stop(self, command: policy.StopWorkers | policy.Regroup) -> None:
        notice = None if isinstance(command, policy.Regroup) else self._notice(command.notice)
        self._report.on_stop_started(notice)
        keep = self._regroup_grace()
        info = self._info  # None where they were started before the first generation
        stopping = StopProcedure(
            self._stop_timeouts,
            node_rank=0 if info is None else info.rank,
            num_nodes=1 if info is None else info.world_size,
            is_peer_reachable=bool(self._board.prefix),
            is_coordinated=self.workers.supports_coordinated_stop,
            regroup_grace_s=keep,
        )
        heard = self._notify(notice, keeps=keep > 0)
        if heard and not keep:
            self.workers.stop(self.workers.standby_ranks())
        if keep and not heard:
            # A member that is still starting has nothing to lose, and the others do not wait.
            self.workers.stop({*self._at_work()} - {*self.workers.regroupable_ranks()})
        self._stopping, commands = stopping.start(self._clock(), notice if heard else None)
        self._carry_out(commands)

    def _regroup_grace(self) -> float:
        """Return how long workers have to leave their group, or 0 if none can go on in another."""
        # The job may have ended since the stop began: a failure can be one too many.
        keeps = self._now.state is AgentState.STOPPING and self._slots.can_regroup()
        return self._options.regroup_grace if keeps else 0.0

    def _stop_sooner(self, command: policy.ShortenNotice) -> None:
        stopping, notice = present(self._stopping, "the stop"), self._notice(command.notice)
        self._stopping, commands = stopping.shorten_notice(self._clock(), notice)
        self._carry_out(commands)

    def _keep_none(self) -> None:
        if self._stopping is not None and self._stopping.regroup_grace_s:
            self.workers.stop(self.workers.standby_ranks())
            self._stopping = self._stopping.cancel_regroup(self._clock())

    def _hurry(self) -> None:
        self._stopping = present(self._stopping, "the stop").escalate(self._clock())

    def _notice(self, why: str) -> StopNotice | None:
        """What workers are told that are to save and end; None if they are not."""
        return self._options.make_notice(why) if why else None

    def _notify(self, notice: StopNotice | None, *, keeps: bool = False) -> bool:
        """Whether the workers listen, and now save and end by themselves."""
        if notice is None:
            return False
        if not self._notified and self.workers.notify(notice):
            self._notified = True
            to_do = "leave their group" if keeps else "save and end"
            log.info("%s: the workers have %g s to %s", notice.reason, notice.grace_s, to_do)
        return self._notified

    def _stop_at(self, command: policy.StopAtCall) -> None:
        if command.call is None:
            self.workers.notify(command.notice)
        else:
            self.workers.stop_at_call(command.call, command.notice)

    def _end_workers(self, command: policy.SignalWorkers) -> None:
        if command.log_message:
            log.warning("%s", command.log_message)
        self.workers.stop(self._at_work(), force=command.force)

    def _group_stopped(self, command: policy.WorkersStopped) -> None:
        self._stopping = None
        self._report.on_stop_finished(command)
        self._react(attrs.evolve(command, standby_ranks=frozenset(self.workers.standby_ranks())))

    def _dump_stacks(self) -> None:
        # It may take its time, and the loop turns meanwhile.
        attempt = self._attempt

        def dump() -> None:
            self._tell_of(
                attempt, StacksDumped(self.workers.dump_stacks(self.workers.running(), save=True))
            )

        helper(dump, "agent-stacks", self._broke).start()

    def _hung(self, command: policy.HangDetected) -> None:
        self._board.submit(publish_root_cause(self._report.on_hang(command)))
        self._react(attrs.evolve(command, can_regroup=self._slots.can_regroup()))


_ACTS: Mapping[type[AgentCommand], Callable[[ElasticAgent, Any], object]] = {
    policy.StartRendezvous: lambda agent, _: agent._seek(),
    policy.StartWorkers: lambda agent, _: agent._start(),
    policy.PrestartWorkers: lambda agent, _: agent._start_ahead(),
    policy.StopWorkers: ElasticAgent._begin_stop,
    policy.Regroup: ElasticAgent._begin_stop,
    policy.LeaveGroup: lambda agent, _: agent.workers.leave_group(),
    policy.CancelRegroup: lambda agent, _: agent._keep_none(),
    policy.ReportSlots: lambda agent, _: agent._report_slots(),
    policy.ShortenNotice: ElasticAgent._stop_sooner,
    policy.EscalateStop: lambda agent, _: agent._hurry(),
    policy.ReportFailure: ElasticAgent._report_failure,
    policy.ReportDrain: lambda agent, said: agent._handler.report_drain(said.reason),
    policy.ReportSuccess: lambda agent, _: agent._report_success(),
    policy.Publish: lambda agent, post: agent._board.submit(post),
    policy.Subscribe: lambda agent, gather: agent._board.submit(gather),
    policy.StopAtCall: ElasticAgent._stop_at,
    policy.SignalWorkers: ElasticAgent._end_workers,
    policy.WorkersStopped: ElasticAgent._group_stopped,
    hang.DumpStacks: lambda agent, _: agent._dump_stacks(),
    policy.HangDetected: ElasticAgent._hung,
}
"""What is done for each command of a machine."""
