"""The steps of one node in the rendezvous protocol: publish, read, lead, decide, write.

A LocalNode has no thread and no clock. Its caller (a NodeThread, or the simulator in the tests)
passes the time and chooses when each step happens.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator
from typing import TypeVar

import attrs

from ..errors import (
    LeaseLostError,
    RendezvousConfigError,
    StoreConnectionError,
    StoreError,
    require_not_none,
)
from ..stores.interface import ABSENT, Entry, Listing, Store
from .membership import (
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
from .rank_assignment import RankAssignment, natural_sort_key, shard_members, shard_of
from .reconcile import LeaderView, ReconcileResult, num_nodes_waiting, reconcile
from .store_layout import (
    FORMAT_REMEDY,
    JobListing,
    StoreKeys,
    decode,
    decode_state,
    encode,
    encode_shard,
    encode_state,
    find_assignment,
)

log = logging.getLogger("elasticlib.rendezvous")

SHARDS_PER_REFRESH = 16  # shards written between two refreshes of this node's leases
KEYS_PER_REFRESH = 64  # keys deleted between two refreshes of this node's leases
REFRESH_FRACTION = 0.1  # of the ttl: a lease that is younger is not refreshed again
RECONNECT_TIME_S = 6.0  # time for a node to notice that the store is away, pause and reconnect
STATUS_INTERVAL_S = 1.0  # minimum interval between two writes of the leader's status
MAX_STATUS_HOSTS = 16
LOG_INTERVAL_S = 10.0  # an unchanged reason to wait is logged this often
# Shorter than a last call, so that nodes which remember a job return before others start a new run.
MAX_BACKOFF_S = 0.5
# If the node's thread was late by this fraction of `loop_timeout`, the whole process was suspended
# or starved, and so was the agent's loop.
PAUSE_FRACTION = 1 / 4
NO_STATUS_YET = LeaderStatus(reason="the store has not answered")
NEVER_REACHED = "; the store was never reached: if the job is already over, its store is gone, too"

Item = TypeVar("Item")


def backoff(failures: int) -> float:
    """Return a random pause in seconds after this many failures in a row."""
    return min(MAX_BACKOFF_S, 0.02 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)


class JobSnapshot(JobListing):
    """A listing of the job, with this node's assignment and, for the leader, its view."""

    assignment: RankAssignment | None = None  # this node's, in the current generation
    view: LeaderView | None = None  # input of the decision, if this node leads

    @property
    def is_active(self) -> bool:
        return self.phase is JobPhase.ACTIVE


class StoreGraceExpiredError(StoreConnectionError):
    """The store, or the job in it, was unreachable for longer than this node waits."""


