"""Which state all ranks go on from, and who gives it to whom."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import attrs
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.choose import Held, Leg, choose, legs, state_of

Inventories = list[list[Held]]


@st.composite
def helds(draw: st.DrawFn) -> Held:
    step = draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["memory", "disk", "disk", "sharded disk", "own"]))
    parts = draw(st.integers(1 if kind == "sharded disk" else 0, 4))
    part = draw(st.integers(0, max(0, parts - 1))) if kind != "sharded disk" else 0
    generation = draw(st.integers(0, 1))
    return Held(step, kind, f"{kind}-{step}-{part}", part, parts, "", generation)


def jobs() -> st.SearchStrategy[Inventories]:
    return st.lists(st.lists(helds(), max_size=6), min_size=1, max_size=6)


@given(jobs())
def test_the_newest_step_is_taken_with_all_who_hold_of_it(inventories):
    plan = choose(inventories)
    every = [(rank, held) for rank, here in enumerate(inventories) for held in here]
    if plan is None:
        assert not every
        return
    assert plan.state.step == max(held.step for _, held in every)
    those = [(rank, held) for rank, held in every if state_of(held) == plan.state]
    assert set(plan.holders) == {part for _, held in those for part in held.has}
    for part, here in plan.holders.items():
        assert set(here) == {rank for rank, held in those if part in held.has}
        for rank, held in here.items():
            assert (rank, held) in those
            mine = {other.kind for at, other in those if at == rank and part in other.has}
            assert held.kind == "memory" or "memory" not in mine


@given(jobs(), st.randoms())
def test_the_plan_does_not_depend_on_the_order_in_which_things_are_told(inventories, random):
    shuffled = [random.sample(inventory, len(inventory)) for inventory in inventories]
    assert choose(shuffled) == choose(inventories)


@given(jobs(), st.data())
def test_what_failed_is_taken_out_and_choosing_anew_comes_to_an_end(inventories, data):
    failed: set[tuple[int, Held]] = set()
    last = None
    while plan := choose(inventories, failed):
        every = {(rank, held) for here in plan.holders.values() for rank, held in here.items()}
        assert not every & failed
        assert last is None or plan.state.step <= last
        last = plan.state.step
        failed.add(data.draw(st.sampled_from(sorted(every, key=repr))))
    assert {(rank, held) for rank, here in enumerate(inventories) for held in here} <= failed


def test_at_an_equal_step_memory_is_before_disk_and_a_later_generation_before_an_earlier():
    disk, memory = Held(4, "disk", "d", generation=2), Held(4, "memory", "m", generation=1)
    assert choose([[disk], [memory]]).kind == "memory"
    later = attrs.evolve(memory, generation=3)
    assert choose([[memory], [memory], [later]]).state.generation == 3


def test_parts_of_two_generations_are_two_states():
    parts = [Held(4, "memory", "m", part, 2, "run", generation=part + 1) for part in range(2)]
    assert set(choose([[parts[0]], [parts[1]]]).holders) == {1}


def deliver(found: tuple[Leg, ...], holders: set[int]) -> set[int]:
    """Who has it in the end; whoever passes on has it before."""
    got = set(holders)
    busy: list[int] = []
    for leg in found:
        assert leg.sender in holders
        has = {leg.sender}
        for receiver, giver in leg.hops:
            assert giver in has
            assert receiver not in got, "sent to one who has it"
            has.add(receiver)
            got.add(receiver)
        busy += has
    assert len(busy) == len(set(busy)), "a rank is on two legs at once"
    return got


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=6).flatmap(
        lambda nodes: st.tuples(st.just(nodes), st.sets(st.integers(0, len(nodes) - 1), min_size=1))
    )
)
def test_all_who_lack_a_pack_are_sent_it_once(job):
    nodes, holders = job
    held = Held(1, "disk", "d")
    found = legs(dict.fromkeys(holders, held), nodes)
    assert deliver(found, holders) == set(range(len(nodes)))


def test_a_thousand_nodes_are_served_by_all_holders_alike_and_each_once():
    held = Held(9, "disk", "d")
    nodes = [f"n{rank // 4}" for rank in range(4000)]
    found = legs(dict.fromkeys(range(40), held), nodes)
    assert {leg.sender for leg in found} == set(range(0, 40, 4))
    assert {len(leg.hops) for leg in found} == {4 * 99}
    depth = {leg.sender: 0 for leg in found}
    fan: Counter[int] = Counter()
    entered: Counter[str] = Counter()
    for leg in found:
        for receiver, giver in leg.hops:
            depth[receiver] = depth[giver] + 1
            fan[giver] += 1
            entered[nodes[receiver]] += nodes[giver] != nodes[receiver]
    assert set(entered.values()) == {1}
    assert max(fan.values()) <= 3
    assert max(depth.values()) <= 10


def test_few_are_served_in_a_chain_and_the_own_node_first():
    held = Held(9, "disk", "d")
    found = legs({0: held, 3: held}, ["a", "a", "b", "c", "c"])
    assert [(leg.sender, leg.hops) for leg in found] == [(0, ((1, 0), (2, 0))), (3, ((4, 3),))]
    [leg] = legs({0: held}, ["0", "1", "2", "3"])
    assert leg.hops == tuple((after, before) for before, after in pairwise(range(4)))
