"""Threads whose end by an exception is told, and calls made aside for who must not wait for them.

Who starts a thread depends on it: one that ended unheard would leave its owner to wait for ever.

`Latch` and `ExclusiveCall` replace `threading.Event` and `threading.Lock` in calls that a signal
handler may interrupt with an exception, such as KeyboardInterrupt, at any line.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import logging
import os
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from .clock import monotonic

log = logging.getLogger("elasticlib")

Result = TypeVar("Result")
RECHECK_S = 0.1  # how late a second waiter of a Latch notices, if the first one was interrupted


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


class Latch:
    """A flag that is set once and that threads can wait for.

    Unlike `threading.Event`, it stays usable when an exception interrupts `set` or `wait`: the flag
    counts, and the lock only wakes waiters early.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()  # held until the flag is set
        self._lock.acquire()

    def set(self) -> None:
        """Set the flag. Setting it again is harmless."""
        self.is_set = True
        self._release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, or for `timeout` seconds. Return whether it is set."""
        deadline = None if timeout is None else monotonic() + timeout
        while not self.is_set:
            left_s = RECHECK_S if deadline is None else deadline - monotonic()
            if left_s <= 0:
                break
            # If a waiter is interrupted while it holds the lock, the others see the flag.
            if self._lock.acquire(timeout=min(left_s, RECHECK_S)):
                self._release()
        return self.is_set

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # It was released before.
            self._lock.release()


_Call = tuple[Generator[Any, None, None], int]


class CallRejected(RuntimeError):
    """Another call is still running."""


class ExclusiveCall:
    """Runs one call at a time, and rejects calls from signal handlers and from other threads.

    An exception of a signal handler can interrupt the code that releases a lock, and the lock is
    then held for ever. Here nothing has to be released: the call runs in a generator, which knows
    whether it is executing, and is not once an exception has left it.
    """

    def __init__(self) -> None:
        # Each with the thread that runs it. The first one that is executing is admitted.
        self._calls: list[_Call] = []

    def run(self, act: Callable[[], Result]) -> Result:
        """Return what `act` returns. Raises CallRejected if another call is running."""
        own: list[_Call] = []
        generator = self._run(act, own)
        own.append((generator, threading.get_ident()))
        try:
            return next(generator)
        finally:
            with contextlib.suppress(ValueError):
                self._calls.remove(own[0])
            own.clear()  # Else the generator, and with it what `act` holds, would hold itself.

    def _run(self, act: Callable[[], Result], own: list[_Call]) -> Generator[Result, None, None]:
        self._calls.append(own[0])  # The generator is executing by now.
        if not self._is_admitted(own[0]):
            raise CallRejected("another call is running")
        yield act()

    def _is_admitted(self, own: _Call) -> bool:
        return next(call for call in list(self._calls) if _is_executing(call[0])) is own

    @property
    def is_running(self) -> bool:
        """Whether a call runs."""
        return any(_is_executing(generator) for generator, _ in list(self._calls))

    @property
    def is_interrupted(self) -> bool:
        """Whether a call runs in the calling thread, which is then in a signal handler."""
        here = threading.get_ident()
        return any(_is_executing(one) and thread == here for one, thread in list(self._calls))


def _is_executing(generator: Generator[Any, None, None]) -> bool:
    return inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING


class ForkAware(abc.ABC):
    """Base class of objects whose copy in a forked child is initialized again.

    The copy neither uses the connections of the parent, nor waits for a lock that a thread of the
    parent owned during the fork.
    """

    _pid = 0  # the process that the state belongs to

    @abc.abstractmethod
    def _init_process_state(self) -> None:
        """Create the state that belongs to one process: connections, locks and leases."""

    def _check_process(self) -> None:
        """Initialize the state of this process once.

        The constructor and each method that uses the state call this first.
        """
        if self._pid != os.getpid():
            with _LOCKS.setdefault(os.getpid(), threading.RLock()):
                if self._pid != os.getpid():
                    self._init_process_state()
                    self._pid = os.getpid()


# One lock per process: during the fork, a thread of the parent may own the lock of the parent.
_LOCKS: dict[int, threading.RLock] = {}
