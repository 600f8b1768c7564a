"""The choice of the state that all ranks restore."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.restore import StoredState, choose_state, state_key

StatesByRank = list[list[StoredState]]


@st.composite
def stored_states(draw: st.DrawFn) -> StoredState:
    step = draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["memory", "disk", "disk", "sharded disk"]))
    num_parts = draw(st.integers(1 if kind == "sharded disk" else 0, 4))
    part = draw(st.integers(0, max(0, num_parts - 1))) if kind != "sharded disk" else 0
    generation = draw(st.integers(0, 1))
    return StoredState(step, kind, f"{kind}-{step}-{part}", part, num_parts, "", generation)


def jobs() -> st.SearchStrategy[StatesByRank]:
    return st.lists(st.lists(stored_states(), max_size=6), min_size=1, max_size=6)


@given(jobs())
def test_plan_has_newest_step_and_all_of_its_holders(states_by_rank):
    plan = choose_state(states_by_rank)
    every = [(rank, stored) for rank, states in enumerate(states_by_rank) for stored in states]
    if plan is None:
        assert not every
        return
    assert plan.key.step == max(stored.step for _, stored in every)
    copies = [(rank, stored) for rank, stored in every if state_key(stored) == plan.key]
    assert set(plan.holders) == {part for _, stored in copies for part in stored.part_numbers}
    for part, by_rank in plan.holders.items():
        assert set(by_rank) == {rank for rank, stored in copies if part in stored.part_numbers}
        for rank, stored in by_rank.items():
            assert (rank, stored) in copies
            kinds = {h.kind for r, h in copies if r == rank and part in h.part_numbers}
            assert stored.kind == "memory" or "memory" not in kinds


@given(jobs(), st.randoms())
def test_plan_does_not_depend_on_the_order_of_lists(states_by_rank, random):
    shuffled = [random.sample(states, len(states)) for states in states_by_rank]
    assert choose_state(shuffled) == choose_state(states_by_rank)


@given(jobs(), st.data())
def test_excluded_copies_are_not_chosen_and_the_search_ends(states_by_rank, data):
    excluded: set[tuple[int, StoredState]] = set()
    last_step = None
    while plan := choose_state(states_by_rank, excluded):
        chosen = {
            (rank, stored) for ranks in plan.holders.values() for rank, stored in ranks.items()
        }
        assert not chosen & excluded
        assert last_step is None or plan.key.step <= last_step
        last_step = plan.key.step
        excluded.add(data.draw(st.sampled_from(sorted(chosen, key=repr))))
    assert {(rank, h) for rank, states in enumerate(states_by_rank) for h in states} <= excluded


def test_of_equal_steps_memory_is_preferred_to_disk_and_then_the_later_generation():
    disk = StoredState(4, "disk", "d", generation=2)
    memory = StoredState(4, "memory", "m", generation=1)
    assert choose_state([[disk], [memory]]).kind == "memory"
    later = attrs.evolve(memory, generation=3)
    assert choose_state([[memory], [memory], [later]]).key.generation == 3


def test_parts_of_two_generations_are_two_states():
    parts = [
        StoredState(4, "memory", "m", part, 2, "run", generation=part + 1) for part in range(2)
    ]
    assert set(choose_state([[parts[0]], [parts[1]]]).holders) == {1}
