"""The recipes of docs/guide/data.md do what the page describes."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from pages import read_page
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler, ShardDataset


def run_recipe(marker: str, **names: Any) -> dict[str, Any]:
    """Run the code block of the page that contains `marker`, and return the names it defines."""
    (code,) = (code for _, code in read_page("guide/data.md")[1] if marker in code)
    exec(code, names)
    return names


def summed_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), y, reduction="sum")


def test_micro_batches_have_the_gradient_of_the_whole_batch() -> None:
    x, y = torch.randn(7, 3), torch.randn(7, 1)
    gradients = []
    for max_piece in (7, 2):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 1)
        model.no_sync = contextlib.nullcontext  # a method of DistributedDataParallel
        sampler = ElasticDistributedSampler(range(7), 1, 0, tail="exact")
        names = run_recipe("max_piece", batches=ElasticBatchSampler(sampler, 7), world_size=1)
        names["train_in_pieces"](model, summed_loss, x, y, max_piece)
        gradients.append(model.weight.grad)
    torch.testing.assert_close(*gradients)


def test_learning_rates_are_scaled_during_a_step_only() -> None:
    names = run_recipe("register_step_pre_hook", model=torch.nn.Linear(1, 1), world_size=4)
    optimizer, model = names["optimizer"], names["model"]
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()
    assert model.weight.item() == pytest.approx(1 - 2 * 0.1 * 8 * 4 / 256)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_stream_continues_at_another_world_size(workers: int) -> None:
    sizes = (5, 9, 0, 14, 7, 20)
    names = run_recipe(
        "IterableDataset",
        DataLoader=DataLoader,
        ElasticDistributedSampler=partial(ElasticDistributedSampler, num_replicas=1, rank=0),
        dataset=range(8),
    )
    batch, stream = names["BATCH"], names["Stream"]
    dataset = ShardDataset(range(6), sizes, lambda s, a, b: [100 * s + n for n in range(a, b)])
    used: Counter[int] = Counter()
    state = None
    for world, steps in ((2, 1), (3, 1), (1, 99)):
        for rank in range(world):
            sampler = ElasticDistributedSampler(dataset, world, rank, shuffle=False)
            if state:
                sampler.load_state_dict(state)
            loader = DataLoader(stream(dataset, sampler), batch, num_workers=workers)
            for _, samples in zip(range(steps), loader, strict=False):
                used.update(samples.tolist())
                sampler.advance(batch * world)
        state = sampler.state_dict()
    assert used == Counter(100 * s + n for s, size in enumerate(sizes) for n in range(size))
