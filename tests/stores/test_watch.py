"""A watch calls its callback once, and no change is missed."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from elasticlib.errors import StoreConnectionError
from elasticlib.stores.failover_store import FailoverStore, StoreEndpoint
from elasticlib.stores.interface import Listing, Store, WatchResult
from elasticlib.stores.key_space import KeySpaceLimits
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import ServerLimits, TcpStoreServer
from elasticlib.testing.waiting import wait_until

TIMEOUT_S = 10.0


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        yield server


@pytest.fixture(params=["tcp", "moving"])
def store(request: pytest.FixtureRequest, server: TcpStoreServer) -> Iterator[Store]:
    with connect(server) as client:
        if request.param == "tcp":
            yield client
            return
        place = StoreEndpoint("here", lambda: connect(server), lambda: None)
        with FailoverStore([place], failover_timeout=TIMEOUT_S) as moving:
            yield moving


def connect(server: TcpStoreServer) -> TcpStore:
    return TcpStore(server.host, server.port, timeout=TIMEOUT_S)


def start_watch(
    store: Store, prefix: str, after: int, *, listing: bool = False
) -> queue.Queue[WatchResult]:
    results: queue.Queue[WatchResult] = queue.Queue()
    assert store.watch(prefix, after=after, callback=results.put, with_listing=listing)
    return results


@pytest.mark.parametrize("listing", [False, True])
def test_a_watch_is_notified_once_of_an_earlier_or_a_later_change(
    store: Store, listing: bool
) -> None:
    version = store.set("watched/a", b"1").version
    before = start_watch(store, "watched/", 0, listing=listing)
    during = start_watch(store, "watched/", version, listing=listing)
    now = store.list("watched/")
    assert before.get(timeout=TIMEOUT_S) == (now if listing else True)
    store.set("other", b"")
    assert during.empty()
    store.set("watched/b", b"2")
    assert during.get(timeout=TIMEOUT_S) == (store.list("watched/") if listing else True)
    store.delete("watched/a")
    store.list("watched/")  # An earlier notification would arrive before this reply.
    assert before.empty()
    assert during.empty()


def test_a_watch_ends_with_the_connection(server: TcpStoreServer) -> None:
    client = connect(server)
    version = client.set("key", b"").version
    results = [
        start_watch(client, "watched/", version, listing=listing) for listing in (False, True)
    ]
    client.close()
    assert [one.get(timeout=TIMEOUT_S) for one in results] == [False, False]
    with pytest.raises(StoreConnectionError):
        client.watch("watched/", after=0, callback=results[0].put)


def test_a_watch_does_not_get_a_long_listing(
    server: TcpStoreServer,
) -> None:
    with connect(server) as client:
        for number in range(20):
            version = client.set(f"watched/{number}", b"x" * 10**5).version
        before = start_watch(client, "watched/", 0, listing=True)
        assert before.get(timeout=TIMEOUT_S) is True
        during = start_watch(client, "watched/", version, listing=True)
        client.delete("watched/0")
        assert during.get(timeout=TIMEOUT_S) is True
        assert len(client.list("watched/").entries) == 19


def test_list_and_watch_miss_no_change(server: TcpStoreServer, store: Store) -> None:
    with connect(server) as writer:
        seen = store.list("key")
        for number in range(40):
            writer.set("key", b"%d" % number)
            writer.set("other", b"")
        writer.set("key", b"last")
        while not (seen.entries and seen.entries[0].value == b"last"):
            # This wait would time out after a missed change.
            watched = start_watch(store, "key", seen.version, listing=True).get(timeout=TIMEOUT_S)
            assert isinstance(watched, Listing)
            assert watched.version > seen.version
            seen = watched


def test_a_watch_is_notified_of_the_end_of_leases(server: TcpStoreServer) -> None:
    with connect(server) as watcher, connect(server) as writer:
        kept = writer.set("lease/there", b"", ttl=1000.0)
        gone = start_watch(watcher, "lease/", kept.version)
        writer.close()
        assert gone.get(timeout=TIMEOUT_S) is True
        version = watcher.set("lease/silent", b"", ttl=0.2).version
        assert start_watch(watcher, "lease/silent", version).get(timeout=TIMEOUT_S) is True
        assert watcher.list("lease").entries == ()


def test_watch_returns_none_if_a_store_has_only_wait() -> None:
    assert MemoryStore().watch("key", after=0, callback=lambda _: None) is None


def test_a_store_without_references_loses_its_watches(server: TcpStoreServer) -> None:
    store = connect(server)
    results = start_watch(store, "watched/", store.set("other", b"").version)
    del store
    assert results.get(timeout=TIMEOUT_S) is False
    wait_until("the connection to be closed", lambda: not server.labels)


def test_a_cancelled_watch_calls_nothing_and_frees_its_place_in_the_store() -> None:
    limits = ServerLimits(KeySpaceLimits(watches=2))
    with TcpStoreServer("127.0.0.1", 0, limits=limits) as server, connect(server) as client:
        version = client.set("other", b"").version
        results: queue.Queue[WatchResult] = queue.Queue()
        for _ in range(10):
            cancel = client.watch("watched/", after=version, callback=results.put)
            assert cancel is not None
            cancel()
            cancel()
        kept = start_watch(client, "watched/", version)
        client.set("watched/a", b"")
        assert kept.get(timeout=TIMEOUT_S) is True
        assert results.empty()
    cancel()  # the store is closed
