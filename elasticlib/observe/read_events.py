"""Reads `events.jsonl` files: a line at a time, however long they are, and whatever state a crash
left them in. What cannot be read is counted, and the count is told."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import attrs

from ..errors import ConfigError
from .event import LONGEST, Event, decode
from .history import History
from .reading import history_of
from .runs import find_runs


class EventsFile:
    """Iterated over, it gives the file's events in their order, as many as are there by then.

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


def read_history(run: str | os.PathLike[str] = "") -> History:
    """A run's history, from the events of all its agents that are found here.

    run: its id; or a path: a file of events, a run's record, or a folder of logs, of one node or of
    several. If left out, this user's newest run here that goes on, or if none does the newest.

    Raises:
        NoSuchRun: there is none; the error lists what there is.
        ConfigError: its events cannot be read.
    """
    return read_files(find_runs(run))


def read_files(paths: Iterable[str | os.PathLike[str]]) -> History:
    """The history that these files tell together; each is read once, by however many names it is
    given, in bounded memory.

    Raises:
        ConfigError: one cannot be read, or there is no event in any of them.
    """
    named = {os.path.realpath(path): os.fspath(path) for path in paths}
    files = [EventsFile(path) for path in sorted(named.values())]
    try:
        history = history_of({file.path: file for file in files})
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    unread = sum(file.unread for file in files)
    if not history.nodes:
        where = ", ".join(file.path for file in files) or "no file at all"
        raise ConfigError(f"a history is read of events, got {where} with {unread} other lines")
    return attrs.evolve(history, unread=unread)
