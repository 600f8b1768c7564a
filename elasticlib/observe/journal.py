"""Journal: records the events of one node, and reads them back from a file.

Each event is created here, once, with one time. It is folded into the node's aggregate, from which
status, metrics and exit summary are read; written to a file by a thread of its own, so that a full
or slow disk never delays the agent; and passed to listeners.
"""

from __future__ import annotations

import abc
import heapq
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import BinaryIO

import attrs

from ..clock import monotonic, wall
from ..errors import format_error
from ..threads import BackgroundQueue, reentrant_lock
from ..workers.interface import Heartbeat
from .aggregate import NodeAggregate, NodeStatus, with_heartbeats
from .event import Event, decode, encode
from .event_kinds import MAX_EVENT_BYTES, EventBody, EventsDropped, RunFinished, RunStarted

log = logging.getLogger("elasticlib.observe")

EVENTS_FILE = "events.jsonl"
CLOSE_TIMEOUT_S = 2.0
MAX_PENDING = 10_000  # events that may wait for the disk, or for a slow listener


class Journal(abc.ABC):
    """Receives the events of a node from the agent's event loop.

    A journal never affects the training: one that raises is disabled, and one that is not
    `is_nonblocking` is called in a thread of its own, in order.
    """

    is_nonblocking = False  # True if `record` never waits for a disk or a network

    @abc.abstractmethod
    def record(self, body: EventBody, *, generation: int = 0, rank: int | None = None) -> None:
        """Record an event.

        Args:
            body: What happened. An event of your own is an `OtherEvent`.
            generation: The number of the generation, 0 before the first.
            rank: The global rank, if the event is about one worker.
        """


class EventListener(abc.ABC):
    """Receives the events of a node, in order. One that raises is disabled.

    A listener that is not `is_nonblocking` is called in a thread of its own.
    """

    is_nonblocking = False  # True if `on_event` never waits for a disk or a network

    label = ""  # name in log messages; empty for the name of the class

    @abc.abstractmethod
    def on_event(self, event: Event) -> None:
        """Handle an event."""


class SafeCaller:
    """Calls a component whose failures must not affect the job.

    A component that raises is named once in the log and not called again. Events for which a slow
    component has no room are counted, and the log reports how many there were.

    Args:
        component: receives the events.
        label: name of the component in log messages; empty for that of its class.
        max_pending: limit on the events that wait for a component that may block.
    """

    def __init__(
        self, component: object, *, label: str = "", max_pending: int = MAX_PENDING
    ) -> None:
        self._name = label or type(component).__name__
        self._max_pending = max_pending
        self._has_failed = False
        self._num_dropped = 0  # calls for which there was no room
        self._queue = BackgroundQueue("event-listener", self._on_error, max_pending=max_pending)

    def call(self, work: Callable[[], object], *, is_nonblocking: bool) -> None:
        """Call `work` in this thread if it never blocks, else in a thread of its own."""
        if self._has_failed:
            return
        if not is_nonblocking:
            if not self._queue.call(work):
                self._count_dropped()
            return
        try:
            work()
        except Exception as error:
            self._on_error(error)

    def flush(self) -> None:
        """Wait for pending calls, up to CLOSE_TIMEOUT_S, and accept no more."""
        if not self._queue.close(CLOSE_TIMEOUT_S):
            log.warning(
                "%s did not handle its events within %g s, and misses the last ones",
                *(self._name, CLOSE_TIMEOUT_S),
            )
        if self._num_dropped and not self._has_failed:
            log.warning("%s was too slow: it missed %d events", self._name, self._num_dropped)

    def _count_dropped(self) -> None:
        self._num_dropped += 1
        if self._num_dropped == 1 and not self._has_failed:
            log.warning(
                "%s is too slow: %d events are waiting for it, so it misses further ones",
                *(self._name, self._max_pending),
            )

    def _on_error(self, error: BaseException) -> None:
        self._has_failed = True
        reason = format_error(error)
        log.warning("%s failed and gets no more events: %s", self._name, reason, exc_info=error)


