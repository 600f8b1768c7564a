"""Global batches: each step uses the same samples at any world size."""

from __future__ import annotations

from collections import Counter, namedtuple

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from round_robin import interleave
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.data.batch_sampler import EmptyBatchCollator
from elasticlib.errors import ConfigError

worlds = st.integers(1, 7)
lengths, sizes = st.integers(0, 80), st.integers(1, 12)


def create_ranks(n, world, batch, *, tail="exact", **options):
    samplers = [ElasticDistributedSampler(range(n), world, rank) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(options.get("epoch", 0))
    return [ElasticBatchSampler(sampler, batch, tail=tail) for sampler in samplers]


def read_order(n):
    return list(ElasticDistributedSampler(range(n), 1, 0))


@given(lengths, sizes, worlds, st.sampled_from(("exact", "drop", "pad")))
def test_each_step_uses_the_next_samples_of_the_order_at_any_world_size(n, batch, world, tail):
    ranks = create_ranks(n, world, batch, tail=tail)
    order, rest = read_order(n), n % batch
    steps = [order[at : at + batch] for at in range(0, n, batch)]
    if rest and tail == "drop":
        del steps[-1]
    if rest and tail == "pad":
        steps[-1] += (order * batch)[: batch - rest]
    assert {len(batches) for batches in ranks} == {len(steps)}
    used = [interleave(shares) for shares in zip(*ranks, strict=True)]
    assert used == steps


@given(
    lengths, sizes, st.lists(st.tuples(worlds, st.integers(0, 4)), max_size=5), worlds, st.data()
)
def test_kills_and_resizes_do_not_change_the_batches_of_a_job(n, batch, segments, last, data):
    """A job that is killed some steps after its last save repeats these steps and no others."""
    state, used = ElasticDistributedSampler(range(n), 1, 0).state_dict(), []
    for world, lost in [*segments, (last, 0)]:
        ranks = create_ranks(n, world, batch)
        for batches in ranks:
            batches.load_state_dict(state)
        final = (world, lost) == (last, 0)
        kept = len(ranks[0]) if final else data.draw(st.integers(0, len(ranks[0])))
        for step, shares in enumerate(zip(*ranks, strict=True)):
            assert sum(map(len, shares)) == ranks[0].next_batch_size
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            if step == kept + lost:
                break
            num_advanced = {batches.advance() for batches in ranks}
            assert num_advanced == {sum(map(len, shares))}
            if step < kept:
                used.append(interleave(shares))
                state = ranks[-1].state_dict()
        if final:
            break
    order = read_order(n)
    assert used == [order[at : at + batch] for at in range(0, n, batch)]
    assert Counter(index for step in used for index in step) == Counter(range(n))


def test_a_long_epoch_has_each_sample_once_in_small_and_in_large_batches():
    order = read_order(30_000)
    for batch, world in ((7, 2), (7, 9), (20_000, 1), (29_999, 3)):
        ranks = create_ranks(30_000, world, batch)
        used = [index for shares in zip(*ranks, strict=True) for index in interleave(shares)]
        assert used == order


def test_a_loader_and_another_iterator_yield_the_same_batches():
    """The iterators of a loader and of the test use one position, and the dataset takes lists."""
    (batches,) = create_ranks(10, 1, 4)
    data = torch.arange(10) * 10
    loader = DataLoader(data, sampler=batches, batch_size=None)
    for indices, rows in zip(batches, loader, strict=True):
        assert rows.tolist() == [10 * index for index in indices]
        batches.advance()
    assert batches.state_dict()["consumed"] == 10


def test_a_prefetched_batch_is_still_the_next_one():
    sampler = ElasticDistributedSampler(range(10), 2, 0, tail="exact", start_index=8)
    batches = ElasticBatchSampler(sampler, 4)
    assert [len(share) for share in batches] == [1]
    assert (batches.next_batch_size, batches.sample_weight) == (2, 1.0)
    assert batches.advance() == 2
    assert batches.next_batch_size == 0
    batches.set_epoch(1)
    assert batches.next_batch_size == 4
    assert [len(share) for share in batches] == [2, 2, 1]


def test_a_dropped_batch_is_not_used_by_a_smaller_batch_size():
    (batches,) = create_ranks(10, 1, 4, tail="drop")
    for _ in batches:
        batches.advance()
    assert batches.state_dict()["consumed"] == 10
    assert batches.next_batch_size == len(batches) == batches.advance() == 0
    with pytest.raises(ConfigError, match="no batch of the epoch is left"):
        _ = batches.sample_weight


def test_the_default_tail_is_that_of_the_sampler():
    sampler = ElasticDistributedSampler(range(10), 1, 0, drop_last=True)
    assert len(ElasticBatchSampler(sampler, 4)) == 2
    assert len(ElasticBatchSampler(sampler, 4, tail="exact")) == 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"global_batch": 0}, "global_batch.*got 0"),
        ({"global_batch": 8.0}, r"global_batch is 8\.0"),
        ({"global_batch": 4, "tail": "cut"}, "tail is 'cut'"),
    ],
)
def test_invalid_arguments_are_rejected(options, named):
    with pytest.raises(ConfigError, match=named):
        ElasticBatchSampler(ElasticDistributedSampler(range(10), 1, 0), **options)


