"""Scenarios of ranks that restore together, for `test_restore_on_all_ranks.py`."""

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

from elasticlib.checkpoint.collectives import peer_group
from elasticlib.checkpoint.pack import LayoutCache, PackImage, Shards, plan_layout
from elasticlib.checkpoint.refs import DISK, Branch, StateRef
from elasticlib.checkpoint.reshard import plan_part_layout
from elasticlib.checkpoint.restore import restore_from
from elasticlib.checkpoint.state_search import RestoreAgreement, StateSource, part_numbers
from elasticlib.checkpoint.state_tree import flatten
from elasticlib.codec import from_json, to_json
from elasticlib.errors import CheckpointCorruptError, ConfigError

BRANCH = "0123abcd"


def plan_part(step: int, value: float, num_elements: int, part: int, num_parts: int) -> PackImage:
    """Plan the part of a state whose sharded tensor has the same value everywhere."""
    size = -(-num_elements // num_parts)
    begin = min(num_elements, part * size)
    shard = torch.full((min(size, num_elements - begin),), value)
    row = ["w", "float32", [num_elements], [begin], [len(shard)], [1], "cpu"]
    meta = {"step": step, "shards": [row]}
    rest = flatten({"w": None, "n": step})
    return LayoutCache().plan(
        rest, meta, Shards({("w",): shard}, [(begin,)], [""], [("w",)], has_rest=True)
    )


class PackFiles(StateSource):
    """Packs in files, each followed by its CRC-32. The file name describes the state.

    `fault` selects one failure: {"list": True}, {"read": step} or {"die": step}.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.fault: dict[str, Any] = {}

    def write(
        self, ref: StateRef, image: PackImage, part: int = 0, *, damage: bool = False
    ) -> None:
        pack = bytearray(image.size)
        image.copy_to(pack)
        checksum = zlib.crc32(pack)
        pack[-1] ^= damage
        path = self._file(ref, part)
        path.with_name(f"{path.name}.json").write_text(json.dumps(to_json(ref)))
        path.write_bytes(pack + checksum.to_bytes(4, "little"))

    def list_states(self) -> list[StateRef]:
        if self.fault.get("list"):
            raise OSError("the disk was removed")
        paths = sorted(self.path.glob("*.json"))
        refs = [from_json(StateRef, json.loads(path.read_text())) for path in paths]
        return list(dict.fromkeys(refs))

    def view(self, ref: StateRef, part: int = 0) -> memoryview:
        if self.fault.get("read") == ref.step:
            raise OSError(5, "Input/output error")
        if self.fault.get("die") == ref.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return memoryview(self._read(ref, part))[:-4]

    def check(self, ref: StateRef, part: int = 0) -> None:
        data = self._read(ref, part)
        if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise CheckpointCorruptError(f"{ref.place} is damaged")

    def _read(self, ref: StateRef, part: int) -> bytearray:
        return bytearray(self._file(ref, 0 if ref.part is not None else part).read_bytes())

    def _file(self, ref: StateRef, part: int) -> Path:
        return self.path / f"{ref.place}.{ref.part}.{ref.parts}.{ref.tier}.{part}"


class FailsToLoad:
    """An object that cannot load its state on one rank."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.loaded = fails, None

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise ValueError("not mine")
        self.loaded = state


irecv, broadcast = dist.irecv, dist.broadcast


class NoisyWork:
    """A transfer over a network that changes the last byte that arrives."""

    def __init__(self, tensor: torch.Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> None:
        self._work.wait()
        self._tensor[-1] ^= 1


def noisy_irecv(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    return NoisyWork(tensor, irecv(tensor, *args, **options))


def noisy_broadcast(tensor: torch.Tensor, source: int, **options: Any) -> Any:
    work = broadcast(tensor, source, **options)
    return work if dist.get_rank() == source else NoisyWork(tensor, work)


def describe_agreement(agreement: RestoreAgreement) -> dict[str, Any]:
    return {
        "step": agreement.step,
        "kind": agreement.base.tier if agreement.base else "",
        "holder": agreement.holder,
        "skipped": list(agreement.skipped),
    }


def write_states(source: PackFiles, run: dict[str, Any], states: list[Any]) -> None:
    """Write the states that a rank holds, each given as [step, value, options]."""
    num_elements = run.get("elements", 1000)
    for step, value, *more in states:
        options = dict(*more)
        damage = options.pop("damage", False)
        options = {"tier": DISK, "place": f"step-{step}", **options}
        ref = StateRef(BRANCH, step, line=(Branch(BRANCH),), **options)
        state = {"w": torch.full((num_elements,), value), "n": step}
        if run.get("fails_to_load"):
            state["object"] = {"a": 2}
        for part in part_numbers(ref):
            if ref.parts:
                image = plan_part(step, value, num_elements, part, ref.parts)
            else:
                image = plan_layout(state)
            source.write(ref, image, part if ref.part is None else 0, damage=damage)


def restore(rank: int, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Restore what the ranks hold.

    The keys of `run` are: holds (the states of each rank, see `write_states`), faults (by rank),
    elements (of the tensor), sharded (whether the live tensor is), names (of the live state),
    nodes (by rank), fails_to_load (a rank), noisy (whether the network changes bytes), and options
    of `restore_from`.
    """
    num_elements = run.get("elements", 1000)
    source = PackFiles(folder / str(rank))
    write_states(source, run, run["holds"][rank])
    source.fault = run.get("faults", {}).get(rank, {})
    live: dict[str, Any] = {"w": torch.zeros(num_elements), "n": 0}
    if run.get("sharded"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        live["w"] = distribute_tensor(live["w"], mesh, [Shard(0)])
    if "names" in run:
        live = {name: live.get(name, 0) for name in run["names"]}
    if run.get("fails_to_load"):
        live["object"] = FailsToLoad(rank == run["fails_to_load"])
    tensor, peak = live.get("w"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options: Any = {"node": f"node{run.get('nodes', range(9))[rank]}"}
    options |= {name: run[name] for name in ("strict", "if_unusable") if name in run}
    if run.get("noisy"):
        dist.irecv, dist.broadcast = noisy_irecv, noisy_broadcast
    agreement = restore_from([source], live, **options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    local = live["w"].to_local() if run.get("sharded") else live.get("w")
    return {
        **describe_agreement(agreement),
        "values": [] if local is None else sorted(set(local.tolist())),
        "n": live.get("n"),
        "in_place": live.get("w") is tensor,
        "peak_kib": peak,
        "received": agreement.received_bytes,
    }


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def sharded_job(world_size: int) -> dict[str, Any]:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    net = Net()
    fully_shard(net, mesh=mesh)
    # Five rows, so that the shards of the ranks differ in size.
    tensor = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    adam = torch.optim.AdamW(net.parameters(), lr=0.1)
    return {"net": net, "adam": adam, "tensor": tensor, "n": 0}


def train(job: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = job["net"](torch.arange(10.0).view(2, 5) / 10).square().sum()
        job["adam"].zero_grad()
        loss.backward()
        job["adam"].step()
        losses.append(loss.item())
    return losses


def train_and_resume(rank: int, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Train, save this rank's part, continue; then restore it in a new job and continue there.

    run: `at` has the rank whose source gets the part of each rank.
    """
    world_size = dist.get_world_size()
    job = sharded_job(world_size)
    train(job, 3)
    job["tensor"].to_local().fill_(float(rank + 1))
    job["n"] = 3
    image = plan_part_layout(LayoutCache(), 3, flatten(job), has_rest=True, has_copies=True)
    target = PackFiles(folder / str(run["at"][rank]))
    ref = StateRef(BRANCH, 3, line=(Branch(BRANCH),), tier="memory", place="a")
    target.write(attrs.evolve(ref, part=rank, parts=world_size), image)
    losses = train(job, 3)
    dist.barrier()
    resumed = sharded_job(world_size)
    agreement = restore_from([PackFiles(folder / str(rank))], resumed, node=f"n{rank}")
    local = resumed["tensor"].to_local()
    return {
        **describe_agreement(agreement),
        "same": losses == train(resumed, 3),
        "values": sorted(set(local.flatten().tolist())),
        "shape": list(local.shape),
        "n": resumed["n"],
    }


def restore_without_cpu_backend(rank: int, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Restore, and open peer groups, under a default group that transfers no CPU tensors."""
    before = dist.distributed_c10d._world.pg_map.copy()
    result = restore(rank, folder, run)
    for turn in range(3):
        with peer_group() as group:
            is_temporary = group.group is not dist.group.WORLD
            gathered = group.all_gather_json([turn, rank])
    left = dist.distributed_c10d._world.pg_map.keys() - before.keys()
    this_rank = dist.new_group([rank], backend="cuda:gloo", use_local_synchronization=True)
    other_rank = dist.new_group([1])
    errors = []
    for group in (this_rank, other_rank) if rank == 0 else (this_rank,):
        try:
            restore_from([], {}, group)
        except ConfigError as error:
            errors.append(str(error))
    more = {"temporary": is_temporary, "left": len(left), "gathered": gathered, "errors": errors}
    return {**result, **more}


def run_scenario(
    scenario: Callable[[int, Path, dict[str, Any]], dict[str, Any]],
    folder: Path,
    run: dict[str, Any],
) -> dict[str, Any]:
    """Return the result of a scenario, or the error that was raised."""
    try:
        return scenario(dist.get_rank() if dist.is_initialized() else 0, folder, run)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
