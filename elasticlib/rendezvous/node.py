"""One node of a job in the rendezvous: what it reads, decides and writes in each of its turns.

A RendezvousNode has no thread and no clock. Its caller, the driver or the simulation in the tests,
gives it the time, the requests of its agent and what the store has delivered. It gets reports back.
The node calls the store that it was given, from one thread. A StoreError may end a turn at any
call: the next turn finds what was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

import attrs

from ..endpoint import split_endpoint
from ..errors import (
    ConfigError,
    RendezvousConfigError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreConnectionError,
    StoreError,
    StoreRejectedError,
    format_error,
    require_not_none,
)
from ..stores.interface import ABSENT, Entry, Listing, Store
from .blame import MAX_DETAILS, Evidence, FailureDetails, FailureKind
from .interface import (
    Joined,
    MembershipChanged,
    RendezvousInfo,
    RendezvousStoreInfo,
    Report,
    ReportKind,
)
from .job_store import JobStore
from .membership import (
    Change,
    ChangeKind,
    GenerationTrigger,
    JobEnd,
    JobPhase,
    Leader,
    LeaderStatus,
    Membership,
    MembershipState,
    Node,
    NodeRecord,
    RendezvousSettings,
    RendezvousTimeouts,
    end_job,
    has_live_node,
    is_replaceable,
)
from .node_intent import NodeIntent
from .rank_assignment import RankAssignment, natural_sort_key, num_shards, shard_members, shard_of
from .reconcile import LeaderView, ReconcileResult, num_nodes_waiting, reconcile
from .store_layout import (
    DetailsRecord,
    JobListing,
    OtherFormatError,
    StoreKeys,
    decode,
    encode,
    encode_shard,
    encode_state,
    find_assignment,
)
from .store_watcher import MAX_BACKOFF_S, backoff

log = logging.getLogger("elasticlib.rendezvous")

SHARDS_PER_REFRESH = 16  # shards written between two refreshes of this node's leases
KEYS_PER_REFRESH = 64  # keys deleted between two refreshes of this node's leases
REFRESH_FRACTION = 0.1  # of the ttl: a lease that is younger is not refreshed again
RECONNECT_TIME_S = 6.0  # time for a node to notice that the store is away, pause and reconnect
STATUS_INTERVAL_S = 1.0  # minimum interval between two writes of the leader's status
STATUS_DELAY_S = 2.0  # a node that waits for this time reads why
MAX_STATUS_HOSTS = 16
LOG_INTERVAL_S = 10.0  # an unchanged reason to wait is logged this often
# If the node's thread was late by this fraction of `loop_timeout`, the whole process was suspended
# or starved, and so was the agent's loop.
PAUSE_FRACTION = 1 / 4
# The leader reads the records of all nodes. It polls at most once per this time and node.
POLL_INTERVAL_PER_NODE_S = 2e-4
DECISIONS_PER_TURN = 8  # after which the requests of the agent are read again
RETRY_INTERVAL_S = 0.01  # pause before the next poll after another node wrote first
NO_STATUS_YET = LeaderStatus(reason="the store has not answered")
NEVER_REACHED = "; the store was never reached: if the job is already over, its store is gone, too"

Item = TypeVar("Item")


class JobSnapshot(JobListing):
    """A listing of the job, with this node's assignment and, for the leader, its view."""

    assignment: RankAssignment | None = None  # this node's, in the current generation
    view: LeaderView | None = None  # input of the decision, if this node leads


class UnreadableJobError(RendezvousError):
    """The state of the job cannot be decoded, and this node does not know another one."""


class StoreGraceExpiredError(StoreConnectionError):
    """The store, or the job in it, was unreachable for longer than this node waits."""


# -- requests of the agent, and reports to it ------------------------------------------------------


@attrs.frozen
class JoinRequest:
    """Join the next generation. No workers of the last one run on this node any more."""

    attempt: int


@attrs.frozen
class CloseJob:
    """End the job for all nodes."""

    reason: str


@attrs.frozen
class StoreServed:
    """Torch's store is open on this node, or could not be opened."""

    endpoint: str = ""
    error: Exception | None = None


@attrs.frozen
class Poll:
    """Read the store soon, because it has changed or because a caller wants to know more."""

    reads_status: bool = False  # read the leader's status as well


@attrs.frozen
class ServeStore:
    """Open torch's store for the workers of the generation at this address."""

    address: str


@attrs.frozen
class CloseStore:
    """Close torch's store, if it is open."""


@attrs.define
class _Join:
    """A request to join, and what has become of it."""

    attempt: int = 0
    waiting_since: float = float("-inf")  # since when it waits for its next step
    is_seeking: bool = False  # the result is not reported yet, or it is a generation
    has_joined: bool = False  # the generation is reported, and changes follow
    change: Change | None = None  # the change that has ended the generation, once reported
    served: StoreServed | None = None  # torch's store of the generation on this node


NodeRequest: TypeAlias = JoinRequest | Report | CloseJob | StoreServed | Poll
NodeReport: TypeAlias = Joined | MembershipChanged | ServeStore | CloseStore


