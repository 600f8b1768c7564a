"""Train a small byte-level transformer on English text, through every crash and resize.

Start it with `elasticrun --nproc-per-node 2 train_text.py`, with torchrun, or with plain python.
What makes it elastic: restore first, `sampler.advance` after each step, save now and then.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it late: see leave_process_group
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from elasticlib import (
    ElasticDistributedSampler,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from elasticlib.examples.byte_transformer import ByteTransformer, Windows, read_text, sha256_of
from elasticlib.examples.trace import Trace


class Training:
    """What is trained, and where it stands: all that a checkpoint must hold."""

    def __init__(self, args: argparse.Namespace, text: bytes) -> None:
        torch.manual_seed(args.seed)
        self.windows = Windows(text, args.samples)
        self.sampler = ElasticDistributedSampler(self.windows, seed=args.seed, tail="exact")
        self.model = ByteTransformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.step, self.loss = 0, float("nan")

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),
            "step": self.step,
            "loss": self.loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        self.step, self.loss = state["step"], state["loss"]


def join_process_group() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def leave_process_group() -> None:
    # If the group's threads still hold a tensor when Python ends, the process aborts, about once
    # in 20 runs. They end here, if nothing else has the group any more: not DDP, which went with
    # `train`, nor torch.distributed.nn, whose functions take a group that exists as a default.
    dist.destroy_process_group()


def restore(training: Training, folder: Path) -> None:
    """Load the newest whole checkpoint: rank 0's choice, so that all ranks start alike."""
    choice = [latest_checkpoint(folder, "step-*.pt") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(choice)
    if choice[0]:
        training.load_state_dict(load_checkpoint(choice[0]))


def batches_of(sampler: ElasticDistributedSampler, global_batch: int) -> list[list[int]]:
    """This rank's part of each global batch left; smaller, or empty, where it does not divide."""
    left = sampler.position.length - sampler.position.consumed
    batches: list[list[int]] = [[] for _ in range(0, left, global_batch)]
    for place, index in zip(range(sampler.rank, left, sampler.num_replicas), sampler, strict=True):
        batches[place // global_batch].append(index)
    return batches


def train(training: Training, args: argparse.Namespace) -> None:
    trace = Trace(args.trace, args.generation, dist.get_rank())
    trace.resumed(training.step)
    parallel = DistributedDataParallel(training.model)
    for epoch in range(training.sampler.epoch, args.epochs):
        training.sampler.set_epoch(epoch)
        train_epoch(training, parallel, trace, args)


def train_epoch(
    training: Training, parallel: DistributedDataParallel, trace: Trace, args: argparse.Namespace
) -> None:
    sampler, world = training.sampler, dist.get_world_size()
    batches = batches_of(sampler, args.global_batch)
    loader = DataLoader(training.windows, sampler=batches, batch_size=None)
    for indices, batch in zip(batches, loader, strict=True):
        samples = min(args.global_batch, len(training.windows) - sampler.position.consumed)
        share = share_of_loss(parallel(batch[:, :-1]), batch[:, 1:], samples)
        trace.step(training.step + 1, sampler.epoch, indices, world, share.item())
        training.optimizer.zero_grad()
        torch.autograd.backward(share * world)  # DDP averages; ours are shares of a sum
        training.optimizer.step()
        sampler.advance(samples)
        training.step += 1
        mean = share.detach()
        dist.all_reduce(mean)
        training.loss = mean.item()
        report_and_save(training, args)


def share_of_loss(logits: Tensor, targets: Tensor, samples: int) -> Tensor:
    """What this rank's windows add to the mean loss of the `samples` of the global batch."""
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (samples * targets.shape[1])


def report_and_save(training: Training, args: argparse.Namespace) -> None:
    step, epoch = training.step, training.sampler.epoch
    last = args.epochs * -(-len(training.windows) // args.global_batch)
    if dist.get_rank() != 0:
        return
    if step % args.print_every == 0:
        progress = f"epoch {epoch} step {step}/{last} loss {training.loss:.2f}"
        group = f"(world {dist.get_world_size()}, generation {args.generation})"
        print(progress, group, flush=True)
    if step % args.save_every == 0 or step == last:
        save_checkpoint(args.checkpoint_dir / f"step-{step}.pt", training.state_dict())


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    join_process_group()
    text, pinned = read_text()
    if not pinned and dist.get_rank() == 0:
        print("the text is not Python 3.11.7's: the loss will differ a little", flush=True)
    training = Training(args, text)
    restore(training, args.checkpoint_dir)
    train(training, args)
    if dist.get_rank() == 0:
        progress = f"done: loss {training.loss:.4f} steps {training.step}"
        print(f"{progress} weights sha256 {sha256_of(training.model)}", flush=True)
    leave_process_group()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--global-batch", type=int, default=16, help="samples a step, of all ranks")
    parser.add_argument("--samples", type=int, default=6400, help="how much of the text to use")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--trace", metavar="PREFIX", help="write which samples each step used")
    generation = int(os.environ.get("ELASTICLIB_GENERATION", "0"))
    parser.set_defaults(generation=generation)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
