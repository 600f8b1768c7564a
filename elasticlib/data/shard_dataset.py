"""A dataset of samples in shard files, of which ranks read contiguous ranges."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
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
    """A dataset over shard files: a batch is read in ranges of consecutive samples of a shard.

    Samples are numbered through all shards, in the given order. A sampler that resumes with them in
    another order raises StateMismatchError. With the sampler below, each sample
    is used exactly once in an epoch, even if the job is resized or killed. torchdata's
    StatefulDataLoader saves the position for any world size::

        def read(url, start, stop):                        # a tar file with a member per sample
            with fsspec.open(url) as file, tarfile.open(fileobj=file) as tar:
                for member in itertools.islice(tar, start, stop):
                    yield tar.extractfile(member).read()

        dataset = ShardDataset(urls, sizes, read)
        sampler = ElasticDistributedSampler(dataset, order=dataset.shuffle_shards, tail="exact")
        batches = ElasticBatchSampler(sampler, global_batch=256, contiguous=True)
        loader = StatefulDataLoader(dataset, batch_sampler=batches, num_workers=4)

    The class is not an `IterableDataset`. A loader's worker knows only its own batches, so the
    state that torchdata saves for an iterable dataset is valid for one number of ranks and workers.
    Here the sampler in the training process has the position, and the workers read the samples that
    it selects.

    Args:
        shards: paths or URLs, or any other values that `read` accepts.
        sizes: number of samples in each shard, in the same order.
        read: called as `read(shard, start, stop)` in the loader's workers. Returns the samples with
            numbers from `start` to `stop`, which is not included, in order.

    Raises:
        ConfigError: there is another number of sizes than of shards, or a size is negative or not
            an integer.
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

    @property
    def digest(self) -> str:
        """A digest of the names and sizes of the shards in their order, 16 hexadecimal digits.

        The saved state of a sampler contains it, so that a job does not resume with the shards in
        another order. The directory that all shards are in and the queries of URLs do not count,
        and neither do shards that are no strings, bytes, paths or integers, or tuples of these.
        """
        names = [_name_of(shard) for shard in self.shards]
        folder = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071
        names = [name.removeprefix(folder) for name in names]
        return hashlib.sha256(json.dumps([names, self.sizes]).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        """Return the number of samples of all shards."""
        return self._starts[-1]

    def __getitem__(self, index: int) -> T:
        """Return one sample by its number."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        """Return samples by their numbers; consecutive numbers are read together."""
        samples: list[T] = []
        start = 0
        for i in range(1, len(indices) + 1):
            if i == len(indices) or indices[i] != indices[i - 1] + 1:
                samples += self.samples(indices[start], indices[i - 1] + 1)
                start = i
        return samples

    def samples(self, start: int, stop: int) -> Iterator[T]:
        """Read the samples with the numbers from `start` to `stop`, which is not included.

        Raises:
            ConfigError: the numbers are out of range, or `read` returned another number of samples
                than requested.
        """
        if not 0 <= start <= stop <= len(self):
            raise ConfigError(
                f"need 0 <= start <= stop <= {len(self)} samples, got {start} and {stop}"
            )
        while start < stop:
            shard = bisect.bisect_right(self._starts, start) - 1
            end = min(self._starts[shard + 1], stop)
            yield from self._read_exactly(
                shard, start - self._starts[shard], end - self._starts[shard]
            )
            start = end

    def _read_exactly(self, shard: int, start: int, stop: int) -> Iterator[T]:
        """Read samples of one shard. Raise ConfigError if `read` returns fewer or more of them."""
        count = 0
        for count, sample in enumerate(self.read(self.shards[shard], start, stop), 1):
            if count <= stop - start:
                yield sample
        if count != stop - start:
            raise ConfigError(
                f"read({self.shards[shard]!r}, {start}, {stop}) returned {count} samples instead of"
                f" {stop - start}: check that the shard has {self.sizes[shard]} samples, as `sizes`"
                " states"
            )

    def shuffle_shards(self, seed: int, epoch: int) -> Order:
        """Return the order of an epoch: shuffled shards, each from its first to its last sample.

        Give this method to `ElasticDistributedSampler` as its `order`. The memory of the order
        depends on the number of shards only.

        Args:
            seed: seed of the sampler.
            epoch: number of the epoch.
        """
        return _ShardOrder(self.sizes, Permutation(len(self.sizes), seed=seed, epoch=epoch))


def _name_of(shard: object) -> str:
    """Return a text that names the shard in every process, or an empty one if there is none."""
    if isinstance(shard, str | bytes | os.PathLike):
        return os.fsdecode(shard).partition("?")[0]
    if isinstance(shard, tuple):
        return " ".join(map(_name_of, shard))
    return str(shard) if isinstance(shard, int) else ""


class _ShardOrder:
    def __init__(self, sizes: Sequence[int], permutation: Permutation) -> None:
        sizes_by_shard = torch.tensor(sizes, dtype=torch.int64)
        shards = permutation[torch.arange(len(sizes))]  # in the order of the epoch
        shuffled_sizes = sizes_by_shard[shards]
        self._ends = shuffled_sizes.cumsum(0)  # position after the last sample of each shard
        first_samples = (sizes_by_shard.cumsum(0) - sizes_by_shard)[shards]
        # Added to a position of the order, this gives the number of the sample.
        self._shifts = first_samples - (self._ends - shuffled_sizes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, positions: Tensor, /) -> Tensor:
        return positions + self._shifts[torch.searchsorted(self._ends, positions, right=True)]
