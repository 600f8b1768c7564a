"""Nodes agree where to stop over a store that they share, whatever else becomes of each."""

from __future__ import annotations

import queue
from collections.abc import Callable

from elasticlib.agent.agreed import Need
from elasticlib.agent.agreement import Agreements
from elasticlib.agent.stop import GroupStop
from elasticlib.clock import monotonic
from elasticlib.errors import StoreUnavailable
from elasticlib.rendezvous.document import Node
from elasticlib.rendezvous.interface import BootstrapStoreInfo, RendezvousInfo
from elasticlib.rendezvous.ranks import deal_seats
from elasticlib.stores.interface import Listing, Store
from elasticlib.stores.memory import MemoryStore
from elasticlib.workers.exit import WorkerExit
from elasticlib.workers.interface import Workers
from elasticlib.workers.messages import DRAIN, RESIZE, Notice
from elasticlib.workers.spec import Ladder, WorkerGroup

NODES = tuple(Node(f"n{i}", f"n{i}", "127.0.0.1", 1) for i in range(2))
PATIENCE = 20.0


class Held(Workers):
    """Workers that are held before a call of should_stop."""

    agrees = True

    def __init__(self, call: int | None) -> None:
        self.call = call
        self.told: list[tuple[str, float]] = []

    def notify(self, notice: Notice) -> bool:
        self.told.append((notice.reason, notice.seconds))
        return True

    def earliest_stop(self, *, now: bool) -> int | None:
        del now
        return self.call

    def start(self, group: WorkerGroup, ended: Callable[[int], None]) -> None:
        raise NotImplementedError

    def collect(self, local_rank: int) -> WorkerExit:
        raise NotImplementedError

    def running(self) -> dict[int, str]:
        return {0: "pid 1"}

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Faltering(MemoryStore):
    """Does not answer the first few listings."""

    failures = 3

    def list(self, prefix: str) -> Listing:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("as if its host had been taken away")
        return super().list(prefix)


class Side:
    """One node's, and what it was told."""

    def __init__(self, store: Store, rank: int, call: int | None) -> None:
        self.heard: queue.Queue[tuple[int, Need]] = queue.Queue()
        seat = deal_seats(NODES)[rank]
        place = BootstrapStoreInfo("127.0.0.1", 1)
        info = RendezvousInfo("run", 1, seat, place, store=store, board="run/board/1.a/")
        self.workers = Held(call)
        self.agreements = Agreements(
            self.workers, monotonic, lambda attempt, need: self.heard.put((attempt, need))
        )
        self.agreements.begin(info, attempt=7)

    def told(self) -> Need:
        attempt, need = self.heard.get(timeout=PATIENCE)
        assert attempt == 7
        return need


def test_both_nodes_hear_of_the_later_call_and_the_more_urgent_reason() -> None:
    store = MemoryStore()
    one, other = Side(store, 0, call=5), Side(store, 1, call=9)
    one.agreements.told(Notice(DRAIN, 30.0))
    other.agreements.told(Notice(RESIZE, 60.0))
    for need in (one.told(), other.told()):
        assert (need.call, need.reason) == (9, DRAIN)
        assert 0 < need.seconds <= 30.0


def test_a_node_that_is_done_keeps_nobody_waiting() -> None:
    store = MemoryStore()
    one, other = Side(store, 0, call=5), Side(store, 1, call=1)
    other.agreements.finished()
    one.agreements.told(Notice(DRAIN, PATIENCE))
    need = one.told()
    assert (need.call, need.reason) == (5, DRAIN)


def test_a_node_that_stops_for_another_reason_says_so_at_once() -> None:
    store = MemoryStore()
    one, other = Side(store, 0, call=5), Side(store, 1, call=1)
    one.agreements.told(Notice(DRAIN, 600.0))
    other.agreements.told(None)
    assert one.told().call is None


def test_a_store_that_falters_costs_nobody_their_save() -> None:
    store = Faltering()
    one, other = Side(store, 0, call=5), Side(store, 1, call=6)
    for side in (one, other):
        side.agreements.told(Notice(RESIZE, PATIENCE))
    assert [one.told().call, other.told().call] == [6, 6]
    assert store.failures == 0


def test_a_drain_that_comes_before_a_resize_is_agreed_on_is_what_all_hear_of() -> None:
    store = MemoryStore()
    one, other = Side(store, 0, call=None), Side(store, 1, call=9)
    stop = GroupStop(one.workers, Ladder(), monotonic, one.agreements.told)
    stop.begin(Notice(RESIZE, 60.0))
    other.agreements.told(Notice(RESIZE, 60.0))
    # Its workers are in a step.
    stop.sooner(Notice(DRAIN, 600.0))
    (_, (reason, seconds)) = one.workers.told
    assert (reason, seconds <= 60.0) == (DRAIN, True)
    one.workers.call = 5
    for need in (one.told(), other.told()):
        assert (need.call, need.reason) == (9, DRAIN)
        assert need.seconds <= 60.0
    for side in (one, other):
        assert side.heard.empty()
