"""Batches of the job rather than of a rank: each is the next so many samples of the order.

A step uses the same samples at any world size; a rank is given its share of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from ..errors import ConfigError
from .batch import BatchPlan, plan_batches
from .deal import Position, Tail, check_tail, end_of_deal
from .drawn import Source, draw
from .order import LISTED, indices_at, order_of
from .sampler import ElasticDistributedSampler
from .state import OnMismatch


class ElasticBatchSampler(Sampler[list[int]]):
    """Yields this rank's share of each global batch, as a list of indices, step by step.

    Batch k of an epoch holds the same samples whatever the world size: positions consumed to
    consumed + global_batch of the sampler's order, dealt to the ranks like cards. Shares differ
    by at most one; a rank's may be empty, in the last batch or where there are more ranks than
    samples in a batch, and the rank takes part in the step all the same. torch's own collate
    function cannot make a batch of no samples; `CollateOrEmpty` can. ::

        sampler = ElasticDistributedSampler(dataset, tail="exact")
        batches = ElasticBatchSampler(sampler, global_batch=256)
        collate = CollateOrEmpty(dataset)                  # this rank's last share may be empty
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(dataset, batch_sampler=batches, collate_fn=collate):
                weight = batches.plan().per_sample         # of this step, which may be the last
                (weight * loss(model(x), y, reduction="sum")).backward()
                ...
                batches.advance()                          # on every rank

    Its state is the sampler's. In torchdata's StatefulDataLoader give it as `batch_sampler`; the
    position is then kept without `advance`, but `plan` and `samples` go by what was counted, not
    by what was drawn: who never counts gets the weight of the first batch for all, which is wrong
    for a smaller last one.

    Args:
        sampler: keeps the position, the order, this rank and the world size.
        global_batch: samples a step, of all ranks together.
        max_micro_batch: the most that one rank's memory takes at once; only `plan` uses it.
        tail: what becomes of the last batch where the samples do not divide by `global_batch`:
            "exact" makes it smaller, "drop" leaves it out, "pad" fills it up with samples from
            the start of the order. By default the sampler's tail.

    Raises:
        ConfigError: `global_batch`, `max_micro_batch` or `tail` cannot be.
    """

    def __init__(
        self,
        sampler: ElasticDistributedSampler,
        global_batch: int,
        *,
        max_micro_batch: int | None = None,
        tail: Tail | None = None,
    ) -> None:
        planned = plan_batches(global_batch, sampler.num_replicas, max_micro_batch)
        self.tail: Tail = sampler.tail if tail is None else tail
        check_tail(self.tail)
        self.sampler, self.global_batch = sampler, planned.global_batch
        self.max_micro_batch = max_micro_batch

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's shares from the present position to the epoch's end."""
        progress = self.sampler.progress
        source = Source(
            runs=self._runs,
            stride=self.global_batch,
            restore=lambda state: progress.restore(state, self._over),
            ended=progress.ended,
            kept=progress.kept,
        )
        return draw(source, progress.begin(self._over))

    def __len__(self) -> int:
        """How many batches an iterator would yield now: what is left; the same on every rank."""
        start = self.sampler.progress.ahead(self._over)
        return -(-(self._end(start) - start.consumed) // self.global_batch)

    @property
    def samples(self) -> int:
        """How many samples, of all ranks, are in the global batch that is used next.

        That is the one after those that `advance` counted, whatever a loader has drawn.
        Less than `global_batch` in the last one if `tail` is "exact"; 0 when the epoch is over
        and the next does not begin by itself.
        """
        start = self.sampler.progress.here(self._over)
        return min(self.global_batch, self._end(start) - start.consumed)

    def plan(self) -> BatchPlan:
        """How the ranks take the next step: its sizes and weights; see `BatchPlan`.

        As `samples`, of the batch after those that `advance` counted.

        Raises:
            ConfigError: the epoch is over.
        """
        if not self.samples:
            raise ConfigError("there is no batch to plan: the epoch is over")
        return plan_batches(self.samples, self.sampler.num_replicas, self.max_micro_batch)

    def advance(self) -> int:
        """Count the next batch as trained on; to be called on every rank after each step.

        Returns:
            Its samples, of all ranks.

        Raises:
            ConfigError: epochs have begun by themselves because nobody counted.
        """
        progress = self.sampler.progress
        here = progress.position
        samples = min(self.global_batch, self._end(here) - here.consumed)
        progress.advance(samples)
        if self._over(progress.position):  # a tail that is dropped is not for another batch size
            progress.advance(progress.position.length)
        return samples

    def set_epoch(self, epoch: int) -> None:
        """As the sampler's `set_epoch`."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, which is the job's: any world and any global batch reads it."""
        return self.sampler.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch = "refuse"
    ) -> None:
        """As the sampler's `load_state_dict`."""
        self.sampler.load_state_dict(state, on_mismatch=on_mismatch)

    def _end(self, start: Position) -> int:
        return end_of_deal(start, self.global_batch, self.tail)

    def _over(self, position: Position) -> bool:
        return self._end(position) <= position.consumed

    def _runs(self, start: Position) -> Iterator[list[list[int]]]:
        rank, world = self.sampler.rank, self.sampler.num_replicas
        whole, rest = divmod(self._end(start) - start.consumed, self.global_batch)
        share = torch.arange(len(range(rank, self.global_batch, world))).mul_(world).add_(rank)
        order, begin, most = order_of(start), start.consumed, max(1, LISTED // max(1, len(share)))
        size = 1
        while whole:
            count = min(size, whole, most)
            firsts = torch.arange(count).mul_(self.global_batch).add_(begin)
            places = (firsts[:, None] + share).flatten()
            yield order(places).view(count, len(share)).tolist()
            begin, whole, size = begin + count * self.global_batch, whole - count, 4 * size
        if rest:
            places_left = range(begin + rank, begin + rest, world)
            yield [[index for run in indices_at(start, places_left) for index in run]]


class CollateOrEmpty:
    """A `collate_fn` that makes a batch of no samples for a rank with an empty share.

    It is the batch of the dataset's first sample, with each tensor cut to 0 rows and each list of
    strings emptied. All other batches are left to `collate_fn`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate_fn(samples) if samples else _cut(self.collate_fn([self.dataset[0]]))


def _cut(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        cut = {name: _cut(part) for name, part in batch.items()}
        return type(batch)(cut)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(part) for part in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        parts = [part for part in batch if not isinstance(part, (str, bytes))]
        return type(batch)([_cut(part) for part in parts])  # type: ignore[call-arg]
    return batch
