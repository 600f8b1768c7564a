"""A dataset of samples in shard files, of which each rank reads contiguous ranges."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import ConfigError
from .permutation import Order, Permutation
from .position import check_int

T = TypeVar("T")


class ShardDataset(Dataset[T]):
    """A dataset over shard files: batches are read range by range, each shard in its order.

    Its samples are numbered through all shards in the order given. With the sampler below each
    sample comes exactly once in an epoch, through resizes and kills; and torchdata's
    StatefulDataLoader keeps the position at any world size::

        def read(url, start, stop):                        # a tar file, one member a sample
            with fsspec.open(url) as file, tarfile.open(fileobj=file) as tar:
                for member in itertools.islice(tar, start, stop):
                    yield tar.extractfile(member).read()

        dataset = ShardDataset(urls, sizes, read)
        sampler = ElasticDistributedSampler(dataset, order=dataset.shuffle_shards, tail="exact")
        batches = ElasticBatchSampler(sampler, global_batch=256, contiguous=True)
        loader = StatefulDataLoader(dataset, batch_sampler=batches, num_workers=4)

    It is not an `IterableDataset`: a loader's worker knows only its own batches, so torchdata's
    state of an iterable dataset is valid for one number of ranks and workers. With this class the
    sampler has the position, in the training process, and tells the workers what to read.

    Args:
        shards: what `read` opens, as paths or URLs.
        sizes: how many samples each shard has, in the same order.
        read: called with a shard, and the numbers of a first sample and of the one after the last;
            returns the samples between them, in order. It runs in the loader's workers.

    Raises:
        ConfigError: there are not as many sizes as shards, or a size is negative or not an integer.
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
        self._starts = [0, *itertools.accumulate(self.sizes)]

    def __len__(self) -> int:
        """Return the number of samples of all shards."""
        return self._starts[-1]

    def __getitem__(self, index: int) -> T:
        """Return one sample by its number."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        """Return samples by their numbers; consecutive numbers are read together."""
        found: list[T] = []
        start = 0
        for at in range(1, len(indices) + 1):
            if at == len(indices) or indices[at] != indices[at - 1] + 1:
                found += self.samples(indices[start], indices[at - 1] + 1)
                start = at
        return found

    def samples(self, start: int, stop: int) -> Iterator[T]:
        """Read the samples with the numbers from `start` to `stop`, which is not included.

        Raises:
            ConfigError: there are no such samples, or `read` returned another number of samples
                than it was asked for.
        """
        if not 0 <= start <= stop <= len(self):
            raise ConfigError(
                f"need 0 <= start <= stop <= {len(self)} samples, got {start} and {stop}"
            )
        while start < stop:
            shard = bisect.bisect_right(self._starts, start) - 1
            end = min(self._starts[shard + 1], stop)
            yield from self._read(shard, start - self._starts[shard], end - self._starts[shard])
            start = end

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

    def shuffle_shards(self, seed: int, epoch: int) -> Order:
        """Return the order of an epoch: shuffled shards, each from its first to its last sample.

        Give this method to `ElasticDistributedSampler` as its `order`. The order takes memory for
        the shards, and not for their samples.
        """
        return _ShardOrder(self.sizes, Permutation(len(self.sizes), seed=seed, epoch=epoch))


class _ShardOrder:
    def __init__(self, sizes: Sequence[int], permutation: Permutation) -> None:
        given = torch.tensor(sizes, dtype=torch.int64)
        order = permutation[torch.arange(len(sizes))]
        self._ends = given[order].cumsum(0)  # where each shard of the order ends
        starts = self._ends - given[order]
        # What to add to a position in a shard to get the number of the sample.
        self._shifts = (given.cumsum(0) - given)[order] - starts

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, positions: Tensor, /) -> Tensor:
        return positions + self._shifts[torch.searchsorted(self._ends, positions, right=True)]
