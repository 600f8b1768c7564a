"""Opens what a launch needs to meet its other nodes: a store, perhaps its server, a handler."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial

import attrs

from ..errors import StoreError
from ..rendezvous.document import Node
from ..rendezvous.dynamic import DynamicRendezvousHandler
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.keys import Keys
from ..stores.file import FileStore
from ..stores.interface import Store
from ..stores.moving import MovingStore
from ..stores.server import TcpStoreServer
from .backends import BackendRequest, open_backend, warn_of_shadows
from .config import TCP_BACKENDS, LaunchConfig
from .tcp_place import TcpMeetingPlace, address_towards, outward_address

log = logging.getLogger("elasticlib.launch")


@attrs.frozen
class Meeting:
    """What is open while a node takes part in a job; `nodes` is where its nodes' keys are.

    store: None where the handler is another distribution's, which looks after its own.
    """

    handler: RendezvousHandler
    store: Store | None
    own_server: TcpStoreServer | None
    nodes: str

    @property
    def server(self) -> TcpStoreServer | None:
        """What this node serves just now, which may have moved here."""
        return self.store.server if isinstance(self.store, MovingStore) else self.own_server

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
        if self.own_server is not None:
            self.own_server.close()


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
        store, find_address = opened, outward_address
    elif config.rdzv_backend == "file":
        store = FileStore(config.rdzv_endpoint, timeout=config.options.read_timeout)
        find_address = outward_address
    elif (etcd := config.etcd) is not None:
        store = etcd.open(config.answer_seconds)
        find_address = partial(etcd.find_address, outward_address)
    else:
        server, tcp = TcpMeetingPlace(config, secret).open()
        store, find_address = tcp, partial(address_towards, tcp)
    handler = _handler(config, store, find_address)
    return Meeting(handler, store, server, Keys(config.run_id).node())


def _request(config: LaunchConfig) -> BackendRequest:
    return BackendRequest(
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        options=config.foreign_options,
        timeout=config.answer_seconds,
        node=_node(config, config.local_addr or outward_address()),
        limits=config.limits,
        timing=config.timing,
    )


def _node(config: LaunchConfig, address: str) -> Node:
    host = socket.gethostname()
    return Node(
        id=f"{host}-{os.getpid()}-{secrets.token_hex(4)}",
        host=host,
        address=address,
        slots=config.nproc_per_node,
        role=config.role,
        hint=config.node_rank,
        topology=config.topology,
    )


def _handler(
    config: LaunchConfig, store: Store, find_address: Callable[[], str]
) -> RendezvousHandler:
    return DynamicRendezvousHandler(
        store,
        config.run_id,
        _node(config, config.local_addr or ""),
        config.limits,
        timing=config.timing,
        backend=config.rdzv_backend,
        find_address=find_address,
    )
