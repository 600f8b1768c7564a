"""The membership of a job as values, and the verbs that change it.

A document is changed by these verbs alone, and each returns a new one. What follows from it
(ranks, world sizes, who decides) is derived, never stored beside it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

import attrs

from ..errors import ConfigError


class Phase(enum.Enum):
    """Where a job's membership stands; all but the first two are for ever."""

    OPEN = "open"
    SETTLED = "settled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def terminal(self) -> bool:
        return self not in (Phase.OPEN, Phase.SETTLED)


@attrs.frozen
class Limits:
    """What a job allows; the same on each of its nodes.

    last_call: seconds without a new arrival, once min_nodes are there, before newcomers are
    let in. max_restarts: restarts after a failure, over the whole job. fixed_ranks: each node
    takes the rank that it asks for, as in torchrun's static rendezvous.
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    last_call: float = 2.0
    fixed_ranks: bool = False

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                "need 1 <= min_nodes <= max_nodes, "
                f"got min_nodes={self.min_nodes} and max_nodes={self.max_nodes}"
            )
        if self.max_restarts < 0:
            raise ConfigError(f"need max_restarts >= 0, got {self.max_restarts}")
        if not 0 <= self.last_call < float("inf"):
            raise ConfigError(f"need 0 <= last_call seconds, got {self.last_call}")


@attrs.frozen
class Node:
    """What one agent says of itself, under its lease.

    after: it waits for a generation later than this one, and has no workers of it left.
    holds: a generation whose workers it may be running though nobody counts on it any more.
    claim: why its workers failed in generation `claim_generation`.
    """

    id: str
    host: str
    address: str
    slots: int
    role: str = "default"
    hint: int | None = None
    after: int = 0
    holds: int = 0
    claim: str | None = None
    claim_generation: int = 0

    @property
    def idle(self) -> bool:
        """Whether no workers of its own can be running."""
        return self.after >= self.holds


@attrs.frozen
class Failure:
    """Which node's workers failed first, and how."""

    node: str
    reason: str


@attrs.frozen
class Document:
    """One job's membership. A member's index is its group rank.

    incarnation names this document as against one that another store, or the same one emptied, may
    hold for the same run id: the node that began it, and which of its beginnings this was.
    generation counts settled memberships from 1 (0: none yet); cause says why the last one ended
    or the next is sought; failure is the claim that is to be charged when the next one settles;
    expelled nodes have used up the budget and must leave.
    """

    limits: Limits
    incarnation: str = ""
    phase: Phase = Phase.OPEN
    generation: int = 0
    members: tuple[Node, ...] = ()
    restarts: int = 0
    cause: str = "the job starts"
    failure: Failure | None = None
    expelled: tuple[str, ...] = ()

    @property
    def member_ids(self) -> frozenset[str]:
        return frozenset(node.id for node in self.members)

    def rank_of(self, node_id: str) -> int | None:
        """The group rank of a member, or None for a stranger."""
        for rank, member in enumerate(self.members):
            if member.id == node_id:
                return rank
        return None


def reopen(document: Document, cause: str, failure: Failure | None = None) -> Document:
    """The generation is over; its members keep their order for the next one."""
    return attrs.evolve(document, phase=Phase.OPEN, cause=cause, failure=failure)


def settle(document: Document, members: Iterable[Node], *, charged: bool) -> Document:
    """The next generation, of these members in this order."""
    chosen = tuple(members)
    limits = document.limits
    if not limits.min_nodes <= len(chosen) <= limits.max_nodes:
        raise ConfigError(
            f"a generation has {limits.min_nodes} to {limits.max_nodes} nodes, got {len(chosen)}"
        )
    return attrs.evolve(
        document,
        phase=Phase.SETTLED,
        generation=document.generation + 1,
        members=tuple(attrs.evolve(node, claim=None, claim_generation=0) for node in chosen),
        restarts=document.restarts + charged,
        failure=None,
    )


def expel(document: Document, node_id: str) -> Document:
    """This node must leave; the others go on without being charged for it."""
    return attrs.evolve(document, expelled=(*document.expelled, node_id), failure=None)


def end(document: Document, phase: Phase, cause: str, failure: Failure | None = None) -> Document:
    """The job is over, for ever."""
    if document.phase.terminal or not phase.terminal:
        raise ConfigError(f"a job ends once, got {document.phase.value} -> {phase.value}")
    return attrs.evolve(document, phase=phase, cause=cause, failure=failure)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts node2 before node10."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p), p) if p.isdigit() else (1, 0, p) for p in parts if p)


def in_rank_order(document: Document, candidates: Iterable[Node]) -> tuple[Node, ...]:
    """Survivors in their order, then newcomers by hint and natural name.

    With fixed ranks each node stands at the rank it asked for, and of two that ask for the same
    the survivor stays.
    """

    def newcomer(node: Node) -> tuple[object, ...]:
        hint = (1, 0) if node.hint is None else (0, node.hint)
        return (hint, natural(node.host), natural(node.id))

    nodes = {node.id: node for node in candidates}
    survivors = [nodes[m.id] for m in document.members if m.id in nodes]
    known = document.member_ids
    arrived = sorted((n for n in nodes.values() if n.id not in known), key=newcomer)
    ordered = (*survivors, *arrived)
    if not document.limits.fixed_ranks:
        return ordered
    at_rank: dict[int, Node] = {}
    for node in ordered:
        at_rank.setdefault(-1 if node.hint is None else node.hint, node)
    return tuple(at_rank[rank] for rank in sorted(at_rank) if rank >= 0)
