"""The command `elasticlib status`: show the status that the nodes of a run publish."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import threading
from collections.abc import Callable, Iterator

import attrs

from ..clock import monotonic
from ..errors import ConfigError, ElasticError, RunNotFoundError, StoreError
from ..observe.history import JobState
from ..observe.job_status import (
    EXIT_CODES,
    EXIT_UNKNOWN,
    FIELDS,
    NODE_FIELDS,
    JobReading,
    JobStatus,
    as_document,
    exit_code,
    headline,
    node_table,
    rank_table,
    read_job,
    status_of,
)
from ..observe.summary import REFRESH_INTERVAL_S, StatusReader
from ..sanitize import escape_to_one_line
from ..stores.file_store import FileStore
from ..stores.interface import Store
from .cli_output import Block, Table, print_error, redraw, show
from .target import (
    RunTarget,
    add_target_arguments,
    find_target,
    open_target,
    recorded_result,
)

DEFAULT_TIMEOUT_S = 2.0
DEFAULT_WATCH_INTERVAL_S = 1.0
# A live node refreshes its status within this time. A file store is polled for that long.
REFRESH_TIMEOUT_S, REFRESH_POLL_INTERVAL_S = REFRESH_INTERVAL_S + 2.0, 0.5
# --watch gives up after this long without a response. A store that moves is away for some seconds.
UNREACHABLE_TIMEOUT_S = 30.0
StatusSource = Callable[[], JobStatus]


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib status`."""
    parser.description = (
        "Show the status that the nodes of a run publish in its store, or the result of a finished "
        "run."
    )
    parser.epilog = _epilog()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_target_arguments(parser, DEFAULT_TIMEOUT_S)
    parser.add_argument("--watch", action="store_true", help="refresh until the run has finished")
    parser.add_argument(
        "--every",
        type=float,
        default=DEFAULT_WATCH_INTERVAL_S,
        metavar="SECONDS",
        help=f"refresh interval of --watch (default: {DEFAULT_WATCH_INTERVAL_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document per line")
    parser.set_defaults(run=_status)


def _epilog() -> str:
    lines = [
        "exit status:",
        *(f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items()),
        "  With --watch it is that of the last refresh, or 0 after SIGINT. If the run is named by",
        "  its store, that store may stop before the final state is read; --watch then exits with",
        f"  4 after {UNREACHABLE_TIMEOUT_S:g} s without a response.",
        "",
        "--json:",
        *(f"  {name}: {meaning}" for name, meaning in FIELDS.items()),
        "",
        "each of nodes:",
        *(f"  {name}: {meaning}" for name, meaning in NODE_FIELDS.items()),
    ]
    return "\n".join(lines)


def _status(args: argparse.Namespace) -> int:
    if not 0 < args.every < threading.TIMEOUT_MAX:
        message = f"--every must be a positive number of seconds, got {args.every}"
        return print_error("status", message, 2)
    try:
        target = find_target(args)
        with status_source(target, args) as read:
            if args.watch:
                return _watch(read, args)
            status = read()
            if args.json:
                _print_document(status)
            else:
                show(*_blocks(status, args))
            return exit_code(status)
    except ConfigError as error:
        return print_error("status", error, 2)
    except ElasticError as error:
        return print_error("status", error, EXIT_UNKNOWN)
    except KeyboardInterrupt:
        return 0 if args.watch else 130


@contextlib.contextmanager
def status_source(target: RunTarget, args: argparse.Namespace) -> Iterator[StatusSource]:
    """Yield a function that reads the status of a run, or returns the result of a finished run.

    Raises:
        ElasticError: the store cannot be opened, and the result is not known either.
    """
    with contextlib.ExitStack() as stack:
        try:
            run = stack.enter_context(open_target(target, args))
        except ElasticError as error:
            is_invalid = isinstance(error, ConfigError) and (args.secret_file or args.rdzv_conf)
            result = recorded_result(target)
            if result is None or is_invalid:
                raise
            if result.state is None:
                print_error("status", error, EXIT_UNKNOWN)
            yield lambda: result
            return

        reader, run_id = JobStatusReader(run.store, run.run_id), run.run_id

        def read() -> JobStatus:
            try:
                status = status_of(reader.read())
            except StoreError:
                if (result := recorded_result(target)) is None:
                    raise
                return result
            if status is not None and status.state is not None:
                return status
            if (result := recorded_result(target)) is not None:
                return result
            if status is None and not target.records:
                raise RunNotFoundError(f"the store at {target.endpoint} holds no job {run_id!r}")
            # An agent can take seconds from its first event until its node has joined.
            return status or JobStatus(run_id, JobState.RENDEZVOUS, "its agents are starting")

        yield read


class JobStatusReader:
    """Reads the status of a job repeatedly.

    In a file store, only readers end the leases of lost nodes. If all statuses there look stale,
    they are read until one is refreshed or the leases end, because clocks of other machines are
    not compared.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._statuses = StatusReader(store, run_id)
        self._remaining_s = REFRESH_TIMEOUT_S if isinstance(store, FileStore) else 0.0

    def read(self) -> JobReading:
        """Return the job as its store has it.

        Raises:
            StoreError: the store cannot be read.
        """
        reading, pause = self._read_once(), threading.Event()
        while self._remaining_s > 0 and reading.looks_stale:
            self._remaining_s -= REFRESH_POLL_INTERVAL_S
            pause.wait(REFRESH_POLL_INTERVAL_S)
            reading = self._read_once()
        is_final = isinstance(self._store, FileStore) and reading.looks_stale
        return attrs.evolve(reading, is_final=is_final)

    def _read_once(self) -> JobReading:
        return read_job(self._store, self._run_id, self._statuses)


def _print_document(status: JobStatus) -> None:
    print(json.dumps(as_document(status)), flush=True)


def _blocks(status: JobStatus, args: argparse.Namespace) -> tuple[Block, ...]:
    tables = (Table(*rows) for rows in (node_table(status), rank_table(status)))
    lines = headline(status)
    if status.is_recorded:
        name = shlex.quote(escape_to_one_line(args.named or status.run))
        lines.append(f"  more: elasticlib report {name}")
    return "\n".join(lines), *tables


def _watch(read: StatusSource, args: argparse.Namespace) -> int:
    pause, responded_at = threading.Event(), monotonic()
    status = None
    while True:
        status, error = _read_or_unknown(read, status)
        if args.json:
            _print_document(status)
        else:
            redraw(*_blocks(status, args))
        if status.is_recorded or (status.state is not None and status.state.is_finished):
            return exit_code(status)
        if status.state is not None:
            responded_at = monotonic()
        elif monotonic() >= responded_at + UNREACHABLE_TIMEOUT_S:
            if error is not None:
                raise error
            return exit_code(status)
        pause.wait(args.every)


def _read_or_unknown(
    read: StatusSource, last: JobStatus | None
) -> tuple[JobStatus, StoreError | None]:
    """Read the status.

    Args:
        read: reads the status.
        last: the previous result, or None at the first call.

    Returns:
        The status and None. If the store cannot be read, an unknown status and the error.

    Raises:
        StoreError: the store cannot be read at the first call.
    """
    try:
        return read(), None
    except StoreError as error:
        if last is None:
            raise
        unknown = attrs.evolve(last, state=None, state_seconds=None, nodes=(), reason=str(error))
        return unknown, error
