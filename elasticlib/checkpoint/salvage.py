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

    share: names the boxes of the global tensors that it has: two parts of one share may stand for
    one another. elements: in those boxes. total: in the tensors that they belong to.
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


Rows = Sequence[Sequence[Any]]
"""The boxes of a part: of each its tensor's name, dtype and size, and its own offsets and sizes."""


def piece_of(state: State, part: int, rows: Rows) -> Piece:
    """What a part with these boxes is told as."""
    boxes = {json.dumps(row[:5]): row for row in rows}
    tensors = {row[0]: row[2] for row in rows}
    return Piece(
        state,
        part,
        hashlib.sha256("\n".join(sorted(boxes)).encode()).hexdigest()[:32],
        sum(math.prod(row[4]) for row in boxes.values()),
        sum(math.prod(size) for size in tensors.values()),
    )


def choose(pieces: Iterable[Piece], rows: Mapping[str, Rows]) -> Plan | None:
    """The newest state that is held whole. rows: those of shares, as far as they are known."""
    for state, shares in _newest_first(pieces):
        if _has_all_parts(state, shares):
            return Plan(state, tuple(shares))
        known = [rows[share] for share in shares if share in rows]
        if len(known) == len(shares) and _may_cover(shares) and covered(known):
            return Plan(state, tuple(shares))
    return None


def covered(parts: Iterable[Rows]) -> bool:
    """Whether the boxes of these parts cover every tensor that they are of."""
    left: dict[str, list[_Box]] = {}
    boxes = {
        (row[0], tuple(row[3]), tuple(row[4])): tuple(row[2]) for rows in parts for row in rows
    }
    for (name, offsets, sizes), size in boxes.items():
        whole: list[_Box] = [] if 0 in size else [((0,) * len(size), size)]
        rest = left.get(name, whole)
        left[name] = [piece for box in rest for piece in _without(box, (offsets, sizes))]
    return not any(left.values())


_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def _without(box: _Box, other: _Box) -> list[_Box]:
    """What is left of a box, in boxes, where another is taken out of it."""
    starts, sizes = map(list, box)
    pieces: list[_Box] = []
    for axis, (start, size) in enumerate(zip(*other, strict=True)):
        end, other_end = starts[axis] + sizes[axis], start + size
        if size == 0 or other_end <= starts[axis] or start >= end:
            return [box]
        if start > starts[axis]:
            below = [*sizes[:axis], start - starts[axis], *sizes[axis + 1 :]]
            pieces.append((tuple(starts), tuple(below)))
        if other_end < end:
            above = [*starts[:axis], other_end, *starts[axis + 1 :]]
            pieces.append((tuple(above), (*sizes[:axis], end - other_end, *sizes[axis + 1 :])))
        starts[axis], end = max(start, starts[axis]), min(other_end, end)
        sizes[axis] = end - starts[axis]
    return pieces


def in_doubt(pieces: Iterable[Piece]) -> frozenset[str]:
    """The shares whose rows decide: of states of which parts are missing, and perhaps no elements,
    as others have copies of them."""
    found: set[str] = set()
    for state, shares in _newest_first(pieces):
        if _has_all_parts(state, shares):
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


def _has_all_parts(state: State, shares: _Shares) -> bool:
    return len({piece.part for held in shares.values() for piece in held}) == state.parts


def _may_cover(shares: _Shares) -> bool:
    firsts = [held[0] for held in shares.values()]
    return sum(piece.elements for piece in firsts) >= max(piece.total for piece in firsts)


def why_not(pieces: Sequence[Piece], told: int, nodes: int) -> str:
    """Why none of these states is whole."""
    if not pieces:
        return "what is here of it cannot be put together: it was not made by CheckpointManager"
    state, shares = _newest_first(pieces)[0]
    here = {piece.part for held in shares.values() for piece in held}
    gone = [part for part in range(state.parts) if part not in here]
    some = ", ".join(map(str, gone[:8])) + (", ..." if len(gone) > 8 else "")
    return (
        f"of its {state.parts} parts {some} {'are' if len(gone) > 1 else 'is'} gone, with elements "
        f"that no other part has ({told} of {nodes} nodes have told what they hold)"
    )


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