class RendezvousNode:
    """The rendezvous of one node over the store of one job. Not thread-safe.

    `turn` does all that is due. The methods below it are its steps, and may raise a StoreError.
    `now` is the caller's monotonic clock in seconds.

    Args:
        store: The store of the job.
        run_id: The job id.
        node: The record of this node.
        settings: The settings of the job.
        timeouts: The timeouts of this node.
        find_address: Returns the address of a node without one. A StoreError is retried.
        wall_time: Returns date and time, for messages.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node: Node,
        settings: RendezvousSettings,
        timeouts: RendezvousTimeouts,
        *,
        find_address: Callable[[], str] | None = None,
        wall_time: Callable[[], str] = str,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.keys = StoreKeys(run_id)
        self.settings = settings
        self.timeouts = timeouts
        self._ttl = timeouts.lease_ttl
        self._job = JobStore(store, timeouts.lease_ttl)
        self._id = node.id
        self._id_digest = hashlib.blake2s(node.id.encode(), digest_size=6).hexdigest()
        self.intent = NodeIntent(NodeRecord.of(node))  # what the node wants
        self.can_regroup = False  # the workers can continue in another generation
        self.takes_notices = False  # a worker of some node has called `should_stop`
        self.snapshot: JobSnapshot | None = None  # the last read, None before the first
        self.read_version = 0  # this node has read all that counts up to this version
        self.leader_status = NO_STATUS_YET  # the last status that was read or decided
        self.next_status_read_at = float("inf")
        self.last_refresh_at: float | None = None  # when the store last accepted this node
        self.last_active_at = float("-inf")  # when a generation was last seen active
        self.error: Exception | None = None  # why this node cannot take part any more
        self._find_address = find_address
        self._wall_time = wall_time
        self._num_nonces = 0  # nonces that were used
        self._join = _Join()  # the last request to join
        self._details: FailureDetails | None = None  # of a failure, until they are in the store
        self._reports: list[NodeReport] = []  # of this turn
        # Polling
        self._poll_at = float("-inf")
        self._earliest_poll = float("-inf")  # a change is not read before this time
        # Publishing
        self._published: NodeRecord | None = None  # the record in the store
        self._refreshed_at = float("-inf")  # when the leases were last refreshed
        self._announced_at = float("-inf")  # when a record was last published after none was
        self._absence_s = 0.0  # how long the store was away when the lease was lost
        self._agent_is_blocked = False  # leases are withdrawn until the agent's loop runs again
        self._publish_called_at = float("-inf")
        self._resumed_at = float("-inf")  # when the process last ran again after a pause
        self._finished_written = ""  # the generation that is recorded as finished by this node
        # Reading
        self._unreadable: set[str] = set()  # keys that a warning was logged for at the last read
        self._has_damaged_shard = False  # this node's shard could not be used at the last read
        self._members_version = 0  # shards that are newer were replaced by another client
        self._state_version = 0  # of the last write of the state
        self._tidy_membership_id = ""  # this node has deleted the keys of the generations before
        self._newest_node_at = float("-inf")  # when a new live node was last seen
        self._phase_since = float("-inf")  # when the current phase was first seen
        self._membership: Membership | None = None  # last membership with its members
        # Waiting
        self._failures = 0  # failed calls of the store in a row
        self._unreachable_since = float("-inf")
        self._job_found_at = float("-inf")  # when enough of the job was last in the store
        self._written_status = LeaderStatus()
        self._status_written_at = float("-inf")
        self._logged_reason = ""
        self._logged_at = float("-inf")

    @property
    def state(self) -> MembershipState | None:
        """The state of the job at the last read."""
        return None if self.snapshot is None else self.snapshot.state

    @property
    def is_store_away(self) -> bool:
        """True if the last call of the store failed."""
        return self._failures > 0

    def enter_generation(self) -> RankAssignment | None:
        """Enter the generation of the last read if this node is a new member of it.

        Returns:
            The node's assignment, or None if there is no generation to enter.
        """
        seen = self.snapshot
        if seen is None or seen.state is None or seen.assignment is None:
            return None
        if seen.membership_id == self.intent.node.membership_id:
            return None
        self.intent = self.intent.enter_generation(seen.state, seen.assignment)
        return seen.assignment

    # -- turns -------------------------------------------------------------------------------------

    def turn(
        self,
        now: float,
        requests: Iterable[NodeRequest] = (),
        listing: Listing | None = None,
        *,
        progress_due: float = float("inf"),
    ) -> tuple[list[NodeReport], float]:
        """Do all that is due.

        Args:
            now: the time.
            requests: what the agent has requested since the last turn, in this order.
            listing: a listing of `watch_prefix` that the store has just delivered, if any.
            progress_due: as for `publish`.

        Returns:
            What the agent must know, and the time of the next turn if nothing happens before.
            `error` is set if this node cannot take part any more.
        """
        self._reports = []
        self._job.forget()
        for request in requests:
            self._accept(request, now)
        try:
            next_at = self._act(now, listing, progress_due)
            self.on_store_success(now)
        except UnreadableJobError as error:
            self.leader_status = LeaderStatus(reason=str(error))
            next_at = now + MAX_BACKOFF_S
        except (StoreRejectedError, RendezvousConfigError, ConfigError) as error:
            self.error, next_at = error, float("inf")
        except StoreError as error:
            self._poll_at = now
            next_at = self._next_turn_after(error, now)
        error_of_join = self.join_error(self._join.attempt, self._join.waiting_since, now)
        if error_of_join is not None:
            self._end_join(Change(ChangeKind.FAILED, str(error_of_join)), error_of_join)
        return self._reports, next_at

    def _next_turn_after(self, error: StoreError, now: float) -> float:
        try:
            if isinstance(error, StoreGraceExpiredError):
                raise error
            return now + self.on_store_error(error, now)
        except StoreGraceExpiredError as expired:
            self.error = expired
            return float("inf")

    def _accept(self, request: NodeRequest, now: float) -> None:
        """Take note of a request. The store is polled after it."""
        match request:
            case JoinRequest(attempt):
                self._begin_join(attempt, now)
            case Report():
                self._note(request)
            case CloseJob(reason):
                self.intent = attrs.evolve(self.intent, close_reason=reason)
            case StoreServed():
                self._join.served = request
            case Poll(reads_status):
                if reads_status:
                    self.next_status_read_at = now
        self._poll_at = min(self._poll_at, self._earliest_poll)

    def _note(self, report: Report) -> None:
        """Take note of what has happened to this node's workers."""
        evidence = report.evidence
        if evidence is None and report.kind is ReportKind.FAILURE:
            evidence = Evidence(FailureKind.RAISED, report.reason)
        if evidence is not None:
            text = evidence.text or report.reason
            before = self.intent
            self.intent = before.record_evidence(attrs.evolve(evidence, text=text))
            if self.intent != before:
                self._details = report.details if evidence.kind.names_host else None
        intent = self.intent
        match report.kind:
            case ReportKind.SLOTS:
                slots, is_retained = report.slots, report.is_retained
                intent = intent.with_node_fields(slots=slots, has_retained_workers=is_retained)
            case ReportKind.CAN_REGROUP:
                self.can_regroup = True
            case ReportKind.TAKES_NOTICES:
                intent = intent.with_node_fields(takes_notices=True)
            case ReportKind.SUCCESS:
                intent = intent.record_success()
            case ReportKind.DRAIN:
                intent = intent.with_node_fields(drain_reason=report.reason)
            case ReportKind.STOP:
                intent = intent.request_stop(report.reason)
            case ReportKind.RESTART:
                intent = intent.request_restart(report.reason)
        self.intent = intent

    def _act(self, now: float, listing: Listing | None, progress_due: float) -> float:
        """Publish, and poll if it is time. Return the time of the next turn.

        After a write, the node reads its copy of the job and decides again in the same turn.
        """
        if self.snapshot is None:
            # Read first: a node that will be rejected, or was closed meanwhile, must not be seen by
            # the others. The next turn, which follows at once, does the rest.
            first = self.read(now)
            self._advance(now)
            if first.leader is not None:
                # Another node decides, so there is nothing to read before the next change.
                self._poll_at = now + self._ttl
            return now
        if self._find_address is not None and not self.intent.node.address:
            self.intent = self.intent.with_node_fields(address=self._find_address())
        if now >= self.next_status_read_at and not self.is_leader:
            self._read_status(now)
        for _ in range(DECISIONS_PER_TURN):
            self._write_details()
            self.publish(now, progress_due, may_decide=self._may_decide(now, listing))
            if now >= self._poll_at:
                self._poll_at, listing = now + self._poll(now, listing), None
            self._advance(now)
            if self._poll_at > now or self._job.copy(self.watch_prefix) is None:
                break
        # The leader knows its status, and does not read it.
        status_at = float("inf") if self.is_leader else self.next_status_read_at
        refreshed_at = now if self._published is None else self._refreshed_at
        refresh_at = refreshed_at + self.timeouts.keep_alive_interval
        return min(refresh_at, self._poll_at, status_at)

    def _may_decide(self, now: float, listing: Listing | None) -> bool:
        """Return whether this turn may decide on the job, or write it again.

        The node then finds out first whether its lease is lost, because the store may be another
        one. A node that has just received the decision of another node takes part in it without
        this round trip.
        """
        if listing is None or self.is_leader:
            return now >= self._poll_at
        return self.keys.leader not in (entry.key for entry in listing.entries)

    def _poll(self, now: float, listing: Listing | None) -> float:
        """Read, write reports and decide. Return the seconds until the next poll."""
        snapshot = self.poll(now, listing, self._job.copy(self.watch_prefix))
        self._advance(now)
        if self.try_other_store(now):
            return 0.0
        if self._write_endpoint(snapshot):
            return 0.0
        if self.write_reports(snapshot):
            return RETRY_INTERVAL_S if self.intent.close_reason else 0.0
        result, has_written = self.reconcile_and_write(snapshot, self._wall_time())
        if snapshot.view is not None:
            self._earliest_poll = now + POLL_INTERVAL_PER_NODE_S * len(snapshot.view.live_nodes)
        if result.new_membership is not None:
            return 0.0 if has_written else RETRY_INTERVAL_S
        again = self.publish_status(result, snapshot, now)
        return min(again, result.requeue_after_s or self.timeouts.lease_ttl)

    def _write_details(self) -> None:
        """Write what is known of a failed worker, before the record with the evidence.

        A bounded number of nodes can do that. In a larger job, the first of several nodes is kept.
        """
        node = self.intent.node
        if self._details is not None and node.evidence_of:
            key = self.keys.detail(node.evidence_of, node.group_rank % MAX_DETAILS)
            record = DetailsRecord(self._id, self._details.bounded())
            self._job.compare_set(key, encode(record), expected=ABSENT)
            self._details = None

    # -- joining -----------------------------------------------------------------------------------

    def join_error(self, attempt: int, since: float, now: float) -> Exception | None:
        """Return the error if a request to join has timed out, or None.

        The timeout does not run while a generation is active, so that a spare can wait for a place.
        Another thread may call this while the store blocks a turn.

        Args:
            attempt: the request, which this node may not have seen yet.
            since: when it was made.
            now: the time.
        """
        timeout, join = self.timeouts.join_timeout, self._join
        if attempt == join.attempt:
            if join.has_joined or not join.is_seeking:
                return None
            since = join.waiting_since
        if attempt == join.attempt and not self.intent.is_joining:
            if now < since + timeout:
                return None
            return RendezvousTimeoutError(
                f"group rank 0 of generation {self.intent.current_generation} has not opened "
                f"torch's store within join_timeout={timeout:g} s"
            )
        if self.snapshot is not None and self.snapshot.is_active:
            return None
        if now < max(since, self.last_active_at) + timeout:
            return None
        has_answered = self.snapshot is not None or self.last_refresh_at is not None
        state = self.state
        return RendezvousTimeoutError(
            f"no generation settled within join_timeout={timeout:g} s: "
            f"{self.leader_status.reason}; here: {self.leader_status.present_names}; at least "
            f"min_nodes={self.settings.min_nodes} are needed (--nnodes)"
            + NEVER_REACHED
            * (not has_answered),
            is_node_loss=state is not None and state.trigger is GenerationTrigger.NODE_LOSS,
        )

    def _begin_join(self, attempt: int, now: float) -> None:
        """Ask for the next generation. No workers of the current one may be running here."""
        self._reports.append(CloseStore())
        self.intent = self.intent.request_join()
        self._join = _Join(attempt, now, is_seeking=True)

    def _end_join(self, change: Change, error: Exception | None = None) -> None:
        """Report that this node does not become a member."""
        self._join.is_seeking = False
        self._reports.append(MembershipChanged(self._join.attempt, change, error))

    def _advance(self, now: float) -> None:
        """Report what the last read means for this node."""
        if self._join.is_seeking and not self._join.has_joined:
            self._advance_join(now)
        join = self._join
        if not join.has_joined or (join.change is not None and join.change.kind.is_final):
            return
        # A finished generation stays so, even if a store has lost that information.
        change = self.intent.change(self.state) or join.change
        if change is not None and change != join.change:
            join.change = change
            self._reports.append(MembershipChanged(join.attempt, change))

    def _advance_join(self, now: float) -> None:
        """Take the join one step further.

        The node first enters a generation. The join then ends when torch's store has an address.
        """
        if self.intent.is_joining:
            final = self.intent.final_change(self.state)
            if final is not None:
                if not self.intent.current_generation:
                    final = _as_late_result(final, self.state)
                self.intent = self.intent.receive_result()
                self._end_join(final)
                return
            assignment = self.enter_generation()
            if assignment is None:
                return
            self._join.waiting_since = now
            if assignment.group_rank == 0:
                self._reports.append(ServeStore(self.intent.node.address))
        if self.intent.change(self.state) is not None:
            # The generation finished before its workers were started.
            self._begin_join(self._join.attempt, now)
            self._poll_at = min(self._poll_at, self._earliest_poll)
            return
        join = self._join
        if join.served is not None and join.served.error is not None:
            error = join.served.error
            self._end_join(Change(ChangeKind.FAILED, format_error(error)), error)
            return
        snapshot = require_not_none(self.snapshot, "a snapshot")
        # Without an assignment, the store has lost it, and this node waits for the leader.
        if snapshot.master_endpoint is not None and snapshot.assignment is not None:
            join.has_joined = True
            info = self._make_info(snapshot, snapshot.master_endpoint)
            self._reports.append(Joined(join.attempt, info))

    def _make_info(self, snapshot: JobSnapshot, endpoint: str) -> RendezvousInfo:
        state = require_not_none(snapshot.state, "the state")
        return RendezvousInfo(
            run_id=self.run_id,
            generation=state.generation,
            assignment=require_not_none(snapshot.assignment, "the assignment"),
            bootstrap_store_info=RendezvousStoreInfo(*split_endpoint(endpoint)),
            restarts=state.restarts,
            max_restarts=state.settings.max_restarts,
            reason=state.reason,
            trigger=state.trigger,
            verdict=state.verdict,
            store=self.store,
            exchange_prefix=self.keys.exchange_prefix(state.membership_id),
            incarnation=state.incarnation,
        )

    # -- publishing --------------------------------------------------------------------------------

    def publish(
        self, now: float, progress_due: float = float("inf"), *, may_decide: bool = True
    ) -> None:
        """Refresh the leases and publish the record of the intent, or withdraw it.

        Args:
            now: the time.
            progress_due: when the agent's loop must have made progress. If it has not, the node
                deletes its leases until the loop runs again.
            may_decide: a decision may follow, so that a lease is refreshed before it is due.
        """
        loop_timeout = self.timeouts.loop_timeout
        if now - self._publish_called_at > loop_timeout * PAUSE_FRACTION:
            self._resumed_at = now
        self._publish_called_at = now
        if now > max(progress_due, self._resumed_at + loop_timeout):
            if not self._agent_is_blocked:
                log.warning(
                    "the agent's loop has been blocked for %g s: this node leaves the group until "
                    "it runs again",
                    loop_timeout,
                )
            self._agent_is_blocked = True
            self.delete_leases()
            return
        if self._agent_is_blocked:
            log.warning("the agent's loop runs again: this node rejoins")
            # The generation may have finished since the last read, which changes the record.
            self.read(now)
            self._agent_is_blocked = False
        record = self.intent.node_record(self.state)
        if record is None:
            self.delete_leases()
        else:
            early_s = self._ttl * REFRESH_FRACTION if may_decide else float("inf")
            self._publish_record(record, now, min(early_s, self.timeouts.keep_alive_interval))
        self.last_refresh_at = now

    def _publish_record(self, record: NodeRecord, now: float, min_lease_age: float) -> None:
        key = self.keys.node(self._id)
        if now >= self._refreshed_at + min_lease_age:
            if self._published is not None and not self._job.refresh(key):
                # The store was away, or is another one and may have lost all that was written.
                self._published, self._finished_written = None, ""
                self._absence_s = max(self._ttl, now - self._refreshed_at)
            self._job.refresh(self.keys.leader)
            self._refreshed_at = now
        if self._published is None or _needs_write(self._published, record):
            if self._published is None:
                self._announced_at = now
            self._job.set(key, encode(record), is_leased=True)
            self._published, self._refreshed_at = record, now

    def leave(self) -> None:
        """Leave for good. A published member records this, so that it does not count as lost."""
        state = self.intent.remembered_state
        if state is not None and self._published is not None:
            self._job.set(self.keys.left(state.membership_id, self._id), b"")
        self.delete_leases()

    def delete_leases(self) -> None:
        """End all leases of this node now."""
        self._published = None
        self._job.delete_leases()

    # -- reading -----------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """True if this node had the leader's lease when that lease was last refreshed or read."""
        return self._job.lease_of(self.keys.leader) != ABSENT

    @property
    def watch_prefix(self) -> str:
        """The prefix of the keys whose changes this node must react to."""
        return self.keys.job_prefix if self.is_leader else self.keys.watched_prefix

    def poll(
        self, now: float, listing: Listing | None = None, copy: Listing | None = None
    ) -> JobSnapshot:
        """Read the job, and become leader or restore a lost state if that is needed.

        Args:
            now: the time.
            listing: a listing of the watched prefix of a follower that the store has just
                delivered, if any.
            copy: this node's copy of `watch_prefix`, if it has one.
        """
        snapshot = self.read(now, listing, copy)
        has_written = self._write_remembered_state(snapshot)
        if self.try_become_leader(snapshot) or has_written:
            return self.read(now, copy=self._job.copy(self.watch_prefix))
        return snapshot

    def read(
        self, now: float, listing: Listing | None = None, copy: Listing | None = None
    ) -> JobSnapshot:
        """Read the job without changing anything in the store. Arguments as in `poll`."""
        before = self.snapshot
        is_outdated = listing is not None and before and listing.version < before.version
        if copy is not None:
            listing = copy
        elif listing is None or self.is_leader or is_outdated:
            listing = self._job.list(self.watch_prefix)
        else:
            self._job.keep(self.watch_prefix, listing)
        snapshot = JobSnapshot(self.keys, listing, None if before is None else before.state)
        self._check_readable(snapshot)
        state, leader, entry = snapshot.state, snapshot.leader, snapshot.leader_entry
        if leader is not None and state is not None and has_live_node(state, [leader]):
            self._check_settings(state)
            if leader.id != self._id:
                # The leader kept its lease, so the store was never away: this node was.
                self._absence_s = 0.0
        is_same = before is not None and (before.membership_id, before.phase) == (
            snapshot.membership_id,
            snapshot.phase,
        )
        if not is_same:
            self._phase_since = now
            # The status in the store may be older than this change.
            self.next_status_read_at = max(self.next_status_read_at, now + STATUS_DELAY_S)
        if before is not None and is_same and not self._has_damaged_shard:
            snapshot.assignment = before.assignment
        else:
            snapshot.assignment = self._find_assignment(snapshot)
        if entry is not None and self._job.lease_of(self.keys.leader) == entry.version:
            snapshot.view = self._make_view(snapshot, now)
        self._apply(snapshot, now)
        return snapshot

    def _apply(self, snapshot: JobSnapshot, now: float) -> None:
        """Update the intent. The first read decides whether this node is part of the run."""
        state = snapshot.state
        nodes: list[NodeRecord | Leader] = [] if snapshot.leader is None else [snapshot.leader]
        if self.snapshot is None:
            self._job_found_at, self.next_status_read_at = now, now + STATUS_DELAY_S
            if state is not None and not nodes:
                # The leader may have left or died while other nodes of the run are alive.
                listing = self.store.list(self.keys.node())
                nodes.extend(JobListing(self.keys, listing).live_nodes())
            self.intent = self.intent.on_first_read(state, snapshot.assignment, nodes)
        if snapshot.view is not None:
            nodes.extend(snapshot.view.live_nodes)
        self.intent = self.intent.on_read(state).check_run_alive(state, nodes)
        # A node that becomes leader later still knows it.
        self.takes_notices = self.takes_notices or any(node.takes_notices for node in nodes)
        if snapshot.is_active or (self.snapshot is not None and self.snapshot.is_active):
            self.last_active_at = now
        self.snapshot, self.read_version = snapshot, snapshot.version

    def _check_settings(self, state: MembershipState) -> None:
        if state.settings == self.settings or state.phase.is_terminal:
            return
        here, there = attrs.asdict(self.settings), attrs.asdict(state.settings)
        different = [
            f"{name} is {here[name]} here and {there[name]} there"
            for name in here
            if here[name] != there[name]
        ]
        raise RendezvousConfigError(
            f"this node's settings differ from the job's: {', '.join(different)}; "
            "start all nodes with the same settings"
        )

    def _check_readable(self, snapshot: JobSnapshot) -> None:
        """Log entries that cannot be decoded. Raise an error if this node cannot replace the state.

        A node that has read or remembers a state waits until the leader has replaced the entry. A
        node that knows none cannot tell whether there is a job.
        """
        error = snapshot.state_error
        if error is not None and snapshot.state is None and self.intent.remembered_state is None:
            if isinstance(error, OtherFormatError):
                raise error
            raise UnreadableJobError(
                f"the membership in the store is damaged, and this node waits for a member that "
                f"replaces it: {error}"
            )
        self._log_unreadable(snapshot)

    def _log_unreadable(self, job: JobListing) -> None:
        for key in job.errors.keys() - self._unreadable:
            log.warning("ignored the entry %s of the store: %s", key, job.errors[key])
        # A bounded number of keys, because any client of the store can invent more.
        self._unreadable = {*job.errors}

    def _find_assignment(self, snapshot: JobSnapshot) -> RankAssignment | None:
        self._has_damaged_shard, state = False, snapshot.state
        if state is None or state.phase is not JobPhase.ACTIVE:
            return None
        number = shard_of(self._id, state.num_nodes)
        # The leader has listed the shards.
        entry = snapshot.shard_entry(number)
        if entry is None:
            entry = self._job.get(self.keys.shard(state.membership_id, number))
        if entry is None:
            # A member reads it again at its next poll: the store was emptied before the state was
            # written, and the leader restores the generation.
            self._has_damaged_shard = self.intent.node.membership_id == state.membership_id
            return None
        try:
            found = find_assignment(entry.value, self._id)
        except RendezvousConfigError as error:
            # The leader replaces the shard, and this node reads it again at its next poll.
            log.warning("cannot read this node's rank, and waits for the leader: %s", error)
            self._has_damaged_shard = True
            return None
        self._has_damaged_shard = found is not None and found.num_nodes != state.num_nodes
        return None if self._has_damaged_shard else found

    def _make_view(self, job: JobListing, now: float) -> LeaderView:
        known = self._membership
        membership, is_complete = job.membership(known)
        remembered = job.remembered_state
        if membership is not None and not is_complete:
            # The store has lost the list of members. Only the members know that they are members.
            remembered, membership = membership.state, None
        if known is None or membership is None or known.membership_id != membership.membership_id:
            self._members_version = job.version
        self._membership = membership
        live = job.live_nodes()
        self._log_unreadable(job)
        if membership is not None and has_live_node(membership, live):
            self._check_settings(membership)
        before = None if self.snapshot is None else self.snapshot.view
        earlier = () if before is None else before.live_nodes
        if not {node.id for node in live} <= {node.id for node in earlier}:
            self._newest_node_at = now
        return LeaderView(
            node_id=self._id,
            settings=self.settings,
            membership=membership,
            live_nodes=live,
            finished_ids=job.finished_ids(),
            left_ids=job.left_ids(),
            details=job.details(),
            remembered_state=remembered,
            since_last_arrival_s=now - self._newest_node_at,
            return_grace_s=self._return_grace_s(remembered, now),
            phase_age_s=now - self._phase_since,
            inactive_incarnation=self.intent.node.inactive_incarnation,
        )

    def _return_grace_s(self, remembered: MembershipState | None, now: float) -> float:
        """Return how long other nodes may still take to return after an absence of the store.

        Other nodes may notice the return of the store later than this node, by as long as the
        store was away.
        """
        absence = self._absence_s if remembered is None else max(self._absence_s, self._ttl)
        absence = min(absence, self._ttl + RECONNECT_TIME_S)
        return max(0.0, absence - (now - self._announced_at))

    # -- leading -----------------------------------------------------------------------------------

    def try_become_leader(self, snapshot: JobSnapshot) -> bool:
        """Take the leader's lease if no node has it, or update this node's own leader entry.

        A node that has not published its record does not become leader.

        Returns:
            Whether the leader entry was written.
        """
        node = self.intent.node
        takes_notices = self.takes_notices or node.takes_notices
        leader = Leader(
            self._id, node.host, node.inactive_incarnation, self.can_regroup, takes_notices
        )
        has_leader, entry = snapshot.leader is not None, snapshot.leader_entry
        if self._published is None or snapshot.leader == leader:
            return False
        if has_leader and not self.is_leader:
            return False
        # An entry that cannot be decoded is no leader, and has perhaps replaced one.
        expected = self._job.lease_of(self.keys.leader) if has_leader else _version(entry)
        key, value = self.keys.leader, encode(leader)
        return self._job.compare_set(key, value, expected=expected, is_leased=True) is not None

    def reconcile_and_write(
        self, snapshot: JobSnapshot, wall_time: str = ""
    ) -> tuple[ReconcileResult, bool]:
        """Decide on a snapshot, and write the new membership if there is one.

        Args:
            snapshot: the snapshot to decide on.
            wall_time: date and time, for messages.

        Returns:
            The decision, and whether a membership was written.
        """
        view = snapshot.view
        if view is None:
            name = "no node" if snapshot.leader is None else snapshot.leader.host
            return ReconcileResult(f"{name} decides, and this node waits"), False
        self._delete_orphaned_state(snapshot, view)
        if snapshot.state_error is not None and view.membership is not None:
            reason = f"the membership in the store was damaged: {snapshot.state_error}"
            log.warning("this node writes it again, as %s", reason)
            return ReconcileResult(reason, view.membership), self._write_state(
                view.membership, snapshot
            )
        self._replace_damaged_shards(snapshot, view)
        self._num_nonces += 1
        nonce = f"{self._id_digest}.{self._num_nonces}"
        result = reconcile(attrs.evolve(view, nonce=nonce, wall_time=wall_time))
        if result.new_membership is None:
            current = snapshot.membership_id
            if snapshot.master_endpoint is not None and current != self._tidy_membership_id:
                # All workers can start: now this delays nobody.
                self._delete_earlier_keys(snapshot, current)
            return result, False
        return result, self._write_membership(result.new_membership, snapshot, nonce)

    def _delete_orphaned_state(self, snapshot: JobSnapshot, view: LeaderView) -> None:
        """Delete the remembered state if no live node was a member of its generation.

        Otherwise, no live node could write the state that it remembers, if that is not newer.
        """
        entry, state = snapshot.remembered_entry, snapshot.remembered_state
        if entry is None or view.return_grace_s > 0:
            return
        ids = {node.membership_id for node in view.live_nodes}
        if state is None or state.membership_id not in ids:
            self._job.delete(entry.key, expected=entry.version)

    def _replace_damaged_shards(self, snapshot: JobSnapshot, view: LeaderView) -> None:
        """Write those shards again that another client has replaced since this node knows them."""
        membership = view.membership
        if membership is None or not membership.membership_id:
            return
        numbers = range(num_shards(membership.num_nodes))
        entries = {n: entry for n in numbers if (entry := snapshot.shard_entry(n)) is not None}
        newer = [n for n, entry in entries.items() if entry.version > self._members_version]
        if not newer:
            return
        shards = shard_members(membership)
        for number in newer:
            entry, value = entries[number], encode_shard(shards[number])
            if entry.value != value:
                log.warning("another client had replaced %s: this node writes it again", entry.key)
                self._job.compare_set(entry.key, value, expected=entry.version)

    def _write_membership(self, membership: Membership, snapshot: JobSnapshot, nonce: str) -> bool:
        """Replace the membership of the snapshot. Return False if another write was faster."""
        view = require_not_none(snapshot.view, "the view of the decision")
        membership_id = membership.membership_id
        has_members = view.membership is not None and view.membership.membership_id == membership_id
        if not has_members:
            self._write_members(membership)
        if self._write_state(membership, snapshot):
            self._membership = membership
            if not has_members:
                self._members_version = self._state_version
                is_untidy = snapshot.membership_id != self._tidy_membership_id
                if is_untidy or snapshot.remembered_entry is not None:
                    # The workers of the last generation could not start, or it is restored.
                    self._delete_earlier_keys(snapshot, membership_id)
            return True
        if membership_id.endswith(f".{nonce}"):
            self._delete_keys(self.keys.shard(membership_id, n) for n in shard_members(membership))
        return False

    def _delete_earlier_keys(self, snapshot: JobSnapshot, membership_id: str) -> None:
        """Delete the keys of all generations before this one."""
        self._delete_keys(snapshot.stale_keys(membership_id))
        self._tidy_membership_id = membership_id

    def _write_state(self, state: MembershipState, snapshot: JobSnapshot) -> bool:
        entry = self._job.compare_set(
            self.keys.state, encode_state(state), expected=_version(snapshot.state_entry)
        )
        if entry is not None:
            self._state_version = entry.version
        return entry is not None

    def _write_members(self, membership: Membership) -> None:
        """Write the shards of the members. The state that refers to them is written afterwards."""
        membership_id = membership.membership_id
        if not membership_id:
            return
        shards = shard_members(membership).items()
        for number, rows in self._iterate_and_refresh(shards, SHARDS_PER_REFRESH):
            self._job.set(self.keys.shard(membership_id, number), encode_shard(rows))

    def _delete_keys(self, keys: Iterable[str]) -> None:
        for key in self._iterate_and_refresh(keys, KEYS_PER_REFRESH):
            self._job.delete(key)

    def _iterate_and_refresh(self, items: Iterable[Item], count: int) -> Iterator[Item]:
        """Yield the items, and refresh this node's leases after each `count` of them."""
        for number, item in enumerate(items, 1):
            yield item
            if number % count == 0:
                self._job.refresh(self.keys.node(self._id))
                self._job.refresh(self.keys.leader)

    # -- writing as a member -----------------------------------------------------------------------

    def _write_remembered_state(self, snapshot: JobSnapshot) -> bool:
        """Write the last state that this node was a member of if the store has lost the job.

        Nothing is written if the store has a state of that generation or a later one.

        Returns:
            Whether the state was written.
        """
        state = self.intent.remembered_state
        if state is None or not is_replaceable(snapshot.state, state.incarnation):
            return False
        written = snapshot.remembered_state
        if written is not None and written.generation >= state.generation:
            return False
        expected = _version(snapshot.remembered_entry)
        key, value = self.keys.remembered_state, encode_state(state)
        return self._job.compare_set(key, value, expected=expected) is not None

    def _write_endpoint(self, snapshot: JobSnapshot) -> bool:
        served = self._join.served
        return served is not None and self.write_endpoint(snapshot, served.endpoint)

    def write_endpoint(self, snapshot: JobSnapshot, endpoint: str) -> bool:
        """Write where this node serves torch's store, if the current generation has none yet.

        If the generation has finished meanwhile, no node reads the key, and the leader deletes it
        in the next generation.

        Returns:
            Whether it was written.
        """
        current = snapshot.membership_id
        is_current = self.intent.node.membership_id == current
        if not endpoint or not is_current or snapshot.master_endpoint is not None:
            return False
        key, expected = self.keys.master_endpoint(current), _version(snapshot.master_entry)
        return self._job.compare_set(key, endpoint.encode(), expected=expected) is not None

    def write_reports(self, snapshot: JobSnapshot) -> bool:
        """Write the reports of this node: job abort, and success of workers.

        Args:
            snapshot: the last read.

        Returns:
            Whether this node is ending the job, so that there is nothing to decide.
        """
        intent, current = self.intent, snapshot.membership_id
        if intent.close_reason:
            state = snapshot.state or MembershipState(self.settings, f"closed by {self._id}")
            is_terminal = state.phase.is_terminal
            if not is_terminal:
                job_end = JobEnd(intent.node.host, self._wall_time())
                aborted = end_job(state, JobPhase.ABORTED, intent.close_reason, job_end=job_end)
                is_terminal = self._write_state(aborted, snapshot)
            if is_terminal:
                self.intent = attrs.evolve(intent, close_reason="")
            return True
        finished = intent.finished_membership_id
        if finished and finished == current != self._finished_written:
            # The key has no lease, so it remains when this node leaves.
            self._job.set(self.keys.finished(current, self._id), b"")
            self._finished_written = current
        return False

    # -- waiting -----------------------------------------------------------------------------------

    def on_store_success(self, now: float) -> None:
        """Record that the store answered. After an absence, missing nodes get time to return."""
        if self._failures:
            self._failures, self._job_found_at = 0, now

    def on_store_error(self, error: StoreError, now: float) -> float:
        """Record that a call of the store failed.

        Returns:
            How long to pause, in seconds.

        Raises:
            StoreGraceExpiredError: the store has been unreachable for too long.
        """
        grace, setting = self.timeouts.store_grace, "store_grace, --store-grace"
        if self.snapshot is None:
            grace, setting = self.timeouts.join_timeout, "join_timeout"
        self.leader_status = LeaderStatus(reason=str(error))
        self._job.forget()
        if self._failures == 0:
            log.warning(
                "the store is unreachable: running workers continue, and this node retries for "
                "%g s (%s): %s",
                *(grace, setting, error),
            )
            if self.snapshot is None:
                log.warning(
                    "this node has not reached the store yet: either the node that serves it has "
                    "not started, or the job is already over; without a store this node fails "
                    "after %g s",
                    grace,
                )
            self._unreachable_since = now
        self._failures += 1
        if now - self._unreachable_since >= grace:
            never = NEVER_REACHED if self.snapshot is None else ""
            raise StoreGraceExpiredError(
                f"the store was unreachable for {grace:g} s ({setting}): {error}{never}"
            )
        return backoff(self._failures)

    def try_other_store(self, now: float) -> bool:
        """Move to another store if this one has lost the job or too few nodes are here.

        Returns:
            Whether the store was changed. The last read is then void.

        Raises:
            StoreGraceExpiredError: too few members of the last generation returned in time.
        """
        grace, missing_s = self.timeouts.store_grace, now - self._job_found_at
        if not self._is_job_missing() and not self.leader_status.is_blocked:
            self._job_found_at = now
        elif missing_s >= grace and self.intent.remembered_state is not None:
            raise StoreGraceExpiredError(
                f"too few nodes of generation {self.intent.current_generation} came back to the "
                f"store within {grace:g} s (store_grace, --store-grace): "
                f"{self.leader_status.reason}"
            )
        elif missing_s >= self._ttl and self.store.try_other_endpoints(self._is_better_store):
            log.warning(
                "too few nodes of the job use this store: this node has moved to another one"
            )
            self._job.forget()
            # The status belongs to the old store. Read that of the new store next.
            self.leader_status, self.next_status_read_at = NO_STATUS_YET, now
            return True
        return False

    def _is_job_missing(self) -> bool:
        return self.state is None or not self.state.membership_id

    def _is_better_store(self, other: Store, is_earlier: bool) -> bool:
        """Return whether this node shall move to another store.

        The other store must have the job if this one has not, or else a later generation of the
        same run. If neither store has the job, the earlier store is better, so that all nodes
        choose the same store.
        """
        there = JobListing(self.keys, other.list(self.keys.state)).state
        if there is None or not there.membership_id:
            return self._is_job_missing() and is_earlier
        here = self.state
        if here is None or self._is_job_missing():
            return True
        return there.incarnation == here.incarnation and there.generation > here.generation

    def publish_status(self, result: ReconcileResult, snapshot: JobSnapshot, now: float) -> float:
        """Write the status if this node leads.

        Returns:
            Seconds until there may be something to write again.
        """
        if snapshot.view is None:
            log.debug("%s", result.reason)
            return float("inf")
        self.leader_status = make_status(result, snapshot.view)
        self._log_wait(now)
        if self.leader_status == self._written_status:
            return float("inf")
        if now - self._status_written_at < STATUS_INTERVAL_S:
            return self._status_written_at + STATUS_INTERVAL_S - now
        self._job.set(self.keys.leader_status, encode(self.leader_status))
        self._skip_own_write(snapshot)
        self._written_status, self._status_written_at = self.leader_status, now
        return float("inf")

    def _read_status(self, now: float) -> None:
        """Read why this node waits. The job is not listed for this."""
        entry = self._job.get(self.keys.leader_status)
        self.leader_status = LeaderStatus()
        if entry is not None:
            with contextlib.suppress(RendezvousConfigError):  # The leader writes it again.
                self.leader_status = decode(LeaderStatus, entry.value, "the status")
        self.next_status_read_at = now + self._ttl
        self._log_wait(now)

    def _log_wait(self, now: float) -> None:
        """Log why this node waits for a generation, if that is new or was logged long ago."""
        snapshot, status = self.snapshot, self.leader_status
        if snapshot is None or snapshot.is_active or status in (NO_STATUS_YET, LeaderStatus()):
            return
        is_waiting = self.intent.is_joining and not self.intent.has_not_joined
        is_due = now - self._logged_at >= LOG_INTERVAL_S or status.reason != self._logged_reason
        if is_waiting and is_due and self.intent.final_change(snapshot.state) is None:
            self._logged_reason, self._logged_at = status.reason, now
            log.info(
                "waiting: %s (present: %s); timeout %g s (join_timeout)",
                *(status.reason, status.present_names, self.timeouts.join_timeout),
            )

    def _skip_own_write(self, snapshot: JobSnapshot) -> None:
        """Do not read the job again because of the status, which is no input of a decision."""
        copy = self._job.copy(self.watch_prefix)
        if copy is not None and copy.version == snapshot.version + 1:
            self.read_version = copy.version


