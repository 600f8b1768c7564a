"""Keeps where one node stands, for whoever looks at it from another thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import attrs

from ..clock import Clock, monotonic, wall
from ..workers.messages import Beat
from .event import Event
from .interface import Journal
from .standing import NodeStanding, after, seen


class StandingJournal(Journal):
    """Folds what is told into a standing; it keeps nothing else.

    Args:
        begins: the node before anything is told; its times are set here.
    """

    prompt = True

    def __init__(self, begins: NodeStanding, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        now = clock()
        self._standing = attrs.evolve(begins, since=now, began=now)

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        with self._lock:
            run, node = self._standing.run, self._standing.node
            event = Event(kind, run, node, generation, wall(), self._clock(), rank, facts)
            self._standing = after(self._standing, event)

    def look(self, beats: Mapping[int, Beat]) -> NodeStanding:
        """Where it stands now, with what its workers tell, by local rank."""
        with self._lock:
            standing = self._standing
        return seen(standing, beats, self._clock())
