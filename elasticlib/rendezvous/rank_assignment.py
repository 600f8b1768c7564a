"""Order the members of a generation and assign global and role ranks to them.

All functions are pure. Every node derives the same assignment from the same membership. A node
reads only the shard that contains its own row, so the cost per node does not grow with the job.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import attrs

from .membership import Membership, Node, NodeRecord

# Each node reads one shard. A small shard keeps that read cheap, for the node and for the store.
NODES_PER_SHARD = 16  # on average


@attrs.frozen
class RankAssignment:
    """The ranks of one node in a generation."""

    group_rank: int  #: rank of the node among all nodes
    num_nodes: int
    local_world_size: int  #: workers on this node
    first_rank: int  #: global rank of this node's first worker
    world_size: int  #: workers on all nodes
    first_role_rank: int  #: rank of this node's first worker among workers of the same role
    role_world_size: int  #: workers of this role on all nodes
    largest_domain: int = 1  #: nodes of the largest topology domain; those of a domain are adjacent


AssignedNode = tuple[NodeRecord, RankAssignment]


def assign_ranks(members: Iterable[Node]) -> tuple[RankAssignment, ...]:
    """Assign consecutive global ranks, and consecutive ranks within each role.

    Args:
        members: the nodes of a generation in rank order, see `order_members`.

    Returns:
        One assignment per node, in the order of `members`.
    """
    members = tuple(members)
    world_size = sum(node.slots for node in members)
    role_world_size: dict[str, int] = defaultdict(int)
    for node in members:
        role_world_size[node.role] += node.slots
    domain_sizes = Counter(node.topology for node in members if node.topology)
    largest_domain = max(domain_sizes.values(), default=1)

    assignments = []
    next_rank = 0
    next_role_rank: dict[str, int] = defaultdict(int)
    for group_rank, node in enumerate(members):
        assignments.append(
            RankAssignment(
                group_rank=group_rank,
                num_nodes=len(members),
                local_world_size=node.slots,
                first_rank=next_rank,
                world_size=world_size,
                first_role_rank=next_role_rank[node.role],
                role_world_size=role_world_size[node.role],
                largest_domain=largest_domain,
            )
        )
        next_rank += node.slots
        next_role_rank[node.role] += node.slots
    return tuple(assignments)


def num_shards(num_nodes: int) -> int:
    """Return the number of shards that the members of a generation are stored in, at least 1."""
    return max(1, -(-num_nodes // NODES_PER_SHARD))


def shard_of(node_id: str, num_nodes: int) -> int:
    """Return the number of the shard that contains `node_id` in a generation of `num_nodes`."""
    # The CRC is the same in every process, unlike hash().
    return zlib.crc32(node_id.encode()) % num_shards(num_nodes)


def shard_members(membership: Membership) -> Mapping[int, tuple[AssignedNode, ...]]:
    """Split the assigned members of a generation into shards.

    Returns:
        The rows of each shard by shard number. Every shard is present, even if it is empty.
    """
    shards: dict[int, list[AssignedNode]] = {
        number: [] for number in range(num_shards(membership.num_nodes))
    }
    assignments = assign_ranks(membership.members)
    for node, assignment in zip(membership.members, assignments, strict=True):
        shards[shard_of(node.id, membership.num_nodes)].append((node, assignment))
    return {number: tuple(rows) for number, rows in shards.items()}


def order_members(
    membership: Membership, candidates: Iterable[NodeRecord]
) -> tuple[NodeRecord, ...]:
    """Choose and order the members of the next generation.

    Survivors of the current generation are first, in their present order, so that their ranks
    change as little as possible. Joining nodes follow, ordered by rank hint, then by host name and
    id in natural order. At most `settings.max_nodes` nodes are chosen, and a survivor is never
    displaced by a joining node.

    With fixed ranks, each node takes the rank of its hint, and gaps remain empty. If two nodes ask
    for the same rank, the survivor gets it. Otherwise, nodes of one topology domain are adjacent.

    Args:
        membership: the current generation.
        candidates: the nodes that are alive, in any order.
    """
    alive = {node.id: node for node in candidates}
    survivors = [alive[member.id] for member in membership.members if member.id in alive]
    joining = [node for node in alive.values() if node.id not in membership.member_ids]
    ordered = survivors + sorted(joining, key=_joining_order)
    max_nodes = membership.settings.max_nodes
    if membership.settings.has_fixed_ranks:
        return _at_fixed_ranks(ordered, max_nodes)
    # Cut to max_nodes before grouping: otherwise a joining node could displace a survivor that
    # belongs to another topology domain.
    return _group_by_topology(ordered[:max_nodes])


def natural_sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that orders `node2` before `node10`, for numbers of up to 18 digits."""
    # Python refuses to convert thousands of digits, and any client can write such a name.
    parts = re.split(r"(\d{1,18})", name)
    return tuple((0, int(p), p) if p.isdecimal() else (1, 0, p) for p in parts if p)


def _joining_order(node: NodeRecord) -> tuple[object, ...]:
    hint = (node.rank_hint is None, node.rank_hint or 0)
    return (hint, natural_sort_key(node.host), natural_sort_key(node.id))


def _at_fixed_ranks(ordered: Iterable[NodeRecord], num_nodes: int) -> tuple[NodeRecord, ...]:
    node_at_rank: dict[int, NodeRecord] = {}
    for node in ordered:
        if node.rank_hint is not None:
            node_at_rank.setdefault(node.rank_hint, node)
    return tuple(node_at_rank[rank] for rank in range(num_nodes) if rank in node_at_rank)


def _group_by_topology(ordered: Iterable[NodeRecord]) -> tuple[NodeRecord, ...]:
    """Make nodes of one domain adjacent, at the position of the first node of the domain."""
    domains: dict[tuple[str, str], list[NodeRecord]] = {}
    for node in ordered:
        domain = ("topology", node.topology) if node.topology else ("node", node.id)
        domains.setdefault(domain, []).append(node)
    return tuple(node for nodes in domains.values() for node in nodes)
