"""A job's membership as values, and the verbs that change it; what else stands beside it in the
store; and how long a node waits for what.

A document is changed by its verbs alone, and each returns a new one. Every node reads its state;
the node that leads reads the members as well, and each member has a seat (`ranks.py`).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable
from typing import TypeVar

import attrs

from ..errors import ConfigError
from ..flag_values import STORE_GRACE


class GenerationTrigger(enum.Enum):
    """Why a generation was sought, or ended. Only FAILURE is charged to the budget of restarts.

    RESIZE: nodes came or left on purpose. LOSS: a node, or what the store held, is gone.
    """

    START = "start"
    FAILURE = "failure"
    NODE_LOSS = "loss"
    RESIZE = "resize"

    @property
    def phrase(self) -> str:
        """For a sentence about the generation: it came `after a loss`."""
        return _WHY[self]


_WHY = {
    GenerationTrigger.START: "at the start",
    GenerationTrigger.FAILURE: "after a failure",
    GenerationTrigger.NODE_LOSS: "after a loss",
    GenerationTrigger.RESIZE: "for a resize",
}


class JobPhase(enum.Enum):
    """Where a job's membership stands; all but the first two are the end of it."""

    FORMING = "forming"
    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_terminal(self) -> bool:
        return self not in (JobPhase.FORMING, JobPhase.ACTIVE)


@attrs.frozen
class RendezvousTimeouts:
    """How long a handler waits, in seconds, each measured on the waiting node's own clock.

    join: for a generation to settle. lease: how long a silent node counts as alive; refresh: how
    often it speaks. store_grace: how long the store may be away. close: for leaving. loop: for how
    long an agent's loop may stand still before its node gives up its place among the others.
    """

    join_timeout: float = 600.0
    lease_ttl: float = 5.0
    keep_alive_interval: float = 1.0
    store_grace: float = STORE_GRACE
    close_timeout: float = 30.0
    loop_timeout: float = 30.0

    def __attrs_post_init__(self) -> None:
        if not 0 < self.keep_alive_interval < self.lease_ttl:
            raise ConfigError(
                f"a lease must be refreshed before it ends: need 0 < refresh < lease, "
                f"got refresh={self.keep_alive_interval:g} s and lease={self.lease_ttl:g} s"
            )
        if self.loop_timeout <= 0:
            raise ConfigError(f"need loop > 0 seconds, got loop={self.loop_timeout:g}")


