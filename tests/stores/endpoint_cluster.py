"""Endpoints at which a store can be served, each with its own port."""

from __future__ import annotations

import queue
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from elasticlib.errors import StoreConnectionError
from elasticlib.stores.failover_store import FailoverStore, StoreEndpoint
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer

JOB = "moving"
FAILOVER_TIMEOUT_S = 3.0


class _EndpointClient(TcpStore):
    """A client with a short timeout for an endpoint without a server, and a long one otherwise."""

    def __init__(self, endpoint: LocalEndpoint) -> None:
        self._endpoint, timeout = endpoint, endpoint.connect_timeout
        super().__init__(
            endpoint.host, endpoint.port, job=JOB, timeout=5.0, connect_timeout=timeout
        )

    def connect(self, timeout: float | None = None) -> None:
        super().connect(10.0 if self._endpoint.is_served else timeout)


class LocalEndpoint:
    """An endpoint with a reserved port, and the clients that were created for it."""

    def __init__(self, stack: ExitStack, address: str) -> None:
        self._stack = stack
        # This socket never listens, so clients are refused until a server binds the port too.
        reserved = stack.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
        self.host, self.port = reserved.getsockname()
        self.connect_timeout = 0.05
        self.clients: list[TcpStore] = []
        self.new_clients: queue.SimpleQueue[TcpStore] = queue.SimpleQueue()
        self.servers: list[TcpStoreServer] = []
        self._opened: list[TcpStoreServer] = []

    @property
    def is_served(self) -> bool:
        return any(server.is_serving for server in (*self.servers, *self._opened))

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def open(self, job: str = JOB) -> TcpStoreServer:
        """Start the server of another node."""
        server = self._stack.enter_context(TcpStoreServer(self.host, self.port, job=job))
        self._opened.append(server)
        return server

    def as_client(self) -> StoreEndpoint:
        """Return the endpoint for a node that does not own it."""
        return StoreEndpoint(self.endpoint, self.create_client, lambda: None)

    def as_owner(self) -> StoreEndpoint:
        """Return the endpoint for the node that can serve the store there."""
        return StoreEndpoint(self.endpoint, self.create_client, self.serve)

    def create_client(self) -> TcpStore:
        store = _EndpointClient(self)
        self.clients.append(store)
        self.new_clients.put(store)
        return store

    def create_connected_client(self) -> TcpStore:
        """Return a connected client of the server at this endpoint."""
        store = self.create_client()
        store.connect()
        return store

    def serve(self) -> TcpStoreServer | None:
        try:
            server = TcpStoreServer(self.host, self.port, job=JOB).start()
        except OSError:
            return None
        self.servers.append(server)
        return server


class EndpointCluster:
    """Three endpoints, and a clock that the test sets."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.now = 0.0
        self.endpoints = tuple(LocalEndpoint(stack, f"127.0.0.{number}") for number in (2, 3, 4))

    def store(self, *endpoints: StoreEndpoint) -> FailoverStore:
        store = FailoverStore(
            endpoints, failover_timeout=FAILOVER_TIMEOUT_S, clock=lambda: self.now
        )
        return self._stack.enter_context(store)

    def assert_no_answer(self, store: Store, at: float) -> None:
        """Set the clock, and check that the store does not answer."""
        self.now = at
        with pytest.raises(StoreConnectionError):
            store.get("key")


def connect_to_any(endpoints: Sequence[tuple[str, int]], timeout: float) -> Store:
    """Return a client of the store that another process serves at one of these endpoints."""

    def create_endpoint(host: str, port: int) -> StoreEndpoint:
        def create_client() -> TcpStore:
            return TcpStore(host, port, job=JOB, timeout=timeout, connect_timeout=1.0)

        return StoreEndpoint(host, create_client, lambda: None)

    # On a busy machine, the client may skip the served endpoint at first and return to it later.
    endpoints_to_try = [create_endpoint(host, port) for host, port in endpoints]
    return wait_for_answer(FailoverStore(endpoints_to_try, failover_timeout=1.0))


def wait_for_answer(store: Store) -> Store:
    """Return the store when it answers. Each attempt waits for the connection."""
    for _ in range(100):
        try:
            store.get("key")
        except StoreConnectionError:
            continue
        return store
    raise AssertionError("the store did not answer in a hundred attempts")


def is_closed(store: TcpStore) -> bool:
    try:
        store.get("key")
    except StoreConnectionError as error:
        return "this store is closed" in str(error)
    return False
