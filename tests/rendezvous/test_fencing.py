"""Writes of an earlier generation or of an old leader are rejected, and leave no keys."""

from __future__ import annotations

import attrs
import pytest
from stepwise_cluster import KEYS, StepwiseCluster, StepwiseNode

from elasticlib.errors import StoreConnectionError
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.membership import JobPhase, Membership
from elasticlib.rendezvous.node import JobSnapshot
from elasticlib.stores.interface import Entry

SETTINGS = RendezvousSettings(1, 4, max_restarts=1000, last_call_timeout=0.0)


def form_cluster(
    count: int, settings: RendezvousSettings = SETTINGS, *, publishes_endpoint: bool = False
) -> StepwiseCluster:
    """Return a cluster in one generation. By default, no node publishes the master endpoint."""
    cluster = StepwiseCluster()
    cluster.add(count, attrs.evolve(settings, max_nodes=count))
    for node in cluster.nodes:
        node.publishes_endpoint = publishes_endpoint
    cluster.form_generation()
    return cluster


def list_entries(cluster: StepwiseCluster) -> tuple[Entry, ...]:
    return cluster.memory.list("").entries


def list_keys(cluster: StepwiseCluster, membership: str) -> list[str]:
    return [entry.key for entry in list_entries(cluster) if membership in entry.key]


def pause_node(cluster: StepwiseCluster, node: StepwiseNode) -> tuple[JobSnapshot, Membership]:
    """Pause a node until the other nodes have formed a generation without it.

    Returns:
        The last snapshot of the paused node, and the new generation.
    """
    cluster.nodes.remove(node)
    before = cluster.document()
    assert before is not None
    cluster.step_all(7, seconds=1.0)
    after = cluster.form_generation()
    assert after.generation == before.generation + 1
    return node.last_snapshot, after


def form_next_generation(cluster: StepwiseCluster, last: Membership) -> None:
    """Form a generation after `last` whose workers can all start."""
    for node in cluster.nodes:
        node.publishes_endpoint = True
    cluster.step_all()
    assert cluster.form_generation().generation == last.generation + 1
    cluster.step_all()


def test_no_node_reads_the_endpoint_of_an_earlier_generation_and_the_next_one_deletes_it() -> None:
    cluster = form_cluster(3)
    first = cluster.nodes[0]
    stale, after = pause_node(cluster, first)
    assert stale.state is not None
    assert stale.assignment is not None
    assert (stale.state.generation, stale.assignment.group_rank) == (1, 0)
    assert stale.master_endpoint is None
    # The paused node still assumes that it is rank 0 of the current generation.
    first.local_node.write_endpoint(stale, "10.0.0.1:1")
    stale_key = KEYS.master_endpoint(stale.state.membership_id)
    assert stale_key in list_keys(cluster, stale.state.membership_id)
    before = list_entries(cluster)
    current = first.local_node.read(cluster.now)
    first.local_node.write_endpoint(current, "10.0.0.1:1")
    assert list_entries(cluster) == before
    assert current.state == after.state
    assert current.master_endpoint is None
    for node in cluster.nodes:
        node.poll()
        assert node.last_snapshot.master_endpoint is None
    cluster.nodes[0].fail(killed=True)
    form_next_generation(cluster, after)
    assert list_keys(cluster, stale.state.membership_id) == []


def test_rank_0_of_the_current_generation_publishes_its_endpoint_once() -> None:
    cluster = form_cluster(2)
    for endpoint in ("10.0.0.1:1", "10.0.0.1:2"):
        for node in cluster.nodes:
            node.poll()
        first = next(
            m for m in cluster.nodes if (own := m.last_snapshot.assignment) and own.group_rank == 0
        )
        first.local_node.write_endpoint(first.last_snapshot, endpoint)
    for node in cluster.nodes:
        node.poll()
        assert node.last_snapshot.master_endpoint == "10.0.0.1:1"


def test_success_in_an_earlier_generation_does_not_count_for_the_next() -> None:
    cluster = form_cluster(2)
    last = cluster.followers[0]
    stale, after = pause_node(cluster, last)
    assert stale.state is not None
    last.finish()
    current = last.local_node.read(cluster.now)
    before = list_entries(cluster)
    last.local_node.write_reports(current)
    assert list_entries(cluster) == before
    # The paused node writes a report for its own generation, which is not current any more.
    last.local_node.write_reports(stale)
    assert list_entries(cluster) != before
    cluster.leader.poll()
    assert cluster.leader.last_snapshot.view is not None
    assert cluster.leader.last_snapshot.view.finished_ids == frozenset()
    assert cluster.document() == after
    cluster.leader.fail()
    form_next_generation(cluster, after)
    assert list_keys(cluster, stale.state.membership_id) == []


