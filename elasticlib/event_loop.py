"""Event loop for descriptors, timers and wake-ups, run by threads that wait for something.

`EventLoop.run_until` handles events until a condition holds. So a thread that waits for several
things needs no other threads that each wait for one of them. The agent's thread waits for its
workers in this way, and the rendezvous thread for the store.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import selectors
import socket
import threading
import weakref
from collections.abc import Callable
from functools import partial

from .clock import monotonic
from .threads import daemon_thread, start_thread

log = logging.getLogger("elasticlib")

MAX_WAIT_S = 86400.0  # epoll accepts at most 24 days, but a timer may be later
CLOSE_TIMEOUT_S = 5.0  # limit for a callback that another thread executes
Callback = Callable[[], object]


class EventLoop:
    """Calls back when descriptors are readable and when timers are due. Thread-safe.

    If several threads call `run_until`, one of them handles the events, and the others wait for it.
    Callbacks must not block, because they delay all others.
    """

    def __init__(self) -> None:
        # Guards the fields below. Notified when a thread has handled some events.
        self._turn = threading.Condition()
        self._handler = 0  # identifies the thread that handles events; 0 if there is none
        self._may_sleep = False  # that thread may be about to wait, or waits, and calls nothing
        self._num_waiting = 0  # threads that wait for that thread
        self._timers: list[tuple[float, int, Callback]] = []  # a heap
        self._numbers = itertools.count()  # orders timers of the same time
        self._num_owners = 0  # threads that call `run_until` again and again
        self._needs_thread = False  # events are to be handled while no thread owns the loop
        self._is_closing = False  # to be closed when the last owner releases it
        self._is_abandoned = False  # the thread closes it once no descriptor is watched
        self._thread: threading.Thread | None = None  # the loop's own thread
        self._selector: selectors.BaseSelector | None = None  # None until it is needed
        self._wakeup: tuple[socket.socket, socket.socket] | None = None  # receives, sends

    def adopt(self) -> None:
        """Announce that the caller will call `run_until` again and again, until it calls `release`.

        The loop needs no thread of its own then.
        """
        with self._turn:
            self._num_owners += 1
            thread, self._thread = self._thread, None
        self._join(thread)

    def release(self) -> None:
        """Undo one call of `adopt`.

        After the last one, the loop is closed if `close` was called meanwhile. Otherwise its own
        thread is started if `start_thread` was called. An error of this start is ignored.
        """
        with self._turn:
            self._num_owners -= 1
        if self._is_closing:
            self.close()
        elif self._needs_thread:
            with contextlib.suppress(OSError):  # Then only threads that wait handle events.
                self.start_thread()

    def start_thread(self) -> None:
        """Handle events in a thread of the loop's own whenever no thread has adopted the loop.

        Raises:
            OSError: The thread cannot be started now. The caller may try again.
        """
        with self._turn:
            self._needs_thread = True
            if self._num_owners > 0 or self._thread is not None:
                return

            def is_over() -> bool:
                return self._thread is not thread or (self._is_abandoned and not self._has_readers)

            def run() -> None:
                self.run_until(is_over, math.inf)
                if self._is_abandoned:
                    self.close()

            def forget(_reason: str) -> None:
                self._thread = None  # the next caller starts another one

            thread = daemon_thread(run, "event-loop", forget)
            self._thread = thread
            try:
                start_thread(thread)
            except OSError:
                self._thread = None
                raise

    def abandon(self) -> None:
        """Close the loop in its thread once no descriptor is watched: nobody uses the loop.

        The garbage collector calls this in any thread, so the call takes no lock.
        """
        self._is_abandoned = True
        self.wake()

    @property
    def is_driven(self) -> bool:
        """True if a thread handles the events even if no caller waits for one."""
        return self._thread is not None or self._num_owners > 0

    def wake(self) -> None:
        """Make all calls of `run_until` check their conditions.

        The call takes no lock, so a signal handler may call this.
        """
        wakeup = self._wakeup
        # After a callback, the conditions are checked in any case.
        is_callback = self._handler == threading.get_ident() and not self._may_sleep
        if wakeup is not None and not is_callback:
            # The buffer may be full of earlier wake-ups, or the loop may be closed.
            with contextlib.suppress(OSError):
                wakeup[1].send(b"x")

    def call_at(self, when: float, callback: Callback) -> None:
        """Call `callback` once, when the monotonic clock reaches `when`."""
        with self._turn:
            heapq.heappush(self._timers, (when, next(self._numbers), callback))
        self.wake()

    def add_reader(self, descriptor: int, callback: Callback) -> None:
        """Call `callback` whenever the descriptor is readable.

        Raises:
            OSError: The descriptor cannot be watched.
        """
        # A thread that waits in `select` also notices a descriptor that is added now.
        self._open_selector().register(descriptor, selectors.EVENT_READ, callback)

    def remove_reader(self, descriptor: int) -> None:
        """Stop watching a descriptor. Another thread may still call its callback once."""
        selector = self._selector
        if selector is not None:
            with contextlib.suppress(KeyError):  # The loop has been closed since.
                selector.unregister(descriptor)

    def run_until(self, condition: Callable[[], object], timeout: float) -> bool:
        """Handle events until a condition holds, at most `timeout` seconds.

        Args:
            condition: Must be fast. It is checked after callbacks and after `wake`. If it holds at
                the beginning, only the events that are due are handled.
            timeout: The time limit in seconds.

        Returns:
            Whether the condition holds.
        """
        deadline, caller = monotonic() + timeout, threading.get_ident()
        self._open_selector()  # before the condition is checked, so that no later `wake` is missed
        while True:
            left_s = max(0.0, deadline - monotonic())
            with self._turn:
                # The caller itself was the last handler if an exception has interrupted it.
                is_handler = self._handler in (0, caller)
                if is_handler:
                    self._handler, self._may_sleep = caller, True
                elif not condition():
                    self._num_waiting += 1
                    self._turn.wait(min(left_s, MAX_WAIT_S))
                    self._num_waiting -= 1
            is_met = bool(condition())
            if is_handler:
                self._take_turn(0.0 if is_met else left_s)
            if is_met or condition():
                return True
            if monotonic() >= deadline:
                return False

    def _take_turn(self, timeout: float) -> None:
        """Handle events for up to `timeout`, and then wake the threads that wait in `run_until`."""
        try:
            self._handle_events(timeout)
        finally:
            with self._turn:
                self._handler, self._may_sleep = 0, False
                if self._num_waiting:
                    self._turn.notify_all()

    def close(self) -> None:
        """End the loop's thread and free the descriptors. A closed loop can be used again.

        The descriptors of a loop that was adopted are freed when it is released. They are not freed
        if a callback in another thread takes more than CLOSE_TIMEOUT_S.
        """
        with self._turn:
            self._needs_thread = False
            self._is_closing = self._num_owners > 0
            if self._is_closing:
                return
            thread, self._thread = self._thread, None
        self._join(thread)
        with self._turn:
            if not self._turn.wait_for(self._is_idle, CLOSE_TIMEOUT_S):
                return
            selector, self._selector = self._selector, None
            wakeup, self._wakeup = self._wakeup, None
        if selector is not None:
            selector.close()
        _close(*wakeup or ())

    def close_after_fork(self) -> None:
        """Free the descriptors of this copy in a forked child. The copy must not be used any more.

        The method takes no lock, because a thread of the parent may own it in the copy forever.
        """
        if self._selector is not None:
            self._selector.close()
        _close(*self._wakeup or ())

    def _is_idle(self) -> bool:
        """Return True if no other thread handles events."""
        return self._handler in (0, threading.get_ident())

    def _join(self, thread: threading.Thread | None) -> None:
        self.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)

    def _open_selector(self) -> selectors.BaseSelector:
        selector = self._selector
        if selector is not None:
            return selector
        with self._turn:
            if self._selector is None:
                receiver, sender = self._wakeup = socket.socketpair()
                weakref.finalize(self, _close, receiver, sender).atexit = False
                receiver.setblocking(False)
                sender.setblocking(False)
                selector = selectors.DefaultSelector()
                # Without a reference to the loop, which is then freed with its last user.
                read = partial(_read_wakeup, receiver)
                selector.register(receiver, selectors.EVENT_READ, read)
                self._selector = selector
            return self._selector

    def _handle_events(self, timeout: float) -> None:
        selector = self._open_selector()
        timers = self._timers
        wait_s = min(timeout, timers[0][0] - monotonic()) if timers else timeout
        events = selector.select(max(0.0, min(wait_s, MAX_WAIT_S)))
        self._may_sleep = False
        for key, _ in events:
            self._call(key.data)
        while timers and (callback := self._take_due_timer()) is not None:
            self._call(callback)

    def _take_due_timer(self) -> Callback | None:
        with self._turn:
            is_due = self._timers and self._timers[0][0] <= monotonic()
            return heapq.heappop(self._timers)[2] if is_due else None

    def _call(self, callback: Callback) -> None:
        try:
            callback()
        except Exception as error:
            # A callback that fails must not prevent the others.
            log.error("a callback of the event loop failed: %s", error, exc_info=error)

    @property
    def _has_readers(self) -> bool:
        """True if a descriptor is watched besides the one for wake-ups."""
        selector = self._selector
        return selector is not None and len(selector.get_map() or ()) > 1


def _read_wakeup(receiver: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The loop may be closed.
        receiver.recv(4096)


def _close(*links: socket.socket) -> None:
    for link in links:
        link.close()
