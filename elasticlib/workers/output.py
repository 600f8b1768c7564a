"""Where a worker's streams go: through to ours, to a file, or line by line to both.

A pipe has one thread that reads it to its end, whatever becomes of the file or the console, so a
worker never dies with them; nothing that it wrote before it ended is lost. A console that stands
still holds up who is shown there, as it would without us. Of what a worker says on stderr the last
lines are kept, for the report of its failure.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from functools import partial
from typing import IO

from ..clock import monotonic
from ..foreign import opened
from .lines import TAIL_BYTES, Lines, Tail
from .output_plan import OutputPlan
from .places import Places
from .spec import Worker
from .streams import Streams
from .turns import end_within
from .warm import Warm

log = logging.getLogger("elasticlib.workers")

CHUNK = 1 << 16
STDERR = 2


class Output:
    """The streams of one worker; files are opened by `open`, before there is a process.

    stderr is read here even where it only passes through, so that its last lines are known. Where
    ours is a terminal the worker gets that itself: progress bars and colours ask for one, and the
    reader has seen those lines.
    """

    def __init__(self, plan: OutputPlan, worker: Worker, role: str, places: Places) -> None:
        self._plan = plan
        self._places = places
        self._prefix = plan.prefix(role, worker, socket.gethostname()).encode()
        self._files: dict[Streams, IO[bytes]] = {}
        self._filtered: dict[Streams, IO[bytes]] = {}
        self._pumps: list[_Pump] = []
        self._tail = Tail()

    def open(self) -> Output:
        """Raises OSError where a file cannot be written."""
        for stream, path in self._places.files.items():
            self._files[stream] = open(path, "ab")  # noqa: SIM115
        for stream, path in self._places.filtered.items():
            # One file for all workers of the attempt; whole lines are appended to it.
            self._filtered[stream] = open(path, "ab")  # noqa: SIM115
        return self

    def target(self, stream: Streams) -> int | IO[bytes] | None:
        """What to give to Popen for stdout or stderr."""
        if stream & self._places.tee:
            return subprocess.PIPE
        if stream in self._files:
            return self._files[stream]
        shown = bool(stream & self._places.shown)
        if stream is Streams.OUT:
            return None if shown else subprocess.DEVNULL
        return None if shown and _is_terminal(STDERR) else subprocess.PIPE

    def attach(self, process: subprocess.Popen[bytes] | Warm) -> None:
        """Read the pipes of the process that has been started with these targets.

        Raises:
            RuntimeError: no thread could be started for one of them.
        """
        pipes = ((Streams.OUT, process.stdout), (Streams.ERR, process.stderr))
        pumps = [_Pump(pipe, self._sinks(stream)) for stream, pipe in pipes if pipe is not None]
        # Files that were handed over whole are the worker's alone now.
        self.abandon()
        for number, pump in enumerate(pumps):
            try:
                pump.start()
            except RuntimeError:
                for unread in pumps[number:]:
                    unread.abandon()
                raise
            self._pumps.append(pump)

    def _sinks(self, stream: Streams) -> list[_Sink]:
        sinks: list[_Sink] = []
        if stream is Streams.ERR:
            sinks.append(_Sink("memory", self._tail.feed))
        if stream & self._places.tee:
            file = self._files.pop(stream)
            sinks.append(_Sink(str(file.name), partial(_write_through, file), end=file.close))
            sinks.append(self._to_console(stream))
        elif stream & self._places.shown:
            sinks.append(_Sink("stderr", partial(_write_all, STDERR)))
        return sinks

    def _to_console(self, stream: Streams) -> _Sink:
        """Whole lines, each under its worker's name, and those that are asked for to a file."""
        lines = Lines(self._prefix)
        console = sys.stdout if stream is Streams.OUT else sys.stderr
        filtered = self._filtered.pop(stream, None)
        sinks = [_Sink("the console", partial(_show, console))]
        needles = self._plan.needles(stream)

        def take(cut: list[bytes]) -> None:
            sinks[0].take(lines.named(cut))
            for sink in sinks[1:]:
                sink.take(lines.named(x for x in cut if any(needle in x for needle in needles)))

        def end() -> None:
            take(lines.cut_rest())
            if filtered is not None:
                filtered.close()

        if filtered is not None:
            sinks.append(_Sink(str(filtered.name), partial(_write_through, filtered)))
        return _Sink("the console", lambda chunk: take(lines.cut(chunk)), end=end)

    def abandon(self) -> None:
        """Close the files that nobody here writes to."""
        for files in (self._files, self._filtered):
            for file in files.values():
                file.close()
            files.clear()

    def close(self, seconds: float = 0.5) -> bool:
        """After the worker and its session are gone: what was written is in its place.

        Something that left the session may hold a pipe open for ever: it is not waited for once
        all that came is passed on. A console may stand still: that is waited for these seconds,
        for all streams together. The thread goes on behind it. Returns whether all is done.
        """
        return end_within(self._pumps, seconds, unless=lambda pump: pump.held)

    def drain(self, deadline: float) -> None:
        """Before this process ends: wait for what a slow console has not taken yet."""
        for pump in self._pumps:
            while not pump.idle and monotonic() < deadline:
                pump.join(0.02)

    def tail(self) -> str:
        """The last lines of stderr, as far as they passed by here or stand in a file."""
        path = self._places.files.get(Streams.ERR)
        if path is not None and not Streams.ERR & self._places.tee:
            tail = Tail()
            try:
                # By now its worker may have put something else there.
                with opened(path) as handle:
                    size = os.fstat(handle).st_size
                    tail.feed(os.pread(handle, TAIL_BYTES + 1, max(0, size - TAIL_BYTES - 1)))
            except OSError:
                return ""
            return tail.text()
        return self._tail.text()


