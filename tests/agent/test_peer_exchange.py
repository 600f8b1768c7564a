"""Messages between nodes over a store that may fail, hang or reject them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from elasticlib import MemoryStore, Node, Store, TcpStore
from elasticlib.agent.peer_exchange import PeerExchange, PeerMessages
from elasticlib.agent.policy import Publish
from elasticlib.errors import StoreConnectionError, StoreRejectedError
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo, assign_ranks
from elasticlib.stores.interface import (
    CancelWatch,
    CompareSetResult,
    Entry,
    Listing,
    WatchResult,
)
from elasticlib.stores.key_space import KeySpaceLimits
from elasticlib.stores.tcp_server import ServerLimits, TcpStoreServer

NODES = tuple(Node(f"n{i}", f"n{i}", "127.0.0.1", 1) for i in range(2))
TIMEOUT_S = 30.0


class ExchangeNode:
    """The exchange of one node, and the messages that it has received."""

    def __init__(self, store: Store | None, rank: int = 0) -> None:
        self.received: queue.SimpleQueue[PeerMessages | str] = queue.SimpleQueue()
        self.exchange = PeerExchange(self.received.put, self.received.put)
        self.open(store, rank)

    def open(self, store: Store | None, rank: int = 0, exchange: str = "run/board/1.a/") -> None:
        assignment = assign_ranks(NODES)[rank]
        master = RendezvousStoreInfo("127.0.0.1", 1)
        self.exchange.start_generation(
            RendezvousInfo("run", 1, assignment, master, store=store, exchange_prefix=exchange)
        )

    def wait_for_messages(self, **messages: bytes) -> None:
        """Wait until exactly these messages have been received."""
        while True:
            received = self.received.get(timeout=TIMEOUT_S)
            assert isinstance(received, PeerMessages)
            if received.messages == messages:
                return


@pytest.fixture
def create() -> Iterator[Callable[..., ExchangeNode]]:
    nodes: list[ExchangeNode] = []

    def create(store: Store | None, rank: int = 0) -> ExchangeNode:
        nodes.append(ExchangeNode(store, rank))
        return nodes[-1]

    yield create
    for node in nodes:
        node.exchange.close()


class PushingStore(MemoryStore):
    """A store that delivers changes to a callback, so that `wait` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.watching: list[tuple[str, Callable[[WatchResult], None]]] = []

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> CancelWatch:
        assert with_listing
        if super().wait(prefix, after=after, timeout=0.0):
            callback(True)
        else:
            self.watching.append((prefix, callback))
        return lambda: None

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        del prefix, after, timeout
        raise AssertionError("a store that pushes changes needs no wait")

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        result = super().compare_set(key, value, expected=expected, ttl=ttl)
        watching, self.watching = self.watching, []
        for prefix, changed in watching:
            changed(self.list(prefix))
        return result


@pytest.mark.parametrize("kind", [MemoryStore, PushingStore])
def test_all_nodes_receive_a_message_and_the_first_value_of_a_topic_is_kept(
    kind: type[MemoryStore], create: Callable[..., ExchangeNode]
) -> None:
    store = kind()
    one, other = create(store, 0), create(store, 1)
    one.exchange.subscribe("stop/")
    one.wait_for_messages()
    other.exchange.publish(Publish("stop/", "b", b"1", only_if_absent=True))
    one.wait_for_messages(b=b"1")
    one.exchange.publish(Publish("stop/", "b", b"2", only_if_absent=True))
    one.exchange.publish(Publish("stop/", "a", b"3", only_if_absent=True))
    one.exchange.publish(Publish("else/", "c", b"4", only_if_absent=True))
    one.wait_for_messages(a=b"3", b=b"1")
    other.exchange.subscribe("stop/")
    other.wait_for_messages(a=b"3", b=b"1")


