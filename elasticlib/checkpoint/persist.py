"""What is in memory alone when a job ends before its work is done is written where it lasts.

An agent's last act: after its workers are gone and before their memory is, and without torch. A
snapshot and a checkpoint are the same bytes, so this is a copy and a commit. Of a state that is the
same on all ranks one node writes, its own newest step. Of a sharded one, the nodes of the last
generation tell one another on its board which parts they hold, of their own workers or as
replicas. They agree on the newest step whose parts cover all elements. Each part is written by a
node that has it, and one node commits them all. Whoever vanishes is taken over from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs

from ..clock import monotonic
from ..errors import CheckpointError, CheckpointRefused, StoreError, Unreadable, describe, present
from ..foreign import read_json
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import ABSENT, Entry, Store
from ..threads import helper
from . import fence as fences
from . import manifest as manifests
from . import memory as memories
from .commit import ClearedAway, Committer
from .cover import Chunk, chunks_of
from .fence import Writer
from .folder import CheckpointFolder, open_place
from .manifest import DataFile
from .memory import Found, Record, flaw, pinned, that_count, word_sum
from .pack_head import read_meta
from .place import Place
from .prune import Retention
from .salvage import (
    CLAIM_SECONDS,
    COMMIT,
    WHOLE,
    Do,
    Over,
    Piece,
    Plan,
    Said,
    State,
    choose,
    in_doubt,
    next_move,
    piece_of,
    why_not,
)

log = logging.getLogger("elasticlib.checkpoint")

WRITE_SECONDS = 600.0
"""For all that is to be written: a disk that hangs must not hold a node for ever."""
RENEW_SECONDS = 5.0
SETTLE_SECONDS = 5.0
"""For which nodes that have not said what they hold are waited for, where others hold enough."""
AGREE_SECONDS = 60.0
"""The same, where it cannot: as long as the slowest takes to end its workers."""
LOOK_SECONDS = 1.0
ATTEMPTS = 4
"""At a write beside a worker that clears it away, which does so once a save."""

_ALL = Retention(last=1 << 62)  # which are too many is for the job's own manager to say


# -- what the nodes say to one another -------------------------------------------------------------


class Board:
    """Where the nodes of a generation say what they hold and write; a node alone says it to itself.

    What is to be done once is claimed by writing under a key, again and again for as long as it
    takes.
    """

    def __init__(self, alone: Callable[[], Store], info: RendezvousInfo | None = None) -> None:
        self._store = alone()
        self._prefix = ""
        self.nodes, self.rank = 1, 0
        if info is not None and info.store is not None and info.board and info.world_size > 1:
            self._store, self._prefix = info.store, f"{info.board}persist/"
            self.nodes, self.rank = info.world_size, info.rank
        self.token = secrets.token_hex(8)
        """Of the writer that all nodes are; of one node alone, its own."""
        if self.nodes > 1:
            self.token = hashlib.sha256(self._prefix.encode()).hexdigest()[:16]
        self._lock = threading.Lock()
        self._claim: Entry | None = None
        self._times = 0

    def list(self, under: str) -> tuple[dict[str, Entry], int]:
        """What stands under a prefix, by the rest of the keys, and the version of that."""
        listing = self._store.list(self._prefix + under)
        start = len(self._prefix + under)
        return {entry.key[start:]: entry for entry in listing.entries}, listing.version

    def wait(self, under: str, version: int) -> None:
        """Until something there has changed, or for a moment."""
        self._store.wait(self._prefix + under, after=version, timeout=LOOK_SECONDS)

    def get(self, key: str) -> Entry | None:
        return self._store.get(self._prefix + key)

    def put(self, key: str, value: object, *, once: bool = False) -> None:
        """once: leave what stands there."""
        if once:
            self._store.compare_set(self._prefix + key, _written(value), expected=ABSENT)
        else:
            self._store.set(self._prefix + key, _written(value))

    def forget(self, key: str, version: int) -> None:
        self._store.delete(self._prefix + key, expected=version)

    def take(self, key: str, version: int) -> int:
        """Claim a key that is at this version: the version of the claim, which grows from claim to
        claim; 0 if another was first."""
        with self._lock:
            return self._say(self._prefix + key, version)

    def renew(self) -> None:
        """We are at it still, if we are: the others wait for as long again."""
        with self._lock:
            if self._claim is not None:
                try:
                    self._say(self._claim.key, self._claim.version)
                except StoreError as error:
                    log.info("the other nodes are not told about a snapshot: %s", error)

    def done(self, **value: object) -> bool:
        """Say what came of what is claimed, or nothing where it is to be claimed anew; whether it
        was ours still."""
        with self._lock:
            claim, self._claim = self._claim, None
            if claim is None:
                return False
            if not value:
                return self._store.delete(claim.key, expected=claim.version)
            return self._store.compare_set(claim.key, _written(value), expected=claim.version).won

    def _say(self, key: str, version: int) -> int:
        self._times += 1
        value = _written({"by": self.rank, "times": self._times})
        answer = self._store.compare_set(key, value, expected=version)
        self._claim = answer.entry if answer.won else None
        return self._claim.version if self._claim else 0


def _written(value: object) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def _read(entry: Entry) -> Any:
    return read_json(zlib.decompress(entry.value))


# -- the folder ------------------------------------------------------------------------------------


class Target:
    """The folder of one kind of snapshots. A worker of the same generation may be at work in it
    still, on another node, with its last save: this writes beside it."""

    def __init__(self, record: Record, generation: int, token: str, place: Place | None) -> None:
        self._folder = CheckpointFolder(open_place(record.folder) if place is None else place)
        label = f"agent {os.getpid()} on {socket.gethostname()}"
        self._writer = Writer(record.run, record.launch, generation, token, label)
        self._committer = Committer(self._folder, self._writer, _ALL, beside=True)

    def has(self, state: State) -> bool:
        """Whether there is a whole checkpoint of the state's step, or of a later one."""
        for found in self._folder.found():
            if found.step < state.step:
                return False
            # Of a sharded state this only decides whether something is lost, and to read all its
            # parts on each node takes longer than a node has that is about to go.
            if found.manifest and (state.sharded or self._is_whole(found.manifest)):
                return True
        return False

    def _is_whole(self, manifest: manifests.Manifest) -> bool:
        try:
            return not self._folder.check(manifest)
        except Unreadable:
            return False  # rather once too often

    def goes_on(self) -> bool:
        """Whether a later generation of the same launch has it."""
        data = self._folder.place.read(fences.NAME)
        holder = None if data is None else fences.decode(data).holder
        return (
            holder is not None
            and holder.start == self._writer.start
            and holder.generation > self._writer.generation
        )

    def write(self, step: int, kind: str, number: int, data: memoryview) -> DataFile:
        self._committer.claim()
        name = fences.data_name(kind, self._writer.token, number)
        try:
            return self._committer.write(step, name, data)
        except BaseException:
            self._committer.abandon(step, [name])
            raise

    def commit(self, step: int, files: Sequence[DataFile], parts: int) -> None:
        self._committer.claim()
        self._committer.commit(step, tuple(files), parts)

    def lacks(self, step: int, file: DataFile) -> bool:
        return file.name not in self._folder.place.files(manifests.folder_of(step))

    def abandon(self, step: int, file: DataFile) -> None:
        self._committer.abandon(step, [file.name])


