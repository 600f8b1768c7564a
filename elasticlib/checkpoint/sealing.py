"""The sums of snapshots, made behind the training, in a thread that stands still during a copy.

What a sum protects from: a byte of shared memory that changes after the snapshot was summed, and
before it is restored, given to another node or written to the disk. To sum takes several times as
long as to copy, so the training step does not wait for it, and the record that makes a snapshot
count is written before. A snapshot whose worker ended in between is whole and has no sum: it is
used as it is, since to refuse it would lose a step of which nothing says that it is damaged.
(What an agent keeps for another node it sums itself, as it comes.) Whoever snapshots more often
than memory can be summed has sums of some snapshots only.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator

from ..threads import helper
from .memory import Slots
from .slot import Record

CHUNK = 1 << 20
"""Bytes summed at once: for so long, less than a millisecond, a copy may share memory with it."""


class Sealing:
    """Sums what is in these slots, the newest first."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._changed = threading.Condition()
        self._next: Record | None = None
        self._copying = self._over = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is summed meanwhile."""
        self._copying = True
        try:
            yield
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify()

    def seal(self, record: Record) -> None:
        """Sum this snapshot, when there is time."""
        with self._changed:
            self._next = record
            self._changed.notify()
        if self._thread is None:
            self._thread = helper(self._run, "elasticlib-seal")
            self._thread.start()

    def close(self) -> None:
        """Sum no more."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._next is not None)
                record, self._next = self._next, None
            if self._over or record is None:
                return
            summed = self._sum(record)
            if summed is not None:
                self._slots.seal(record, summed)

    def _sum(self, record: Record) -> int | None:
        summed = 0
        for at in range(0, record.size, CHUNK):
            if self._copying:
                with self._changed:
                    self._changed.wait_for(lambda: self._over or not self._copying)
            # Looked for anew each time: the slot may have been given to a later snapshot.
            view = self._slots.view_of(record)
            if self._over or view is None:
                return None
            with view, view[at : at + CHUNK] as chunk:
                summed = zlib.crc32(chunk, summed)
        return summed
