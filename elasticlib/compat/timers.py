"""The timers that workers set with torch's `FileTimerClient`, in its words: a line of JSON each.

A worker has one timer of each name (`scope_id`). When one runs out, all of that worker's go, and it
is sent the signal that it has asked for itself, and nothing more: how it ends is then noticed as
any end of a worker is, and the agent goes on. Processes of other sessions than the workers' are
sent nothing, whatever a line says. (torch's own server is a thread that looks once in a while, ends
whole agents, and takes a second to import.)
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable

import attrs

from ..clock import monotonic, wall
from ..errors import ConfigError
from ..foreign import read_json
from ..workers import session
from ..workers.loop import Loop
from ..workers.session import Guardian
from . import TIMER_FILE

log = logging.getLogger("elasticlib.workers")

CHUNK = 1 << 16
LONGEST_NAME = 1024


@attrs.frozen
class Timer:
    """`signal` is for process `pid` at `at`, on the reader's own clock; 0: nothing is sent."""

    pid: int
    scope: str
    at: float
    signal: int


class Timers(dict[tuple[int, str], Timer]):
    """Those that are running, by process and name."""

    def take(self, line: bytes, *, wall: float, now: float) -> None:
        """wall, now: the time on the clock that workers go by, which is this machine's, and on
        ours. What is no request changes nothing."""
        try:
            said = read_json(line)
            pid, scope, at = int(said["pid"]), str(said["scope_id"]), float(said["expiration_time"])
            number = int(said["signal"])
        except (ValueError, KeyError, TypeError, OverflowError):
            return
        self.pop((pid, scope), None)
        if at >= 0 and len(scope) <= LONGEST_NAME:
            self[pid, scope] = Timer(pid, scope, now + at - wall, number)

    def next(self) -> float | None:
        """When the first one runs out."""
        return min((timer.at for timer in self.values()), default=None)

    def expire(self, now: float) -> tuple[Timer, ...]:
        """The first that sends a signal, of each process of which one has run out: those go."""
        over = sorted((t for t in self.values() if t.at <= now), key=lambda t: t.at)
        first: dict[int, Timer] = {}
        for timer in over:
            if timer.signal > 0:
                first.setdefault(timer.pid, timer)
        self.forget({timer.pid for timer in over})
        return tuple(first.values())

    def forget(self, pids: set[int]) -> None:
        """These processes have ended, or been signalled."""
        for key in [key for key in self if key[0] in pids]:
            del self[key]


class TimerServer:
    """A named pipe, which the workers' loop reads. path: empty for one in a folder of its own."""

    VARIABLE = TIMER_FILE

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder = ""
        self._pipe = -1
        self._timers, self._rest = Timers(), b""
        self._next = float("inf")

    def open(self, loop: Loop, guardian: Guardian, leaders: Callable[[], Iterable[int]]) -> None:
        """Make the pipe and listen; does nothing when it does already, and nobody has removed it.

        leaders: the sessions whose processes may be signalled, just now.

        Raises:
            ConfigError: no pipe can be made there.
        """
        self._loop, self._guardian, self._leaders = loop, guardian, leaders
        if self._pipe >= 0:
            if os.path.exists(self.path):
                return
            self.close()
        if self._folder:
            self._folder = self.path = ""  # its folder is gone
        try:
            self._make()
            # For both, so that it has no end while no worker has it open.
            self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"{self.VARIABLE}={self.path}: no pipe can be made: {error}"
            ) from error
        loop.read(self._pipe, self._read)

    def _make(self) -> None:
        if self.path and _is_listened_to(self.path):
            log.warning(
                "%s=%s is read by another process: these workers have a pipe of their own",
                self.VARIABLE,
                self.path,
            )
            self.path = ""
        if not self.path:
            self._folder = tempfile.mkdtemp(prefix="elasticlib_timers_")
            self._guardian.add(self._folder)
            self.path = os.path.join(self._folder, "timers")
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.mkfifo(self.path, 0o600)

    def close(self) -> None:
        """Listen no more, and leave no file."""
        pipe, self._pipe = self._pipe, -1
        if pipe < 0:
            return
        self._loop.forget(pipe, lambda: os.close(pipe))
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._guardian.remove(self._folder)

    # -- in the loop's thread ----------------------------------------------------------------------

    def _read(self) -> None:
        try:
            chunk = os.read(self._pipe, CHUNK)
        except OSError:
            return  # it is being closed
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-CHUNK:]
        for line in lines:
            self._timers.take(line, wall=wall(), now=monotonic())
        self._look()

    def _look(self) -> None:
        now = monotonic()
        if self._next <= now:
            self._next = float("inf")
        pids = {pid for pid, _ in self._timers}
        self._timers.forget({pid for pid in pids if not os.path.exists(f"/proc/{pid}")})
        for timer in self._timers.expire(now):
            self._signal(timer)
        first = self._timers.next()
        if first is not None and first < self._next:
            self._next = first
            self._loop.at(first, self._look)

    def _signal(self, timer: Timer) -> None:
        for leader in tuple(self._leaders()):
            if session.signal_member(leader, timer.pid, timer.signal):
                log.warning(
                    "pid %d is sent signal %d, as it asked to be when its timer %r ran out",
                    timer.pid,
                    timer.signal,
                    timer.scope,
                )
                return


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
