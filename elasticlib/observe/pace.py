"""What a node's workers have told of their steps between two looks, as events to keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..workers.beat import NOTHING, Beat


@attrs.frozen
class Look:
    """All workers of a node at one moment. at: seconds; generation: whose workers they are."""

    generation: int
    at: float
    beats: Mapping[int, Beat] = attrs.field(factory=dict)

    @property
    def step(self) -> int:
        """The last that all workers which tell of steps have told of; NOTHING if none does."""
        return min((b.step for b in self.beats.values() if b.steps), default=NOTHING)

    @property
    def saved(self) -> int:
        return max((b.saved for b in self.beats.values()), default=NOTHING)


def told(before: Look, now: Look) -> list[tuple[str, dict[str, Any]]]:
    """Kinds and facts; nothing where nothing has moved."""
    found: list[tuple[str, dict[str, Any]]] = []
    same = before.generation == now.generation
    if now.step != NOTHING and not (same and now.step == before.step):
        seconds = now.at - before.at
        known = same and before.step != NOTHING and seconds > 0
        quietest = min(b.alive for b in now.beats.values() if b.steps)
        facts = {
            "step": now.step,
            "per_second": round((now.step - before.step) / seconds, 3) if known else None,
            "silent": round(max(0.0, now.at - quietest), 3),
        }
        found.append(("steps", facts))
    if now.saved != NOTHING and not (same and now.saved == before.saved):
        found.append(("saved", {"step": now.saved}))
    return found
