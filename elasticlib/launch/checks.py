"""What can be found out before a launch starts: looks at this machine, and leaves nothing."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder

import attrs

from ..compat import TIMER_FILE
from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError, ElasticError, present
from ..workers.cpu import bindings, count_cores
from ..workers.spec import Command, Entrypoint, Module, check_preload, own_device
from .config import (
    EVERYWHERE,
    HEALTH_VARIABLE,
    LOOPBACK,
    OBSERVE_FLAG,
    TCP_BACKENDS,
    LaunchConfig,
    health_port,
    read_port,
)
from .console import log_level
from .endpoints import read_secret
from .requeue import find_requeue
from .tcp_place import NOT_OURS, is_ours, of_several_machines, resolve

CONNECT_SECONDS = 2.0


@attrs.frozen
class Finding:
    """What one check found. good: whether the launch can work so; None where it is for its user
    to say."""

    check: str
    good: bool | None
    sentence: str


def check_launch(
    config: LaunchConfig, entrypoint: Entrypoint, environment: Mapping[str, str]
) -> list[Finding]:
    """All findings on this machine as it is now; an endpoint is tried for some seconds at most."""
    found = [_program(entrypoint), _processors(config)]
    found += _logs(config)
    found += _modules(config, entrypoint)
    found += _timers(config)
    found += _refusals(config, environment)
    found += _ports(config, environment)
    found += _place(config)
    return found


def _program(entrypoint: Entrypoint) -> Finding:
    if isinstance(entrypoint, Command):
        path = shutil.which(entrypoint.program)
        where = f"is {path}" if path else "is not on the PATH, or not to be executed"
        return Finding("program", path is not None, f"{entrypoint.program} {where}")
    if isinstance(entrypoint, Module):
        return _importable("module", entrypoint.name)
    return Finding("script", True, f"{getattr(entrypoint, 'path', entrypoint)} is there")


def _importable(check: str, name: str) -> Finding:
    """By its outermost package: looking further would import it."""
    outermost, dot, _ = name.partition(".")
    if PathFinder.find_spec(outermost, [os.getcwd(), *sys.path]) is None:
        return Finding(check, False, f"{outermost} is not found from here or on Python's path")
    rest = f"; whether it has {name} is not looked at, as that would import it" if dot else ""
    return Finding(check, True, f"{outermost} is found{rest}")


def _modules(config: LaunchConfig, entrypoint: Entrypoint) -> Iterator[Finding]:
    refused = list(_tried("--preload", lambda: check_preload(config.preload, entrypoint), ""))
    yield from refused
    for name in () if refused else config.preload:
        yield _importable("--preload", name)


def _timers(config: LaunchConfig) -> Iterator[Finding]:
    path = config.torchrun.timer_file
    if path:
        folder = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(folder):
            yield writable(TIMER_FILE, folder)
        else:
            yield Finding(TIMER_FILE, False, f"no pipe can be made at {path}: there is no {folder}")


def _processors(config: LaunchConfig) -> Finding:
    cores, workers = count_cores(), config.nproc_per_node
    good = True if workers <= cores else None
    return Finding("processors", good, f"{workers} workers, and {cores} to use")


def _logs(config: LaunchConfig) -> Iterator[Finding]:
    if config.log_dir is not None:
        yield writable("--log-dir", config.log_dir)


def writable(check: str, path: str) -> Finding:
    """Whether a folder can be written to, or made."""
    nearest = os.path.abspath(path)
    while not os.path.exists(nearest):
        nearest = os.path.dirname(nearest)
    try:
        # Permissions alone do not tell: the file system may be full, or take no files at all.
        with tempfile.NamedTemporaryFile(dir=nearest) as file:
            file.write(b"elasticrun --dry-run")
            file.flush()
        good = True
    except OSError:
        good = False
    made = "" if nearest == os.path.abspath(path) else f", as it would be made in {nearest}"
    return Finding(check, good, f"{path} can{'' if good else 'not'} be written to{made}")


def _refusals(config: LaunchConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What a launch would be refused for."""
    if config.virtual_local_rank:
        yield from _tried(
            "--virtual-local-rank",
            lambda: own_device(config.nproc_per_node - 1, environment),
            "the last worker's GPU is {}",
        )
    workers, visible = config.nproc_per_node, environment.get("CUDA_VISIBLE_DEVICES")
    if config.numa_binding is not None:
        name = config.numa_binding
        yield from _tried(
            "--numa-binding",
            lambda: bindings(name, workers, visible),
            "workers are bound to processors near their GPUs",
        )
    level = environment.get("LOGLEVEL", "INFO")
    yield from _tried("LOGLEVEL", lambda: log_level(level), f"{level}, for the agent's own lines")
    requeue = config.supervision.requeue
    yield from _tried(
        "--requeue",
        lambda: find_requeue(requeue, environment),
        "{0.scontrol} is asked to requeue {0.target}",
    )
    yield from _secret(config, environment)


