"""Scenarios of ranks that save or load sharded state, for `test_sharded_checkpoints.py`."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import GatedStorage
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointCorruptError, CheckpointError
from elasticlib.in_place.group_backend import _clear_dtensor_plans


def sharded_layers(mesh: DeviceMesh, *, bias: bool = True) -> torch.nn.Module:
    """Return two layers under FSDP2 or HSDP, whose sizes no number of ranks divides."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=bias))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained() -> dict[str, Any]:
    """Return an FSDP2 model and its optimizer after a step, and tensors sharded in other ways."""
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
    """Return the complete values of a state as integers, so that equal results mean equal bits."""
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
    """Load with the sharding of the given state, and complete on each rank."""
    expected = bits(state)
    loaded = manager.load(like=state)
    tensor, given = loaded["more"][0], state["more"][0]
    assert isinstance(tensor, DTensor)
    assert tensor.placements == given.placements
    assert bits(loaded) == expected, (bits(loaded), expected)
    assert not any(isinstance(t, DTensor) for t in manager.load()["model"].values())
    assert bits(manager.load()) == expected
    state["model"].load_state_dict(loaded["model"])
    state["optimizer"].load_state_dict(loaded["optimizer"])
    assert bits(state) == expected


def save(manager: CheckpointManager, state: dict[str, Any]) -> None:
    for step in (1, 2, 3):
        manager.save(step, state)
    manager.wait()
    assert manager.steps() == [2, 3], manager.steps()
    load(manager, state)


def fail_on_one(manager: CheckpointManager, place: GatedStorage, state: dict[str, Any]) -> str:
    """Save while the disk of one rank is full, and return the error of this rank."""
    if dist.get_rank() == 1:
        place.full = True
    manager.save(4, state)
    message = ""
    try:
        manager.wait()
    except CheckpointError as error:
        message = str(error)
    assert manager.latest() == 3
    return message


def save_and_fail(folder: Path) -> str:
    """Return the error of a save that fails on rank 1."""
    state, place = trained(), GatedStorage(folder / "checkpoints")
    place.gate.set()
    with CheckpointManager(place, keep_last=2) as manager:
        save(manager, state)
        return fail_on_one(manager, place, state)


def load_shards_of_damaged_checkpoint(folder: Path) -> str | None:
    """Load the shards of rank 0 of a checkpoint in which the part of rank 1 is damaged."""
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
            with pytest.raises(CheckpointCorruptError):
                manager.latest()
            return "damaged"
    return None


def drop_sharded_state(folder: Path) -> bool:
    """Save and restore a sharded state, drop it, and return whether its mesh is still alive."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": DTensor.from_local(torch.ones(4), mesh, [Shard(0)])}
    with CheckpointManager(folder) as manager:
        manager.save(1, state).wait()
        manager.restore(state)
    reference = weakref.ref(mesh)
    dist.destroy_process_group()
    del state, mesh
    _clear_dtensor_plans()  # torch's own caches, as in a regroup
    gc.collect()
    return reference() is not None


def load_on_one_rank(folder: Path) -> None:
    """Load on one rank a state that two ranks have saved."""
    state = trained()
    with CheckpointManager(folder / "checkpoints", keep_last=2) as manager:
        load(manager, state)
