"""`elasticlib status`: what a run is doing, once or again and again, for people and for scripts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from ..clock import monotonic
from ..errors import ConfigError, ElasticError, StoreError
from ..observe.status import (
    EXIT_CODES,
    FIELDS,
    NOBODY,
    NODE_FIELDS,
    JobStatus,
    as_document,
    exit_code,
    headline,
    lines,
    node_table,
    rank_table,
    read_job,
    status_of,
)
from ..visible import visible
from .reach import Target, add_reach, find_target, is_recorded, reached, recorded

EVERY_SECONDS = 1.0
TIMEOUT = 2.0
GONE_SECONDS = 30.0
"""Of silence, for --watch to take a run for gone: a store that moves is away for some seconds."""
Look = Callable[[], JobStatus]


def add_status(commands: Any) -> None:
    """Add the subcommand to those of `elasticlib`."""
    parser = commands.add_parser(
        "status",
        help="what a run is doing: its state, nodes, ranks, steps",
        description="Show what the nodes of a run publish of themselves in its store; where that "
        "is not there, what is written down of it on this machine.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_reach(parser, TIMEOUT)
    parser.add_argument("--watch", action="store_true", help="again and again, until it is over")
    parser.add_argument(
        "--every",
        type=float,
        default=EVERY_SECONDS,
        metavar="SECONDS",
        help=f"between looks with --watch (default {EVERY_SECONDS:g})",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON document a look, each on a line"
    )
    parser.set_defaults(run=_status)


def _epilog() -> str:
    codes = [f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items()]
    said = "SIGINT ends --watch with 0; else its last look says. By ENDPOINT the end of a run may"
    rest = (
        "go unseen, as its store may end with it: --watch says 4 then, after "
        f"{GONE_SECONDS:g} s in which nobody answered."
    )
    keys = [f"  {name}: {meaning}" for name, meaning in FIELDS.items()]
    nodes = [f"  {name}: {meaning}" for name, meaning in NODE_FIELDS.items()]
    parts = [
        "exit status:",
        *codes,
        f"  {said}",
        f"  {rest}",
        "",
        "--json:",
        *keys,
        "",
        "each of nodes:",
        *nodes,
    ]
    return "\n".join(parts)


def _status(chosen: argparse.Namespace) -> int:
    if not 0 < chosen.every < threading.TIMEOUT_MAX:
        return _fail(2, ConfigError(f"--every is a positive number of seconds, got {chosen.every}"))
    try:
        target = find_target(chosen)
        with looking(target, chosen) as look:
            if not chosen.watch:
                status = look()
                print(_said(status, chosen.json), flush=True)
                return exit_code(status)
            return _watch(look, chosen)
    except ConfigError as error:
        return _fail(2, error)
    except ElasticError as error:
        return _fail(NOBODY, error)
    except KeyboardInterrupt:
        return 0 if chosen.watch else 130


def _fail(code: int, error: Exception) -> int:
    print(f"elasticlib status: {visible(str(error))}", file=sys.stderr)
    return code


@contextlib.contextmanager
def looking(target: Target, chosen: argparse.Namespace) -> Iterator[Look]:
    """What looks at the run: at its nodes, or where they do not answer at what they wrote.

    Raises what `reached` raises, where nothing was written on this machine.
    """
    told: set[str] = set()
    with contextlib.ExitStack() as stack:
        try:
            store, run_id = stack.enter_context(reached(target, chosen))
        except ElasticError as failed:
            told_how = chosen.secret_file or chosen.rdzv_conf
            if not is_recorded(target) or (told_how and isinstance(failed, ConfigError)):
                raise
            error = failed
            yield lambda: _from_events(recorded(target), error, told)
            return

        def look() -> JobStatus:
            try:
                status = status_of(read_job(store, run_id))
            except StoreError as error:
                return _from_events(recorded(target), error, told)
            return status or _not_in_store(target, run_id, told)

        yield look


def _not_in_store(target: Target, run_id: str, told: set[str]) -> JobStatus:
    """An agent may take seconds from its first event until its node has joined."""
    status = recorded(target)
    if status is not None and status.starting:
        return status
    return _from_events(status, StoreError(f"no job {run_id!r} is there (yet)"), told)


def _from_events(status: JobStatus | None, error: ElasticError, told: set[str]) -> JobStatus:
    """What is recorded. told: what was said of why nobody answers, which is not said again."""
    if status is None:
        raise error
    if str(error) not in told and not (status.state is not None and status.state.over):
        told.add(str(error))
        _fail(NOBODY, error)
    return status


def _said(status: JobStatus, as_json: bool) -> str:
    if as_json:
        return json.dumps(as_document(status))
    parts = [headline(status), lines(node_table(status)), lines(rank_table(status))]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _watch(look: Look, chosen: argparse.Namespace) -> int:
    with _shown(chosen) as show:
        pause, heard = threading.Event(), monotonic()
        status = None
        while True:
            status, error = _looked(look, status)
            show(status)
            ended = status.state is not None and status.state.over
            if ended or (status.age is not None and not any(n.lives for n in status.nodes)):
                return exit_code(status)
            if status.state is not None:
                heard = monotonic()
            elif monotonic() >= heard + GONE_SECONDS:
                if error is not None:
                    raise error
                return exit_code(status)
            pause.wait(chosen.every)


def _looked(look: Look, last: JobStatus | None) -> tuple[JobStatus, StoreError | None]:
    """What there is to see, and if that is nothing, after the first look, why."""
    try:
        return look(), None
    except StoreError as error:
        if last is None:
            raise
        return attrs.evolve(last, state=None, since=None, nodes=(), reason=str(error)), error


@contextlib.contextmanager
def _shown(chosen: argparse.Namespace) -> Iterator[Callable[[JobStatus], None]]:
    """What shows a status in place of the one before, where there is a terminal and rich for it."""
    terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if chosen.json or not terminal:
        yield lambda status: print(
            _said(status, chosen.json) + "\n" * (not chosen.json), flush=True
        )
        return
    try:
        from rich.live import Live
    except ImportError:
        print("for a table that stays in place: pip install 'elasticlib[ui]'", file=sys.stderr)
        yield lambda status: print(_said(status, False) + "\n", flush=True)
        return
    from .status_table import table_of

    with Live(auto_refresh=False) as live:
        yield lambda status: live.update(table_of(status), refresh=True)
