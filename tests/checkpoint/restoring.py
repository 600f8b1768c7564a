"""What ranks do that restore together, from packs in folders of their own: see test_agree."""

from __future__ import annotations

import json
import os
import resource
import signal
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from elasticlib.checkpoint import peers
from elasticlib.checkpoint.pack import LayoutCache, PackImage, Shards, plan_layout
from elasticlib.checkpoint.peers import Held, Source, peers_of
from elasticlib.checkpoint.restore import restore_from
from elasticlib.checkpoint.sharded import plan_part_layout
from elasticlib.checkpoint.state_tree import flatten
from elasticlib.errors import CheckpointCorrupt, ConfigError


def packed(image: PackImage) -> bytearray:
    memory = bytearray(image.size)
    image.copy_to(memory)
    return memory


def a_part(step: int, value: float, elements: int, part: int, parts: int) -> PackImage:
    """Plan the part of a state whose sharded tensor has the same value everywhere."""
    size = -(-elements // parts)
    begin = min(elements, part * size)
    shard = torch.full((min(size, elements - begin),), value)
    chunk = ["w", "float32", [elements], [begin], [len(shard)], [1], "cpu"]
    meta = {"step": step, "chunks": [chunk], "whole": True}
    rest = flatten({"w": None, "n": step})
    return LayoutCache().plan(rest, meta, Shards({("w",): shard}, [("w",)], has_rest=True))


class Folder(Source):
    """Packs in files, each with its CRC-32 behind it, and what is said of it in its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.fault: dict[str, Any] = {}

    def write(self, held: Held, layout: PackImage, part: int = 0, *, damage: bool = False) -> None:
        memory = packed(layout)
        summed = zlib.crc32(memory)
        memory[-1] ^= damage
        name = json.dumps([part, *attrs.astuple(held)])
        (self.path / name).write_bytes(memory + summed.to_bytes(4, "little"))

    def held(self) -> list[Held]:
        if self.fault.get("held"):
            raise OSError("the disk is gone")
        return [*{Held(*json.loads(name)[1:]) for name in os.listdir(self.path)}]

    def view(self, held: Held, part: int = 0) -> memoryview:
        if self.fault.get("read") == held.step:
            raise OSError(5, "Input/output error")
        if self.fault.get("die") == held.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return memoryview(self._data(held, part))[:-4]

    def check(self, held: Held, part: int = 0) -> None:
        data = self._data(held, part)
        if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise CheckpointCorrupt(f"{held.name} is damaged")

    def _data(self, held: Held, part: int) -> bytearray:
        part = part if held.kind == "sharded disk" else 0
        return bytearray((self.path / json.dumps([part, *attrs.astuple(held)])).read_bytes())


class Fragile:
    """An object whose state one rank cannot load."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.loaded = fails, None

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise ValueError("not mine")
        self.loaded = state


class Noisy:
    """What is received over a wire that changes the last byte."""

    def __init__(self, tensor: torch.Tensor, *more: Any, **options: Any) -> None:
        self._tensor, self._work = tensor, irecv(tensor, *more, **options)

    def wait(self) -> None:
        self._work.wait()
        self._tensor[-1] ^= 1


irecv = dist.irecv


def about(restored: Any) -> dict[str, Any]:
    return {
        "step": restored.step,
        "kind": restored.kind,
        "holder": restored.holder,
        "passed_over": list(restored.passed_over),
    }


def restore(rank: int, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """holds: for each rank [step, value, what else]; faults: for each rank, what fails."""
    elements = run.get("elements", 1000)
    source = Folder(folder / str(rank))
    for step, value, *more in run["holds"][rank]:
        options = dict(*more)
        damage = options.pop("damage", False)
        held = Held(step, options.pop("kind", "disk"), f"step-{step}", **options)
        state = {"w": torch.full((elements,), value), "n": step}
        if run.get("fragile"):
            state["fragile"] = {"a": 2}
        for part in held.has:
            line = (step, value, elements, part, held.parts)
            layout = a_part(*line) if held.parts else plan_layout(state)
            source.write(held, layout, part * (len(held.has) > 1), damage=damage)
    source.fault = run.get("faults", {}).get(rank, {})
    own: dict[str, Any] = {"w": torch.zeros(elements), "n": 0}
    if run.get("sharded"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own["w"] = distribute_tensor(own["w"], mesh, [Shard(0)])
    if "names" in run:
        own = {name: own.get(name, 0) for name in run["names"]}
    if run.get("fragile"):
        own["fragile"] = Fragile(rank == run["fragile"])
    before = own.get("w"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = {"node": f"node{run.get('nodes', range(9))[rank]}"}
    options |= {name: run[name] for name in ("strict", "if_unusable") if name in run}
    if run.get("noisy"):
        dist.irecv = Noisy
    peers.CHUNK_BYTES = run.get("chunk", 1 << 20)
    restored = restore_from([source], own, **options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1]
    local = own["w"].to_local() if run.get("sharded") else own.get("w")
    values = [] if local is None else sorted(set(local.tolist()))
    still = own.get("w") is before[0]
    found = {"values": values, "n": own.get("n"), "in_place": still, "peak_kib": peak}
    return {**about(restored), **found, "received": restored.received}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def sharded_job(world: int) -> dict[str, Any]:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    net = Net()
    fully_shard(net, mesh=mesh)
    # A tensor of five rows, so that the ranks' shares differ in size.
    bare = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    return {"net": net, "adam": torch.optim.AdamW(net.parameters(), lr=0.1), "bare": bare, "n": 0}


def train(job: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = job["net"](torch.arange(10.0).view(2, 5) / 10).square().sum()
        job["adam"].zero_grad()
        loss.backward()
        job["adam"].step()
        losses.append(loss.item())
    return losses


def sharded(rank: int, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Train, keep this rank's part, train on; then the same again from what a new job restores.
    at: where part `rank` is kept, by rank."""
    world = dist.get_world_size()
    job = sharded_job(world)
    losses = train(job, 3)
    job["bare"].to_local().fill_(float(rank + 1))
    job["n"] = 3
    keeper = Folder(folder / str(run["at"][rank]))
    part = plan_part_layout(LayoutCache(), 3, flatten(job), has_rest=True, has_copies=True)
    keeper.write(Held(3, "memory", "a", rank, world), part)
    losses = train(job, 3)
    dist.barrier()
    again = sharded_job(world)
    restored = restore_from([Folder(folder / str(rank))], again, node=f"n{rank}")
    bare = again["bare"].to_local()
    return {
        **about(restored),
        "same": losses == train(again, 3),
        "bare": sorted(set(bare.flatten().tolist())),
        "shape": list(bare.shape),
        "n": again["n"],
    }


def own_group(rank: int, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Under a default group that moves no CPU tensors, more than once."""
    before = dist.distributed_c10d._world.pg_map.copy()
    found = restore(rank, folder, run)
    for turn in range(3):
        with peers_of() as every:
            other = every.group is not dist.group.WORLD
            told = [word["turn"] for word in every.words({"turn": [turn, rank]})]
    left = dist.distributed_c10d._world.pg_map.keys() - before.keys()
    alone = dist.new_group([rank], backend="cuda:gloo", use_local_synchronization=True)
    others = dist.new_group([1])
    refused = []
    for group in (alone, others) if rank == 0 else (alone,):
        try:
            restore_from([], {}, group)
        except ConfigError as error:
            refused.append(str(error))
    return {**found, "other": other, "left": len(left), "told": told, "refused": refused}


def found_by(
    scenario: Callable[[int, Path, dict[str, Any]], dict[str, Any]],
    folder: Path,
    run: dict[str, Any],
) -> dict[str, Any]:
    """What a rank finds, or the error that it is told."""
    try:
        return scenario(dist.get_rank() if dist.is_initialized() else 0, folder, run)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
