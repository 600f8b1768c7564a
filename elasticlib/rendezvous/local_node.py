"""One node's part in the protocol: announce, read, lead if nobody does, decide, write.

It has no thread and no clock of its own. Whoever drives it (the handler's thread, the simulator)
gives the time and chooses when each step happens, so that both run the very same steps.
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
    present,
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
    RendezvousSettings,
    RendezvousTimeouts,
    end_job,
)
from .rank_assignment import RankAssignment, natural_sort_key, shard_members, shard_of
from .reconcile import (
    LeaderView,
    NodeIntent,
    ReconcileResult,
    has_live_node,
    is_replaceable,
    num_nodes_waiting,
    reconcile,
)
from .store_layout import (
    REMEDY,
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

SHARDS_AT_ONCE = 4
KEYS_AT_ONCE = 64
KEEP_SHARE = 0.1
"""Of a lease: a node that has spoken for it so lately need not do so again."""
RETURN_SECONDS = 6.0
"""For a node to find that the store does not answer, to pause, and to connect."""
NOTE_SECONDS = 1.0
NAMES_IN_A_NOTE = 16
REMIND_SECONDS = 10.0
LONGEST_PAUSE = 0.5
"""Shorter than a last call, so that those who remember a job are back before newcomers begin
another."""
LATE_SHARE = 1 / 4
"""Share of `Timing.loop`. If the thread of the rendezvous was late by this much, the whole process
could not run, as on a paused or overloaded machine, and neither could the agent's loop."""
NO_STATUS_YET = LeaderStatus(reason="the store has not answered")
"""Until the node that leads is heard."""
NEVER_REACHED = "; the store was never reached: if the job is already over, its store is gone, too"

Item = TypeVar("Item")


def backoff(misses: int) -> float:
    """Seconds to pause after so many misses, drawn so that nodes do not all come at once."""
    return min(LONGEST_PAUSE, 0.02 * 2.0 ** min(misses, 10)) * random.uniform(0.5, 1.0)


class JobSnapshot(JobListing):
    """What was listed at one moment, and what that is to this node.

    seat: this node's in the state's generation. view: what there is to decide on, for the node
    that leads.
    """

    assignment: RankAssignment | None = None
    view: LeaderView | None = None

    @property
    def is_active(self) -> bool:
        return self.stage[1] is JobPhase.ACTIVE


class StoreGraceExpired(StoreConnectionError):
    """The store, or the job in it, was out of reach for longer than this node waits."""


