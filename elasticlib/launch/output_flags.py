"""The flags that say where workers' output goes, what each worker sees, and what it runs on.

torchrun's names and meanings. A flag that could have no effect is refused, with the reason.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import ConfigError
from ..workers.cpu import BINDINGS
from ..workers.output import OutputPlan, Streams, parse_streams


def read_output_flags(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of a LaunchConfig that these flags fill.

    Raises:
        ConfigError: one of them cannot be read.
    """
    return {
        "log_dir": given.log_dir,
        "redirects": parse_streams(given.redirects, "--redirects"),
        "tee": parse_streams(given.tee, "--tee"),
        "local_ranks_filter": _ranks(given.local_ranks_filter),
        "duplicate_stdout_filters": split_at_commas(given.duplicate_stdout_filters),
        "duplicate_stderr_filters": split_at_commas(given.duplicate_stderr_filters),
        "log_line_prefix_template": given.log_line_prefix_template or None,
        "events": not given.no_events,
        "virtual_local_rank": given.virtual_local_rank,
        "numa_binding": given.numa_binding,
    }


def check_output(plan: OutputPlan, workers: int) -> None:
    """Whether each choice can have an effect, with so many workers on a node.

    Raises:
        ConfigError: one cannot.
    """
    named = (
        ("--redirects", plan.redirect.by_rank),
        ("--tee", plan.tee.by_rank),
        ("--local-ranks-filter", plan.ranks or ()),
    )
    for flag, ranks in named:
        strays = sorted(rank for rank in ranks if not 0 <= rank < workers)
        if strays:
            raise ConfigError(
                f"{flag} names local rank {strays[0]}, and there are {workers} workers a node"
            )
    for stream, name in ((Streams.OUT, "stdout"), (Streams.ERR, "stderr")):
        seen = any(plan.shows(rank) and stream & plan.tee.of(rank) for rank in range(workers))
        if plan.needles(stream) and not seen:
            raise ConfigError(
                f"--duplicate-{name}-filters looks through what --tee shows, and that is no "
                f"worker's {name}: add --tee {stream.value}"
            )


def check_numa_binding(name: str | None) -> None:
    """Raises ConfigError for what is no binding."""
    if name is not None and name not in BINDINGS:
        raise ConfigError(f"--numa-binding is one of {', '.join(BINDINGS)}, got {name!r}")


def split_at_commas(text: str) -> tuple[str, ...]:
    """The texts between single commas; a double one is a comma of the text."""
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--local-ranks-filter is local ranks as in 0,2, got {text!r}") from None
