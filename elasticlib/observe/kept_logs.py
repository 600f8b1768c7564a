"""Which files hold the lines of a run's workers, as its events and its folders of logs tell it.

A node's folder is the one in which its events lie; in it there is one for each attempt, and there
one for each worker. Which global rank that was is known from the events alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import attrs

from .event import Event, decode
from .runs import EVENTS, of_one_job, read_record

STREAMS = {"out": ("stdout",), "err": ("stderr",), "both": ("stdout", "stderr")}
CHUNK = 256 * 1024
MOST_WORKERS = 4096
"""Of one node: an event that tells of more is no event of ours."""


@attrs.frozen
class Attempt:
    """One start of a node's workers. first, last: their global ranks."""

    number: int
    generation: int
    first: int
    last: int
    cause: str


@attrs.frozen
class Kept:
    """One worker's stream, of one attempt, in a file that may not be there."""

    path: Path
    attempt: int
    rank: int


class NodeLogs:
    """What is known of one node's logs; `look` takes in what has happened since.

    Args:
        events: its `events.jsonl`, or a link to it.
    """

    def __init__(self, events: Path) -> None:
        self.events = events
        self.run = ""
        self.logs: str | None = None
        self.attempts: list[Attempt] = []
        self.began = self.seen = 0.0
        self._host, self._pid = "", 0
        self._ended = False
        self._read = Tail(events)
        self.look()

    @property
    def folder(self) -> Path:
        """Where the attempts' folders are: also on another machine than the node's own."""
        return self.events.resolve().parent

    @property
    def over(self) -> bool:
        """Whether nothing more is to come: it has ended, or its process here is gone."""
        return self._ended or (self._here and not os.path.exists(f"/proc/{self._pid}"))

    @property
    def _here(self) -> bool:
        return self._host == socket.gethostname() and self._pid > 0

    def with_run_of(self, began: float) -> bool:
        """Whether it was there when another node's part began, in seconds since 1970. (Of other
        machines' nodes no more is known than when they last told something.)"""
        return self.seen >= began or (self._here and not self.over)

    def look(self) -> None:
        """Read what has been told since the last look; lines that nobody can read are passed by."""
        for line in self._read.lines():
            try:
                self._take(decode(line))
            except ValueError:
                continue

    def _take(self, event: Event) -> None:
        self.began, self.seen = self.began or event.wall, event.wall
        if event.kind == "run.began":
            self.run = event.run
            self._host, self._pid = event.text("host"), event.count("pid") or 0
            self.logs = event.text("logs") if "logs" in event.facts else None
        elif event.kind == "generation.began":
            first, last = event.pair("ranks") or (0, 0)
            if last - first >= MOST_WORKERS:
                raise ValueError(f"a node has at most {MOST_WORKERS} workers")
            number, cause = event.count("attempt"), event.text("cause")
            if number is None:
                number = len(self.attempts)
            self.attempts.append(Attempt(number, event.generation, first, last, cause))
        elif event.kind == "run.ended":
            self._ended = True

    def kept(self, attempt: Attempt, streams: str) -> Iterator[Kept]:
        """The files of an attempt, rank by rank."""
        for rank in range(attempt.first, attempt.last + 1):
            folder = self.folder / f"attempt_{attempt.number}" / str(rank - attempt.first)
            for name in STREAMS[streams]:
                yield Kept(folder / f"{name}.log", attempt.number, rank)


class Tail:
    """The lines of a file that grows, or is not there yet, as they come.

    chunk: bytes to read at a time, and the longest piece of a line that does not end.
    """

    def __init__(self, path: Path, *, chunk: int = CHUNK) -> None:
        self.path = path
        self._chunk = chunk
        self._at = 0
        self._part = b""

    def skip_to_last(self, count: int) -> None:
        """Begin with the last so many lines of what is there now."""
        try:
            with self.path.open("rb") as file:
                at = end = file.seek(0, os.SEEK_END)
                last = b""
                # One end of a line more than lines: what is before the first of them.
                while count and at > 0 and last.count(b"\n") <= count:
                    size = min(self._chunk, at)
                    at -= size
                    file.seek(at)
                    last = file.read(size) + last
        except OSError:
            return
        ended = last.endswith(b"\n")
        wanted = last.removesuffix(b"\n").split(b"\n")[-count:] if last else []
        self._at = end - sum(len(line) + 1 for line in wanted) + (bool(wanted) and not ended)

    def lines(self) -> Iterator[bytes]:
        """All whole lines since the last call, without their ends; endless ones come in pieces."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self._at:
                self._at, self._part = 0, b""  # it was made anew
            file.seek(self._at)
            while data := file.read(self._chunk):
                self._at += len(data)
                *whole, self._part = (self._part + data).split(b"\n")
                yield from whole
                if len(self._part) > self._chunk:
                    yield self._part
                    self._part = b""

    def rest(self) -> Iterator[bytes]:
        """The line that was begun and not ended, as nothing more is to come."""
        if self._part:
            yield self._part
        self._part = b""


class Neighbours:
    """Finds the nodes of a run whose folders lie beside those of others of it, as in a log
    directory that several machines share.

    A file of another job is dismissed by its first line, once; what an earlier run of the same job
    wrote is read once.
    """

    def __init__(self) -> None:
        self._dismissed: set[Path] = set()
        self._read: dict[Path, NodeLogs] = {}

    def beside(self, found: list[NodeLogs]) -> list[NodeLogs]:
        """These and their neighbours. Jobs of one id may follow one another: others than those that
        ran together with these are left out."""
        nodes = {node.folder: node for node in found}
        began = max((node.began for node in found), default=0.0)
        for parent in {node.folder.parent for node in found if node.logs != ""}:
            for events in sorted(parent.glob(f"*/{EVENTS}")):
                if events.parent in nodes:
                    continue
                other = self._of_run(events, found[0].events)
                if other is not None and other.with_run_of(began):
                    nodes[other.folder] = other
        return sorted(nodes.values(), key=lambda node: (node.began, node.folder))

    def _of_run(self, events: Path, first: Path) -> NodeLogs | None:
        """What these events tell by now, if they are of the job of those."""
        known = self._read.get(events)
        if known is not None:
            known.look()
            return known
        if events in self._dismissed:
            return None
        mine, other = read_record(first), read_record(events)
        if mine is None or other is None or not other.run:
            return None  # its first line may be on its way
        if not of_one_job(mine, other):
            self._dismissed.add(events)
            return None
        return self._read.setdefault(events, NodeLogs(events))
