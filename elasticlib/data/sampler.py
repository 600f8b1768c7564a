"""A `DistributedSampler` whose progress belongs to the job, not to a rank or a world size.

The order of an epoch depends on the seed and the epoch only, and the saved state counts samples
that were *trained on*. So a job of any world size continues where a job of another one stopped.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from operator import length_hint
from typing import Any, TypeVar, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from ..errors import ConfigError, StateMismatch
from .permutation import MAX_SHUFFLED, Order, Permutation, Sequential, index_chunks
from .position import (
    OnMismatch,
    SamplerPosition,
    Tail,
    advance,
    check_int,
    check_one_of,
    encode,
    epoch_end,
    next_epoch,
    positions_of_rank,
    resume,
)

T = TypeVar("T")
OrderFunction = Callable[[int, int], Order | Sequence[int]]

MAX_DIGEST_INDICES = 1 << 14  # indices of a custom order that its digest in the state is made of


class Progress:
    """Position of a job in its data, shared by a sampler and the batch samplers over it.

    `advance`, `set_epoch` and a loaded state move the position. Drawing indices does not, because
    a loader draws them long before they are trained on.

    The other attributes serve to detect a program that does not call `advance` or `set_epoch`, or
    counts wrongly. Each kind of wrong count is reported once.
    """

    def __init__(self, position: SamplerPosition) -> None:
        self.position = position
        self._epoch_set: int | None = None  # argument of the last call of set_epoch
        self._is_fresh = True  # nothing was drawn, counted, loaded or set before
        self._is_counted = False  # the program calls advance, or a loader keeps the position
        self._iteration: Iteration | None = None  # the last one since a state was loaded
        self._drawn_at_save: tuple[object, int] = (None, 0)  # that one, and what it had yielded
        # Samples of the present epoch since set_epoch was called or a state was loaded:
        self._surplus = 0  # counted beyond the end of the epoch
        self._largest_count = 0
        self._reported: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # An iterator can be neither copied nor pickled.
        return {**vars(self), "_iteration": None, "_drawn_at_save": (None, 0)}

    def begin(self, iteration: Iteration, *, is_used_up: bool) -> None:
        """Note that an iterator begins at the position.

        Raises:
            ConfigError: the epoch is over, and `set_epoch` was not called. Another iterator would
                be empty, or repeat the samples that the last one has drawn.
        """
        position, last, reason = self.position, self._iteration, ""
        never_set = self._epoch_set is None
        repeats = position.consumed > 0 or position.order != "sequential"
        if never_set and repeats and last is not None and last.has_run_out:
            reason = "an iterator has drawn it to its end"
        elif position.consumed and is_used_up and (never_set or self._largest_count):
            reason = f"all of its {position.length} samples were counted"
        if reason:
            raise ConfigError(
                f"epoch {position.epoch} is over, because {reason}, and the next epoch does not"
                f" begin by itself: call set_epoch({position.epoch + 1}) on the sampler before the"
                " next iterator, and set_epoch(epoch) before each epoch"
            )
        self._is_fresh, self._iteration = False, iteration

    def note_kept(self) -> None:
        """Note that a loader saves the position of an iterator, so `advance` is not needed."""
        self._is_counted = True

    def advance(self, count: int) -> None:
        """Count `count` more samples as trained on; see `position.advance` for what it raises."""
        before, self.position = self.position, advance(self.position, count)
        self._is_fresh, self._is_counted, count = False, True, int(count)
        self._surplus += before.consumed + count - self.position.consumed
        self._largest_count = max(self._largest_count, count)
        if self._iteration is not None:
            self._iteration.note_count(count)

    def finish_epoch(self) -> None:
        """Go to the end of the epoch; its remaining samples are left out."""
        self.position = attrs.evolve(self.position, consumed=self.position.length)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; stay if it is the present one, or the first to be set."""
        epoch = check_int("epoch", epoch)
        if epoch < 0:
            raise ConfigError(f"need epoch >= 0, got {epoch}")
        stays = self._is_fresh or epoch == self.position.epoch
        consumed = self.position.consumed if stays else 0
        self.position = attrs.evolve(self.position, epoch=epoch, consumed=consumed)
        self._is_fresh, self._epoch_set = False, epoch
        self._surplus = self._largest_count = 0

    def load(self, state: Mapping[str, Any], on_mismatch: OnMismatch = "refuse") -> None:
        """Go to the position of `state`; see `position.resume` for what it raises."""
        self._go_to(resume(state, self.position, on_mismatch))

    def restore_iterator(
        self,
        iteration: Iteration,
        state: Mapping[str, Any],
        is_used_up: Callable[[SamplerPosition], bool],
    ) -> None:
        """Go to the position of an iterator's state, where `iteration` continues.

        A loader restores its iterator only when it is iterated. So `set_epoch` may have been called
        since, with the epoch of the state or, if that is used up, with the next one.

        Raises:
            StateMismatch: as `position.resume`; or `set_epoch` was called with another epoch.
        """
        saved = resume(state, self.position)
        if self._epoch_set is not None and self._epoch_set != saved.epoch:
            present = saved.epoch + 1 if is_used_up(saved) else saved.epoch
            if self._epoch_set != present:
                raise StateMismatch(
                    f"epoch is {saved.epoch} in the loader's state, with {saved.consumed} of"
                    f" {saved.length} samples used, and set_epoch({self._epoch_set}) was called:"
                    f" call set_epoch({present}) to continue after it"
                )
            saved = next_epoch(saved)
        self._go_to(saved)
        self._iteration = iteration

    def _go_to(self, position: SamplerPosition) -> None:
        self.position, self._is_fresh = position, False
        self._iteration, self._drawn_at_save = None, (None, 0)
        self._surplus = self._largest_count = 0

    # -- Warnings of wrong counts: each method returns a message, or an empty string. --------------

    def missing_counts(self) -> str:
        """Check whether the last iterator has run out while too few samples were counted."""
        missing = self._iteration.missing_counts() if self._iteration is not None else ""
        return self._once("missing", missing)

    def surplus_counts(self) -> str:
        """Check whether more samples were counted than the epoch has.

        A last batch that is smaller than it is counted is not reported.
        """
        if self._surplus < max(1, 2 * self._largest_count):
            return ""
        position = self.position
        return self._once(
            "surplus",
            f"advance() counted {position.length + self._surplus} samples of epoch"
            f" {position.epoch}, which has {position.length}: a run that is resumed in an epoch"
            " skips samples. Count each batch once, as batch_size * world_size on every rank",
        )

    def no_counts(self) -> str:
        """Check whether samples were drawn since the last save and none has ever been counted."""
        last, before = self._iteration, self._drawn_at_save
        self._drawn_at_save = last, last.yielded if last is not None else 0
        # A loader draws ahead of the first step: a save before that says nothing.
        if self._is_counted or not before[1] or before == self._drawn_at_save:
            return ""
        position = self.position
        return self._once(
            "none",
            "samples were drawn from this ElasticDistributedSampler between two saves, but"
            f" advance() was not called: the state says {position.consumed} samples of epoch"
            f" {position.epoch}, so a resumed run repeats the others. Call"
            " sampler.advance(batch_size * world_size) after each step, on every rank",
        )

    def _once(self, kind: str, message: str) -> str:
        if not message or kind in self._reported:
            return ""
        self._reported.add(kind)
        return message


