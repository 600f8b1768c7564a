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
from ..errors import ConfigError, ElasticError, RendezvousClosed, describe, present
from ..observe.journal import Journal
from ..rendezvous.decide import NOT_RETRIED
from ..rendezvous.document import Change, ChangeKind
from ..rendezvous.interface import FailureKind, RendezvousHandler, RendezvousInfo
from ..signals import signal_name
from ..threads import helper
from ..workers.exit import WorkerExit, classify
from ..workers.interface import Notice, Workers
from ..workers.spec import Ladder, WorkerGroup, WorkerSpec, WorkerState, deal_ranks
from . import hang, policy
from .board import Board, Gathered
from .interface import Cause, Memory, RunResult
from .options import HEARD_SECONDS, AgentOptions, SignalObserver
from .policy import Command, Event, Outcome, State, Supervision
from .report import CAUSE, Report, first_cause, post_cause, post_failed, summary

log = logging.getLogger("elasticlib.agent")

START_SECONDS = 120.0
"""That the start of many workers may take, in which the loop does not turn."""
KEEP_SECONDS = 660.0
"""That a memory may take at the end to put what it holds where it lasts."""
ANSWER_SECONDS = 3.0
"""For the other nodes' word on why the job failed, which is on its way when it has."""
ASK_SECONDS = 5e-4
"""Between two looks at workers that are in a step, and are to say where they can stop."""


# What comes into the inbox, beside what the rendezvous says and what the board has gathered.


@attrs.frozen
class Prepared:
    """A start of workers will not have to wait."""


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
"""News of one attempt of this node at a generation, and of no other."""
News = OfAttempt | Prepared | Signalled | Gathered | policy.Broke


