"""The agent of one node: one inbox, one loop, and the policy between them.

Everything that happens becomes an event in the inbox; the loop asks the policy and carries out
its commands. Nothing else starts, stops or reports.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
from collections.abc import Callable, Iterable

import attrs

from ..clock import Clock, monotonic
from ..errors import ConfigError, ElasticError, RendezvousClosed, describe
from ..rendezvous.change import Change, ChangeKind
from ..rendezvous.interface import RendezvousHandler, RendezvousInfo
from ..workers.exits import WorkerExit
from ..workers.interface import Workers
from ..workers.ladder import Ladder, Rung
from ..workers.spec import WorkerGroup, WorkerSpec, WorkerState, deal_ranks
from .interface import ElasticAgent, RunResult
from .observers import RendezvousObserver, SignalObserver
from .policy import (
    Action,
    Changed,
    Event,
    Finish,
    GroupStopped,
    Join,
    JoinEnded,
    KillWorkers,
    Outcome,
    OutcomeKind,
    ReportDone,
    ReportFailure,
    Settled,
    SignalArrived,
    StartFailed,
    StartWorkers,
    State,
    StopWorkers,
    Supervision,
    WorkerEnded,
    outcome_of,
    react,
)

log = logging.getLogger("elasticlib.agent")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_STATES = {
    OutcomeKind.SUCCEEDED: WorkerState.SUCCEEDED,
    OutcomeKind.FAILED: WorkerState.FAILED,
    OutcomeKind.SIGNALLED: WorkerState.STOPPED,
}


@attrs.frozen
class _News:
    """An entry of the inbox; attempt is None where it belongs to no particular one."""

    attempt: int | None
    read: Callable[[], Event | None]


class LocalElasticAgent(ElasticAgent):
    """Supervises a node's workers, whatever `workers` runs them as.

    Args:
        spec: what to run.
        handler: how the node meets the others; shut down when the run is over.
        workers: runs the processes (`elasticlib.workers.local.LocalWorkers`).
        max_restarts: of a handler that keeps no budget for the job.
        ladder: how workers are stopped, on every path.
        interval: seconds between looks at a handler that cannot push.
        signals: which of them end the run; those ignored on entry stay ignored.
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
        signals: Iterable[int] = SIGNALS,
        clock: Clock = monotonic,
    ) -> None:
        self._spec = spec
        self._handler = handler
        self._workers = workers
        self._max_restarts = max_restarts
        self._ladder = ladder or Ladder()
        self._clock = clock
        self._inbox: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._signals = SignalObserver(signals, self._signal)
        self._observer = RendezvousObserver(
            handler, interval, settled=self._settled, ended=self._ended, changed=self._changed
        )
        self._now = Supervision()
        self._attempt = 0
        self._started = 0
        self._own_restarts = 0
        self._info: RendezvousInfo | None = None
        self._group: WorkerGroup | None = None
        self._stopping_since: float | None = None
        self._rung = Rung.TERM
        self._idle_since = clock()
        self._exits: dict[int, WorkerExit] = {}

    def get_worker_group(self) -> WorkerGroup | None:
        return self._group

    def run(self) -> RunResult:
        self._idle_since = self._clock()
        with self._signals:
            self._observer.start()
            try:
                # Side by side with the rendezvous, as both take their time. What cannot work
                # is said by the start, to which it belongs.
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
            finally:
                self._clean_up()
        return self._result()

    def _clean_up(self) -> None:
        """Each part is closed, whatever became of the one before."""
        with contextlib.ExitStack() as stack:
            # Called in reverse order.
            stack.callback(_closed, lambda: self._observer.stop(seconds=5.0))
            stack.callback(_closed, self._handler.shutdown)
            stack.callback(_closed, self._workers.close)

    # -- the loop -----------------------------------------------------------------------------

    def _turn(self) -> None:
        self._climb()
        try:
            news = self._inbox.get(timeout=self._patience())
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
                self._idle_since = self._clock()
            log.debug("%s -> %s: %s", before.value, self._now.state.value, _summary(event))
        for action in actions:
            self._do(action)
        self._check_stopped()

    def _patience(self) -> float | None:
        """Seconds until the ladder's next rung; None to wait for whatever comes."""
        if self._stopping_since is None:
            return None
        return self._ladder.left(self._clock() - self._stopping_since)

    def _climb(self) -> None:
        if self._stopping_since is None:
            return
        rung = self._ladder.rung(self._clock() - self._stopping_since)
        if rung is self._rung:
            return
        self._rung = rung
        names = ", ".join(f"{name}" for name in self._workers.running().values())
        if rung is Rung.KILL:
            log.warning("still there after %g s, killing: %s", self._ladder.grace, names)
            self._workers.kill()
        else:
            self._stopping_since = None
            self._react(GroupStopped(left=names))

    def _check_stopped(self) -> None:
        if self._stopping_since is not None and not self._workers.running():
            self._stopping_since = None
            self._react(GroupStopped())

    # -- commands -----------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        if isinstance(action, Join):
            self._attempt += 1
            self._observer.join(self._attempt)
        elif isinstance(action, StartWorkers):
            self._start()
        elif isinstance(action, StopWorkers):
            self._stopping_since, self._rung = self._clock(), Rung.TERM
            self._workers.terminate()
        elif isinstance(action, KillWorkers):
            self._workers.kill()
        elif isinstance(action, ReportFailure):
            self._report_failure(action.reason)
        elif isinstance(action, ReportDone):
            if not self._handler.report_done():
                self._react(Changed(Change(ChangeKind.SUCCEEDED, "this node is done")))
        else:
            assert isinstance(action, Finish)

    def _start(self) -> None:
        info = self._info
        assert info is not None
        self._exits = {}
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
        )
        self._started += 1
        self._tell_start(info, self._group)
        attempt = self._attempt
        try:
            self._workers.start(self._group, lambda local: self._worker_ended(attempt, local))
        except ElasticError as error:
            self._put(attempt, StartFailed(str(error)))

    def _budget(self, info: RendezvousInfo) -> int:
        """The job's where its rendezvous keeps one, else our own."""
        return self._max_restarts if info.max_restarts is None else info.max_restarts

    def _tell_start(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        ranks = f"{group.workers[0].rank}-{group.workers[-1].rank}"
        log.info(
            "generation %d after %.2f s: node %d of %d, ranks %s of %d, %d of %d restarts; %s",
            info.generation,
            self._clock() - self._idle_since,
            info.rank,
            info.world_size,
            ranks,
            group.workers[0].world_size,
            group.restarts,
            group.max_restarts,
            info.cause,
        )

    def _report_failure(self, reason: str) -> None:
        log.warning("%s", reason)
        if self._handler.report_failure(reason):
            return
        self._own_restarts += 1
        if self._own_restarts > self._max_restarts:
            spent = f"{reason} ({self._max_restarts} of {self._max_restarts} restarts used)"
            self._react(Changed(Change(ChangeKind.FAILED, spent)))

    # -- what observers say, from whatever thread -----------------------------------------------

    def _put(self, attempt: int | None, event: Event) -> None:
        self._inbox.put(_News(attempt, lambda: event))

    def _settled(self, attempt: int, info: RendezvousInfo) -> None:
        # Here, in the observer's thread, as the loop waits for nothing.
        self._workers.await_prepared()
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
        self._put(attempt, JoinEnded(_outcome_of(error)))

    def _changed(self, attempt: int, change: Change) -> None:
        self._put(attempt, Changed(change))

    def _worker_ended(self, attempt: int, local_rank: int) -> None:
        # Collected in the loop's own turn: reaping is an act, and not an observer's.
        self._inbox.put(_News(attempt, lambda: self._collect(local_rank)))

    def _collect(self, local_rank: int) -> Event | None:
        if local_rank not in self._workers.running():
            return None
        exit_ = self._workers.collect(local_rank)
        # What ends while it is being stopped did what it was told, and failed at nothing.
        if exit_.ok or self._now.state is State.RUNNING:
            self._exits[local_rank] = exit_
        return WorkerEnded(exit_)

    def _signal(self, number: int) -> None:
        self._put(None, SignalArrived(number, signal.Signals(number).name))

    # -- the end ------------------------------------------------------------------------------

    def _result(self) -> RunResult:
        outcome = self._now.outcome or Outcome(OutcomeKind.FAILED, "the agent ended unexpectedly")
        group = self._group
        succeeded = outcome.kind is OutcomeKind.SUCCEEDED
        exits = self._exits.values()
        return RunResult(
            state=_STATES[outcome.kind],
            reason=outcome.reason,
            values={e.rank: e.value for e in exits} if succeeded else {},
            failures={} if succeeded else {e.rank: e for e in exits if not e.ok},
            generation=0 if group is None else group.generation,
            restarts=0 if group is None else group.restarts,
            signal=outcome.signal,
        )


def _closed(close: Callable[[], object]) -> None:
    try:
        close()
    except Exception:
        # How the run ended is known by now, and must still be told.
        log.exception("the end of the run was not clean")


def _outcome_of(error: Exception) -> Outcome:
    change = getattr(error, "change", None)
    if isinstance(error, RendezvousClosed) and isinstance(change, Change):
        return outcome_of(change)
    return Outcome(OutcomeKind.FAILED, describe(error))


def _summary(event: Event) -> str:
    if isinstance(event, WorkerEnded):
        return event.exit.describe()
    if isinstance(event, Changed):
        return event.change.reason
    if isinstance(event, SignalArrived):
        return event.name
    return type(event).__name__
