"""The report of an agent's run: log messages, events, the root cause, and the result.

Everything here follows from the events of the machine and what it decided: `observe` is called
with each event, and the state before and after it. This module decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import attrs

from ..clock import Clock
from ..observe import event_kinds as kinds
from ..observe.formatting import format_ranks
from ..observe.journal import Journal, SafeCaller
from ..observe.step_monitor import MAX_INTERVAL_S, StepMonitor
from ..rendezvous.blame import FailureDetails, FailureKind, Verdict, find_cause
from ..rendezvous.interface import (
    Joined,
    MembershipChanged,
    PeerMessages,
    RendezvousInfo,
    Report,
    ReportKind,
)
from ..sanitize import shorten
from ..signals import signal_name
from ..workers.exits import WorkerExit
from ..workers.interface import DRAIN, PREEMPTED, Heartbeat, StopHow
from ..workers.spec import WorkerGroup, WorkerState
from .answers import describe_reaction
from .hang_detector import HangDetector
from .interface import RootCause, RunResult
from .machine import MachineState, Phase, after_others, describe, details_of
from .messages import (
    Action,
    Effect,
    Event,
    Finished,
    Meaning,
    NodeReady,
    Requested,
    RunOutcome,
    SignalReceived,
    StopWorkers,
    WorkerExited,
    WorkersSeen,
)

log = logging.getLogger("elasticlib.agent")

MAX_STACK_LINES = 40
NAMED_AFTER_S = 1.0  # an ordinary exit is quicker, and needs no message
MAX_TRACEBACK_BYTES = 8 * 1024
MAX_TAIL_BYTES = 4 * 1024
MAX_LINE_BYTES = 1024
NEVER = float("inf")
_WAYS = {
    StopHow.LEAVE: "asking them to leave it",
    StopHow.TERM: "sending SIGTERM",
    StopHow.KILL: "killing",
}


def remote_cause(verdict: Verdict, generation: int) -> RootCause:
    """Return the failure on another node that the job's leader has found to be the cause."""
    evidence, details = verdict.evidence, verdict.details or FailureDetails(verdict.evidence.rank)
    if evidence.kind is FailureKind.ELSEWHERE:  # No worker has failed in a hang.
        details = attrs.evolve(details, rank=-1)
    return root_cause(evidence.host, generation, evidence.text, details)


def root_cause(host: str, generation: int, summary: str, details: FailureDetails) -> RootCause:
    """Return a failure as a RootCause, with texts of bounded length."""
    return RootCause(
        host=host,
        generation=generation,
        rank=details.rank,
        local_rank=details.local_rank,
        pid=details.pid,
        returncode=details.returncode,
        signal=signal_name(-details.returncode) if details.returncode < 0 else "",
        summary=shorten(summary, MAX_LINE_BYTES),
        message=shorten(details.message, MAX_LINE_BYTES),
        traceback=shorten(details.traceback, MAX_TRACEBACK_BYTES),
        stderr_tail="" if details.traceback else shorten(details.stderr_tail, MAX_TAIL_BYTES),
        log_dir=details.log_dir,
    )


@attrs.frozen
class _Group:
    """The reported facts of a generation."""

    number: int = 0
    restarts: int = 0
    started_at: float = 0.0
    ranks: range = range(0)  # of the members of this node


