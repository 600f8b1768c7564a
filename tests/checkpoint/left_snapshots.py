"""Functions that ranks run to leave sharded snapshots in the memory of agents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharding import bits, sharded_layers
from torch.distributed.device_mesh import init_device_mesh

from elasticlib import CheckpointManager


def made(copies: int) -> dict[str, Any]:
    """FSDP2, or HSDP of so many copies."""
    torch.manual_seed(0)
    shape, names = (copies, dist.get_world_size() // copies), ("replicate", "shard")
    axes = slice(None) if copies > 1 else slice(1, None)
    mesh = init_device_mesh("cpu", shape[axes], mesh_dim_names=names[axes])
    model = sharded_layers(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "step": 0}


def train(state: dict[str, Any]) -> None:
    state["step"] += 1
    # The same on every rank, so that the number of ranks changes nothing.
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(state["step"]))
    state["model"](x).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def leave_snapshots(folder: Path, last: Sequence[int], copies: int = 1) -> dict[int, Any]:
    """Two ranks a node. last: of each rank, the step of its last snapshot. What the states are."""
    rank, states = dist.get_rank(), {}
    memory = folder / f"memory{rank // 2}" / "1"
    memory.mkdir(parents=True, exist_ok=True)
    os.environ.update(ELASTICLIB_SNAPSHOTS=str(memory), LOCAL_RANK=str(rank % 2))
    state = made(copies)
    with CheckpointManager(folder / "checkpoints") as manager:
        for step in range(1, max(last) + 1):
            train(state)
            if step <= last[rank]:
                assert manager.snapshot(step, state)
            states[step] = bits(state)
    return states


def restored(folder: Path) -> tuple[int, Any]:
    """What any number of ranks find on the disk."""
    state = made(1)
    with CheckpointManager(folder / "checkpoints") as manager:
        assert manager.verify() == {}
        found = manager.restore(state)
    return found.step, bits(state)
