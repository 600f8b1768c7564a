"""What a store promises that can watch without a thread: one call for each watch, and no change
is missed."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from elasticlib.errors import StoreConnectionError
from elasticlib.stores.failover_store import FailoverStore, StoreEndpoint
from elasticlib.stores.interface import Listing, Store, WatchResult
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer

PATIENCE = 10.0


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        yield server


@pytest.fixture(params=["tcp", "moving"])
def store(request: pytest.FixtureRequest, server: TcpStoreServer) -> Iterator[Store]:
    with reached(server) as client:
        if request.param == "tcp":
            yield client
            return
        place = StoreEndpoint("here", lambda: reached(server), lambda: None)
        with FailoverStore([place], failover_timeout=PATIENCE) as moving:
            yield moving


def reached(server: TcpStoreServer) -> TcpStore:
    return TcpStore(server.host, server.port, timeout=PATIENCE)


def told(
    store: Store, prefix: str, after: int, *, listing: bool = False
) -> queue.Queue[WatchResult]:
    heard: queue.Queue[WatchResult] = queue.Queue()
    assert store.watch(prefix, after=after, callback=heard.put, with_listing=listing)
    return heard


@pytest.mark.parametrize("listing", [False, True])
def test_a_watch_is_notified_once_of_an_earlier_or_a_later_change(
    store: Store, listing: bool
) -> None:
    version = store.set("watched/a", b"1").version
    before = told(store, "watched/", 0, listing=listing)
    during = told(store, "watched/", version, listing=listing)
    now = store.list("watched/")
    assert before.get(timeout=PATIENCE) == (now if listing else True)
    store.set("other", b"")
    assert during.empty()
    store.set("watched/b", b"2")
    assert during.get(timeout=PATIENCE) == (store.list("watched/") if listing else True)
    store.delete("watched/a")
    store.list("watched/")  # whatever had been told before this answer would be here
    assert before.empty()
    assert during.empty()


def test_a_watch_ends_with_the_connection(server: TcpStoreServer) -> None:
    client = reached(server)
    version = client.set("key", b"").version
    heard = [told(client, "watched/", version, listing=listing) for listing in (False, True)]
    client.close()
    assert [one.get(timeout=PATIENCE) for one in heard] == [False, False]
    with pytest.raises(StoreConnectionError):
        client.watch("watched/", after=0, callback=heard[0].put)


def test_a_watch_does_not_get_a_long_listing(
    server: TcpStoreServer,
) -> None:
    with reached(server) as client:
        for number in range(20):
            version = client.set(f"watched/{number}", b"x" * 10**5).version
        before = told(client, "watched/", 0, listing=True)
        assert before.get(timeout=PATIENCE) is True
        during = told(client, "watched/", version, listing=True)
        client.delete("watched/0")
        assert during.get(timeout=PATIENCE) is True
        assert len(client.list("watched/").entries) == 19


def test_list_and_watch_miss_no_change(server: TcpStoreServer, store: Store) -> None:
    with reached(server) as writer:
        seen = store.list("key")
        for number in range(40):
            writer.set("key", b"%d" % number)
            writer.set("other", b"")
        writer.set("key", b"last")
        while not (seen.entries and seen.entries[0].value == b"last"):
            # A missed change shows as a watch that nobody answers.
            watched = told(store, "key", seen.version, listing=True).get(timeout=PATIENCE)
            assert isinstance(watched, Listing)
            assert watched.version > seen.version
            seen = watched


def test_a_watch_is_notified_of_the_end_of_leases(server: TcpStoreServer) -> None:
    with reached(server) as here, reached(server) as there:
        kept = there.set("lease/there", b"", ttl=1000.0)
        gone = told(here, "lease/", kept.version)
        there.close()
        assert gone.get(timeout=PATIENCE) is True
        version = here.set("lease/silent", b"", ttl=0.2).version
        assert told(here, "lease/silent", version).get(timeout=PATIENCE) is True
        assert here.list("lease").entries == ()


def test_watch_returns_false_if_a_store_has_only_wait() -> None:
    assert not MemoryStore().watch("key", after=0, callback=lambda _: None)