def _as_late_result(change: Change, state: MembershipState | None) -> Change:
    reason = f"{change.reason}; no workers ran on this node"
    job_end = None if state is None else state.job_end
    if job_end is not None:
        reason += (
            f" (reported by {job_end.written_by} at {job_end.finished_at}; to run it again, start "
            "it once all of its nodes have ended)"
        )
    return attrs.evolve(change, reason=reason)


def make_status(result: ReconcileResult, view: LeaderView) -> LeaderStatus:
    """Return the status that the leader publishes after a decision."""
    hosts = sorted((node.host for node in view.live_nodes), key=natural_sort_key)
    return LeaderStatus(
        reason=result.reason,
        present_hosts=tuple(hosts[:MAX_STATUS_HOSTS]),
        num_present=len(hosts),
        num_waiting=num_nodes_waiting(view),
        membership_id="" if view.membership is None else view.membership.membership_id,
        is_blocked=result.is_blocked,
    )


def _needs_write(published: NodeRecord, record: NodeRecord) -> bool:
    """Return whether the published record must be replaced.

    A node that has only entered a generation does not write that, as the shards name the members.
    """
    if record == published:
        return False
    if published.may_run_workers and not record.may_run_workers:
        return True
    moved = attrs.evolve(
        published,
        membership_id=record.membership_id,
        group_rank=record.group_rank,
        may_run_workers=record.may_run_workers,
    )
    return record != moved


def _version(entry: Entry | None) -> int:
    return ABSENT if entry is None else entry.version
