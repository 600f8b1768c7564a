"""The thread in which an agent waits for timers and its supervisor process.

Callbacks must not block, because the agent notices the exit of a worker only through this loop.
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

from ..clock import monotonic
from ..errors import WorkerStartError, require_not_none
from ..threads import daemon_thread
from .output import start_thread

log = logging.getLogger("elasticlib.workers")

MAX_WAIT_S = 86400.0  # epoll accepts at most 24 days, but a timer may be later
Callback = Callable[[], object]


class EventLoop:
    """Calls back in one thread. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the start and the end of the thread
        self._soon: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Callback]] = []  # a heap
        self._numbers = itertools.count()  # orders timers of the same time
        self._selector: selectors.BaseSelector | None = None  # None while there is no thread
        self._wakeup = (-1, -1)  # a pipe
        self._is_closing = False
        self._on_failure: list[Callback] = []

    def start(self) -> None:
        """Start the thread if it does not run.

        Raises:
            OSError, WorkerStartError: the thread cannot be started now. The caller may try again.
        """
        with self._lock:
            self._is_closing = False
            if self._selector is not None:
                return
            try:
                self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._selector = selectors.DefaultSelector()
                self._selector.register(self._wakeup[0], selectors.EVENT_READ, self._read_wakeup)
                start_thread(daemon_thread(self._run, "workers-loop", self._fail))
            except (OSError, WorkerStartError):
                self._release()
                raise

    def close(self) -> None:
        """End the thread once no reader is left."""
        with self._lock:
            self._is_closing = True
        self.call_soon_threadsafe(lambda: None)

    def call_on_failure(self, callback: Callback) -> None:
        """Call back if an exception ends the thread."""
        self._on_failure.append(callback)

    def call_soon_threadsafe(self, callback: Callback) -> None:
        """Call back once, after earlier callbacks."""
        self._soon.append(callback)
        # The pipe may be full of earlier wake-ups, or the thread may not run yet.
        with self._lock, contextlib.suppress(OSError):
            os.write(self._wakeup[1], b"x")

    def call_at(self, when: float, callback: Callback) -> None:
        """Call back once, at a time of the monotonic clock."""
        timer = (when, next(self._numbers), callback)
        self.call_soon_threadsafe(lambda: heapq.heappush(self._timers, timer))

    def add_reader(self, descriptor: int, callback: Callback) -> None:
        """Call back whenever a descriptor is readable, until it is removed."""
        self.call_soon_threadsafe(
            lambda: self._selected.register(descriptor, selectors.EVENT_READ, callback)
        )

    def remove_reader(self, descriptor: int, then: Callback = lambda: None) -> None:
        """Stop reading a descriptor, and call `then`, which may close it."""
        self.call_soon_threadsafe(lambda: (self._selected.unregister(descriptor), then()))

    # -- in the thread ---------------------------------------------------------------------------

    @property
    def _selected(self) -> selectors.BaseSelector:
        return require_not_none(self._selector, "the selector of a loop that was started")

    def _run(self) -> None:
        selector = self._selected
        while True:
            while self._soon:
                self._call(self._soon.popleft())
            while self._timers and self._timers[0][0] <= monotonic():
                self._call(heapq.heappop(self._timers)[2])
            if self._is_closing and len(selector.get_map()) == 1:
                with self._lock:
                    self._release()
                return
            left = self._timers[0][0] - monotonic() if self._timers else MAX_WAIT_S
            for key, _ in selector.select(max(0.0, min(left, MAX_WAIT_S))):
                self._call(key.data)

    def _call(self, callback: Callback) -> None:
        try:
            callback()
        except Exception as error:
            # A callback that fails must not end the others.
            log.error("event of a worker was not handled: %s", error, exc_info=error)

    def _read_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup[0], 4096)

    def _fail(self, _: str) -> None:
        for callback in self._on_failure:
            self._call(callback)

    def _release(self) -> None:
        selector, self._selector = self._selector, None
        if selector is not None:
            selector.close()
        wakeup, self._wakeup = self._wakeup, (-1, -1)
        for descriptor in wakeup:
            with contextlib.suppress(OSError):  # The pipe may not have been opened.
                os.close(descriptor)
