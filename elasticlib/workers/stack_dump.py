"""Python stacks of workers, written by `faulthandler` in the worker when the agent sends a signal.

`faulthandler` handles the signal in C, so it also answers while the main thread is in a call
outside Python, with or without the GIL. It shows the main thread alone: reading threads that run
crashes Python 3.12 and 3.13. A process that has said that it answers may have become another
program since, or have closed the file, so the agent asks the kernel before it sends the signal.
This module uses the standard library only, because workers import it.
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
from ..foreign import opened
from .worker_channel import CHANNEL_ENV, WorkerChannel

STACK_FILE = "stacks.txt"
DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR1 + 2) - 3
"""Not known to be used by anything else; sent only to processes that handle it."""
QUIET_INTERVAL_S = 0.1
"""faulthandler writes no end mark: an answer is whole once nothing was added for this long."""
POLL_INTERVAL_S = 0.005
MAX_STACK_BYTES = 256 * 1024
MIN_DUMP_FD = 200
"""From where on the number of the open file is, so that the program's own begin where they do."""
TRUNCATION_MARK = "(cut short)\n"

MEMFD_NAME = "elasticlib-stacks"

StackDumper = tuple[int, int, int]
"""Its session, the process, and the number of its file."""

_asking = threading.Lock()
_registered = False
"""Also true in the children that this process forks: the agent asks this process alone."""


# -- the worker's end -----------------------------------------------------------------------------


def install_dump_handler() -> None:
    """In a Python worker that the agent has started, before the user's code runs: from now on the
    agent can have this process's stacks, whether the code ever asks for its context or not."""
    path = os.environ.get(CHANNEL_ENV, "")
    with contextlib.suppress(OSError):  # of an agent that is gone
        if path:
            channel = WorkerChannel(path)
            register_dump_handler(channel)
            channel.close()


def register_dump_handler(channel: WorkerChannel) -> None:
    """From now on this process adds its stacks to a file of its own, in memory, when it gets the
    signal, unless it does so already, or its program handles the signal."""
    global _registered
    if _registered or signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        handle = _raised(os.memfd_create(MEMFD_NAME))
        fcntl.fcntl(handle, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(DUMP_SIGNAL, file=handle, all_threads=False)
        channel.set_stack_dumper(os.getpid(), handle)
        _registered = True


def _raised(handle: int) -> int:
    try:
        high = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, MIN_DUMP_FD)
    except OSError:  # so many files are not allowed here
        return handle
    os.close(handle)
    return high


# -- the agent's end ------------------------------------------------------------------------------


def collect_stacks(workers: Mapping[int, StackDumper], seconds: float = 1.0) -> dict[int, str]:
    """Ask processes for their stacks; return what they wrote, or why they cannot answer.

    Calls of several threads run one after another, because each process has one file.
    """
    with _asking, contextlib.ExitStack() as files:
        found: dict[int, str] = {}
        asked: dict[int, _Answer] = {}
        for local, (session, pid, handle) in workers.items():
            refused = _why_not(session, pid)
            file = None if refused else _file_of(pid, handle)
            if file is None:
                refused = refused or (
                    f"process {pid} has closed file {handle}, which elasticlib opened for its "
                    "stacks"
                )
                found[local] = f"It cannot show its stacks: {refused}.\n"
                continue
            files.callback(os.close, file)
            asked[local] = _Answer(file)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, DUMP_SIGNAL)
        return {**found, **_answers(asked, seconds)}


def append_to_stack_file(folder: Path, text: str) -> None:
    """Add it to what people find among the worker's logs; a full disk loses it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with contextlib.suppress(OSError), opened(folder / STACK_FILE, flags) as handle:
        os.write(handle, text.encode(errors="replace"))


class _Answer:
    """What a process adds to its file after it was asked."""

    def __init__(self, file: int) -> None:
        self._file = file
        with contextlib.suppress(OSError):  # sealed by the program
            os.ftruncate(file, 0)
        self._size = 0
        self._grew_at = monotonic()

    @property
    def is_whole(self) -> bool:
        size, now = os.fstat(self._file).st_size, monotonic()
        if size != self._size:
            self._size, self._grew_at = size, now
        return size > 0 and now >= self._grew_at + QUIET_INTERVAL_S

    @property
    def text(self) -> str:
        """What there is so far; empty if it has written nothing."""
        text = os.pread(self._file, MAX_STACK_BYTES, 0).decode(errors="replace")
        return text if not text or self.is_whole else f"{text}\n{TRUNCATION_MARK}"


def _answers(asked: Mapping[int, _Answer], seconds: float) -> dict[int, str]:
    deadline, pause = monotonic() + seconds, threading.Event()
    while not all(answer.is_whole for answer in asked.values()) and monotonic() < deadline:
        pause.wait(POLL_INTERVAL_S)
    texts = {local: answer.text for local, answer in asked.items()}
    return {local: text for local, text in texts.items() if text}


def _why_not(session: int, pid: int) -> str:
    """Return why a process must not get the signal, which would end it; empty if it handles it."""
    try:
        # A number that has passed to another process is in another session.
        gone = os.getsid(pid) != session
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        gone, status = True, ""
    if gone:
        return f"the process {pid} that would have answered is gone"
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "")
    mask = int(caught.partition(":")[2] or "0", 16)
    if mask >> (DUMP_SIGNAL - 1) & 1:
        return ""
    return f"process {pid} has become another program, or no longer handles signal {DUMP_SIGNAL}"


def _file_of(pid: int, handle: int) -> int | None:
    """What the process writes its stacks to, opened here as well; None where it has it open no
    more, and would write into another in its place."""
    path = f"/proc/{pid}/fd/{handle}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{MEMFD_NAME}"):
            return None
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
