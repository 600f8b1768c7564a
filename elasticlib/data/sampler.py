"""A `DistributedSampler` whose progress belongs to the job, not to a rank or a world size.

The order of an epoch depends on seed and epoch alone, and the state counts what was *trained on*,
so a job of any size continues exactly where a job of another size stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch.utils.data import Dataset, DistributedSampler

from ..errors import ConfigError, StateMismatch
from .deal import Position, Tail, advance, check_tail, deal, decode, encode


class ElasticDistributedSampler(DistributedSampler[int]):
    """Deals the samples of an epoch to the ranks, and goes on at any world size.

    Without a resume it yields what torch's `DistributedSampler` yields. To resume::

        sampler = ElasticDistributedSampler(dataset)
        sampler.load_state_dict(checkpoint["sampler"])     # on every rank, the same state
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)                       # the same epoch keeps its position
            for batch in DataLoader(dataset, batch_size, sampler=sampler):
                train(batch)
                sampler.advance(batch_size * world_size)   # on every rank, the global count

    `advance` is what moves the state. Iterating does not, because a loader with workers draws
    indices long before they are trained on.

    Args:
        dataset: what is sampled from; only its length is used.
        num_replicas: the world size; by default that of the process group.
        rank: this process among them; by default its rank in the process group.
        shuffle: whether an epoch's order is a random permutation of all indices, made from
            seed + epoch, or 0, 1, 2, ...
        seed: of the permutations; must be the same on every rank.
        drop_last: whether `tail` is "drop" or "pad" where it is not given.
        start_index: position in epoch 0's order at which to begin, in samples of the whole job.
            To begin in another epoch, load a state instead.
        tail: what happens where the samples left do not divide by the world size: "pad" repeats
            some at the very end, "drop" leaves some out, "exact" deals each once, so that some
            ranks draw one less. By default what `drop_last` says.

    Raises:
        ConfigError: `start_index` or `tail` cannot be.
        ValueError: `rank` is not in the world, or there is no process group to take it from.
    """

    def __init__(  # noqa: PLR0917 - the first six are torch's own, which may be positional
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        start_index: int = 0,
        tail: Tail | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.tail: Tail = ("drop" if drop_last else "pad") if tail is None else tail
        check_tail(self.tail)
        if drop_last and self.tail != "drop":
            raise ConfigError(f"drop_last=True means tail='drop', got tail={self.tail!r}")
        length = len(cast(Sized, dataset))
        if not 0 <= start_index <= length:
            raise ConfigError(f"need 0 <= start_index <= {length} samples, got {start_index}")
        self._consumed = start_index

    @property
    def position(self) -> Position:
        """Where the job stands: seed, epoch, samples consumed by all ranks, dataset length."""
        length = len(cast(Sized, self.dataset))
        return Position(self.seed, self.epoch, self._consumed, length)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices into the dataset, from the present position to the epoch's end."""
        length = self.position.length
        places = [place % length for place in self._places()]
        if not self.shuffle:
            return iter(places)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(length, generator=generator)
        return iter(order[torch.tensor(places, dtype=torch.int64)].tolist())

    def __len__(self) -> int:
        """How many indices this rank's iterator would yield now: what is left of the epoch."""
        return len(self._places())

    def _places(self) -> range:
        return deal(self.position, rank=self.rank, world_size=self.num_replicas, tail=self.tail)

    def advance(self, global_batch: int) -> None:
        """Count `global_batch` more samples, over all ranks together, as trained on.

        Past the end of the epoch it stays at the end, so the last, smaller batch may be counted
        as a full one.

        Raises:
            ConfigError: `global_batch` is negative.
        """
        self._consumed = advance(self.position, global_batch).consumed

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or stay where we are if that is the present one.

        Raises:
            ConfigError: `epoch` is negative.
        """
        if epoch < 0:
            raise ConfigError(f"need epoch >= 0, got {epoch}")
        if epoch != self.epoch:
            self._consumed = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The position as plain integers, the same on every rank: format, seed, epoch, ..."""
        return encode(self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that a sampler of any world size gave out.

        Raises:
            StateMismatch: the state is not whole, of another format, or of another dataset
                length or seed than this sampler's; nothing has changed then.
        """
        saved, mine = decode(state), self.position
        if saved.length != mine.length:
            raise StateMismatch(
                f"length is {saved.length} in the state, this dataset has {mine.length} samples:"
                " positions in one order mean nothing in another"
            )
        if saved.seed != mine.seed:
            raise StateMismatch(
                f"seed is {saved.seed} in the state, this sampler has {mine.seed}:"
                " positions in one order mean nothing in another"
            )
        self.epoch, self._consumed = saved.epoch, saved.consumed
