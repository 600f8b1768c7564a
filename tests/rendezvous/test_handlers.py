"""Rendezvous handlers with their threads over a memory store.

A listening socket replaces the bootstrap store, so that no test imports torch.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import attrs
import pytest
from handler_cluster import TIMEOUTS, HandlerCluster, next_change

from elasticlib.clock import monotonic
from elasticlib.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConfigError,
    RendezvousTimeoutError,
)
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.handler import DynamicRendezvousHandler, StaticRendezvousHandler
from elasticlib.rendezvous.interface import ChangeKind, Report, ReportKind
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.node import RendezvousNode
from elasticlib.rendezvous.store_layout import FORMAT, StoreKeys
from elasticlib.stores.interface import CancelWatch, Listing, WatchResult
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore, report_failure
from elasticlib.testing.waiting import wait_until


def test_two_nodes_form_a_generation_with_a_reachable_master(cluster: HandlerCluster) -> None:
    settings = RendezvousSettings(2, 2)
    infos = [cluster.join(cluster.handler(name, settings)) for name in ("b", "a")]
    one, two = sorted((future.result(20) for future in infos), key=lambda info: info.rank)
    assert (one.rank, two.rank, one.world_size, one.generation) == (0, 1, 2, 1)
    assert one.bootstrap_store_info == two.bootstrap_store_info
    master = one.bootstrap_store_info
    socket.create_connection((master.master_addr, master.master_port), 5).close()


def test_a_wait_for_other_nodes_is_logged_and_a_failed_job_is_not(
    cluster: HandlerCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elasticlib.rendezvous")
    first, second = (cluster.handler(name, RendezvousSettings(2, 2)) for name in ("a", "b"))
    # Both nodes have read the store before they join, as they do while their agents start.
    assert not first.is_closed()
    assert not second.is_closed()
    joining = [cluster.join(first)]
    waiting = "waiting: 1 of at least 2 nodes are here (present: a)"
    wait_until("a log message about the missing node", lambda: waiting in caplog.text)
    joining.append(cluster.join(second))
    for future in joining:
        future.result(20)
    assert "the store has not answered" not in caplog.text
    assert report_failure(first, "exit code 1")
    # Both nodes know of the failure before they join. A node that joins earlier leaves its
    # generation by itself.
    assert all(handler.wait_for_change(20) for handler in (first, second))
    for future in [cluster.join(handler) for handler in (first, second)]:
        with pytest.raises(RendezvousClosedError):
            future.result(20)
    wait_for_iterations(first, second)
    assert "the job has failed" not in caplog.text


def wait_for_iterations(*handlers: DynamicRendezvousHandler, count: int = 3) -> None:
    """Wait until the thread of each handler has run `count` more iterations of its loop."""
    for handler in handlers:
        node, refreshes = handler.membership(slots=handler.node.slots).node, set[float | None]()

        def iterations(node: RendezvousNode = node, seen: set[float | None] = refreshes) -> bool:
            seen.add(node.last_refresh_at)
            return len(seen) > count

        wait_until(f"{count} more iterations", iterations)


def test_a_node_keeps_its_lease_during_a_slow_name_resolution(cluster: HandlerCluster) -> None:
    answers = threading.Event()
    answers.set()

    def open_bootstrap(address: str) -> FakeBootstrapStore:
        assert address == "a.test"
        assert answers.wait(60)
        return FakeBootstrapStore("127.0.0.1")

    settings = RendezvousSettings(2, 2, max_restarts=1)
    named = DynamicRendezvousHandler(
        cluster.client(),
        "run",
        Node(id="a-1", host="a", address="a.test", slots=1, rank_hint=0),
        settings,
        timeouts=TIMEOUTS,
        open_bootstrap_store=open_bootstrap,
    )
    cluster.handlers.append(named)
    other = cluster.handler("b", settings)
    infos = [future.result(20) for future in [cluster.join(named), cluster.join(other)]]
    assert [info.rank for info in infos] == [0, 1]
    answers.clear()
    report_failure(other, "exit code 1")
    assert next_change(other).kind is ChangeKind.GENERATION_ENDED
    joining = [cluster.join(named), cluster.join(other)]
    # The node keeps its lease for three times the TTL while the name resolution blocks.
    node, deadline = StoreKeys("run").node("a-1"), monotonic() + 3 * TIMEOUTS.lease_ttl
    while (left := deadline - monotonic()) > 0:
        listing = cluster.store.list(node)
        assert listing.entries
        cluster.store.wait(node, after=listing.version, timeout=min(left, 0.1))
    answers.set()
    assert [future.result(20).generation for future in joining] == [2, 2]


def test_failures_reported_by_both_nodes_use_one_restart(cluster: HandlerCluster) -> None:
    settings = RendezvousSettings(2, 2, max_restarts=3)
    handlers = [cluster.handler(name, settings) for name in ("a", "b")]
    for future in [cluster.join(h) for h in handlers]:
        future.result(20)
    for handler in handlers:
        assert report_failure(handler, "exit code 1")
    assert all(next_change(h).kind is ChangeKind.GENERATION_ENDED for h in handlers)
    infos = [future.result(20) for future in [cluster.join(h) for h in handlers]]
    assert [info.restarts for info in infos] == [1, 1]


def test_every_node_gets_the_failure_that_exceeded_the_restart_budget(
    cluster: HandlerCluster,
) -> None:
    settings = RendezvousSettings(2, 2, max_restarts=0)
    handlers = [cluster.handler(name, settings) for name in ("a", "b")]
    for future in [cluster.join(h) for h in handlers]:
        future.result(20)
    report_failure(handlers[1], "exit code 7")
    assert all(next_change(h).kind is ChangeKind.GENERATION_ENDED for h in handlers)
    for future in [cluster.join(h) for h in handlers]:
        with pytest.raises(RendezvousClosedError, match="b: exit code 7"):
            future.result(20)


def test_join_timeout_names_the_present_nodes_and_the_option(cluster: HandlerCluster) -> None:
    handler = cluster.handler(
        "a", RendezvousSettings(2, 2), attrs.evolve(TIMEOUTS, join_timeout=1.0)
    )
    with pytest.raises(RendezvousTimeoutError, match=r"1 of at least 2.*here: a.*--nnodes"):
        cluster.join(handler).result(20)


def test_join_timeout_names_the_lost_node(cluster: HandlerCluster) -> None:
    settings = RendezvousSettings(2, 2, max_restarts=3)
    names = ("a", "b")
    first, second = (
        cluster.handler(name, settings, attrs.evolve(TIMEOUTS, join_timeout=3.0)) for name in names
    )
    for future in [cluster.join(first), cluster.join(second)]:
        future.result(20)
    assert report_failure(first, "its peer vanished")
    wait_until(
        "the failure as the reason of the change",
        lambda: next_change(first).reason == "a: its peer vanished",
    )
    joining = cluster.join(first)
    second.shutdown()
    with pytest.raises(
        RendezvousTimeoutError, match=r"1 of at least 2.*; b left; here: a;"
    ) as error:
        joining.result(20)
    assert error.value.is_node_loss


def test_a_spare_waits_while_the_generation_is_active(cluster: HandlerCluster) -> None:
    first = cluster.handler("a", RendezvousSettings(1, 1))
    spare = cluster.handler("b", RendezvousSettings(1, 1), attrs.evolve(TIMEOUTS, join_timeout=0.1))
    cluster.join(first).result(20)
    assert not spare.is_closed()  # The spare has read by now that a generation is active.
    waiting = cluster.join(spare)
    key = StoreKeys("run").node("b-1")
    wait_until("the record of the spare", lambda: cluster.clients[0].get(key) is not None)
    assert first.wait_for_change(0.5) is None
    assert first.num_nodes_waiting() == 0
    assert not waiting.done()
    first.shutdown()
    assert waiting.result(20).generation == 2


def test_a_surplus_spare_is_rejected_as_not_needed(cluster: HandlerCluster) -> None:
    settings = RendezvousSettings(1, 1, spares=0)
    cluster.join(cluster.handler("a", settings)).result(20)
    spare = cluster.handler("b", settings)
    with pytest.raises(
        RendezvousClosedError, match=r"not_needed: the job has all.*1 nodes and 0 spares"
    ):
        cluster.join(spare).result(20)
    change = spare.wait_for_change(20)
    assert change is not None
    assert change.kind is ChangeKind.NOT_NEEDED


def test_a_second_next_rendezvous_replaces_the_first(cluster: HandlerCluster) -> None:
    handler = cluster.handler("a", RendezvousSettings(2, 2))
    first = cluster.join(handler)
    key = StoreKeys("run").node("a-1")
    wait_until("the record of the node", lambda: cluster.clients[0].get(key) is not None)
    second = cluster.join(handler)
    with pytest.raises(
        RendezvousClosedError, match="another call of next_rendezvous took its place"
    ):
        first.result(20)
    cluster.join(cluster.handler("b", RendezvousSettings(2, 2)))
    assert second.result(20).world_size == 2


def test_shutdown_does_not_wait_for_a_store_that_was_never_reached(
    cluster: HandlerCluster,
) -> None:
    # The blocked listing has the same effect as a name server that does not answer.
    listing, released = threading.Event(), threading.Event()

    class BlockedStore(MemoryStore):
        def list(self, prefix: str) -> Listing:
            listing.set()
            released.wait(20.0)
            return super().list(prefix)

    node = Node(id="a-1", host="a", address="127.0.0.1", slots=1)
    timeouts = attrs.evolve(TIMEOUTS, close_timeout=20.0)
    with BlockedStore() as store:
        handler = DynamicRendezvousHandler(
            store, "run", node, RendezvousSettings(1, 1), timeouts=timeouts
        )
        joining = cluster.join(handler)
        assert listing.wait(20.0)
        started_at = monotonic()
        assert not handler.shutdown()
        assert monotonic() - started_at < 10.0
        with pytest.raises(RendezvousClosedError):
            joining.result(20.0)
        released.set()
        wait_until("a shutdown that deletes the record of the node", handler.shutdown)
        assert store.list("").entries == ()


def test_a_handler_polls_if_a_watch_fails(cluster: HandlerCluster) -> None:
    class FailsToWatch(MemoryStore):
        watches = 0

        def watch(
            self,
            prefix: str,
            *,
            after: int,
            callback: Callable[[WatchResult], None],
            with_listing: bool = False,
        ) -> CancelWatch:
            del prefix, after, with_listing
            FailsToWatch.watches += 1
            callback(False)
            return lambda: None

    cluster.store = FailsToWatch()
    # The keep-alive interval is so long that polling alone would not find a change in this test.
    patient = RendezvousTimeouts(join_timeout=60.0, lease_ttl=1000.0, keep_alive_interval=100.0)
    first, second = (
        cluster.handler(name, RendezvousSettings(1, 2, last_call_timeout=60.0), patient)
        for name in "ab"
    )
    for future in [cluster.join(handler) for handler in (first, second)]:
        assert future.result(60.0).world_size == 2
    # The handler tries to watch again after each change that a wait has reported.
    assert FailsToWatch.watches > 2
    assert second.shutdown()
    assert next_change(first).reason == "b left"


def test_settings_other_than_those_of_the_job_are_rejected_by_name(cluster: HandlerCluster) -> None:
    cluster.join(cluster.handler("a", RendezvousSettings(1, 2))).result(20)
    with pytest.raises(RendezvousConfigError, match="max_nodes is 3 here and 2 there"):
        cluster.join(cluster.handler("b", RendezvousSettings(1, 3))).result(20)


def test_a_node_of_another_version_is_ignored(
    cluster: HandlerCluster, caplog: pytest.LogCaptureFixture
) -> None:
    keys = StoreKeys("run")
    cluster.client().set(keys.node("other"), b'{"id":"other"}')
    info = cluster.join(cluster.handler("a", RendezvousSettings(1, 1))).result(20)
    assert info.world_size == 1
    assert "ignored the entry run/node/other of the store: a node needs the fields" in caplog.text
    # While a member is alive, it replaces a membership of another format.
    assert cluster.handlers[0].shutdown()
    document = cluster.store.get(keys.state)
    assert document is not None
    newer = document.value.replace(f'"format":{FORMAT}'.encode(), b'"format":99')
    cluster.client().set(keys.state, newer)
    with pytest.raises(RendezvousConfigError, match="has format 99, this elasticlib reads only"):
        cluster.join(cluster.handler("b", RendezvousSettings(1, 1))).result(20)


def test_set_closed_on_a_finished_job_changes_nothing(cluster: HandlerCluster) -> None:
    handler = cluster.handler("a", RendezvousSettings(1, 1))
    cluster.join(handler).result(20)
    handler.report(Report(ReportKind.SUCCESS))
    assert next_change(handler).kind is ChangeKind.SUCCEEDED
    handler.set_closed()
    assert next_change(handler).kind is ChangeKind.SUCCEEDED
    assert handler.shutdown()


def create_static_handler(cluster: HandlerCluster, rank: int) -> StaticRendezvousHandler:
    handler = StaticRendezvousHandler(
        cluster.client(),
        "run",
        Node(id=f"n{rank}-1", host=f"n{9 - rank}", address="127.0.0.1", slots=1, rank_hint=rank),
        2,
        timeouts=TIMEOUTS,
        open_bootstrap_store=FakeBootstrapStore,
    )
    cluster.handlers.append(handler)
    return handler


def test_static_nodes_get_their_ranks(cluster: HandlerCluster) -> None:
    futures = {rank: cluster.join(create_static_handler(cluster, rank)) for rank in (1, 0)}
    assert {rank: future.result(20).rank for rank, future in futures.items()} == {0: 0, 1: 1}


def test_a_static_rank_outside_the_job_is_rejected(cluster: HandlerCluster) -> None:
    with pytest.raises(ConfigError, match="the rank of a static node must be from 0 to 1, got 2"):
        create_static_handler(cluster, 2)


PREPARE = """
import sys
from elasticlib import DynamicRendezvousHandler, RendezvousSettings, Node
from elasticlib.stores.memory_store import MemoryStore

node = Node("n-1", "n", "127.0.0.1", slots=1)
with MemoryStore() as store:
    handler = DynamicRendezvousHandler(store, "run", node, RendezvousSettings(1, 1))
    handler.membership(slots=handler.node.slots).prepare()
    print("torch.distributed" in sys.modules)
    handler.shutdown()
"""


def test_prepare_imports_the_modules_of_the_bootstrap_store() -> None:
    process = subprocess.run((sys.executable, "-c", PREPARE), capture_output=True, timeout=120)
    assert process.stdout == b"True\n", process.stderr.decode()
