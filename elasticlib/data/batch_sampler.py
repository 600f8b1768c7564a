"""Global batches: each step of the job trains on the same samples at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from ..errors import ConfigError
from .permutation import index_chunks
from .position import SamplerPosition, Tail, check_int, check_one_of, even_share
from .sampler import ElasticDistributedSampler, GlobalPositionIterable, _warn


class ElasticBatchSampler(GlobalPositionIterable, Sampler[list[int]]):
    """Yields this rank's share of each global batch, as a list of indices, step by step.

    Batch k of an epoch has the same samples at any world size: the next `global_batch` samples of
    the sampler's order. The shares of the ranks differ by at most one sample. A rank's share may be
    empty, in the last batch or with more ranks than samples in a batch; the rank then takes part in
    the step with the empty batch that `CollateOrEmpty` makes.

    DDP and FSDP *average* the gradients of the ranks, as if all had used equally many samples. To
    end with the gradient of the mean loss over the global batch, multiply the summed loss by
    `sample_weight`::

        sampler = ElasticDistributedSampler(dataset, tail="exact")
        batches = ElasticBatchSampler(sampler, global_batch=256)
        collate = CollateOrEmpty(dataset)                  # this rank's last share may be empty
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(dataset, batch_sampler=batches, collate_fn=collate):
                (batches.sample_weight * loss(model(x), y, reduction="sum")).backward()
                ...
                batches.advance()                          # on every rank

    Its state is the sampler's. In torchdata's StatefulDataLoader give it as `batch_sampler`; the
    position is then kept without `advance`, but `samples` and `sample_weight` follow what it
    counted: without it all batches have the weight of the first, a smaller last one too.

    Args:
        sampler: keeps the position, the order, this rank and the world size.
        global_batch: samples a step, of all ranks together.
        tail: what becomes of the last batch if `global_batch` does not divide the number of
            samples: "exact" makes it smaller, "drop" leaves it out, "pad" fills it up with samples
            from the start of the order. By default the sampler's tail.
        contiguous: whether a rank's share is one contiguous part of the batch, for data that are
            best read in a row, such as a `ShardDataset`; otherwise samples are dealt one by one.

    Raises:
        ConfigError: `global_batch` is less than 1, or not an integer; or `tail` is unknown.
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

    def __len__(self) -> int:
        """Return how many batches an iterator would yield now; the same on every rank."""
        start = self.position
        return -(-(self._epoch_end(start) - start.consumed) // self.global_batch)

    @property
    def samples(self) -> int:
        """Samples, of all ranks together, in the batch after those that `advance` has counted.

        It is less than `global_batch` in the last batch if `tail` is "exact", and 0 when the epoch
        is over.
        """
        start = self.position
        return min(self.global_batch, self._epoch_end(start) - start.consumed)

    @property
    def sample_weight(self) -> float:
        """Factor of the summed loss of this rank's share of the batch of these `samples`.

        It is world size / samples, for gradients that are averaged over the ranks. Where they are
        summed over the ranks, divide it by the world size.

        Raises:
            ConfigError: the epoch is over.
        """
        if not self.samples:
            raise ConfigError("the epoch is over: no batch is left that could have a sample_weight")
        return self.sampler.num_replicas / self.samples

    def advance(self) -> int:
        """Count the next batch as trained on; to be called on every rank after each step.

        Returns:
            Its samples, of all ranks together.
        """
        samples = self.samples
        # The whole batch is counted, also beyond the end: a surplus shows a wrong count.
        self.progress.advance(self.global_batch)
        if self._is_used_up(self.position):  # a dropped tail is not for another batch size
            self.progress.finish_epoch()
        _warn(self.progress.surplus_counts())
        return samples

    def _share(self, samples: int) -> range:
        """Return this rank's part of a batch of so many samples."""
        rank, world_size = self.sampler.rank, self.sampler.num_replicas
        if self.contiguous:
            return even_share(samples, rank=rank, world_size=world_size)
        return range(rank, samples, world_size)

    def _chunks(self, start: SamplerPosition) -> Iterator[list[list[int]]]:
        order, end = self.sampler.order_of(start.epoch), self._epoch_end(start)
        rest = (end - start.consumed) % self.global_batch
        full = range(start.consumed, end - rest, self.global_batch)
        yield from index_chunks(order, full, self._share(self.global_batch))
        if rest:
            yield from index_chunks(order, range(end - rest, end, rest), self._share(rest))


class CollateOrEmpty:
    """A `collate_fn` that makes a batch of no samples for a rank with an empty share.

    The empty batch is the batch of the dataset's first sample, with each tensor cut to 0 rows and
    each list of strings emptied. All other batches are left to `collate_fn`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate_fn(samples) if samples else _emptied(self.collate_fn([self.dataset[0]]))


def _emptied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        emptied = {name: _emptied(part) for name, part in batch.items()}
        return type(batch)(emptied)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_emptied(part) for part in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        parts = [part for part in batch if not isinstance(part, (str, bytes))]
        return type(batch)([_emptied(part) for part in parts])  # type: ignore[call-arg]
    return batch