@attrs.frozen
class RendezvousSettings:
    """What a job allows; the same on each of its nodes.

    last_call: seconds without a new arrival, once min_nodes are there, before newcomers are
    let in. max_restarts: restarts after a failure, over the whole job. fixed_ranks: each node
    takes the rank that it asks for, as in torchrun's static rendezvous. spares: how many nodes
    beyond max_nodes may wait (None: any). quorum: whether a store that has forgotten the job
    needs more than half of the last generation to remember it. restart_window: seconds that a
    generation must stand for the restarts before it to count no more (0: they always do).
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    last_call_timeout: float = 2.0
    has_fixed_ranks: bool = False
    spares: int | None = None
    quorum: bool = False
    restart_window: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                "need 1 <= min_nodes <= max_nodes, "
                f"got min_nodes={self.min_nodes} and max_nodes={self.max_nodes}"
            )
        if self.max_restarts < 0:
            raise ConfigError(f"need max_restarts >= 0, got {self.max_restarts}")
        if self.spares is not None and self.spares < 0:
            raise ConfigError(f"need spares >= 0, got {self.spares}")
        for name in ("last_call_timeout", "restart_window"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"need 0 <= {name} seconds, got {getattr(self, name)}")


@attrs.frozen
class Node:
    """What one agent says of itself, under its lease.

    slots: with how many workers it comes to the next generation, or would; kept: and whether these
    have run in the last one. With 0 of them it waits for its workers' start, and those that come
    with kept ones go on without it. topology: nodes with the
    same one get adjacent ranks. membership and rank: the last generation that it was in, and where;
    runs: whether it may be running workers of it. stopped: the
    generation whose workers it has stopped, to wait for a later one. came_after: the incarnation
    of which this node found no live node when it started, so that it is not part of it. claim: why
    its workers failed in the generation `claim_membership`; claim_killed: a signal from outside
    ended the worker that failed. draining: why it is about to leave, once its workers have saved;
    empty if not.

    Generations are named by their memberships: a number comes again if a store has forgotten it.
    """

    id: str
    host: str
    address: str
    slots: int
    role: str = "default"
    rank_hint: int | None = None
    topology: str = ""
    membership_id: str = ""
    group_rank: int = 0
    may_run_workers: bool = False
    stopped_membership_id: str = ""
    ended_incarnation: str = ""
    failure_reason: str | None = None
    failed_membership_id: str = ""
    was_killed: bool = False
    drain_reason: str = ""
    has_retained_workers: bool = False


@attrs.frozen
class NodeFailure:
    """The node whose workers failed first, and why; killed: as `claim_killed` of its `Node`."""

    node: str
    reason: str
    was_killed: bool = False


@attrs.frozen
class JobEnd:
    """Which node wrote down that the job is over, and when, by its own wall clock: for people."""

    written_by: str
    ended_at: str


@attrs.frozen
class MembershipState:
    """What every node reads of a job: small, however many nodes there are.

    incarnation names this run of the job as against one that ended before it, or one that another
    store, or the same one emptied, may hold. generation counts settled memberships from 1 (0:
    none yet), and membership names the list of its members, of whom there are `nodes`. cause says
    why the last generation ended or the next is sought, for people, and why says it for programs;
    failure is the claim that is to be charged when the next one settles; expelled nodes have used
    up the budget and must leave; surplus ones are not needed as spares. supersedes: the incarnation
    of which no node was alive when this one was started in its place. planned: the last generation
    ended on purpose, with all its workers at work, so they may stop at a step that they agree on.
    quick: how many generations in a row have failed soon after they began.
    """

    settings: RendezvousSettings
    incarnation: str = ""
    phase: JobPhase = JobPhase.FORMING
    generation: int = 0
    membership_id: str = ""
    num_nodes: int = 0
    restarts: int = 0
    reason: str = "the job starts"
    failure: NodeFailure | None = None
    evicted: tuple[str, ...] = ()
    rejected_spares: tuple[str, ...] = ()
    job_end: JobEnd | None = None
    supersedes: str = ""
    is_planned: bool = False
    quick_failure_count: int = 0
    trigger: GenerationTrigger = GenerationTrigger.START


@attrs.frozen
class Leader:
    """Which node decides for now. came_after: as in its `Node`.

    keeps: its workers can go on in another generation, so that whoever joins need not have them
    wait for its own workers' start.
    """

    id: str
    host: str
    ended_incarnation: str = ""
    can_regroup: bool = False


@attrs.frozen
class LeaderStatus:
    """What the node that leads lets the waiting ones know: why nothing happens yet, who is there
    (the first names of `count`), how many wait for the generation with that membership to end, and
    whether there are too few nodes to go on."""

    reason: str = ""
    present_hosts: tuple[str, ...] = ()
    num_present: int = 0
    num_waiting: int = 0
    membership_id: str = ""
    is_blocked: bool = False

    @property
    def present_names(self) -> str:
        """Who is there, in words; of nodes of one name, how many."""
        found = Counter(self.present_hosts).items()
        names = ", ".join(f"{name} ({n} nodes)" if n > 1 else name for name, n in found)
        more = self.num_present - len(self.present_hosts)
        return f"{names} and {more} more" if more > 0 else names or "nobody"


class ChangeKind(enum.Enum):
    """REOPENED: rendezvous anew. RESIZE: the same, on purpose and with all workers at work, so that
    they may first save and stop at a step that they agree on. SUCCEEDED, FAILED, ABORTED: the
    job is over. EXPELLED: this node's workers failed, and the job goes on without it. SURPLUS: it
    is one spare more than the job wants. LOST: the store has been out of reach for longer than
    the handler allows.
    """

    GENERATION_ENDED = "generation_ended"
    RESIZE = "resize"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"
    EVICTED = "evicted"
    NOT_NEEDED = "not_needed"
    STORE_LOST = "store_lost"

    @property
    def is_final(self) -> bool:
        """Whether there is nothing left to rendezvous for."""
        return self not in (ChangeKind.GENERATION_ENDED, ChangeKind.RESIZE)

    @property
    def job_continues(self) -> bool:
        """Whether the job goes on without this node, whose end is not the job's."""
        return self in (ChangeKind.EVICTED, ChangeKind.NOT_NEEDED)


