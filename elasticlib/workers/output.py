"""Where a worker's streams go: through to ours, to a file, or line by line to both.

A pipe has one thread that reads it to its end, whatever becomes of the file or the console, so a
worker never waits for them or dies with them; nothing that it wrote before it ended is lost.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import attrs

from ..clock import monotonic
from .lines import Lines
from .streams import StreamChoice, Streams
from .warm import Warm

log = logging.getLogger("elasticlib.workers")

CHUNK = 1 << 16


@attrs.frozen
class OutputPlan:
    """Streams to write to files, and streams to write to files and show."""

    redirect: StreamChoice = attrs.field(factory=StreamChoice)
    tee: StreamChoice = attrs.field(factory=StreamChoice)

    @property
    def any(self) -> bool:
        return self.redirect.any or self.tee.any


class Output:
    """The streams of one worker; files are opened by `open`, before there is a process."""

    def __init__(self, plan: OutputPlan, local_rank: int, folder: Path, prefix: str) -> None:
        self._redirect = plan.redirect.of(local_rank)
        self._tee = plan.tee.of(local_rank)
        self._folder = folder
        self._prefix = prefix.encode()
        self._files: dict[Streams, IO[bytes]] = {}
        self._pumps: list[threading.Thread] = []

    def open(self) -> Output:
        """Raises OSError where a file cannot be written."""
        for stream, name in ((Streams.OUT, "stdout.log"), (Streams.ERR, "stderr.log")):
            if stream & (self._redirect | self._tee):
                self._files[stream] = open(self._folder / name, "ab")  # noqa: SIM115
        return self

    def target(self, stream: Streams) -> int | IO[bytes] | None:
        """What to give to Popen for stdout or stderr."""
        return subprocess.PIPE if stream & self._tee else self._files.get(stream)

    def attach(self, process: subprocess.Popen[bytes] | Warm) -> None:
        """Read the pipes of the process that has been started with these targets."""
        for stream, pipe in ((Streams.OUT, process.stdout), (Streams.ERR, process.stderr)):
            if pipe is None:
                continue
            console = sys.stdout if stream is Streams.OUT else sys.stderr
            args = (pipe, self._files.pop(stream), console, self._prefix)
            pump = threading.Thread(target=_pump, args=args, daemon=True, name="worker-output")
            pump.start()
            self._pumps.append(pump)
        # Files that were handed over whole are the worker's alone now.
        self.abandon()

    def abandon(self) -> None:
        """Close the files that nobody here writes to."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def close(self, seconds: float = 0.5) -> None:
        """After the worker and its session are gone: what was written is in its place.

        Something that left the session may hold a pipe open for ever. Its thread goes on reading
        after these seconds, for all streams together, and this worker is waited for no longer.
        """
        deadline = monotonic() + seconds
        for pump in self._pumps:
            pump.join(max(0.0, deadline - monotonic()))


class _Sink:
    """Takes bytes until that fails, then says so once and takes no more."""

    def __init__(self, name: str, write: Callable[[bytes], None]) -> None:
        self._name = name
        self._write: Callable[[bytes], None] | None = write

    def take(self, data: bytes) -> None:
        if self._write is None or not data:
            return
        try:
            self._write(data)
        except (OSError, ValueError) as error:
            self._write = None
            log.warning("a worker's output is no longer written to %s: %s", self._name, error)


def _pump(pipe: IO[bytes], file: IO[bytes], console: IO[str], prefix: bytes) -> None:
    lines = Lines(prefix)
    kept = _Sink(str(file.name), lambda data: _write_through(file, data))
    shown = _Sink("the console", lambda data: _show(console, data))
    with pipe:
        while chunk := pipe.read1(CHUNK):  # type: ignore[attr-defined]
            kept.take(chunk)
            shown.take(lines.feed(chunk))
    shown.take(lines.rest())
    _Sink(str(file.name), lambda _: file.close()).take(b"end")


def _write_through(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.flush()


def _show(console: IO[str], text: bytes) -> None:
    # One write a chunk, so that the lines of several workers do not run into one another.
    try:
        console.buffer.write(text)  # type: ignore[attr-defined]
    except AttributeError:
        console.write(text.decode(errors="replace"))
    console.flush()
