"""A `DistributedSampler` whose progress belongs to the job, not to a rank or a world size.

The order of an epoch depends on seed and epoch alone, and the state counts what was *trained on*,
so a job of any size continues exactly where a job of another size stopped.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal, cast, get_args

from torch.utils.data import Dataset, DistributedSampler

from ..errors import ConfigError
from ..whole import whole
from .deal import Position, Tail, check_tail, deal
from .drawn import Source, draw
from .order import indices_at
from .permute import LARGEST
from .progress import Progress
from .state import OnMismatch, encode

Algorithm = Literal["feistel", "randperm"]


class ElasticDistributedSampler(DistributedSampler[int]):
    """Deals the samples of an epoch to the ranks, and goes on at any world size.

    To resume::

        sampler = ElasticDistributedSampler(dataset)
        sampler.load_state_dict(checkpoint["sampler"])     # on every rank, the same state
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)                       # the same epoch keeps its position
            for batch in DataLoader(dataset, batch_size, sampler=sampler):
                train(batch)
                sampler.advance(batch_size * world_size)   # on every rank, the global count

    `advance` is what moves the state. Iterating does not, because a loader with workers draws
    indices long before they are trained on. Without `set_epoch` the next epoch begins by itself:
    when all samples of the present one are counted and a new iterator is asked for. For who does
    not count either, it does after an iterator has run out. (`DataLoader`'s own `drop_last` leaves
    samples that nobody counts: name the epochs then, or leave them out here, by `tail`.) So ask for
    the next epoch's iterator only after the last step of this one was counted; who fetches a batch
    ahead of the step under way asks earlier, gets the end of this epoch again, and has to name
    epochs by `set_epoch`.

    In torchdata's StatefulDataLoader the loader's own state holds the position of what it has
    handed out, and no `advance` is needed. Loaded on another number of ranks it goes on exactly,
    provided that the loader takes a snapshot each step (`snapshot_every_n_steps=1`, the default):
    the steps since the last snapshot are drawn anew, and are of another size there. With
    `ElasticBatchSampler` each step has the same size, and the condition falls. Of torch's own
    `BatchSampler` that loader keeps only a count of batches, which holds for one world size.

    The order comes from a keyed shuffle that is computed where it is needed: the first index
    after microseconds, with the same memory for a thousand samples and for 2**62.

    Args:
        dataset: what is sampled from; only its length is used, as it is now.
        num_replicas: the world size; by default that of the process group.
        rank: this process among them; by default its rank in the process group.
        shuffle: whether an epoch's order is a random permutation of all indices, made from
            seed and epoch, or 0, 1, 2, ...
        seed: of the permutations; must be the same on every rank.
        drop_last: whether `tail` is "drop" or "pad" where it is not given.
        start_index: position at which to begin, in samples of the whole job, in the order of the
            first epoch: 0, or the one that `set_epoch` names before anything is drawn.
        tail: what happens where the samples left do not divide by the world size: "pad" repeats
            some at the very end, "drop" leaves some out, "exact" deals each once, so that some
            ranks draw one less. By default what `drop_last` says. What "drop" leaves out depends
            on the world size: a job that ended an epoch on 4 ranks, and resumes on 2 from there,
            may still draw two of the samples that were left out.
        shuffle_algorithm: "feistel" is ours; "randperm" yields just what torch's
            `DistributedSampler` yields, at its price: a list of the whole order, on every rank.

    Raises:
        ConfigError: `shuffle`, `seed`, `start_index`, `tail` or `shuffle_algorithm` cannot be, or
            there are more than 2**62 samples to shuffle.
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
        shuffle_algorithm: Algorithm = "feistel",
    ) -> None:
        if shuffle_algorithm not in get_args(Algorithm):
            names = " or ".join(get_args(Algorithm))
            raise ConfigError(f"shuffle_algorithm is {shuffle_algorithm!r}, must be {names}")
        if not isinstance(shuffle, bool):
            raise ConfigError(
                f"shuffle is {shuffle!r}, must be True or False: torchelastic's sampler took"
                " start_index as its fourth argument; give it by name, start_index=..., or resume"
                " by load_state_dict"
            )
        length = len(cast(Sized, dataset))
        seed, start_index = whole("seed", seed), whole("start_index", start_index)
        if not 0 <= start_index <= length:
            raise ConfigError(f"need 0 <= start_index <= {length} samples, got {start_index}")
        if shuffle and length > LARGEST:
            raise ConfigError(f"need at most 2**62 samples to shuffle, got {length}")
        order = shuffle_algorithm if shuffle else "none"
        self.progress = Progress(Position(seed, 0, start_index, length, order))
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.tail: Tail = ("drop" if drop_last else "pad") if tail is None else tail
        check_tail(self.tail)
        if drop_last and self.tail != "drop":
            raise ConfigError(f"drop_last=True means tail='drop', got tail={self.tail!r}")

    @property
    def position(self) -> Position:
        """Where the job stands: seed, epoch, samples consumed by all ranks, length, shuffle."""
        return self.progress.position

    @property
    def epoch(self) -> int:
        """The epoch in which the job stands; assigning to it is `set_epoch`."""
        return self.progress.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        # torch's constructor assigns the 0 that stands there already: nobody has named an epoch.
        if hasattr(self, "tail"):
            self.progress.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices into the dataset, from the present position to the epoch's end.

        The iterator has `state_dict` and `load_state_dict` of its own: the position of what it
        has yielded, for loaders that keep it with each batch.
        """
        source = Source(
            runs=lambda start: indices_at(start, self._places(start)),
            stride=self.num_replicas,
            restore=lambda state: self.progress.restore(state, self._over),
            ended=self.progress.ended,
            kept=self.progress.kept,
        )
        return draw(source, self.progress.begin(self._over))

    def __len__(self) -> int:
        """How many indices an iterator of this rank would yield now: what is left."""
        return len(self._places(self.progress.ahead(self._over)))

    @property
    def samples_left(self) -> int:
        """How many samples all ranks together have before them, repeats not counted.

        What an evaluation's sums are to be divided by, when asked before it begins.
        """
        start = self.progress.ahead(self._over)
        if self.tail == "drop":
            return len(self._places(start)) * self.num_replicas
        return start.length - start.consumed

    @property
    def samples_left_here(self) -> int:
        """How many of them are this rank's: what it yields beyond them are repeats."""
        start = self.progress.ahead(self._over)
        places = self._places(start)
        return len(range(places.start, min(places.stop, start.length), places.step))

    def _places(self, start: Position, rank: int | None = None) -> range:
        rank = self.rank if rank is None else rank
        return deal(start, rank=rank, world_size=self.num_replicas, tail=self.tail)

    def _over(self, position: Position) -> bool:
        return not self._places(position, rank=0)

    def advance(self, global_batch: int) -> None:
        """Count `global_batch` more samples, over all ranks together, as trained on.

        Past the end of the epoch it stays at the end, so the last, smaller batch may be counted
        as a full one.

        Raises:
            ConfigError: `global_batch` is negative, or no integer; or epochs have begun by
                themselves because nobody counted.
        """
        self.progress.advance(global_batch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or stay where we are if that is the present one.

        From the first call on no epoch begins by itself. See `start_index` for what the first
        call does to it.

        Raises:
            ConfigError: `epoch` is negative, or no integer.
        """
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values, the same on every rank: format, seed, epoch, ...

        Warns, once, if epochs were drawn to their end and nothing was counted: then it is not where
        training stands.
        """
        asker, frames = _asker()
        if asker == "torchdata":
            # That loader asks its iterator, too, and it is the iterator's answer that it goes by.
            self.progress.kept()
        why = self.progress.why_misleading()
        if why:
            warnings.warn(why, UserWarning, stacklevel=frames)
        return encode(self.position)

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch = "refuse"
    ) -> None:
        """Continue from a state that a sampler of any world size gave out.

        Args:
            state: of `state_dict`; also of the versions before, where that is certain to mean
                the same: see `elasticlib.data.state.decode`.
            on_mismatch: what to do with a state of another dataset length, seed or shuffle.
                "refuse" it; "restart" its epoch at the start, in this sampler's order; or "keep"
                its count, so that some of the epoch's samples come twice and others not at all.

        Raises:
            StateMismatch: the state is not whole, of another format, or of another dataset
                length, seed or shuffle than this sampler's; nothing has changed then.
            ConfigError: `on_mismatch` cannot be.
        """
        self.progress.load(state, on_mismatch)


def _asker() -> tuple[str, int]:
    """Which package, other than this one, asks for a state; and how many calls it is away."""
    frames = 1
    frame = sys._getframe(1)
    # A program that was given to exec() may have no name.
    while (package := str(frame.f_globals.get("__name__")).partition(".")[0]) == "elasticlib":
        if frame.f_back is None:
            break
        frame, frames = frame.f_back, frames + 1
    return package, frames