class Iteration:
    """State of an iterator: what it has yielded, and what was counted since it began."""

    def __init__(self, source: GlobalPositionIterable) -> None:
        self._source = source
        self._begin()

    def _begin(self) -> None:
        self._start = self._source.position
        self._chunks = self._source._chunks(self._start)
        self._current: Iterator[Any] = iter(())
        self._given, self.has_run_out = 0, False
        # What `advance` has counted since then, and what had been drawn at the first count:
        self._counted = self._first_count = self._largest_count = 0
        self._drawn_at_first_count: int | None = None

    def chunks(self) -> Iterator[Iterator[Any]]:
        """Yield the items in lists, as iterators whose remaining length can be read."""
        while (chunk := next(self._chunks, None)) is not None:
            self._given += len(chunk)
            self._current = iter(chunk)
            yield self._current
        self.has_run_out = True

    @property
    def yielded(self) -> int:
        """Items that the iterator has yielded."""
        return self._given - length_hint(self._current)

    @property
    def _drawn(self) -> int:
        """Samples that all ranks have drawn while the iterator yielded what it did."""
        return self.yielded * self._source._stride

    def state_dict(self) -> dict[str, Any]:
        self._source.progress.note_kept()
        return encode(advance(self._start, self._drawn))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.has_run_out:
            raise StateMismatch("the iterator has run out: load the state into a new iterator")
        self._source.progress.restore_iterator(self, state, self._source._is_used_up)
        for _ in self._current:  # the iterator of the caller holds this list: empty it
            pass
        self._begin()

    def note_count(self, count: int) -> None:
        """Note that `advance` has counted `count` more samples."""
        if self._drawn_at_first_count is None:
            self._drawn_at_first_count, self._first_count = self._drawn, count
        self._counted += count
        self._largest_count = max(self._largest_count, count)

    def missing_counts(self) -> str:
        """Return a warning if this has run out and too few samples were counted, or ''.

        A loader draws ahead of the training by a number of batches that is constant after the first
        one. So what is drawn after the first count and what is counted after it are equal, however
        far the loader draws ahead, unless the training stops within the epoch.
        """
        if not self.has_run_out or self._drawn_at_first_count is None:
            return ""
        drawn, start = min(self._drawn, self._start.length - self._start.consumed), self._start
        drawn_later = drawn - self._drawn_at_first_count
        counted_later = self._counted - self._first_count
        # The last batch may be missing: it was dropped, or the training stopped there.
        if drawn_later - counted_later < 2 * self._largest_count:
            return ""
        return (
            f"advance() counted {self._counted} of the {drawn} samples of epoch {start.epoch} that"
            " all ranks drew together: a run that is resumed in an epoch repeats samples. Call"
            " advance(batch_size * world_size) after each step, on every rank"
        )