Pair = namedtuple("Pair", "x name")


class NestedSamples:
    """A dataset whose samples have every kind of container that torch can collate."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        x = torch.full((3,), float(index))
        return {"x": x, "pair": Pair(x, f"sample {index}"), "both": (x, index)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_rank_with_an_empty_share_gets_a_batch_without_rows(workers):
    batches = ElasticBatchSampler(
        ElasticDistributedSampler(NestedSamples(), 2, 1, shuffle=False, tail="exact"), 4
    )
    loader = DataLoader(
        NestedSamples(),
        batch_sampler=batches,
        collate_fn=EmptyBatchCollator(NestedSamples()),
        num_workers=workers,
    )
    full, empty = loader
    assert full["x"].tolist() == [[1.0] * 3, [3.0] * 3]
    assert list(full["pair"].name) == ["sample 1", "sample 3"]
    assert empty["x"].shape == empty["pair"].x.shape == empty["both"][0].shape == (0, 3)
    assert empty["both"][1].shape == (0,)
    assert list(empty["pair"].name) == []


@attrs.frozen
class Graph:
    """A batch of a class that only its own collate function knows."""

    nodes: torch.Tensor


@pytest.mark.parametrize(
    "collate",
    [
        lambda samples: np.array(samples),
        lambda samples: {"x": torch.tensor(samples), "mask": np.array(samples)},
        lambda samples: Graph(torch.tensor(samples)),
        lambda samples: (torch.tensor(samples), len(samples)),
        lambda samples: torch.tensor(float(sum(samples))),
    ],
)
def test_an_empty_share_raises_if_samples_cannot_be_removed_from_a_batch(collate):
    sampler = ElasticDistributedSampler(range(5), 2, 1, tail="exact")
    loader = iter(
        DataLoader(
            range(5),
            batch_sampler=ElasticBatchSampler(sampler, 4),
            collate_fn=EmptyBatchCollator(range(5), collate),
        )
    )
    next(loader)
    with pytest.raises(ConfigError, match=r"no sample of the batch.*collate_fn"):
        next(loader)


def test_each_step_of_the_docstring_example_has_its_weight():
    """The example has 9 samples in batches of 4 on 2 ranks, so the last batch has 1 sample."""
    for rank, rows in ((0, [2, 2, 1]), (1, [2, 2, 0])):
        sampler = ElasticDistributedSampler(range(9), 2, rank, tail="exact")
        batches, weights = ElasticBatchSampler(sampler, 4), []
        collate = EmptyBatchCollator(range(9))
        for x in DataLoader(range(9), batch_sampler=batches, collate_fn=collate):
            weights.append((len(x), batches.sample_weight))
            batches.advance()
        assert weights == list(zip(rows, [0.5, 0.5, 2.0], strict=True))


@pytest.mark.parametrize(("world", "pieces"), [(1, 3), (2, 1), (3, 2), (3, 3), (9, 1)])
def test_the_gradient_averaged_over_ranks_is_that_of_one_process(world, pieces):
    """The test includes the micro-batches of docs/guide/data.md, some of which are empty."""
    torch.manual_seed(0)
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    model = torch.nn.Linear(3, 1).double()
    expected = torch.autograd.grad(mse_loss(model(x), y), model.parameters())
    averaged = [torch.zeros_like(gradient) for gradient in expected]
    for batches in create_ranks(7, world, 7):
        (mine,) = batches
        for piece in torch.tensor(mine, dtype=torch.int64).tensor_split(pieces):
            loss = mse_loss(model(x[piece]), y[piece], reduction="sum") * batches.sample_weight
            for mean, part in zip(
                averaged, torch.autograd.grad(loss, model.parameters()), strict=True
            ):
                mean += part / world
    for mean, gradient in zip(averaged, expected, strict=True):
        torch.testing.assert_close(mean, gradient)
