"""Finds the run that a command names: by its record on this machine, or by its store's endpoint.

A reader authenticates to the store as a node does, so a reader without the secret learns nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from ..clock import wall
from ..constants import BUILTIN_BACKENDS, ETCD_BACKENDS, TCP_BACKENDS
from ..endpoint import STORE_PORT, split_endpoint, split_endpoints
from ..errors import (
    ConfigError,
    RunNotFoundError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from ..observe.event import Event
from ..observe.formatting import NOT_JOINED_TEXT
from ..observe.job_status import JobStatus, jobs_in, result_of
from ..observe.journal import EventFile
from ..observe.runs import AliveAgents, find_runs, last_event
from ..options import LaunchOptions, RendezvousOptions
from ..stores.file_store import FileStore
from ..stores.interface import Store
from ..stores.tcp_client import TcpStore
from ..stores.tcp_protocol import NOT_A_STORE
from .addresses import resolve
from .backends import conf_keys_of, read_etcd_config
from .cli_output import argument_type
from .layers import read_conf, read_pairs
from .secret import read_secret

MAX_TIMEOUT_S = 30.0


@attrs.frozen
class RunTarget:
    """The run that a command names."""

    run_id: str  # empty for the only job in the store
    backend: str
    endpoint: str
    conf: Mapping[str, str] = attrs.field(factory=dict)  # the keys of --rdzv-conf
    records: tuple[Path, ...] = ()  # the run's event files on this machine


def add_target_arguments(
    parser: argparse.ArgumentParser, timeout: float, *, is_run_required: bool = False
) -> None:
    """Add the arguments that name a run.

    Args:
        parser: the parser of a subcommand.
        timeout: the default of --timeout in seconds.
        is_run_required: there is no default for the run.
    """
    help_text = "id or directory of a run on this machine, or the HOST:PORT of its store"
    if is_run_required:
        parser.add_argument("named", metavar="RUN|ENDPOINT", help=help_text)
    else:
        parser.add_argument(
            "named",
            nargs="?",
            default="",
            metavar="RUN|ENDPOINT",
            help=f"{help_text} (default: your newest running job, or the newest job if none is "
            "running)",
        )
    parser.add_argument(
        "--rdzv-id", default="", help="job id, if the store at ENDPOINT holds several jobs"
    )
    parser.add_argument(
        "--rdzv-backend",
        metavar="NAME",
        help="rendezvous backend of the run; ENDPOINT is then its --rdzv-endpoint: "
        f"{', '.join(BUILTIN_BACKENDS)} or package.module:function (default: tcp)",
    )
    parser.add_argument(
        "--rdzv-conf", default="", metavar="K=V,...", help="options of the rendezvous backend"
    )
    parser.add_argument("--secret-file", metavar="PATH", help="file with the secret of the job")
    parser.add_argument(
        "--timeout",
        type=argument_type(_parse_timeout),
        default=timeout,
        metavar="SECONDS",
        help=f"seconds to wait for the store and the nodes to respond (default: {timeout:g})",
    )


def _parse_timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"must be a positive number of seconds up to {MAX_TIMEOUT_S:g}, got {text!r}"
        )
    return seconds


def find_target(args: argparse.Namespace) -> RunTarget:
    """Return the run that the arguments name.

    Raises:
        ConfigError: the arguments contradict each other.
        RunNotFoundError: this machine has no record of the run.
    """
    conf = read_pairs(args.rdzv_conf)
    target = RunTarget(args.rdzv_id, args.rdzv_backend or "tcp", args.named, conf)
    if args.rdzv_backend or args.rdzv_id:
        if not args.named:
            raise ConfigError("--rdzv-id and --rdzv-backend require an ENDPOINT")
    else:
        try:
            target = _recorded_target(tuple(find_runs(args.named)), conf)
        except RunNotFoundError:
            if not _is_endpoint(args.named):
                raise
    if args.rdzv_backend or conf:  # made for the errors of the backend, its endpoint and its keys
        _options_of(target)
    return target


def _options_of(target: RunTarget) -> RendezvousOptions:
    """Return the options with which a node finds the run.

    Raises:
        ConfigError: the backend or a key of --rdzv-conf is unknown.
    """
    values = read_conf(target.conf, others=conf_keys_of(target.backend))
    return RendezvousOptions(
        run_id=target.run_id,
        backend=target.backend,
        endpoint=target.endpoint,
        conf=values["rendezvous.conf"],
        node_rank=0,
    )


def _is_endpoint(text: str) -> bool:
    """Return True for HOST:PORT, or a list of them."""
    for part in split_endpoints(text):
        try:
            _, port = split_endpoint(part) if os.sep not in part else ("", 0)
        except ConfigError:
            return False
        if not port:
            return False
    return True


def _recorded_target(records: tuple[Path, ...], conf: Mapping[str, str]) -> RunTarget:
    """Return the target that the event files of a run describe; keys of `conf` override theirs.

    The endpoint is empty if no file names one.
    """
    run_id = backend = endpoint = ""
    agents = AliveAgents()
    for path in records:
        event = _first_event(path)
        if event is None:
            continue
        run_id = event.run
        settings = event.data.get("settings")
        if event.kind == "run.started" and isinstance(settings, dict):
            backend = str(settings.get("rdzv_backend", ""))
            # A store that an agent served is gone with the agent.
            served = event.data.get("endpoint") if agents.is_known_alive(path) else ""
            endpoint = str(served or settings.get("rdzv_endpoint", ""))
            conf = {**read_pairs(str(settings.get("rdzv_conf", ""))), **conf}
            if endpoint:
                break
    return RunTarget(run_id, backend, endpoint, conf, records)


def _first_event(path: Path) -> Event | None:
    with contextlib.suppress(OSError):
        return next((event for event in EventFile(path) if event.is_plausible), None)
    return None


@contextlib.contextmanager
def open_target(target: RunTarget, args: argparse.Namespace) -> Iterator[tuple[Store, str]]:
    """Yield the store of the job and the job's id, and close the store at the end.

    Raises:
        StoreError: the store cannot be reached, or rejects this reader.
        ConfigError: the settings do not fit the store.
        RunNotFoundError: the store holds no job, or several.
    """
    store = open_store(target, args)
    try:
        yield store, target.run_id or _find_only_job(store, target)
    finally:
        with contextlib.suppress(StoreError):
            store.close()


@contextlib.contextmanager
def open_running_target(
    target: RunTarget, args: argparse.Namespace, consequence: str
) -> Iterator[tuple[Store, str]]:
    """Yield the same values as `open_target`, for a command that needs a running job.

    Args:
        target: the run.
        args: the arguments of the command.
        consequence: what is impossible after the end of the run, as a part of the error message.

    Raises:
        RunNotFoundError: also if the store cannot be used because the run has finished.
    """
    try:
        with open_target(target, args) as opened:
            yield opened
    except StoreError as error:
        last = recorded_result(target)
        if last is None or last.state is None:
            raise
        raise RunNotFoundError(
            f"run {target.run_id!r} has finished ({last.state.value}) and {consequence}"
        ) from error


def open_store(target: RunTarget, args: argparse.Namespace) -> Store:
    """Return the store of a run. The caller closes it.

    Raises:
        StoreError: the store cannot be reached, or rejects this reader.
        ConfigError: the settings do not fit the store.
    """
    if not target.endpoint:
        raise StoreConnectionError("no agent on this machine serves the store of this run any more")
    if target.backend == "file":
        if not os.path.isdir(os.path.expanduser(target.endpoint)):  # a store would create it
            raise StoreConnectionError(f"directory {target.endpoint} does not exist")
        return FileStore(target.endpoint, timeout=args.timeout)
    if target.backend in ETCD_BACKENDS:
        return read_etcd_config(target.endpoint, target.conf).open(args.timeout)
    if target.backend in TCP_BACKENDS:
        path = args.secret_file or target.conf.get("secret_file")
        label = "--secret-file" if args.secret_file else "secret_file of the run's --rdzv-conf"
        return _open_tcp(target, read_secret(os.environ, path, label), args.timeout)
    # Imported here, because most jobs use a built-in backend.
    from .rendezvous_setup import open_store_for_reading

    return open_store_for_reading(LaunchOptions(rendezvous=_options_of(target)), args.timeout)


def _open_tcp(target: RunTarget, secret: bytes | None, timeout: float) -> Store:
    """Return a client of the first endpoint that responds."""
    error: StoreError = StoreConnectionError(
        f"the host of {target.endpoint} cannot be resolved on this machine"
    )
    endpoints = [split_endpoint(part, STORE_PORT) for part in split_endpoints(target.endpoint)]
    addresses = [(address, port) for host, port in endpoints for address in resolve(host, port)]
    for address, port in addresses:
        store = TcpStore(address, port, job=target.run_id, timeout=timeout, secret=secret)
        try:
            store.connect(timeout / len(addresses))
        except StoreError as failure:
            store.close()
            error = failure
            continue
        return store
    if not target.records and (isinstance(error, StoreTimeoutError) or NOT_A_STORE in str(error)):
        hint = "if this endpoint belongs to another backend, pass --rdzv-backend"
        raise type(error)(f"{error}; {hint}")
    raise error


def _find_only_job(store: Store, target: RunTarget) -> str:
    """Return the id of the only live job in the store, or of the only job if none is alive.

    Raises:
        RunNotFoundError: there is no job, or several.
    """
    jobs, alive = jobs_in(store)
    candidates = alive or jobs
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise RunNotFoundError(f"the store at {target.endpoint} holds no job: {NOT_JOINED_TEXT}")
    names = ", ".join(candidates)
    raise RunNotFoundError(
        f"the store at {target.endpoint} holds several jobs: {names}; choose one with --rdzv-id"
    )


def recorded_result(target: RunTarget) -> JobStatus | None:
    """Return the result of a run from its last events on this machine.

    Returns:
        The result, or None if there are no events or an agent of the run is alive here.
    """
    agents = AliveAgents()
    if any(agents.is_known_alive(path) for path in target.records):
        return None
    events = [event for path in target.records if (event := last_event(path)) is not None]
    return result_of(target.run_id or events[0].run, events, wall()) if events else None
