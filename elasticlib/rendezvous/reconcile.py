"""What the membership should become next, decided from one snapshot; and what it means to one node.

No clock, store, thread or log stands here. For the node that leads, all that counts comes in as a
`View`, and what goes out is a `Decision`, whose sentence is the log line. The `Intent` of each node
says what should stand in the store for it, and what has become of the generation that it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from ..errors import present
from .membership import (
    Change,
    ChangeKind,
    GenerationTrigger,
    JobEnd,
    JobPhase,
    Leader,
    Membership,
    MembershipState,
    Node,
    NodeFailure,
    RendezvousSettings,
    begin_resize,
    end_generation,
    end_job,
    evict,
    form_generation,
    reject_spares,
    with_members,
)
from .rank_assignment import RankAssignment, order_members

QUORUM = (
    "without a quorum the job might continue twice; quorum=False, or --rdzv-conf quorum=any, "
    "allows that"
)
QUICK_FAILURE_S = 10.0  # a generation that fails sooner than this is a quick failure
MAX_UNDELAYED_RESTARTS = (
    2  # quick failures in a row without a delay: the first restart mends most causes
)
RESTART_DELAY_S = 5.0  # delay of each restart after more quick failures in a row than these


@attrs.frozen
class LeaderView:
    """What the node that leads has read of its job.

    live: those whose lease stands, in the order in which they last spoke. finished: ids of members
    that finished the document's generation; departed: of those that have said that they leave it,
    which they say where a quorum counts. memory: what a node that was in it says of a job
    that the store has forgotten. quiet: seconds, on the reader's own clock, since it last saw a
    node arrive. patience: seconds for which others may still be missing because the store was
    away. stands: seconds, likewise, since it first saw the document in this phase of this
    generation. nonce: a name that nobody has used. came_after: as in this node's
    record. today: the date and time, for people to read.
    """

    node_id: str
    settings: RendezvousSettings
    membership: Membership | None
    live_nodes: tuple[Node, ...]
    finished_ids: frozenset[str] = frozenset()
    left_ids: frozenset[str] = frozenset()
    remembered_state: MembershipState | None = None
    since_last_arrival_s: float = 0.0
    return_grace_s: float = 0.0
    phase_age_s: float = 0.0
    nonce: str = ""
    ended_incarnation: str = ""
    wall_time: str = ""


@attrs.frozen
class ReconcileResult:
    """Why, what to write if anything, and in how many seconds time alone could change it.

    stuck: there are too few here to go on, and the job may have gone on elsewhere.
    """

    reason: str
    new_membership: Membership | None = None
    requeue_after_s: float | None = None
    is_blocked: bool = False


def reconcile(view: LeaderView) -> ReconcileResult:
    """The next step of the job's membership, which is for the node that leads to take."""
    document = view.membership
    recalled = _recall(view)
    if recalled is not None:
        return recalled
    nothing = document is None or not (document.membership_id or document.phase.is_terminal)
    if view.return_grace_s > 0 and nothing:
        # Those who were in the job may be on their way back, and it is for them to say.
        return ReconcileResult(
            "the store was unreachable, and has lost the job", requeue_after_s=view.return_grace_s
        )
    if document is None:
        begun = Membership(view.settings, view.nonce)
        return ReconcileResult("the job's first node writes its limits", new_membership=begun)
    if not has_live_node(document, (view, *view.live_nodes)):
        return _start_new_run(view, document)
    if document.phase.is_terminal:
        return ReconcileResult(f"the job has {document.phase.value}: {document.reason}")
    if document.phase is JobPhase.ACTIVE:
        return _watch(view, document)
    return _gather(view, document)


def num_nodes_waiting(view: LeaderView) -> int:
    """How many nodes wait for the members to end their generation, and find room in the next one.

    Newcomers, and once it is over, members that have stopped their workers as well. Spares beyond
    max_nodes are not counted: for them nobody need start anew.
    """
    document = view.membership
    if document is None or not document.membership_id or document.phase.is_terminal:
        return 0
    members, over = document.member_ids, document.phase is JobPhase.FORMING
    here = [n for n in _candidates(view, document) if n.slots and not n.drain_reason]
    back = [
        n
        for n in here
        if over and n.id in members and n.stopped_membership_id == document.membership_id
    ]
    newcomers = [n for n in here if n.id not in members and not n.may_run_workers]
    staying = sum(n.id in members for n in here) if over else len(members)
    return min(len(back) + len(newcomers), document.settings.max_nodes - (staying - len(back)))


