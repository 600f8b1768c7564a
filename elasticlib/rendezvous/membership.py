"""The membership of a job: its values, and the transitions from one membership to the next.

All values are immutable, and each transition returns a new membership. This module decides nothing:
`reconcile` chooses the transition, and `store_layout` reads and writes the values.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any, Protocol, TypeVar

import attrs

from ..errors import ConfigError
from ..options import RendezvousSettings
from .bad_nodes import ExcludedHost, FirstFailure, add_failure
from .blame import Evidence, FailureKind, Verdict


class GenerationTrigger(enum.Enum):
    """Why a new generation is formed. Only FAILURE counts against the restart budget."""

    START = "start"
    FAILURE = "failure"
    NODE_LOSS = "loss"  # a node, or the content of the store, was lost
    RESIZE = "resize"  # nodes joined or left on purpose
    RESTART = "restart"  # an operator asked to restart all workers

    @property
    def phrase(self) -> str:
        """A phrase for messages about the generation, such as `after a failure`."""
        return _TRIGGER_PHRASES[self]


_TRIGGER_PHRASES = {
    GenerationTrigger.START: "at the start",
    GenerationTrigger.FAILURE: "after a failure",
    GenerationTrigger.NODE_LOSS: "after a loss",
    GenerationTrigger.RESIZE: "for a resize",
    GenerationTrigger.RESTART: "on request",
}


class JobPhase(enum.Enum):
    """The phase of a job. The last four are final."""

    FORMING = "forming"  # the next generation is being formed
    ACTIVE = "active"  # a generation is formed and its workers may run
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"  # a node has closed the rendezvous
    STOPPED = "stopped"  # an operator has stopped the job

    @property
    def is_terminal(self) -> bool:
        return self not in (JobPhase.FORMING, JobPhase.ACTIVE)


@attrs.frozen
class Node:
    """A node of a job, as its launcher describes it to a rendezvous handler."""

    id: str  # unique: no other process of the job ever has the same id
    host: str  # name shown to users
    address: str  # address at which other nodes reach this node
    # Number of workers that the node offers for the next generation. A node that offers 0 is not
    # admitted before its workers have started.
    slots: int
    role: str = "default"
    rank_hint: int | None = None  # requested rank, or None
    # Nodes with an equal value get adjacent ranks. Replicas of their snapshots are elsewhere.
    topology: str = ""

    def __attrs_post_init__(self) -> None:
        if self.slots < 0:
            raise ConfigError(f"a node offers 0 or more slots, got {self.slots}")


class JobAction(enum.Enum):
    """An action that an operator can request for a whole job."""

    STOP = "stop"  # the job ends once all workers have saved
    RESTART = "restart"  # all workers are restarted


@attrs.frozen
class JobRequest:
    """A request for the whole job, which a member passes to the leader."""

    action: JobAction
    reason: str
    membership_id: str  # the generation in which it was made; a restart is for this one only


@attrs.frozen
class NodeRecord(Node):
    """The record that a node publishes under its lease: the node, and its state in the rendezvous.

    Generations are named by their membership id, because a generation number can occur twice if a
    store loses the job.
    """

    membership_id: str = ""  # the last generation that the node was a member of
    group_rank: int = 0  # the node's rank in that generation
    may_run_workers: bool = False  # workers of that generation may be running
    stopped_membership_id: str = ""  # the generation whose workers the node has stopped
    # The incarnation that had no live node when this node started. The node is not part of it.
    inactive_incarnation: str = ""
    evidence: Evidence | None = None  # what happened to the workers of the generation `evidence_of`
    evidence_of: str = ""
    drain_reason: str = ""  # why the node leaves once its workers have saved; empty: it stays
    has_retained_workers: bool = False  # the offered workers have run in the last generation
    request: JobRequest | None = None  # what an operator wants for the whole job
    takes_notices: bool = False  # a worker has called `should_stop`, in any generation

    @classmethod
    def of(cls, node: Node) -> NodeRecord:
        """Return the record of a node that has not taken part in a rendezvous yet."""
        return cls(**attrs.asdict(node, recurse=False))


@attrs.frozen
class JobEnd:
    """The node that recorded the end of the job, and the wall-clock time, for messages."""

    written_by: str
    finished_at: str


@attrs.frozen
class MembershipState:
    """The part of a membership that every node reads: everything except the list of members."""

    settings: RendezvousSettings
    incarnation: str = ""  # identifies one run of the job id
    phase: JobPhase = JobPhase.FORMING
    generation: int = 0  # number of the current generation, from 1; 0: none has formed yet
    membership_id: str = ""  # names the list of members
    num_nodes: int = 0
    restarts: int = 0  # restarts that were charged to the budget
    reason: str = "the job starts"  # why the last generation finished, for messages
    # Why the last generation ended, or ends: a failure or a loss. None if neither has ended it. It
    # is replaced as long as evidence arrives, and final once the next generation has formed.
    verdict: Verdict | None = None
    evicted: tuple[str, ...] = ()  # nodes that used up the budget and must leave
    rejected_spares: tuple[str, ...] = ()  # nodes beyond the allowed number of spares
    job_end: JobEnd | None = None
    supersedes: str = ""  # the incarnation that this one replaced, having no live node
    # The generation finished while all workers run, so that they can agree on a step to stop at.
    is_planned: bool = False
    quick_failure_count: int = 0  # generations in a row that failed soon after they formed
    trigger: GenerationTrigger = GenerationTrigger.START
    stop_reason: str = ""  # why the job ends once all workers have stopped; empty: it continues
    first_failures: tuple[FirstFailure, ...] = ()  # in the last generations, oldest first
    excluded_hosts: tuple[ExcludedHost, ...] = ()  # hosts whose nodes must leave

    def exclusion_of(self, host: str) -> ExcludedHost | None:
        """Return the exclusion of this host, or None if its nodes may take part."""
        return next((item for item in self.excluded_hosts if item.host == host), None)


@attrs.frozen
class Leader:
    """The node that currently decides for the job."""

    id: str
    host: str
    inactive_incarnation: str = ""  # as in `NodeRecord`
    can_regroup: bool = False  # its workers can continue in another generation
    takes_notices: bool = False  # a worker of some node has called `should_stop`


@attrs.frozen
class LeaderStatus:
    """A status that the leader publishes for waiting nodes."""

    reason: str = ""  # why the next generation has not formed yet
    present_hosts: tuple[str, ...] = ()  # the first hosts that are present
    num_present: int = 0
    num_waiting: int = 0  # nodes that wait for the generation `membership_id` to end
    membership_id: str = ""
    is_blocked: bool = False  # too few nodes are present to continue

    @property
    def present_names(self) -> str:
        """The nodes that are present, as text. Nodes of one host are counted."""
        counts = Counter(self.present_hosts).items()
        names = ", ".join(f"{name} ({n} nodes)" if n > 1 else name for name, n in counts)
        more = self.num_present - len(self.present_hosts)
        return f"{names} and {more} more" if more > 0 else names or "no nodes"


class ChangeKind(enum.Enum):
    """A change that ends a node's generation."""

    GENERATION_ENDED = "generation_ended"  # the node must join the next generation
    RESIZE = "resize"  # the node must join, too; workers may first save and stop at one step
    RESTART = "restart"  # like RESIZE, but workers that can regroup are restarted, too
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"  # a node has closed the rendezvous
    STOPPED = "stopped"  # an operator has stopped the job
    EVICTED = "evicted"  # this node's workers failed, and the job continues without the node
    EXCLUDED = "excluded"  # this host's workers keep failing, and the job continues without it
    NOT_NEEDED = "not_needed"  # the job has enough spares
    STORE_LOST = "store_lost"  # the store was unreachable for longer than the handler allows

    @property
    def is_final(self) -> bool:
        """True if there is no further generation for this node."""
        return self is not ChangeKind.GENERATION_ENDED and not self.is_planned

    @property
    def is_planned(self) -> bool:
        """True if no worker has failed and no node is lost, so that workers may save first."""
        return self in (ChangeKind.RESIZE, ChangeKind.RESTART)

    @property
    def job_continues(self) -> bool:
        """True if the job continues without this node."""
        return self in (ChangeKind.EVICTED, ChangeKind.EXCLUDED, ChangeKind.NOT_NEEDED)