def _secret(config: LaunchConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    path, backend = config.options.secret_file, config.rdzv_backend
    for found in _tried(
        "secret",
        lambda: read_secret(environment, path, "--rdzv-conf secret_file"),
        "nodes must prove to know it",
    ):
        if found.good and backend not in TCP_BACKENDS:
            sentence = f"nobody is asked for the secret: it is not for {backend}"
            yield Finding("secret", None, sentence)
        else:
            yield found


def _ports(config: LaunchConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Those at which it would be observed."""
    asked: dict[str, tuple[str, int] | None] = {}
    if config.observe_port is not None:
        asked[OBSERVE_FLAG] = read_port(config.observe_port, OBSERVE_FLAG, LOOPBACK)
    try:
        asked[HEALTH_VARIABLE] = health_port(environment)
    except ConfigError as error:
        yield Finding(HEALTH_VARIABLE, False, str(error))
    for name, where in asked.items():
        if where is not None:
            why = why_not_served([where[0], *["0.0.0.0"] * (where[0] == EVERYWHERE)], where[1])
            said = "can be served" if why is None else f"cannot be served: {why}"
            # The launch goes on without torch's, which several on a machine may be told.
            bad = False if name == OBSERVE_FLAG else None
            good = True if why is None else bad
            yield Finding(name, good, f"{join_endpoint(*where)} {said}")


def _tried(check: str, do: Callable[[], object], sentence: str) -> Iterator[Finding]:
    try:
        result = do()
    except ConfigError as error:
        yield Finding(check, False, str(error))
    else:
        if result is not None:
            yield Finding(check, True, sentence.format(result))


def _place(config: LaunchConfig) -> Iterator[Finding]:
    if config.alone:
        yield Finding("meeting place", True, "this node is alone, with a store of its own")
    elif config.rdzv_backend in TCP_BACKENDS:
        for name in config.endpoints:
            host, port = split_endpoint(name, STORE_PORT)
            yield _endpoint(config, host, port)
    elif config.rdzv_backend == "file":
        yield writable("meeting place", config.rdzv_endpoint)
    elif config.etcd is not None:
        yield _etcd(config)
    else:
        yield Finding("meeting place", None, f"only {config.rdzv_backend} itself can try it")


def _etcd(config: LaunchConfig) -> Finding:
    place = present(config.etcd, "the place of the etcd backend")
    try:
        store = place.open(CONNECT_SECONDS)
        try:
            store.get("elasticlib/dry-run")
        finally:
            store.close()
    except ElasticError as error:
        return Finding("meeting place", False, f"etcd does not answer: {error}")
    return Finding("meeting place", True, f"etcd at {place.endpoints} answers")


def _endpoint(config: LaunchConfig, host: str, port: int) -> Finding:
    """Who would serve a TCP store at an endpoint, as the launch decides it."""
    check, endpoint = "meeting place", join_endpoint(host, port)
    addresses = resolve(host, port)
    if not addresses:
        return Finding(check, False, f"{endpoint}: the name resolves to nothing here")
    shown = f"{endpoint} ({', '.join(addresses)})"
    asked = config.options.is_host
    if asked is None and config.rdzv_backend == "static":
        asked = config.node_rank == 0
    several = "" if asked is not None else of_several_machines(endpoint, addresses)
    if several:
        return Finding(check, False, several)
    if asked is not False:
        bound = why_not_served(addresses, port)
        if bound is None:
            return Finding(check, True, f"{shown}: this node would serve the store")
        if config.options.is_host and not any(map(is_ours, addresses)):
            sentence = f"{shown}: this node would serve the store, at all of its own addresses"
            return Finding(check, True, sentence)
        if asked:
            return Finding(check, False, f"{shown}: this node is to serve the store: {bound}")
    try:
        dial(addresses, port, CONNECT_SECONDS)
    except OSError as error:
        why = error.strerror or str(error)
        return Finding(check, None, f"{shown}: nobody answers there yet ({why})")
    return Finding(check, True, f"{shown}: somebody answers there")


def dial(addresses: list[str], port: int, seconds: float) -> str:
    """The first of these that takes a connection.

    Raises:
        OSError: none does; it is the last one's.
    """
    for address in addresses[:-1]:
        with suppress(OSError):
            socket.create_connection((address, port), seconds).close()
            return address
    socket.create_connection((addresses[-1], port), seconds).close()
    return addresses[-1]


def why_not_served(addresses: list[str], port: int) -> str | None:
    """Why none of these can be served here, or None if one can; it is free again on return."""
    why = "no address"
    for address in addresses:
        try:
            # By its name as a socket has it: of a link-local one, the scope is a part of that.
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            family, kind, proto, _, name = found[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(name)
        except OSError as error:
            why = f"{address}: {error.strerror}"
            if error.errno not in (errno.EADDRINUSE, *NOT_OURS):
                return why
        else:
            return None
    return why
