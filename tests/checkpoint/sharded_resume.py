"""FSDP2 training that resumes in a new model, for `test_sharded_checkpoints.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharding import bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elasticlib import CheckpointManager

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5, amsgrad=True),
    "foreach": lambda groups: torch.optim.Adam(groups, lr=0.1, foreach=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.5),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, centered=True, momentum=0.5),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.1),
}
STEPS, SAVED = 5, 3


class Model(torch.nn.Module):
    """A model of uneven layers, with a frozen parameter, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
        self.unused = torch.nn.Linear(3, 3)
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        # Negative zeros show whether a restore changes parameters.
        torch.nn.init.constant_(self.second.bias, -0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x * self.frozen)))


def make(kind: str) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), Model()
    for layer in (model.first, model.second, model.unused):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rest = [p for n, p in model.named_parameters() if not n.startswith("first")]
    groups = [{"params": list(model.first.parameters()), "lr": 0.05}, {"params": rest}]
    return model, OPTIMIZERS[kind](groups)


def train(model: Model, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        # The batch is the same on every rank, so that the number of ranks does not matter.
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, kind: str) -> None:
    model, optimizer = make(kind)
    train(model, optimizer, range(SAVED))
    with CheckpointManager(folder / kind) as manager:
        manager.save(SAVED, {"model": model, "optimizer": optimizer})


def resume(folder: Path, kind: str) -> None:
    model, optimizer = make(kind)
    train(model, optimizer, range(SAVED))
    before = bits([model, optimizer])
    train(model, optimizer, range(SAVED, STEPS))
    new_model, new_optimizer = make(kind)
    initial = bits([new_model, new_optimizer])
    with CheckpointManager(folder / kind) as manager:
        # Loading does not change the given objects, although the optimizer has no state yet.
        loaded = manager.load(like={"model": new_model, "optimizer": new_optimizer})
        assert bits([new_model, new_optimizer]) == initial
        assert bits([loaded["model"], loaded["optimizer"]]) == before
        assert manager.restore({"model": new_model, "optimizer": new_optimizer}).step == SAVED
    assert bits([new_model, new_optimizer]) == before
    assert all(p.grad is None for p in new_model.parameters())
    for parameter, state in new_optimizer.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                assert isinstance(value, DTensor)
                assert value.placements == parameter.placements
    train(new_model, new_optimizer, range(SAVED, STEPS))
    assert bits([new_model, new_optimizer]) == bits([model, optimizer])
    # An optimizer that has taken more steps, and has more state than was saved, is restored, too.
    with CheckpointManager(folder / kind) as manager:
        new_model.unused(torch.ones(2, 3)).sum().backward()
        new_optimizer.step()
        new_optimizer.zero_grad()
        assert manager.restore({"model": new_model, "optimizer": new_optimizer}).step == SAVED
    assert bits([new_model, new_optimizer]) == before


def save_each(folder: Path) -> None:
    for kind in OPTIMIZERS:
        save(folder, kind)


def resume_each(folder: Path) -> None:
    for kind in OPTIMIZERS:
        resume(folder, kind)
