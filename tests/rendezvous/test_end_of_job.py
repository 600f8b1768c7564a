"""The end of a job, its result for later nodes, and a new run with the same run id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future

import attrs
import pytest
from handler_cluster import HandlerCluster, next_change, read_state
from stepwise_cluster import LEASE_TTL, StepwiseCluster

from elasticlib.errors import RendezvousClosedError
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.handler import DynamicRendezvousHandler as Handler
from elasticlib.rendezvous.interface import (
    ChangeKind,
    RendezvousHandler,
    RendezvousInfo,
    Report,
    ReportKind,
)
from elasticlib.rendezvous.membership import JobPhase
from elasticlib.testing.rendezvous_cluster import report_failure

FULL = RendezvousSettings(2, 2)
BELOW_MAX = RendezvousSettings(2, 3, last_call_timeout=0.0)
REPORTED_BY = r"\(reported by [ab] at \d{4}-\d\d-\d\d.\d\d:\d\d:\d\d"


def wait_for_generations(futures: list[Future[RendezvousInfo]]) -> list[int]:
    """Wait until the nodes have joined, and return the number of each one's generation."""
    return [future.result(20).generation for future in futures]


def start_job_of_two(
    cluster: HandlerCluster, settings: RendezvousSettings, names: str = "ab"
) -> list[Handler]:
    """Start a job of two nodes, and return their handlers in the first generation."""
    handlers = [cluster.handler(name, settings) for name in names]
    assert wait_for_generations([cluster.join(handler) for handler in handlers]) == [1, 1]
    return handlers


def succeed(handlers: list[Handler]) -> None:
    for handler in handlers:
        handler.report(Report(ReportKind.SUCCESS))
    assert [next_change(handler).kind for handler in handlers] == [ChangeKind.SUCCEEDED] * len(
        handlers
    )


def create_finished_cluster() -> StepwiseCluster:
    """Return a full job of two nodes that has succeeded. Its nodes have not left yet."""
    cluster = StepwiseCluster()
    cluster.add(2, FULL)
    cluster.form_generation()
    for node in cluster.nodes:
        node.finish()
        node.local_node.write_reports(node.last_snapshot)
    cluster.step_all()
    return cluster


def shutdown_all(handlers: Sequence[RendezvousHandler]) -> None:
    assert all(handler.shutdown() for handler in handlers)


def join_finished_job(cluster: HandlerCluster, name: str, settings: RendezvousSettings) -> str:
    """Return the error of a node that joins a finished job."""
    with pytest.raises(RendezvousClosedError) as closed:
        cluster.join(cluster.handler(name, settings)).result(20)
    return str(closed.value)


@pytest.mark.parametrize("settings", [FULL, BELOW_MAX], ids=["full", "below max_nodes"])
def test_nodes_that_start_after_all_nodes_of_a_run_have_left_start_a_new_run(
    cluster: HandlerCluster, settings: RendezvousSettings
) -> None:
    incarnations = set()
    for names in ("ab", "cd", "ef"):
        handlers = start_job_of_two(cluster, settings, names)
        incarnations.add(read_state(cluster).incarnation)
        succeed(handlers)
        shutdown_all(handlers)
    assert len(incarnations) == 3


@pytest.mark.parametrize("settings", [FULL, BELOW_MAX], ids=["full", "below max_nodes"])
def test_a_new_run_after_a_failed_one_has_its_own_restart_budget(
    cluster: HandlerCluster, settings: RendezvousSettings
) -> None:
    settings = attrs.evolve(settings, max_restarts=1)
    handlers = start_job_of_two(cluster, settings)
    report_failure(handlers[1], "exit code 6")
    assert all(next_change(handler).kind is ChangeKind.GENERATION_ENDED for handler in handlers)
    assert wait_for_generations([cluster.join(handler) for handler in handlers]) == [2, 2]
    report_failure(handlers[1], "exit code 7")
    assert all(next_change(handler).kind is ChangeKind.GENERATION_ENDED for handler in handlers)
    for future in [cluster.join(handler) for handler in handlers]:
        with pytest.raises(RendezvousClosedError, match="failed: b: exit code 7"):
            future.result(20)
    shutdown_all(handlers)
    again = [cluster.handler(name, settings) for name in "cd"]
    infos = [future.result(20) for future in [cluster.join(handler) for handler in again]]
    assert [(info.generation, info.restarts) for info in infos] == [(1, 0), (1, 0)]


def test_nodes_that_start_after_a_closed_run_start_a_new_run(cluster: HandlerCluster) -> None:
    handlers = start_job_of_two(cluster, FULL)
    handlers[0].set_closed()
    assert [next_change(handler).kind for handler in handlers] == [ChangeKind.ABORTED] * 2
    shutdown_all(handlers)
    start_job_of_two(cluster, FULL, "cd")


