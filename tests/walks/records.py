"""What the probe wrote, and what a walk is: the calls between two times, counted by file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

AROUND = ("stores/", "observe/", "launch/", "checkpoint/")
"""Folders that the core speaks to through an interface. The first house's figures, 61, 52 and 34
files, were counted without them."""


@dataclass(frozen=True)
class Call:
    """One call of a function of the library; at: in ns of the machine's monotonic clock."""

    at: int
    process: int
    thread: int
    thread_name: str
    file: str
    function: str


@dataclass(frozen=True)
class Walk:
    """The calls of one run of a scenario from its start event to its end event.

    quiet: the calls of the same length of time and more before the start event, in which nothing
    happened that the scenario is about.
    """

    calls: tuple[Call, ...]
    quiet: tuple[Call, ...]
    agents: frozenset[int]
    names: dict[int, str]
    milliseconds: float

    @property
    def files(self) -> set[str]:
        """The figure: in which a function ran, in any process, but for `__init__.py`."""
        return counted(self.calls)

    @property
    def reacting(self) -> set[str]:
        """Those with a function that had not run in the quiet time in the same process."""
        usual = {(call.process, call.file, call.function) for call in self.quiet}
        return counted(
            call for call in self.calls if (call.process, call.file, call.function) not in usual
        )

    @property
    def core(self) -> Walk:
        """The same without the folders around the core."""
        inside = tuple(call for call in self.calls if not call.file.startswith(AROUND))
        return replace(self, calls=inside)

    @property
    def threads(self) -> dict[str, set[str]]:
        """The threads of each agent in which a function ran."""
        found = defaultdict(set)
        for call in self.calls:
            if call.process in self.agents:
                found[self.names[call.process]].add(f"{call.thread_name} ({call.thread})")
        return dict(found)

    @property
    def thread_count(self) -> int:
        return sum(map(len, self.threads.values()))

    @property
    def by_process(self) -> dict[str, set[str]]:
        """The files of each process, by its name; of two with the same name, together."""
        found = defaultdict(set)
        for call in self.calls:
            found[self.names.get(call.process, "helper")] |= counted([call])
        return {name: files for name, files in sorted(found.items()) if files}


def counted(calls: Iterable[Call]) -> set[str]:
    return {call.file for call in calls if Path(call.file).name != "__init__.py"}


def read(folder: Path) -> list[Call]:
    """All that the processes wrote so far, in the order in which it happened."""
    return sorted(_calls(folder), key=lambda call: call.at)


def _calls(folder: Path) -> Iterator[Call]:
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            at, thread, *rest = line.split("\t")
            yield Call(int(at), int(path.name), int(thread), *rest)


def walk(
    calls: Collection[Call], start: int, end: int, *, agents: Iterable[int], names: dict[int, str]
) -> Walk:
    """What ran from start to end, both included; the quiet time is all of 2 s before it."""
    return Walk(
        tuple(call for call in calls if start <= call.at <= end),
        tuple(call for call in calls if start - 2_000_000_000 <= call.at < start),
        frozenset(agents),
        names,
        (end - start) / 1e6,
    )
