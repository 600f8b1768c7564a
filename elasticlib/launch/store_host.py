"""Decides whether this node hosts the job's TCP store, by addresses and not by names.

The node that can bind an endpoint hosts the store there, unless the settings name the host. The
decision is logged in one line. The node decides again while a name may still change its address, as
a container's name does some time after its start. A name that means this machine and also others is
rejected.
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
from ..options import LaunchOptions, RendezvousOptions
from ..stores.failover_store import FailoverStore, StoreEndpoint
from ..stores.interface import Store
from ..stores.tcp_client import TcpStore
from ..stores.tcp_server import ServerLimits, TcpStoreServer
from ..threads import daemon_thread, only_logged
from .addresses import (
    NOT_LOCAL_ERRNOS,
    addresses_of,
    ambiguous_host_error,
    is_literal,
    is_local_address,
    is_localhost,
    is_loopback,
    outward_address,
    resolve,
)
from .launcher_process import raise_open_file_limit

log = logging.getLogger("elasticlib.launch")

CONNECT_TIMEOUT_S = 1.0  # of one attempt; the handler retries, and can be stopped in between
RESERVED_DESCRIPTORS = 256
# Connections of a worker to torch's store through this port: its group, its watchdog, two spare.
TORCH_CONNECTIONS_PER_WORKER = 4
NAME_CHECK_INTERVAL_LEASES = (
    3  # leases between two checks that the name still resolves to this machine
)

_FORWARDING_HINT = (
    "; if a Service or a router forwards the endpoint to this machine, set --rdzv-conf "
    "is_host=true on this node as well, and it serves on all of its addresses"
)


@attrs.frozen
class TorchStoreProxy:
    """The port of a static job, at which scripts find torch's store as they do under torchrun."""

    address: str
    port: int
    _server: TcpStoreServer

    def forward_to(self, host: str, port: int) -> None:
        """Forward clients of torch's TCPStore to the store at this address from now on."""
        self._server.forward_torch_clients_to((host, port))

    def stop_forwarding(self) -> None:
        """Reject clients of torch's TCPStore until `forward_to` is called again."""
        self._server.forward_torch_clients_to(None)


def local_server(store: Store | None, own: TcpStoreServer | None) -> TcpStoreServer | None:
    """Return the server of the store that this process runs now, or None.

    Args:
        store: the store of the job. A failover store starts a server when it moves to this node.
        own: the server that was started together with another kind of store, or None.
    """
    return store.server if isinstance(store, FailoverStore) else own


def is_designated_host(rendezvous: RendezvousOptions) -> bool | None:
    """Return whether the settings make this node the host of the store.

    Returns:
        None if they leave that to the address of the endpoint.
    """
    designated = rendezvous.is_host
    if rendezvous.backend == "static" and designated is None:
        return rendezvous.node_rank == 0
    return designated


