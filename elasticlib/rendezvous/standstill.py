"""Whether an agent's loop stands still, judged by one who looks at it again and again.

A node whose agent reacts to nothing is of no use to the others, and must not have them wait for it.
"""

from __future__ import annotations

LATE = 1 / 4
"""Of the bound: who looks so much later than it did last could not run itself, as where the
machine was paused or is overloaded; then the loop could not either."""


class Standstill:
    """bound: seconds that a loop may be silent for, while who looks at it could run."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._looked: float | None = None
        self._since = 0.0

    def judge(self, silent: float, now: float) -> bool:
        """silent: seconds since the loop last turned; now: by the monotonic clock of who looks."""
        if self._looked is None or now - self._looked > self._bound * LATE:
            self._since = now
        self._looked = now
        return min(silent, now - self._since) > self._bound
