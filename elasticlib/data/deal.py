"""Which positions of an epoch's order each rank trains on, whatever the world size.

The state of an epoch is one number for the whole job: how many positions of the order have been
used. What is left is dealt out one by one like cards, so any world can go on where another ended.
"""

from __future__ import annotations

from typing import Literal, get_args

import attrs

from ..errors import ConfigError, StateMismatch
from ..whole import whole

Tail = Literal["pad", "drop", "exact"]
"""How an epoch ends when its samples do not divide by the world size.

* `pad`: as torch with `drop_last=False`. Samples from the start of the order are used again, at
  most world size - 1 of them and at the very end, so that every rank draws as many.
* `drop`: as torch with `drop_last=True`. The last few samples, fewer than ranks, are left out.
* `exact`: each sample once; the ranks' counts differ by at most one.
"""

Shuffle = Literal["feistel", "randperm", "none"]
"""What makes an epoch's order: our own shuffle, torch's, or nothing (0, 1, 2, ...)."""


@attrs.frozen
class Position:
    """Where a job stands in an epoch: `consumed` of `length` samples are used, by all ranks.

    `seed`, `epoch` and `shuffle` name the order.
    """

    seed: int
    epoch: int
    consumed: int
    length: int
    shuffle: Shuffle = "feistel"

    def __attrs_post_init__(self) -> None:
        if self.epoch < 0:
            raise StateMismatch(f"need epoch >= 0, got {self.epoch}")
        if not 0 <= self.consumed <= self.length:
            raise StateMismatch(
                f"need 0 <= consumed <= length, got {self.consumed} and {self.length}"
            )
        if self.shuffle not in get_args(Shuffle):
            names = ", ".join(get_args(Shuffle))
            raise StateMismatch(f"shuffle is {self.shuffle!r}, must be one of {names}")


def advance(position: Position, count: int) -> Position:
    """The position after `count` more samples were used, which is at most the epoch's end.

    Raises:
        ConfigError: `count` is negative, or no integer.
    """
    count = whole("count", count)
    if count < 0:
        raise ConfigError(f"need count >= 0, got {count}: samples are never given back")
    return attrs.evolve(position, consumed=min(position.consumed + count, position.length))


def next_epoch(position: Position) -> Position:
    """The start of the epoch after this one."""
    return attrs.evolve(position, epoch=position.epoch + 1, consumed=0)


def deal(position: Position, *, rank: int, world_size: int, tail: Tail) -> range:
    """The positions of the order that `rank` of `world_size` uses from here to the epoch's end.

    Rank r gets consumed + r, consumed + r + w, and so on. With `pad` a number may be `length` or
    more: it stands for a repeat, from the start of the order again (`number % length`).

    Raises:
        ConfigError: `rank`, `world_size` or `tail` cannot be.
    """
    check_rank(rank, world_size)
    end = end_of_deal(position, world_size, tail)
    return range(position.consumed + rank, end, world_size)


def end_of_deal(position: Position, unit: int, tail: Tail) -> int:
    """Where an epoch ends that is used up from `position` in steps of `unit` positions.

    Raises:
        ConfigError: `tail` cannot be.
    """
    check_tail(tail)
    spare = (position.length - position.consumed) % unit
    if tail == "exact" or spare == 0:
        return position.length
    dropped = position.length - spare
    return dropped if tail == "drop" else dropped + unit


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank outside its world.

    Raises:
        ConfigError: names both and the rule.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"need 0 <= rank < world_size, got {rank} and {world_size}")


def check_tail(tail: str) -> None:
    """Refuse a tail that is none of `Tail`.

    Raises:
        ConfigError: names it and what it may be.
    """
    if tail not in get_args(Tail):
        raise ConfigError(f"tail is {tail!r}, must be one of {', '.join(get_args(Tail))}")