def test_no_generation_leaves_a_watch_in_the_store(create: Callable[..., ExchangeNode]) -> None:
    limits = ServerLimits(KeySpaceLimits(watches=3))
    with (
        TcpStoreServer("127.0.0.1", 0, limits=limits) as server,
        TcpStore(server.host, server.port) as store,
    ):
        node = create(store)
        for generation in range(20):
            node.open(store, exchange=f"run/board/{generation}/")
            for topic in ("stop/", "hang/"):
                node.exchange.subscribe(topic)
                node.wait_for_messages()
        # The store rejects a watch, with False, if the others have left too many.
        results: queue.SimpleQueue[WatchResult] = queue.SimpleQueue()
        version = store.list("run/").version
        assert store.watch("run/", after=version, callback=results.put) is not None
        node.exchange.publish(Publish("stop/", "0", b"1"))
        assert results.get(timeout=TIMEOUT_S) is True
        node.wait_for_messages(**{"0": b"1"})
        node.exchange.close()


class FailingStore(MemoryStore):
    """A store that fails the first few calls of each kind."""

    failures = 3

    def __init__(self, error: type[Exception] = StoreConnectionError) -> None:
        super().__init__()
        self.error = error
        self.left = {"list": self.failures, "set": self.failures}

    def _fail(self, call: str) -> None:
        if self.left[call]:
            self.left[call] -= 1
            raise self.error("as if its host had been taken away")

    def list(self, prefix: str) -> Listing:
        self._fail("list")
        return super().list(prefix)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        self._fail("set")
        return super().compare_set(key, value, expected=expected, ttl=ttl)


def test_a_store_that_fails_is_retried_until_it_answers(
    create: Callable[..., ExchangeNode],
) -> None:
    store = FailingStore()
    node = create(store)
    node.exchange.publish(Publish("stop/", "a", b"1", only_if_absent=True))
    node.exchange.subscribe("stop/")
    node.wait_for_messages(a=b"1")
    assert store.left == {"list": 0, "set": 0}


@pytest.mark.parametrize("error", [StoreRejectedError, ZeroDivisionError])
def test_a_rejected_message_is_logged_and_others_are_still_exchanged(
    error: type[Exception], create: Callable[..., ExchangeNode]
) -> None:
    store = FailingStore(error)
    store.left["list"] = 1
    node = create(store)
    node.exchange.subscribe("stop/")
    assert node.received.get(timeout=TIMEOUT_S) == PeerMessages("run/board/1.a/", "stop/", None)
    node.exchange.subscribe("cause/")
    node.wait_for_messages()


def test_messages_of_another_generation_are_not_received(
    create: Callable[..., ExchangeNode],
) -> None:
    store = MemoryStore()
    one, other = create(store, 0), create(store, 1)
    other.exchange.publish(Publish("cause/", "first", b"old", only_if_absent=True))
    for node, rank in ((one, 0), (other, 1)):
        node.open(store, rank, exchange="run/board/2.b/")
    other.exchange.publish(Publish("cause/", "first", b"new", only_if_absent=True))
    one.exchange.subscribe("cause/")
    one.wait_for_messages(first=b"new")


@pytest.mark.parametrize("store", [None, MemoryStore()])
def test_a_node_without_peers_or_a_store_exchanges_no_messages(store: Store | None) -> None:
    before = threading.active_count()
    node = ExchangeNode(None)
    if store is not None:
        (assignment,) = assign_ranks(NODES[:1])
        master = RendezvousStoreInfo("127.0.0.1", 1)
        node.exchange.start_generation(
            RendezvousInfo(
                "run", 1, assignment, master, store=store, exchange_prefix="run/board/1.a/"
            )
        )
    assert node.exchange.prefix == ""
    node.exchange.publish(Publish("stop/", "a", b"1"))
    node.exchange.subscribe("stop/")
    assert threading.active_count() == before
    node.exchange.close()
    assert node.received.empty()


class HangingStore(MemoryStore):
    """A store that does not answer until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = threading.Event()

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        self.answer.wait(TIMEOUT_S)
        return super().set(key, value, ttl=ttl)


def test_a_store_that_hangs_does_not_block_the_callers() -> None:
    store = HangingStore()
    node = ExchangeNode(store)
    node.exchange.publish(Publish("also/", "0", b"[]"))
    with contextlib.closing(node.exchange):
        pass
    assert not store.answer.is_set(), "it was not waited for"
    store.answer.set()
