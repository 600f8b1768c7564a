"""Shuffled samplers: time to the first index, memory, and a whole epoch, beside torch's.

    python tests/benchmarks/sampler.py [--repeat 5] [--torch-until 1000000]

Each figure is taken in a process of its own, forked from one that has imported torch. Memory is
what its peak grows by. An epoch of at most `--torch-until` samples is drawn whole, by all. Of
longer ones ours draws the first 2 million of the job, and torch's has no figure: its list of 10^9
would take 40 GB.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import resource
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

KINDS = ("ours", "torch", "ours, randperm")
DRAWN = 2 * 10**6
"""Samples, over all ranks, that are drawn of an epoch that is not drawn whole."""


class Samples:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(kind: str, length: int, world: int, drawn: int, told: Connection) -> None:
    """Tells seconds to the first index, bytes until then and in all, and nanoseconds an index."""
    import torch
    from torch.utils.data import DistributedSampler

    from elasticlib import ElasticDistributedSampler

    torch.set_num_threads(1)

    def begin(samples: int, seed: int) -> Iterator[int]:
        if kind == "torch":
            return iter(DistributedSampler(Samples(samples), world, 0, seed=seed))
        algorithm = "feistel" if kind == "ours" else "randperm"
        sampler = ElasticDistributedSampler(
            Samples(samples), world, 0, seed=seed, shuffle_algorithm=algorithm
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
    told.send((first, memory, peak() - before, each * 1e9))


def measured(kind: str, length: int, world: int, drawn: int, repeat: int) -> tuple[float, ...]:
    """Medians of several processes."""
    rounds = []
    server = multiprocessing.get_context("forkserver")
    for _ in range(repeat):
        ours, theirs = server.Pipe()
        process = server.Process(target=measure, args=(kind, length, world, drawn, theirs))
        process.start()
        theirs.close()
        rounds.append(ours.recv())
        process.join()
    return tuple(statistics.median(column) for column in zip(*rounds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10**6, 10**9, 10**12])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--torch-until", type=int, default=10**6)
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    print(f"{'samples':>10} {'world':>5} {'sampler':16}", end="")
    print(f"{'first index':>12} {'memory':>10} {'peak':>10} {'per index':>10} {'to torch':>9}")
    for length, world in itertools.product(args.lengths, args.worlds):
        small = length <= args.torch_until
        case = (length, world, length if small else min(length, DRAWN), args.repeat)
        torchs = measured("torch", *case) if small else None
        for kind in KINDS if small else KINDS[:1]:
            found = torchs if kind == "torch" else measured(kind, *case)
            assert found is not None
            first, memory, most, each = found
            ratio = f"{each / torchs[3]:9.2f}" if torchs else f"{'':9}"
            print(f"{length:10.0e} {world:5} {kind:16}{first * 1e3:9.3f} ms", end="")
            print(f" {memory / 2**20:7.2f} MB {most / 2**20:7.2f} MB {each:7.0f} ns {ratio}")


if __name__ == "__main__":
    main()
