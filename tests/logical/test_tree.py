"""The order of additions and the shares of work: pure, so nothing here imports torch."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.data.position import share_of
from elasticlib.errors import ConfigError
from elasticlib.logical.shares import TreeSum, pieces, seed_of, workers_of

CASES = [(count, world) for count in range(1, 17) for world in range(1, count + 1)]
counts_and_worlds = st.integers(1, 300).flatmap(
    lambda count: st.tuples(st.just(count), st.integers(1, count))
)


def in_one_place(start, stop):
    """The additions as nested pairs: the left half is the largest power of two below the whole."""
    if stop - start == 1:
        return start
    half = 1 << (stop - start - 1).bit_length() - 1
    return in_one_place(start, start + half), in_one_place(start + half, stop)


def pair(left, right):
    return left, right


def by_ranks(count, world):
    """The additions that the ranks make, each of its own share, and then of all pieces."""
    whole = TreeSum(count, pair)
    for rank in range(world):
        own = TreeSum(count, pair)
        for worker in workers_of(count, world, rank):
            own.push(range(worker, worker + 1), worker)
        assert [node for node, _ in own.waiting] == pieces(count, world, rank)
        for node, value in own.waiting:
            whole.push(node, value)
    return whole.waiting


@pytest.mark.parametrize(("count", "world"), CASES)
def test_the_additions_are_the_same_whatever_the_world(count, world):
    assert by_ranks(count, world) == [(range(count), in_one_place(0, count))]


@given(counts_and_worlds)
def test_the_additions_are_the_same_for_many_logical_workers_too(case):
    assert by_ranks(*case) == [(range(case[0]), in_one_place(0, case[0]))]


def buffers(count, world, rank):
    """How many gradients a rank holds at once at most, its last sums included."""
    own, most = TreeSum(count, pair), 0
    for worker in workers_of(count, world, rank):
        own.push(range(worker, worker + 1), worker)
        most = max(most, len(own.waiting))
    return most


def gradients_sent(count, world, rank):
    """What a rank sends in a step, in units of one whole gradient: it needs one slice of everyone's
    pieces, and gives everyone the result."""
    return (len(pieces(count, world, rank)) + 1) * (world - 1) / world


@pytest.mark.parametrize(("count", "world"), CASES)
def test_a_rank_sends_and_holds_few_sums(count, world):
    bound = max(1, 2 * math.log2(count))
    for rank in range(world):
        assert 1 <= len(pieces(count, world, rank)) <= bound
        assert len(pieces(count, world, rank)) <= buffers(count, world, rank) <= bound


def test_one_process_holds_as_many_sums_as_the_tree_has_whole_levels():
    for count in range(2, 200):
        assert buffers(count, 1, 0) == count.bit_length() - 1


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_powers_of_two_send_as_much_as_a_ring_all_reduce(world):
    for rank in range(world):
        assert gradients_sent(8, world, rank) == 2 * (world - 1) / world


@given(st.integers(0, 1000), st.integers(1, 50))
def test_shares_cover_everything_in_order_and_differ_by_one_at_most(total, parts):
    shares = [share_of(total, rank=index, world_size=parts) for index in range(parts)]
    assert [place for mine in shares for place in mine] == list(range(total))
    sizes = [len(mine) for mine in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(counts_and_worlds, st.integers(0, 1000))
def test_a_ranks_samples_are_its_logical_workers_whatever_the_world(case, batch):
    count, world = case
    dealt = [
        list(share_of(batch, rank=worker, world_size=count))
        for rank in range(world)
        for worker in workers_of(count, world, rank)
    ]
    workers = range(count)
    assert dealt == [list(share_of(batch, rank=worker, world_size=count)) for worker in workers]


def test_more_ranks_than_logical_workers_are_refused():
    with pytest.raises(ConfigError, match="got 5 and 4"):
        workers_of(4, 5, 0)
    for size, parts, index in [(-1, 2, 0), (3, 2, 2), (3, 2, -1), (3, 0, 0)]:
        with pytest.raises(ConfigError, match=r"size >= 0|rank < world_size"):
            share_of(size, rank=index, world_size=parts)


def test_seeds_differ_in_each_of_what_they_are_for_and_stay_the_same_for_ever():
    everything = {
        seed_of(seed, step, worker, use)
        for seed in (0, 1, -1, 10**30)
        for step in range(20)
        for worker in range(20)
        for use in ("model", "data", "update")
    }
    assert len(everything) == 4 * 20 * 20 * 3
    assert all(0 <= seed < 2**63 for seed in everything)
    # Written down: a checkpoint of today is to be continued with the random numbers of today.
    assert seed_of(0, 0, 0, "model") == 1133652586245721400
    with pytest.raises(ConfigError, match=r"step.*got -1"):
        seed_of(0, -1, 0, "model")


def test_the_order_is_decided_without_torch():
    code = "import sys, elasticlib.logical.shares; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