class _Sink:
    """Takes bytes until that fails, then says so once and takes no more."""

    def __init__(
        self, name: str, write: Callable[[bytes], None], end: Callable[[], None] | None = None
    ) -> None:
        self._name = name
        self._write: Callable[[bytes], None] | None = write
        self._end = end

    def take(self, data: bytes) -> None:
        if self._write is None or not data:
            return
        try:
            self._write(data)
        except (OSError, ValueError) as error:
            self._write = None
            log.warning("a worker's output is no longer written to %s: %s", self._name, error)

    def finish(self) -> None:
        try:
            if self._end is not None:
                self._end()
        except (OSError, ValueError) as error:
            log.warning("a worker's output is not whole in %s: %s", self._name, error)


class _Pump(threading.Thread):
    """Reads one pipe to its end, and never more than it has passed on."""

    def __init__(self, pipe: IO[bytes], sinks: list[_Sink]) -> None:
        super().__init__(daemon=True, name="worker-output")
        self._pipe = pipe
        self._sinks = sinks
        self._busy = False

    @property
    def idle(self) -> bool:
        """Whether all that was written so far has been passed on."""
        if not self.is_alive():
            return True
        try:
            left = int.from_bytes(fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0" * 4), "little")
        except (OSError, ValueError):
            # Closed: the thread is about to end.
            return False
        # In this order: what is no longer in the pipe was taken by one who was busy before.
        return left == 0 and not self._busy

    @property
    def held(self) -> bool:
        """Whether all is passed on, and somebody holds the pipe's other end: the worker is gone."""
        try:
            look = select.poll()
            look.register(self._pipe, select.POLLIN)
            # Without any writer there is an end to be read, and to be waited for.
            return not look.poll(0) and self.idle
        except ValueError:
            return False

    def run(self) -> None:
        with self._pipe:
            number = self._pipe.fileno()
            news = select.poll()
            news.register(number, select.POLLIN)
            while True:
                news.poll()
                self._busy = True
                chunk = os.read(number, CHUNK)
                for sink in self._sinks:
                    sink.take(chunk)
                # At the end there is still what `_finish` passes on, such as half a line.
                self._busy = not chunk
                if not chunk:
                    break
        self._finish()

    def abandon(self) -> None:
        """In place of `start`: nothing is read."""
        self._pipe.close()
        self._finish()

    def _finish(self) -> None:
        for sink in self._sinks:
            sink.finish()


def _is_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False


def _write_through(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.flush()


def _write_all(number: int, data: bytes) -> None:
    while data:
        data = data[os.write(number, data) :]


def _show(console: IO[str], text: bytes) -> None:
    # One write a chunk, so that the lines of several workers do not run into one another.
    try:
        console.buffer.write(text)  # type: ignore[attr-defined]
    except AttributeError:
        console.write(text.decode(errors="replace"))
    console.flush()
