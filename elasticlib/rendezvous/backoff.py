"""How long to wait before a store that is away is tried again: longer each time, never alike."""

from __future__ import annotations

import random

LONGEST = 0.5
"""Seconds; shorter than a last call, so that those who remember a job are back before newcomers
begin another."""


def backoff(misses: int) -> float:
    """Seconds to pause after so many misses, drawn so that nodes do not all come at once."""
    pause = min(LONGEST, 0.02 * 2.0 ** min(misses, 10))
    return pause * random.uniform(0.5, 1.0)
