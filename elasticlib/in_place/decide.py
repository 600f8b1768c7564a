"""Whose state a group goes on from: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs


@attrs.frozen
class Word:
    """What a worker says to those that it meets in a group.

    step: the last one that it has committed; None if it has no state of the job's yet. whole:
    whether its state is just as that step left it. ready: whether it is in its loop of steps, and
    not in its start-up. node: on which it runs.
    """

    step: int | None = None
    whole: bool = False
    ready: bool = False
    node: str = ""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Word:
        """What one has sent."""
        return cls(**fields)


@attrs.frozen
class Takeover:
    """A state of the living that all go on from.

    step: after which it is. source: the rank that gives it. takers: those that lack it.
    """

    step: int
    source: int
    takers: tuple[int, ...]


def choose(words: Sequence[Word], *, any_step: bool = False) -> Takeover | None:
    """The newest committed step, from the lowest rank that has it whole. None if nobody has: then
    it is to be looked for where snapshots and checkpoints are.

    any_step: whether an older one, which somebody has whole, is better than none.
    """
    whole = {rank: word.step for rank, word in enumerate(words) if word.whole}
    held = [step for step in whole.values() if step is not None]
    newest = max((word.step for word in words if word.step is not None), default=None)
    if not held or (max(held) != newest and not any_step):
        return None
    step = max(held)
    holders = [rank for rank, own in whole.items() if own == step]
    takers = tuple(rank for rank in range(len(words)) if rank not in holders)
    return Takeover(step, holders[0], takers)