@attrs.frozen
class Change:
    """A change that ends this node's generation, with its reason."""

    kind: ChangeKind
    reason: str
    verdict: Verdict | None = None  # which failure or loss the end of the job is based on, if any


@attrs.frozen
class Membership(MembershipState):
    """The state of a job with its members. The index of a member is its group rank."""

    members: tuple[NodeRecord, ...] = ()
    member_ids: frozenset[str] = attrs.field(init=False, eq=False, repr=False)

    @member_ids.default
    def _(self) -> frozenset[str]:
        return frozenset(node.id for node in self.members)

    @property
    def state(self) -> MembershipState:
        return MembershipState(**_state_fields(self))


def _state_fields(state: MembershipState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in attrs.fields_dict(MembershipState)}


def with_members(state: MembershipState, members: Iterable[NodeRecord]) -> Membership:
    """Return the membership of this state with these members."""
    return Membership(**_state_fields(state), members=tuple(members))


# -- transitions -----------------------------------------------------------------------------------


def end_generation(
    membership: Membership,
    reason: str,
    verdict: Verdict | None = None,
    *,
    trigger: GenerationTrigger | None = None,
) -> Membership:
    """End the current generation. Its members keep their order in the next one.

    The default trigger is FAILURE if workers have failed, and NODE_LOSS otherwise.
    """
    if trigger is None:
        is_loss = verdict is None or verdict.kind is FailureKind.LOST
        trigger = GenerationTrigger.NODE_LOSS if is_loss else GenerationTrigger.FAILURE
    return attrs.evolve(
        membership,
        phase=JobPhase.FORMING,
        reason=reason,
        trigger=trigger,
        verdict=verdict,
        is_planned=False,
    )


