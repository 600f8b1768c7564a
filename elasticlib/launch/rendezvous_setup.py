"""Opens what a launch needs for its rendezvous: a store, perhaps its server, and a handler."""

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
from ..observe.formatting import plural
from ..options import LaunchOptions, RendezvousTimeouts
from ..rendezvous.bootstrap_store import torch_store_opener
from ..rendezvous.handler import DynamicRendezvousHandler
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import JobPhase, Node
from ..rendezvous.store_layout import JobListing, StoreKeys
from ..stores.file_store import FileStore
from ..stores.interface import Store
from ..stores.tcp_server import TcpStoreServer
from .addresses import outward_address
from .backends import BackendParameters, etcd_of, open_backend
from .store_host import TcpStoreHost, TorchStoreProxy, local_address_for, local_server

log = logging.getLogger("elasticlib.launch")


@attrs.frozen
class RendezvousSetup:
    """The open parts of this node's rendezvous. `close` closes the store and its server."""

    handler: RendezvousHandler
    store: Store | None  # None if a plug-in opened the handler, which has its own store
    own_server: TcpStoreServer | None
    run_id: str
    node_id: str

    @property
    def server(self) -> TcpStoreServer | None:
        """The store server that this node runs now."""
        return local_server(self.store, self.own_server)

    @property
    def serves_at(self) -> str:
        """`host:port` of the store server that this node runs, or an empty string."""
        return "" if self.server is None else self.server.address

    def serve_until_nodes_left(self, give_up_reason: Callable[[], str]) -> str:
        """Serve the store until no other node of the job is alive, if this node serves it.

        A node that is suspended is waited for until its lease ends.

        Args:
            give_up_reason: returns why this node must stop serving at once, or an empty string.

        Returns:
            The reason for which other nodes have lost the store, or an empty string.
        """
        if self.server is None or self.store is None:
            return ""
        prefix, is_logged = StoreKeys(self.run_id).node(), False
        try:
            while (nodes := self.store.list(prefix)).entries:
                if reason := give_up_reason():
                    return reason
                if not is_logged:
                    is_logged = True
                    log.info(
                        "this node is done and serves the store until %s more have left",
                        plural(len(nodes.entries), "node"),
                    )
                self.store.wait(prefix, after=nodes.version, timeout=0.5)
        except StoreError as error:
            # The result of this node's run is known by now, and does not depend on the server.
            log.warning("this node no longer serves the store to the other nodes: %s", error)
        return ""

    def serve_until_handover(
        self,
        give_up_reason: Callable[[], str],
        timeouts: RendezvousTimeouts,
        *,
        min_remaining_nodes: int,
        stop_timeout: float,
    ) -> str:
        """After this node has left, serve the store until the others have formed a generation.

        The others read in this store that the node has left, and need that to continue. This node
        stops serving earlier if too few nodes are alive, or if they need too long. The call returns
        at once if this node does not serve the store.

        Args:
            give_up_reason: returns why this node must stop serving at once, or an empty string.
            timeouts: the timeouts of the rendezvous.
            min_remaining_nodes: fewer nodes than this cannot continue without a new node.
            stop_timeout: seconds that the others may take to stop their workers first.

        Returns:
            The reason for which other nodes have lost the store, or an empty string.
        """
        if self.server is None or self.store is None:
            return ""
        keys, is_logged = StoreKeys(self.run_id), False
        deadline = monotonic() + stop_timeout + timeouts.close_timeout
        try:
            while monotonic() < deadline:
                job = JobListing(keys, self.store.list(keys.job_prefix))
                num_nodes = len(job.live_nodes())
                if num_nodes < min_remaining_nodes:
                    return ""
                if reason := give_up_reason():
                    return reason
                if not is_logged:
                    is_logged = True
                    log.info(
                        "this node has left and serves the store until %s can continue without it",
                        plural(num_nodes, "node"),
                    )
                if job_continues_without(self.node_id, job):
                    # A node that has not read the new generation yet does so within a refresh.
                    deadline = min(deadline, monotonic() + timeouts.keep_alive_interval)
                elif not has_running_workers(job):
                    deadline = min(deadline, monotonic() + timeouts.close_timeout)
                self.store.wait(keys.job_prefix, after=job.version, timeout=0.2)
        except ElasticError as error:
            log.warning("this node no longer serves the store to the other nodes: %s", error)
        return ""

    def close(self) -> None:
        """Close the store and its server. A failure is logged."""
        try:
            if self.store is not None:
                self.store.close()
        except StoreError as error:
            log.warning("the store could not be closed, and the run ends without that: %s", error)
        if self.own_server is not None:
            self.own_server.close()


