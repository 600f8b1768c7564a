"""The one thread in which an agent waits for its workers: for ends, pipes and times.

What is called back here must not block: how soon the end of a worker is noticed depends on it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from ..clock import monotonic
from ..errors import WorkerStartError, present
from ..threads import helper
from . import cleanup
from .output import start_thread

log = logging.getLogger("elasticlib.workers")

LOOK_SECONDS = 0.1
LONGEST_WAIT = 86400.0
"""Seconds; epoll takes no more than 24 days, and a timer may run for longer."""
Callback = Callable[[], object]


class EventLoop:
    """All methods are for any thread; what they are given is called in the loop's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Callback]] = []
        self._numbers = itertools.count()
        self._watched: dict[int, Callback] = {}
        self._paused: set[int] = set()
        self._then: Callback = lambda: None
        self._selector: selectors.BaseSelector | None = None
        self._wake = (-1, -1)
        self._closing = False

    def start(self) -> None:
        """Have the thread; harmless if it is there.

        Raises:
            OSError, WorkerStartError: it cannot be had now; this can be tried again.
        """
        with self._lock:
            self._closing = False
            if self._selector is not None:
                return
            try:
                self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._selector = selectors.DefaultSelector()
                self._selector.register(self._wake[0], selectors.EVENT_READ, self._woken)
                start_thread(helper(self._run, "workers-loop", self._give_up))
            except (OSError, WorkerStartError):
                self._leave()
                raise

    def close(self, then: Callback) -> None:
        """End the thread, with a last call, once it has nothing more to read or to watch."""
        with self._lock:
            self._then = then
            self._closing = True
        self.call_soon_threadsafe(lambda: None)

    def call_soon_threadsafe(self, act: Callback) -> None:
        """Call it, after what was asked before."""
        self._asked.append(act)
        with self._lock, contextlib.suppress(OSError):  # full of earlier calls, or not there
            os.write(self._wake[1], b"x")

    def call_at(self, when: float, act: Callback) -> None:
        """Call it at this time of the monotonic clock."""
        self.call_soon_threadsafe(lambda: self._at(when, act))

    def add_reader(self, file: int, ready: Callback) -> None:
        """Call `ready` whenever `file` is readable, until it is paused or removed."""
        self.call_soon_threadsafe(lambda: self._read(file, ready))

    def pause_reading(self, file: int) -> None:
        """Read it no more until `add_reader` is called again, which is to come."""
        self._paused.add(file)
        self.call_soon_threadsafe(lambda: self._selected.unregister(file))

    def remove_reader(self, file: int, then: Callback = lambda: None) -> None:
        """Read it no more; `then` may close it."""
        self.call_soon_threadsafe(lambda: (self._selected.unregister(file), then()))

    def watch_process(self, pid: int, ended: Callback) -> None:
        """Call `ended` once this process has ended; it must not be reaped before."""
        self._watched[pid] = ended
        self.call_soon_threadsafe(lambda: self._watch(pid))

    # -- in the thread ---------------------------------------------------------------------------

    @property
    def _selected(self) -> selectors.BaseSelector:
        return present(self._selector, "the selector of a loop that was started")

    def _run(self) -> object:
        selector = self._selected
        while True:
            left = LONGEST_WAIT if not self._timers else self._timers[0][0] - monotonic()
            for key, _ in selector.select(max(0.0, min(left, LONGEST_WAIT))):
                self._do(key.data)
            while self._asked:
                self._do(self._asked.popleft())
            while self._timers and self._timers[0][0] <= monotonic():
                self._do(heapq.heappop(self._timers)[2])
            idle = len(selector.get_map()) == 1 and not self._watched and not self._paused
            if self._closing and idle:
                with self._lock:
                    self._leave()
                return self._then()

    def _do(self, act: Callback) -> None:
        try:
            act()
        except Exception as error:
            # One that breaks must not take the others' waits with it.
            log.error("the loop that waits for workers failed: %s", error, exc_info=error)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake[0], 4096)

    def _read(self, file: int, ready: Callback) -> None:
        self._paused.discard(file)
        self._selected.register(file, selectors.EVENT_READ, ready)

    def _at(self, when: float, act: Callback) -> None:
        heapq.heappush(self._timers, (when, next(self._numbers), act))

    def _watch(self, pid: int) -> None:
        try:
            handle = cleanup.open_pidfd(pid)
        except ProcessLookupError:
            # Its fork server ended, and the worker with it.
            self._ended(pid)
            return
        if handle is None:
            self._look(pid)
            return

        def over() -> None:
            self._selected.unregister(handle)
            os.close(handle)
            self._ended(pid)

        self._selected.register(handle, selectors.EVENT_READ, over)

    def _look(self, pid: int) -> None:
        """Where there are no handles it can only be looked at, now and again."""
        if cleanup.has_exited(pid):
            self._ended(pid)
        else:
            self._at(monotonic() + LOOK_SECONDS, partial(self._look, pid))

    def _ended(self, pid: int) -> None:
        ended = self._watched.pop(pid, None)
        if ended is not None:
            ended()

    def _give_up(self, _: str) -> None:
        """A process that cannot be watched any more is taken for ended: its owner then ends it."""
        for pid in list(self._watched):
            self._ended(pid)

    def _leave(self) -> None:
        selector, self._selector = self._selector, None
        if selector is not None:
            selector.close()
        wake, self._wake = self._wake, (-1, -1)
        for number in wake:
            with contextlib.suppress(OSError):  # it was never opened
                os.close(number)
