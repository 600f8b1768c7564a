"""Final save: agents write snapshots that exist only in memory as a checkpoint when a job ends early.

An agent does this last, after its workers have ended and before their memory is freed. A snapshot
and a checkpoint have the same bytes, so a final save is a copy and a commit, and needs no torch.

**Which state is written.** Each agent can write the parts in its memory: those of its own workers,
and replicas of other nodes' parts. Nodes may hold different newest steps. A state is complete if
every part of it is available, or if the boxes of the available parts cover every element, as with
HSDP copies. The newest complete state is written. A state that is the same on all ranks has one
part, and any agent that holds it can write it.

**How agents learn about each other.** The agents of one generation share a scratch directory in the
checkpoint directory. Each agent keeps one report there: the parts that it can write, the data files
that it has written, the task that it is working on, and the states that it has seen committed. A
report has a version in its file name and a checksum, so a reader never uses a partial or a cached
one. `next_action` decides from the reports what an agent does next, and is a pure function. Before
an agent starts a task, it reads the reports again and publishes its claim while it holds the lock of
the checkpoint directory, so that no two agents start the same task. The last task is the commit: the
agent that sees a data file for every part claims it. Without a lock (behind a URL) two agents may
write the same part or commit the same files, which costs time only.

**What can go wrong.**

- *An agent dies.* Every agent renews its report, also while it writes. A report that has not been
  renewed for `lost_s` counts no longer, except for the files that are already written. Replicas of
  the lost agent's parts are then written by their holders, or an older state becomes the newest
  complete one.
- *An agent is late.* The others start at once if the newest known state is complete. Otherwise they
  wait `settle_s` for a newer state to become complete, or `peers_s` if no state is complete. An agent
  that arrives after the commit accepts the committed state. If a newer state is complete by then, it
  is committed as well.
- *The disk is full, or a snapshot in memory is damaged.* The agent withdraws what it cannot write,
  and publishes the reason. Agents that hold the same elements write them instead. If none does, each
  agent reports the reason.
- *A later generation owns the directory.* The job continues from its own snapshots or checkpoints.
  Nothing is committed, and this is not an error. A different launch that owns the directory is one.
- *A worker of the same generation saves at the same time.* Its commit may delete data files that no
  manifest names yet. They are written again, up to `MAX_WRITES` times, unless the worker's checkpoint
  is at least as new.
- *The disk hangs.* The agent gives up after `total_s`, or when the caller says so.

The last agent deletes the scratch directory. If an agent was lost, the directory remains until the
next generation or launch acquires the checkpoint directory.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs

from ..clock import monotonic
from ..errors import CheckpointError, describe
from ..foreign import read_fields, read_json, read_object
from ..rendezvous.interface import RendezvousInfo
from ..threads import helper
from . import memory as memories
from .commit import ClearedAway, Committer, Writer, data_name, scratch_prefix
from .cover import Chunk, chunks_of, lacking, some
from .folder import (
    CheckpointFolder,
    DataFile,
    Retention,
    body_of,
    folder_of,
    open_place,
    step_of,
    summed,
)
from .memory import Found, Record, flaw, pinned, that_count
from .pack_head import read_meta
from .place import Place

log = logging.getLogger("elasticlib.checkpoint")

UNSHARDED = "unsharded"  # the share of a state that is the same on all ranks
COMMIT = "commit"  # the task after all shares are written; no share has this name
WAIT_INTERVAL_S = 0.1  # between two checks whether the final save must end
MAX_WRITES = 4  # a worker that saves at the same time deletes unnamed files once per save

_KEEP_ALL = Retention(last=1 << 62)  # only the job's CheckpointManager deletes old checkpoints


@attrs.frozen
class Timeouts:
    """Time limits of a final save, in seconds."""

    poll_s: float = 0.2  # between two reads of the reports
    heartbeat_s: float = 3.0  # between two renewals of a report
    lost_s: float = 30.0  # without a renewal, the agent of a report is considered lost
    replica_s: float = 3.0  # before a replica is written whose owner has not reported
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


LoadChunks = Callable[[str], Sequence[Chunk] | None]
"""Return the chunks of a share, or None if they are not available."""

_Shares = Mapping[str, Sequence[PartOffer]]


def offer_part(
    state: SnapshotState, part: int, chunks: Sequence[Chunk], *, is_replica: bool = False
) -> PartOffer:
    """Return the offer of a part of a sharded state that contains `chunks`."""
    boxes = {(c.name, c.dtype, c.shape, c.box) for c in chunks}
    encoded = json.dumps(sorted(boxes)).encode()
    return PartOffer(
        state,
        part,
        hashlib.sha256(encoded).hexdigest()[:32],
        sum(math.prod(sizes) for _, _, _, (_, sizes) in boxes),
        sum(math.prod(shape) for shape in {c.name: c.shape for c in chunks}.values()),
        is_replica,
    )


def newest_complete(offers: Iterable[PartOffer], load_chunks: LoadChunks) -> SavePlan | str:
    """Choose the newest state whose offered parts contain every element.

    Args:
        offers: of all agents.
        load_chunks: called only for states that lack a part but may still be complete.

    Returns:
        The plan, or the reason why the newest state is incomplete, as the end of a sentence.
    """
    by_state: dict[SnapshotState, dict[str, list[PartOffer]]] = {}
    for offer in sorted(offers, key=lambda offer: (offer.state, -offer.part), reverse=True):
        by_state.setdefault(offer.state, {}).setdefault(offer.share, []).append(offer)
    reasons = []
    for state, shares in by_state.items():
        reason = _describe_missing(state, shares, load_chunks)
        if not reason:
            return SavePlan(state, tuple(shares))
        reasons.append(reason)
    return reasons[0] if reasons else "is not available: no agent can write a part of it"


def _describe_missing(state: SnapshotState, shares: _Shares, load_chunks: LoadChunks) -> str:
    available = {offer.part for offers in shares.values() for offer in offers}
    missing = [part for part in range(state.num_parts) if part not in available]
    if not missing:
        return ""
    firsts = [offers[0] for offers in shares.values()]
    if sum(one.num_elements for one in firsts) >= max(one.total_elements for one in firsts):
        loaded = {offer.part: load_chunks(offer.share) for offer in firsts}
        chunks = {part: rows for part, rows in loaded.items() if rows is not None}
        if len(chunks) == len(firsts):
            try:
                return lacking(chunks, state.num_parts)
            except CheckpointError as error:
                return f"is not consistent: {error}"
    return f"is not complete: no agent holds {some(missing, 'part')} of {state.num_parts}"


# -- what an agent does next: pure -----------------------------------------------------------------


@attrs.frozen
class Claim:
    """The right to write one share of a state, or to commit the state (`COMMIT`)."""

    state: SnapshotState
    share: str

    def is_for(self, offer: PartOffer) -> bool:
        return (offer.state, offer.share) == (self.state, self.share)


@attrs.frozen
class Write:
    """Write a part."""

    offer: PartOffer

    @property
    def claim(self) -> Claim:
        return Claim(self.offer.state, self.offer.share)


@attrs.frozen
class Commit:
    """Commit a state whose shares are all written."""

    state: SnapshotState
    files: tuple[DataFile, ...]

    @property
    def claim(self) -> Claim:
        return Claim(self.state, COMMIT)


@attrs.frozen
class Finish:
    """End the final save."""

    step: int | None = None  # the committed step
    problem: str = ""  # why the snapshots were not written


@attrs.frozen
class AgentReport:
    """What an agent publishes to the other agents of its generation."""

    offers: tuple[PartOffer, ...] = ()  # the parts of its own workers before replicas
    claim: Claim | None = None  # the task that it is working on
    committed: tuple[SnapshotState, ...] = ()  # states that it has committed or found committed
    is_leaving: bool = True  # False: it helps agents that leave, and its job continues
    can_write: bool = True  # False after a write failed
    is_finished: bool = False  # it writes nothing more and reads no reports
    problem: str = ""  # why it could not write something


@attrs.frozen
class JobView:
    """What one agent knows about the final save."""

    agent: str  # its own id
    num_agents: int  # nodes of the generation
    reports: Mapping[str, AgentReport]  # by agent id; its own is included
    lost: AbstractSet[str] = frozenset()  # agents whose reports are not renewed any more
    waited_s: float = 0.0  # since this agent started its final save

    @property
    def has_all_reports(self) -> bool:
        return len(self.reports) >= self.num_agents

    @property
    def active(self) -> set[str]:
        """The agents that can still write."""
        return {
            agent
            for agent, report in self.reports.items()
            if agent not in self.lost and report.can_write and not report.is_finished
        }

    @property
    def usable_offers(self) -> list[PartOffer]:
        """The parts that are written, or that an active agent can write."""
        active = self.active
        return [
            offer
            for agent, report in self.reports.items()
            for offer in report.offers
            if offer.file or agent in active
        ]


def next_action(
    view: JobView, load_chunks: LoadChunks, limits: Timeouts
) -> Write | Commit | Finish | None:
    """Decide what an agent does next.

    Returns:
        A task to claim and do, the end of the final save, or None to wait for the other agents.
    """
    reports = view.reports.values()
    plan = newest_complete(view.usable_offers, load_chunks)
    if isinstance(plan, SavePlan):
        newest = max(offer.state for report in reports for offer in report.offers)
        is_settled = view.has_all_reports or view.waited_s >= limits.settle_s
        if plan.state != newest and not is_settled:
            return None
        if any(plan.state in report.committed for report in reports):
            return Finish(plan.state.step)
        if view.active:
            return _next_task(view, plan, limits)
        return _give_up(view, "was not committed", limits)
    return _give_up(view, plan, limits)


def _next_task(view: JobView, plan: SavePlan, limits: Timeouts) -> Write | Commit | None:
    if view.agent not in view.active:
        return None
    files = {o.share: o.file for o in view.usable_offers if o.state == plan.state and o.file}
    others = [view.reports[agent] for agent in view.active - {view.agent}]
    claims = {report.claim for report in others}
    owned = {(o.state, o.share) for report in others for o in report.offers if not o.is_replica}
    may_write_replicas = view.has_all_reports or view.waited_s >= limits.replica_s
    for offer in view.reports[view.agent].offers:
        task = Write(offer)
        if offer.state != plan.state or offer.share in files or task.claim in claims:
            continue
        # The bytes of a replica are written by the node whose workers made them, if it is there.
        is_mine = not offer.is_replica
        if is_mine or (may_write_replicas and (offer.state, offer.share) not in owned):
            return task
    if files.keys() < set(plan.shares):
        return None
    commit = Commit(plan.state, tuple(files[share] for share in plan.shares))
    return None if commit.claim in claims else commit


def _give_up(view: JobView, reason: str, limits: Timeouts) -> Finish | None:
    # If every agent has failed, only agents that have not reported can still write something.
    timeout_s = limits.peers_s if view.active else limits.settle_s
    if not view.has_all_reports and view.waited_s < timeout_s:
        return None
    details = []
    if not view.has_all_reports:
        details.append(f"{len(view.reports)} of {view.num_agents} nodes took part")
    if view.lost:
        details.append(f"{len(view.lost)} of them stopped responding")
    suffix = f" ({', '.join(details)})" if details else ""
    problems = sorted({report.problem for report in view.reports.values() if report.problem})
    return Finish(problem=("; ".join(problems) or f"it {reason}") + suffix)


# -- the scratch directory -------------------------------------------------------------------------


def encode_report(report: AgentReport) -> bytes:
    """Encode a report as one line of JSON and a line with its checksum."""
    return summed(json.dumps(attrs.asdict(report)).encode("ascii"))


def decode_report(data: bytes) -> AgentReport | None:
    """Decode a report. Return None if it is incomplete or corrupt."""
    body = body_of(data)
    try:
        fields = read_object(body) if body else {}
        offers = tuple(map(_read_offer, fields.pop("offers")))
        committed = tuple(read_fields(SnapshotState, row) for row in fields.pop("committed"))
        claim = fields.pop("claim")
        state = read_fields(SnapshotState, claim.pop("state")) if claim else None
        claimed = read_fields(Claim, claim, state=state) if claim else None
        return read_fields(AgentReport, fields, offers=offers, committed=committed, claim=claimed)
    except (KeyError, TypeError, ValueError):
        return None


def _read_offer(row: dict[str, object]) -> PartOffer:
    file = row.pop("file")
    state = read_fields(SnapshotState, row.pop("state"))
    return read_fields(
        PartOffer, row, state=state, file=read_fields(DataFile, file) if file else None
    )


class ReportExchange:
    """The reports of the agents of one generation, as files of a scratch directory.

    `publish` and `close` may be called by any thread, the other methods by one thread. The
    directory is not used if there is no other agent.
    """

    def __init__(self, storage: Place, directory: str, agent: str, num_agents: int) -> None:
        self.agent = agent  # id of this agent, and its writer token
        self.num_agents = num_agents
        self.mine = AgentReport()  # the report that was published last
        self._storage, self._directory = storage, directory
        self._lock = threading.Lock()  # guards the next three fields
        self._version = 0  # of the last report that was published
        self._published = ""  # file name of that report
        self._is_closed = False
        self._reports: dict[str, tuple[int, float, AgentReport]] = {}  # version, seen at, report
        self._chunks: dict[str, Mapping[str, Sequence[Chunk]]] = {}  # by agent, then by share

    def locked(self) -> AbstractContextManager[None]:
        """Return a context that excludes the other agents, and writers of checkpoints."""
        return self._storage.locked() if self.num_agents > 1 else contextlib.nullcontext()

    def publish(self, report: AgentReport | None = None) -> None:
        """Replace this agent's report, or renew it. Raise OSError if the disk fails."""
        with self._lock:
            self.mine = report or self.mine
            if self.num_agents == 1 or self._is_closed:
                return
            previous, name = self._published, f"{self.agent}.{self._version + 1}.report"
            # A new name for each version: NFS clients may cache what they have read of an old one.
            self._storage.write(self._path(name), memoryview(encode_report(self.mine)))
            self._version, self._published = self._version + 1, name
            if previous:
                self._storage.remove(self._path(previous))

    def publish_chunks(self, chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Publish the chunks of this agent's parts by share. Raise OSError if the disk fails."""
        self._chunks[self.agent] = chunks
        if self.num_agents > 1 and chunks:
            rows = {share: [chunk.row() for chunk in held] for share, held in chunks.items()}
            data = zlib.compress(json.dumps(rows).encode())
            self._storage.write(self._path(f"{self.agent}.chunks"), memoryview(data))

    def read(self) -> Mapping[str, AgentReport]:
        """Return the newest reports by agent; this agent's own is included."""
        now = monotonic()
        names = self._storage.files(self._directory) if self.num_agents > 1 else {}
        for name in names:
            agent, _, version = name.removesuffix(".report").partition(".")
            if not version.isdecimal() or int(version) <= self._reports.get(agent, (0,))[0]:
                continue
            report = decode_report(self._storage.read(self._path(name)) or b"")
            if report is not None:
                self._reports[agent] = int(version), now, report
        reports = {agent: report for agent, (_, _, report) in self._reports.items()}
        return {**reports, self.agent: self.mine}

    def lost_agents(self, timeout_s: float) -> set[str]:
        """Return the agents whose reports have not been renewed for `timeout_s`."""
        oldest = monotonic() - timeout_s
        seen = {agent: seen_at for agent, (_, seen_at, _) in self._reports.items()}
        return {agent for agent, seen_at in seen.items() if seen_at < oldest} - {self.agent}

    def load_chunks(self, share: str) -> Sequence[Chunk] | None:
        """Return the chunks of a share as published by any agent, or None."""
        for agent, report in self.read().items():
            if all(offer.share != share for offer in report.offers):
                continue
            if agent not in self._chunks:
                with contextlib.suppress(OSError, ValueError, zlib.error, CheckpointError):
                    data = self._storage.read(self._path(f"{agent}.chunks"))
                    rows = read_json(zlib.decompress(data)) if data else {}
                    self._chunks[agent] = {s: chunks_of({"chunks": r}) for s, r in rows.items()}
            if share in self._chunks.get(agent, {}):
                return self._chunks[agent][share]
        return None

    def close(self) -> None:
        """Mark this agent as finished. The last agent deletes the directory."""
        with contextlib.suppress(OSError):
            self.publish(attrs.evolve(self.mine, is_finished=True, claim=None))
            with self._lock:
                self._is_closed = True
            reports = self.read()
            if len(reports) >= self.num_agents > 1 and all(r.is_finished for r in reports.values()):
                for name in self._storage.files(self._directory):
                    self._storage.remove(self._path(name))
                self._storage.remove_folder(self._directory)

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}"


