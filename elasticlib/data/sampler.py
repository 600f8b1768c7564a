"""A `DistributedSampler` whose progress belongs to the job, not to a rank or a world size.

The order of an epoch depends on seed and epoch alone, and the state counts what was *trained on*,
so a job of any size continues exactly where a job of another size stopped.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from operator import length_hint
from typing import Any, Literal, TypeVar, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from ..errors import ConfigError, StateMismatch
from .deal import (
    OnMismatch,
    Position,
    Shuffle,
    Tail,
    advance,
    check_int,
    check_one_of,
    deal,
    encode,
    end_of_deal,
    next_epoch,
    resume,
)
from .permutation import LARGEST, digest_of, order_of, runs_of, weights_of

T = TypeVar("T")
Algorithm = Literal["feistel", "randperm", "shards"]
Over = Callable[[Position], bool]
"""Whether a position leaves nothing for any rank."""


class Progress:
    """The position of one sampler, with what it must remember to move on by itself.

    Samples are used when they are counted (`advance`). Drawing moves nothing, as loaders draw long
    before training. An epoch gives way to the next when an iterator begins (`begin`), unless
    `set_epoch` was ever called: after its last sample was counted; or, as long as nobody has
    counted any, after an iterator that began where it stands has run out.
    """

    def __init__(self, position: Position) -> None:
        self.position = position
        self._fresh = True
        self._named: int | None = None
        self.ran_out: Position | None = None
        """Where an iterator began that has run out."""
        self.drawn = 0
        """How many this rank's iterator has been given, which is ahead of what it has yielded."""
        self._asked: tuple[Position, int] | None = None
        self._guessed = False
        self._account: Literal["nobody's", "advance's", "a loader's", "warned of"] = "nobody's"
        """Who counts what was trained on; "warned of": nobody does, and the user knows."""
        self._cursor: Cursor | None = None
        """Of the iterator that began last, to compare what it drew with what is counted."""
        self._counted = False
        """Whether this process has counted samples of the present epoch."""
        self._surplus = self._largest_count = 0
        """Samples of the present epoch that were counted beyond its end; the largest count."""
        self._warned: set[str] = set()
        """The kinds of wrong counts that were reported: each is reported once."""

    def __getstate__(self) -> dict[str, Any]:
        # An iterator can be neither copied nor pickled.
        return {**vars(self), "_cursor": None}

    def next_to_count(self, over: Over) -> Position:
        """Where the next sample to be counted stands."""
        used_up = self.position.consumed > 0 and over(self.position)
        return next_epoch(self.position) if used_up and self._named is None else self.position

    def next_to_draw(self, over: Over) -> Position:
        """Where an iterator that began now would begin."""
        return next_epoch(self.position) if self._drawn_out else self.next_to_count(over)

    @property
    def _drawn_out(self) -> bool:
        uncounted = self._named is None and self._account != "advance's"
        return uncounted and self.ran_out == self.position

    def begin(self, over: Over) -> Position:
        """An iterator begins: where."""
        start = self.next_to_draw(over)
        self._guessed |= self._drawn_out
        if start.epoch != self.position.epoch:
            self._forget_counts()
        self.position, self._fresh = start, False
        self.drawn, self._asked = 0, None
        return start

    def track(self, cursor: Cursor) -> None:
        """Compare what this iterator draws with what is counted from now on."""
        self._cursor = cursor

    def miscount(self) -> str:
        """Return what to warn of when the last iterator is given up: if it has run out, and far
        fewer samples were counted than it drew. Empty if there is nothing to warn of."""
        cursor, self._cursor = self._cursor, None
        return self._once("miscount", cursor.miscount() if cursor is not None else "")

    def emptiness(self, over: Over) -> str:
        """Return what to warn of if an iterator that begins now is empty, because this process has
        counted all samples of the epoch; else an empty string."""
        position = self.position
        if self._named is None or not self._counted or not over(position):
            return ""
        return self._once(
            "empty",
            f"epoch {position.epoch} is empty: all of its {position.length} samples were counted"
            " before, and the next epoch does not begin by itself after set_epoch() was called."
            " Call set_epoch(epoch) before each epoch",
        )

    def excess(self) -> str:
        """Return what to warn of if far more samples were counted than the epoch has; else an empty
        string. A last batch that is smaller than it is counted is no reason to warn."""
        if self._surplus < max(1, 2 * self._largest_count):
            return ""
        position = self.position
        counted = position.length + self._surplus
        return self._once(
            "excess",
            f"advance() counted {counted} samples of epoch {position.epoch}, which has"
            f" {position.length}: a run that is resumed in an epoch passes over samples. Count each"
            " batch once, as batch_size * world_size on every rank",
        )

    def _once(self, kind: str, message: str) -> str:
        if not message or kind in self._warned:
            return ""
        self._warned.add(kind)
        return message

    def _forget_counts(self) -> None:
        self._counted, self._surplus, self._largest_count = False, 0, 0

    def kept(self) -> None:
        """A loader keeps the position of what was drawn with its own state: nobody has to count."""
        if self._account != "advance's":
            self._account = "a loader's"

    def why_misleading(self) -> str:
        """Why the position is not where training stands, when first asked for; or nothing."""
        ended = self.ran_out is not None and self.ran_out.consumed < self.ran_out.length
        before, self._asked = self._asked, (self.position, self.drawn)
        goes_on = before is not None and before[0] == self.position and 0 < before[1] < self.drawn
        if not (ended or goes_on) or self._account != "nobody's":
            return ""
        self._account = "warned of"
        position = self.position
        drawn = "an epoch was drawn to its end" if ended else "samples were drawn"
        return (
            f"{drawn} from this ElasticDistributedSampler, but advance() was not called: the state"
            f" says {position.consumed} samples of epoch {position.epoch}, so a resumed run repeats"
            " the others. Call"
            " sampler.advance(batch_size * world_size) after each step, on every rank"
        )

    def advance(self, count: int) -> None:
        """As the sampler's. Refused in an epoch that began because the one before it was drawn:
        which of the two is trained on?"""
        if self._guessed and self._named is None and self._account != "advance's":
            raise ConfigError(
                f"epoch {self.position.epoch} began by itself, as the one before it was drawn to"
                " its end and nothing was counted; now samples are. Call set_epoch() before each"
                " epoch, or look at the order through another sampler"
            )
        before, self.position = self.position, advance(self.position, count)
        self._fresh, self._account = False, "advance's"
        count = int(count)
        if count:
            self._counted = True
            self._surplus += before.consumed + count - self.position.consumed
            self._largest_count = max(self._largest_count, count)
            if self._cursor is not None:
                self._cursor.add_count(count)

    def finish_epoch(self) -> None:
        """Go to the end of the epoch, whose remaining samples are left out."""
        self.position = attrs.evolve(self.position, consumed=self.position.length)

    def set_epoch(self, epoch: int) -> None:
        epoch = check_int("epoch", epoch)
        if epoch < 0:
            raise ConfigError(f"need epoch >= 0, got {epoch}")
        stays = self._fresh or epoch == self.position.epoch
        consumed = self.position.consumed if stays else 0
        if not stays:
            self._forget_counts()
        self.position = attrs.evolve(self.position, epoch=epoch, consumed=consumed)
        self._fresh, self._named = False, epoch

    def load(self, state: Mapping[str, Any], on_mismatch: OnMismatch = "refuse") -> None:
        """Go to where `state` stands; see `resume` for what it raises."""
        self._go_to(resume(state, self.position, on_mismatch))
        if self._account != "nobody's":
            self._account = "warned of"  # a program that has counted knows that it has to

    def restore(self, state: Mapping[str, Any], over: Over) -> Position:
        """Go to where an iterator stood: where.

        A loader does this late, when it is first iterated, so `set_epoch` may have named the next
        epoch meanwhile; that is right if the state's has come to its end.

        Raises:
            StateMismatch: as `resume`; or `set_epoch` named an epoch that neither is the state's
                nor follows its end: some would be trained on again, or passed over.
        """
        saved, named = resume(state, self.position), self._named
        if named is not None and named != saved.epoch:
            fits = saved.epoch + 1 if over(saved) else saved.epoch
            if named != fits:
                raise StateMismatch(
                    f"epoch is {saved.epoch} in the loader's state, with {saved.consumed} of"
                    f" {saved.length} samples used, and set_epoch({named}) was called: call"
                    f" set_epoch({fits}) to go on after it"
                )
            saved = next_epoch(saved)
        self._go_to(saved)
        return saved

    def _go_to(self, position: Position) -> None:
        """Stand at `position`; what was drawn before says nothing about it."""
        self.position, self._fresh = position, False
        self.ran_out, self._guessed, self._cursor = None, False, None
        self._forget_counts()


