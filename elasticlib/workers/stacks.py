"""What each thread of a worker is doing, written by the worker itself when its agent asks.

Asked twice: first by a signal that the interpreter handles between two steps of the main thread,
so that no other thread moves while it is looked at. A main thread that is in a call of C's does
not get there; it alone, which is then at rest, is shown by C's handler of a second signal. (C's
could show all threads, but reads what they are changing: that can end the process.) What a process
was when it said that it would may have become another program, or closed the file: so the kernel
is asked first. Standard library only: workers import this.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from ..clock import monotonic
from ..foreign import opened
from .channel import VARIABLE, Channel

FILE = "stacks.txt"
SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR1 + 2) - 3
"""Not known to be used by anything else; sent only to processes that handle it."""
SECOND = SIGNAL - 1
"""For a process that does not answer the first."""
PATIENCE = 0.5
"""Of the time for an answer: after that, the second."""
QUIET_SECONDS = 0.1
"""What C's handler wrote has no end mark; it is through once it has written nothing for so long."""
LOOK_SECONDS = 0.005
LONGEST = 256 * 1024
DEEPEST = 100
HIGH = 200
"""From where on the number of the open file is, so that the program's own begin where they do."""
BEGIN, END = "-- all threads\n", "-- end\n"
CUT = "(cut short)\n"
ALONE = (
    "Main thread only: it is in a call outside Python, or the program handles signal "
    f"{SIGNAL} itself, so the other threads cannot be shown:\n"
)

NAME = "elasticlib-stacks"

Dumper = tuple[int, int, int]
"""Its session, the process, and the number of its file."""

_asking = threading.Lock()


# -- the worker's end -----------------------------------------------------------------------------


def begin_in_worker() -> None:
    """In a Python worker that the agent has started, before the user's code runs: from now on the
    agent can have this process's stacks, whether the code ever asks for its context or not."""
    path = os.environ.get(VARIABLE, "")
    with contextlib.suppress(OSError):  # of an agent that is gone, or of another version
        if path:
            channel = Channel(path)
            write_on_demand(channel)
            channel.close()


