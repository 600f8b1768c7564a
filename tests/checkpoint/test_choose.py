"""Which state all ranks go on from, and who gives it to whom."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import attrs
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.peers import Held, choose, givers, origin, state_of

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


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=6).flatmap(
        lambda nodes: st.tuples(
            st.just(nodes),
            st.sets(st.integers(0, len(nodes) - 1), min_size=1),
            st.sets(st.integers(0, len(nodes) - 1)),
        )
    )
)
def test_all_who_need_a_pack_and_lack_it_are_sent_it_once(job):
    nodes, holders, takers = job
    got = {*holders}
    route = givers(holders, nodes, takers)
    for taker, giver in route.items():
        assert giver in got
        got.add(taker)
        assert origin(route, taker) in holders
    assert route.keys() == takers - holders


def test_a_thousand_nodes_are_served_by_all_holders_alike_and_each_once():
    nodes = [f"n{rank // 4}" for rank in range(4000)]
    route = givers(range(40), nodes, range(4000))
    served = Counter(origin(route, taker) for taker in route)
    assert served == dict.fromkeys(range(0, 40, 4), 4 * 99)
    depth = dict.fromkeys(range(40), 0)
    fan: Counter[int] = Counter()
    entered: Counter[str] = Counter()
    for taker, giver in route.items():
        depth[taker] = depth[giver] + 1
        fan[giver] += 1
        entered[nodes[taker]] += nodes[giver] != nodes[taker]
    assert set(entered.values()) == {1}
    assert max(fan.values()) <= 3
    assert max(depth.values()) <= 10


def test_few_are_served_in_a_chain_and_the_own_node_first():
    route = givers({0, 3}, ["a", "a", "b", "c", "c"], range(5))
    assert [*route.items()] == [(1, 0), (2, 0), (4, 3)]
    route = givers({0}, ["0", "1", "2", "3"], range(4))
    assert [*route.items()] == [(after, before) for before, after in pairwise(range(4))]