# -- the snapshots of one node ---------------------------------------------------------------------


@attrs.define
class SnapshotSet:
    """The snapshots of one name in an agent's memory."""

    newest: Record
    offers: list[PartOffer] = attrs.field(factory=list)  # newest first, local before replicas
    snapshots: defaultdict[Claim, list[Found]] = attrs.field(factory=lambda: defaultdict(list))
    chunks: dict[str, list[Chunk]] = attrs.field(factory=dict)  # by share

    @property
    def state(self) -> SnapshotState:
        return state_of(self.newest)

    def describe_failure(self, reason: str) -> str:
        """Return the sentence that reports that these snapshots were not written."""
        where = self.newest.folder
        return f"the snapshot of step {self.newest.step} was not written to {where}: {reason}"


def state_of(record: Record) -> SnapshotState:
    """Return the state that a snapshot is a part of."""
    is_sharded = record.sharded or record.parts > 1
    return SnapshotState(record.generation, record.step, record.parts, is_sharded)


def snapshot_sets(memory: Path) -> list[SnapshotSet]:
    """Return the snapshots in an agent's memory that have a checkpoint directory, by name."""
    sets: dict[str, SnapshotSet] = {}
    valid = [ref for ref in that_count(memories.look(memory)) if ref.record.folder]
    for ref in sorted(valid, key=lambda ref: state_of(ref.record), reverse=True):
        state, record = state_of(ref.record), ref.record
        snapshots = sets.setdefault(record.name, SnapshotSet(record))
        if state.is_sharded:
            chunks = read_chunks(memory, ref)
            if chunks is None:
                continue
            offer = offer_part(state, record.part, chunks, is_replica=bool(ref.owner))
            snapshots.chunks[offer.share] = chunks
        else:
            offer = PartOffer(state, 0, is_replica=bool(ref.owner))
        refs = snapshots.snapshots[Claim(state, offer.share)]
        if not refs:
            snapshots.offers.append(offer)
        refs.append(ref)
    return [snapshots for _, snapshots in sorted(sets.items())]


