"""Final save: when a job ends early, agents write the snapshots in their memory as a checkpoint.

An agent does this last, after its workers have exited and before their memory is freed. A snapshot
and a checkpoint have the same bytes, so a final save is a copy and a commit, and needs no torch.

**Which state is written.** An agent can write the parts in its memory: those of its own workers and
replicas of other nodes' parts. Nodes may hold different newest steps. A state is complete if every
part is available, or if the boxes of the available parts cover every element, as HSDP copies do.
The newest complete state is written. A state that is the same on all ranks has one part.

**How agents learn about each other.** The agents of a generation share a scratch directory in the
checkpoint directory. Each agent keeps one report there: the parts that it can write, the data files
that it has written, its current task, and the states that it has committed
(`final_save_reports`). `final_save_plan.next_action` decides from the reports what an agent does
next. If another agent could start the same task, an agent holds the lock of the checkpoint
directory while it reads the reports and publishes its task, so that each part is written once. The
commit is the last task. The agent that completes the set of data files starts it. Two agents may
write the same part or commit the same files if there is no lock, as at a URL, or if they share a
part of a sharded state and one of them is late. This costs only time.

**What can go wrong.**

- *An agent dies.* An agent renews its report, also while it writes. If a report is not renewed for
  `lost_s`, only the files that its agent has written count. Other holders of the same elements
  write the rest, or an older state is the newest complete one.
- *An agent has nothing to write,* because its newest state has a checkpoint. It publishes this
  state as committed, so that the others do not wait for it.
- *An agent that helps must leave.* It withdraws its report and starts again with a new one. The
  others wait for it as for an agent that is late.
- *An agent is late.* The others start at once if the newest known state is complete. Otherwise they
  wait: `settle_s` if an older state is complete, else `peers_s`. A late agent accepts what has been
  committed. It commits a newer state if that is complete by then.
- *The disk fails.* The agent tries again for `retry_s`, and other holders of a part may write it
  in the meantime. Then, or at once if the disk is full or read-only, the agent withdraws its parts
  and publishes the reason. If there is no other holder, every agent reports the reason.
- *A snapshot is unreadable.* The agent does not offer it.
- *A later generation owns the directory.* It continues the job from its own snapshots. Nothing is
  committed, and this is not an error. If another launch owns the directory, it is an error.
- *A worker of the generation saves at the same time.* Its commit may delete data files that are not
  in a manifest yet. They are written again, unless the checkpoint of the worker is as new.
- *The disk hangs.* The agent gives up when neither it nor another agent has made progress for
  `total_s`, or when its caller asks for it. An agent that helps waits without a limit.

The last agent deletes the scratch directory. If an agent was lost, the directory stays until a
later generation or launch acquires the checkpoint directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from ..clock import monotonic
from ..errors import CheckpointError, format_error
from ..rendezvous.interface import RendezvousInfo
from ..threads import daemon_thread
from .boxes import TensorShard, format_numbers, read_shards
from .catalog import CheckpointCatalog, DataFile, Retention, folder_of, step_of
from .commit import (
    NOT_WRITABLE_ERRORS,
    Committer,
    FileDeletedError,
    WriterIdentity,
    data_name,
    scratch_prefix,
)
from .final_save_plan import (
    COMMIT,
    AgentReport,
    Finish,
    PartOffer,
    SnapshotState,
    Task,
    count_nodes,
    describe_difference,
    newest_complete,
    next_action,
    offer_part,
)
from .final_save_reports import ReportExchange
from .safetensors_header import read_meta
from .snapshot_slots import (
    SnapshotHeader,
    SnapshotRef,
    list_snapshots,
    map_snapshot,
    valid_snapshots,
)
from .storage import CheckpointStorage, open_storage

log = logging.getLogger("elasticlib.checkpoint")

WAIT_INTERVAL_S = 0.1  # between two checks whether the final save must end
MAX_WRITES = 4  # a worker that saves at the same time deletes unnamed files once per save

_KEEP_ALL = Retention(keep_last=1 << 62)  # only the job's CheckpointManager deletes old checkpoints


@attrs.frozen
class Timeouts:
    """Time limits of a final save, in seconds."""

    poll_s: float = 0.2  # between two reads of the reports
    heartbeat_s: float = 5.0  # between two renewals of a report
    lost_s: float = 30.0  # without a renewal, the agent of a report is considered lost
    settle_s: float = 5.0  # for late agents, if an older state than the newest is complete
    peers_s: float = 60.0  # for late agents, if no state is complete: workers may end slowly
    announce_s: float = 3.0  # a final save that takes longer is announced in the log
    retry_pause_s: float = 1.0  # between two attempts after an error of the disk
    retry_s: float = 60.0  # for attempts after the first of several errors of the disk
    total_s: float = 600.0  # without progress: a disk that hangs must not block the node


# -- the snapshots of one node ---------------------------------------------------------------------


@attrs.define
class SnapshotSet:
    """The snapshots of one name in an agent's memory. Each CheckpointManager has its own name."""

    newest: SnapshotHeader
    offers: list[PartOffer] = attrs.field(factory=list)  # newest first, local before replicas
    refs: dict[Task, SnapshotRef] = attrs.field(factory=dict)  # the snapshot of each offer
    chunks: dict[str, list[TensorShard]] = attrs.field(factory=dict)  # by share

    @property
    def state(self) -> SnapshotState:
        return state_of(self.newest)

    def describe_failure(self, reason: str) -> str:
        """Return the error message for snapshots that were not written."""
        where = self.newest.folder
        return f"the snapshot of step {self.newest.step} was not written to {where}: {reason}"


