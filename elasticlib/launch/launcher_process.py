"""Duties of the launcher's process: early signals, orphans in a container, the open file limit.

Only the standard library is imported, so that signals are captured before any longer import.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

# Signals by which users and schedulers may ask a node to stop, or to save and leave. What each of
# them means is known after the command line has been read.
EARLY_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


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
    # No signal may arrive before it can be forwarded to the child. Python runs the handlers of
    # those that have arrived now, so that the child's copy of the inbox has them.
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
