"""Timeouts for a store that is unreachable or lost the job, and moves to another store."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from stepwise_cluster import KEYS, LEASE_TTL, CountingStore, StepwiseCluster, StepwiseNode

from elasticlib.errors import StoreConnectionError
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.membership import LeaderStatus, Membership, Node
from elasticlib.rendezvous.node import (
    NO_STATUS_YET,
    STATUS_INTERVAL_S,
    JoinRequest,
    RendezvousNode,
    StoreGraceExpiredError,
)
from elasticlib.rendezvous.store_layout import encode_state
from elasticlib.rendezvous.store_watcher import MAX_BACKOFF_S
from elasticlib.stores.interface import Store
from elasticlib.stores.memory_store import MemoryStore

UNREACHABLE = StoreConnectionError("no route to host")
TIMEOUTS = RendezvousTimeouts(join_timeout=60.0, lease_ttl=LEASE_TTL, store_grace=30.0)
WITHOUT_GENERATION = Membership(RendezvousSettings(2, 2), "one")
GENERATION_2 = attrs.evolve(WITHOUT_GENERATION, generation=2, membership_id="2.m", num_nodes=2)


class StoreWithOtherEndpoint(CountingStore):
    """A store with one other endpoint, which is earlier or later in the endpoint list."""

    def __init__(self, other: Store, *, earlier: bool) -> None:
        super().__init__(MemoryStore())
        self._other, self._earlier = other, earlier
        self.num_searches = 0

    def try_other_endpoints(self, accept: Callable[[Store, bool], bool]) -> bool:
        self.num_searches += 1
        return accept(self._other, self._earlier)


def create_node(store: Store) -> RendezvousNode:
    node = Node(id="a-1", host="a", address="127.0.0.1", slots=1)
    return RendezvousNode(store, "run", node, RendezvousSettings(2, 2), TIMEOUTS)


def create_store(state: Membership | None) -> MemoryStore:
    store = MemoryStore()
    if state is not None:
        store.set(KEYS.state, encode_state(state))
    return store


# -- a store that does not answer ------------------------------------------------------------------


def test_a_store_that_was_never_reached_is_retried_for_the_join_timeout() -> None:
    node = create_node(MemoryStore())
    assert 0 < node.on_store_error(UNREACHABLE, 100.0) <= MAX_BACKOFF_S
    assert (
        0 < node.on_store_error(UNREACHABLE, 100.0 + TIMEOUTS.join_timeout - 0.1) <= MAX_BACKOFF_S
    )
    assert node.leader_status.reason == str(UNREACHABLE)
    with pytest.raises(
        StoreGraceExpiredError, match=r"60 s \(join_timeout\): no route.*was never reached"
    ):
        node.on_store_error(UNREACHABLE, 100.0 + TIMEOUTS.join_timeout)


def test_a_store_that_was_reached_is_retried_for_the_grace_since_its_last_answer() -> None:
    node = create_node(MemoryStore())
    node.read(0.0)
    for failed_at in (100.0, 200.0):
        assert node.on_store_error(UNREACHABLE, failed_at) > 0
        assert node.on_store_error(UNREACHABLE, failed_at + TIMEOUTS.store_grace - 0.1) > 0
        node.on_store_success(failed_at + TIMEOUTS.store_grace)
    node.on_store_error(UNREACHABLE, 300.0)
    with pytest.raises(StoreGraceExpiredError) as error:
        node.on_store_error(UNREACHABLE, 300.0 + TIMEOUTS.store_grace)
    assert (
        str(error.value)
        == f"the store was unreachable for 30 s (store_grace, --store-grace): {UNREACHABLE}"
    )


def test_retry_delays_grow_up_to_a_maximum() -> None:
    node = create_node(MemoryStore())
    node.read(0.0)
    pauses = [node.on_store_error(UNREACHABLE, 1.0) for _ in range(20)]
    assert pauses[0] <= 0.04
    assert all(MAX_BACKOFF_S / 2 <= pause <= MAX_BACKOFF_S for pause in pauses[10:])


# -- a store without the job -----------------------------------------------------------------------


def test_a_node_without_a_job_tries_other_stores_after_a_lease() -> None:
    store = StoreWithOtherEndpoint(create_store(GENERATION_2), earlier=False)
    node = create_node(store)
    node.read(0.0)
    assert not node.try_other_store(LEASE_TTL - 0.1)
    assert store.num_searches == 0
    assert node.try_other_store(LEASE_TTL)
    assert store.num_searches == 1


def test_a_node_whose_store_has_the_job_tries_no_other_store() -> None:
    store = StoreWithOtherEndpoint(create_store(GENERATION_2), earlier=True)
    store.inner.set(KEYS.state, encode_state(GENERATION_2))
    node = create_node(store)
    node.read(0.0)
    for now in (LEASE_TTL, 9 * TIMEOUTS.store_grace):
        assert not node.try_other_store(now)
    assert store.num_searches == 0


@pytest.mark.parametrize("earlier", [True, False], ids=["earlier", "later"])
@pytest.mark.parametrize("state", [None, WITHOUT_GENERATION], ids=["empty", "no generation"])
@pytest.mark.parametrize(
    "other_state", [None, WITHOUT_GENERATION], ids=["empty there", "no generation there"]
)
def test_all_nodes_use_the_first_store_if_no_store_has_a_generation(
    state: Membership | None, other_state: Membership | None, earlier: bool
) -> None:
    assert moves_to_other_store(state, other_state, earlier=earlier) == earlier


@pytest.mark.parametrize("earlier", [True, False], ids=["earlier", "later"])
@pytest.mark.parametrize(
    ("other_state", "is_moved"),
    [
        (attrs.evolve(GENERATION_2, generation=3, membership_id="3.m"), True),
        (GENERATION_2, False),
        (attrs.evolve(GENERATION_2, generation=1, membership_id="1.m"), False),
        (attrs.evolve(GENERATION_2, incarnation="two", generation=3, membership_id="3.m"), False),
        (WITHOUT_GENERATION, False),
        (None, False),
    ],
    ids=["later", "same", "earlier", "another run", "no generation", "empty"],
)
def test_a_minority_only_moves_to_a_store_with_a_later_generation(
    other_state: Membership | None, is_moved: bool, earlier: bool
) -> None:
    assert moves_to_other_store(GENERATION_2, other_state, earlier=earlier) == is_moved


def moves_to_other_store(
    own_state: Membership | None, other_state: Membership | None, *, earlier: bool
) -> bool:
    """Return True if a node of a blocked job moves to the other store."""
    store = StoreWithOtherEndpoint(create_store(other_state), earlier=earlier)
    if own_state is not None:
        store.inner.set(KEYS.state, encode_state(own_state))
    node = create_node(store)
    node.read(0.0)
    node.leader_status = attrs.evolve(node.leader_status, is_blocked=True)
    return node.try_other_store(LEASE_TTL)


def test_a_node_that_moved_to_another_store_reads_the_status_of_that_store() -> None:
    """A node that still counted as blocked would fail at a store that has enough nodes."""
    node = create_node(StoreWithOtherEndpoint(create_store(GENERATION_2), earlier=False))
    node.read(0.0)
    node.leader_status = attrs.evolve(node.leader_status, is_blocked=True)
    node.next_status_read_at = 100 * LEASE_TTL
    assert node.try_other_store(LEASE_TTL)
    assert not node.leader_status.is_blocked
    assert node.next_status_read_at == LEASE_TTL


def test_a_node_that_remembers_a_generation_leaves_after_the_store_grace() -> None:
    cluster = StepwiseCluster()
    cluster.add(2, RendezvousSettings(2, 2))
    cluster.form_generation()
    node = cluster.followers[0]
    assert not node.local_node.try_other_store(cluster.now)
    for entry in cluster.memory.list("").entries:
        cluster.memory.delete(entry.key)
    node.poll()
    assert not node.local_node.try_other_store(cluster.now)
    grace = node.local_node.timeouts.store_grace
    assert not node.local_node.try_other_store(cluster.now + grace - 0.1)
    with pytest.raises(
        StoreGraceExpiredError, match=r"too few nodes of generation 1 came back to the sto"
    ):
        node.local_node.try_other_store(cluster.now + grace)


# -- the status of the leader ----------------------------------------------------------------------


def publish_status(node: StepwiseNode, now: float) -> float:
    """Reconcile the last snapshot and publish the status. Return the pause until the next call."""
    decision, _ = node.local_node.reconcile_and_write(node.last_snapshot)
    return node.local_node.publish_status(decision, node.last_snapshot, now)


def test_the_leader_publishes_the_reason_for_waiting_and_the_present_nodes() -> None:
    cluster = StepwiseCluster()
    cluster.add(2, RendezvousSettings(3, 3))
    cluster.step_all(2)
    publish_status(cluster.leader, cluster.now)
    (other,) = (node.local_node for node in cluster.followers)
    due = other.next_status_read_at
    other.turn(due - 0.1)
    assert other.leader_status == NO_STATUS_YET
    other.turn(due)
    assert other.leader_status == cluster.leader.local_node.leader_status
    status = other.leader_status
    assert (status.reason, status.present_hosts) == ("2 of at least 3 nodes are here", ("n0", "n1"))
    assert other.next_status_read_at > cluster.now + LEASE_TTL


def create_waiting_nodes() -> tuple[RendezvousNode, RendezvousNode, CountingStore]:
    """Return a leader that has waited for 12 s, a node that joins then, and this node's store."""
    store, timeouts = MemoryStore(clock=lambda: 0.0), RendezvousTimeouts(lease_ttl=30.0)
    leader, other = (
        RendezvousNode(
            CountingStore(store.client()),
            "job",
            Node(name, name, "127.0.0.1", 1),
            RendezvousSettings(3, 3),
            timeouts,
        )
        for name in ("n0", "n1")
    )
    leader.turn(0.0, [JoinRequest(1)])
    for now in (0.0, 0.1, 1.5, 12.0):
        leader.turn(now)
    other.turn(12.0, [JoinRequest(1)])
    other.turn(12.0)
    assert isinstance(other.store, CountingStore)
    return leader, other, other.store


