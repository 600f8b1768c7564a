"""A node whose event loop is blocked loses its membership, and no other node does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping

import pytest
from single_worker_agent import OneWorker, Run, running

from elasticlib import DynamicRendezvousHandler, MemoryStore, Node, WorkerState
from elasticlib.errors import ConfigError
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.node import RendezvousNode
from elasticlib.rendezvous.store_layout import StoreKeys
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import StopHow, WorkerView
from elasticlib.workers.spec import WorkerGroup, WorkerSpec

TIMEOUT_S = 60.0
LOOP_TIMEOUT_S = 1.0


class RecordingWorker(OneWorker):
    """A worker that records its starts and stops in order."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[str] = []
        self.groups: list[tuple[int, int]] = []
        self._is_blocked, self._is_released = threading.Event(), threading.Event()
        self._is_released.set()

    def prepare(
        self, spec: WorkerSpec, on_ready: Callable[[str], None], on_change: Callable[[], None]
    ) -> None:
        super().prepare(spec, on_ready, on_change)
        self._on_change = on_change

    def start(self, group: WorkerGroup, on_exit: Callable[[WorkerExit, str], None]) -> None:
        self.history.append("start")
        super().start(group, on_exit)
        self.groups.append((group.info.generation, group.info.world_size))

    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        self.history.append("stop")
        super().stop(local_ranks, how)

    @contextlib.contextmanager
    def block_event_loop(self) -> Iterator[None]:
        """Block the event loop within the `with` block."""
        self._is_blocked, self._is_released = threading.Event(), threading.Event()
        self._on_change()
        assert self._is_blocked.wait(TIMEOUT_S)
        try:
            yield
        finally:
            self._is_released.set()

    def view(self) -> Mapping[int, WorkerView]:
        self._is_blocked.set()
        self._is_released.wait(TIMEOUT_S)
        return super().view()


class Nodes:
    """The handlers of one job over a memory store."""

    def __init__(
        self, min_nodes: int, max_nodes: int, loop_timeout: float = LOOP_TIMEOUT_S
    ) -> None:
        self.store = MemoryStore()
        self._settings = RendezvousSettings(min_nodes, max_nodes, 0, last_call_timeout=0.0)
        self._timeouts = RendezvousTimeouts(
            join_timeout=TIMEOUT_S,
            lease_ttl=2.0,
            keep_alive_interval=0.1,
            close_timeout=5.0,
            loop_timeout=loop_timeout,
        )

    def handler(self, name: str) -> DynamicRendezvousHandler:
        return DynamicRendezvousHandler(
            self.store.client(),
            "job",
            Node(name, name, "127.0.0.1", 1),
            self._settings,
            timeouts=self._timeouts,
            open_bootstrap_store=FakeBootstrapStore,
        )

    def live_nodes(self) -> set[str]:
        """Return the nodes whose lease is valid."""
        keys = StoreKeys("job").node()
        return {entry.key.removeprefix(keys) for entry in self.store.list(keys).entries}


def finish(*pairs: tuple[RecordingWorker, Run]) -> list[WorkerState]:
    for workers, _ in pairs:
        workers.end()
    return [run.result().state for _, run in pairs]


def wait_for_common_generation(*workers: RecordingWorker, after: int) -> int:
    """Wait until all workers are in one generation after `after`, and return its number."""

    def condition() -> int:
        groups = {worker.groups[-1] for worker in workers}
        number, nodes = max(groups)
        return number if len(groups) == 1 and nodes == len(workers) and number > after else 0

    return wait_until(f"one generation of all workers after generation {after}", condition)


def test_the_other_nodes_continue_without_a_node_whose_event_loop_is_blocked() -> None:
    nodes, a, b = Nodes(1, 2), RecordingWorker(), RecordingWorker()
    with running(a, nodes.handler("a")) as first, running(b, nodes.handler("b")) as second:
        before = wait_for_common_generation(a, b, after=0), len(a.history)
        with a.block_event_loop():
            wait_until(
                "a generation of b without a",
                lambda: b.groups[-1][1] == 1 and b.groups[-1][0] > before[0],
            )
            assert nodes.live_nodes() == {"b"}
            assert len(a.history) == before[1], "no other thread stopped the workers of a"
        wait_for_common_generation(a, b, after=before[0])
        # Node a stops its workers before it joins again.
        assert a.history[before[1] :] == ["stop", "start"]
        assert finish((a, first), (b, second)) == [WorkerState.SUCCEEDED] * 2


def test_a_blocked_node_continues_if_no_other_generation_was_formed() -> None:
    nodes, workers = Nodes(1, 1), RecordingWorker()
    with running(workers, nodes.handler("a")) as run:
        with workers.block_event_loop():
            wait_until("the expiry of the lease", lambda: not nodes.live_nodes())
        wait_until("a new lease of the node", lambda: nodes.live_nodes() == {"a"})
        assert finish((workers, run)) == [WorkerState.SUCCEEDED]
    assert workers.history == ["start"]


class SlowToStart(RecordingWorker):
    """Workers that are up three loop timeouts after the call of `start`."""

    def __init__(self) -> None:
        super().__init__()
        self.was_lost = False
        self.live_nodes: Callable[[], set[str]] = set

    def start(self, group: WorkerGroup, on_exit: Callable[[WorkerExit, str], None]) -> None:
        def start_slowly() -> None:
            never = threading.Event()
            for _ in range(30):
                never.wait(LOOP_TIMEOUT_S / 10)
                self.was_lost = self.was_lost or not self.live_nodes()
            super(SlowToStart, self).start(group, on_exit)

        threading.Thread(target=start_slowly).start()


class BlocksWhileStarting(RecordingWorker):
    """Workers whose start blocks the event loop until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def start(self, group: WorkerGroup, on_exit: Callable[[WorkerExit, str], None]) -> None:
        super().start(group, on_exit)
        self.release.wait(TIMEOUT_S)


def test_a_start_that_blocks_costs_the_lease_until_it_returns() -> None:
    nodes, workers = Nodes(1, 1), BlocksWhileStarting()
    with running(workers, nodes.handler("a")) as run:
        wait_until("the expiry of the lease", lambda: not nodes.live_nodes())
        workers.release.set()
        wait_until("a new lease of the node", lambda: nodes.live_nodes() == {"a"})
        assert finish((workers, run)) == [WorkerState.SUCCEEDED]
    assert workers.history == ["start"]


def test_a_node_whose_workers_start_slowly_keeps_its_lease() -> None:
    nodes, workers = Nodes(1, 1), SlowToStart()
    workers.live_nodes = nodes.live_nodes
    with running(workers, nodes.handler("a")) as run:
        assert finish((workers, run)) == [WorkerState.SUCCEEDED]
    assert not workers.was_lost


def test_pause_of_the_whole_process_does_not_count_as_a_blocked_loop() -> None:
    store = MemoryStore()
    node = RendezvousNode(
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


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["loop_timeout", "join_timeout", "close_timeout"])
def test_timeouts_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be seconds above 0 and .*, got {value}"):
        RendezvousTimeouts(**{name: value})


def test_grace_for_the_store_must_not_be_negative() -> None:
    assert RendezvousTimeouts(store_grace=0.0).store_grace == 0.0
    with pytest.raises(ConfigError, match=r"store_grace must be seconds from 0 to .*, got -1"):
        RendezvousTimeouts(store_grace=-1.0)
