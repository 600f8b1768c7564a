"""Train a small byte-level transformer on English text, with workers that may crash or be resized.

Usage: `elasticrun --nproc-per-node 2 train_text.py`, or with torchrun or python. The functions
`train` and `end_step` make the training elastic: restore the state first, advance the sampler after
each step, make snapshots and checkpoints, and stop when requested. The text is part of Python, so
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported before init_process_group, see the comment in main
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from elasticlib import (
    CheckpointManager,
    ElasticBatchSampler,
    ElasticDistributedSampler,
    LogicalWorkers,
    context,
)
from elasticlib.clock import wall

CONTEXT_LENGTH = 64  # bytes


class TextDataset(Dataset[Tensor]):
    """Python's documentation (about 460 kB) as windows of CONTEXT_LENGTH + 1 bytes.

    An index is a list of n sample numbers, and returns an int64 tensor of shape (n, 65).
    """

    def __init__(self, num_samples: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.windows = data.unfold(0, CONTEXT_LENGTH + 1, CONTEXT_LENGTH)[:num_samples]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, indices: list[int]) -> Tensor:
        return self.windows[torch.tensor(indices, dtype=torch.int64)]


class ByteTransformer(nn.Module):
    """Maps bytes of shape (n, length) to logits of the next bytes of shape (n, length, 256)."""

    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT_LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width,
            num_heads,
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(layer, num_layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.byte(text) + self.position(torch.arange(length))
        logits: Tensor = self.head(self.blocks(x, mask, is_causal=True))
        return logits


class Training:
    """Model, optimizer, data and progress. `state` is the content of a checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.model = ByteTransformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.dataset = TextDataset(args.samples)
        self.logical: LogicalWorkers | None = None
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if args.logical_workers:
            self.logical = LogicalWorkers(self.model, args.logical_workers, seed=args.seed)
            # Each rank gets the whole batch, and selects the samples of its logical workers.
            world_size, rank = 1, 0
        self.sampler = ElasticDistributedSampler(
            self.dataset, world_size, rank, seed=args.seed, tail="exact"
        )
        self.batches = ElasticBatchSampler(self.sampler, args.global_batch)
        self.progress = {"step": 0, "loss": float("nan")}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "sampler": self.sampler,
            "progress": self.progress,
        }
        if self.logical:
            self.state["logical"] = self.logical  # restoring checks its count and seed

    @property
    def step(self) -> int:
        return int(self.progress["step"])

    def local_indices(self, batch: list[int]) -> list[int]:
        """Return the samples of a batch that this rank trains on."""
        if self.logical is None:
            return batch
        positions = self.logical.samples(len(batch))
        return batch[positions.start : positions.stop]


class LocalBatches:
    """This rank's part of each remaining batch of an epoch: the indices, and their windows."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def __iter__(self) -> Iterator[tuple[list[int], Tensor]]:
        indices = [self.training.local_indices(batch) for batch in self.training.batches]
        loader = DataLoader(self.training.dataset, sampler=indices, batch_size=None)
        return zip(indices, loader, strict=True)


def summed_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the sum of the mean losses of the windows, which is 0 for an empty batch."""
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / targets.shape[1]


def backward_ddp(training: Training, model: nn.Module, windows: Tensor) -> Tensor:
    """Compute the gradient of the global batch, and return this rank's part of its mean loss."""
    training.optimizer.zero_grad()
    loss = summed_loss(model, windows) / training.batches.next_batch_size
    (loss * dist.get_world_size()).backward()  # DDP averages the gradients of the ranks
    return loss.detach()


def backward_logical(training: Training, logical: LogicalWorkers, windows: Tensor) -> Tensor:
    """Compute the same with logical workers: the gradient is bitwise equal at any world size."""
    batch_size = training.batches.next_batch_size
    first, rank_loss = logical.samples(batch_size).start, torch.zeros(())
    for worker in logical.step(training.step):
        positions = worker.samples(batch_size)
        if positions:
            local = windows[positions.start - first : positions.stop - first]
            loss = summed_loss(training.model, local) / batch_size
            loss.backward()
            rank_loss += loss.detach()
    logical.reduce()
    return rank_loss