class NodeJournal(Journal):
    """Records the events of one node.

    Args:
        run: id of the job.
        node: id of the node.
        path: file that events are appended to, in an existing directory; None to write none.
        listeners: receive each event.
        run_selector: argument with which `elasticlib report` finds the file.
        max_pending: limit on events that wait to be written; more are dropped and counted.
        retry_interval: seconds between tries to write to a full disk.

    Attributes:
        aggregate: the state of the node, by its events.
    """

    is_nonblocking = True

    def __init__(
        self,
        run: str,
        node: str,
        path: str | os.PathLike[str] | None = None,
        *,
        listeners: Iterable[EventListener] = (),
        run_selector: str = "",
        max_pending: int = MAX_PENDING,
        retry_interval: float = 1.0,
    ) -> None:
        self.aggregate = NodeAggregate()
        self._on_recorded: Callable[[], object] = lambda: None
        self.path = "" if path is None else os.fspath(path)
        self.run_selector = run_selector
        self._run = run
        self._node = node
        self._aggregate_caller = SafeCaller(self.aggregate)
        self._listeners = [
            (listener, SafeCaller(listener, label=listener.label)) for listener in listeners
        ]
        self._file_queue = BackgroundQueue("journal", _on_write_error, max_pending=max_pending)
        self._retry_interval = retry_interval
        # Guards what follows: the requests of operators are recorded by a thread of their own. A
        # listener may record events as well.
        self._lock = reentrant_lock()
        self._num_rejected = 0  # they were no valid events
        self._num_recorded = 0
        self._num_unqueued = 0  # there was no room in the queue
        # Owned by the calls that write the file, which are executed one after the other:
        self._num_written = 0
        self._num_failed = 0  # given up because the queue was full
        self._num_reported = 0  # dropped events that the file mentions
        self._last: Event | None = None

    @property
    def num_dropped(self) -> int:
        """Number of events that could not be written so far."""
        return self._num_rejected + self._num_unqueued + self._num_failed

    def call_when_recorded(self, function: Callable[[], object]) -> None:
        """Call a function after each event, in the thread that records it. It must not block."""
        self._on_recorded = function

    def record(self, body: EventBody, *, generation: int = 0, rank: int | None = None) -> None:
        """Record an event. One that is no valid event counts as dropped; the log says so once.

        Any thread may record events. The file has them in the order of their times.
        """
        with self._lock:
            self._record(body, generation, rank)

    def _record(self, body: EventBody, generation: int, rank: int | None) -> None:
        times = wall(), monotonic()
        try:
            event = Event(body, self._run, self._node, generation, *times, rank)
        except Exception as error:
            self._reject(body, error)
            return
        self._aggregate_caller.call(partial(self.aggregate.apply, event), is_nonblocking=True)
        self._on_recorded()
        for listener, caller in self._listeners:
            on_event = partial(listener.on_event, event)
            caller.call(on_event, is_nonblocking=listener.is_nonblocking)
        if not self.path:
            return
        self._num_recorded += 1
        if not self._file_queue.call(partial(self._write, event)):
            self._num_unqueued += 1

    def _reject(self, body: object, error: Exception) -> None:
        self._num_rejected += 1
        if self._num_rejected == 1:
            kind = getattr(body, "kind", type(body).__name__)
            log.warning(
                "an event %.60s is not recorded: %s; further invalid events are only counted",
                *(kind, error),
            )

    def status(self, heartbeats: Mapping[int, Heartbeat]) -> NodeStatus:
        """Return the current status of the node. Thread-safe.

        Args:
            heartbeats: heartbeats of the workers by local rank.
        """
        return with_heartbeats(self.aggregate.status, heartbeats, monotonic())

    def close(self) -> None:
        """Wait for pending writes and listeners, up to CLOSE_TIMEOUT_S for each."""
        for _, caller in self._listeners:
            caller.flush()
        if self._last is not None:
            self._file_queue.call(partial(self._append, b"", self._last))
        self._file_queue.close(CLOSE_TIMEOUT_S)
        if self._num_written < self._num_recorded:
            log.warning(
                "%d of %d events of this run are missing in %s: the disk was full or too slow",
                *(self._num_recorded - self._num_written, self._num_recorded, self.path),
            )

    def _write(self, event: Event) -> None:
        self._last = event
        while not self._append(encode(event), event):
            # Retry for as long as there is room for the events that follow.
            if not self._file_queue.wait_before_retry(self._retry_interval):
                self._num_failed += 1
                return
        self._num_written += 1

    def _append(self, line: bytes, template: Event) -> bool:
        """Append a line to the file, after an `events.dropped` event if events were dropped.

        Returns:
            False if the file cannot be written. The next call then reports the dropped events.
        """
        dropped = self.num_dropped
        if dropped > self._num_reported:
            body = EventsDropped(count=dropped - self._num_reported)
            notice = attrs.evolve(template, body=body, rank=None)
            line = encode(notice) + line
        if line and not append_line(self.path, line):
            return False
        self._num_reported = dropped
        return True


