"""Where the TCP store of a launch is served, and by whom: decided by addresses, not by names.

Whoever can bind an endpoint hosts it, at that address alone. The decision explains itself in one
line, and is taken again where a name may yet come to mean this machine: a container's does so some
time after it starts. A name of several machines decides nothing, and is refused.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError, StoreConnectionError
from ..stores.failover_store import FailoverStore, StoreEndpoint
from ..stores.interface import Store
from ..stores.tcp_client import TcpStore
from ..stores.tcp_server import ServerLimits, TcpStoreServer
from ..threads import helper
from .addresses import (
    NOT_OURS,
    addresses_of,
    is_literal,
    is_localhost,
    is_loopback,
    is_ours,
    of_several_machines,
    outward_address,
    resolve,
)
from .launch_config import LaunchConfig
from .launcher_process import raise_open_file_limit

log = logging.getLogger("elasticlib.launch")

CONNECT_SECONDS = 1.0
"""For one attempt: the handler goes on trying, and can be told to stop in between."""
SPARE_DESCRIPTORS = 256
LINKS_PER_WORKER = 4
"""To torch's store, at the port of ours: a group has one, its watchdog another, a library more."""
LOOK_AGAIN_LEASES = 3
"""Leases after which a host looks again whether the name still means it."""

_PASSED_ON = (
    "; if a Service or a router passes it on to this machine, give this node --rdzv-conf "
    "is_host=true as well, and it serves at all of its addresses"
)


@attrs.frozen
class TorchFront:
    """The port of a static job, at which scripts find torch's store as they do with torchrun."""

    address: str
    port: int
    _server: TcpStoreServer

    def forward_to(self, host: str, port: int) -> None:
        self._server.forward_torch_clients_to((host, port))

    def stop_forwarding(self) -> None:
        self._server.forward_torch_clients_to(None)


def served_here(store: Store | None, own: TcpStoreServer | None) -> TcpStoreServer | None:
    """The server of this store, if that is in this process just now: it may have moved here."""
    return store.server if isinstance(store, FailoverStore) else own


def must_host(config: LaunchConfig) -> bool | None:
    """Whether this node is to host the store, or must not; None where addresses decide."""
    must = config.options.is_host
    if config.rdzv_backend == "static" and must is None:
        return config.node_rank == 0
    return must


