"""A node that tries other endpoints of the store keeps its lease."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from elasticlib.errors import RendezvousClosedError
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.store_layout import StoreKeys
from elasticlib.stores.failover_store import FailoverStore, StoreEndpoint
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until

RUN_ID = "run"
LEASE_TTL = 2.0
NUM_SILENT_ENDPOINTS = 14  # trying one after another would take 7 s, longer than the lease


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_silent_endpoint(stack: ExitStack) -> socket.socket:
    """Return a socket that listens. Its connections never receive a byte."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
    listener.settimeout(60.0)
    return listener


def create_endpoint(port: int) -> StoreEndpoint:
    connect = partial(TcpStore, "127.0.0.1", port, job=RUN_ID, timeout=60.0, connect_timeout=1.0)
    return StoreEndpoint(f"127.0.0.1:{port}", connect, lambda: None)


def start_waiting_node(stack: ExitStack, store: Store) -> None:
    """Start a node that waits for a second node, which never joins."""
    handler = DynamicRendezvousHandler(
        store,
        RUN_ID,
        Node(id="a-1", host="a", address="127.0.0.1", slots=1),
        RendezvousSettings(2, 2),
        timeouts=RendezvousTimeouts(
            join_timeout=600.0, lease_ttl=LEASE_TTL, keep_alive_interval=0.25
        ),
        open_bootstrap_store=FakeBootstrapStore,
    )

    def join() -> None:
        with pytest.raises(RendezvousClosedError):
            handler.next_rendezvous()

    thread = threading.Thread(target=join)
    stack.callback(thread.join, 60.0)
    stack.callback(handler.shutdown)
    thread.start()


def test_a_waiting_node_keeps_its_lease_while_other_endpoints_do_not_answer(
    stack: ExitStack,
) -> None:
    server = stack.enter_context(TcpStoreServer("127.0.0.1", 0, job=RUN_ID))
    listeners = [open_silent_endpoint(stack) for _ in range(NUM_SILENT_ENDPOINTS)]
    ports = [server.port, *(listener.getsockname()[1] for listener in listeners)]
    store = stack.enter_context(
        FailoverStore([create_endpoint(port) for port in ports], failover_timeout=LEASE_TTL)
    )
    with TcpStore("127.0.0.1", server.port, job=RUN_ID) as observer:
        start_waiting_node(stack, store)
        key = StoreKeys(RUN_ID).node("a-1")
        wait_until("the record of the node", lambda: observer.get(key) is not None)
        announced = observer.get(key)
        for _ in range(2):  # the node tries each silent endpoint twice
            for listener in listeners:
                listener.accept()[0].close()
        # If the lease had expired, the record would have another version.
        assert observer.get(key) == announced