def _on_write_error(error: BaseException) -> None:
    log.error(
        "no more events are written to the event file, and status and report end there: %s",
        format_error(error),
        exc_info=error,
    )


def append_line(path: str, line: bytes) -> bool:
    """Append to a file; a line that is written in part is removed. Return True on success."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return False
    try:
        size = os.fstat(file).st_size
        written = os.write(file, line)
        if written < len(line):
            os.ftruncate(file, size)
    except OSError:
        return False
    finally:
        os.close(file)
    return written == len(line)


class EventFile:
    """Reads what a journal wrote. Iterating yields the events that the file holds at that time.

    Attributes:
        invalid_lines: lines of the last iteration that were no events of this version.
        is_truncated: the file ends within a line, because its writer is writing or was killed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.invalid_lines = 0
        self.is_truncated = False
        self._offset = 0  # behind the last complete line that was read

    def __iter__(self) -> Iterator[Event]:
        self.invalid_lines, self._offset = 0, 0
        return self.new_events()

    def new_events(self) -> Iterator[Event]:
        """Yield the events that were appended since the last reading, or all at first."""
        self.is_truncated = False
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            while line := file.readline(MAX_EVENT_BYTES + 1):
                is_complete = line.endswith(b"\n")
                if not is_complete and (len(line) <= MAX_EVENT_BYTES or not _skip_line(file)):
                    self.is_truncated = True
                    return
                self._offset = file.tell()
                try:
                    if not is_complete:
                        raise ValueError("the line is too long")
                    event = decode(line)
                except ValueError:
                    self.invalid_lines += 1
                else:
                    yield event


def _skip_line(file: BinaryIO) -> bool:
    """Read up to the end of a line that is too long; return False at the end of the file."""
    while line := file.readline(MAX_EVENT_BYTES + 1):
        if line.endswith(b"\n"):
            return True
    return False


class EventStream:
    """Reads the growing event files of a run in the order of time.

    Args:
        paths: the event files.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        self._files: dict[str, EventFile] = {}  # by real path, because records link to files
        # The last `run.started` of each file, by path, until a `run.finished` follows it.
        self._starts: dict[str, RunStarted] = {}
        self.add(paths)

    @property
    def paths(self) -> list[str]:
        """The event files."""
        return [file.path for file in self._files.values()]

    def add(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Also read these files, unless they are read already."""
        for path in paths:
            self._files.setdefault(os.path.realpath(path), EventFile(path))

    def read(self) -> Iterator[Event]:
        """Yield the events that were appended since the last call, sorted by time.

        Raises:
            OSError: a file cannot be read.
        """
        new = [self._read(file) for file in self._files.values()]
        yield from heapq.merge(*new, key=attrgetter("timestamp"))

    @property
    def unfinished(self) -> dict[str, RunStarted]:
        """The `run.started` of each file whose agent has not recorded its end, by path."""
        return dict(self._starts)

    def _read(self, file: EventFile) -> Iterator[Event]:
        for event in file.new_events():
            if isinstance(event.body, RunStarted):
                self._starts[file.path] = event.body
            elif isinstance(event.body, RunFinished):
                self._starts.pop(file.path, None)
            if event.is_plausible:
                yield event
