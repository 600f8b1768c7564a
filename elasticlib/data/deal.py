"""Which positions of an epoch's order each rank trains on, whatever the world size.

The state of an epoch is one number for the whole job: how many positions of the order have been
used. What is left is dealt out one by one like cards, so any world can go on where another ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs

from ..errors import ConfigError, StateMismatch

FORMAT = 1
"""The version of a position's plain form."""

Tail = Literal["pad", "drop", "exact"]
"""How an epoch ends when its samples do not divide by the world size.

* `pad`: as torch with `drop_last=False`. Samples from the start of the order are used again, at
  most world size - 1 of them and at the very end, so that every rank draws as many.
* `drop`: as torch with `drop_last=True`. The last few samples, fewer than ranks, are left out.
* `exact`: each sample once; the ranks' counts differ by at most one.
"""


@attrs.frozen
class Position:
    """Where a job stands in an epoch: `consumed` of `length` samples are used, by all ranks.

    `seed` and `epoch` name the order. `format` is the version of the plain form.
    """

    seed: int
    epoch: int
    consumed: int
    length: int
    format: int = FORMAT

    def __attrs_post_init__(self) -> None:
        if self.epoch < 0:
            raise StateMismatch(f"need epoch >= 0, got {self.epoch}")
        if not 0 <= self.consumed <= self.length:
            raise StateMismatch(
                f"need 0 <= consumed <= length, got {self.consumed} and {self.length}"
            )


FIELDS = tuple(field.name for field in attrs.fields(Position))


def encode(position: Position) -> dict[str, int]:
    """The plain form: a dict of five integers, which knows no rank and no world size."""
    return attrs.asdict(position)


def decode(state: Mapping[str, Any]) -> Position:
    """The position that `state` stands for.

    Raises:
        StateMismatch: a field is missing, unknown, not an integer or out of range, or the
            format is not this version's; the message names field, value and rule.
    """
    if state.get("format", FORMAT) != FORMAT:
        raise StateMismatch(f"format is {state['format']!r}, this version reads {FORMAT}")
    for name in FIELDS:
        if name not in state:
            raise StateMismatch(f"{name} is missing: a sampler's state has {', '.join(FIELDS)}")
        if type(state[name]) is not int:
            raise StateMismatch(f"{name} is {state[name]!r}, must be an integer")
    for name in state:
        if name not in FIELDS:
            raise StateMismatch(f"{name!r} is no field of a sampler's state of format {FORMAT}")
    return Position(**state)


def advance(position: Position, count: int) -> Position:
    """The position after `count` more samples were used, which is at most the epoch's end.

    Raises:
        ConfigError: `count` is negative.
    """
    if count < 0:
        raise ConfigError(f"need count >= 0, got {count}: samples are never given back")
    return attrs.evolve(position, consumed=min(position.consumed + count, position.length))


def deal(position: Position, *, rank: int, world_size: int, tail: Tail) -> range:
    """The positions of the order that `rank` of `world_size` uses from here to the epoch's end.

    Rank r gets consumed + r, consumed + r + w, and so on. With `pad` a number may be `length` or
    more: it stands for a repeat, from the start of the order again (`number % length`).

    Raises:
        ConfigError: `rank`, `world_size` or `tail` cannot be.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"need 0 <= rank < world_size, got {rank} and {world_size}")
    return range(position.consumed + rank, _end(position, world_size, tail), world_size)


def _end(position: Position, world_size: int, tail: Tail) -> int:
    check_tail(tail)
    spare = (position.length - position.consumed) % world_size
    if tail == "exact" or spare == 0:
        return position.length
    dropped = position.length - spare
    return dropped if tail == "drop" else dropped + world_size


def check_tail(tail: str) -> None:
    """Refuse a tail that is none of `Tail`.

    Raises:
        ConfigError: names it and what it may be.
    """
    if tail not in get_args(Tail):
        raise ConfigError(f"tail is {tail!r}, must be one of {', '.join(get_args(Tail))}")
