"""Final save: when a job ends early, agents write the snapshots in their memory as a checkpoint.

An agent does this last, after its workers have exited and before their memory is freed. A snapshot
and a checkpoint have the same bytes, so a final save is a copy and a commit, and needs no torch.

**Which state is written.** An agent can write the parts in its memory: those of its own workers and
replicas of other nodes' parts. Nodes may hold different newest steps. A state is complete if every
part is available, or if the boxes of the available parts cover every element, as HSDP copies do.
The newest complete state is written. A state that is the same on all ranks has one part.

**How agents learn about each other.** The agents of a generation share a scratch directory in the
checkpoint directory. Each agent keeps one report there: the parts that it can write, the data files
that it has written, its current task, and the states that it has committed. `next_action`, a pure
function, decides from the reports what an agent does next. If another agent could start the same
task, an agent holds the lock of the checkpoint directory while it reads the reports and publishes
its task, so that each part is written once. The commit is the last task. The agent that completes
the set of data files starts it. Without a lock, behind a URL, two agents may write the same part
or commit the same files, which costs only time.

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
- *The disk is full.* The agent withdraws its parts and publishes the reason. Other holders write
  them. If there is none, every agent reports the reason.
- *A snapshot is unreadable.* The agent does not offer it.
- *A later generation owns the directory.* It continues the job from its own snapshots. Nothing is
  committed, and this is not an error. If another launch owns the directory, it is an error.
- *A worker of the generation saves at the same time.* Its commit may delete data files that are not
  in a manifest yet. They are written again, unless the checkpoint of the worker is as new.
- *The disk hangs.* The agent gives up after `total_s`, or when its caller asks for it.

The last agent deletes the scratch directory. If an agent was lost, the directory stays until a
later generation or launch acquires the checkpoint directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..clock import monotonic
from ..errors import CheckpointError, describe
from ..foreign import read_fields, read_json, read_object
from ..rendezvous.interface import RendezvousInfo
from ..threads import helper
from .boxes import TensorShard, describe_missing, format_numbers, read_shards
from .catalog import (
    CheckpointCatalog,
    DataFile,
    Retention,
    append_checksum,
    folder_of,
    step_of,
    strip_checksum,
)
from .commit import Committer, FileDeleted, WriterIdentity, data_name, scratch_prefix
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

UNSHARDED = "unsharded"  # the share of a state that is the same on all ranks
COMMIT = "commit"  # the task after all shares are written; no share has this name
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
    total_s: float = 600.0  # for the whole final save: a disk that hangs must not block the node


# -- which state is written: pure ------------------------------------------------------------------


@attrs.frozen(order=True)
class SnapshotState:
    """Identity of a state. Parts of one state fit together.

    A step that was trained twice, before and after a failure, is two states.
    """

    generation: int
    step: int
    num_parts: int = 1  # ranks that hold a part; 1 if the state is the same on all ranks
    is_sharded: bool = False


@attrs.frozen
class PartOffer:
    """A part of a state that an agent can write or has written."""

    state: SnapshotState
    part: int
    share: str = UNSHARDED  # digest of its boxes; parts with equal shares are interchangeable
    num_elements: int = 0  # in its boxes
    total_elements: int = 0  # in the whole tensors that its boxes belong to
    is_replica: bool = False  # it was made by a worker of another node
    file: DataFile | None = None  # its data file, once it is durable


@attrs.frozen
class SavePlan:
    """The state to write, and its shares in the order of their files in the manifest."""

    state: SnapshotState
    shares: tuple[str, ...]


LoadChunks = Callable[[str], Sequence[TensorShard] | None]
"""Returns the tensor shards that the parts with this `PartOffer.share` contain: names and boxes,
without the bytes. None if they are not available.
"""


def offer_part(
    state: SnapshotState, part: int, chunks: Sequence[TensorShard], *, is_replica: bool = False
) -> PartOffer:
    """Return the offer of a part of a sharded state that contains `chunks`."""
    boxes = {(c.name, c.dtype, c.shape, c.box) for c in chunks}
    share = hashlib.sha256(json.dumps(sorted(boxes)).encode()).hexdigest()[:32]
    num_elements = sum(math.prod(sizes) for _, _, _, (_, sizes) in boxes)
    total_elements = sum(math.prod(shape) for shape in {c.name: c.shape for c in chunks}.values())
    return PartOffer(state, part, share, num_elements, total_elements, is_replica)


def newest_complete(offers: Iterable[PartOffer], load_chunks: LoadChunks) -> SavePlan | str:
    """Choose the newest state whose offered parts contain every element.

    Args:
        offers: of all agents.
        load_chunks: called only for a state that lacks a part but may be complete all the same.

    Returns:
        The plan, or the reason why the newest state is incomplete, as the end of an error message.
    """
    states: dict[SnapshotState, dict[str, PartOffer]] = {}
    parts: dict[SnapshotState, set[int]] = {}
    for offer in sorted(offers, key=lambda offer: (offer.state, -offer.part), reverse=True):
        states.setdefault(offer.state, {}).setdefault(offer.share, offer)
        parts.setdefault(offer.state, set()).add(offer.part)
    reasons = []
    for state, by_share in states.items():
        missing = [part for part in range(state.num_parts) if part not in parts[state]]
        reason = _describe_missing(missing, by_share, load_chunks)
        if not reason:
            return SavePlan(state, tuple(by_share))
        reasons.append(reason)
    return reasons[0] if reasons else "is not available: no agent can write a part of it"


def _describe_missing(
    missing: Sequence[int], offers: Mapping[str, PartOffer], load_chunks: LoadChunks
) -> str:
    """Return what a state lacks that lacks parts, or an empty string if it is complete."""
    if not missing:
        return ""
    num_parts = next(iter(offers.values())).state.num_parts
    total_elements = max(offer.total_elements for offer in offers.values())
    if sum(offer.num_elements for offer in offers.values()) >= total_elements:
        loaded = {offer.part: load_chunks(share) for share, offer in offers.items()}
        chunks = {part: rows for part, rows in loaded.items() if rows is not None}
        try:
            if len(chunks) == len(offers):
                return describe_missing(chunks, num_parts)
        except CheckpointError as error:
            return f"is not consistent: {error}"
    return f"is not complete: no agent holds {format_numbers(missing, 'part')} of {num_parts}"


# -- what an agent does next: pure -----------------------------------------------------------------


@attrs.frozen
class Task:
    """Writing one share of a state, or committing the state if the share is `COMMIT`."""

    state: SnapshotState
    share: str

    def is_for(self, offer: PartOffer) -> bool:
        return (offer.state, offer.share) == (self.state, self.share)


@attrs.frozen
class Finish:
    """The end of a final save."""

    step: int | None = None  # the committed step
    problem: str = ""  # why the snapshots were not written


@attrs.frozen
class AgentReport:
    """The status that an agent publishes to the other agents of its generation."""

    offers: tuple[PartOffer, ...] = ()  # newest first, and parts of its workers before replicas
    task: Task | None = None  # what it is doing
    committed: tuple[SnapshotState, ...] = ()  # states that it has committed or found committed
    can_write: bool = True  # False: only its data files count
    is_finished: bool = False  # it reads no reports any more
    problem: str = ""  # why it could not write something
    node: int = 0  # rank of its node in the generation
    is_withdrawn: bool = False  # it was stopped while it helped, and its node may report again


def count_nodes(reports: Iterable[AgentReport]) -> int:
    """Return how many nodes have reported.

    A node reports twice if it helped other nodes before its own run was over.
    """
    return len({report.node for report in reports if not report.is_withdrawn})


def next_action(
    agent: str,
    reports: Mapping[str, AgentReport],
    load_chunks: LoadChunks,
    *,
    is_settled: bool,
    has_all_reports: bool,
) -> Task | Finish | None:
    """Decide what an agent does next.

    Args:
        agent: the id of the agent.
        reports: by agent id, its own included. Those of lost agents have `can_write=False`.
        load_chunks: see `newest_complete`.
        is_settled: no agent will report within `settle_s` of the start.
        has_all_reports: no agent will report any more.

    Returns:
        A task, the end of the final save, or None to wait for other agents.
    """
    writers = {other: report for other, report in reports.items() if report.can_write}
    offers = [o for a, r in reports.items() for o in r.offers if o.file or a in writers]
    plan = newest_complete(offers, load_chunks)
    # The parts of a committed state may not be offered any more.
    complete = {state for report in reports.values() for state in report.committed}
    committed = max(complete, default=None)
    if isinstance(plan, SavePlan):
        complete.add(plan.state)
    if complete:
        newest = max(complete)
        offered = {offer.state for report in reports.values() for offer in report.offers}
        if not is_settled and any(state > newest for state in offered):
            return None
        if newest == committed:
            return Finish(newest.step)
    if isinstance(plan, SavePlan):
        if agent in writers:
            return _next_task(agent, writers, offers, plan, is_settled=is_settled)
        if writers:
            return None
    # If no agent can write any more, only an agent that reports late could help.
    if not (has_all_reports or (is_settled and not writers)):
        return None
    problems = sorted({report.problem for report in reports.values() if report.problem})
    reason = plan if isinstance(plan, str) else "was not committed"
    return Finish(problem="; ".join(problems) or f"it {reason}")


def _next_task(
    agent: str,
    writers: Mapping[str, AgentReport],
    offers: Iterable[PartOffer],
    plan: SavePlan,
    *,
    is_settled: bool,
) -> Task | None:
    written = {offer.share for offer in offers if offer.state == plan.state and offer.file}
    others = [report for other, report in writers.items() if other != agent]
    for offer in writers[agent].offers:
        task = Task(offer.state, offer.share)
        if offer.state != plan.state or offer.share in written or _is_taken(task, others):
            continue
        # A replica is written only if no node whose workers made the part can write it.
        has_owner = any(task.is_for(o) and not o.is_replica for r in others for o in r.offers)
        if not offer.is_replica or (is_settled and not has_owner):
            return task
    commit = Task(plan.state, COMMIT)
    is_complete = written.issuperset(plan.shares)
    return commit if is_complete and not _is_taken(commit, others) else None


def _is_taken(task: Task, others: Iterable[AgentReport]) -> bool:
    return any(report.task == task for report in others)


# -- the scratch directory -------------------------------------------------------------------------


def encode_report(report: AgentReport) -> bytes:
    """Encode a report as one line of JSON and a line with its checksum."""
    return append_checksum(json.dumps(attrs.asdict(report)).encode("ascii"))


def decode_report(data: bytes) -> AgentReport | None:
    """Decode a report. Return None if it is incomplete or corrupt."""
    body = strip_checksum(data)
    try:
        fields = read_object(body or b"")
        offers = tuple(
            read_fields(
                PartOffer,
                {name: row[name] for name in row if name not in ("state", "file")},
                state=read_fields(SnapshotState, row["state"]),
                file=read_fields(DataFile, row["file"]) if row["file"] else None,
            )
            for row in fields.pop("offers")
        )
        committed = tuple(read_fields(SnapshotState, row) for row in fields.pop("committed"))
        row = fields.pop("task")
        task = Task(read_fields(SnapshotState, row["state"]), str(row["share"])) if row else None
        return read_fields(AgentReport, fields, offers=offers, committed=committed, task=task)
    except (KeyError, TypeError, ValueError):
        return None


class ReportExchange:
    """The reports of the agents of a generation, as files of a scratch directory.

    `publish` may be called by any thread, the other methods by one thread. If there is no other
    agent, nothing is written.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        directory: str,
        agent: str,
        num_agents: int,
        node: int = 0,
    ) -> None:
        self.mine = AgentReport(node=node)  # the report of this agent
        self.num_agents = num_agents
        self._storage, self._directory, self._agent = storage, directory, agent
        self._lock = threading.Lock()  # guards the version
        self._version = 0  # of the last report that was published
        self._seen: dict[str, tuple[int, float]] = {}  # version of each report, and when it changed
        self._reports: dict[str, AgentReport] = {}  # of the other agents
        self._chunks: dict[str, Mapping[str, Sequence[TensorShard]]] = {}  # by agent, then by share

    def publish(self, **changes: Any) -> None:
        """Change this agent's report and publish it. Raise OSError if the disk fails."""
        with self._lock:
            self.mine = attrs.evolve(self.mine, **changes)
            if self.num_agents > 1:
                # Each version has a name of its own, because NFS clients cache what they have read.
                # After an error a file may exist, so its name is not used again.
                self._version += 1
                data = memoryview(encode_report(self.mine))
                self._storage.write(self._path(f"{self._agent}.{self._version}"), data)
                self._storage.remove(self._path(f"{self._agent}.{self._version - 1}"))

    def publish_chunks(self, chunks: Mapping[str, Sequence[TensorShard]]) -> None:
        """Publish the chunks of this agent's parts by share. Raise OSError if the disk fails."""
        self._chunks[self._agent] = chunks
        if self.num_agents > 1 and chunks:
            rows = {
                share: [chunk.to_row() for chunk in of_share] for share, of_share in chunks.items()
            }
            data = memoryview(zlib.compress(json.dumps(rows).encode()))
            self._storage.write(self._path(f"{self._agent}.chunks"), data)

    def read(self, lost_s: float = math.inf) -> dict[str, AgentReport]:
        """Return the reports by agent, this agent's included.

        Args:
            lost_s: an agent that has not renewed its report for so long is considered lost.
        """
        now = monotonic()
        for name in self._storage.list_files(self._directory) if self.num_agents > 1 else ():
            agent, _, version = name.partition(".")
            last_version, _ = self._seen.get(agent, (0, now))
            if agent != self._agent and version.isdecimal() and int(version) > last_version:
                report = decode_report(self._storage.read(self._path(name)) or b"")
                if report is not None:
                    self._seen[agent], self._reports[agent] = (int(version), now), report
        found = {self._agent: self.mine}
        for agent, report in self._reports.items():
            is_lost = now - self._seen[agent][1] > lost_s and not report.is_finished
            if is_lost:
                problem = report.problem or "an agent stopped responding"
                report = attrs.evolve(report, can_write=False, task=None, problem=problem)
            found[agent] = report
        return found

    def load_chunks(self, share: str) -> Sequence[TensorShard] | None:
        """Return the chunks of a share as any agent has published them, or None."""
        for agent, report in self.read().items():
            if all(offer.share != share for offer in report.offers):
                continue
            if agent not in self._chunks:
                with contextlib.suppress(OSError, ValueError, zlib.error, CheckpointError):
                    data = self._storage.read(self._path(f"{agent}.chunks"))
                    rows = read_json(zlib.decompress(data)) if data else {}
                    self._chunks[agent] = {s: read_shards({"shards": r}) for s, r in rows.items()}
            if share in self._chunks.get(agent, {}):
                return self._chunks[agent][share]
        return None

    def close(self, problem: str, *, is_withdrawn: bool = False) -> None:
        """Publish that this agent has finished. The last agent deletes the directory.

        Args:
            problem: why the snapshots were not written, or an empty string.
            is_withdrawn: see `AgentReport`.
        """
        with contextlib.suppress(OSError):
            if self._version == 0 and len(self.read()) == 1:
                return  # no agent has published a report
            self.publish(
                can_write=False,
                is_finished=True,
                task=None,
                problem=problem,
                is_withdrawn=is_withdrawn,
            )
            reports = self.read().values()
            if count_nodes(reports) >= self.num_agents > 1 and all(r.is_finished for r in reports):
                for name in self._storage.list_files(self._directory):
                    self._storage.remove(self._path(name))
                self._storage.remove_folder(self._directory)

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}"


