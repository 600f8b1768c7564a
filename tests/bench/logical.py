"""What the same weights at any world size cost beside DDP: time and bytes of a step.

    python tests/bench/logical.py [--world 2] [--rounds 15] [--width 512] [--batch 64]

The same model and samples in the same processes, one kind of step after another in each round;
ratios are of the same round, and medians over the rounds. `DDP in 4 parts` has each rank compute 4
parts of its batch one after another, and reduces after the last, without a fixed order. Bytes are
what the kernel counted as sent on rank 0's TCP connections. At the end a few steps at several world
sizes show whose weights differ.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from figures import Row, Samples, run, said
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticlib import LogicalWorkers
from elasticlib.data.position import even_share

sys.path.append(str(Path(__file__).resolve().parent.parent))
from ranks import Ranks

BYTES_SENT = 200
"""Where `tcpi_bytes_sent` stands in Linux's struct tcp_info."""

TRAINED = ("DDP", "8 logical workers")
Step = Callable[[int], None]


def bytes_sent() -> int:
    """By this process, on all TCP connections that it has now."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
        except OSError:
            continue
        if len(info) >= BYTES_SENT + 8:
            total += struct.unpack_from("Q", info, BYTES_SENT)[0]
    return total


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))]
    layers += [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
    ]
    return nn.Sequential(*layers)


@attrs.frozen
class Settings:
    rounds: int
    width: int
    batch: int


class Trainer:
    """One kind of training, with a model and an optimizer of its own."""

    def __init__(self, args: Settings) -> None:
        self.model, self.batch = model_of(args.width), args.batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.inputs = torch.randn(
            args.batch, args.width, generator=torch.Generator().manual_seed(1)
        )

    def loss(self, model: nn.Module, mine: range) -> torch.Tensor:
        inputs = self.inputs[list(mine)]
        return (model(inputs) - inputs).square().sum() / (self.batch * inputs.shape[1])

    def ddp(self, parts: int) -> Step:
        parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        rank, world = dist.get_rank(), dist.get_world_size()

        def step(_: int) -> None:
            self.optimizer.zero_grad()
            for part in range(parts):
                mine = even_share(self.batch, rank=rank * parts + part, world_size=world * parts)
                parallel.require_backward_grad_sync = part == parts - 1
                (self.loss(parallel, mine) * world).backward()
            self.optimizer.step()

        return step

    def logical(self, count: int) -> Step:
        logical = LogicalWorkers(self.model, count)

        def step(number: int) -> None:
            for worker in logical.step(number):
                self.loss(self.model, worker.samples(self.batch)).backward()
            logical.reduce()
            self.optimizer.step()

        return step


def counts(world: int) -> tuple[int, ...]:
    """Of logical workers: as many parts a rank as DDP has below, and one that does not divide."""
    return (world, 2 * world, 4 * world, 2 * world + 1)


def ddp(parts: int) -> str:
    return "DDP" if parts == 1 else f"DDP in {parts} parts"


def kinds(args: Settings) -> dict[str, Step]:
    found = {ddp(n): Trainer(args).ddp(n) for n in (1, 2, 4)}
    for count in counts(dist.get_world_size()):
        found[f"{count} logical workers"] = Trainer(args).logical(count)
    return found


def take(args: Settings) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """On every rank: seconds and bytes of each kind and round."""
    steps = kinds(args)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds + 2):  # the first two are to warm up
        for name, step in steps.items():
            dist.barrier()
            before, began = bytes_sent(), time.perf_counter()
            step(number)
            dist.barrier()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
                sent[name].append(bytes_sent() - before)
    return seconds, sent


def trained(args: Settings, name: str) -> str:
    """What the weights come to after a few steps of this kind."""
    trainer = Trainer(args)
    step = trainer.ddp(1) if name == "DDP" else trainer.logical(8)
    for number in range(5):
        step(number)
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(bytes(parameter.detach().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


def measure(
    *, world: int = 2, rounds: int = 15, width: int = 512, batch: int = 64
) -> Iterator[Row | str]:
    ranks = Ranks()
    # Of rank 0.
    seconds, sent = ranks.run(take, world, Settings(rounds, width, batch))[0]
    for count in counts(world):
        name = f"{count} logical workers"
        what = f"a step of {name} on {world} ranks"
        mine = Samples("s", seconds[name])
        parts = count // world if count % world == 0 else 1
        for base in dict.fromkeys((1, parts)):
            theirs = Samples("s", seconds[ddp(base)])
            yield Row(f"step.{count}.{base}", what, mine, theirs, ddp(base), paired=True)
        both = [Samples("bytes", sent[of]) for of in (name, "DDP")]
        yield Row(f"bytes.{count}", f"bytes sent in {what}", *both, "DDP")
    size = sum(p.numel() * p.element_size() for p in model_of(width).parameters())
    yield f"The gradient has {said(size, 'bytes')}; the batch {batch} samples."
    small, worlds = Settings(5, 32, 40), (1, 2, 3, 4, 5)
    for name in TRAINED:
        ends = len({ranks.run(trained, some, small, name)[0] for some in worlds})
        same = "the same" if ends == 1 else f"of {ends} kinds"
        yield f"Weights after 5 steps of {name} at world sizes {worlds[0]} to {worlds[-1]}: {same}."
    ranks.close()


if __name__ == "__main__":
    run(measure, __doc__)
