"""Which state all ranks go on from, and who gives it to whom, beside a dumb second choice."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import attrs
from hypothesis import example, given
from hypothesis import strategies as st

from elasticlib.checkpoint.choose import Choice, choose, state_of
from elasticlib.checkpoint.held import Held

Inventories = list[list[Held]]


@st.composite
def helds(draw: st.DrawFn) -> Held:
    step = draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["memory", "disk", "disk", "sharded disk", "own"]))
    parts = 1 if kind == "sharded disk" else draw(st.integers(1, 4))
    part = draw(st.integers(0, parts - 1))
    generation = draw(st.integers(0, 1))
    return Held(step, kind, f"{kind}-{step}-{part}", part, parts, "", generation)


def jobs(least: int = 1) -> st.SearchStrategy[tuple[Inventories, list[str]]]:
    inventories = st.lists(st.lists(helds(), max_size=6), min_size=least, max_size=6)
    return inventories.flatmap(
        lambda found: st.tuples(
            st.just(found),
            st.lists(st.sampled_from("abc"), min_size=len(found), max_size=len(found)),
        )
    )


@st.composite
def scattered(draw: st.DrawFn) -> tuple[Inventories, list[str]]:
    """All parts of one state are there, each with one or two ranks, whoever they are."""
    world = draw(st.integers(2, 6))
    ranks = st.integers(0, world - 1)
    inventories: Inventories = [[] for _ in range(world)]
    for part in range(world):
        for rank in draw(st.sets(ranks, min_size=1, max_size=2)):
            inventories[rank].append(Held(2, "memory", str(part), part, world))
    nodes = draw(st.lists(st.sampled_from("abc"), min_size=world, max_size=world))
    return inventories, nodes


def newest_whole_step(inventories: Inventories) -> int | None:
    """By looking for each step at each group of equals, in no clever way."""
    world = len(inventories)
    every = [(rank, held) for rank, here in enumerate(inventories) for held in here]
    for step in range(3, -1, -1):
        for wanted in {state_of(held) for _, held in every if held.step == step}:
            those = [(rank, held) for rank, held in every if state_of(held) == wanted]
            if wanted.sharded_disk:
                whole = {rank for rank, _ in those} == set(range(world))
            elif wanted.parts == 1:
                whole = True
            else:
                whole = wanted.parts == world == len({held.part for _, held in those})
            if whole:
                return step
    return None


def deliver(choice: Choice, inventories: Inventories) -> list[Held]:
    """What each rank has in the end, after the rounds; whoever passes on has it before."""
    assert choice.plan
    got: dict[int, Held] = {}
    for rank, own in enumerate(choice.plan.own):
        if own:
            assert own in inventories[rank]
            got[rank] = own
    for legs in choice.plan.rounds:
        busy: list[int] = []
        for leg in legs:
            assert leg.held in inventories[leg.sender]
            has = {leg.sender}
            for receiver, giver in leg.hops:
                assert giver in has
                assert receiver not in got, "sent to one who has it"
                has.add(receiver)
                got[receiver] = leg.held
            busy += [leg.sender, *(receiver for receiver, _ in leg.hops)]
        assert len(busy) == len(set(busy)), "a rank is on two legs at once"
    assert set(got) == set(range(len(inventories)))
    return [got[rank] for rank in sorted(got)]


@given(jobs() | scattered())
def test_all_end_with_their_part_of_the_newest_state_that_is_whole(job):
    inventories, nodes = job
    choice = choose(inventories, nodes)
    step = newest_whole_step(inventories)
    if step is None:
        assert choice.plan is None
        return
    got = deliver(choice, inventories)
    assert choice.plan.state.step == step
    assert {state_of(held) for held in got} == {choice.plan.state}
    parts = choice.plan.state.parts
    assert [held.part for held in got] == [rank if parts > 1 else 0 for rank in range(len(got))]


@given(jobs())
def test_who_holds_it_reads_its_own_and_from_memory_if_it_can(job):
    inventories, nodes = job
    plan = choose(inventories, nodes).plan
    for rank, inventory in enumerate(inventories if plan else []):
        part = rank if plan.state.parts > 1 else 0
        mine = [held for held in inventory if state_of(held) == plan.state and held.part == part]
        assert (plan.own[rank] is not None) == bool(mine)
        if any(held.kind == "memory" for held in mine):
            assert plan.own[rank].kind == "memory"
        assert plan.origin(rank)[1] == rank or not mine


@given(jobs(), st.randoms())
def test_the_plan_does_not_depend_on_the_order_in_which_things_are_told(job, random):
    inventories, nodes = job
    shuffled = [random.sample(inventory, len(inventory)) for inventory in inventories]
    assert choose(shuffled, nodes) == choose(inventories, nodes)


@given(jobs() | scattered(), st.data())
def test_what_failed_is_taken_out_and_choosing_anew_comes_to_an_end(job, data):
    inventories, nodes = job
    failed: set[tuple[int, Held]] = set()
    last = None
    while plan := choose(inventories, nodes, failed).plan:
        got = deliver(choose(inventories, nodes, failed), inventories)
        assert not {(plan.origin(rank)[1], held) for rank, held in enumerate(got)} & failed
        assert last is None or plan.state.step <= last
        last = plan.state.step
        readers = [(rank, held) for rank, held in enumerate(plan.own) if held]
        readers += [(leg.sender, leg.held) for legs in plan.rounds for leg in legs]
        failed.add(data.draw(st.sampled_from(readers)))
    assert (
        newest_whole_step(
            [[h for h in here if (rank, h) not in failed] for rank, here in enumerate(inventories)]
        )
        is None
    )


@given(jobs())
@example(([[Held(1, "disk", "a", 0, 2)], []], ["a", "a"]))
def test_each_newer_step_that_is_not_taken_has_its_reason(job):
    inventories, nodes = job
    choice = choose(inventories, nodes)
    taken = choice.plan.state.step if choice.plan else -1
    newer = {held.step for here in inventories for held in here if held.step > taken}
    assert newer <= {int(why.split()[1]) for why in choice.passed_over}


def test_at_an_equal_step_memory_is_before_disk_and_a_later_generation_before_an_earlier():
    disk, memory = Held(4, "disk", "d", generation=2), Held(4, "memory", "m", generation=1)
    assert choose([[disk], [memory]]).plan.kind == "memory"
    later = attrs.evolve(memory, generation=3)
    assert choose([[memory], [memory], [later]]).plan.state.generation == 3


def test_parts_of_two_generations_do_not_make_a_whole():
    parts = [Held(4, "memory", "m", part, 2, "run", generation=part + 1) for part in range(2)]
    choice = choose([[parts[0]], [parts[1]]])
    assert choice.plan is None
    assert choice.passed_over == (
        "step 4 (memory) is not whole: nobody holds part 0 of 2",
        "step 4 (memory) is not whole: nobody holds part 1 of 2",
    )


def test_a_thousand_nodes_are_served_by_all_holders_alike_and_each_once():
    held = Held(9, "disk", "d")
    nodes = [f"n{rank // 4}" for rank in range(4000)]
    inventories = [[held] if rank < 40 else [] for rank in range(4000)]
    [legs] = choose(inventories, nodes).plan.rounds
    assert {leg.sender for leg in legs} == set(range(0, 40, 4))
    assert {len(leg.hops) for leg in legs} == {4 * 99}
    depth = {leg.sender: 0 for leg in legs}
    fan: Counter[int] = Counter()
    entered: Counter[str] = Counter()
    for leg in legs:
        for receiver, giver in leg.hops:
            depth[receiver] = depth[giver] + 1
            fan[giver] += 1
            entered[nodes[receiver]] += nodes[giver] != nodes[receiver]
    assert set(entered.values()) == {1}
    assert max(fan.values()) <= 3
    assert max(depth.values()) <= 10


def test_few_are_served_in_a_chain_and_the_own_node_first():
    held = Held(9, "disk", "d")
    plan = choose([[held], [], [], [held], []], ["a", "a", "b", "c", "c"]).plan
    [legs] = plan.rounds
    assert [(leg.sender, leg.hops) for leg in legs] == [(0, ((1, 0), (2, 0))), (3, ((4, 3),))]
    [[leg]] = choose([[held], [], [], []]).plan.rounds
    assert leg.hops == tuple((after, before) for before, after in pairwise(range(4)))


def test_parts_that_lie_crosswise_are_exchanged_in_rounds_in_which_nobody_does_both():
    parts = [Held(9, "memory", f"p{part}", part, 2) for part in range(2)]
    rounds = choose([[parts[1]], [parts[0]]]).plan.rounds
    assert [[(leg.sender, leg.hops) for leg in legs] for legs in rounds] == [
        [(1, ((0, 1),))],
        [(0, ((1, 0),))],
    ]


def test_parts_of_a_lost_node_come_from_several_buddies_in_as_few_rounds_as_can_be():
    parts = [Held(9, "memory", f"p{part}", part, 4) for part in range(4)]
    inventories = [[parts[0], *parts[2:]], [parts[1], *parts[2:]], [], []]
    [legs] = choose(inventories, ["a", "a", "b", "b"]).plan.rounds
    assert [(leg.sender, leg.held.part, leg.hops) for leg in legs] == [
        (0, 2, ((2, 0),)),
        (1, 3, ((3, 1),)),
    ]
