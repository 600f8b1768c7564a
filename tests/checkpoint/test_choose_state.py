"""The choice of the state that all ranks restore."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.refs import DISK, MEMORY, REPLICA, Branch, StateRef
from elasticlib.checkpoint.state_search import choose_state, copy_key, part_numbers

RefsByRank = list[list[StateRef]]

LINE = (Branch("a", 2), Branch("b"))


@st.composite
def state_refs(draw: st.DrawFn) -> StateRef:
    tier = draw(st.sampled_from([MEMORY, REPLICA, DISK]))
    parts = draw(st.integers(0, 4))
    step, branch = draw(st.integers(0, 3)), draw(st.sampled_from("abc"))
    part = draw(st.integers(0, parts - 1)) if parts and tier != DISK else None
    place = f"{tier}-{branch}-{step}-{part}-{parts}"
    return StateRef(branch, step, parts=parts, part=part, tier=tier, place=place)


def jobs() -> st.SearchStrategy[RefsByRank]:
    return st.lists(st.lists(state_refs(), max_size=6), min_size=1, max_size=6)


def order(ref: StateRef) -> tuple[int, int] | None:
    """Return the order of a state by a list that a person can check."""
    states = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2), ("b", 3)]
    return states.index((ref.branch, ref.step)) if (ref.branch, ref.step) in states else None


@given(jobs())
def test_plan_has_the_newest_state_of_the_line_and_all_of_its_holders(refs_by_rank):
    plan = choose_state(refs_by_rank, LINE)
    every = [(rank, ref) for rank, refs in enumerate(refs_by_rank) for ref in refs]
    if plan is None:
        assert all(order(ref) is None for _, ref in every)
        return
    assert order(plan.ref) == max(at for _, ref in every if (at := order(ref)) is not None)
    copies = [(rank, ref) for rank, ref in every if copy_key(ref) == copy_key(plan.ref)]
    assert set(plan.holders) == {part for _, ref in copies for part in part_numbers(ref)}
    for part, by_rank in plan.holders.items():
        assert set(by_rank) == {rank for rank, ref in copies if part in part_numbers(ref)}
        for rank, ref in by_rank.items():
            assert (rank, ref) in copies
            tiers = {r.tier for other, r in copies if other == rank and part in part_numbers(r)}
            assert ref.tier != DISK or tiers == {DISK}


@given(jobs(), st.randoms())
def test_plan_does_not_depend_on_the_order_of_lists(refs_by_rank, random):
    shuffled = [random.sample(refs, len(refs)) for refs in refs_by_rank]
    assert choose_state(shuffled, LINE) == choose_state(refs_by_rank, LINE)


@given(jobs(), st.data())
def test_removed_copies_are_not_chosen_and_the_search_ends(refs_by_rank, data):
    left = [list(dict.fromkeys(refs)) for refs in refs_by_rank]
    last = None
    while plan := choose_state(left, LINE):
        chosen = {(rank, ref) for ranks in plan.holders.values() for rank, ref in ranks.items()}
        assert last is None or order(plan.ref) <= last
        last = order(plan.ref)
        rank, ref = data.draw(st.sampled_from(sorted(chosen, key=repr)))
        left[rank].remove(ref)
    assert all(order(ref) is None for refs in left for ref in refs)


def test_memory_is_preferred_to_disk_and_the_later_of_two_saves_counts():
    disk = StateRef("b", 4, place="d", number=1)
    memory = attrs.evolve(disk, tier=MEMORY, place="m")
    assert choose_state([[disk], [memory]], LINE).ref.tier == MEMORY
    sharded = attrs.evolve(disk, parts=1)
    later = attrs.evolve(sharded, place="e", number=2)
    assert choose_state([[sharded, later]], LINE).ref == later


def test_parts_of_two_branches_are_two_states():
    line = (Branch("a", 4), Branch("b"))
    parts = [
        StateRef(branch, 4, parts=2, part=part, tier=MEMORY, place="m")
        for part, branch in enumerate("ab")
    ]
    assert set(choose_state([[parts[0]], [parts[1]]], line).holders) == {1}
