"""Boxes of tensor indices: check that parts cover a state, and plan which rank reads which box.

A box is a range of indices in each dimension of a tensor. The part of a rank contains one box of
each sharded tensor. Boxes of different parts may overlap (replicated dimensions of a mesh), and a
rank that restores a state may need boxes that overlap those of several parts. All functions are
pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import attrs

from ..errors import CheckpointCorruptError, StateMismatchError

_Holder = TypeVar("_Holder")
_MAX_DIMENSIONS = 64
_MAX_LISTED_NUMBERS = 8


class Box(NamedTuple):
    """A range of indices in each dimension of a tensor."""

    offsets: tuple[int, ...]  # first index in each dimension
    sizes: tuple[int, ...]  # number of indices in each dimension

    @classmethod
    def full(cls, shape: Iterable[int]) -> Box:
        """Return the box of all elements of a tensor of this shape."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def num_elements(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.sizes)

    def with_range(self, axis: int, begin: int, end: int) -> Box:
        """Return this box with the index range [`begin`, `end`) along one axis."""
        return Box(
            (*self.offsets[:axis], begin, *self.offsets[axis + 1 :]),
            (*self.sizes[:axis], end - begin, *self.sizes[axis + 1 :]),
        )


def intersect_boxes(box: Box, other: Box) -> Box | None:
    """Return the box of the elements that two boxes share, or None if they share none."""
    offsets = tuple(map(max, box.offsets, other.offsets))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*box, *other, strict=True))
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def subtract_box(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes of the elements of `box` that are not in `hole`.

    `hole` must lie within `box`.
    """
    remainder = []
    for axis, (begin, size) in enumerate(zip(*hole, strict=True)):
        first, end = box.offsets[axis], box.offsets[axis] + box.sizes[axis]
        remainder.append(box.with_range(axis, first, begin))
        remainder.append(box.with_range(axis, begin + size, end))
        box = box.with_range(axis, begin, begin + size)
    return [rest for rest in remainder if all(rest.sizes)]


def cover_box(
    need: Box, available: Iterable[tuple[_Holder, Box]]
) -> tuple[list[tuple[_Holder, Box]], list[Box]]:
    """Assign each element of a box to the first holder that has it.

    Args:
        need: the box to cover.
        available: holders and their boxes, in order of preference.

    Returns:
        Two lists: disjoint boxes with the holder of each, and disjoint boxes that no holder has.
    """
    missing = [need] if all(need.sizes) else []
    covered: list[tuple[_Holder, Box]] = []
    for holder, box in available:
        if not missing:
            break
        still_missing: list[Box] = []
        for wanted in missing:
            shared = intersect_boxes(wanted, box)
            if shared is None:
                still_missing.append(wanted)
            else:
                covered.append((holder, shared))
                still_missing += subtract_box(wanted, shared)
        missing = still_missing
    return covered, missing


def split_box(box: Box, source_sizes: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Split a box into boxes of at most `max_elements` elements, in order.

    Args:
        box: the box to split.
        source_sizes: sizes of the contiguous tensor that the box is copied from. The range from the
            first to the last element of a piece in that tensor has at most `max_elements` elements.
        max_elements: maximum number of elements of a piece.
    """
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), None)
    elements_per_index = 0 if axis is None else math.prod(source_sizes[axis + 1 :])
    if axis is None or box.sizes[axis] * elements_per_index <= max_elements:
        yield box
        return
    step = max(1, max_elements // elements_per_index)
    end = box.offsets[axis] + box.sizes[axis]
    for begin in range(box.offsets[axis], end, step):
        piece = box.with_range(axis, begin, min(end, begin + step))
        yield from split_box(piece, source_sizes, max_elements)


# -- the shards in a part --------------------------------------------------------------------------


@attrs.frozen
class TensorShard:
    """The box that a part contains of one sharded tensor, and properties of the whole tensor."""

    name: str  # of the tensor, see `state_tree.path_name`
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    stride: tuple[int, ...] = ()  # of the whole tensor
    device: str = "cpu"  # device of the tensor when it was saved, as torch names it
    mesh: str = ""  # ranks that share the tensor, see `format_ranks`; empty for all ranks

    def to_row(self) -> list[Any]:
        """Return the JSON value that describes the shard in the header of a pack."""
        return [self.name, self.dtype, self.shape, *self.box, self.stride, self.device, self.mesh]


Shards = Mapping[int, Sequence[TensorShard]]  # the shards in each part, by the number of the part


def read_shards(meta: Mapping[str, Any]) -> list[TensorShard]:
    """Return the shards in a part.

    Args:
        meta: the metadata in the header of the part.

    Raises:
        CheckpointCorruptError: the metadata does not describe shards.
    """
    try:
        return [_shard_from_row(row) for row in meta["shards"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"the list of shards in a part cannot be read: {error}"
        ) from error


def _shard_from_row(row: Sequence[Any]) -> TensorShard:
    defaults: list[Any] = [(), "cpu", ""]
    values = [*row, *defaults[len(row) - 5 :]]
    name, dtype, shape, offsets, sizes, stride, device, mesh = values
    box = Box(tuple(offsets), tuple(sizes))
    shard = TensorShard(name, dtype, tuple(shape), box, tuple(stride), device, mesh)
    counts = (*shard.shape, *box.offsets, *box.sizes, *shard.stride)
    if not all(type(text) is str for text in (name, dtype, device, mesh)):
        raise ValueError(f"a shard of {name!r:.80}, {dtype!r:.80}, {device!r:.80}, {mesh!r:.80}")
    _parse_ranks(mesh)
    if len(shard.shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in counts):
        raise ValueError(f"a shard of {name:.80} with the counts {counts!r:.200}")
    ends = (begin + size for begin, size in zip(*box, strict=True))
    if not all(end <= size for end, size in zip(ends, shard.shape, strict=True)):
        raise ValueError(f"a shard of {name:.80} is outside of the shape {shard.shape}")
    return shard


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a text that lists ranks as ranges with an optional step, such as `0-3,8-14:2`."""
    runs: list[tuple[int, int, int]] = []  # first and last rank, and the step or 0
    for rank in sorted(ranks):
        first, last, step = runs[-1] if runs else (rank, rank, -1)
        if step in (0, rank - last):
            runs[-1] = (first, rank, rank - last)
        else:
            runs.append((rank, rank, 0))
    steps = {0: "", 1: ""}
    return ",".join(
        f"{first}-{last}{steps.get(step, f':{step}')}" if step else str(first)
        for first, last, step in runs
    )


@functools.lru_cache(maxsize=4096)
def _parse_ranks(text: str) -> tuple[range, ...]:
    """Parse the result of `format_ranks`. Raise ValueError if it is malformed."""
    runs = []
    for run in filter(None, text.split(",")):
        bounds, _, step = run.partition(":")
        first, _, last = bounds.partition("-")
        runs.append(range(int(first), int(last or first) + 1, int(step or 1)))
    return tuple(runs)


def has_rank(mesh: str, rank: int) -> bool:
    """Return True if a rank is in `TensorShard.mesh`. An empty mesh contains all ranks."""
    return not mesh or any(rank in run for run in _parse_ranks(mesh))


def shards_by_tensor(parts: Shards) -> dict[str, list[tuple[int, int, TensorShard]]]:
    """Group the shards of all parts by the name of their tensor.

    Returns:
        A list for each name of a tensor, in the order of the parts. Each item has the number of the
        part, the index of the shard in the part, and the shard.

    Raises:
        CheckpointCorruptError: two parts of a mesh disagree on the shape or the dtype of a tensor.
    """
    tensors: dict[str, list[tuple[int, int, TensorShard]]] = {}
    first_on_mesh: dict[tuple[str, str], tuple[int, TensorShard]] = {}
    for part, shards in sorted(parts.items()):
        for index, shard in enumerate(shards):
            tensors.setdefault(shard.name, []).append((part, index, shard))
            # Two pipeline stages can have different tensors of one name, each on its own mesh.
            key = (shard.name, shard.mesh)
            first_part, first = first_on_mesh.setdefault(key, (part, shard))
            if (shard.shape, shard.dtype) != (first.shape, first.dtype):
                raise CheckpointCorruptError(
                    f"{shard.name} is a {first.dtype} of {first.shape} in part {first_part}, and "
                    f"a {shard.dtype} of {shard.shape} in part {part}"
                )
    return tensors


def describe_missing(parts: Shards, num_parts: int) -> str:
    """Describe what is missing from a state if only some of its parts are available.

    A missing part does not matter if the available parts have all its elements. This is known only
    if an available part has the same tensors, that is, if all meshes of the available part include
    the rank of the missing part. Otherwise the missing part may have had other tensors, as another
    stage of a pipeline has.

    A tensor that was sharded over several meshes is checked once for each mesh, because it may be a
    different tensor on each of them.

    Args:
        parts: the parts that are available.
        num_parts: the number of parts that were saved.

    Returns:
        The end of a sentence about the state. It is empty if the available parts have every element
        of every tensor.

    Raises:
        CheckpointCorruptError: see `shards_by_tensor`.
    """
    num_missing: dict[tuple[Any, ...], int] = {}  # by shape and boxes, which most tensors share
    incomplete = []
    for name, rows in shards_by_tensor(parts).items():
        boxes: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
        for _, _, shard in rows:
            boxes.setdefault((shard.mesh, shard.shape), []).append(shard.box)
        for (_, shape), available in boxes.items():
            key = (shape, *available)
            if key not in num_missing:
                _, missing = cover_box(Box.full(shape), ((None, box) for box in available))
                num_missing[key] = sum(box.num_elements for box in missing)
            if num_missing[key]:
                incomplete.append(
                    f"{num_missing[key]} of the {math.prod(shape)} elements of {name}"
                )
                break
    lost = [part for part in range(num_parts) if part not in parts]
    meshes = {frozenset(shard.mesh for shard in shards) for shards in parts.values() if shards}
    unknown = [
        part
        for part in lost
        if not any(all(has_rank(mesh, part) for mesh in of_rank) for of_rank in meshes)
    ]
    if not incomplete and not unknown:
        return ""
    reasons = [f"no rank has {format_numbers(lost, 'part')} of {num_parts}"] if lost else []
    if incomplete:
        reasons.append(f"{incomplete[0]} are missing")
    else:
        reasons.append(f"the tensors of {format_numbers(unknown, 'rank')} are unknown")
    more = f" (and elements of {len(incomplete) - 1} more tensors)" if len(incomplete) > 1 else ""
    return f"is incomplete: {', so '.join(reasons)}{more}"


def multi_mesh_tensors(parts: Shards) -> set[str]:
    """Return the names under which shards on several meshes were saved.

    They can be copies of one tensor: tensor parallelism leaves some layers whole, and each of its
    ranks shards them over a mesh of its own. Or they are different tensors, as in the stages of a
    pipeline. `different_tensors` tells one from the other.
    """
    tensors = shards_by_tensor(parts).items()
    return {name for name, rows in tensors if len({shard.mesh for _, _, shard in rows}) > 1}


def different_tensors(parts: Shards, digests: Mapping[tuple[int, int], str]) -> set[str]:
    """Return the names under which meshes have tensors that differ, or that cannot be compared.

    Args:
        parts: all parts.
        digests: of the elements of shards, by part and index in the part: those of all shards of
            the tensors in question.
    """
    different = set()
    for name, rows in shards_by_tensor(parts).items():
        contents: dict[str, dict[Box, tuple[Any, ...]]] = {}
        for part, index, shard in rows:
            if (part, index) in digests:
                content = (shard.dtype, shard.shape, digests[part, index])
                contents.setdefault(shard.mesh, {}).setdefault(shard.box, content)
        first, *others = contents.values() or [{}]
        if any(other != first for other in others):
            different.add(name)
    return different


def format_numbers(numbers: Sequence[int], noun: str) -> str:
    """Return a text with the first numbers and the count of the rest: `parts 1, 2 and 7 more`."""
    first = ", ".join(map(str, numbers[:_MAX_LISTED_NUMBERS]))
    num_more = len(numbers) - _MAX_LISTED_NUMBERS
    more = f" and {num_more} more" if num_more > 0 else ""
    return f"{noun}{'s' if len(numbers) != 1 else ''} {first}{more}"


# -- who reads what --------------------------------------------------------------------------------


@attrs.frozen
class BoxRead:
    """A box that a rank needs, the rank that reads it, and the shard that contains it."""

    source: int  # the rank that reads it
    part: int  # number of the part
    index: int  # of the shard in the part
    box: Box  # in indices of the whole tensor


def plan_reads(
    needs: Mapping[str, Box],
    parts: Shards,
    holders: Mapping[int, Sequence[int]],
    rank: int,
    own_part: int | None,
    *,
    only_mesh: Mapping[str, str] | None = None,
) -> list[BoxRead]:
    """Plan how a rank gets the elements that it needs, each element once.

    A rank prefers its own part, then parts that it can read itself, then parts that other ranks
    read for it. Different ranks prefer different parts, so that the work is spread.

    Args:
        needs: the box that the rank needs of each tensor, by the name of the tensor.
        parts: the available parts; `describe_missing` finds nothing missing in them.
        holders: the ranks that can read each part, in ascending order.
        rank: the rank that needs the boxes.
        own_part: the part that the rank itself has saved, or None if the number of ranks differs.
        only_mesh: the only mesh from which a tensor may be read, by the name of the tensor.

    Raises:
        StateMismatchError: a mesh in `only_mesh` does not have all elements that the rank needs.
    """
    only_mesh = only_mesh or {}
    num_parts = max(parts) + 1
    sources, preference = {}, {}
    for part in parts:
        ranks = holders[part]
        source = rank if rank in ranks else ranks[(rank + part) % len(ranks)]
        sources[part] = source
        preference[part] = (part != own_part, source != rank, (part - rank) % num_parts)
    tensors = shards_by_tensor(parts)
    reads = []
    for name, need in needs.items():
        mesh = only_mesh.get(name)
        rows = [row for row in tensors[name] if mesh in (None, row[2].mesh)]
        rows.sort(key=lambda row: (preference[row[0]], row[1]))
        boxes = (((part, index), shard.box) for part, index, shard in rows)
        covered, missing = cover_box(need, boxes)
        if missing and mesh is not None:
            raise StateMismatchError(
                f"{name} was saved as different tensors on several meshes, as in pipeline stages, "
                f"and none of them has the ranks {mesh}, on which it is now: arrange the ranks as "
                "when it was saved"
            )
        reads += [BoxRead(sources[part], part, index, box) for (part, index), box in covered]
    return reads