def is_replaceable(state: MembershipState | None, incarnation: str) -> bool:
    """Whether nothing has come yet of what the store holds, so that a job which it has forgotten
    may take its place. (One that was begun in place of that very job was begun knowingly.)"""
    if state is None:
        return True
    nothing = state.generation == 0 and not state.phase.is_terminal
    return nothing and incarnation not in (state.incarnation, state.supersedes)


def _recall(view: LeaderView) -> ReconcileResult | None:
    """The last generation as those remember who were in it, where the store has forgotten it."""
    memory = view.remembered_state
    if memory is None or not is_replaceable(view.membership, memory.incarnation):
        return None
    here = sorted(
        (n for n in view.live_nodes if n.membership_id == memory.membership_id),
        key=lambda n: n.group_rank,
    )
    if not here:
        return None
    job, count = with_members(memory, here), f"{len(here)} of {memory.num_nodes}"
    forgot = f"the store has lost generation {memory.generation}"
    if len(here) == memory.num_nodes:
        return ReconcileResult(f"{forgot}, and all of its nodes remember it", new_membership=job)
    if memory.settings.quorum and len(here) * 2 <= memory.num_nodes:
        return ReconcileResult(
            f"{forgot}: {count} of its nodes are here, and more than half must be ({QUORUM})",
            is_blocked=True,
        )
    if view.return_grace_s > 0:
        return ReconcileResult(
            f"{forgot}: {count} of its nodes are here", requeue_after_s=view.return_grace_s
        )
    if memory.phase is not JobPhase.ACTIVE:
        return ReconcileResult(f"{forgot}: {count} of its nodes remember it", new_membership=job)
    lost = memory.num_nodes - len(here)
    verb = "was" if lost == 1 else "were"
    cause = f"{lost} of {memory.num_nodes} nodes {verb} lost with the store"
    return ReconcileResult(cause, new_membership=end_generation(job, cause))


def has_live_node(state: MembershipState, nodes: Iterable[Node | Leader | LeaderView]) -> bool:
    """Return whether one of these live nodes is part of this run of the job.

    Every live node is, except those that started when no node of the run was alive. While the run
    has a live node, a node that starts joins it or, if the run has ended, gets its result. When it
    has none, the nodes that start begin a new run.
    """
    return any(not n.ended_incarnation or n.ended_incarnation != state.incarnation for n in nodes)


def _start_new_run(view: LeaderView, document: Membership) -> ReconcileResult:
    if document.phase.is_terminal:
        number, ended = 0, f"the previous run has {document.phase.value} ({document.reason})"
    else:
        # A node of the run may only have lost its lease. If it rejoins, it must not see the
        # generation number decrease.
        number, ended = document.generation, "the previous run did not end"
    begun = Membership(
        view.settings, view.nonce, generation=number, supersedes=document.incarnation
    )
    return ReconcileResult(
        f"{ended} and none of its nodes is alive: a new run starts", new_membership=begun
    )


