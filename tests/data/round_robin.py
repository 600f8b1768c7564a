"""The order in which a job uses the items of its ranks."""

from __future__ import annotations

from itertools import zip_longest


def interleave(ranks):
    """Return the items of all ranks, round by round."""
    return [item for items in zip_longest(*ranks) for item in items if item is not None]