def test_a_waiting_node_does_not_list_the_job_to_read_the_status() -> None:
    """In a large job, the listings of all nodes would delay the generation for which they wait."""
    _, other, store = create_waiting_nodes()
    before = store.calls.copy()
    other.turn(other.next_status_read_at)
    assert {name: n for name, n in (store.calls - before).items() if name != "refresh"} == {
        "get": 1
    }
    assert other.leader_status.present_hosts == ("n0",)


def test_a_waiting_leader_pauses_between_its_turns() -> None:
    """Its lease may last longer than the time after which it would log again why it waits."""
    leader, _, _ = create_waiting_nodes()
    for now in (13.0, 20.0, 31.0):
        _, next_at = leader.turn(now)
        assert next_at > now


def test_the_leader_publishes_at_most_once_per_second() -> None:
    cluster = StepwiseCluster()
    cluster.add(1, RendezvousSettings(3, 3))
    cluster.step_all(3)
    publish_status(cluster.leader, cluster.now)
    first = cluster.memory.get(KEYS.leader_status)
    cluster.add(1, RendezvousSettings(3, 3))
    cluster.step_all(2)
    assert publish_status(cluster.leader, cluster.now + 0.25) == pytest.approx(
        STATUS_INTERVAL_S - 0.25
    )
    assert cluster.memory.get(KEYS.leader_status) == first
    publish_status(cluster.leader, cluster.now + STATUS_INTERVAL_S)
    assert cluster.memory.get(KEYS.leader_status) != first


def test_nodes_with_equal_names_are_counted() -> None:
    assert LeaderStatus().present_names == "no nodes"
    assert (
        LeaderStatus(present_hosts=("a", "vm", "vm"), num_present=5).present_names
        == "a, vm (2 nodes) and 2 more"
    )