# -- the snapshots of one node ---------------------------------------------------------------------


@attrs.define
class SnapshotSet:
    """The snapshots of one name in an agent's memory."""

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
    """Return the snapshots in an agent's memory that have a checkpoint directory."""
    sets: dict[str, SnapshotSet] = {}
    refs = [ref for ref in valid_snapshots(list_snapshots(memory)) if ref.header.folder]
    for ref in sorted(refs, key=lambda ref: state_of(ref.header), reverse=True):
        header, state = ref.header, state_of(ref.header)
        snapshots = sets.setdefault(header.name, SnapshotSet(header))
        offer = PartOffer(state, 0, is_replica=bool(ref.owner))
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
    saved_step: int | None = None  # the step that this agent or another one has committed
    _started_at: float = attrs.field(init=False, factory=monotonic)
    _num_writes: Counter[Task] = attrs.field(init=False, factory=Counter)

    def has_other_reports(self) -> bool:
        """Return whether another agent has published a report."""
        return len(self.exchange.read()) > 1

    def run(self) -> str:
        """Return an error message about what was not written, or an empty string."""
        self._started_at = monotonic()
        is_over, problem = threading.Event(), ""
        renewing = helper(lambda: self._renew(is_over), "agent-final-save-renew")
        try:
            if self._is_saved(self.snapshots.state):
                self._publish_saved()
                return ""
            self._join()
            renewing.start()
            problem = self._work()
        finally:
            is_over.set()
            if renewing.is_alive():
                renewing.join()
            # If the caller has stopped an agent that helps, its node may start another final save.
            is_withdrawn = not self.is_leaving and self.stop.is_set()
            self.exchange.close(problem, is_withdrawn=is_withdrawn)
        # A worker may have saved in the meantime.
        is_lost = problem and not self._is_saved(self.snapshots.state)
        return self.snapshots.describe_failure(problem) if is_lost else ""

    def _publish_saved(self) -> None:
        """Publish that the newest state here has a checkpoint.

        Other agents may hold parts of a newer state, and wait until all agents have reported.
        """
        state = self.snapshots.state
        if state.is_sharded:
            with contextlib.suppress(OSError):
                self.exchange.publish(committed=(state,))

    def _renew(self, is_over: threading.Event) -> None:
        while not is_over.wait(self.limits.heartbeat_s):
            with contextlib.suppress(OSError):
                self.exchange.publish()

    def _join(self) -> None:
        try:
            self.committer.claim()
            self.exchange.publish_chunks(self.snapshots.chunks)
            self.exchange.publish(offers=tuple(self.snapshots.offers))
        except (CheckpointError, OSError) as error:
            self._fail(error)

    def _work(self) -> str:
        """Do one task after the other. Return why the snapshots were not written, if so."""
        while not self.stop.is_set():
            if self._was_superseded():
                step = self.snapshots.newest.step
                log.info("step %d is not written: a later generation continues the job", step)
                break
            action = self._decide()
            if isinstance(action, Finish):
                self.saved_step = action.step
                return action.problem
            if action is None:
                self.stop.wait(self.limits.poll_s)
            elif self._start(action):
                self._do(action)
        return ""

    def _was_superseded(self) -> bool:
        with contextlib.suppress(CheckpointError, OSError):  # the commit reports a corrupt fence
            return self.committer.was_superseded()
        return False

    def _is_saved(self, state: SnapshotState) -> bool:
        """Return whether a complete checkpoint of the state's step or of a later one exists."""
        steps = [step_of(name) for name in self.folder.storage.list_folders()]
        for step in sorted((s for s in steps if s is not None and s >= state.step), reverse=True):
            entry = self.folder.read_entry(step)
            if entry is None or entry.manifest is None:
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

    def _reports(self) -> dict[str, AgentReport]:
        """Return the reports without data files that another writer has deleted."""
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
        reports, waited_s = self._reports(), monotonic() - self._started_at
        has_all_reports = count_nodes(reports.values()) >= self.exchange.num_agents
        return next_action(
            self.agent,
            reports,
            self.exchange.load_chunks,
            is_settled=has_all_reports or waited_s >= self.limits.settle_s,
            has_all_reports=has_all_reports or waited_s >= self.limits.peers_s,
        )

    def _start(self, task: Task) -> bool:
        """Publish the task. Return False if another agent has started it before."""
        reports = self.exchange.read(self.limits.lost_s).values()
        offers = [offer for report in reports if report.can_write for offer in report.offers]
        owners = [offer for offer in offers if task.is_for(offer) and not offer.is_replica]
        try:
            with contextlib.ExitStack() as stack:
                # No other agent starts the task of the only owner. A commit has no owner.
                if len(owners) != 1 and self.exchange.num_agents > 1:
                    stack.enter_context(self.folder.storage.lock())
                    if self._decide() != task:
                        return False
                self.exchange.publish(task=task)
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _do(self, task: Task) -> None:
        """Do a task, and publish the result."""
        try:
            self.exchange.publish(task=None, **self._perform(task))
        except (CheckpointError, OSError) as error:
            self._fail(error)

    def _perform(self, task: Task) -> dict[str, Any]:
        """Do a task, unless the state has a checkpoint. Return the changes of this agent's report.

        Raises:
            CheckpointError: The task failed.
            OSError: The same.
        """
        state, mine = task.state, self.exchange.mine
        is_saved = self._is_saved(state)
        try:
            if is_saved or task.share == COMMIT:
                if not is_saved:
                    self._commit(state)
                return {"committed": (*mine.committed, state)}
            [offer] = [offer for offer in mine.offers if task.is_for(offer)]
            written = attrs.evolve(offer, file=self._write(task, offer.part))
            return {"offers": (written, *(other for other in mine.offers if other != offer))}
        except FileDeleted as error:
            log.info("writing step %d again: %s", state.step, error)
            return {}

    def _write(self, task: Task, part: int) -> DataFile:
        """Write the data file of a part durably."""
        if self._num_writes[task] == MAX_WRITES:
            raise CheckpointError(
                f"a data file is missing: another writer has deleted it {MAX_WRITES} times"
            )
        self._num_writes[task] += 1
        kind = f"part-{part:05d}" if task.state.is_sharded else "state"
        name = data_name(kind, self.agent, self._num_writes.total())
        with map_snapshot(self.memory, self.snapshots.refs[task]) as view:
            if view is None:
                raise CheckpointError(f"the snapshot of step {task.state.step} was deleted")
            return self.committer.write(task.state.step, name, view)

    def _commit(self, state: SnapshotState) -> None:
        """Commit a state whose shares are all written."""
        offers = [o for r in self._reports().values() for o in r.offers if o.state == state]
        plan = newest_complete((o for o in offers if o.file), self.exchange.load_chunks)
        files = {offer.share: offer.file for offer in offers if offer.file}
        if isinstance(plan, str):
            raise FileDeleted(f"step {state.step} {plan}")
        named = tuple(files[share] for share in plan.shares)
        self.committer.commit(state.step, named, len(named) if state.is_sharded else 0)
        directory = self.snapshots.newest.folder
        log.info("step %d was written to %s, from the last snapshot", state.step, directory)

    def _fail(self, error: Exception) -> None:
        """Write nothing more, and wait for what the other agents can do."""
        # If the report cannot be written either, the other agents will consider this one lost.
        with contextlib.suppress(OSError):
            self.exchange.publish(task=None, can_write=False, problem=describe(error))


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
        self.saved: int | None = None  # the step that was written, by any agent
        self._unfinished: list[SnapshotSet] = []
        self._problems: list[str] = []

    def run(self, cancel_reason: Callable[[], str] = str) -> str:
        """Write the snapshots. Block until they are written, or the time limit has passed.

        Args:
            cancel_reason: returns why the writing must end now, or an empty text. The caller calls
                it several times per second.

        Returns:
            An error message about what was not written, or an empty string if nothing is lost.
        """
        # Nothing can interrupt a thread that writes to a disk that hangs.
        thread = helper(self._save_all, "agent-final-save")
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

    def _wait(self, thread: threading.Thread, cancel_reason: Callable[[], str]) -> str:
        """Return why the wait ended before the thread did, or an empty text."""
        total_s, started_at, is_announced = self._limits.total_s, monotonic(), False
        while thread.is_alive() and not self._stop.is_set():
            waited_s = monotonic() - started_at
            if waited_s >= total_s:
                return f"it was not written within {total_s:g} s"
            if reason := cancel_reason():
                return reason
            if self._is_leaving and not is_announced and waited_s >= self._limits.announce_s:
                is_announced = True
                log.info(
                    "still writing the last snapshots, for up to %g s more; a further SIGTERM "
                    "gives them up",
                    total_s - waited_s,
                )
            thread.join(min(WAIT_INTERVAL_S, total_s - waited_s))
        return ""

    def _save_all(self) -> None:
        try:
            sets = snapshot_sets(self._memory)
        except Exception as error:
            self._problems.append(f"snapshots in memory were not written: {describe(error)}")
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
                    problem = snapshots.describe_failure(describe(error))
                if problem:
                    self._problems.append(problem)
                self._unfinished.remove(snapshots)
            if self._unfinished:
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
        )
