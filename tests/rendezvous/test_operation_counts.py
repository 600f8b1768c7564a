"""The numbers of store operations and bytes per node do not depend on the number of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from stepwise_cluster import KEYS, RUN_ID, CountingStore, StepwiseCluster, StepwiseNode

from elasticlib.clock import Clock, monotonic
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.node import STATUS_INTERVAL_S
from elasticlib.stores.interface import Store
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until

COUNTS = [8, 32, 128, 256]
# Operations of one node from its first read until its workers start, its announcement included.
MAX_OPERATIONS = 12
MAX_LISTINGS = 8  # listings of the whole job by the leader, for one generation


def form_cluster(count: int) -> StepwiseCluster:
    """Return a cluster whose nodes have formed a generation. They joined in four groups."""
    cluster = StepwiseCluster()
    for _ in range(4):
        cluster.add(count // 4, RendezvousSettings(1, count))
        cluster.step_all()
    assert len(cluster.form_generation().members) == count
    return cluster


def count_loss_of(cluster: StepwiseCluster, node: StepwiseNode) -> None:
    """Remove a node, and count the operations until the others have formed a generation."""
    for other in cluster.nodes:
        other.store.reset_counts()
    cluster.remove(node)
    assert cluster.form_generation().member_ids == {other.id for other in cluster.nodes}


def check_counts(cluster: StepwiseCluster) -> None:
    followers = [node.store for node in cluster.followers]
    assert max(store.operations for store in followers) <= MAX_OPERATIONS
    for store in followers:
        check_reads_one_shard_per_membership(store)
    # The leader also writes the shards and deletes old keys: a fraction of an operation per node.
    leader = cluster.leader.store
    assert leader.operations <= 4 * MAX_OPERATIONS + len(cluster.nodes) / 4
    assert leader.listed[KEYS.job_prefix] <= MAX_LISTINGS


def check_reads_one_shard_per_membership(store: CountingStore) -> None:
    """Check that a follower lists only the watched prefix, and reads one shard per membership."""
    assert set(store.listed) <= {KEYS.watched_prefix}
    shards = [key for key in store.got if key.startswith(KEYS.shard())]
    memberships = [key.removeprefix(KEYS.shard()).partition("/")[0] for key in shards]
    assert len(set(memberships)) == len(memberships)
    assert all(store.got[key] == 1 for key in shards)


@pytest.mark.parametrize("count", COUNTS)
def test_each_node_joins_with_a_bounded_number_of_operations(count: int) -> None:
    cluster = form_cluster(count)
    check_counts(cluster)
    assert sum(node.store.operations for node in cluster.nodes) <= MAX_OPERATIONS * count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("lost", ["a follower", "the leader"])
def test_each_survivor_of_a_lost_node_rejoins_with_a_bounded_number_of_operations(
    count: int, lost: str
) -> None:
    cluster = form_cluster(count)
    count_loss_of(cluster, cluster.leader if lost == "the leader" else cluster.followers[-1])
    check_counts(cluster)
    assert sum(node.store.operations for node in cluster.nodes) <= MAX_OPERATIONS * count


def test_a_followers_bytes_do_not_grow_with_the_job() -> None:
    few, many = form_cluster(128), form_cluster(512)
    for stage in ("after the first generation", "after a node is lost"):
        if stage == "after a node is lost":
            count_loss_of(few, few.followers[-1])
            count_loss_of(many, many.followers[-1])
        largest = [max(node.store.bytes for node in cluster.followers) for cluster in (few, many)]
        assert largest[1] <= 2 * largest[0], stage
        small = [sorted(m.store.bytes for m in cluster.followers)[15] for cluster in (few, many)]
        assert small[1] <= 1.5 * small[0], stage


def test_the_bytes_of_the_leader_grow_at_most_linearly_with_the_job() -> None:
    bytes_per_node = [form_cluster(count).leader.store.bytes / count for count in (32, 256)]
    assert bytes_per_node[1] <= bytes_per_node[0]


def test_a_node_in_an_active_generation_only_refreshes_its_lease() -> None:
    cluster = form_cluster(32)
    cluster.step_all()
    for node in cluster.nodes:
        node.store.reset_counts()
    cluster.step_all(60, seconds=1.0)
    for node in cluster.followers:
        assert node.store.calls == {"refresh": 60}
    assert cluster.leader.store.calls == {"refresh": 120}


# -- real handlers with their threads ------------------------------------------------------------


class StoreWithSteppingClock(CountingStore):
    """A store client with a clock that advances by a constant each time that its node reads it."""

    def __init__(self, inner: Store, step: float) -> None:
        super().__init__(inner)
        self._step = step
        self._time = 0.0
        self.refreshes = 0

    def refresh(self, key: str, version: int) -> None:
        super().refresh(key, version)
        if key != KEYS.leader:
            self.refreshes += 1

    def clock(self) -> float:
        self._time += self._step / 4
        return self._time


def wait_for_refreshes(stores: Sequence[StoreWithSteppingClock], count: int) -> None:
    """Wait until each node has refreshed its lease `count` more times."""
    targets = [store.refreshes + count for store in stores]
    for store, target in zip(stores, targets, strict=True):
        wait_until(f"{count} more refreshes", lambda s=store, n=target: s.refreshes > n)


class HandlerGroup:
    """Real handlers over one memory store in which no lease ends."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._memory = MemoryStore(clock=lambda: 0.0)

    def client(self) -> MemoryStore:
        return self._stack.enter_context(self._memory.client())

    def form_generation(
        self,
        nodes: Sequence[tuple[CountingStore, Clock]],
        timing: RendezvousTimeouts,
        *,
        leads_first: bool = False,
    ) -> None:
        """Let all nodes join at once, each with its own store and clock.

        With `leads_first`, the first node leads and has written a membership before others join.
        """
        count = len(nodes)
        handlers = [
            DynamicRendezvousHandler(
                store,
                RUN_ID,
                Node(id=f"n{number}-1", host=f"n{number}", address="127.0.0.1", slots=1),
                RendezvousSettings(count, count),
                timeouts=timing,
                open_bootstrap_store=FakeBootstrapStore,
                clock=clock,
            )
            for number, (store, clock) in enumerate(nodes)
        ]
        pool = self._stack.enter_context(ThreadPoolExecutor(count))
        for handler in handlers:
            self._stack.callback(handler.shutdown)
        futures = [pool.submit(handlers[0].next_rendezvous)]
        if leads_first:
            wait_until("the first node to lead", lambda: self._memory.get(KEYS.state))
        futures.extend(pool.submit(handler.next_rendezvous) for handler in handlers[1:])
        assert sorted(future.result(60).rank for future in futures) == list(range(count))


