"""What each thread of a worker is doing, written by the worker itself when its agent asks.

The signal handler is C, and needs no interpreter: it writes also when a thread is in a call that
never returns. What a process was when it said that it would may have become another program, or
closed the file: so the kernel is asked first. Standard library only: workers import this.
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
from .channel import VARIABLE, Channel

FILE = "stacks.txt"
SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR1 + 2) - 3
"""One that nobody else is known to use; it is sent only to who has said that it handles it."""
LONGEST = 256 * 1024
HIGH = 200
"""From where on the number of the open file is, so that the program's own begin where they do."""

Dumper = tuple[int, int, int, str]
"""Its session, the process, and the number and the name of its file."""

_asking = threading.Lock()


# -- the worker's end -----------------------------------------------------------------------------


def begin_in_worker() -> None:
    """In a Python worker that the agent has started, before the user's code runs: from now on the
    agent can have this process's stacks, whether the code ever asks for its context or not."""
    path = os.environ.get(VARIABLE, "")
    with contextlib.suppress(OSError):  # of an agent that is gone, or of another version
        if path:
            channel = Channel(path)
            write_on_demand(channel, path)
            channel.close()


def write_on_demand(channel: Channel, path: str) -> None:
    """From now on this process adds its stacks to a file beside its channel when it gets the
    signal, unless it does so already."""
    if channel.dumps[0] == os.getpid():
        return
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        handle = _raised(os.open(beside(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        faulthandler.register(SIGNAL, file=handle, all_threads=True)
        channel.tell_dumps(os.getpid(), handle)


def beside(path: str) -> str:
    """The file of the stacks, of the channel's."""
    return f"{path}.stacks"


def _raised(handle: int) -> int:
    try:
        high = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except OSError:  # so many files are not allowed here
        return handle
    os.close(handle)
    return high


# -- the agent's end ------------------------------------------------------------------------------


def dump(workers: Mapping[int, Dumper], seconds: float = 1.0) -> dict[int, str]:
    """Ask processes for their stacks; what they wrote in the time.

    One after another of those who ask at once, so that each has one writing of them.
    """
    with _asking:
        return _dumped({local: w for local, w in workers.items() if _writes(*w)}, seconds)


def keep(folder: Path, text: str) -> None:
    """Add it to what people find among the worker's logs; a full disk loses it."""
    with contextlib.suppress(OSError), (folder / FILE).open("a", errors="replace") as file:
        file.write(text)


def _dumped(workers: Mapping[int, Dumper], seconds: float) -> dict[int, str]:
    before = {local: _size(path) for local, (*_, path) in workers.items()}
    for _, pid, _, _ in workers.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, SIGNAL)
    deadline, pause = monotonic() + seconds, threading.Event()
    found: dict[int, str] = {}
    while len(found) < len(workers) and monotonic() < deadline:
        pause.wait(0.02)
        sizes = {local: _size(path) for local, (*_, path) in workers.items()}
        for local, (*_, path) in workers.items():
            # Written in one go, in a moment: what has stopped growing is whole.
            if sizes[local] > before[local] and sizes[local] == _size(path):
                found[local] = _read(path, before[local])
    return found


def _writes(session: int, pid: int, handle: int, path: str) -> bool:
    """Whether the process handles the signal, which else would end it, and has the file open,
    in whose place it would else write into another."""
    try:
        # A number that has passed to another process is in another session.
        if os.getsid(pid) != session:
            return False
        status = Path(f"/proc/{pid}/status").read_text()
        opened = os.stat(f"/proc/{pid}/fd/{handle}")
        same = os.path.samestat(opened, os.stat(path))
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "")
    return same and bool(int(caught.partition(":")[2] or "0", 16) >> (SIGNAL - 1) & 1)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read(path: str, at: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(at)
            return file.read(LONGEST).decode(errors="replace")
    except OSError:
        return ""
