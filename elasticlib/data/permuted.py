"""The keyed shuffle for many places at once, in torch: the same numbers as one by one.

Every step stays within int64 without wrapping round, and works in place on two buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .permute import FOLD, Permutation

ONE_BY_ONE = 24
"""Up to so many results that must go through again go alone: a pass costs as much as they do."""


def permuted(permutation: Permutation, places: Tensor) -> Tensor:
    """The numbers at `places`.

    Args:
        permutation: of range(n).
        places: int64, one-dimensional, each in range(n); that is not checked.

    Returns:
        int64 of the same shape: element i is `permutation.at(places[i])`.
    """
    if permutation.table:
        return torch.tensor(permutation.table, dtype=torch.int64)[places]
    numbers = _once(permutation, places)
    again = (numbers >= permutation.length).nonzero().squeeze(1)
    while len(again) > ONE_BY_ONE:
        further = _once(permutation, numbers[again])
        numbers[again] = further
        again = again[further >= permutation.length]
    for where in again.tolist():
        numbers[where] = permutation.walk(int(numbers[where]))
    return numbers


def _once(permutation: Permutation, numbers: Tensor) -> Tensor:
    size, mask = permutation.high_size, (1 << permutation.low_bits) - 1
    high, low = numbers >> permutation.low_bits, numbers & mask
    mixed, folded = torch.empty_like(numbers), torch.empty_like(numbers)
    for turn, (factor, summand) in enumerate(permutation.rounds):
        source = high if turn % 2 else low
        torch.add(torch.tensor(summand), source, alpha=factor, out=mixed)
        torch.bitwise_right_shift(mixed, FOLD, out=folded)
        mixed ^= folded
        if turn % 2:
            mixed &= mask
            low ^= mixed
        else:
            # Scaled to -size ... -1 rather than 0 ... size - 1: the sum is negative just where
            # it needs no reduction, and its sign, as a mask, adds the size again there.
            mixed |= -(1 << FOLD)
            mixed *= size
            mixed >>= FOLD
            high += mixed
            torch.bitwise_right_shift(high, 63, out=folded)
            folded &= size
            high += folded
    high <<= permutation.low_bits
    high |= low
    return high
