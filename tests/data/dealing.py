"""The order in which a job uses what its ranks draw."""

from __future__ import annotations

from itertools import zip_longest


def in_turn(ranks):
    """Return the items of all ranks, round by round."""
    return [item for turn in zip_longest(*ranks) for item in turn if item is not None]