@attrs.frozen
class Change:
    """What happened to the generation that this node holds, why, and because of which node."""

    kind: ChangeKind
    reason: str
    node: str = ""


@attrs.frozen
class Membership(MembershipState):
    """A job's state with its members. A member's index is its group rank."""

    members: tuple[Node, ...] = ()

    @property
    def state(self) -> MembershipState:
        """The document without its members."""
        return MembershipState(
            **{name: getattr(self, name) for name in attrs.fields_dict(MembershipState)}
        )

    @property
    def member_ids(self) -> frozenset[str]:
        return frozenset(node.id for node in self.members)

    def rank_of(self, node_id: str) -> int | None:
        """The group rank of a member, or None for a stranger."""
        for rank, member in enumerate(self.members):
            if member.id == node_id:
                return rank
        return None


def with_members(state: MembershipState, members: Iterable[Node]) -> Membership:
    """The whole document of which this is the state."""
    fields = {name: getattr(state, name) for name in attrs.fields_dict(MembershipState)}
    return Membership(**fields, members=tuple(members))


def end_generation(
    document: Membership,
    reason: str,
    failure: NodeFailure | None = None,
    *,
    trigger: GenerationTrigger | None = None,
) -> Membership:
    """The generation is over; its members keep their order for the next one.

    trigger: left out, it is a failure where there is one, and else a loss.
    """
    trigger = trigger or (
        GenerationTrigger.NODE_LOSS if failure is None else GenerationTrigger.FAILURE
    )
    return attrs.evolve(
        document,
        phase=JobPhase.FORMING,
        reason=reason,
        trigger=trigger,
        failure=failure,
        is_planned=False,
    )


def begin_resize(document: Membership, reason: str) -> Membership:
    """The generation is to end where its workers agree to; nobody has failed or is lost."""
    return attrs.evolve(
        end_generation(document, reason, trigger=GenerationTrigger.RESIZE), is_planned=True
    )


def form_generation(
    document: Membership, members: Iterable[Node], *, charged: bool, nonce: str
) -> Membership:
    """The next generation, of these members in this order; `nonce` is used for no other."""
    chosen = tuple(
        attrs.evolve(node, failure_reason=None, failed_membership_id="", was_killed=False)
        for node in members
    )
    limits = document.settings
    if not limits.min_nodes <= len(chosen) <= limits.max_nodes:
        raise ConfigError(
            f"a generation has {limits.min_nodes} to {limits.max_nodes} nodes, got {len(chosen)}"
        )
    generation = document.generation + 1
    return attrs.evolve(
        document,
        phase=JobPhase.ACTIVE,
        generation=generation,
        membership_id=f"{generation}.{nonce}",
        num_nodes=len(chosen),
        members=chosen,
        restarts=document.restarts + charged,
        failure=None,
        is_planned=False,
    )


def evict(document: Membership, node_ids: Iterable[str], live: Container[str]) -> Membership:
    """These nodes must leave; the others go on without being charged for it.

    Of those expelled before, only the living and the members are still named: an id is never
    used again.
    """
    members = document.member_ids
    there = (n for n in document.evicted if n in live or n in members)
    return attrs.evolve(document, evicted=(*there, *node_ids), failure=None)


def reject_spares(document: Membership, node_ids: Iterable[str]) -> Membership:
    """These are too many to wait, and no others are."""
    return attrs.evolve(document, rejected_spares=tuple(node_ids))


AnyState = TypeVar("AnyState", bound=MembershipState)


def end_job(
    document: AnyState,
    phase: JobPhase,
    reason: str,
    *,
    job_end: JobEnd,
    failure: NodeFailure | None = None,
) -> AnyState:
    """The job is over, for as long as this incarnation lasts."""
    if document.phase.is_terminal or not phase.is_terminal:
        raise ConfigError(f"a job ends once, got {document.phase.value} -> {phase.value}")
    return attrs.evolve(document, phase=phase, reason=reason, failure=failure, job_end=job_end)
