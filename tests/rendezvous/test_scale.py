"""The numbers of store operations and bytes per node do not depend on the number of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from counted import KEYS, RUN, CountedStore, Crew, Member

from elasticlib.clock import Clock, monotonic
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.membership import Node, RendezvousSettings, RendezvousTimeouts
from elasticlib.stores.interface import Store
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until

COUNTS = [8, 32, 128, 256]
OPERATIONS = 16
"""Of one node, its announcement included, from its first look until its workers start."""
LISTINGS = 8
"""Of the whole job, by the node that leads, for one generation."""


def crew_of(count: int) -> Crew:
    """Return nodes that have settled. They joined in four groups."""
    crew = Crew()
    for _ in range(4):
        crew.add(count // 4, RendezvousSettings(1, count))
        crew.turns()
    assert len(crew.settle().members) == count
    return crew


def lose_one(crew: Crew, member: Member) -> None:
    """The next generation, without it; what it takes is counted from zero."""
    for one in crew.members:
        one.store.begin()
    crew.lose(member)
    assert crew.settle().member_ids == {one.id for one in crew.members}


def check_frugal(crew: Crew) -> None:
    followers = [member.store for member in crew.followers]
    assert max(store.operations for store in followers) <= OPERATIONS
    for store in followers:
        check_reads_its_own_alone(store)
    # The node that leads writes the shards and sweeps up, a small part of an operation each.
    leader = crew.leader.store
    assert leader.operations <= 4 * OPERATIONS + len(crew.members) / 4
    assert leader.listed[KEYS.job_prefix] <= LISTINGS


def check_reads_its_own_alone(store: CountedStore) -> None:
    """Nothing that tells of all nodes: the watched part, and one shard of each roll."""
    assert set(store.listed) <= {KEYS.watched_prefix}
    rolls = [key.removeprefix(KEYS.shard()).partition("/")[0] for key in store.got]
    read = [
        roll for key, roll in zip(store.got, rolls, strict=True) if key.startswith(KEYS.shard())
    ]
    assert len(set(read)) == len(read)
    assert all(store.got[key] == 1 for key in store.got if key.startswith(KEYS.shard()))


@pytest.mark.parametrize("count", COUNTS)
def test_every_node_settles_with_a_few_operations_of_its_own(count: int) -> None:
    crew = crew_of(count)
    check_frugal(crew)
    assert sum(member.store.operations for member in crew.members) <= OPERATIONS * count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("who", ["a follower", "the leader"])
def test_every_survivor_of_a_lost_node_settles_with_a_few_operations(count: int, who: str) -> None:
    crew = crew_of(count)
    lose_one(crew, crew.leader if who == "the leader" else crew.followers[-1])
    check_frugal(crew)
    assert sum(member.store.operations for member in crew.members) <= OPERATIONS * count


def test_a_followers_bytes_do_not_grow_with_the_job() -> None:
    few, many = crew_of(128), crew_of(512)
    for stage in ("all settle", "one is lost"):
        if stage == "one is lost":
            lose_one(few, few.followers[-1])
            lose_one(many, many.followers[-1])
        most = [max(member.store.bytes for member in crew.followers) for crew in (few, many)]
        assert most[1] <= 2 * most[0], stage
        usual = [sorted(m.store.bytes for m in crew.followers)[15] for crew in (few, many)]
        assert usual[1] <= 1.5 * usual[0], stage


def test_all_bytes_of_the_leader_are_a_constant_for_each_node() -> None:
    each = [crew_of(count).leader.store.bytes / count for count in (32, 256)]
    assert each[1] <= each[0]


def test_a_settled_node_only_refreshes_its_lease() -> None:
    crew = crew_of(32)
    crew.turns()
    for member in crew.members:
        member.store.begin()
    crew.turns(60, seconds=1.0)
    for member in crew.followers:
        assert member.store.calls == {"refresh": 60}
    assert crew.leader.store.calls == {"refresh": 120}


# -- the handler's own pace --------------------------------------------------------------------


class Ticking(CountedStore):
    """Its node's clock is moved by the node itself, a little each time that it is read."""

    def __init__(self, inner: Store, step: float) -> None:
        super().__init__(inner)
        self._step = step
        self._now = 0.0
        self.rounds = 0

    def refresh(self, key: str, version: int) -> None:
        super().refresh(key, version)
        if key != KEYS.leader:
            self.rounds += 1

    def clock(self) -> float:
        self._now += self._step / 4
        return self._now


def go_on(stores: Sequence[Ticking], rounds: int) -> None:
    """Wait until all of their nodes have taken so many more."""
    last = [store.rounds + rounds for store in stores]
    for store, number in zip(stores, last, strict=True):
        wait_until(f"{rounds} more rounds", lambda s=store, n=number: s.rounds > n)


class Handlers:
    """Real handlers over one memory store in which no lease ends."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._memory = MemoryStore(clock=lambda: 0.0)

    def client(self) -> MemoryStore:
        return self._stack.enter_context(self._memory.client())

    def settle(
        self, nodes: Sequence[tuple[CountedStore, Clock]], timing: RendezvousTimeouts
    ) -> None:
        """All come at once, each with its store and its clock."""
        count = len(nodes)
        handlers = [
            DynamicRendezvousHandler(
                store,
                RUN,
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
        futures = [pool.submit(handler.next_rendezvous) for handler in handlers]
        assert sorted(future.result(60).rank for future in futures) == list(range(count))


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    with ExitStack() as stack:
        yield Handlers(stack)


@pytest.mark.parametrize("count", [8, 32, 128])
def test_handlers_that_join_at_the_same_time_need_no_more_operations(
    handlers: Handlers, count: int
) -> None:
    stores = [CountedStore(handlers.client()) for _ in range(count)]
    # Nothing that depends on how long this machine takes.
    patient = RendezvousTimeouts(join_timeout=60.0, lease_ttl=1000.0, keep_alive_interval=100.0)
    handlers.settle([(store, monotonic) for store in stores], patient)
    (leader,) = [store for store in stores if store.listed[KEYS.job_prefix]]
    for store in stores:
        if store is not leader:
            check_reads_its_own_alone(store)
            assert store.operations <= OPERATIONS
    assert leader.listed[KEYS.job_prefix] <= 2 * count


def test_a_settled_handler_polls_once_per_lease(handlers: Handlers) -> None:
    step, rounds = 0.005, 8
    stores = [Ticking(handlers.client(), step) for _ in range(4)]
    timing = RendezvousTimeouts(join_timeout=1e6, lease_ttl=rounds * step, keep_alive_interval=step)
    handlers.settle([(store, store.clock) for store in stores], timing)
    go_on(stores, 2 * rounds)
    before = [(store.rounds, Counter(store.calls)) for store in stores]
    go_on(stores, 4 * rounds)
    for store, (first, calls) in zip(stores, before, strict=True):
        more, leases = store.calls - calls, 1 + 2 * (store.rounds - first) / rounds
        leads = store.listed[KEYS.job_prefix] > 0
        assert more["list"] <= leases
        assert more["get"] <= leases * (not leads)  # the note of the one that leads
        assert set(more) <= {"refresh", "list", "get"}