# -- one node's part in it -------------------------------------------------------------------------


@attrs.define
class Kind:
    """The snapshots of one name that this node holds. record: of the newest; held: by state and
    share, those of its own workers first."""

    record: Record
    held: dict[tuple[State, str], list[Found]] = attrs.field(factory=dict)
    pieces: list[Piece] = attrs.field(factory=list)
    chunks: dict[str, list[Chunk]] = attrs.field(factory=dict)

    @property
    def newest(self) -> State:
        return state_of(self.record)

    @property
    def key(self) -> str:
        return quote(self.record.name, safe="")[:256]

    def add(self, found: Found, chunks: list[Chunk] | None) -> None:
        """chunks: of a part of a sharded state."""
        state, share = state_of(found.record), WHOLE
        if chunks is not None:
            piece = piece_of(state, found.record.part, chunks)
            share = piece.share
            self.pieces.append(piece)
            self.chunks[share] = chunks
        if not state.sharded or chunks is not None:
            self.held.setdefault((state, share), []).append(found)

    def drop(self, state: State, share: str) -> None:
        """The one of these that would be written turned out to be damaged."""
        del self.held[state, share][0]
        if not self.held[state, share]:
            del self.held[state, share]
            self.pieces = [p for p in self.pieces if (p.state, p.share) != (state, share)]

    def mine(self, plan: Plan) -> list[str]:
        """The shares of it that are here, first those of workers here."""
        here = [s for s in plan.shares if (plan.state, s) in self.held]
        return sorted(here, key=lambda share: self.held[plan.state, share][0].owner != "")

    def not_written(self, state: State, reason: str) -> str:
        return (
            f"the snapshot of step {state.step} was not written to {self.record.folder}: {reason}"
        )


