"""Output of workers: one thread reads all pipes, and writes to files and to the console.

Files get every byte that a worker writes before it exits. The console gets what it reads in time:
its bytes wait in a bounded buffer, and lines that do not fit are dropped and counted. So a console
that does not read (a stopped terminal, a pager) holds up neither workers nor files. The last lines
of each worker's stderr are kept in memory, for the report of a failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from typing import IO, Any

from ..clock import monotonic
from ..options import OutputOptions, Streams
from .loop_thread import LoopThread
from .output_plan import OutputFiles, line_prefix
from .spec import Worker

log = logging.getLogger("elasticlib.workers")

CHUNK_BYTES = 1 << 16  # the size of a pipe's buffer
MAX_DRAIN_CHUNKS = 16  # a pipe holds at most 1 MiB, the default limit of the kernel
MAX_CONSOLE_BYTES = 4 << 20  # what may wait for one console
RETRY_INTERVAL_S = 0.02  # between writes to a console that does not read
OUTPUT_FLUSH_TIMEOUT_S = 5.0  # for the console at last
STDERR_FD = 2
MAX_LINE_BYTES = 1 << 16
TAIL_LINES = 30
TAIL_BYTES = 8 * 1024


class LineSplitter:
    """Cuts a stream of bytes into lines, at newlines and at carriage returns.

    A progress bar ends its lines with carriage returns, and is shown as it moves. A line that
    grows beyond MAX_LINE_BYTES is cut, so memory is bounded.
    """

    def __init__(self) -> None:
        self._partial = b""  # the begin of a line without its end

    def cut(self, chunk: bytes) -> list[bytes]:
        """Return the lines that are complete with this chunk."""
        text = self._partial + chunk
        # A carriage return at the very end may be the first half of a pair.
        certain = len(text) - text.endswith(b"\r")
        end = 1 + max(text.rfind(b"\n", 0, certain), text.rfind(b"\r", 0, certain))
        lines = text[:end].splitlines(keepends=True)
        self._partial = text[end:]
        return lines + self.rest() if len(self._partial) > MAX_LINE_BYTES else lines

    def rest(self) -> list[bytes]:
        """Remove and return the last line if it has no end yet, with a newline added to it."""
        partial, self._partial = self._partial, b""
        return [partial.rstrip(b"\r") + b"\n"] if partial else []


class TailBuffer:
    """The last lines of a stream of any length."""

    def __init__(self) -> None:
        self._end = b""  # the last bytes
        self._is_cut = False  # earlier bytes were dropped

    def feed(self, chunk: bytes) -> None:
        end = self._end + chunk[-TAIL_BYTES:]
        self._is_cut = self._is_cut or len(self._end) + len(chunk) > TAIL_BYTES
        self._end = end[-TAIL_BYTES:]

    def text(self) -> str:
        """Return the last lines, without the text before the last carriage return of each line."""
        lines = self._end.split(b"\n")
        if self._is_cut and len(lines) > 1:
            del lines[0]
        if not lines[-1]:
            del lines[-1]
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[-TAIL_LINES:])
        return b"\n".join(shown).decode(errors="replace")


class Console:
    """The agent's stdout or stderr.

    Bytes that it does not accept at once wait in a bounded buffer; when that is full, lines are
    dropped and counted.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # a text stream, or a file descriptor
        self._fd = _open_nonblocking(stream)  # None for a stream that is not a pipe or a terminal
        self._pending = bytearray()
        self._num_dropped = 0  # lines since the last notice
        self._is_broken = False  # a write failed; the console gets nothing more

    def show(self, data: bytes) -> None:
        """Write these bytes, or drop them if too many bytes wait already."""
        if self._num_dropped or len(self._pending) + len(data) > MAX_CONSOLE_BYTES:
            self._num_dropped += max(1, data.count(b"\n"))
        else:
            self._pending += data
        self.flush()

    @property
    def has_pending(self) -> bool:
        return bool(self._pending) and not self._is_broken

    def flush(self) -> None:
        """Write as much as the console takes without blocking."""
        try:
            while self.has_pending:
                del self._pending[: self._write(bytes(self._pending[:CHUNK_BYTES]))]
                if not self._pending and self._num_dropped:
                    self._pending += self._take_drop_notice()
        except BlockingIOError:
            pass
        except Exception as error:
            # The stream may be any object, whose own code may raise anything.
            self._is_broken = True
            log.warning(
                "the workers' output is no longer shown on the console, but still written to log "
                "files: %s",
                error,
            )

    def close(self) -> None:
        """Close the descriptor. Log how many lines were never shown, if there are any."""
        num_lost = self._num_dropped + self._pending.count(b"\n")
        if num_lost and not self._is_broken:
            log.warning(
                "%d lines of the workers' output were not shown, because the console did not read "
                "them (log files are complete)",
                num_lost,
            )
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, data: bytes) -> int:
        if self._fd is not None:
            return os.write(self._fd, data)
        if isinstance(self._stream, int):
            return os.write(self._stream, data)
        if hasattr(self._stream, "buffer"):
            self._stream.buffer.write(data)
        else:
            self._stream.write(data.decode(errors="replace"))
        self._stream.flush()
        return len(data)

    def _take_drop_notice(self) -> bytes:
        count, self._num_dropped = self._num_dropped, 0
        return b"[elasticlib]: %d lines were dropped, because the console did not read\n" % count


