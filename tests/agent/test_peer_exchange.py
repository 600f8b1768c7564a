"""Messages between nodes over a store that may fail, hang or reject them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from elasticlib import MemoryStore, Node, Store
from elasticlib.agent.peer_exchange import PeerExchange, PeerMessages
from elasticlib.agent.policy import Publish
from elasticlib.errors import StoreConnectionError, StoreRejectedError
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo, assign_ranks
from elasticlib.stores.interface import CompareSetResult, Entry, Listing, WatchResult

NODES = tuple(Node(f"n{i}", f"n{i}", "127.0.0.1", 1) for i in range(2))
PATIENCE = 30.0


class Side:
    """The exchange of one node, and the messages that it has received."""

    def __init__(self, store: Store | None, rank: int = 0) -> None:
        self.heard: queue.SimpleQueue[PeerMessages | str] = queue.SimpleQueue()
        self.board = PeerExchange(self.heard.put, self.heard.put)
        self.open(store, rank)

    def open(self, store: Store | None, rank: int = 0, board: str = "run/board/1.a/") -> None:
        seat = assign_ranks(NODES)[rank]
        place = RendezvousStoreInfo("127.0.0.1", 1)
        self.board.start_generation(
            RendezvousInfo("run", 1, seat, place, store=store, exchange_prefix=board)
        )

    def hears(self, **posts: bytes) -> None:
        """Waits until exactly these are gathered."""
        while True:
            news = self.heard.get(timeout=PATIENCE)
            assert isinstance(news, PeerMessages)
            if news.messages == posts:
                return


@pytest.fixture
def make() -> Iterator[Callable[..., Side]]:
    sides: list[Side] = []

    def make(store: Store | None, rank: int = 0) -> Side:
        sides.append(Side(store, rank))
        return sides[-1]

    yield make
    for side in sides:
        side.board.close()


class Pushing(MemoryStore):
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
    ) -> bool:
        assert with_listing
        if super().wait(prefix, after=after, timeout=0.0):
            callback(True)
        else:
            self.watching.append((prefix, callback))
        return True

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        del prefix, after, timeout
        raise AssertionError("nobody need wait for a store that pushes")

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        done = super().compare_set(key, value, expected=expected, ttl=ttl)
        watching, self.watching = self.watching, []
        for prefix, changed in watching:
            changed(self.list(prefix))
        return done


@pytest.mark.parametrize("kind", [MemoryStore, Pushing])
def test_all_nodes_receive_a_message_and_the_first_value_of_a_topic_is_kept(
    kind: type[MemoryStore], make: Callable[..., Side]
) -> None:
    store = kind()
    one, other = make(store, 0), make(store, 1)
    one.board.subscribe("stop/")
    one.hears()
    other.board.publish(Publish("stop/", "b", b"1", only_if_absent=True))
    one.hears(b=b"1")
    one.board.publish(Publish("stop/", "b", b"2", only_if_absent=True))
    one.board.publish(Publish("stop/", "a", b"3", only_if_absent=True))
    one.board.publish(Publish("else/", "c", b"4", only_if_absent=True))
    one.hears(a=b"3", b=b"1")
    other.board.subscribe("stop/")
    other.hears(a=b"3", b=b"1")


class Faltering(MemoryStore):
    """Answers the first few calls of each kind with an error."""

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


def test_a_store_that_fails_is_retried_until_it_answers(make: Callable[..., Side]) -> None:
    store = Faltering()
    side = make(store)
    side.board.publish(Publish("stop/", "a", b"1", only_if_absent=True))
    side.board.subscribe("stop/")
    side.hears(a=b"1")
    assert store.left == {"list": 0, "set": 0}


@pytest.mark.parametrize("error", [StoreRejectedError, ZeroDivisionError])
def test_a_rejected_message_is_logged_and_others_are_still_exchanged(
    error: type[Exception], make: Callable[..., Side]
) -> None:
    store = Faltering(error)
    store.left["list"] = 1
    side = make(store)
    side.board.subscribe("stop/")
    assert side.heard.get(timeout=PATIENCE) == PeerMessages("run/board/1.a/", "stop/", None)
    side.board.subscribe("cause/")
    side.hears()


def test_messages_of_another_generation_are_not_received(make: Callable[..., Side]) -> None:
    store = MemoryStore()
    one, other = make(store, 0), make(store, 1)
    other.board.publish(Publish("cause/", "first", b"old", only_if_absent=True))
    for side, rank in ((one, 0), (other, 1)):
        side.open(store, rank, board="run/board/2.b/")
    other.board.publish(Publish("cause/", "first", b"new", only_if_absent=True))
    one.board.subscribe("cause/")
    one.hears(first=b"new")


@pytest.mark.parametrize("store", [None, MemoryStore()])
def test_a_node_without_peers_or_a_store_exchanges_no_messages(store: Store | None) -> None:
    before = threading.active_count()
    side = Side(None)
    if store is not None:
        (seat,) = assign_ranks(NODES[:1])
        place = RendezvousStoreInfo("127.0.0.1", 1)
        side.board.start_generation(
            RendezvousInfo("run", 1, seat, place, store=store, exchange_prefix="run/board/1.a/")
        )
    assert side.board.prefix == ""
    side.board.publish(Publish("stop/", "a", b"1"))
    side.board.subscribe("stop/")
    assert threading.active_count() == before
    side.board.close()
    assert side.heard.empty()


class Hanging(MemoryStore):
    """A store that does not answer until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = threading.Event()

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        self.answer.wait(PATIENCE)
        return super().set(key, value, ttl=ttl)


def test_a_store_that_hangs_does_not_block_the_callers() -> None:
    store = Hanging()
    side = Side(store)
    side.board.publish(Publish("also/", "0", b"[]"))
    with contextlib.closing(side.board):
        pass
    assert not store.answer.is_set(), "it was not waited for"
    store.answer.set()