class Cursor:
    """What an iterator has been given, list by list, and how far it has come in that.

    It also compares what was drawn with what `advance` counts meanwhile. A loader draws ahead of
    the training by a number of batches that is constant after the first one, so only what is drawn
    and counted after the first count is compared: a training that stops within an epoch has
    counted as many samples as were drawn, however far its loader draws ahead.
    """

    def __init__(self, source: JobIterable, start: Position) -> None:
        self._source, self._ran_out = source, False
        self._drawn_at_first: int | None = None
        self._counted = self._first_count = self._largest_count = 0
        self._begin(start)

    def _begin(self, start: Position) -> None:
        self._start, self._given = start, 0
        self._current: Iterator[Any] = iter(())
        self._runs = self._source._runs(start)

    def state_dict(self) -> dict[str, Any]:
        self._source.progress.kept()
        return encode(advance(self._start, self._drawn))

    @property
    def _drawn(self) -> int:
        """How many samples all ranks have drawn while this iterator yielded what it did."""
        yielded = self._given - length_hint(self._current)
        return yielded * self._source._stride

    def add_count(self, count: int) -> None:
        """Note that `advance` has counted `count` samples more."""
        if self._drawn_at_first is None:
            self._drawn_at_first, self._first_count = self._drawn, count
        self._counted += count
        self._largest_count = max(self._largest_count, count)

    def miscount(self) -> str:
        """Return what to warn of if it has run out and too few samples were counted, or ''."""
        if not self._ran_out or self._drawn_at_first is None:
            return ""
        drawn, start = min(self._drawn, self._start.length - self._start.consumed), self._start
        missing = (drawn - self._drawn_at_first) - (self._counted - self._first_count)
        # A last batch that is dropped, or that a training stops at, may be missing.
        if missing < 2 * self._largest_count:
            return ""
        return (
            f"advance() counted {self._counted} of the {drawn} samples of epoch {start.epoch} that"
            " all ranks drew together: a run that is resumed in an epoch repeats samples, and an"
            " epoch that begins without set_epoch() is too short. Call advance(batch_size *"
            " world_size) after each step, on every rank"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._ran_out:
            raise StateMismatch("an iterator that has run out cannot go on: load into a new one")
        start = self._source.progress.restore(state, self._source._over)
        for _ in self._current:  # the chain holds this list: use it up
            pass
        self._begin(start)

    def lists(self) -> Iterator[Iterator[Any]]:
        """The lists, each as an iterator of which we see how much is left."""
        while (run := next(self._runs, None)) is not None:
            self._given += len(run)
            self._source.progress.drawn = self._given
            self._current = iter(run)
            yield self._current
        self._ran_out = True
        self._source.progress.ran_out = self._start


class ElasticIterator(chain[T]):
    """Yields as fast as a list, as nothing of ours runs between two items of a run.

    Loaders that save their own state, as torchdata's StatefulDataLoader, ask the iterator for it
    with each batch that they draw, and keep the answer until that batch has been handed out.
    """

    cursor: Cursor

    def state_dict(self) -> dict[str, Any]:
        """What the job has used once all that was yielded is; any sampler or iterator loads it."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at `state`, and the sampler with it.

        Raises:
            StateMismatch: the state is another sampler's, of another epoch than `set_epoch`
                named, or this iterator has run out.
        """
        self.cursor.load_state_dict(state)


class JobIterable:
    """What iterates from the position of a job: a sampler, or a batch sampler over one."""

    progress: Progress
    tail: Tail

    @property
    def _stride(self) -> int:
        """How many places of the order all ranks use while this one is given one item."""
        raise NotImplementedError

    def _runs(self, start: Position) -> Iterator[list[Any]]:
        """This rank's items from a position to the epoch's end, in lists."""
        raise NotImplementedError

    def _end(self, start: Position) -> int:
        return end_of_deal(start, self._stride, self.tail)

    def _over(self, position: Position) -> bool:
        return self._end(position) <= position.consumed

    def __iter__(self) -> ElasticIterator[Any]:
        """This rank's items from the present position to the epoch's end."""
        _warn(self.progress.miscount())
        start = self.progress.begin(self._over)
        _warn(self.progress.emptiness(self._over))
        cursor = Cursor(self, start)
        self.progress.track(cursor)
        iterator = cast("ElasticIterator[Any]", ElasticIterator.from_iterable(cursor.lists()))
        iterator.cursor = cursor
        return iterator

    @property
    def position(self) -> Position:
        """Where the job stands: seed, epoch, samples consumed by all ranks, length, shuffle."""
        return self.progress.position

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or stay where we are if that is the present one.

        After the first call, no epoch begins automatically. A first call before anything is drawn,
        counted or loaded keeps the position, so that `start_index` counts in that epoch.

        Raises:
            ConfigError: `epoch` is negative, or no integer.
        """
        if epoch != self.position.epoch:
            _warn(self.progress.miscount())
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values, the same on every rank.

        Warns, once, if an epoch was drawn to its end, or from one state to the next, and nothing
        was counted: then this is not the position of the training.
        """
        asker, frames = _asker()
        if asker == "torchdata":
            # That loader asks its iterator, too, and it is the iterator's answer that it goes by.
            self.progress.kept()
        if why := self.progress.why_misleading():
            warnings.warn(why, UserWarning, stacklevel=frames)
        return encode(self.position)

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch = "refuse"
    ) -> None:
        """Continue from a state that a sampler of any world size gave out.

        Args:
            state: of `state_dict`; also of the versions before, where that is certain to mean
                the same: see `elasticlib.data.deal.decode`.
            on_mismatch: what to do if the dataset's length, the seed or shuffle differ: see
                `elasticlib.data.deal.OnMismatch`.

        Raises:
            StateMismatch: the state is incomplete, has another format, or, with "refuse", does not
                match this sampler. Nothing has changed.
            ConfigError: `on_mismatch` cannot be.
        """
        self.progress.load(state, on_mismatch)


