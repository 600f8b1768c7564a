"""Position of a job in an epoch, and the positions of the epoch that each rank uses from there.

The state of an epoch is one number for the whole job: how many positions of the epoch's order have
been used. The remaining positions are dealt to the ranks one by one, so a job of any world size
continues where a job of another world size stopped. This module does not import torch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal, SupportsIndex, get_args

import attrs

from ..errors import ConfigError, StateMismatch

Tail = Literal["pad", "drop", "exact"]
"""How an epoch ends if the world size does not divide the number of its samples.

* `pad`: as torch with `drop_last=False`. Up to world size - 1 samples from the start of the order
  are repeated at the very end, so that all ranks draw equally many.
* `drop`: as torch with `drop_last=True`. The last samples, fewer than there are ranks, are left
  out.
* `exact`: each sample is used once. The ranks' counts differ by at most one.
"""

OnMismatch = Literal["refuse", "restart", "keep"]
"""What to do with a state whose length, seed or order differs from the sampler's.

* `refuse`: raise StateMismatch.
* `restart`: begin the epoch of the state at its start, in the sampler's order.
* `keep`: continue after as many samples (at most all) of the epoch of the state, in the sampler's
  order. Some samples of the epoch are then used twice, and others not at all.
"""

FORMAT = 4
"""The only version of the saved state that this version of elasticlib reads and writes."""


@attrs.frozen
class SamplerPosition:
    """Position of a job in an epoch, independent of the world size.

    Raises:
        StateMismatch: `epoch` is negative, or `consumed` is not in [0, length].
    """

    seed: int
    epoch: int
    consumed: int  # samples of the epoch that all ranks together have used
    length: int  # samples of the epoch
    order: str = "shuffled"  # "shuffled", "sequential", or "custom" with a digest of the order

    def __attrs_post_init__(self) -> None:
        if self.epoch < 0:
            raise StateMismatch(f"need epoch >= 0, got {self.epoch}")
        if not 0 <= self.consumed <= self.length:
            raise StateMismatch(
                f"need 0 <= consumed <= length, got {self.consumed} and {self.length}"
            )


def advance(position: SamplerPosition, count: int) -> SamplerPosition:
    """Return the position after `count` more samples, which is at most the end of the epoch.

    Raises:
        ConfigError: `count` is negative, or not an integer.
    """
    count = check_int("count", count)
    if count < 0:
        raise ConfigError(f"need count >= 0, got {count}: a position never moves back")
    return attrs.evolve(position, consumed=min(position.consumed + count, position.length))


def next_epoch(position: SamplerPosition) -> SamplerPosition:
    """Return the start of the epoch after this one."""
    return attrs.evolve(position, epoch=position.epoch + 1, consumed=0)


def positions_of_rank(
    position: SamplerPosition, *, rank: int, world_size: int, tail: Tail
) -> range:
    """Return the positions that a rank uses from here to the end of the epoch.

    Rank r uses consumed + r, consumed + r + world_size, and so on. With "pad", a number can be
    `length` or more; it stands for `number % length`, a repeat from the start of the order.

    Raises:
        ConfigError: `rank` is not in the world, or `tail` is unknown.
    """
    check_rank(rank, world_size)
    end = epoch_end(position, world_size, tail)
    return range(position.consumed + rank, end, world_size)


def epoch_end(position: SamplerPosition, unit: int, tail: Tail) -> int:
    """Return where an epoch ends that is used from `position` on in steps of `unit` positions.

    Raises:
        ConfigError: `tail` is unknown.
    """
    check_one_of("tail", tail, Tail)
    spare = (position.length - position.consumed) % unit
    if tail == "exact" or spare == 0:
        return position.length
    dropped = position.length - spare
    return dropped if tail == "drop" else dropped + unit


def even_share(size: int, *, rank: int, world_size: int) -> range:
    """Return this rank's contiguous part of range(size); the first ranks may have one more.

    Raises:
        ConfigError: `size` is negative, or `rank` is not in the world.
    """
    check_rank(rank, world_size)
    if size < 0:
        raise ConfigError(f"need size >= 0, got {size}")
    each, more = divmod(size, world_size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def encode(position: SamplerPosition) -> dict[str, Any]:
    """Return the saved state of a position: a dict of integers and one string."""
    return {**attrs.asdict(position), "format": FORMAT}


def decode(state: Mapping[str, Any]) -> SamplerPosition:
    """Return the position that `encode` made `state` of.

    Raises:
        StateMismatch: the format is another one, or a field is missing, unknown, of another type
            or out of range. The message names field, value and rule.
    """
    version = state.get("format", FORMAT)
    if version != FORMAT:
        raise StateMismatch(
            f"format is {version!r} in the sampler's state, and this version of elasticlib reads"
            f" format {FORMAT} only: resume with the version that saved it, or restore without"
            " the sampler"
        )
    fields = {**attrs.fields_dict(SamplerPosition), "format": None}
    for name in fields:
        if name not in state:
            raise StateMismatch(f"{name} is missing: a sampler's state has {', '.join(fields)}")
        kind = str if name == "order" else int
        if type(state[name]) is not kind:
            raise StateMismatch(f"{name} is {state[name]!r}, must be of type {kind.__name__}")
    for name in state:
        if name not in fields:
            raise StateMismatch(
                f"{name!r} is not a field of a sampler's state: {', '.join(fields)}"
            )
    return SamplerPosition(**{name: state[name] for name in fields if name != "format"})


def resume(
    state: Mapping[str, Any], mine: SamplerPosition, on_mismatch: OnMismatch = "refuse"
) -> SamplerPosition:
    """Return where a sampler at the position `mine` continues after `state`.

    Raises:
        StateMismatch: the state cannot be read; or it has another length, seed or order, and
            `on_mismatch` is "refuse".
        ConfigError: `on_mismatch` is unknown.
    """
    check_one_of("on_mismatch", on_mismatch, OnMismatch)
    saved = decode(state)
    difference = describe_mismatch(saved, mine)
    if difference and on_mismatch == "refuse":
        raise StateMismatch(
            f"{difference}: a position in one order is not valid in another. In"
            " sampler.load_state_dict(state, on_mismatch=...), 'restart' begins the epoch anew, and"
            " 'keep' skips as many samples of the new order"
        )
    restarts = difference and on_mismatch == "restart"
    consumed = 0 if restarts else min(saved.consumed, mine.length)
    return attrs.evolve(mine, epoch=saved.epoch, consumed=consumed)


def describe_mismatch(saved: SamplerPosition, mine: SamplerPosition) -> str:
    """Describe how the orders of two positions differ; return an empty string if they do not."""
    if saved.length != mine.length:
        return f"length is {saved.length} in the state, this sampler has {mine.length} samples"
    if saved.seed != mine.seed:
        return f"seed is {saved.seed} in the state, this sampler has {mine.seed}"
    if saved.order != mine.order:
        return f"order is {saved.order!r} in the state, this sampler has {mine.order!r}"
    return ""


def check_int(name: str, value: SupportsIndex) -> int:
    """Return the plain int that an integer of any type stands for, such as NumPy's.

    Raises:
        ConfigError: `value` is not an integer; 32.0 is not one either.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(
            f"{name} is {value!r}, must be an integer: round it before, by // or int()"
        ) from None


def check_rank(rank: int, world_size: int) -> None:
    """Raise ConfigError if `rank` is not in a world of `world_size` ranks."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"need 0 <= rank < world_size, got {rank} and {world_size}")


def check_one_of(name: str, value: str, names: Any) -> None:
    """Raise ConfigError if `value` is not one of the values of the `Literal` type `names`."""
    if value not in get_args(names):
        raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(get_args(names))}")
