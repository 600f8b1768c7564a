"""`elasticlib status` and `stacks`: what a run is doing, and what its workers' threads are doing.

A run is found by its record on this machine or by its store's endpoint. The store's own gatekeeping
holds as for any node: a reader without the secret learns nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from ..clock import monotonic, wall
from ..endpoint import STORE_PORT, split_endpoint
from ..errors import (
    ConfigError,
    ElasticError,
    RunNotFoundError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from ..observe.event import Event
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
    jobs_in,
    node_table,
    rank_table,
    read_job,
    result_of,
    status_of,
)
from ..observe.journal import EventFile
from ..observe.node_status import REFRESH_INTERVAL_S, StatusReader
from ..observe.runs import AliveAgents, find_runs, last_event
from ..observe.stack_query import JobStacks, StackClient, stack_lines
from ..stores.file_store import FileStore
from ..stores.interface import Store
from ..stores.tcp_client import TcpStore
from ..stores.tcp_protocol import NOT_A_STORE
from ..visible import visible_line
from ..workers.output_plan import parse_ranks
from .addresses import resolve
from .backends import check_backend, check_etcd_keys, read_etcd_config
from .cli_output import Block, Table, argument_type, print_error, redraw, show
from .endpoints import read_secret, split_endpoints
from .flags import BUILTIN_BACKENDS, ETCD_BACKENDS
from .launch_config import TCP_BACKENDS, LaunchConfig
from .rendezvous_options import read_options, read_pairs

LONGEST_TIMEOUT = 30.0
EVERY_SECONDS = 1.0
STATUS_TIMEOUT = 2.0
STACKS_TIMEOUT = 5.0
"""Seconds: a worker that writes nothing is waited for on its node."""
PROOF_SECONDS, PROOF_PAUSE = REFRESH_INTERVAL_S + 2.0, 0.5
"""In which each node that lives renews its status, and between two looks for that."""
GONE_SECONDS = 30.0
"""Of silence, for --watch to take a run for gone: a store that moves is away for some seconds."""
Look = Callable[[], JobStatus]


# -- which run is meant ----------------------------------------------------------------------------


@attrs.frozen
class Target:
    """run_id: empty for the only job there. records: files of its events on this machine."""

    run_id: str
    backend: str
    endpoint: str
    conf: Mapping[str, str] = attrs.field(factory=dict)
    records: tuple[Path, ...] = ()


def _add_target(parser: argparse.ArgumentParser, timeout: float) -> None:
    """The arguments that say which run is meant, and how long its nodes may take to answer."""
    parser.add_argument(
        "named",
        nargs="?",
        default="",
        metavar="RUN|ENDPOINT",
        help="a run's id or folder, as found on this machine, or the HOST:PORT of its store; "
        "without it, this user's newest running job, or the newest of all if none is running",
    )
    parser.add_argument("--rdzv-id", default="", help="at an ENDPOINT: the job, if it has several")
    parser.add_argument(
        "--rdzv-backend",
        metavar="NAME",
        help="RUN|ENDPOINT is what --rdzv-endpoint was, of this backend: "
        f"{', '.join(BUILTIN_BACKENDS)} or package.module:function (default tcp)",
    )
    parser.add_argument(
        "--rdzv-conf", default="", metavar="K=V,...", help="as for elasticrun: how to reach a store"
    )
    parser.add_argument("--secret-file", metavar="PATH", help="holds the job's secret, if any")
    parser.add_argument(
        "--timeout",
        type=argument_type(_seconds),
        default=timeout,
        metavar="SECONDS",
        help=f"for the store, and the nodes that are asked, to answer (default {timeout:g})",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise ConfigError(
            f"it is a positive number of seconds up to {LONGEST_TIMEOUT:g}, got {text!r}"
        )
    return seconds


def find_target(chosen: argparse.Namespace) -> Target:
    """Which run is meant.

    Raises:
        ConfigError: the command line contradicts itself. RunNotFoundError: there is none of that
        name.
    """
    conf = read_pairs(chosen.rdzv_conf)
    target = Target(chosen.rdzv_id, chosen.rdzv_backend or "tcp", chosen.named, conf)
    if chosen.rdzv_backend or chosen.rdzv_id:
        if not chosen.named:
            raise ConfigError("--rdzv-id and --rdzv-backend are for an ENDPOINT, and there is none")
    else:
        try:
            target = _recorded_target(tuple(find_runs(chosen.named)), conf)
        except RunNotFoundError:
            if not _is_endpoint(chosen.named):
                raise
    if chosen.rdzv_backend:
        check_backend(chosen.rdzv_backend)
    if target.backend in BUILTIN_BACKENDS:  # for their errors, of what was given here
        check_etcd_keys(target.backend, conf)
        read_options(conf)
    return target


def _is_endpoint(text: str) -> bool:
    """Whether it is a host with a port, or several of them."""
    for part in split_endpoints(text):
        try:
            named = split_endpoint(part) if os.sep not in part else ("", 0)
        except ConfigError:
            return False
        if not named[1]:
            return False
    return True


def _recorded_target(records: tuple[Path, ...], conf: Mapping[str, str]) -> Target:
    """As the first event of each record tells it."""
    run_id = backend = endpoint = ""
    living = AliveAgents()
    for path in records:
        event = _first_event(path)
        if event is None:
            continue
        run_id = event.run
        settings = event.facts.get("settings")
        if event.kind == "run.started" and isinstance(settings, dict):
            backend = str(settings.get("rdzv_backend", ""))
            # What an agent itself serves is gone with it.
            served = event.facts.get("endpoint") if living.is_known_alive(path) else ""
            endpoint = str(served or settings.get("rdzv_endpoint", ""))
            conf = {**read_pairs(str(settings.get("rdzv_conf", ""))), **conf}
            if endpoint:
                break
    return Target(run_id, backend, endpoint, conf, records)


def _first_event(path: Path) -> Event | None:
    """Return the first event of a file that can be read, or None."""
    with contextlib.suppress(OSError):
        return next((event for event in EventFile(path) if event.is_plausible), None)
    return None


# -- through the store -----------------------------------------------------------------------------


@contextlib.contextmanager
def reached(target: Target, chosen: argparse.Namespace) -> Iterator[tuple[Store, str]]:
    """The store in which the job meets, and the job's id.

    Raises:
        StoreError: it is not there, or refuses. ConfigError: it cannot be asked as things are.
        RunNotFoundError: it holds no job, or several.
    """
    store = _open(target, chosen)
    try:
        yield store, target.run_id or _only_job(store, target)
    finally:
        with contextlib.suppress(StoreError):
            store.close()


def _open(target: Target, chosen: argparse.Namespace) -> Store:
    if not target.endpoint:
        raise StoreConnectionError("no agent on this machine serves the store of this run any more")
    if target.backend == "file":
        if not Path(target.endpoint).is_dir():  # a store would make it
            raise StoreConnectionError(f"there is no folder {target.endpoint}")
        return FileStore(target.endpoint, timeout=chosen.timeout)
    if target.backend in ETCD_BACKENDS:
        return read_etcd_config(target.endpoint, target.conf).open(chosen.timeout)
    if target.backend in TCP_BACKENDS:
        path = chosen.secret_file or target.conf.get("secret_file")
        named = "--secret-file" if chosen.secret_file else "secret_file of the run's --rdzv-conf"
        return _open_tcp(target, read_secret(os.environ, path, named), chosen.timeout)
    # Imported here: most stores are ours.
    from .rendezvous_setup import open_store_for_reading

    config = LaunchConfig(
        run_id=target.run_id or "none",
        rdzv_backend=target.backend,
        rdzv_endpoint=target.endpoint,
        rdzv_configs=target.conf,
    )
    return open_store_for_reading(config, chosen.timeout)


def _open_tcp(target: Target, secret: bytes | None, timeout: float) -> Store:
    """A client of the first of its places that answers."""
    error: StoreError = StoreConnectionError(
        f"the host of {target.endpoint} cannot be resolved on this machine"
    )
    places = [split_endpoint(part, STORE_PORT) for part in split_endpoints(target.endpoint)]
    found = [(address, port) for host, port in places for address in resolve(host, port)]
    for address, port in found:
        store = TcpStore(address, port, job=target.run_id, timeout=timeout, secret=secret)
        try:
            store.connect(timeout / len(found))
        except StoreError as failed:
            store.close()
            error = failed
            continue
        return store
    if not target.records and (isinstance(error, StoreTimeoutError) or NOT_A_STORE in str(error)):
        hint = "is it the place of another --rdzv-backend? name it with --rdzv-backend"
        raise type(error)(f"{error}; {hint}")
    raise error


def _only_job(store: Store, target: Target) -> str:
    jobs, living = jobs_in(store)
    found = living or jobs
    if len(found) == 1:
        return found[0]
    if not found:
        raise RunNotFoundError(f"{target.endpoint} holds no job (yet)")
    there = ", ".join(found)
    raise RunNotFoundError(f"{target.endpoint} holds these jobs: {there}; name one with --rdzv-id")


# -- the result of a run that is over -------------------------------------------------------------


def result(target: Target) -> JobStatus | None:
    """Return the result of a run from its last events on this machine.

    None if it has no events here, or one of its agents is alive.
    """
    living = AliveAgents()
    if any(living.is_known_alive(path) for path in target.records):
        return None
    last = [event for path in target.records if (event := last_event(path)) is not None]
    return result_of(target.run_id or last[0].run, last, wall()) if last else None


# -- status ----------------------------------------------------------------------------------------


def add_status(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what the nodes of a run publish of themselves in its store, or the result of a run "
        "that is over."
    )
    parser.epilog = _status_epilog()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_target(parser, STATUS_TIMEOUT)
    parser.add_argument("--watch", action="store_true", help="again and again, until it is over")
    parser.add_argument(
        "--every",
        type=float,
        default=EVERY_SECONDS,
        metavar="SECONDS",
        help=f"between looks with --watch (default {EVERY_SECONDS:g})",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document per line")
    parser.set_defaults(run=_status)


def _status_epilog() -> str:
    parts = [
        "exit status:",
        *(f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items()),
        "  SIGINT ends --watch with 0; else its last look decides. By ENDPOINT a run's end may",
        "  go unseen, as its store may end with it: --watch says 4 then, after "
        f"{GONE_SECONDS:g} s in which nobody answered.",
        "",
        "--json:",
        *(f"  {name}: {meaning}" for name, meaning in FIELDS.items()),
        "",
        "each of nodes:",
        *(f"  {name}: {meaning}" for name, meaning in NODE_FIELDS.items()),
    ]
    return "\n".join(parts)


def _status(chosen: argparse.Namespace) -> int:
    if not 0 < chosen.every < threading.TIMEOUT_MAX:
        sentence = f"--every is a positive number of seconds, got {chosen.every}"
        return print_error("status", sentence, 2)
    try:
        target = find_target(chosen)
        with looking(target, chosen) as look:
            if chosen.watch:
                return _watch(look, chosen)
            status = look()
            if chosen.json:
                _print_document(status)
            else:
                show(*_parts(status, chosen))
            return exit_code(status)
    except ConfigError as error:
        return print_error("status", error, 2)
    except ElasticError as error:
        return print_error("status", error, EXIT_UNKNOWN)
    except KeyboardInterrupt:
        return 0 if chosen.watch else 130


@contextlib.contextmanager
def looking(target: Target, chosen: argparse.Namespace) -> Iterator[Look]:
    """Yield a function that asks the run's nodes, or returns the result of a run that is over.

    Raises what `reached` raises if the run is not known to be over.
    """
    with contextlib.ExitStack() as stack:
        try:
            store, run_id = stack.enter_context(reached(target, chosen))
        except ElasticError as error:
            wrong = isinstance(error, ConfigError) and (chosen.secret_file or chosen.rdzv_conf)
            found = result(target)
            if found is None or wrong:
                raise
            if found.state is None:
                print_error("status", error, EXIT_UNKNOWN)
            yield lambda: found
            return

        reader = JobReader(store, run_id)

        def look() -> JobStatus:
            try:
                status = status_of(reader.read())
            except StoreError:
                if (found := result(target)) is None:
                    raise
                return found
            if status is not None and status.state is not None:
                return status
            if (found := result(target)) is not None:
                return found
            if status is None and not target.records:
                raise RunNotFoundError(f"no job {run_id!r} is there (yet)")
            # An agent can take seconds from its first event until its node has joined.
            return status or JobStatus(run_id, JobState.RENDEZVOUS, "its agents are starting")

        yield look


class JobReader:
    """Reads a job again and again. In a folder nobody but readers ends the leases of the dead, so
    if all statuses there look old, they are looked at until one is renewed or the leases end: no
    clock of another machine says that a node is gone."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._statuses = StatusReader(store, run_id)
        self._left = PROOF_SECONDS if isinstance(store, FileStore) else 0.0

    def read(self) -> JobReading:
        """Raises StoreError."""
        view, pause = self._look(), threading.Event()
        while self._left > 0 and view.looks_stale:
            self._left -= PROOF_PAUSE
            pause.wait(PROOF_PAUSE)
            view = self._look()
        return attrs.evolve(view, is_final=isinstance(self._store, FileStore) and view.looks_stale)

    def _look(self) -> JobReading:
        return read_job(self._store, self._run_id, self._statuses)


