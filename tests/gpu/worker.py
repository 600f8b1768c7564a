"""A worker that trains on a device: `worker.py FOLDER DEVICE BACKEND [oom | endless]`.

It restores, reports once its group has reduced a tensor of the device, trains and snapshots step by
step until FOLDER/finish is there, and saves when it is told to stop. In the first generation `oom`
asks for more memory than there is, and `endless` starts a kernel that never ends in step 12.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticlib import CheckpointManager, context

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ELASTICLIB_GENERATION")
HANGS_IN = 12


def gpu_files(pid: int | str) -> int:
    """How many files of the GPU's driver a process has open."""
    folder = Path(f"/proc/{pid}/fd")
    found = 0
    for path in folder.iterdir():
        try:
            found += os.readlink(path).startswith("/dev/nvidia")
        except OSError:
            continue
    return found


def report(folder: Path, where: torch.device, resumed: int) -> None:
    report = {name: os.environ.get(name, "") for name in NAMES} | {"pid": os.getpid()}
    # torchrun, beside which the benchmark runs this, counts restarts alone.
    generation = report["ELASTICLIB_GENERATION"] or os.environ["TORCHELASTIC_RESTART_COUNT"]
    parent = os.getppid()
    report |= {
        "node": os.environ.get("NODE", ""),
        "resumed": resumed,
        "gpu_files": gpu_files("self"),
        "parent": Path(f"/proc/{parent}/comm").read_text().strip(),
        "parents_gpu_files": gpu_files(parent),
        "processors": sorted(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
    }
    name = f"report.{generation}.{report['RANK']}.{os.getpid()}"
    (folder / f"{name}.part").write_text(json.dumps(report))
    (folder / f"{name}.part").rename(folder / f"{name}.json")


def run_endlessly(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda._sleep(1 << 62)  # cycles: a hundred years
        torch.cuda.synchronize()
    time.sleep(1e9)


class Training:
    def __init__(self, where: torch.device) -> None:
        torch.manual_seed(0)
        self.where = where
        self.model = torch.nn.Linear(64, 64).to(where)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.progress = {"step": 0}
        parts = {"model": self.model, "optimizer": self.optimizer}
        self.state = {**parts, "progress": self.progress}

    def step(self) -> int:
        self.optimizer.zero_grad()
        inputs = torch.ones(8, 64, device=self.where)
        (self.model(inputs) - inputs).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.progress["step"] += 1
        return self.progress["step"]


def train(folder: Path, where: torch.device, words: list[str], manager: CheckpointManager) -> None:
    training = Training(where)
    manager.restore(training.state)
    told = torch.zeros(1, device=where)
    dist.all_reduce(told)
    report(folder, where, training.progress["step"])
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first and "oom" in words:
        torch.empty(1 << 50, dtype=torch.uint8, device=where)
    while not told:
        step = training.step()
        if first and "endless" in words and step == HANGS_IN:
            run_endlessly(where)
        manager.snapshot(step, training.state)
        context().step(step)
        (folder / f"step.{os.environ['RANK']}").write_text(str(step))
        if context().should_stop():
            manager.save(step, training.state)
            return
        # All ranks must see the end in the same step.
        told = torch.tensor([float((folder / "finish").exists())], device=where)
        dist.all_reduce(told, dist.ReduceOp.MAX)


def main() -> None:
    folder, device, backend, *words = Path(sys.argv[1]), *sys.argv[2:]
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    dist.init_process_group(backend)
    with CheckpointManager(folder / "checkpoints", keep_last=1) as manager:
        train(folder, where, words, manager)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
