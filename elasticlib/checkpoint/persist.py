"""What is in memory alone when a job ends before its work is done is written where it lasts.

An agent's last act: after its workers are gone and before their memory is, and without torch. A
snapshot and a checkpoint are the same bytes, so this is a copy and a commit. Of a state that is the
same on all ranks one node writes, its own newest step. Of a sharded one, the nodes of the last
generation tell one another on its board which parts they hold, of their own workers or as
replicas. They agree on the newest step whose parts cover all elements; a part that has the same
boxes as another may stand for it, as with HSDP's copies. Each part is written by a node that has
it, and one node commits them all. Whoever vanishes is taken over from.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs

from ..clock import monotonic
from ..errors import CheckpointError, CheckpointRefused, StoreError, describe, present
from ..foreign import read_json
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import ABSENT, Entry, Store
from ..threads import helper
from .boxes import TensorShard, describe_missing, format_numbers, read_shards
from .commit import ClearedAway, Committer, Writer, data_name
from .folder import CheckpointFolder, DataFile, Retention, folder_of, open_place
from .place import Place
from .safetensors_header import read_meta
from .snapshot_slots import (
    SnapshotHeader,
    SnapshotRef,
    list_snapshots,
    map_snapshot,
    valid_snapshots,
)

log = logging.getLogger("elasticlib.checkpoint")

WRITE_SECONDS = 600.0
"""For all that is to be written: a disk that hangs must not hold a node for ever."""
RENEW_SECONDS = 5.0
POLL_SECONDS = 0.1  # between two looks whether the final write is to be given up
ANNOUNCE_SECONDS = 3.0  # a final write that takes longer is announced in the log
CLAIM_SECONDS = 60.0
"""What a node has said that it writes, and has not said again for so long, others take over."""
FAILED_SECONDS = 3.0
"""For which others may take over what a node could not write."""
SETTLE_SECONDS = 5.0
"""For which nodes that have not said what they hold are waited for, if the others hold enough."""
AGREE_SECONDS = 60.0
"""The same, if they do not: the slowest node may take so long to end its workers."""
LOOK_SECONDS = 1.0
ATTEMPTS = 4
"""To commit what a worker beside us clears away, which it does once a save."""
WHOLE, COMMIT = "whole", "commit"
"""The one share of a state that is the same on all ranks; and what comes after all shares."""

_ALL = Retention(last=1 << 62)  # which are too many is for the job's own manager to say


# -- which state the nodes write together: pure ----------------------------------------------------


@attrs.frozen(order=True)
class SnapshotState:
    """Parts of one state fit together. A step that was trained twice, before a loss and after it,
    is two states. parts: the number of ranks that hold it; 1 if it is the same on all of them."""

    generation: int
    step: int
    parts: int = 1
    sharded: bool = False


@attrs.frozen
class Piece:
    """A part of a state that a node says it holds.

    share: a name for its boxes of tensors: of two parts with one share either will do. elements: in
    those boxes. total: in the tensors that they belong to.
    """

    state: SnapshotState
    part: int
    share: str
    elements: int = 0
    total: int = 0


@attrs.frozen
class WritePlan:
    """The state that is written, and its shares in the order of their files."""

    state: SnapshotState
    shares: tuple[str, ...]


Chunks = Mapping[str, Sequence[TensorShard]]  # of the shares of which that is known
_Shares = dict[str, list[Piece]]


def piece_of(state: SnapshotState, part: int, chunks: Sequence[TensorShard]) -> Piece:
    """What a node says of a part that holds these."""
    boxes = {(c.name, c.dtype, c.shape, c.box) for c in chunks}
    named = json.dumps(sorted(boxes)).encode()
    return Piece(
        state,
        part,
        hashlib.sha256(named).hexdigest()[:32],
        sum(math.prod(sizes) for _, _, _, (_, sizes) in boxes),
        sum(math.prod(shape) for shape in {c.name: c.shape for c in chunks}.values()),
    )


def newest_whole(pieces: Iterable[Piece], chunks: Chunks) -> WritePlan | str:
    """The newest state that is held whole; or why the newest is not, as the end of a sentence."""
    reasons = []
    for state, shares in _newest_first(pieces):
        reason = _lacking(state, shares, chunks)
        if not reason:
            return WritePlan(state, tuple(shares))
        reasons.append(reason)
    return reasons[0] if reasons else "is in no part that says which elements it has"


def in_doubt(pieces: Iterable[Piece]) -> frozenset[str]:
    """The shares whose chunks decide: of states that lack parts, but perhaps no elements, as other
    parts may have copies."""
    found: set[str] = set()
    for state, shares in _newest_first(pieces):
        if not _lost(state, shares):
            break
        if _may_cover(shares):
            found.update(shares)
    return frozenset(found)


def _newest_first(pieces: Iterable[Piece]) -> list[tuple[SnapshotState, _Shares]]:
    """The shares of each state, by their lowest parts."""
    states: dict[SnapshotState, _Shares] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.state, -piece.part), reverse=True):
        states.setdefault(piece.state, {}).setdefault(piece.share, []).append(piece)
    return list(states.items())


def _lacking(state: SnapshotState, shares: _Shares, chunks: Chunks) -> str:
    lost = _lost(state, shares)
    if lost and _may_cover(shares) and shares.keys() <= chunks.keys():
        held = {piece.part: chunks[s] for s, held in shares.items() for piece in held}
        return describe_missing(held, state.parts)
    return (
        f"is incomplete: no rank has {format_numbers(lost, 'part')} of {state.parts}"
        if lost
        else ""
    )


def _lost(state: SnapshotState, shares: _Shares) -> list[int]:
    held = {piece.part for pieces in shares.values() for piece in pieces}
    return [part for part in range(state.parts) if part not in held]


def _may_cover(shares: _Shares) -> bool:
    firsts = [held[0] for held in shares.values()]
    return sum(piece.elements for piece in firsts) >= max(piece.total for piece in firsts)


# -- who does what next: pure ----------------------------------------------------------------------


@attrs.frozen
class Said:
    """What stands under a key of the board. age: seconds since it was last seen to change."""

    value: Any
    version: int
    age: float

    @property
    def is_free(self) -> bool:
        """Whether another may take it over."""
        return "failed" in self.value or (not self.file and self.age > CLAIM_SECONDS)

    @property
    def file(self) -> DataFile | None:
        return DataFile(*self.value["file"]) if "file" in self.value else None


@attrs.frozen
class Over:
    """It is done, or lost for this reason."""

    reason: str = ""


def next_move(
    shares: Sequence[str],
    said: Mapping[str, Said],
    mine: Iterable[str],
    failed: AbstractSet[str],
    others: bool,
) -> str | Over | None:
    """What a node does next of a plan: a share, or the commit; None while others are at work.

    said: by share, and of the commit, what the nodes have said of it. mine: the shares that this
    node holds, those first that it should write first. failed: what it has tried in vain. others:
    whether there are other nodes, which may take over what one could not do.
    """
    commit = said.get(COMMIT)
    if commit is not None and commit.value.get("done"):
        return Over()
    for share in mine:
        if share not in failed and (share not in said or said[share].is_free):
            return share
    written = all(share in said and said[share].file for share in shares)
    if written and COMMIT not in failed and (commit is None or commit.is_free):
        return COMMIT
    for one in said.values():
        if "failed" in one.value and one.age >= FAILED_SECONDS * others:
            return Over(str(one.value["failed"]))
    return None


# -- what the nodes say to one another -------------------------------------------------------------


class Board:
    """Where the nodes of a generation say what they hold and write; a node alone says it to itself.

    A node claims what is to be done once: it writes under a key, and again for as long as it takes.
    """

    def __init__(self, alone: Callable[[], Store], info: RendezvousInfo | None = None) -> None:
        self._store, self._prefix, self.nodes, self.rank = alone(), "", 1, 0
        self.token = secrets.token_hex(8)
        """All nodes write to the disk as one writer, with this token."""
        if info is not None and info.store is not None and info.board and info.world_size > 1:
            self._store, self._prefix = info.store, f"{info.board}persist/"
            self.nodes, self.rank = info.world_size, info.rank
            self.token = hashlib.sha256(self._prefix.encode()).hexdigest()[:16]
        self._seen: dict[str, tuple[int, float]] = {}
        self._lock = threading.RLock()
        self._claim: tuple[str, int] | None = None
        self._times = 0

    def list(self, under: str) -> tuple[dict[str, Said], int]:
        """What stands under a prefix, by the rest of the keys, and the version of that."""
        listing, now = self._store.list(self._prefix + under), monotonic()
        said = {}
        for entry in listing.entries:
            if self._seen.get(entry.key, (ABSENT,))[0] != entry.version:
                self._seen[entry.key] = entry.version, now
            age = now - self._seen[entry.key][1]
            said[entry.key[len(self._prefix + under) :]] = Said(_read(entry), entry.version, age)
        return said, listing.version

    def wait(self, under: str, version: int) -> None:
        """Until something there has changed, or for a moment."""
        self._store.wait(self._prefix + under, after=version, timeout=LOOK_SECONDS)

    def get(self, key: str) -> Said | None:
        entry = self._store.get(self._prefix + key)
        return Said(_read(entry), entry.version, 0.0) if entry else None

    def put(self, key: str, value: object, *, once: bool = False) -> None:
        """once: leave what stands there."""
        if once:
            self._store.compare_set(self._prefix + key, _written(value), expected=ABSENT)
        else:
            self._store.set(self._prefix + key, _written(value))

    def forget(self, key: str, version: int) -> bool:
        return self._store.delete(self._prefix + key, expected=version)

    def take(self, key: str, version: int) -> int:
        """Claim a key that is at this version. Returns the version of the claim, which is larger
        than that of any claim before it; 0 if another was first."""
        with self._lock:
            self._times += 1
            value = _written({"by": self.rank, "times": self._times})
            answer = self._store.compare_set(self._prefix + key, value, expected=version)
            claim = answer.entry.version if answer.won and answer.entry else 0
            self._claim = (key, claim) if claim else None
            return claim

    def renew(self) -> None:
        """Say again that we are at what we have claimed, if anything."""
        with self._lock:
            try:
                if self._claim is not None:
                    self.take(*self._claim)
            except StoreError as error:
                log.info("the other nodes are not told about a snapshot: %s", error)

    def done(self, **value: object) -> bool:
        """Say what came of the claim; without a value, let others claim it anew. Whether it was
        still ours."""
        with self._lock:
            (key, version), self._claim = self._claim or ("", ABSENT), None
            if not key or not value:
                return bool(key) and self.forget(key, version)
            written = _written(value)
            return self._store.compare_set(self._prefix + key, written, expected=version).won


def _written(value: object) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def _read(entry: Entry) -> Any:
    return read_json(zlib.decompress(entry.value))


# -- one node's part in it -------------------------------------------------------------------------


@attrs.define
class Kind:
    """The snapshots of one name that this node holds.

    header: of the newest. held: newest first, and of one state those first that workers here have
    made. chunks: of the parts among them, by share.
    """

    header: SnapshotHeader
    held: list[tuple[Piece, SnapshotRef]] = attrs.field(factory=list)
    chunks: dict[str, list[TensorShard]] = attrs.field(factory=dict)

    @property
    def newest(self) -> SnapshotState:
        return state_of(self.header)

    @property
    def key(self) -> str:
        return quote(self.header.name, safe="")[:256]

    def of(self, plan: WritePlan) -> dict[str, SnapshotRef]:
        """What is here of it, by share."""
        found: dict[str, SnapshotRef] = {}
        for piece, one in self.held:
            if piece.state == plan.state and piece.share in plan.shares:
                found.setdefault(piece.share, one)
        return found

    def not_written(self, state: SnapshotState, reason: str) -> str:
        where = self.header.folder
        return f"the snapshot of step {state.step} was not written to {where}: {reason}"


def state_of(record: SnapshotHeader) -> SnapshotState:
    sharded = record.sharded or record.parts > 1
    return SnapshotState(record.generation, record.step, record.parts, sharded)


def kinds_in(memory: Path) -> list[Kind]:
    """What is to be written of an agent's memory."""
    kinds: dict[str, Kind] = {}
    counting = [one for one in valid_snapshots(list_snapshots(memory)) if one.header.folder]
    for one in sorted(counting, key=lambda one: state_of(one.header), reverse=True):
        state, kind = state_of(one.header), kinds.setdefault(one.header.name, Kind(one.header))
        if not state.sharded:
            kind.held.append((Piece(state, 0, WHOLE), one))
        elif (chunks := chunks_in(memory, one)) is not None:
            piece = piece_of(state, one.header.part, chunks)
            kind.held.append((piece, one))
            kind.chunks[piece.share] = chunks
    return sorted(kinds.values(), key=lambda kind: kind.key)


