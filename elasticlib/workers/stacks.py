"""What each thread of a worker is doing, written by the worker itself when its agent asks.

The signal handler is C, and needs no interpreter: it writes also when a thread is in a call that
never returns. Standard library only: workers import this.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from ..clock import monotonic

FILE = "stacks.txt"
SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR1 + 2) - 3
"""One that nobody else is known to use; it is sent only to who has said that it handles it."""
LONGEST = 256 * 1024


def write_on_demand(folder: Path) -> bool:
    """From now on this process adds its stacks to a file there when it gets the signal."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        handle = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(SIGNAL, file=handle, all_threads=True)
        return True
    return False


def dump(workers: Mapping[int, tuple[int, Path]], seconds: float = 1.0) -> dict[int, str]:
    """Ask processes for their stacks, each with its folder; what they wrote in the time."""
    before = {local: _size(folder) for local, (_, folder) in workers.items()}
    for pid, _ in workers.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, SIGNAL)
    deadline, pause = monotonic() + seconds, threading.Event()
    found: dict[int, str] = {}
    while len(found) < len(workers) and monotonic() < deadline:
        pause.wait(0.02)
        sizes = {local: _size(folder) for local, (_, folder) in workers.items()}
        for local, (_, folder) in workers.items():
            # Written in one go, in a moment: what has stopped growing is whole.
            if sizes[local] > before[local] and sizes[local] == _size(folder):
                found[local] = _read(folder, before[local])
    return found


def _size(folder: Path) -> int:
    try:
        return (folder / FILE).stat().st_size
    except OSError:
        return 0


def _read(folder: Path, at: int) -> str:
    try:
        with (folder / FILE).open("rb") as file:
            file.seek(at)
            return file.read(LONGEST).decode(errors="replace")
    except OSError:
        return ""