class LocalNode:
    """The protocol of one node over the store of one job. Not thread-safe.

    All methods may raise a StoreError. `now` is the caller's monotonic clock in seconds.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node: Node,
        settings: RendezvousSettings,
        timeouts: RendezvousTimeouts,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.keys = StoreKeys(run_id)
        self.settings = settings
        self.timeouts = timeouts
        self._ttl = timeouts.lease_ttl
        self._id = node.id
        self._id_digest = hashlib.blake2s(node.id.encode(), digest_size=6).hexdigest()
        self.intent = NodeIntent(NodeRecord.of(node))  # what the node wants; replaced by the caller
        self.can_regroup = False  # the workers can continue in another generation; set by caller
        self.takes_notices = False  # a worker of some node has called `should_stop`
        self.snapshot: JobSnapshot | None = None  # the last read, None before the first
        self.leader_status = NO_STATUS_YET  # the last status that was read or decided
        self.next_status_read_at = float("inf")
        self.last_refresh_at: float | None = None  # when the store last accepted this node
        self.last_active_at = float("-inf")  # when a generation was last seen active
        self._num_nonces = 0  # nonces that were used
        # Publishing
        self._published: NodeRecord | None = None  # the record in the store
        self._leases: dict[str, int] = {}  # version of each leased key
        self._refreshed_at = float("-inf")  # when the leases were last refreshed
        self._announced_at = float("-inf")  # when a record was last published after none was
        self._absence_s = 0.0  # how long the store was away when the lease was lost
        self._agent_is_blocked = False  # leases are withdrawn until the agent's loop runs again
        self._publish_called_at = float("-inf")
        self._resumed_at = float("-inf")  # when the process last ran again after a pause
        self._finished_written = ""  # the generation that is recorded as finished by this node
        # Reading
        self._unreadable: set[str] = set()  # keys of node records that a warning was logged for
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

    # -- publishing --------------------------------------------------------------------------------

    def publish(self, now: float, progress_due: float = float("inf")) -> None:
        """Refresh the leases and publish the record of the intent, or withdraw it.

        Args:
            now: the time.
            progress_due: when the agent's loop must have made progress. If it has not, the node
                deletes its leases until the loop runs again.
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
            self._publish_record(record, now)
        self.last_refresh_at = now

    def _publish_record(self, record: NodeRecord, now: float) -> None:
        key = self.keys.node(self._id)
        if now - self._refreshed_at >= self._ttl * REFRESH_FRACTION:
            if self._published is not None and not self._refresh_lease(key):
                # The store was away, or is another one and may have lost all that was written.
                self._published, self._finished_written = None, ""
                self._absence_s = max(self._ttl, now - self._refreshed_at)
            self._refresh_lease(self.keys.leader)
            self._refreshed_at = now
        if self._published is None or _needs_write(self._published, record):
            if self._published is None:
                self._announced_at = now
            entry = self.store.set(key, encode(record), ttl=self._ttl)
            self._leases[key] = entry.version
            self._published, self._refreshed_at = record, now

    def _refresh_lease(self, key: str) -> bool:
        if key not in self._leases:
            return False
        try:
            self.store.refresh(key, self._leases[key])
        except LeaseLostError:
            del self._leases[key]
            return False
        return True

    def leave(self) -> None:
        """Leave for good. A published member records this, so that it does not count as lost."""
        state = self.intent.remembered_state
        if state is not None and self._published is not None:
            self.store.set(self.keys.left(state.membership_id, self._id), b"")
        self.delete_leases()

    def delete_leases(self) -> None:
        """End all leases of this node now."""
        leases, self._leases, self._published = self._leases, {}, None
        for key, version in leases.items():
            self.store.delete(key, expected=version)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """True if this node had the leader's lease when that lease was last refreshed or read."""
        return self.keys.leader in self._leases

    @property
    def watch_prefix(self) -> str:
        """The prefix of the keys whose changes this node must react to."""
        return self.keys.job_prefix if self.is_leader else self.keys.watched_prefix

    def poll(self, now: float, listing: Listing | None = None) -> JobSnapshot:
        """Read the job, and become leader or restore a lost state if that is needed.

        Args:
            now: the time.
            listing: a listing of `watch_prefix` that the store has just delivered, if any.
        """
        snapshot = self.read(now, listing)
        has_written = self._write_remembered_state(snapshot)
        if self.try_become_leader(snapshot) or has_written:
            return self.read(now)
        return snapshot

    def read(self, now: float, listing: Listing | None = None) -> JobSnapshot:
        """Read the job without changing anything in the store. Arguments as in `poll`."""
        before = self.snapshot
        is_outdated = listing is not None and before and listing.version < before.version
        if listing is None or self.is_leader or is_outdated:
            listing = self.store.list(self.watch_prefix)
        snapshot = JobSnapshot(self.keys, listing)
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
        if before is not None and is_same:
            snapshot.assignment = before.assignment
        else:
            snapshot.assignment, self._phase_since = self._find_assignment(state), now
        if entry is not None and self._leases.get(self.keys.leader) == entry.version:
            snapshot.view = self._make_view(snapshot, now)
        self._apply(snapshot, now)
        return snapshot

    def _apply(self, snapshot: JobSnapshot, now: float) -> None:
        """Update the intent. The first read decides whether this node is part of the run."""
        state = snapshot.state
        nodes: list[NodeRecord | Leader] = [] if snapshot.leader is None else [snapshot.leader]
        if self.snapshot is None:
            self._job_found_at, self.next_status_read_at = now, now + 2 * STATUS_INTERVAL_S
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
        self.snapshot = snapshot

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

    def _find_assignment(self, state: MembershipState | None) -> RankAssignment | None:
        if state is None or state.phase is not JobPhase.ACTIVE:
            return None
        number = shard_of(self._id, state.num_nodes)
        entry = self.store.get(self.keys.shard(state.membership_id, number))
        return None if entry is None else find_assignment(entry.value, self._id)

    def _make_view(self, job: JobListing, now: float) -> LeaderView:
        membership, is_complete = job.membership(self._membership)
        remembered = job.remembered_state
        if membership is not None and not is_complete:
            # The store has lost the list of members. Only the members know that they are members.
            remembered, membership = membership.state, None
        self._membership = membership
        live, errors = job.node_records()
        for key in errors.keys() - self._unreadable:
            log.warning("ignored the node at %s: %s (%s)", key, errors[key], FORMAT_REMEDY)
        self._unreadable |= errors.keys()
        if membership is not None and has_live_node(membership, live):
            self._check_settings(membership)
        before = None if self.snapshot is None else self.snapshot.view
        known = () if before is None else before.live_nodes
        if not {node.id for node in live} <= {node.id for node in known}:
            self._newest_node_at = now
        return LeaderView(
            node_id=self._id,
            settings=self.settings,
            membership=membership,
            live_nodes=live,
            finished_ids=job.finished_ids(),
            left_ids=job.left_ids(),
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
        has_leader = snapshot.leader is not None
        if self._published is None or snapshot.leader == leader:
            return False
        if has_leader and not self.is_leader:
            return False
        expected = self._leases.get(self.keys.leader, ABSENT) if has_leader else ABSENT
        written = self.store.compare_set(
            self.keys.leader, encode(leader), expected=expected, ttl=self._ttl
        )
        if written.succeeded and written.entry is not None:
            self._leases[self.keys.leader] = written.entry.version
        return written.succeeded

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
        self._num_nonces += 1
        nonce = f"{self._id_digest}.{self._num_nonces}"
        result = reconcile(attrs.evolve(view, nonce=nonce, wall_time=wall_time))
        if result.new_membership is None:
            return result, False
        return result, self._write_membership(result.new_membership, snapshot, nonce)

    def _delete_orphaned_state(self, snapshot: JobSnapshot, view: LeaderView) -> None:
        """Delete the remembered state if no live node was a member of its generation.

        Otherwise, no live node could write the state that it remembers, if that is not newer.
        """
        entry, state = snapshot.remembered_entry, snapshot.remembered_state
        if entry is None or state is None or view.return_grace_s > 0:
            return
        if not any(node.membership_id == state.membership_id for node in view.live_nodes):
            self.store.delete(entry.key, expected=entry.version)

    def _write_membership(self, membership: Membership, snapshot: JobSnapshot, nonce: str) -> bool:
        """Replace the membership of the snapshot. Return False if another write was faster."""
        before, view = snapshot.state, require_not_none(snapshot.view, "the view of the decision")
        membership_id = membership.membership_id
        has_members = view.membership is not None and view.membership.membership_id == membership_id
        if not has_members:
            self._write_members(membership)
        if self._write_state(membership, snapshot):
            self._membership = membership
            is_new_run = before is not None and before.incarnation != membership.incarnation
            if not has_members or is_new_run:
                self._delete_keys(snapshot.stale_keys(membership_id))
            return True
        if membership_id.endswith(f".{nonce}"):
            self._delete_keys(self.keys.shard(membership_id, n) for n in shard_members(membership))
        return False

    def _write_state(self, state: MembershipState, snapshot: JobSnapshot) -> bool:
        return self.store.compare_set(
            self.keys.state, encode_state(state), expected=_version(snapshot.state_entry)
        ).succeeded

    def _write_members(self, membership: Membership) -> None:
        """Write the shards of the members. The state that refers to them is written afterwards."""
        membership_id = membership.membership_id
        if not membership_id:
            return
        shards = shard_members(membership).items()
        for number, rows in self._iterate_and_refresh(shards, SHARDS_PER_REFRESH):
            self.store.set(self.keys.shard(membership_id, number), encode_shard(rows))

    def _delete_keys(self, keys: Iterable[str]) -> None:
        for key in self._iterate_and_refresh(keys, KEYS_PER_REFRESH):
            self.store.delete(key)

    def _iterate_and_refresh(self, items: Iterable[Item], count: int) -> Iterator[Item]:
        """Yield the items, and refresh this node's leases after each `count` of them."""
        for number, item in enumerate(items, 1):
            yield item
            if number % count == 0:
                self._refresh_lease(self.keys.node(self._id))
                self._refresh_lease(self.keys.leader)

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
        return self.store.compare_set(
            self.keys.remembered_state,
            encode_state(state),
            expected=_version(snapshot.remembered_entry),
        ).succeeded

    def write_reports(
        self, snapshot: JobSnapshot, wall_time: str = "", *, endpoint: str | None = None
    ) -> bool:
        """Write the reports of this node: job abort, endpoint of torch's store, success of workers.

        Args:
            snapshot: the last read.
            wall_time: date and time, for messages.
            endpoint: where this node serves torch's store for the current generation, if it does.

        Returns:
            Whether this node is ending the job, so that there is nothing to decide.
        """
        intent, current = self.intent, snapshot.membership_id
        if intent.close_reason:
            state = snapshot.state or MembershipState(self.settings, f"closed by {self._id}")
            is_terminal = state.phase.is_terminal
            if not is_terminal:
                job_end = JobEnd(intent.node.host, wall_time)
                aborted = end_job(state, JobPhase.ABORTED, intent.close_reason, job_end=job_end)
                is_terminal = self._write_state(aborted, snapshot)
            if is_terminal:
                self.intent = attrs.evolve(intent, close_reason="")
            return True
        is_current = intent.node.membership_id == current
        if endpoint and is_current and snapshot.master_endpoint is None:
            # If the generation has finished meanwhile, no node reads the key, and the leader
            # deletes it before the next generation.
            key = self.keys.master_endpoint(current)
            self.store.compare_set(key, endpoint.encode(), expected=ABSENT)
        finished = intent.finished_membership_id
        if finished and finished == current != self._finished_written:
            # The key has no lease, so it remains when this node leaves.
            self.store.set(self.keys.finished(current, self._id), b"")
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
        entry = other.get(self.keys.state)
        there = None if entry is None else decode_state(entry.value)
        if there is None or not there.membership_id:
            return self._is_job_missing() and is_earlier
        here = self.state
        if here is None or self._is_job_missing():
            return True
        return there.incarnation == here.incarnation and there.generation > here.generation

    def publish_status(self, result: ReconcileResult, snapshot: JobSnapshot, now: float) -> float:
        """Write the leader's status if this node leads, else read it, and log why this node waits.

        Returns:
            Seconds until there may be something to write, read or log again.
        """
        again = self._exchange_status(result, snapshot, now)
        is_waiting = self.intent.is_joining and not self.intent.has_not_joined
        is_final = self.intent.final_change(snapshot.state) is not None
        if not is_waiting or snapshot.is_active or is_final:
            log.debug("%s", result.reason)
            return again
        status = self.leader_status
        is_due = now - self._logged_at >= LOG_INTERVAL_S
        if status not in (NO_STATUS_YET, LeaderStatus()) and (
            is_due or status.reason != self._logged_reason
        ):
            self._logged_reason, self._logged_at = status.reason, now
            log.info(
                "waiting: %s (present: %s); timeout %g s (join_timeout)",
                *(status.reason, status.present_names, self.timeouts.join_timeout),
            )
        return max(0.01, min(again, self.next_status_read_at - now))

    def _exchange_status(self, result: ReconcileResult, snapshot: JobSnapshot, now: float) -> float:
        if snapshot.view is None:
            if now >= self.next_status_read_at:
                entry = self.store.get(self.keys.leader_status)
                self.leader_status = LeaderStatus()
                if entry is not None:
                    self.leader_status = decode(LeaderStatus, entry.value, "the leader's status")
                self.next_status_read_at = now + self._ttl
            return float("inf")
        self.leader_status = make_status(result, snapshot.view)
        self.next_status_read_at = now + LOG_INTERVAL_S
        if self.leader_status == self._written_status:
            return float("inf")
        if now - self._status_written_at < STATUS_INTERVAL_S:
            return self._status_written_at + STATUS_INTERVAL_S - now
        self.store.set(self.keys.leader_status, encode(self.leader_status))
        self._written_status, self._status_written_at = self.leader_status, now
        return float("inf")


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
