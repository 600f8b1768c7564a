"""Looks at the workers' steps now and then, and tells a journal how they move on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..clock import Clock, monotonic
from ..workers.interface import Workers
from ..workers.spec import WorkerGroup
from .interface import Journal
from .pace import Look, told

EVERY_SECONDS = 10.0


class StepWatch:
    """A thread that only looks, from `with` to its end.

    Args:
        workers: whose steps, where they tell of them.
        group: that of the generation which the node holds, or None.
        every: seconds between looks.
    """

    def __init__(
        self,
        workers: Workers,
        group: Callable[[], WorkerGroup | None],
        journal: Journal,
        *,
        every: float = EVERY_SECONDS,
        clock: Clock = monotonic,
    ) -> None:
        self._workers = workers
        self._group = group
        self._journal = journal
        self._every = every
        self._clock = clock
        self._over = threading.Event()
        self._last = Look(0, clock())
        self._thread = threading.Thread(target=self._watch, name="agent-steps", daemon=True)

    def __enter__(self) -> StepWatch:
        if self._workers.tell_steps:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self.look()

    def look(self) -> None:
        """Tell what has moved since the last look."""
        group = self._group()
        beats = self._workers.beats()
        if group is None or not beats:
            return
        now = Look(group.generation, self._clock(), dict(beats))
        for kind, facts in told(self._last, now):
            self._journal.tell(kind, generation=now.generation, **facts)
        self._last = now