def state_of(record: Record) -> State:
    sharded = record.sharded or record.parts > 1
    return State(record.generation, record.step, record.parts, sharded)


def kinds_in(memory: Path) -> list[Kind]:
    """What is to be written of an agent's memory."""
    kinds: dict[str, Kind] = {}
    counting = [one for one in that_count(memories.look(memory)) if one.record.folder]
    for one in sorted(counting, key=lambda one: state_of(one.record), reverse=True):
        kind = kinds.setdefault(one.record.name, Kind(one.record))
        kind.add(one, held_by(memory, one) if state_of(one.record).sharded else None)
    return sorted(kinds.values(), key=lambda kind: kind.key)


def held_by(memory: Path, found: Found) -> list[Chunk] | None:
    """What a part holds; None where it is gone, is damaged, or does not say."""
    with pinned(memory, found) as view:
        try:
            return None if view is None else chunks_of(read_meta(view))
        except CheckpointError as error:
            step, part = found.record.step, found.record.part
            log.warning("part %d of the snapshot of step %d is passed over: %s", part, step, error)
            return None


class _Damaged(CheckpointError):
    """A snapshot is not as it was when it was made."""


class _GoesOn(Exception):
    """A later generation has the folder: nothing is lost."""


class Persisting:
    """One kind of snapshots on its way to its folder.

    leaves: whether this node's run is over. If not, it helps those that leave, if any does.
    over: whether to begin nothing more.
    """

    def __init__(
        self,
        memory: Path,
        kind: Kind,
        board: Board,
        target: Target,
        *,
        leaves: bool,
        over: threading.Event,
    ) -> None:
        self._memory, self._kind, self._board, self._target = memory, kind, board, target
        self._leaves, self._over = leaves, over
        self._chunks = dict(kind.chunks)
        self._why = ""
        self._cleared = 0

    def run(self) -> str:
        """What could not be written, as a sentence; empty if nothing is lost."""
        if self._kind.newest.sharded:
            self._post()  # also if this node has nothing to write: the others wait for its word
        while not self._over.is_set():
            if self._target.has(self._kind.newest):
                return ""
            plan, version = self._agreed()
            if plan is None:
                return self._why and self._kind.not_written(self._kind.newest, self._why)
            try:
                reason = "" if self._target.has(plan.state) else self._carry_out(plan)
            except _GoesOn as error:
                log.info("step %d is not written, as the job goes on: %s", plan.state.step, error)
                return ""
            if not reason:
                return ""
            # Without what turned out to be damaged the nodes may have agreed on another state.
            if not plan.state.sharded or self._plan()[1] == version:
                return self._kind.not_written(plan.state, reason)
        return ""

    # -- which state --------------------------------------------------------------------------

    def _agreed(self) -> tuple[Plan | None, int]:
        """What all nodes write, and the version of that; None if they hold no state whole."""
        if not self._kind.newest.sharded:
            return Plan(self._kind.newest, (WHOLE,)), ABSENT
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
        rows = [attrs.astuple(piece) for piece in self._kind.pieces]
        self._board.put(f"held/{self._kind.key}/{self._board.rank}", rows)

    def _plan(self) -> tuple[Plan | None, int]:
        entry = self._board.get(f"agreed/plan/{self._kind.key}")
        if entry is None:
            return None, ABSENT
        state, shares = _read(entry)
        return Plan(State(*state), tuple(shares)), entry.version

    def _decide(self, waited: float) -> bool:
        """Say what is to be written, if that can be said; False if it never can."""
        posts, _ = self._board.list(f"held/{self._kind.key}/")
        pieces = [
            Piece(State(*state), *rest) for post in posts.values() for state, *rest in _read(post)
        ]
        all_in = len(posts) >= self._board.nodes
        settled = all_in or waited > SETTLE_SECONDS
        missing = settled and self._learn(in_doubt(pieces))
        plan = choose(pieces, self._chunks)
        newest = max((piece.state for piece in pieces), default=None)
        if plan is not None and (plan.state == newest or (settled and not missing)):
            self._board.put(f"agreed/plan/{self._kind.key}", attrs.astuple(plan), once=True)
        elif (all_in and not missing) or waited > AGREE_SECONDS:
            self._why = f"it {why_not(pieces, self._chunks)}"
            if not all_in:
                self._why += (
                    f" ({len(posts)} of {self._board.nodes} nodes have told what they hold)"
                )
        return not self._why

    def _learn(self, doubtful: frozenset[str]) -> bool:
        """Whether chunks that decide are still to come from other nodes, which are asked."""
        if doubtful - self._chunks.keys():
            self._board.put(f"agreed/doubt/{self._kind.key}", sorted(doubtful), once=True)
        for share in doubtful - self._chunks.keys():
            entry = self._board.get(f"chunks/{share}")
            if entry is not None:
                self._chunks[share] = chunks_of({"chunks": _read(entry)})
        return bool(doubtful - self._chunks.keys())

    def _tell_chunks(self) -> None:
        """Those of ours that somebody has asked for."""
        entry = self._board.get(f"agreed/doubt/{self._kind.key}")
        for share in self._kind.chunks.keys() & set(_read(entry) if entry else ()):
            rows = [chunk.row() for chunk in self._kind.chunks[share]]
            self._board.put(f"chunks/{share}", rows, once=True)

    # -- writing it ---------------------------------------------------------------------------

    def _carry_out(self, plan: Plan) -> str:
        """Write with the others what is planned; why it could not be, or "".

        Raises:
            _GoesOn: a later generation has the folder.
        """
        board, failed = self._board, set[str]()
        under = self._under(plan)
        known, changed = dict[str, tuple[int, float]](), monotonic()
        while not self._over.is_set():
            entries, seen = board.list(under)
            now = monotonic()
            for key, entry in entries.items():
                if key not in known or known[key][0] != entry.version:
                    known[key], changed = (entry.version, now), now
            said = {k: Said(_read(e), e.version, now - known[k][1]) for k, e in entries.items()}
            move = next_move(plan.shares, said, self._kind.mine(plan), failed, board.nodes > 1)
            if isinstance(move, Over):
                return move.reason
            if isinstance(move, Do):
                at = entries[move.key].version if move.key in entries else ABSENT
                claim = board.take(under + move.key, at)
                if claim and not self._do(plan, move.key, claim, said):
                    failed.add(move.key)
            elif now - changed > CLAIM_SECONDS:
                return f"for {CLAIM_SECONDS:g} s nobody said that it is being written"
            else:
                board.wait(under, seen)
        return ""

    def _under(self, plan: Plan) -> str:
        return f"written/{self._kind.key}/{plan.state.generation}.{plan.state.step}/"

    def _do(self, plan: Plan, key: str, claim: int, said: Mapping[str, Said]) -> bool:
        """Do what is claimed. False if it is of no use to try that again here."""
        step, sharded = plan.state.step, plan.state.sharded
        try:
            if key == COMMIT:
                files = [present(said[share].file, "a file") for share in plan.shares]
                self._target.commit(step, files, len(files) if sharded else 0)
                log.info("step %d was written to %s", step, self._kind.record.folder)
                self._board.done(done=True)
            else:
                file = self._write(plan, key, claim)
                if not self._board.done(file=attrs.astuple(file)):
                    self._target.abandon(step, file)  # another has taken it over
        except StoreError:
            raise
        except ClearedAway as error:
            return self._cleared_away(plan, said, error)
        except Exception as error:
            return self._failed(plan, key, error)
        return True

    def _write(self, plan: Plan, share: str, claim: int) -> DataFile:
        found = self._kind.held[plan.state, share][0]
        with pinned(self._memory, found) as view:
            if view is None:
                raise _Damaged("it is not there any more")
            damage = flaw(self._memory, found, lambda: word_sum(view))
            if damage:
                raise _Damaged(damage)
            part = f"part-{plan.shares.index(share):05d}"
            kind = part if plan.state.sharded else "state"
            return self._target.write(plan.state.step, kind, claim, view)

    def _cleared_away(self, plan: Plan, said: Mapping[str, Said], error: ClearedAway) -> bool:
        """Who has the folder has committed something meanwhile, perhaps this step."""
        self._cleared += 1
        if self._cleared >= ATTEMPTS:
            return self._failed(plan, COMMIT, error)
        log.info("step %d is looked for again: %s", plan.state.step, error)
        self._board.done()
        if self._target.has(plan.state):
            raise _GoesOn(str(error))
        for share, one in said.items():
            if one.file is not None and self._target.lacks(plan.state.step, one.file):
                self._board.forget(self._under(plan) + share, one.version)
        return True

    def _failed(self, plan: Plan, key: str, error: Exception) -> bool:
        if isinstance(error, CheckpointRefused) and self._target.goes_on():
            self._board.done()
            raise _GoesOn(str(error)) from error
        self._board.done(failed=describe(error))
        if not isinstance(error, _Damaged):
            return False
        self._kind.drop(plan.state, key)
        if plan.state.sharded:
            self._post()
            self._board.forget(f"agreed/plan/{self._kind.key}", self._plan()[1])
        return True


