"""Samples in shard files: which ranges of them a rank and its loader's worker read.

The samples stand in one row, shard after shard. From `consumed` on they are dealt in blocks, one
block a rank and step; so the job has used a prefix of the row after every step, and any world, with
any number of loader workers, goes on from there.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import Dataset

from ..errors import ConfigError
from .deal import Position, Tail, check_int, check_rank, end_of_deal

T = TypeVar("T")


def deal_ranges(
    position: Position,
    *,
    rank: int,
    world_size: int,
    batch: int,
    worker: int = 0,
    workers: int = 1,
    tail: Tail = "exact",
) -> Iterator[range]:
    """The ranges of the row that this loader worker of this rank reads, in its order.

    Step k of the job uses world_size blocks of `batch` samples, of which block `rank` is this
    rank's, and worker k % workers reads it: a `DataLoader` with `batch_size=batch` takes its
    workers' batches in that order. So k steps consume k x batch x world_size samples, as counted
    by `advance`, and the loader prefetches as it likes.

    Do not use `persistent_workers=True`: a worker has a copy of the position from when it was
    started. A persistent one begins each later epoch where the first one was resumed, and never
    reads the samples before.

    Args:
        position: where the job stands: `sampler.position`, asked for in the dataset's `__iter__`.
        rank, world_size: this process among the job's.
        batch: samples a rank uses in a step: the loader's batch_size.
        worker, workers: `torch.utils.data.get_worker_info()`'s id and num_workers; 0 and 1 in
            the process itself.
        tail: with "exact" the last step's ranges are shorter, or none. With "drop" that step is
            left out. With "pad" it is filled up: numbers of `position.length` or more stand for
            repeats, from the start of the row again (`number % length`).

    Raises:
        ConfigError: one of the numbers, or `tail`, cannot be.
    """
    check_rank(rank, world_size)
    if batch < 1 or not 0 <= worker < workers:
        raise ConfigError(
            f"need batch >= 1 and 0 <= worker < workers, got {batch}, {worker} and {workers}"
        )
    step = batch * world_size
    end = end_of_deal(position, step, tail)
    first = position.consumed + rank * batch
    starts = range(first, end, step)[worker::workers]
    return (range(start, min(start + batch, end)) for start in starts)


class ShardDataset(Dataset[T]):
    """A dataset over shard files: batches of it are read range by range, each shard in its order.

    With the sampler below each sample comes exactly once in an epoch, through resizes and kills;
    and torchdata's StatefulDataLoader keeps the position at any world size::

        def read(url, start, stop):                        # a tar file, one member a sample
            with fsspec.open(url) as file, tarfile.open(fileobj=file) as tar:
                for member in itertools.islice(tar, start, stop):
                    yield tar.extractfile(member).read()

        dataset = ShardDataset(urls, sizes, read)
        sampler = ElasticDistributedSampler(dataset, shuffle_algorithm="shards", tail="exact")
        batches = ElasticBatchSampler(sampler, global_batch=256, contiguous=True)
        loader = StatefulDataLoader(dataset, batch_sampler=batches, num_workers=4)

    It is not an `IterableDataset`: a loader's worker knows only its own batches, so torchdata's
    state of an iterable dataset is valid for one number of ranks and workers. With this class the
    sampler has the position, in the training process, and tells the workers what to read.

    Args:
        shards: what `read` opens, as paths or URLs.
        sizes: how many samples each shard has, in the same order.
        read: called with a shard, and the numbers of a first sample and of the one after the last;
            gives the samples between them, in order. It runs in the loader's workers.

    Raises:
        ConfigError: there are not as many sizes as shards, or one is negative or no integer.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        sizes: Sequence[int],
        read: Callable[[Any, int, int], Iterable[T]],
    ) -> None:
        if len(shards) != len(sizes):
            raise ConfigError(f"need a size for each shard, got {len(sizes)} for {len(shards)}")
        self.shards, self.read = shards, read
        self.sizes = tuple(check_int("a shard's size", size) for size in sizes)
        if min(self.sizes, default=0) < 0:
            raise ConfigError(f"need sizes >= 0, got {min(self.sizes)}")
        self._begins = [0, *itertools.accumulate(self.sizes)]

    def __len__(self) -> int:
        """Samples of all shards."""
        return self._begins[-1]

    def __getitem__(self, index: int) -> T:
        """One sample, by its number among those of all shards in the order given."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        """Samples by their numbers; those of numbers in a row are read at one go."""
        found: list[T] = []
        start = 0
        for at in range(1, len(indices) + 1):
            if at == len(indices) or indices[at] != indices[at - 1] + 1:
                found += self.samples(range(indices[start], indices[at - 1] + 1))
                start = at
        return found

    def samples(self, places: range) -> Iterator[T]:
        """The samples of a range of the row, as `deal_ranges` gives it to a reader of streams.

        Places beyond the row, of a tail that is padded, are repeats from its start.

        Raises:
            ConfigError: `places` has another step than 1, or begins before the row, or there are
                no samples; or `read` gave more or fewer than it was asked for.
        """
        if places and (places.step != 1 or places.start < 0 or not len(self)):
            raise ConfigError(f"need a range of the {len(self)} samples with step 1, got {places}")
        at = places.start
        while at < places.stop:
            inside = at % len(self)
            shard = bisect.bisect_right(self._begins, inside) - 1
            count = min(self._begins[shard + 1] - inside, places.stop - at)
            start = inside - self._begins[shard]
            yield from self._read(shard, start, start + count)
            at += count

    def _read(self, shard: int, start: int, stop: int) -> Iterator[T]:
        count = 0
        for count, sample in enumerate(self.read(self.shards[shard], start, stop), 1):
            if count <= stop - start:
                yield sample
        if count != stop - start:
            raise ConfigError(
                f"read({self.shards[shard]!r}, {start}, {stop}) gave {count} samples instead of"
                f" {stop - start}: has this shard the {self.sizes[shard]} of `sizes`?"
            )