def state_of(header: SnapshotHeader) -> SnapshotState:
    """Return the state that a snapshot is a part of."""
    is_sharded = header.sharded or header.parts > 1
    return SnapshotState(header.generation, header.step, header.parts, is_sharded)


def snapshot_sets(memory: Path) -> list[SnapshotSet]:
    """Return the valid snapshots in an agent's memory, one set for each name.

    Snapshots without a checkpoint directory are left out. An unreadable part is skipped.
    """
    sets: dict[str, SnapshotSet] = {}
    refs = [ref for ref in valid_snapshots(list_snapshots(memory)) if ref.header.folder]
    for ref in sorted(refs, key=lambda ref: state_of(ref.header), reverse=True):
        header, state = ref.header, state_of(ref.header)
        snapshots = sets.setdefault(header.name, SnapshotSet(header))
        offer = PartOffer(state, 0, is_replica=bool(ref.owner), values=header.values)
        if state.is_sharded:
            try:
                with map_snapshot(memory, ref) as view:
                    if view is None:
                        continue
                    chunks = read_shards(read_meta(view))
            except CheckpointError as error:
                what = "part %d of the snapshot of step %d is skipped: %s"
                log.warning(what, header.part, header.step, error)
                continue
            offer = offer_part(state, header.part, chunks, is_replica=bool(ref.owner))
            offer = attrs.evolve(offer, values=header.values)
            snapshots.chunks[offer.share] = chunks
        task = Task(state, offer.share)
        if task not in snapshots.refs:
            snapshots.refs[task] = ref
            snapshots.offers.append(offer)
    return [snapshots for _, snapshots in sorted(sets.items())]


# -- one agent's work ------------------------------------------------------------------------------


