"""Where the agents of a job go on a Ray cluster: one a node, between as few and as many as it may.

`decide` is told what there is and returns what to do, with the sentence that says why. A node on
which agent after agent dies is left alone, and one that has no room loses its turn to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

DEATHS = 3
"""So many agents in a row that died young, and a node is not tried again."""


@attrs.frozen
class RayNode:
    """A living node of the cluster.

    room: all the resources that it has, whether in use or not. deaths: how many agents in a row
    died there soon after they began. vain: how many waited there for room that never came.
    """

    id: str
    room: Mapping[str, float]
    deaths: int = 0
    vain: int = 0


@attrs.frozen
class Placed:
    """An agent that has been asked for; waiting: seconds since, or None once it runs."""

    number: int
    node: str
    waiting: float | None = None


@attrs.frozen
class Needs:
    """What the job asks of the cluster: demand is what each agent takes of its node.

    patience: seconds that an agent may wait for room while another node stands idle. join: seconds
    for which there may be fewer than min_nodes agents.
    """

    demand: Mapping[str, float]
    min_nodes: int
    max_nodes: int
    patience: float = 10.0
    join: float = 600.0


@attrs.frozen
class Plan:
    """What is to be done: agents (by number) to take back, then nodes to place one on each.

    gives_up: the job cannot be run on this cluster; the reason says why.
    """

    reason: str
    withdraw: tuple[int, ...] = ()
    place: tuple[str, ...] = ()
    gives_up: bool = False


def decide(nodes: Sequence[RayNode], agents: Sequence[Placed], needs: Needs, short: float) -> Plan:
    """The next step, from what there is.

    short: seconds for which fewer than min_nodes agents have run.
    """
    held = {agent.node for agent in agents}
    living = {node.id for node in nodes}
    free = [node for node in nodes if node.id not in held and _fits(node, needs.demand)]
    usable = sorted((n for n in free if n.deaths < DEATHS), key=lambda n: (n.deaths, n.vain))
    running = sum(agent.waiting is None for agent in agents)
    reason = _described(nodes, agents, needs)
    if running < needs.min_nodes and short >= needs.join:
        return Plan(f"for {needs.join:g} s, {reason}", gives_up=True)
    if not agents and free and not usable:
        return Plan(f"{DEATHS} agents in a row died on each node; {reason}", gives_up=True)
    # An agent on a node that is gone will not come back, whatever Ray knows of it yet.
    gone = tuple(agent.number for agent in agents if agent.node not in living)
    wanted = needs.max_nodes - len(agents) + len(gone)
    place = usable[: max(wanted, 0)]
    moved = _moved(agents, usable[len(place) :], needs, gone)
    spare = usable[len(place) : len(place) + len(moved)]
    return Plan(reason, (*gone, *moved), tuple(node.id for node in (*place, *spare)))


def _moved(
    agents: Sequence[Placed], idle: Sequence[RayNode], needs: Needs, gone: tuple[int, ...]
) -> tuple[int, ...]:
    """Agents that have waited for too long, as many as there are idle nodes for them."""
    late = [
        agent
        for agent in agents
        if agent.waiting is not None
        and agent.waiting >= needs.patience
        and agent.number not in gone
    ]
    late.sort(key=lambda agent: -(agent.waiting or 0.0))
    return tuple(agent.number for agent in late[: len(idle)])


def _fits(node: RayNode, demand: Mapping[str, float]) -> bool:
    return all(node.room.get(name, 0.0) >= amount for name, amount in demand.items() if amount)


def _described(nodes: Sequence[RayNode], agents: Sequence[Placed], needs: Needs) -> str:
    running = sum(agent.waiting is None for agent in agents)
    waiting = len(agents) - running
    small = sum(not _fits(node, needs.demand) for node in nodes)
    shunned = sum(node.deaths >= DEATHS for node in nodes)
    parts = [f"{running} of {needs.min_nodes} to {needs.max_nodes} agents run"]
    if waiting:
        parts.append(f"{waiting} {'wait' if waiting > 1 else 'waits'} for room")
    if small:
        asked = ", ".join(f"{name} {amount:g}" for name, amount in needs.demand.items() if amount)
        parts.append(f"{small} of {len(nodes)} nodes are too small for {asked}")
    if shunned:
        parts.append(f"{shunned} of {len(nodes)} nodes are not tried again")
    return "; ".join(parts)
