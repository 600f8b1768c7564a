"""Errors of operations that are interrupted by a move to another endpoint, or by close."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from endpoint_cluster import FAILOVER_TIMEOUT_S, JOB, EndpointCluster, is_closed

from elasticlib.errors import StoreConnectionError
from elasticlib.stores.failover_store import StoreEndpoint
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.waiting import wait_until


def test_an_operation_that_a_failover_interrupts_names_its_reason(cluster: EndpointCluster) -> None:
    one, two, _ = cluster.endpoints
    asking: queue.SimpleQueue[None] = queue.SimpleQueue()

    class ObservedStore(TcpStore):
        def connect(self, timeout: float | None = None) -> None:
            if timeout is None:  # an operation, not a scan
                asking.put(None)
            super().connect(timeout)

    def create_client() -> TcpStore:
        return ObservedStore(one.host, one.port, job=JOB, timeout=5.0, connect_timeout=1.0)

    store = cluster.store(StoreEndpoint(one.endpoint, create_client, lambda: None), two.as_client())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.get, "key")
        asking.get(timeout=10.0)
        second = pool.submit(store.get, "key")
        asking.get(timeout=10.0)
        # The first operation fails, and the store moves.
        cluster.now = 2 * FAILOVER_TIMEOUT_S
        for pending in (first, second):
            with pytest.raises(StoreConnectionError, match=f"{one.endpoint} could not be reached"):
                pending.result(20.0)


def test_an_operation_that_a_move_interrupts_names_the_new_endpoint(
    cluster: EndpointCluster,
) -> None:
    one, two, _ = cluster.endpoints
    one.connect_timeout = 60.0
    store = cluster.store(one.as_client(), two.as_client())
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(store.get, "key")
        for _ in ("looking round", "connecting"):
            one.new_clients.get(timeout=10.0)
        two.open()
        wait_until(
            "a move to another endpoint",
            lambda: store.try_other_endpoints(lambda _found, _earlier: True),
        )
        with pytest.raises(StoreConnectionError, match=f"now uses the store at {two.endpoint}"):
            pending.result(10.0)


# -- closing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reaches", [1, 2], ids=["looking round", "connecting"])
def test_close_ends_a_thread_that_tries_to_connect(cluster: EndpointCluster, reaches: int) -> None:
    one, two, _ = cluster.endpoints
    one.connect_timeout = two.connect_timeout = 60.0
    store = cluster.store(one.as_client(), two.as_owner())
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(store.get, "key")
        for _ in range(reaches):
            one.new_clients.get(timeout=10.0)
        store.close()
        with pytest.raises(StoreConnectionError, match="closed"):
            asking.result(10.0)
    assert all(is_closed(found) for found in one.clients)


def test_close_does_not_block_and_also_closes_a_server_that_starts_later(
    cluster: EndpointCluster,
) -> None:
    one, _, _ = cluster.endpoints
    serving, closed = threading.Event(), threading.Event()

    def serve_late() -> TcpStoreServer | None:
        serving.set()
        closed.wait(20.0)
        return one.serve()

    store = cluster.store(StoreEndpoint(one.endpoint, one.create_client, serve_late))
    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(store.get, "key")
        assert serving.wait(10.0)
        try:
            pool.submit(store.close).result(5.0)
        finally:
            closed.set()
        with pytest.raises(StoreConnectionError, match="closed"):
            asking.result(10.0)
    assert [server.is_serving for server in one.servers] == [False]


def test_a_closed_store_does_not_move(cluster: EndpointCluster) -> None:
    one, two, _ = cluster.endpoints
    one.open()
    two.open()
    store = cluster.store(one.as_client(), two.as_client())
    store.get("key")
    store.close()
    cluster.assert_no_answer(store, 10 * FAILOVER_TIMEOUT_S)
    assert not store.try_other_endpoints(lambda _found, _earlier: True)
    assert two.clients == []