@attrs.define(eq=False)
class SetSaver:
    """Writes one set of snapshots together with the other agents. Used by one thread."""

    memory: Path
    snapshots: SnapshotSet
    agent: str  # id of this agent, and its writer token
    exchange: ReportExchange
    folder: CheckpointCatalog
    committer: Committer
    limits: Timeouts
    stop: threading.Event  # when it is set, this agent starts nothing more
    is_leaving: bool = True  # see `FinalSave`
    on_progress: Callable[[], object] = lambda: None  # called after progress of any agent
    saved_step: int | None = None  # the step that this agent or another one has committed
    _started_at: float = attrs.field(init=False, factory=monotonic)
    _has_joined: bool = attrs.field(init=False, default=False)  # the parts here are offered
    _last_seen: dict[str, AgentReport] = attrs.field(init=False, factory=dict)
    _first_error_at: float = attrs.field(init=False, default=float("-inf"))  # see `retry_s`
    _last_error_at: float = attrs.field(init=False, default=float("-inf"))
    _abandoned_steps: set[int] = attrs.field(init=False, factory=set)  # see `_is_saved`
    _num_files: int = attrs.field(init=False, default=0)  # makes the names of data files unique
    _num_writes: Counter[Task] = attrs.field(init=False, factory=Counter)

    def has_other_reports(self) -> bool:
        """Return whether another agent has published a report."""
        return len(self.exchange.read()) > 1

    def run(self) -> str:
        """Write the snapshots. Return an error message, or an empty string if nothing is lost."""
        self._started_at = monotonic()
        is_over, problem = threading.Event(), ""
        renewing = daemon_thread(lambda: self._renew(is_over), "agent-final-save-renew")
        renewing.start()
        try:
            problem = self._act_until_finished()
        finally:
            is_over.set()
            renewing.join()
            # If the caller has stopped an agent that helps, its node may start another final save.
            is_withdrawn = not self.is_leaving and self.stop.is_set()
            self.exchange.finish(problem, is_withdrawn=is_withdrawn)
        if problem:
            with contextlib.suppress(OSError):
                # A worker may have saved in the meantime.
                problem = "" if self._is_saved(self.snapshots.state) else problem
        if problem:
            return self.snapshots.describe_failure(problem)
        reports = (*self._last_seen.values(), self.exchange.mine)
        offers = [offer for report in reports for offer in report.offers]
        difference = describe_difference(offers, self.saved_step)
        return f"{self.snapshots.newest.folder}: {difference}" if difference else ""

    def _renew(self, is_over: threading.Event) -> None:
        while not is_over.wait(self.limits.heartbeat_s):
            with contextlib.suppress(OSError):
                self.exchange.publish()

    def _act_until_finished(self) -> str:
        """Do one action after another. Return why the snapshots were not written, or ''."""
        while not self.stop.is_set():
            try:
                end = self._do_next_action()
            except (CheckpointError, OSError) as error:
                end = self._handle_error(error)
            if end is not None:
                self.saved_step = end.step
                if self._abandoned_steps and end.step is not None:
                    self._warn_of_abandoned_steps(end.step)
                return end.problem
        return ""

    def _warn_of_abandoned_steps(self, saved_step: int) -> None:
        log.warning(
            "%s: step %d was written after the job had gone back to an earlier step, and %s, from "
            "before that, %s still there: the next start uses %d unless you delete it, or restore "
            "with step=%d",
            *(self.folder.storage.name, saved_step),
            format_numbers(sorted(self._abandoned_steps), "step"),
            "are" if len(self._abandoned_steps) > 1 else "is",
            *(max(self._abandoned_steps), saved_step),
        )

    def _do_next_action(self) -> Finish | None:
        """Do one action, such as a task or a pause. Return the result at the end, else None."""
        if not self._has_joined and self._is_saved(self.snapshots.state):
            self._publish_existing_checkpoint()
            return Finish()
        if not self._has_joined:
            self.committer.claim()
            self.exchange.publish_chunks(self.snapshots.chunks)
            self.exchange.publish(offers=tuple(self.snapshots.offers))
            self._has_joined = True
        if self._was_superseded():
            step = self.snapshots.newest.step
            log.info("step %d is not written: a later generation continues the job", step)
            return Finish()
        action = self._decide()
        if isinstance(action, Finish):
            return action
        if action is None:
            self.stop.wait(self.limits.poll_s)
        elif self._claim_task(action):
            self.exchange.publish(task=None, problem="", **self._perform(action))
            self._first_error_at = float("-inf")
        return None

    def _handle_error(self, error: Exception) -> Finish | None:
        """Pause before the next attempt. After a lasting error, withdraw the parts of this agent.

        An agent without parts still waits until the other agents have written the state.

        Returns:
            The end of the final save if the parts are withdrawn and errors have lasted for
            `retry_s`, else None.
        """
        now, problem = monotonic(), format_error(error)
        if now - max(self._first_error_at, self._last_error_at) > self.limits.retry_s:
            self._first_error_at = now
        self._last_error_at = now
        could_write = self.exchange.mine.can_write
        can_write = (
            could_write
            and _is_transient(error)
            and now - self._first_error_at < self.limits.retry_s
        )
        if could_write:
            outcome = "trying again" if can_write else "not trying again"
            log.warning("%s: %s", self.snapshots.describe_failure(problem), outcome)
        elif now - self._first_error_at >= self.limits.retry_s:
            return Finish(problem=problem)  # The reports of the other agents cannot be read either.
        # If the report cannot be written, the other agents will consider this one lost.
        with contextlib.suppress(OSError):
            self.exchange.publish(task=None, can_write=can_write, problem=problem)
        self._has_joined = self._has_joined or not can_write
        self.stop.wait(self.limits.retry_pause_s if can_write else self.limits.poll_s)
        return None

    def _publish_existing_checkpoint(self) -> None:
        """Publish that the newest state in this agent's memory has a checkpoint.

        Other agents may hold parts of a newer state, and wait until all agents have reported. An
        unsharded state has no parts, so nothing is published for it.
        """
        state = self.snapshots.state
        if state.is_sharded:
            with contextlib.suppress(OSError):
                self.exchange.publish(committed=(state,))

    def _was_superseded(self) -> bool:
        with contextlib.suppress(CheckpointError, OSError):  # the commit reports a corrupt fence
            return self.committer.was_superseded()
        return False

    def _is_saved(self, state: SnapshotState) -> bool:
        """Return whether an intact checkpoint of the state's step or of a later step exists.

        A sharded checkpoint of the same step is not verified. A checkpoint of a later step from an
        earlier generation does not count: the job has gone back to a step before it.
        """
        steps = [step_of(name) for name in self.folder.storage.list_folders()]
        for step in sorted((s for s in steps if s is not None and s >= state.step), reverse=True):
            entry = self.folder.read_entry(step)
            if entry is None or entry.manifest is None:
                continue
            if step > state.step and self.committer.is_from_earlier(
                entry.manifest, state.generation
            ):
                self._abandoned_steps.add(step)
                continue
            # A sharded checkpoint of the same step is not read: if each agent reads all parts, a
            # node that must leave has too little time. A later checkpoint is read, because the job
            # may have gone back to an earlier step because this one is corrupt.
            if state.is_sharded and step == state.step:
                return True
            with contextlib.suppress(CheckpointError):
                self.folder.check(entry.manifest)
                return True
        return False

    def _read_verified_reports(self) -> dict[str, AgentReport]:
        """Read the reports of all agents, without data files that do not exist any more.

        Another writer may have deleted a file. The `file` of its offer is None in the result.
        """
        reports = self.exchange.read(self.limits.lost_s)
        steps = {o.state.step for report in reports.values() for o in report.offers if o.file}
        sizes = {step: self.folder.storage.list_files(folder_of(step)) for step in steps}

        def verified(offer: PartOffer) -> PartOffer:
            file = offer.file
            is_there = file is None or sizes[offer.state.step].get(file.name) == file.size
            return offer if is_there else attrs.evolve(offer, file=None)

        return {
            agent: attrs.evolve(report, offers=tuple(map(verified, report.offers)))
            for agent, report in reports.items()
        }

    def _decide(self) -> Task | Finish | None:
        """Return `next_action` for the newest reports. Call `on_progress` if they show progress."""
        reports, waited_s = self._read_verified_reports(), monotonic() - self._started_at
        # An agent that is busy gives up by itself if it makes no progress.
        is_busy = any(report.task for other, report in reports.items() if other != self.agent)
        if is_busy or reports != self._last_seen:
            self._last_seen = reports
            self.on_progress()
        has_all_reports = count_nodes(reports.values()) >= self.exchange.num_agents
        return next_action(
            self.agent,
            reports,
            self.exchange.load_chunks,
            is_settled=has_all_reports or waited_s >= self.limits.settle_s,
            has_all_reports=has_all_reports or waited_s >= self.limits.peers_s,
        )

    def _claim_task(self, task: Task) -> bool:
        """Publish that this agent does the task. Return False if another task is next now.

        For example, another agent may have started the task.
        """
        reports = self.exchange.read(self.limits.lost_s).values()
        offers = [offer for report in reports if report.can_write for offer in report.offers]
        owners = [offer for offer in offers if task.is_for(offer) and not offer.is_replica]
        with contextlib.ExitStack() as stack:
            # No other agent starts the task of the only owner, except for a state that all agents
            # hold: those that are late have not reported it yet. A commit has no owner.
            is_only_owner = len(owners) == 1 and task.state.is_sharded
            if not is_only_owner and self.exchange.num_agents > 1:
                stack.enter_context(self.folder.storage.lock())
                if self._decide() != task:
                    return False
            self.exchange.publish(task=task)
        return True

    def _perform(self, task: Task) -> dict[str, Any]:
        """Do a task, unless the state has a checkpoint. Return the changes of this agent's report.

        Nothing changes if another writer deleted a data file: then the file is written again.

        Raises:
            CheckpointError: The task failed.
            OSError: The storage failed.
        """
        state, mine = task.state, self.exchange.mine
        is_saved = self._is_saved(state)
        try:
            if is_saved or task.share == COMMIT:
                if not is_saved:
                    self._commit(state)
                return {"committed": (*mine.committed, state)}
            [offer] = [offer for offer in mine.offers if task.is_for(offer)]
            written = attrs.evolve(offer, file=self._write_part(task, offer.part))
            return {"offers": (written, *(other for other in mine.offers if other != offer))}
        except FileDeletedError as error:
            log.info("writing step %d again: %s", state.step, error)
            return {}

    def _write_part(self, task: Task, part: int) -> DataFile:
        """Write the data file of a part durably."""
        if self._num_writes[task] == MAX_WRITES:
            raise CheckpointError(
                f"a data file is missing: another writer has deleted it {MAX_WRITES} times"
            )
        self._num_files += 1
        kind = f"part-{part:05d}" if task.state.is_sharded else "state"
        name = data_name(kind, self.agent, self._num_files)
        with map_snapshot(self.memory, self.snapshots.refs[task]) as view:
            if view is None:
                raise CheckpointError(f"the snapshot of step {task.state.step} was deleted")
            file = self.committer.write(task.state.step, name, view)
        self._num_writes[task] += 1
        return file

    def _commit(self, state: SnapshotState) -> None:
        """Commit a state whose shares are all written.

        Raises:
            FileDeletedError: a data file was deleted after it was written.
        """
        offers = [
            o for r in self._read_verified_reports().values() for o in r.offers if o.state == state
        ]
        plan = newest_complete((o for o in offers if o.file), self.exchange.load_chunks)
        files = {offer.share: offer.file for offer in offers if offer.file}
        if isinstance(plan, str):
            raise FileDeletedError(f"step {state.step} {plan}")
        named = tuple(files[share] for share in plan.shares)
        self.committer.commit(state.step, named, len(named) if state.is_sharded else 0)
        directory = self.snapshots.newest.folder
        log.info("step %d was written to %s, from the last snapshot", state.step, directory)