class ElasticIterator(chain[T]):
    """Iterator of a sampler, with a state. No Python code runs between two items of a list.

    Loaders that save their own state, such as torchdata's StatefulDataLoader, ask the iterator for
    its state with each batch that they draw, and use it once that batch was handed out.
    """

    iteration: Iteration

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job once everything that was yielded is used.

        A sampler or an iterator of any world size loads it.
        """
        return self.iteration.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at `state`, and move the sampler there.

        Raises:
            StateMismatch: the state is of another sampler, or of another epoch than `set_epoch` was
                called with; or this iterator has run out.
        """
        self.iteration.load_state_dict(state)


class GlobalPositionIterable:
    """Base class of what iterates from the position of a job: a sampler, or a batch sampler."""

    progress: Progress
    tail: Tail

    @property
    def _stride(self) -> int:
        """Samples that all ranks together use while this one is given one item."""
        raise NotImplementedError

    def _chunks(self, start: SamplerPosition) -> Iterator[list[Any]]:
        """Yield this rank's items from a position to the end of the epoch, in lists."""
        raise NotImplementedError

    def _epoch_end(self, start: SamplerPosition) -> int:
        return epoch_end(start, self._stride, self.tail)

    def _is_used_up(self, position: SamplerPosition) -> bool:
        return self._epoch_end(position) <= position.consumed

    def __iter__(self) -> ElasticIterator[Any]:
        """Iterate over this rank's items from the position to the end of the epoch.

        Raises:
            ConfigError: the epoch is over, and `set_epoch` was not called since.
        """
        _warn(self.progress.missing_counts())
        iteration = Iteration(self)
        self.progress.begin(iteration, is_used_up=self._is_used_up(self.position))
        chunks = iteration.chunks()
        iterator = cast("ElasticIterator[Any]", ElasticIterator.from_iterable(chunks))
        iterator.iteration = iteration
        return iterator

    @property
    def position(self) -> SamplerPosition:
        """Position of the job: seed, epoch, samples consumed by all ranks, length and order."""
        return self.progress.position

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or keep the position if that is the present epoch.

        Call it before each epoch. A first call before anything is drawn, counted or loaded keeps
        the position, so that `start_index` counts in that epoch.

        Raises:
            ConfigError: `epoch` is negative, or not an integer.
        """
        if epoch != self.position.epoch:
            _warn(self.progress.missing_counts())
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a dict of integers and one string, the same on every rank.

        It warns once if samples were drawn between two calls and `advance` was never called,
        because the state is then not the position of the training.
        """
        _warn(self.progress.no_counts())
        return encode(self.position)

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch = "refuse"
    ) -> None:
        """Continue at the state of a sampler of any world size.

        Args:
            state: what `state_dict` returned.
            on_mismatch: what to do if the dataset's length, the seed or the order differ: "refuse"
                raises StateMismatch; "restart" begins the epoch of the state at its start; "keep"
                continues after as many samples of that epoch, in the order of this sampler.

        Raises:
            StateMismatch: the state is incomplete, has another format, or, with "refuse", does not
                match this sampler. Nothing has changed.
            ConfigError: `on_mismatch` is unknown.
        """
        self.progress.load(state, on_mismatch)


