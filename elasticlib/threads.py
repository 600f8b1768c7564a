"""Threads whose end by an exception is told, and calls made aside for who must not wait for them.

Who starts a thread depends on it: one that ended unheard would leave its owner to wait for ever.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("elasticlib")


def helper(
    work: Callable[[], object], name: str, broke: Callable[[str], object] | None = None
) -> threading.Thread:
    """A daemon thread, not started yet. If an exception ends it, that is logged, and `broke` hears
    it as a sentence, in that thread."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            # Not passed on: nobody is above a thread's first function.
            sentence = f"the thread {name} broke: {type(error).__name__}: {error}"
            log.error("%s", sentence, exc_info=error)
            if broke is not None:
                broke(sentence)

    return threading.Thread(target=run, name=name, daemon=True)


class Aside:
    """Makes calls in a thread of its own, in their order, until one of them raises.

    Args:
        name: of the thread, which starts with the first call.
        broke: hears what was raised, once; nothing is called after that.
        waiting: so many calls may wait for their turn; more of them are not made.
    """

    def __init__(
        self, name: str, broke: Callable[[BaseException], object], *, waiting: int = 10_000
    ) -> None:
        self._name = name
        self._broke = broke
        self._waiting: queue.Queue[Callable[[], object] | None] = queue.Queue(waiting)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = False
        self._closing = threading.Event()

    def call(self, work: Callable[[], object]) -> bool:
        """Whether it will be called, if no call before it raises."""
        with self._lock:
            if self._over:
                return False
            if self._thread is None:
                self._thread = helper(self._run, self._name)
                self._thread.start()
            try:
                self._waiting.put_nowait(work)
            except queue.Full:
                return False
        return True

    def rest(self, seconds: float) -> bool:
        """For a call that would try again: whether it may, after so many seconds. Not when this is
        closed meanwhile, or no more calls can wait behind it."""
        return not (self._closing.wait(seconds) or self._waiting.full())

    def close(self, seconds: float) -> bool:
        """Whether all calls have been made within so many seconds; no others are accepted."""
        with self._lock:
            self._over, thread = True, self._thread
        self._closing.set()
        if thread is None:
            return True
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return False  # its end is noticed behind the call that it is in
        thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException as error:
                with self._lock:
                    self._over = True
                self._broke(error)
                return

    def _next(self) -> Callable[[], object] | None:
        while True:
            try:
                return self._waiting.get(timeout=1.0)
            except queue.Empty:
                if self._over:
                    return None
