"""A `DistributedSampler` whose position belongs to the job, not to a rank or a world size.

The order of an epoch depends only on the seed and the epoch, and the saved state counts samples
that were *trained on*. So a job of any world size continues where a job of another one stopped.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from operator import length_hint
from typing import Any, Generic, TypeVar, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from ..errors import ConfigError, StateMismatchError
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
from .shard_dataset import ShardDataset

T = TypeVar("T")
OrderFunction = Callable[[int, int], Order | Sequence[int]]

MAX_DIGEST_INDICES = 1 << 14  # indices of a custom order that its digest in the state includes


class EpochProgress:
    """Position of a job in its data, shared by a sampler and the batch samplers over it.

    `advance`, `set_epoch` and a loaded state move the position. Iterating does not, because a
    loader reads indices long before they are trained on.

    The other attributes are used to detect a script that does not call `advance` or `set_epoch`, or
    counts wrongly. Each kind of wrong count is reported once.
    """

    def __init__(self, position: SamplerPosition) -> None:
        self.position = position
        self._explicit_epoch: int | None = None  # argument of the last call of set_epoch
        self._is_fresh = True  # nothing was drawn, counted, loaded or set before
        self._is_counted = False  # the script calls advance, or a loader saves the position
        self._iteration: Iteration | None = None  # the last one since a state was loaded
        self._drawn_at_save: tuple[object, int] = (None, 0)  # that one, and what it had yielded
        # The next three are of the current epoch, since set_epoch was called or a state was loaded.
        self._surplus = 0  # samples that were counted beyond the end of the epoch
        self._max_count = 0  # samples of the largest call of advance
        self._has_no_batches_left = False  # a loop over `epochs` has used all of its batches
        self._is_in_epochs = False  # the script is in a loop over `epochs`
        self._reported: set[str] = set()  # kinds of warnings

    def __getstate__(self) -> dict[str, Any]:
        # An iterator can be neither copied nor pickled.
        return {**vars(self), "_iteration": None, "_drawn_at_save": (None, 0)}

    def set_position(self, position: SamplerPosition) -> None:
        """Return to a position, for example that before an interrupted call of `advance`."""
        self.position = position

    def leave_finished_epoch(self, *, is_exhausted: bool) -> str:
        """Move to the next epoch if the current one is finished and the script did not say so.

        torch's sampler repeats the order of an epoch then. Here that would use samples twice, or
        none at all.

        Args:
            is_exhausted: True if an iterator that starts at the position has no items.

        Returns:
            A warning if the epoch has changed, else an empty string.

        Raises:
            ConfigError: the last iterator has yielded all of its samples, and samples that it has
                yielded were not counted. The next epoch would leave them out.
        """
        position, last = self.position, self._iteration
        is_implicit = self._explicit_epoch is None
        if self._is_in_epochs:
            # A loader that was saved after its end starts a second iterator after the restored one.
            if is_exhausted and last is not None and last.is_restored:
                self.start_next_epoch()
            return ""
        can_repeat = position.consumed > 0 or position.order != "sequential"
        is_drawn = is_implicit and can_repeat and last is not None and last.is_finished
        is_counted = position.consumed > 0 and is_exhausted and (is_implicit or self._max_count > 0)
        if not is_drawn and not is_counted:
            return ""
        num_missing = last.num_missing if is_drawn and last is not None else 0
        if num_missing:
            raise ConfigError(
                f"all samples of epoch {position.epoch} were drawn, but {num_missing} of them were"
                " not counted as trained on, and set_epoch was not called: call"
                f" set_epoch({position.epoch}) to continue after the samples that were counted, or"
                f" set_epoch({position.epoch + 1}) to start the next epoch"
            )
        self.start_next_epoch()
        return self._report_once(
            "epoch",
            f"epoch {position.epoch} is complete, and set_epoch was not called: this iterator"
            f" starts epoch {position.epoch + 1}. Use `for epoch, batches in sampler.epochs(count,"
            " loader)`, or call set_epoch(epoch) before each epoch",
        )

    def start_iteration(self, iteration: Iteration) -> None:
        """Record that an iterator starts at the position."""
        self._is_fresh, self._iteration = False, iteration

    def enter_epochs(self) -> None:
        """Record that `epochs` moves from epoch to epoch, instead of calls of `set_epoch`."""
        self._is_in_epochs, self._explicit_epoch = True, None

    def leave_epochs(self) -> None:
        """Record that the loop over `epochs` has ended, or was left."""
        self._is_in_epochs = False

    def end_batches(self) -> None:
        """Record that the script has used all batches of the epoch."""
        self._has_no_batches_left = True

    def start_next_epoch(self) -> None:
        """Move to the start of the next epoch, without a call of `set_epoch`."""
        self._move_to(next_epoch(self.position))
        self._explicit_epoch = None

    @property
    def saved_position(self) -> SamplerPosition:
        """The position where a resumed job continues.

        In a loop over `epochs`, it is the start of the next epoch once the batches have ended, so
        that the rest of the body is not repeated.
        """
        return next_epoch(self.position) if self._has_no_batches_left else self.position

    def mark_counted(self) -> None:
        """Record that a loader saves the position of an iterator, so `advance` is not needed."""
        self._is_counted = True

    def advance(self, count: int) -> None:
        """Count `count` more samples as trained on. It raises the errors of `position.advance`."""
        before, self.position = self.position, advance(self.position, count)
        self._is_fresh, self._is_counted, count = False, True, int(count)
        self._surplus += before.consumed + count - self.position.consumed
        self._max_count = max(self._max_count, count)
        if self._iteration is not None:
            self._iteration.add_count(count)

    def finish_epoch(self) -> None:
        """Move to the end of the epoch, and leave out its remaining samples."""
        self.position = attrs.evolve(self.position, consumed=self.position.length)

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of `epoch`.

        The samples of the position are kept if `epoch` is the current one, or if nothing was drawn,
        counted, loaded or set before.
        """
        epoch = check_int("epoch", epoch)
        if epoch < 0:
            raise ConfigError(f"need epoch >= 0, got {epoch}")
        keeps_position = self._is_fresh or epoch == self.position.epoch
        consumed = self.position.consumed if keeps_position else 0
        self.position = attrs.evolve(self.position, epoch=epoch, consumed=consumed)
        self._is_fresh, self._explicit_epoch = False, epoch
        self._surplus, self._max_count, self._has_no_batches_left = 0, 0, False

    def load(self, state: Mapping[str, Any], on_mismatch: OnMismatch = "raise") -> None:
        """Move to the position of `state`. It raises the errors of `position.resume`."""
        self._move_to(resume(state, self.position, on_mismatch))

    def restore_iterator(
        self,
        iteration: Iteration,
        state: Mapping[str, Any],
        is_exhausted: Callable[[SamplerPosition], bool],
    ) -> None:
        """Move to the position of an iterator's state, where `iteration` continues.

        A loader restores its iterator only when it is iterated. Before that, the script may have
        called `set_epoch` with the epoch of the state or, if it is exhausted, with the next epoch.

        Raises:
            StateMismatchError: as for `position.resume`, or `set_epoch` was called with another
            epoch.
        """
        saved = resume(state, self.position)
        if self._explicit_epoch is not None and self._explicit_epoch != saved.epoch:
            expected = saved.epoch + 1 if is_exhausted(saved) else saved.epoch
            if self._explicit_epoch != expected:
                raise StateMismatchError(
                    f"epoch is {saved.epoch} in the loader's state, with {saved.consumed} of"
                    f" {saved.length} samples used, but set_epoch was called with"
                    f" {self._explicit_epoch}: call set_epoch({expected}) to continue after it"
                )
            saved = next_epoch(saved)
        self._move_to(saved)
        self._iteration = iteration

    def _move_to(self, position: SamplerPosition) -> None:
        self.position, self._is_fresh = position, False
        self._iteration, self._drawn_at_save = None, (None, 0)
        self._surplus, self._max_count, self._has_no_batches_left = 0, 0, False

    # -- Warnings about wrong counts. Each method returns a message or an empty string. ------------

    def missing_counts_warning(self) -> str:
        """Return a warning if the last iterator is finished and too few samples were counted."""
        if self._iteration is None:
            return ""
        return self._report_once("missing", self._iteration.missing_counts_warning())

    def surplus_warning(self) -> str:
        """Return a warning if more samples were counted than the epoch has.

        A script may count a smaller last batch as a full one.
        """
        if self._surplus < max(1, 2 * self._max_count):
            return ""
        position = self.position
        return self._report_once(
            "surplus",
            f"advance() counted {position.length + self._surplus} samples of epoch"
            f" {position.epoch}, which has {position.length}: a run that is resumed within an"
            " epoch skips samples. Count each batch once, as batch_size * world_size on every rank",
        )

    def no_counts_warning(self) -> str:
        """Return a warning if samples were drawn since the last save and none was ever counted."""
        last, at_last_save = self._iteration, self._drawn_at_save
        self._drawn_at_save = last, last.yielded if last is not None else 0
        # A loader reads ahead, so samples may be drawn before the first step.
        if self._has_no_batches_left:  # The saved position does not depend on counts.
            self._drawn_at_save = None, 0
            return ""
        if self._is_counted or not at_last_save[1] or at_last_save == self._drawn_at_save:
            return ""
        position = self.position
        return self._report_once(
            "none",
            "samples were drawn from this ElasticDistributedSampler between two saves, but"
            f" advance() was not called: the state has {position.consumed} samples of epoch"
            f" {position.epoch}, so a resumed run repeats the others. Call"
            " sampler.advance(batch_size * world_size) after each step, on every rank",
        )

    def _report_once(self, kind: str, message: str) -> str:
        """Return `message` if it is the first one of its kind, else an empty string."""
        if not message or kind in self._reported:
            return ""
        self._reported.add(kind)
        return message


