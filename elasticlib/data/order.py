"""An epoch's order in torch: positions in, indices into the dataset out.

What is drawn is worked out in runs that grow from a few to what fits the cache, so the first
comes at once, and no run's size depends on the epoch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .deal import Position
from .permute import permutation
from .permuted import permuted

Order = Callable[[Tensor], Tensor]
"""Positions (int64, one-dimensional, not negative) to indices. A position of the length or more
stands for a repeat, from the order's start again."""

FIRST, AT_ONCE, LISTED = 1 << 5, 3 << 12, 1 << 11
"""Positions worked out in the first run and in the largest, which with its buffers is half a MB.
Of that, so many are Python's integers at a time, which need five times the memory."""


def order_of(position: Position) -> Order:
    """The order of the epoch that `position` stands in.

    Raises:
        ConfigError: it has more than 2**62 samples, and is to be shuffled.
    """
    length = position.length
    if position.shuffle == "none":
        return lambda places: within(places, length)
    if position.shuffle == "randperm":
        generator = torch.Generator()
        generator.manual_seed(position.seed + position.epoch)
        whole = torch.randperm(length, generator=generator)
        return lambda places: whole[within(places, length)]
    keyed = permutation(length, seed=position.seed, epoch=position.epoch)
    return lambda places: permuted(keyed, within(places, length))


def within(places: Tensor, length: int) -> Tensor:
    """Positions below `length`; a remainder is slow, and only the very end repeats."""
    if len(places) and int(places.max()) >= length:
        return places % length
    return places


def indices_at(position: Position, places: range) -> Iterator[list[int]]:
    """The indices at `places` of the order that `position` names, run by run."""
    order, begin, size = order_of(position), 0, FIRST
    while begin < len(places):
        part = places[begin : begin + size]
        indices = order(torch.arange(part.start, part.stop, part.step))
        for listed in torch.split(indices, LISTED):
            yield listed.tolist()
        begin, size = begin + size, min(4 * size, AT_ONCE)
