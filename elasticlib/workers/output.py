"""Where a worker's streams go: through to ours, to a file, or line by line to both.

A pipe is read to its end, whatever becomes of the file or the console, so a worker never dies with
them; nothing that it wrote before it ended is lost. Output is passed on by a thread for each
of our two streams: a console that stands still holds up the workers that are shown there, as it
would without us, and nothing else. The last lines of stderr are kept, for the report of a failure.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import select
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import IO, Any

from ..foreign import opened
from ..threads import helper
from .loop import Loop, start_thread
from .output_plan import NAMES, OutputPlan, Places, Streams
from .spec import Worker

log = logging.getLogger("elasticlib.workers")

CHUNK = 1 << 16
MOST_WAITING = 4 * CHUNK
"""Bytes of one pipe that wait to be passed on; then it is read no more for now."""
STDERR = 2
LONGEST_LINE = 1 << 16
TAIL_LINES = 30
TAIL_BYTES = 8 * 1024
TURNS, LONGEST_TURN = 20, 0.05


class Lines:
    """A stream of bytes cut into lines, at newlines and at carriage returns alike: a progress bar
    ends its lines with these only, and is shown as it moves. A line that does not end is cut when
    it has grown too long, so memory stays bounded."""

    def __init__(self) -> None:
        self._half = b""

    def cut(self, chunk: bytes) -> list[bytes]:
        """The lines that are whole with this chunk."""
        text = self._half + chunk
        # A carriage return at the very end may be half of a pair.
        sure = len(text) - text.endswith(b"\r")
        end = 1 + max(text.rfind(b"\n", 0, sure), text.rfind(b"\r", 0, sure))
        whole = text[:end].splitlines(keepends=True)
        self._half = text[end:]
        return whole + self.rest() if len(self._half) > LONGEST_LINE else whole

    def rest(self) -> list[bytes]:
        """What is left without an end, ended."""
        half, self._half = self._half, b""
        return [half.rstrip(b"\r") + b"\n"] if half else []


class Tail:
    """The last lines of a stream, whatever its length."""

    def __init__(self) -> None:
        self._end = b""
        self._cut = False

    def feed(self, chunk: bytes) -> None:
        end = self._end + chunk[-TAIL_BYTES:]
        self._cut = self._cut or len(self._end) + len(chunk) > TAIL_BYTES
        self._end = end[-TAIL_BYTES:]

    def text(self) -> str:
        """Whole lines, as a terminal would show them in the end."""
        lines = self._end.split(b"\n")
        if self._cut and len(lines) > 1:
            del lines[0]
        if not lines[-1]:
            del lines[-1]
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[-TAIL_LINES:])
        return b"\n".join(shown).decode(errors="replace")


class Sink:
    """Takes bytes until that fails, then says so once and takes no more."""

    def __init__(self, name: str, write: Callable[[bytes], object]) -> None:
        self._name = name
        self._write: Callable[[bytes], object] | None = write

    def take(self, data: bytes) -> None:
        if self._write is None or not data:
            return
        try:
            self._write(data)
        except Exception as error:
            # A console may be any object, whose own code may raise anything.
            self._write = None
            log.warning("a worker's output is no longer written to %s: %s", self._name, error)


class FileSink(Sink):
    """A file that is ours to close."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(str(file.name), partial(_write_all, file.fileno()))
        self._file = file

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.warning("a worker's output is not whole in %s: %s", self._file.name, error)


class Writers:
    """The threads that pass on what workers say, one for each of our streams; for any thread."""

    def __init__(self) -> None:
        self._waiting: dict[Streams, queue.SimpleQueue[Callable[[], object] | None]] = {}

    def start(self, stream: Streams) -> None:
        """Have this one. Raises WorkerStartError where no thread can be started."""
        if stream not in self._waiting:
            waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
            start_thread(helper(partial(_write_what_comes, waiting), f"workers-{NAMES[stream]}"))
            self._waiting[stream] = waiting

    def call(self, stream: Streams, work: Callable[[], object]) -> None:
        self._waiting[stream].put(work)

    def close(self) -> None:
        """They end once all is passed on."""
        for waiting in self._waiting.values():
            waiting.put(None)
        self._waiting = {}


