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

from .document import Document, Node

SHARD_NODES = 64
"""Members on one shard, on average."""


@attrs.frozen
class Seat:
    """One node's place in a settled generation.

    rank: among its `nodes`. slots: workers of this node. first_rank: global rank of the first of
    them, of world_size workers. first_role_rank, role_world_size: the same among the workers of
    all nodes with this one's role.
    """

    rank: int
    nodes: int
    slots: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int


def deal_seats(members: Iterable[Node]) -> tuple[Seat, ...]:
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
            Seat(rank, len(members), node.slots, first, world, first_of_role[role], of_role[role])
        )
        first += node.slots
        first_of_role[role] += node.slots
    return tuple(seats)


Row = tuple[Node, Seat]


def shard_of(node_id: str, nodes: int) -> int:
    """On which shard this one stands, in a generation of `nodes` members."""
    return zlib.crc32(node_id.encode()) % shard_count(nodes)


def shard_count(nodes: int) -> int:
    return -(-nodes // SHARD_NODES) or 1


def deal_shards(document: Document) -> Mapping[int, tuple[Row, ...]]:
    """The members of the document's generation, cut up; every shard is there, if only empty."""
    count = shard_count(document.nodes)
    shards: dict[int, list[Row]] = {number: [] for number in range(count)}
    for row in zip(document.members, deal_seats(document.members), strict=True):
        shards[shard_of(row[0].id, document.nodes)].append(row)
    return {number: tuple(rows) for number, rows in shards.items()}


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts node2 before node10."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p), p) if p.isdecimal() else (1, 0, p) for p in parts if p)


def in_rank_order(document: Document, candidates: Iterable[Node]) -> tuple[Node, ...]:
    """Survivors in their order, then newcomers by hint and natural name; max_nodes of them.

    With fixed ranks each node stands at the rank it asked for, and of two that ask for the same
    the survivor stays. Otherwise nodes of one topology stand together, where the first of them
    does.
    """

    def newcomer(node: Node) -> tuple[object, ...]:
        hint = (1, 0) if node.hint is None else (0, node.hint)
        return (hint, natural(node.host), natural(node.id))

    nodes = {node.id: node for node in candidates}
    survivors = [nodes[m.id] for m in document.members if m.id in nodes]
    known = document.member_ids
    arrived = sorted((n for n in nodes.values() if n.id not in known), key=newcomer)
    ordered = [*survivors, *arrived]
    if document.limits.fixed_ranks:
        return _at_fixed_ranks(ordered, document.limits.max_nodes)
    # Cut before they are put together: no survivor gives way to a newcomer of another's topology.
    return _together(ordered[: document.limits.max_nodes])


def _at_fixed_ranks(ordered: Iterable[Node], nodes: int) -> tuple[Node, ...]:
    at_rank: dict[int, Node] = {}
    for node in ordered:
        at_rank.setdefault(-1 if node.hint is None else node.hint, node)
    return tuple(at_rank[rank] for rank in range(nodes) if rank in at_rank)


def _together(ordered: Iterable[Node]) -> tuple[Node, ...]:
    groups: dict[str, list[Node]] = {}
    for node in ordered:
        # Nodes without a topology are each their own.
        key = f"t {node.topology}" if node.topology else f"id {node.id}"
        groups.setdefault(key, []).append(node)
    return tuple(node for group in groups.values() for node in group)
