"""Orders of the user, such as weighted sampling: each position is used exactly once."""

from __future__ import annotations

import pytest
import torch
from round_robin import interleave

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.errors import ConfigError, StateMismatchError

WEIGHTS = torch.tensor([1.0, 0.0, 2.0, 4.0, 0.0, 1.0, 8.0, 3.0, 1.0, 2.0])


def by_weight(weights=WEIGHTS, count=8):
    """Return the order of docs/guide/data.md."""

    def order(seed, epoch):
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        return weights.multinomial(count, generator=generator)

    return order


def sampler_of(order, world=1, rank=0, **options):
    return ElasticDistributedSampler(range(10), world, rank, order=order, tail="exact", **options)


def test_each_draw_is_used_once_through_resizes():
    for epoch in range(3):
        used, state = [], None
        for world, steps in ((2, 1), (3, 1), (1, 3)):
            ranks = [sampler_of(by_weight(), world, rank, seed=5) for rank in range(world)]
            for sampler in ranks:
                if state:
                    sampler.load_state_dict(state)
                sampler.set_epoch(epoch)
            used += interleave(list(sampler)[:steps] for sampler in ranks)
            for sampler in ranks:
                sampler.advance(steps * world)
            state = ranks[0].state_dict()
        assert used == by_weight()(5, epoch).tolist()
        assert set(used) == set(WEIGHTS.nonzero().flatten().tolist())


def test_the_order_is_created_once_for_each_epoch():
    calls = []

    def order(seed, epoch):
        calls.append((seed, epoch))
        return list(range(10 * epoch, 10 * epoch + 4))

    sampler = sampler_of(order, seed=3)
    batches = ElasticBatchSampler(sampler, 2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert list(batches) == [[10 * epoch, 10 * epoch + 1], [10 * epoch + 2, 10 * epoch + 3]]
        assert len(list(sampler)) == len(sampler) == 4
    assert calls == [(3, 0), (3, 1), (3, 2)]


class Backwards:
    """An order without a list of its indices."""

    def __len__(self):
        return 2**40

    def __getitem__(self, positions):
        return len(self) - 1 - positions


def test_an_order_can_be_computed_on_demand():
    sampler = sampler_of(lambda _seed, _epoch: Backwards(), start_index=5)
    assert next(iter(sampler)) == 2**40 - 6


def test_a_state_of_other_weights_is_rejected():
    state = sampler_of(by_weight(), seed=1).state_dict()
    sampler_of(by_weight(), seed=1).load_state_dict(state)
    with pytest.raises(
        StateMismatchError, match=r"order is 'custom \w+' in the state, .* 'custom \w+'"
    ):
        sampler_of(by_weight(WEIGHTS.flip(0)), seed=1).load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"length is 8 .* has 7"):
        sampler_of(by_weight(count=7), seed=1).load_state_dict(state)
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
        sampler_of(order)


def test_each_epoch_must_have_the_same_length():
    sampler = sampler_of(lambda _seed, epoch: range(4 + epoch))
    assert list(sampler) == [0, 1, 2, 3]
    sampler.set_epoch(1)
    with pytest.raises(ConfigError, match=r"order\(0, 1\) returned 5 indices, .* returned 4"):
        list(sampler)
