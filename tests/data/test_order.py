"""The order can be a function of the user; each of its positions is used exactly once."""

from __future__ import annotations

import pytest
import torch
from round_robin import interleave

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.errors import ConfigError, StateMismatchError

WEIGHTS = torch.tensor([1.0, 0.0, 2.0, 4.0, 0.0, 1.0, 8.0, 3.0, 1.0, 2.0])


def create_weighted_order(weights=WEIGHTS, count=8):
    """Return the order of docs/guide/data.md."""

    def order(seed, epoch):
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        return weights.multinomial(count, generator=generator)

    return order


def create_sampler(order, world=1, rank=0, **options):
    return ElasticDistributedSampler(range(10), world, rank, order=order, tail="exact", **options)


def test_each_draw_is_used_once_through_resizes():
    for epoch in range(3):
        used, state = [], None
        for world, steps in ((2, 1), (3, 1), (1, 3)):
            ranks = [
                create_sampler(create_weighted_order(), world, rank, seed=5)
                for rank in range(world)
            ]
            for sampler in ranks:
                if state:
                    sampler.load_state_dict(state)
                sampler.set_epoch(epoch)
            used += interleave(list(sampler)[:steps] for sampler in ranks)
            for sampler in ranks:
                sampler.advance(steps * world)
            state = ranks[0].state_dict()
        assert used == create_weighted_order()(5, epoch).tolist()
        assert set(used) == set(WEIGHTS.nonzero().flatten().tolist())


def test_the_order_is_created_once_for_each_epoch():
    calls = []

    def order(seed, epoch):
        calls.append((seed, epoch))
        return list(range(10 * epoch, 10 * epoch + 4))

    sampler = create_sampler(order, seed=3)
    batches = ElasticBatchSampler(sampler, 2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert list(batches) == [[10 * epoch, 10 * epoch + 1], [10 * epoch + 2, 10 * epoch + 3]]
        assert len(list(sampler)) == len(sampler) == 4
    assert calls == [(3, 0), (3, 1), (3, 2)]


class ReversedOrder:
    """An order without a list of its indices."""

    def __len__(self):
        return 2**40

    def __getitem__(self, positions):
        return len(self) - 1 - positions


def test_an_order_can_be_computed_on_demand():
    sampler = create_sampler(lambda _seed, _epoch: ReversedOrder(), start_index=5)
    assert next(iter(sampler)) == 2**40 - 6


def test_a_state_of_other_weights_is_rejected():
    state = create_sampler(create_weighted_order(), seed=1).state_dict()
    create_sampler(create_weighted_order(), seed=1).load_state_dict(state)
    with pytest.raises(
        StateMismatchError, match=r"order is 'custom \w+' in the state, .* 'custom \w+'"
    ):
        create_sampler(create_weighted_order(WEIGHTS.flip(0)), seed=1).load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"length is 8 .* has 7"):
        create_sampler(create_weighted_order(count=7), seed=1).load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"order is 'custom \w+' .* has 'shuffled'"):
        ElasticDistributedSampler(range(8), 1, 0, seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("order", "named"),
    [
        (lambda _seed, _epoch: 7, "as a tensor or a sequence, got int"),
        (lambda _seed, _epoch: torch.zeros(3), "int64 indices, got torch.float32 of shape"),
        (lambda _seed, _epoch: torch.zeros(3, 1, dtype=torch.int64), r"of shape \[3, 1\]"),
    ],
)
def test_an_invalid_order_is_rejected(order, named):
    with pytest.raises(ConfigError, match=named):
        create_sampler(order)


def test_each_epoch_must_have_the_same_length():
    sampler = create_sampler(lambda _seed, epoch: range(4 + epoch))
    assert list(sampler) == [0, 1, 2, 3]
    sampler.set_epoch(1)
    with pytest.raises(ConfigError, match=r"order\(0, 1\) returned 5 indices, .* returned 4"):
        list(sampler)