def _watch(view: LeaderView, document: Membership) -> ReconcileResult:
    if view.phase_age_s >= QUICK_FAILURE_S:
        # A generation that lasts ends the row of quick failures, whatever it is ended by itself.
        document = attrs.evolve(document, quick_failure_count=0)
    members = document.member_ids
    if members <= view.finished_ids:
        cause = f"{len(members)} node{'s' * (len(members) > 1)} done"
        return ReconcileResult(
            "all are done", new_membership=_over(view, document, JobPhase.SUCCEEDED, cause)
        )
    live = {node.id for node in view.live_nodes}
    lost = [m for m in document.members if m.id not in live and m.id not in view.finished_ids]
    if lost:
        return _reconcile_lost(view, document, lost)
    failure = _claim(document, view.live_nodes)
    if failure is not None:
        cause = f"{_name_of(failure.node, view)}: {failure.reason}"
        quick = count_quick_failures(document, failure, view.phase_age_s)
        return ReconcileResult(
            cause,
            new_membership=attrs.evolve(
                end_generation(document, cause, failure), quick_failure_count=quick
            ),
        )
    draining = [
        n
        for n in view.live_nodes
        if n.id in members and n.drain_reason and n.id not in view.finished_ids
    ]
    if draining:
        verb = "drains" if len(draining) == 1 else "drain"
        cause = f"{_names(draining, view)} {verb} ({draining[0].drain_reason})"
        return ReconcileResult(cause, new_membership=begin_resize(document, cause))
    again = [
        n
        for n in view.live_nodes
        if n.id in members and n.stopped_membership_id == document.membership_id
    ]
    if again:
        cause = f"{_names(again, view)} asked for a new generation"
        return ReconcileResult(cause, new_membership=end_generation(document, cause))
    if view.finished_ids:
        return ReconcileResult(f"{len(view.finished_ids)} of {len(members)} nodes are done")
    return _stand(view, document)


def _reconcile_lost(
    view: LeaderView, document: Membership, lost: Sequence[Node]
) -> ReconcileResult:
    """End the generation because members are lost, unless they may return or are a majority."""
    if view.return_grace_s > 0:
        reason = f"the store was unreachable, waiting for {_names(lost, view)}"
        return ReconcileResult(reason, requeue_after_s=view.return_grace_s)
    minority = _minority(view, document, lost)
    if minority is not None:
        return minority
    reason = _missing(lost, view)
    # If other members failed as well, they failed because these members were lost.
    failure = _claim(document, view.live_nodes)
    ended = end_generation(document, reason, failure, trigger=GenerationTrigger.NODE_LOSS)
    return ReconcileResult(reason, new_membership=ended)


def _missing(lost: Sequence[Node], view: LeaderView) -> str:
    left = [node for node in lost if node.id in view.left_ids]
    gone = [node for node in lost if node.id not in view.left_ids]
    said = [f"{_names(left, view)} left"] if left else []
    if gone:
        was = "was" if len(gone) == 1 else "were"
        said.append(f"{_names(gone, view)} {was} lost (killed, or cut off)")
    return "; ".join(said)


def _stand(view: LeaderView, document: Membership) -> ReconcileResult:
    """All is well: what is left is to let newcomers in, nodes and workers, and to forgive."""
    wait = restart_reset_in_s(document, view.phase_age_s)
    if wait == 0:
        window = document.settings.restart_window
        stood = f"{window:g} s (restart_window, --restart-window)"
        reason = f"generation {document.generation} ran for {stood}"
        count = f"the count of restarts, {document.restarts}, is reset"
        return ReconcileResult(
            f"{reason}: {count}",
            new_membership=attrs.evolve(document, restarts=0, quick_failure_count=0),
        )
    seated = {member.id: member.slots for member in document.members}
    ready = [n for n in view.live_nodes if n.slots != seated.get(n.id, n.slots)]
    if ready:
        first, count = ready[0], f"{ready[0].slots} worker{'s' * (ready[0].slots > 1)}"
        cause = f"{_name_of(first.id, view)} has {count} ready"
        return ReconcileResult(cause, new_membership=begin_resize(document, cause))
    decision = _admit(view, document)
    again = min((s for s in (decision.requeue_after_s, wait) if s is not None), default=None)
    return (
        decision
        if decision.new_membership is not None
        else attrs.evolve(decision, requeue_after_s=again)
    )


def _minority(
    view: LeaderView, document: Membership, lost: Sequence[Node]
) -> ReconcileResult | None:
    """To wait, where those of the last generation who are here could be the lesser part of it.

    Half is enough where the store is: whoever has gone elsewhere needs more than half.
    """
    here = {*(n.id for n in view.live_nodes), *view.finished_ids, *view.left_ids, *document.evicted}
    members = document.member_ids
    if not document.settings.quorum or len(members & here) * 2 >= len(members):
        return None
    return ReconcileResult(
        f"{_names(lost, view)} of the {len(document.members)} nodes of generation "
        f"{document.generation} cannot be reached, and half must be here ({QUORUM})",
        is_blocked=True,
    )


