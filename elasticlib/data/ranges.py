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

import attrs
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

    Not with `persistent_workers=True`: a worker has a copy of the dataset, and so of the position,
    from when it was started. Those that live on begin each later epoch where the first one was
    resumed, in its order, and the samples before that place are never read. Without it each
    epoch's workers are started anew, from the position as it is then.

    Args:
        position: where the job stands; a sampler over `range(samples)` keeps one
            (`sampler.position`), and counts and saves it. To be asked for when an epoch's
            iterator begins, in the dataset's `__iter__`.
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


@attrs.frozen
class Span:
    """Samples `start` to `stop` (not included) of shard number `shard`."""

    shard: int
    start: int
    stop: int


class Shards:
    """Shards of known sizes in a row, and what of which shard a range of the row is.

    Args:
        sizes: samples of each shard, by its number.
        order: the shards' numbers as they stand in the row, each once; by default 0, 1, 2, ...
            `permutation(len(sizes), seed=seed, epoch=epoch)` shuffles them.

    Raises:
        ConfigError: a size is negative, or `order` is not one of all shards.
    """

    def __init__(self, sizes: Sequence[int], order: Sequence[int] | None = None) -> None:
        self._order = list(range(len(sizes)) if order is None else order)
        if sorted(self._order) != list(range(len(sizes))):
            raise ConfigError(f"order must hold each of the {len(sizes)} shards' numbers once")
        if any(size < 0 for size in sizes):
            raise ConfigError(f"need sizes >= 0, got {min(sizes)}")
        in_row = (sizes[shard] for shard in self._order)
        self._begins = list(itertools.accumulate(in_row, initial=0))

    def __len__(self) -> int:
        """Samples in the row."""
        return self._begins[-1]

    def spans(self, places: range) -> Iterator[Span]:
        """What `places`, a range of steps of 1, is made of, in its order.

        Places beyond the row, of a tail that is padded, are repeats from its start.

        Raises:
            ConfigError: `places` has another step, or begins before the row, or there are no
                samples.
        """
        if places and (places.step != 1 or places.start < 0 or not len(self)):
            raise ConfigError(f"need a range of the {len(self)} samples with step 1, got {places}")
        at = places.start
        while at < places.stop:
            inside = at % len(self)
            number = bisect.bisect_right(self._begins, inside) - 1
            count = min(self._begins[number + 1] - inside, places.stop - at)
            start = inside - self._begins[number]
            yield Span(self._order[number], start, start + count)
            at += count


class ShardDataset(Dataset[T]):
    """A dataset over shard files: batches of it are read range by range, each shard in its order.

    Each sample comes exactly once an epoch, through resizes and kills, where the sampler deals it
    so; and torchdata's StatefulDataLoader keeps the position at any world size::

        def read(url, start, stop):                        # a tar file, one member a sample
            with fsspec.open(url) as file, tarfile.open(fileobj=file) as tar:
                for member in itertools.islice(tar, start, stop):
                    yield tar.extractfile(member).read()

        dataset = ShardDataset(urls, sizes, read)
        sampler = ElasticDistributedSampler(dataset, shuffle_algorithm="shards", tail="exact")
        batches = ElasticBatchSampler(sampler, global_batch=256, contiguous=True)
        loader = StatefulDataLoader(dataset, batch_sampler=batches, num_workers=4)

    Why it is no `IterableDataset`: a worker of a loader knows its own batches alone, so what
    torchdata keeps of an iterable dataset holds for one number of ranks and workers. Here the
    position is the sampler's, in the training process, and workers are told what to read.

    Args:
        shards: what `read` opens, as paths or URLs.
        sizes: how many samples each shard has, in the same order.
        read: called with a shard, and the numbers of a first sample and of the one after the last;
            gives the samples between them, in order. It runs in the loader's workers.

    Attributes:
        sizes: as given, as a tuple.

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
        self._row = Shards(self.sizes)

    def __len__(self) -> int:
        """Samples of all shards."""
        return len(self._row)

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

        Raises:
            ConfigError: `read` gave more or fewer than it was asked for.
        """
        for span in self._row.spans(places):
            shard, asked = self.shards[span.shard], span.stop - span.start
            count = 0
            for count, sample in enumerate(self.read(shard, span.start, span.stop), 1):
                if count <= asked:
                    yield sample
            if count != asked:
                raise ConfigError(
                    f"read({shard!r}, {span.start}, {span.stop}) gave {count} samples instead of"
                    f" {asked}: has this shard the {self.sizes[span.shard]} of `sizes`?"
                )
