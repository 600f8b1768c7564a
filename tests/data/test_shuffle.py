"""Statistical tests of the shuffle, with fixed seeds.

Each test computes a score that is close to a standard normal number for a fair shuffle; a score
beyond LIMIT fails. With 2 rounds instead of 4, steps between neighbors of 1,100 samples have a
score of 66. With 3 rounds, all tests pass.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from elasticlib.data.permutation import Permutation

# A fair score exceeds the limit with a probability of 1/150,000. There are about 100 scores.
LIMIT = 4.5


def draw_order(length, seed, epoch=0, positions=None):
    positions = torch.arange(length) if positions is None else positions
    return Permutation(length, seed=seed, epoch=epoch)[positions]


def compute_score(counts, expected, freedom=None):
    """Return chi-square as a number of standard deviations from its expectation."""
    freedom = len(counts) - 1 if freedom is None else freedom
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


def count_cells(a, b, cells_each):
    return torch.bincount(a * cells_each + b, minlength=cells_each**2).double()


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_orders_of_a_few_samples_are_equally_likely(length):
    seeds = 200 * math.factorial(length)
    tables = (tuple(draw_order(length, seed).tolist()) for seed in range(seeds))
    counts = torch.tensor(list(Counter(tables).values())).double()
    assert len(counts) == math.factorial(length)
    assert abs(compute_score(counts, torch.tensor(200.0))) < LIMIT


@pytest.mark.parametrize("length", [100, 1000, 1100])
def test_positions_neighbors_and_fixed_points_are_random_over_many_seeds(length):
    seeds, grid, width = 1500, 20, -(-length // 20)
    positions = torch.arange(length)
    numbers = torch.stack([draw_order(length, seed) for seed in range(seeds)])
    cell = positions // width
    size = torch.bincount(cell, minlength=grid).double()
    filled = (size > 0).sum().item()

    both = size[:, None] * size[None, :]
    by_position = count_cells(cell.repeat(seeds), (numbers // width).flatten(), grid)
    seen = both.flatten() > 0
    expected = (both * seeds / length).flatten()[seen]
    assert abs(compute_score(by_position[seen], expected, (filled - 1) ** 2)) < LIMIT

    before, after = numbers[:, :-1].flatten(), numbers[:, 1:].flatten()
    pairs = count_cells(before // width, after // width, grid)
    expected = ((both - torch.diag(size)) * seeds / length).flatten()[seen]
    assert abs(compute_score(pairs[seen], expected, filled**2 - 1)) < LIMIT

    steps = torch.bincount((after - before) % length, minlength=length)[1:].double()
    assert abs(compute_score(steps, torch.tensor(float(seeds)))) < LIMIT

    fixed = (numbers == positions).sum().item()
    assert abs(fixed - seeds) / math.sqrt(seeds) < LIMIT


@pytest.mark.parametrize("length", [2**18 + 1, 2**62, pytest.param(10**12, marks=pytest.mark.long)])
def test_pairs_in_a_long_order_are_random(length):
    assert max(abs(s) for s in compute_pair_scores(length)) < LIMIT


def compute_pair_scores(length):
    """Yield scores of indices at positions that are a stride apart.

    A weak network would show at strides that are powers of two.
    """
    bits, count, grid = (length - 1).bit_length(), 2**16, 32
    scale = length // grid + 1
    for stride in (1, 2, 16, 2 ** (bits // 2), 2 ** ((bits + 1) // 2), 2 ** (bits - 2)):
        positions = torch.arange(count) % (length - stride)
        a = draw_order(length, 3, positions=positions)
        b = draw_order(length, 3, positions=positions + stride)
        fair = torch.tensor(count / grid**2)
        size = torch.full((grid,), float(scale))
        size[-1] = length - (grid - 1) * scale
        weights = (size[:, None] * size[None, :]).flatten() / float(length) ** 2
        yield compute_score(count_cells(a // scale, b // scale, grid), weights * count)
        yield compute_score(count_cells(a % grid, b % grid, grid), fair)
        yield compute_score(torch.bincount((a ^ b) % 1024, minlength=1024).double(), count / 1024)


@pytest.mark.parametrize(("seed", "epoch"), [(1, 0), (0, 1), (-1, 0), (1, 1), (2**32, 0)])
def test_orders_of_other_seeds_and_epochs_are_independent(seed, epoch):
    length, grid = 100_000, 32
    scale = -(-length // grid)
    size = torch.full((grid,), float(scale))
    size[-1] = length - (grid - 1) * scale
    a, b = draw_order(length, 0), draw_order(length, seed, epoch)
    expected = (size[:, None] * size[None, :]).flatten() / length
    assert (
        abs(compute_score(count_cells(a // scale, b // scale, grid), expected, (grid - 1) ** 2))
        < LIMIT
    )
    correlation = torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()
    assert abs(correlation) * math.sqrt(length) < LIMIT
    assert (a == b).sum() < 10  # one is expected
