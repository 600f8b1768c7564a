"""Which state the nodes of a job that has ended write together, and who does what next: pure.

Each node says which parts it holds, of its own workers or as replicas. The newest state is written
whose parts cover all elements. A part that has the same boxes as another may stand for it, as with
HSDP's copies. From then on each node looks at what all have said, and knows what to do next.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import attrs

from .cover import Chunk, lacking, some
from .manifest import DataFile

CLAIM_SECONDS = 60.0
"""For which a node that says it writes is believed, since it said so last."""
FAILED_SECONDS = 3.0
"""For which others may take over what a node could not write."""
WHOLE, COMMIT = "whole", "commit"
"""The one share of a state that is the same on all ranks; and what comes after all shares."""


@attrs.frozen(order=True)
class State:
    """What parts fit together: a step that was trained twice, before a loss and after it, is two
    states. parts: the number of ranks that hold it; 1 where it is the same on all of them."""

    generation: int
    step: int
    parts: int = 1
    sharded: bool = False


@attrs.frozen
class Piece:
    """A part of a state, as a node says that it holds it.

    share: names the boxes of tensors that it has: two parts of one share may stand for one another.
    elements: in those boxes. total: in the tensors that they belong to.
    """

    state: State
    part: int
    share: str
    elements: int = 0
    total: int = 0


@attrs.frozen
class Plan:
    """The state that is written, and its shares in the order of their files."""

    state: State
    shares: tuple[str, ...]


Chunks = Mapping[str, Sequence[Chunk]]
"""What parts with these shares hold, as far as that is known."""


def piece_of(state: State, part: int, chunks: Sequence[Chunk]) -> Piece:
    """What a part that holds these is told as."""
    boxes = {(c.name, c.dtype, c.shape, c.box) for c in chunks}
    named = json.dumps(sorted(boxes)).encode()
    return Piece(
        state,
        part,
        hashlib.sha256(named).hexdigest()[:32],
        sum(math.prod(sizes) for _, _, _, (_, sizes) in boxes),
        sum(math.prod(shape) for shape in {c.name: c.shape for c in chunks}.values()),
    )


def choose(pieces: Iterable[Piece], chunks: Chunks) -> Plan | None:
    """The newest state that is held whole."""
    for state, shares in _newest_first(pieces):
        if not _lacking(state, shares, chunks):
            return Plan(state, tuple(shares))
    return None


def why_not(pieces: Iterable[Piece], chunks: Chunks) -> str:
    """Why the newest of these states is not whole, as the end of a sentence."""
    for state, shares in _newest_first(pieces):
        return _lacking(state, shares, chunks)
    return "is in no part that says which elements it has"


def _lacking(state: State, shares: _Shares, chunks: Chunks) -> str:
    parts = {piece.part for held in shares.values() for piece in held}
    if len(parts) == state.parts:
        return ""
    if _may_cover(shares) and shares.keys() <= chunks.keys():
        held = {piece.part: chunks[s] for s, held in shares.items() for piece in held}
        return lacking(held, state.parts)
    lost = [part for part in range(state.parts) if part not in parts]
    return f"is not whole: nobody holds {some(lost, 'part')} of {state.parts}"


def in_doubt(pieces: Iterable[Piece]) -> frozenset[str]:
    """The shares whose chunks decide: of states that lack parts, but perhaps no elements, as other
    parts may have copies."""
    found: set[str] = set()
    for state, shares in _newest_first(pieces):
        if len({piece.part for held in shares.values() for piece in held}) == state.parts:
            break
        if _may_cover(shares):
            found.update(shares)
    return frozenset(found)


_Shares = dict[str, list[Piece]]


def _newest_first(pieces: Iterable[Piece]) -> list[tuple[State, _Shares]]:
    """The shares of each state, by their lowest parts."""
    states: dict[State, _Shares] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.state, -piece.part), reverse=True):
        states.setdefault(piece.state, {}).setdefault(piece.share, []).append(piece)
    return list(states.items())


def _may_cover(shares: _Shares) -> bool:
    firsts = [held[0] for held in shares.values()]
    return sum(piece.elements for piece in firsts) >= max(piece.total for piece in firsts)


@attrs.frozen
class Said:
    """What stands under a key of the board. age: seconds since it was last seen to change."""

    value: Mapping[str, Any]
    version: int
    age: float

    @property
    def is_free(self) -> bool:
        """Whether another may take it over."""
        return "failed" in self.value or ("file" not in self.value and self.age > CLAIM_SECONDS)

    @property
    def file(self) -> DataFile | None:
        return DataFile(*self.value["file"]) if "file" in self.value else None


@attrs.frozen
class Do:
    """Take this key, and write what it stands for: a share, or the commit."""

    key: str


@attrs.frozen
class Wait:
    """Others are at work."""


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
) -> Do | Wait | Over:
    """What a node does next of a plan.

    Args:
        said: by share, and of the commit, what the nodes have said of it.
        mine: the shares that this node holds, those first that it should write first.
        failed: what this node has tried in vain.
        others: whether there are other nodes, who may take over what one could not do.
    """
    commit = said.get(COMMIT)
    if commit is not None and commit.value.get("done"):
        return Over()
    for share in mine:
        if share not in failed and (share not in said or said[share].is_free):
            return Do(share)
    written = all(share in said and said[share].file for share in shares)
    if written and COMMIT not in failed and (commit is None or commit.is_free):
        return Do(COMMIT)
    for one in said.values():
        if "failed" in one.value and one.age >= FAILED_SECONDS * others:
            return Over(str(one.value["failed"]))
    return Wait()
