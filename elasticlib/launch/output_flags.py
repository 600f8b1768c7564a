"""The flags that say where workers' output goes, what each worker sees, and what it runs on.

torchrun's names and meanings. A flag that could have no effect is refused, with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..workers.cpu import BINDINGS
from ..workers.output_plan import OutputPlan, Streams, parse_streams


def add_output_flags(flag: Callable[..., None]) -> None:
    """`flag(name, *short, **settings)` adds one in all its spellings."""
    flag("--log-dir", help="where each run's folder of logs goes")
    flag(
        "--redirects",
        "-r",
        default="0",
        help="streams to files: 1 stdout, 2 stderr, 3 both; or by local rank, 0:1,1:2",
    )
    flag("--tee", "-t", default="0", help="the same, to files and to the console")
    flag(
        "--local-ranks-filter",
        default="",
        metavar="R,R...",
        help="show the output of these local ranks alone; files are written for all",
    )
    flag(
        "--log-line-prefix-template",
        default="",
        metavar="TEXT",
        help="what stands before each line that --tee shows, with ${role_name}, ${rank}, "
        "${local_rank} and ${hostname} filled in (default [${role_name}${rank}]:)",
    )
    for stream in ("stdout", "stderr"):
        flag(
            f"--duplicate-{stream}-filters",
            default="",
            metavar="TEXT,TEXT...",
            help=f"lines with one of these texts go from --tee's {stream} to attempt_N/"
            f"filtered_{stream}.log as well; two commas for one",
        )
    flag(
        "--logs-specs",
        metavar="NAME",
        help="an entry point of the group torchrun.logs_specs that says where output goes instead",
    )
    _add_kept(flag)
    _add_devices(flag)


def _add_devices(flag: Callable[..., None]) -> None:
    flag(
        "--virtual-local-rank",
        action="store_true",
        help="LOCAL_RANK is 0 in each worker, and its own GPU is all that it sees",
    )
    flag(
        "--numa-binding",
        choices=BINDINGS,
        help="bind each worker to processors near the GPU of its local rank",
    )


def _add_kept(flag: Callable[..., None]) -> None:
    flag(
        "--no-events",
        action="store_true",
        help="keep no record of what happens, which is an events.jsonl beside the logs that are "
        "kept, or else in a folder for temporary files",
    )


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
