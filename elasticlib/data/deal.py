"""Which positions of an epoch's order each rank trains on, whatever the world size.

The state of an epoch is one number for the whole job: how many positions of the order have been
used. What is left is dealt out one by one like cards, so any world can go on where another ended.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal, SupportsIndex, get_args

import attrs

from ..errors import ConfigError, ElasticError, StateMismatch

Tail = Literal["pad", "drop", "exact"]
"""How an epoch ends when its samples do not divide by the world size.

* `pad`: as torch with `drop_last=False`. Samples from the start of the order are used again, at
  most world size - 1 of them and at the very end, so that every rank draws as many.
* `drop`: as torch with `drop_last=True`. The last few samples, fewer than ranks, are left out.
* `exact`: each sample once; the ranks' counts differ by at most one.
"""

Shuffle = Literal["feistel", "randperm", "none", "weighted", "shards"]
"""What makes an epoch's order: our own shuffle, torch's, nothing (0, 1, 2, ...), draws by weight
without replacement, or our own shuffle of shards whose samples stay in their order."""

OnMismatch = Literal["refuse", "restart", "keep"]
"""What to do with a state of another length, seed or shuffle.

* `refuse`: raise StateMismatch.
* `restart`: begin the state's epoch at its start, in this sampler's own order.
* `keep`: go on after as many samples (at most all) of the state's epoch, in this sampler's own
  order: some of the epoch's samples come twice then, and others not at all.
"""

FORMATS = {
    1: ("seed", "epoch", "consumed", "length", "format"),
    2: ("seed", "epoch", "consumed", "length", "shuffle", "format"),
    3: ("seed", "epoch", "consumed", "length", "shuffle", "digest", "format"),
}
"""The fields of a position's plain form, by its version. Format 1 did not name the order, which was
torch's. Format 3 is written only for an order that is made of weights or of shards' sizes."""


@attrs.frozen
class Position:
    """Where a job stands in an epoch: `consumed` of `length` samples are used, by all ranks.

    `seed`, `epoch` and `shuffle` name the order; so does `digest` where it is made of weights or of
    shards' sizes.
    """

    seed: int
    epoch: int
    consumed: int
    length: int
    shuffle: Shuffle = "feistel"
    digest: str = ""

    def __attrs_post_init__(self) -> None:
        if self.epoch < 0:
            raise StateMismatch(f"need epoch >= 0, got {self.epoch}")
        if not 0 <= self.consumed <= self.length:
            raise StateMismatch(
                f"need 0 <= consumed <= length, got {self.consumed} and {self.length}"
            )
        check_one_of("shuffle", self.shuffle, Shuffle, StateMismatch)


def advance(position: Position, count: int) -> Position:
    """The position after `count` more samples were used, which is at most the epoch's end.

    Raises:
        ConfigError: `count` is negative, or no integer.
    """
    count = check_int("count", count)
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
    check_one_of("tail", tail, Tail)
    spare = (position.length - position.consumed) % unit
    if tail == "exact" or spare == 0:
        return position.length
    dropped = position.length - spare
    return dropped if tail == "drop" else dropped + unit


def share_of(size: int, *, rank: int, world_size: int) -> range:
    """This rank's run of range(size); the runs differ by at most one, the first ones are longer.

    Raises:
        ConfigError: `size` is negative, or `rank` is not in the world.
    """
    check_rank(rank, world_size)
    if size < 0:
        raise ConfigError(f"need size >= 0, got {size}")
    each, more = divmod(size, world_size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def encode(position: Position) -> dict[str, Any]:
    """The plain form: a dict of integers and one or two names, which any world size reads."""
    version = 3 if position.digest else 2
    return {name: getattr(position, name) for name in FORMATS[version][:-1]} | {"format": version}


def decode(state: Mapping[str, Any], shuffle: Shuffle) -> Position:
    """The position that `state` stands for, to be read by a sampler that shuffles by `shuffle`.

    A state of format 1 is taken as that sampler's own where that cannot be wrong: where it does
    not shuffle by "feistel", which did not exist, and at an epoch's start or end, where a number
    means the same in any order. In the midst of an epoch it stands for "randperm".

    Raises:
        StateMismatch: a field is missing, unknown, of another type or out of range, or the
            format is not known; the message names field, value and rule.
    """
    version = state.get("format", 2)
    if version not in tuple(FORMATS):
        raise StateMismatch(f"format is {version!r}, this version reads 1, 2 and 3")
    fields = FORMATS[version]
    for name in fields:
        if name not in state:
            raise StateMismatch(f"{name} is missing: a sampler's state has {', '.join(fields)}")
        if name not in ("shuffle", "digest") and type(state[name]) is not int:
            raise StateMismatch(f"{name} is {state[name]!r}, must be an integer")
    for name in state:
        if name not in fields:
            raise StateMismatch(f"{name!r} is no field of a sampler's state of format {version}")
    position = Position(**{"shuffle": shuffle, **{name: state[name] for name in fields[:-1]}})
    if version == 1 and shuffle == "feistel" and 0 < position.consumed < position.length:
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
    check_one_of("on_mismatch", on_mismatch, OnMismatch)
    saved = decode(state, mine.shuffle)
    differs = mismatch(saved, mine)
    if differs and on_mismatch == "refuse":
        raise StateMismatch(
            f"{differs}: a position in one order is not valid in another. In"
            " sampler.load_state_dict(state, on_mismatch=...), 'restart' begins the epoch anew, and"
            " 'keep' skips as many samples of the new order"
        )
    consumed = 0 if differs and on_mismatch == "restart" else min(saved.consumed, mine.length)
    return attrs.evolve(mine, epoch=saved.epoch, consumed=consumed)


def mismatch(saved: Position, mine: Position) -> str:
    """How the orders of two positions differ, as the start of a sentence, or nothing."""
    if saved.length != mine.length:
        return f"length is {saved.length} in the state, this dataset has {mine.length} samples"
    if saved.seed != mine.seed:
        return f"seed is {saved.seed} in the state, this sampler has {mine.seed}"
    if saved.shuffle != mine.shuffle:
        return f"shuffle is {saved.shuffle!r} in the state, this sampler has {mine.shuffle!r}"
    if saved.digest != mine.digest:
        what = "the weights" if mine.shuffle == "weighted" else "the sizes of the shards"
        return f"{what} have the digest {saved.digest!r} in the state, and {mine.digest!r} here"
    return ""


def check_int(name: str, value: SupportsIndex) -> int:
    """The plain int that an integer of any kind stands for: numpy's, or a tensor with one element.

    Raises:
        ConfigError: it is no integer, as 32.0 is not; names both.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(
            f"{name} is {value!r}, must be an integer: round it, by // or int(), before"
        ) from None


def check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigError(f"need 0 <= rank < world_size, got {rank} and {world_size}")


def check_one_of(
    name: str, value: str, names: Any, error: type[ElasticError] = ConfigError
) -> None:
    """Refuse a value that is none of those of a `Literal`."""
    if value not in get_args(names):
        raise error(f"{name} is {value!r}, must be one of {', '.join(get_args(names))}")