class Iteration:
    """State of an iterator: its items, and the samples that were counted since its start."""

    def __init__(self, source: GlobalPositionIterable) -> None:
        self._source = source
        self.is_restored = False  # it continues at a state that was loaded
        self._start_at_position()

    def _start_at_position(self) -> None:
        self.is_finished = False  # all items were yielded
        self._start = self._source.position
        self._chunks = self._source._chunks(self._start)
        self._current: Iterator[Any] = iter(())  # of the last chunk
        self._num_in_chunks = 0  # items of all chunks until now
        # The next four are samples that `advance` has counted, or that were drawn, since the start.
        self._counted = self._first_count = self._max_count = 0
        self._drawn_at_first_count: int | None = None

    def chunks(self) -> Iterator[Iterator[Any]]:
        """Yield the items in chunks, as list iterators, so that their remaining length is known."""
        while (chunk := next(self._chunks, None)) is not None:
            self._num_in_chunks += len(chunk)
            self._current = iter(chunk)
            yield self._current
        self.is_finished = True

    @property
    def yielded(self) -> int:
        """Number of items that the iterator has yielded."""
        return self._num_in_chunks - length_hint(self._current)

    @property
    def _drawn(self) -> int:
        """Number of samples of all ranks once each has yielded as many items as this iterator."""
        return self.yielded * self._source._stride

    def state_dict(self) -> dict[str, Any]:
        self._source.progress.mark_counted()
        return encode(advance(self._start, self._drawn))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.is_finished:
            raise StateMismatchError("the iterator is finished: load the state into a new iterator")
        self._source.progress.restore_iterator(self, state, self._source._is_exhausted)
        self.is_restored = True
        for _ in self._current:  # The caller's iterator would yield the rest of this list.
            pass
        self._start_at_position()

    def add_count(self, count: int) -> None:
        """Record that `advance` has counted `count` more samples."""
        if self._drawn_at_first_count is None:
            self._drawn_at_first_count, self._first_count = self._drawn, count
        self._counted += count
        self._max_count = max(self._max_count, count)

    @property
    def num_missing(self) -> int:
        """Number of samples that were drawn and not counted, by a script that counts; else 0.

        A loader with `drop_last=True` drops less than a batch, which is not missing.
        """
        if self._drawn_at_first_count is None:
            return 0
        num_missing = self._drawn_in_epoch - self._counted
        return num_missing if num_missing >= self._max_count else 0

    @property
    def _drawn_in_epoch(self) -> int:
        """Number of samples that all ranks have drawn, without those that fill the last step."""
        return min(self._drawn, self._start.length - self._start.consumed)

    def missing_counts_warning(self) -> str:
        """Return a warning if the iterator is finished and too few samples were counted, or ''.

        After the first batch, a loader reads a constant number of batches ahead of the training. So
        the samples that are drawn after the first count are as many as are counted after it, unless
        the training stops within the epoch.
        """
        if not self.is_finished or self._drawn_at_first_count is None:
            return ""
        drawn, start = self._drawn_in_epoch, self._start
        drawn_later = drawn - self._drawn_at_first_count
        counted_later = self._counted - self._first_count
        # One batch may be missing, because it was dropped or the training stopped there.
        if drawn_later - counted_later < 2 * self._max_count:
            return ""
        return (
            f"advance() counted {self._counted} of the {drawn} samples of epoch {start.epoch} that"
            " all ranks drew together: a run that is resumed within an epoch repeats samples. Call"
            " advance(batch_size * world_size) after each step, on every rank"
        )


