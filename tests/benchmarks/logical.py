"""What the same weights at any world size cost beside DDP: time and bytes of a step.

    python tests/benchmarks/logical.py [--world 2] [--rounds 15] [--width 512] [--batch 64]

The same model and samples in the same processes, one kind of step after another in each round;
ratios are of the same round, and medians over the rounds. `DDP, 4 parts` has each rank compute 4
parts of its batch one after another, and reduces after the last, without a fixed order; the last
ratio is to it, where there is one of as many parts. Bytes are what the kernel counted as sent on
rank 0's TCP connections, and what is held is computed. At the end a few steps at several world
sizes show whose weights differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which an optimizer would import in every fork
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticlib import LogicalWorkers
from elasticlib.logical.shares import share
from elasticlib.logical.tree import buffers, gradients_sent

BYTES_SENT = 200
"""Where `tcpi_bytes_sent` stands in Linux's struct tcp_info."""

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


class Trainer:
    """One kind of training, with a model and an optimizer of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
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
                mine = share(self.batch, world * parts, rank * parts + part)
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


def kinds(args: argparse.Namespace) -> dict[str, tuple[Step, int]]:
    """By name a step, and of how many logical workers; 0 is DDP's."""
    world = dist.get_world_size()
    found = {f"DDP, {n} parts": (Trainer(args).ddp(n), 0) for n in (1, 2, 4)}
    for count in (world, 2 * world, 4 * world, 2 * world + 1):
        found[f"{count} logical workers"] = (Trainer(args).logical(count), count)
    return found


def measure(args: argparse.Namespace) -> None:
    """On every rank; rank 0 prints."""
    steps = kinds(args)
    gradient = sum(p.numel() * p.element_size() for p in model_of(args.width).parameters())
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, int] = {}
    for number in range(args.rounds + 2):  # the first two are to warm up
        for name, (step, _) in steps.items():
            dist.barrier()
            before, began = bytes_sent(), time.perf_counter()
            step(number)
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            sent[name] = bytes_sent() - before
    if dist.get_rank() == 0:
        print(f"world {dist.get_world_size()}, gradient {gradient / 1e6:.1f} MB, a step:")
        heads = ("ms", "of DDP", "of parts", "MB sent", "expected", "MB held")
        print(" " * 20, *(f"{head:>8}" for head in heads))
        for name, (_, count) in steps.items():
            report(name, count, seconds, sent[name], gradient)


def ratio_of(taken: list[float], base: list[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(taken, base, strict=True)):.2f}"


def report(name: str, count: int, seconds: dict[str, list[float]], sent: int, size: int) -> None:
    world = dist.get_world_size()
    parts = count // world if count % world == 0 else 0
    ratios = [
        ratio_of(seconds[name][2:], seconds[base][2:]) if base in seconds else "-"
        for base in ("DDP, 1 parts", f"DDP, {parts} parts")
    ]
    due = gradients_sent(count, world, 0) if count else 2 * (world - 1) / world
    held = buffers(count, world, 0) if count else 1
    milliseconds = statistics.median(seconds[name][2:]) * 1e3
    megabytes = [part / 1e6 for part in (sent, due * size, held * size)]
    figures = [f"{milliseconds:8.1f}", *(f"{ratio:>8}" for ratio in ratios)]
    print(f"{name:20}", *figures, *(f"{part:8.1f}" for part in megabytes))


def trained(args: argparse.Namespace) -> None:
    """A few steps of both kinds; rank 0 prints what the weights come to."""
    for name in ("DDP", "8 logical workers"):
        trainer = Trainer(args)
        step = trainer.ddp(1) if name == "DDP" else trainer.logical(8)
        for number in range(5):
            step(number)
        digest = hashlib.sha256()
        for parameter in trainer.model.parameters():
            digest.update(bytes(parameter.detach().flatten().view(torch.uint8).tolist()))
        if dist.get_rank() == 0:
            print(f"world {dist.get_world_size()}, {name:18} {digest.hexdigest()[:16]}")


def in_ranks(world: int, body: Callable[[argparse.Namespace], None], args: Any) -> None:
    """Each rank a fork, with a thread of its own alone."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                torch.set_num_threads(1)
                store = dist.FileStore(str(Path(folder) / "meeting"), world)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
                body(args)
                sys.stdout.flush()
                os._exit(0)
            children.append(pid)
        ended = [os.waitpid(pid, 0)[1] for pid in children]
    if any(ended):
        raise SystemExit(f"ranks ended with {ended}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    in_ranks(args.world, measure, args)
    args.width, args.batch = 32, 40
    for world in (1, 2, 3, 4, 5):
        in_ranks(world, trained, args)


if __name__ == "__main__":
    main()
