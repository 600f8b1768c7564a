"""A keyed shuffle of the numbers below n that is computed place by place: nothing is stored.

It is a Feistel network over just more than n numbers; a result that is not below n goes through it
again until it is. One order for each seed, epoch and length, for ever: a resumed job must find it.

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

import hashlib

import attrs

from ..errors import ConfigError

LARGEST = 2**62
"""The largest n: halves of 31 bits, whose products still fit in int64."""

ROUNDS = 8
"""With 5 the tests of `tests/data/test_shuffle.py` see a difference to chance; with 6 none does."""

SMALL = 256
"""Up to so many numbers a table is shuffled: of n! orders a network this small reaches few."""

FOLD = 31
"""The shift that folds a product of 62 bits, and the bits that scale to a half's size."""


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
