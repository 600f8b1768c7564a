"""What a checkpoint does with tensors of a device, as one process: `checkpointing.py SCENE DEVICE`.

It prints what it found as JSON. A process of its own, as page-locked memory and a CUDA context are
not for the process that runs the tests.
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


def state_of(mib: int, device: str) -> State:
    return {f"large.{at}": torch.randn(4 << 20, device=device) for at in range(mib // 16)}


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def link_seconds(state: State, device: str) -> list[float]:
    """Copies of all tensors into memory that is reused, and page-locked where that helps."""
    pinned = device == "cuda"
    host = {name: torch.empty_like(t, device="cpu", pin_memory=pinned) for name, t in state.items()}

    def copy() -> None:
        for name, tensor in state.items():
            host[name].copy_(tensor, non_blocking=True)
        wait_for(device)

    copy()
    return [seconds(copy) for _ in range(REPEAT)]


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def stall(device: str, folder: Path, mib: int = 256) -> dict[str, Any]:
    """How long a step waits for `save`, beside a plain copy of the same bytes; seconds."""
    state, stalls = state_of(mib, device), []
    with CheckpointManager(folder, keep_last=1) as manager:
        for step in range(1 + REPEAT):  # the first makes the memory that the others use
            wait_for(device)
            manager.save(step, state)
            stalls.append(manager.last_stall_s)
            manager.wait()
    return {"mib": mib, "save": stalls[1:], "link": link_seconds(state, device)}


class Conv:
    """A model in channels_last with a fused optimizer, and what it comes to."""

    def __init__(self, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
        self.model = layers.to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.device = device

    def train(self, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            images = torch.randn(4, 3, 16, 16).to(self.device, memory_format=torch.channels_last)
            self.optimizer.zero_grad()
            self.model(images).square().mean().backward()
            self.optimizer.step()

    def tensors(self) -> State:
        found = dict(self.model.state_dict())
        for number, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": value for name, value in kept.items()}
        return found


def fused(device: str, folder: Path) -> dict[str, Any]:
    """Whether training goes on bit by bit after a restore, in the same shapes and places."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    one, other = Conv(device, 0), Conv(device, 1)
    one.train(range(3))
    other.train(range(1))  # its optimizer has a state of its own by then
    with CheckpointManager(folder, keep_last=1) as manager:
        manager.save(3, one.state)
        manager.wait()
        manager.restore(other.state)
    for conv in (one, other):
        conv.train(range(3, 6))
    pairs = [(value, other.tensors()[name]) for name, value in one.tensors().items()]
    return {
        "tensors": len(pairs),
        "same": all(torch.equal(a, b) for a, b in pairs),
        "places": all(a.device == b.device for a, b in pairs),
        "strides": all(a.stride() == b.stride() for a, b in pairs),
    }


def memory(device: str, folder: Path) -> dict[str, Any]:
    """By how many bytes the device's memory grows at most while a state is restored."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 2048, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(folder, keep_last=1) as manager:
        manager.save(1, state)
        manager.wait()
        wait_for(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        manager.restore(state)
        wait_for(device)
    return {
        "state": 3 * sum(p.nbytes for p in model.parameters()),
        "growth": torch.cuda.max_memory_allocated() - before,
        "kept": torch.cuda.memory_allocated() - before,
    }


SCENES = {scene.__name__: scene for scene in (stall, fused, memory)}


def main() -> None:
    scene, device = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(SCENES[scene](device, Path(folder))))


if __name__ == "__main__":
    main()
