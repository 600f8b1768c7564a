"""The first thing that runs in a worker's process: die with the agent, then become the program.

Run by its path with `-I -S`, it imports nothing of elasticlib. The kernel's parent-death signal
survives the exec, so the program needs to know nothing of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have ended before the kernel was asked.
    if os.getppid() != parent:
        os._exit(1)


def undo_python(lc_ctype: str) -> None:
    """Take back what Python did to this process for itself, which an exec would hand on."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if not lc_ctype:
        os.environ.pop("LC_CTYPE", None)


def ignore(numbers: str) -> None:
    """Signals that are meant for the agent alone; they were blocked until now."""
    signals = [int(number) for number in numbers.split(",") if number]
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def main(argv: list[str]) -> None:
    """`enter.py AGENT_PID LC_CTYPE SIGNALS PROGRAM ARGS...`, an empty LC_CTYPE for none."""
    die_with(int(argv[1]))
    program = argv[4:]
    undo_python(argv[2])
    ignore(argv[3])
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"elasticlib: cannot run {program[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv)
