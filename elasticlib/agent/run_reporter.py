"""What an agent says of its run: the first cause over all nodes, the log, the journal, the result.

The first cause is the one that the job's store took first; what other nodes then say is that
workers of theirs failed, too. No machine's clock is compared with another's. Nothing here decides.
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
from ..rendezvous.interface import RendezvousInfo
from ..rendezvous.membership import Change, ChangeKind
from ..visible import shorten
from ..workers.exits import WorkerExit
from ..workers.interface import StopNotice, Workers
from ..workers.spec import WorkerGroup, WorkerState
from . import policy
from .interface import RootCause, RunResult
from .policy import AgentEvent, Publish, RunOutcome, decode, encode

log = logging.getLogger("elasticlib.agent")

CAUSE = "cause/"
"""What is posted under it: as FIRST, why the generation failed; and ALSO, of each node, which
ranks of it did."""
FIRST = "first"
ALSO = "also/"
STACK_LINES = 40
LONGEST_TRACE = 8 * 1024
LONGEST_TAIL = 4 * 1024
LONGEST_LINE = 1024
MOST_RANKS = 64
Ranks = tuple[int, ...]


# Causes, as the nodes tell one another: bounded, and plain JSON.


def root_cause_of(failure: WorkerExit, host: str, generation: int) -> RootCause:
    """What is told of this failure, in bounds."""
    first = failure.root_failure
    return RootCause(
        host=host,
        generation=generation,
        rank=first.rank,
        local_rank=first.local_rank,
        pid=first.pid,
        returncode=first.returncode,
        signal=first.signal,
        summary=shorten(first.describe(), LONGEST_LINE),
        message=shorten(first.message, LONGEST_LINE),
        traceback=shorten(first.traceback, LONGEST_TRACE),
        stderr_tail=shorten(first.stderr_tail, LONGEST_TAIL),
        log_dir=first.log_dir,
    )


def publish_root_cause(cause: RootCause) -> Publish:
    """Whoever comes later has followed, and says so at the end of its run."""
    return Publish(CAUSE, FIRST, encode(cause), only_if_absent=True)


def publish_failed_ranks(node: int, ranks: Collection[int]) -> Publish:
    """Workers of these ranks failed on this node."""
    return Publish(CAUSE, f"{ALSO}{node}", encode(sorted(ranks)[:MOST_RANKS]))


def merge_root_cause(said: Mapping[str, bytes]) -> RootCause | None:
    """What all nodes said of a generation, by the ends of their keys, as one cause."""
    cause = decode(RootCause, said[FIRST]) if FIRST in said else None
    if cause is None:
        return None
    also = [decode(Ranks, data) or () for key, data in said.items() if key.startswith(ALSO)]
    return with_subsequent_ranks(cause, (rank for ranks in also for rank in ranks[:MOST_RANKS]))


def with_subsequent_ranks(cause: RootCause, ranks: Iterable[int]) -> RootCause:
    """Workers of these ranks failed, and all but the first of them afterwards."""
    return attrs.evolve(cause, subsequent_ranks=tuple(sorted({*ranks} - {cause.rank})))


def summary(event: AgentEvent) -> str:
    """What it was, in a few words: its own where it has some."""
    match event:
        case policy.WorkerExited():
            return event.exit.describe()
        case policy.MembershipChanged():
            return event.change.reason
        case policy.ComponentFailed():
            return event.reason
        case policy.SignalReceived() | policy.DrainRequested():
            return event.name
    return type(event).__name__


class RunReporter:
    """Of one node's run, in the order in which it happens; host: what people know the node by.

    It remembers one generation's ends at a time. Those of workers that did as they were told are
    no failures, and why the job failed is asked of all nodes.
    """

    def __init__(self, host: str, workers: Workers, journal: Journal | None, clock: Clock) -> None:
        self._host = host
        self._workers = workers
        self._journal = journal
        self._guard = SafeCaller(journal)
        self._clock = clock
        self._steps: StepMonitor | None = None
        self._idle_since = self._began_at = self._stopping_at = self._prepared_at = clock()
        self._why, self._planned = "the first generation of this node", False
        self._silent_since: float | None = None
        self._group: WorkerGroup | None = None
        self._exits: dict[int, WorkerExit] = {}
        self._without_exit: RootCause | None = None
        self.failed_on_other_node = False
        """Whether workers of a node that is known have ended the job."""
        self.lost_node_not_replaced = False
        """Whether nobody took the place of a lost node, of which workers here may have failed."""
        self.unsaved_reason = ""
        self.saved_step: int | None = None
        """What was in memory alone and could not be put where it lasts."""

    # -- as it happens ------------------------------------------------------------------------

    def on_run_started(self) -> None:
        self._idle_since = self._clock()

    def on_workers_idle(self, event: AgentEvent) -> None:
        """The workers are not to work any more, for this; those that must be stopped are not gone
        before `stopped`."""
        self._idle_since, self._why = self._clock(), summary(event)
        resized = (
            isinstance(event, policy.MembershipChanged) and event.change.kind is ChangeKind.RESIZE
        )
        self._planned = resized or isinstance(event, policy.DrainRequested)
        self._silent_since = (
            event.inactive_since if isinstance(event, policy.HangDetected) else None
        )

    @property
    def reason(self) -> str:
        """What this node's last generation ended with, or that there was none yet."""
        return self._why

    def on_rendezvous_started(self) -> None:
        self._report_last_steps()
        self._record("rendezvous.started", reason=self._why, is_planned=self._planned)

    def on_prepared(self) -> None:
        """All imports that workers need are done, and the node asks for its first place."""
        self._prepared_at = self._clock()

    def on_prestart(self, group: WorkerGroup) -> None:
        """The workers are about to start that wait for a place in the job."""
        count = len(group.standby_workers)
        log.info(
            "the job goes on: %d worker%s start%s here before this node joins it",
            *(count, "s" * (count > 1), "s" * (count == 1)),
        )

    def on_workers_starting(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        """Another generation's workers are about to start; nothing of the last one counts."""
        self._group, self._began_at = group, self._clock()
        self._exits, self._without_exit, self.failed_on_other_node = {}, None, False
        waited = self._began_at - self._idle_since
        imports = max(0.0, self._prepared_at - self._idle_since)
        first, last = group.workers[0], group.workers[-1]
        ranks = format_ranks(range(first.rank, last.rank + 1))
        importing = f"{imports:.2f} s of imports and " if imports else ""
        # A handler of the user's may give no cause.
        cause = info.reason or self._why
        log.info(
            "%s",
            f"generation {info.generation} after {importing}{waited - imports:.2f} s of "
            f"rendezvous: node {info.rank} of {info.world_size}, {ranks} of {first.world_size}, "
            f"{group.restarts} of {group.max_restarts} restarts; {cause}",
        )
        self._record(
            "generation.started",
            duration_seconds=round(waited, 6),
            import_seconds=round(imports, 6),
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
        self, group: WorkerGroup, names: Mapping[int, str], started_in: Mapping[int, int]
    ) -> None:
        """started_in: in which start of this agent's workers each was begun, by local rank."""
        for worker in group.workers:
            local = worker.local_rank
            if local in names:
                facts = {"local_rank": local, "name": names[local], "attempt": started_in[local]}
                self._record("worker.started", worker.rank, **facts)
        if names and self._workers.reports_heartbeats and self._journal is not None:
            self._steps = StepMonitor(self._began_at)

    def report_steps(self, *, final: bool = False) -> None:
        """Tell of the workers' steps, if that is due. Of those that have ended something is known
        for as long as no others are started."""
        watch, now = self._steps, self._clock()
        if watch is None or not (final or now >= watch.due_at):
            return
        try:
            beats = self._workers.heartbeats()
            final = final or not beats
            beats = self._workers.final_heartbeats() if final else beats
            self._steps, found = watch.read(now, beats, is_final=final)
        except Exception:
            # What is seen is never worth the end of the training.
            log.exception("cannot read the workers' steps")
            self._steps, found = attrs.evolve(watch, due_at=now + MAX_INTERVAL_S), []
        for kind, facts in found:
            self._record(kind, **facts)

    def _report_last_steps(self) -> None:
        """None of the generation's workers is left, and what they did is told before their end."""
        self.report_steps(final=True)
        self._steps = None

    def on_worker_exited(self, exit_: WorkerExit, *, supervised: bool) -> RootCause | None:
        """A worker ended; supervised: while nothing was being stopped. The cause to be told, if
        this is one."""
        self._record(
            "worker.exited",
            exit_.rank,
            local_rank=exit_.local_rank,
            exit_code=exit_.returncode,
            succeeded=exit_.succeeded,
            stopped=exit_.stop_was_requested,
            description=exit_.describe(),
            error="" if exit_.succeeded else exit_.message or exit_.exit_description,
            traceback="" if exit_.succeeded else shorten(exit_.traceback, LONGEST_TRACE),
            uptime_seconds=round(self._clock() - self._began_at, 6),
        )
        # What ends while it is being stopped did what it was told, and failed at nothing; unless
        # it had said before that it failed.
        if exit_.succeeded or exit_.has_failed or supervised:
            self._exits[exit_.local_rank] = exit_
        if exit_.succeeded or not supervised:
            return None
        return root_cause_of(exit_, self._host, self._generation)

    def record_failure_without_exit(self, reason: str) -> RootCause:
        """The workers could not all be started, or hang: no exit will tell of it."""
        said, numbers = shorten(reason, LONGEST_LINE), (self._generation, -1, -1)
        self._without_exit = RootCause(
            self._host, *numbers, pid=0, returncode=0, signal="", summary=said
        )
        return self._without_exit

    def on_hang(self, event: policy.HangDetected) -> RootCause:
        """Workers hang; what is known of it, and the cause to be told."""
        self.log_stacks(event.stacks)
        return self.record_failure_without_exit(event.reason)

    def log_stacks(self, stacks: str) -> None:
        """The first lines of them, if there are any."""
        if stacks:
            log.warning("%s", "\n".join(stacks.splitlines()[: STACK_LINES + 1]))

    def on_failure(self, failure: policy.ReportFailure) -> None:
        log.warning("%s", failure.reason)
        since = self._silent_since
        word = "hang" if since is not None else "killed" if failure.killed else "ordinary"
        silent = None if since is None else round(self._clock() - since, 3)
        self._record(
            "failure",
            reason=failure.reason,
            failure_kind=word,
            seconds_since_heartbeat=silent,
        )

    def on_drain(self, signal: str, why: str) -> None:
        self._record("drain.requested", signal=signal, reason=why)

    def on_stop_started(self, notice: StopNotice | None) -> None:
        self._stopping_at = self._clock()
        why, seconds = ("", 0.0) if notice is None else (notice.reason, notice.grace_s)
        self._record("stopping", notice=why, grace_seconds=seconds, reason=self._why)

    def on_stop_finished(self, end: policy.WorkersStopped) -> None:
        self._idle_since = self._clock()
        seconds = round(self._idle_since - self._stopping_at, 6)
        self._record("stopped", duration_seconds=seconds, survivors=end.unkillable)

    def on_change(self, change: Change) -> None:
        """The generation is over, or the job is."""
        self.failed_on_other_node = change.kind is ChangeKind.FAILED and bool(change.node)

    # -- at the end ---------------------------------------------------------------------------

    @property
    def failed_ranks(self) -> list[int]:
        """Of this node's workers that failed, the first one first."""
        return [found.rank for found in self._exits.values() if found.has_failed]

    def local_root_cause(self) -> RootCause | None:
        """Why the last generation failed, as far as this node knows."""
        failed = [found for found in self._exits.values() if found.has_failed]
        if not failed:
            return self._without_exit
        own = root_cause_of(failed[0], self._host, self._generation)
        return with_subsequent_ranks(own, self.failed_ranks)

    def finish(self, outcome: RunOutcome, cause: RootCause | None) -> RunResult:
        """How the run ended, and why the job did if it failed; that is told, too."""
        succeeded, group = outcome.state is WorkerState.SUCCEEDED, self._group
        cause = None if succeeded or self.lost_node_not_replaced else cause
        exits = self._exits.values()
        result = RunResult(
            state=outcome.state,
            reason=f"{outcome.reason}; {self.unsaved_reason}"
            if self.unsaved_reason
            else outcome.reason,
            return_values={found.rank: found.value for found in exits} if succeeded else {},
            failures={}
            if succeeded
            else {found.rank: found for found in exits if not found.succeeded},
            generation=self._generation,
            restarts=0 if group is None else group.restarts,
            signal=outcome.signal,
            root_cause=cause,
            evicted=outcome.evicted,
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
            root_cause=None if cause is None else _in_short(cause),
        )
        # What was told has been heard, unless that takes too long.
        self._guard.flush()
        return result

    @property
    def _generation(self) -> int:
        return 0 if self._group is None else self._group.generation

    def _record(self, kind: str, rank: int | None = None, **facts: object) -> None:
        if self._journal is not None:
            tell, generation = self._journal.record, self._generation
            told = partial(tell, kind, generation=generation, rank=rank, **facts)
            self._guard.call(told, is_nonblocking=self._journal.is_nonblocking)


def _in_short(cause: RootCause) -> dict[str, object]:
    return {"host": cause.host, "rank": cause.rank, "what": cause.summary}
