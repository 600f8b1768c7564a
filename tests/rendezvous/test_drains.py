"""Drains, slots, requested stops and restarts, and the reset of restarts, over a memory store."""

from __future__ import annotations

import concurrent.futures

import pytest
from handler_cluster import HandlerCluster, next_change, read_state

from elasticlib.errors import RendezvousClosedError
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.blame import FailureKind
from elasticlib.rendezvous.interface import Change, ChangeKind, Report, ReportKind
from elasticlib.rendezvous.membership import GenerationTrigger, JobPhase
from elasticlib.testing.rendezvous_cluster import report_failure
from elasticlib.testing.waiting import wait_until


def test_a_drain_is_reported_to_all_nodes_and_the_others_continue_after_it(
    cluster: HandlerCluster,
) -> None:
    settings = RendezvousSettings(1, 3, last_call_timeout=0.3)
    handlers = [cluster.handler(name, settings) for name in "abc"]
    # All nodes have read the store, so that none of them misses the last call.
    assert not any(handler.is_closed() for handler in handlers)
    assert [info.world_size for info in cluster.join_all(handlers)] == [3, 3, 3]
    handlers[1].report(Report(ReportKind.DRAIN, "SIGUSR2"))
    expected = Change(ChangeKind.RESIZE, "b drains (SIGUSR2)")
    assert [next_change(handler) for handler in handlers] == [expected] * 3
    joining = [cluster.join(handlers[n]) for n in (0, 2)]
    # The other nodes wait while the draining node still runs its workers.
    assert not concurrent.futures.wait(joining, 0.5).done
    assert handlers[1].shutdown()
    infos = [future.result(20) for future in joining]
    assert [(i.generation, i.world_size, i.restarts) for i in infos] == [(2, 2, 0)] * 2


def test_a_node_joins_with_fewer_workers_and_later_resizes_the_job_with_all(
    cluster: HandlerCluster,
) -> None:
    handlers = [
        cluster.handler(name, RendezvousSettings(2, 2, max_restarts=1), slots=2) for name in "ab"
    ]
    assert [info.assignment.world_size for info in cluster.join_all(handlers)] == [4, 4]
    report_failure(handlers[0], "killed", FailureKind.KILLED)
    assert [next_change(handler).kind for handler in handlers] == [ChangeKind.GENERATION_ENDED] * 2
    assert handlers[0].report(Report(ReportKind.SLOTS, slots=1))
    assignments = [info.assignment for info in cluster.join_all(handlers)]
    assert [
        (s.group_rank, s.local_world_size, s.first_rank, s.world_size) for s in assignments
    ] == [
        *((0, 1, 0, 3), (1, 2, 1, 3)),
    ]
    assert handlers[0].report(Report(ReportKind.SLOTS, slots=2))
    expected = Change(ChangeKind.RESIZE, "a has 2 workers ready")
    assert [next_change(handler) for handler in handlers] == [expected] * 2
    infos = cluster.join_all(handlers)
    for info in infos:
        assignment = info.assignment
        assert (assignment.local_world_size, assignment.world_size, info.restarts) == (2, 4, 1)


def test_restarts_are_reset_when_a_generation_has_lasted_for_the_restart_window(
    cluster: HandlerCluster,
) -> None:
    handler = cluster.handler("a", RendezvousSettings(1, 1, max_restarts=1, restart_window=1.0))
    cluster.join(handler).result(20)
    for _ in range(2):
        report_failure(handler, "killed", FailureKind.KILLED)
        assert next_change(handler).kind is ChangeKind.GENERATION_ENDED
        info = cluster.join(handler).result(20)
        assert info.restarts == 1
        wait_until("restarts to be reset", lambda: read_state(cluster).restarts == 0)
        # The reset does not stop the workers.
        assert handler.wait_for_change(0.0) is None


def test_a_requested_restart_is_a_new_generation_of_the_same_nodes_that_uses_no_restart(
    cluster: HandlerCluster,
) -> None:
    settings = RendezvousSettings(2, 2, max_restarts=0)
    handlers = [cluster.handler(name, settings) for name in "ab"]
    cluster.join_all(handlers)
    # Each node may have read the request.
    assert all(
        handler.report(Report(ReportKind.RESTART, "a restart request from ann"))
        for handler in handlers
    )
    expected = Change(ChangeKind.RESTART, "a restart request from ann")
    assert [next_change(handler) for handler in handlers] == [expected] * 2
    infos = cluster.join_all(handlers)
    assert [(i.generation, i.world_size, i.restarts) for i in infos] == [(2, 2, 0)] * 2
    assert {info.trigger for info in infos} == {GenerationTrigger.RESTART}
    # The request is not repeated in the new generation.
    assert [handler.wait_for_change(0.3) for handler in handlers] == [None, None]


def test_a_node_that_missed_a_requested_stop_gets_the_end_of_the_job(
    cluster: HandlerCluster,
) -> None:
    settings = RendezvousSettings(1, 3, last_call_timeout=0.3)
    handlers = [cluster.handler(name, settings) for name in "abc"]
    assert not any(handler.is_closed() for handler in handlers)
    assert [info.world_size for info in cluster.join_all(handlers)] == [3, 3, 3]
    for handler in handlers[:2]:
        handler.report(Report(ReportKind.STOP, "a stop request from ann"))
    expected = Change(ChangeKind.RESIZE, "a stop request from ann")
    assert next_change(handlers[2]) == expected
    joining = cluster.join(handlers[2])
    assert not concurrent.futures.wait([joining], 0.5).done, "the others are still saving"
    assert all(handler.shutdown() for handler in handlers[:2])
    with pytest.raises(RendezvousClosedError, match="stopped: a stop request from ann"):
        joining.result(20)
    assert read_state(cluster).phase is JobPhase.STOPPED
