"""A node whose event loop is blocked loses its membership, and no other node does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

import pytest
from single_worker_agent import OneWorker, Run, running

from elasticlib import DynamicRendezvousHandler, MemoryStore, Node, WorkerState
from elasticlib.errors import ConfigError
from elasticlib.rendezvous.local_node import LocalNode
from elasticlib.rendezvous.membership import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.store_layout import StoreKeys
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.spec import WorkerGroup

PATIENCE = 60.0
LOOP = 1.0
UNKNOWN_LOCAL_RANK = 7  # its exit is reported to wake the event loop


class Recorded(OneWorker):
    """A worker that records its starts and stops in order."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[str] = []
        self.groups: list[tuple[int, int]] = []
        self._held, self._free = threading.Event(), threading.Event()
        self._free.set()

    def start(self, group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
        self.history.append("start")
        super().start(group, on_exit)
        self.groups.append((group.generation, group.group_world_size))

    def stop(self, local_ranks: Collection[int], *, force: bool = False) -> None:
        self.history.append("stop")
        super().stop(local_ranks, force=force)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Block the event loop within the `with` block."""
        self._held, self._free = threading.Event(), threading.Event()
        self._on_exit(UNKNOWN_LOCAL_RANK)
        assert self._held.wait(PATIENCE)
        try:
            yield
        finally:
            self._free.set()

    def running(self) -> dict[int, str]:
        self._held.set()
        self._free.wait(PATIENCE)
        return super().running()


class Nodes:
    """The nodes of one job over a store in memory; each has an agent in its own thread."""

    def __init__(self, least: int, most: int, loop: float = LOOP) -> None:
        self.store = MemoryStore()
        self._limits = RendezvousSettings(least, most, 0, last_call_timeout=0.0)
        self._timing = RendezvousTimeouts(
            join_timeout=PATIENCE,
            lease_ttl=2.0,
            keep_alive_interval=0.1,
            close_timeout=5.0,
            loop_timeout=loop,
        )

    def handler(self, name: str) -> DynamicRendezvousHandler:
        return DynamicRendezvousHandler(
            self.store.client(),
            "job",
            Node(name, name, "127.0.0.1", 1),
            self._limits,
            timeouts=self._timing,
            open_bootstrap_store=FakeBootstrapStore,
        )

    def here(self) -> set[str]:
        """Return the nodes whose lease is valid."""
        keys = StoreKeys("job").node()
        return {entry.key.removeprefix(keys) for entry in self.store.list(keys).entries}


def finished(*pairs: tuple[Recorded, Run]) -> list[WorkerState]:
    for workers, _ in pairs:
        workers.finish()
    return [run.result().state for _, run in pairs]


def together(*workers: Recorded, after: int) -> int:
    """Waits until all are in one generation past that, and returns its number."""

    def look() -> int:
        found = {worker.groups[-1] for worker in workers}
        number, nodes = max(found)
        return number if len(found) == 1 and nodes == len(workers) and number > after else 0

    return wait_until(f"all to be together after generation {after}", look)


def test_the_other_nodes_continue_without_a_node_whose_event_loop_is_blocked() -> None:
    nodes, a, b = Nodes(1, 2), Recorded(), Recorded()
    with running(a, nodes.handler("a")) as first, running(b, nodes.handler("b")) as second:
        before = together(a, b, after=0), len(a.history)
        with a.standing_still():
            wait_until(
                "b to go on alone", lambda: b.groups[-1][1] == 1 and b.groups[-1][0] > before[0]
            )
            assert nodes.here() == {"b"}
            assert len(a.history) == before[1], "nobody stopped what the loop did not"
        together(a, b, after=before[0])
        # It stops its workers before it is among the others again.
        assert a.history[before[1] :] == ["stop", "start"]
        assert finished((a, first), (b, second)) == [WorkerState.SUCCEEDED] * 2


def test_a_blocked_node_continues_if_no_other_generation_was_formed() -> None:
    nodes, workers = Nodes(1, 1), Recorded()
    with running(workers, nodes.handler("a")) as run:
        with workers.standing_still():
            wait_until("its lease to end", lambda: not nodes.here())
        wait_until("it to be there again", lambda: nodes.here() == {"a"})
        assert finished((workers, run)) == [WorkerState.SUCCEEDED]
    assert workers.history == ["start"]


class SlowToStart(Recorded):
    """Workers whose start takes three times as long as the loop timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = False
        self.here: Callable[[], set[str]] = set

    def start(self, group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
        over = threading.Event()
        for _ in range(30):
            over.wait(LOOP / 10)
            self.lost = self.lost or not self.here()
        super().start(group, on_exit)


def test_a_node_whose_workers_start_slowly_keeps_its_lease() -> None:
    nodes, workers = Nodes(1, 1), SlowToStart()
    workers.here = nodes.here
    with running(workers, nodes.handler("a")) as run:
        assert finished((workers, run)) == [WorkerState.SUCCEEDED]
    assert not workers.lost


def test_pause_of_the_whole_process_does_not_count_as_a_blocked_loop() -> None:
    store = MemoryStore()
    node = LocalNode(
        store,
        "job",
        Node("a", "a", "127.0.0.1", 1),
        RendezvousSettings(1, 1),
        RendezvousTimeouts(loop_timeout=30.0),
    )
    node.intent = node.intent.request_join()

    def is_member(now: float, *, progress_due: float) -> bool:
        node.publish(now, progress_due)
        return store.get(StoreKeys("job").node("a")) is not None

    assert all(is_member(now, progress_due=30.0) for now in range(10))
    # The machine was paused for 1000 s: neither the rendezvous nor the loop could run.
    assert all(is_member(1010.0 + s, progress_due=30.0) for s in range(31))
    assert not is_member(1041.0, progress_due=30.0)
    assert is_member(1042.0, progress_due=1072.0)


def test_loop_timeout_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="loop_timeout must be above 0"):
        RendezvousTimeouts(loop_timeout=0.0)
