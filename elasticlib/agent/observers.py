"""Those who only look and enqueue: one thread for the rendezvous, and the signals.

Neither decides anything. What they see becomes an event in the agent's inbox, marked with the
attempt that it belongs to, so that late news about an earlier one can be told apart.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ..clock import monotonic
from ..errors import describe
from ..rendezvous.interface import Change, ChangeKind, RendezvousHandler, RendezvousInfo
from ..threads import helper

HEARD_SECONDS = 0.2
"""Whoever hears signals waits no longer than this without a look.

Python runs a handler when the main thread comes back from what it waits in, and a signal does not
end that wait if it comes just before it, or if the kernel gives it to another thread.
"""


class RendezvousObserver:
    """Waits on a handler, which may block, for an agent, which must not.

    `ready()` blocks until workers can be started at once: the others do not stop theirs for a
    node that is not. `settled(attempt, info)`, `ended(attempt, error)` and
    `changed(attempt, change)` are called from the observer's thread and only enqueue, as does
    `broke(sentence)`, if that thread ends unasked.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        interval: float,
        *,
        ready: Callable[[], None],
        settled: Callable[[int, RendezvousInfo], None],
        ended: Callable[[int, Exception], None],
        changed: Callable[[int, Change], None],
        broke: Callable[[str], None],
    ) -> None:
        self._handler = handler
        self._interval = interval
        self._ready = ready
        self._settled = settled
        self._ended = ended
        self._changed = changed
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = helper(self._observe, "agent-rendezvous", broke)

    def start(self) -> None:
        self._thread.start()

    def join(self, attempt: int) -> None:
        """Ask for the next generation, and from then on watch it."""
        self._asked.put(attempt)

    def stop(self, seconds: float) -> None:
        """After the handler's shutdown, which ends whatever the thread waits for."""
        self._asked.put(None)
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _observe(self) -> None:
        attempt = self._asked.get()
        while attempt is not None:
            try:
                self._ready()
                info = self._handler.next_rendezvous()
            except Exception as error:
                # Somebody else's handler may raise anything; an agent that waits for an
                # observer that is no more would wait for ever.
                self._ended(attempt, error)
                attempt = self._asked.get()
                continue
            self._settled(attempt, info)
            attempt = self._watch(attempt)

    def _watch(self, attempt: int) -> int | None:
        """Report the one change that ends this generation; returns what is asked next."""
        while True:
            began = monotonic()
            try:
                change = self._handler.wait_for_change(self._interval)
            except Exception as error:
                change = Change(ChangeKind.LOST, describe(error))
            if change is not None:
                self._changed(attempt, change)
                return self._asked.get()
            try:
                # A handler that cannot push answers at once, and is polled.
                rest = self._interval - (monotonic() - began)
                return self._asked.get(timeout=rest) if rest > 0 else self._asked.get_nowait()
            except queue.Empty:
                continue


class SignalObserver:
    """Turns signals into events, and leaves alone those that were ignored on entry."""

    def __init__(self, numbers: Iterable[int], arrived: Callable[[int], None]) -> None:
        self._numbers = tuple(numbers)
        self._arrived = arrived
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalObserver:
        # Python lets only the main thread hear signals; elsewhere they are the program's own.
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._arrived(number)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