def _warn(message: str) -> None:
    """Warn the caller of the sampler's method that calls this, if there is a message."""
    if message:
        warnings.warn(message, UserWarning, stacklevel=3)


class ElasticDistributedSampler(GlobalPositionIterable, DistributedSampler[int]):
    """Deals the samples of an epoch to the ranks, and continues at any world size.

    To resume::

        sampler = ElasticDistributedSampler(dataset)
        sampler.load_state_dict(checkpoint["sampler"])     # on every rank, the same state
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)                       # the same epoch keeps its position
            for batch in DataLoader(dataset, batch_size, sampler=sampler):
                train(batch)
                sampler.advance(batch_size * world_size)   # on every rank, the global count

    Iterating does not move the position, because a loader with workers draws indices long before
    they are trained on; `advance` does. `set_epoch` must be called before each epoch: an iterator
    that begins after the end of an epoch without it raises ConfigError.

    In torchdata's StatefulDataLoader the loader's own state has the position of what it has
    returned, and `advance` is not needed. At another world size it continues exactly if the loader
    takes a snapshot at each step (`snapshot_every_n_steps=1`, the default): otherwise the steps
    since the last snapshot are drawn again, with another size. With `ElasticBatchSampler` each step
    has the same size, and any interval works. Of torch's own `BatchSampler` that loader only keeps
    a count of batches, which is valid for one world size.

    The order is computed where it is needed: the first index comes in under a millisecond, with
    the same memory for a thousand samples and for 2**62.

    Args:
        dataset: only its present length is used.
        num_replicas: the world size; by default that of the process group.
        rank: this process among them; by default its rank in the process group.
        shuffle: whether the order is a random permutation, which depends on the seed and the epoch,
            or 0, 1, 2, ...
        seed: of the permutations; must be the same on every rank.
        drop_last: torch's name for `tail`: True is "drop", False is "pad".
        start_index: where to begin in the first epoch, counted in samples of the whole job. The
            first epoch is 0, or the one of a `set_epoch` before anything is drawn.
        tail: what to do if the remaining samples cannot be divided evenly among the ranks: "pad"
            repeats some at the very end, "drop" leaves some out, "exact" gives each to one rank, so
            that some ranks draw one less. What "drop" leaves out depends on the world size: a job
            that ended an epoch on 4 ranks, and resumes there on 2, may still draw two of them.
        order: an order of your own instead of `shuffle`: a function of the seed and the epoch that
            returns the indices of an epoch as a one-dimensional int64 tensor or a sequence, or an
            object with `__len__` that maps int64 tensors of positions to tensors of indices by
            `__getitem__`, such as `ShardDataset.shuffle_shards` returns. It must return the same
            on every rank, and equally many indices in each epoch. It is called with epoch 0 when
            the sampler is made, and then once for each epoch that is drawn. The saved state has a
            digest of the order of epoch 0, and a sampler whose order has another one refuses it.

    Raises:
        ConfigError: an argument is not valid, or there are more than 2**62 samples to shuffle.
        ValueError: `rank` is not in the world, or there is no process group to take it from.
    """

    def __init__(  # noqa: PLR0917 - the first six are torch's own, by place
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
        order: OrderFunction | None = None,
    ) -> None:
        if not isinstance(shuffle, bool):
            raise ConfigError(
                f"shuffle is {shuffle!r}, must be True or False: torchelastic's sampler took"
                " start_index as its fourth argument; give it by name, start_index=..., or resume"
                " by load_state_dict"
            )
        if order is not None and not shuffle:
            raise ConfigError("order takes the place of shuffle: leave shuffle out")
        seed, start = check_int("seed", seed), check_int("start_index", start_index)
        length, name = len(cast(Sized, dataset)), "shuffled" if shuffle else "sequential"
        self._order_function = order
        self._present_order: tuple[int, Order] | None = None
        if order is not None:
            first = _checked_order(order(seed, 0))
            length, name = len(first), f"custom {_digest(first)}"
            self._present_order = 0, first
        elif shuffle and length > MAX_SHUFFLED:
            raise ConfigError(f"need at most 2**62 samples to shuffle, got {length}")
        if not 0 <= start <= length:
            raise ConfigError(f"need 0 <= start_index <= {length} samples, got {start}")
        self.progress = Progress(SamplerPosition(seed, 0, start, length, name))
        _check_group(num_replicas, rank)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.tail: Tail = ("drop" if drop_last else "pad") if tail is None else tail
        check_one_of("tail", self.tail, Tail)
        if drop_last and self.tail != "drop":
            raise ConfigError(f"drop_last=True means tail='drop', got tail={self.tail!r}")

    @property
    def epoch(self) -> int:
        """The epoch of the position; assigning to it is `set_epoch`."""
        return self.progress.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        # The constructor of torch's sampler assigns 0, which is not a call of set_epoch.
        if hasattr(self, "tail"):
            self.set_epoch(epoch)

    def order_of(self, epoch: int) -> Order:
        """Return the order of an epoch, which is kept until another epoch is asked for.

        Raises:
            ConfigError: the function `order` returned something else, or another length.
        """
        if self._present_order is None or self._present_order[0] != epoch:
            self._present_order = None  # two orders need not be in memory at a time
            self._present_order = epoch, self._make_order(epoch)
        return self._present_order[1]

    def _make_order(self, epoch: int) -> Order:
        seed, length = self.position.seed, self.position.length
        if self._order_function is None and not self.shuffle:
            return Sequential(length)
        if self._order_function is None:
            return Permutation(length, seed=seed, epoch=epoch)
        order = _checked_order(self._order_function(seed, epoch))
        if len(order) != length:
            raise ConfigError(
                f"order({seed}, {epoch}) returned {len(order)} indices, and order({seed}, 0)"
                f" returned {length}: each epoch must have equally many"
            )
        return order

    @property
    def _stride(self) -> int:
        return self.num_replicas

    def _chunks(self, start: SamplerPosition) -> Iterator[list[int]]:
        # The order is made when the first index is drawn.
        yield from index_chunks(self.order_of(start.epoch), self._positions(start))

    def _positions(self, start: SamplerPosition) -> range:
        return positions_of_rank(
            start, rank=self.rank, world_size=self.num_replicas, tail=self.tail
        )

    def __len__(self) -> int:
        """Return how many indices an iterator of this rank would yield now: what is left."""
        return len(self._positions(self.position))

    @property
    def samples_left(self) -> int:
        """Samples that all ranks together have left, without repeats.

        Read it before an evaluation, to divide its sums by it.
        """
        start = self.position
        return min(self._epoch_end(start), start.length) - start.consumed

    def advance(self, global_batch: int) -> None:
        """Count `global_batch` more samples, over all ranks together, as trained on.

        Past the end of the epoch the position stays at the end, so the last, smaller batch may be
        counted as a full one. It warns once if far more samples are counted than the epoch has. At
        the end of an epoch, `set_epoch` or the next iterator warns if far fewer were counted than
        drawn.

        Raises:
            ConfigError: `global_batch` is negative, or not an integer.
        """
        self.progress.advance(global_batch)
        _warn(self.progress.surplus_counts())