class LastWrites:
    """What is in an agent's memory alone, on its way to where it lasts.

    Args:
        memory: the agent's.
        info: of the last generation; None where there was none.
        alone: makes a store in this process.
        leaves: whether this node's run is over. If not, it helps those that leave, if any does.
        place: of the checkpoints, if not the one that the snapshots name.
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
        self._left: list[Kind] = []
        self._problems: list[str] = []

    def run(self, seconds: float = WRITE_SECONDS, renewed: float = RENEW_SECONDS) -> str:
        """What could not be written within so many seconds, as a sentence; empty if nothing is
        lost. renewed: after so many each the others are told that this node is at it still."""
        # In a thread of its own: nothing ends a write to a disk that hangs.
        thread = helper(self._write_all, "agent-persist")
        thread.start()
        deadline = monotonic() + seconds
        while not self._over.is_set() and thread.is_alive() and deadline > monotonic():
            thread.join(min(max(0.0, deadline - monotonic()), renewed))
            self._board.renew()
        if self._over.is_set():
            return ""
        self._over.set()
        why = f"it was not there after {seconds:g} s"
        late = [kind.not_written(kind.newest, why) for kind in tuple(self._left)]
        return "; ".join([*self._problems, *late])

    def stop(self) -> None:
        """Begin nothing more, and tell nothing."""
        self._over.set()

    def _write_all(self) -> None:
        try:
            kinds = kinds_in(self._memory)
        except Exception as error:
            self._problems.append(f"snapshots in memory were not written: {describe(error)}")
            return
        self._left = [k for k in kinds if self._leaves or (k.newest.sharded and k.record.shared)]
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
        if not kind.record.shared:
            return self._write_at(kind, Board(self._alone))
        try:
            return self._write_at(kind, self._board)
        except StoreError as error:
            # Perhaps twice, but not never, whatever becomes of the store.
            log.info("the nodes cannot agree who writes a snapshot, so this one does: %s", error)
            return self._write_at(kind, Board(self._alone))

    def _write_at(self, kind: Kind, board: Board) -> str:
        # Its workers may have taken the folder in the last generation, and ended before their
        # first snapshot.
        generation = max(kind.record.generation, self._info.generation if self._info else 0)
        target = Target(kind.record, generation, board.token, self._place)
        return Persisting(
            self._memory, kind, board, target, leaves=self._leaves, over=self._over
        ).run()
