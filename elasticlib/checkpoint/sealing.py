"""The sums of snapshots, made behind the training, in a thread that stands still during a copy.

What a sum protects from: a byte of shared memory that changes after the snapshot was summed, and
before it is restored (here, or on a node that keeps a replica, which is given the sum as well) or
written to the disk. It is the sum of 64-bit words, which any flipped bit changes; words that trade
places do not, nor do two changes that make up for each other: those are for the CRC-32 of disks and
wires. The training step does not wait for it, so the record that makes a snapshot count is written
before. A snapshot whose worker ended in between is whole and has no sum: it is used as it is, since
to refuse it would lose a step of which nothing says that it is damaged.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from .memory import Slots
from .slot import SUMS, Record

CHUNK = 4 << 20
"""Bytes summed before it is looked whether a copy has begun, or the slot has another snapshot."""
_SERIAL = 24576
"""Of so few words torch makes no work for further threads, which are the training's."""


def torch_sum(data: torch.Tensor, *, serial: bool = False) -> int:
    """`slot.word_sum` of a tensor of bytes that begins at a multiple of 8 of them.

    serial: whether this thread alone is to do it.
    """
    whole = len(data) // 8 * 8
    summed = int.from_bytes(bytes(data[whole:].tolist()), "little")
    words = data[:whole].view(torch.int64)
    step = _SERIAL if serial else max(1, len(words))
    for at in range(0, len(words), step):
        summed += int(words[at : at + step].sum())
    return summed % SUMS


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
            self._thread = threading.Thread(target=self._run, name="elasticlib-seal", daemon=True)
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
                summed += torch_sum(torch.frombuffer(chunk, dtype=torch.uint8), serial=True)
        return summed % SUMS
