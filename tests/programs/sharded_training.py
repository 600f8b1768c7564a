"""FSDP2 training on any number of ranks that keeps a snapshot of each step and saves no checkpoint.

Usage: sharded_training.py FOLDER. The worker's report contains the step that it has restored, the
source of that state, and a checksum of all bits of the whole state (`bits`). After each step, rank
0 writes this checksum to FOLDER/bits.GENERATION.STEP. The worker makes no step beyond the number in
FOLDER/permit, and exits with success when FOLDER/finish exists.
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
from elasticlib.checkpoint.snapshot_source import snapshot_folder


def create_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Create a model with uneven shards; some ranks have no elements of the last layer."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 2))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def checksum_bits(state: object) -> str:
    """Return a checksum of the whole state, gathered from all ranks."""
    checksum = hashlib.sha256()

    def add(part: object) -> None:
        if isinstance(part, DTensor):
            part = part.full_tensor()
        if isinstance(part, dict):
            for key, item in part.items():
                checksum.update(repr(key).encode())
                add(item)
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        else:
            value = part.tolist() if isinstance(part, torch.Tensor) else part
            checksum.update(repr(value).encode())

    add(state)
    return checksum.hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "still_running": []}
    attempt = snapshot_folder()
    assert attempt is not None
    report |= {"node": os.environ["NODE"], "memory": str(Path(attempt).parent)}
    dist.init_process_group("gloo")
    model, optimizer = create_model()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with CheckpointManager(folder / "no checkpoints") as manager:
        restored = manager.restore(state)
        assert restored.step == state["step"]
        report |= {"step": restored.step, "source": restored.source, "skipped": restored.skipped}
        report["bits"] = checksum_bits([model.state_dict(), optimizer.state_dict()])
        generation, rank = report["ELASTICLIB_GENERATION"], dist.get_rank()
        write_json(folder / f"report.{generation}.{rank}.{os.getpid()}.json", report)
        for step in range(restored.step + 1, 1_000_000):
            while int((folder / "permit").read_text()) < step:
                if (folder / "finish").exists():
                    return
                time.sleep(1e-2)
            train(model, optimizer, step)
            state["step"] = step
            checksum = checksum_bits([model.state_dict(), optimizer.state_dict()])
            if rank == 0:
                write_json(folder / f"bits.{generation}.{step}", checksum)
            manager.snapshot(step, state)


if __name__ == "__main__":
    main()