def _open_nonblocking(stream: Any) -> int | None:
    """Open a stream's pipe or terminal again, so that only elasticlib's writes to it do not block.

    Returns:
        The new descriptor. None for another kind of stream, or if it cannot be opened.
    """
    try:
        fd = stream if isinstance(stream, int) else stream.fileno()
        mode = os.fstat(fd).st_mode
        if not stat.S_ISFIFO(mode) and not os.isatty(fd):
            return None
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{fd}", flags)
    except (AttributeError, OSError, ValueError):
        return None


class LogFile:
    """A file that gets a worker's output until a write fails, for example on a full disk."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._is_broken = False  # a write failed; the file gets nothing more

    def write(self, data: bytes) -> None:
        try:
            while data and not self._is_broken:
                data = data[os.write(self._file.fileno(), data) :]
        except OSError as error:
            self._is_broken = True
            log.warning("a worker's output is no longer written to %s: %s", self._file.name, error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.warning("a worker's output in %s is incomplete: %s", self._file.name, error)


class PipeReader:
    """The reading end of a worker's pipe. Used by the output thread."""

    def __init__(
        self, fd: int, on_chunk: Callable[[bytes], object], on_end: Callable[[], object]
    ) -> None:
        self.fd = fd
        self.on_close: Callable[[], object] = lambda: None  # called before the descriptor closes
        self._on_chunk, self._on_end = on_chunk, on_end
        self._is_closed = False

    def read(self) -> bool:
        """Pass on up to CHUNK_BYTES that wait in the pipe. The end of the stream closes the reader.

        Returns:
            Whether more bytes may wait in the pipe now.
        """
        try:
            chunk = b"" if self._is_closed else os.read(self.fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            self._on_chunk(chunk)
        return bool(chunk) or self.close()

    def close(self) -> bool:
        """End the stream; return False."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._on_end()
            finally:
                self.on_close()
                os.close(self.fd)
        return False

    def drain(self) -> None:
        """Pass on what an exited worker has left in the pipe.

        A process that left the worker's session may hold the pipe open for a long time.
        """
        for _ in range(MAX_DRAIN_CHUNKS):
            if not self.read():
                return


class OutputThread:
    """The thread that reads and writes the output of all workers of an agent. Thread-safe.

    Only the thread itself touches pipes, files and consoles that were handed to it. It also opens
    and reads all other files of workers, because their file system may hang.

    Args:
        on_error: receives the error message, in the thread, if the thread fails.
    """

    def __init__(self, on_error: Callable[[str], object]) -> None:
        self._thread = LoopThread("workers-output", self._tick, on_error)
        self.start = self._thread.start
        self._lock = threading.Lock()  # guards the next field
        self._consoles: dict[object, Console] = {}  # by descriptor, or by stream if it has none
        self._readers: set[PipeReader] = set()  # of the pipes that are open
        self._deadline: float | None = None  # when a closing thread gives up

    def console(self, stream: Any) -> Console:
        """Return the console of a text stream or a descriptor; one for each descriptor."""
        try:
            key = stream if isinstance(stream, int) else stream.fileno()
        except (AttributeError, OSError, ValueError):
            key = id(stream)
        with self._lock:
            if key not in self._consoles:
                self._consoles[key] = Console(stream)
            return self._consoles[key]

    def add(self, reader: PipeReader) -> None:
        """Begin to read a pipe."""
        os.set_blocking(reader.fd, False)
        self.call(lambda: self._add(reader))

    def close(self, timeout: float = OUTPUT_FLUSH_TIMEOUT_S) -> None:
        """End the thread once all is written, and wait for that at most `timeout` seconds."""
        self.call(lambda: self._drain_and_end_by(monotonic() + timeout))
        # A file system that hangs the thread must not hang the agent.
        self._thread.join(timeout + 1.0)
        for console in self._consoles.values():
            console.close()

    def call(self, request: Callable[[], object]) -> None:
        """Let the thread make a call. Errors of it are logged."""
        self._thread.post(lambda: self._run_and_log_errors(request))

    # -- in the thread ---------------------------------------------------------------------------

    def _tick(self, now: float, _late_s: float) -> float:
        with self._lock:
            consoles = list(self._consoles.values())
        for console in consoles:
            console.flush()
        has_pending = any(console.has_pending for console in consoles)
        if self._deadline is not None and (not has_pending or now >= self._deadline):
            for reader in list(self._readers):
                self._run_and_log_errors(reader.close)
            self._thread.end_now()
        return now + RETRY_INTERVAL_S if has_pending else float("inf")

    def _add(self, reader: PipeReader) -> None:
        def forget() -> None:
            self._thread.unwatch(reader.fd)
            self._readers.discard(reader)

        self._thread.watch(reader.fd, lambda: self._run_and_log_errors(reader.read))
        self._readers.add(reader)
        reader.on_close = forget

    def _drain_and_end_by(self, deadline: float) -> None:
        self._deadline = deadline
        for reader in list(self._readers):
            self._run_and_log_errors(reader.drain)

    def _run_and_log_errors(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            # An error of one worker's output must not end the others'.
            log.error("some of a worker's output is missing: %s", error, exc_info=error)


class WorkerOutput:
    """The streams of one worker. They are opened before the worker's process is started.

    stderr passes through the agent even if it is written to a file only, so that its last lines are
    known even if the disk is full. If the agent's own stderr is a terminal, the worker gets the
    terminal itself, because progress bars and colors need one.

    Args:
        options: Where the output of all workers goes.
        worker: The worker.
        role: The worker's role, for the prefix of its lines.
        files: The worker's files.
        thread: The agent's output thread.

    Raises:
        OSError: A file or a pipe cannot be opened, or the output thread cannot be started.
    """

    def __init__(
        self,
        options: OutputOptions,
        worker: Worker,
        role: str,
        files: OutputFiles,
        thread: OutputThread,
    ) -> None:
        self._options = options
        self._files = files
        self._prefix = line_prefix(options, role, worker, socket.gethostname()).encode()
        self._thread = thread
        self._readers: list[PipeReader] = []  # of the streams that go through the agent
        self._tail = TailBuffer()  # of stderr
        self._worker_ends = contextlib.ExitStack()  # what only the worker's process keeps open
        self._agent_ends = contextlib.ExitStack()  # what to close if there is no process
        try:
            # The descriptors of the process's stdout and stderr; None for the agent's own.
            self.targets = self._open_target(Streams.OUT), self._open_target(Streams.ERR)
        except BaseException:
            self.abandon()
            raise

    def attach(self) -> None:
        """Begin to read the pipes; the process has been started with `targets`."""
        self._worker_ends.close()
        self._agent_ends.pop_all()
        for reader in self._readers:
            self._thread.add(reader)

    def abandon(self) -> None:
        """Close everything, because there is no process."""
        self._worker_ends.close()
        self._agent_ends.close()

    def drain(self) -> None:
        """Write what an exited worker has left in its pipes to its files, in the output thread."""
        for reader in self._readers:
            reader.drain()

    def tail(self) -> str:
        """Return the last lines of stderr; nothing if the worker has a terminal for it."""
        return self._tail.text()

    def _open_target(self, stream: Streams) -> int | None:
        """Return the descriptor that the worker gets for this stream.

        Returns:
            The descriptor, or None if the worker inherits the agent's.
        """
        path = self._files.files.get(stream)
        is_shown = bool(stream & self._files.shown)
        if path is not None and stream & self._files.tee:
            return self._open_tee(stream, path)
        if stream is Streams.ERR and path is not None:
            file = self._open_file(path)
            return self._open_pipe(stream, file.write, file.close)
        if path is not None:
            # Whole lines are appended, because several workers may have one file.
            return self._worker_ends.enter_context(open(path, "ab", buffering=0)).fileno()
        if is_shown and (stream is Streams.OUT or _is_terminal(STDERR_FD)):
            return None
        if stream is Streams.OUT:
            return self._worker_ends.enter_context(open(os.devnull, "wb")).fileno()
        show = self._thread.console(STDERR_FD).show if is_shown else lambda _: None
        return self._open_pipe(stream, show, lambda: None)

    def _open_file(self, path: str) -> LogFile:
        return LogFile(self._agent_ends.enter_context(open(path, "ab", buffering=0)))

    def _open_pipe(
        self, stream: Streams, on_chunk: Callable[[bytes], object], on_end: Callable[[], object]
    ) -> int:
        """Return the worker's end of a pipe that the output thread reads."""
        self._thread.start()
        reading, writing = os.pipe()
        self._worker_ends.callback(os.close, writing)
        self._agent_ends.callback(os.close, reading)

        def on_stderr(chunk: bytes) -> None:
            self._tail.feed(chunk)
            on_chunk(chunk)

        take = on_stderr if stream is Streams.ERR else on_chunk
        self._readers.append(PipeReader(reading, take, on_end))
        return writing

    def _open_tee(self, stream: Streams, path: str) -> int:
        """Open a pipe whose bytes go to a file, and whose lines go to the console with a prefix.

        Lines that contain a filter text of this stream also go to another file.

        Returns:
            The descriptor that the worker writes to.
        """
        file = self._open_file(path)
        filtered_path = self._files.filtered.get(stream)
        filtered = None if filtered_path is None else self._open_file(filtered_path)
        console = self._thread.console(sys.stdout if stream is Streams.OUT else sys.stderr)
        splitter = LineSplitter()
        filters = [text.encode() for text in self._options.filters(stream)]

        def with_prefix(lines: Iterable[bytes]) -> bytes:
            return b"".join(self._prefix + line for line in lines)

        def show(lines: list[bytes]) -> None:
            if lines:
                console.show(with_prefix(lines))
            if filtered is not None:
                filtered.write(with_prefix(x for x in lines if any(text in x for text in filters)))

        def on_chunk(chunk: bytes) -> None:
            file.write(chunk)
            show(splitter.cut(chunk))

        def on_end() -> None:
            show(splitter.rest())
            file.close()
            if filtered is not None:
                filtered.close()

        return self._open_pipe(stream, on_chunk, on_end)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
