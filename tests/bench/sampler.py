"""Shuffled samplers: time to the first index, memory, and time per index.

    python tests/bench/sampler.py [--repeat 5] [--torch-until 1000000]

The samplers of elasticlib are compared with those of torch. Each sample is taken in its own
process, which is forked from one that has imported torch. The two samplers of a row take turns.
The ratio of a time is the median of the ratios of all turns. The rows measure:

- first index: the time from `iter(sampler)` until the first index.
- memory for it: the growth of the peak memory of the process during this time.
- an index: the time of the whole iteration, divided by the number of indices.

An epoch of at most `--torch-until` samples is drawn completely by both samplers. For longer epochs,
elasticlib's sampler draws the first 2 million indices of all ranks. It is compared with torch's
sampler for an epoch of `--torch-until` samples, because torch's list of 10^9 indices would take
40 GB. In rows with `in batches`, a batch has 256 samples per rank.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from results import Row, Samples, run_command_line

ELASTIC = "ElasticDistributedSampler"
MAX_DRAWN = 2 * 10**6  # indices of all ranks that are drawn from a long epoch
BATCH_SIZE = 256
# The suffix of the row's name, the suffix of its description, and the two samplers.
PAIRS = (
    ("", "", ELASTIC, "DistributedSampler"),
    (".random", "", ELASTIC, "RandomSampler"),
    (".batches", " in batches", "ElasticBatchSampler", "BatchSampler"),
)
# The name, description and unit of each measurement.
MEASUREMENTS = (
    ("first", "first index", "s"),
    ("memory", "memory for it", "bytes"),
    ("each", "an index", "s"),
)


class Length:
    """A dataset that has a length and no samples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def create_sampler(kind: str, length: int, world: int, seed: int) -> Any:
    """Return a sampler of this class for rank 0."""
    import torch
    from torch.utils import data

    from elasticlib import ElasticBatchSampler, ElasticDistributedSampler

    torch.manual_seed(seed)
    distributed = data.DistributedSampler(Length(length), world, 0, seed=seed)
    if kind == "RandomSampler":
        return data.RandomSampler(Length(length))
    if kind == "BatchSampler":
        return data.BatchSampler(distributed, BATCH_SIZE, drop_last=False)
    if kind == "DistributedSampler":
        return distributed
    sampler = ElasticDistributedSampler(Length(length), world, 0, seed=seed)
    is_batched = kind == "ElasticBatchSampler"
    return ElasticBatchSampler(sampler, BATCH_SIZE * world) if is_batched else sampler


def draw_indices(kind: str, length: int, world: int, drawn: int, connection: Connection) -> None:
    """Send the seconds to the first index, the bytes until then, and the seconds per index."""
    import torch

    torch.set_num_threads(1)
    # torch loads modules with its first operations. No measurement includes them.
    list(itertools.islice(create_sampler(kind, 10_000, world, 1), 1000))
    sampler = create_sampler(kind, length, world, 0)
    before = peak_memory_bytes()
    started_at = time.perf_counter()
    indices = iter(sampler)
    next(indices)
    first, memory = time.perf_counter() - started_at, peak_memory_bytes() - before
    width = BATCH_SIZE if "Batch" in kind else 1
    count = 1
    for _ in itertools.islice(indices, drawn // world // width - 1):
        count += 1
    each = (time.perf_counter() - started_at) / (count * width)
    connection.send((first, memory, each))


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_in_turns(cases: list[tuple[Any, ...]], repeat: int) -> list[list[Samples]]:
    """Measure the cases in turns, each time in a new process.

    Args:
        cases: The arguments of `draw_indices` for each case.
        repeat: The number of turns.

    Returns:
        For each case, the samples of MEASUREMENTS.
    """
    rounds: list[list[tuple[float, ...]]] = [[] for _ in cases]
    server = multiprocessing.get_context("forkserver")
    for _ in range(repeat):
        for case, values in zip(cases, rounds, strict=True):
            connection, remote = server.Pipe()
            process = server.Process(target=draw_indices, args=(*case, remote))
            process.start()
            remote.close()
            values.append(connection.recv())
            process.join()
    units = [unit for _, _, unit in MEASUREMENTS]
    return [
        [Samples(unit, of) for unit, of in zip(units, zip(*values, strict=True), strict=True)]
        for values in rounds
    ]


def power_of_ten(length: int) -> str:
    """Return a power of ten as text, such as `10^6`."""
    return f"10^{len(str(length)) - 1}"


def rows_of(length: int, world: int, torch_until: int, repeat: int) -> Iterator[Row]:
    """Yield the rows of all samplers for one length and number of ranks."""
    job = f"{power_of_ten(length)} samples, {world} rank{'s' * (world > 1)}"
    for name_suffix, text_suffix, elastic, torch in PAIRS:
        if torch == "RandomSampler" and world > 1:  # it has no ranks
            continue
        cases = [(elastic, length, world, min(length, MAX_DRAWN))]
        if torch_until:
            torch_length = min(length, torch_until)
            cases.append((torch, torch_length, world, torch_length))
        samples, *others = measure_in_turns(cases, repeat)
        baselines = others[0] if others else [None] * len(samples)
        is_short = length <= torch_until
        baseline_name = torch if is_short else f"{torch} of {power_of_ten(torch_until)}"
        for (name, text, _), own, baseline in zip(MEASUREMENTS, samples, baselines, strict=True):
            yield Row(
                f"{name}{name_suffix}.{length:.0e}.{world}",
                f"{job}{text_suffix}: {text}",
                own,
                baseline,
                baseline_name if baseline else "",
                paired=name != "memory" and baseline is not None,
            )


def measure(
    *,
    lengths: str = f"{10**6},{10**9},{10**12}",
    worlds: str = "1,8",
    repeat: int = 5,
    torch_until: int = 10**6,
) -> Iterator[Row]:
    """Measure the samplers, and yield their rows.

    Args:
        lengths: The numbers of samples of an epoch, separated by commas.
        worlds: The numbers of ranks.
        repeat: The number of turns.
        torch_until: The longest epoch that torch's samplers draw. 0 measures elasticlib alone.
    """
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    for length in map(int, lengths.split(",")):
        for world in map(int, worlds.split(",")):
            yield from rows_of(length, world, torch_until, repeat)


if __name__ == "__main__":
    run_command_line(measure, __doc__)