def chunks_in(memory: Path, found: SnapshotRef) -> list[TensorShard] | None:
    """What a part holds; None where it is gone, is damaged, or does not say."""
    with map_snapshot(memory, found) as view:
        try:
            return None if view is None else read_shards(read_meta(view))
        except CheckpointError as error:
            step, part = found.header.step, found.header.part
            log.warning("part %d of the snapshot of step %d is skipped: %s", part, step, error)
            return None


class _Damaged(CheckpointError):
    """A snapshot is not as it was when it was made."""


class _GoesOn(Exception):
    """A later generation has the folder: nothing is lost."""


@attrs.define(eq=False)
class Persisting:
    """One kind of snapshots on its way to its folder, beside a worker of the same generation that
    may be at its last save there, on another node.

    leaves: see `LastWrites`. over: whether to begin nothing more. saved: the step that was written,
    by this node or with others.
    """

    _memory: Path
    _kind: Kind
    _board: Board
    _folder: CheckpointFolder
    _committer: Committer
    _leaves: bool
    _over: threading.Event
    saved: int | None = attrs.field(init=False, default=None)
    _learned: dict[str, list[TensorShard]] = attrs.field(init=False, factory=dict)
    _why: str = attrs.field(init=False, default="")
    _cleared: int = attrs.field(init=False, default=0)

    def run(self) -> str:
        """What could not be written, as a sentence; empty if nothing is lost."""
        if self._kind.newest.sharded:
            self._post()  # also if nothing is here: the others wait for this node's word
        while not self._over.is_set():
            if self._has(self._kind.newest):
                return ""
            plan, version = self._agreed()
            if plan is None:
                return self._why and self._kind.not_written(self._kind.newest, self._why)
            try:
                reason = "" if self._has(plan.state) else self._carry_out(plan)
            except _GoesOn as error:
                log.info("step %d is not written, as the job goes on: %s", plan.state.step, error)
                return ""
            if not reason:
                return ""
            # Without what turned out to be damaged the nodes may have agreed on another state.
            if not plan.state.sharded or self._plan()[1] == version:
                return self._kind.not_written(plan.state, reason)
        return ""

    def _has(self, state: SnapshotState) -> bool:
        """Whether there is a whole checkpoint of the state's step, or of a later one."""
        for found in self._folder.found():
            if found.step < state.step:
                return False
            # A sharded checkpoint of the same step is not read: to read all its parts on each
            # node takes longer than a node has that is about to go. A later one is read, because
            # training has gone back behind it, and then it may be damaged.
            with contextlib.suppress(CheckpointError):  # rather once too often
                if found.manifest:
                    if not state.sharded or found.step > state.step:
                        self._folder.check(found.manifest)
                    return True
        return False

    def _agreed(self) -> tuple[WritePlan | None, int]:
        """What all nodes write, and the version of that; None if they hold no state whole."""
        if not self._kind.newest.sharded:
            return WritePlan(self._kind.newest, (WHOLE,)), ABSENT
        began = monotonic()
        while not self._over.is_set():
            plan, version = self._plan()
            if plan is not None:
                return plan, version
            _, seen = self._board.list("agreed/")
            self._tell_chunks()
            if self._leaves and not self._decide(monotonic() - began):
                break
            self._board.wait("" if self._leaves else "agreed/", seen)
        return None, ABSENT

    def _post(self) -> None:
        """Say which parts are here."""
        rows = [attrs.astuple(piece) for piece, _ in self._kind.held if piece.state.sharded]
        self._board.put(f"held/{self._kind.key}/{self._board.rank}", rows)

    def _plan(self) -> tuple[WritePlan | None, int]:
        said = self._board.get(f"agreed/plan/{self._kind.key}")
        if said is None:
            return None, ABSENT
        state, shares = said.value
        return WritePlan(SnapshotState(*state), tuple(shares)), said.version

    def _decide(self, waited: float) -> bool:
        """Say what is to be written, if that can be said; False if it never can."""
        posts, _ = self._board.list(f"held/{self._kind.key}/")
        rows = (row for post in posts.values() for row in post.value)
        pieces = [Piece(SnapshotState(*state), *rest) for state, *rest in rows]
        all_in = len(posts) >= self._board.nodes
        settled = all_in or waited > SETTLE_SECONDS
        missing = settled and self._learn(in_doubt(pieces))
        plan = newest_whole(pieces, self._kind.chunks | self._learned)
        told = f"{len(posts)} of {self._board.nodes} nodes have listed what they hold"
        if isinstance(plan, WritePlan):
            is_newest = plan.state == max(piece.state for piece in pieces)
            if is_newest or (settled and not missing) or waited > AGREE_SECONDS:
                self._board.put(f"agreed/plan/{self._kind.key}", attrs.astuple(plan), once=True)
        elif (all_in and not missing) or waited > AGREE_SECONDS:
            self._why = f"it {plan}" if all_in else f"it {plan} ({told})"
        return not self._why

    def _learn(self, doubtful: frozenset[str]) -> bool:
        """Whether chunks that decide are still to come from other nodes, which are asked."""
        unknown = doubtful - self._kind.chunks.keys() - self._learned.keys()
        if unknown:
            self._board.put(f"agreed/doubt/{self._kind.key}", sorted(doubtful), once=True)
        for share in unknown:
            if (said := self._board.get(f"chunks/{share}")) is not None:
                self._learned[share] = read_shards({"shards": said.value})
        return bool(unknown - self._learned.keys())

    def _tell_chunks(self) -> None:
        """Those of ours that somebody has asked for."""
        asked = self._board.get(f"agreed/doubt/{self._kind.key}")
        for share in self._kind.chunks.keys() & set(asked.value if asked else ()):
            rows = [chunk.to_row() for chunk in self._kind.chunks[share]]
            self._board.put(f"chunks/{share}", rows, once=True)

    def _carry_out(self, plan: WritePlan) -> str:
        """Write with the others what is planned; why it could not be, or ""."""
        board, failed = self._board, set[str]()
        under = self._under(plan)
        began = monotonic()
        while not self._over.is_set():
            said, seen = board.list(under)
            move = next_move(plan.shares, said, self._kind.of(plan), failed, board.nodes > 1)
            if isinstance(move, Over):
                self.saved = None if move.reason else plan.state.step
                return move.reason
            if move is not None:
                at = said[move].version if move in said else ABSENT
                claim = board.take(under + move, at)
                if claim and not self._do(plan, move, claim, said):
                    failed.add(move)
            elif min([monotonic() - began, *(one.age for one in said.values())]) > CLAIM_SECONDS:
                return f"for {CLAIM_SECONDS:g} s nobody said that it is being written"
            else:
                board.wait(under, seen)
        return ""

    def _under(self, plan: WritePlan) -> str:
        return f"written/{self._kind.key}/{plan.state.generation}.{plan.state.step}/"

    def _do(self, plan: WritePlan, key: str, claim: int, said: Mapping[str, Said]) -> bool:
        """Do what is claimed. False if it is of no use to try that again here."""
        step = plan.state.step
        try:
            self._committer.claim()
            if key == COMMIT:
                files = tuple(present(said[share].file, "a file") for share in plan.shares)
                self._committer.commit(step, files, len(files) if plan.state.sharded else 0)
                folder = self._kind.header.folder
                log.info("step %d was written to %s, from the last snapshot", step, folder)
                self._board.done(done=True)
            else:
                file = self._write(plan, key, claim)
                if not self._board.done(file=attrs.astuple(file)):
                    self._committer.abandon(step, file.name)  # another has taken it over
        except StoreError:
            raise
        except ClearedAway as error:
            return self._cleared_away(plan, said, error)
        except Exception as error:
            return self._failed(plan, key, error)
        return True

    def _write(self, plan: WritePlan, share: str, number: int) -> DataFile:
        step, found = plan.state.step, self._kind.of(plan)[share]
        with map_snapshot(self._memory, found) as view:
            if view is None:
                raise _Damaged("it is not there any more")
            part = f"part-{plan.shares.index(share):05d}" if plan.state.sharded else "state"
            name = data_name(part, self._committer.writer.token, number)
            return self._committer.write(step, name, view)

    def _cleared_away(self, plan: WritePlan, said: Mapping[str, Said], error: ClearedAway) -> bool:
        """Who has the folder has committed something meanwhile, perhaps this step."""
        self._cleared += 1
        if self._cleared >= ATTEMPTS:
            return self._failed(plan, COMMIT, error)
        log.info("looking for step %d again: %s", plan.state.step, error)
        self._board.done()
        if self._has(plan.state):
            raise _GoesOn(str(error))
        there = self._folder.place.files(folder_of(plan.state.step))
        for share, one in said.items():
            if one.file is not None and one.file.name not in there:
                self._board.forget(self._under(plan) + share, one.version)
        return True

    def _failed(self, plan: WritePlan, key: str, error: Exception) -> bool:
        if isinstance(error, CheckpointRefused) and self._committer.goes_on():
            self._board.done()
            raise _GoesOn(str(error)) from error
        self._board.done(failed=describe(error))
        if not isinstance(error, _Damaged):
            return False
        # Another of the same share may be here, such as a replica.
        damaged = self._kind.of(plan)[key]
        self._kind.held = [one for one in self._kind.held if one[1] is not damaged]
        if plan.state.sharded:
            self._post()
            self._board.forget(f"agreed/plan/{self._kind.key}", self._plan()[1])
        return True


