"""Which elements of which tensors somebody holds: whether they make up a state, and who gives them.

A tensor is cut up into boxes: a range of indices in each of its dimensions. Parts of a state hold
boxes, which may overlap (replicated dimensions of a mesh), and ranks need boxes, which may be cut
in any other way. What follows from these is computed here alone, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import attrs

from ..errors import CheckpointCorrupt

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The first index in each dimension, and how many there are."""

_T = TypeVar("_T")
_MOST_DIMENSIONS = 64


def overlap(one: Box, other: Box) -> Box | None:
    """The elements that are in both; None if there are none."""
    begins = tuple(map(max, one[0], other[0]))
    sizes = tuple(
        min(a + n, b + m) - begin for a, n, b, m, begin in zip(*one, *other, begins, strict=True)
    )
    return (begins, sizes) if all(n > 0 for n in sizes) else None


def without(box: Box, hole: Box) -> list[Box]:
    """What is left of a box when another one, which lies within it, is taken out."""
    left = []
    for axis, (begin, size) in enumerate(zip(*hole, strict=True)):
        first, end = box[0][axis], box[0][axis] + box[1][axis]
        left.append(_between(box, axis, first, begin))
        left.append(_between(box, axis, begin + size, end))
        box = _between(box, axis, begin, begin + size)
    return [one for one in left if all(one[1])]


def _between(box: Box, axis: int, begin: int, end: int) -> Box:
    """The same box, but for its indices along one axis."""
    begins, sizes = box
    size = end - begin
    return (
        (*begins[:axis], begin, *begins[axis + 1 :]),
        (*sizes[:axis], size, *sizes[axis + 1 :]),
    )


def taken(need: Box, held: Iterable[tuple[_T, Box]]) -> tuple[list[tuple[_T, Box]], list[Box]]:
    """Each element of `need` from the first that holds it, and what nobody holds."""
    left = [need] if all(need[1]) else []
    found: list[tuple[_T, Box]] = []
    for who, box in held:
        if not left:
            break
        still: list[Box] = []
        for part in left:
            both = overlap(part, box)
            if both is None:
                still.append(part)
            else:
                found.append((who, both))
                still += without(part, both)
        left = still
    return found, left