def _admit(view: LeaderView, document: Membership) -> ReconcileResult:
    """Newcomers wait out the last call while the members go on training."""
    limits, members = document.settings, document.member_ids
    stay = [n for n in _candidates(view, document) if not n.drain_reason]
    newcomers = [n for n in stay if n.id not in members]
    room = limits.max_nodes - len(document.members)
    surplus = [] if limits.spares is None else newcomers[room + limits.spares :]
    if surplus:
        there = [n.id for n in view.live_nodes if n.id in document.rejected_spares]
        write = reject_spares(document, (*there, *(n.id for n in surplus)))
        return ReconcileResult(
            f"{_names(surplus, view)} are not needed as spares", new_membership=write
        )
    ready = [n for n in newcomers if n.slots and not n.may_run_workers]
    if not ready or not room:
        spare = f", {len(newcomers)} spare" if newcomers else ""
        return ReconcileResult(f"generation {document.generation} stands{spare}")
    if len(ready) < room and view.since_last_arrival_s < limits.last_call_timeout:
        return _last_call(view.since_last_arrival_s, limits)
    cause = f"{_names(ready[:room], view)} joined"
    return ReconcileResult(cause, new_membership=begin_resize(document, cause))


def _gather(view: LeaderView, document: Membership) -> ReconcileResult:
    limits = document.settings
    candidates = _candidates(view, document)
    members = document.member_ids
    busy = [
        n
        for n in candidates
        if n.id in members and n.stopped_membership_id != document.membership_id
    ]
    if busy:
        names, number = _names(busy, view), document.generation
        return ReconcileResult(f"waiting for {names} to stop the workers of generation {number}")
    # Who drains was waited for until it had stopped: what it saves is what the others go on from.
    candidates = [
        n for n in candidates if not n.drain_reason and (n.id in members or not n.may_run_workers)
    ]
    here = {n.id for n in candidates}
    if view.return_grace_s > 0 and not members <= here:
        return ReconcileResult(
            "the store was unreachable, waiting for nodes", requeue_after_s=view.return_grace_s
        )
    away = [m for m in document.members if m.id not in here]
    first = _minority(view, document, away) or _loss_behind_a_failure(view, document)
    if first is not None:
        return first
    charged = document.failure is not None and members <= here
    if charged and document.restarts >= limits.max_restarts:
        return _spent(view, document, candidates)
    if (
        charged
        and document.quick_failure_count > MAX_UNDELAYED_RESTARTS
        and view.phase_age_s < RESTART_DELAY_S
    ):
        return ReconcileResult(
            f"the last {document.quick_failure_count} generations failed within "
            f"{QUICK_FAILURE_S:g} s each: the restart is delayed by {RESTART_DELAY_S:g} s",
            requeue_after_s=RESTART_DELAY_S - view.phase_age_s,
        )
    back = [n for n in candidates if n.id in members]
    starting = [n for n in back if not n.slots]
    if starting and not any(n.has_retained_workers for n in back):
        # Nobody is kept from work, and what they hold of the last generation's state counts, too.
        return ReconcileResult(f"waiting for the workers of {_names(starting, view)} to start")
    ordered = order_members(document, [n for n in candidates if n.slots])
    if len(ordered) < limits.min_nodes:
        return _too_few(ordered, document)
    return _settle(view, document, ordered, charged=charged)


def _settle(
    view: LeaderView, document: Membership, ordered: tuple[Node, ...], *, charged: bool
) -> ReconcileResult:
    limits = document.settings
    if limits.quorum and not document.membership_id and len(ordered) * 2 <= limits.max_nodes:
        return ReconcileResult(
            f"{len(ordered)} of up to {limits.max_nodes} nodes are here, and a job that may be "
            f"going on elsewhere begins with more than half ({QUORUM})",
            is_blocked=True,
        )
    newcomers = {n.id for n in ordered} - document.member_ids
    if (
        newcomers
        and len(ordered) < limits.max_nodes
        and view.since_last_arrival_s < limits.last_call_timeout
    ):
        return _last_call(view.since_last_arrival_s, limits)
    reason = f"generation {document.generation + 1} of {len(ordered)} nodes: {document.reason}"
    return ReconcileResult(
        reason, new_membership=form_generation(document, ordered, charged=charged, nonce=view.nonce)
    )


