"""A position's plain form, and what to do with one that belongs to something else.

It knows no rank and no world size, so any world reads what another wrote. What cannot be read
exactly is refused by a sentence; whoever changed the dataset on purpose says what is meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs

from ..errors import ConfigError, StateMismatch
from .deal import Position, Shuffle

FORMAT = 2
"""The version of a position's plain form. Format 1 did not name the order: it was torch's."""

OnMismatch = Literal["refuse", "restart", "keep"]
"""What to do with a state of another length, seed or shuffle.

* `refuse`: raise StateMismatch.
* `restart`: begin the state's epoch at its start, in this sampler's own order.
* `keep`: go on after as many samples (at most all) of the state's epoch, in this sampler's own
  order: some of the epoch's samples come twice then, and others not at all.
"""

INTEGERS = ("seed", "epoch", "consumed", "length")
FIELDS = (*INTEGERS, "shuffle", "format")


def encode(position: Position) -> dict[str, Any]:
    """The plain form: a dict of five integers and a name."""
    return {**attrs.asdict(position), "format": FORMAT}


def decode(state: Mapping[str, Any], shuffle: Shuffle) -> Position:
    """The position that `state` stands for, to be read by a sampler that shuffles by `shuffle`.

    A state of format 1 is taken as that sampler's own where that cannot be wrong: where it does
    not shuffle by "feistel", which did not exist, and at an epoch's start or end, where a number
    means the same in any order. In the midst of an epoch it stands for "randperm".

    Raises:
        StateMismatch: a field is missing, unknown, of another type or out of range, or the
            format is not known; the message names field, value and rule.
    """
    version = state.get("format", FORMAT)
    if version not in (1, FORMAT):
        raise StateMismatch(f"format is {version!r}, this version reads 1 and {FORMAT}")
    fields = FIELDS if version == FORMAT else (*INTEGERS, "format")
    for name in fields:
        if name not in state:
            raise StateMismatch(f"{name} is missing: a sampler's state has {', '.join(fields)}")
        if name != "shuffle" and type(state[name]) is not int:
            raise StateMismatch(f"{name} is {state[name]!r}, must be an integer")
    for name in state:
        if name not in fields:
            raise StateMismatch(f"{name!r} is no field of a sampler's state of format {version}")
    named = {"shuffle": shuffle, **state}
    del named["format"]
    position = Position(**named)
    begun = 0 < position.consumed < position.length
    if version == 1 and shuffle == "feistel" and begun:
        return attrs.evolve(position, shuffle="randperm")
    return position


def resume(
    state: Mapping[str, Any], mine: Position, on_mismatch: OnMismatch = "refuse"
) -> Position:
    """Where a sampler that stands at `mine` goes on after `state`.

    Raises:
        StateMismatch: the state cannot be read, or is of another length, seed or shuffle while
            `on_mismatch` is "refuse".
        ConfigError: `on_mismatch` cannot be.
    """
    if on_mismatch not in get_args(OnMismatch):
        names = ", ".join(get_args(OnMismatch))
        raise ConfigError(f"on_mismatch is {on_mismatch!r}, must be one of {names}")
    saved = decode(state, mine.shuffle)
    differs = mismatch(saved, mine)
    if differs and on_mismatch == "refuse":
        raise StateMismatch(
            f"{differs}: positions in one order mean nothing in another. on_mismatch='restart'"
            " begins the epoch anew, 'keep' goes on after as many samples of the new order"
        )
    consumed = 0 if differs and on_mismatch == "restart" else min(saved.consumed, mine.length)
    return attrs.evolve(mine, epoch=saved.epoch, consumed=consumed)


def mismatch(saved: Position, mine: Position) -> str | None:
    """How the orders of two positions differ, as the start of a sentence; None if they do not."""
    if saved.length != mine.length:
        return f"length is {saved.length} in the state, this dataset has {mine.length} samples"
    if saved.seed != mine.seed:
        return f"seed is {saved.seed} in the state, this sampler has {mine.seed}"
    if saved.shuffle != mine.shuffle:
        return f"shuffle is {saved.shuffle!r} in the state, this sampler has {mine.shuffle!r}"
    return None
