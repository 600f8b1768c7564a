"""Writes of an ended generation or of an old leader are rejected, and leave no keys."""

from __future__ import annotations

import attrs
import pytest
from counted import KEYS, Crew, Member

from elasticlib.errors import StoreConnectionError
from elasticlib.rendezvous.local_node import JobSnapshot
from elasticlib.rendezvous.membership import JobPhase, Membership, RendezvousSettings
from elasticlib.stores.interface import Entry

LIMITS = RendezvousSettings(1, 4, max_restarts=1000, last_call_timeout=0.0)


def crew_of(count: int, limits: RendezvousSettings = LIMITS) -> Crew:
    """Return nodes that are in one generation. None of them publishes the master endpoint."""
    crew = Crew()
    crew.add(count, attrs.evolve(limits, max_nodes=count))
    for member in crew.members:
        member.publishes = False
    crew.settle()
    return crew


def entries(crew: Crew) -> tuple[Entry, ...]:
    return crew.memory.list("").entries


def keys_of(crew: Crew, membership: str) -> list[str]:
    return [entry.key for entry in entries(crew) if membership in entry.key]


def asleep(crew: Crew, member: Member) -> tuple[JobSnapshot, Membership]:
    """It stands still until the others have gone on without it; what it last read, and the
    generation that they are in."""
    crew.members.remove(member)
    before = crew.document()
    assert before is not None
    crew.turns(7, seconds=1.0)
    after = crew.settle()
    assert after.generation == before.generation + 1
    return member.seen, after


def test_rank_0_of_an_ended_generation_cannot_publish_its_endpoint() -> None:
    crew = crew_of(3)
    first = crew.members[0]
    stale, after = asleep(crew, first)
    assert stale.state is not None
    assert (
        stale.state.generation,
        stale.assignment and stale.assignment.group_rank,
        stale.master_endpoint,
    ) == (
        1,
        0,
        None,
    )
    before = entries(crew)
    first.part.write_reports(stale, endpoint="10.0.0.1:1")
    woken = first.part.read(crew.now)
    first.part.write_reports(woken, endpoint="10.0.0.1:1")
    assert entries(crew) == before
    assert keys_of(crew, stale.state.membership_id) == []
    assert woken.state == after.state
    assert woken.master_endpoint is None


def test_rank_0_of_the_current_generation_publishes_its_endpoint_once() -> None:
    crew = crew_of(2)
    for endpoint in ("10.0.0.1:1", "10.0.0.1:2"):
        for member in crew.members:
            member.look()
        first = next(m for m in crew.members if (own := m.seen.assignment) and own.group_rank == 0)
        first.part.write_reports(first.seen, endpoint=endpoint)
    for member in crew.members:
        member.look()
        assert member.seen.master_endpoint == "10.0.0.1:1"


def test_success_in_an_ended_generation_does_not_count_for_the_next() -> None:
    crew = crew_of(2)
    last = crew.followers[0]
    stale, after = asleep(crew, last)
    assert stale.state is not None
    last.finish()
    woken = last.part.read(crew.now)
    before = entries(crew)
    last.part.write_reports(woken)
    assert entries(crew) == before
    # It had read the state before that generation was over, and writes after.
    last.part.write_reports(stale)
    assert entries(crew) != before
    crew.leader.look()
    assert crew.leader.seen.view is not None
    assert crew.leader.seen.view.finished_ids == frozenset()
    assert crew.document() == after
    crew.leader.fail()
    crew.turns()
    assert crew.settle().generation == after.generation + 1
    assert keys_of(crew, stale.state.membership_id) == []


@pytest.mark.parametrize("what", ["begins", "settles", "reopens"])
def test_acting_twice_on_one_snapshot_fails_and_changes_nothing(what: str) -> None:
    crew = Crew()
    crew.add(3, RendezvousSettings(2, 3, last_call_timeout=0.0))
    leader, *others = crew.members
    if what == "begins":
        leader.part.publish(crew.now)
    else:
        crew.turns(1)
    if what == "reopens":
        crew.settle()
        crew.lose(others[0])
    snapshot = leader.part.poll(crew.now)
    decision, won = leader.part.reconcile_and_write(snapshot)
    assert won
    assert decision.new_membership is not None
    assert (decision.new_membership.phase is JobPhase.ACTIVE) == (what == "settles")
    before = entries(crew)
    again, won = leader.part.reconcile_and_write(snapshot)
    assert not won
    assert again.new_membership is not None
    assert again.new_membership.phase is decision.new_membership.phase
    assert entries(crew) == before


def test_a_leader_whose_lease_has_expired_decides_nothing() -> None:
    crew = crew_of(3)
    old = crew.leader
    asleep(crew, old)
    assert crew.leader is not old
    woken = old.part.read(crew.now)
    before = entries(crew)
    assert woken.view is None
    decision, won = old.part.reconcile_and_write(woken)
    assert (decision.new_membership, won) == (None, False)
    assert decision.reason == f"{crew.leader.name} decides, and this node waits"
    assert not old.part.try_become_leader(woken)
    assert entries(crew) == before


def about_to_settle() -> tuple[Crew, Member, Membership]:
    """A generation that a node has left; the leader's next look begins another."""
    crew = crew_of(4)
    leader = crew.leader
    crew.lose(crew.followers[-1])
    crew.turns()
    leader.look()  # and says that it has stopped its workers
    document = crew.document()
    assert document is not None
    assert document.phase is JobPhase.FORMING
    return crew, leader, document


def test_a_leader_that_dies_at_any_operation_leaves_no_permanent_state() -> None:
    settled_by_it = []
    for steps in range(100):
        crew, leader, before = about_to_settle()
        leader.store.begin()
        leader.store.breaks_after = steps
        try:
            leader.look()
        except StoreConnectionError:
            leader.store.breaks_after = None
        else:
            break
        document = crew.document()
        assert document is not None
        settled_by_it.append(document.generation > before.generation)
        crew.lose(leader)
        after = crew.settle()
        assert after.generation == before.generation + 1 + settled_by_it[-1]
        assert keys_of(crew, before.membership_id) == []
        rolls = [
            e.key for e in entries(crew) if e.key.startswith((KEYS.shard(), KEYS.master_endpoint()))
        ]
        assert [key for key in rolls if after.membership_id not in key] == []
    # It died before the state was written, and after.
    assert settled_by_it == sorted(settled_by_it)
    assert settled_by_it.count(False) >= 5
    assert settled_by_it.count(True) >= 1


def test_keys_do_not_accumulate_over_two_hundred_generations() -> None:
    crew = crew_of(4, attrs.evolve(LIMITS, quorum=True))
    most = 0
    for number in range(200):
        some = crew.members[number % 4]
        if number % 2:
            crew.lose(some)
            crew.settle()
            crew.add(1, attrs.evolve(LIMITS, quorum=True))
        else:
            some.finish()
            some.part.write_reports(some.seen)
            some.fail(killed=True)
        crew.turns()
        document = crew.settle()
        assert len(document.members) == 4
        most = max(most, len(entries(crew)))
    assert document.generation > 200
    # Nodes, state, leader, master endpoint and one shard; and what two nodes said of the last one.
    assert most <= 4 + 4 + 2