@pytest.fixture
def handlers() -> Iterator[HandlerGroup]:
    with ExitStack() as stack:
        yield HandlerGroup(stack)


@pytest.mark.parametrize("count", [8, 32, 128])
def test_handlers_that_join_at_the_same_time_need_no_more_operations(
    handlers: HandlerGroup, count: int
) -> None:
    stores = [CountingStore(handlers.client()) for _ in range(count)]
    # The timeouts are so long that the counts do not depend on the speed of this machine.
    patient = RendezvousTimeouts(join_timeout=60.0, lease_ttl=1000.0, keep_alive_interval=100.0)
    handlers.form_generation([(store, monotonic) for store in stores], patient)
    (leader,) = [store for store in stores if store.listed[KEYS.job_prefix]]
    for store in stores:
        if store is not leader:
            check_reads_one_shard_per_membership(store)
            assert store.operations <= MAX_OPERATIONS
    assert leader.listed[KEYS.job_prefix] <= 2 * count


def test_a_handler_that_finds_a_leader_reads_only_when_something_has_changed(
    handlers: HandlerGroup,
) -> None:
    stores = [CountingStore(handlers.client()) for _ in range(2)]
    patient = RendezvousTimeouts(join_timeout=60.0, lease_ttl=1000.0, keep_alive_interval=100.0)
    nodes = [(store, monotonic) for store in stores]
    handlers.form_generation(nodes, patient, leads_first=True)
    # One listing when it joins, one of the generation, and one of the address of torch's store.
    assert stores[1].listed.keys() == {KEYS.watched_prefix}
    assert stores[1].listed[KEYS.watched_prefix] <= 3
    assert stores[1].calls["set"] == stores[1].calls["get"] == 1


def test_a_handler_in_an_active_generation_polls_once_per_lease(handlers: HandlerGroup) -> None:
    step, refreshes = 0.005, 8  # a node refreshes its lease eight times during its TTL
    stores = [StoreWithSteppingClock(handlers.client(), step) for _ in range(4)]
    timing = RendezvousTimeouts(
        join_timeout=1e6, lease_ttl=refreshes * step, keep_alive_interval=step
    )
    handlers.form_generation([(store, store.clock) for store in stores], timing)
    # The leader publishes its last status after up to this interval of its own clock.
    wait_for_refreshes(stores, int(STATUS_INTERVAL_S / step) + 2 * refreshes)
    before = [(store.refreshes, Counter(store.calls)) for store in stores]
    wait_for_refreshes(stores, 4 * refreshes)
    for store, (first, calls) in zip(stores, before, strict=True):
        more, max_polls = store.calls - calls, 1 + 2 * (store.refreshes - first) / refreshes
        is_leader = store.listed[KEYS.job_prefix] > 0
        assert more["list"] <= max_polls
        assert more["get"] <= (0 if is_leader else max_polls)  # followers read the leader's status
        assert set(more) <= {"refresh", "list", "get"}
