"""Thread that executes calls, and waits for descriptors and times.

A worker's agent has two of them: one starts and watches all processes, because the kernel kills a
process when the *thread* ends that has started it; the other one deals with output and files.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
from collections import deque
from collections.abc import Callable

from ..clock import monotonic
from ..threads import daemon_thread, do_nothing, start_thread

CHUNK_BYTES = 4096
PAUSE_S = 1.0  # a thread that wakes so much too late was paused, with its process or machine


class LoopThread:
    """A thread that executes calls of other threads, and waits for descriptors and for times.

    Args:
        name: the name of the thread.
        tick: called in the thread after each wake-up, with the time, and with the seconds for which
            the thread has not run although it should have. Returns when it must be called again.
        on_error: receives the error message, in the thread, if a call raises. The thread ends.
    """

    def __init__(
        self,
        name: str,
        tick: Callable[[float, float], float],
        on_error: Callable[[str], object],
    ) -> None:
        self._name, self._tick, self._on_error = name, tick, on_error
        self._lock = threading.Lock()  # guards the next two fields
        self._thread: threading.Thread | None = None
        self._wake_fd = -1  # writing a byte to it wakes the thread
        self._calls: deque[Callable[[], object]] = deque()
        self._readers: dict[int, Callable[[], object]] = {}  # by descriptor
        self._selector: selectors.BaseSelector | None = None  # while the thread runs
        self._is_ending = False

    def start(self) -> None:
        """Start the thread, unless it was started before. Raises OSError."""
        with self._lock:
            if self._thread is not None:
                return
            reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            thread = daemon_thread(lambda: self._run(reading), self._name, self._on_error)
            try:
                start_thread(thread)
            except OSError:
                os.close(reading)
                os.close(writing)
                raise
            self._thread, self._wake_fd = thread, writing

    @property
    def has_started(self) -> bool:
        return self._thread is not None

    def post(self, call: Callable[[], object]) -> None:
        """Let the thread make a call. Thread-safe. A thread that has finished makes none."""
        self._calls.append(call)
        with self._lock, contextlib.suppress(OSError):  # full, or the thread has finished
            os.write(self._wake_fd, b"x")

    def watch(self, fd: int, on_readable: Callable[[], object]) -> None:
        """Call a function in the thread whenever a descriptor is readable. Only in the thread."""
        self._readers[fd] = on_readable
        if self._selector is not None:
            self._selector.register(fd, selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`, before the descriptor is closed. Only in the thread."""
        if self._readers.pop(fd, None) is not None and self._selector is not None:
            self._selector.unregister(fd)

    def end(self, timeout: float) -> None:
        """End the thread after the calls that were posted, and wait for that."""
        self.post(self.end_now)
        self.join(timeout)

    def end_now(self) -> None:
        """End the thread before it waits again. Only in the thread."""
        self._is_ending = True

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, unless this is the thread or it was never started."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout)

    def _run(self, wake_fd: int) -> None:
        # A new process gets the mask of the thread that starts it. Batch systems send signals to
        # all processes, so a new one must not receive any before it has its dispositions.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._selector = selector = selectors.DefaultSelector()
        self.watch(wake_fd, lambda: os.read(wake_fd, CHUNK_BYTES))
        try:
            late_s = 0.0
            while True:
                due_at = self._tick(monotonic(), late_s)
                if self._is_ending:
                    return
                begin = monotonic()
                timeout = None if due_at == float("inf") else max(0.0, due_at - begin)
                events = selector.select(timeout)
                late_s = 0.0 if timeout is None else monotonic() - begin - timeout
                late_s = late_s if late_s > PAUSE_S else 0.0
                for key, _ in events:
                    # A call before this one may have called `unwatch`.
                    self._readers.get(key.fd, do_nothing)()
                while self._calls:
                    self._calls.popleft()()
        finally:
            selector.close()
            with self._lock:
                os.close(wake_fd)
                os.close(self._wake_fd)
                self._wake_fd = -1
