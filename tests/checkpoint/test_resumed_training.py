"""Training that resumes from saved state is bitwise equal to training without interruption.

Weights and optimizer state are compared with their strides, on which fused kernels depend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import open_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from elasticlib import CheckpointManager, load_checkpoint, save_checkpoint
from elasticlib.checkpoint import snapshot_slots
from elasticlib.checkpoint.restore import restore_from
from elasticlib.checkpoint.snapshot_slots import SnapshotSlots
from elasticlib.checkpoint.tensor_layout import StridedLayout

OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]
MORE: dict[type, dict[str, Any]] = {
    torch.optim.SGD: {"momentum": 0.9, "lr": 0.1},
    torch.optim.RMSprop: {"momentum": 0.9, "centered": True},
    torch.optim.Adam: {"amsgrad": True},
}
FUSED_ON_THE_CPU = {
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad),
}


def cases() -> list[Any]:
    parameters = []
    for kind in OPTIMIZERS:
        accepted = inspect.signature(kind).parameters
        modes: dict[str, dict[str, bool]] = {"plain": {}}
        if "foreach" in accepted:
            modes = {"plain": {"foreach": False}, "foreach": {"foreach": True}}
        if kind in FUSED_ON_THE_CPU:
            modes["fused"] = {"fused": True}
        parameters += [pytest.param(kind, modes[m], id=f"{kind.__name__}-{m}") for m in modes]
    return parameters


class Training:
    """A training of parameters with every kind of memory layout."""

    def __init__(self, kind: type, options: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = [
            torch.randn(3, 4, generator=generator),
            torch.randn(4, 3, generator=generator).t(),
            torch.randn(1, 5, generator=generator).as_strided((1, 5), (1, 1)),
        ]
        if kind in (
            torch.optim.SparseAdam,
            torch.optim.LBFGS,
        ):  # These optimizers accept contiguous parameters only.
            del weights[1:]
        elif kind.__name__ != "Muon":  # Muon accepts matrices only.
            image = torch.randn(2, 3, 4, 5, generator=generator)
            weights.append(image.to(memory_format=torch.channels_last))
            weights.append(torch.randn(2, 3, 4, generator=generator).permute(1, 2, 0))
            weights.append(torch.randn((), generator=generator))
        self.model = torch.nn.ParameterList(torch.nn.Parameter(weight) for weight in weights)
        self.sparse = kind is torch.optim.SparseAdam
        more = MORE.get(kind, {})
        self.optimizer = kind(self.model.parameters(), **more, **options)
        self.state = {"model": self.model, "optimizer": self.optimizer, "free": [torch.ones(1)]}

    def train(self, steps: int, *, expanded: bool = False) -> Training:
        for step in range(steps):
            self.optimizer.step(self.compute_gradients)
            if expanded and not step:
                # The script adds values of its own to the state of the optimizer.
                for number, weight in enumerate(self.model):
                    mean = torch.tensor(float(number)).expand_as(weight)
                    self.optimizer.state[weight]["mean"] = mean
                ramp = torch.arange(4.0)
                self.state["free"] = [ramp.expand(3, 4), ramp[1:3], ramp[::2]]
        return self

    def compute_gradients(self) -> float:
        for number, weight in enumerate(self.model):
            grad = torch.empty_like(weight).copy_(weight.detach() * 0.3 + number + 1)
            weight.grad = grad.to_sparse() if self.sparse else grad
        return float(sum((weight.detach() ** 2).sum() for weight in self.model))


def flatten(value: Any) -> Iterator[Any]:
    """Yield the strides and bits of all tensors of a state, and all other values."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from flatten(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)
    elif isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        yield StridedLayout.of(value).densified(), bits
    else:
        yield value


def restore_from_save(folder: Path, saved: Training, new: Training) -> None:
    with CheckpointManager(folder) as manager:
        manager.save(1, saved.state)
    with CheckpointManager(folder) as manager:
        assert manager.restore(new.state).step == 1


def load_save(folder: Path, saved: Training, new: Training) -> None:
    with CheckpointManager(folder) as manager:
        manager.save(1, saved.state)
    load_into(new, CheckpointManager(folder).load(map_location=None))


def restore_from_snapshot(folder: Path, saved: Training, new: Training) -> None:
    memory = open_memory(folder)
    memory.snapshot(1, saved.state)
    assert restore_from([memory], new.state).step == 1
    memory.close()


def restore_from_replica(folder: Path, saved: Training, new: Training) -> None:
    """Restore from a replica, which has only the bytes of the snapshot."""
    memory, other = open_memory(folder / "one"), open_memory(folder / "other")
    memory.snapshot(1, saved.state)
    replicas = SnapshotSlots(folder / "other" / "1", "a-node")
    (snapshot,) = snapshot_slots.list_snapshots(folder / "one")
    with snapshot_slots.map_snapshot(folder / "one", snapshot) as pack:
        assert pack is not None
        with replicas.open_for_writing(snapshot) as view:
            view[:] = pack
    assert restore_from([other], new.state).step == 1
    for one in (memory, other, replicas):
        one.close()


def load_file(folder: Path, saved: Training, new: Training) -> None:
    state = {"free": saved.state["free"]}
    for name in ("model", "optimizer"):
        state[name] = saved.state[name].state_dict()  # type: ignore[attr-defined]
    save_checkpoint(folder / "a.pt", state)
    load_into(new, load_checkpoint(folder / "a.pt"))


def load_into(new: Training, loaded: Any) -> None:
    new.model.load_state_dict(loaded["model"])
    new.optimizer.load_state_dict(loaded["optimizer"])
    new.state["free"] = loaded["free"]


RESTORES: list[Callable[[Path, Training, Training], None]] = [
    *(restore_from_save, load_save, restore_from_snapshot, restore_from_replica, load_file),
]


@pytest.mark.parametrize(("kind", "options"), cases())
def test_interrupted_training_is_bitwise_equal_to_uninterrupted_training(
    tmp_path: Path, kind: type, options: dict[str, Any]
) -> None:
    expected = list(flatten(Training(kind, options).train(4, expanded=True).state))
    for restore in RESTORES:
        (tmp_path / restore.__name__).mkdir()
        interrupted = Training(kind, options).train(2, expanded=True)
        new = Training(kind, options)
        if restore is not load_save and restore is not load_file:
            new.state["free"] = None  # The saved list replaces it, and is not copied into it.
        restore(tmp_path / restore.__name__, interrupted, new)
        assert list(flatten(new.state)) == list(flatten(interrupted.state)), restore.__name__
        assert list(flatten(new.train(2).state)) == expected, restore.__name__


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_local_shards_keep_their_strides(tmp_path: Path, mesh: Any) -> None:
    turned = torch.arange(12.0).view(3, 4).t()
    state = {"t": DTensor.from_local(turned, mesh, [Shard(0)], run_check=False)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.wait()
        assert manager.load()["t"].stride() == (1, 4)
        again = manager.load(like=state)["t"]
    assert again.to_local().stride() == (1, 4)
    assert torch.equal(manager.load()["t"], turned)
    memory = open_memory(tmp_path / "memory")
    memory.snapshot(1, state)
    like = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)], run_check=False)
    new: dict[str, Any] = {"t": like}
    assert restore_from([memory], new).step == 1
    assert torch.equal(new["t"].to_local(), turned)
    memory.close()
