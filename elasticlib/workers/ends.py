"""The end of a worker's process: noticed once it is there, and its exit code, if that can be had.

What has not been seen to end is never taken for ended: whoever is told ends all that is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from ..errors import WorkerStartError
from ..threads import helper
from . import session
from .warm import Warm


def watch(pid: int, local_rank: int, ended: Callable[[int], None]) -> None:
    """Have a thread call `ended(local_rank)` when it has; RuntimeError where none can start."""

    def wait() -> None:
        session.ends_within(pid, None)
        ended(local_rank)

    # One that nobody can wait for any more is taken for one that ended: whoever is told ends it.
    helper(wait, f"worker-{local_rank}-end", lambda _: ended(local_rank)).start()


def reap(popen: subprocess.Popen[bytes] | Warm) -> int | None:
    """The returncode of a process that has ended; None where it went to somebody else."""
    if isinstance(popen, Warm):
        return popen.wait()
    try:
        # Popen takes one that somebody else has reaped for one that succeeded.
        seen = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        seen = None
    popen.wait()
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def heed_children() -> None:
    """Where SIGCHLD is ignored, which is inherited, the kernel tells nobody how a child ended."""
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        return
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except ValueError as error:
        raise WorkerStartError(
            "SIGCHLD is ignored in this process, so no worker's end can be learnt, and only the "
            "main thread can change that: set it to SIG_DFL there"
        ) from error
