"""Listens to the timers that workers set with torch's `FileTimerClient`, and keeps them.

When one runs out, its worker is sent the signal that it has asked for itself, and nothing more: how
it ends is then noticed as any end of a worker is, and the agent goes on. Processes of other
sessions than the workers' are sent nothing, whatever a line says.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable

from ..clock import monotonic, wall
from ..errors import ConfigError, WorkerStartError, present
from ..threads import helper
from . import session
from .guardian import Guardian
from .timers import Timer, Timers

log = logging.getLogger("elasticlib.workers")

VARIABLE = "TORCHELASTIC_TIMER_FILE"
CHUNK = 1 << 16
JOIN_SECONDS = 5.0
LONGEST_LOOK = 86400.0
"""Seconds; poll takes no more than 24 days, and a timer may run for longer."""


class TimerServer:
    """A named pipe, and the thread that reads it.

    path: of the pipe; empty for one in a folder of its own. leaders: the sessions whose processes
    may be signalled, just now.
    """

    def __init__(self, path: str, guardian: Guardian, leaders: Callable[[], Iterable[int]]) -> None:
        self.path = path
        self._guardian = guardian
        self._leaders = leaders
        self._folder = ""
        self._pipe = -1
        self._wake: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Make the pipe and listen; does nothing when it does already, and nobody has removed it.

        Raises:
            ConfigError: no pipe can be made there.
            WorkerStartError: no thread can be started now.
        """
        if self._thread is not None:
            if os.path.exists(self.path):
                return
            self.close()
        if self._folder:
            self._folder = self.path = ""  # its folder is gone
        try:
            self._make()
            # For both, so that it has no end while no worker has it open.
            self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            raise ConfigError(f"{VARIABLE}={self.path}: no pipe can be made: {error}") from error
        self._wake = os.pipe()
        thread = helper(self._listen, "worker-timers")
        try:
            thread.start()
        except RuntimeError as error:
            self._leave()
            raise WorkerStartError(
                f"nobody would listen to the workers' timers: {error}"
            ) from error
        self._thread = thread

    def _make(self) -> None:
        if self.path and _is_listened_to(self.path):
            log.warning(
                "%s=%s is another's, who listens there: these workers have a pipe of their own",
                VARIABLE,
                self.path,
            )
            self.path = ""
        if not self.path:
            self._folder = tempfile.mkdtemp(prefix="elasticlib_timers_")
            self._guardian.add_folder(self._folder)
            self.path = os.path.join(self._folder, "timers")
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.mkfifo(self.path, 0o600)

    def _listen(self) -> None:
        wake, _ = present(self._wake, "what ends this thread")
        timers, rest = Timers(), b""
        news = select.poll()
        news.register(self._pipe, select.POLLIN)
        news.register(wake, select.POLLIN)
        while True:
            first = timers.next()
            left = LONGEST_LOOK if first is None else max(0.0, first - monotonic())
            ready = news.poll(min(left, LONGEST_LOOK) * 1000)
            if any(number == wake for number, _ in ready):
                return
            if ready:
                *lines, rest = (rest + os.read(self._pipe, CHUNK)).split(b"\n")
                rest = rest[-CHUNK:]
                for line in lines:
                    timers = timers.heed(line, wall=wall(), now=monotonic())
            timers = timers.without({t.pid for t in timers.running.values() if _is_gone(t.pid)})
            timers, over = timers.expire(monotonic())
            for timer in over:
                self._end(timer)

    def _end(self, timer: Timer) -> None:
        for leader in tuple(self._leaders()):
            if session.signal_member(leader, timer.pid, timer.signal):
                log.warning(
                    "pid %d is sent signal %d, as it asked to be when its timer %r ran out",
                    timer.pid,
                    timer.signal,
                    timer.scope,
                )
                return

    def close(self) -> None:
        """Listen no more, and leave no file."""
        if self._thread is None or self._wake is None:
            return
        os.write(self._wake[1], b"x")
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            # It stands before a console that takes nothing, and may still look at these.
            return
        self._thread = None
        self._leave()

    def _leave(self) -> None:
        for number in (self._pipe, *(self._wake or ())):
            os.close(number)
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._guardian.remove_folder(self._folder)


def _is_listened_to(path: str) -> bool:
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return False  # as mktemp leaves one
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except FileNotFoundError:
        return False
    except OSError as error:
        # A pipe that an agent left behind, which was killed.
        if error.errno == errno.ENXIO:
            return False
        raise
    return True


def _is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")