def _loss_behind_a_failure(view: LeaderView, document: Membership) -> ReconcileResult | None:
    """Where the generation is said to have ended by a failure on a node that is here, and members
    are gone: what that failed of is that these had gone, which their leases told later."""
    live, failure = {n.id for n in view.live_nodes}, document.failure
    lost = [m for m in document.members if m.id not in live]
    if (
        failure is None
        or document.trigger is not GenerationTrigger.FAILURE
        or failure.node not in live
        or not lost
    ):
        return None
    cause = _missing(lost, view)
    return ReconcileResult(
        cause,
        new_membership=end_generation(
            document, cause, failure, trigger=GenerationTrigger.NODE_LOSS
        ),
    )


def _too_few(here: Sequence[Node], document: Membership) -> ReconcileResult:
    limits = document.settings
    said = f"{len(here)} of at least {limits.min_nodes} nodes are here"
    if limits.has_fixed_ranks:
        missing = sorted(set(range(limits.max_nodes)) - {node.rank_hint for node in here})
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        said += f"; missing: node ranks {', '.join(map(str, missing[:8]))}{more}"
    return ReconcileResult(
        f"{said}; {document.reason}" if document.trigger is GenerationTrigger.NODE_LOSS else said
    )


def _spent(view: LeaderView, document: Membership, candidates: list[Node]) -> ReconcileResult:
    """The restart budget is used up: the failed node leaves, or the job ends if it needs it."""
    failure = present(document.failure, "the failure")
    limits = document.settings
    failed = [n for n in candidates if n.id == failure.node]
    budget = f"{document.restarts} of {limits.max_restarts} restarts used"
    out = [n.id for n in failed]
    if len(candidates) - len(out) >= limits.min_nodes:
        write = evict(document, out, {n.id for n in view.live_nodes})
        return ReconcileResult(f"{_names(failed, view)} must leave: {budget}", new_membership=write)
    cause = f"{_name_of(failure.node, view)}: {failure.reason} ({budget})"
    return ReconcileResult(
        cause, new_membership=_over(view, document, JobPhase.FAILED, cause, failure)
    )


def _over(
    view: LeaderView,
    document: Membership,
    phase: JobPhase,
    cause: str,
    failure: NodeFailure | None = None,
) -> Membership:
    ending = JobEnd(_name_of(view.node_id, view), view.wall_time)
    return end_job(document, phase, cause, job_end=ending, failure=failure)


def _candidates(view: LeaderView, document: Membership) -> list[Node]:
    turned_away = {*document.evicted, *document.rejected_spares}
    return [n for n in view.live_nodes if n.id not in turned_away]


def _claim(document: Membership, live: Iterable[Node]) -> NodeFailure | None:
    """The earliest failure that a member claims for this generation."""
    members = document.member_ids
    for node in live:
        is_of_this = node.id in members and node.failed_membership_id == document.membership_id
        if is_of_this and node.failure_reason is not None:
            return NodeFailure(node.id, node.failure_reason, node.was_killed)
    return None


def _last_call(quiet: float, limits: RendezvousSettings) -> ReconcileResult:
    return ReconcileResult(
        f"last call: newcomers are let in after {limits.last_call_timeout:g} s "
        "without another arrival",
        requeue_after_s=limits.last_call_timeout - quiet,
    )


def _names(nodes: Sequence[Node], view: LeaderView) -> str:
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return ", ".join(_name_of(node.id, view) for node in nodes[:3]) + more


def _name_of(node_id: str, view: LeaderView) -> str:
    """A node's host, which people know it by; its id where several nodes share that host."""
    members = () if view.membership is None else view.membership.members
    hosts = {node.id: node.host for node in (*members, *view.live_nodes)}
    host = hosts.get(node_id, node_id)
    return node_id if sum(other == host for other in hosts.values()) > 1 else host


