"""Scenarios of ranks with sharded snapshots in agent memory, for `test_sharded_memory.py`."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharding import bits, sharded_layers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elasticlib import CheckpointManager
from elasticlib.checkpoint.restore import DiskSource, restore_from
from elasticlib.errors import CheckpointError, StateMismatchError

MeshSizes = tuple[int, ...]
"""Sizes of a mesh. If there are two, the first dimension replicates and the second shards."""


def make_state(sizes: MeshSizes, *, fresh: bool) -> dict[str, Any]:
    """Return a state with FSDP2 or HSDP, other sharded tensors, and a value of each rank.

    No tensor can be divided evenly, and some ranks have no elements of some tensors.
    """
    torch.manual_seed(5 if fresh else 3)
    names = ("copies", "shards")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = sharded_layers(mesh, bias=False)
    copies = [Replicate()] * (len(sizes) - 1)
    full = torch.zeros(3, 5) if fresh else torch.arange(15.0).view(3, 5)
    state = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
        "columns": [distribute_tensor(full, mesh, [*copies, Shard(1)])],
        "same": distribute_tensor(full.sum(), mesh, [Replicate()] * len(sizes)),
        "number": -1 if fresh else 7,
    }
    if not fresh:
        for at in range(2):
            model(torch.full((2, 5), at / 3)).sum().backward()
            state["optimizer"].step()
    return state


def all_bits(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(bits([*state.values()])))


def manager_on_node(folder: Path, node: int, attempt: int) -> CheckpointManager:
    """Return a manager as the worker of an agent creates it."""
    memory = folder / f"node{node}" / str(attempt)
    memory.mkdir(parents=True)
    os.environ.update(ELASTICLIB_SNAPSHOTS=str(memory), ELASTICLIB_GENERATION=str(attempt))
    os.environ["ELASTICLIB_INCARNATION"] = "launch"
    return CheckpointManager(folder / "empty")


def snapshot(folder: Path, sizes: MeshSizes) -> None:
    """Take a snapshot of step 4. Each rank is on a node of its own."""
    state = make_state(sizes, fresh=False)
    with manager_on_node(folder, dist.get_rank(), 1) as manager:
        assert manager.snapshot(4, state)
    expected = all_bits(state)
    if dist.get_rank() == 0:
        (folder / "bits").write_text(json.dumps(expected))


def restore(folder: Path, sizes: MeshSizes, nodes: list[int]) -> dict[str, Any]:
    """Restore on ranks that are on these nodes."""
    state = make_state(sizes, fresh=True)
    before = all_bits(state)
    with manager_on_node(folder, nodes[dist.get_rank()], 2) as manager:
        result = manager.restore(state)
        source = manager._snapshots
        assert source is not None
        parts = sorted((s.step, s.part, s.parts) for s in source.list_states())
    now = all_bits(state)
    return {
        "step": result.step,
        "source": result.source,
        "skipped": result.skipped,
        "right": now == json.loads((folder / "bits").read_text()),
        "unchanged": now == before,
        "parts": parts,
    }


def restore_part_and_later_all(folder: Path, sizes: MeshSizes, nodes: list[int]) -> dict[str, Any]:
    """Restore one value of the state, restart, and restore the complete state."""
    state = make_state(sizes, fresh=True)
    node = nodes[dist.get_rank()]
    with manager_on_node(folder, node, 2) as manager:
        part = manager.restore({"number": -1}, strict=False)
        part_snapshots = sorted(path.name for path in (folder / f"node{node}" / "2").iterdir())
    dist.barrier()
    with manager_on_node(folder, node, 3) as manager:
        result = manager.restore(state)
    expected = json.loads((folder / "bits").read_text())
    return {
        "steps": (part.step, result.step),
        "kept": part_snapshots,
        "right": all_bits(state) == expected,
    }


# -- tensors of one name in two pipeline stages ----------------------------------------------------


def snapshot_stages(folder: Path) -> None:
    with manager_on_node(folder, dist.get_rank(), 1) as manager:
        assert manager.snapshot(4, make_stage(float(dist.get_rank() // 2)))


def make_stage(value: float, *, other: str = "") -> dict[str, Any]:
    """Return a stage of a pipeline. `other` is what its tensor has of its own: "name" or "size"."""
    stage = dist.get_rank() // 2
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "dp"))
    full = torch.full((4 + 2 * stage if other == "size" else 4,), value)
    name = f"w{stage}" if other == "name" else "w"
    return {"w": {name: distribute_tensor(full, mesh["dp"], [Shard(0)])}}


def save_stages(folder: Path, other: str) -> str:
    """Save the stages of a pipeline on disk, and return the error of loading them."""
    state = make_stage(float(dist.get_rank() // 2), other=other)
    with CheckpointManager(folder) as manager:
        manager.save(1, state).wait()
        try:
            manager.load()
        except StateMismatchError as error:
            return str(error)
    return ""


def restore_saved_stages(folder: Path, other: str) -> tuple[list[float], str]:
    """Return the values of this rank, and the error of restoring them."""
    state, message = make_stage(-1.0, other=other), ""
    with CheckpointManager(folder) as manager:
        try:
            manager.restore(state)
        except (CheckpointError, StateMismatchError) as error:
            message = str(error)
    [tensor] = state["w"].values()
    return sorted(set(tensor.to_local().tolist())), message


def restore_stages(folder: Path, nodes: list[int], attempt: int) -> dict[str, Any]:
    state, step, skipped, error = make_stage(-1.0), 0, (), ""
    with manager_on_node(folder, nodes[dist.get_rank()], attempt) as manager:
        try:
            result = manager.restore(state)
            step, skipped = result.step, result.skipped
        except (CheckpointError, StateMismatchError) as mismatch:
            error = str(mismatch)
    values = state["w"]["w"].to_local().tolist()
    return {"step": step, "skipped": skipped, "values": values, "error": error}


# -- memory and transfers --------------------------------------------------------------------------

ROWS, COLUMNS = 4096, 4096  # 64 MiB
NUM_TENSORS = 3
LARGE_STATE_BYTES = ROWS * COLUMNS * 4 * NUM_TENSORS


def make_large(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for number in range(NUM_TENSORS):
        size, axis = [ROWS, COLUMNS], number % 2
        size[axis] //= mesh.size()
        local = torch.full(size, value + number)
        state[f"t{number}"] = DTensor.from_local(local, mesh, [Shard(axis)], run_check=False)
    return state


def store_large(folder: Path, disk: bool) -> None:
    """Save a large state to disk, or take a snapshot of it."""
    with manager_on_node(folder, dist.get_rank(), 1) as manager:
        state = make_large(1.0)
        if disk:
            manager.save(4, state)
        else:
            assert manager.snapshot(4, state)


class PeakMemory:
    """The maximum of the private memory of this process while the context is active, in bytes."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = private_bytes()
        self._is_finished = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_finished.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_finished.wait(0.001):
            self.peak = max(self.peak, private_bytes())


def private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not report anonymous memory")


def restore_large(folder: Path, nodes: list[int]) -> tuple[int, int]:
    """Return the peak of private memory in addition to the state, and the bytes received."""
    with manager_on_node(folder, nodes[dist.get_rank()], 2) as manager:
        state = make_large(0.0)
        addresses = [tensor.to_local().data_ptr() for tensor in state.values()]
        memory, disk = manager._snapshots, DiskSource(manager._catalog)
        assert memory is not None
        with PeakMemory() as usage:
            agreement = restore_from([memory, disk], state, node=str(nodes[dist.get_rank()]))
        assert agreement.step == 4
        for number, tensor in enumerate(state.values()):
            assert bool((tensor.to_local() == 1.0 + number).all())
        assert [tensor.to_local().data_ptr() for tensor in state.values()] == addresses
    return usage.peak - usage.before, agreement.received_bytes
