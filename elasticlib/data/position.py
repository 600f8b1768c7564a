"""Position of a job in an epoch, and the positions of the epoch's order that each rank uses.

The state of an epoch is one number for the whole job: how many positions of the epoch's order have
been used. The remaining positions are distributed to the ranks round-robin, so a job of any world
size continues where a job of another world size stopped. Pure functions; this module does not
import torch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal, SupportsIndex, get_args

import attrs

from ..errors import ConfigError, StateMismatchError

Tail = Literal["pad", "drop", "exact"]
"""The end of an epoch whose number of samples is not divisible by the world size.

* `pad`: as torch with `drop_last=False`. Up to world size - 1 samples from the start of the order
  are repeated at the end, so that all ranks use the same number of samples.
* `drop`: as torch with `drop_last=True`. The last samples, fewer than there are ranks, are left
  out.
* `exact`: each sample is used once. The numbers of samples of two ranks differ by at most one.
"""

OnMismatch = Literal["raise", "restart", "keep"]
"""The handling of a state whose length, seed, order or dataset differs from the sampler's.

* `raise`: raise StateMismatchError.
* `restart`: start the epoch of the state from its first sample, in the sampler's order.
* `keep`: continue the epoch in the sampler's order, after its first `consumed` samples (the number
  in the state). Some samples of the epoch are then used twice, and others are not used.
