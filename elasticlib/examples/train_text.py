"""Train a small byte-level transformer on English text, through every crash and resize.

`elasticrun --nproc-per-node 2 train_text.py`, or torchrun, or plain python starts it. What makes it
elastic stands in `train` and `finish_step`: restore first, count each batch once it is trained on,
snapshot and save, stop when asked. Text and model need no download, no dropout and no threads.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it late, and hold the group: see main
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

CONTEXT = 64
"""Bytes that the model sees at once."""


class Windows(Dataset[Tensor]):
    """Python's own documentation (about 460 kB) as windows of CONTEXT + 1 bytes.

    Indexed by lists: n indices give n x 65 int64.
    """

    def __init__(self, samples: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.windows = whole.unfold(0, CONTEXT + 1, CONTEXT)[:samples]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, indices: list[int]) -> Tensor:
        return self.windows[torch.tensor(indices, dtype=torch.int64)]


class ByteTransformer(nn.Module):
    """Bytes (n x length) to logits of each next byte (n x length x 256); 137,216 weights."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        before = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.byte(text) + self.place(torch.arange(length))
        logits: Tensor = self.head(self.blocks(x, before, is_causal=True))
        return logits


class Training:
    """What is trained, and where it stands: `state` is all that a checkpoint must hold."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        count, seed = args.logical_workers, args.seed
        self.model, self.windows = ByteTransformer(), Windows(args.samples)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.logical = LogicalWorkers(self.model, count, seed=seed) if count else None
        # Logical workers find their samples in the whole batch, of which each rank has its own.
        ranks = (1, 0) if count else (dist.get_world_size(), dist.get_rank())
        self.sampler = ElasticDistributedSampler(self.windows, *ranks, seed=seed, tail="exact")
        self.batches = ElasticBatchSampler(self.sampler, args.global_batch)
        self.progress = {"step": 0, "loss": float("nan")}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "sampler": self.sampler,
            "progress": self.progress,
        }
        if self.logical:
            self.state["logical"] = self.logical  # so that another count or seed is refused

    @property
    def step(self) -> int:
        return int(self.progress["step"])

    def mine(self, batch: list[int]) -> list[int]:
        """Of the indices that the sampler gives this rank those that it trains on."""
        if self.logical is None:
            return batch
        places = self.logical.samples(len(batch))
        return batch[places.start : places.stop]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """The sum over windows of their mean loss; 0 of none, for a rank that has none."""
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / targets.shape[1]


def parallel_gradient(training: Training, parallel: nn.Module, windows: Tensor) -> Tensor:
    """Leave the whole batch's gradient behind, by DDP; this rank's share of its mean loss."""
    training.optimizer.zero_grad()
    share = loss_of(parallel, windows) / training.batches.next_batch_size
    (share * dist.get_world_size()).backward()  # DDP averages; these are shares
    return share.detach()


def logical_gradient(training: Training, logical: LogicalWorkers, windows: Tensor) -> Tensor:
    """The same, by logical workers: with the same bits at any world size."""
    batch = training.batches.next_batch_size
    first, share = logical.samples(batch).start, torch.zeros(())
    for worker in logical.step(training.step):
        places = worker.samples(batch)
        if places:
            own = windows[places.start - first : places.stop - first]
            loss = loss_of(training.model, own) / batch
            loss.backward()
            share += loss.detach()
    logical.reduce()
    return share


def train(training: Training, manager: CheckpointManager, args: argparse.Namespace) -> bool:
    """To the end, or until we are asked to stop; whether it was the end."""
    logical = training.logical
    model = training.model if logical else DistributedDataParallel(training.model)
    manager.restore(training.state)
    write_down(args.trace, resumed=training.step, at=wall())
    for epoch in range(training.sampler.epoch, args.epochs):
        training.sampler.set_epoch(epoch)
        drawn = [training.mine(indices) for indices in training.batches]
        loader = DataLoader(training.windows, sampler=drawn, batch_size=None)
        for indices, windows in zip(drawn, loader, strict=True):
            step, world = training.step + 1, dist.get_world_size()
            write_down(args.trace, step=step, epoch=epoch, indices=indices, world_size=world)
            if logical:
                share = logical_gradient(training, logical, windows)
            else:
                share = parallel_gradient(training, model, windows)
            training.optimizer.step()
            training.batches.advance()
            dist.all_reduce(share)
            training.progress.update(step=step, loss=share.item())
            if finish_step(training, manager, args, samples=len(indices)):
                return False
    manager.save(training.step, training.state)
    return True


def finish_step(
    training: Training, manager: CheckpointManager, args: argparse.Namespace, *, samples: int
) -> bool:
    """Keep what has to be kept of this step, of `samples` on this rank; whether we are to stop."""
    step, state, loss = training.step, training.state, training.progress["loss"]
    context().step(step, loss=loss, samples=samples)
    if step % args.snapshot_every == 0:
        manager.snapshot(step, state)
    stop = context().should_stop()
    if stop or step % args.save_every == 0:
        manager.save(step, state)
    if stop or (step % args.print_every == 0 and dist.get_rank() == 0):
        last = args.epochs * -(-len(training.windows) // args.global_batch)
        progress = f"epoch {training.sampler.epoch} step {step}/{last} loss {loss:.2f}"
        group = f"(world {dist.get_world_size()}, generation {args.generation})"
        print(progress, group, f"stopping: {stop.reason}" if stop else "", flush=True)
    return stop is not None


def write_down(prefix: str | None, **line: Any) -> None:
    """Append a line to PREFIX.LAUNCH.GENERATION.RANK.jsonl, if there is a prefix.

    It is out of the process when the call returns, so SIGKILL loses none. A rank writes a step's
    line before it takes part in that step: whatever a checkpoint holds has been written down.
    """
    if prefix:
        names = ("ELASTICLIB_INCARNATION", "ELASTICLIB_GENERATION", "RANK")
        launch, generation, rank = (os.environ.get(name, "0") for name in names)
        with open(f"{prefix}.{launch}.{generation}.{rank}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"generation": int(generation), **line}) + "\n")


def sha256_of(model: nn.Module) -> str:
    """Equal for two models only if their weights are bitwise equal."""
    digest = hashlib.sha256()
    for weights in model.state_dict().values():
        plain = weights.cpu().contiguous()  # and no .numpy(): the demo runs without NumPy
        digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
    return digest.hexdigest()


def join_process_group() -> None:
    """The launcher's, or one of this process alone."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    join_process_group()
    training = Training(args)
    with CheckpointManager(args.checkpoint_dir, keep_last=args.keep_last) as manager:
        done = train(training, manager, args)
    if done and dist.get_rank() == 0:
        progress = f"done: loss {training.progress['loss']:.4f} steps {training.step}"
        print(f"{progress} weights sha256 {sha256_of(training.model)}", flush=True)
    # Its threads abort the process, about once in 20 runs, if one still holds a tensor when Python
    # ends. So nothing else may have the group: not DDP, which went with `train`, nor
    # torch.distributed.nn, whose functions take a group that exists at its import as a default.
    dist.destroy_process_group()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--checkpoint-dir", default="checkpoints", help="a folder, or a URL")
    add("--epochs", type=int, default=1)
    add("--global-batch", type=int, default=16, help="samples a step, of all ranks")
    add("--samples", type=int, default=6400, help="how much of the text to use")
    add("--save-every", type=int, default=20, metavar="STEPS")
    add("--snapshot-every", type=int, default=1, metavar="STEPS")
    add("--keep-last", type=int, default=3, metavar="CHECKPOINTS")
    add("--print-every", type=int, default=20, metavar="STEPS")
    add("--logical-workers", type=int, default=0, metavar="V", help="equal weights at any world")
    add("--seed", type=int, default=0)
    add("--lr", type=float, default=2e-3)
    add("--trace", metavar="PREFIX", help="write which samples each step used")
    parser.set_defaults(generation=int(os.environ.get("ELASTICLIB_GENERATION", "0")))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
