"""What the launcher's own process owes the system: to signals that come before there is an agent,
to the other processes of a container, and to the limit on open files.

Only the standard library is imported: a signal that comes while the rest is imported is kept.
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

EARLY = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)
"""Signals by which schedulers may ask a node to save and leave. Which of them do is known once the
command line has been read; by default each of them would end the process."""


class HeldSignals:
    """Keeps what comes, from `hold` or `with` on, and hands it to an agent, from `give` on.

    Signals ignored on entry stay ignored. Python lets only the main thread hear signals; in another
    thread nothing is held.
    """

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._numbers = tuple(numbers)
        self._before: dict[int, Any] = {}
        self._came: list[int] = []
        self._heed: Callable[[int], object] = self._came.append
        self.active = False

    def hold(self, numbers: Iterable[int]) -> None:
        """Keep these from now on, as well."""
        self.active = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            if number not in self._before and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)

    def keep(self, numbers: Iterable[int]) -> None:
        """These and no others; those of the others that came have the effect that they had."""
        wanted = frozenset(numbers)
        for number in self._before.keys() - wanted:
            signal.signal(number, self._before.pop(number))
        self.hold(wanted)
        for number in [number for number in self._came if number not in wanted]:
            self._came.remove(number)
            os.kill(os.getpid(), number)

    def give(self, heed: Callable[[int], object]) -> None:
        """Tell `heed` of what came, and from now on of what comes."""
        self._heed = heed
        for number in self._came:
            heed(number)

    def __enter__(self) -> HeldSignals:
        self.hold(self._numbers)
        return self

    def __exit__(self, *error: object) -> None:
        before, self._before, self.active = self._before, {}, False
        for number, handler in before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._heed(number)


HELD = HeldSignals()
"""Those of this process, where it is the command itself."""


def stand_in() -> int | None:
    """As process 1 of a container: reap orphans while a child launches, and return its exit code.

    None in the child that is to do the work, and in any other process. To be called before there
    is any thread. The launcher's work is done by a child so that no end of a worker is ever taken
    from the agent that waits for it.
    """
    if os.getpid() != 1:
        return None
    # Were its children's ends ignored, which is inherited, nobody could learn the exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    own = {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGTTIN, signal.SIGTTOU}
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    passed_on = {int(number) for number in signal.valid_signals() - own - ignored}
    # Nothing may arrive between the fork and the moment at which it can be passed on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child == 0:
        _lead_the_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    awaited = {*passed_on, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    code = None
    while code is None:
        number = signal.sigwait(awaited)
        if number == signal.SIGCHLD:
            code = _reap(child)
        else:
            # Ours and not yet reaped, so the number is nobody else's.
            os.kill(child, number)
    return code


def _lead_the_terminal() -> None:
    """A group of the child's own: what a terminal sends reaches it once, and not through us."""
    os.setpgid(0, 0)
    if not os.isatty(sys.stdin.fileno() if sys.stdin is not None else -1):
        return
    # A process in the background is stopped for this, unless it ignores that signal.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    signal.signal(signal.SIGTTOU, before)


def _reap(child: int) -> int | None:
    """Reap all that have ended; the child's exit code if it was among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended


def allow_descriptors(count: int | None) -> None:
    """Let this process open at least `count` files, as whoever serves a store has one for each
    client; None: as many as may be had. No more than that, as workers inherit the limit."""
    import logging
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == hard if count is None else soft == resource.RLIM_INFINITY or soft >= count
    if enough:
        return
    most = hard if count is None else count
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if count is not None and most < count:
        log = logging.getLogger("elasticlib.launch")
        log.warning("the store needs %d descriptors for all nodes, and may have %d", count, most)