"""

STATE_FORMAT = 7  # raise it when the fields of the state or the shuffled order change


@attrs.frozen
class SamplerPosition:
    """Position of a job in an epoch, independent of the world size.

    Raises:
        StateMismatchError: `epoch` is negative, or `consumed` is not in [0, length].
    """

    seed: int
    epoch: int  # from 0
    consumed: int  # samples of the epoch that all ranks together have used
    length: int  # samples of the epoch
    order: str = "shuffled"  # "shuffled", "sequential", or "custom" with a digest of the order
    dataset: str = ""  # a digest of what the indices refer to; empty if the dataset has none

    def __attrs_post_init__(self) -> None:
        if self.epoch < 0:
            raise StateMismatchError(f"need epoch >= 0, got {self.epoch}")
        if not 0 <= self.consumed <= self.length:
            raise StateMismatchError(
                f"need 0 <= consumed <= length, got {self.consumed} and {self.length}"
            )


def advance(position: SamplerPosition, count: int) -> SamplerPosition:
    """Return the position after `count` more samples, which is at most the end of the epoch.

    Raises:
        ConfigError: `count` is negative or not an integer.
    """
    count = check_int("count", count)
    if count < 0:
        raise ConfigError(f"need count >= 0, got {count}: a position never moves back")
    return attrs.evolve(position, consumed=min(position.consumed + count, position.length))


def next_epoch(position: SamplerPosition) -> SamplerPosition:
    """Return the start of the epoch after that of `position`."""
    return attrs.evolve(position, epoch=position.epoch + 1, consumed=0)


def positions_of_rank(
    position: SamplerPosition, *, rank: int, world_size: int, tail: Tail
) -> range:
    """Return the positions of the order that a rank uses from `position` to the end of the epoch.

    Rank r uses consumed + r, consumed + r + world_size, and so on. With "pad", a position can
    be `position.length` or more. It then repeats the order from its start.

    Raises:
        ConfigError: `rank` is out of range, or `tail` is unknown.
    """
    check_rank(rank, world_size)
    end = epoch_end(position, world_size, tail)
    return range(position.consumed + rank, end, world_size)


def epoch_end(position: SamplerPosition, unit: int, tail: Tail) -> int:
    """Return where the epoch of `position` ends if each step uses `unit` samples.

    If the remaining samples are no multiple of `unit`, `tail` decides: the end is `length`
    ("exact"), or it is moved down ("drop") or up ("pad") so that the last step is a full one.

    Raises:
        ConfigError: `tail` is unknown.
    """
    check_one_of("tail", tail, Tail)
    remainder = (position.length - position.consumed) % unit
    if tail == "exact" or remainder == 0:
        return position.length
    last_full = position.length - remainder
    return last_full if tail == "drop" else last_full + unit


def even_share(size: int, *, rank: int, world_size: int) -> range:
    """Return this rank's contiguous part of range(size). The first ranks can have one more item.

    Raises:
        ConfigError: `size` is negative, or `rank` is out of range.
    """
    check_rank(rank, world_size)
    if size < 0:
        raise ConfigError(f"need size >= 0, got {size}")
    length, remainder = divmod(size, world_size)
    start = rank * length + min(rank, remainder)
    return range(start, start + length + (rank < remainder))


STATE_FIELDS = frozenset({*attrs.fields_dict(SamplerPosition), "format"})
"""The keys of the saved state of a position, which no other state dict has."""


def encode(position: SamplerPosition) -> dict[str, Any]:
    """Return the saved state of a position: a dict of integers and strings."""
    return {**attrs.asdict(position), "format": STATE_FORMAT}


def decode(state: Mapping[str, Any]) -> SamplerPosition:
    """Return the position from which `encode` created `state`.

    Raises:
        StateMismatchError: the state has another format, or a field is missing, unknown, of another
            type or out of range. The message names the field, its value and the rule.
    """
    version = state.get("format", STATE_FORMAT)
    if version != STATE_FORMAT:
        raise StateMismatchError(
            f"format is {version!r} in the sampler's state, but this version of elasticlib reads"
            f" only format {STATE_FORMAT}: resume with the version that saved the state, or restore"
            " without the sampler"
        )
    fields = [*attrs.fields_dict(SamplerPosition), "format"]
    for name in fields:
        if name not in state:
            raise StateMismatchError(
                f"{name} is missing: a sampler's state has {', '.join(fields)}"
            )
        kind = str if name in ("order", "dataset") else int
        if type(state[name]) is not kind:
            raise StateMismatchError(f"{name} is {state[name]!r}, must be of type {kind.__name__}")
    for name in state:
        if name not in fields:
            raise StateMismatchError(
                f"{name!r} is not a field of a sampler's state: {', '.join(fields)}"
            )
    return SamplerPosition(**{name: state[name] for name in fields if name != "format"})


def resume(
    state: Mapping[str, Any], current: SamplerPosition, on_mismatch: OnMismatch = "raise"
) -> SamplerPosition:
    """Return the position from which a sampler at `current` continues after loading `state`.

    Raises:
        StateMismatchError: the state cannot be read, or has another length, seed, order or dataset,
            and `on_mismatch` is "raise".
        ConfigError: `on_mismatch` is unknown.
    """
    check_one_of("on_mismatch", on_mismatch, OnMismatch)
    saved = decode(state)
    difference = describe_mismatch(saved, current)
    if difference and on_mismatch == "raise":
        raise StateMismatchError(
            f"{difference}: a position in one order is not valid in another. Use"
            " sampler.load_state_dict(state, on_mismatch='restart') to start the epoch from its"
            " first sample, or 'keep' to skip as many samples of the new order"
        )
    restarts = difference and on_mismatch == "restart"
    consumed = 0 if restarts else min(saved.consumed, current.length)
    return attrs.evolve(current, epoch=saved.epoch, consumed=consumed)


def describe_mismatch(saved: SamplerPosition, current: SamplerPosition) -> str:
    """Describe how the orders of two positions differ; return an empty string if they do not."""
    if saved.length != current.length:
        return f"length is {saved.length} in the state, this sampler has {current.length} samples"
    if saved.seed != current.seed:
        return f"seed is {saved.seed} in the state, this sampler has {current.seed}"
    if saved.order != current.order:
        return f"order is {saved.order!r} in the state, this sampler has {current.order!r}"
    if saved.dataset != current.dataset:
        return (
            f"dataset is {saved.dataset!r} in the state, this sampler has {current.dataset!r}: its"
            " shards have other names or sizes, or another order"
        )
    return ""


def check_int(name: str, value: SupportsIndex) -> int:
    """Return the plain int of an integer of any type, such as NumPy's.

    Raises:
        ConfigError: `value` is not an integer. A float such as 32.0 is not one either.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(
            f"{name} is {value!r}, must be an integer: round it first, with // or int()"
        ) from None


def check_rank(rank: int, world_size: int) -> None:
    """Raise ConfigError if `rank` is not in range(world_size)."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"need 0 <= rank < world_size, got {rank} and {world_size}")


def check_one_of(name: str, value: str, names: Any) -> None:
    """Raise ConfigError if `value` is not one of the values of the `Literal` type `names`."""
    if value not in get_args(names):
        raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(get_args(names))}")