class RunObserver:
    """Reports one agent's run to the log and the journal, and builds its result.

    One thread calls the methods. A journal that raises is disabled.

    Args:
        host: the name of this machine.
        journal: receives each event.
        clock: the time source.
        shutdown_timeout: seconds in which the process of a failed worker may end.
    """

    def __init__(
        self, host: str, journal: Journal | None, clock: Clock, shutdown_timeout: float
    ) -> None:
        self._host, self._journal, self._clock = host, journal, clock
        self._shutdown_timeout = shutdown_timeout
        self._caller = SafeCaller(journal)
        self._group = _Group()
        self._unnamed: dict[int, int] = {}  # ranks of the workers not reported yet, by local rank
        self._hang: HangDetector | None = None  # of the group
        self._has_warned = False  # that no steps are reported
        self._names: dict[int, str] = {}  # of the workers, for messages, by local rank
        # When the program of each worker was first seen to have ended before its process.
        self._ending: dict[int, float] = {}
        self._named: set[int] = set()  # a message has named these ending workers
        self._steps: StepMonitor | None = None  # step events of the group, None without a group
        self._last_heartbeats: dict[int, Heartbeat] = {}
        self._idle_since = self._prepared_at = self._stop_started_at = clock()
        self._reason = "the first generation of this node"  # why the last group ended
        self._is_planned = False  # it ended for a resize or a drain, without a failure
        self._failures: dict[int, WorkerExit] = {}  # of this generation, by local rank, in order
        self._failure_without_exit: RootCause | None = None  # an unfit node, or a hang
        self._end: MembershipChanged | None = None  # the change that ended the job
        self._saved_step: int | None = None

    # -- reports of the agent -------------------------------------------------------------------

    def on_run_started(self) -> None:
        """Note that the run has begun."""
        self._idle_since = self._clock()
        self._record(kinds.RendezvousStarted(reason=self._reason, is_planned=False))

    def on_start(self, group: WorkerGroup) -> None:
        """Report the workers that are about to start."""
        if not group.workers:
            log.info(
                "the job is running: starting %d standby worker(s) before this node joins it",
                len(group.standby_workers),
            )
        self._unnamed = {worker.local_rank: worker.rank for worker in group.workers}
        self._names = {n: f"worker of rank {rank} (local {n}" for n, rank in self._unnamed.items()}
        if group.workers and self._journal is not None:
            self._steps = StepMonitor(self._clock())

    @property
    def due_at(self) -> float:
        """The time at which the steps of the workers must be read."""
        return NEVER if self._steps is None else self._steps.due_at

    # -- what follows from each event ------------------------------------------------------------

    def observe(
        self, event: Event, before: MachineState, after: MachineState, effects: Sequence[Effect]
    ) -> None:
        """Report what an event has changed."""
        match event:
            case NodeReady() if not before.is_prepared:
                self._prepared_at = self._clock()
            case Joined() if after.phase is Phase.ACTIVE:
                self._on_joined(event.generation, after)
            case WorkersSeen():
                self._on_seen(after)
            case WorkerExited() if before.alive != after.alive:
                self._on_exit(after_others(event.exit, before.exits), event.unfit, before)
            case MembershipChanged() if before.outcome is not after.outcome:
                self._end = event
            case Requested():
                self._on_request(event, before, after, effects)
            case Finished(problem=problem, saved_step=step):
                self._saved_step = step
                if problem:
                    log.warning("%s", problem)
        if after.takes_notices and not before.takes_notices and isinstance(event, PeerMessages):
            log.debug("the script takes notices on another node")
        self._hang = after.hang
        for effect in effects:
            self._on_effect(effect, event, before, after)
        if before.phase is not after.phase:
            self._on_phase(event, before, after, effects)

    def _on_request(
        self,
        request: Requested,
        before: MachineState,
        after: MachineState,
        effects: Sequence[Effect],
    ) -> None:
        if request.id and describe_reaction(request, before, after, effects).done:
            log.info("%s has requested: %s", request.by, request.action.value)
            self._record(kinds.ControlRequested(action=request.action.value, by=request.by))
        if request.action is not Action.RESTART:
            self._record(kinds.DrainRequested(signal=request.source, reason=request.reason))

    def _on_effect(
        self, effect: Effect, event: Event, before: MachineState, after: MachineState
    ) -> None:
        if isinstance(effect, StopWorkers) and effect.why:
            views = ((n, after.view.get(n)) for n in effect.local_ranks)
            names = ", ".join((one and one.name) or f"local rank {n}" for n, one in views)
            log.warning("%s, %s: %s", effect.why, _WAYS[effect.how], names)
        elif isinstance(effect, Report) and effect.kind is ReportKind.FAILURE:
            self._on_failure(effect, event, before)
        is_drain = isinstance(effect, Report) and effect.kind is ReportKind.DRAIN
        if is_drain and isinstance(event, SignalReceived):
            reason = PREEMPTED if event.meaning is Meaning.DRAIN_IF_NOTICED else DRAIN
            self._record(kinds.DrainRequested(signal=event.name, reason=reason))

    def _on_failure(self, report: Report, event: Event, before: MachineState) -> None:
        log.warning("%s", report.reason)
        self._is_planned = False  # It may have happened during a resize.
        hang = before.hang
        # A failure of an active generation that is no exit of a worker is a hang.
        is_hang = hang is not None and not isinstance(event, WorkerExited)
        since = hang.inactive_since if hang is not None and is_hang else None
        is_killed = report.evidence is not None and report.evidence.kind is FailureKind.KILLED
        kind = "hang" if since is not None else "killed" if is_killed else "ordinary"
        inactive_s = None if since is None else round(self._clock() - since, 3)
        self._record(
            kinds.Failure(
                reason=report.reason, failure_kind=kind, seconds_since_heartbeat=inactive_s
            )
        )
        if not isinstance(event, WorkerExited):
            self._note_failure_without_exit(report.reason)

    def _note_failure_without_exit(self, reason: str) -> None:
        numbers, text = (self._group.number, -1, -1), shorten(reason, MAX_LINE_BYTES)
        self._failure_without_exit = self._failure_without_exit or RootCause(
            self._host, *numbers, pid=0, returncode=0, signal="", summary=text
        )

    def _on_joined(self, info: RendezvousInfo, after: MachineState) -> None:
        now = self._clock()
        self._failures, self._failure_without_exit = {}, None
        waited_s = now - self._idle_since
        import_s = max(0.0, self._prepared_at - self._idle_since)
        place = info.assignment
        first, last = place.first_rank, place.first_rank + place.local_world_size - 1
        self._group = _Group(info.generation, info.restarts, now, range(first, last + 1))
        ranks = format_ranks(self._group.ranks)
        imports = f"imports took {import_s:.2f} s, " if import_s else ""
        cause = info.reason or self._reason  # a user's handler may give no cause
        log.info(
            "%s",
            f"generation {info.generation}: {imports}rendezvous took {waited_s - import_s:.2f} s; "
            f"node rank {info.rank} of {info.world_size}, {ranks} of world size "
            f"{place.world_size}, restarts {info.restarts}/{info.max_restarts or 0}; "
            f"reason: {cause}",
        )
        self._record(
            kinds.GenerationStarted(
                duration_seconds=round(waited_s, 6),
                import_seconds=round(import_s, 6),
                attempt=after.start,
                node_rank=info.rank,
                node_count=info.world_size,
                ranks=(first, last),
                world_size=place.world_size,
                role=(place.first_role_rank, place.role_world_size),
                restarts=info.restarts,
                max_restarts=info.max_restarts or 0,
                reason=cause,
                trigger="" if info.trigger is None else info.trigger.value,
                incarnation=info.incarnation,
            )
        )

    def _on_seen(self, after: MachineState) -> None:
        for local in [n for n in self._unnamed if n in after.view and after.view[n].name]:
            self._on_worker_started(local, after.view[local].name, after.alive[local].start)
        beats = {n: one.heartbeat for n, one in after.view.items() if one.heartbeat is not None}
        self._last_heartbeats |= beats

    def _on_worker_started(self, local: int, name: str, start: int) -> None:
        rank = self._unnamed.pop(local)
        body = kinds.WorkerStarted(local_rank=local, name=name, attempt=start)
        self._record(body, rank)

    def report_steps(self, *, is_final: bool = False) -> None:
        """Report the workers' progress if that is due, or at the end of a group in any case."""
        watch, now = self._steps, self._clock()
        if self._hang is not None and not self._has_warned:
            warning = self._hang.no_steps_warning(now, self._last_heartbeats)
            self._has_warned = bool(warning)
            if warning:
                log.warning("%s", warning)
        if watch is None or not (is_final or now >= watch.due_at):
            return
        try:
            self._steps, events = watch.read(now, self._last_heartbeats, is_final=is_final)
        except Exception:
            # An error in a report must not stop the training.
            log.exception("cannot read the workers' steps, trying again in %g s", MAX_INTERVAL_S)
            self._steps, events = attrs.evolve(watch, due_at=now + MAX_INTERVAL_S), []
        for body in events:
            self._record(body)

    def report_ending_workers(self, state: MachineState) -> None:
        """Name the workers whose program has ended, and whose process has not.

        A thread may live, or a function of `atexit` may block. A worker that has failed is killed
        after a time, because the others wait for it. One that has succeeded is named only if all
        others have ended as well, because it may still be writing results.
        """
        now, view = self._clock(), state.view
        ending = {n for n, one in view.items() if one.has_failed or one.has_returned}
        self._ending = {n: self._ending.get(n, now) for n in ending}
        self._named &= ending
        if state.phase is not Phase.ACTIVE:
            return
        for local in sorted(ending - self._named):
            if view[local].has_failed and now - self._ending[local] >= NAMED_AFTER_S:
                self._named.add(local)
                log.warning(
                    "%s, %s) has failed and is still exiting; it has %g s to end "
                    "(--shutdown-timeout), and is killed then",
                    *(self._names.get(local, ""), view[local].name, self._shutdown_timeout),
                )
        waited_s = min((now - at for at in self._ending.values()), default=0.0)
        is_last = ending and ending == state.alive.keys() and not self._named
        if is_last and waited_s >= self._shutdown_timeout:
            self._named |= ending
            names = (f"{self._names.get(n, '')}, {view[n].name})" for n in sorted(ending))
            log.warning(
                "all other workers of this node have ended, and the node waits: %s has succeeded "
                "and is still exiting; a thread or a function of atexit may block "
                "(`elasticlib stacks` shows it)",
                "; ".join(names),
            )

    def _on_exit(self, exit_: WorkerExit, unfit: str, before: MachineState) -> None:
        if exit_.heartbeat is not None:
            self._last_heartbeats[exit_.local_rank] = exit_.heartbeat
        if exit_.pid and exit_.local_rank in self._unnamed:
            # It has exited before it was seen.
            start = before.alive[exit_.local_rank].start
            self._on_worker_started(exit_.local_rank, f"pid {exit_.pid}", start)
        body = kinds.WorkerExited(
            local_rank=exit_.local_rank,
            exit_code=exit_.returncode,
            succeeded=exit_.succeeded,
            stopped=exit_.stop_was_requested,
            description=exit_.describe(),
            error="" if exit_.succeeded else exit_.message or exit_.exit_description,
            traceback="" if exit_.succeeded else shorten(exit_.traceback, MAX_TRACEBACK_BYTES),
            uptime_seconds=round(self._clock() - self._group.started_at, 6),
        )
        self._record(body, exit_.rank)
        if unfit:
            # It is about the node, not about one of its workers.
            self._note_failure_without_exit(unfit)
            return
        is_stopping = before.phase is not Phase.ACTIVE
        # A worker that was stopped has failed only if it reported a failure before.
        if not exit_.succeeded and (exit_.has_failed or not is_stopping):
            self._failures[exit_.local_rank] = exit_

    def _on_phase(
        self, event: Event, before: MachineState, after: MachineState, effects: Sequence[Effect]
    ) -> None:
        now = self._clock()
        if before.phase is Phase.ACTIVE:
            self._idle_since, self._reason = now, describe(event, effects)
            change = event.change if isinstance(event, MembershipChanged) else None
            has_failed = any(
                isinstance(effect, Report) and effect.kind is ReportKind.FAILURE
                for effect in effects
            )
            is_requested = isinstance(event, (Requested, SignalReceived))
            self._is_planned = not has_failed and (
                is_requested or (change is not None and change.kind.is_planned)
            )
            if before.hang is not None and (stacks := before.hang.stack_report()):
                log.warning("%s", "\n".join(stacks.splitlines()[: MAX_STACK_LINES + 1]))
        if after.phase is Phase.STOPPING and after.stop is not None:
            self._stop_started_at = now
            notice = after.stop.notice
            reason, grace_s = ("", 0.0) if notice is None else (notice.reason, notice.grace_s)
            if notice is not None:
                log.info("%s: the workers have %g s to save and exit", reason, grace_s)
            self._record(kinds.Stopping(notice=reason, grace_seconds=grace_s, reason=self._reason))
        if before.phase is Phase.STOPPING:
            self._idle_since = now
            seconds = round(now - self._stop_started_at, 6)
            left = ", ".join(before.view[n].name for n in after.alive if n in before.view)
            survivors = left if after.phase is Phase.CLOSING else ""
            self._record(kinds.Stopped(duration_seconds=seconds, survivors=survivors))
        if after.phase in (Phase.JOINING, Phase.CLOSING):
            self.report_steps(is_final=True)
            self._steps, self._last_heartbeats = None, {}
        if after.phase is Phase.JOINING:
            self._record(kinds.RendezvousStarted(reason=self._reason, is_planned=self._is_planned))
        log.debug("%s -> %s: %s", before.phase.value, after.phase.value, describe(event, effects))

    # -- the end --------------------------------------------------------------------------------

    def finish(self, state: MachineState) -> RunResult:
        """Report the end of the run, and return its result."""
        outcome = state.outcome or RunOutcome(WorkerState.FAILED, "the agent ended unexpectedly")
        succeeded = outcome.state is WorkerState.SUCCEEDED
        cause = self._root_cause() if outcome.state is WorkerState.FAILED else None
        result = RunResult(
            state=outcome.state,
            reason=outcome.reason,
            return_values={one.rank: one.value for one in state.exits} if succeeded else {},
            failures={} if succeeded else {one.rank: one for one in self._failures.values()},
            generation=self._group.number,
            restarts=self._group.restarts,
            signal=outcome.signal,
            root_cause=cause,
            evicted=outcome.evicted,
            is_unfit=outcome.is_unfit,
        )
        if self._saved_step is not None:
            self._record(kinds.CheckpointSaved(step=self._saved_step, count=1))
        first = None
        if cause is not None:
            first = {"host": cause.host, "rank": cause.rank, "what": cause.summary}
        body = kinds.RunFinished(
            state=result.state.value,
            reason=result.reason,
            exit_code=result.exit_code,
            expelled=result.evicted,
            root_cause=first,
        )
        self._record(body)
        # Wait until the journal has the events, for a bounded time.
        self._caller.flush()
        return result

    def _root_cause(self) -> RootCause | None:
        """Return why the last generation failed: what the leader has found, or this node knows."""
        end, number = self._end, self._group.number
        if end is not None and getattr(end.error, "is_node_loss", False):
            return None
        verdict = None if end is None else end.change.verdict
        failed = [one for one in self._failures.values() if one.has_failed]
        ranks = {one.rank for one in failed}
        if verdict is None or verdict.evidence.rank in self._group.ranks:
            if not failed:
                return self._failure_without_exit
            cause = find_cause([one.root_failure for one in failed])
            # This node knows more of its own worker than the leader.
            found = root_cause(self._host, number, cause.describe(), details_of(cause))
        elif verdict.kind is FailureKind.LOST:
            return None
        else:
            found = remote_cause(verdict, number)
        ranks.update(() if verdict is None else verdict.followers)
        return attrs.evolve(found, subsequent_ranks=tuple(sorted(ranks - {found.rank})))

    def _record(self, body: kinds.EventBody, rank: int | None = None) -> None:
        if self._journal is not None:
            generation, journal = self._group.number, self._journal
            record = partial(journal.record, body, generation=generation, rank=rank)
            self._caller.call(record, is_nonblocking=journal.is_nonblocking)
