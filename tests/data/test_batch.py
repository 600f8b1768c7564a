"""The plan of a global batch: shares, micro-batches, and weights that make up for both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

from elasticlib import plan_batches
from elasticlib.data.deal import Position, deal
from elasticlib.errors import ConfigError

plans = st.builds(
    plan_batches, st.integers(1, 300), st.integers(1, 40), st.none() | st.integers(1, 50)
)


@given(plans)
def test_the_shares_are_the_global_batch_and_no_micro_batch_is_over_the_limit(plan):
    shares = [plan.share(rank) for rank in range(plan.world_size)]
    assert sum(shares) == plan.global_batch
    assert max(shares) - min(shares) <= 1
    for rank, share in enumerate(shares):
        micro_batches = plan.micro_batches(rank)
        sizes = [micro.size for micro in micro_batches]
        assert len(sizes) == plan.accumulation >= 1
        assert sum(sizes) == share
        assert max(sizes) <= plan.max_micro_batch
        assert max(sizes) - min(sizes) <= 1


@given(plans)
def test_no_more_micro_batches_than_the_limit_asks_for(plan):
    largest_share = -(-plan.global_batch // plan.world_size)
    assert (plan.accumulation - 1) * plan.max_micro_batch < largest_share


@given(plans)
def test_the_weights_of_all_ranks_average_to_one(plan):
    weights = [m.weight for rank in range(plan.world_size) for m in plan.micro_batches(rank)]
    assert sum(weights) / plan.world_size == pytest.approx(1)


@given(plans)
def test_a_share_is_what_the_cards_of_one_batch_come_to(plan):
    position = Position(0, 0, 0, plan.global_batch)
    for rank in range(plan.world_size):
        places = deal(position, rank=rank, world_size=plan.world_size, tail="exact")
        assert len(places) == plan.share(rank)


@pytest.mark.parametrize(("world", "most"), [(1, 3), (2, None), (3, 2), (3, 1), (9, 4)])
@pytest.mark.parametrize("by_mean", [True, False])
def test_averaged_over_the_ranks_the_gradient_is_that_of_one_process(world, most, by_mean):
    torch.manual_seed(0)
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()
    expected = torch.autograd.grad(mse_loss(model(x), y), model.parameters())
    plan, averaged = plan_batches(7, world, most), [torch.zeros_like(g) for g in expected]
    for rank in range(world):
        at = 0
        mine = torch.tensor(range(rank, 7, world), dtype=torch.int64)
        for micro in plan.micro_batches(rank):
            rows = mine[at : at + micro.size]
            at += micro.size
            if by_mean and micro.size:
                loss = micro.weight * mse_loss(model(x[rows]), y[rows])
            else:
                loss = plan.per_sample * mse_loss(model(x[rows]), y[rows], reduction="sum")
            for mean, part in zip(
                averaged, torch.autograd.grad(loss, model.parameters()), strict=True
            ):
                mean += part / world
    for mean, alone in zip(averaged, expected, strict=True):
        torch.testing.assert_close(mean, alone)


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ((0, 1), "global_batch.*got 0"),
        ((1, 0), "world_size.*got 0"),
        ((1, 1, 0), "max_micro_batch.*got 0"),
        ((8.0, 1), "global_batch is 8.0"),
        ((8, 1, 2.0), "max_micro_batch is 2.0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(numbers, named):
    with pytest.raises(ConfigError, match=named):
        plan_batches(*numbers)


def test_a_rank_outside_the_world_has_no_share():
    with pytest.raises(ConfigError, match=r"rank.*got 2 and 2"):
        plan_batches(4, 2).micro_batches(2)
