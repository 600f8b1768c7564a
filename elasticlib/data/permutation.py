"""Orders of the samples of an epoch, computed where they are needed instead of stored.

The shuffle is an unbalanced Feistel network with random tables as round functions. Seed, epoch and
length determine the order, on every machine and with every version of torch. Another version of
elasticlib may define another order.

Sources: an alternating network on two halves of unequal size, one of them added modulo its size,
and repeated passes until a result is in range, are from J. Black and P. Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002, and V. T. Hoang and P. Rogaway, "On Generalized Feistel
Networks", CRYPTO 2010. Shuffling with a network of this kind instead of sorting is from R. Mitchell
et al., "Bandwidth-Optimal Random Shuffling for GPUs", ACM TOPC 2022. Tables that are selected by
parts of a number are tabulation hashing (A. Zobrist, 1970).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError

MAX_SHUFFLED = 2**62  # the network computes with int64, and its domain is slightly larger

MAX_SORTED = (
    1 << 10
)  # A network on so few numbers reaches few of the n! orders, so keys are sorted.

ROUNDS = 4  # the tests of tests/data/test_shuffle.py detect 2 rounds, and do not detect 3

MAX_TABLE_BITS = 15  # a table of int32 for each round then fits a processor's cache

MAX_INT32_BITS = 30  # numbers of so many bits are computed as int32, in half the time

FIRST_CHUNK = 32  # positions whose indices are computed before the first index is returned
MAX_CHUNK = 1 << 15  # positions of the largest chunk; it takes about 1 MB with its temporaries
MAX_LIST_CHUNK = 1 << 11  # indices that are Python integers at a time; they take 5 times the memory


class Order(Protocol):
    """Order of the samples of an epoch, for example a one-dimensional int64 tensor of indices.

    `order[positions]` returns the indices into the dataset at int64 `positions` in
    range(len(order)), as an int64 tensor of the same shape.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, positions: Tensor, /) -> Tensor: ...