def read_chunks(memory: Path, ref: Found) -> list[Chunk] | None:
    """Return the chunks of a part, or None if the snapshot is gone or its header is corrupt."""
    with pinned(memory, ref) as view:
        try:
            return None if view is None else chunks_of(read_meta(view))
        except CheckpointError as error:
            step, part = ref.record.step, ref.record.part
            log.warning("part %d of the snapshot of step %d is skipped: %s", part, step, error)
            return None


# -- one agent's work ------------------------------------------------------------------------------


class _SnapshotUnusable(CheckpointError):
    """A snapshot in memory is gone or corrupt."""


@attrs.define(eq=False)
class SetSaver:
    """Writes one set of snapshots together with the other agents. Used by one thread."""

    memory: Path
    snapshots: SnapshotSet
    exchange: ReportExchange
    folder: CheckpointFolder
    committer: Committer
    limits: Timeouts
    is_leaving: bool  # False: it only helps agents that leave
    stop: threading.Event  # when it is set, this agent starts nothing more
    saved_step: int | None = None  # the step that this agent or another one has committed
    _started_at: float = attrs.field(init=False, factory=monotonic)
    _num_writes: Counter[Claim] = attrs.field(init=False, factory=Counter)

    def run(self) -> str:
        """Return what was not written, as a sentence, or an empty string if nothing is lost."""
        if not self._wait_for_leaving_agent():
            return ""
        self._started_at = monotonic()
        is_over = threading.Event()
        try:
            if self._is_saved(self.snapshots.state):
                return ""
            self._join()
            helper(lambda: self._renew(is_over), "agent-final-save-renew").start()
            return self._work()
        finally:
            is_over.set()
            self.exchange.close()

    def _wait_for_leaving_agent(self) -> bool:
        while not (self.is_leaving or any(r.is_leaving for r in self.exchange.read().values())):
            if self.stop.wait(self.limits.poll_s):
                return False
        return True

    def _join(self) -> None:
        offers = tuple(self.snapshots.offers)
        self.exchange.mine = AgentReport(offers, is_leaving=self.is_leaving)
        try:
            self.committer.claim()
            self.exchange.publish_chunks(self.snapshots.chunks)
        except (CheckpointError, OSError) as error:
            self._fail(error)
        else:
            self._publish()

    def _renew(self, is_over: threading.Event) -> None:
        while not is_over.wait(self.limits.heartbeat_s):
            with contextlib.suppress(OSError):
                self.exchange.publish()

    def _work(self) -> str:
        while not self.stop.is_set():
            if self._was_superseded():
                step = self.snapshots.newest.step
                log.info("step %d is not written: a later generation continues the job", step)
                return ""
            action = self._claim_next()
            if isinstance(action, Finish):
                self.saved_step = action.step
                # A worker may have saved in the meantime.
                if not action.problem or self._is_saved(self.snapshots.state):
                    return ""
                return self.snapshots.describe_failure(action.problem)
            if action is None:
                self.stop.wait(self.limits.poll_s)
            else:
                self._do(action)
        return ""

    def _is_saved(self, state: SnapshotState) -> bool:
        """Return whether a complete checkpoint of the state's step or of a later one exists."""
        steps = [step_of(name) for name in self.folder.place.folders()]
        for step in sorted((s for s in steps if s is not None and s >= state.step), reverse=True):
            entry = self.folder.look(step)
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

    def _was_superseded(self) -> bool:
        with contextlib.suppress(CheckpointError, OSError):  # the commit reports a corrupt fence
            return self.committer.goes_on()
        return False

    def _claim_next(self) -> Write | Commit | Finish | None:
        """Decide what to do next. If it is a task, decide again under the lock, and claim it."""
        action = self._decide()
        if isinstance(action, Write | Commit):
            with self.exchange.locked():
                action = self._decide()
                if isinstance(action, Write | Commit):
                    self._publish(claim=action.claim)
        return action

    def _decide(self) -> Write | Commit | Finish | None:
        reports = self.exchange.read()
        steps = {o.state.step for report in reports.values() for o in report.offers if o.file}
        sizes = {step: self.folder.place.files(folder_of(step)) for step in steps}

        def verified(offer: PartOffer) -> PartOffer:
            file = offer.file
            is_there = file and sizes[offer.state.step].get(file.name) == file.size
            return offer if is_there else attrs.evolve(offer, file=None)

        view = JobView(
            self.exchange.agent,
            self.exchange.num_agents,
            {
                agent: attrs.evolve(report, offers=tuple(map(verified, report.offers)))
                for agent, report in reports.items()
            },
            self.exchange.lost_agents(self.limits.lost_s),
            monotonic() - self._started_at,
        )
        return next_action(view, self.exchange.load_chunks, self.limits)

    def _do(self, task: Write | Commit) -> None:
        """Do a task, and publish the result."""
        state, offers = task.claim.state, self.exchange.mine.offers
        try:
            if self._is_saved(state):
                self._publish(claim=None, committed=(*self.exchange.mine.committed, state))
            elif isinstance(task, Commit):
                self.committer.commit(state.step, task.files, len(task.files) * state.is_sharded)
                directory = self.snapshots.newest.folder
                log.info("step %d was written to %s, from the last snapshot", state.step, directory)
                self._publish(claim=None, committed=(*self.exchange.mine.committed, state))
            else:
                written = attrs.evolve(task.offer, file=self._write(task))
                is_same = task.claim.is_for
                self._publish(claim=None, offers=[written if is_same(o) else o for o in offers])
        except ClearedAway as error:
            log.info("writing step %d again: %s", state.step, error)
            self._publish(claim=None)
        except _SnapshotUnusable as error:
            self._withdraw(task.claim, str(error))
        except (CheckpointError, OSError) as error:
            self._fail(error)

    def _write(self, task: Write) -> DataFile:
        """Write the data file of a part durably."""
        state, ref = task.claim.state, self.snapshots.snapshots[task.claim][0]
        if self._num_writes[task.claim] == MAX_WRITES:
            raise CheckpointError(
                f"a data file is missing: other writers have deleted it {MAX_WRITES} times"
            )
        self._num_writes[task.claim] += 1
        kind = f"part-{task.offer.part:05d}" if state.is_sharded else "state"
        name = data_name(kind, self.exchange.agent, self._num_writes.total())
        with pinned(self.memory, ref) as view:
            if view is None:
                raise _SnapshotUnusable(f"the snapshot of step {state.step} is gone")
            if corruption := flaw(self.memory, ref, view):
                raise _SnapshotUnusable(corruption)
            return self.committer.write(state.step, name, view)

    def _withdraw(self, claim: Claim, problem: str) -> None:
        """Use another copy of a part, or offer the part no longer."""
        log.warning("a snapshot cannot be written: %s", problem)
        refs, offers = self.snapshots.snapshots[claim], self.exchange.mine.offers
        del refs[0]
        if not refs:
            offers = tuple(offer for offer in offers if not claim.is_for(offer))
        self._publish(claim=None, offers=offers, problem=problem)

    def _fail(self, error: Exception) -> None:
        """Publish that this agent can write nothing more."""
        self._publish(claim=None, can_write=False, problem=describe(error))

    def _publish(self, **changes: Any) -> None:
        try:
            self.exchange.publish(attrs.evolve(self.exchange.mine, **changes))
        except OSError as error:
            # If the disk is full, the other agents will consider this agent lost. This one waits
            # for their commit all the same.
            problem = self.exchange.mine.problem or describe(error)
            self.exchange.mine = attrs.evolve(self.exchange.mine, can_write=False, problem=problem)


