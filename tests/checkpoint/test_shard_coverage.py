"""Coverage of tensors by boxes, and the plan of reads, compared with full tensors."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.boxes import (
    Box,
    TensorShard,
    describe_missing,
    format_ranks,
    has_rank,
    plan_reads,
    read_shards,
    split_box,
)
from elasticlib.checkpoint.reshard import narrow_to_box
from elasticlib.errors import CheckpointCorruptError

Shape = tuple[int, ...]
Mesh = list[tuple[int, int | None]]
"""Size of each dimension of a mesh, and the tensor dimension that it shards; None: replicated."""


def split_dimension(size: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return offsets and sizes as torch shards a dimension; some sizes are 0."""
    each = max(1, -(-size // num_ranks))
    starts = [min(size, rank * each) for rank in range(num_ranks)]
    return [(start, min(size, start + each) - start) for start in starts]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    return [(size, draw(st.none() | st.integers(0, 2))) for size in sizes]


def boxes_on_mesh(shape: Shape, mesh: Mesh) -> list[Box]:
    """Return the box of each rank."""
    boxes = []
    for coordinate in itertools.product(*(range(size) for size, _ in mesh)):
        offsets, sizes = [0] * len(shape), [*shape]
        for position, (num_ranks, axis) in zip(coordinate, mesh, strict=True):
            if axis is not None and axis < len(shape):
                start, sizes[axis] = split_dimension(sizes[axis], num_ranks)[position]
                offsets[axis] += start
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


@st.composite
def jobs(
    draw: st.DrawFn,
) -> tuple[dict[str, Shape], list[list[TensorShard]], list[dict[str, Box]]]:
    """Draw shapes, the shards in parts of one mesh, and what the ranks of another mesh need."""
    saved_mesh, live_mesh = draw(meshes()), draw(meshes())
    shapes = {
        name: tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        for name in draw(st.sampled_from(["w", "wb"]))
    }
    parts: list[list[TensorShard]] = [[] for _ in range(math.prod(n for n, _ in saved_mesh))]
    needs: list[dict[str, Box]] = [{} for _ in range(math.prod(n for n, _ in live_mesh))]
    for name, shape in shapes.items():
        for part, box in zip(parts, boxes_on_mesh(shape, saved_mesh), strict=True):
            part.append(TensorShard(name, "int64", shape, box))
        for need, box in zip(needs, boxes_on_mesh(shape, live_mesh), strict=True):
            need[name] = box
    return shapes, parts, needs


@given(jobs(), st.data())
def test_each_needed_element_is_read_once_or_reported_as_missing(job, data):
    shapes, parts, needs = job
    # Some ranks can read each part, or none can.
    ranks = st.sets(st.integers(0, len(needs) - 1), max_size=3)
    readers = {part: sorted(data.draw(ranks)) for part in range(len(parts))}
    available = {part: shards for part, shards in enumerate(parts) if readers[part]}
    covered = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for shards in available.values():
        for shard in shards:
            narrow_to_box(covered[shard.name], Box.full(shard.shape), shard.box).fill_(True)
    is_complete = bool(available) and all(bool(mask.all()) for mask in covered.values())
    assert (describe_missing(available, len(parts)) == "") == is_complete
    if not is_complete:
        return
    saved = {name: torch.arange(math.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    for rank, need in enumerate(needs):
        own_part = rank if len(needs) == len(parts) else None
        restored = {name: torch.full(box.sizes, -1) for name, box in need.items()}
        num_read: Counter[str] = Counter()
        for read in plan_reads(need, available, readers, rank, own_part):
            shard = available[read.part][read.index]
            assert read.source in readers[read.part]
            assert read.source == rank or rank not in readers[read.part]
            memory = narrow_to_box(saved[shard.name], Box.full(shard.shape), shard.box)
            target = narrow_to_box(restored[shard.name], need[shard.name], read.box)
            target.copy_(narrow_to_box(memory, shard.box, read.box))
            num_read[shard.name] += read.box.num_elements
        for name, box in need.items():
            expected = narrow_to_box(saved[name], Box.full(shapes[name]), box)
            assert torch.equal(restored[name], expected)
            assert num_read[name] == box.num_elements


@given(st.lists(st.integers(1, 6), max_size=3), st.integers(1, 40))
def test_pieces_are_small_and_cover_the_box_once(shape, max_elements):
    count = torch.zeros(shape)
    for piece in split_box(Box.full(shape), shape, max_elements):
        view = narrow_to_box(count, Box.full(shape), piece)
        view += 1
        extent = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
        assert extent <= max_elements
    assert bool((count == 1).all())


def test_missing_parts_and_elements_are_described():
    part = [
        TensorShard("w", "f", (4, 2), Box((0, 0), (2, 2))),
        TensorShard("b", "f", (2,), Box((0,), (1,))),
    ]
    assert describe_missing({0: part}, 2) == (
        "is incomplete: no rank has part 1 of 2, so 4 of the 8 elements of w are missing (and "
        "elements of 1 more tensors)"
    )
    assert describe_missing({}, 2) == (
        "is incomplete: no rank has parts 0, 1 of 2, so the tensors of ranks 0, 1 are unknown"
    )


def shard_on(mesh: list[int], name: str) -> TensorShard:
    return TensorShard(name, "float32", (4,), Box((0,), (4,)), mesh=format_ranks(mesh))


def test_state_that_lacks_a_pipeline_stage_is_incomplete():
    first, second = (shard_on([0, 1], "first"), shard_on([2, 3], "second"))
    assert describe_missing({0: [first], 2: [second]}, 4) == ""
    assert describe_missing({0: [first], 1: [first]}, 4) == (
        "is incomplete: no rank has parts 2, 3 of 4, so the tensors of ranks 2, 3 are unknown"
    )
    # A rank without tensors does not restrict the other ranks.
    assert "of rank 3 are" in describe_missing({0: [first], 1: [], 2: []}, 4)


def test_ranks_that_share_one_of_several_meshes_may_have_other_tensors():
    dense, experts = shard_on([0, 1, 2, 3], "dense"), shard_on([0, 2], "experts")
    others = shard_on([1, 3], "experts")
    assert describe_missing({0: [dense, experts], 1: [dense, others]}, 4) == ""
    assert "of ranks 1, 3 are" in describe_missing({0: [dense, experts], 2: [dense, experts]}, 4)


@given(st.sets(st.integers(0, 40)))
def test_ranks_are_described_shortly_and_completely(ranks):
    text = format_ranks(ranks)
    assert {rank for rank in range(50) if has_rank(text, rank)} == (ranks or {*range(50)})
    assert format_ranks(range(1, 1000, 2)) == "1-999:2"
    assert format_ranks([0, 1, 2, 3, 8]) == "0-3,8"


@pytest.mark.parametrize(
    "row",
    [
        [],
        ["w", "f", [4], [0]],
        [7, "f", [4], [0], [4]],
        ["w", "f", [4], [1], [4]],
        ["w", "f", [4], [-1], [4]],
        ["w", "f", [4], [0, 0], [4]],
        ["w", "f", [4], [0.5], [1]],
        ["w", "f", [1] * 100, [0] * 100, [1] * 100],
        ["w", "f", [4], [0], [4], [1], "cpu", "m"],
        ["w", "f", [4], [0], [4], [1], "cpu", 1, 2],
    ],
)
def test_invalid_description_of_a_shard_is_corrupt(row):
    with pytest.raises(CheckpointCorruptError):
        read_shards({"shards": [row]})


def test_parts_that_disagree_on_a_shape_are_corrupt():
    shard, other = (TensorShard("w", "f", (n,), Box((0,), (n,))) for n in (4, 5))
    with pytest.raises(
        CheckpointCorruptError, match=r"w is a f of \(4,\) in part 0, and a f of \(5,\)"
    ):
        describe_missing({0: [shard], 3: [other]}, 4)
