"""A small model and a log of steps, for the two training scripts of the README's picture."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEP_S = 0.025  # sleep in each step, in place of the work of a GPU


class ToyTraining:
    """A linear model in DistributedDataParallel. Its samples depend on the step and the rank only.

    The inputs have different sizes, so that the loss decreases during the whole run.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.005, momentum=0.9)
        self._model = DistributedDataParallel(self.net)
        self._sizes = 0.6 ** torch.arange(8)

    def train_step(self, step: int) -> float:
        """Train on the samples of this step, and return the loss."""
        time.sleep(STEP_S)
        generator = torch.Generator().manual_seed(16 * step + dist.get_rank())
        x = torch.randn(256, 8, generator=generator) * self._sizes
        loss = (self._model(x) - 4 * x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class StepLog:
    """A file with a line for each step of this worker: the step and the time of its end.

    The name of the file is NODE.LOCAL_RANK.GENERATION.PID.
    """

    def __init__(self, directory: Path, generation: int) -> None:
        names = (os.environ["NODE"], os.environ["LOCAL_RANK"], generation, os.getpid())
        path = directory / "steps" / ".".join(map(str, names))
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("a", buffering=1)  # line-buffered, so that a kill loses no line

    def write(self, step: int) -> None:
        print(step, f"{time.monotonic():.3f}", file=self._file)


def is_finished(directory: Path) -> bool:
    """Return the same answer on all ranks: whether there is a file DIRECTORY/finish."""
    answer = torch.tensor(float((directory / "finish").exists()))
    dist.broadcast(answer, src=0)
    return bool(answer)