# -- what failures cost a job ------------------------------------------------------------------
# All seconds are of the deciding node's own clock, since it first saw the document as it stands.


def count_quick_failures(document: Membership, failure: NodeFailure, stood: float) -> int:
    """Return the number of quick failures in a row, including this one after `stood` seconds.

    A worker that was killed from outside is not counted: an immediate restart makes it no more
    likely that the next one is killed as well.
    """
    if stood >= QUICK_FAILURE_S:
        return 0
    return document.quick_failure_count + (not failure.was_killed)


def restart_reset_in_s(document: Membership, stood: float) -> float | None:
    """Seconds until the generation that stands has earned the restarts back; None for never."""
    window = document.settings.restart_window
    if window <= 0 or not (document.restarts or document.quick_failure_count):
        return None
    return max(0.0, window - stood)


# -- what a node wants, and what the job means to it: pure -----------------------------------------


@attrs.frozen
class NodeIntent:
    """What an agent wants said of its node, and what its job's state means to that.

    A node asks for a generation only when no workers of an earlier one are left, and it falls
    silent rather than speak for workers that the others have gone on without.

    node: its record. silent: it has not asked for a generation yet. memory: the last state of which
    it was a member. finished: the generation (as its membership) whose workers have succeeded here.
    closing: why the job is to end for all, until that is written; empty if it need not be.
    late_for: the incarnation that had ended when this node started, and whose result it gets. Such
    a node is not announced, so that it does not keep the ended run alive for nodes that start after
    it.
    """

    node: Node
    has_not_joined: bool = True
    remembered_state: MembershipState | None = None
    finished_membership_id: str = ""
    close_reason: str = ""
    ended_incarnation: str = ""

    @property
    def is_joining(self) -> bool:
        """Whether it is in no generation, or seeks a later one than it was in."""
        return not self.node.may_run_workers

    @property
    def current_generation(self) -> int:
        """The number of the last generation that it was in; 0 for none."""
        return 0 if self.remembered_state is None else self.remembered_state.generation

    @property
    def incarnation(self) -> str:
        """That of the last generation that it was in; empty for none."""
        return "" if self.remembered_state is None else self.remembered_state.incarnation

    def with_node_fields(self, **fields: Any) -> NodeIntent:
        """The same, with other fields in the record."""
        return attrs.evolve(self, node=attrs.evolve(self.node, **fields))

    # What its agent wants

    def request_join(self) -> NodeIntent:
        """No workers of ours are left, and we want the generation after the one that we held."""
        stopped = self.with_node_fields(
            may_run_workers=False, stopped_membership_id=self.node.membership_id
        )
        return attrs.evolve(stopped, has_not_joined=False, finished_membership_id="")

    def receive_result(self) -> NodeIntent:
        """Do not take part in a later run, unless the agent asks for a generation again."""
        return attrs.evolve(
            self, has_not_joined=self.has_not_joined or bool(self.ended_incarnation)
        )

    def enter_generation(self, state: MembershipState, seat: RankAssignment) -> NodeIntent:
        """We are a member of this generation and may run its workers."""
        member = self.with_node_fields(
            membership_id=state.membership_id,
            group_rank=seat.group_rank,
            may_run_workers=True,
            ended_incarnation="",
        )
        return attrs.evolve(member, remembered_state=state)

    def record_failure(self, reason: str, *, killed: bool = False) -> NodeIntent:
        """Our workers of the held generation failed."""
        of = self.node.membership_id
        return self.with_node_fields(
            failure_reason=reason, failed_membership_id=of, was_killed=killed
        )

    def record_success(self) -> NodeIntent:
        """Our workers of the held generation succeeded."""
        return attrs.evolve(self, finished_membership_id=self.node.membership_id)

    # What is read in the store

    def on_first_read(
        self,
        state: MembershipState | None,
        seat: RankAssignment | None,
        nodes: Iterable[Node | Leader],
    ) -> NodeIntent:
        """Decide at the first look at the store whether this node is part of the run found there.

        nodes: those that are alive, or the one of them that leads.
        """
        if state is None:
            return self
        if seat is not None:
            # Another had it before us, under our id, and what it ran is gone with it.
            of = state.membership_id
            return self.with_node_fields(
                membership_id=of, group_rank=seat.group_rank, stopped_membership_id=of
            )
        return self.with_node_fields(ended_incarnation=state.incarnation).check_run_alive(
            state, nodes
        )

    def on_read(self, state: MembershipState | None) -> NodeIntent:
        """While joining, whatever was held in another incarnation counts for nothing."""
        if state is None:
            return self
        if state.membership_id and state.membership_id == self.node.membership_id:
            return attrs.evolve(self, remembered_state=state)
        if (
            not self.current_generation
            or not self.is_joining
            or state.incarnation == self.incarnation
        ):
            return self
        if is_replaceable(state, self.incarnation):
            return self
        return attrs.evolve(
            self.with_node_fields(membership_id="", group_rank=0, stopped_membership_id=""),
            remembered_state=None,
        )

    def check_run_alive(
        self, state: MembershipState | None, nodes: Iterable[Node | Leader]
    ) -> NodeIntent:
        """Become part of the run after all if one of its nodes is back, such as a node whose lease
        had ended while it was stopped.

        nodes: those that are known to be alive.
        """
        if state is None or self.node.ended_incarnation != state.incarnation:
            return self
        if not has_live_node(state, nodes):
            return self
        late_for = state.incarnation if state.phase.is_terminal else ""
        return attrs.evolve(self.with_node_fields(ended_incarnation=""), ended_incarnation=late_for)

    def node_record(self, state: MembershipState | None) -> Node | None:
        """What should stand in the store for this node; None for nothing."""
        if self.has_not_joined or (
            state is not None and state.incarnation == self.ended_incarnation
        ):
            return None
        if self.is_joining:
            if state is None or state.phase is not JobPhase.FORMING:
                return self.node
            if self.node.stopped_membership_id == state.membership_id:
                return self.node
            # A generation that came and went while this node slept is one that it has no workers
            # of; unless it says so, the others wait for ever for it to stop them.
            return attrs.evolve(self.node, stopped_membership_id=state.membership_id)
        goes_on = state is not None and state.membership_id == self.node.membership_id
        return self.node if goes_on or is_replaceable(state, self.incarnation) else None

    def final_change(self, state: MembershipState | None) -> Change | None:
        """Why this node has nothing left to wait for, if so."""
        if state is None:
            return None
        me = self.node.id
        if state.phase.is_terminal and self.node.ended_incarnation != state.incarnation:
            node = "" if state.failure is None else state.failure.node
            return Change(ChangeKind(state.phase.value), state.reason, node)
        if me in state.evicted:
            spent = f"{state.restarts} of {state.settings.max_restarts} restarts used"
            reason = f"this node's workers failed and the job goes on without it ({spent})"
            return Change(ChangeKind.EVICTED, reason, me)
        if me in state.rejected_spares:
            wanted = (
                f"{state.settings.max_nodes} nodes and {state.settings.spares} spares (--spares)"
            )
            return Change(
                ChangeKind.NOT_NEEDED, f"the job has all the nodes it wants, {wanted}", me
            )
        return None

    def change(self, state: MembershipState | None) -> Change | None:
        """What has become of the generation that this node is in; None while it stands.

        A store that has forgotten it is no news: those who remember are going to say it again.
        """
        final = self.final_change(state)
        if final is not None or self.is_joining or state is None:
            return final
        if is_replaceable(state, self.incarnation):
            return None
        if state.incarnation != self.incarnation:
            new = "a new run of the job started while this node was not connected to the store"
            return Change(ChangeKind.GENERATION_ENDED, new)
        if state.membership_id != self.node.membership_id:
            return Change(ChangeKind.GENERATION_ENDED, state.reason)
        if state.phase is JobPhase.ACTIVE:
            return None
        return Change(
            ChangeKind.RESIZE if state.is_planned else ChangeKind.GENERATION_ENDED, state.reason
        )
