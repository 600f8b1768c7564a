"""Counts what is told, as it is told."""

from __future__ import annotations

import threading
from typing import Any

from ..clock import Clock, monotonic, wall
from .counts import Counts, counted
from .event import Event
from .interface import Journal


class CountingJournal(Journal):
    """The counts of one node's events; for several threads."""

    prompt = True

    def __init__(self, run: str, node: str, *, clock: Clock = monotonic) -> None:
        self._run = run
        self._node = node
        self._clock = clock
        self._counts = Counts()
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counts:
        return self._counts

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        event = Event(kind, self._run, self._node, generation, wall(), self._clock(), rank, facts)
        with self._lock:
            self._counts = counted(self._counts, event)
