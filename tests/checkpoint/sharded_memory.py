"""What ranks do whose sharded state is in the memory of agents: see test_sharded_memory."""

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

Mesh = tuple[int, ...]
"""Its sizes: of two, the first holds copies and the second shards."""


def job(sizes: Mesh, *, fresh: bool) -> dict[str, Any]:
    """FSDP2, or HSDP, over this mesh, with tensors sharded in other ways; and what is each rank's
    own. Uneven everywhere, and some ranks have nothing of some tensors."""
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
        "own": -1 if fresh else dist.get_rank(),
    }
    if not fresh:
        for at in range(2):
            model(torch.full((2, 5), at / 3)).sum().backward()
            state["optimizer"].step()
    return state


def shared(state: dict[str, Any]) -> Any:
    """All bits of what all ranks share."""
    return json.loads(json.dumps(bits([state[name] for name in state if name != "own"])))


def on_node(folder: Path, node: int, era: int) -> CheckpointManager:
    """A manager as an agent's worker makes it on this node, in this start of its workers."""
    memory = folder / f"node{node}" / str(era)
    memory.mkdir(parents=True)
    os.environ.update(ELASTICLIB_SNAPSHOTS=str(memory), ELASTICLIB_GENERATION=str(era))
    return CheckpointManager(folder / "empty")


def keep(folder: Path, sizes: Mesh) -> None:
    """Each rank is a node of its own."""
    state = job(sizes, fresh=False)
    with on_node(folder, dist.get_rank(), 1) as manager:
        assert manager.snapshot(4, state)
    whole = shared(state)
    if dist.get_rank() == 0:
        (folder / "bits").write_text(json.dumps(whole))


def go_on(folder: Path, sizes: Mesh, nodes: list[int]) -> dict[str, Any]:
    """nodes: where each rank is, in order."""
    state = job(sizes, fresh=True)
    before = shared(state)
    with on_node(folder, nodes[dist.get_rank()], 2) as manager:
        found = manager.restore(state)
        held = manager._snapshots
        assert held is not None
        parts = sorted((one.step, one.part, one.parts) for one in held.held())
    now = shared(state)
    return {
        "step": found.step,
        "source": found.source,
        "passed_over": found.passed_over,
        "right": now == json.loads((folder / "bits").read_text()),
        "unchanged": now == before,
        "own": state["own"],
        "parts": parts,
    }


# -- one name for a tensor of each stage of a pipeline --------------------------------------------


def keep_stages(folder: Path) -> None:
    with on_node(folder, dist.get_rank(), 1) as manager:
        assert manager.snapshot(4, stages(float(dist.get_rank() // 2)))


def stages(value: float) -> dict[str, Any]:
    whole = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "dp"))
    return {"w": distribute_tensor(torch.full((4,), value), whole["dp"], [Shard(0)])}


def go_on_with_stages(folder: Path, nodes: list[int], era: int) -> dict[str, Any]:
    state = stages(-1.0)
    with on_node(folder, nodes[dist.get_rank()], era) as manager:
        found = manager.restore(state)
    return {
        "step": found.step,
        "passed_over": found.passed_over,
        "values": state["w"].to_local().tolist(),
    }


# -- what it costs --------------------------------------------------------------------------------

ROWS, COLUMNS = 4096, 4096  # 64 MiB
TENSORS = 3


def large(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for at in range(TENSORS):
        size = [ROWS, COLUMNS]
        size[at % 2] //= mesh.size()
        local = torch.full(size, value + at)
        state[f"t{at}"] = DTensor.from_local(local, mesh, [Shard(at % 2)], run_check=False)
    return state


def keep_large(folder: Path, disk: bool) -> None:
    with on_node(folder, dist.get_rank(), 1) as manager:
        state = large(1.0)
        if disk:
            manager.save(4, state)
        else:
            assert manager.snapshot(4, state)


class Peak:
    """How much private memory a process has taken at most beside what it had."""

    def __enter__(self) -> Peak:
        self.before = self.peak = _anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.peak = max(self.peak, _anonymous())


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not tell of anonymous memory")


def go_on_with_large(folder: Path, nodes: list[int]) -> tuple[int, int]:
    """The most bytes of private memory beside the state, and those that were received."""
    with on_node(folder, nodes[dist.get_rank()], 2) as manager:
        state = large(0.0)
        memories = [shard.to_local().data_ptr() for shard in state.values()]
        held, disk = manager._snapshots, DiskSource(manager._catalog)
        assert held is not None
        with Peak() as memory:
            found = restore_from([held, disk], state, node=str(nodes[dist.get_rank()]))
        assert found.step == 4
        for at, shard in enumerate(state.values()):
            assert bool((shard.to_local() == 1.0 + at).all())
        assert [shard.to_local().data_ptr() for shard in state.values()] == memories
    return memory.peak - memory.before, found.received
