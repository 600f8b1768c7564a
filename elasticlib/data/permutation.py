"""Orders of the samples of an epoch, computed where they are needed instead of stored.

The shuffle is a Feistel network over slightly more than n numbers; a result that is not below n
passes through the network again until it is. Seed, epoch and length determine the order, on every
machine and with every version of torch, because a resumed job must find the same order again.

Sources: the network on two halves of unequal size, one of them added modulo its size, and repeated
passes until a result is below n are J. Black and P. Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002; alternating halves are V. T. Hoang and P. Rogaway, "On Generalized Feistel
Networks", CRYPTO 2010. Shuffling by a cheap network of this kind instead of by sorting is
R. Mitchell et al., "Bandwidth-Optimal Random Shuffling for GPUs", ACM TOPC 2022. The mixing in a
round is elasticlib's: one multiplication whose upper half is folded onto its lower half, within 63
bits. The network is a shuffle, not a cipher: it does not keep anything secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ConfigError

MAX_SHUFFLED = 2**62  # the halves have 31 bits each, so their products fit in int64

ROUNDS = 8  # the tests of tests/data/test_shuffle.py detect 5 rounds, and do not detect 6

MAX_TABLE = 256  # a network on so few numbers reaches few of the n! orders: a table is shuffled

FOLD_BITS = 31  # the shift that folds a product of 62 bits onto itself

FIRST_CHUNK = 32  # positions whose indices are computed before the first index is returned
MAX_CHUNK = 1 << 15  # positions of the largest chunk; it takes about 1 MB with its buffers
MAX_LIST_CHUNK = 1 << 11  # of which so many are Python's integers at a time: five times the memory


class Order(Protocol):
    """Order of the samples of an epoch. A one-dimensional int64 tensor is one.

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

    Args:
        length: at most 2**62.
        seed, epoch: any integers; each pair has its own order.

    Raises:
        ConfigError: `length` is negative or more than 2**62.
    """

    def __init__(self, length: int, *, seed: int, epoch: int = 0) -> None:
        if not 0 <= length <= MAX_SHUFFLED:
            raise ConfigError(f"need 0 <= length <= 2**62 to shuffle, got {length}")
        key = hashlib.shake_256(f"elasticlib order 1: {seed:d} {epoch:d} {length:d}".encode())
        self._length = length
        self._table: Tensor | None = None
        if length <= MAX_TABLE:
            self._table = torch.tensor(_shuffled(_words(key.digest(8 * length))), dtype=torch.int64)
            return
        # A number is split into `number >> low_bits`, which is below `high_size`, and its
        # `low_bits` lowest bits.
        bits = (length - 1).bit_length()
        self.low_bits = (bits + 1) // 2
        self.high_size = -(-length >> self.low_bits)
        # Each round has an odd factor and a summand, both below 2**62. A factor times the largest
        # number of the half that it multiplies is also below 2**62.
        words = _words(key.digest(16 * ROUNDS))
        widths = (self.low_bits, bits - self.low_bits) * (ROUNDS // 2)
        self.rounds = [
            (words[2 * i] >> (2 + width) | 1, words[2 * i + 1] >> 2)
            for i, width in enumerate(widths)
        ]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, positions: Tensor, /) -> Tensor:
        if self._table is not None:
            return self._table[positions]
        numbers = self._pass_through_network(positions)
        while len(outside := (numbers >= self._length).nonzero().squeeze(1)):
            numbers[outside] = self._pass_through_network(numbers[outside])
        return numbers

    def _pass_through_network(self, numbers: Tensor) -> Tensor:
        low_mask, fold_mask = (1 << self.low_bits) - 1, (1 << FOLD_BITS) - 1
        high, low = numbers >> self.low_bits, numbers & low_mask
        for i, (factor, summand) in enumerate(self.rounds):
            mixed = (high if i % 2 else low) * factor
            mixed += summand
            mixed ^= mixed >> FOLD_BITS
            if i % 2:
                low ^= mixed.bitwise_and_(low_mask)
            else:
                # The folded bits are scaled to range(high_size), and added modulo high_size.
                mixed &= fold_mask
                mixed *= self.high_size
                mixed >>= FOLD_BITS
                high += mixed
                high = torch.where(high >= self.high_size, high - self.high_size, high)
        return (high << self.low_bits).bitwise_or_(low)


def _words(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def _shuffled(words: list[int]) -> list[int]:
    """Shuffle range(len(words)) by R. Durstenfeld, "Algorithm 235: Random permutation", 1964."""
    table = list(range(len(words)))
    for last in range(len(words) - 1, 0, -1):
        chosen = words[last] % (last + 1)
        table[last], table[chosen] = table[chosen], table[last]
    return table


def index_chunks(order: Order, starts: range, offsets: range | None = None) -> Iterator[list[Any]]:
    """Yield the indices at some positions of an order, in lists.

    The lists grow from a few indices to what fits a processor's cache. So the first list comes at
    once, and the memory does not depend on the length of the epoch.

    Args:
        order: of the epoch.
        starts: positions. A position of len(order) or more is a repeat from the start of the order.
        offsets: if given, each start begins a batch, which is a list of the indices at the start
            plus each offset; otherwise an item is the index at the start.
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
