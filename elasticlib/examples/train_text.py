"""Train a small byte-level transformer on English text, through every crash and resize.

Start it with `elasticrun --nproc-per-node 2 train_text.py`, with torchrun, or with plain python.
What makes it elastic: restore first, advance after each step, snapshot and save, stop when asked.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it late: see leave_process_group
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from elasticlib import (
    CheckpointManager,
    ElasticBatchSampler,
    ElasticDistributedSampler,
    LogicalWorkers,
    context,
)
from elasticlib.examples.byte_transformer import ByteTransformer, Windows, read_text, sha256_of
from elasticlib.examples.trace import Trace


class Training:
    """What is trained, and where it stands: `state` is all that a checkpoint must hold."""

    def __init__(self, args: argparse.Namespace, text: bytes) -> None:
        torch.manual_seed(args.seed)
        self.windows = Windows(text, args.samples)
        # Logical workers find their samples in the whole batch, of which each rank has its own.
        ranks = (1, 0) if args.logical_workers else (dist.get_world_size(), dist.get_rank())
        self.sampler = ElasticDistributedSampler(self.windows, *ranks, seed=args.seed, tail="exact")
        self.batches = ElasticBatchSampler(self.sampler, args.global_batch)
        self.model = ByteTransformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.progress = {"step": 0, "loss": float("nan")}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "sampler": self.sampler,
            "progress": self.progress,
        }

    @property
    def step(self) -> int:
        return int(self.progress["step"])


def join_process_group() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def leave_process_group() -> None:
    # If the group's threads still hold a tensor when Python ends, the process aborts, about once
    # in 20 runs. They end here, if nothing else has the group any more: not DDP, which went with
    # its step, nor torch.distributed.nn, whose functions take a group that exists as a default.
    dist.destroy_process_group()


class ParallelStep:
    """Gradients by DDP: the ranks' shares of each batch side by side."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._model = DistributedDataParallel(training.model)

    def mine(self, batch: list[int]) -> list[int]:
        """Which of the indices that the sampler gives this rank it uses: all of them."""
        return batch

    def gradients(self, windows: Tensor) -> Tensor:
        """Leave the whole batch's gradient behind; this rank's share of its mean loss."""
        batches = self._training.batches
        self._training.optimizer.zero_grad()
        share = loss_of(self._model, windows) / batches.samples
        torch.autograd.backward(share * dist.get_world_size())  # DDP averages; these are shares
        return share.detach()


class LogicalStep:
    """Gradients of a fixed number of logical workers: the same weights at any world size."""

    def __init__(self, training: Training, count: int, seed: int) -> None:
        self._training = training
        self._logical = LogicalWorkers(training.model, count, seed=seed)
        training.state["logical"] = self._logical  # so that another count or seed is refused

    def mine(self, batch: list[int]) -> list[int]:
        """Of the whole batch those of this rank's logical workers."""
        places = self._logical.samples(len(batch))
        return batch[places.start : places.stop]

    def gradients(self, windows: Tensor) -> Tensor:
        """Leave the whole batch's gradient behind; this rank's share of its mean loss."""
        batch = self._training.batches.samples
        first = self._logical.samples(batch).start
        share = torch.zeros(())
        for worker in self._logical.step(self._training.step):
            places = worker.samples(batch)
            if places:
                own = windows[places.start - first : places.stop - first]
                loss = loss_of(self._training.model, own) / batch
                torch.autograd.backward(loss)
                share += loss.detach()
        self._logical.reduce()
        return share


def loss_of(model: torch.nn.Module, windows: Tensor) -> Tensor:
    """The sum over windows of their mean loss; 0 of none, for a rank that has none."""
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / targets.shape[1]


def batches_of(training: Training, how: ParallelStep | LogicalStep) -> Iterator[Any]:
    """What is left of the epoch: this rank's indices of each batch, and their windows."""
    drawn = [how.mine(indices) for indices in training.batches]
    return zip(drawn, DataLoader(training.windows, sampler=drawn, batch_size=None), strict=True)


def train(training: Training, manager: CheckpointManager, args: argparse.Namespace) -> bool:
    """To the end, or until we are asked to stop; whether it was the end."""
    count, seed = args.logical_workers, args.seed
    how = LogicalStep(training, count, seed) if count else ParallelStep(training)
    manager.restore(training.state)
    trace = Trace(args.trace, args.generation, dist.get_rank(), launch=args.launch)
    trace.resumed(training.step)
    for epoch in range(training.sampler.epoch, args.epochs):
        training.sampler.set_epoch(epoch)
        for indices, windows in batches_of(training, how):
            world, number = dist.get_world_size(), training.step + 1
            trace.step(number, epoch, indices, world)
            share = how.gradients(windows)
            training.optimizer.step()
            training.batches.advance()
            dist.all_reduce(share)
            training.progress.update(step=number, loss=share.item())
            if finish_step(training, manager, args, samples=len(indices)):
                return False
    manager.save(training.step, training.state)
    return True


def finish_step(
    training: Training, manager: CheckpointManager, args: argparse.Namespace, *, samples: int
) -> bool:
    """Keep what has to be kept of this step; whether we are to stop after it. samples: this
    rank's."""
    step, state = training.step, training.state
    context().step(step, loss=training.progress["loss"], samples=samples)
    if step % args.snapshot_every == 0:
        manager.snapshot(step, state)
    stop = context().should_stop()
    if stop or step % args.save_every == 0:
        manager.save(step, state)
    if stop or (step % args.print_every == 0 and dist.get_rank() == 0):
        report(training, args, f"stopping: {stop.reason}" if stop else "")
    return stop is not None


def last_step(training: Training, args: argparse.Namespace) -> int:
    """Of a run that has always had this global batch: to show, not to decide by."""
    per_epoch = -(-len(training.windows) // args.global_batch)
    return int(args.epochs * per_epoch)


def report(training: Training, args: argparse.Namespace, more: str) -> None:
    epoch, step, loss = training.sampler.epoch, training.step, training.progress["loss"]
    progress = f"epoch {epoch} step {step}/{last_step(training, args)} loss {loss:.2f}"
    group = f"(world {dist.get_world_size()}, generation {args.generation})"
    print(progress, group, more, flush=True)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    join_process_group()
    text, pinned = read_text()
    if not pinned and dist.get_rank() == 0:
        print("the text is not Python 3.11.7's: the loss will differ a little", flush=True)
    training = Training(args, text)
    with CheckpointManager(args.checkpoint_dir, keep_last=args.keep_last) as manager:
        done = train(training, manager, args)
    if done and dist.get_rank() == 0:
        progress = f"done: loss {training.progress['loss']:.4f} steps {training.step}"
        print(f"{progress} weights sha256 {sha256_of(training.model)}", flush=True)
    leave_process_group()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint-dir", default="checkpoints", help="a folder, or a URL")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--global-batch", type=int, default=16, help="samples a step, of all ranks")
    parser.add_argument("--samples", type=int, default=6400, help="how much of the text to use")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--snapshot-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--keep-last", type=int, default=3, metavar="CHECKPOINTS")
    parser.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    parser.add_argument(
        "--logical-workers",
        type=int,
        default=0,
        metavar="V",
        help="the same weights at any world size from 1 to V; 0 for DDP",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--trace", metavar="PREFIX", help="write which samples each step used")
    generation = int(os.environ.get("ELASTICLIB_GENERATION", "0"))
    launch = os.environ.get("ELASTICLIB_INCARNATION", "")  # generations count from 1 in each
    parser.set_defaults(generation=generation, launch=launch)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
