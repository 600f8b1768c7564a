"""FSDP2 training on gloo that keeps a snapshot of each step and never saves a checkpoint.

Usage: fsdp_worker.py FOLDER. The worker's report contains the step that it has restored and the
digest of the whole state at that step. The worker makes no step beyond the number in FOLDER/permit.
When the snapshot of a step is complete, it writes the digest of the state to
FOLDER/snapshot.STEP.RANK. It exits with success when FOLDER/finish exists.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from context_worker import write_json
from fault_worker import NAMES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elasticlib import CheckpointManager


def digest(state) -> str:
    """Return the digest of the whole state, gathered from all ranks."""
    checksum = hashlib.sha256()

    def add(value) -> None:
        if hasattr(value, "state_dict"):
            value = value.state_dict()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            checksum.update(value.numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                checksum.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list):
            for part in value:
                add(part)
        else:
            checksum.update(repr(value).encode())

    add(state)
    return checksum.hexdigest()


def create_state():
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "step": 0}


def train(state) -> None:
    state["step"] += 1
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(state["step"]))
    state["model"](x).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def main() -> None:
    folder = Path(sys.argv[1])
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "still_running": []}
    dist.init_process_group("gloo")
    manager = CheckpointManager(folder / "checkpoints")
    state, rank, generation = create_state(), report["RANK"], report["ELASTICLIB_GENERATION"]
    restored = manager.restore(state)
    report |= {"node": os.environ["NODE"], "restored": restored.step, "source": restored.source}
    report |= {"memory": os.path.dirname(os.environ["ELASTICLIB_SNAPSHOTS"])}
    report |= {"digest": digest(state) if restored.step else ""}
    write_json(folder / f"report.{generation}.{rank}.{os.getpid()}.json", report)
    while True:
        while int((folder / "permit").read_text()) <= state["step"]:
            if (folder / "finish").exists():
                return
            time.sleep(0.005)
        train(state)
        manager.snapshot(state["step"], state)
        write_json(folder / f"snapshot.{state['step']}.{rank}", digest(state))


if __name__ == "__main__":
    main()