def write_on_demand(channel: Channel) -> None:
    """From now on this process adds its stacks to a file of its own, in memory, when it gets the
    signals, unless it does so already, or does something else."""
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        handle = _raised(os.memfd_create(NAME))
        fcntl.fcntl(handle, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(SECOND, file=handle, all_threads=False)
        with contextlib.suppress(ValueError):  # not in the main thread: then the second alone
            signal.signal(SIGNAL, _writer(handle))
        channel.tell_dumps(os.getpid(), handle)


def _raised(handle: int) -> int:
    try:
        high = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except OSError:  # so many files are not allowed here
        return handle
    os.close(handle)
    return high


def _writer(handle: int) -> Callable[[int, FrameType | None], None]:
    """What runs in the midst of the user's code: it takes no lock, and raises nothing."""

    def write(_number: int, interrupted: FrameType | None) -> None:
        with contextlib.suppress(Exception):
            text = "\n".join(_shown_threads(interrupted)).encode(errors="backslashreplace")
            if len(text) > LONGEST:
                text = text[:LONGEST] + f"\n{CUT}".encode()
            os.write(handle, BEGIN.encode() + text + END.encode())

    return write


def _shown_threads(interrupted: FrameType | None) -> Iterator[str]:
    """The main thread, then the others, the oldest first; as faulthandler writes them."""
    # Without the lock of `threading.enumerate`, which the interrupted code may hold.
    threads = dict(getattr(threading, "_active", {}))
    own, frames = threading.get_ident(), sys._current_frames()
    frames.pop(own, None)  # that is where this very code is
    for ident, frame in ((own, interrupted), *reversed(frames.items())):
        who = "Current thread" if ident == own else "Thread"
        name = getattr(threads.get(ident), "_name", "")
        lines = [f"{who} 0x{ident:016x} [{name}] (most recent call first):"]
        while frame is not None and len(lines) <= DEEPEST:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back
        yield "\n".join([*lines, "  ..."] if frame is not None else lines) + "\n"


# -- the agent's end ------------------------------------------------------------------------------


def dump(workers: Mapping[int, Dumper], seconds: float = 1.0) -> dict[int, str]:
    """Ask processes for their stacks; what they wrote in the time, or why they cannot be asked.

    One after another of those who ask at once, so that each has one writing of them.
    """
    with _asking, contextlib.ExitStack() as files:
        found: dict[int, str] = {}
        asked: dict[int, _Asked] = {}
        for local, (session, pid, handle) in workers.items():
            numbers, refused = _handled(session, pid)
            file = _file_of(pid, handle)
            if file is None:
                refused = refused or (
                    f"process {pid} has closed file {handle}, which elasticlib opened for its "
                    "stacks"
                )
            else:
                files.callback(os.close, file)
            if file is None or refused:
                found[local] = f"It cannot show its stacks: {refused}.\n"
            else:
                asked[local] = _Asked(pid, file, numbers)
        return {**found, **_answers(asked, seconds)}


def keep(folder: Path, text: str) -> None:
    """Add it to what people find among the worker's logs; a full disk loses it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with contextlib.suppress(OSError), opened(folder / FILE, flags) as handle:
        os.write(handle, text.encode(errors="replace"))


class _Asked:
    """A process that was asked, by the first of the signals that it handles."""

    def __init__(self, pid: int, file: int, numbers: list[int]) -> None:
        self._pid = pid
        self._file = file
        self._numbers = numbers
        # It only ever adds to the end, wherever that is by now.
        with contextlib.suppress(OSError):
            os.truncate(file, 0)
        self._at = self._size = os.fstat(file).st_size
        self._grew_at = monotonic()
        self.ask()

    def ask(self) -> None:
        """Again, by the next signal, if there is one."""
        if self._numbers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, self._numbers.pop(0))

    def whole(self) -> str:
        """What it wrote between the marks; empty if it has not, or not all of it."""
        if (size := os.fstat(self._file).st_size) == self._size:
            return ""
        self._size, self._grew_at = size, monotonic()
        _, _, text = self._written().rpartition(BEGIN)
        text, mark, _ = text.partition(END)
        return text if mark else ""

    def rest(self) -> str:
        """What there is when the time is over."""
        text = self.whole()
        if text or self._size == self._at:
            return text
        before, begun, text = self._written().rpartition(BEGIN)
        if begun and not before:
            return f"{text}\n{CUT}"
        cut = monotonic() < self._grew_at + QUIET_SECONDS
        return f"{ALONE}{before or text}{CUT if cut else ''}"

    def _written(self) -> str:
        return os.pread(self._file, 2 * LONGEST, self._at).decode(errors="replace")


def _answers(asked: Mapping[int, _Asked], seconds: float) -> dict[int, str]:
    now, pause = monotonic(), threading.Event()
    second, deadline = now + PATIENCE * seconds, now + seconds
    found: dict[int, str] = {}
    while len(found) < len(asked) and now < deadline:
        pause.wait(LOOK_SECONDS)
        now = monotonic()
        for local, one in asked.items():
            if local not in found and (text := one.whole()):
                found[local] = text
            elif local not in found and now >= second:
                one.ask()
    rest = {local: one.rest() for local, one in asked.items() if local not in found}
    return {**found, **{local: text for local, text in rest.items() if text}}


def _handled(session: int, pid: int) -> tuple[list[int], str]:
    """Which signals the process handles, which else would end it; and why it is not to be asked."""
    try:
        # A number that has passed to another process is in another session.
        gone = os.getsid(pid) != session
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        gone, status = True, ""
    if gone:
        return [], f"the process {pid} that would have answered is gone"
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "")
    mask = int(caught.partition(":")[2] or "0", 16)
    numbers = [number for number in (SIGNAL, SECOND) if mask >> (number - 1) & 1]
    if not numbers:
        signals = f"the signals {SECOND} and {SIGNAL}"
        return [], f"process {pid} has become another program, or no longer handles {signals}"
    return numbers, ""


def _file_of(pid: int, handle: int) -> int | None:
    """What the process writes its stacks to, opened here as well; None where it has it open no
    more, and would write into another in its place."""
    path = f"/proc/{pid}/fd/{handle}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            return None
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