def begin_resize(membership: Membership, reason: str) -> Membership:
    """End the current generation although no worker has failed and no node is lost."""
    forming = end_generation(membership, reason, trigger=GenerationTrigger.RESIZE)
    return attrs.evolve(forming, is_planned=True)


def begin_restart(membership: Membership, reason: str) -> Membership:
    """End the current generation to restart all of its workers, although none has failed."""
    return attrs.evolve(begin_resize(membership, reason), trigger=GenerationTrigger.RESTART)


def begin_stop(membership: Membership, reason: str) -> Membership:
    """End the current generation, and the job once the workers have saved and stopped."""
    return attrs.evolve(begin_resize(membership, reason), stop_reason=reason)


def form_generation(
    membership: Membership, members: Iterable[NodeRecord], *, charged: bool, nonce: str
) -> Membership:
    """Form the next generation of these members, in this order.

    Args:
        membership: the membership to replace.
        members: the members in rank order.
        charged: count one restart.
        nonce: text that no other generation uses.
    """
    chosen = tuple(
        attrs.evolve(node, evidence=None, evidence_of="", request=None) for node in members
    )
    settings = membership.settings
    if not settings.min_nodes <= len(chosen) <= settings.max_nodes:
        raise ConfigError(
            f"a generation has {settings.min_nodes} to {settings.max_nodes} nodes, "
            f"got {len(chosen)}"
        )
    generation = membership.generation + 1
    return attrs.evolve(
        membership,
        phase=JobPhase.ACTIVE,
        generation=generation,
        membership_id=f"{generation}.{nonce}",
        num_nodes=len(chosen),
        members=chosen,
        restarts=membership.restarts + charged,
        is_planned=False,
    )


def evict(membership: Membership, node_ids: Iterable[str], live: Container[str]) -> Membership:
    """Evict these nodes. The other nodes continue, and no restart is charged.

    Nodes that were evicted before and are neither live nor members are removed from the list, as
    no later node has their ids.
    """
    members = membership.member_ids
    earlier = (n for n in membership.evicted if n in live or n in members)
    return attrs.evolve(membership, evicted=(*earlier, *node_ids))


def record_first_failure(membership: Membership) -> Membership:
    """Add the host that the verdict names to the history, if it names one."""
    verdict, window = membership.verdict, membership.settings.bad_node_window
    if verdict is None or not verdict.named_host:
        return membership
    history, host = membership.first_failures, verdict.named_host
    history = add_failure(history, membership.generation, host, window=window)
    return attrs.evolve(membership, first_failures=history)


def exclude_hosts(membership: Membership, hosts: Iterable[ExcludedHost], reason: str) -> Membership:
    """Exclude hosts for the rest of this incarnation. No restart is charged.

    Args:
        membership: the membership, whose next generation is being formed.
        hosts: the hosts to exclude.
        reason: why the next generation is formed, for messages.
    """
    excluded = (*membership.excluded_hosts, *hosts)
    names = {item.host for item in excluded}
    history = tuple(item for item in membership.first_failures if item.host not in names)
    return attrs.evolve(
        membership,
        excluded_hosts=excluded,
        first_failures=history,
        reason=reason,
    )


def reject_spares(membership: Membership, node_ids: Iterable[str]) -> Membership:
    """Replace the list of nodes that are not needed as spares."""
    return attrs.evolve(membership, rejected_spares=tuple(node_ids))


AnyState = TypeVar("AnyState", bound=MembershipState)


def end_job(
    state: AnyState,
    phase: JobPhase,
    reason: str,
    *,
    job_end: JobEnd,
    verdict: Verdict | None = None,
) -> AnyState:
    """End this run of the job in a terminal phase.

    Raises:
        ConfigError: the job is already in a terminal phase, or `phase` is not terminal.
    """
    if state.phase.is_terminal or not phase.is_terminal:
        raise ConfigError(f"a job ends once, got {state.phase.value} -> {phase.value}")
    return attrs.evolve(state, phase=phase, reason=reason, verdict=verdict, job_end=job_end)


# -- predicates ------------------------------------------------------------------------------------


class Participant(Protocol):
    """A record of a node with the incarnation that had no live node when that node started."""

    @property
    def inactive_incarnation(self) -> str: ...


def has_live_node(state: MembershipState, nodes: Iterable[Participant]) -> bool:
    """Return whether one of these live nodes is part of this run of the job.

    Every live node is, except those that started when no node of the run was alive. While the run
    has a live node, a node that starts joins it or gets its result if the run has finished. When
    it has none, the nodes that start begin a new run.
    """
    return any(
        not node.inactive_incarnation or node.inactive_incarnation != state.incarnation
        for node in nodes
    )


def is_replaceable(state: MembershipState | None, incarnation: str) -> bool:
    """Return whether the remembered state of run `incarnation` may replace the store's state.

    It may if the store has no state, or the state of another run that has neither formed a
    generation nor finished. A run that was started in place of `incarnation` is never replaced.
    """
    if state is None:
        return True
    is_new = state.generation == 0 and not state.phase.is_terminal
    return is_new and incarnation not in (state.incarnation, state.supersedes)