class LastWrites:
    """What is in an agent's memory alone, on its way to where it lasts.

    info: of the last generation; None where there was none. alone: makes a store in this process.
    leaves: whether this node's run is over; if not, it helps those that leave, if any does. place:
    of the checkpoints, if not the one that the snapshots name. saved: the step that was written.
    """

    def __init__(
        self,
        memory: Path,
        info: RendezvousInfo | None,
        alone: Callable[[], Store],
        *,
        leaves: bool = True,
        place: Place | None = None,
    ) -> None:
        self._memory, self._info, self._alone = memory, info, alone
        self._leaves, self._place = leaves, place
        self._board = Board(alone, info)
        self._over = threading.Event()
        self.saved: int | None = None
        self._left: list[Kind] = []
        self._problems: list[str] = []

    def run(
        self,
        seconds: float = WRITE_SECONDS,
        renewed: float = RENEW_SECONDS,
        given_up: Callable[[], str] = str,
    ) -> str:
        """Write the snapshots; return what could not be written, as a sentence, or an empty text.

        seconds: time limit. renewed: how often the other nodes are told that this one still writes,
        in seconds. given_up: returns why the writing must end now, or an empty text.
        """
        # Both in threads of their own: nothing ends a write to a disk that hangs, and a store may
        # take long to answer.
        thread, ended = helper(self._write_all, "agent-persist"), threading.Event()
        thread.start()
        helper(lambda: self._renew_until(ended, renewed), "agent-persist-renew").start()
        try:
            why = self._await(thread, seconds, given_up)
        finally:
            ended.set()
        if self._over.is_set():
            return ""
        self._over.set()
        late = [kind.not_written(kind.newest, why) for kind in tuple(self._left)]
        return "; ".join([*self._problems, *late])

    def _await(self, thread: threading.Thread, seconds: float, given_up: Callable[[], str]) -> str:
        """Return why the writing ends before its thread does, or an empty text."""
        began, is_announced = monotonic(), False
        while thread.is_alive() and not self._over.is_set():
            waited = monotonic() - began
            if waited >= seconds:
                return f"it was not there after {seconds:g} s"
            if reason := given_up():
                return reason
            if self._leaves and not is_announced and waited >= ANNOUNCE_SECONDS:
                is_announced = True
                log.info(
                    "still writing the last snapshots, for up to %g s more; a further SIGTERM "
                    "gives them up",
                    seconds - waited,
                )
            thread.join(min(POLL_SECONDS, seconds - waited))
        return ""

    def _renew_until(self, ended: threading.Event, interval: float) -> None:
        while not ended.wait(interval):
            self._board.renew()

    def stop(self) -> None:
        """Begin nothing more, and tell nothing."""
        self._over.set()

    def _write_all(self) -> None:
        try:
            kinds = kinds_in(self._memory)
        except Exception as error:
            self._problems.append(f"snapshots in memory were not written: {describe(error)}")
            return
        self._left = [k for k in kinds if self._leaves or k.newest.sharded]
        while self._left and not self._over.is_set():
            kind = self._left[0]
            try:
                problem = self._write(kind)
            except Exception as error:
                # Of whatever kind: how the run ended must still be told, and this with it.
                problem = kind.not_written(kind.newest, describe(error))
            if problem:
                self._problems.append(problem)
            del self._left[0]

    def _write(self, kind: Kind) -> str:
        try:
            return self._write_at(kind, self._board)
        except StoreError as error:
            # Perhaps twice, but not never, whatever becomes of the store.
            log.info("the nodes cannot agree who writes a snapshot: %s", error)
        return self._write_at(kind, Board(self._alone))

    def _write_at(self, kind: Kind, board: Board) -> str:
        # Its workers may have taken the folder in the last generation, and ended before their
        # first snapshot.
        record = kind.header
        generation = max(record.generation, self._info.generation if self._info else 0)
        label = f"agent {os.getpid()} on {socket.gethostname()}"
        writer = Writer(record.run, record.incarnation, generation, board.token, label)
        folder = CheckpointFolder(self._place or open_place(record.folder))
        committer = Committer(folder, writer, _ALL, beside=True)
        writing = Persisting(self._memory, kind, board, folder, committer, self._leaves, self._over)
        problem = writing.run()
        self.saved = self.saved if writing.saved is None else writing.saved
        return problem
