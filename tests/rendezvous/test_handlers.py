"""The real handler with its threads, a store, and a listening socket as bootstrap store."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import attrs
import pytest

from elasticlib.clock import monotonic
from elasticlib.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConfigError,
    RendezvousTimeoutError,
)
from elasticlib.rendezvous.handler import DynamicRendezvousHandler, StaticRendezvousHandler
from elasticlib.rendezvous.interface import Change, ChangeKind, RendezvousHandler, RendezvousInfo
from elasticlib.rendezvous.membership import Node, RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.store_layout import FORMAT, StoreKeys
from elasticlib.stores.interface import Listing, WatchResult
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until

TIMING = RendezvousTimeouts(
    join_timeout=20.0, lease_ttl=1.0, keep_alive_interval=0.1, close_timeout=5.0
)


class Cluster:
    """Handlers in this process over one memory store; all are shut down at the end."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clients: list[MemoryStore] = []
        self.pool = ThreadPoolExecutor(8)
        self.handlers: list[RendezvousHandler] = []

    def client(self) -> MemoryStore:
        self.clients.append(self.store.client())
        return self.clients[-1]

    def node(
        self,
        name: str,
        limits: RendezvousSettings,
        timing: RendezvousTimeouts = TIMING,
        *,
        slots: int = 1,
    ) -> DynamicRendezvousHandler:
        handler = DynamicRendezvousHandler(
            self.client(),
            "run",
            Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=slots),
            limits,
            timeouts=timing,
            open_bootstrap_store=FakeBootstrapStore,
        )
        self.handlers.append(handler)
        return handler

    def join(self, handler: RendezvousHandler) -> Future[RendezvousInfo]:
        return self.pool.submit(handler.next_rendezvous)

    def close(self) -> None:
        assert all(handler.shutdown() for handler in self.handlers)
        for client in self.clients:
            client.close()
        self.pool.shutdown()


def change(handler: RendezvousHandler) -> Change:
    found = handler.wait_for_change(20.0)
    assert found is not None
    return found


def test_two_nodes_form_a_generation_with_a_reachable_master(cluster: Cluster) -> None:
    limits = RendezvousSettings(2, 2)
    infos = [cluster.join(cluster.node(name, limits)) for name in ("b", "a")]
    one, two = sorted((future.result(20) for future in infos), key=lambda info: info.rank)
    assert (one.rank, two.rank, one.world_size, one.generation) == (0, 1, 2, 1)
    assert one.bootstrap_store_info == two.bootstrap_store_info
    place = one.bootstrap_store_info
    socket.create_connection((place.master_addr, place.master_port), 5).close()


