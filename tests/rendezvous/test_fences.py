"""What is written under a generation that is over is refused, and nothing of it stays behind."""

from __future__ import annotations

import attrs
import pytest
from counted import KEYS, Crew, Member

from elasticlib.errors import StoreConnectionError
from elasticlib.rendezvous.document import Document, Limits, Phase
from elasticlib.rendezvous.node import Reading
from elasticlib.stores.interface import Entry

LIMITS = Limits(1, 4, max_restarts=1000, last_call=0.0)


def crew_of(count: int, limits: Limits = LIMITS) -> Crew:
    """So many nodes that meet at once, of whom none says where torch's store is."""
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


def asleep(crew: Crew, member: Member) -> tuple[Reading, Document]:
    """It stands still until the others have gone on without it; what it last read, and the
    generation that they are in."""
    crew.members.remove(member)
    before = crew.document()
    assert before is not None
    crew.turns(7, seconds=1.0)
    after = crew.settle()
    assert after.generation == before.generation + 1
    return member.seen, after


def test_rank_0_of_a_generation_that_is_over_can_tell_nobody_where_its_store_is() -> None:
    crew = crew_of(3)
    first = crew.members[0]
    stale, after = asleep(crew, first)
    assert stale.state is not None
    assert (stale.state.generation, stale.seat and stale.seat.rank, stale.master_endpoint) == (
        1,
        0,
        None,
    )
    before = entries(crew)
    first.part.report(stale, endpoint="10.0.0.1:1")
    woken = first.part.read(crew.now)
    first.part.report(woken, endpoint="10.0.0.1:1")
    assert entries(crew) == before
    assert keys_of(crew, stale.state.membership) == []
    assert woken.state == after.state
    assert woken.master_endpoint is None


def test_rank_0_of_the_generation_that_stands_tells_all_and_once() -> None:
    crew = crew_of(2)
    for endpoint in ("10.0.0.1:1", "10.0.0.1:2"):
        for member in crew.members:
            member.look()
        first = next(m for m in crew.members if m.seen.seat and m.seen.seat.rank == 0)
        first.part.report(first.seen, endpoint=endpoint)
    for member in crew.members:
        member.look()
        assert member.seen.master_endpoint == "10.0.0.1:1"


def test_who_is_done_with_a_generation_that_is_over_has_done_nothing_for_the_next() -> None:
    crew = crew_of(2)
    last = crew.followers[0]
    stale, after = asleep(crew, last)
    assert stale.state is not None
    last.finish()
    woken = last.part.read(crew.now)
    before = entries(crew)
    last.part.report(woken)
    assert entries(crew) == before
    # It had read the state before that generation was over, and writes after.
    last.part.report(stale)
    assert entries(crew) != before
    crew.leader.look()
    assert crew.leader.seen.view is not None
    assert crew.leader.seen.view.finished == frozenset()
    assert crew.document() == after
    crew.leader.fail()
    crew.turns()
    assert crew.settle().generation == after.generation + 1
    assert keys_of(crew, stale.state.membership) == []


@pytest.mark.parametrize("what", ["begins", "settles", "reopens"])
def test_acting_twice_upon_one_snapshot_loses_and_leaves_the_store_as_it_was(what: str) -> None:
    crew = Crew()
    crew.add(3, Limits(2, 3, last_call=0.0))
    leader, *others = crew.members
    if what == "begins":
        leader.part.speak(crew.now)
    else:
        crew.turns(1)
    if what == "reopens":
        crew.settle()
        crew.lose(others[0])
    snapshot = leader.part.look(crew.now)
    decision, won = leader.part.act(snapshot)
    assert won
    assert decision.write is not None
    assert (decision.write.phase is Phase.SETTLED) == (what == "settles")
    before = entries(crew)
    again, won = leader.part.act(snapshot)
    assert not won
    assert again.write is not None
    assert again.write.phase is decision.write.phase
    assert entries(crew) == before


def test_a_leader_whose_lease_has_ended_decides_nothing() -> None:
    crew = crew_of(3)
    old = crew.leader
    asleep(crew, old)
    assert crew.leader is not old
    woken = old.part.read(crew.now)
    before = entries(crew)
    assert woken.view is None
    decision, won = old.part.act(woken)
    assert (decision.write, won) == (None, False)
    assert decision.reason == f"{crew.leader.name} decides, and this node waits"
    assert not old.part.lead(woken)
    assert entries(crew) == before


def about_to_settle() -> tuple[Crew, Member, Document]:
    """A generation that a node has left; the leader's next look begins another."""
    crew = crew_of(4)
    leader = crew.leader
    crew.lose(crew.followers[-1])
    crew.turns()
    leader.look()  # and says that it has stopped its workers
    document = crew.document()
    assert document is not None
    assert document.phase is Phase.OPEN
    return crew, leader, document


def test_a_leader_that_dies_after_any_step_of_settling_leaves_nothing_that_lasts() -> None:
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
        assert keys_of(crew, before.membership) == []
        rolls = [
            e.key for e in entries(crew) if e.key.startswith((KEYS.shard(), KEYS.master_endpoint()))
        ]
        assert [key for key in rolls if after.membership not in key] == []
    # It died before the state was written, and after.
    assert settled_by_it == sorted(settled_by_it)
    assert settled_by_it.count(False) >= 5
    assert settled_by_it.count(True) >= 1


def test_keys_do_not_pile_up_over_two_hundred_generations() -> None:
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
            some.part.report(some.seen)
            some.fail(killed=True)
        crew.turns()
        document = crew.settle()
        assert len(document.members) == 4
        most = max(most, len(entries(crew)))
    assert document.generation > 200
    # Nodes, state, leader, master endpoint and one shard; and what two nodes said of the last one.
    assert most <= 4 + 4 + 2