def train(training: Training, manager: CheckpointManager, args: argparse.Namespace) -> bool:
    """Train to the end, or until a stop is requested. Return True at the end."""
    logical = training.logical
    model = training.model if logical else DistributedDataParallel(training.model)
    manager.restore(training.state)
    append_trace(args.trace, resumed=training.step, at=wall())
    for epoch, batches in training.batches.epochs(args.epochs, LocalBatches(training)):
        for indices, windows in batches:
            step, world_size = training.step + 1, dist.get_world_size()
            append_trace(args.trace, step=step, epoch=epoch, indices=indices, world_size=world_size)
            if logical:
                loss = backward_logical(training, logical, windows)
            else:
                loss = backward_ddp(training, model, windows)
            training.optimizer.step()
            training.batches.advance()
            dist.all_reduce(loss)
            training.progress.update(step=step, loss=loss.item())
            if end_step(training, manager, args, num_samples=len(indices)):
                return False
        manager.save(training.step, training.state)
    return True


def end_step(
    training: Training, manager: CheckpointManager, args: argparse.Namespace, *, num_samples: int
) -> bool:
    """Report, save and print the step that has just finished. Return True if training must stop."""
    step, state, loss = training.step, training.state, training.progress["loss"]
    context().step(step, loss=loss, samples=num_samples)
    if step % args.snapshot_every == 0:
        manager.snapshot(step, state)
    stop = context().should_stop()
    if stop or step % args.save_every == 0:
        manager.save(step, state)
    if stop or (step % args.print_every == 0 and dist.get_rank() == 0):
        last_step = args.epochs * -(-len(training.dataset) // args.global_batch)
        progress = f"epoch {training.sampler.epoch} step {step}/{last_step} loss {loss:.2f}"
        group = f"(world {dist.get_world_size()}, generation {args.generation})"
        print(progress, group, f"stopping: {stop.reason}" if stop else "", flush=True)
    return stop is not None


def append_trace(prefix: str | None, **line: Any) -> None:
    """Append a JSON line to PREFIX.INCARNATION.GENERATION.RANK.jsonl, if there is a prefix.

    A rank writes the line of a step before it takes part in the step, and the file is closed when
    the call returns. So the traces contain every step of every checkpoint, even after SIGKILL.
    """
    if prefix:
        names = ("ELASTICLIB_INCARNATION", "ELASTICLIB_GENERATION", "RANK")
        incarnation, generation, rank = (os.environ.get(name, "0") for name in names)
        path = f"{prefix}.{incarnation}.{generation}.{rank}.jsonl"
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"generation": int(generation), **line}) + "\n")


def weights_sha256(model: nn.Module) -> str:
    """Return a digest that is equal for two models only if their weights are bitwise equal."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        data = weight.cpu().contiguous()  # not .numpy(), because NumPy may not be installed
        digest.update(ctypes.string_at(data.data_ptr(), data.nbytes))
    return digest.hexdigest()


def init_process_group() -> None:
    """Join the process group of the launcher, or create one for a single process."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def main(args: argparse.Namespace) -> None:
    """Train on the CPU, and print the digest of the weights at the end."""
    torch.set_num_threads(1)
    init_process_group()
    training = Training(args)
    with CheckpointManager(args.checkpoint_dir, keep_last=args.keep_last) as manager:
        is_done = train(training, manager, args)
    if is_done and dist.get_rank() == 0:
        progress = f"done: loss {training.progress['loss']:.4f} steps {training.step}"
        print(f"{progress} weights sha256 {weights_sha256(training.model)}", flush=True)
    # If a gloo thread is still running when Python exits, it sometimes aborts the process. It ends
    # with the last reference to the group. DistributedDataParallel was released when `train`
    # returned. torch.distributed.nn takes a group that exists when it is imported as the default
    # of its functions, so it is imported at the top.
    dist.destroy_process_group()


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of the command line, or the given ones."""
    parser = argparse.ArgumentParser(description="train a small transformer on English text")
    add = parser.add_argument
    add("--checkpoint-dir", default="checkpoints", help="a directory or an fsspec URL")
    add("--epochs", type=int, default=1)
    add("--global-batch", type=int, default=16, help="samples per step, over all ranks")
    add("--samples", type=int, default=6400, help="samples per epoch")
    add("--save-every", type=int, default=20, metavar="STEPS")
    add("--snapshot-every", type=int, default=1, metavar="STEPS")
    add("--keep-last", type=int, default=3, metavar="CHECKPOINTS")
    add("--print-every", type=int, default=20, metavar="STEPS")
    add(
        "--logical-workers",
        type=int,
        default=0,
        metavar="N",
        help="compute bitwise equal weights at any world size up to N",
    )
    add("--seed", type=int, default=0)
    add("--lr", type=float, default=2e-3)
    add("--trace", metavar="PREFIX", help="record the samples of each step in PREFIX.*.jsonl")
    parser.set_defaults(generation=int(os.environ.get("ELASTICLIB_GENERATION", "0")))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse_args())