class EpochBatches(Generic[T]):
    """The batches of one epoch in a loop over `epochs`. They can be used once.

    Its length is that of the loader: the number of batches that are left in the epoch.
    """

    def __init__(
        self, progress: EpochProgress, loader: Iterable[T], iterator: Iterator[T] | None
    ) -> None:
        self.is_started = False  # the script has iterated over the batches
        self._progress, self._loader = progress, loader
        self._iterator = iterator  # of the loader, if it has been created already

    def __len__(self) -> int:
        return len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[T]:
        if self.is_started:
            raise ConfigError(
                f"the batches of epoch {self._progress.position.epoch} can be used once: a second"
                " pass over the data is another epoch"
            )
        self.is_started = True
        return self._batches()

    def _batches(self) -> Iterator[T]:
        iterator, self._iterator = self._iterator, None
        yield from iter(self._loader) if iterator is None else iterator
        self._progress.end_batches()


class ElasticIterator(chain[T]):
    """Iterator over the items of a sampler, which can save and load the position of the job.

    The sampler yields lists of items. `itertools.chain` passes through each list in C, so that no
    Python code of the sampler runs for each item.

    A loader that saves its own state, such as torchdata's StatefulDataLoader, reads the state of
    the iterator with each batch, and saves it after it has returned that batch.
    """

    iteration: Iteration

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job after all yielded items are used.

        A sampler or an iterator of any world size can load it.
        """
        return self.iteration.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at `state`, and move the sampler there.

        Raises:
            StateMismatchError: the state belongs to another sampler, `set_epoch` was called with
                another epoch, or this iterator is finished.
        """
        self.iteration.load_state_dict(state)


