"""Shuffled samplers: time to the first index, memory, and a whole epoch, beside torch's.

    python tests/bench/sampler.py [--repeat 5] [--torch-until 1000000]

Each figure is taken in a process of its own, forked from one that has imported torch. Memory is
what its peak grows by until the first index. An epoch of at most `--torch-until` samples is drawn
whole, by all. Of longer ones ours draws the first 2 million of the job, and torch's has no figure:
its list of 10^9 would take 40 GB. `randperm` is our sampler with `shuffle_algorithm="randperm"`,
which deals in torch's own order.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from figures import Row, Samples, run

OURS, RANDPERM, TORCH = "ours", "ours, `randperm`", "DistributedSampler"
DRAWN = 2 * 10**6
"""Samples, over all ranks, that are drawn of an epoch that is not drawn whole."""


class Length:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def take(kind: str, length: int, world: int, drawn: int, told: Connection) -> None:
    """Tells seconds to the first index, bytes until then, and seconds an index."""
    import torch
    from torch.utils.data import DistributedSampler

    from elasticlib import ElasticDistributedSampler

    torch.set_num_threads(1)

    def begin(samples: int, seed: int) -> Iterator[int]:
        if kind == TORCH:
            return iter(DistributedSampler(Length(samples), world, 0, seed=seed))
        algorithm = "feistel" if kind == OURS else "randperm"
        sampler = ElasticDistributedSampler(
            Length(samples), world, 0, seed=seed, shuffle_algorithm=algorithm
        )
        return iter(sampler)

    # What torch loads with its first operations is in neither figure.
    list(itertools.islice(begin(1000, 1), 1000))
    before = peak()
    start = time.perf_counter()
    indices = begin(length, 0)
    next(indices)
    first, memory = time.perf_counter() - start, peak() - before
    count = 1
    for _ in itertools.islice(indices, drawn // world - 1):
        count += 1
    each = (time.perf_counter() - start) / count
    told.send((first, memory, each))


def measured(kind: str, length: int, world: int, drawn: int, repeat: int) -> list[Samples]:
    """Of several processes: seconds to the first index, bytes, seconds an index."""
    rounds = []
    server = multiprocessing.get_context("forkserver")
    for _ in range(repeat):
        ours, theirs = server.Pipe()
        process = server.Process(target=take, args=(kind, length, world, drawn, theirs))
        process.start()
        theirs.close()
        rounds.append(ours.recv())
        process.join()
    units = ("s", "bytes", "s")
    return [Samples(unit, of) for unit, of in zip(units, zip(*rounds, strict=True), strict=True)]


def rows_of(length: int, world: int, torch_until: int, repeat: int) -> Iterator[Row]:
    small = length <= torch_until
    case = (length, world, length if small else min(length, DRAWN), repeat)
    beside: Sequence[Samples | None] = measured(TORCH, *case) if small else (None,) * 3
    job = f"10^{len(str(length)) - 1} samples, {world} rank{'s' * (world > 1)}"
    for kind, mark in ((OURS, ""), (RANDPERM, ".randperm"))[: 2 if small else 1]:
        things = ("first", "memory", "each"), ("first index", "memory for it", "an index")
        for name, what, ours, theirs in zip(*things, measured(kind, *case), beside, strict=True):
            said = f"{job}: {what}" + (f" ({RANDPERM})" if mark else "")
            yield Row(f"{name}{mark}.{length:.0e}.{world}", said, ours, theirs, TORCH)


def measure(
    *,
    lengths: str = f"{10**6},{10**9},{10**12}",
    worlds: str = "1,8",
    repeat: int = 5,
    torch_until: int = 10**6,
) -> Iterator[Row]:
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    for length in map(int, lengths.split(",")):
        for world in map(int, worlds.split(",")):
            yield from rows_of(length, world, torch_until, repeat)


if __name__ == "__main__":
    run(measure, __doc__)
