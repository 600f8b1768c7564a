"""What happens on one node, as events: each is made here, once and with one time.

An event is folded into the node's story, off which status, metrics and the exit summary are read;
it is written to the node's file by a thread of its own, so that neither a full nor a slow disk is
felt; and it is passed on to whoever else looks on. What cannot be kept is counted, and the count is
written when writing works again. What was written is read back here, too.
"""

from __future__ import annotations

import abc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

import attrs

from ..clock import monotonic, wall
from ..errors import describe
from ..threads import Aside
from ..workers.interface import Heartbeat
from .event import LONGEST, Event, decode, encode
from .story import NodeStatus, Story, with_heartbeats

log = logging.getLogger("elasticlib.observe")

FILE = "events.jsonl"
CLOSE_SECONDS = 2.0


class Journal(abc.ABC):
    """Takes what happens, while it happens, from the agent's loop.

    Nothing of it is worth a stop of the training: a journal that raises is called no more, and one
    that is not `prompt` is called in a thread of its own, in order.
    """

    prompt = False
    """Whether `tell` never waits, whatever becomes of the disk or the network behind it."""

    @abc.abstractmethod
    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        """One event; its kinds and their facts are in `elasticlib.observe.event.KINDS`."""


class View(abc.ABC):
    """Hears the events of a node, in a thread of its own; one that raises is called no more."""

    @abc.abstractmethod
    def hear(self, event: Event) -> None:
        """This has happened."""


class Guard:
    """Calls a part whose failures must not be felt: one that raises is named once in the log, and
    is called no more. Events that a slow part has no room for are counted, and the log says how
    many they were.

    Args:
        part: receives the events; the log names its type.
        waiting: limit on the events that wait for a part that is not prompt.
    """

    def __init__(self, part: object, *, waiting: int = 10_000) -> None:
        self._name = type(part).__name__
        self._broken = False
        self._dropped = 0
        self._aside = Aside("agent-view", self._broke, waiting=waiting)

    def call(self, work: Callable[[], object], *, prompt: bool) -> None:
        """prompt: now, else in a thread of its own, as it may wait."""
        if self._broken:
            return
        if not prompt:
            if not self._aside.call(work):
                self._dropped += 1
            return
        try:
            work()
        except Exception as error:
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        self._broken = True
        why = describe(error)
        log.warning("no more events are passed to %s: %s", self._name, why, exc_info=error)

    def settle(self) -> None:
        """Nothing more will be called; returns when all has been, or after some seconds."""
        if not self._aside.close(CLOSE_SECONDS):
            log.warning("%s did not take all events within %g s", self._name, CLOSE_SECONDS)
        if self._dropped:
            log.warning("%s was too slow for %d events, which it lacks", self._name, self._dropped)


class NodeJournal(Journal):
    """One node's events.

    Args:
        run, node: whose events these are.
        path: the file that they are appended to, a line each; its folder is there, and the file is
            made with the first line. None: they are not kept.
        views: hear each event as well.
        found_by: what `elasticlib report` finds the file by.
        waiting: so many may wait to be written; more of them are lost, and counted.
        retry: seconds before another try where a disk takes nothing.

    Attributes:
        on_event: is called after each event has been folded, and must not wait.
    """

    prompt = True

    def __init__(
        self,
        run: str,
        node: str,
        path: str | os.PathLike[str] | None = None,
        *,
        views: Iterable[View] = (),
        found_by: str = "",
        waiting: int = 10_000,
        retry: float = 1.0,
    ) -> None:
        self.story = Story()
        self.on_event: Callable[[], object] = lambda: None
        self.path = "" if path is None else os.fspath(path)
        self.found_by = found_by
        self._run = run
        self._node = node
        self._fold = Guard(self.story)
        self._views = [(view, Guard(view)) for view in views]
        self._file = Aside("journal", _broke, waiting=waiting)
        self._retry = retry
        # The thread that tells events owns the first two counts, the one that writes the others.
        self._told = self._dropped = 0
        self._kept = self._failed = self._counted = 0
        self._last: Event | None = None

    @property
    def lost(self) -> int:
        """How many events could not be written so far."""
        return self._dropped + self._failed

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        event = Event(kind, self._run, self._node, generation, wall(), monotonic(), rank, facts)
        self._fold.call(partial(self.story.fold, event), prompt=True)
        self.on_event()
        for view, guard in self._views:
            guard.call(partial(view.hear, event), prompt=False)
        if not self.path:
            return
        self._told += 1
        if not self._file.call(partial(self._write, event)):
            self._dropped += 1

    def status(self, heartbeats: Mapping[int, Heartbeat]) -> NodeStatus:
        """The node's status now; heartbeats: of its workers, by local rank. For any thread."""
        return with_heartbeats(self.story.status, heartbeats, monotonic())

    def close(self) -> None:
        """Nothing more will happen; what did is put where it belongs, within some seconds."""
        for _, guard in self._views:
            guard.settle()
        if self._last is not None:
            self._file.call(partial(self._written, b"", self._last))
        self._file.close(CLOSE_SECONDS)
        if self._kept < self._told:
            log.warning(
                "%d of %d events of this run are missing from %s: its disk was full or too slow",
                *(self._told - self._kept, self._told, self.path),
            )

    def _write(self, event: Event) -> None:
        self._last = event
        while not self._written(encode(event), event):
            # An event is worth the wait, as long as there is room for those behind it.
            if not self._file.rest(self._retry):
                self._failed += 1
                return
        self._kept += 1

    def _written(self, line: bytes, at: Event) -> bool:
        """Whether the line is in the file, behind the number of the events lost before it."""
        lost = self.lost
        if lost > self._counted:
            facts = {"events": lost - self._counted}
            line = encode(attrs.evolve(at, kind="lost", rank=None, facts=facts)) + line
        if line and not appended(self.path, line):
            return False
        self._counted = lost
        return True


def _broke(error: BaseException) -> None:
    log.error("events are no longer written: %s", describe(error), exc_info=error)


def appended(path: str, line: bytes) -> bool:
    """Whether all of it is in the file; a part of it is taken out again."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return False
    try:
        before = os.fstat(file).st_size
        done = os.write(file, line)
        if done < len(line):
            os.ftruncate(file, before)
    except OSError:
        return False
    finally:
        os.close(file)
    return done == len(line)


# -- read back -------------------------------------------------------------------------------------


class EventsFile:
    """What a journal wrote. Iterated over, it gives the file's events in their order, as many as
    are there by then.

    unread: lines so far that were none: damaged, longer than an event can be, or of another
    version. cut: whether the file ends within a line, as it does when its writer was killed; that
    line is not counted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.unread = 0
        self.cut = False

    def __iter__(self) -> Iterator[Event]:
        self.unread, self.cut = 0, False
        with open(self.path, "rb") as file:
            while line := file.readline(LONGEST + 1):
                if not line.endswith(b"\n"):
                    if len(line) <= LONGEST:
                        # Its writer is at it, or was killed; the rest would pass for a line.
                        self.cut = True
                        return
                    self.cut = not _passed_over(file)
                    self.unread += not self.cut
                    continue
                try:
                    yield decode(line)
                except ValueError:
                    self.unread += 1


def _passed_over(file: BinaryIO) -> bool:
    """Whether the line that this file is in ends; it is too long to be an event."""
    while line := file.readline(LONGEST + 1):
        if line.endswith(b"\n"):
            return True
    return False
