"""FSDP2 training on any number of ranks that keeps snapshots of each step, and no checkpoint.

`sharded_training.py FOLDER`. Its place says what it restored: the step, from where, and the sum of
all bits of the whole state (`bits`). After each step the first rank writes that sum to
FOLDER/bits.GENERATION.STEP. No step is taken beyond the number in FOLDER/permit. It ends with
success when FOLDER/finish is there.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from context_worker import write
from fault_worker import NAMES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elasticlib import CheckpointManager
from elasticlib.checkpoint.snapshot_source import snapshot_location


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Uneven over any number of ranks; of the last layer some have nothing."""
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


def bits(value: object) -> str:
    """The sum of the whole state, which all ranks put together."""
    summed = hashlib.sha256()

    def add(part: object) -> None:
        if isinstance(part, DTensor):
            part = part.full_tensor()
        if isinstance(part, dict):
            for key, item in part.items():
                summed.update(repr(key).encode())
                add(item)
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        else:
            summed.update(repr(part.tolist() if isinstance(part, torch.Tensor) else part).encode())

    add(value)
    return summed.hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    report = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid(), "still_running": []}
    where = snapshot_location()
    assert where is not None
    report |= {"node": os.environ["NODE"], "memory": str(Path(where.folder).parent)}
    dist.init_process_group("gloo")
    model, optimizer = made()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with CheckpointManager(folder / "no checkpoints") as manager:
        found = manager.restore(state)
        assert found.step == state["step"]
        report |= {"step": found.step, "source": found.source, "skipped": found.skipped}
        report["bits"] = bits([model.state_dict(), optimizer.state_dict()])
        generation, rank = report["ELASTICLIB_GENERATION"], dist.get_rank()
        write(folder / f"report.{generation}.{rank}.{os.getpid()}.json", report)
        for step in range(found.step + 1, 1_000_000):
            while int((folder / "permit").read_text()) < step:
                if (folder / "finish").exists():
                    return
                time.sleep(1e-2)
            train(model, optimizer, step)
            state["step"] = step
            whole = bits([model.state_dict(), optimizer.state_dict()])
            if rank == 0:
                write(folder / f"bits.{generation}.{step}", whole)
            manager.snapshot(step, state)


if __name__ == "__main__":
    main()
