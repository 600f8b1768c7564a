"""Whether boxes make up a state, and who gives which of them to whom, beside full tensors."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.cover import Box, Chunk, chunks_of, lacking, pieces, shares
from elasticlib.checkpoint.sharded import narrowed
from elasticlib.errors import CheckpointCorrupt

Shape = tuple[int, ...]


def split(size: int, into: int) -> list[tuple[int, int]]:
    """As torch shards a dimension: begins and sizes, some of them empty."""
    each = max(1, -(-size // into))
    return [
        (min(size, at * each), max(0, min(size, (at + 1) * each) - at * each)) for at in range(into)
    ]


@st.composite
def meshes(draw: st.DrawFn, most: int = 4) -> list[tuple[int, int | None]]:
    """For each dimension of a mesh its size, and the dimension of the tensor that it shards; None
    where it holds copies."""
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=2))
    return [(size, draw(st.none() | st.integers(0, 2))) for size in sizes]


def boxes(shape: Shape, mesh: list[tuple[int, int | None]]) -> list[Box]:
    """What each rank has."""
    found = []
    for place in itertools.product(*(range(size) for size, _ in mesh)):
        begins, sizes = [0] * len(shape), [*shape]
        for at, (count, axis) in zip(place, mesh, strict=True):
            if axis is not None and axis < len(shape):
                begin, sizes[axis] = split(sizes[axis], count)[at]
                begins[axis] += begin
        found.append((tuple(begins), tuple(sizes)))
    return found


def all_of(shape: Shape) -> Box:
    return (0,) * len(shape), shape


def whole(shape: Shape) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Shape], list[list[Chunk]], list[dict[str, Box]]]:
    """Tensors, what parts hold of them, and what ranks need, of two meshes of any sizes."""
    before, now = draw(meshes()), draw(meshes())
    shapes = {
        name: tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        for name in draw(st.sampled_from(["w", "wb"]))
    }
    parts: list[list[Chunk]] = [[] for _ in range(math.prod(size for size, _ in before))]
    needs: list[dict[str, Box]] = [{} for _ in range(math.prod(size for size, _ in now))]
    for name, shape in shapes.items():
        for part, box in zip(parts, boxes(shape, before), strict=True):
            part.append(Chunk(name, "int64", shape, box))
        for need, box in zip(needs, boxes(shape, now), strict=True):
            need[name] = box
    return shapes, parts, needs


@given(jobs(), st.data())
def test_each_rank_has_each_element_that_it_needs_once_wherever_it_is_or_all_know_that_it_is_not(
    job, data
):
    shapes, parts, needs = job
    # Each part lies with some ranks, or was lost.
    ranks = st.sets(st.integers(0, len(needs) - 1), max_size=3)
    reach = {part: sorted(data.draw(ranks)) for part in range(len(parts))}
    held = {part: chunks for part, chunks in enumerate(parts) if reach[part]}
    covered = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for chunks in held.values():
        for chunk in chunks:
            narrowed(covered[chunk.name], all_of(chunk.shape), chunk.box).fill_(True)
    is_all = bool(held) and all(bool(found.all()) for found in covered.values())
    assert (lacking(held, len(parts)) == "") == is_all
    if not is_all:
        return
    for rank, need in enumerate(needs):
        own = rank if len(needs) == len(parts) else -1
        got = {name: torch.full(box[1], -1) for name, box in need.items()}
        taken: Counter[str] = Counter()
        for share in shares(need, held, reach, rank, own):
            chunk = held[share.part][share.place]
            assert share.source in reach[share.part]
            assert share.source == rank or rank not in reach[share.part]
            there = narrowed(whole(chunk.shape), all_of(chunk.shape), chunk.box)
            into = narrowed(got[chunk.name], need[chunk.name], share.box)
            into.copy_(narrowed(there, chunk.box, share.box))
            taken[chunk.name] += math.prod(share.box[1])
        for name, box in need.items():
            assert torch.equal(got[name], narrowed(whole(shapes[name]), all_of(shapes[name]), box))
            assert taken[name] == math.prod(box[1])


@given(st.lists(st.integers(1, 6), max_size=3), st.integers(1, 40))
def test_pieces_are_all_of_a_box_and_small(shape, most):
    found = torch.zeros(shape)
    for piece in pieces(all_of(tuple(shape)), shape, most):
        one = narrowed(found, all_of(tuple(shape)), piece)
        one += 1
        extent = 1 + sum((n - 1) * step for n, step in zip(one.shape, one.stride(), strict=True))
        assert extent <= most
    assert bool((found == 1).all())


def test_a_state_says_what_it_lacks():
    half = [Chunk("w", "f", (4, 2), ((0, 0), (2, 2))), Chunk("b", "f", (2,), ((0,), (1,)))]
    assert lacking({0: half}, 2) == (
        "is not whole: nobody holds part 1 of 2, and so 4 of the 8 elements of w (and of 1 more "
        "tensors)"
    )
    assert lacking({}, 2) == "is not whole: nobody holds parts 0, 1 of 2"


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
def test_what_is_no_chunk_is_damage(row):
    with pytest.raises(CheckpointCorrupt):
        chunks_of({"chunks": [row]})


def test_parts_that_contradict_each_other_are_damage():
    one, other = Chunk("w", "f", (4,), ((0,), (4,))), Chunk("w", "f", (5,), ((0,), (5,)))
    with pytest.raises(CheckpointCorrupt, match=r"w is a f of \(4,\) in part 0, and a f of \(5,\)"):
        lacking({0: [one], 3: [other]}, 4)
