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
from ..rendezvous.document import Change, ChangeKind
from ..rendezvous.interface import RendezvousHandler, RendezvousInfo, check_restart_budget
from ..signals import signal_name
from ..threads import helper
from ..workers.exit import WorkerExit
from ..workers.interface import Notice, Workers
from ..workers.spec import (
    StopTimeouts,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    assign_worker_ranks,
    make_standby_group,
    make_standby_workers,
)
from . import hang, policy
from .board import Board, Gathered
from .interface import Cause, Memory, RunResult
from .options import HEARD_SECONDS, AgentOptions, SignalObserver
from .policy import Command, Event, Outcome, State, Supervision
from .report import CAUSE, Report, first_cause, post_cause, post_failed, summary
from .slots import Slots
from .stopping import ANY_CALL, OVER, STOP, Stopping, post_need
from .waiter import Waiter

log = logging.getLogger("elasticlib.agent")

START_SECONDS = 120.0
"""That the start of many workers may take, in which the loop does not turn."""
KEEP_SECONDS = 660.0
"""That a memory may take at the end to put what it holds where it lasts."""
ANSWER_SECONDS = 3.0
"""For the other nodes' word on why the job failed, which is on its way when it has."""
ASK_SECONDS = 5e-4
"""Between two looks at workers that are in a step, and are to say where they can stop."""
LEAVING_SECONDS = 1e-3
"""Between two looks at workers that are to leave their group, and say so in memory alone."""
NEWCOMER_SECONDS = 0.02
"""Between two looks whether newcomers are ready."""


# What comes into the inbox, beside what the rendezvous says and what the board has gathered.


@attrs.frozen
class Prepared:
    """A start of workers will not have to wait; others_keep: the job has some that are kept."""

    others_keep: bool = False


@attrs.frozen
class Exited:
    local_rank: int


@attrs.frozen
class Dumped:
    """The workers have written their stacks."""

    stacks: Mapping[int, str]


@attrs.frozen
class Signalled:
    number: int


