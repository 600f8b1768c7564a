"""The summation tree and the assignment of logical workers to ranks, without torch."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.data.position import even_share
from elasticlib.errors import ConfigError
from elasticlib.logical.tree_sum import TreeSum, local_subtrees, logical_workers_of_rank

CASES = [(count, world) for count in range(1, 17) for world in range(1, count + 1)]
counts_and_worlds = st.integers(1, 300).flatmap(
    lambda count: st.tuples(st.just(count), st.integers(1, count))
)


def compute_additions_recursively(start, stop):
    """Return the additions as nested pairs; a left half has the largest possible power of two."""
    if stop - start == 1:
        return start
    half = 1 << (stop - start - 1).bit_length() - 1
    return compute_additions_recursively(start, start + half), compute_additions_recursively(
        start + half, stop
    )


def add(left, right):
    return left, right


def compute_additions_of_ranks(count, world):
    """Return the additions of the ranks: first in each share, then of the remaining sums."""
    tree = TreeSum(count, add)
    for rank in range(world):
        own = TreeSum(count, add)
        for worker in logical_workers_of_rank(count, world, rank):
            own.push(range(worker, worker + 1), worker)
        assert [node for node, _ in own.pending] == local_subtrees(count, world, rank)
        for node, value in own.pending:
            tree.push(node, value)
    return tree.pending


@pytest.mark.parametrize(("count", "world"), CASES)
def test_the_additions_are_the_same_at_any_world_size(count, world):
    assert compute_additions_of_ranks(count, world) == [
        (range(count), compute_additions_recursively(0, count))
    ]


@given(counts_and_worlds)
def test_the_additions_are_the_same_for_many_logical_workers(case):
    assert compute_additions_of_ranks(*case) == [
        (range(case[0]), compute_additions_recursively(0, case[0]))
    ]


def compute_max_pending(count, world, rank):
    """Return how many sums a rank stores at most at the same time."""
    own, most = TreeSum(count, add), 0
    for worker in logical_workers_of_rank(count, world, rank):
        own.push(range(worker, worker + 1), worker)
        most = max(most, len(own.pending))
    return most


def compute_gradients_sent(count, world, rank):
    """Return what a rank sends in a step, in units of a whole gradient.

    It sends a slice of each of its sums to each rank, and the result of its own slice to all.
    """
    return (len(local_subtrees(count, world, rank)) + 1) * (world - 1) / world


@pytest.mark.parametrize(("count", "world"), CASES)
def test_a_rank_stores_and_sends_few_sums(count, world):
    bound = max(1, 2 * math.log2(count))
    for rank in range(world):
        assert 1 <= len(local_subtrees(count, world, rank)) <= bound
        assert (
            len(local_subtrees(count, world, rank))
            <= compute_max_pending(count, world, rank)
            <= bound
        )


def test_one_process_stores_as_many_sums_as_the_tree_has_levels():
    for count in range(2, 200):
        assert compute_max_pending(count, 1, 0) == count.bit_length() - 1


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_powers_of_two_send_as_much_as_a_ring_all_reduce(world):
    for rank in range(world):
        assert compute_gradients_sent(8, world, rank) == 2 * (world - 1) / world


@given(st.integers(0, 1000), st.integers(1, 50))
def test_shares_are_consecutive_and_differ_by_at_most_one(total, parts):
    shares = [even_share(total, rank=index, world_size=parts) for index in range(parts)]
    assert [item for share in shares for item in share] == list(range(total))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(counts_and_worlds, st.integers(0, 1000))
def test_the_samples_of_logical_workers_are_the_same_at_any_world_size(case, batch):
    count, world = case
    assigned = [
        list(even_share(batch, rank=worker, world_size=count))
        for rank in range(world)
        for worker in logical_workers_of_rank(count, world, rank)
    ]
    workers = range(count)
    assert assigned == [
        list(even_share(batch, rank=worker, world_size=count)) for worker in workers
    ]


def test_more_ranks_than_logical_workers_are_rejected():
    with pytest.raises(ConfigError, match="got 5 and 4"):
        logical_workers_of_rank(4, 5, 0)
    for size, parts, index in [(-1, 2, 0), (3, 2, 2), (3, 2, -1), (3, 0, 0)]:
        with pytest.raises(ConfigError, match=r"size >= 0|rank < world_size"):
            even_share(size, rank=index, world_size=parts)


def test_the_module_does_not_import_torch():
    code = "import sys, elasticlib.logical.tree_sum; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
