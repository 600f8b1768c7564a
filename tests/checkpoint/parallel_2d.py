"""Scenarios of ranks with FSDP2 and tensor parallelism, for `test_parallel_2d.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharding import bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from elasticlib import CheckpointManager
from elasticlib.errors import StateMismatchError

MeshShape = tuple[int, int]
"""Ranks that shard the data (FSDP2), and ranks that divide each layer (tensor parallelism)."""


class Block(torch.nn.Module):
    """Two layers that tensor parallelism divides, and a norm that it does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        # Each tensor rank has 5 rows or columns, which no number of data ranks divides.
        self.up, self.down = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def create_state(shape: MeshShape) -> dict[str, Any]:
    """Return a model with FSDP2 and tensor parallelism, and its optimizer."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(1)
    model = torch.nn.Sequential(Block(), Block())
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "n": 0}


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["n"] += 1
        # The batch is the same on every rank, so that the number of ranks does not matter.
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(state["n"]))
        state["model"](x).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def open_manager(folder: Path, attempt: int) -> CheckpointManager:
    """Return the manager of a worker. There are two nodes, each with memory for snapshots."""
    node = dist.get_rank() * 2 // dist.get_world_size()
    memory = folder / f"node{node}" / str(attempt)
    memory.mkdir(parents=True, exist_ok=True)
    os.environ["ELASTICLIB_INCARNATION"] = "launch"
    os.environ.update(ELASTICLIB_SNAPSHOTS=str(memory), ELASTICLIB_GENERATION=str(attempt))
    return CheckpointManager(folder / "checkpoints")


def save(folder: Path, shape: MeshShape, in_memory: bool) -> Any:
    """Train and save. Return the bits of the complete state."""
    state = create_state(shape)
    train(state, 2)
    with open_manager(folder, 1) as manager:
        if in_memory:
            assert manager.snapshot(2, state)
        else:
            manager.save(2, state).wait()
            assert bits(manager.load()) == bits(state)
    return bits(state)


def restore(folder: Path, shape: MeshShape, attempt: int) -> Any:
    """Restore into a new state. Return the step and the bits of the complete state."""
    state = create_state(shape)
    with open_manager(folder, attempt) as manager:
        step = manager.restore(state).step
    return step, bits(state)


def save_different_norms(folder: Path) -> str:
    """Save a state in which a norm differs between tensor ranks. Return the error of loading it."""
    state = create_state((2, 2))
    with torch.no_grad():
        state["model"][0].norm.weight.fill_(float(dist.get_rank() % 2))
    with open_manager(folder, 1) as manager:
        manager.save(2, state).wait()
        try:
            manager.load()
        except StateMismatchError as error:
            return str(error)
    return ""


def restore_different_norms(folder: Path, shape: MeshShape) -> tuple[str, list[float], bool]:
    """Return the error of a restore, this rank's norm, and whether the state is unchanged."""
    state, message = create_state(shape), ""
    before = bits(state)
    with open_manager(folder, 2) as manager:
        try:
            manager.restore(state, if_unusable="start_over")
        except StateMismatchError as error:
            message = str(error)
    weight = state["model"][0].norm.weight.to_local()
    return message, sorted(set(weight.tolist())), bits(state) == before