@pytest.mark.parametrize("action", ["creates the job", "forms a generation", "ends a generation"])
def test_acting_twice_on_one_snapshot_fails_and_changes_nothing(action: str) -> None:
    cluster = StepwiseCluster()
    cluster.add(3, RendezvousSettings(2, 3, last_call_timeout=0.0))
    leader, *others = cluster.nodes
    if action == "creates the job":
        leader.local_node.publish(cluster.now)
    else:
        cluster.step_all(1)
    if action == "ends a generation":
        cluster.form_generation()
        cluster.remove(others[0])
    snapshot = leader.local_node.poll(cluster.now)
    decision, was_written = leader.local_node.reconcile_and_write(snapshot)
    assert was_written
    assert decision.new_membership is not None
    assert (decision.new_membership.phase is JobPhase.ACTIVE) == (action == "forms a generation")
    before = list_entries(cluster)
    again, was_written = leader.local_node.reconcile_and_write(snapshot)
    assert not was_written
    assert again.new_membership is not None
    assert again.new_membership.phase is decision.new_membership.phase
    assert list_entries(cluster) == before


def test_a_leader_whose_lease_has_expired_decides_nothing() -> None:
    cluster = form_cluster(3)
    old = cluster.leader
    pause_node(cluster, old)
    assert cluster.leader is not old
    current = old.local_node.read(cluster.now)
    before = list_entries(cluster)
    assert current.view is None
    decision, was_written = old.local_node.reconcile_and_write(current)
    assert (decision.new_membership, was_written) == (None, False)
    assert decision.reason == f"{cluster.leader.name} decides, and this node waits"
    assert not old.local_node.try_become_leader(current)
    assert list_entries(cluster) == before


def end_a_generation() -> tuple[StepwiseCluster, StepwiseNode, Membership]:
    """Return a job that a node has left, so that the leader's next poll forms a generation."""
    cluster = form_cluster(64, publishes_endpoint=True)
    leader = cluster.leader
    cluster.remove(cluster.followers[-1])
    cluster.step_all()
    leader.poll()  # The leader reports that it has stopped its workers.
    document = cluster.document()
    assert document is not None
    assert document.phase is JobPhase.FORMING
    return cluster, leader, document


def test_a_leader_that_dies_at_any_operation_leaves_no_permanent_state() -> None:
    has_written = []
    for operations in range(100):
        cluster, leader, before = end_a_generation()
        leader.store.reset_counts()
        leader.store.fails_after = operations
        try:
            leader.poll()
            for node in cluster.nodes:  # rank 0 announces its endpoint
                node.poll()
            leader.poll()
        except StoreConnectionError:
            leader.store.fails_after = None
        else:
            break
        document = cluster.document()
        assert document is not None
        has_written.append(document.generation > before.generation)
        cluster.remove(leader)
        after = cluster.form_generation()
        assert after.generation == before.generation + 1 + has_written[-1]
        cluster.step_all()
        assert list_keys(cluster, before.membership_id) == []
        of_memberships = (KEYS.shard(), KEYS.master_endpoint())
        keys = [e.key for e in list_entries(cluster) if e.key.startswith(of_memberships)]
        assert [key for key in keys if after.membership_id not in key] == []
    # The leader died at several operations before the write of the state, and after it.
    assert has_written == sorted(has_written)
    assert has_written.count(False) >= 5
    assert has_written.count(True) >= 5


def test_keys_do_not_accumulate_over_two_hundred_generations() -> None:
    cluster = form_cluster(4, attrs.evolve(SETTINGS, quorum=True))
    max_entries = 0
    for number in range(200):
        changed = cluster.nodes[number % 4]
        if number % 2:
            cluster.remove(changed)
            cluster.form_generation()
            cluster.add(1, attrs.evolve(SETTINGS, quorum=True))
        else:
            changed.finish()
            changed.local_node.write_reports(changed.last_snapshot)
            changed.fail(killed=True)
        cluster.step_all()
        document = cluster.form_generation()
        assert len(document.members) == 4
        max_entries = max(max_entries, len(list_entries(cluster)))
    assert document.generation > 200
    # Keys of 4 nodes; the state, the leader, the master endpoint and one shard; and reports of two
    # nodes about the last generation.
    assert max_entries <= 4 + 4 + 2
