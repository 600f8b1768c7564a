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

MAX_RANK = 99_999  # larger than any job that we know
MAX_NAMED_RANKS = 10_000  # a query that names more would not fit into a store's entry


class Streams(enum.IntFlag):
    """A set of a worker's output streams, with the values of torch's `Std`."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


NAMES: Mapping[Streams, str] = {Streams.OUT: "stdout", Streams.ERR: "stderr"}


@attrs.frozen
class StreamChoice:
    """Streams of each worker.

    Attributes:
        everywhere: The streams of workers that `by_rank` does not name.
        by_rank: The streams of other workers, by local rank.
    """

    everywhere: Streams = Streams.NONE
    by_rank: Mapping[int, Streams] = attrs.field(factory=dict)

    def for_rank(self, local_rank: int) -> Streams:
        return self.by_rank.get(local_rank, self.everywhere)

    @property
    def any(self) -> bool:
        return bool(self.everywhere) or any(self.by_rank.values())


def parse_streams(text: str, option: str) -> StreamChoice:
    """Parse a choice of streams.

    Args:
        text: One number for all workers, as in `3`, or one for each local rank, as in `0:1,1:2`.
        option: The flag, for the error message.

    Raises:
        ConfigError: The text has another format.
    """
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
            f"{option} must be 0, 1, 2 or 3, or such a number for each of some local ranks, "
            f"as in 0:1,1:2, got {text!r}"
        ) from error


def parse_ranks(text: str) -> frozenset[int]:
    """Parse a list of ranks, such as `0,3` or `0-3,8`.

    Raises:
        ConfigError: The text has another format, or names more than MAX_NAMED_RANKS ranks.
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
    """Files of one worker, and which of its streams are shown on the console."""

    files: Mapping[Streams, str] = attrs.field(factory=dict)  # the path of each stream's file
    tee: Streams = Streams.NONE  # streams with a file that are also shown, line by line
    shown: Streams = Streams.ALL  # streams without a file that are shown
    filtered: Mapping[Streams, str] = attrs.field(factory=dict)  # files of matching lines


@attrs.frozen
class OutputPlan:
    """A plan for the output of all workers of a node. The defaults show all of it.

    Attributes:
        redirect: Streams that go to files only.
        tee: Streams that go to files and, line by line, to the console.
        shown_ranks: Local ranks whose output is shown; None for all.
        stdout_filters: Lines of a shown stdout of `tee` with one of these texts also go to one file
            of the attempt.
        stderr_filters: The same texts for stderr.
        line_prefix_template: The prefix of each shown line of `tee`, with `${role_name}`,
            `${rank}`, `${local_rank}` and `${hostname}` as placeholders. None for torchrun's
            default, role and rank.
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
        """Return the prefix of each shown line of a worker on this host."""
        if self.line_prefix_template is None:
            return f"[{role}{worker.rank}]:"
        return Template(self.line_prefix_template).safe_substitute(
            role_name=role, rank=worker.rank, local_rank=worker.local_rank, hostname=host
        )

    def files_of(self, local_rank: int, log_dir: str) -> OutputFiles:
        """Return the files of a worker.

        Args:
            local_rank: The worker's local rank.
            log_dir: The worker's own directory; its parent is the attempt's.
        """
        shown = self.shows(local_rank)
        tee = self.tee.for_rank(local_rank)
        kept = self.redirect.for_rank(local_rank) | tee
        tee = tee if shown else Streams.NONE
        attempt_dir = log_dir.rpartition("/")[0]
        return OutputFiles(
            files={s: f"{log_dir}/{name}.log" for s, name in NAMES.items() if s & kept},
            tee=tee,
            shown=Streams.ALL if shown else Streams.NONE,
            filtered={
                s: f"{attempt_dir}/filtered_{name}.log"
                for s, name in NAMES.items()
                if s & tee and self.filters(s)
            },
        )
