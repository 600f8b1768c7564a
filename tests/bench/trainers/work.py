"""The training that all launchers of field.py run: plain torch, and nothing of any launcher.

A step is 45 ms of sleep, which stands for a GPU's work, and then a small model's gradients, their
mean over the workers, and SGD with momentum. A step's number decides its batch, so that a step that
is done again is the same step. A batch has two parts, one for each of two workers; a worker that
computes both takes twice as long. Model and optimizer are 2 MiB.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

SECONDS = 0.045
"""Of a step with one part of the batch, beside the model and the gradients' mean."""
PART = 16
"""Samples in a part of a batch."""
START = "FIELD_START_SECONDS"
"""Says, in the environment, how long a script takes to start: for a GPU's context, weights on their
way to the device, compiled graphs, data loaders."""
SAVE_EVERY = 4
"""Steps between two checkpoints. Young's rule for the time between them is the square root of twice
a checkpoint's cost (2 ms) times the time between faults (10 s): 0.2 s, which is four steps."""
SELDOM = 200
"""The same where a checkpoint is for the loss of the machine alone."""


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    time.sleep(float(os.environ.get(START, "0")))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: torch.nn.Module, step: int, *parts: int) -> torch.Tensor:
    """The mean of these parts of a step's batch. It takes the step's time."""
    time.sleep(SECONDS * len(parts))
    seeds = (2 * step + part for part in parts)
    drawn = [torch.randn(PART, 256, generator=torch.Generator().manual_seed(s)) for s in seeds]
    x = torch.cat(drawn)
    return (model(x) - x.flip(1)).square().mean()


class Progress:
    """What a worker tells field.py: that it trains, as which process, and when each step was done.

    slot: which of the two workers it is, by a number that stays with it and that goes to whoever
    replaces it. A line is written by one system call, so that a kill leaves no half of one.
    """

    def __init__(self, folder: Path, slot: int) -> None:
        self._steps = os.open(folder / f"steps.{slot}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # With the time of its start, by which the kernel tells it from a later process of this pid.
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        new = folder / f"new.{slot}"
        new.write_text(f"{os.getpid()} {started}")
        new.replace(folder / f"worker.{slot}")

    def done(self, step: int, parts: int = 1) -> None:
        """A step, of whose batch this worker has computed so many parts."""
        samples = parts * PART
        os.write(self._steps, f"{step} {time.monotonic():.6f} {os.getpid()} {samples}\n".encode())


class Checkpoints:
    """Plain torch's: a file, written by one rank and renamed, which any rank reads.

    There is no fsync, as no machine fails here.
    """

    def __init__(
        self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int
    ) -> None:
        self._file, self._model, self._optimizer = folder / "checkpoint", model, optimizer
        self._rank = rank

    def restore(self) -> int:
        """The step of the newest, 0 if there is none."""
        if not self._file.exists():
            return 0
        state = torch.load(self._file)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def after(self, step: int) -> None:
        """Every fourth step is written."""
        if self._rank == 0 and step % SAVE_EVERY == 0:
            state = {"model": self._model, "optimizer": self._optimizer}
            plain = {name: part.state_dict() for name, part in state.items()}
            torch.save({**plain, "step": step}, self._file.with_suffix(".new"))
            self._file.with_suffix(".new").replace(self._file)
