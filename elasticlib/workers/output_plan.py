"""Plan for workers' output: which streams go to files, to the console, or to both.

The plan has torchrun's meanings. A choice of streams is `3` for both streams of every worker, or
`0:1,1:2` for some local ranks, where 1 is stdout, 2 is stderr and 3 is both. The names of a
worker's files follow from the plan and a directory, as torchrun lays them out. This module does no
I/O; `output.py` carries the plan out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from string import Template

import attrs

from ..errors import ConfigError
from .spec import Worker

ERROR_FILE = "error.json"
MAX_RANK = 99_999
MAX_NAMED_RANKS = 10_000


class Streams(enum.IntFlag):
    """A set of a worker's output streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


NAMES: Mapping[Streams, str] = {Streams.OUT: "stdout", Streams.ERR: "stderr"}


@attrs.frozen
class StreamChoice:
    """Streams by local rank; `everywhere` for those not named."""

    everywhere: Streams = Streams.NONE
    by_rank: Mapping[int, Streams] = attrs.field(factory=dict)

    def for_rank(self, local_rank: int) -> Streams:
        return self.by_rank.get(local_rank, self.everywhere)

    @property
    def any(self) -> bool:
        return bool(self.everywhere) or any(self.by_rank.values())


def parse_streams(text: str, option: str) -> StreamChoice:
    """A choice from `3` or `0:1,1:2`; `option` names the flag in the error."""
    try:
        if ":" not in text:
            return StreamChoice(everywhere=_streams(text))
        pairs = [part.split(":") for part in text.split(",")]
        by_rank = {int(rank): _streams(which) for rank, which in pairs}
        if len(by_rank) < len(pairs) or min(by_rank) < 0:
            raise ValueError(text)
        return StreamChoice(by_rank=by_rank)
    except ValueError as error:
        raise ConfigError(
            f"{option} is 0, 1, 2 or 3, or such a number for some local ranks "
            f"as in 0:1,1:2, got {text!r}"
        ) from error


def parse_ranks(text: str) -> frozenset[int]:
    """The ranks of `0,3` or `0-3,8`.

    Raises:
        ConfigError: they are none, or more than a question to a job's nodes can name.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and len(end) < 8 for end in ends):
            raise ConfigError(f"ranks are numbers as in 0,3 or 0-7, got {text!r}")
        low, high = int(ends[0]), int(ends[1])
        if low > high:
            raise ConfigError(
                f"ranks go from the lower to the higher, as in {high}-{low}, got {part.strip()!r}"
            )
        if high > MAX_RANK:
            raise ConfigError(f"a rank is at most {MAX_RANK}, got {high}")
        found.update(range(low, high + 1))
    if len(found) > MAX_NAMED_RANKS:
        raise ConfigError(
            f"at most {MAX_NAMED_RANKS} ranks can be named, got {len(found)}: name none for all"
        )
    return frozenset(found)


def _streams(text: str) -> Streams:
    number = int(text)
    if not 0 <= number <= Streams.ALL:
        raise ValueError(text)
    return Streams(number)


@attrs.frozen
class OutputFiles:
    """The files of one worker. files: a path for each stream that has one. tee: those of them that
    are shown as well, line by line. shown: whether the streams without a file are. filtered: the
    files for the shown lines that were asked for. error_file: where it writes of its failure.
    """

    error_file: str
    files: Mapping[Streams, str] = attrs.field(factory=dict)
    tee: Streams = Streams.NONE
    shown: Streams = Streams.ALL
    filtered: Mapping[Streams, str] = attrs.field(factory=dict)


@attrs.frozen
class OutputPlan:
    """Streams to write to files, and streams to write to files and show.

    shown_ranks: the local ranks whose output is shown at all, None for all of them. stdout_filters,
    stderr_filters: lines of shown streams of `tee` with one of these in it are written to a file
    of the attempt, too. line_prefix_template: what stands before each shown line of `tee`, with
    `${role_name}`, `${rank}`, `${local_rank}` and `${hostname}` filled in.
    """

    redirect: StreamChoice = attrs.field(factory=StreamChoice)
    tee: StreamChoice = attrs.field(factory=StreamChoice)
    shown_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    line_prefix_template: str | None = None

    @property
    def any(self) -> bool:
        return self.redirect.any or self.tee.any

    def shows(self, local_rank: int) -> bool:
        return self.shown_ranks is None or local_rank in self.shown_ranks

    def filters(self, stream: Streams) -> tuple[bytes, ...]:
        texts = self.stdout_filters if stream is Streams.OUT else self.stderr_filters
        return tuple(text.encode() for text in texts)

    def prefix(self, role: str, worker: Worker, host: str) -> str:
        """What stands before each line of a worker of that host."""
        if self.line_prefix_template is None:
            return f"[{role}{worker.rank}]:"
        return Template(self.line_prefix_template).safe_substitute(
            role_name=role, rank=worker.rank, local_rank=worker.local_rank, hostname=host
        )

    def files_of(self, local_rank: int, folder: str) -> OutputFiles:
        """torchrun's tree: a folder for each attempt, and one in it for each worker, which this
        is."""
        shown = self.shows(local_rank)
        tee = self.tee.for_rank(local_rank)
        kept = self.redirect.for_rank(local_rank) | tee
        tee = tee if shown else Streams.NONE
        attempt = folder.rpartition("/")[0]
        return OutputFiles(
            error_file=f"{folder}/{ERROR_FILE}",
            files={s: f"{folder}/{name}.log" for s, name in NAMES.items() if s & kept},
            tee=tee,
            shown=Streams.ALL if shown else Streams.NONE,
            filtered={
                s: f"{attempt}/filtered_{name}.log"
                for s, name in NAMES.items()
                if s & tee and self.filters(s)
            },
        )
