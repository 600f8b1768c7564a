"""The order of an epoch: which index into the dataset stands at which place.

A keyed shuffle computes that place by place: nothing is stored. It is a Feistel network over just
more than n numbers; a result that is not below n goes through it again until it is. One order for
each seed, epoch and length, for ever: a resumed job must find it.

Sources: the network on two halves of unequal size, one of them added modulo its size, and walking
until a result falls below n are J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002; halves that take turns are V. T. Hoang and P. Rogaway, "On Generalized Feistel
Networks", CRYPTO 2010. Shuffling by a cheap network of this kind, instead of by sorting, is
R. Mitchell et al., "Bandwidth-Optimal Random Shuffling for GPUs", ACM TOPC 2022. What a round
mixes with is ours: one multiplication whose upper half is folded onto its lower, all within 63
bits, so that int64 gives the same numbers as Python. It is a shuffle and no cipher: it keeps no
secret.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError
from .deal import Position

LARGEST = 2**62
"""The largest n: halves of 31 bits, whose products still fit in int64."""

ROUNDS = 8
"""With 5 the tests of `tests/data/test_shuffle.py` see a difference to chance; with 6 none does."""

SMALL = 256
"""The longest order that is a shuffled table: of n! orders a network this small reaches few."""

FOLD = 31
"""The shift that folds a product of 62 bits, and the bits that scale to a half's size."""

FEW, ONE_BY_ONE = 8, 24
"""The most places, and results that must go through again, that Python does faster than torch."""

TABLED, TABLED_BITS = 1 << 14, 15
"""From this many places on, halves of at most this many bits (up to 2**30 samples) go through
tables of 1 MB together, in half the time."""


@attrs.frozen
class Permutation:
    """One order of range(length): `at(place)` is the number that stands at a place.

    Made by `permutation`. A number is split into `number >> low_bits`, below `high_size`, and its
    `low_bits` lowest bits. Round i changes one of them by what `rounds[i]` makes of the other.
    """

    length: int
    low_bits: int
    high_size: int
    rounds: tuple[tuple[int, int], ...] = attrs.field(repr=False)
    """A factor, which is odd, and a summand, below 2**62; a source times its factor is as well."""
    table: tuple[int, ...] = attrs.field(default=(), repr=False)
    """The order itself where it is small; then there are no rounds."""

    def at(self, place: int) -> int:
        """The number at `place`; microseconds, whatever the length.

        Raises:
            IndexError: `place` is not in range(length).
        """
        if not 0 <= place < self.length:
            raise IndexError(f"need 0 <= place < {self.length}, got {place}")
        return self.table[place] if self.table else self.walk(place)

    def walk(self, number: int) -> int:
        """Through the network once, and again until the result is below the length."""
        while True:
            number = self._once(number)
            if number < self.length:
                return number

    def _once(self, number: int) -> int:
        mask = (1 << self.low_bits) - 1
        high, low = number >> self.low_bits, number & mask
        for turn, (factor, summand) in enumerate(self.rounds):
            mixed = (high if turn % 2 else low) * factor + summand
            mixed ^= mixed >> FOLD
            if turn % 2:
                low ^= mixed & mask
            else:
                share = (mixed & ((1 << FOLD) - 1)) * self.high_size >> FOLD
                high = (high + share) % self.high_size
        return high << self.low_bits | low

    def many(self, places: Tensor) -> Tensor:
        """The numbers at `places`.

        Args:
            places: int64, one-dimensional, each in range(length); that is not checked.

        Returns:
            int64 of the same shape: element i is `at(places[i])`.
        """
        if self.table:
            return torch.tensor(self.table, dtype=torch.int64)[places]
        if len(places) <= FEW:
            return torch.tensor([self.walk(place) for place in places.tolist()], dtype=torch.int64)
        numbers = self._once_each(places)
        again = (numbers >= self.length).nonzero().squeeze(1)
        while len(again) > ONE_BY_ONE:
            further = self._once_each(numbers[again])
            numbers[again] = further
            again = again[further >= self.length]
        for where in again.tolist():
            numbers[where] = self.walk(int(numbers[where]))
        return numbers

    def _once_each(self, numbers: Tensor) -> Tensor:
        """As `_once`, in place on a few buffers."""
        tabled = self.low_bits <= TABLED_BITS and len(numbers) >= TABLED
        tables = _tables(self) if tabled else ()
        high, low = numbers >> self.low_bits, numbers & ((1 << self.low_bits) - 1)
        if tables:
            high, low = high.int(), low.int()
        mixed, spare = torch.empty_like(high), torch.empty_like(high)
        for turn in range(len(self.rounds)):
            source = high if turn % 2 else low
            if tables:
                torch.index_select(tables[turn], 0, source, out=mixed)
            else:
                self._mix(turn, source, mixed, spare)
            if turn % 2:
                low ^= mixed
            else:
                # The sum is negative just where it needs no reduction, and its sign, as a mask,
                # adds the size again there.
                high += mixed
                torch.bitwise_right_shift(high, FOLD, out=spare)
                spare &= self.high_size
                high += spare
        return (high.long() << self.low_bits).bitwise_or_(low)

    def _mix(self, turn: int, source: Tensor, mixed: Tensor, spare: Tensor) -> None:
        """Make of each source what a round adds to the other half, without leaving int64: of a high
        half, scaled to -size ... -1 rather than 0 ... size - 1."""
        factor, summand = self.rounds[turn]
        torch.add(torch.tensor(summand), source, alpha=factor, out=mixed)
        torch.bitwise_right_shift(mixed, FOLD, out=spare)
        mixed ^= spare
        if turn % 2:
            mixed &= (1 << self.low_bits) - 1
        else:
            mixed |= -(1 << FOLD)
            mixed *= self.high_size
            mixed >>= FOLD