class FinalSave:
    """The final save of one agent: writes what exists only in its memory."""

    def __init__(
        self,
        memory: Path,
        info: RendezvousInfo | None,
        *,
        is_leaving: bool = True,
        storage: Place | None = None,
        limits: Timeouts = Timeouts(),
    ) -> None:
        """Do nothing yet.

        Args:
            memory: the directory of the agent's snapshots.
            info: the last generation; None if there was none.
            is_leaving: whether this node's run is over. If it is not, the agent writes only parts
                that agents that leave need.
            storage: the checkpoint directory, if it is not the one that the snapshots name.
            limits: the time limits.
        """
        self._memory, self._info, self._storage = memory, info, storage
        self._is_leaving, self._limits = is_leaving, limits
        self._stop = threading.Event()
        self.saved: int | None = None  # the step that was written, by any agent
        self._unfinished: list[SnapshotSet] = []
        self._problems: list[str] = []

    def run(self, given_up: Callable[[], str] = str) -> str:
        """Write the snapshots. Block until they are written, or the time limit has passed.

        Args:
            given_up: returns why the writing must end now, or an empty text. It is called several
                times a second, by the calling thread.

        Returns:
            What was not written, as a sentence, or an empty text if nothing is lost.
        """
        # Nothing can interrupt a thread that writes to a disk that hangs.
        thread = helper(self._save_all, "agent-final-save")
        thread.start()
        reason = self._wait(thread, given_up)
        if self._stop.is_set():
            return ""
        self._stop.set()
        late = [snapshots.describe_failure(reason) for snapshots in tuple(self._unfinished)]
        return "; ".join([*self._problems, *late])

    def stop(self) -> None:
        """Start nothing more and report nothing. Thread-safe."""
        self._stop.set()

    def _wait(self, thread: threading.Thread, given_up: Callable[[], str]) -> str:
        """Return why the wait ended before the thread did, or an empty text."""
        limits, started_at, is_announced = self._limits, monotonic(), False
        while thread.is_alive() and not self._stop.is_set():
            waited_s = monotonic() - started_at
            if waited_s >= limits.total_s:
                return f"it was not written within {limits.total_s:g} s"
            if reason := given_up():
                return reason
            if self._is_leaving and not is_announced and waited_s >= limits.announce_s:
                is_announced = True
                log.info(
                    "still writing the last snapshots, for up to %g s more; a further SIGTERM "
                    "gives them up",
                    limits.total_s - waited_s,
                )
            thread.join(min(WAIT_INTERVAL_S, limits.total_s - waited_s))
        return ""

    def _save_all(self) -> None:
        try:
            sets = snapshot_sets(self._memory)
        except Exception as error:
            self._problems.append(f"snapshots in memory were not written: {describe(error)}")
            return
        self._unfinished = [s for s in sets if self._is_leaving or s.state.is_sharded]
        while self._unfinished and not self._stop.is_set():
            snapshots = self._unfinished[0]
            try:
                problem = self._save(snapshots)
            except Exception as error:
                # Any error must be part of the report on how the run ended.
                problem = snapshots.describe_failure(describe(error))
            if problem:
                self._problems.append(problem)
            del self._unfinished[0]

    def _save(self, snapshots: SnapshotSet) -> str:
        newest, info = snapshots.newest, self._info
        # Workers of the last generation may own the directory without having made a snapshot.
        generation = max(newest.generation, info.generation if info else 0)
        label = f"agent {os.getpid()} on {socket.gethostname()}"
        agent = secrets.token_hex(8)
        writer = Writer(newest.run, newest.launch, generation, agent, label)
        folder = CheckpointFolder(self._storage or open_place(newest.folder))
        directory = f"{scratch_prefix(writer)}.{zlib.crc32(newest.name.encode()):08x}"
        saver = SetSaver(
            self._memory,
            snapshots,
            ReportExchange(folder.place, directory, agent, info.world_size if info else 1),
            folder,
            Committer(folder, writer, _KEEP_ALL, beside=True),
            self._limits,
            self._is_leaving,
            self._stop,
        )
        problem = saver.run()
        self.saved = self.saved if saver.saved_step is None else saver.saved_step
        return problem
