"""Functions that ranks run to make sharded snapshots in the memory of their agents."""

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


def create_state(copies: int) -> dict[str, Any]:
    """Return a model with FSDP2, or with HSDP if there are several copies, and its optimizer."""
    torch.manual_seed(0)
    shape, names = (copies, dist.get_world_size() // copies), ("replicate", "shard")
    axes = slice(None) if copies > 1 else slice(1, None)
    mesh = init_device_mesh("cpu", shape[axes], mesh_dim_names=names[axes])
    model = sharded_layers(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "step": 0}


def train(state: dict[str, Any]) -> None:
    state["step"] += 1
    # The batch is the same on every rank, so that the number of ranks does not matter.
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(state["step"]))
    state["model"](x).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def make_snapshots(folder: Path, last: Sequence[int], copies: int = 1) -> dict[int, Any]:
    """Train, and make snapshots. Each node has two ranks.

    Args:
        folder: the directory of the checkpoints and of the memory of each node.
        last: the step of the last snapshot of each rank.
        copies: number of copies of the state (HSDP).

    Returns:
        The bits of the state after each step.
    """
    rank, states = dist.get_rank(), {}
    memory = folder / f"memory{rank // 2}" / "1"
    memory.mkdir(parents=True, exist_ok=True)
    os.environ["ELASTICLIB_INCARNATION"] = "launch"
    os.environ.update(ELASTICLIB_SNAPSHOTS=str(memory), LOCAL_RANK=str(rank % 2))
    state = create_state(copies)
    with CheckpointManager(folder / "checkpoints") as manager:
        for step in range(1, max(last) + 1):
            train(state)
            if step <= last[rank]:
                assert manager.snapshot(step, state)
            states[step] = bits(state)
    return states


def restore_from_disk(folder: Path) -> tuple[int, Any]:
    """Restore from the disk on any number of ranks. Return the step and the bits of the state."""
    state = create_state(1)
    with CheckpointManager(folder / "checkpoints") as manager:
        assert manager.verify() == {}
        result = manager.restore(state)
    return result.step, bits(state)
