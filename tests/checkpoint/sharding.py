"""What a rank does that saves or loads sharded state: see test_sharded_checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import Gated
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointCorrupt, CheckpointError


def sharded_layers(mesh: DeviceMesh, *, bias: bool = True) -> torch.nn.Module:
    """FSDP2, or HSDP, of two layers that no number of ranks divides."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=bias))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained() -> dict[str, Any]:
    """An FSDP2 model with its optimizer, both after a step, and tensors sharded in other ways."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded_layers(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    columns = distribute_tensor(torch.arange(15.0).view(3, 5), mesh, [Shard(1)])
    same = distribute_tensor(torch.arange(4), mesh, [Replicate()])
    return {"model": model, "optimizer": optimizer, "more": [columns, (same, "text")]}


def bits(value: Any) -> Any:
    """All of it, put together from all ranks, so that equal means equal bits."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return bits(value.state_dict())
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.view(torch.int32).tolist() if value.dtype is torch.float32 else value.tolist()
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    return [bits(part) for part in value] if isinstance(value, list | tuple) else value


def load(manager: CheckpointManager, state: dict[str, Any]) -> None:
    """As sharded as the state given, at this world size; and whole, by each rank by itself."""
    want = bits(state)
    found = manager.load(like=state)
    more, given = found["more"][0], state["more"][0]
    assert isinstance(more, DTensor)
    assert more.placements == given.placements
    assert bits(found) == want, (bits(found), want)
    assert not any(isinstance(t, DTensor) for t in manager.load()["model"].values())
    assert bits(manager.load()) == want
    state["model"].load_state_dict(found["model"])
    state["optimizer"].load_state_dict(found["optimizer"])
    assert bits(state) == want


def save(manager: CheckpointManager, state: dict[str, Any]) -> None:
    for step in (1, 2, 3):
        manager.save(step, state)
    manager.wait()
    assert manager.steps() == [2, 3], manager.steps()
    load(manager, state)


def fail_on_one(manager: CheckpointManager, place: Gated, state: dict[str, Any]) -> str:
    """One rank's part cannot be written: none of the ranks counts it as saved."""
    if dist.get_rank() == 1:
        place.full = True
    manager.save(4, state)
    said = ""
    try:
        manager.wait()
    except CheckpointError as error:
        said = str(error)
    assert manager.latest() == 3
    return said


def save_and_fail(folder: Path) -> str:
    """What each of two ranks is told of the save that fails."""
    state, place = trained(), Gated(folder / "checkpoints")
    place.gate.set()
    with CheckpointManager(place, keep_last=2) as manager:
        save(manager, state)
        return fail_on_one(manager, place, state)


def load_beside_damage(folder: Path) -> str | None:
    """What is whole for a rank that has loaded its share of a checkpoint; the other is damaged."""
    state = trained()
    with CheckpointManager(folder / "checkpoints") as manager:
        manager.save(1, state).wait()
    if dist.get_rank() == 0:
        [other] = (folder / "checkpoints").glob("*/part-00001.*")
        data = bytearray(other.read_bytes())
        data[-1] ^= 1
        other.write_bytes(data)
        with CheckpointManager(folder / "checkpoints") as manager:
            manager.load(like=state)
            with pytest.raises(CheckpointCorrupt):
                manager.latest()
            return "damaged"
    return None


def load_alone(folder: Path) -> None:
    """Load on one rank what was saved at two."""
    state = trained()
    with CheckpointManager(folder / "checkpoints", keep_last=2) as manager:
        load(manager, state)