def _is_transient(error: Exception) -> bool:
    """Return True for an error of the disk after which another attempt may succeed."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno not in NOT_WRITABLE_ERRORS


class FinalSave:
    """The final save of one agent.

    Args:
        memory: the directory of the agent's snapshots.
        info: the last generation; None if there was none.
        is_leaving: whether this node's run is over. Otherwise the agent only writes parts that
            agents whose runs are over need.
        storage: the checkpoint directory, if it is not the one that the snapshots name.
        limits: the time limits.
    """

    def __init__(
        self,
        memory: Path,
        info: RendezvousInfo | None,
        *,
        is_leaving: bool = True,
        storage: CheckpointStorage | None = None,
        limits: Timeouts | None = None,
    ) -> None:
        self._memory, self._info, self._storage = memory, info, storage
        self._is_leaving, self._limits = is_leaving, limits or Timeouts()
        self._stop = threading.Event()
        self._progress_at = 0.0  # when an agent last made progress, by `monotonic`
        self.saved: int | None = None  # the step that was written, by any agent
        self._unfinished: list[SnapshotSet] = []
        self._problems: list[str] = []

    def run(self, cancel_reason: Callable[[], str] = str) -> str:
        """Write the snapshots. Block until they are written, or there is no progress any more.

        Args:
            cancel_reason: returns why the writing must end now, or an empty text. This method calls
                it several times per second.

        Returns:
            An error message about what was not written. It is empty if nothing is lost, or after a
            call of `stop`.
        """
        # Nothing can interrupt a thread that writes to a disk that hangs.
        thread = daemon_thread(self._save_all, "agent-final-save")
        self._mark_progress()
        thread.start()
        reason = self._wait(thread, cancel_reason)
        if self._stop.is_set():
            return ""
        late = [snapshots.describe_failure(reason) for snapshots in tuple(self._unfinished)]
        self._stop.set()
        return "; ".join([*self._problems, *late])

    def stop(self) -> None:
        """Start nothing more and report nothing. Thread-safe."""
        self._stop.set()

    def _mark_progress(self) -> None:
        self._progress_at = monotonic()

    def _wait(self, thread: threading.Thread, cancel_reason: Callable[[], str]) -> str:
        """Return why the wait ended before the thread did, or an empty text."""
        limits, is_announced = self._limits, not self._is_leaving
        total_s, announce_at = limits.total_s, monotonic() + limits.announce_s
        while thread.is_alive() and not self._stop.is_set():
            now = monotonic()
            if now - self._progress_at >= total_s:
                return f"it was not written, and there was no progress for {total_s:g} s"
            if reason := cancel_reason():
                return reason
            if not is_announced and now >= announce_at:
                is_announced = True
                log.info(
                    "still writing the last snapshots, until there is no progress for %g s; the "
                    "third SIGINT gives them up",
                    total_s,
                )
            thread.join(min(WAIT_INTERVAL_S, total_s))
        return ""

    def _save_all(self) -> None:
        try:
            sets = snapshot_sets(self._memory)
        except Exception as error:
            self._problems.append(f"snapshots in memory were not written: {format_error(error)}")
            return
        self._unfinished = [s for s in sets if self._is_leaving or s.state.is_sharded]
        savers: dict[str, SetSaver] = {}  # by name
        while self._unfinished and not self._stop.is_set():
            for snapshots in tuple(self._unfinished):
                if self._stop.is_set():
                    return
                try:
                    name = snapshots.newest.name
                    saver = savers[name] = savers.get(name) or self._create_saver(snapshots)
                    # The agents that leave may need the parts of another set first.
                    if not self._is_leaving and not saver.has_other_reports():
                        continue
                    problem = saver.run()
                    self.saved = self.saved if saver.saved_step is None else saver.saved_step
                except Exception as error:
                    # Any error must be part of the report on how the run ended.
                    problem = snapshots.describe_failure(format_error(error))
                if problem:
                    self._problems.append(problem)
                self._unfinished.remove(snapshots)
            if self._unfinished:
                self._mark_progress()  # No node needs help yet.
                self._stop.wait(self._limits.poll_s)

    def _create_saver(self, snapshots: SnapshotSet) -> SetSaver:
        newest, info, agent = snapshots.newest, self._info, secrets.token_hex(8)
        # Workers of the last generation may own the directory without having made a snapshot.
        generation = max(newest.generation, info.generation if info else 0)
        label = f"agent {os.getpid()} on {socket.gethostname()}"
        writer = WriterIdentity(newest.run, newest.incarnation, generation, agent, label)
        folder = CheckpointCatalog(self._storage or open_storage(newest.folder))
        scratch = f"{scratch_prefix(writer)}.{zlib.crc32(newest.name.encode()):08x}"
        num_agents, node = (info.world_size, info.rank) if info else (1, 0)
        return SetSaver(
            self._memory,
            snapshots,
            agent,
            ReportExchange(folder.storage, scratch, agent, num_agents, node),
            folder,
            Committer(folder, writer, _KEEP_ALL, allow_concurrent_writer=True),
            self._limits,
            self._stop,
            self._is_leaving,
            self._mark_progress,
        )
