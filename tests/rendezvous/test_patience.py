"""Time limits for a store that is unreachable or without the job, and the search elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from counted import KEYS, LEASE, CountedStore, Crew, Member

from elasticlib.errors import StoreConnectionError
from elasticlib.rendezvous.local_node import (
    MAX_BACKOFF_S,
    NO_STATUS_YET,
    STATUS_INTERVAL_S,
    LocalNode,
    StoreGraceExpiredError,
)
from elasticlib.rendezvous.membership import (
    LeaderStatus,
    Membership,
    Node,
    RendezvousSettings,
    RendezvousTimeouts,
)
from elasticlib.rendezvous.store_layout import encode_state
from elasticlib.stores.interface import Store
from elasticlib.stores.memory_store import MemoryStore

AWAY = StoreConnectionError("no route to host")
TIMING = RendezvousTimeouts(join_timeout=60.0, lease_ttl=LEASE, store_grace=30.0)
BEGUN = Membership(RendezvousSettings(2, 2), "one")
SECOND = attrs.evolve(BEGUN, generation=2, membership_id="2.m", num_nodes=2)


class Scattered(CountedStore):
    """A store that is served at one more place, which comes before this one or after it."""

    def __init__(self, other: Store, *, earlier: bool) -> None:
        super().__init__(MemoryStore())
        self._other, self._earlier = other, earlier
        self.asked = 0

    def try_other_endpoints(self, accept: Callable[[Store, bool], bool]) -> bool:
        self.asked += 1
        return accept(self._other, self._earlier)


def lone(store: Store) -> LocalNode:
    node = Node(id="a-1", host="a", address="127.0.0.1", slots=1)
    return LocalNode(store, "run", node, RendezvousSettings(2, 2), TIMING)


def holding(state: Membership | None) -> MemoryStore:
    store = MemoryStore()
    if state is not None:
        store.set(KEYS.state, encode_state(state))
    return store


# -- a store that does not answer ------------------------------------------------------------------


def test_a_store_that_was_never_reached_is_retried_for_the_join_timeout() -> None:
    part = lone(MemoryStore())
    assert 0 < part.on_store_error(AWAY, 100.0) <= MAX_BACKOFF_S
    assert 0 < part.on_store_error(AWAY, 100.0 + TIMING.join_timeout - 0.1) <= MAX_BACKOFF_S
    assert part.leader_status.reason == str(AWAY)
    with pytest.raises(
        StoreGraceExpiredError, match=r"60 s \(join_timeout\): no route.*was never reached"
    ):
        part.on_store_error(AWAY, 100.0 + TIMING.join_timeout)


def test_a_store_that_was_reached_is_retried_for_the_grace_since_its_last_answer() -> None:
    part = lone(MemoryStore())
    part.read(0.0)
    for came_back in (100.0, 200.0):
        assert part.on_store_error(AWAY, came_back) > 0
        assert part.on_store_error(AWAY, came_back + TIMING.store_grace - 0.1) > 0
        part.on_store_success(came_back + TIMING.store_grace)
    part.on_store_error(AWAY, 300.0)
    with pytest.raises(StoreGraceExpiredError) as spent:
        part.on_store_error(AWAY, 300.0 + TIMING.store_grace)
    assert (
        str(spent.value)
        == f"the store was unreachable for 30 s (store_grace, --store-grace): {AWAY}"
    )


def test_retry_delays_grow_up_to_a_maximum() -> None:
    part = lone(MemoryStore())
    part.read(0.0)
    pauses = [part.on_store_error(AWAY, 1.0) for _ in range(20)]
    assert pauses[0] <= 0.04
    assert all(MAX_BACKOFF_S / 2 <= pause <= MAX_BACKOFF_S for pause in pauses[10:])


# -- a store without the job -----------------------------------------------------------------------


def test_a_node_without_a_job_tries_other_stores_after_a_lease() -> None:
    store = Scattered(holding(SECOND), earlier=False)
    part = lone(store)
    part.read(0.0)
    assert not part.try_other_store(LEASE - 0.1)
    assert store.asked == 0
    assert part.try_other_store(LEASE)
    assert store.asked == 1


def test_a_node_that_finds_its_job_stays() -> None:
    store = Scattered(holding(SECOND), earlier=True)
    store.inner.set(KEYS.state, encode_state(SECOND))
    part = lone(store)
    part.read(0.0)
    for now in (LEASE, 9 * TIMING.store_grace):
        assert not part.try_other_store(now)
    assert store.asked == 0


@pytest.mark.parametrize("earlier", [True, False], ids=["earlier", "later"])
@pytest.mark.parametrize("state", [None, BEGUN], ids=["nothing", "no generation"])
@pytest.mark.parametrize("there", [None, BEGUN], ids=["nothing there", "none there"])
def test_all_nodes_use_the_first_store_if_no_store_has_a_generation(
    state: Membership | None, there: Membership | None, earlier: bool
) -> None:
    assert goes(state, there, earlier=earlier) == earlier


@pytest.mark.parametrize("earlier", [True, False], ids=["earlier", "later"])
@pytest.mark.parametrize(
    ("there", "goes_there"),
    [
        (attrs.evolve(SECOND, generation=3, membership_id="3.m"), True),
        (SECOND, False),
        (attrs.evolve(SECOND, generation=1, membership_id="1.m"), False),
        (attrs.evolve(SECOND, incarnation="two", generation=3, membership_id="3.m"), False),
        (BEGUN, False),
        (None, False),
    ],
    ids=["a later one", "the same", "an earlier one", "another job's", "none", "nothing"],
)
def test_a_minority_only_moves_to_a_store_with_a_later_generation(
    there: Membership | None, goes_there: bool, earlier: bool
) -> None:
    assert goes(SECOND, there, earlier=earlier) == goes_there


def goes(here: Membership | None, there: Membership | None, *, earlier: bool) -> bool:
    """Return True if a node moves to another store that knows that nodes are missing here."""
    store = Scattered(holding(there), earlier=earlier)
    if here is not None:
        store.inner.set(KEYS.state, encode_state(here))
    part = lone(store)
    part.read(0.0)
    part.leader_status = attrs.evolve(part.leader_status, is_blocked=True)
    return part.try_other_store(LEASE)


def test_a_node_that_moved_to_another_store_reads_the_status_of_that_store() -> None:
    """If the node still counted as blocked, it would fail at a store that has enough nodes."""
    store = Scattered(holding(SECOND), earlier=False)
    part = lone(store)
    part.read(0.0)
    part.leader_status = attrs.evolve(part.leader_status, is_blocked=True)
    part.next_status_read_at = 100 * LEASE
    assert part.try_other_store(LEASE)
    assert not part.leader_status.is_blocked
    assert part.next_status_read_at == LEASE


def test_a_node_that_remembers_a_generation_gives_up_after_the_grace() -> None:
    crew = Crew()
    crew.add(2, RendezvousSettings(2, 2))
    crew.settle()
    member = crew.followers[0]
    assert not member.part.try_other_store(crew.now)
    for entry in crew.memory.list("").entries:
        crew.memory.delete(entry.key)
    member.look()
    assert not member.part.try_other_store(crew.now)
    grace = member.part.timeouts.store_grace
    assert not member.part.try_other_store(crew.now + grace - 0.1)
    with pytest.raises(
        StoreGraceExpiredError, match=r"too few nodes of generation 1 came back to the sto"
    ):
        member.part.try_other_store(crew.now + grace)


# -- what it hears meanwhile -----------------------------------------------------------------------


def explains(member: Member, now: float) -> float:
    """It acts on what it last read and says so; in how many seconds it may have more to say."""
    decision, _ = member.part.reconcile_and_write(member.seen)
    return member.part.publish_status(decision, member.seen, now)


def test_the_leader_publishes_the_reason_for_waiting_and_the_present_nodes() -> None:
    crew = Crew()
    crew.add(2, RendezvousSettings(3, 3))
    crew.turns(2)
    explains(crew.leader, crew.now)
    (other,) = crew.followers
    explains(other, other.part.next_status_read_at - 0.1)
    assert other.part.leader_status == NO_STATUS_YET
    explains(other, other.part.next_status_read_at)
    assert other.part.leader_status == crew.leader.part.leader_status
    note = other.part.leader_status
    assert (note.reason, note.present_hosts) == ("2 of at least 3 nodes are here", ("n0", "n1"))
    assert other.part.next_status_read_at > crew.now + LEASE


def test_the_leader_publishes_at_most_once_per_second() -> None:
    crew = Crew()
    crew.add(1, RendezvousSettings(3, 3))
    crew.turns(3)
    explains(crew.leader, crew.now)
    first = crew.memory.get(KEYS.leader_status)
    crew.add(1, RendezvousSettings(3, 3))
    crew.turns(2)
    assert explains(crew.leader, crew.now + 0.25) == pytest.approx(STATUS_INTERVAL_S - 0.25)
    assert crew.memory.get(KEYS.leader_status) == first
    explains(crew.leader, crew.now + STATUS_INTERVAL_S)
    assert crew.memory.get(KEYS.leader_status) != first


def test_nodes_with_equal_names_are_counted() -> None:
    assert LeaderStatus().present_names == "no nodes"
    assert (
        LeaderStatus(present_hosts=("a", "vm", "vm"), num_present=5).present_names
        == "a, vm (2 nodes) and 2 more"
    )