class GlobalPositionIterable:
    """Base class of the samplers. Each iteration starts where the whole job has arrived."""

    progress: EpochProgress  # shared with other samplers of the job
    tail: Tail

    @property
    def _stride(self) -> int:
        """Number of samples that all ranks together use while this rank gets one item."""
        raise NotImplementedError

    def _chunks(self, start: SamplerPosition) -> Iterator[list[Any]]:
        """Yield this rank's items from a position to the end of the epoch, in lists."""
        raise NotImplementedError

    def _num_items(self, start: SamplerPosition) -> int:
        """Return the number of this rank's items from a position to the end of the epoch."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of this rank's remaining items in the epoch.

        In a resumed epoch it is less than `epoch_length`. So is the length of a loader, which must
        not be used to compute a learning-rate schedule.
        """
        return self._num_items(self.position)

    @property
    def epoch_length(self) -> int:
        """The number of this rank's items in a whole epoch, wherever the position is.

        It is the length of the sampler at the start of an epoch. An `ElasticBatchSampler` has as
        many batches, at any world size, so schedules that count steps can use it.
        """
        return self._num_items(attrs.evolve(self.position, consumed=0))

    def _epoch_end(self, start: SamplerPosition) -> int:
        return epoch_end(start, self._stride, self.tail)

    def _is_exhausted(self, position: SamplerPosition) -> bool:
        return self._epoch_end(position) <= position.consumed

    def __iter__(self) -> ElasticIterator[Any]:
        """Iterate over this rank's items from the position to the end of the epoch.

        If the epoch is complete, and `set_epoch` was not called since, the iterator starts the next
        epoch, and a warning is issued once. An order without shuffling that was not counted is
        repeated, for evaluation.

        Raises:
            ConfigError: `set_epoch` was not called since the last iterator was used up, and samples
                that it has yielded were not counted.
        """
        _warn(self.progress.missing_counts_warning())
        is_exhausted = self._is_exhausted(self.position)
        _warn(self.progress.leave_finished_epoch(is_exhausted=is_exhausted))
        iteration = Iteration(self)
        self.progress.start_iteration(iteration)
        chunks = iteration.chunks()
        iterator = cast("ElasticIterator[Any]", ElasticIterator.from_iterable(chunks))
        iterator.iteration = iteration
        return iterator

    def epochs(self, count: int, loader: Iterable[T]) -> Iterator[tuple[int, EpochBatches[T]]]:
        """Iterate over the epochs that are left, each with the batches of a loader::

            for epoch, batches in sampler.epochs(3, loader):
                for x, y in batches:                   # what is left of a resumed epoch
                    ...
                    sampler.advance(batch_size * world_size)
                scheduler.step()                       # once for each epoch
                manager.save(step, state)

        The loop starts at the restored position, and sets the epochs. It ends at once if all epochs
        are complete.

        A state that is saved once the batches have ended continues with the next epoch. So the rest
        of the body is not repeated, and a save belongs at its end. A state that is saved among the
        batches, even after the last one, continues with the batches that are left, and then with
        the rest of the body. If the body leaves the batches early and goes on, the next epoch
        starts, but a state that was saved in the body continues within the epoch.

        Args:
            count: number of epochs of the whole training, with those that are complete.
            loader: an iterable that reads from this sampler in each epoch, such as a DataLoader,
                or torchdata's StatefulDataLoader with or without a state that it has loaded. If
                anything reads batches before they are trained on, put it around the loader and not
                around the batches, which must end after the last step.

        Returns:
            An iterator of pairs of an epoch, from 0, and its batches.

        Raises:
            ConfigError: `count` is negative or not an integer. While the result is iterated: the
                body has not iterated over the batches of an epoch, or more than once.
        """
        if check_int("count", count) < 0:
            raise ConfigError(f"need count >= 0, got {count}")
        return self._epochs(count, loader)

    def _epochs(self, count: int, loader: Iterable[T]) -> Iterator[tuple[int, EpochBatches[T]]]:
        restoring = None
        try:
            self.progress.enter_epochs()
            if self.position.epoch < count and hasattr(loader, "load_state_dict"):
                # A stateful loader moves the sampler to its state only when it is iterated.
                restoring = iter(loader)
            while (epoch := self.position.epoch) < count:
                batches = EpochBatches(self.progress, loader, restoring)
                restoring = None
                yield epoch, batches
                if not batches.is_started:
                    raise ConfigError(
                        f"the batches of epoch {epoch} were not used: iterate over what epochs()"
                        " yields, as in `for epoch, batches in sampler.epochs(count, loader)`, and"
                        " not over the loader itself"
                    )
                _warn(self.progress.missing_counts_warning())
                self.progress.start_next_epoch()
        finally:
            self.progress.leave_epochs()

    @property
    def position(self) -> SamplerPosition:
        """The position of the job: seed, epoch, samples consumed by all ranks, length and order."""
        return self.progress.position

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of `epoch`, or keep the position if `epoch` is the current one.

        Call it before each epoch. A first call before anything is drawn, counted or loaded keeps
        the position, so `start_index` refers to that epoch.

        Args:
            epoch: number of the epoch, at least 0.

        Raises:
            ConfigError: `epoch` is negative or not an integer.
        """
        if epoch != self.position.epoch:
            _warn(self.progress.missing_counts_warning())
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a dict of integers and strings, the same on every rank.

        A warning is issued once if `advance` was never called and samples were drawn between two
        calls, because the state is then not the position of the training. The first of the two
        calls must come after the first sample was drawn: a loader may read ahead before a step.
        """
        _warn(self.progress.no_counts_warning())
        return encode(self.progress.saved_position)

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch = "raise"
    ) -> None:
        """Continue at the state of a sampler of any world size.

        Args:
            state: the result of `state_dict`.
            on_mismatch: what to do if the dataset, its length, the seed or the order differ.
                "raise" raises StateMismatchError. "restart" starts the epoch of the state from its
                first sample. "keep" skips as many samples of that epoch, in the order of this
                sampler.

        Raises:
            StateMismatchError: the state is incomplete, has another format, or, with "raise", does
                not match this sampler. The sampler is unchanged.
            ConfigError: `on_mismatch` is unknown.
        """
        self.progress.load(state, on_mismatch)

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise the StateMismatchError that `load_state_dict` would raise. Change nothing.

        `CheckpointManager.restore` calls it before it changes anything.
        """
        resume(state, self.position)


def _warn(message: str) -> None:
    """Issue a warning, if there is a message, for the line that called the sampler's method."""
    if message:
        warnings.warn(message, UserWarning, stacklevel=3)


