"""A small training that takes its time: each step lasts as long as it is told to, on any machine.

For who wants to watch a job, or to see what a crash costs: it keeps its state in one of three ways,
may kill itself once at a given step, and ends at a given step or when a file is there.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it late, and hold the group
from torch.nn.parallel import DistributedDataParallel

from elasticlib import CheckpointManager, context

SNAPSHOTS, CHECKPOINTS, TORCH_SAVE = "snapshots", "checkpoints", "torch.save"
WAYS = (SNAPSHOTS, CHECKPOINTS, TORCH_SAVE)
"""Each step into the agent's memory, and each n steps to the disk; the latter alone; torch.save
alone, each n steps."""


class Kept:
    """How the state outlives a crash: `take_up` when a worker begins, `keep` after each step."""

    def __init__(self, args: argparse.Namespace, state: dict[str, Any]) -> None:
        self._args, self._state = args, state
        self._manager = CheckpointManager(args.folder / "checkpoints")
        self._file = args.folder / "last.pt"

    def take_up(self) -> int:
        """The step that the state is of, 0 for a fresh one."""
        if self._args.keep != TORCH_SAVE:
            return self._manager.restore(self._state).step
        if not self._file.exists():
            return 0
        saved = torch.load(self._file)
        for name, part in self._state.items():
            part.load_state_dict(saved[name])
        return int(saved["step"])

    def keep(self, step: int, *, last: bool) -> None:
        """What has to be kept of this step; last: no other follows."""
        due = last or step % self._args.save_every == 0
        if self._args.keep == SNAPSHOTS:
            self._manager.snapshot(step, self._state)
        if due and self._args.keep != TORCH_SAVE:
            self._manager.save(step, self._state)
        elif due and dist.get_rank() == 0:
            parts = {name: part.state_dict() for name, part in self._state.items()}
            aside = self._file.with_suffix(".new")
            torch.save({**parts, "step": step}, aside)
            os.replace(aside, self._file)

    def close(self) -> None:
        self._manager.close()


def train(args: argparse.Namespace) -> None:
    """Learn a sine, until it is enough."""
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept = Kept(args, {"model": model, "optimizer": optimizer})
    step, rest, is_last = kept.take_up(), threading.Event(), False
    while step < args.steps and not is_last:
        step += 1
        loss = learn(model, optimizer, step)
        rest.wait(args.pace)
        # All ranks end at one step, whichever of them sees the file first.
        said = torch.tensor(
            [loss / dist.get_world_size(), float((args.folder / "finish").exists())]
        )
        dist.all_reduce(said)
        context().step(step, loss=float(said[0]), samples=32)
        is_last = step == args.steps or bool(said[1]) or context().should_stop() is not None
        kept.keep(step, last=is_last)
        crash_once(args, step)
    kept.close()


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on samples that depend on step and rank alone; its loss."""
    seed = step * 1000 + dist.get_rank()
    x = torch.rand(32, 1, generator=torch.Generator().manual_seed(seed)) * 6
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), x.sin())
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.item()


def crash_once(args: argparse.Namespace, step: int) -> None:
    """As if the machine ran out of memory, with nobody asked and nothing said; but once only."""
    mark = args.folder / "crashed"
    if step == args.crash_at and dist.get_rank() == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for its state; it ends once `finish` is there")
    parser.add_argument("--keep", choices=WAYS, default=SNAPSHOTS)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=2000, help="it ends after so many")
    parser.add_argument("--pace", type=float, default=0.05, metavar="SECONDS", help="of each step")
    parser.add_argument("--crash-at", type=int, default=0, metavar="STEP", help="0 for never")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