def test_a_node_that_starts_while_nodes_of_a_finished_run_remain_gets_its_result(
    cluster: HandlerCluster,
) -> None:
    handlers = start_job_of_two(cluster, FULL)
    succeed(handlers)
    error = join_finished_job(cluster, "c", FULL)
    assert re.search(
        f"succeeded: 2 nodes done; no workers ran on this node {REPORTED_BY}", error
    ), error
    assert read_state(cluster).phase.is_terminal


def test_a_node_that_starts_without_a_leader_gets_the_result_of_a_finished_run() -> None:
    cluster = create_finished_cluster()
    cluster.remove(cluster.leader)
    cluster.add(1, FULL)
    late = cluster.nodes[-1]
    state = late.local_node.read(cluster.now).state
    assert state is not None
    assert state.phase is JobPhase.SUCCEEDED
    assert late.local_node.intent.final_change(state) is not None


def test_a_leader_that_joined_late_reports_the_result_to_later_nodes() -> None:
    cluster = StepwiseCluster()
    cluster.add(3, BELOW_MAX)
    cluster.form_generation()
    cluster.remove(cluster.leader)
    cluster.add(1, BELOW_MAX)
    # The node joins while there is no leader, so it leads before it has read the job.
    joining = cluster.nodes[-1]
    joining.step()
    cluster.form_generation()
    assert joining is cluster.leader
    joining.local_node.intent = attrs.evolve(joining.local_node.intent, close_reason="by the test")
    assert joining.local_node.write_reports(joining.last_snapshot)
    assert not joining.local_node.intent.close_reason
    cluster.step_all()
    cluster.add(1, BELOW_MAX)
    cluster.nodes[-1].step()
    cluster.step_all(3)
    late = cluster.nodes[-1]
    assert late.local_node.intent.final_change(late.last_snapshot.state) is not None


def test_a_leader_of_a_new_run_yields_when_a_node_of_the_old_run_returns() -> None:
    cluster = create_finished_cluster()
    old = list(cluster.nodes)
    cluster.nodes.clear()
    for _ in range(20):
        # The clock advances in small steps, because a store does not expire leases after a pause.
        cluster.now += LEASE_TTL / 10
        cluster.memory.list("")
    cluster.add(2, FULL)
    first, second = cluster.nodes
    snapshot = first.local_node.read(cluster.now)
    first.local_node.publish(cluster.now)
    assert first.local_node.try_become_leader(snapshot)
    old[1].step()
    second.step()
    cluster.step_all(3)
    for node in (first, second):
        assert node.local_node.intent.final_change(node.last_snapshot.state) is not None


def test_a_late_node_gets_the_reason_of_a_failed_run_and_the_node_that_reported_it(
    cluster: HandlerCluster,
) -> None:
    handlers = start_job_of_two(cluster, BELOW_MAX)
    report_failure(handlers[0], "exit code 3")
    assert all(next_change(handler).kind is ChangeKind.GENERATION_ENDED for handler in handlers)
    for future in [cluster.join(handler) for handler in handlers]:
        with pytest.raises(RendezvousClosedError, match="a: exit code 3") as closed:
            future.result(20)
        assert "no workers ran on this node" not in str(closed.value)
    shutdown_all(handlers[:1])
    error = join_finished_job(cluster, "c", BELOW_MAX)
    assert re.search(
        rf"failed: a: exit code 3 .*no workers ran on this node {REPORTED_BY}", error
    ), error
    assert "to run it again, start it once all of its nodes have ended" in error


def test_nodes_get_the_result_while_a_run_is_ending_and_start_a_new_run_after_it(
    cluster: HandlerCluster,
) -> None:
    handlers = start_job_of_two(cluster, BELOW_MAX)
    succeed(handlers)
    shutdown_all(handlers[:1])
    for name in "cd":
        assert "succeeded: 2 nodes done; no workers ran" in join_finished_job(
            cluster, name, BELOW_MAX
        )
    assert next_change(handlers[1]).kind is ChangeKind.SUCCEEDED
    shutdown_all(handlers[1:])
    # A node that got the result without having been part of the run does not keep the run alive.
    start_job_of_two(cluster, BELOW_MAX, "ef")


def test_the_result_names_the_node_and_the_time(cluster: HandlerCluster) -> None:
    handlers = start_job_of_two(cluster, FULL)
    handlers[1].set_closed()
    assert next_change(handlers[0]).reason == "closed by b"
    job_end = read_state(cluster).job_end
    assert job_end is not None
    assert job_end.written_by == "b"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d.*", job_end.finished_at)


@pytest.mark.parametrize("has_succeeded", [True, False])
def test_a_node_that_leaves_without_its_store_says_so_only_while_the_job_runs(
    cluster: HandlerCluster, caplog: pytest.LogCaptureFixture, has_succeeded: bool
) -> None:
    handlers = start_job_of_two(cluster, FULL)
    if has_succeeded:
        succeed(handlers)
    # The host of the store has left the job first, and its server with it.
    cluster.clients[1].close()
    with caplog.at_level("INFO", logger="elasticlib"):
        handlers[1].shutdown()
    assert ("the store was unreachable" in caplog.text) is not has_succeeded