class ElasticDistributedSampler(GlobalPositionIterable, DistributedSampler[int]):
    """Distributes the samples of an epoch to the ranks, and continues at any world size.

    To resume::

        sampler = ElasticDistributedSampler(dataset)
        sampler.load_state_dict(checkpoint["sampler"])     # on every rank, the same state
        loader = DataLoader(dataset, batch_size, sampler=sampler)
        for epoch, batches in sampler.epochs(3, loader):   # the first one keeps its position
            for batch in batches:
                train(batch)
                sampler.advance(batch_size * world_size)   # on every rank, the global count

    `advance` moves the position. Iterating does not, because a loader with workers reads indices
    long before they are trained on. Instead of using `epochs`, a script can call `set_epoch` before
    each epoch. If it does neither, the second iterator starts the next epoch, with a warning.

    With torchdata's StatefulDataLoader, the state of the loader has the position of the batches
    that it has returned, and `advance` is not needed. At another world size, the loader continues
    exactly if it takes a snapshot at each step (`snapshot_every_n_steps=1`, the default). Otherwise
    the steps since the last snapshot are repeated with another batch size. With
    `ElasticBatchSampler`, each step has the same size, and any interval works. With torch's own
    `BatchSampler`, the loader saves only a number of batches, which is valid for one world size.

    The order is computed where it is needed. The first index is available within a few
    milliseconds, and the memory is the same for a thousand samples and for 2**62.

    Args:
        dataset: any object with a length, such as a Dataset of torch or of Hugging Face. Only its
            current length is used.
        num_replicas: the world size; by default that of the process group.
        rank: the rank of this process; by default its rank in the process group.
        shuffle: True for a random permutation, which depends on the seed and the epoch; False for
            the order 0, 1, 2, ...
        seed: seed of the permutations; must be the same on every rank.
        drop_last: torch's name for `tail`: True is "drop", False is "pad".
        start_index: number of samples, of all ranks together, to skip in the first epoch. The first
            epoch is 0, or the argument of a `set_epoch` before anything is drawn.
        tail: what to do if the remaining samples cannot be divided evenly among the ranks. "pad"
            repeats some at the end, "drop" leaves some out, "exact" uses each once, so that some
            ranks use one less. The samples that "drop" leaves out depend on the world size: a job
            that finished an epoch on 4 ranks, and resumes there on 2, may still use two of them.
        order: an order of your own instead of `shuffle`: a function of the seed and the epoch. It
            returns the indices of an epoch as a one-dimensional int64 tensor, a sequence, or an
            object with `__len__` whose `__getitem__` maps an int64 tensor of positions to a tensor
            of indices, as `ShardDataset.shuffle_shards` does. It must return the same order on
            every rank, and equally many indices in each epoch. It is called with epoch 0 when the
            sampler is created, and once for each epoch that is drawn. The saved state contains a
            digest of the order of epoch 0, and a sampler with another order rejects it.

    Raises:
        ConfigError: an argument is invalid, or there are more than 2**62 samples to shuffle.
        ValueError: `rank` is out of range, or there is no process group to take it from.
    """

    def __init__(  # noqa: PLR0917 - the first six are torch's own, by place
        self,
        dataset: Sized,
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
                f"shuffle is {shuffle!r}, must be True or False: torchelastic's sampler has"
                " start_index as its fourth argument; pass start_index=... by name, or resume with"
                " load_state_dict"
            )
        if order is not None and not shuffle:
            raise ConfigError("order replaces shuffle: leave shuffle out")
        seed, start = check_int("seed", seed), check_int("start_index", start_index)
        length, name = len(dataset), "shuffled" if shuffle else "sequential"
        self._order_function = order
        self._current_order: tuple[int, Order] | None = None
        if order is not None:
            first = _checked_order(order(seed, 0))
            length, name = len(first), f"custom {_digest(first)}"
            self._current_order = 0, first
        elif shuffle and length > MAX_SHUFFLED:
            raise ConfigError(f"need at most 2**62 samples to shuffle, got {length}")
        if not 0 <= start <= length:
            raise ConfigError(f"need 0 <= start_index <= {length} samples, got {start}")
        digest = dataset.digest if isinstance(dataset, ShardDataset) else ""
        self.progress = EpochProgress(SamplerPosition(seed, 0, start, length, name, digest))
        _check_group(num_replicas, rank)
        super().__init__(cast(Dataset[Any], dataset), num_replicas, rank, shuffle, seed, drop_last)
        self.tail: Tail = ("drop" if drop_last else "pad") if tail is None else tail
        check_one_of("tail", self.tail, Tail)
        if drop_last and self.tail != "drop":
            raise ConfigError(f"drop_last=True means tail='drop', got tail={self.tail!r}")

    @property
    def epoch(self) -> int:
        """The current epoch. Assigning to it calls `set_epoch`."""
        return self.progress.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        # The constructor of torch's sampler assigns 0, which is not a call of set_epoch.
        if hasattr(self, "tail"):
            self.set_epoch(epoch)

    def set_rank(self, rank: int, num_replicas: int) -> None:
        """Draw the items of another rank from now on, as after a change of the process group.

        Args:
            rank: the rank, from 0.
            num_replicas: the number of ranks that share the samples.

        Raises:
            ConfigError: `rank` is out of range.
        """
        if not 0 <= rank < num_replicas:
            raise ConfigError(f"need 0 <= rank < num_replicas, got {rank} and {num_replicas}")
        self.rank, self.num_replicas = rank, num_replicas

    def epoch_order(self, epoch: int) -> Order:
        """Return the order of an epoch. The order that was returned last is cached.

        Args:
            epoch: number of the epoch.

        Raises:
            ConfigError: the function `order` returned an invalid order or another length.
        """
        if self._current_order is None or self._current_order[0] != epoch:
            self._current_order = None  # Free its memory before the next one is created.
            self._current_order = epoch, self._create_order(epoch)
        return self._current_order[1]

    def _create_order(self, epoch: int) -> Order:
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
        # The order is created when the first index is drawn.
        yield from index_chunks(self.epoch_order(start.epoch), self._positions(start))

    def _positions(self, start: SamplerPosition) -> range:
        return positions_of_rank(
            start, rank=self.rank, world_size=self.num_replicas, tail=self.tail
        )

    def _num_items(self, start: SamplerPosition) -> int:
        return len(self._positions(start))

    @property
    def samples_left(self) -> int:
        """The number of remaining samples of all ranks together, without repeats.

        Divide the sums of an evaluation by the value that this had before the evaluation.
        """
        start = self.position
        return min(self._epoch_end(start), start.length) - start.consumed

    def advance(self, global_batch: int) -> None:
        """Count `global_batch` more samples, of all ranks together, as trained on.

        The position never moves past the end of the epoch, so a smaller last batch can be counted
        as a full one. A warning is issued once if far more samples are counted than the epoch has.
        At the end of an epoch, `set_epoch` or the next iterator warns if far fewer samples were
        counted than drawn.

        Args:
            global_batch: number of samples in the step, of all ranks together.

        Raises:
            ConfigError: `global_batch` is negative or not an integer.
        """
        self.progress.advance(global_batch)
        _warn(self.progress.surplus_warning())


