"""Threads that report the exception that ends them, and calls that run in the background.

The owner of a thread waits for its results, and would wait forever after an unreported exception.

`Latch` and `SingleCall` replace `threading.Event` and `threading.Lock` in calls that a signal
handler may interrupt with an exception, such as KeyboardInterrupt, at any line.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, TypeVar, cast

from .clock import monotonic
from .errors import format_error
from .open_files import open_files_hint

log = logging.getLogger("elasticlib")

Result = TypeVar("Result")
RECHECK_S = 0.1  # how late a second waiter of a Latch notices, if the first one was interrupted
IDLE_TIMEOUT_S = 0.1  # a BackgroundQueue ends its thread so long after the last call


def daemon_thread(
    target: Callable[[], object], name: str, on_error: Callable[[str], object]
) -> threading.Thread:
    """Return a daemon thread, which the caller starts.

    Each thread has an owner that hears of its end: nobody may wait for ever for a thread that has
    failed.

    Args:
        target: The function that the thread calls.
        name: The name of the thread.
        on_error: Receives the error message, in the thread, if `target` raises. The error is logged
            as well. `only_logged` is for threads for which nobody waits, or whose owner learns of
            the failure otherwise.
    """

    def run() -> None:
        try:
            target()
        except BaseException as error:
            # It is not raised again: a thread has no caller that could handle it.
            message = f"thread {name} failed: {format_error(error)}"
            # Any call may run out of files, and its message does not say what can be done.
            if getattr(error, "errno", None) == errno.EMFILE and (hint := open_files_hint()):
                message = f"{message}; {hint}"
            log.error("%s", message, exc_info=error)
            on_error(message)

    return threading.Thread(target=run, name=name, daemon=True)


def only_logged(_message: str) -> None:
    """Do nothing: the error of a thread is in the log."""


def reentrant_lock() -> AbstractContextManager[bool]:
    """Return a lock that the thread which has it may take again."""
    return threading.RLock()


def do_nothing() -> None:
    """Do nothing, where a function is needed."""


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        OSError: The thread cannot be started.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(
            f"{error}; threads count as processes (ulimit -u, pids.max of the cgroup): raise that "
            "limit"
        ) from error


def run_with_limit(action: Callable[[], Result], limit_s: float, name: str) -> Result:
    """Return the result of `action`, which a thread of its own executes.

    Where no thread can be started, the calling thread executes it, without a limit.

    Args:
        action: The function. If it takes longer than `limit_s`, it goes on in its thread, and its
            result is dropped.
        limit_s: How many seconds it may take.
        name: The name of the thread.

    Raises:
        TimeoutError: `action` has not ended within `limit_s` seconds.
        BaseException: The exception of `action`.
    """
    # The caller takes the exception out of the queue, so that it does not refer to itself through
    # the frames of its traceback, and frees their memory with its last reference.
    outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((action(), None))
        except BaseException as error:
            outcome.put((None, error))

    try:
        start_thread(daemon_thread(run, name, only_logged))
    except OSError:
        return action()
    try:
        result, error = outcome.get(timeout=limit_s)
    except Empty:
        raise TimeoutError(f"it has not ended within {limit_s:g} s") from None
    if error is None:
        return cast(Result, result)
    try:
        raise error
    finally:
        del error


class BackgroundQueue:
    """Executes calls one after the other in a thread, until one of them raises. Thread-safe.

    The thread exists only while there are calls, and for a moment after the last one.

    Args:
        name: The name of the thread.
        on_error: Receives the exception of a call, in the thread. No call is executed after that.
        max_pending: Limit on the calls that wait. Further calls are not accepted.
    """

    def __init__(
        self, name: str, on_error: Callable[[BaseException], object], *, max_pending: int = 10_000
    ) -> None:
        self._name = name
        self._on_error = on_error
        self._max_pending = max_pending
        self._condition = threading.Condition()  # guards the fields below; notified on changes
        self._pending: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None  # None while there is nothing to do
        self._is_closed = False  # closed, or a call has raised

    def call(self, work: Callable[[], object]) -> bool:
        """Let the thread execute `work`, and return at once.

        Returns:
            False if `work` is not accepted: the queue is closed or full, or its thread cannot be
            started.
        """
        with self._condition:
            if self._is_closed or len(self._pending) >= self._max_pending:
                return False
            if self._thread is None:
                thread = daemon_thread(self._run, self._name, only_logged)
                try:
                    start_thread(thread)
                except OSError:
                    return False
                self._thread = thread
            self._pending.append(work)
            self._condition.notify_all()
        return True

    def wait_before_retry(self, delay: float) -> bool:
        """Wait `delay` seconds. A call that the queue executes may use this before it retries.

        Returns:
            True after `delay` seconds. False, possibly earlier, if the queue is closed or full, so
            that the call should not retry.
        """
        with self._condition:
            return not self._condition.wait_for(self._must_give_up, delay)

    def close(self, timeout: float) -> bool:
        """Accept no more calls. Return whether the accepted ones end within `timeout` seconds."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            return self._condition.wait_for(lambda: self._thread is None, timeout)

    def _must_give_up(self) -> bool:
        return self._is_closed or len(self._pending) >= self._max_pending

    def _run(self) -> None:
        while (work := self._take_next_call()) is not None:
            try:
                work()
            except BaseException as error:
                # First the report: a caller whose call is refused can then know why.
                self._on_error(error)
                with self._condition:
                    self._is_closed = True
                    self._pending.clear()

    def _take_next_call(self) -> Callable[[], object] | None:
        with self._condition:
            self._condition.wait_for(lambda: self._pending or self._is_closed, IDLE_TIMEOUT_S)
            if self._pending:
                return self._pending.popleft()
            self._thread = None
            self._condition.notify_all()
            return None


