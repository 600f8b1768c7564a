"""What a store with several places tells those who ask it as it leaves one, or is closed."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from places import JOB, PATIENCE, World, is_closed

from elasticlib.errors import StoreConnectionError
from elasticlib.stores.failover_store import StoreEndpoint
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.waiting import wait_until


def test_an_operation_that_a_failover_interrupts_names_its_reason(world: World) -> None:
    """And not that the store is closed, which says nothing to whoever reads it in a log."""
    one, two, _ = world.spots
    asking: queue.SimpleQueue[None] = queue.SimpleQueue()

    class Told(TcpStore):
        def connect(self, timeout: float | None = None) -> None:
            if timeout is None:  # not just looking round
                asking.put(None)
            super().connect(timeout)

    def reach() -> TcpStore:
        return Told(one.host, one.port, job=JOB, timeout=5.0, connect_timeout=1.0)

    store = world.store(StoreEndpoint(one.endpoint, reach, lambda: None), two.theirs())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.get, "key")
        asking.get(timeout=10.0)
        second = pool.submit(store.get, "key")
        asking.get(timeout=10.0)
        # The first gives up first, and leaves.
        world.now = 2 * PATIENCE
        for asked in (first, second):
            with pytest.raises(StoreConnectionError, match=f"{one.endpoint} could not be reached"):
                asked.result(20.0)


def test_an_operation_that_a_move_interrupts_names_the_new_endpoint(world: World) -> None:
    one, two, _ = world.spots
    one.connect_timeout = 60.0
    store = world.store(one.theirs(), two.theirs())
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.get, "key")
        for _ in ("looking round", "connecting"):
            one.reaching.get(timeout=10.0)
        two.open()
        wait_until(
            "it to have gone", lambda: store.try_other_endpoints(lambda _found, _earlier: True)
        )
        with pytest.raises(StoreConnectionError, match=f"now uses the store at {two.endpoint}"):
            asked.result(10.0)


# -- closing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reaches", [1, 2], ids=["looking round", "connecting"])
def test_close_ends_a_thread_that_tries_to_connect(world: World, reaches: int) -> None:
    one, two, _ = world.spots
    one.connect_timeout = two.connect_timeout = 60.0
    store = world.store(one.theirs(), two.ours())
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(store.get, "key")
        for _ in range(reaches):
            one.reaching.get(timeout=10.0)
        store.close()
        with pytest.raises(StoreConnectionError, match="closed"):
            asking.result(10.0)
    assert all(is_closed(found) for found in one.reached)


def test_close_does_not_block_and_also_closes_a_server_that_starts_later(
    world: World,
) -> None:
    one, _, _ = world.spots
    serving, closed = threading.Event(), threading.Event()

    def serve_late() -> TcpStoreServer | None:
        serving.set()
        closed.wait(20.0)
        return one.serve()

    store = world.store(StoreEndpoint(one.endpoint, one.reach, serve_late))
    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(store.get, "key")
        assert serving.wait(10.0)
        try:
            pool.submit(store.close).result(5.0)
        finally:
            closed.set()
        with pytest.raises(StoreConnectionError, match="closed"):
            asking.result(10.0)
    assert [server.is_serving for server in one.served] == [False]


def test_a_closed_store_does_not_move(world: World) -> None:
    one, two, _ = world.spots
    one.open()
    two.open()
    store = world.store(one.theirs(), two.theirs())
    store.get("key")
    store.close()
    world.misses(store, 10 * PATIENCE)
    assert not store.try_other_endpoints(lambda _found, _earlier: True)
    assert two.reached == []