@functools.lru_cache(maxsize=2)
def _tables(permutation: Permutation) -> tuple[Tensor, ...]:
    """What each round makes of every number of a half."""
    made = []
    for turn in range(ROUNDS):
        size = permutation.high_size if turn % 2 else 1 << permutation.low_bits
        mixed, spare = torch.empty(2, size, dtype=torch.int64)
        permutation._mix(turn, torch.arange(size), mixed, spare)
        made.append(mixed.int())
    return tuple(made)


def permutation(length: int, *, seed: int, epoch: int = 0) -> Permutation:
    """The order of range(length) for a seed and an epoch, which may be any integers.

    The keys are SHAKE-256 of all three, so neighbours have nothing in common.

    Raises:
        ConfigError: `length` is negative or more than 2**62.
    """
    if not 0 <= length <= LARGEST:
        raise ConfigError(f"need 0 <= length <= 2**62 to shuffle, got {length}")
    stream = hashlib.shake_256(f"elasticlib order 1: {seed:d} {epoch:d} {length:d}".encode("ascii"))
    if length <= SMALL:
        return Permutation(length, 0, 0, (), _shuffled(length, _words(stream.digest(8 * length))))
    bits = (length - 1).bit_length()
    low_bits = (bits + 1) // 2
    high_size = -(-length >> low_bits)
    words = _words(stream.digest(16 * ROUNDS))
    widths = (low_bits, bits - low_bits) * (ROUNDS // 2)
    rounds = tuple(
        (words[2 * turn] >> (2 + width) | 1, words[2 * turn + 1] >> 2)
        for turn, width in enumerate(widths)
    )
    return Permutation(length, low_bits, high_size, rounds)


def _words(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def _shuffled(length: int, words: list[int]) -> tuple[int, ...]:
    """R. Durstenfeld, "Algorithm 235: Random permutation", CACM 7 (1964), after Fisher, Yates."""
    table = list(range(length))
    for last in range(length - 1, 0, -1):
        chosen = words[last] % (last + 1)
        table[last], table[chosen] = table[chosen], table[last]
    return tuple(table)


Order = Callable[[Tensor], Tensor]
"""Places (int64, one-dimensional, not negative) to indices."""

AT_ONCE, LISTED = 1 << 15, 1 << 11
"""Places worked out in the largest run, which with its buffers is a MB; and those that are Python's
integers at a time, which need five times the memory."""


def order_of(position: Position, made_of: Tensor | None = None) -> Order:
    """The order of the epoch that `position` stands in.

    A place of the epoch's length or more stands for a repeat, from the order's start again.

    Args:
        position: names the order.
        made_of: the weights (float, one for each sample) or the shards' sizes (int64) that an order
            by "weighted" or "shards" is made of.

    Raises:
        ConfigError: it has more than 2**62 samples, and is to be shuffled.
    """
    length, seed, epoch = position.length, position.seed, position.epoch
    order: Order
    if position.shuffle == "none":
        order = torch.positive  # which gives the places back
    elif position.shuffle == "randperm":
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(length, generator=generator).__getitem__
    elif position.shuffle == "weighted":
        order = WeightedOrder(cast(Tensor, made_of), length, seed=seed, epoch=epoch)
    elif position.shuffle == "shards":
        order = order_of_shards(cast(Tensor, made_of), seed=seed, epoch=epoch)
    else:
        order = permutation(length, seed=seed, epoch=epoch).many

    def of_any(places: Tensor) -> Tensor:
        # A remainder is slow, and only the very end repeats.
        repeats = len(places) > 0 and int(places.max()) >= length
        return order(places % length if repeats else places)

    return of_any


def runs_of(order: Order, places: range, share: range | None = None) -> Iterator[list[Any]]:
    """The indices at `places`, in lists that grow from a few to what fits the cache.

    So the first comes at once, and no list's size depends on the epoch's. With a `share`, each
    place begins a batch: it stands for the places of `share` after it, as one list.
    """
    width = len(share) if share else 1
    done, count, most = 0, 1 if share else FEW, max(1, AT_ONCE // width)
    offsets = None if share is None else torch.arange(len(share)) * share.step + share.start
    while done < len(places):
        part = places[done : done + count]
        starts = torch.arange(part.start, part.stop, part.step)
        if offsets is None:
            indices = order(starts)
        else:
            indices = order((starts[:, None] + offsets).flatten()).view(len(part), len(offsets))
        for listed in torch.split(indices, max(1, LISTED // width)):
            yield listed.tolist()
        done, count = done + len(part), min(4 * count, most)


def order_of_shards(sizes: Tensor, *, seed: int, epoch: int) -> Order:
    """The shards one after the other in the order of the keyed shuffle, each from its first sample
    to its last; an index counts the samples of all shards in the order in which they are given."""
    order = permutation(len(sizes), seed=seed, epoch=epoch).many(torch.arange(len(sizes)))
    first, ends = (sizes.cumsum(0) - sizes)[order], sizes[order].cumsum(0)
    # What to add to a place of a shard, so that its begin in the row becomes its first index.
    moved = first - (ends - sizes[order])
    return lambda places: places + moved[torch.searchsorted(ends, places, right=True)]


class WeightedOrder:
    """Draws without replacement, each next one in proportion to its weight among those left.

    Sample i has the key -log(u) / weight, with u in (0, 1] from its number in a keyed shuffle of
    range(2**62), and the order is that of the keys: P. S. Efraimidis and P. G. Spirakis, "Weighted
    random sampling with a reservoir", Information Processing Letters 97 (2006), where the keys are
    u ** (1 / weight), from the largest. Equal keys are in the order of their indices, and weights
    of 0 come last.

    Keys are not kept. They are counted once, by their highest bits, to know which of them stand
    where; then an eighth of all is sorted at a time, from the place that is wanted. That takes
    about 8 bytes a sample. The first index comes after two passes over the weights, of some 100 ns
    a sample each, and a whole epoch costs ten.

    Args:
        weights: a float tensor of one dimension.
        length: places of an epoch.
        at_least: samples that are sorted at a time, or an eighth of all if that is more.
    """

    def __init__(
        self, weights: Tensor, length: int, *, seed: int, epoch: int, at_least: int = 1 << 22
    ) -> None:
        self._weights, self._length = weights, length
        self._numbers = permutation(LARGEST, seed=seed, epoch=epoch)
        self._most = max(at_least, len(weights) // 8)
        self._ends = torch.empty(0, dtype=torch.int64)
        self._begin, self._sorted = 0, torch.empty(0, dtype=torch.int64)

    def __call__(self, places: Tensor) -> Tensor:
        indices, missing = torch.empty_like(places), torch.arange(len(places))
        while len(missing):
            wanted = places[missing]
            self._sort_from(int(wanted[0]))
            inside = (wanted >= self._begin) & (wanted < self._begin + len(self._sorted))
            indices[missing[inside]] = self._sorted[wanted[inside] - self._begin]
            missing = missing[~inside]
        return indices

    def keys(self, begin: int, end: int) -> Tensor:
        """Of the samples begin to end (not included); float64, not negative."""
        numbers = self._numbers.many(torch.arange(begin, end))
        return minus_log((numbers.double() + 0.5) * 2.0**-62) / self._weights[begin:end].double()

    def _blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of each block its begin, keys, and their buckets: by sign, exponent and the highest 5
        bits of the fraction."""
        for begin in range(0, len(self._weights), BLOCK):
            keys = self.keys(begin, min(begin + BLOCK, len(self._weights)))
            yield begin, keys, keys.view(torch.int64) >> 47

    def _sort_from(self, place: int) -> None:
        """Have the indices sorted that stand at `place` and after it."""
        if self._begin <= place < self._begin + len(self._sorted):
            return
        first, last, begin = 0, BUCKETS - 1, 0
        if len(self._weights) > self._most:
            if not len(self._ends):
                counts = torch.zeros(BUCKETS, dtype=torch.int64)
                for _, _, buckets in self._blocks():
                    counts += torch.bincount(buckets, minlength=BUCKETS)
                self._ends = counts.cumsum(0)
            first = int(torch.searchsorted(self._ends, place, right=True))
            begin = int(self._ends[first - 1]) if first else 0
            last = int(torch.searchsorted(self._ends, min(begin + self._most, self._length)))
        found = []
        for start, keys, buckets in self._blocks():
            chosen = ((buckets >= first) & (buckets <= last)).nonzero().squeeze(1)
            found.append((keys[chosen], chosen + start))
        keys, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
        if (left := self._length - begin) < len(keys):
            drawn = keys <= keys.kthvalue(left).values
            keys, indices = keys[drawn], indices[drawn]
        self._begin, self._sorted = begin, indices[keys.sort(stable=True).indices]


BLOCK, BUCKETS = 1 << 16, 1 << 16
"""Samples whose keys are made at once; values of a positive double's highest 17 bits."""


def minus_log(u: Tensor) -> Tensor:
    """-log(u) of float64 in (0, 1], to the last bit the same on every machine.

    Two ranks whose libraries' logarithms differ in a bit would disagree on an order. So it is made
    of operations that IEEE 754 rounds: with u = m * 2**e and m near 1, log(m) = 2 artanh((m - 1) /
    (m + 1)), by its power series.
    """
    fraction, exponent = torch.frexp(u)
    low = fraction < math.sqrt(0.5)
    fraction = torch.where(low, 2 * fraction, fraction)
    part = (fraction - 1) / (fraction + 1)
    square = part * part
    series = torch.full_like(u, 1 / 21)
    for divisor in range(19, 0, -2):
        series *= square
        series += 1 / divisor
    log = (exponent - low.int()).double() * math.log(2)
    return (log + 2 * part * series).abs()


def weights_of(weights: Sequence[float] | Tensor, samples: int) -> Tensor:
    """One weight for each sample, checked.

    Raises:
        ConfigError: there are more or fewer, or one is no number, negative, not finite, too large
            or too small.
    """
    floats = isinstance(weights, Tensor) and weights.is_floating_point()
    try:
        checked = torch.as_tensor(weights, dtype=None if floats else torch.float64).detach().cpu()
    except (TypeError, ValueError) as error:
        kind = type(weights).__name__
        raise ConfigError(
            f"weights must be a list or a tensor of numbers, got {kind}: {error}"
        ) from error
    if checked.shape != (samples,):
        raise ConfigError(f"need one weight for each of {samples} samples, got {[*checked.shape]}")
    wrong = ((checked != 0) & ~((checked >= 1e-30) & (checked <= 1e30))).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ConfigError(
            f"need weights of 0, or from 1e-30 to 1e30, got {checked[at].item()} for sample {at}"
        )
    return checked


def digest_of(numbers: Tensor) -> str:
    """16 hexadecimal digits that two tensors share only if all their numbers are the same."""
    found = hashlib.sha256(f"{len(numbers)}".encode("ascii"))
    wide = torch.float64 if numbers.is_floating_point() else torch.int64
    for part in torch.split(numbers, BLOCK):
        part = part.to(wide).contiguous()
        found.update(ctypes.string_at(part.data_ptr(), 8 * len(part)))
    return found.hexdigest()[:16]
