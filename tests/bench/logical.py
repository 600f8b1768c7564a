"""Logical workers and DDP: time and network traffic of a training step.

    python tests/bench/logical.py [--world 2] [--rounds 15] [--width 512] [--batch 64]

`LogicalWorkers` trains bitwise the same weights at any number of ranks. This benchmark measures
what that costs. All kinds of step use the same model, the same samples and the same processes. In
each round, every kind makes one step. The ratio of a time is the median of the ratios of all
rounds.

- DDP: each rank computes its share of the batch at once.
- DDP in N parts: each rank computes its share in N parts, one after another. It reduces gradients
  after the last part, in no fixed order.
- bytes sent: what the kernel counted as sent on the TCP connections of rank 0.

At the end, a few steps at several numbers of ranks show which weights differ.
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
from results import Row, Samples, format_quantity, run_command_line
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticlib import LogicalWorkers
from elasticlib.data.position import even_share

sys.path.append(str(Path(__file__).resolve().parent.parent))
from ranks import Ranks

BYTES_SENT_OFFSET = 200  # of the field tcpi_bytes_sent in Linux's struct tcp_info
WARMUP_ROUNDS = 2
COMPARED_WEIGHTS = ("DDP", "8 logical workers")
Step = Callable[[int], None]


def tcp_bytes_sent() -> int:
    """Return the bytes that this process has sent on all its current TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
        except OSError:
            continue
        if len(info) >= BYTES_SENT_OFFSET + 8:
            total += struct.unpack_from("Q", info, BYTES_SENT_OFFSET)[0]
    return total


def create_model(width: int) -> nn.Module:
    """Return the model with the same initial weights in every process."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))]
    layers += [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
    ]
    return nn.Sequential(*layers)


@attrs.frozen
class Settings:
    """The size of a training."""

    rounds: int
    width: int  # of the model
    batch: int  # samples of a step, over all ranks


class Trainer:
    """A training with its own model and optimizer."""

    def __init__(self, settings: Settings) -> None:
        self.model, self.batch = create_model(settings.width), settings.batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.inputs = torch.randn(
            settings.batch, settings.width, generator=torch.Generator().manual_seed(1)
        )

    def loss(self, model: nn.Module, samples: range) -> torch.Tensor:
        """Return the share of these samples in the mean loss of the batch."""
        inputs = self.inputs[list(samples)]
        return (model(inputs) - inputs).square().sum() / (self.batch * inputs.shape[1])

    def ddp_step(self, parts: int) -> Step:
        """Return a step of DDP in which each rank computes this number of parts."""
        parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        rank, world = dist.get_rank(), dist.get_world_size()

        def step(_: int) -> None:
            self.optimizer.zero_grad()
            for part in range(parts):
                share = even_share(self.batch, rank=rank * parts + part, world_size=world * parts)
                parallel.require_backward_grad_sync = part == parts - 1
                (self.loss(parallel, share) * world).backward()
            self.optimizer.step()

        return step

    def logical_step(self, count: int) -> Step:
        """Return a step of this number of logical workers."""
        logical = LogicalWorkers(self.model, count)

        def step(number: int) -> None:
            for worker in logical.step(number):
                self.loss(self.model, worker.samples(self.batch)).backward()
            logical.reduce()
            self.optimizer.step()

        return step


def logical_counts(world: int) -> tuple[int, ...]:
    """Return the numbers of logical workers: 1, 2 and 4 per rank, and one that is uneven."""
    return (world, 2 * world, 4 * world, 2 * world + 1)


def ddp_name(parts: int) -> str:
    """Return the name of a DDP step with this number of parts."""
    return "DDP" if parts == 1 else f"DDP in {parts} parts"


def create_steps(settings: Settings) -> dict[str, Step]:
    """Return all kinds of step, by name."""
    steps = {ddp_name(parts): Trainer(settings).ddp_step(parts) for parts in (1, 2, 4)}
    for count in logical_counts(dist.get_world_size()):
        steps[f"{count} logical workers"] = Trainer(settings).logical_step(count)
    return steps


def time_steps(settings: Settings) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds and the bytes of each kind of step in each round; runs on every rank."""
    steps = create_steps(settings)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(settings.rounds + WARMUP_ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            before, started_at = tcp_bytes_sent(), time.perf_counter()
            step(number)
            dist.barrier()
            if number >= WARMUP_ROUNDS:
                seconds[name].append(time.perf_counter() - started_at)
                sent[name].append(tcp_bytes_sent() - before)
    return seconds, sent


def weights_digest(settings: Settings, name: str) -> str:
    """Return the SHA-256 of the weights after five steps of this kind."""
    trainer = Trainer(settings)
    step = trainer.ddp_step(1) if name == "DDP" else trainer.logical_step(8)
    for number in range(5):
        step(number)
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(bytes(parameter.detach().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


def measure(
    *, world: int = 2, rounds: int = 15, width: int = 512, batch: int = 64
) -> Iterator[Row | str]:
    """Measure the steps, and yield their rows and notes.

    Args:
        world: The number of ranks.
        rounds: The number of measured steps of each kind.
        width: The width of the model.
        batch: The samples of a step, over all ranks.
    """
    ranks = Ranks()
    # The values of rank 0.
    seconds, sent = ranks.run(time_steps, world, Settings(rounds, width, batch))[0]
    for count in logical_counts(world):
        name = f"{count} logical workers"
        text = f"a step of {name} on {world} ranks"
        samples = Samples("s", seconds[name])
        parts = count // world if count % world == 0 else 1
        for base in dict.fromkeys((1, parts)):
            ddp = Samples("s", seconds[ddp_name(base)])
            yield Row(f"step.{count}.{base}", text, samples, ddp, ddp_name(base), paired=True)
        traffic = [Samples("bytes", sent[kind]) for kind in (name, "DDP")]
        yield Row(f"bytes.{count}", f"bytes sent in {text}", *traffic, "DDP")
    size = sum(p.numel() * p.element_size() for p in create_model(width).parameters())
    yield f"The gradient has {format_quantity(size, 'bytes')}, the batch has {batch} samples."
    small, worlds = Settings(5, 32, 40), (1, 2, 3, 4, 5)
    for name in COMPARED_WEIGHTS:
        digests = {ranks.run(weights_digest, count, small, name)[0] for count in worlds}
        result = "identical" if len(digests) == 1 else f"{len(digests)} different sets of weights"
        yield f"Weights after 5 steps of {name} on {worlds[0]} to {worlds[-1]} ranks: {result}."
    ranks.close()


if __name__ == "__main__":
    run_command_line(measure, __doc__)
