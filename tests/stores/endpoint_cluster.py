"""Endpoints at which a store can be served, each with a port of its own."""

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
PATIENCE = 3.0


class _Client(TcpStore):
    """A client that gives up soon if its endpoint is not served, and waits if it is."""

    def __init__(self, endpoint: LocalEndpoint) -> None:
        self._endpoint, patience = endpoint, endpoint.connect_timeout
        super().__init__(
            endpoint.host, endpoint.port, job=JOB, timeout=5.0, connect_timeout=patience
        )

    def connect(self, timeout: float | None = None) -> None:
        super().connect(10.0 if self._endpoint.is_served else timeout)


class LocalEndpoint:
    """An endpoint with a reserved port, and the clients that were created for it."""

    def __init__(self, stack: ExitStack, address: str) -> None:
        self._stack = stack
        # This socket never listens. A server can bind the port too; without one, it is refused.
        holder = stack.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        self.host, self.port = holder.getsockname()
        self.connect_timeout = 0.05
        self.reached: list[TcpStore] = []
        self.reaching: queue.SimpleQueue[TcpStore] = queue.SimpleQueue()
        self.served: list[TcpStoreServer] = []
        self._opened: list[TcpStoreServer] = []

    @property
    def is_served(self) -> bool:
        return any(server.is_serving for server in (*self.served, *self._opened))

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def open(self, job: str = JOB) -> TcpStoreServer:
        """Start the server of another node."""
        server = self._stack.enter_context(TcpStoreServer(self.host, self.port, job=job))
        self._opened.append(server)
        return server

    def theirs(self) -> StoreEndpoint:
        return StoreEndpoint(self.endpoint, self.reach, lambda: None)

    def ours(self) -> StoreEndpoint:
        return StoreEndpoint(self.endpoint, self.reach, self.serve)

    def reach(self) -> TcpStore:
        store = _Client(self)
        self.reached.append(store)
        self.reaching.put(store)
        return store

    def joined(self) -> TcpStore:
        """Return a connected client of the server at this endpoint."""
        store = self.reach()
        store.connect()
        return store

    def serve(self) -> TcpStoreServer | None:
        try:
            server = TcpStoreServer(self.host, self.port, job=JOB).start()
        except OSError:
            return None
        self.served.append(server)
        return server


class EndpointCluster:
    """Three endpoints, and a clock that the test sets."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.now = 0.0
        self.endpoints = tuple(LocalEndpoint(stack, f"127.0.0.{number}") for number in (2, 3, 4))

    def store(self, *places: StoreEndpoint) -> FailoverStore:
        store = FailoverStore(places, failover_timeout=PATIENCE, clock=lambda: self.now)
        return self._stack.enter_context(store)

    def misses(self, store: Store, at: float) -> None:
        """Set the clock, and check that the store does not answer."""
        self.now = at
        with pytest.raises(StoreConnectionError):
            store.get("key")


def reaching(endpoints: Sequence[tuple[str, int]], timeout: float) -> Store:
    """Return a client of the store that is served at one of these endpoints by another process."""

    def place(host: str, port: int) -> StoreEndpoint:
        def reach() -> TcpStore:
            return TcpStore(host, port, job=JOB, timeout=timeout, connect_timeout=1.0)

        return StoreEndpoint(host, reach, lambda: None)

    # On a busy machine, the client can skip the endpoint at first, and tries it again later.
    places = [place(host, port) for host, port in endpoints]
    return until_answered(FailoverStore(places, failover_timeout=1.0))


def until_answered(store: Store) -> Store:
    """Return the store when it answers. Each attempt waits for the connection."""
    for _ in range(100):
        try:
            store.get("key")
        except StoreConnectionError:
            continue
        return store
    raise AssertionError("no answer in a hundred attempts")


def is_closed(store: TcpStore) -> bool:
    try:
        store.get("key")
    except StoreConnectionError as error:
        return "this store is closed" in str(error)
    return False