class ElasticAgent:
    """Supervises the workers of one node, wherever they run.

    What starts, observes and stops them is an object of a class of `Workers`: `LocalWorkers` runs
    processes of this machine; your own may run them elsewhere. Where it is not said otherwise its
    methods are called by the thread that `run` was called in, one at a time, and nothing else
    happens meanwhile: signals and changes of membership wait. So none of them waits for a worker to
    end. An `ElasticError` from `start`, as `WorkerStartError` is, is a failure that is charged, and
    is tried again; one from `prepare`, or an `OSError`, is passed over, as `start` will meet it.
    Whatever else one of them raises ends the run. `elasticlib.testing.AgentContract` tests all that
    is promised here.

    Args:
        spec: what to run.
        handler: how the node meets the others; shut down when the run is over.
        workers: runs the workers; closed when the run is over.
        max_restarts: of a handler that keeps no budget for the job.
        ladder: how workers are stopped, on every path.
        interval: seconds between looks at a handler that cannot push.
        options: which signals it heeds, and how long workers may save.
        memory: what is kept for the workers over all generations; nothing, if left out.
        journal: is told what happens, and how the workers' steps go on; nobody, if left out. One
            that raises is told no more.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        handler: RendezvousHandler,
        workers: Workers,
        *,
        max_restarts: int = 0,
        ladder: Ladder | None = None,
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
        self._max_restarts = max_restarts
        self._options = options or AgentOptions()
        self._ladder = ladder or Ladder()
        self._clock = clock
        self._inbox: queue.SimpleQueue[tuple[int | None, News]] = queue.SimpleQueue()
        self._host = socket.gethostname()
        self._report = Report(self._host, workers, journal, clock)
        self._board = Board(self._tell, self._broke, clock)
        self._waiter = _Waiter(handler, interval, self._tell_of, self._broke)
        self._turned_at = self._started_at = clock()
        self._allowed = 0.0
        # What the loop owns.
        self._now = Supervision()
        self._stopping: policy.Stopping | None = None
        self._watch: hang.HangWatch | None = None
        self._attempt = self._started = self._own_restarts = 0
        self._prepared = self._notified = False
        self._info: RendezvousInfo | None = None
        self._group: WorkerGroup | None = None
        if self._options.hang is not None and not workers.tell_steps:
            raise ConfigError(
                f"--hang-timeout needs workers that report their steps, and "
                f"{type(workers).__name__} has none of them: leave it out"
            )

    # -- for any thread -----------------------------------------------------------------------

    def heed(self, number: int) -> None:
        """As if this signal had come: one of those that `options` name.

        For a program that runs its agent beside its main thread, where no signal is heard.
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
        """Take part in the job until it is over for this node; never raises for its failures.

        Once in an agent's life: what it holds is freed at the end.
        """
        cause = None
        self._turns()
        self._report.began()
        with SignalObserver(self._options.heeded, self.heed):
            try:
                self._handler.follow(self._stuck)
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

    def _turns(self, allowed: float = 0.0) -> None:
        """The loop turns. allowed: seconds that what it does now may take beside."""
        self._turned_at, self._allowed = self._clock(), allowed

    def _stuck(self) -> float:
        """Seconds for which it has not, beyond those."""
        return max(0.0, self._clock() - self._turned_at - self._allowed)

    def _clean_up(self) -> None:
        """Each part is closed, whatever became of the one before."""
        closing = (self._board.close, self.workers.end, self._keep, self.workers.close)
        for close in (*closing, self._handler.shutdown, self._waiter.stop):
            self._turns(KEEP_SECONDS if close == self._keep else 0.0)
            try:
                close()
            except Exception:
                # How the run ended is known by now, and must still be told.
                log.exception("clearing up after the run failed")

    def _keep(self) -> None:
        """Before the rendezvous is left: who goes on may need what is put where it lasts."""
        outcome = self._now.outcome
        done = outcome is not None and outcome.state is WorkerState.SUCCEEDED
        if self._memory is not None:
            self._report.lost = self._memory.finish(keep=not done)

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
        self._turns(ANSWER_SECONDS)
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
        self._turns()
        self._look()
        if self._now.state is State.ENDED:
            return
        try:
            attempt, news = self._inbox.get(timeout=self._pause())
        except queue.Empty:
            return
        event = self._read(news) if attempt in (None, self._attempt) else None
        if event is not None:
            self._react(event)

    def _pause(self) -> float:
        """Seconds until something is due without an event."""
        now, due = self._clock(), HEARD_SECONDS
        if self._stopping is not None:
            due = ASK_SECONDS if self._stopping.asking else self._stopping.left(now)
        elif self._watch is not None and self._watch.found is None:
            due = max(0.0, self._watch.due - now)
        return min(HEARD_SECONDS, due)

    def _look(self) -> None:
        """Have the machine that is at work look at the time, and at the workers."""
        commands: Iterable[Command] = ()
        stopping, watch, now = self._stopping, self._watch, self._clock()
        if stopping is not None:
            call = None
            if stopping.asking:
                call = self.workers.earliest_stop(now=bool(stopping.needs))
            running = self.workers.running().values()
            self._stopping, commands = stopping.look(self._clock(), running, call)
        elif watch is not None and (watch.found is not None or now >= watch.due):
            self._watch, commands = watch.look(now, self.workers.beats())
        self._carry_out(commands)
        self._report.look()

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
            case Prepared():
                self._prepared = True
                if self._now.state is State.JOINING:
                    self._join()
            case RendezvousInfo():
                return self._settle(news)
            case Change():
                self._report.heard(news)
                return policy.Changed(news)
            case Exception():
                return self._fell_through(news)
            case Exited(local_rank):
                return self._collect(local_rank)
            case Signalled(number):
                return self._heed(number)
            case Gathered(board) if board == self._board.name:
                if news.name == policy.STOP and self._stopping is not None:
                    self._stopping = self._stopping.heard(news.posts)
                if news.name == hang.HANG and self._watch is not None:
                    self._watch = self._watch.heard(news.posts or {})
            case Dumped(stacks) if self._watch is not None:
                self._watch, commands = self._watch.dumped(self._clock(), stacks)
                self._carry_out(commands)
            case policy.Broke():
                return news
        return None

    def _fell_through(self, error: Exception) -> Event:
        """The rendezvous has no generation for this node, or says so no more of the one it has."""
        if self._now.state is not State.JOINING:
            return policy.Changed(Change(ChangeKind.LOST, describe(error)))
        change = getattr(error, "change", None)
        if isinstance(error, RendezvousClosed) and isinstance(change, Change):
            self._report.heard(change)
            return policy.JoinEnded(policy.end_of_job(change))
        return policy.JoinEnded(Outcome(WorkerState.FAILED, describe(error)))

    def _settle(self, info: RendezvousInfo) -> Event:
        self._info = info
        slots = info.seat.slots
        if slots != self._spec.local_world_size:
            raise ConfigError(
                f"the rendezvous registered this node with {slots} slots, but its worker spec "
                f"has {self._spec.local_world_size} workers: give both the same number"
            )
        return policy.Settled(frozenset(range(slots)))

    def _collect(self, local_rank: int) -> Event | None:
        if local_rank not in self.workers.running():
            return None
        exit_ = self.collect(local_rank)
        stopping = self._stopping
        unsaved = stopping is not None and stopping.noticing and not exit_.ok
        if unsaved:
            log.warning("failed after it was asked to save and end: %s", exit_.describe())
        cause = self._report.ended(exit_, supervised=self._now.state is State.RUNNING)
        if cause is not None:
            self._board.do(post_cause(cause))
        kind = classify(
            exit_,
            self._spec.entrypoint,
            uptime=self._clock() - self._started_at,
            first=self._started == 1,
        )
        alone = unsaved and stopping is not None and stopping.agreeing
        return policy.WorkerEnded(exit_, kind, unsaved, alone)

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
            self._turns()
            _ACTS[type(command)](self, command)

    def _seek(self) -> None:
        self._attempt += 1
        self._report.joining()
        if self._memory is not None:
            self._memory.rest()
        self._join()

    def _join(self) -> None:
        """Ask for the next generation once all that takes its time is prepared: the other nodes do
        not stop their workers for a node that cannot start its own at once."""
        hears = partial(self._tell_of, self._attempt)
        if not self._prepared:
            helper(partial(self._await_prepared, hears), "agent-prepare", self._broke).start()
        elif not self._handler.join(hears):
            self._waiter.join(self._attempt)

    def _await_prepared(self, failed: Callable[[Exception], None]) -> None:
        try:
            self._handler.prepare()
            self.workers.await_prepared()
        except Exception as error:
            failed(error)
        else:
            self._tell(Prepared())

    def _start(self) -> None:
        info = present(self._info, "the generation")
        self._turns(START_SECONDS)
        self._notified = False
        self._board.open(info)
        self._started_at = self._clock()
        self._group = group = self._group_of(info)
        self._started += 1
        self._report.starting(info, group)
        if self._memory is not None:
            self._memory.begin(info, group)
        attempt, failed = self._attempt, ""
        try:
            self.start(group, lambda local_rank: self._tell_of(attempt, Exited(local_rank)))
        except ElasticError as error:
            failed = str(error)
        self._report.started(group, self.workers.running())
        if failed:
            self._board.do(post_cause(self._report.ended_without(failed)))
            self._react(policy.StartFailed(failed))
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
            workers=deal_ranks(info.seat),
            run_id=info.run_id,
            generation=info.generation,
            group_rank=info.rank,
            group_world_size=info.world_size,
            master_addr=store.master_addr,
            master_port=store.master_port,
            restarts=info.restarts + self._own_restarts,
            # The job's where its rendezvous keeps one, else our own.
            max_restarts=self._max_restarts if info.max_restarts is None else info.max_restarts,
            use_agent_store=self._handler.use_agent_store,
            attempt=self._started,
            incarnation=info.incarnation,
        )

    def _report_failure(self, failure: policy.ReportFailure) -> None:
        reason, budget = failure.reason, self._max_restarts
        self._report.failure(failure)
        if self._handler.report_failure_as(failure.kind, reason):
            return
        self._own_restarts += 1
        if failure.kind is FailureKind.AT_START:
            self._react(policy.Changed(Change(ChangeKind.FAILED, f"{reason} ({NOT_RETRIED})")))
        elif self._own_restarts > budget:
            spent = f"{reason} ({budget} of {budget} restarts used)"
            self._react(policy.Changed(Change(ChangeKind.FAILED, spent)))

    def _report_done(self) -> None:
        rank = present(self._info, "the generation").rank
        self._board.do(policy.post_need(rank, policy.ANY_CALL))
        if not self._handler.report_done():
            self._react(policy.Changed(Change(ChangeKind.SUCCEEDED, "this node is done")))

    def _begin_stop(self, command: policy.StopWorkers) -> None:
        notice = self._notice(command.notice)
        self._report.stopping(notice)
        info = present(self._info, "the generation")
        stopping = policy.Stopping(
            self._ladder,
            node=info.rank,
            nodes=info.world_size,
            reachable=bool(self._board.name),
            agrees=self.workers.agrees,
        )
        heard = self._notify(notice)
        self._stopping, commands = stopping.begin(self._clock(), notice if heard else None)
        self._carry_out(commands)

    def _stop_sooner(self, command: policy.StopSooner) -> None:
        stopping, notice = present(self._stopping, "the stop"), self._notice(command.notice)
        self._stopping, commands = stopping.sooner(self._clock(), notice)
        self._carry_out(commands)

    def _hurry(self) -> None:
        self._stopping = present(self._stopping, "the stop").hurry(self._clock())

    def _notice(self, why: str) -> Notice | None:
        """What workers are told that are to save and end; None if they are not."""
        return self._options.notice(why) if why else None

    def _notify(self, notice: Notice | None) -> bool:
        """Whether the workers listen, and now save and end by themselves."""
        if notice is None:
            return False
        if not self._notified and self.workers.notify(notice):
            self._notified = True
            log.info("%s: the workers have %g s to save and end", notice.reason, notice.seconds)
        return self._notified

    def _stop_at(self, command: policy.StopAt) -> None:
        if command.call is None:
            self.workers.notify(command.notice)
        else:
            self.workers.stop_at(command.call, command.notice)

    def _end_workers(self, command: policy.EndWorkers) -> None:
        if command.why:
            log.warning("%s", command.why)
        (self.workers.kill if command.force else self.workers.terminate)()

    def _group_stopped(self, command: policy.GroupStopped) -> None:
        self._stopping = None
        self._report.stopped(command)
        self._react(command)

    def _dump_stacks(self) -> None:
        # It may take its time, and the loop turns meanwhile.
        attempt = self._attempt

        def dump() -> None:
            self._tell_of(attempt, Dumped(self.workers.dump_stacks()))

        helper(dump, "agent-stacks", self._broke).start()

    def _hung(self, command: policy.Hung) -> None:
        self._board.do(post_cause(self._report.hung(command)))
        self._react(command)


