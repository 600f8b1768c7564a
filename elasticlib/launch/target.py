"""Finds the run that a command names: by its store and its job id, or by its record here.

The name of a run is `BACKEND://ENDPOINT/JOB` for any machine, such as `tcp://node0:29400/job7`,
`file:/shared/dir/job7` or `etcd://h1,h2/job7`; or its id, on a machine that has a record of it. An
id in the first form is quoted as in a URL. A name that ends with the endpoint, or with `/` after
it, means the only job there.

A reader authenticates to a TCP store as a node does, so a reader without the secret learns nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

import attrs

from ..clock import wall
from ..constants import ETCD_BACKENDS, TCP_BACKENDS
from ..endpoint import STORE_PORT, split_endpoint, split_endpoints
from ..errors import (
    ConfigError,
    OptionError,
    RunNotFoundError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from ..observe.event import Event
from ..observe.event_kinds import RunStarted
from ..observe.formatting import NOT_JOINED_TEXT
from ..observe.job_status import JobStatus, result_of
from ..observe.journal import EventFile
from ..observe.runs import AliveAgents, find_runs, last_event
from ..options import LaunchOptions, RendezvousOptions, backend_rule
from ..rendezvous.overview import has_leader, jobs_in
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


@attrs.frozen
class OpenRun:
    """A run whose store is open."""

    store: Store
    run_id: str
    secret: bytes | None  # of the job, as the operator has given it


def run_name(backend: str, endpoint: str, run_id: str) -> str:
    """Return the name by which commands find a run from any machine."""
    colon = ":" if backend == "file" else "://"
    return f"{backend}{colon}{endpoint}/{quote(run_id, safe='')}"


def parse_name(text: str) -> RunTarget | None:
    """Return what a name `BACKEND://ENDPOINT/JOB` or `file:DIR/JOB` says; None for another text.

    Raises:
        ConfigError: the backend is unknown, or the endpoint is missing.
    """
    backend, colon, rest = text.partition("://")
    if text.startswith("file:"):
        backend, colon, rest = "file", ":", text.removeprefix("file:").removeprefix("//")
    if not colon:
        return None
    if rule := backend_rule(backend):
        raise OptionError(RendezvousOptions, "backend", rule, backend)
    endpoint, slash, job = rest.rpartition("/")
    if not slash:
        endpoint, job = rest, ""
    if backend == "file" and slash:
        endpoint = endpoint or "/"
    if not endpoint:
        raise ConfigError(
            f"a run is named {run_name('tcp', 'HOST:PORT', 'JOB')}, "
            f"{run_name('file', '/DIR', 'JOB')} or {run_name('etcd', 'HOST,HOST', 'JOB')}, "
            f"got {text!r}"
        )
    return RunTarget(unquote(job), backend, endpoint)


def add_target_arguments(
    parser: argparse.ArgumentParser, timeout: float, *, is_run_required: bool = False
) -> None:
    """Add the arguments that name a run.

    Args:
        parser: the parser of a subcommand.
        timeout: the default of --timeout in seconds.
        is_run_required: there is no default for the run.
    """
    help_text = (
        "id or directory of a run on this machine; or its store and job id: tcp://HOST:PORT/JOB, "
        "file:/DIR/JOB, etcd://HOST,HOST/JOB or package.module:function://ENDPOINT/JOB (without "
        "JOB: the only job there); or HOST:PORT"
    )
    if is_run_required:
        parser.add_argument("named", metavar="RUN", help=help_text)
    else:
        parser.add_argument(
            "named",
            nargs="?",
            default="",
            metavar="RUN",
            help=f"{help_text} (default: your newest running job, or the newest job if none is "
            "running)",
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
        ConfigError: the name or the options are not valid.
        RunNotFoundError: this machine has no record of the run.
    """
    conf = read_pairs(args.rdzv_conf)
    target = parse_name(args.named)
    if target is not None:
        target = attrs.evolve(target, conf=conf)
    else:
        try:
            target = _recorded_target(tuple(find_runs(args.named)), conf)
        except RunNotFoundError:
            if not _is_endpoint(args.named):
                raise
            target = RunTarget("", "tcp", args.named, conf)
    if target.backend and target.endpoint:  # made for the errors of the endpoint and the keys
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
        start = event.body
        if isinstance(start, RunStarted):
            settings = start.settings
            backend = settings.get("rdzv_backend", "")
            # A store that an agent served is gone with the agent.
            served = start.endpoint if agents.is_known_alive(path) else ""
            endpoint = served or settings.get("rdzv_endpoint", "")
            conf = {**read_pairs(settings.get("rdzv_conf", "")), **conf}
            if endpoint:
                break
    return RunTarget(run_id, backend, endpoint, conf, records)


def _first_event(path: Path) -> Event | None:
    with contextlib.suppress(OSError):
        return next((event for event in EventFile(path) if event.is_plausible), None)
    return None


@contextlib.contextmanager
def open_target(target: RunTarget, args: argparse.Namespace) -> Iterator[OpenRun]:
    """Yield the run with its open store, and close the store at the end.

    Raises:
        StoreError: the store cannot be reached, or rejects this reader.
        ConfigError: the settings do not fit the store.
        RunNotFoundError: the store holds no job, or several.
    """
    secret = _secret_of(target, args)
    store = open_store(target, args)
    try:
        yield OpenRun(store, target.run_id or _find_only_job(store, target), secret)
    finally:
        with contextlib.suppress(StoreError):
            store.close()


@contextlib.contextmanager
def open_running_target(
    target: RunTarget, args: argparse.Namespace, consequence: str
) -> Iterator[OpenRun]:
    """Yield the same value as `open_target`, for a command that needs a running job.

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


def _secret_of(target: RunTarget, args: argparse.Namespace) -> bytes | None:
    path = args.secret_file or target.conf.get("secret_file")
    label = "--secret-file" if args.secret_file else "secret_file of the run's --rdzv-conf"
    return read_secret(os.environ, path, label)


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
        return _open_tcp(target, _secret_of(target, args), args.timeout)
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
        hint = "if this endpoint belongs to another backend, name it: BACKEND://ENDPOINT/JOB"
        raise type(error)(f"{error}; {hint}")
    raise error


def _find_only_job(store: Store, target: RunTarget) -> str:
    """Return the id of the only live job in the store, or of the only job if none is alive.

    Raises:
        RunNotFoundError: there is no job, or several.
    """
    jobs = jobs_in(store)
    if not jobs:
        raise RunNotFoundError(f"the store at {target.endpoint} holds no job: {NOT_JOINED_TEXT}")
    alive = [job for job in jobs if has_leader(store, job)] if len(jobs) > 1 else jobs
    candidates = alive or jobs
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(candidates)
    example = run_name(target.backend, target.endpoint, candidates[0])
    raise RunNotFoundError(
        f"the store at {target.endpoint} holds several jobs: {names}; name one, such as {example}"
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
