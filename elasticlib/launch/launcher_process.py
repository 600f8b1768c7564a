"""Duties of the launcher's process: early signals, orphans in a container, the open file limit.

Only the standard library is imported, so that a signal that arrives during later imports is kept.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

# Signals by which schedulers may ask a node to save and leave. Which of them do so is known after
# the command line has been parsed. By default each of them would end the process.
SCHEDULER_SIGNALS = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


class SignalBuffer:
    """Buffers signals, and forwards them once `forward_to` has named a receiver.

    Signals that were ignored on entry stay ignored. Python delivers signals only to the main
    thread; in another thread nothing is buffered.
    """

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._numbers = tuple(numbers)
        self._previous_handlers: dict[int, Any] = {}
        self._pending: list[int] = []
        self._receiver: Callable[[int], object] = self._pending.append
        self.is_active = False

    def capture(self, numbers: Iterable[int]) -> None:
        """Buffer these signals from now on, in addition to those of earlier calls."""
        self.is_active = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if number not in self._previous_handlers and not is_ignored:
                self._previous_handlers[number] = signal.signal(number, self._handle)

    def restrict_to(self, numbers: Iterable[int]) -> None:
        """Buffer only these signals, and give all others their previous handlers.

        Signals of the others that are buffered already are sent to this process again.
        """
        wanted = frozenset(numbers)
        for number in self._previous_handlers.keys() - wanted:
            signal.signal(number, self._previous_handlers.pop(number))
        self.capture(wanted)
        for number in [number for number in self._pending if number not in wanted]:
            self._pending.remove(number)
            os.kill(os.getpid(), number)

    def forward_to(self, receiver: Callable[[int], object]) -> None:
        """Call `receiver` with each buffered signal now, and with each later one as it arrives."""
        self._receiver = receiver
        for number in self._pending:
            receiver(number)

    def __enter__(self) -> SignalBuffer:
        self.capture(self._numbers)
        return self

    def __exit__(self, *error: object) -> None:
        handlers, self._previous_handlers, self.is_active = self._previous_handlers, {}, False
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._receiver(number)


DEFERRED_SIGNALS = SignalBuffer()  # the buffer of the command `elasticrun`


def run_as_init() -> int | None:
    """Reap orphans in process 1 of a container, while a child does the launcher's work.

    The work is done in a child so that this process never reaps a worker for which the agent waits.
    This function must be called before any thread is started.

    Returns:
        In process 1, the exit code of the child. In the child and in any other process, None.
    """
    if os.getpid() != 1:
        return None
    # If SIGCHLD were ignored, which is inherited, the kernel would discard the exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    not_forwarded = {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGTTIN, signal.SIGTTOU}
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    forwarded = {int(number) for number in signal.valid_signals() - not_forwarded - ignored}
    # No signal may arrive before it can be forwarded to the child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    child = os.fork()
    if child == 0:
        _set_foreground_process_group()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    awaited = {*forwarded, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    code = None
    while code is None:
        number = signal.sigwait(awaited)
        if number == signal.SIGCHLD:
            code = _reap_exited_children(child)
        else:
            # The child has not been reaped, so no other process has its pid.
            os.kill(child, number)
    return code


def _set_foreground_process_group() -> None:
    """Put this process in its own foreground group, so that the terminal signals only it."""
    os.setpgid(0, 0)
    if not os.isatty(sys.stdin.fileno() if sys.stdin is not None else -1):
        return
    # The kernel stops a background process that does this, unless it ignores SIGTTOU.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    signal.signal(signal.SIGTTOU, before)


def _reap_exited_children(child: int) -> int | None:
    """Reap all exited child processes.

    Returns:
        The exit code of `child`, or None if it was not among them.
    """
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            returncode = os.waitstatus_to_exitcode(status)
            code = returncode if returncode >= 0 else 128 - returncode


def raise_open_file_limit(count: int | None) -> None:
    """Raise the limit of open files for a store server, which needs one per client.

    Args:
        count: the number of files that is needed, or None for the hard limit. The limit is not
            raised beyond `count`, because workers inherit it.
    """
    import logging
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == hard if count is None else soft == resource.RLIM_INFINITY or soft >= count
    if is_enough:
        return
    limit = hard if count is None else count
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if count is not None and limit < count:
        log = logging.getLogger("elasticlib.launch")
        log.warning(
            "the store needs %d open files for all nodes, but the limit is %d: raise ulimit -n",
            *(count, limit),
        )