class Sequential:
    """The order 0, 1, 2, ..., length - 1."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, positions: Tensor, /) -> Tensor:
        return positions


class Permutation:
    """A random order of range(length), which takes the same memory for any length.

    The order of at most MAX_SORTED samples is stored. A longer order is computed by a network: a
    number is split into a high part, below `high_size`, and a low part of `low_bits` bits. In each
    round, a random function of the low part is added to the high part, modulo `high_size`, and then
    a random function of the high part is combined with the low part by XOR.

    Args:
        length: at most 2**62.
        seed: any integer.
        epoch: any integer; each pair of seed and epoch has its own order.

    Raises:
        ConfigError: `length` is negative or more than 2**62.
    """

    def __init__(self, length: int, *, seed: int, epoch: int = 0) -> None:
        if not 0 <= length <= MAX_SHUFFLED:
            raise ConfigError(f"need 0 <= length <= 2**62 to shuffle, got {length}")
        key = f"elasticlib order 3: {seed:d} {epoch:d} {length:d}"
        self._length = length
        self._sorted: Tensor | None = None  # the whole order, if it is short
        if length <= MAX_SORTED:
            self._sorted = _random_words(key, 2 * length).view(torch.int64).argsort(stable=True)
            return
        bits = (length - 1).bit_length()
        self.low_bits = (bits + 1) // 2
        self.high_size = -(-length >> self.low_bits)
        self._dtype = torch.int32 if bits <= MAX_INT32_BITS else torch.int64
        of_low = self._random_functions(f"{key} low", self.low_bits, self.high_size)
        of_high = self._random_functions(f"{key} high", bits - self.low_bits, 1 << self.low_bits)
        self.rounds = list(zip(of_low, of_high, strict=True))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, positions: Tensor, /) -> Tensor:
        if self._sorted is not None:
            return self._sorted[positions]
        numbers = self._pass_through_network(positions.to(self._dtype))
        # The domain of the network is larger than `length` by less than 2**low_bits.
        while len(outside := (numbers >= self._length).nonzero().squeeze(1)):
            numbers[outside] = self._pass_through_network(numbers[outside])
        return numbers.to(torch.int64)

    def _pass_through_network(self, numbers: Tensor) -> Tensor:
        sign_bit = 8 * numbers.element_size() - 1
        high, low = numbers >> self.low_bits, numbers & (1 << self.low_bits) - 1
        for tables_of_low, tables_of_high in self.rounds:
            for table in tables_of_low:
                high += table.look_up(low)
                high -= self.high_size
                high += (high >> sign_bit).bitwise_and_(self.high_size)  # where it is negative
            for table in tables_of_high:
                low ^= table.look_up(high)
        return high.bitwise_left_shift_(self.low_bits).bitwise_or_(low)

    def _random_functions(self, key: str, num_bits: int, size: int) -> list[list[LookupTable]]:
        """Return, for each round, a random function from `num_bits` bits to range(size).

        A function is a list of tables, one for each part of the bits.
        """
        width = -(-num_bits // -(-num_bits // MAX_TABLE_BITS))
        widths = [(shift, min(width, num_bits - shift)) for shift in range(0, num_bits, width)]
        words = _random_words(key, ROUNDS * sum(1 << bits for _, bits in widths))
        scaled = (words.to(torch.int64) & 2**31 - 1).mul_(size).bitwise_right_shift_(31)
        values = iter(
            scaled.to(self._dtype).split_with_sizes([1 << bits for _, bits in widths] * ROUNDS)
        )
        return [
            [
                LookupTable(shift, None if width >= num_bits else (1 << bits) - 1, next(values))
                for shift, bits in widths
            ]
            for _ in range(ROUNDS)
        ]


@attrs.frozen(eq=False)
class LookupTable:
    """A function of some consecutive bits of a number."""

    shift: int  # the number of lower bits
    mask: int | None  # of the bits, after the shift; None for a function of all bits
    values: Tensor

    def look_up(self, numbers: Tensor) -> Tensor:
        if self.mask is not None:
            numbers = (numbers >> self.shift).bitwise_and_(self.mask)
        return self.values.index_select(0, numbers)


def _random_words(key: str, count: int) -> Tensor:
    """Return `count` random int32 numbers, which `key` determines."""
    if not count:
        return torch.empty(0, dtype=torch.int32)
    words = bytearray(hashlib.shake_128(key.encode()).digest(4 * count))
    return torch.frombuffer(words, dtype=torch.int32)


def index_chunks(order: Order, starts: range, offsets: range | None = None) -> Iterator[list[Any]]:
    """Yield lists of items: indices of samples, or batches of them with `offsets`.

    The lists grow from a few indices to what fits a processor's cache. So the first list is
    available at once, and the memory does not depend on the length of the epoch.

    Args:
        order: the order of the epoch.
        starts: the position of each item. A position of len(order) or more repeats the order from
            its start.
        offsets: None for items that are the indices at `starts`. Otherwise each item is a batch:
            the list of the indices at its start plus each offset.
    """
    width = 1 if offsets is None else max(1, len(offsets))
    count = FIRST_CHUNK if offsets is None else 1
    done = 0
    while done < len(starts):
        part = starts[done : done + count]
        positions = torch.arange(part.start, part.stop, part.step)
        if offsets is not None:
            positions = positions[:, None] + torch.tensor(offsets, dtype=torch.int64)
        indices = _indices_at(order, positions.flatten()).view(positions.shape)
        for chunk in torch.split(indices, max(1, MAX_LIST_CHUNK // width)):
            yield chunk.tolist()
        done += len(part)
        count = min(4 * count, max(1, MAX_CHUNK // width))


def _indices_at(order: Order, positions: Tensor) -> Tensor:
    # A remainder is slow, and only the end of a padded epoch needs it.
    if len(positions) and int(positions.max()) >= len(order):
        positions = positions % len(order)
    return order[positions]