_ACTS: Mapping[type[Command], Callable[[ElasticAgent, Any], object]] = {
    policy.Join: lambda agent, _: agent._seek(),
    policy.StartWorkers: lambda agent, _: agent._start(),
    policy.StopWorkers: ElasticAgent._begin_stop,
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

LocalElasticAgent = ElasticAgent
"""The name that torch has for it; what runs the workers is given in either case."""


class _Waiter:
    """Waits in the calls of a handler that has only blocking ones, in a thread of its own."""

    def __init__(
        self,
        handler: RendezvousHandler,
        interval: float,
        put: Callable[[int, RendezvousInfo | Change | Exception], None],
        broke: Callable[[str], None],
    ) -> None:
        self._handler = handler
        self._interval = interval
        self._put = put
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = helper(self._wait, "agent-rendezvous", broke)

    def join(self, attempt: int) -> None:
        """Ask for the next generation, and from then on watch it."""
        if self._thread.ident is None:
            self._thread.start()
        self._asked.put(attempt)

    def stop(self) -> None:
        """After the handler's shutdown, which ends whatever the thread waits for."""
        self._asked.put(None)
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _wait(self) -> None:
        attempt = self._asked.get()
        while attempt is not None:
            try:
                info = self._handler.next_rendezvous()
            except Exception as error:
                # Somebody else's handler may raise anything; an agent that waits for a thread
                # that is no more would wait for ever.
                self._put(attempt, error)
                attempt = self._asked.get()
            else:
                self._put(attempt, info)
                attempt = self._watch(attempt)

    def _watch(self, attempt: int) -> int | None:
        """Tell the one change that ends this generation; returns what is asked next."""
        while True:
            began = monotonic()
            try:
                change = self._handler.wait_for_change(self._interval)
            except Exception as error:
                change = Change(ChangeKind.LOST, describe(error))
            if change is not None:
                self._put(attempt, change)
                return self._asked.get()
            with contextlib.suppress(queue.Empty):
                # A handler that cannot push answers at once, and is polled.
                rest = self._interval - (monotonic() - began)
                return self._asked.get(timeout=max(0.0, rest))
