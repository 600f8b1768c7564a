"""How a store measures the silence of lease owners: by looks, none of which counts for much.

A look adds at most a quarter of the ttl to a lease's silence, so a store that stood still
(stopped, swapped out, its machine paused) gives every owner the chance to be heard on waking.
"""

from __future__ import annotations

import attrs

LONGEST_STEP = 1 / 4
"""The part of its ttl that one look can add to a lease's silence."""

LOOKS_PER_TTL = 8
"""How often the shortest lease is to be looked at within its ttl."""


@attrs.define
class _Silence:
    ttl: float
    seen: float
    so_far: float = 0.0

    def look(self, now: float) -> bool:
        """Count the time since the last look; whether the lease has been silent for its ttl."""
        self.so_far += min(max(now - self.seen, 0.0), self.ttl * LONGEST_STEP)
        self.seen = now
        return self.so_far >= self.ttl


class LeaseClock:
    """The silence of each lease, by name. Time is an argument, from one monotonic clock."""

    def __init__(self) -> None:
        self._silences: dict[str, _Silence] = {}
        self._next = 0.0
        self.interval: float | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._silences

    def hear(self, name: str, ttl: float, now: float) -> None:
        """The owner wrote or refreshed: its silence starts again at nothing."""
        self._silences[name] = _Silence(ttl, now)
        soon = ttl / LOOKS_PER_TTL
        if self.interval is None or soon < self.interval:
            self._next = now + soon if self.interval is None else min(self._next, now + soon)
            self.interval = soon

    def forget(self, name: str) -> None:
        """No lease of that name any more; harmless if there was none."""
        self._silences.pop(name, None)

    def until_due(self, now: float) -> float | None:
        """Seconds until the next look is worth taking; None without leases."""
        return max(self._next - now, 0.0) if self._silences else None

    def due(self, now: float) -> bool:
        """Whether a look is worth taking now."""
        return bool(self._silences) and now >= self._next

    def look(self, now: float) -> list[str]:
        """Count the silence of all leases; the names of those silent for their ttl or longer."""
        silent = [name for name, silence in self._silences.items() if silence.look(now)]
        shortest = min((s.ttl for s in self._silences.values()), default=None)
        self.interval = None if shortest is None else shortest / LOOKS_PER_TTL
        self._next = now + (self.interval or 0.0)
        return silent
