"""Python stacks of workers, which `faulthandler` writes in the worker on a signal of the agent.

`faulthandler` handles the signal in C, so it also works while the main thread is in a call outside
Python, with or without the GIL. It writes the stack of the main thread only, because reading
threads that run crashes Python 3.12 and 3.13. The worker may have started another program, or may
have closed the file, so the agent checks both in /proc before it sends the signal. This module uses
the standard library only, because workers import it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from ..clock import monotonic
from ..untrusted import open_regular_file
from .worker_channel import CHANNEL_ENV, WorkerChannel

STACK_FILE = "stacks.txt"  # in the worker's log directory
# This signal is used by no library that we know. It is sent only to processes that handle it.
DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR1 + 2) - 3
QUIET_INTERVAL_S = 0.1  # a dump has no end mark: it is complete once it has not grown for this long
POLL_INTERVAL_S = 0.005
MAX_STACK_BYTES = 256 * 1024
MIN_DUMP_FD = 200  # a high number, so that the program's own files get the usual numbers
TRUNCATION_MARK = "(cut short)\n"
MEMFD_NAME = "elasticlib-stacks"

StackDumper = tuple[int, int, int]
"""Session id, process id and the number of the file that the process writes its stacks to."""

_collecting = threading.Lock()  # each process has one file, so collections run one by one
_is_registered = False  # also true in a forked child, which the agent sends no signal


# -- the worker's end -----------------------------------------------------------------------------


def install_dump_handler() -> None:
    """Let the agent collect the stacks of this worker, even if its script never calls `context`."""
    path = os.environ.get(CHANNEL_ENV, "")
    with contextlib.suppress(OSError):  # the agent has exited
        if path:
            channel = WorkerChannel(path)
            register_dump_handler(channel)
            channel.close()


def register_dump_handler(channel: WorkerChannel) -> None:
    """Register a handler of DUMP_SIGNAL that writes the main thread's stack to a file in memory.

    Nothing happens if the handler is registered already, cannot be registered, or if the program
    handles or ignores the signal itself.
    """
    global _is_registered
    if _is_registered or signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        fd = _move_to_high_number(os.memfd_create(MEMFD_NAME))
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=False)
        channel.set_stack_dumper(os.getpid(), fd)
        _is_registered = True


def _move_to_high_number(fd: int) -> int:
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, MIN_DUMP_FD)
    except OSError:  # the limit of open files is lower
        return fd
    os.close(fd)
    return high


# -- the agent's end ------------------------------------------------------------------------------


def collect_stacks(workers: Mapping[int, StackDumper], timeout: float = 1.0) -> dict[int, str]:
    """Return the stacks of workers, or why a worker cannot write them, by local rank.

    Blocks up to `timeout` seconds. A worker that writes nothing by then is left out. Thread-safe.
    """
    with _collecting, contextlib.ExitStack() as files:
        refusals: dict[int, str] = {}
        dumps: dict[int, _PendingDump] = {}
        for local_rank, (session, pid, fd) in workers.items():
            refusal = _signal_refusal(session, pid)
            file = None if refusal else _open_dump(pid, fd)
            if file is None:
                refusal = refusal or (
                    f"process {pid} has closed file {fd}, which elasticlib opened for its stacks"
                )
                refusals[local_rank] = f"It cannot show its stacks: {refusal}.\n"
                continue
            files.callback(os.close, file)
            dumps[local_rank] = _PendingDump(file)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, DUMP_SIGNAL)
        return {**refusals, **_wait_for_dumps(dumps, timeout)}


def append_to_stack_file(log_dir: Path, text: str) -> None:
    """Append stacks to the file in the worker's log directory. An error of the file is ignored."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with contextlib.suppress(OSError), open_regular_file(log_dir / STACK_FILE, flags) as fd:
        os.write(fd, text.encode(errors="replace"))


class _PendingDump:
    """The stacks that a process writes after the signal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        with contextlib.suppress(OSError):  # the program may have sealed the file
            os.ftruncate(fd, 0)
        self._size = 0  # bytes at the last check
        self._grew_at = monotonic()  # when a check found a new size

    @property
    def is_complete(self) -> bool:
        size, now = os.fstat(self._fd).st_size, monotonic()
        if size != self._size:
            self._size, self._grew_at = size, now
        return size > 0 and now >= self._grew_at + QUIET_INTERVAL_S

    @property
    def text(self) -> str:
        text = os.pread(self._fd, MAX_STACK_BYTES, 0).decode(errors="replace")
        return text if not text or self.is_complete else f"{text}\n{TRUNCATION_MARK}"


def _wait_for_dumps(dumps: Mapping[int, _PendingDump], timeout: float) -> dict[int, str]:
    deadline, never = monotonic() + timeout, threading.Event()
    while not all(dump.is_complete for dump in dumps.values()) and monotonic() < deadline:
        never.wait(POLL_INTERVAL_S)
    texts = {local_rank: dump.text for local_rank, dump in dumps.items()}
    return {local_rank: text for local_rank, text in texts.items() if text}


def _signal_refusal(session: int, pid: int) -> str:
    """Return why a process must not get DUMP_SIGNAL, or '' if the process handles the signal.

    The signal kills a process that does not handle it.
    """
    try:
        # A process that has the same number by chance is in another session.
        is_gone = os.getsid(pid) != session
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        is_gone, status = True, ""
    if is_gone:
        return f"process {pid}, which was to write them, has exited"
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "")
    mask = int(caught.partition(":")[2] or "0", 16)
    if mask >> (DUMP_SIGNAL - 1) & 1:
        return ""
    return f"process {pid} has become another program, or no longer handles signal {DUMP_SIGNAL}"


def _open_dump(pid: int, fd: int) -> int | None:
    """Open the file of a process's stacks, or return None if the process has closed it."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{MEMFD_NAME}"):
            return None
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
