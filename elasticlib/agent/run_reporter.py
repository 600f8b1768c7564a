"""Report of an agent's run: log messages, events, the root cause over all nodes, and the result.

The root cause is the failure with the strongest evidence (`rendezvous/blame.py`); of several, the
one that the job's store accepted first. Other nodes add the ranks that failed later. So clocks of
different machines are never compared. This module decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial

import attrs

from ..clock import Clock
from ..observe.formatting import format_ranks
from ..observe.journal import Journal, SafeCaller
from ..observe.step_monitor import MAX_INTERVAL_S, StepMonitor
from ..rendezvous.blame import FailureKind, find_cause
from ..rendezvous.interface import RendezvousInfo
from ..rendezvous.membership import Change, ChangeKind
from ..sanitize import shorten
from ..workers.exits import WorkerExit
from ..workers.interface import StopNotice, Workers
from ..workers.spec import WorkerGroup, WorkerState
from . import policy
from .interface import RootCause, RunResult
from .policy import AgentEvent, Publish, RunOutcome, decode, encode

log = logging.getLogger("elasticlib.agent")

ROOT_CAUSE_TOPIC = "cause/"
FIRST_FAILURE_PREFIX = "first/"  # followed by a FailureKind: the first failure of that kind
FAILED_RANKS_PREFIX = "also/"  # followed by a node's rank: all its ranks that failed

MAX_STACK_LINES = 40
MAX_TRACEBACK_BYTES = 8 * 1024
MAX_TAIL_BYTES = 4 * 1024
MAX_LINE_BYTES = 1024
MAX_RANKS = 64
Ranks = tuple[int, ...]


def root_cause_of(failure: WorkerExit, host: str, generation: int) -> RootCause:
    """Convert the failure of a worker to a RootCause, with texts of bounded length."""
    first = failure.root_failure
    return RootCause(
        host=host,
        generation=generation,
        rank=first.rank,
        local_rank=first.local_rank,
        pid=first.pid,
        returncode=first.returncode,
        signal=first.signal,
        summary=shorten(first.describe(), MAX_LINE_BYTES),
        message=shorten(first.message, MAX_LINE_BYTES),
        traceback=shorten(first.traceback, MAX_TRACEBACK_BYTES),
        stderr_tail=shorten(first.stderr_tail, MAX_TAIL_BYTES),
        log_dir=first.log_dir,
    )


def publish_root_cause(cause: RootCause, kind: FailureKind) -> Publish:
    """Return the command that publishes a root cause, unless a node has published an equal kind."""
    key = f"{FIRST_FAILURE_PREFIX}{kind.value}"
    return Publish(ROOT_CAUSE_TOPIC, key, encode(cause), only_if_absent=True)


def publish_failed_ranks(node_rank: int, ranks: Collection[int]) -> Publish:
    """Return the command that publishes which ranks of this node failed."""
    key = f"{FAILED_RANKS_PREFIX}{node_rank}"
    return Publish(ROOT_CAUSE_TOPIC, key, encode(sorted(ranks)[:MAX_RANKS]))


def merge_root_cause(messages: Mapping[str, bytes]) -> RootCause | None:
    """Combine the published root cause with the failed ranks. None if no cause is published."""
    by_strength = sorted(FailureKind, key=lambda kind: -kind.strength)
    published = (messages.get(f"{FIRST_FAILURE_PREFIX}{kind.value}", b"") for kind in by_strength)
    cause = next(filter(None, (decode(RootCause, data) for data in published)), None)
    if cause is None:
        return None
    ranks: set[int] = set()
    for key, value in messages.items():
        if key.startswith(FAILED_RANKS_PREFIX):
            ranks.update((decode(Ranks, value) or ())[:MAX_RANKS])
    return with_subsequent_ranks(cause, ranks)


def with_subsequent_ranks(cause: RootCause, ranks: Iterable[int]) -> RootCause:
    """Return the cause with the ranks that failed after it."""
    return attrs.evolve(cause, subsequent_ranks=tuple(sorted({*ranks} - {cause.rank})))


def summary(event: AgentEvent) -> str:
    """Return a short text about an event: its own reason, or else the name of its class."""
    match event:
        case policy.WorkerExited():
            return event.exit.describe()
        case policy.MembershipChanged():
            return event.change.reason
        case policy.ComponentFailed() | policy.HangDetected() | policy.WorkerStartFailed():
            return event.reason
        case policy.SignalReceived() | policy.DrainRequested():
            return event.name
    return type(event).__name__


class RunReporter:
    """Reports one agent's run to the log and the journal, and builds its result.

    It stores the failures of one generation at a time. A worker that exits because it was stopped
    has not failed. A journal that raises is disabled.
    """

    def __init__(self, host: str, workers: Workers, journal: Journal | None, clock: Clock) -> None:
        self._host = host
        self._workers = workers
        self._journal = journal
        self._caller = SafeCaller(journal)
        self._clock = clock
        self._steps: StepMonitor | None = None  # step events of the group, None without a group
        self._idle_since = clock()  # when the workers stopped to train
        self._prepared_at = clock()  # when this node was ready to join for the first time
        self._started_at = clock()  # start of the current group
        self._stop_started_at = clock()
        self._reason = "the first generation of this node"  # why the last group ended
        self._is_planned = False  # the last group ended for a resize or a drain, without a failure
        self._inactive_since: float | None = None  # last progress before a hang
        self._group: WorkerGroup | None = None
        self._exits: dict[int, WorkerExit] = {}  # by local rank, in order
        self._failure_without_exit: RootCause | None = None  # a failed start, or a hang
        self.failed_on_other_node = False  # the job failed because of workers of another node
        self.lost_node_not_replaced = False  # then failures of workers here may be a consequence
        self.unsaved_reason = ""  # which snapshots could not be written at the end
        self.saved_step: int | None = None  # step that was written at the end

    @property
    def reason(self) -> str:
        """Why this node's last group ended."""
        return self._reason

    # -- events, in their usual order -----------------------------------------------------------

    def on_run_started(self) -> None:
        self._idle_since = self._clock()

    def on_rendezvous_started(self) -> None:
        self._report_last_steps()
        self._record("rendezvous.started", reason=self._reason, is_planned=self._is_planned)

    def on_prepared(self) -> None:
        """Note that the imports are done, and the node joins for the first time."""
        self._prepared_at = self._clock()

    def on_prestart(self, group: WorkerGroup) -> None:
        """Report that standby workers start while other nodes train."""
        log.info(
            "the job is running: starting %d standby worker(s) before this node joins it",
            len(group.standby_workers),
        )

    def on_workers_starting(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        """Report the generation, and forget the exits of the last one."""
        self._group, self._started_at = group, self._clock()
        self._exits, self._failure_without_exit, self.failed_on_other_node = {}, None, False
        waited_s = self._started_at - self._idle_since
        import_s = max(0.0, self._prepared_at - self._idle_since)
        first, last = group.workers[0], group.workers[-1]
        ranks = format_ranks(range(first.rank, last.rank + 1))
        imports = f"imports took {import_s:.2f} s, " if import_s else ""
        cause = info.reason or self._reason  # a user's handler may give no cause
        log.info(
            "%s",
            f"generation {info.generation}: {imports}rendezvous took {waited_s - import_s:.2f} s; "
            f"node rank {info.rank} of {info.world_size}, {ranks} of world size "
            f"{first.world_size}, restarts {group.restarts}/{group.max_restarts}; reason: {cause}",
        )
        self._record(
            "generation.started",
            duration_seconds=round(waited_s, 6),
            import_seconds=round(import_s, 6),
            attempt=group.attempt,
            node_rank=info.rank,
            node_count=info.world_size,
            ranks=[first.rank, last.rank],
            world_size=first.world_size,
            role=[first.role_rank, first.role_world_size],
            restarts=group.restarts,
            max_restarts=group.max_restarts,
            reason=cause,
            trigger=None if info.trigger is None else info.trigger.value,
            incarnation=info.incarnation,
        )

    def on_workers_started(
        self, group: WorkerGroup, names: Mapping[int, str], attempts: Mapping[int, int]
    ) -> None:
        """Report the running workers.

        Args:
            group: the group.
            names: names of the running workers by local rank.
            attempts: the number of the start in which each worker was started, by local rank.
        """
        for worker in group.workers:
            local = worker.local_rank
            if local in names:
                data = {"local_rank": local, "name": names[local], "attempt": attempts[local]}
                self._record("worker.started", worker.rank, **data)
        if names and self._workers.reports_heartbeats and self._journal is not None:
            self._steps = StepMonitor(self._started_at)

    def report_steps(self, *, final: bool = False) -> None:
        """Report the workers' progress if that is due, or with `final` in any case."""
        watch, now = self._steps, self._clock()
        if watch is None or not (final or now >= watch.due_at):
            return
        try:
            heartbeats = self._workers.heartbeats()
            final = final or not heartbeats
            heartbeats = self._workers.final_heartbeats() if final else heartbeats
            self._steps, events = watch.read(now, heartbeats, is_final=final)
        except Exception:
            # An error in a report must not stop the training.
            log.exception("cannot read the workers' steps, trying again in %g s", MAX_INTERVAL_S)
            self._steps, events = attrs.evolve(watch, due_at=now + MAX_INTERVAL_S), []
        for kind, data in events:
            self._record(kind, **data)

    def _report_last_steps(self) -> None:
        self.report_steps(final=True)
        self._steps = None

    def on_worker_exited(self, exit_: WorkerExit, *, is_stopping: bool) -> WorkerExit | None:
        """Report the exit of a worker.

        Args:
            exit_: the exit.
            is_stopping: the workers were being stopped.

        Returns:
            The failure that the other nodes must know, or None if this exit tells them nothing.
        """
        self._record(
            "worker.exited",
            exit_.rank,
            local_rank=exit_.local_rank,
            exit_code=exit_.returncode,
            succeeded=exit_.succeeded,
            stopped=exit_.stop_was_requested,
            description=exit_.describe(),
            error="" if exit_.succeeded else exit_.message or exit_.exit_description,
            traceback="" if exit_.succeeded else shorten(exit_.traceback, MAX_TRACEBACK_BYTES),
            uptime_seconds=round(self._clock() - self._started_at, 6),
        )
        # A worker that was stopped has failed only if it reported a failure before.
        if exit_.succeeded or exit_.has_failed or not is_stopping:
            self._exits[exit_.local_rank] = exit_
        cause = exit_.root_failure
        is_evidence = exit_.failed_before_stop and cause.failure_kind.names_host
        if exit_.succeeded or (is_stopping and not is_evidence):
            return None
        return find_cause((cause, *self._root_failures))

    def add_exits_before(self, exit_: WorkerExit) -> WorkerExit:
        """Return the exit with the ranks of this node that had exited with success before."""
        left = tuple(sorted(other.rank for other in self._exits.values() if other.succeeded))
        return attrs.evolve(exit_, ranks_left_before=left)

    def on_failure_without_exit(self, reason: str, host: str = "") -> RootCause:
        """Record a failed start of workers, or a hang. Return the root cause to publish.

        Args:
            reason: what has failed.
            host: the host of the worker that hangs. Default: this one.
        """
        numbers, text = (self._generation, -1, -1), shorten(reason, MAX_LINE_BYTES)
        self._failure_without_exit = RootCause(
            host or self._host, *numbers, pid=0, returncode=0, signal="", summary=text
        )
        return self._failure_without_exit

    def on_hang(self, event: policy.HangDetected) -> RootCause:
        """Log the stacks of a hang, and record the hang. Return the root cause to publish."""
        self.log_stacks(event.stacks)
        return self.on_failure_without_exit(event.reason, event.host)

    def log_stacks(self, stacks: str) -> None:
        """Log the first lines of the stacks, if there are any."""
        if stacks:
            log.warning("%s", "\n".join(stacks.splitlines()[: MAX_STACK_LINES + 1]))

    def on_workers_idle(self, event: AgentEvent) -> None:
        """Note that the workers shall not train any more. Some may still be running."""
        self._idle_since, self._reason = self._clock(), summary(event)
        self._is_planned, self._inactive_since = False, None
        match event:
            case policy.MembershipChanged(change):
                self._is_planned = change.kind.is_planned
            case policy.DrainRequested():
                self._is_planned = True
            case policy.HangDetected():
                self._inactive_since = event.inactive_since

    def on_failure(self, failure: policy.ReportFailure) -> None:
        log.warning("%s", failure.reason)
        self._is_planned = False  # It may have happened during a resize.
        since = self._inactive_since
        kind = (
            "hang"
            if since is not None
            else "killed"
            if failure.kind is FailureKind.KILLED
            else "ordinary"
        )
        inactive_s = None if since is None else round(self._clock() - since, 3)
        self._record(
            "failure",
            reason=failure.reason,
            failure_kind=kind,
            seconds_since_heartbeat=inactive_s,
        )

    def on_control(self, action: str, by: str) -> None:
        """Report that an operator has requested an action.

        Args:
            action: drain, stop or restart.
            by: the operator.
        """
        log.info("%s has requested: %s", by, action)
        self._record("control.requested", action=action, by=by)

    def on_drain(self, signal: str, reason: str) -> None:
        self._record("drain.requested", signal=signal, reason=reason)

    def on_stop_started(self, notice: StopNotice | None) -> None:
        self._stop_started_at = self._clock()
        reason, grace_s = ("", 0.0) if notice is None else (notice.reason, notice.grace_s)
        self._record("stopping", notice=reason, grace_seconds=grace_s, reason=self._reason)

    def on_stop_finished(self, event: policy.WorkersStopped) -> None:
        self._idle_since = self._clock()
        seconds = round(self._idle_since - self._stop_started_at, 6)
        self._record("stopped", duration_seconds=seconds, survivors=event.unkillable)

    def on_change(self, change: Change) -> None:
        """Note the change that ends the generation, and whether a node has made the job fail."""
        self.failed_on_other_node = change.kind is ChangeKind.FAILED and bool(change.node)

    # -- at the end -----------------------------------------------------------------------------

    @property
    def failed_ranks(self) -> list[int]:
        """The global ranks of this node that failed, in order of their failure."""
        return [exit_.rank for exit_ in self._exits.values() if exit_.has_failed]

    def local_root_cause(self) -> RootCause | None:
        """Return why the last generation failed, as far as this node knows."""
        if not self._root_failures:
            return self._failure_without_exit
        cause = root_cause_of(find_cause(self._root_failures), self._host, self._generation)
        return with_subsequent_ranks(cause, self.failed_ranks)

    @property
    def _root_failures(self) -> list[WorkerExit]:
        return [exit_.root_failure for exit_ in self._exits.values() if exit_.has_failed]

    def finish(self, outcome: RunOutcome, cause: RootCause | None) -> RunResult:
        """Report the end of the run, and return its result. `cause`: why the job failed."""
        succeeded, group = outcome.state is WorkerState.SUCCEEDED, self._group
        cause = None if succeeded or self.lost_node_not_replaced else cause
        exits, unsaved = self._exits.values(), self.unsaved_reason
        result = RunResult(
            state=outcome.state,
            reason=f"{outcome.reason}; {unsaved}" if unsaved else outcome.reason,
            return_values={exit_.rank: exit_.value for exit_ in exits} if succeeded else {},
            failures={exit_.rank: exit_ for exit_ in exits if not (succeeded or exit_.succeeded)},
            generation=self._generation,
            restarts=0 if group is None else group.restarts,
            signal=outcome.signal,
            root_cause=cause,
            evicted=outcome.evicted,
            is_unfit=outcome.is_unfit,
        )
        self._report_last_steps()
        if self.saved_step is not None:
            self._record("checkpoint.saved", step=self.saved_step, count=1)
        self._record(
            "run.finished",
            state=result.state.value,
            reason=result.reason,
            exit_code=result.exit_code,
            expelled=result.evicted,
            root_cause=cause and {"host": cause.host, "rank": cause.rank, "what": cause.summary},
        )
        # Wait until the journal has the events, for a bounded time.
        self._caller.flush()
        return result

    @property
    def _generation(self) -> int:
        return 0 if self._group is None else self._group.generation

    def _record(self, kind: str, rank: int | None = None, **data: object) -> None:
        if self._journal is not None:
            generation, journal = self._generation, self._journal
            record = partial(journal.record, kind, generation=generation, rank=rank, **data)
            self._caller.call(record, is_nonblocking=journal.is_nonblocking)
