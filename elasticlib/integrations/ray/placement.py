"""Placement of agents on the nodes of a Ray cluster, as a pure function of what the driver sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

MAX_EARLY_DEATHS = 3  # a node on which so many agents in a row died early is not used again


@attrs.frozen
class RayNode:
    """A node of the cluster that is alive."""

    id: str
    resources: Mapping[str, float]  # all resources of the node, in use or not
    early_deaths: int = 0  # agents in a row that died there soon after their start
    failed_placements: int = 0  # agents that waited there for resources and were moved

    def has_resources(self, demand: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0.0) >= amount for name, amount in demand.items())


@attrs.frozen
class PlacedAgent:
    """An agent for which the driver has created an actor."""

    number: int
    node: str
    waiting_s: float | None = None  # seconds for which it waits for resources; None if it runs


@attrs.frozen
class JobRequirements:
    """Resources and nodes that a job needs."""

    demand: Mapping[str, float]  # resources of each agent
    min_nodes: int
    max_nodes: int
    placement_timeout_s: float = 10.0  # after this time, a waiting agent is moved to an idle node
    join_timeout_s: float = 600.0  # the job fails after so long with fewer than min_nodes agents


@attrs.frozen
class PlacementPlan:
    """The next actions of the driver: remove agents, then place one agent on each listed node."""

    summary: str  # the state of the job, for the log
    remove: tuple[int, ...] = ()  # numbers of agents
    place: tuple[str, ...] = ()  # ids of nodes
    is_infeasible: bool = False  # the job cannot run on this cluster, and fails


def plan_placement(
    nodes: Sequence[RayNode],
    agents: Sequence[PlacedAgent],
    requirements: JobRequirements,
    seconds_below_min: float,
) -> PlacementPlan:
    """Return the next actions of the driver.

    Each node gets at most one agent. Nodes with early deaths or failed placements are used last.

    Args:
        nodes: The nodes that are alive.
        agents: All agents, running or waiting for resources.
        requirements: What the job needs.
        seconds_below_min: Time for which fewer than `min_nodes` agents have been running.
    """
    demand = requirements.demand
    waiting = [agent for agent in agents if agent.waiting_s is not None]
    num_running = len(agents) - len(waiting)
    summary = _summarize(nodes, num_running, len(waiting), requirements)
    if num_running < requirements.min_nodes and seconds_below_min >= requirements.join_timeout_s:
        return PlacementPlan(
            f"for {requirements.join_timeout_s:g} s, {summary}", is_infeasible=True
        )
    used = {agent.node for agent in agents}
    free = [node for node in nodes if node.id not in used and node.has_resources(demand)]
    usable = [node for node in free if node.early_deaths < MAX_EARLY_DEATHS]
    usable.sort(key=lambda node: (node.early_deaths, node.failed_placements))
    if not agents and free and not usable:
        return PlacementPlan(
            f"{MAX_EARLY_DEATHS} agents in a row died on each node; {summary}", is_infeasible=True
        )
    # Remove agents of lost nodes at once, even if Ray still tries to start or restart them.
    alive = {node.id for node in nodes}
    lost = [agent.number for agent in agents if agent.node not in alive]
    num_missing = max(0, requirements.max_nodes - len(agents) + len(lost))
    # Move agents that have waited too long, but only to nodes that no other agent needs.
    waiting.sort(key=lambda agent: -(agent.waiting_s or 0.0))
    late = [
        agent.number
        for agent in waiting
        if (agent.waiting_s or 0.0) >= requirements.placement_timeout_s and agent.node in alive
    ]
    moved = late[: len(usable[num_missing:])]
    place = usable[: num_missing + len(moved)]
    return PlacementPlan(summary, (*lost, *moved), tuple(node.id for node in place))


def _summarize(
    nodes: Sequence[RayNode], num_running: int, num_waiting: int, requirements: JobRequirements
) -> str:
    too_small = sum(not node.has_resources(requirements.demand) for node in nodes)
    excluded = sum(node.early_deaths >= MAX_EARLY_DEATHS for node in nodes)
    agents = "agent" if num_running == 1 else "agents"
    parts = [
        f"{num_running} {agents} running"
        f" ({requirements.min_nodes} to {requirements.max_nodes} required)"
    ]
    if num_waiting:
        parts.append(f"{num_waiting} waiting for resources")
    if too_small:
        demand = ", ".join(f"{name} {amount:g}" for name, amount in requirements.demand.items())
        parts.append(f"{too_small} of {len(nodes)} nodes lack the resources {demand}")
    if excluded:
        parts.append(f"{excluded} of {len(nodes)} nodes excluded after repeated agent failures")
    return "; ".join(parts)