class TcpMeetingPlace:
    """The store of a launch, and what it takes to serve it here."""

    def __init__(self, config: LaunchConfig, secret: bytes | None) -> None:
        self._config = config
        self._secret = secret
        self._hosts = must_host(config)
        self._said, self._taken = "", False
        self._looked: set[str] = set()
        self._everywhere = False
        workers = config.max_nodes * config.nproc_per_node
        static = config.rdzv_backend == "static"
        self._links = SPARE_DESCRIPTORS + LINKS_PER_WORKER * workers if static else 0

    def open(self) -> tuple[TcpStoreServer | None, TcpStore | FailoverStore]:
        """The server, if this node is the host, and a client.

        Raises:
            ConfigError: the endpoint cannot be what the flags say.
        """
        config = self._config
        if config.is_single_node:
            server = self._serve("127.0.0.1", 0)
            return server, self._reach(server.host, server.port)
        endpoints = [split_endpoint(name, STORE_PORT) for name in config.endpoints]
        places = [
            StoreEndpoint(
                join_endpoint(host, port),
                partial(self._reach_at, host, port),
                partial(self._host_if_ours, host, port),
            )
            for host, port in endpoints
        ]
        patience = config.timing.lease_ttl
        if len(places) > 1:
            return None, FailoverStore(places, failover_timeout=patience)
        ((host, port),) = endpoints
        hosted = self._host_if_ours(host, port)
        if hosted is not None:
            own = self._reach(self._own_address or hosted.host, hosted.port)
            if self._hosts or is_literal(host) or is_localhost(host):
                return hosted, own
            store = FailoverStore(places, failover_timeout=patience, hosted=(hosted, own))
            helper(lambda: self._watch_name(store, hosted, host), "endpoint-name").start()
            return None, store
        if self._hosts is False or self._taken or is_literal(host):
            return None, places[0].connect()
        # The name may come to mean this machine. (Where it does, and another of its processes
        # serves there, that is for whoever started the two of them to look after.)
        return None, FailoverStore(places, failover_timeout=patience)

    def front_finder(
        self, server: TcpStoreServer | None, store: Store
    ) -> Callable[[], TorchFront | None] | None:
        """What finds where workers meet, if this node serves the one port that all of a job know
        just now; None where the job is not static, and has no such port."""

        def find() -> TorchFront | None:
            served = served_here(store, server)
            if served is None:
                return None
            return TorchFront(self._own_address or served.host, served.port, served)

        return find if self._links else None

    def _watch_name(self, store: FailoverStore, hosted: TcpStoreServer, host: str) -> None:
        """While it is hosted here: DNS may have said something old of a name, an address that was
        another's before it was ours. Who is alone then goes where the name leads."""
        endpoint, said = join_endpoint(host, hosted.port), ""
        while not hosted.wait_closed(LOOK_AGAIN_LEASES * self._config.timing.lease_ttl):
            addresses = resolve(host, hosted.port)
            if not addresses or any(map(is_ours, addresses)):
                said = ""
                continue
            there = f"{endpoint} has come to mean another machine ({', '.join(addresses)})"
            if store.yield_to_other_server():
                log.warning("%s: this node, which was alone, goes to the store there", there)
            elif there != said:
                log.warning(
                    "%s: this node goes on serving the store at %s to the nodes that are in it, or "
                    "until one is served there; nodes that start now do not find it",
                    there,
                    hosted.address,
                )
            said = there

    @property
    def _own_address(self) -> str | None:
        """Where this node reaches what it serves at all of its addresses; the others are to be
        told one at which they reach its workers."""
        return outward_address() if self._everywhere else None

    def _serve(self, address: str, port: int, more: Sequence[str] = ()) -> TcpStoreServer:
        nodes = self._config.max_nodes
        # Torch's own store, which each worker connects to, may be this process's too.
        own = SPARE_DESCRIPTORS + nodes * self._config.nproc_per_node
        own += 3 * self._links  # a client's, its other half, and that one's in torch's server
        raise_open_file_limit(nodes + SPARE_DESCRIPTORS + own)
        limits = ServerLimits(reserved_descriptors=own, max_torch_relays=self._links)
        job, secret = self._config.run_id, self._secret
        return TcpStoreServer(
            address, port, job=job, limits=limits, secret=secret, extra_hosts=more
        ).start()

    def _reach(self, host: str, port: int) -> TcpStore:
        return TcpStore(
            host,
            port,
            job=self._config.run_id,
            timeout=self._config.store_timeout_s,
            connect_timeout=CONNECT_SECONDS,
            secret=self._secret,
        )

    def _reach_at(self, host: str, port: int) -> TcpStore:
        if self._own_address is not None:
            return self._reach(self._own_address, port)
        found = resolve(host, port)
        # A name that means this machine, where another of its processes serves at its address.
        own = len(found) == 1 and not is_literal(host) and found[0] == outward_address()
        return self._reach(found[0] if own else host, port)

    def _host_if_ours(self, host: str, port: int) -> TcpStoreServer | None:
        """The server, if the endpoint is an address of this machine that nobody serves yet."""
        if self._hosts is False:
            return None
        endpoint = join_endpoint(host, port)
        tried: list[str] = []
        addresses = resolve(host, port)
        if self._is_of_several(host, endpoint, addresses):
            return None
        self._taken = self._everywhere = False
        for address in addresses:
            try:
                server = self._serve(address, port, self._loopbacks_of(host, address))
            except OSError as error:
                tried.append(f"{address}: {error.strerror}")
                self._taken |= error.errno == errno.EADDRINUSE
                if error.errno not in (errno.EADDRINUSE, *NOT_OURS):
                    raise ConfigError(f"cannot serve the store at {endpoint}: {error}") from error
                continue
            log.info("this node hosts the store at %s", server.address)
            return server
        if self._config.options.is_host and addresses and not self._taken:
            return self._host_everywhere(endpoint, addresses, port)
        self._explain(host, endpoint, tried)
        return None

    def _loopbacks_of(self, host: str, address: str) -> Sequence[str]:
        """torchrun serves torch's store at all addresses, so that scripts may say localhost, or a
        name that means 127.0.1.1 on its own machine: where else this one is served."""
        if not self._links or is_loopback(address):
            return ()
        own = {"127.0.0.1", *filter(is_loopback, addresses_of(host))}
        return ("127.0.0.1", *sorted(own - {"127.0.0.1"}))

    def _is_of_several(self, host: str, endpoint: str, addresses: list[str]) -> bool:
        """Whether each of several machines would find itself meant; at first that is an error.
        Later it may be a name that is about to change, and has nobody host meanwhile."""
        first = endpoint not in self._looked
        self._looked.add(endpoint)
        why = "" if self._hosts or is_literal(host) else of_several_machines(endpoint, addresses)
        if why and first:
            raise ConfigError(why)
        if why and why != self._said:
            log.warning("%s", why)
        self._said = why or self._said
        return bool(why)

    def _host_everywhere(self, endpoint: str, addresses: list[str], port: int) -> TcpStoreServer:
        """Told to host at an address that is another's: of a router, or of a Service."""
        wildcards = ["::", "0.0.0.0"] if any(":" in one for one in addresses) else ["0.0.0.0"]
        server, why = None, ""
        while server is None and wildcards:
            wildcard = wildcards.pop(0)
            try:
                server = self._serve(wildcard, port)
            except OSError as error:
                why = f"{wildcard}: {error.strerror}"
        if server is None:
            raise ConfigError(f"cannot serve the store at port {port}: {why}")
        self._everywhere = True
        log.warning(
            "this node hosts the store at all of its addresses, port %d, as --rdzv-conf "
            "is_host=true says, and %s (%s) is none of them: forward that to this machine",
            port,
            endpoint,
            ", ".join(addresses),
        )
        return server

    def _explain(self, host: str, endpoint: str, tried: list[str]) -> None:
        why = "; ".join(tried)
        if self._hosts and tried and (self._taken or not _is_hostname(host)):
            hint = "" if self._taken else _PASSED_ON
            raise ConfigError(
                f"this node must host the store at {endpoint}, but cannot: {why}{hint}"
            )
        found = ", ".join(one.rpartition(": ")[0] for one in tried)
        where = host if found == host else f"{host} ({found})"
        said = f"waiting for {where}, which serves the store"
        if self._taken:
            said = f"joining the store that another process serves at {endpoint}"
        if not tried:
            said = f"cannot resolve the host of {endpoint} yet, retrying"
        elif self._hosts:
            said = f"this node hosts the store at {endpoint} once the name means it ({why})"
        if said != self._said:
            log.info("%s", said)
        self._said = said


def address_towards(store: TcpStore | FailoverStore) -> str:
    """This node's literal address, learnt from the socket that reached the store."""
    store.connect()
    address = store.local_address
    if address is None:
        raise StoreConnectionError("the connection to the store was lost as it was made")
    return address


def _is_hostname(host: str) -> bool:
    """Whether the first label is this machine's name, of which DNS may say something old."""
    return host.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower()
