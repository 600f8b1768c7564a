"""Where agents go on a Ray cluster, decided without one."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.integrations.ray.driver import DEATHS, Needs, Placed, Plan, RayNode, decide

ROOM = {"CPU": 2.0, "GPU": 1.0}
NEEDS = Needs({"CPU": 2.0, "GPU": 1.0}, min_nodes=2, max_nodes=3)


def nodes(*names: str) -> list[RayNode]:
    return [RayNode(name, ROOM) for name in names]


def test_each_node_that_fits_gets_one_agent_and_no_more_than_max_do() -> None:
    plan = decide(nodes("a", "b", "c", "d"), [], NEEDS, short=0)
    assert plan == Plan("0 of 2 to 3 agents run", place=("a", "b", "c"))
    few = decide(nodes("a", "b"), [Placed(1, "a")], NEEDS, short=0)
    assert few == Plan("1 of 2 to 3 agents run", place=("b",))


def test_a_node_that_is_too_small_is_named_and_gets_none() -> None:
    there = [RayNode("small", {"CPU": 8.0}), *nodes("a")]
    plan = decide(there, [Placed(1, "a", waiting=1.0)], NEEDS, short=0)
    assert plan == Plan(
        "0 of 2 to 3 agents run; 1 waits for room; 1 of 2 nodes are too small for CPU 2, GPU 1"
    )


def test_an_agent_of_a_node_that_is_gone_makes_place_for_another() -> None:
    agents = [Placed(1, "a"), Placed(2, "b"), Placed(3, "c")]
    plan = decide(nodes("a", "b", "d"), agents, NEEDS, short=0)
    assert (plan.withdraw, plan.place) == ((3,), ("d",))


def test_who_waits_too_long_for_room_is_moved_to_an_idle_node_and_else_waits_on() -> None:
    agents = [Placed(1, "a"), Placed(2, "b", waiting=11.0), Placed(3, "c", waiting=9.0)]
    moved = decide(nodes("a", "b", "c", "d"), agents, NEEDS, short=0)
    assert (moved.withdraw, moved.place) == ((2,), ("d",))
    stays = decide(nodes("a", "b", "c"), agents, NEEDS, short=0)
    assert (stays.withdraw, stays.place) == ((), ())


def test_nodes_that_had_no_room_are_tried_last() -> None:
    there = [RayNode("busy", ROOM, vain=2), RayNode("deadly", ROOM, deaths=1), *nodes("a", "b")]
    plan = decide(there, [], NEEDS, short=0)
    assert plan.place == ("a", "b", "busy")


def test_a_node_on_which_agent_after_agent_dies_is_left_alone() -> None:
    deadly = RayNode("deadly", ROOM, deaths=DEATHS)
    plan = decide([deadly, *nodes("a")], [], NEEDS, short=0)
    assert plan.place == ("a",)
    assert "1 of 2 nodes are not tried again" in plan.reason
    over = decide([deadly], [], NEEDS, short=0)
    assert over.gives_up
    assert "3 agents in a row died" in over.reason


def test_too_few_for_too_long_is_given_up_and_says_what_there_was() -> None:
    plan = decide(nodes("a"), [Placed(1, "a")], attrs.evolve(NEEDS, join=60.0), short=60.0)
    assert plan == Plan("for 60 s, 1 of 2 to 3 agents run", gives_up=True)
    enough = decide(nodes("a", "b"), [Placed(1, "a"), Placed(2, "b")], NEEDS, short=1e6)
    assert not enough.gives_up


# Of each node: how much it has, whether it is there, whether it is in use by others.
STEP = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=5, max_size=5)


@given(st.lists(STEP, max_size=12), st.integers(1, 3), st.integers(0, 2))
def test_whatever_the_cluster_does_one_agent_a_node_and_all_that_can_run_do_in_the_end(
    steps: list[list[tuple[bool, bool]]], most: int, small: int
) -> None:
    needs = Needs({"CPU": 2.0}, 1, most, join=1e9)
    agents: dict[int, Placed] = {}
    vain: dict[str, int] = {}
    count = 0
    for step in [*steps, *[[(True, False)] * 5] * 12]:
        there = {
            str(i): RayNode(str(i), {"CPU": 1.0 if i < small else 2.0}, vain=vain.get(str(i), 0))
            for i, (lives, _) in enumerate(step)
            if lives
        }
        plan = decide(list(there.values()), list(agents.values()), needs, short=1.0)
        assert not plan.gives_up
        for number in plan.withdraw:
            node = agents.pop(number).node
            vain[node] = vain.get(node, 0) + 1
        for node in plan.place:
            count += 1
            agents[count] = Placed(count, node, waiting=0.0)
        held = [agent.node for agent in agents.values()]
        assert len(held) == len(set(held)) <= most
        assert all(node in there and int(node) >= small for node in held)
        for number, agent in agents.items():
            if agent.waiting is not None:
                busy = step[int(agent.node)][1]
                agents[number] = attrs.evolve(agent, waiting=agent.waiting + 6 if busy else None)
    assert sum(agent.waiting is None for agent in agents.values()) == min(most, 5 - small)