def pieces(box: Box, row: Sequence[int], most: int) -> Iterator[Box]:
    """A box in boxes of at most `most` elements, in order.

    Args:
        row: the sizes of what the box is copied from. So many elements of it lie between the first
            and the last one of each piece at most, unless a single index has more.
    """
    axis = next((at for at, n in enumerate(box[1]) if n > 1), None)
    index = 0 if axis is None else math.prod(row[axis + 1 :])
    if axis is None or box[1][axis] * index <= most:
        yield box
        return
    step, end = max(1, most // index), box[0][axis] + box[1][axis]
    for begin in range(box[0][axis], end, step):
        yield from pieces(_between(box, axis, begin, min(end, begin + step)), row, most)


@attrs.frozen
class Chunk:
    """What a part holds of a tensor. dtype, shape: of the whole tensor. stride: in which order its
    elements lay, and device: where, as torch names it. mesh: a sum of the ranks that it was sharded
    over. The last three are as they stand here where they were not written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    stride: tuple[int, ...] = ()
    device: str = "cpu"
    mesh: int = 0

    def row(self) -> list[Any]:
        """As it stands in the head of a pack."""
        return [self.name, self.dtype, self.shape, *self.box, self.stride, self.device, self.mesh]


def chunks_of(meta: Mapping[str, Any]) -> list[Chunk]:
    """The chunks in a part, by what the head of its pack says.

    Raises:
        CheckpointCorrupt: it says something else.
    """
    try:
        return [_chunk(*row) for row in meta["chunks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the list of a part's chunks cannot be read: {error}") from error


def _chunk(name: Any, dtype: Any, shape: Any, *more: Any) -> Chunk:
    later: tuple[Any, ...] = ((), "cpu", 0)
    offsets, sizes, stride, device, mesh = (*more, *later[len(more) - 2 :])
    box = (tuple(offsets), tuple(sizes))
    found = Chunk(name, dtype, tuple(shape), box, tuple(stride), device, mesh)
    counts = (*found.shape, *box[0], *box[1], *found.stride, mesh)
    if not all(type(text) is str for text in (name, dtype, device)):
        raise ValueError(f"a chunk of {name!r:.80}, {dtype!r:.80} and {device!r:.80}")
    if len(found.shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in counts):
        raise ValueError(f"a chunk of {name:.80} with the counts {counts!r:.200}")
    ends = (begin + size for begin, size in zip(*found.box, strict=True))
    if not all(end <= n for end, n in zip(ends, found.shape, strict=True)):
        raise ValueError(f"a chunk of {name:.80} lies outside of its shape {found.shape}")
    return found


def tensors_of(parts: Mapping[int, Sequence[Chunk]]) -> dict[str, list[tuple[int, int, Chunk]]]:
    """By name: each chunk of a tensor, with its part's number and its place in that part.

    Raises:
        CheckpointCorrupt: two parts have a tensor of one name and another shape or dtype.
    """
    found: dict[str, list[tuple[int, int, Chunk]]] = {}
    for part, chunks in sorted(parts.items()):
        for place, chunk in enumerate(chunks):
            rows = found.setdefault(chunk.name, [])
            rows.append((part, place, chunk))
            first = rows[0][2]
            if (chunk.shape, chunk.dtype) != (first.shape, first.dtype):
                raise CheckpointCorrupt(
                    f"{chunk.name} is a {first.dtype} of {first.shape} in part {rows[0][0]}, and "
                    f"a {chunk.dtype} of {chunk.shape} in part {part}"
                )
    return found


def lacking(parts: Mapping[int, Sequence[Chunk]], count: int) -> str:
    """What a state lacks of which some parts are held, as the end of a sentence; empty if it is
    whole: if each element of each tensor is in one of them. A tensor of several meshes is several.

    Args:
        count: how many parts there were.

    Raises:
        CheckpointCorrupt: see `tensors_of`.
    """
    known: dict[tuple[Any, ...], int] = {}
    lacks = {}
    for name, rows in tensors_of(parts).items():
        shape = rows[0][2].shape
        boxes: dict[int, list[Box]] = {}
        for _, _, chunk in rows:
            boxes.setdefault(chunk.mesh, []).append(chunk.box)
        for held in boxes.values():
            # Most tensors of a shape are cut in one way.
            key = (shape, *held)
            if key not in known:
                left = taken(((0,) * len(shape), shape), ((None, box) for box in held))[1]
                known[key] = sum(math.prod(sizes) for _, sizes in left)
            if known[key]:
                lacks[name] = f"{known[key]} of the {math.prod(shape)} elements of {name}"
    lost = [part for part in range(count) if part not in parts]
    if not lacks and len(lost) < count:
        return ""
    nobody = f"nobody holds {some(lost, 'part')} of {count}"
    if not lacks:
        return f"is not whole: {nobody}"
    more = f" (and of {len(lacks) - 1} more tensors)" if len(lacks) > 1 else ""
    return f"is not whole: {nobody}, and so {next(iter(lacks.values()))}{more}"


def apart(parts: Mapping[int, Sequence[Chunk]]) -> set[str]:
    """The names of tensors that were sharded over several meshes, as the stages of a pipeline have
    them: what has one name there may be another tensor in each."""
    tensors = tensors_of(parts).items()
    return {name for name, rows in tensors if len({chunk.mesh for _, _, chunk in rows}) > 1}


def some(numbers: Sequence[int], what: str) -> str:
    """The first of them, in words."""
    first = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{what}{'s' if len(numbers) != 1 else ''} {first}{more}"


@attrs.frozen
class Share:
    """Elements that a rank needs, and the rank that has them: a box of the chunk at `place` in
    `part`, by the whole tensor's indices."""

    source: int
    part: int
    place: int
    box: Box


def shares(
    needs: Mapping[str, Box],
    parts: Mapping[int, Sequence[Chunk]],
    holders: Mapping[int, Sequence[int]],
    rank: int,
    own: int,
) -> list[Share]:
    """Whence a rank has what it needs, each element once; of a state that is not `lacking`.

    First what is in its own part; then what it can reach by itself; then what others can, of whom
    each rank begins with another one.

    Args:
        needs: by the tensors' names.
        holders: the ranks that can reach a part, in order.
        own: the part that this rank has made; -1 if there were not as many ranks.
    """
    order = {}
    for part in parts:
        ranks = holders[part]
        source = rank if rank in ranks else ranks[(rank + part) % len(ranks)]
        order[part] = (part != own, source != rank, (part - rank) % (max(parts) + 1)), source
    tensors = tensors_of(parts)
    found = []
    for name, need in needs.items():
        rows = sorted(tensors[name], key=lambda row: (order[row[0]][0], row[1]))
        got, _ = taken(need, (((part, place), chunk.box) for part, place, chunk in rows))
        found += [Share(order[part][1], part, place, box) for (part, place), box in got]
    return found