def _print_document(status: JobStatus) -> None:
    print(json.dumps(as_document(status)), flush=True)


def _parts(status: JobStatus, chosen: argparse.Namespace) -> tuple[Block, ...]:
    tables = (Table(*rows) for rows in (node_table(status), rank_table(status)))
    lines = headline(status)
    if status.is_recorded:
        name = shlex.quote(visible_line(chosen.named or status.run))
        lines.append(f"  more: elasticlib report {name}")
    return "\n".join(lines), *tables


def _watch(look: Look, chosen: argparse.Namespace) -> int:
    pause, heard = threading.Event(), monotonic()
    status = None
    while True:
        status, error = _looked(look, status)
        if chosen.json:
            _print_document(status)
        else:
            redraw(*_parts(status, chosen))
        if status.is_recorded or (status.state is not None and status.state.is_finished):
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
        return attrs.evolve(
            last, state=None, state_seconds=None, nodes=(), reason=str(error)
        ), error


# -- stacks ----------------------------------------------------------------------------------------


def add_stacks(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The Python stacks of all ranks of all nodes, now; those that are the same are shown once, "
        "and those that the fewest share come first."
    )
    parser.epilog = (
        "exit status: 0 if all nodes that live answered, 1 if some did not, 2 for a wrong "
        "command line, 4 if there is no such run, or nobody answers or can be asked; 130 "
        "after Ctrl-C"
    )
    _add_target(parser, STACKS_TIMEOUT)
    parser.add_argument(
        "-r",
        "--ranks",
        type=argument_type(parse_ranks),
        metavar="RANKS",
        help="those of these ranks, as in 0,3-5",
    )
    parser.set_defaults(run=_stacks)


def _stacks(chosen: argparse.Namespace) -> int:
    try:
        view = _asked(find_target(chosen), chosen)
        print("\n".join(stack_lines(view, chosen.ranks)))
    except ConfigError as error:
        return print_error("stacks", error, 2)
    except ElasticError as error:
        return print_error("stacks", error, EXIT_UNKNOWN)
    except KeyboardInterrupt:
        return 130
    if not view.stacks:
        return EXIT_UNKNOWN
    return int(len(view.stacks) < len(view.alive_nodes))


def _asked(target: Target, chosen: argparse.Namespace) -> JobStacks:
    """What the nodes show.

    Raises:
        RunNotFoundError: none of them lives. StoreError: they could not be asked.
    """
    try:
        with reached(target, chosen) as (store, run_id), StackClient(store, run_id) as asker:
            view = asker.query(chosen.timeout, chosen.ranks)
    except StoreError as error:
        last = result(target)
        if last is None or last.state is None:
            raise
        over = f"{target.run_id!r} is over ({last.state.value}): no worker of it is left"
        raise RunNotFoundError(over) from error
    if not view.alive_nodes:
        raise RunNotFoundError(f"no node of {run_id!r} is alive")
    return view
