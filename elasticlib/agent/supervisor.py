"""What every agent does: one inbox, one loop, and the policy between them.

Everything that happens becomes an event in the inbox; the loop asks the policy and carries out
its commands. Nothing else starts, stops or reports.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from ..clock import Clock, monotonic
from ..errors import ConfigError, ElasticError, RendezvousClosed, describe, present
from ..observe.interface import Journal, NoJournal
from ..rendezvous.decide import NOT_RETRIED
from ..rendezvous.interface import (
    Change,
    ChangeKind,
    FailureKind,
    RendezvousHandler,
    RendezvousInfo,
)
from ..signals import signal_name
from ..workers.blame import failure_kind
from ..workers.interface import Workers
from ..workers.ladder import Ladder
from ..workers.spec import WorkerGroup, WorkerSpec, deal_ranks
from .account import Account
from .agreed import Need
from .agreement import Agreements
from .hang_watch import HangWatch
from .interface import Memory, NoMemory, RunResult
from .observers import HEARD_SECONDS, RendezvousObserver, SignalObserver
from .options import AgentOptions
from .policy import (
    Action,
    Broke,
    Changed,
    DrainAsked,
    Event,
    Finish,
    Hung,
    HurryWorkers,
    Join,
    JoinEnded,
    Outcome,
    OutcomeKind,
    ReportDone,
    ReportDraining,
    ReportFailure,
    Settled,
    SignalArrived,
    StartFailed,
    StartWorkers,
    State,
    StopSooner,
    StopWorkers,
    Supervision,
    WorkerEnded,
    outcome_of,
    react,
)
from .stop import GroupStop
from .summary import summary
from .telling import Telling

log = logging.getLogger("elasticlib.agent")

Answer = TypeVar("Answer")

START_SECONDS = 120.0
"""That the start of many workers may take, in which the loop does not turn."""
KEEP_SECONDS = 660.0
"""That a memory may take at the end to put what it holds where it lasts."""


@attrs.frozen
class _News:
    """An entry of the inbox; attempt is None where it belongs to no particular one. asked: whom
    somebody waits for that asked."""

    attempt: int | None
    read: Callable[[], Event | None]
    asked: Future[Any] | None = None


class Supervisor:
    """Takes one node through its job, with whatever runs its workers.

    Args: as of `elasticlib.agent.elastic.ElasticAgent`; and workers, which it starts, observes and
    stops, and closes when the run is over.
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
        self._spec = spec
        self._handler = handler
        self._workers = workers
        self._memory = memory or NoMemory()
        self._max_restarts = max_restarts
        self._options = options or AgentOptions()
        self._agreements = Agreements(workers, clock, self._agreed)
        self._stop = GroupStop(workers, ladder or Ladder(), clock, self._agreements.told)
        self._clock = clock
        self._inbox: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._signals = SignalObserver(self._options.heeded, self.heed)
        self._observer = RendezvousObserver(
            handler,
            interval,
            ready=workers.await_prepared,
            settled=self._settled,
            ended=self._ended,
            changed=self._changed,
            broke=self._broke,
        )
        self._now = Supervision()
        self._attempt = 0
        self._started = 0
        self._own_restarts = 0
        self._info: RendezvousInfo | None = None
        self._group: WorkerGroup | None = None
        self._started_at = self._turned_at = clock()
        self._telling = Telling(journal or NoJournal(), clock)
        self._account = Account(socket.gethostname(), clock)
        self._hang = self._watched(workers)

    def _watched(self, workers: Workers) -> HangWatch | None:
        if self._options.hang is None:
            return None
        if not workers.tell_steps:
            raise ConfigError(
                f"--hang-timeout needs workers that tell of their steps, and those of "
                f"{type(workers).__name__} do not: leave it out"
            )
        host = socket.gethostname()
        return HangWatch(
            workers,
            self._options.hang,
            host,
            clock=self._clock,
            hung=self._hung,
            broke=self._broke,
        )

    @property
    def group(self) -> WorkerGroup | None:
        """That of the generation which this node holds, or None before the first."""
        return self._group

    def ask(self, call: Callable[[], Answer]) -> Future[Answer] | None:
        """Have the loop call this in a turn of its own; None where it has no more."""
        asked: Future[Answer] = Future()
        self._inbox.put(_News(None, lambda: _answer(asked, call), asked))
        return None if self._now.state is State.ENDED else asked

    def _turn_seen(self, allowed: float = 0.0) -> None:
        """The loop turns. allowed: seconds that what it does now may take beside."""
        self._turned_at = self._clock() + allowed

    def _silent(self) -> float:
        return max(0.0, self._clock() - self._turned_at)

    def run(self) -> RunResult:
        """Take part in the job until it is over for this node."""
        self._turn_seen()
        self._telling.began()
        with self._signals:
            self._observer.start()
            try:
                self._handler.follow(self._silent)
                self._handler.prepare()
                # What cannot work is said by the start, to which it belongs.
                with contextlib.suppress(ElasticError, OSError):
                    self._workers.prepare(self._spec)
                self._do(Join())
                while self._now.state is not State.ENDED:
                    self._turn()
            except Exception as error:
                # A bug of ours, or a promise broken by a part: still an end with a reason.
                log.exception("the agent's loop broke")
                outcome = Outcome(OutcomeKind.FAILED, describe(error))
                self._now = Supervision(State.ENDED, outcome=outcome)
            else:
                self._account.find_cause(self._info, self._now.outcome)
            finally:
                self._clean_up()
        unexpected = Outcome(OutcomeKind.FAILED, "the agent ended unexpectedly")
        result = self._account.result(self._now.outcome or unexpected, self._group)
        self._telling.over(result)
        self._telling.end()
        return result

    def _clean_up(self) -> None:
        """Each part is closed, whatever became of the one before."""
        with contextlib.suppress(queue.Empty):
            while True:
                asked = self._inbox.get_nowait().asked
                if asked is not None:
                    asked.cancel()
        with contextlib.ExitStack() as stack:
            # Called in reverse order.
            stack.callback(_closed, lambda: self._observer.stop(seconds=5.0))
            stack.callback(_closed, self._handler.shutdown)
            stack.callback(_closed, self._workers.close)
            stack.callback(self._turn_seen)
            stack.callback(_closed, self._keep)
            stack.callback(_closed, self._workers.end)
            stack.callback(self._turn_seen)
            stack.callback(_closed, self._account.close)
            stack.callback(_closed, self._agreements.end)
            if self._hang is not None:
                stack.callback(_closed, self._hang.end)

    def _keep(self) -> None:
        """Before the rendezvous is left: who goes on may need what is put where it lasts."""
        self._turn_seen(KEEP_SECONDS)
        outcome = self._now.outcome
        done = outcome is not None and outcome.kind is OutcomeKind.SUCCEEDED
        self._account.lost = self._memory.finish(keep=not done)

    # -- the loop -----------------------------------------------------------------------------

    def _turn(self) -> None:
        self._turn_seen()
        stopped = self._stop.climb()
        if stopped is not None:
            self._telling.stopped(stopped)
            self._react(stopped)
            return
        try:
            news = self._inbox.get(timeout=min(HEARD_SECONDS, self._stop.left()))
        except queue.Empty:
            return
        if news.attempt in (None, self._attempt):
            event = news.read()
            if event is not None:
                self._react(event)

    def _react(self, event: Event) -> None:
        before = self._now.state
        self._now, actions = react(self._now, event)
        if self._now.state is not before:
            if before in (State.RUNNING, State.FINISHED):
                self._telling.idle(event)
            log.debug("%s -> %s: %s", before.value, self._now.state.value, summary(event))
        for action in actions:
            self._turn_seen()
            self._do(action)

    # -- commands -----------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        if isinstance(action, Join):
            self._attempt += 1
            self._telling.joining()
            self._observer.join(self._attempt)
        elif isinstance(action, StartWorkers):
            self._start()
        elif isinstance(action, StopWorkers):
            notice = self._options.notice(action.notice) if action.notice else None
            self._telling.stopping(notice)
            self._stop.begin(notice)
        elif isinstance(action, StopSooner):
            self._stop.sooner(self._options.notice(action.notice) if action.notice else None)
        elif isinstance(action, HurryWorkers):
            self._stop.hurry()
        elif isinstance(action, ReportFailure):
            self._report_failure(action)
        elif isinstance(action, ReportDraining):
            self._handler.report_draining(action.reason)
        elif isinstance(action, ReportDone):
            self._agreements.finished()
            if not self._handler.report_done():
                self._react(Changed(Change(ChangeKind.SUCCEEDED, "this node is done")))
        elif not isinstance(action, Finish):
            raise TypeError(f"no action of the policy: {action!r}")

    def _start(self) -> None:
        info = present(self._info, "the generation")
        self._turn_seen(START_SECONDS)
        self._account.begin()
        self._stop.forget()
        self._agreements.begin(info, self._attempt)
        self._started_at = self._clock()
        store = info.bootstrap_store_info
        self._group = WorkerGroup(
            spec=self._spec,
            workers=deal_ranks(info.seat),
            run_id=info.run_id,
            generation=info.generation,
            group_rank=info.rank,
            group_world_size=info.world_size,
            master_addr=store.master_addr,
            master_port=store.master_port,
            restarts=info.restarts + self._own_restarts,
            max_restarts=self._budget(info),
            use_agent_store=self._handler.use_agent_store,
            attempt=self._started,
            incarnation=info.incarnation,
        )
        self._started += 1
        self._telling.starting(info, self._group)
        attempt = self._attempt
        self._memory.begin(info, self._group)
        try:
            self._workers.start(self._group, lambda local: self._worker_ended(attempt, local))
        except ElasticError as error:
            self._account.no_exit(str(error), info)
            self._put(attempt, StartFailed(str(error)))
        self._telling.started(self._group, self._workers.running())
        if self._hang is not None:
            self._hang.begin(info, self._group, attempt)

    def _budget(self, info: RendezvousInfo) -> int:
        """The job's where its rendezvous keeps one, else our own."""
        return self._max_restarts if info.max_restarts is None else info.max_restarts

    def _report_failure(self, failure: ReportFailure) -> None:
        reason, at_start = failure.reason, failure.kind is FailureKind.AT_START
        self._telling.failure(failure.kind, reason, self._hang)
        if self._handler.report_failure_as(failure.kind, reason):
            return
        self._own_restarts += 1
        if at_start:
            self._react(Changed(Change(ChangeKind.FAILED, f"{reason} ({NOT_RETRIED})")))
        elif self._own_restarts > self._max_restarts:
            spent = f"{reason} ({self._max_restarts} of {self._max_restarts} restarts used)"
            self._react(Changed(Change(ChangeKind.FAILED, spent)))

    # -- what observers say, from whatever thread -----------------------------------------------

    def _put(self, attempt: int | None, event: Event) -> None:
        self._inbox.put(_News(attempt, lambda: event))

    def _settled(self, attempt: int, info: RendezvousInfo) -> None:
        self._inbox.put(_News(attempt, lambda: self._take(info)))

    def _take(self, info: RendezvousInfo) -> Event:
        self._info = info
        slots = info.seat.slots
        if slots != self._spec.local_world_size:
            raise ConfigError(
                f"the rendezvous has this node with {slots} slots, and its worker spec "
                f"has {self._spec.local_world_size} workers: give both the same number"
            )
        return Settled(frozenset(range(slots)))

    def _ended(self, attempt: int, error: Exception) -> None:
        change = getattr(error, "change", None)
        if isinstance(error, RendezvousClosed) and isinstance(change, Change):
            self._inbox.put(
                _News(attempt, lambda: JoinEnded(outcome_of(self._account.heard(change))))
            )
        else:
            self._put(attempt, JoinEnded(Outcome(OutcomeKind.FAILED, describe(error))))

    def _changed(self, attempt: int, change: Change) -> None:
        self._inbox.put(_News(attempt, lambda: Changed(self._account.heard(change))))

    def _worker_ended(self, attempt: int, local_rank: int) -> None:
        # Collected in the loop's own turn: reaping is an act, and not an observer's.
        self._inbox.put(_News(attempt, lambda: self._collect(local_rank)))

    def _collect(self, local_rank: int) -> Event | None:
        if local_rank not in self._workers.running():
            return None
        exit_ = self._workers.collect(local_rank)
        self._telling.ended(exit_)
        unsaved = self._stop.noticing and not exit_.ok
        if unsaved:
            log.warning("while it was to save and end: %s", exit_.describe())
        if self._info is not None:
            running = self._now.state is State.RUNNING
            self._account.ended(exit_, self._info, supervised=running)
        kind = failure_kind(
            exit_,
            self._spec.entrypoint,
            uptime=self._clock() - self._started_at,
            first=self._started == 1,
            min_uptime=self._options.min_uptime,
        )
        return WorkerEnded(exit_, kind, unsaved, unsaved and self._stop.undecided)

    def heed(self, number: int) -> None:
        # Read in the loop's own turn: whether workers listen is found by telling them.
        self._inbox.put(_News(None, lambda: self._heed(number)))

    def _heed(self, number: int) -> Event:
        options, name = self._options, signal_name(number)
        why = options.why_drained(number)
        if number in options.drain_signals or (
            number in options.save_signals and self._listens(why)
        ):
            self._telling.draining(name, why)
            return DrainAsked(number, name, why)
        return SignalArrived(number, name)

    def _listens(self, why: str) -> bool:
        """Whether the workers have been told to save, or can be."""
        if self._now.state is State.RUNNING:
            notice = self._options.notice(why)
            return notice is not None and self._stop.tell(notice)
        if self._now.state is State.STOPPING:
            return self._stop.heard
        # Schedulers repeat themselves, and what is being saved is not to be cut short for it.
        outcome = self._now.outcome
        return outcome is not None and outcome.kind is OutcomeKind.DRAINED

    def _hung(self, attempt: int, reason: str) -> None:
        def tell() -> Event:
            if self._info is not None:
                self._account.no_exit(reason, self._info)
            return Hung(reason)

        self._inbox.put(_News(attempt, tell))

    def _broke(self, reason: str) -> None:
        self._put(None, Broke(reason))

    def _agreed(self, attempt: int, need: Need) -> None:
        self._inbox.put(_News(attempt, lambda: self._stop.agreed(need)))


def _answer(asked: Future[Answer], call: Callable[[], Answer]) -> None:
    """What comes of the call is for who asked, and for nobody else."""
    if not asked.set_running_or_notify_cancel():
        return
    try:
        asked.set_result(call())
    except (Exception, SystemExit) as error:
        asked.set_exception(error)


def _closed(close: Callable[[], object]) -> None:
    try:
        close()
    except Exception:
        # How the run ended is known by now, and must still be told.
        log.exception("the end of the run was not clean")
