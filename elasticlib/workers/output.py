"""Where a worker's streams go: through to ours, to a file, or line by line to both.

What becomes of them is a plan with torchrun's meanings: a choice of streams is `3` for both of
every worker, or `0:1,1:2` for some, where 1 is stdout, 2 is stderr, 3 both; a worker's files follow
from the plan and a folder, as torchrun lays them out.

A pipe is read to its end, whatever becomes of the file or the console, so a worker never dies with
them; nothing that it wrote before it ended is lost. The loop reads all pipes, and a thread for each
of our two streams passes on what it read: to write to a console that stands still (a terminal that
was stopped, a pager, a pipe whose reader waits) takes for ever, and nobody can tell before. So it
holds up the workers that are shown there, as it would without us, and nothing else. The last lines
of stderr are kept, for the report of a failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from ..errors import WorkerStartError
from ..threads import helper
from .output_plan import NAMES, OutputFiles, OutputPlan, Streams
from .spec import Worker

if TYPE_CHECKING:
    from .event_loop import EventLoop

log = logging.getLogger("elasticlib.workers")

CHUNK = 1 << 16
MOST_WAITING = 4 * CHUNK
"""Bytes of one pipe that wait to be passed on; then it is read no more for now."""
STDERR = 2
MAX_LINE_BYTES = 1 << 16
TAIL_LINES = 30
TAIL_BYTES = 8 * 1024
TURNS, LONGEST_TURN = 20, 0.05


# -- the streams as they pass ----------------------------------------------------------------------


class LineSplitter:
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
        return whole + self.rest() if len(self._half) > MAX_LINE_BYTES else whole

    def rest(self) -> list[bytes]:
        """What is left without an end, ended."""
        half, self._half = self._half, b""
        return [half.rstrip(b"\r") + b"\n"] if half else []


class TailBuffer:
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
            log.warning("stopped writing a worker's output to %s: %s", self._name, error)


class FileSink(Sink):
    """A file that is ours to close."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(str(file.name), partial(_write_all, file.fileno()))
        self._file = file

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.warning("a worker's output in %s is incomplete: %s", self._file.name, error)


def start_thread(thread: threading.Thread) -> None:
    """Raises WorkerStartError where it cannot be started."""
    try:
        thread.start()
    except RuntimeError as error:
        raise WorkerStartError(
            f"cannot watch the workers: {error}; threads count as processes (ulimit -u, pids.max "
            "of the cgroup): raise that limit"
        ) from error


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
            log.error("lost some of a worker's output: %s", error, exc_info=error)


class Pipe:
    """A stream of one worker that is read here: by the loop, and never much more than has been
    passed on, which `take` does in the stream's writer, and `end` once there is no more."""

    def __init__(
        self,
        pipe: IO[bytes],
        write: Callable[[Callable[[], object]], object],
        take: Callable[[bytes], object],
        end: Callable[[], object],
        tail: TailBuffer | None = None,
    ) -> None:
        self._pipe = pipe
        self._write, self._take, self._finish, self._tail = write, take, end, tail
        self._lock = threading.Lock()
        self._waiting = 0
        self._paused = False
        self._over = threading.Event()

    def start(self, loop: EventLoop) -> None:
        os.set_blocking(self._pipe.fileno(), False)
        self._loop = loop
        loop.add_reader(self._pipe.fileno(), self._ready)

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
                self._loop.remove_reader(self._pipe.fileno(), self._pipe.close)
            elif self._paused:
                self._loop.pause_reading(self._pipe.fileno())
        if self._tail is not None:
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
                    self._loop.add_reader(self._pipe.fileno(), self._ready)
            if not chunk:
                self._over.set()

    def is_alive(self) -> bool:
        return not self._over.is_set()

    def join(self, seconds: float) -> None:
        self._over.wait(seconds)

    @property
    def held(self) -> bool:
        """Whether all is passed on, and somebody holds the pipe's other end: the worker is gone."""
        with self._lock:
            try:
                look = select.poll()
                look.register(self._pipe, select.POLLIN)
                # Without any writer there is an end to be read, and to be waited for.
                return not self._waiting and not look.poll(0)
            except ValueError:
                return False  # closed


