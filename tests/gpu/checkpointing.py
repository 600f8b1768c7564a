"""Checkpoints of tensors on a device, in one process: `checkpointing.py SCENARIO DEVICE`.

The program prints its results as JSON. It is a process of its own, because page-locked memory and a
CUDA context do not belong into the process that runs the tests.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elasticlib import CheckpointManager

State = dict[str, torch.Tensor]
REPEAT = 3


def create_state(mib: int, device: str) -> State:
    """Return tensors of 16 MiB on the device."""
    return {f"large.{at}": torch.randn(4 << 20, device=device) for at in range(mib // 16)}


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def copy_seconds(state: State, device: str) -> list[float]:
    """Return the seconds of copies of all tensors into existing host memory.

    The memory is page-locked if the tensors are on a GPU.
    """
    pinned = device == "cuda"
    host = {name: torch.empty_like(t, device="cpu", pin_memory=pinned) for name, t in state.items()}

    def copy() -> None:
        for name, tensor in state.items():
            host[name].copy_(tensor, non_blocking=True)
        synchronize(device)

    copy()
    return [seconds(copy) for _ in range(REPEAT)]


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    started_at = time.perf_counter()
    function()
    return time.perf_counter() - started_at


def stall(device: str, directory: Path, mib: int = 256) -> dict[str, Any]:
    """Return the seconds that training waits for `save`, and those of a plain copy."""
    state, stalls = create_state(mib, device), []
    with CheckpointManager(directory, keep_last=1) as manager:
        for step in range(1 + REPEAT):  # the first save allocates the memory of the others
            synchronize(device)
            manager.save(step, state)
            stalls.append(manager.last_stall_s)
            manager.wait()
    return {"mib": mib, "save": stalls[1:], "copy": copy_seconds(state, device)}


class ConvTraining:
    """A training of a model in channels_last format with a fused optimizer."""

    def __init__(self, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
        self.model = layers.to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.device = device

    def train(self, steps: range) -> None:
        """Train these steps. The number of a step determines its samples."""
        for step in steps:
            torch.manual_seed(step)
            images = torch.randn(4, 3, 16, 16).to(self.device, memory_format=torch.channels_last)
            self.optimizer.zero_grad()
            self.model(images).square().mean().backward()
            self.optimizer.step()

    def tensors(self) -> State:
        """Return all tensors of the model and the optimizer."""
        tensors = dict(self.model.state_dict())
        for number, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{number}.{name}": value for name, value in values.items()}
        return tensors


def fused(device: str, directory: Path) -> dict[str, Any]:
    """Compare a training that continues with one that continues from its checkpoint."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    original, restored = ConvTraining(device, 0), ConvTraining(device, 1)
    original.train(range(3))
    restored.train(range(1))  # afterwards, its optimizer has a state that `restore` replaces
    with CheckpointManager(directory, keep_last=1) as manager:
        manager.save(3, original.state)
        manager.wait()
        manager.restore(restored.state)
    for training in (original, restored):
        training.train(range(3, 6))
    tensors = restored.tensors()
    pairs = [(value, tensors[name]) for name, value in original.tensors().items()]
    return {
        "tensors": len(pairs),
        "values_equal": all(torch.equal(a, b) for a, b in pairs),
        "devices_equal": all(a.device == b.device for a, b in pairs),
        "strides_equal": all(a.stride() == b.stride() for a, b in pairs),
    }


def memory(device: str, directory: Path) -> dict[str, Any]:
    """Return the bytes by which the memory of the device grows during and after a restore."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 2048, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(directory, keep_last=1) as manager:
        manager.save(1, state)
        manager.wait()
        synchronize(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        manager.restore(state)
        synchronize(device)
    return {
        "state": 3 * sum(p.nbytes for p in model.parameters()),
        "peak_growth": torch.cuda.max_memory_allocated() - before,
        "final_growth": torch.cuda.memory_allocated() - before,
    }


SCENARIOS = {scenario.__name__: scenario for scenario in (stall, fused, memory)}


def main() -> None:
    scenario, device = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(SCENARIOS[scenario](device, Path(directory))))


if __name__ == "__main__":
    main()
