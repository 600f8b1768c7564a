"""First steps of each process that an agent starts, before it runs any code of the user.

Worker processes and fork servers take these steps, whether they are forked or executed. The kernel
then kills the process when its parent exits; the process has the working directory and the
processors that its job names, and is entered in the ledger of the agent. A job is the description
of one process, in a file in memory, with these fields:

    slot         the slot of the process in the ledger
    cpu_set      the processors that the process may use
    command      the program and its arguments, if the process is to execute a program
    environment  all variables of the program
    ignored      the signals that the program ignores
    keeps_ledger true for a program that starts further processes of the agent
    program      the arguments of `run_program`, if a fork server can fork the process instead
    server_environment   the variables that the agent gave to that fork server

This module uses only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from . import ledger as ledgers

PR_SET_PDEATHSIG = 1
EXEC_FAILED = 127  # the shell's exit code for a program that cannot be executed
# The interpreter changes these in each process; a program is to have the defaults.
_SET_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)

Job = dict[str, Any]


def write_job(job: Mapping[str, Any]) -> int:
    """Return the descriptor of a file in memory that contains a job. Raises OSError."""
    descriptor = os.memfd_create("elasticlib-job")
    try:
        with open(descriptor, "w", closefd=False) as file:
            json.dump(job, file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def set_parent_death_signal(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread exits that has started it.

    If the parent has exited already, this process exits with code 1, unless the signal is another
    one than SIGKILL.

    Args:
        parent: the pid of the parent.
        number: the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    # The parent may have exited before this call.
    if number == signal.SIGKILL and os.getppid() != parent:
        os._exit(1)


def begin(parent: int, ledger: int, job: int, directory: int) -> Job:
    """Take the first steps of a process, which leads its session already; return its job.

    Args:
        parent: the pid of the process that has started this one.
        ledger: the descriptor of the ledger.
        job: the descriptor of the file with the job.
        directory: the descriptor of the working directory, which may have been removed.

    Raises:
        OSError: the job cannot be read or applied.
        ValueError: the file contains no job.
    """
    set_parent_death_signal(parent)
    os.fchdir(directory)
    # The position of the file is shared with other processes, so it is not used.
    found: Job = json.loads(os.pread(job, os.fstat(job).st_size, 0))
    if set(found["cpu_set"]) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, found["cpu_set"])
    ledgers.enter(ledger, found["slot"])
    return found


def execute(parent: int, ledger: int, job: int, directory: int) -> NoReturn:
    """Become the program of a job; the arguments are those of `begin`."""
    program = ""
    try:
        found = begin(parent, ledger, job, directory)
        for number in (*_SET_BY_PYTHON, *found["ignored"]):
            is_ignored = number in found["ignored"]
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        os.set_inheritable(ledger, found.get("keeps_ledger", False))
        for descriptor in (job, directory):
            os.set_inheritable(descriptor, False)
        program, *_ = command = found["command"]
        # The agent's thread has blocked all signals.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(program, command, found["environment"])
    except OSError as error:
        os.write(2, f"elasticlib: cannot run {program!r}: {error.strerror}\n".encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(EXEC_FAILED)
