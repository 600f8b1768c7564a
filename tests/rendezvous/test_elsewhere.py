"""A node that tries other endpoints of the store keeps its membership."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from elasticlib.errors import RendezvousClosedError
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.membership import Node, RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.store_layout import StoreKeys
from elasticlib.stores.failover_store import FailoverStore, StoreEndpoint
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until

RUN = "run"
LEASE = 2.0
SILENT = 14
"""Places; one after another they would take 7 s."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def silent_place(stack: ExitStack) -> socket.socket:
    """Somebody listens there, and never says a word."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
    listener.settimeout(60.0)
    return listener


def place(port: int) -> StoreEndpoint:
    reach = partial(TcpStore, "127.0.0.1", port, job=RUN, timeout=60.0, connect_timeout=1.0)
    return StoreEndpoint(f"127.0.0.1:{port}", reach, lambda: None)


def waiting_alone(stack: ExitStack, store: Store) -> None:
    """A node that waits for a second one, which never comes."""
    handler = DynamicRendezvousHandler(
        store,
        RUN,
        Node(id="a-1", host="a", address="127.0.0.1", slots=1),
        RendezvousSettings(2, 2),
        timeouts=RendezvousTimeouts(join_timeout=600.0, lease_ttl=LEASE, keep_alive_interval=0.25),
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
    server = stack.enter_context(TcpStoreServer("127.0.0.1", 0, job=RUN))
    silent = [silent_place(stack) for _ in range(SILENT)]
    ports = [server.port, *(one.getsockname()[1] for one in silent)]
    store = stack.enter_context(
        FailoverStore([place(port) for port in ports], failover_timeout=LEASE)
    )
    with TcpStore("127.0.0.1", server.port, job=RUN) as other:
        waiting_alone(stack, store)
        key = StoreKeys(RUN).node("a-1")
        wait_until("the node to have announced itself", lambda: other.get(key) is not None)
        announced = other.get(key)
        for _ in range(2):  # each of them is asked, and asked again
            for one in silent:
                one.accept()[0].close()
        # Had its lease ended, it would have had to announce itself anew.
        assert other.get(key) == announced