def job_continues_without(node_id: str, job: JobListing) -> bool:
    """Return True if the job has finished, or if a generation without this node is active."""
    membership, _ = job.membership(None)
    if membership is None or membership.phase is JobPhase.FORMING:
        return False
    has_formed = job.master_endpoint is not None
    return membership.phase.is_terminal or (has_formed and node_id not in membership.member_ids)


def has_running_workers(job: JobListing) -> bool:
    """Return True if a member of the last generation has not stopped its workers yet."""
    membership, _ = job.membership(None)
    if membership is None:
        return False
    members = membership.member_ids
    return any(
        node.id in members and node.stopped_membership_id != membership.membership_id
        for node in job.live_nodes()
    )


def open_rendezvous(options: LaunchOptions, secret: bytes | None = None) -> RendezvousSetup:
    """Open the store, which this node may host, and create the handler.

    No other node is waited for.

    Args:
        options: the options of this node.
        secret: the secret that nodes must prove in order to use a TCP store. Other stores do not
            use it.

    Raises:
        ConfigError: the endpoint contradicts the settings, or the backend cannot be opened.
    """
    server: TcpStoreServer | None = None
    find_store_proxy: Callable[[], TorchStoreProxy | None] | None = None
    rendezvous = options.rendezvous
    node = _node(options, rendezvous.local_addr or "")
    if not rendezvous.is_builtin:
        backend = open_backend(rendezvous.backend, _parameters(options, node))
        if isinstance(backend, RendezvousHandler):
            return RendezvousSetup(backend, None, None, rendezvous.run_id, node.id)
        store, find_address = backend, outward_address
    elif rendezvous.backend == "file":
        store = FileStore(rendezvous.endpoint, timeout=rendezvous.read_timeout)
        find_address = outward_address
    elif (etcd := etcd_of(rendezvous)) is not None:
        store = etcd.open(rendezvous.store_timeout_s)
        find_address = etcd.find_address
    else:
        host = TcpStoreHost(options, secret)
        server, tcp_store = host.open()
        store, find_address = tcp_store, partial(local_address_for, tcp_store)
        find_store_proxy = host.proxy_finder(server, tcp_store)

    handler = DynamicRendezvousHandler(
        store,
        rendezvous.run_id,
        node,
        options.job,
        timeouts=rendezvous.timeouts,
        backend=rendezvous.backend,
        find_address=find_address,
        find_store_proxy=find_store_proxy,
        open_bootstrap_store=torch_store_opener(options.workers.use_libuv is not False),
    )
    return RendezvousSetup(handler, store, server, rendezvous.run_id, node.id)


def open_store_for_reading(options: LaunchOptions, timeout: float) -> Store:
    """Return the store of a plug-in for a reader that is no node of the job.

    Args:
        options: the options of the job.
        timeout: seconds within which a call of the store ends.

    Raises:
        ConfigError: the plug-in cannot be opened.
        StoreConnectionError: the plug-in opens a handler and no store.
    """
    parameters = attrs.evolve(_parameters(options, _node(options, "")), timeout=timeout)
    name = options.rendezvous.backend
    backend = open_backend(name, parameters)
    if isinstance(backend, Store):
        return backend
    raise StoreConnectionError(
        f"--rdzv-backend {name} has no store that can be read: use the events on the machines of "
        "its nodes"
    )


def _parameters(options: LaunchOptions, node: Node) -> BackendParameters:
    rendezvous = options.rendezvous
    return BackendParameters(
        endpoint=rendezvous.endpoint,
        run_id=rendezvous.run_id,
        options=rendezvous.conf,
        timeout=rendezvous.store_timeout_s,
        node=attrs.evolve(node, address=node.address or outward_address()),
        settings=options.job,
        timeouts=rendezvous.timeouts,
    )


def _node(options: LaunchOptions, address: str) -> Node:
    host = socket.gethostname()
    return Node(
        id=f"{host}-{os.getpid()}-{secrets.token_hex(4)}",
        host=host,
        address=address,
        slots=options.workers.count,
        role=options.workers.role,
        rank_hint=options.rendezvous.node_rank,
        topology=options.rendezvous.topology,
    )