class WorkerOutput:
    """The streams of one worker, opened before there is a process.

    stderr is read here even if it only goes to a file or passes through, so that its last lines are
    known; they are kept in memory, because the file may be on a full disk. If the agent's own
    stderr is a terminal, the worker gets the terminal itself: progress bars and colours ask for
    one, and the reader has seen those lines.

    Raises:
        OSError: a file or a pipe cannot be opened.
        WorkerStartError: no thread can be had.
    """

    def __init__(
        self, plan: OutputPlan, worker: Worker, role: str, places: OutputFiles, writers: Writers
    ) -> None:
        self._plan = plan
        self._places = places
        self._prefix = plan.prefix(role, worker, socket.gethostname()).encode()
        self._writers = writers
        self._pipes: list[Pipe] = []
        self._tail = TailBuffer()
        self._theirs, self._ours = contextlib.ExitStack(), contextlib.ExitStack()
        try:
            self.targets = self._open(Streams.OUT), self._open(Streams.ERR)
            """What the process is to have for stdout and stderr; None for our own."""
        except BaseException:
            self.abandon()
            raise

    def _open(self, stream: Streams) -> int | None:
        places, path = self._places, self._places.files.get(stream)
        # Whole lines are appended, as several workers may have one file.
        file = None if path is None else open(path, "ab", buffering=0)  # noqa: SIM115
        if file is not None and stream & places.tee:
            return self._piped(stream, *self._teed(stream, self._ours.enter_context(file)))
        if file is not None and stream is Streams.ERR:
            # The agent writes this file, so that it knows the last lines although the disk is full.
            sink = FileSink(self._ours.enter_context(file))
            return self._piped(stream, sink.take, sink.close)
        if file is not None:
            return self._theirs.enter_context(file).fileno()
        shown = bool(stream & places.shown)
        if shown and (stream is Streams.OUT or _is_terminal(STDERR)):
            return None
        if stream is Streams.OUT:
            return self._theirs.enter_context(open(os.devnull, "wb")).fileno()
        take = Sink("stderr", partial(_write_all, STDERR)).take if shown else lambda _: None
        return self._piped(stream, take, lambda: None)

    def _piped(
        self, stream: Streams, take: Callable[[bytes], object], end: Callable[[], object]
    ) -> int:
        """The worker's end of a pipe whose other end is read here."""
        self._writers.start(stream)
        reading, writing = os.pipe()
        self._theirs.callback(os.close, writing)
        pipe = self._ours.enter_context(open(reading, "rb", buffering=0))  # noqa: SIM115
        tail = self._tail if stream is Streams.ERR else None
        self._pipes.append(Pipe(pipe, partial(self._writers.call, stream), take, end, tail))
        return writing

    def _teed(
        self, stream: Streams, kept: IO[bytes]
    ) -> tuple[Callable[[bytes], object], Callable[[], object]]:
        """What takes the bytes, and what ends them: all go to their file, whole lines under their
        worker's name to the console, and those that are asked for to another file."""
        files, path = [FileSink(kept)], self._places.filtered.get(stream)
        if path is not None:
            file = self._ours.enter_context(open(path, "ab", buffering=0))  # noqa: SIM115
            files.append(FileSink(file))
        ours = sys.stdout if stream is Streams.OUT else sys.stderr
        console = Sink("the console", partial(_show, ours))
        lines, needles = LineSplitter(), self._plan.needles(stream)

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

    def attach(self, loop: EventLoop) -> None:
        """Read the pipes of the process, which has been started with the targets."""
        self._theirs.close()
        self._ours.pop_all()
        for pipe in self._pipes:
            pipe.start(loop)

    def abandon(self) -> None:
        """There is no process: close all that is open."""
        self._theirs.close()
        self._ours.close()

    def close(self, seconds: float = 0.5) -> bool:
        """After the worker and its session are gone: what was written is in its place.

        Something that left the session may hold a pipe open for ever: it is not waited for once
        all that came is passed on. A console may stand still: that is waited for these seconds,
        for all streams together; and it goes on behind it. Returns whether all is done.
        """
        return end_within(self._pipes, seconds)

    def tail(self) -> str:
        """Return the last lines of stderr, or nothing where the worker has a terminal for it."""
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


def _is_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False