def _warn(message: str) -> None:
    """Warn the caller of the sampler's method that calls this, if there is something to say."""
    if message:
        warnings.warn(message, UserWarning, stacklevel=3)


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


class ElasticDistributedSampler(JobIterable, DistributedSampler[int]):
    """Deals the samples of an epoch to the ranks, and goes on at any world size.

    To resume::

        sampler = ElasticDistributedSampler(dataset)
        sampler.load_state_dict(checkpoint["sampler"])     # on every rank, the same state
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)                       # the same epoch keeps its position
            for batch in DataLoader(dataset, batch_size, sampler=sampler):
                train(batch)
                sampler.advance(batch_size * world_size)   # on every rank, the global count

    Only `advance` moves the position. Iterating does not, because a loader with workers draws
    indices long before they are trained on. Without `set_epoch` the next epoch begins
    automatically: with the first new iterator after all samples of the present epoch were counted;
    or, if nothing is counted, after an iterator has run out. Call `set_epoch` if batches are
    fetched ahead of the current step, or if `DataLoader`'s own `drop_last` leaves samples that are
    never counted.

    In torchdata's StatefulDataLoader the loader's own state has the position of what it has
    returned, and `advance` is not needed. On another number of ranks it continues exactly if the
    loader takes a snapshot each step (`snapshot_every_n_steps=1`, the default): otherwise the steps
    since the last snapshot are drawn again, with another size. With `ElasticBatchSampler` each step
    has the same size, and any interval works. Of torch's own `BatchSampler` that loader only keeps
    a count of batches, which is valid for one world size.

    The order is computed where it is needed: the first index comes after microseconds, with the
    same memory for a thousand samples and for 2**62.

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
        shuffle_algorithm: "feistel" needs no memory for the order. "randperm" has exactly the order
            of torch's `DistributedSampler`, and its cost: a list of all indices on every rank.
            "shards" shuffles the shards of a `ShardDataset`, and keeps the samples of a shard in
            order.
        weights: one for each sample, 0 or more. An epoch then draws without replacement, each time
            in proportion to the weights of the remaining samples; a sample with weight 0 is never
            drawn. This takes 8 bytes for each sample beside the weights, and about 200 ns for each
            before the first index.
        epoch_size: with `weights`, how many samples all ranks together draw in an epoch. By default
            each sample with a weight above 0 comes once, heavy ones sooner.

    Raises:
        ConfigError: `shuffle`, `seed`, `start_index`, `tail`, `shuffle_algorithm`, `weights` or
            `epoch_size` cannot be, or there are more than 2**62 samples to shuffle.
        ValueError: `rank` is not in the world, or there is no process group to take it from.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the first six are torch's own, by place
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
        weights: Sequence[float] | Tensor | None = None,
        epoch_size: int | None = None,
    ) -> None:
        if not isinstance(shuffle, bool):
            raise ConfigError(
                f"shuffle is {shuffle!r}, must be True or False: torchelastic's sampler took"
                " start_index as its fourth argument; give it by name, start_index=..., or resume"
                " by load_state_dict"
            )
        check_one_of("shuffle_algorithm", shuffle_algorithm, Algorithm)
        length = len(cast(Sized, dataset))
        order: Shuffle = shuffle_algorithm if shuffle else "none"
        seed, at = check_int("seed", seed), check_int("start_index", start_index)
        self.made_of: Tensor | None = None
        if weights is not None:
            if order != "feistel":
                raise ConfigError(
                    "weights make an order of their own: leave shuffle and shuffle_algorithm out"
                )
            self.made_of = weights_of(weights, length)
            order, length = "weighted", _epoch_of(self.made_of, epoch_size)
        elif epoch_size is not None:
            raise ConfigError("epoch_size is for weights alone: without them an epoch is all")
        elif order == "shards":
            self.made_of = _sizes_of(dataset, length)
        if not 0 <= at <= length:
            raise ConfigError(f"need 0 <= start_index <= {length} samples, got {at}")
        if shuffle and length > LARGEST:
            raise ConfigError(f"need at most 2**62 samples to shuffle, got {length}")
        digest = "" if self.made_of is None else digest_of(self.made_of)
        self.progress = Progress(Position(seed, 0, at, length, order, digest))
        _check_group(num_replicas, rank)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.tail: Tail = ("drop" if drop_last else "pad") if tail is None else tail
        check_one_of("tail", self.tail, Tail)
        if drop_last and self.tail != "drop":
            raise ConfigError(f"drop_last=True means tail='drop', got tail={self.tail!r}")

    @property
    def epoch(self) -> int:
        """The epoch in which the job stands; assigning to it is `set_epoch`."""
        return self.progress.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        # torch's constructor assigns the 0 that stands there already: nobody has named an epoch.
        if hasattr(self, "tail"):
            self.set_epoch(epoch)

    @property
    def _stride(self) -> int:
        return self.num_replicas

    def _runs(self, start: Position) -> Iterator[list[int]]:
        return runs_of(order_of(start, self.made_of), self._places(start))

    def __len__(self) -> int:
        """How many indices an iterator of this rank would yield now: what is left."""
        return len(self._places(self.progress.next_to_draw(self._over)))

    @property
    def samples_left(self) -> int:
        """How many samples all ranks together have before them, repeats not counted: asked before
        an evaluation begins, what its sums are to be divided by."""
        start = self.progress.next_to_draw(self._over)
        return min(self._end(start), start.length) - start.consumed

    @property
    def samples_left_here(self) -> int:
        """How many of them are this rank's: what it yields beyond them are repeats."""
        return len(range(self.rank, self.samples_left, self.num_replicas))

    def _places(self, start: Position) -> range:
        return deal(start, rank=self.rank, world_size=self.num_replicas, tail=self.tail)

    def advance(self, global_batch: int) -> None:
        """Count `global_batch` more samples, over all ranks together, as trained on.

        Past the end of the epoch it stays at the end, so the last, smaller batch may be counted
        as a full one. Warns, once, if far more samples are counted than the epoch has. At the end
        of an epoch, `set_epoch` or the next iterator warns if far fewer were counted than drawn.

        Raises:
            ConfigError: `global_batch` is negative, or no integer; or epochs have begun by
                themselves because nobody counted.
        """
        self.progress.advance(global_batch)
        _warn(self.progress.excess())


def _epoch_of(weights: Tensor, epoch_size: int | None) -> int:
    most = int((weights > 0).sum())
    size = most if epoch_size is None else check_int("epoch_size", epoch_size)
    if not 0 < size <= most:
        raise ConfigError(
            f"need 0 < epoch_size <= {most}, the samples whose weight is not 0, got {size}: an"
            " epoch draws each of them once at most"
        )
    return size


def _sizes_of(dataset: Dataset[Any], length: int) -> Tensor:
    sizes = getattr(dataset, "sizes", None)
    if sizes is None or sum(sizes) != length:
        raise ConfigError(
            "shuffle_algorithm='shards' needs a dataset that has `sizes`, the samples of each of"
            f" its shards, as ShardDataset; {type(dataset).__name__} has {sizes!r} and {length}"
            " samples"
        )
    return torch.tensor(sizes, dtype=torch.int64)


def _check_group(num_replicas: int | None, rank: int | None) -> None:
    """Raises ConfigError where both are to be the process group's, and there is none."""
    grouped = dist.is_available() and dist.is_initialized()
    if (num_replicas is None or rank is None) and not grouped:
        raise ConfigError(
            "the process group has not been initialized: call init_process_group first, or give"
            " num_replicas=1, rank=0"
        )