def _checked_order(order: Any) -> Order:
    """Return the result of a user's order function as an order.

    Raises:
        ConfigError: the result is not an order.
    """
    if isinstance(order, Sequence) or hasattr(order, "__array__"):
        order = torch.as_tensor(order)
    is_tensor = isinstance(order, Tensor)
    if is_tensor and (order.dim() != 1 or (len(order) and order.dtype != torch.int64)):
        raise ConfigError(
            "order must return a one-dimensional tensor of int64 indices, got"
            f" {order.dtype} of shape {[*order.shape]}"
        )
    if not is_tensor and not (hasattr(order, "__len__") and hasattr(order, "__getitem__")):
        raise ConfigError(
            "order must return the indices of an epoch, as a tensor or a sequence, got"
            f" {type(order).__name__}"
        )
    return cast(Order, order)


def _digest(order: Order) -> str:
    """Return a digest of evenly spaced indices of an order, as 16 hexadecimal digits."""
    spacing = max(1, len(order) // MAX_DIGEST_INDICES)
    indices = order[torch.arange(0, len(order), spacing)].tolist()
    return hashlib.sha256(f"{len(order)} {indices}".encode()).hexdigest()[:16]


def _check_group(num_replicas: int | None, rank: int | None) -> None:
    """Raise ConfigError if rank or world size are missing and there is no process group."""
    has_group = dist.is_available() and dist.is_initialized()
    if (num_replicas is None or rank is None) and not has_group:
        raise ConfigError(
            "the process group has not been initialized: call init_process_group first, or pass"
            " num_replicas=1, rank=0"
        )
