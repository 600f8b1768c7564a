"""What process 1 of a container owes the others: it reaps whoever lost its parent.

The launcher's work is done by a child, so that no end of a worker is ever taken from the agent
that waits for it. Signals are passed on to that child, and its exit code is ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

FIRST = 1


def stand_in() -> int | None:
    """As process 1: become the one that reaps, and return the exit code in the end.

    None in the child that is to do the work, and in any other process. To be called before there
    is any thread.
    """
    if os.getpid() != FIRST:
        return None
    # Were its children's ends ignored, which is inherited, nobody could learn the exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Nothing may arrive between the fork and the moment at which it can be passed on.
    passed_on = _passed_on()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child == 0:
        _lead_the_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    return _serve(child, passed_on)


def _passed_on() -> set[int]:
    """All but those that were ignored on entry, and those that are nobody else's affair."""
    own = {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGTTIN, signal.SIGTTOU}
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    return {int(number) for number in signal.valid_signals() - own - ignored}


def _lead_the_terminal() -> None:
    """A group of the child's own: what a terminal sends reaches it once, and not through us."""
    os.setpgid(0, 0)
    if not os.isatty(sys.stdin.fileno() if sys.stdin is not None else -1):
        return
    # Whoever is not in the foreground is stopped for this, unless it ignores that.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    signal.signal(signal.SIGTTOU, before)


def _serve(child: int, passed_on: set[int]) -> int:
    """Wait for signals and for ends, until the child's own."""
    awaited = {*passed_on, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            # Ours and not yet reaped, so the number is nobody else's.
            os.kill(child, number)
            continue
        code = _reap(child)
        if code is not None:
            return code


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
