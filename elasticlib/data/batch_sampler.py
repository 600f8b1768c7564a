"""Global batches: each step of a job trains on the same samples at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import Sampler, default_collate

from ..errors import ConfigError
from .permutation import index_chunks
from .position import SamplerPosition, Tail, check_int, check_one_of, even_share
from .sampler import ElasticDistributedSampler, GlobalPositionIterable, _warn


class ElasticBatchSampler(GlobalPositionIterable, Sampler[list[int]]):
    """Yields this rank's share of each global batch, as a list of indices, step by step.

    Batch k of an epoch has the same samples at any world size: the next `global_batch` samples of
    the sampler's order. The shares of the ranks differ by at most one sample. A rank's share may be
    empty, in the last batch or if there are more ranks than samples in a batch. The rank then takes
    part in the step with the empty batch that `EmptyBatchCollator` creates.

    DDP and FSDP *average* the gradients of the ranks, as if all had used the same number of
    samples. To get the gradient of the mean loss over the global batch, multiply the sum of the
    losses by `sample_weight`::

        sampler = ElasticDistributedSampler(dataset, tail="exact")
        batches = ElasticBatchSampler(sampler, global_batch=256)
        collate = EmptyBatchCollator(dataset)              # the last share of a rank can be empty
        loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collate)
        for epoch, local_batches in batches.epochs(3, loader):
            for x, y in local_batches:
                (batches.sample_weight * loss(model(x), y, reduction="sum")).backward()
                ...
                batches.advance()                          # on every rank

    Its state is the sampler's. torchdata's StatefulDataLoader takes it as `batch_sampler`, and then
    saves the position without `advance`. But `next_batch_size` and `sample_weight` depend on what
    `advance` has counted: without it, a smaller last batch has the weight of a full one.

    Args:
        sampler: has the position, the order, the rank and the world size.
        global_batch: number of samples in each step, of all ranks together.
        tail: what happens to the last batch if `global_batch` does not divide the number of
            samples. "exact" makes it smaller, "drop" leaves it out, "pad" fills it with samples
            from the start of the order. By default the sampler's tail.
        contiguous: if True, a rank's share is one contiguous part of the batch, for data that is
            read fastest in sequence, such as a `ShardDataset`. Otherwise the samples of a batch are
            distributed round-robin.

    Raises:
        ConfigError: `global_batch` is less than 1 or not an integer, or `tail` is unknown.
    """

    def __init__(
        self,
        sampler: ElasticDistributedSampler,
        global_batch: int,
        *,
        tail: Tail | None = None,
        contiguous: bool = False,
    ) -> None:
        self.tail: Tail = sampler.tail if tail is None else tail
        check_one_of("tail", self.tail, Tail)
        self.sampler, self.global_batch = sampler, check_int("global_batch", global_batch)
        if self.global_batch < 1:
            raise ConfigError(f"need global_batch >= 1, got {global_batch}")
        self.progress, self.contiguous = sampler.progress, contiguous

    @property
    def _stride(self) -> int:
        return self.global_batch

    def _num_items(self, start: SamplerPosition) -> int:
        return -(-(self._epoch_end(start) - start.consumed) // self.global_batch)

    @property
    def next_batch_size(self) -> int:
        """Number of samples, of all ranks together, in the next batch.

        The next batch is the one after those that `advance` has counted. If `tail` is "exact", the
        last batch can be smaller than `global_batch`. At the end of the epoch the number is 0.
        """
        start = self.position
        return min(self.global_batch, self._epoch_end(start) - start.consumed)

    @property
    def sample_weight(self) -> float:
        """Factor for the sum of the losses of this rank's share of the next batch.

        The factor is world size / `next_batch_size`, for gradients that are averaged over the
        ranks. If gradients are summed over the ranks, divide it by the world size.

        Raises:
            ConfigError: no batch of the epoch is left.
        """
        if not self.next_batch_size:
            raise ConfigError("sample_weight is undefined, because no batch of the epoch is left")
        return self.sampler.num_replicas / self.next_batch_size

    def advance(self) -> int:
        """Count the next batch as trained on. Call it on every rank after each step.

        Returns:
            The number of samples in the batch, of all ranks together.
        """
        batch_size = self.next_batch_size
        # A full batch is counted even beyond the end, so that counting twice can be detected.
        self.progress.advance(self.global_batch)
        if self._is_exhausted(self.position):
            self.progress.finish_epoch()  # Another batch size must not use a dropped tail.
        _warn(self.progress.surplus_warning())
        return batch_size

    def _local_offsets(self, batch_size: int) -> range:
        """Return the offsets of this rank's samples in a batch of `batch_size` samples."""
        rank, world_size = self.sampler.rank, self.sampler.num_replicas
        if self.contiguous:
            return even_share(batch_size, rank=rank, world_size=world_size)
        return range(rank, batch_size, world_size)

    def _chunks(self, start: SamplerPosition) -> Iterator[list[list[int]]]:
        order, end = self.sampler.epoch_order(start.epoch), self._epoch_end(start)
        last = (end - start.consumed) % self.global_batch  # samples in a smaller last batch
        full_batches = range(start.consumed, end - last, self.global_batch)
        yield from index_chunks(order, full_batches, self._local_offsets(self.global_batch))
        if last:
            yield from index_chunks(order, range(end - last, end, last), self._local_offsets(last))


class Indexable(Protocol):
    """A dataset whose samples have indices, such as one of torch or of Hugging Face."""

    def __getitem__(self, index: int, /) -> Any: ...


class EmptyBatchCollator:
    """A `collate_fn` that creates a batch without samples for a rank with an empty share.

    The empty batch is the batch of the dataset's first sample, with each tensor reduced to 0 rows
    and each list of strings to an empty list. All other batches are created by `collate_fn`. If the
    batch contains anything else, such as NumPy arrays, dataclasses or graphs, an empty share raises
    ConfigError: the rank would otherwise train on the first sample.

    Args:
        dataset: its first sample shows the structure of a batch.
        collate_fn: creates a batch from a list of samples; torch's default by default.
    """

    def __init__(
        self,
        dataset: Indexable,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of a list of samples, which can be empty.

        Raises:
            ConfigError: the list is empty, and the samples cannot be removed from a batch.
        """
        if samples:
            return self.collate_fn(samples)
        return _without_samples(self.collate_fn([self.dataset[0]]))


def _without_samples(batch: Any) -> Any:
    if isinstance(batch, Tensor) and batch.dim():
        return batch[:0]
    if isinstance(batch, Mapping):
        parts_by_name = {name: _without_samples(part) for name, part in batch.items()}
        return type(batch)(parts_by_name)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_without_samples(part) for part in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        parts = [part for part in batch if not isinstance(part, (str, bytes))]
        return type(batch)([_without_samples(part) for part in parts])  # type: ignore[call-arg]
    if batch is None or isinstance(batch, (str, bytes)):
        return batch
    what = "tensor without dimensions" if isinstance(batch, Tensor) else type(batch).__name__
    raise ConfigError(
        f"this rank has no sample of the batch, and no sample can be removed from a {what}: give"
        " the loader a collate_fn that returns a batch without samples for an empty list, instead"
        " of EmptyBatchCollator, or the sampler tail='drop'"
    )
