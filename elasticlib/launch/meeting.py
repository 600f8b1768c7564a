"""Opens what a launch needs to meet its other nodes: a store, perhaps its server, a handler.

Which machine hosts the TCP store is decided by addresses: whoever can bind the endpoint does.
The decision explains itself in one line.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial

import attrs

from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError, StoreError, StoreUnavailable
from ..rendezvous.document import Node
from ..rendezvous.dynamic import DynamicRendezvousHandler
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.keys import Keys
from ..rendezvous.static import StaticRendezvousHandler
from ..stores.file import FileStore
from ..stores.interface import Store
from ..stores.server import TcpStoreServer
from ..stores.tcp import TcpStore
from .backends import BackendRequest, open_backend, warn_of_shadows
from .config import TCP_BACKENDS, LaunchConfig

log = logging.getLogger("elasticlib.launch")

ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 2.0
"""For one attempt: the handler goes on trying, and can be told to stop in between."""


@attrs.frozen
class Meeting:
    """What is open while a node takes part in a job; `nodes` is where its nodes' keys are.

    store: None where the handler is another distribution's, which looks after its own.
    """

    handler: RendezvousHandler
    store: Store | None
    server: TcpStoreServer | None
    nodes: str

    def serve_others(self, stopped: Callable[[], bool]) -> None:
        """Keep serving the store while other nodes of the job live, or until told to stop.

        A node that stands still is waited for until its lease ends, and no longer.
        """
        if self.server is None or self.store is None:
            return
        told = False
        try:
            while not stopped() and (living := self.store.list(self.nodes)).entries:
                if not told:
                    told = True
                    log.info("still serving the store to %d nodes", len(living.entries))
                self.store.wait(self.nodes, after=living.version, timeout=0.5)
        except StoreError as error:
            # How this node's run ended is known by now, and a broken server takes nothing of it.
            log.warning("no longer serving the store: %s", error)

    def close(self) -> None:
        try:
            if self.store is not None:
                self.store.close()
        except StoreError as error:
            log.warning("the store was not left cleanly: %s", error)
        if self.server is not None:
            self.server.close()


def open_meeting(config: LaunchConfig, secret: bytes | None = None) -> Meeting:
    """Bind or find the store, and make the handler; no other node is waited for.

    secret: what the nodes must prove to know to meet in a TCP store.

    Raises:
        ConfigError: the endpoint cannot be what the flags say, or the backend cannot be opened.
    """
    server: TcpStoreServer | None = None
    warn_of_shadows()
    if secret is not None and config.rdzv_backend not in TCP_BACKENDS:
        log.warning("nobody is asked for the secret: it is not for %s", config.rdzv_backend)
    if config.foreign:
        opened = open_backend(config.rdzv_backend, _request(config))
        if isinstance(opened, RendezvousHandler):
            return Meeting(opened, None, None, Keys(config.run_id).node())
        store, find_address = opened, _outward_address
    elif config.rdzv_backend == "file":
        store = FileStore(config.rdzv_endpoint, timeout=config.options.read_timeout)
        find_address = _outward_address
    elif (etcd := config.etcd) is not None:
        store = etcd.open(config.options.read_timeout)
        find_address = partial(etcd.find_address, _outward_address)
    else:
        server, tcp = _open_tcp(config, secret)
        store, find_address = tcp, lambda: _address_towards(tcp)
    handler = _handler(config, store, find_address)
    return Meeting(handler, store, server, Keys(config.run_id).node())


def _request(config: LaunchConfig) -> BackendRequest:
    return BackendRequest(
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        options=config.foreign_options,
        timeout=_answer_seconds(config),
        node=_node(config, config.local_addr or _outward_address()),
        limits=config.limits,
        timing=config.options.timing,
    )


def _answer_seconds(config: LaunchConfig) -> float:
    """A store that hangs is noticed within a lease; how long it may is the keeper's affair."""
    return min(config.options.read_timeout, max(config.options.timing.lease, ANSWER_SECONDS))


def _node(config: LaunchConfig, address: str) -> Node:
    host = socket.gethostname()
    return Node(
        id=f"{host}-{os.getpid()}-{secrets.token_hex(4)}",
        host=host,
        address=address,
        slots=config.nproc_per_node,
        role=config.role,
        hint=config.node_rank,
    )


def _handler(
    config: LaunchConfig, store: Store, find_address: Callable[[], str]
) -> RendezvousHandler:
    node = _node(config, config.local_addr or "")
    timing = config.options.timing
    if config.rdzv_backend == "static":
        return StaticRendezvousHandler(
            store,
            config.run_id,
            node,
            config.max_nodes,
            max_restarts=config.max_restarts,
            timing=timing,
            find_address=find_address,
        )
    return DynamicRendezvousHandler(
        store,
        config.run_id,
        node,
        config.limits,
        timing=timing,
        backend=config.rdzv_backend,
        find_address=find_address,
    )


def _open_tcp(config: LaunchConfig, secret: bytes | None) -> tuple[TcpStoreServer | None, TcpStore]:
    serve = partial(TcpStoreServer, job=config.run_id, secret=secret)
    if config.alone:
        server: TcpStoreServer | None = serve("127.0.0.1", 0).start()
        assert server is not None
        host, port = server.host, server.port
    else:
        host, port = split_endpoint(config.rdzv_endpoint, STORE_PORT)
        server = _host_if_ours(host, port, config, serve)
        if server is not None:
            host, port = server.host, server.port
    store = TcpStore(
        host,
        port,
        job=config.run_id,
        timeout=_answer_seconds(config),
        connect_timeout=CONNECT_SECONDS,
        secret=secret,
    )
    return server, store


def _host_if_ours(
    host: str, port: int, config: LaunchConfig, serve: Callable[[str, int], TcpStoreServer]
) -> TcpStoreServer | None:
    """The server, if the endpoint is an address of this machine that nobody serves yet."""
    must = config.options.is_host
    if config.rdzv_backend == "static" and must is None:
        must = config.node_rank == 0
    if must is False:
        return None
    endpoint = join_endpoint(host, port)
    tried: list[str] = []
    for address in _resolve(host, port):
        try:
            server = serve(address, port).start()
        except OSError as error:
            tried.append(f"{address}: {error.strerror}")
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise ConfigError(f"cannot serve the store at {endpoint}: {error}") from error
            continue
        log.info("this node hosts the store at %s", server.address)
        return server
    why = "; ".join(tried) or "the name resolves to nothing here"
    if must:
        raise ConfigError(f"this node is to host the store at {endpoint}, but cannot: {why}")
    log.info("another process hosts the store at %s (%s)", endpoint, why)
    return None


def _resolve(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _address_towards(store: TcpStore) -> str:
    """This node's literal address, learnt from the socket that reached the store."""
    store.connect()
    address = store.local_address
    if address is None:
        raise StoreUnavailable(f"the connection to {store.address} was lost as it was made")
    return address


def _outward_address() -> str:
    """The address of the default route's interface; loopback on a machine without one."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                # Connecting a datagram socket chooses a route and sends nothing.
                probe.connect((target, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"