def _write_what_comes(waiting: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (work := waiting.get()) is not None:
        try:
            work()
        except Exception as error:
            # One worker's must not take the others' with it.
            log.error("a worker's output is lost: %s", error, exc_info=error)


class Pipe:
    """A stream of one worker that is read here: by the loop, and never much more than has been
    passed on, which `take` does in the stream's writer."""

    def __init__(
        self,
        pipe: IO[bytes],
        tail: Tail | None,
        take: Callable[[bytes], object],
        end: Callable[[], object],
    ) -> None:
        self._pipe = pipe
        self._tail, self._take, self._finish = tail, take, end
        self._lock = threading.Lock()
        self._waiting = 0
        self._paused = False
        self._over = threading.Event()

    def start(self, loop: Loop, write: Callable[[Callable[[], object]], object]) -> None:
        os.set_blocking(self._pipe.fileno(), False)
        self._loop, self._write = loop, write
        loop.read(self._pipe.fileno(), self._ready)

    def _ready(self) -> None:
        with self._lock:
            try:
                chunk = os.read(self._pipe.fileno(), CHUNK)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            # At the end there is still what `end` passes on, such as half a line.
            self._waiting += len(chunk) or 1
            self._paused = bool(chunk) and self._waiting > MOST_WAITING
            if not chunk:
                self._loop.forget(self._pipe.fileno(), self._pipe.close)
            elif self._paused:
                self._loop.pause(self._pipe.fileno())
        if chunk and self._tail is not None:
            self._tail.feed(chunk)
        self._write(partial(self._pass_on, chunk))

    def _pass_on(self, chunk: bytes) -> None:
        try:
            self._take(chunk) if chunk else self._finish()
        finally:
            with self._lock:
                self._waiting -= len(chunk) or 1
                if self._paused and self._waiting <= MOST_WAITING // 2:
                    self._paused = False
                    self._loop.read(self._pipe.fileno(), self._ready)
            if not chunk:
                self._over.set()

    def is_alive(self) -> bool:
        return not self._over.is_set()

    def join(self, seconds: float) -> None:
        self._over.wait(seconds)

    @property
    def idle(self) -> bool:
        """Whether all that was written so far has been passed on."""
        if not self.is_alive():
            return True
        with self._lock:
            try:
                left = fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0" * 4)
            except (OSError, ValueError):
                # Closed: its end is about to be passed on.
                return False
            return not any(left) and not self._waiting

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
        self._pipes: list[Pipe] = []
        self._tail = Tail()

    def open(self, writers: Writers) -> Output:
        """Raises OSError if a file cannot be opened, WorkerStartError if no thread can be had."""
        for stream, path in self._places.files.items():
            self._files[stream] = open(path, "ab", buffering=0)  # noqa: SIM115
        for stream, path in self._places.filtered.items():
            # One file for all workers of the attempt; whole lines are appended to it.
            self._filtered[stream] = open(path, "ab", buffering=0)  # noqa: SIM115
        for stream in NAMES:
            if self.target(stream) == subprocess.PIPE:
                writers.start(stream)
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

    def attach(
        self, stdout: IO[bytes] | None, stderr: IO[bytes] | None, loop: Loop, writers: Writers
    ) -> None:
        """Read the pipes of the process that has been started with these targets."""
        for stream, pipe in ((Streams.OUT, stdout), (Streams.ERR, stderr)):
            if pipe is not None:
                tail = self._tail if stream is Streams.ERR else None
                self._pipes.append(Pipe(pipe, tail, *self._passed_on(stream)))
                self._pipes[-1].start(loop, partial(writers.call, stream))
        # Files that were handed over whole are the worker's alone now.
        self.abandon()

    def _passed_on(self, stream: Streams) -> tuple[Callable[[bytes], object], Callable[[], object]]:
        """What takes a stream's bytes, and what ends it."""
        if stream & self._places.tee:
            return self._teed(stream)
        if stream & self._places.shown:
            return Sink("stderr", partial(_write_all, STDERR)).take, lambda: None
        return lambda _: None, lambda: None

    def _teed(self, stream: Streams) -> tuple[Callable[[bytes], object], Callable[[], object]]:
        """All of it to its file, whole lines under their worker's name to the console, and those
        that are asked for to another file."""
        ours = sys.stdout if stream is Streams.OUT else sys.stderr
        console = Sink("the console", partial(_show, ours))
        kept, filtered = self._files.pop(stream), self._filtered.pop(stream, None)
        files = [FileSink(file) for file in (kept, filtered) if file is not None]
        lines, needles = Lines(), self._plan.needles(stream)

        def named(cut: Iterable[bytes]) -> bytes:
            return b"".join(self._prefix + line for line in cut)

        def show(cut: list[bytes]) -> None:
            console.take(named(cut))
            for file in files[1:]:
                file.take(named(x for x in cut if any(needle in x for needle in needles)))

        def take(chunk: bytes) -> None:
            files[0].take(chunk)
            show(lines.cut(chunk))

        def end() -> None:
            show(lines.rest())
            for file in files:
                file.close()

        return take, end

    def abandon(self) -> None:
        """Close the files that are not written here."""
        for files in (self._files, self._filtered):
            for file in files.values():
                file.close()
            files.clear()

    def close(self, seconds: float = 0.5) -> bool:
        """After the worker and its session are gone: what was written is in its place.

        Something that left the session may hold a pipe open for ever: it is not waited for once
        all that came is passed on. A console may stand still: that is waited for these seconds,
        for all streams together; and it goes on behind it. Returns whether all is done.
        """
        return end_within(self._pipes, seconds)

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


def end_within(pipes: Sequence[Any], seconds: float) -> bool:
    """Whether all of them end in so many seconds; one that is held open is not waited for.

    In many short turns rather than in one: a machine that stands still for a while (paused, or a
    container that has used up its share of processors) would otherwise end the wait before they
    have had any of it.
    """
    turns = max(TURNS, round(seconds / LONGEST_TURN))
    for _ in range(turns):
        left = [pipe for pipe in pipes if pipe.is_alive() and not pipe.held]
        if not left:
            break
        for pipe in left:
            pipe.join(seconds / turns / len(left))
    return not any(pipe.is_alive() for pipe in pipes)


def _is_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False


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