OfAttempt = RendezvousInfo | Change | Exception | Exited | Dumped
"""News of one attempt of this node at a generation, and of no other; an exit is of one start of
workers."""
News = OfAttempt | Prepared | Signalled | Gathered | policy.Broke


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
        ladder: StopTimeouts | None = None,
        interval: float = 0.1,
        options: AgentOptions | None = None,
        memory: Memory | None = None,
        journal: Journal | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.workers = workers
        self._spec = spec
        self._handler = handler
        self._memory = memory
        if max_restarts is not None and max_restarts < 0:
            raise ConfigError(f"max_restarts must be at least 0, got {max_restarts}")
        handler.check_agent(slots=spec.local_world_size, max_restarts=max_restarts)
        self._max_restarts = max_restarts
        self._options = options or AgentOptions()
        self._ladder = ladder or StopTimeouts()
        self._clock = clock
        self._inbox: queue.SimpleQueue[tuple[int | None, News]] = queue.SimpleQueue()
        self._host = socket.gethostname()
        self._report = Report(self._host, workers, journal, clock)
        self._slots = Slots(handler, workers, spec.local_world_size)
        self._board = Board(self._tell, self._broke, clock)
        self._waiter = Waiter(handler, interval, self._tell_of, self._broke)
        self._turned_at = clock()
        # What the loop owns.
        self._now = Supervision()
        self._stopping: Stopping | None = None
        self._watch: hang.HangWatch | None = None
        self._attempt = self._started = self._own_restarts = 0
        self._has_run = False
        self._started_in: dict[int, int] = {}
        """The start of workers in which each of them was begun, by its local rank."""
        self._prepared = self._notified = self._said_unseen = self._told_to_end = False
        self._info: RendezvousInfo | None = None
        self._group: WorkerGroup | None = None
        if self._options.hang is not None and not workers.tell_steps:
            raise ConfigError(
                f"hang (--hang-timeout) needs workers that report their steps, and "
                f"{type(workers).__name__} has none of them: leave it out"
            )

    # -- for any thread -----------------------------------------------------------------------

    def heed(self, number: int) -> None:
        """Act as if this signal had arrived: one of those that `options` name.

        For a program that runs its agent in another thread than its main one, which receives no
        signals.
        """
        self._tell(Signalled(number))

    def _tell(self, news: News) -> None:
        self._inbox.put((None, news))

    def _tell_of(self, attempt: int, news: OfAttempt) -> None:
        self._inbox.put((attempt, news))

    def _broke(self, reason: str) -> None:
        self._tell(policy.Broke(reason))

    def silent(self) -> float:
        """Seconds for which the agent's loop has not turned; 0 when it has done its work."""
        over = self._now.state is State.ENDED
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
        self._report.began()
        with SignalObserver(self._options.heeded, self.heed):
            try:
                self._mark_progress()
                # What cannot work is said by the start, to which it belongs.
                with contextlib.suppress(ElasticError, OSError):
                    self.workers.prepare(self._spec)
                self._carry_out([policy.Join()])
                while self._now.state is not State.ENDED:
                    self._turn()
                cause = self._find_cause()
            except Exception as error:
                # A bug of ours, or a promise broken by a part: still an end with a reason.
                log.exception("the agent's loop failed")
                outcome = Outcome(WorkerState.FAILED, describe(error))
                self._now = Supervision(State.ENDED, outcome=outcome)
            finally:
                self._clean_up()
        unexpected = Outcome(WorkerState.FAILED, "the agent ended unexpectedly")
        return self._report.result(self._now.outcome or unexpected, cause)

    def start(self, group: WorkerGroup, ended: Callable[[int], None]) -> None:
        """Start the workers of a generation; called in a turn of the loop, as `collect` is. A
        subclass may look on at both."""
        self.workers.start(group, ended)

    def collect(self, local_rank: int) -> WorkerExit:
        """How a worker of the group ended."""
        return self.workers.collect(local_rank)

    def _mark_progress(self, allowance_s: float = 0.0) -> None:
        """Record that the loop makes progress; the next operation may take `allowance_s` longer."""
        self._turned_at = self._clock()
        self._handler.mark_progress(allowance_s)

    def _clean_up(self) -> None:
        """Each part is closed, whatever became of the one before."""
        closing = (self._board.close, self.workers.end, self._keep, self.workers.close)
        for close in (*closing, self._handler.shutdown, self._waiter.stop):
            try:
                self._mark_progress(KEEP_SECONDS if close == self._keep else 0.0)
                close()
            except Exception:
                # How the run ended is known by now, and must still be told.
                log.exception("clearing up after the run failed")

    def _keep(self) -> None:
        """Before the rendezvous is left: who goes on may need what is put where it lasts."""
        outcome = self._now.outcome
        done = outcome is not None and outcome.state is WorkerState.SUCCEEDED
        if self._memory is None:
            return
        self._told_to_end = bool(outcome and outcome.signal) or bool(self._signals())
        self._report.lost = self._memory.finish(keep=not done, given_up=self._given_up)
        self._report.saved = self._memory.saved
        if self._report.lost:
            log.warning("%s", self._report.lost)

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
                if isinstance(news, Signalled) and news.number in self._options.signals:
                    numbers.append(news.number)
        return numbers

    def _find_cause(self) -> Cause | None:
        """Why the job failed, over all nodes, as far as it can be had in time."""
        outcome, info, own = self._now.outcome, self._info, self._report.own_cause()
        if outcome is None or outcome.state is not WorkerState.FAILED or info is None:
            return None
        failed = self._report.failed_ranks
        if not self._board.name or not (failed or self._report.failed_elsewhere):
            return own
        if failed:
            self._board.do(post_failed(info.rank, failed))
        self._board.do(policy.Gather(CAUSE))
        deadline = self._clock() + ANSWER_SECONDS
        self._mark_progress(ANSWER_SECONDS)
        with contextlib.suppress(queue.Empty):
            while True:
                _, news = self._inbox.get(timeout=max(0.0, deadline - self._clock()))
                if isinstance(news, Gathered) and news.name == CAUSE:
                    cause = None if news.posts is None else first_cause(news.posts)
                    if cause is not None or news.posts is None:
                        return cause or own
        log.info(
            "the store did not answer within %g s whether another node knows the cause",
            ANSWER_SECONDS,
        )
        return own

    # -- the loop -----------------------------------------------------------------------------

    def _turn(self) -> None:
        self._mark_progress()
        self._look()
        if self._now.state is State.ENDED:
            return
        try:
            attempt, news = self._inbox.get(timeout=self._pause())
        except queue.Empty:
            return
        current = self._attempt
        if isinstance(news, Exited):
            current = self._started_in.get(news.local_rank, self._started - 1)
        event = self._read(news) if attempt in (None, current) else None
        if event is not None:
            self._react(event)

    def _pause(self) -> float:
        """Seconds until something is due without an event."""
        now, due = self._clock(), HEARD_SECONDS
        if self._stopping is not None:
            due = ASK_SECONDS if self._stopping.asking else self._stopping.left(now)
            due = min(due, LEAVING_SECONDS) if self._stopping.keep else due
        elif self._now.spare and not all(self.workers.spare().values()):
            due = NEWCOMER_SECONDS
        elif self._watch is not None and self._watch.found is None:
            due = max(0.0, self._watch.due - now)
        return min(HEARD_SECONDS, due)

    def _look(self) -> None:
        """Have the machine that is at work look at the time, and at the workers."""
        commands: Iterable[Command] = ()
        stopping, watch, now = self._stopping, self._watch, self._clock()
        if stopping is not None:
            call = self.workers.earliest_stop() if stopping.asking else None
            breaks: tuple[Command, ...] = ()
            if not stopping.keep and stopping.noticing:
                # Workers that were still starting when they were asked can leave their group now.
                stopping, breaks = stopping.keep_members(self._regroup_grace())
            if stopping.keep and stopping.noticing and self.workers.broken():
                stopping, breaks = stopping.sooner(now, None)
            running = [name for _, name in sorted(self._at_work().items())]
            self._stopping, commands = stopping.look(self._clock(), running, call)
            commands = (*breaks, *commands)
        elif watch is not None and (watch.found is not None or now >= watch.due):
            beats = self.workers.beats()
            members = {local: beats[local] for local in watch.ranks if local in beats}
            self._watch, commands = watch.look(now, members)
            if not self._said_unseen and (unseen := watch.unseen(now, members)):
                self._said_unseen = True
                log.warning("%s", unseen)
        self._carry_out(commands)
        if self._now.state is State.JOINING:
            self._waiter.remind(now, self._report.why)
        self._report_slots()
        self._report.look()

    def _at_work(self) -> dict[int, str]:
        """The workers that have not stopped: where they are kept, those in a group."""
        running = self.workers.running()
        if self._stopping is not None and self._stopping.keep:
            spare = self.workers.spare()
            return {local: name for local, name in running.items() if local not in spare}
        return running

    def _react(self, event: Event) -> None:
        before = self._now.state
        self._now, commands = policy.react(self._now, event)
        if self._now.state is not before:
            if before in (State.RUNNING, State.FINISHED):
                self._report.idle(event)
            if self._watch is not None and not isinstance(event, policy.Hung):
                # Another node may have found the same hang first.
                self._report.show(self._watch.evidence())
            self._watch = None
            log.debug("%s -> %s: %s", before.value, self._now.state.value, summary(event))
        self._carry_out(commands)

    # -- what has come into the inbox -----------------------------------------------------------

    def _read(self, news: News) -> Event | None:
        """What it means to the policy, if anything."""
        match news:
            case Prepared(others_keep):
                self._prepared = True
                self._report.prepared()
                self._slots.heard(others_keep=others_keep)
                if self._now.state is State.JOINING:
                    self._join()
            case RendezvousInfo():
                return self._settle(news)
            case Change():
                self._report.heard(news)
                return policy.Changed(news, self._slots.keeps())
            case Exception():
                return self._fell_through(news)
            case Exited(local_rank):
                return self._collect(local_rank)
            case Signalled(number):
                return self._heed(number)
            case Gathered(board) if board == self._board.name:
                if news.name == STOP and self._stopping is not None:
                    self._stopping = self._stopping.heard(news.posts)
                if news.name == OVER and self._stopping is not None:
                    self._stopping, commands = self._stopping.over(self._clock(), news.posts or {})
                    self._carry_out(commands)
                if news.name == hang.HANG and self._watch is not None:
                    self._watch = self._watch.heard(news.posts or {})
            case Dumped(dumped) if self._watch is not None:
                ranks = self._watch.ranks
                stacks = {local: text for local, text in dumped.items() if local in ranks}
                self._watch, commands = self._watch.dumped(self._clock(), stacks)
                self._carry_out(commands)
            case policy.Broke():
                return news
        return None

    def _fell_through(self, error: Exception) -> Event:
        """The rendezvous has no generation for this node, or says so no more of the one it has."""
        if self._now.state is not State.JOINING:
            return policy.Changed(Change(ChangeKind.LOST, describe(error)), self._slots.keeps())
        change = getattr(error, "change", None)
        if isinstance(error, RendezvousClosedError) and isinstance(change, Change):
            self._report.heard(change)
            return policy.JoinEnded(policy.end_of_job(change))
        self._report.deserted = getattr(error, "lost", False)
        reason = describe(error)
        if self._info is not None and not self._report.deserted:
            # Otherwise only a timeout would be reported, and not the failure that led to it.
            why = self._report.why
            reason = f"{why}; then this node could not join another generation: {reason}"
        return policy.JoinEnded(Outcome(WorkerState.FAILED, reason))

    def _settle(self, info: RendezvousInfo) -> Event:
        check_restart_budget(self._max_restarts, info.max_restarts)
        self._info = info
        members = self._slots.members(info.seat)
        return policy.Settled(members, frozenset(range(self._spec.local_world_size)) - members)

    def _collect(self, local_rank: int) -> Event | None:
        if local_rank not in self.workers.running():
            return None
        spare = local_rank in self.workers.spare()
        if local_rank in self.workers.keepers():
            self._slots.tell_keeping()
        exit_ = self.collect(local_rank)
        stopping = self._stopping
        unsaved = not (stopping is None or not stopping.noticing or exit_.ok or spare)
        if unsaved:
            log.warning("failed after it was asked to save and end: %s", exit_.describe())
        cause = self._report.ended(exit_, supervised=self._now.state is State.RUNNING)
        if cause is not None:
            self._board.do(post_cause(cause))
        alone = unsaved and stopping is not None and (stopping.agreeing or stopping.keep > 0)
        return policy.WorkerEnded(exit_, unsaved, alone, self._slots.keeps())

    def _heed(self, number: int) -> Event:
        options, name = self._options, signal_name(number)
        why = options.why_drained(number)
        if number in options.drain_signals or (
            number in options.save_signals and self._listens(why)
        ):
            self._report.draining(name, why)
            return policy.DrainAsked(number, name, why)
        return policy.SignalArrived(number, name)

    def _listens(self, why: str) -> bool:
        """Whether the workers have been told to save, or can be, which is found by telling them."""
        if self._now.state is State.RUNNING:
            return self._notify(self._options.notice(why))
        if self._now.state is State.STOPPING:
            return self._notified
        # Schedulers repeat themselves, and what is being saved is not to be cut short for it.
        outcome = self._now.outcome
        return outcome is not None and outcome.state is WorkerState.DRAINED

    # -- what the machines want done ----------------------------------------------------------

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._mark_progress()
            _ACTS[type(command)](self, command)

    def _seek(self) -> None:
        self._attempt += 1
        self._report.joining()
        if self._memory is not None:
            self._memory.rest()
        self._join()

    def _join(self) -> None:
        """Ask for the next generation once all that takes its time is prepared: the other nodes do
        not stop their workers for a node that cannot start its own at once. Where theirs are kept,
        they need not even wait for that start."""
        hears = partial(self._tell_of, self._attempt)
        if not self._prepared:
            helper(partial(self._await_prepared, hears), "agent-prepare", self._broke).start()
            return
        if self._slots.starts_ahead(self._info):
            everyone = range(self._spec.local_world_size)
            self._react(policy.OthersGoOn(frozenset(everyone)))
        self._report_slots()
        if not self._handler.join(hears):
            self._waiter.join(self._attempt, self._clock())

    def _report_slots(self) -> None:
        self._slots.report(self._now, len(self._group.workers) if self._group else 0)

    def _await_prepared(self, failed: Callable[[Exception], None]) -> None:
        try:
            self._handler.prepare()
            self.workers.await_prepared()
            others_keep = self._handler.others_keep()
        except Exception as error:
            failed(error)
        else:
            self._tell(Prepared(others_keep))

    def _start_ahead(self) -> None:
        everyone = range(self._spec.local_world_size)
        group = make_standby_group(self._spec, everyone, self._handler.get_run_id(), self._started)
        self._report.starting_ahead(group)
        failed = self._begin(group)
        if failed is not None:
            self._react(failed)

    def _begin(self, group: WorkerGroup) -> policy.StartFailed | policy.Broke | None:
        """Start those workers of the group that do not run yet; return the failure, if any."""
        self._mark_progress(START_SECONDS)
        self._started += 1
        number, kept = group.attempt, self.workers.running().keys()
        for worker in (*group.workers, *group.standby_workers):
            if worker.local_rank not in kept:
                self._started_in[worker.local_rank] = number
        try:
            self.start(group, lambda local_rank: self._tell_of(number, Exited(local_rank)))
        except ConfigError as error:
            # This node cannot run such workers at all, so a restart would fail in the same way.
            return policy.Broke(str(error))
        except ElasticError as error:
            return policy.StartFailed(str(error), self._slots.keeps())
        return None

    def _start(self) -> None:
        info = present(self._info, "the generation")
        self._mark_progress(START_SECONDS)
        self._notified = False
        self._board.open(info)
        group = self._group = self._group_of(info)
        self._report.starting(info, group)
        if self._memory is not None:
            self._memory.begin(info, group)
        failed = self._begin(group)
        self._report.started(group, self.workers.running(), self._started_in)
        if failed is not None:
            self._board.do(post_cause(self._report.ended_without(failed.reason)))
            self._react(failed)
        elif self._options.hang is not None:
            self._watch = hang.HangWatch(
                self._options.hang,
                self._host,
                {worker.local_rank: worker.rank for worker in group.workers},
                node=info.rank,
                others=info.world_size - 1 if self._board.name else 0,
                began=self._clock(),
            )

    def _group_of(self, info: RendezvousInfo) -> WorkerGroup:
        store = info.bootstrap_store_info
        return WorkerGroup(
            spec=self._spec,
            workers=assign_worker_ranks(info.seat, self._now.awaited),
            standby_workers=make_standby_workers(info.seat, self._now.spare),
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
        self._report.failure(failure)
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
        self._react(policy.Changed(Change(ChangeKind.FAILED, reason)))

    def _report_done(self) -> None:
        info = present(self._info, "the generation")
        self._board.do(post_need(info.rank, ANY_CALL))
        if not self._handler.report_done():
            if info.world_size > 1:
                log.info(
                    "%s has no report_done: this node leaves without waiting for the other nodes; "
                    "workers that fail there from now on are restarted without it, or not at all",
                    type(self._handler).__name__,
                )
            self._react(policy.Changed(Change(ChangeKind.SUCCEEDED, "this node is done")))

    def _begin_stop(self, command: policy.StopWorkers | policy.Regroup) -> None:
        notice = None if isinstance(command, policy.Regroup) else self._notice(command.notice)
        self._report.stopping(notice)
        keep = self._regroup_grace()
        info = self._info  # None where they were started before the first generation
        stopping = Stopping(
            self._ladder,
            node=0 if info is None else info.rank,
            nodes=1 if info is None else info.world_size,
            reachable=bool(self._board.name),
            agrees=self.workers.agrees,
            keep=keep,
        )
        heard = self._notify(notice, keeps=keep > 0)
        if heard and not keep:
            self.workers.stop_only(self.workers.spare())
        if keep and not heard:
            # A member that is still starting has nothing to lose, and the others do not wait.
            self.workers.stop_only({*self._at_work()} - {*self.workers.keepers()})
        self._stopping, commands = stopping.begin(self._clock(), notice if heard else None)
        self._carry_out(commands)

    def _regroup_grace(self) -> float:
        """Return how long workers have to leave their group, or 0 if none can go on in another."""
        # The job may have ended since the stop began: a failure can be one too many.
        keeps = self._now.state is State.STOPPING and self._slots.keeps()
        return self._options.regroup_grace if keeps else 0.0

    def _stop_sooner(self, command: policy.StopSooner) -> None:
        stopping, notice = present(self._stopping, "the stop"), self._notice(command.notice)
        self._stopping, commands = stopping.sooner(self._clock(), notice)
        self._carry_out(commands)

    def _keep_none(self) -> None:
        if self._stopping is not None and self._stopping.keep:
            self.workers.stop_only(self.workers.spare())
            self._stopping = self._stopping.keep_none(self._clock())

    def _hurry(self) -> None:
        self._stopping = present(self._stopping, "the stop").hurry(self._clock())

    def _notice(self, why: str) -> Notice | None:
        """What workers are told that are to save and end; None if they are not."""
        return self._options.notice(why) if why else None

    def _notify(self, notice: Notice | None, *, keeps: bool = False) -> bool:
        """Whether the workers listen, and now save and end by themselves."""
        if notice is None:
            return False
        if not self._notified and self.workers.notify(notice):
            self._notified = True
            to_do = "leave their group" if keeps else "save and end"
            log.info("%s: the workers have %g s to %s", notice.reason, notice.seconds, to_do)
        return self._notified

    def _stop_at(self, command: policy.StopAt) -> None:
        if command.call is None:
            self.workers.notify(command.notice)
        else:
            self.workers.stop_at(command.call, command.notice)

    def _end_workers(self, command: policy.EndWorkers) -> None:
        if command.why:
            log.warning("%s", command.why)
        if self._stopping is not None and self._stopping.keep:
            self.workers.stop_only(self._at_work(), force=command.force)
        else:
            (self.workers.kill if command.force else self.workers.terminate)()

    def _group_stopped(self, command: policy.GroupStopped) -> None:
        self._stopping = None
        self._report.stopped(command)
        self._react(attrs.evolve(command, spare=frozenset(self.workers.spare())))

    def _dump_stacks(self) -> None:
        # It may take its time, and the loop turns meanwhile.
        attempt = self._attempt

        def dump() -> None:
            self._tell_of(attempt, Dumped(self.workers.dump_stacks()))

        helper(dump, "agent-stacks", self._broke).start()

    def _hung(self, command: policy.Hung) -> None:
        self._board.do(post_cause(self._report.hung(command)))
        self._react(attrs.evolve(command, keeps=self._slots.keeps()))


_ACTS: Mapping[type[Command], Callable[[ElasticAgent, Any], object]] = {
    policy.Join: lambda agent, _: agent._seek(),
    policy.StartWorkers: lambda agent, _: agent._start(),
    policy.StartAhead: lambda agent, _: agent._start_ahead(),
    policy.StopWorkers: ElasticAgent._begin_stop,
    policy.Regroup: ElasticAgent._begin_stop,
    policy.LeaveGroup: lambda agent, _: agent.workers.leave(),
    policy.KeepNone: lambda agent, _: agent._keep_none(),
    policy.ReportSlots: lambda agent, _: agent._report_slots(),
    policy.StopSooner: ElasticAgent._stop_sooner,
    policy.HurryWorkers: lambda agent, _: agent._hurry(),
    policy.ReportFailure: ElasticAgent._report_failure,
    policy.ReportDraining: lambda agent, said: agent._handler.report_draining(said.reason),
    policy.ReportDone: lambda agent, _: agent._report_done(),
    policy.Post: lambda agent, post: agent._board.do(post),
    policy.Gather: lambda agent, gather: agent._board.do(gather),
    policy.StopAt: ElasticAgent._stop_at,
    policy.EndWorkers: ElasticAgent._end_workers,
    policy.GroupStopped: ElasticAgent._group_stopped,
    hang.DumpStacks: lambda agent, _: agent._dump_stacks(),
    policy.Hung: ElasticAgent._hung,
}
"""What is done for each command of a machine."""
