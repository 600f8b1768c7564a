"""Decide the next membership of a job from one snapshot of its store. Pure functions.

The leader passes a `LeaderView` to `reconcile`. The result contains the membership to write, if
any, and the reason, which is logged and shown to waiting nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from ..errors import require_not_none
from ..options import RendezvousSettings
from .bad_nodes import ExcludedHost, bad_hosts, describe_failures, excluded_hosts
from .blame import Evidence, FailureDetails, FailureKind, Verdict, blame
from .membership import (
    GenerationTrigger,
    JobAction,
    JobEnd,
    JobPhase,
    JobRequest,
    Membership,
    MembershipState,
    NodeRecord,
    begin_resize,
    begin_restart,
    begin_stop,
    end_generation,
    end_job,
    evict,
    exclude_hosts,
    form_generation,
    has_live_node,
    is_replaceable,
    record_first_failure,
    reject_spares,
    with_members,
)
from .rank_assignment import order_members

QUORUM_HINT = (
    "without a quorum the job might continue twice; quorum=False, or --rdzv-conf quorum=any, "
    "allows that"
)
QUICK_FAILURE_S = 10.0  # a generation that fails sooner than this is a quick failure
MAX_UNDELAYED_RESTARTS = 2  # quick failures in a row whose restart is not delayed
RESTART_DELAY_S = 5.0  # delay of each restart after more quick failures in a row
MAX_NAMES = 3  # nodes that a reason names; it counts the others


@attrs.frozen
class LeaderView:
    """Everything that the leader has read for one decision.

    All ages are in seconds on the leader's own monotonic clock.
    """

    node_id: str  # the leader
    settings: RendezvousSettings  # the leader's settings
    membership: Membership | None
    live_nodes: tuple[
        NodeRecord, ...
    ]  # nodes with a valid lease, most recently written record last
    finished_ids: frozenset[str] = frozenset()  # members whose workers have succeeded
    left_ids: frozenset[str] = frozenset()  # members that have left on purpose
    details: Mapping[str, FailureDetails] = attrs.field(factory=dict)  # by id of the failed node
    remembered_state: MembershipState | None = None  # state of a job that the store has lost
    since_last_arrival_s: float = 0.0  # time since the leader first saw the newest node
    return_grace_s: float = 0.0  # nodes may still be missing this long because the store was away
    phase_age_s: float = 0.0  # time since the leader first saw this phase of this generation
    nonce: str = ""  # text that is used for no other generation or run
    inactive_incarnation: str = ""  # as in the leader's own record
    wall_time: str = ""  # date and time, for messages


@attrs.frozen
class ReconcileResult:
    """A decision of the leader."""

    reason: str
    new_membership: Membership | None = None  # the membership to write, if any
    requeue_after_s: float | None = None  # the decision may change after this time without events
    is_blocked: bool = False  # too few nodes are here, and the job may continue at another store


def reconcile(view: LeaderView) -> ReconcileResult:
    """Decide the next step of the job."""
    membership = view.membership
    if membership is not None:
        # Any client of the store can write such a key. Other nodes than the members do not count.
        members = membership.member_ids
        finished_ids, left_ids = view.finished_ids & members, view.left_ids & members
        view = attrs.evolve(view, finished_ids=finished_ids, left_ids=left_ids)
    restored = _restore_lost_generation(view)
    if restored is not None:
        return restored
    is_empty = membership is None or not (membership.membership_id or membership.phase.is_terminal)
    if view.return_grace_s > 0 and is_empty:
        # Nodes that remember the job may be about to reconnect.
        reason = "the store was unreachable, and has lost the job"
        return ReconcileResult(reason, requeue_after_s=view.return_grace_s)
    if membership is None:
        first = Membership(view.settings, view.nonce)
        return ReconcileResult("the job's first node writes its settings", first)
    if not has_live_node(membership, (view, *view.live_nodes)):
        return _start_new_run(view, membership)
    if membership.phase.is_terminal:
        return ReconcileResult(f"the job has {membership.phase.value}: {membership.reason}")
    if membership.phase is JobPhase.ACTIVE:
        return _reconcile_active(view, membership)
    return _reconcile_forming(view, membership)


def num_nodes_waiting(view: LeaderView) -> int:
    """Return how many nodes wait for the current generation to end and have a place in the next.

    Joining nodes count. Members that have stopped their workers count once the generation has
    finished. Spares beyond max_nodes do not count, as no worker needs to be restarted for them.
    """
    membership = view.membership
    if membership is None or not membership.membership_id or membership.phase.is_terminal:
        return 0
    members, is_forming = membership.member_ids, membership.phase is JobPhase.FORMING
    ready = [n for n in _candidates(view, membership) if n.slots and not n.drain_reason]
    returned = [n for n in ready if is_forming and n.id in members and _is_stopped(n, membership)]
    joining = [n for n in ready if n.id not in members and not n.may_run_workers]
    staying = sum(n.id in members for n in ready) if is_forming else len(members)
    places = membership.settings.max_nodes - (staying - len(returned))
    return min(len(returned) + len(joining), places)


def _restore_lost_generation(view: LeaderView) -> ReconcileResult | None:
    """Restore a generation that the store has lost from its live nodes, or wait for more of them.

    Return None if the store has lost nothing, or if none of these nodes is alive.
    """
    memory = view.remembered_state
    if memory is None or not is_replaceable(view.membership, memory.incarnation):
        return None
    present_nodes = [n for n in view.live_nodes if n.membership_id == memory.membership_id]
    if not present_nodes:
        return None
    present_nodes.sort(key=lambda node: node.group_rank)
    restored, here = with_members(memory, present_nodes), len(present_nodes)
    prefix = f"the store has lost generation {memory.generation}"
    count = f"{here} of {memory.num_nodes} of its nodes"
    if here == memory.num_nodes:
        return ReconcileResult(f"{prefix}, and all of its nodes remember it", restored)
    if memory.settings.quorum and here * 2 <= memory.num_nodes:
        reason = f"{prefix}: {count} are here, and more than half must be ({QUORUM_HINT})"
        return ReconcileResult(reason, is_blocked=True)
    if view.return_grace_s > 0:
        return ReconcileResult(f"{prefix}: {count} are here", requeue_after_s=view.return_grace_s)
    if memory.phase is not JobPhase.ACTIVE:
        return ReconcileResult(f"{prefix}: {count} remember it", restored)
    lost = memory.num_nodes - here
    verb = "was" if lost == 1 else "were"
    reason = f"{lost} of {memory.num_nodes} nodes {verb} lost with the store"
    return ReconcileResult(reason, end_generation(restored, reason))


def _start_new_run(view: LeaderView, membership: Membership) -> ReconcileResult:
    if membership.phase.is_terminal:
        generation = 0
        previous_run = f"the previous run has {membership.phase.value} ({membership.reason})"
    else:
        # A node of the run may only have lost its lease. If it rejoins, it must not see the
        # generation number decrease.
        generation, previous_run = membership.generation, "the previous run did not end"
    new_run = Membership(
        view.settings, view.nonce, generation=generation, supersedes=membership.incarnation
    )
    return ReconcileResult(
        f"{previous_run} and none of its nodes is alive: a new run starts", new_run
    )


# -- while a generation is active ------------------------------------------------------------------


def _reconcile_active(view: LeaderView, membership: Membership) -> ReconcileResult:
    if view.phase_age_s >= QUICK_FAILURE_S:
        membership = attrs.evolve(membership, quick_failure_count=0)
    members = membership.member_ids
    if members <= view.finished_ids:
        reason = f"{len(members)} node{'s' * (len(members) > 1)} done"
        return ReconcileResult(
            "all are done", _end_job(view, membership, JobPhase.SUCCEEDED, reason)
        )
    live = {node.id for node in view.live_nodes}
    lost = [m for m in membership.members if m.id not in live and m.id not in view.finished_ids]
    if lost:
        return _reconcile_after_loss(view, membership, lost)
    verdict = blame(_evidence_of_failures(view, membership))
    if verdict is not None:
        reason = _describe(verdict, view)
        count = count_quick_failures(membership, verdict.kind, view.phase_age_s)
        forming = end_generation(membership, reason, verdict)
        return ReconcileResult(reason, attrs.evolve(forming, quick_failure_count=count))
    requested = _requested_change(view, membership)
    if requested is not None:
        return ReconcileResult(requested.reason, requested)
    live_members = [n for n in view.live_nodes if n.id in members]
    draining = [n for n in live_members if n.drain_reason and n.id not in view.finished_ids]
    if draining:
        verb = "drains" if len(draining) == 1 else "drain"
        reason = f"{_names(draining, view)} {verb} ({draining[0].drain_reason})"
        return ReconcileResult(reason, begin_resize(membership, reason))
    stopped = [n for n in live_members if _is_stopped(n, membership)]
    if stopped:
        reason = f"{_names(stopped, view)} asked for a new generation"
        return ReconcileResult(reason, end_generation(membership, reason))
    if view.finished_ids:
        return ReconcileResult(f"{len(view.finished_ids)} of {len(members)} nodes are done")
    return _reconcile_healthy(view, membership)


def _requested_change(view: LeaderView, membership: Membership) -> Membership | None:
    """Return the membership after a request to stop the job or to restart its workers, if any."""
    requests = _list_requests(view, membership)
    for request in requests:
        if request.action is JobAction.STOP:
            return begin_stop(membership, request.reason)
    for request in requests:
        if request.membership_id == membership.membership_id:
            return begin_restart(membership, request.reason)
    return None


def _reconcile_after_loss(
    view: LeaderView, membership: Membership, lost: Sequence[NodeRecord]
) -> ReconcileResult:
    """End the generation after a loss, unless the lost may return or a quorum is missing."""
    if view.return_grace_s > 0:
        reason = f"the store was unreachable, waiting for {_names(lost, view)}"
        return ReconcileResult(reason, requeue_after_s=view.return_grace_s)
    blocked = _wait_for_quorum(view, membership, lost)
    if blocked is not None:
        return blocked
    verdict = blame((), _evidence_of_loss(lost, view))
    reason = _describe_loss(lost, view)
    return ReconcileResult(reason, end_generation(membership, reason, verdict))


def _reconcile_healthy(view: LeaderView, membership: Membership) -> ReconcileResult:
    """Admit joining nodes and started workers, and reset the restart budget when it is time."""
    reset_in = restart_reset_in_s(membership, view.phase_age_s)
    if reset_in == 0:
        window = f"{membership.settings.restart_window:g} s (restart_window, --restart-window)"
        reason = (
            f"generation {membership.generation} ran for {window}: the count of restarts, "
            f"{membership.restarts}, is reset"
        )
        return ReconcileResult(reason, attrs.evolve(membership, restarts=0, quick_failure_count=0))
    slots = {member.id: member.slots for member in membership.members}
    changed = [n for n in view.live_nodes if n.slots != slots.get(n.id, n.slots)]
    if changed:
        workers = f"{changed[0].slots} worker{'s' * (changed[0].slots > 1)}"
        reason = f"{_name_of(changed[0].id, view)} has {workers} ready"
        return ReconcileResult(reason, begin_resize(membership, reason))
    result = _admit_joining(view, membership)
    if result.new_membership is not None or reset_in is None:
        return result
    again = reset_in if result.requeue_after_s is None else min(result.requeue_after_s, reset_in)
    return attrs.evolve(result, requeue_after_s=again)


def _admit_joining(view: LeaderView, membership: Membership) -> ReconcileResult:
    """Begin a resize for joining nodes. The members keep training during the last call."""
    settings, members = membership.settings, membership.member_ids
    staying = [n for n in _candidates(view, membership) if not n.drain_reason]
    joining = [n for n in staying if n.id not in members]
    places = settings.max_nodes - len(membership.members)
    surplus = [] if settings.spares is None else joining[places + settings.spares :]
    if surplus:
        earlier = [n.id for n in view.live_nodes if n.id in membership.rejected_spares]
        rejected = reject_spares(membership, (*earlier, *(n.id for n in surplus)))
        return ReconcileResult(f"{_names(surplus, view)} are not needed as spares", rejected)
    ready = [n for n in joining if n.slots and not n.may_run_workers]
    if not ready or not places:
        spares = f", {len(joining)} spare" if joining else ""
        return ReconcileResult(f"generation {membership.generation} is active{spares}")
    if len(ready) < places and view.since_last_arrival_s < settings.last_call_timeout:
        return _wait_for_last_call(view, settings)
    reason = f"{_names(ready[:places], view)} joined"
    return ReconcileResult(reason, begin_resize(membership, reason))


# -- while the next generation forms ---------------------------------------------------------------


def _reconcile_forming(view: LeaderView, membership: Membership) -> ReconcileResult:
    """Form the next generation once all members have stopped their workers, left or are lost."""
    stops = [r for r in _list_requests(view, membership) if r.action is JobAction.STOP]
    if stops and not membership.stop_reason:
        reason = stops[0].reason
        return ReconcileResult(reason, attrs.evolve(membership, stop_reason=reason))
    members = membership.member_ids
    if membership.is_planned:
        result = _reconcile_planned_end(view, membership)
        if result is not None:
            return result
    candidates = _candidates(view, membership)
    busy = [n for n in candidates if n.id in members and not _is_stopped(n, membership)]
    if busy:
        generation = membership.generation
        reason = f"waiting for {_names(busy, view)} to stop the workers of generation {generation}"
        return ReconcileResult(reason)
    if stop_reason := membership.stop_reason:
        # The nodes that asked for it have left. A node that missed the request must not continue.
        stopped = _end_job(view, membership, JobPhase.STOPPED, stop_reason)
        return ReconcileResult(f"the job ends: {stop_reason}", stopped)
    # A draining node had stopped before this point, so its final save is complete. A node that
    # is not a member may run workers only of a generation that the store has lost.
    candidates = [
        n for n in candidates if not n.drain_reason and (n.id in members or not n.may_run_workers)
    ]
    here = {n.id for n in candidates}
    if view.return_grace_s > 0 and not members <= here:
        reason = "the store was unreachable, waiting for nodes"
        return ReconcileResult(reason, requeue_after_s=view.return_grace_s)
    absent = [m for m in membership.members if m.id not in here]
    result = _wait_for_quorum(view, membership, absent)
    if result is not None:
        return result
    before, membership = membership, _review_verdict(view, membership)
    if membership.trigger is not before.trigger:
        return ReconcileResult(membership.reason, membership)
    verdict = membership.verdict
    charged = verdict is not None and verdict.kind is not FailureKind.LOST and members <= here
    if charged:
        membership = record_first_failure(membership)
        result = _exclude_bad_hosts(membership, candidates)
        result = result or _refuse_or_delay_restart(view, membership, candidates)
        if result is not None:
            return result
        membership = _explain_bad_host(membership, candidates)
    returned = [n for n in candidates if n.id in members]
    starting = [n for n in returned if not n.slots]
    if starting and not any(n.has_retained_workers for n in returned):
        # No workers would be kept from training by this wait, and the starting nodes may hold
        # parts of the training state.
        return ReconcileResult(f"waiting for the workers of {_names(starting, view)} to start")
    ordered = order_members(membership, [n for n in candidates if n.slots])
    if len(ordered) < membership.settings.min_nodes:
        return _wait_for_more_nodes(view, membership, ordered, absent)
    return _form_or_wait(view, membership, ordered, charged=charged)


def _reconcile_planned_end(view: LeaderView, membership: Membership) -> ReconcileResult | None:
    """Return what to do about a loss or a failure while workers stop at a step that they agree on.

    The others would wait for a lost node until their time to save is over. So the end is no longer
    planned, and its nodes are told. A node that leaves on purpose has told them by itself.

    A failure is charged like one that ends a generation: workers that fail again and again must
    use up the budget, whatever ends their generations. A failed collective may only mean that
    workers of another node have stopped already.
    """
    live = {node.id for node in view.live_nodes}
    accounted_for = live | view.finished_ids | view.left_ids
    lost = [member for member in membership.members if member.id not in accounted_for]
    if lost:
        return _reconcile_after_loss(view, membership, lost)
    verdict = blame(_evidence_of_failures(view, membership))
    if verdict is None or not verdict.kind.is_own:
        return None
    if membership.verdict is not None or membership.stop_reason:
        return None
    failed = attrs.evolve(
        membership,
        verdict=verdict,
        reason=_describe(verdict, view),
        quick_failure_count=count_quick_failures(membership, verdict.kind, view.phase_age_s),
    )
    return ReconcileResult(failed.reason, failed)


def _exclude_bad_hosts(
    membership: Membership, candidates: Sequence[NodeRecord]
) -> ReconcileResult | None:
    """Exclude hosts whose workers keep failing, or return None if there is nothing to exclude."""
    settings, verdict = membership.settings, membership.verdict
    if settings.has_fixed_ranks:
        return None  # No other node can have the rank of the excluded one.
    if verdict is None or not verdict.named_node:
        return None  # The last failure is evidence against no host.
    counts = _bad_hosts(membership)
    names = (node.host for node in candidates)
    hosts = excluded_hosts(counts, names, min_nodes=settings.min_nodes)
    if not hosts:
        return None
    excluded = [
        ExcludedHost(host, describe_failures(counts[host], settings.bad_node_window))
        for host in hosts
    ]
    texts = (f"{item.host} is excluded, because {item.reason}" for item in excluded)
    reason = f"{'; '.join(texts)}; the last failure was {membership.reason}"
    return ReconcileResult(reason, exclude_hosts(membership, excluded, reason))


def _bad_hosts(membership: Membership) -> dict[str, int]:
    settings = membership.settings
    return bad_hosts(
        membership.first_failures,
        limit=settings.bad_node_failures,
        window=settings.bad_node_window,
    )


def _explain_bad_host(membership: Membership, candidates: Sequence[NodeRecord]) -> Membership:
    """Add to the reason why the host of the last failure is not excluded, if it is a bad host."""
    settings, verdict = membership.settings, membership.verdict
    if verdict is None or not verdict.named_host:
        return membership
    counts, host = _bad_hosts(membership), verdict.named_host
    others = sum(node.host != host for node in candidates)
    if host not in counts or not others:
        return membership
    reason = (
        f"{membership.reason}; {host} stays in the job although "
        f"{describe_failures(counts[host], settings.bad_node_window)}: without it, {others} of at "
        f"least {settings.min_nodes} nodes would be here"
    )
    return attrs.evolve(membership, reason=reason)


def _refuse_or_delay_restart(
    view: LeaderView, membership: Membership, candidates: Sequence[NodeRecord]
) -> ReconcileResult | None:
    """Enforce the restart budget and the restart delay. Return None if the restart may begin."""
    if membership.restarts >= membership.settings.max_restarts:
        return _evict_or_end_job(view, membership, candidates)
    count, verdict = membership.quick_failure_count, membership.verdict
    # A kill from outside does not make it more likely that the next worker fails.
    is_killed = verdict is not None and verdict.kind is FailureKind.KILLED
    is_delayed = count > MAX_UNDELAYED_RESTARTS and not is_killed
    if is_delayed and view.phase_age_s < RESTART_DELAY_S:
        return ReconcileResult(
            f"the last {count} generations failed within {QUICK_FAILURE_S:g} s each: the restart "
            f"is delayed by {RESTART_DELAY_S:g} s",
            requeue_after_s=RESTART_DELAY_S - view.phase_age_s,
        )
    return None


def _evict_or_end_job(
    view: LeaderView, membership: Membership, candidates: Sequence[NodeRecord]
) -> ReconcileResult:
    """Evict the node that caused the failure.

    End the job if the evidence names no node, or if too few nodes would remain.
    """
    verdict = require_not_none(membership.verdict, "the verdict")
    settings = membership.settings
    failed = [n for n in candidates if n.id == verdict.named_node]
    budget = f"{membership.restarts} of {settings.max_restarts} restarts used"
    if failed and len(candidates) - len(failed) >= settings.min_nodes:
        ids = [n.id for n in failed]
        evicted = evict(membership, ids, {n.id for n in view.live_nodes})
        return ReconcileResult(f"{_names(failed, view)} must leave: {budget}", evicted)
    reason = f"{_describe(verdict, view)} ({budget})"
    verdict = attrs.evolve(verdict, details=view.details.get(verdict.evidence.node))
    return ReconcileResult(reason, _end_job(view, membership, JobPhase.FAILED, reason, verdict))


def _form_or_wait(
    view: LeaderView, membership: Membership, ordered: tuple[NodeRecord, ...], *, charged: bool
) -> ReconcileResult:
    """Form the next generation of these nodes, or wait for a quorum or for the last call."""
    settings = membership.settings
    is_first = not membership.membership_id
    if settings.quorum and is_first and len(ordered) * 2 <= settings.max_nodes:
        return ReconcileResult(
            f"{len(ordered)} of up to {settings.max_nodes} nodes are here, and a job that may "
            f"run elsewhere begins with more than half ({QUORUM_HINT})",
            is_blocked=True,
        )
    joining = {n.id for n in ordered} - membership.member_ids
    is_last_call = view.since_last_arrival_s < settings.last_call_timeout
    if joining and len(ordered) < settings.max_nodes and is_last_call:
        return _wait_for_last_call(view, settings)
    number = membership.generation + 1
    reason = f"generation {number} of {len(ordered)} nodes: {membership.reason}"
    formed = form_generation(membership, ordered, charged=charged, nonce=view.nonce)
    return ReconcileResult(reason, formed)


def _wait_for_more_nodes(
    view: LeaderView,
    membership: Membership,
    ordered: Sequence[NodeRecord],
    absent: Sequence[NodeRecord],
) -> ReconcileResult:
    settings = membership.settings
    reason = f"{len(ordered)} of at least {settings.min_nodes} nodes are here"
    if settings.has_fixed_ranks:
        missing = sorted(set(range(settings.max_nodes)) - {node.rank_hint for node in ordered})
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        reason += f"; missing: node ranks {', '.join(map(str, missing[:8]))}{more}"
    left = [node for node in absent if node.id in view.left_ids]
    if membership.trigger is GenerationTrigger.NODE_LOSS:
        reason += f"; {membership.reason}"
    elif left:
        reason += f"; {_names(left, view)} left"
    return ReconcileResult(reason)


# -- rules that several decisions use --------------------------------------------------------------


def count_quick_failures(membership: Membership, kind: FailureKind, age_s: float) -> int:
    """Return the number of quick failures in a row, including one of this kind after `age_s`.

    A worker that was killed from outside is not counted: an immediate restart does not make it
    more likely that the next worker is killed as well.
    """
    if age_s >= QUICK_FAILURE_S:
        return 0
    return membership.quick_failure_count + (kind is not FailureKind.KILLED)


def restart_reset_in_s(membership: Membership, age_s: float) -> float | None:
    """Return the seconds until the restart budget is reset, or None if it will not be."""
    window = membership.settings.restart_window
    if window <= 0 or not (membership.restarts or membership.quick_failure_count):
        return None
    return max(0.0, window - age_s)


def _wait_for_quorum(
    view: LeaderView, membership: Membership, absent: Sequence[NodeRecord]
) -> ReconcileResult | None:
    """Return a result that waits if fewer than half of the last generation's members are here.

    Members that have finished, left on purpose, or must leave are not counted as missing.

    Half of the members are enough at the store that has the job, because nodes that moved to
    another store need more than half.
    """
    if not membership.settings.quorum:
        return None
    live = (n.id for n in view.live_nodes)
    excluded = (n.id for n in membership.members if membership.exclusion_of(n.host) is not None)
    accounted_for = {*live, *view.finished_ids, *view.left_ids, *membership.evicted, *excluded}
    members = membership.member_ids
    if len(members & accounted_for) * 2 >= len(members):
        return None
    return ReconcileResult(
        f"{_names(absent, view)} of the {len(members)} nodes of generation "
        f"{membership.generation} cannot be reached, and half must be here ({QUORUM_HINT})",
        is_blocked=True,
    )


def _wait_for_last_call(view: LeaderView, settings: RendezvousSettings) -> ReconcileResult:
    timeout = settings.last_call_timeout
    return ReconcileResult(
        f"the rendezvous completes after {timeout:g} s without a new node",
        requeue_after_s=timeout - view.since_last_arrival_s,
    )


def _end_job(
    view: LeaderView,
    membership: Membership,
    phase: JobPhase,
    reason: str,
    verdict: Verdict | None = None,
) -> Membership:
    job_end = JobEnd(_name_of(view.node_id, view), view.wall_time)
    return end_job(membership, phase, reason, job_end=job_end, verdict=verdict)


def _candidates(view: LeaderView, membership: Membership) -> list[NodeRecord]:
    """Return the live nodes that are neither evicted, rejected as spares nor excluded."""
    rejected = {*membership.evicted, *membership.rejected_spares}
    excluded = {item.host for item in membership.excluded_hosts}
    return [n for n in view.live_nodes if n.id not in rejected and n.host not in excluded]


def _is_stopped(node: NodeRecord, membership: Membership) -> bool:
    return node.stopped_membership_id == membership.membership_id


def _evidence_of_failures(view: LeaderView, membership: Membership) -> list[Evidence]:
    """Return the evidence of failed workers, of one node each, the first report in front.

    The present verdict keeps the evidence of a node that was lost after it had reported.
    """
    found: dict[str, Evidence] = {}
    verdict, members = membership.verdict, membership.member_ids
    if verdict is not None and membership.phase is JobPhase.FORMING:
        found[verdict.evidence.node] = verdict.evidence
    for node in view.live_nodes:
        is_current = node.evidence_of == membership.membership_id
        if node.evidence is not None and is_current and node.id in members:
            # The record itself says what it is about, not what is written in it.
            found[node.id] = attrs.evolve(node.evidence, node=node.id, host=node.host)
    excluded = (FailureKind.LOST, FailureKind.STOPPED)
    failures = [one for one in found.values() if one.kind not in excluded]
    collective = next((one for one in failures if one.kind is FailureKind.COLLECTIVE), None)
    if collective is not None:
        who = _name_of(collective.node, view)
        text = f"its workers had exited with code 0 before {who}: {collective.text}"
        failures.extend(
            Evidence(FailureKind.LEFT, text, node=member.id, host=member.host)
            for member in membership.members
            if member.id in view.finished_ids
        )
    return failures


def _evidence_of_loss(lost: Sequence[NodeRecord], view: LeaderView) -> list[Evidence]:
    return [
        Evidence(FailureKind.LOST, _describe_loss([node], view), node=node.id, host=node.host)
        for node in lost
    ]


def _review_verdict(view: LeaderView, membership: Membership) -> Membership:
    """Return the membership with the verdict on all evidence, once all members have stopped.

    The first node that reports is often one that has only noticed a lost peer. By now, each node
    has reported what happened to its own workers, and the leases of lost nodes have expired.
    """
    before = membership.verdict
    if before is None or before.kind is FailureKind.LOST:
        return membership
    lost: list[NodeRecord] = []
    if membership.trigger is GenerationTrigger.FAILURE:
        live = {node.id for node in view.live_nodes} | {*membership.evicted}
        is_excluded = membership.exclusion_of
        lost = [m for m in membership.members if m.id not in live and not is_excluded(m.host)]
    evidence = _evidence_of_failures(view, membership)
    verdict = blame(evidence, _evidence_of_loss(lost, view))
    if verdict is None or verdict == before:
        return membership
    if verdict.kind is FailureKind.LOST:
        return end_generation(membership, _describe_loss(lost, view), verdict)
    if verdict.evidence == before.evidence:
        return attrs.evolve(membership, verdict=verdict)
    count, killed = membership.quick_failure_count, FailureKind.KILLED
    if verdict.kind is killed and before.kind is not killed:
        count = max(0, count - 1)
    reason = _describe(verdict, view)
    return attrs.evolve(membership, verdict=verdict, reason=reason, quick_failure_count=count)


def _describe(verdict: Verdict, view: LeaderView) -> str:
    return f"{_name_of(verdict.evidence.node, view)}: {verdict.evidence.text}"


def _list_requests(view: LeaderView, membership: Membership) -> list[JobRequest]:
    """Return the requests for the whole job that live members have received."""
    members = membership.member_ids
    return [n.request for n in view.live_nodes if n.request is not None and n.id in members]


def _describe_loss(lost: Iterable[NodeRecord], view: LeaderView) -> str:
    left: list[NodeRecord] = []
    vanished: list[NodeRecord] = []
    for node in lost:
        (left if node.id in view.left_ids else vanished).append(node)
    parts = [f"{_names(left, view)} left"] if left else []
    if vanished:
        was = "was" if len(vanished) == 1 else "were"
        parts.append(f"{_names(vanished, view)} {was} lost (killed, or cut off)")
    return "; ".join(parts)


def _names(nodes: Sequence[NodeRecord], view: LeaderView) -> str:
    more = f" and {len(nodes) - MAX_NAMES} more" if len(nodes) > MAX_NAMES else ""
    return ", ".join(_name_of(node.id, view) for node in nodes[:MAX_NAMES]) + more


def _name_of(node_id: str, view: LeaderView) -> str:
    """Return the node's host, or its id if several nodes are on that host."""
    members = () if view.membership is None else view.membership.members
    hosts = {node.id: node.host for node in (*members, *view.live_nodes)}
    host = hosts.get(node_id, node_id)
    is_shared = sum(other == host for other in hosts.values()) > 1
    return node_id if is_shared else host