class TcpStoreHost:
    """Opens the TCP store of a launch, and serves it if this node is the host."""

    def __init__(self, options: LaunchOptions, secret: bytes | None) -> None:
        self._rendezvous = options.rendezvous
        self._max_nodes = options.job.max_nodes
        self._num_workers = options.job.max_nodes * options.workers.count
        self._secret = secret
        self._is_designated = is_designated_host(options.rendezvous)
        self._last_message = ""  # the last logged decision
        self._is_address_in_use = False  # by another process of this machine
        self._checked_endpoints: set[str] = set()
        self._serves_all_addresses = False
        self._torch_connections = 0  # for which descriptors are reserved; static jobs only
        if options.rendezvous.backend == "static":
            per_worker = TORCH_CONNECTIONS_PER_WORKER
            self._torch_connections = RESERVED_DESCRIPTORS + per_worker * self._num_workers

    def open(self) -> tuple[TcpStoreServer | None, TcpStore | FailoverStore]:
        """Return the server that this node runs, or None, and a client of the store.

        The server is also None if it can move to another node: a FailoverStore then owns it.

        Raises:
            ConfigError: the endpoint contradicts the settings.
        """
        if self._rendezvous.is_single_node:
            server = self._start_server("127.0.0.1", 0)
            return server, self._client(server.host, server.port)
        addresses = [split_endpoint(name, STORE_PORT) for name in self._rendezvous.endpoints]
        endpoints = [
            StoreEndpoint(
                join_endpoint(host, port),
                partial(self._client_for, host, port),
                partial(self._host_if_local, host, port),
            )
            for host, port in addresses
        ]
        failover_timeout = self._rendezvous.timeouts.lease_ttl
        if len(endpoints) > 1:
            return None, FailoverStore(endpoints, failover_timeout=failover_timeout)
        ((host, port),) = addresses
        hosted = self._host_if_local(host, port)
        if hosted is not None:
            client = self._client(self._own_address or hosted.host, hosted.port)
            if self._is_designated or is_literal(host) or is_localhost(host):
                return hosted, client
            store = FailoverStore(
                endpoints, failover_timeout=failover_timeout, hosted=(hosted, client)
            )
            watch = partial(self._watch_name, store, hosted, host)
            daemon_thread(watch, "endpoint-name", only_logged).start()
            return None, store
        if self._is_designated is False or self._is_address_in_use or is_literal(host):
            return None, endpoints[0].connect()
        # The name may resolve to this machine later.
        return None, FailoverStore(endpoints, failover_timeout=failover_timeout)

    def proxy_finder(
        self, server: TcpStoreServer | None, store: Store
    ) -> Callable[[], TorchStoreProxy | None] | None:
        """Return a function that returns the proxy of torch's store.

        The function returns None while this node does not serve the job's store.

        Returns:
            The function, or None if the job is not static and so has no fixed port.
        """

        def find() -> TorchStoreProxy | None:
            current = local_server(store, server)
            if current is None:
                return None
            return TorchStoreProxy(self._own_address or current.host, current.port, current)

        return find if self._torch_connections else None

    def _watch_name(self, store: FailoverStore, hosted: TcpStoreServer, host: str) -> None:
        """Move to another store if the name resolves to another machine, until the server closes.

        DNS may give an old address that belonged to another machine before. A node that has peers
        stays, because they use the store that it serves.
        """
        endpoint, last_message = join_endpoint(host, hosted.port), ""
        interval = NAME_CHECK_INTERVAL_LEASES * self._rendezvous.timeouts.lease_ttl
        while not hosted.wait_closed(interval):
            addresses = resolve(host, hosted.port)
            if not addresses or any(map(is_local_address, addresses)):
                last_message = ""
                continue
            message = f"{endpoint} now resolves to another machine ({', '.join(addresses)})"
            if store.yield_to_other_server():
                log.warning("%s: this node has no peers and joins the store there", message)
            elif message != last_message:
                log.warning(
                    "%s: this node keeps serving the store at %s to its nodes, until a store is "
                    "served there; nodes that start now do not find it",
                    message,
                    hosted.address,
                )
            last_message = message

    @property
    def _own_address(self) -> str | None:
        """The address for this node's own client if the server listens on all addresses.

        The other nodes learn the address of the workers from this connection, so it must be one
        that they can reach.
        """
        return outward_address() if self._serves_all_addresses else None

    def _start_server(
        self, address: str, port: int, extra_hosts: Sequence[str] = ()
    ) -> TcpStoreServer:
        # Torch's own store, to which each worker connects, may be in this process, too.
        reserved = RESERVED_DESCRIPTORS + self._num_workers
        # A relayed connection of a client takes two descriptors here and one in torch's server.
        reserved += 3 * self._torch_connections
        raise_open_file_limit(self._max_nodes + RESERVED_DESCRIPTORS + reserved)
        limits = ServerLimits(
            reserved_descriptors=reserved, max_torch_relays=self._torch_connections
        )
        return TcpStoreServer(
            address,
            port,
            job=self._rendezvous.run_id,
            limits=limits,
            secret=self._secret,
            extra_hosts=extra_hosts,
        ).start()

    def _client(self, host: str, port: int) -> TcpStore:
        return TcpStore(
            host,
            port,
            job=self._rendezvous.run_id,
            timeout=self._rendezvous.store_timeout_s,
            connect_timeout=CONNECT_TIMEOUT_S,
            secret=self._secret,
        )

    def _client_for(self, host: str, port: int) -> TcpStore:
        if self._own_address is not None:
            return self._client(self._own_address, port)
        addresses = resolve(host, port)
        # A name of this machine, on which another process serves at the address of the name.
        is_own_name = (
            len(addresses) == 1 and not is_literal(host) and addresses[0] == outward_address()
        )
        return self._client(addresses[0] if is_own_name else host, port)

    def _host_if_local(self, host: str, port: int) -> TcpStoreServer | None:
        """Start the server if the endpoint is a free address of this machine, else return None.

        With is_host=true and no address of this machine, the server listens on all addresses. No
        server is started if another node must host the store.

        Raises:
            ConfigError: the endpoint contradicts the settings, or cannot be served.
        """
        if self._is_designated is False:
            return None
        endpoint = join_endpoint(host, port)
        failures: list[str] = []
        addresses = resolve(host, port)
        if self._is_ambiguous(host, endpoint, addresses):
            return None
        self._is_address_in_use = self._serves_all_addresses = False
        for address in addresses:
            try:
                server = self._start_server(address, port, self._loopbacks_for(host, address))
            except OSError as error:
                failures.append(f"{address}: {error.strerror}")
                self._is_address_in_use |= error.errno == errno.EADDRINUSE
                if error.errno not in (errno.EADDRINUSE, *NOT_LOCAL_ERRNOS):
                    raise ConfigError(f"cannot serve the store at {endpoint}: {error}") from error
                continue
            log.info("this node hosts the store at %s", server.address)
            return server
        if self._rendezvous.is_host and addresses and not self._is_address_in_use:
            return self._host_on_all_addresses(endpoint, addresses, port)
        self._log_decision(host, endpoint, failures)
        return None

    def _loopbacks_for(self, host: str, address: str) -> Sequence[str]:
        """Return the loopback addresses on which a static job's store is served as well.

        torchrun serves torch's store on all addresses, so scripts may use localhost, or a name
        that means 127.0.1.1 on its own machine.
        """
        if not self._torch_connections or is_loopback(address):
            return ()
        loopbacks = {"127.0.0.1", *filter(is_loopback, addresses_of(host))}
        return ("127.0.0.1", *sorted(loopbacks - {"127.0.0.1"}))

    def _is_ambiguous(self, host: str, endpoint: str, addresses: list[str]) -> bool:
        """Return True if the name resolves to several machines, each of which would host a store.

        Raises:
            ConfigError: this is the first check of the endpoint. Later, the name may be about to
                change, and no node hosts the store until then.
        """
        is_first = endpoint not in self._checked_endpoints
        self._checked_endpoints.add(endpoint)
        error = ""
        if not self._is_designated and not is_literal(host):
            error = ambiguous_host_error(endpoint, addresses)
        if error and is_first:
            raise ConfigError(error)
        if error and error != self._last_message:
            log.warning("%s", error)
        self._last_message = error or self._last_message
        return bool(error)

    def _host_on_all_addresses(
        self, endpoint: str, addresses: list[str], port: int
    ) -> TcpStoreServer:
        """Serve on all addresses, because the endpoint is one of a router or of a Service."""
        has_ipv6 = any(":" in address for address in addresses)
        server, error_text = None, ""
        for wildcard in ("::", "0.0.0.0") if has_ipv6 else ("0.0.0.0",):
            try:
                server = self._start_server(wildcard, port)
                break
            except OSError as error:
                error_text = f"{wildcard}: {error.strerror}"
        if server is None:
            raise ConfigError(f"cannot serve the store at port {port}: {error_text}")
        self._serves_all_addresses = True
        log.warning(
            "this node hosts the store on all of its addresses, port %d, because of --rdzv-conf "
            "is_host=true; %s (%s) is none of them, so it must be forwarded to this machine",
            port,
            endpoint,
            ", ".join(addresses),
        )
        return server

    def _log_decision(self, host: str, endpoint: str, failures: list[str]) -> None:
        """Log why this node does not host the store now.

        Raises:
            ConfigError: this node must host the store, and cannot.
        """
        reasons = "; ".join(failures)
        is_final = self._is_address_in_use or not _is_own_hostname(host)
        if self._is_designated and failures and is_final:
            hint = "" if self._is_address_in_use else _FORWARDING_HINT
            raise ConfigError(
                f"this node must host the store at {endpoint}, but cannot: {reasons}{hint}"
            )
        addresses = ", ".join(failure.rpartition(": ")[0] for failure in failures)
        if self._is_address_in_use:
            message = f"joining the store that another process serves at {endpoint}"
        else:
            suffix = "" if addresses == host else f" ({addresses})"
            message = f"waiting for the store at {endpoint}{suffix}"
        if not failures:
            message = f"cannot resolve the host of {endpoint}, retrying"
        elif self._is_designated:
            message = (
                f"this node will host the store at {endpoint} once that name resolves to one of "
                f"its addresses ({reasons})"
            )
        if message != self._last_message:
            log.info("%s", message)
        self._last_message = message


def local_address_for(store: TcpStore | FailoverStore) -> str:
    """Return this node's address on the connection to the store.

    Raises:
        StoreError: the store cannot be reached.
    """
    store.connect()
    address = store.local_address
    if address is None:
        raise StoreConnectionError("lost the connection to the store right after connecting")
    return address


def _is_own_hostname(host: str) -> bool:
    """Return True if the host is named like this machine, so that DNS may be out of date.

    Only the first labels of the names are compared.
    """
    return host.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower()
