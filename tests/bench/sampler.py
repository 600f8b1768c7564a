"""Shuffled samplers: time to the first index, memory, and each index, beside torch's.

    python tests/bench/sampler.py [--repeat 5] [--torch-until 1000000]

Each figure is taken in a process of its own, forked from one that has imported torch; ours and
torch's take turns, and a ratio is of one turn. Memory is what its peak grows by until the first
index. An epoch of at most `--torch-until` samples is drawn whole, by all. Of longer ones ours draws
the first 2 million of the job beside torch's epoch of `--torch-until` samples, which is the longest
that torch is asked for: its list of 10^9 would take 40 GB. Batches are of 256 samples a rank.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from figures import Row, Samples, run

OURS = "ElasticDistributedSampler"
DRAWN = 2 * 10**6
"""Samples, over all ranks, that are drawn of an epoch that is not drawn whole."""
BATCH = 256
PAIRS = (
    ("", "", OURS, "DistributedSampler"),
    (".random", "", OURS, "RandomSampler"),
    (".batches", " in batches", "ElasticBatchSampler", "BatchSampler"),
)
"""What is appended to a row's name, what is said of it, our way and torch's."""


class Length:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def sampler_of(kind: str, length: int, world: int, seed: int) -> Any:
    import torch
    from torch.utils import data

    from elasticlib import ElasticBatchSampler, ElasticDistributedSampler

    torch.manual_seed(seed)
    torchs = data.DistributedSampler(Length(length), world, 0, seed=seed)
    if kind == "RandomSampler":
        return data.RandomSampler(Length(length))
    if kind == "BatchSampler":
        return data.BatchSampler(torchs, BATCH, drop_last=False)
    if kind == "DistributedSampler":
        return torchs
    sampler = ElasticDistributedSampler(Length(length), world, 0, seed=seed)
    return ElasticBatchSampler(sampler, BATCH * world) if kind == "ElasticBatchSampler" else sampler


def take(kind: str, length: int, world: int, drawn: int, told: Connection) -> None:
    """Tells seconds to the first index, bytes until then, and seconds an index."""
    import torch

    torch.set_num_threads(1)
    # What torch loads with its first operations is in neither figure.
    list(itertools.islice(sampler_of(kind, 10_000, world, 1), 1000))
    sampler = sampler_of(kind, length, world, 0)
    before = peak()
    start = time.perf_counter()
    indices = iter(sampler)
    next(indices)
    first, memory = time.perf_counter() - start, peak() - before
    width = BATCH if "Batch" in kind else 1
    count = 1
    for _ in itertools.islice(indices, drawn // world // width - 1):
        count += 1
    each = (time.perf_counter() - start) / (count * width)
    told.send((first, memory, each))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_turns(cases: list[tuple[Any, ...]], repeat: int) -> list[list[Samples]]:
    """Of each case, by several processes: seconds to the first index, bytes, seconds an index."""
    rounds: list[list[tuple[float, ...]]] = [[] for _ in cases]
    server = multiprocessing.get_context("forkserver")
    for _ in range(repeat):
        for case, found in zip(cases, rounds, strict=True):
            ours, theirs = server.Pipe()
            process = server.Process(target=take, args=(*case, theirs))
            process.start()
            theirs.close()
            found.append(ours.recv())
            process.join()
    units = ("s", "bytes", "s")
    return [
        [Samples(unit, of) for unit, of in zip(units, zip(*found, strict=True), strict=True)]
        for found in rounds
    ]


def power(length: int) -> str:
    return f"10^{len(str(length)) - 1}"


def rows_of(length: int, world: int, torch_until: int, repeat: int) -> Iterator[Row]:
    small = length <= torch_until
    job = f"{power(length)} samples, {world} rank{'s' * (world > 1)}"
    things = ("first", "memory", "each"), ("first index", "memory for it", "an index")
    for mark, how, ours, theirs in PAIRS:
        if theirs == "RandomSampler" and world > 1:  # it is of one rank
            continue
        cases = [(ours, length, world, min(length, DRAWN))]
        if torch_until:
            torchs = min(length, torch_until)
            cases.append((theirs, torchs, world, torchs))
        mine, *beside = in_turns(cases, repeat)
        name_of_it = theirs if small else f"{theirs} of {power(torch_until)}"
        for name, what, one, other in zip(
            *things, mine, beside[0] if beside else [None] * 3, strict=True
        ):
            said = f"{job}{how}: {what}"
            yield Row(
                f"{name}{mark}.{length:.0e}.{world}",
                said,
                one,
                other,
                name_of_it if other else "",
                paired=name != "memory" and other is not None,
            )


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
