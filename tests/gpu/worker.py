"""A worker that trains on a device: `worker.py DIR DEVICE BACKEND [oom | endless]`.

It restores, and writes a report after its process group has reduced a tensor of the device. Then it
trains and makes a snapshot of each step, until DIR/finish exists. If the agent requests a stop, it
saves a checkpoint.
In the first generation, `oom` allocates more memory than the device has, and `endless` starts a
kernel that never ends in step 12.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticlib import CheckpointManager, context

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ELASTICLIB_GENERATION"),
)
ENDLESS_STEP = 12


def count_gpu_files(pid: int | str) -> int:
    """Return how many files of the GPU driver a process has open."""
    count = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += os.readlink(path).startswith("/dev/nvidia")
        except OSError:
            continue
    return count


def write_report(directory: Path, device: torch.device, step: int) -> None:
    """Write the report of this rank, which is complete once the file has its name."""
    report = {name: os.environ.get(name, "") for name in VARIABLES} | {"pid": os.getpid()}
    # torchrun, with which the benchmark compares elasticrun, only counts restarts.
    generation = report["ELASTICLIB_GENERATION"] or os.environ["TORCHELASTIC_RESTART_COUNT"]
    parent = os.getppid()
    report |= {
        "node": os.environ.get("NODE", ""),
        "resumed": step,
        "gpu_files": count_gpu_files("self"),
        "parent": Path(f"/proc/{parent}/comm").read_text().strip(),
        "parents_gpu_files": count_gpu_files(parent),
        "processors": sorted(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    name = f"report.{generation}.{report['RANK']}.{os.getpid()}"
    (directory / f"{name}.part").write_text(json.dumps(report))
    (directory / f"{name}.part").rename(directory / f"{name}.json")


def run_endless_kernel(device: torch.device) -> None:
    """Never return."""
    if device.type == "cuda":
        torch.cuda._sleep(1 << 62)  # this number of cycles takes a hundred years
        torch.cuda.synchronize()
    time.sleep(1e9)


class Training:
    """A small model whose gradients are summed over all ranks."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = torch.nn.Linear(64, 64).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.progress = {"step": 0}
        parts = {"model": self.model, "optimizer": self.optimizer}
        self.state = {**parts, "progress": self.progress}

    def step(self) -> int:
        """Train one step; return its number."""
        self.optimizer.zero_grad()
        inputs = torch.ones(8, 64, device=self.device)
        (self.model(inputs) - inputs).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.progress["step"] += 1
        return self.progress["step"]


def train(
    directory: Path, device: torch.device, options: list[str], manager: CheckpointManager
) -> None:
    """Train until DIR/finish exists, or until the agent requests a stop."""
    training = Training(device)
    manager.restore(training.state)
    is_finished = torch.zeros(1, device=device)
    dist.all_reduce(is_finished)
    write_report(directory, device, training.progress["step"])
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if is_first and "oom" in options:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    while not is_finished:
        step = training.step()
        if is_first and "endless" in options and step == ENDLESS_STEP:
            run_endless_kernel(device)
        manager.snapshot(step, training.state)
        context().step(step)
        (directory / f"step.{os.environ['RANK']}").write_text(str(step))
        if context().should_stop():
            manager.save(step, training.state)
            return
        # All ranks must finish in the same step.
        is_finished = torch.tensor([float((directory / "finish").exists())], device=device)
        dist.all_reduce(is_finished, dist.ReduceOp.MAX)


def main() -> None:
    directory, name, backend, *options = Path(sys.argv[1]), *sys.argv[2:]
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    dist.init_process_group(backend)
    with CheckpointManager(directory / "checkpoints", keep_last=1) as manager:
        train(directory, device, options, manager)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
