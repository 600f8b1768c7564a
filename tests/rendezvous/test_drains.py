"""Drains, requested stops and restarts, and the reset of restarts, with real handlers."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator

import pytest
from test_ending import state_of
from test_handlers import Cluster, change

from elasticlib.errors import RendezvousClosedError
from elasticlib.rendezvous.interface import Change, ChangeKind
from elasticlib.rendezvous.membership import GenerationTrigger, JobPhase, RendezvousSettings


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_a_drain_is_reported_to_all_nodes_and_the_others_continue_after_it(
    cluster: Cluster,
) -> None:
    limits = RendezvousSettings(1, 3, last_call_timeout=0.3)
    handlers = [cluster.node(name, limits) for name in "abc"]
    # All have begun to look, so that none misses the last call.
    assert not any(handler.is_closed() for handler in handlers)
    for future in [cluster.join(handler) for handler in handlers]:
        assert future.result(20).world_size == 3
    handlers[1].report_drain("SIGUSR2")
    told = Change(ChangeKind.RESIZE, "b drains (SIGUSR2)")
    assert [change(handler) for handler in handlers] == [told] * 3
    joining = [cluster.join(handlers[n]) for n in (0, 2)]
    # It saves, and who has stopped waits for it, however long nothing else happens.
    assert not concurrent.futures.wait(joining, 0.5).done
    assert handlers[1].shutdown()
    infos = [future.result(20) for future in joining]
    assert [(i.generation, i.world_size, i.restarts) for i in infos] == [(2, 2, 0)] * 2


def test_a_node_joins_with_fewer_workers_and_later_resizes_the_job_with_all(
    cluster: Cluster,
) -> None:
    handlers = [
        cluster.node(name, RendezvousSettings(2, 2, max_restarts=1), slots=2) for name in "ab"
    ]
    for future in [cluster.join(handler) for handler in handlers]:
        assert future.result(20).assignment.world_size == 4
    handlers[0].report_failure("killed", killed=True)
    assert [change(handler).kind for handler in handlers] == [ChangeKind.GENERATION_ENDED] * 2
    assert handlers[0].report_slots(1)
    seats = [f.result(20).assignment for f in [cluster.join(handler) for handler in handlers]]
    assert [(s.group_rank, s.local_world_size, s.first_rank, s.world_size) for s in seats] == [
        *((0, 1, 0, 3), (1, 2, 1, 3)),
    ]
    assert handlers[0].report_slots(2)
    told = Change(ChangeKind.RESIZE, "a has 2 workers ready")
    assert [change(handler) for handler in handlers] == [told] * 2
    infos = [f.result(20) for f in [cluster.join(handler) for handler in handlers]]
    for info in infos:
        ours = info.assignment
        assert (ours.local_world_size, ours.world_size, info.restarts) == (2, 4, 1)


def test_restarts_are_reset_when_a_generation_has_lasted_for_the_restart_window(
    cluster: Cluster,
) -> None:
    handler = cluster.node("a", RendezvousSettings(1, 1, max_restarts=1, restart_window=1.0))
    cluster.join(handler).result(20)
    for _ in range(2):
        handler.report_failure("killed", killed=True)
        assert change(handler).kind is ChangeKind.GENERATION_ENDED
        info = cluster.join(handler).result(20)
        assert info.restarts == 1
        for _ in range(1000):
            if state_of(cluster).restarts == 0:
                break
            threading.Event().wait(0.01)
        assert state_of(cluster).restarts == 0
        # Nobody's workers are stopped for that.
        assert handler.wait_for_change(0.0) is None


def test_a_requested_restart_is_a_new_generation_of_the_same_nodes_that_uses_no_restart(
    cluster: Cluster,
) -> None:
    limits = RendezvousSettings(2, 2, max_restarts=0)
    handlers = [cluster.node(name, limits) for name in "ab"]
    for future in [cluster.join(handler) for handler in handlers]:
        future.result(20)
    # Each node may have read the request.
    assert all(handler.report_restart("a restart request from ann") for handler in handlers)
    expected = Change(ChangeKind.RESTART, "a restart request from ann")
    assert [change(handler) for handler in handlers] == [expected] * 2
    infos = [f.result(20) for f in [cluster.join(handler) for handler in handlers]]
    assert [(i.generation, i.world_size, i.restarts) for i in infos] == [(2, 2, 0)] * 2
    assert {info.trigger for info in infos} == {GenerationTrigger.RESTART}
    # The request is not repeated in the new generation.
    assert [handler.wait_for_change(0.3) for handler in handlers] == [None, None]


def test_a_node_that_missed_a_requested_stop_gets_the_end_of_the_job(cluster: Cluster) -> None:
    limits = RendezvousSettings(1, 3, last_call_timeout=0.3)
    handlers = [cluster.node(name, limits) for name in "abc"]
    assert not any(handler.is_closed() for handler in handlers)
    for future in [cluster.join(handler) for handler in handlers]:
        assert future.result(20).world_size == 3
    for handler in handlers[:2]:
        handler.report_stop("a stop request from ann")
    expected = Change(ChangeKind.RESIZE, "a stop request from ann")
    assert change(handlers[2]) == expected
    joining = cluster.join(handlers[2])
    assert not concurrent.futures.wait([joining], 0.5).done, "the others are still saving"
    assert all(handler.shutdown() for handler in handlers[:2])
    with pytest.raises(RendezvousClosedError, match="aborted: a stop request from ann"):
        joining.result(20)
    assert state_of(cluster).phase is JobPhase.ABORTED