class LocalNode:
    """Speaks for one node to the store of one job. All calls may raise a StoreError.

    intent: what it wants said. seen: what it last read; None before the store first answered.
    note: what the node that leads last let the others know, and note_at: when to ask for the next.
    heard_at: when the store last took this node's word; None before it has. keeps: whether its
    workers can go on in another generation. settled_at: when a
    generation was last seen to stand. `now`, in all calls, is the caller's monotonic clock in
    seconds.
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
        self.intent = NodeIntent(node)
        self.snapshot: JobSnapshot | None = None
        self.leader_status, self.next_status_read_at = NO_STATUS_YET, float("inf")
        self.last_refresh_at: float | None = None
        self.can_regroup = False
        self.last_active_at = float("-inf")
        self._lease = timeouts.lease_ttl
        self._me = node.id
        self._signature = hashlib.blake2s(node.id.encode(), digest_size=6).hexdigest()
        self._nonces = 0
        # What it has said.
        self._said: Node | None = None
        self._leases: dict[str, int] = {}
        self._kept_at = float("-inf")
        self._spoke_at = float("-inf")
        self._away = 0.0
        self._agent_is_blocked = False
        self._called_at = self._resumed_at = float("-inf")  # of `speak`; after a pause
        self._finish_said = ""
        # What it has read.
        self._unreadable: set[str] = set()  # keys of node records that a warning was logged for
        self._arrived_at = self._stands_since = float("-inf")
        self._document: Membership | None = None
        # What it waits for.
        self._misses = 0
        self._missing_since = self._found_at = float("-inf")
        self._shared, self._shared_at = LeaderStatus(), float("-inf")
        self._reminded, self._reminded_at = "", float("-inf")

    @property
    def state(self) -> MembershipState | None:
        """The job's, as it was last read."""
        return None if self.snapshot is None else self.snapshot.state

    def enter_generation(self) -> RankAssignment | None:
        """Our seat, where a generation has settled in which we have one and have not been yet:
        from now on we may run workers of it."""
        seen = self.snapshot
        if seen is None or seen.state is None or seen.assignment is None:
            return None
        if seen.stage[0] == self.intent.node.membership_id:
            return None
        self.intent = self.intent.enter_generation(seen.state, seen.assignment)
        return seen.assignment

    # -- announcing ---------------------------------------------------------------------------

    def publish(self, now: float, progress_due: float = float("inf")) -> None:
        """Keep the leases, and have what the intent wants stand under this node's.

        progress_due: the time at which the agent's loop must have made progress again. If it has
        not, the node gives up its place. Once it has, the node reads what has become of the
        generation before it speaks again.
        """
        if now - self._called_at > self.timeouts.loop_timeout * LATE_SHARE:
            self._resumed_at = now
        self._called_at = now
        if now > max(progress_due, self._resumed_at + self.timeouts.loop_timeout):
            if not self._agent_is_blocked:
                log.warning(
                    "the agent's loop has been blocked for %g s: this node leaves the group until "
                    "it runs again",
                    self.timeouts.loop_timeout,
                )
            self._agent_is_blocked = True
            self.delete_leases()
            return
        if self._agent_is_blocked:
            log.warning("the agent's loop runs again: this node rejoins")
            self.read(now)
            self._agent_is_blocked = False
        record = self.intent.node_record(self.state)
        if record is None:
            self.delete_leases()
        else:
            self._say(record, now)
        self.last_refresh_at = now

    def _say(self, record: Node, now: float) -> None:
        key = self.keys.node(self._me)
        if now - self._kept_at >= self._lease * KEEP_SHARE:
            if self._said is not None and not self._keep(key):
                # The store was away or is another: what we said may be gone as well.
                self._said, self._finish_said = None, ""
                self._away = max(self._lease, now - self._kept_at)
            self._keep(self.keys.leader)
            self._kept_at = now
        if self._said is None or _worth_a_write(self._said, record):
            self._spoke_at = now if self._said is None else self._spoke_at
            entry = self.store.set(key, encode(record), ttl=self._lease)
            self._said, self._leases[key], self._kept_at = record, entry.version, now

    def _keep(self, key: str) -> bool:
        if key not in self._leases:
            return False
        try:
            self.store.refresh(key, self._leases[key])
        except LeaseLostError:
            del self._leases[key]
            return False
        return True

    def leave(self) -> None:
        """Withdraw for good, in words that outlive the node: who is silent was lost."""
        memory = self.intent.remembered_state
        if memory is not None and self._said is not None:
            self.store.set(self.keys.left(memory.membership_id, self._me), b"")
        self.delete_leases()

    def delete_leases(self) -> None:
        """Fall silent: the leases end now."""
        leases, self._leases, self._said = self._leases, {}, None
        for key, version in leases.items():
            self.store.delete(key, expected=version)

    # -- reading ------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Whether this node held the leader's lease when it last looked."""
        return self.keys.leader in self._leases

    @property
    def watch_prefix(self) -> str:
        """What a change under is worth reading for."""
        return self.keys.job_prefix if self.is_leader else self.keys.watched_prefix

    def poll(self, now: float, listing: Listing | None = None) -> JobSnapshot:
        """Read; lead if nobody does, and remind a store that has forgotten the job.

        listing: of what this node watches, as just read, if that was.
        """
        reading = self.read(now, listing)
        reminded = self._remind(reading)
        return self.read(now) if self.try_become_leader(reading) or reminded else reading

    def read(self, now: float, listing: Listing | None = None) -> JobSnapshot:
        """What the store holds for this node; changes nothing there."""
        before = self.snapshot
        outdated = listing is not None and before and listing.version < before.version
        if listing is None or self.is_leader or outdated:
            listing = self.store.list(self.watch_prefix)
        reading = JobSnapshot(self.keys, listing)
        state, leader, entry = reading.state, reading.leader, reading.leader_entry
        if (
            leader is not None
            and state is not None
            and leader.ended_incarnation != state.incarnation
        ):
            self._check_limits(state)
            if leader.id != self._me:
                # Who leads was here all the time: the store was, and it was we who were away.
                self._away = 0.0
        if before is not None and before.stage == reading.stage:
            reading.assignment = before.assignment
        else:
            reading.assignment, self._stands_since = self._find_seat(state), now
        if entry is not None and self._leases.get(self.keys.leader) == entry.version:
            reading.view = self._view(reading, now)
        self._heed(reading, now)
        return reading

    def _heed(self, reading: JobSnapshot, now: float) -> None:
        """Take in what was read; at first, whether this node is part of the run found there."""
        state = reading.state
        nodes: list[Node | Leader] = [] if reading.leader is None else [reading.leader]
        if self.snapshot is None:
            # From now on others have their time to come.
            self._found_at, self.next_status_read_at = now, now + 2 * NOTE_SECONDS
            if state is not None and not nodes:
                # The leader may have left or died while other nodes of the run are alive.
                listing = self.store.list(self.keys.node())
                nodes.extend(JobListing(self.keys, listing).live_nodes())
            self.intent = self.intent.on_first_read(state, reading.assignment, nodes)
        if reading.view is not None:
            nodes.extend(reading.view.live_nodes)
        self.intent = self.intent.on_read(state).check_run_alive(state, nodes)
        if reading.is_active or (self.snapshot is not None and self.snapshot.is_active):
            self.last_active_at = now
        self.snapshot = reading

    def _check_limits(self, state: MembershipState) -> None:
        """Of a job that somebody is in; what was left behind is not asked for its settings."""
        if state.settings == self.settings or state.phase.is_terminal:
            return
        ours, theirs = attrs.asdict(self.settings), attrs.asdict(state.settings)
        differ = [
            f"{name} is {ours[name]} here and {theirs[name]} there"
            for name in ours
            if ours[name] != theirs[name]
        ]
        raise RendezvousConfigError(
            f"this node's settings differ from the job's: {', '.join(differ)}; "
            "start all nodes with the same settings"
        )

    def _find_seat(self, state: MembershipState | None) -> RankAssignment | None:
        if state is None or state.phase is not JobPhase.ACTIVE:
            return None
        number = shard_of(self._me, state.num_nodes)
        entry = self.store.get(self.keys.shard(state.membership_id, number))
        return None if entry is None else find_assignment(entry.value, self._me)

    def _view(self, job: JobListing, now: float) -> LeaderView:
        document, whole = job.membership(self._document)
        memory = job.remembered_state
        if not whole and document is not None:
            # Its members are lost, and only they themselves can tell who they were.
            memory, document = document.state, None
        self._document = document
        live, unreadable = job.records()
        for key in unreadable.keys() - self._unreadable:
            log.warning("ignored the node at %s: %s (%s)", key, unreadable[key], REMEDY)
        self._unreadable |= unreadable.keys()
        if document is not None and has_live_node(document, live):
            self._check_limits(document)
        known = (
            ()
            if self.snapshot is None or self.snapshot.view is None
            else self.snapshot.view.live_nodes
        )
        if not {node.id for node in live} <= {node.id for node in known}:
            self._arrived_at = now
        return LeaderView(
            node_id=self._me,
            settings=self.settings,
            membership=document,
            live_nodes=live,
            finished_ids=job.finished_ids(),
            left_ids=job.left_ids(),
            remembered_state=memory,
            since_last_arrival_s=now - self._arrived_at,
            return_grace_s=self._patience(memory, now),
            phase_age_s=now - self._stands_since,
            ended_incarnation=self.intent.node.ended_incarnation,
        )

    def _patience(self, memory: MembershipState | None, now: float) -> float:
        """How long others may still take to come back, after an absence of the store's that
        ended our own lease as well: they may find it later than we by as long as it was away."""
        away = self._away if memory is None else max(self._away, self._lease)
        away = min(away, self._lease + RETURN_SECONDS)
        return max(0.0, away - (now - self._spoke_at))

    # -- leading ------------------------------------------------------------------------------

    def try_become_leader(self, reading: JobSnapshot) -> bool:
        """Lead, if nobody does, and say as whom; whether that was written now."""
        node = self.intent.node
        leader = Leader(self._me, node.host, node.ended_incarnation, self.can_regroup)
        stays = reading.leader is not None
        if self._said is None or reading.leader == leader or (stays and not self.is_leader):
            return False
        expected = self._leases.get(self.keys.leader, ABSENT) if stays else ABSENT
        taken = self.store.compare_set(
            self.keys.leader, encode(leader), expected=expected, ttl=self._lease
        )
        if taken.succeeded and taken.entry is not None:
            self._leases[self.keys.leader] = taken.entry.version
        return taken.succeeded

    def reconcile_and_write(
        self, reading: JobSnapshot, wall_time: str = ""
    ) -> tuple[ReconcileResult, bool]:
        """Decide on what was read and write; whether the write (if any) won.

        wall_time: the date and time, for people to read.
        """
        view = reading.view
        if view is None:
            name = "nobody" if reading.leader is None else reading.leader.host
            return ReconcileResult(f"{name} decides, and this node waits"), False
        self._forget_orphaned(reading, view)
        self._nonces += 1
        nonce = f"{self._signature}.{self._nonces}"
        decision = reconcile(attrs.evolve(view, nonce=nonce, wall_time=wall_time))
        if decision.new_membership is None:
            return decision, False
        return decision, self._write(decision.new_membership, reading, nonce)

    def _forget_orphaned(self, reading: JobSnapshot, view: LeaderView) -> None:
        """A memory that nobody here shares must not hide another that somebody has."""
        entry, memory = reading.remembered_entry, reading.remembered_state
        if entry is None or memory is None or view.return_grace_s > 0:
            return
        if not any(node.membership_id == memory.membership_id for node in view.live_nodes):
            self.store.delete(entry.key, expected=entry.version)

    def _write(self, document: Membership, reading: JobSnapshot, nonce: str) -> bool:
        """Put the document in place of the one that was read."""
        state, view = reading.state, present(reading.view, "what the document was decided on")
        membership = document.membership_id
        enrolled = view.membership is not None and view.membership.membership_id == membership
        if not enrolled:
            self._enrol(document, reading)
        won = self._write_state(document, reading)
        if won:
            self._document = document
            if not enrolled or (state is not None and state.incarnation != document.incarnation):
                self._delete(reading.stale_keys(membership))
        elif membership.endswith(f".{nonce}"):
            self._delete((self.keys.master_endpoint(membership),))
            self._delete(self.keys.shard(membership, number) for number in shard_members(document))
        return won

    def _write_state(self, state: MembershipState, reading: JobSnapshot) -> bool:
        expected = _version(reading.state_entry)
        return self.store.compare_set(
            self.keys.state, encode_state(state), expected=expected
        ).succeeded

    def _enrol(self, document: Membership, job: JobListing) -> None:
        """Write who the members are, before the state that says that they are."""
        if not document.membership_id:
            return
        # From now on, what is written under an earlier generation is refused.
        master_key = self.keys.master_endpoint(document.membership_id)
        self._delete(key for key in job.master_keys() if key != master_key)
        for number, rows in self._in_turns(shard_members(document).items(), SHARDS_AT_ONCE):
            self.store.set(self.keys.shard(document.membership_id, number), encode_shard(rows))
        if document.phase is JobPhase.ACTIVE:
            self.store.compare_set(master_key, b"", expected=ABSENT)

    def _delete(self, keys: Iterable[str]) -> None:
        for key in self._in_turns(keys, KEYS_AT_ONCE):
            self.store.delete(key)

    def _in_turns(self, items: Iterable[Item], at_once: int) -> Iterator[Item]:
        """On a slow store our own leases must not end while we write all of these."""
        for number, item in enumerate(items, 1):
            yield item
            if number % at_once == 0:
                self._keep(self.keys.node(self._me))
                self._keep(self.keys.leader)

    # -- as a member --------------------------------------------------------------------------

    def _remind(self, reading: JobSnapshot) -> bool:
        """Say what this node remembers of a job that the store has forgotten; whether it had to."""
        memory = self.intent.remembered_state
        if memory is None or not is_replaceable(reading.state, memory.incarnation):
            return False
        said = reading.remembered_state
        if said is not None and said.generation >= memory.generation:
            return False
        expected = _version(reading.remembered_entry)
        return self.store.compare_set(
            self.keys.remembered_state, encode_state(memory), expected=expected
        ).succeeded

    def write_reports(
        self, reading: JobSnapshot, wall_time: str = "", *, endpoint: str | None = None
    ) -> bool:
        """What this node has to say of its job and of its generation, until the store has it;
        whether the job's end is among that, so that there is nothing to decide.

        endpoint: where this node serves torch's store of the held generation, if it does.
        """
        intent, current = self.intent, reading.stage[0]
        if intent.close_reason:
            state = reading.state or MembershipState(self.settings, f"closed by {self._me}")
            ending = JobEnd(intent.node.host, wall_time)
            if state.phase.is_terminal or self._write_state(
                end_job(state, JobPhase.ABORTED, intent.close_reason, job_end=ending), reading
            ):
                self.intent = attrs.evolve(intent, close_reason="")
            return True
        master = reading.master_entry
        is_awaited = master is not None and not master.value
        if endpoint and master is not None and is_awaited and intent.node.membership_id == current:
            # Refused where the generation is over: its key is gone then, or another's.
            self.store.compare_set(master.key, endpoint.encode(), expected=master.version)
        if (
            intent.finished_membership_id
            and intent.finished_membership_id == current != self._finish_said
        ):
            # It outlives the node.
            self.store.set(self.keys.finished(current, self._me), b"")
            self._finish_said = current
        return False

    # -- waiting ------------------------------------------------------------------------------

    def on_store_success(self, now: float) -> None:
        """The store answers; if it was away, what is missing there has its time from now on."""
        if self._misses:
            self._misses, self._found_at = 0, now

    def on_store_error(self, error: StoreError, now: float) -> float:
        """The store does not answer: how long to pause. Raises PatienceSpent at the end of our
        patience."""
        grace, knob = self.timeouts.store_grace, "store_grace, --store-grace"
        if self.snapshot is None:
            grace, knob = self.timeouts.join_timeout, "join_timeout"
        self.leader_status = LeaderStatus(reason=str(error))
        if self._misses == 0:
            log.warning("the store is unreachable, retrying for %g s (%s): %s", grace, knob, error)
            if self.snapshot is None:
                log.warning(
                    "this node has not reached the store yet: either the node that serves it has "
                    "not started, or the job is already over; without a store this node fails "
                    "after %g s",
                    grace,
                )
            self._missing_since = now
        self._misses += 1
        if now - self._missing_since >= grace:
            never = NEVER_REACHED if self.snapshot is None else ""
            raise StoreGraceExpired(
                f"the store was unreachable for {grace:g} s ({knob}): {error}{never}"
            )
        return backoff(self._misses)

    def try_other_store(self, now: float) -> bool:
        """Where the store has forgotten the job, or too few are here to go on, the others have
        until the end of our patience to come; and they may be elsewhere. Whether we have gone
        there, so that what was read here counts for nothing. Raises PatienceSpent at the end of
        our patience."""
        grace, missing = self.timeouts.store_grace, now - self._found_at
        if not self._finds_nothing() and not self.leader_status.is_blocked:
            self._found_at = now
        elif missing >= grace and self.intent.remembered_state is not None:
            raise StoreGraceExpired(
                f"too few nodes of generation {self.intent.current_generation} came back to the "
                f"store within {grace:g} s (store_grace, --store-grace): "
                f"{self.leader_status.reason}"
            )
        elif missing >= self._lease and self.store.try_other_endpoints(self._is_further):
            log.warning("too few nodes were at the store: this node has moved to another store")
            return True
        return False

    def _finds_nothing(self) -> bool:
        """Whether no generation of the job is in the store."""
        return self.state is None or not self.state.membership_id

    def _is_further(self, other: Store, earlier: bool) -> bool:
        """Whether the job is further at another store than it is here; or, where neither has it,
        whether the other comes first, so that all look at the same one."""
        entry = other.get(self.keys.state)
        there = None if entry is None else decode_state(entry.value)
        if there is None or not there.membership_id:
            return self._finds_nothing() and earlier
        here = self.state
        if here is None or self._finds_nothing():
            return True
        return there.incarnation == here.incarnation and there.generation > here.generation

    def publish_status(self, decision: ReconcileResult, reading: JobSnapshot, now: float) -> float:
        """Let the others know, or hear from the node that leads, what is being waited for; and log
        it while this node waits, when it changes and every so often. Seconds until there may be
        something to say again."""
        again = self._share_note(decision, reading, now)
        waits = self.intent.is_joining and not self.intent.has_not_joined and not reading.is_active
        if not waits or self.intent.final_change(reading.state) is not None:
            log.debug("%s", decision.reason)
            return again
        note = self.leader_status
        new = note.reason != self._reminded or now - self._reminded_at >= REMIND_SECONDS
        if new and note not in (NO_STATUS_YET, LeaderStatus()):
            self._reminded, self._reminded_at = note.reason, now
            limit = f"gives up after {self.timeouts.join_timeout:g} s (join_timeout)"
            log.info("waiting: %s (%s); %s", note.reason, note.present_names, limit)
        return max(0.01, min(again, self.next_status_read_at - now))

    def _share_note(self, decision: ReconcileResult, reading: JobSnapshot, now: float) -> float:
        if reading.view is None:
            if now >= self.next_status_read_at:
                entry = self.store.get(self.keys.leader_status)
                self.leader_status = (
                    LeaderStatus()
                    if entry is None
                    else decode(LeaderStatus, entry.value, "the note")
                )
                self.next_status_read_at = now + self._lease
            return float("inf")
        self.leader_status = note_of(decision, reading.view)
        self.next_status_read_at = now + REMIND_SECONDS
        if self.leader_status == self._shared:
            return float("inf")
        if now - self._shared_at < NOTE_SECONDS:
            return self._shared_at + NOTE_SECONDS - now
        self.store.set(self.keys.leader_status, encode(self.leader_status))
        self._shared, self._shared_at = self.leader_status, now
        return float("inf")


def note_of(decision: ReconcileResult, view: LeaderView) -> LeaderStatus:
    """What the others may know of a decision: why, who is here, and how many wait to be let in."""
    names = sorted((node.host for node in view.live_nodes), key=natural_sort_key)
    return LeaderStatus(
        reason=decision.reason,
        present_hosts=tuple(names[:NAMES_IN_A_NOTE]),
        num_present=len(names),
        num_waiting=num_nodes_waiting(view),
        membership_id="" if view.membership is None else view.membership.membership_id,
        is_blocked=decision.is_blocked,
    )


def _worth_a_write(said: Node, record: Node) -> bool:
    """Not where only its place differs: a member is in the generation whose members name it."""
    if record == said:
        return False
    if said.may_run_workers and not record.may_run_workers:
        return True
    moved = attrs.evolve(
        said,
        membership_id=record.membership_id,
        group_rank=record.group_rank,
        may_run_workers=record.may_run_workers,
    )
    return record != moved


def _version(entry: Entry | None) -> int:
    return ABSENT if entry is None else entry.version
