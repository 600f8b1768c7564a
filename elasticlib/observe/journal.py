"""Events in a file, written by a thread of its own: neither a full nor a slow disk is felt.

What cannot be kept is counted, and the count is written when writing works again.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import attrs

from ..clock import Clock, monotonic, wall
from ..threads import helper
from .event import Event, encode
from .interface import Journal

FILE = "events.jsonl"
CLOSE_SECONDS = 2.0


class FileJournal(Journal):
    """Appends to one file, a line at a time; the file is made with the first line.

    Args:
        path: the file; its folder is there.
        run, node: whose events these are.
        waiting: so many may wait to be written; more of them are lost, and counted.
        retry: seconds before another try where a disk takes nothing.
    """

    prompt = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        run: str,
        node: str,
        *,
        waiting: int = 10_000,
        retry: float = 1.0,
        clock: Clock = monotonic,
    ) -> None:
        self.path = os.fspath(path)
        self._run = run
        self._node = node
        self._clock = clock
        self._queue: queue.Queue[Event | None] = queue.Queue(waiting)
        self._retry = retry
        self._lost = self._lost_in_all = 0
        self._lost_lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = helper(self._write_all, "journal")
        self._thread.start()

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        event = Event(kind, self._run, self._node, generation, wall(), self._clock(), rank, facts)
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._lose(1)

    @property
    def lost(self) -> int:
        return self._lost_in_all

    def close(self) -> None:
        self._closing.set()
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return  # its thread stands before a disk that does not answer
        self._thread.join(CLOSE_SECONDS)

    def _lose(self, count: int) -> None:
        with self._lost_lock:
            self._lost += count
            self._lost_in_all += max(0, count)

    def _write_all(self) -> None:
        last: Event | None = None
        while (event := self._queue.get()) is not None:
            last = event
            while not self._written(encode(event), event):
                # An event is worth the wait, as long as there is room for those behind it.
                if self._closing.wait(self._retry) or self._queue.full():
                    self._lose(1)
                    break
        if last is not None:
            self._written(b"", last)

    def _written(self, line: bytes, at: Event) -> bool:
        """Whether the line is in the file, behind the number of the events lost before it."""
        with self._lost_lock:
            lost = self._lost
        if lost:
            line = encode(attrs.evolve(at, kind="lost", rank=None, facts={"events": lost})) + line
        if line and not _appended(self.path, line):
            return False
        self._lose(-lost)
        return True


def _appended(path: str, line: bytes) -> bool:
    """Whether all of it is in the file; a part of it is taken out again."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return False
    try:
        before = os.fstat(file).st_size
        done = os.write(file, line)
        if done < len(line):
            os.ftruncate(file, before)
    except OSError:
        return False
    finally:
        os.close(file)
    return done == len(line)
