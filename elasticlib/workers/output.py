"""Where a worker's streams go: through to ours, to a file, or line by line to both.

A pipe has one thread that reads it to its end, so a line is shown when it is whole, and nothing
that a worker wrote before it ended is lost, half lines included.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import attrs

from .streams import StreamChoice, Streams

CHUNK = 1 << 16


@attrs.frozen
class OutputPlan:
    """Streams to write to files, and streams to write to files and show; where the files go."""

    redirect: StreamChoice = attrs.field(factory=StreamChoice)
    tee: StreamChoice = attrs.field(factory=StreamChoice)


class Output:
    """The streams of one worker."""

    def __init__(self, plan: OutputPlan, local_rank: int, folder: Path, prefix: str) -> None:
        self._redirect = plan.redirect.of(local_rank)
        self._tee = plan.tee.of(local_rank)
        self._folder = folder
        self._prefix = prefix.encode()
        self._files: list[IO[bytes]] = []
        self._pumps: list[threading.Thread] = []

    def target(self, stream: Streams) -> int | IO[bytes] | None:
        """What to give to Popen for stdout or stderr."""
        if stream & self._tee:
            return subprocess.PIPE
        return self._file(stream) if stream & self._redirect else None

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        """Read the pipes of the process that has been started with these targets."""
        for stream, pipe in ((Streams.OUT, process.stdout), (Streams.ERR, process.stderr)):
            if pipe is not None:
                console = sys.stdout if stream is Streams.OUT else sys.stderr
                args = (pipe, self._file(stream), console, self._prefix)
                pump = threading.Thread(target=_pump, args=args, daemon=True, name="worker-output")
                pump.start()
                self._pumps.append(pump)

    def close(self, seconds: float = 5.0) -> None:
        """After the worker and its session are gone: all that was written is in its place."""
        for pump in self._pumps:
            pump.join(seconds)
        if any(pump.is_alive() for pump in self._pumps):
            # Something that left the worker's session holds the pipe, and may yet write.
            return
        for file in self._files:
            file.close()

    def _file(self, stream: Streams) -> IO[bytes]:
        name = "stdout.log" if stream is Streams.OUT else "stderr.log"
        file = open(self._folder / name, "ab")  # noqa: SIM115 - closed by close()
        self._files.append(file)
        return file


def _pump(pipe: IO[bytes], file: IO[bytes], console: IO[str], prefix: bytes) -> None:
    half = b""
    with pipe:
        while chunk := pipe.read1(CHUNK):  # type: ignore[attr-defined]
            file.write(chunk)
            file.flush()
            *lines, half = (half + chunk).split(b"\n")
            _show(console, [prefix + line for line in lines])
        if half:
            _show(console, [prefix + half])


def _show(console: IO[str], lines: list[bytes]) -> None:
    if not lines:
        return
    text = b"".join(line + b"\n" for line in lines)
    # One write a chunk, so that the lines of several workers do not run into one another.
    try:
        console.buffer.write(text)  # type: ignore[attr-defined]
    except AttributeError:
        console.write(text.decode(errors="replace"))
    console.flush()
