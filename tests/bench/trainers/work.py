"""The training that all launchers of compare_launchers.py run, without code of any launcher.

A step sleeps for 45 ms, which stands for the work of a GPU. Then it computes the gradients of a
small model and their mean over the workers, and makes a step of SGD with momentum. The number of a
step determines its batch, so a repeated step is the same step. A batch has two parts, one for each
of two workers. A worker that computes both parts takes twice as long. Model and optimizer have
2 MiB.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

STEP_SLEEP_S = 0.045  # for one part of a batch
PART_SAMPLES = 16  # in one part of a batch
# The environment variable with the start delay of a worker in seconds. The delay stands for a GPU
# context, the loading of weights, compiled graphs and data loaders.
START_DELAY = "BENCH_START_DELAY_S"
# Steps between two checkpoints. By Young's formula, the best interval is the square root of twice
# the cost of a checkpoint (2 ms) times the time between faults (10 s): 0.2 s, which is four steps.
SAVE_EVERY = 4
RARE_SAVE_EVERY = 200  # steps between two checkpoints that only serve the loss of the machine


def create_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Wait for the start delay, and return the model and its optimizer."""
    time.sleep(float(os.environ.get(START_DELAY, "0")))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def compute_loss(model: torch.nn.Module, step: int, *parts: int) -> torch.Tensor:
    """Return the mean loss of these parts of the batch. This takes the time of a step."""
    time.sleep(STEP_SLEEP_S * len(parts))
    seeds = (2 * step + part for part in parts)
    inputs = [
        torch.randn(PART_SAMPLES, 256, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    x = torch.cat(inputs)
    return (model(x) - x.flip(1)).square().mean()


class ProgressFile:
    """The file in which a worker records its steps for compare_launchers.py.

    Each line is written by one system call, so a kill leaves no partial line.

    Args:
        directory: The directory of the job.
        slot: The number of the worker, 0 or 1. A replacement has the number of the killed worker.
    """

    def __init__(self, directory: Path, slot: int) -> None:
        self._steps = os.open(directory / f"steps.{slot}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # The start time distinguishes this process from a later one with the same pid.
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        new = directory / f"new.{slot}"
        new.write_text(f"{os.getpid()} {started}")
        new.replace(directory / f"worker.{slot}")

    def record_step(self, step: int, parts: int = 1) -> None:
        """Record a finished step, of whose batch this worker has computed `parts` parts."""
        samples = parts * PART_SAMPLES
        os.write(self._steps, f"{step} {time.monotonic():.6f} {os.getpid()} {samples}\n".encode())


class Checkpoints:
    """Checkpoints in plain torch: one rank writes and renames a file that every rank can read.

    There is no fsync, because no machine fails in this benchmark.
    """

    def __init__(
        self, directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int
    ) -> None:
        self._file, self._model, self._optimizer = directory / "checkpoint", model, optimizer
        self._rank = rank

    def restore(self) -> int:
        """Load the newest checkpoint; return its step, or 0 if there is none."""
        if not self._file.exists():
            return 0
        state = torch.load(self._file)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def save_if_due(self, step: int) -> None:
        """Save every fourth step, on rank 0."""
        if self._rank == 0 and step % SAVE_EVERY == 0:
            state = {"model": self._model, "optimizer": self._optimizer}
            plain = {name: part.state_dict() for name, part in state.items()}
            torch.save({**plain, "step": step}, self._file.with_suffix(".new"))
            self._file.with_suffix(".new").replace(self._file)
