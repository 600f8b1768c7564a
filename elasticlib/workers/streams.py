"""Which of a worker's streams go where, in torchrun's grammar.

`3` for both streams of every worker, or `0:1,1:2` for some: 1 is stdout, 2 is stderr, 3 both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from ..errors import ConfigError


class Streams(enum.IntFlag):
    """A set of a worker's output streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@attrs.frozen
class StreamChoice:
    """Streams by local rank; `everywhere` for those not named."""

    everywhere: Streams = Streams.NONE
    by_rank: Mapping[int, Streams] = attrs.field(factory=dict)

    def of(self, local_rank: int) -> Streams:
        return self.by_rank.get(local_rank, self.everywhere)

    @property
    def any(self) -> bool:
        return bool(self.everywhere) or any(self.by_rank.values())


def parse_streams(text: str, option: str) -> StreamChoice:
    """A choice from `3` or `0:1,1:2`; `option` names the flag in the error."""
    try:
        if ":" not in text:
            return StreamChoice(everywhere=_streams(text))
        pairs = [part.split(":") for part in text.split(",")]
        if len({_number(rank) for rank, _ in pairs}) < len(pairs):
            raise ValueError(text)
        return StreamChoice(by_rank={_number(rank): _streams(which) for rank, which in pairs})
    except ValueError as error:
        raise ConfigError(
            f"{option} is 0, 1, 2 or 3, or such a number for some local ranks "
            f"as in 0:1,1:2, got {text!r}"
        ) from error


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _streams(text: str) -> Streams:
    number = _number(text)
    if number > Streams.ALL:
        raise ValueError(text)
    return Streams(number)
