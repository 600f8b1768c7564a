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

from elasticlib import (
    ElasticBatchSampler,
    ElasticDistributedSampler,
    EmptyBatchCollator,
    ShardDataset,
)

DATA: Any = range(64)


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


@pytest.mark.parametrize("name", ["by_samples", "by_steps"])
def test_a_schedule_reaches_its_end_after_a_resize(name: str) -> None:
    """Four ranks train one epoch of three, and one rank the rest. The rate never climbs."""
    rates: list[float] = []
    state: list[dict[str, Any]] | None = None
    for world, last_epoch in ((4, 1), (1, 3)):
        sampler = ElasticDistributedSampler(DATA, world, 0)
        batches = ElasticBatchSampler(sampler, 8)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        names = {"torch": torch, "sampler": sampler, "batches": batches, "optimizer": optimizer}
        schedule = run_recipe(f"{name} =", **names)[name]
        if state is not None:
            for part, saved in zip((sampler, optimizer, schedule), state, strict=True):
                part.load_state_dict(saved)
        by_samples: Any = DataLoader(DATA, 2, sampler=sampler)
        loader = by_samples if name == "by_samples" else DataLoader(DATA, batch_sampler=batches)
        for _, local_batches in sampler.epochs(last_epoch, loader):
            for _ in local_batches:
                optimizer.step()
                sampler.advance(2 * world if name == "by_samples" else 8)
                schedule.step()
                rates += schedule.get_last_lr()
        state = [part.state_dict() for part in (sampler, optimizer, schedule)]
    assert len(rates) == (8 + 2 * 32 if name == "by_samples" else 3 * 8)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_stream_continues_at_another_world_size(workers: int) -> None:
    sizes = (5, 9, 0, 14, 7, 6)  # The last step has one sample, fewer than there are ranks.
    names = run_recipe(
        "IterableDataset",
        DataLoader=DataLoader,
        ElasticDistributedSampler=partial(ElasticDistributedSampler, num_replicas=1, rank=0),
        EmptyBatchCollator=EmptyBatchCollator,
        dataset=range(8),
    )
    batch, stream = names["BATCH"], names["Stream"]
    dataset = ShardDataset(range(6), sizes, lambda s, a, b: [100 * s + n for n in range(a, b)])
    used: Counter[int] = Counter()
    state = None
    for world, steps in ((2, 1), (3, 1), (2, 99)):
        num_batches = set()
        for rank in range(world):
            sampler = ElasticDistributedSampler(dataset, world, rank, shuffle=False)
            if state:
                sampler.load_state_dict(state)
            batches = []
            loader = DataLoader(stream(dataset, sampler), batch_size=None, num_workers=workers)
            for _, samples in zip(range(steps), loader, strict=False):
                batches.append(samples.tolist())
                sampler.advance(batch * world)
            assert max(map(len, batches)) <= batch
            used.update(sample for samples in batches for sample in samples)
            num_batches.add(len(batches))
        state = sampler.state_dict()
        assert len(num_batches) == 1  # Otherwise DDP waits for a step that a rank does not make.
    assert used == Counter(100 * s + n for s, size in enumerate(sizes) for n in range(size))