class Latch:
    """A flag that is set once and that threads can wait for.

    Unlike `threading.Event`, it stays usable when an exception interrupts `set` or `wait`: the flag
    counts, and the lock only wakes waiters early.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()  # locked until the flag is set
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


class CallRejectedError(RuntimeError):
    """Another call is still running."""


class _Claim:
    """The claim of one call of `SingleCall.run`."""

    def __init__(self) -> None:
        self.process, self.thread = os.getpid(), threading.get_ident()
        self.number: int | None = None  # None: it is not known that the claim was successful
        self.is_over = False


class SingleCall:
    """Runs one call at a time, and rejects calls from signal handlers and from other threads.

    There is no lock that an exception of a signal handler could leave locked. A call claims the
    first free number in one atomic operation, and frees it in another one. If an exception comes
    between the claim and the note that it was successful, the number is given up: Python calls
    signal handlers after the call of a function and at a jump backward, and there is none between
    the other steps. A debugger or a profiler can raise one elsewhere; the thread itself then finds
    that its stack does not execute the call. The stacks of other threads are not looked at: Python
    may end the process if `f_locals` of a frame is read while the frame is executed, and
    `sys._current_frames` can block all threads if garbage is collected in it (CPython 3.11).
    """

    def __init__(self) -> None:
        self._claims: dict[int, _Claim | None] = {}  # None: the number is given up

    def run(self, func: Callable[[], Result]) -> Result:
        """Call `func`, and return its result.

        Raises:
            CallRejectedError: another call is running, in this thread or another one.
        """
        claim = _Claim()  # `_is_executing` looks for this variable.
        try:
            self._claim(claim)
            return func()
        finally:
            if claim.number is None:
                claim.is_over = True
            else:
                self._claims.pop(claim.number, None)

    def _claim(self, claim: _Claim) -> None:
        number = 0
        while (holder := self._claims.setdefault(number, claim)) is not claim:
            if holder is None:
                number += 1
            elif _is_running(holder):
                raise CallRejectedError("another call is running")
            elif self._claims.get(number) is holder:  # otherwise the call has just ended
                self._claims[number] = None
        claim.number = number

    @property
    def is_running(self) -> bool:
        """True while a call runs."""
        return bool(self._running_claims())

    @property
    def is_interrupted(self) -> bool:
        """True if a call runs in the calling thread, which is then in a signal handler."""
        return any(claim.thread == threading.get_ident() for claim in self._running_claims())

    def _running_claims(self) -> list[_Claim]:
        return [claim for claim in [*self._claims.values()] if claim and _is_running(claim)]


def _is_running(claim: _Claim) -> bool:
    """Return whether a call has not ended. A fork has one thread of its parent only."""
    if claim.thread == threading.get_ident():
        return _is_executing(claim)
    return not claim.is_over and claim.process == os.getpid()


def _is_executing(claim: _Claim) -> bool:
    """Return whether `SingleCall.run` executes the call of a claim in the calling thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is SingleCall.run.__code__ and frame.f_locals.get("claim") is claim:
            return True
        frame = frame.f_back
    return False


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
        """Initialize the state if this process has not: in a new object, and once after a fork.

        The constructor and each method that uses the state call this first.
        """
        if self._pid != os.getpid():
            with _LOCKS.setdefault(os.getpid(), threading.RLock()):
                if self._pid != os.getpid():
                    self._init_process_state()
                    self._pid = os.getpid()


# One lock per process: during the fork, a thread of the parent may own the lock of the parent.
_LOCKS: dict[int, threading.RLock] = {}