def _checked_order(found: Any) -> Order:
    """Return what the user's function has returned as an order.

    Raises:
        ConfigError: it is not an order.
    """
    if isinstance(found, Sequence) or hasattr(found, "__array__"):
        found = torch.as_tensor(found)
    is_tensor = isinstance(found, Tensor)
    if is_tensor and (found.dim() != 1 or (len(found) and found.dtype != torch.int64)):
        raise ConfigError(
            "order must return a one-dimensional tensor of int64 indices, got"
            f" {found.dtype} of shape {[*found.shape]}"
        )
    if not is_tensor and not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigError(
            "order must return the indices of an epoch, as a tensor or a sequence, got"
            f" {type(found).__name__}"
        )
    return cast(Order, found)


def _digest(order: Order) -> str:
    """Return 16 hexadecimal digits made of evenly spaced indices of an order."""
    spacing = max(1, len(order) // MAX_DIGEST_INDICES)
    indices = order[torch.arange(0, len(order), spacing)].tolist()
    return hashlib.sha256(f"{len(order)} {indices}".encode()).hexdigest()[:16]


def _check_group(num_replicas: int | None, rank: int | None) -> None:
    """Raise ConfigError if rank or world size must come from a process group that is not there."""
    grouped = dist.is_available() and dist.is_initialized()
    if (num_replicas is None or rank is None) and not grouped:
        raise ConfigError(
            "the process group has not been initialized: call init_process_group first, or give"
            " num_replicas=1, rank=0"
        )
