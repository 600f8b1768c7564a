"""Which of a worker's streams go to files, to the console, or to both.

`OutputOptions` has torchrun's meanings. The names of a worker's files follow from the options and a
directory, as torchrun lays them out. This module does no I/O; `output.py` writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

import attrs

from ..errors import ConfigError
from ..options import OutputOptions, Streams
from .spec import Worker

MAX_RANK = 99_999  # larger than any job that we know
MAX_NAMED_RANKS = 10_000  # a query that names more would not fit into a store's entry
NAMES: Mapping[Streams, str] = {Streams.OUT: "stdout", Streams.ERR: "stderr"}


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


@attrs.frozen
class OutputFiles:
    """Files of one worker, and which of its streams are shown on the console."""

    files: Mapping[Streams, str] = attrs.field(factory=dict)  # the path of each stream's file
    tee: Streams = Streams.NONE  # streams with a file that are also shown, line by line
    shown: Streams = Streams.ALL  # streams without a file that are shown
    filtered: Mapping[Streams, str] = attrs.field(factory=dict)  # files of matching lines


def line_prefix(options: OutputOptions, role: str, worker: Worker, host: str) -> str:
    """Return the prefix of each shown line of a worker on this host."""
    if options.line_prefix is None:
        return f"[{role}{worker.rank}]:"
    return Template(options.line_prefix).safe_substitute(
        role_name=role, rank=worker.rank, local_rank=worker.local_rank, hostname=host
    )


def files_of(options: OutputOptions, local_rank: int, log_dir: str) -> OutputFiles:
    """Return the files of a worker.

    Args:
        options: Where the output of the workers goes.
        local_rank: The worker's local rank.
        log_dir: The worker's own directory; its parent is the attempt's.
    """
    shown = options.shows(local_rank)
    tee = options.tee.for_rank(local_rank)
    kept = options.redirect.for_rank(local_rank) | tee
    tee = tee if shown else Streams.NONE
    attempt_dir = log_dir.rpartition("/")[0]
    return OutputFiles(
        files={s: f"{log_dir}/{name}.log" for s, name in NAMES.items() if s & kept},
        tee=tee,
        shown=Streams.ALL if shown else Streams.NONE,
        filtered={
            s: f"{attempt_dir}/filtered_{name}.log"
            for s, name in NAMES.items()
            if s & tee and options.filters(s)
        },
    )
