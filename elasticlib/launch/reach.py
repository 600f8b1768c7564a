"""How a run is found from outside: by its record on this machine, or by its store's endpoint.

The store's own gatekeeping holds as for any node: who does not know the secret is told nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from ..clock import wall
from ..compat import our_name
from ..endpoint import STORE_PORT, split_endpoint
from ..errors import ConfigError, NoSuchRun, StoreError, StoreTimeout, StoreUnavailable
from ..observe.asking import jobs_in
from ..observe.event import Event
from ..observe.question import Answer
from ..observe.read_events import EventsFile
from ..observe.runs import find_runs, known_runs
from ..observe.status import JobStatus, NodeEntry, status_of_records
from ..observe.story import AgentLog
from ..stores.file import FileStore
from ..stores.interface import Store
from ..stores.tcp_client import TcpStore
from ..stores.tcp_protocol import NOT_OURS
from .backend_names import BACKENDS, ETCD_BACKENDS, OUR_BACKENDS
from .config import TCP_BACKENDS, LaunchConfig, read_options, read_pairs
from .endpoints import parts_of, read_secret
from .etcd_place import check_etcd_keys, read_etcd_place
from .tcp_place import resolve

LONGEST_TIMEOUT = 30.0


@attrs.frozen
class Target:
    """run_id: empty for the only job there. records: files of its events on this machine."""

    run_id: str
    backend: str
    endpoint: str
    conf: Mapping[str, str] = attrs.field(factory=dict)
    records: tuple[Path, ...] = ()


def add_reach(parser: argparse.ArgumentParser, timeout: float) -> None:
    """Add the arguments that say which run is meant, and how long its nodes may take to answer."""
    parser.add_argument(
        "named",
        nargs="?",
        default="",
        metavar="RUN|ENDPOINT",
        help="a run's id or folder, as found on this machine, or the HOST:PORT of its store; "
        "without it, this user's newest run that goes on, or if none does the newest",
    )
    parser.add_argument("--rdzv-id", default="", help="at an ENDPOINT: the job, if it has several")
    parser.add_argument(
        "--rdzv-backend",
        type=our_name,
        choices=BACKENDS,
        metavar="NAME",
        help="RUN|ENDPOINT is what --rdzv-endpoint was, of this backend: %(choices)s (default tcp)",
    )
    parser.add_argument(
        "--rdzv-conf", default="", metavar="K=V,...", help="as for elasticrun: how to reach a store"
    )
    parser.add_argument("--secret-file", metavar="PATH", help="holds the job's secret, if any")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=timeout,
        metavar="SECONDS",
        help=f"for the nodes to answer (default {timeout:g})",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise argparse.ArgumentTypeError(
            f"it is a positive number of seconds up to {LONGEST_TIMEOUT:g}, got {text!r}"
        )
    return seconds


def find_target(chosen: argparse.Namespace) -> Target:
    """Which run is meant.

    Raises:
        ConfigError: the command line contradicts itself. NoSuchRun: there is none of that name.
    """
    conf = read_pairs(chosen.rdzv_conf)
    if chosen.rdzv_backend or chosen.rdzv_id:
        if not chosen.named:
            raise ConfigError("--rdzv-id and --rdzv-backend are for an ENDPOINT, and there is none")
        backend = chosen.rdzv_backend or "tcp"
        return Target(chosen.rdzv_id, backend, chosen.named, _known(conf, backend))
    try:
        records = tuple(find_runs(chosen.named))
    except NoSuchRun:
        if not is_endpoint(chosen.named):
            raise
        return Target("", "tcp", chosen.named, _known(conf, "tcp"))
    target = _told(records, conf)
    _known(conf, target.backend)
    return target


def _known(conf: dict[str, str], backend: str) -> dict[str, str]:
    """The same, of which each key means something to the backend; ConfigError if not."""
    if backend in OUR_BACKENDS:
        check_etcd_keys(backend, conf)
        read_options(conf)
    return conf


def is_endpoint(text: str) -> bool:
    """Whether it is a host with a port, or several of them."""
    for part in parts_of(text):
        try:
            named = split_endpoint(part) if os.sep not in part else ("", 0)
        except ConfigError:
            return False
        if not named[1]:
            return False
    return True


def _told(records: tuple[Path, ...], conf: Mapping[str, str]) -> Target:
    """As the first event of each record tells it."""
    run_id = backend = endpoint = ""
    living = _living()
    for path in records:
        event = next(events_of(path), None)
        if event is None:
            continue
        run_id = event.run
        settings = event.facts.get("settings")
        if event.kind == "run.began" and isinstance(settings, dict):
            backend = str(settings.get("rdzv_backend", ""))
            # What an agent itself serves is gone with it.
            served = event.facts.get("endpoint") if os.path.realpath(path) in living else ""
            endpoint = str(served or settings.get("rdzv_endpoint", ""))
            conf = {**read_pairs(str(settings.get("rdzv_conf", ""))), **conf}
            if endpoint:
                break
    return Target(run_id, backend, endpoint, conf, records)


# -- through the store -----------------------------------------------------------------------------


@contextlib.contextmanager
def reached(target: Target, chosen: argparse.Namespace) -> Iterator[tuple[Store, str]]:
    """The store in which the job meets, and the job's id.

    Raises:
        StoreError: it is not there, or refuses. ConfigError: it cannot be asked as things are.
        NoSuchRun: it holds no job, or several.
    """
    store = _open(target, chosen)
    try:
        yield store, target.run_id or _only_job(store, target)
    finally:
        with contextlib.suppress(StoreError):
            store.close()


def _open(target: Target, chosen: argparse.Namespace) -> Store:
    if not target.endpoint:
        raise StoreUnavailable("no agent lives here that served the store of this run")
    if target.backend == "file":
        if not Path(target.endpoint).is_dir():  # a store would make it
            raise StoreUnavailable(f"there is no folder {target.endpoint}")
        return FileStore(target.endpoint, timeout=chosen.timeout)
    if target.backend in ETCD_BACKENDS:
        return read_etcd_place(target.endpoint, target.conf).open(chosen.timeout)
    if target.backend not in TCP_BACKENDS:
        return _open_foreign(target, chosen.timeout)
    path = chosen.secret_file or target.conf.get("secret_file")
    named = "--secret-file" if chosen.secret_file else "secret_file of the run's --rdzv-conf"
    secret = read_secret(os.environ, path, named)
    return _open_tcp(target, secret, chosen.timeout)


def _open_foreign(target: Target, timeout: float) -> Store:
    # Imported here: most stores are ours.
    from .meeting import open_to_look

    config = LaunchConfig(
        run_id=target.run_id or "none",
        rdzv_backend=target.backend,
        rdzv_endpoint=target.endpoint,
        rdzv_configs=target.conf,
    )
    return open_to_look(config, timeout)


def _open_tcp(target: Target, secret: bytes | None, timeout: float) -> Store:
    """A client of the first of its places that answers."""
    error: StoreError = StoreUnavailable(f"{target.endpoint} means nothing here")
    places = [split_endpoint(part, STORE_PORT) for part in parts_of(target.endpoint)]
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
    if not target.records and (isinstance(error, StoreTimeout) or NOT_OURS in str(error)):
        hint = "is it the place of another --rdzv-backend? name it with --rdzv-backend"
        raise type(error)(f"{error}; {hint}")
    raise error


def _only_job(store: Store, target: Target) -> str:
    jobs, living = jobs_in(store)
    chosen = living or jobs
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise NoSuchRun(f"{target.endpoint} holds no job (yet)")
    there = ", ".join(chosen)
    raise NoSuchRun(f"{target.endpoint} holds these jobs: {there}; name one with --rdzv-id")


# -- from what was written down --------------------------------------------------------------------


def events_of(path: Path) -> Iterator[Event]:
    """The events of a file, but for lines that are none (the last may be cut short)."""
    with contextlib.suppress(OSError):
        yield from EventsFile(path)


def is_recorded(target: Target) -> bool:
    """Whether there are events of it on this machine."""
    return any(event.possible for path in target.records for event in events_of(path))


def recorded(target: Target) -> JobStatus | None:
    """What the events on this machine tell; None if there are none."""
    living = _living()
    nodes, newest = [], 0.0
    for path in target.records:
        found = _recorded_node(path, os.path.realpath(path) in living)
        if found is not None:
            nodes.append(found[0])
            newest = max(newest, found[1])
    if not nodes:
        return None
    return status_of_records(target.run_id, nodes, age=max(0.0, wall() - newest))


def _living() -> set[str]:
    """The files of events of the agents that live here."""
    return {os.path.realpath(one.events) for one in known_runs() if one.living}


def _recorded_node(path: Path, lives: bool) -> tuple[NodeEntry, float] | None:
    """The node, and when it last wrote, in seconds since 1970."""
    log = AgentLog(keep=False)
    for event in events_of(path):
        log.fold(event)
    if log.began is None:
        return None
    status = log.status
    answer = Answer(0, status, log.seen - status.since, log.seen - status.began)
    node = NodeEntry(
        node=status.node,
        host=status.host,
        rank=status.node_rank,
        slots=status.slots,
        lives=lives and not status.state.over,
        answer=answer,
    )
    return node, log.wall
