"""A small training with steps of a fixed duration, for the notebooks.

It saves its state with one of three methods, can kill itself once at a given step, and ends at a
given step or when DIR/finish exists.
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
import torch.distributed.nn  # DDP would import it later, during the first step
from torch.nn.parallel import DistributedDataParallel

from elasticlib import CheckpointManager, context

SNAPSHOTS, CHECKPOINTS, TORCH_SAVE = "snapshots", "checkpoints", "torch.save"
# snapshots: a snapshot of each step, and a checkpoint every n steps. checkpoints: only a checkpoint
# every n steps. torch.save: one file every n steps.
SAVE_METHODS = (SNAPSHOTS, CHECKPOINTS, TORCH_SAVE)


class StateSaver:
    """The state of the training, and the method with which it is saved."""

    def __init__(self, args: argparse.Namespace, state: dict[str, Any]) -> None:
        self._args, self._state = args, state
        self._manager = CheckpointManager(args.dir / "checkpoints")
        self._file = args.dir / "last.pt"

    def load(self) -> int:
        """Load the newest state; return its step, or 0 if there is none."""
        if self._args.save_method != TORCH_SAVE:
            return self._manager.restore(self._state).step
        if not self._file.exists():
            return 0
        saved = torch.load(self._file)
        for name, part in self._state.items():
            part.load_state_dict(saved[name])
        return int(saved["step"])

    def save(self, step: int, *, is_last: bool) -> None:
        """Save the state after a step, if it is due or the last one."""
        is_due = is_last or step % self._args.save_every == 0
        if self._args.save_method == SNAPSHOTS:
            self._manager.snapshot(step, self._state)
        if is_due and self._args.save_method != TORCH_SAVE:
            self._manager.save(step, self._state)
        elif is_due and dist.get_rank() == 0:
            parts = {name: part.state_dict() for name, part in self._state.items()}
            temporary = self._file.with_suffix(".new")
            torch.save({**parts, "step": step}, temporary)
            os.replace(temporary, self._file)

    def close(self) -> None:
        """Wait until all saves have finished."""
        self._manager.close()


def train(args: argparse.Namespace) -> None:
    """Train a model of the sine function until the last step."""
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saver = StateSaver(args, {"model": model, "optimizer": optimizer})
    step, pause, is_last = saver.load(), threading.Event(), False
    while step < args.steps and not is_last:
        step += 1
        loss = train_step(model, optimizer, step)
        pause.wait(args.step_seconds)
        # The file is part of the all-reduce, so that all ranks end at the same step.
        values = torch.tensor([loss / dist.get_world_size(), float((args.dir / "finish").exists())])
        dist.all_reduce(values)
        context().step(step, loss=float(values[0]), samples=32)
        is_last = step == args.steps or bool(values[1]) or context().should_stop() is not None
        saver.save(step, is_last=is_last)
        crash_once(args, step)
    saver.close()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train one step, whose samples depend only on step and rank; return its loss."""
    seed = step * 1000 + dist.get_rank()
    x = torch.rand(32, 1, generator=torch.Generator().manual_seed(seed)) * 6
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), x.sin())
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.item()


def crash_once(args: argparse.Namespace, step: int) -> None:
    """Kill rank 0 at the given step, as the kernel does without memory; only once per job."""
    marker = args.dir / "crashed"
    if step == args.crash_at and dist.get_rank() == 0 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path, help="directory for the state and the file `finish`")
    parser.add_argument("--save-method", choices=SAVE_METHODS, default=SNAPSHOTS)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=2000, help="the last step")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="duration of a step")
    parser.add_argument("--crash-at", type=int, default=0, metavar="STEP", help="0: never")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_arguments())
