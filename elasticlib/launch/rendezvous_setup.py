"""Opens what a launch needs to meet its other nodes: a store, perhaps its server, a handler."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial

import attrs

from ..clock import monotonic
from ..errors import ElasticError, StoreConnectionError, StoreError
from ..observe.wording import plural
from ..rendezvous.bootstrap_store import torch_store_opener
from ..rendezvous.handler import DynamicRendezvousHandler
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import JobPhase, Node, RendezvousTimeouts
from ..rendezvous.store_layout import JobListing, StoreKeys
from ..stores.file_store import FileStore
from ..stores.interface import Store
from ..stores.tcp_server import TcpStoreServer
from .addresses import outward_address
from .backends import BackendParameters, open_backend
from .launch_config import TCP_BACKENDS, LaunchConfig
from .store_host import TcpMeetingPlace, TorchFront, address_towards, served_here

log = logging.getLogger("elasticlib.launch")


@attrs.frozen
class Meeting:
    """What is open while the node `me` takes part in a job.

    store: None where a backend of the user's own opened a handler, which has its own store.
    """

    handler: RendezvousHandler
    store: Store | None
    own_server: TcpStoreServer | None
    run_id: str
    me: str

    @property
    def server(self) -> TcpStoreServer | None:
        """What this node serves just now."""
        return served_here(self.store, self.own_server)

    @property
    def serves_at(self) -> str:
        """`host:port` of what it serves; empty if that is nothing."""
        return "" if self.server is None else self.server.address

    def serve_others(self, stopped: Callable[[], bool]) -> None:
        """Keep serving the store while other nodes of the job live, or until told to stop.

        A node that stands still is waited for until its lease ends, and no longer.
        """
        if self.server is None or self.store is None:
            return
        nodes, said = StoreKeys(self.run_id).node(), False
        try:
            while not stopped() and (living := self.store.list(nodes)).entries:
                if not said:
                    said = True
                    served = plural(len(living.entries), "node")
                    log.info("still serving the store to %s", served)
                self.store.wait(nodes, after=living.version, timeout=0.5)
        except StoreError as error:
            # How this node's run ended is known by now, and a broken server takes nothing of it.
            log.warning("no longer serving the store: %s", error)

    def hand_over(
        self,
        stopped: Callable[[], bool],
        timing: RendezvousTimeouts,
        *,
        needed: int,
        stopping: float,
    ) -> None:
        """Having left: serve the store until the others have gone on without us, if they can.

        What they know of our leaving is in that store, and they need to know it to go on.
        needed: fewer others than this can do nothing before somebody comes. stopping: seconds
        that the others may take to stop their workers, before they can meet.
        """
        if self.server is None or self.store is None:
            return
        keys, deadline = StoreKeys(self.run_id), monotonic() + stopping + timing.close_timeout
        try:
            while not stopped() and monotonic() < deadline:
                read = JobListing(keys, self.store.list(keys.job_prefix))
                if len(read.live_nodes()) < needed:
                    return
                if goes_on_without(self.me, read):
                    # They have met; whoever has not read so yet does within a refresh.
                    deadline = min(deadline, monotonic() + timing.keep_alive_interval)
                elif not has_workers(read):
                    deadline = min(deadline, monotonic() + timing.close_timeout)
                self.store.wait(keys.job_prefix, after=read.version, timeout=0.2)
        except ElasticError as error:
            log.warning("no longer serving the store: %s", error)

    def close(self) -> None:
        try:
            if self.store is not None:
                self.store.close()
        except StoreError as error:
            log.warning("closing the store failed: %s", error)
        if self.own_server is not None:
            self.own_server.close()


def goes_on_without(node_id: str, read: JobListing) -> bool:
    """Whether the job is over, or a generation without this node has met."""
    document, _ = read.membership(None)
    if document is None or document.phase is JobPhase.FORMING:
        return False
    met = read.master_entry is not None and bool(read.master_entry.value)
    return document.phase.is_terminal or (met and document.rank_of(node_id) is None)


def has_workers(read: JobListing) -> bool:
    """Whether a member of the last generation has yet to stop its workers of it."""
    document, _ = read.membership(None)
    if document is None:
        return False
    members = document.member_ids
    return any(
        node.id in members and node.stopped_membership_id != document.membership_id
        for node in read.live_nodes()
    )


def open_meeting(config: LaunchConfig, secret: bytes | None = None) -> Meeting:
    """Bind or find the store, and make the handler; no other node is waited for.

    secret: what the nodes must prove to know to meet in a TCP store.

    Raises:
        ConfigError: the endpoint cannot be what the flags say, or the backend cannot be opened.
    """
    server: TcpStoreServer | None = None
    find_front: Callable[[], TorchFront | None] | None = None
    node = _node(config, config.local_addr or "")
    if secret is not None and config.rdzv_backend not in TCP_BACKENDS:
        log.warning("the secret is not used: it is not for %s", config.rdzv_backend)
    if config.is_plugin_backend:
        opened = open_backend(config.rdzv_backend, _request(config, node))
        if isinstance(opened, RendezvousHandler):
            return Meeting(opened, None, None, config.run_id, node.id)
        store, find_address = opened, outward_address
    elif config.rdzv_backend == "file":
        store = FileStore(config.rdzv_endpoint, timeout=config.options.read_timeout)
        find_address = outward_address
    elif (etcd := config.etcd_config) is not None:
        store = etcd.open(config.store_timeout_s)
        find_address = etcd.find_address
    else:
        place = TcpMeetingPlace(config, secret)
        server, tcp = place.open()
        store, find_address = tcp, partial(address_towards, tcp)
        find_front = place.front_finder(server, tcp)

    handler = DynamicRendezvousHandler(
        store,
        config.run_id,
        node,
        config.limits,
        timeouts=config.timing,
        backend=config.rdzv_backend,
        find_address=find_address,
        find_store_proxy=find_front,
        open_bootstrap_store=torch_store_opener(config.torchrun.use_libuv),
    )
    return Meeting(handler, store, server, config.run_id, node.id)


def open_to_look(config: LaunchConfig, timeout: float) -> Store:
    """The store of a user's own backend, for a reader that is no node of the job.

    timeout: seconds within which a call ends.

    Raises:
        ConfigError: there is none, or it cannot be opened.
        StoreConnectionError: the backend keeps its store to itself.
    """
    request = attrs.evolve(_request(config, _node(config, "")), timeout=timeout)
    opened = open_backend(config.rdzv_backend, request)
    if isinstance(opened, Store):
        return opened
    raise StoreConnectionError(
        f"--rdzv-backend {config.rdzv_backend} keeps its store to itself, so its nodes cannot be "
        "asked: only their events can be read, on their machines"
    )


def _request(config: LaunchConfig, node: Node) -> BackendParameters:
    return BackendParameters(
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        options=config.plugin_options,
        timeout=config.store_timeout_s,
        node=attrs.evolve(node, address=node.address or outward_address()),
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
        rank_hint=config.node_rank,
        topology=config.topology,
    )
