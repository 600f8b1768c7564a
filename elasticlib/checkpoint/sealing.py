"""What is done behind the training with a worker's slots: memory is made for the next snapshot
before that is due, and the last one is summed.

It is one thread, which stands still during a copy. No step waits for it: the record that makes a
snapshot count is written before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..threads import helper
from .memory import CHUNK, SUMS, Record, Slots, word_sum


class Sealing:
    """Works on these slots, the newest snapshot first."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._changed = threading.Condition()
        self._next: Record | None = None
        self._like: Record | None = None
        self._copying = self._over = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is done meanwhile."""
        self._copying = True
        try:
            yield
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify()

    def prepare(self, like: Record) -> None:
        """Make memory for a snapshot of this size, when there is time."""
        self._begin(None, like)

    def seal(self, record: Record) -> None:
        """Sum this snapshot, when there is time, and make memory for another one like it."""
        self._begin(record, record)

    def close(self) -> None:
        """Do no more."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, record: Record | None, like: Record) -> None:
        with self._changed:
            self._next, self._like = record or self._next, like
            self._changed.notify()
        if self._thread is None:
            self._thread = helper(self._run, "elasticlib-seal")
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._next or self._like)
                record, self._next = self._next, None
                like, self._like = self._like, None
            if self._over:
                return
            if like is not None:
                self._slots.prepare(like, self._may_go_on)
            if record is not None and (summed := self._sum(record)) is not None:
                self._slots.seal(record, summed)

    def _may_go_on(self) -> bool:
        if self._copying:
            with self._changed:
                self._changed.wait_for(lambda: self._over or not self._copying)
        return not self._over

    def _sum(self, record: Record) -> int | None:
        summed = 0
        for at in range(0, record.size, CHUNK):
            # Looked for anew each time: the slot may have been given to a later snapshot.
            view = self._slots.view_of(record) if self._may_go_on() else None
            if view is None:
                return None
            with view, view[at : at + CHUNK] as chunk:
                summed += word_sum(chunk)
        return summed % SUMS