def test_a_long_wait_is_logged_and_its_end_too(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elasticlib.rendezvous")
    handlers = [cluster.node(name, RendezvousSettings(2, 2)) for name in ("a", "b")]
    # They look at the store while their agents get themselves ready.
    assert not any(handler.is_closed() for handler in handlers)
    for future in [cluster.join(handler) for handler in handlers]:
        future.result(20)
    assert "the store has not answered" not in caplog.text
    assert handlers[0].report_failure("exit code 1")
    # A node that joins before it has heard of the failure leaves its generation, by itself.
    assert all(handler.wait_for_change(20) for handler in handlers)
    for future in [cluster.join(handler) for handler in handlers]:
        with pytest.raises(RendezvousClosedError):
            future.result(20)
    time.sleep(2 * TIMING.keep_alive_interval)
    assert "the job has failed" not in caplog.text


def test_a_node_keeps_its_lease_during_a_slow_name_resolution(cluster: Cluster) -> None:
    answers = threading.Event()
    answers.set()

    def open_bootstrap(address: str) -> FakeBootstrapStore:
        assert address == "a.test"
        assert answers.wait(60)
        return FakeBootstrapStore("127.0.0.1")

    limits = RendezvousSettings(2, 2, max_restarts=1)
    named = DynamicRendezvousHandler(
        cluster.client(),
        "run",
        Node(id="a-1", host="a", address="a.test", slots=1, rank_hint=0),
        limits,
        timeouts=TIMING,
        open_bootstrap_store=open_bootstrap,
    )
    cluster.handlers.append(named)
    other = cluster.node("b", limits)
    infos = [future.result(20) for future in [cluster.join(named), cluster.join(other)]]
    assert [info.rank for info in infos] == [0, 1]
    answers.clear()
    other.report_failure("exit code 1")
    assert change(other).kind is ChangeKind.GENERATION_ENDED
    joining = [cluster.join(named), cluster.join(other)]
    # Its lease of 1 s is renewed through three times as many seconds.
    node, deadline = StoreKeys("run").node("a-1"), monotonic() + 3 * TIMING.lease_ttl
    while (left := deadline - monotonic()) > 0:
        listing = cluster.store.list(node)
        assert listing.entries
        cluster.store.wait(node, after=listing.version, timeout=min(left, 0.1))
    answers.set()
    assert [future.result(20).generation for future in joining] == [2, 2]


def test_failures_reported_by_both_nodes_use_one_restart(cluster: Cluster) -> None:
    limits = RendezvousSettings(2, 2, max_restarts=3)
    handlers = [cluster.node(name, limits) for name in ("a", "b")]
    for future in [cluster.join(h) for h in handlers]:
        future.result(20)
    for handler in handlers:
        assert handler.report_failure("exit code 1")
    assert all(change(h).kind is ChangeKind.GENERATION_ENDED for h in handlers)
    infos = [future.result(20) for future in [cluster.join(h) for h in handlers]]
    assert [info.restarts for info in infos] == [1, 1]


def test_every_node_gets_the_failure_that_exceeded_the_restart_budget(cluster: Cluster) -> None:
    limits = RendezvousSettings(2, 2, max_restarts=0)
    handlers = [cluster.node(name, limits) for name in ("a", "b")]
    for future in [cluster.join(h) for h in handlers]:
        future.result(20)
    handlers[1].report_failure("exit code 7")
    assert all(change(h).kind is ChangeKind.GENERATION_ENDED for h in handlers)
    for future in [cluster.join(h) for h in handlers]:
        with pytest.raises(RendezvousClosedError, match="b: exit code 7"):
            future.result(20)


def test_join_timeout_names_the_present_nodes_and_the_option(cluster: Cluster) -> None:
    handler = cluster.node("a", RendezvousSettings(2, 2), attrs.evolve(TIMING, join_timeout=1.0))
    with pytest.raises(RendezvousTimeoutError, match=r"1 of at least 2.*here: a.*--nnodes"):
        cluster.join(handler).result(20)


def test_join_timeout_names_the_lost_node(cluster: Cluster) -> None:
    limits = RendezvousSettings(2, 2, max_restarts=3)
    names = ("a", "b")
    first, second = (
        cluster.node(name, limits, attrs.evolve(TIMING, join_timeout=3.0)) for name in names
    )
    for future in [cluster.join(first), cluster.join(second)]:
        future.result(20)
    assert first.report_failure("its peer vanished")
    wait_until("the failure to be known", lambda: change(first).reason == "a: its peer vanished")
    joining = cluster.join(first)
    second.shutdown()
    with pytest.raises(RendezvousTimeoutError, match=r"1 of at least 2.*; b left; here: a;") as one:
        joining.result(20)
    assert one.value.is_node_loss


def test_a_spare_waits_while_the_generation_is_active(cluster: Cluster) -> None:
    first = cluster.node("a", RendezvousSettings(1, 1))
    spare = cluster.node("b", RendezvousSettings(1, 1), attrs.evolve(TIMING, join_timeout=0.1))
    cluster.join(first).result(20)
    assert not spare.is_closed()  # it has seen by now that a generation stands
    waiting = cluster.join(spare)
    key = StoreKeys("run").node("b-1")
    wait_until("the spare to be there", lambda: cluster.clients[0].get(key) is not None)
    assert first.wait_for_change(0.5) is None
    assert first.num_nodes_waiting() == 0
    assert not waiting.done()
    first.shutdown()
    assert waiting.result(20).generation == 2


def test_a_surplus_spare_is_rejected_as_not_needed(cluster: Cluster) -> None:
    limits = RendezvousSettings(1, 1, spares=0)
    cluster.join(cluster.node("a", limits)).result(20)
    spare = cluster.node("b", limits)
    with pytest.raises(
        RendezvousClosedError, match=r"not_needed: the job has all.*1 nodes and 0 spares"
    ):
        cluster.join(spare).result(20)
    change = spare.wait_for_change(20)
    assert change is not None
    assert change.kind is ChangeKind.NOT_NEEDED


def test_a_second_next_rendezvous_replaces_the_first(cluster: Cluster) -> None:
    handler = cluster.node("a", RendezvousSettings(2, 2))
    first = cluster.join(handler)
    key = StoreKeys("run").node("a-1")
    wait_until("the node to be there", lambda: cluster.clients[0].get(key) is not None)
    second = cluster.join(handler)
    with pytest.raises(
        RendezvousClosedError, match="another call of next_rendezvous took its place"
    ):
        first.result(20)
    cluster.join(cluster.node("b", RendezvousSettings(2, 2)))
    assert second.result(20).world_size == 2


def test_shutdown_does_not_wait_for_a_store_that_was_never_reached(
    cluster: Cluster,
) -> None:
    # A name server that does not answer has the same effect.
    searching, found = threading.Event(), threading.Event()

    class Searched(MemoryStore):
        def list(self, prefix: str) -> Listing:
            searching.set()
            found.wait(20.0)
            return super().list(prefix)

    node = Node(id="a-1", host="a", address="127.0.0.1", slots=1)
    timing = attrs.evolve(TIMING, close_timeout=20.0)
    with Searched() as store:
        handler = DynamicRendezvousHandler(
            store, "run", node, RendezvousSettings(1, 1), timeouts=timing
        )
        joining = cluster.join(handler)
        assert searching.wait(20.0)
        began = monotonic()
        assert not handler.shutdown()
        assert monotonic() - began < 10.0
        with pytest.raises(RendezvousClosedError):
            joining.result(20.0)
        found.set()
        wait_until("it to have left", handler.shutdown)
        assert store.list("").entries == ()


def test_a_handler_polls_if_a_watch_fails(cluster: Cluster) -> None:
    class FailsToWatch(MemoryStore):
        watches = 0

        def watch(
            self,
            prefix: str,
            *,
            after: int,
            callback: Callable[[WatchResult], None],
            with_listing: bool = False,
        ) -> bool:
            del prefix, after, with_listing
            FailsToWatch.watches += 1
            callback(False)
            return True

    cluster.store = FailsToWatch()
    # So seldom does a node look by itself that it would find nothing within this test.
    patient = RendezvousTimeouts(join_timeout=60.0, lease_ttl=1000.0, keep_alive_interval=100.0)
    first, second = (
        cluster.node(name, RendezvousSettings(1, 2, last_call_timeout=60.0), patient)
        for name in "ab"
    )
    for future in [cluster.join(handler) for handler in (first, second)]:
        assert future.result(60.0).world_size == 2
    # After each change that a wait has told of, watching is tried again.
    assert FailsToWatch.watches > 2
    assert second.shutdown()
    assert change(first).reason == "b left"


def test_settings_other_than_those_of_the_job_are_rejected_by_name(cluster: Cluster) -> None:
    cluster.join(cluster.node("a", RendezvousSettings(1, 2))).result(20)
    with pytest.raises(RendezvousConfigError, match="max_nodes is 3 here and 2 there"):
        cluster.join(cluster.node("b", RendezvousSettings(1, 3))).result(20)


def test_a_node_of_another_version_is_ignored(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    keys = StoreKeys("run")
    cluster.client().set(keys.node("other"), b'{"id":"other"}')
    info = cluster.join(cluster.node("a", RendezvousSettings(1, 1))).result(20)
    assert info.world_size == 1
    assert "ignored the node at run/node/other: a node needs the fields" in caplog.text
    document = cluster.store.get(keys.state)
    assert document is not None
    newer = document.value.replace(f'"format":{FORMAT}'.encode(), b'"format":99')
    cluster.client().set(keys.state, newer)
    with pytest.raises(RendezvousConfigError, match="has format 99, this elasticlib reads only"):
        cluster.join(cluster.node("b", RendezvousSettings(1, 1))).result(20)


def test_set_closed_on_a_finished_job_changes_nothing(cluster: Cluster) -> None:
    handler = cluster.node("a", RendezvousSettings(1, 1))
    cluster.join(handler).result(20)
    handler.report_success()
    assert change(handler).kind is ChangeKind.SUCCEEDED
    handler.set_closed()
    assert change(handler).kind is ChangeKind.SUCCEEDED
    assert handler.shutdown()


def static(cluster: Cluster, rank: int) -> StaticRendezvousHandler:
    handler = StaticRendezvousHandler(
        cluster.client(),
        "run",
        Node(id=f"n{rank}-1", host=f"n{9 - rank}", address="127.0.0.1", slots=1, rank_hint=rank),
        2,
        timeouts=TIMING,
        open_bootstrap_store=FakeBootstrapStore,
    )
    cluster.handlers.append(handler)
    return handler


def test_static_nodes_get_their_ranks(cluster: Cluster) -> None:
    futures = {rank: cluster.join(static(cluster, rank)) for rank in (1, 0)}
    assert {rank: future.result(20).rank for rank, future in futures.items()} == {0: 0, 1: 1}


def test_a_static_rank_outside_the_job_is_rejected(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="the rank of a static node must be from 0 to 1, got 2"):
        static(cluster, 2)


PREPARED = """
import sys
from elasticlib import DynamicRendezvousHandler, RendezvousSettings, Node
from elasticlib.stores.memory_store import MemoryStore

node = Node("n-1", "n", "127.0.0.1", slots=1)
with MemoryStore() as store:
    handler = DynamicRendezvousHandler(store, "run", node, RendezvousSettings(1, 1))
    handler.prepare()
    print("torch.distributed" in sys.modules)
    handler.shutdown()
"""


def test_prepare_imports_the_modules_of_the_bootstrap_store() -> None:
    told = subprocess.run((sys.executable, "-c", PREPARED), capture_output=True, timeout=120)
    assert told.stdout == b"True\n", told.stderr.decode()


def test_a_task_is_called_between_the_steps_of_the_rendezvous_until_the_node_leaves(
    cluster: Cluster,
) -> None:
    handler = cluster.node("a", RendezvousSettings(1, 1))
    names: list[str] = []

    def task() -> float:
        names.append(threading.current_thread().name)
        return 600.0

    request = handler.add_task(task)
    # The node does not read the job for it, and joins as it would without it.
    wait_until("the first call", lambda: len(names) == 1)
    assert handler._thread.node.snapshot is None
    assert cluster.join(handler).result(60.0).generation == 1
    for number in (1, 2):
        request()
        wait_until("another call", lambda number=number: len(names) > number)
    often: list[int] = []
    handler.add_task(lambda: often.append(1) or 0.01)  # type: ignore[func-returns-value]
    wait_until("some calls", lambda: len(often) > 3)
    handler.shutdown()
    count = len(names), len(often)
    request()
    assert (len(names), len(often)) == count
    assert set(names) == {"rendezvous"}
