"""Placement of agents on the nodes of a Ray cluster, without Ray."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.integrations.ray.placement import (
    MAX_EARLY_DEATHS,
    JobRequirements,
    PlacedAgent,
    PlacementPlan,
    RayNode,
    plan_placement,
)

RESOURCES = {"CPU": 2.0, "GPU": 1.0}
REQUIREMENTS = JobRequirements(RESOURCES, min_nodes=2, max_nodes=3)


def nodes(*names: str) -> list[RayNode]:
    return [RayNode(name, RESOURCES) for name in names]


def plan_now(
    nodes: list[RayNode], agents: list[PlacedAgent], requirements: JobRequirements = REQUIREMENTS
) -> PlacementPlan:
    return plan_placement(nodes, agents, requirements, seconds_below_min=0.0)


def test_each_node_gets_one_agent_up_to_max_nodes() -> None:
    plan = plan_now(nodes("a", "b", "c", "d"), [])
    assert plan == PlacementPlan("0 agents running (2 to 3 required)", place=("a", "b", "c"))
    plan = plan_now(nodes("a", "b"), [PlacedAgent(1, "a")])
    assert plan == PlacementPlan("1 agent running (2 to 3 required)", place=("b",))


def test_a_node_without_the_resources_gets_no_agent_and_is_counted_in_the_summary() -> None:
    cluster = [RayNode("small", {"CPU": 8.0}), *nodes("a")]
    plan = plan_now(cluster, [PlacedAgent(1, "a", waiting_s=1.0)])
    assert plan == PlacementPlan(
        "0 agents running (2 to 3 required); 1 waiting for resources;"
        " 1 of 2 nodes lack the resources CPU 2, GPU 1"
    )


def test_an_agent_of_a_lost_node_is_removed_and_replaced() -> None:
    agents = [PlacedAgent(1, "a"), PlacedAgent(2, "b"), PlacedAgent(3, "c")]
    plan = plan_now(nodes("a", "b", "d"), agents)
    assert (plan.remove, plan.place) == ((3,), ("d",))


def test_an_agent_that_waits_too_long_is_moved_if_a_node_is_idle() -> None:
    agents = [
        PlacedAgent(1, "a"),
        PlacedAgent(2, "b", waiting_s=11.0),
        PlacedAgent(3, "c", waiting_s=9.0),
    ]
    plan = plan_now(nodes("a", "b", "c", "d"), agents)
    assert (plan.remove, plan.place) == ((2,), ("d",))
    plan = plan_now(nodes("a", "b", "c"), agents)
    assert (plan.remove, plan.place) == ((), ())


def test_nodes_with_failed_placements_or_early_deaths_are_used_last() -> None:
    cluster = [
        RayNode("full", RESOURCES, failed_placements=2),
        RayNode("faulty", RESOURCES, early_deaths=1),
        *nodes("a", "b"),
    ]
    assert plan_now(cluster, []).place == ("a", "b", "full")


def test_a_node_with_repeated_early_deaths_is_excluded() -> None:
    faulty = RayNode("faulty", RESOURCES, early_deaths=MAX_EARLY_DEATHS)
    plan = plan_now([faulty, *nodes("a")], [])
    assert plan.place == ("a",)
    assert "1 of 2 nodes excluded after repeated agent failures" in plan.summary
    plan = plan_now([faulty], [])
    assert plan.is_infeasible
    assert "3 agents in a row died" in plan.summary


def test_a_job_below_min_nodes_for_the_join_timeout_is_infeasible() -> None:
    requirements = attrs.evolve(REQUIREMENTS, join_timeout_s=60.0)
    plan = plan_placement(nodes("a"), [PlacedAgent(1, "a")], requirements, seconds_below_min=60.0)
    summary = "for 60 s, 1 agent running (2 to 3 required)"
    assert plan == PlacementPlan(summary, is_infeasible=True)
    agents = [PlacedAgent(1, "a"), PlacedAgent(2, "b")]
    plan = plan_placement(nodes("a", "b"), agents, REQUIREMENTS, seconds_below_min=1e6)
    assert not plan.is_infeasible


# For each node: whether it is alive, and whether other jobs use its resources.
STEP = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=5, max_size=5)


@given(st.lists(STEP, max_size=12), st.integers(1, 3), st.integers(0, 2))
def test_all_agents_run_on_different_nodes_as_soon_as_the_cluster_allows_it(
    steps: list[list[tuple[bool, bool]]], max_nodes: int, num_small: int
) -> None:
    requirements = JobRequirements({"CPU": 2.0}, 1, max_nodes, join_timeout_s=1e9)
    agents: dict[int, PlacedAgent] = {}
    failed_placements: dict[str, int] = {}
    count = 0
    idle_cluster = [(True, False)] * 5
    for step in [*steps, *[idle_cluster] * 12]:
        alive = {
            str(i): RayNode(
                str(i),
                {"CPU": 1.0 if i < num_small else 2.0},
                failed_placements=failed_placements.get(str(i), 0),
            )
            for i, (is_alive, _) in enumerate(step)
            if is_alive
        }
        plan = plan_now(list(alive.values()), list(agents.values()), requirements)
        assert not plan.is_infeasible
        for number in plan.remove:
            node = agents.pop(number).node
            failed_placements[node] = failed_placements.get(node, 0) + 1
        for node in plan.place:
            count += 1
            agents[count] = PlacedAgent(count, node, waiting_s=0.0)
        used = [agent.node for agent in agents.values()]
        assert len(used) == len(set(used)) <= max_nodes
        assert all(node in alive and int(node) >= num_small for node in used)
        for number, agent in agents.items():
            if agent.waiting_s is not None:
                is_full = step[int(agent.node)][1]
                waiting_s = agent.waiting_s + 6 if is_full else None
                agents[number] = attrs.evolve(agent, waiting_s=waiting_s)
    num_running = sum(agent.waiting_s is None for agent in agents.values())
    assert num_running == min(max_nodes, 5 - num_small)
