"""Which member stands where: the order of a generation, and what each node need know of it.

A node learns its own seat from one shard of the generation's members, so that no node but the one
that decides ever reads the names of all the others.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

import attrs

from .membership import Membership, Node

NODES_PER_SHARD = 64
"""Members on one shard, on average."""


@attrs.frozen
class RankAssignment:
    """One node's place in a settled generation.

    rank: among its `nodes`. slots: workers of this node. first_rank: global rank of the first of
    them, of world_size workers. first_role_rank, role_world_size: the same among the workers of
    all nodes with this one's role.
    """

    group_rank: int
    num_nodes: int
    local_world_size: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int


def assign_ranks(members: Iterable[Node]) -> tuple[RankAssignment, ...]:
    """Global ranks node by node in the members' order, and role ranks likewise."""
    members = tuple(members)
    world = sum(node.slots for node in members)
    of_role: dict[str, int] = defaultdict(int)
    for node in members:
        of_role[node.role] += node.slots
    seats = []
    first = 0
    first_of_role: dict[str, int] = defaultdict(int)
    for rank, node in enumerate(members):
        role = node.role
        seats.append(
            RankAssignment(
                rank, len(members), node.slots, first, world, first_of_role[role], of_role[role]
            )
        )
        first += node.slots
        first_of_role[role] += node.slots
    return tuple(seats)


AssignedNode = tuple[Node, RankAssignment]


def shard_of(node_id: str, nodes: int) -> int:
    """On which shard this one stands, in a generation of `nodes` members."""
    return zlib.crc32(node_id.encode()) % num_shards(nodes)


def num_shards(nodes: int) -> int:
    return -(-nodes // NODES_PER_SHARD) or 1


def shard_members(document: Membership) -> Mapping[int, tuple[AssignedNode, ...]]:
    """The members of the document's generation, cut up; every shard is there, if only empty."""
    count = num_shards(document.num_nodes)
    shards: dict[int, list[AssignedNode]] = {number: [] for number in range(count)}
    for row in zip(document.members, assign_ranks(document.members), strict=True):
        shards[shard_of(row[0].id, document.num_nodes)].append(row)
    return {number: tuple(rows) for number, rows in shards.items()}


def natural_sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts node2 before node10."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p), p) if p.isdecimal() else (1, 0, p) for p in parts if p)


def order_members(document: Membership, candidates: Iterable[Node]) -> tuple[Node, ...]:
    """Survivors in their order, then newcomers by hint and natural name; max_nodes of them.

    With fixed ranks each node stands at the rank it asked for, and of two that ask for the same
    the survivor stays. Otherwise nodes of one topology stand together, where the first of them
    does.
    """

    def newcomer(node: Node) -> tuple[object, ...]:
        hint = (1, 0) if node.rank_hint is None else (0, node.rank_hint)
        return (hint, natural_sort_key(node.host), natural_sort_key(node.id))

    nodes = {node.id: node for node in candidates}
    survivors = [nodes[m.id] for m in document.members if m.id in nodes]
    known = document.member_ids
    arrived = sorted((n for n in nodes.values() if n.id not in known), key=newcomer)
    ordered = [*survivors, *arrived]
    if document.settings.has_fixed_ranks:
        return _at_fixed_ranks(ordered, document.settings.max_nodes)
    # Cut before they are put together: no survivor gives way to a newcomer of another's topology.
    return _together(ordered[: document.settings.max_nodes])


def _at_fixed_ranks(ordered: Iterable[Node], nodes: int) -> tuple[Node, ...]:
    at_rank: dict[int, Node] = {}
    for node in ordered:
        at_rank.setdefault(-1 if node.rank_hint is None else node.rank_hint, node)
    return tuple(at_rank[rank] for rank in range(nodes) if rank in at_rank)


def _together(ordered: Iterable[Node]) -> tuple[Node, ...]:
    groups: dict[str, list[Node]] = {}
    for node in ordered:
        # Nodes without a topology are each their own.
        key = f"t {node.topology}" if node.topology else f"id {node.id}"
        groups.setdefault(key, []).append(node)
    return tuple(node for group in groups.values() for node in group)
