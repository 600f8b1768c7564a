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
from .decide import Decision, Intent, View, decide, gives_way, has_live_node, waiting
from .document import (
    Document,
    Ending,
    Leader,
    Limits,
    Node,
    Note,
    Phase,
    State,
    Timing,
    end,
)
from .layout import (
    REMEDY,
    Keys,
    StoredJob,
    decode,
    decode_state,
    encode,
    encode_shard,
    encode_state,
    find_seat,
)
from .ranks import Seat, deal_shards, natural, shard_of

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
UNANSWERED = Note(reason="the store has not answered")
"""Until the node that leads is heard."""
NEVER_REACHED = "; the store was never reached: if the job is already over, its store is gone, too"

Item = TypeVar("Item")


def backoff(misses: int) -> float:
    """Seconds to pause after so many misses, drawn so that nodes do not all come at once."""
    return min(LONGEST_PAUSE, 0.02 * 2.0 ** min(misses, 10)) * random.uniform(0.5, 1.0)


class Reading(StoredJob):
    """What was listed at one moment, and what that is to this node.

    seat: this node's in the state's generation. view: what there is to decide on, for the node
    that leads.
    """

    seat: Seat | None = None
    view: View | None = None

    @property
    def settled(self) -> bool:
        return self.stage[1] is Phase.SETTLED


class PatienceSpent(StoreConnectionError):
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
        self, store: Store, run_id: str, node: Node, limits: Limits, timing: Timing
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.keys = Keys(run_id)
        self.limits = limits
        self.timing = timing
        self.intent = Intent(node)
        self.seen: Reading | None = None
        self.note, self.note_at = UNANSWERED, float("inf")
        self.heard_at: float | None = None
        self.keeps = False
        self.settled_at = float("-inf")
        self._lease = timing.lease
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
        self._document: Document | None = None
        # What it waits for.
        self._misses = 0
        self._missing_since = self._found_at = float("-inf")
        self._shared, self._shared_at = Note(), float("-inf")
        self._reminded, self._reminded_at = "", float("-inf")

    @property
    def state(self) -> State | None:
        """The job's, as it was last read."""
        return None if self.seen is None else self.seen.state

    def enter(self) -> Seat | None:
        """Our seat, where a generation has settled in which we have one and have not been yet:
        from now on we may run workers of it."""
        seen = self.seen
        if seen is None or seen.state is None or seen.seat is None:
            return None
        if seen.stage[0] == self.intent.node.membership:
            return None
        self.intent = self.intent.enter(seen.state, seen.seat)
        return seen.seat

    # -- announcing ---------------------------------------------------------------------------

    def speak(self, now: float, progress_due: float = float("inf")) -> None:
        """Keep the leases, and have what the intent wants stand under this node's.

        progress_due: the time at which the agent's loop must have made progress again. If it has
        not, the node gives up its place. Once it has, the node reads what has become of the
        generation before it speaks again.
        """
        if now - self._called_at > self.timing.loop * LATE_SHARE:
            self._resumed_at = now
        self._called_at = now
        if now > max(progress_due, self._resumed_at + self.timing.loop):
            if not self._agent_is_blocked:
                log.warning(
                    "the agent's loop has been blocked for %g s: this node leaves the group until "
                    "it runs again",
                    self.timing.loop,
                )
            self._agent_is_blocked = True
            self.withdraw()
            return
        if self._agent_is_blocked:
            log.warning("the agent's loop runs again: this node rejoins")
            self.read(now)
            self._agent_is_blocked = False
        record = self.intent.record(self.state)
        if record is None:
            self.withdraw()
        else:
            self._say(record, now)
        self.heard_at = now

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
        memory = self.intent.memory
        if memory is not None and self._said is not None:
            self.store.set(self.keys.departed(memory.membership, self._me), b"")
        self.withdraw()

    def withdraw(self) -> None:
        """Fall silent: the leases end now."""
        leases, self._leases, self._said = self._leases, {}, None
        for key, version in leases.items():
            self.store.delete(key, expected=version)

    # -- reading ------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this node held the leader's lease when it last looked."""
        return self.keys.leader in self._leases

    @property
    def prefix(self) -> str:
        """What a change under is worth reading for."""
        return self.keys.job if self.leads else self.keys.watched

    def look(self, now: float, listing: Listing | None = None) -> Reading:
        """Read; lead if nobody does, and remind a store that has forgotten the job.

        listing: of what this node watches, as just read, if that was.
        """
        reading = self.read(now, listing)
        reminded = self._remind(reading)
        return self.read(now) if self.lead(reading) or reminded else reading

    def read(self, now: float, listing: Listing | None = None) -> Reading:
        """What the store holds for this node; changes nothing there."""
        before = self.seen
        outdated = listing is not None and before and listing.version < before.version
        if listing is None or self.leads or outdated:
            listing = self.store.list(self.prefix)
        reading = Reading(self.keys, listing)
        state, leader, entry = reading.state, reading.leader, reading.leader_entry
        if leader is not None and state is not None and leader.came_after != state.incarnation:
            self._check_limits(state)
            if leader.id != self._me:
                # Who leads was here all the time: the store was, and it was we who were away.
                self._away = 0.0
        if before is not None and before.stage == reading.stage:
            reading.seat = before.seat
        else:
            reading.seat, self._stands_since = self._find_seat(state), now
        if entry is not None and self._leases.get(self.keys.leader) == entry.version:
            reading.view = self._view(reading, now)
        self._heed(reading, now)
        return reading

    def _heed(self, reading: Reading, now: float) -> None:
        """Take in what was read; at first, whether this node is part of the run found there."""
        state = reading.state
        nodes: list[Node | Leader] = [] if reading.leader is None else [reading.leader]
        if self.seen is None:
            # From now on others have their time to come.
            self._found_at, self.note_at = now, now + 2 * NOTE_SECONDS
            if state is not None and not nodes:
                # The leader may have left or died while other nodes of the run are alive.
                listing = self.store.list(self.keys.node())
                nodes.extend(StoredJob(self.keys, listing).live())
            self.intent = self.intent.arrive(state, reading.seat, nodes)
        if reading.view is not None:
            nodes.extend(reading.view.live)
        self.intent = self.intent.meet(state).notice(state, nodes)
        if reading.settled or (self.seen is not None and self.seen.settled):
            self.settled_at = now
        self.seen = reading

    def _check_limits(self, state: State) -> None:
        """Of a job that somebody is in; what was left behind is not asked for its limits."""
        if state.limits == self.limits or state.phase.terminal:
            return
        ours, theirs = attrs.asdict(self.limits), attrs.asdict(state.limits)
        differ = [
            f"{name} is {ours[name]} here and {theirs[name]} there"
            for name in ours
            if ours[name] != theirs[name]
        ]
        raise RendezvousConfigError(
            f"this node's settings differ from the job's: {', '.join(differ)}; "
            "start all nodes with the same settings"
        )

    def _find_seat(self, state: State | None) -> Seat | None:
        if state is None or state.phase is not Phase.SETTLED:
            return None
        number = shard_of(self._me, state.nodes)
        entry = self.store.get(self.keys.shard(state.membership, number))
        return None if entry is None else find_seat(entry.value, self._me)

    def _view(self, job: StoredJob, now: float) -> View:
        document, whole = job.document(self._document)
        memory = job.memory
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
        known = () if self.seen is None or self.seen.view is None else self.seen.view.live
        if not {node.id for node in live} <= {node.id for node in known}:
            self._arrived_at = now
        return View(
            me=self._me,
            limits=self.limits,
            document=document,
            live=live,
            finished=job.finished(),
            departed=job.departed(),
            memory=memory,
            quiet=now - self._arrived_at,
            patience=self._patience(memory, now),
            stands=now - self._stands_since,
            came_after=self.intent.node.came_after,
        )

    def _patience(self, memory: State | None, now: float) -> float:
        """How long others may still take to come back, after an absence of the store's that
        ended our own lease as well: they may find it later than we by as long as it was away."""
        away = self._away if memory is None else max(self._away, self._lease)
        away = min(away, self._lease + RETURN_SECONDS)
        return max(0.0, away - (now - self._spoke_at))

    # -- leading ------------------------------------------------------------------------------

    def lead(self, reading: Reading) -> bool:
        """Lead, if nobody does, and say as whom; whether that was written now."""
        node = self.intent.node
        leader = Leader(self._me, node.host, node.came_after, self.keeps)
        stays = reading.leader is not None
        if self._said is None or reading.leader == leader or (stays and not self.leads):
            return False
        expected = self._leases.get(self.keys.leader, ABSENT) if stays else ABSENT
        taken = self.store.compare_set(
            self.keys.leader, encode(leader), expected=expected, ttl=self._lease
        )
        if taken.succeeded and taken.entry is not None:
            self._leases[self.keys.leader] = taken.entry.version
        return taken.succeeded

    def act(self, reading: Reading, today: str = "") -> tuple[Decision, bool]:
        """Decide on what was read and write; whether the write (if any) won.

        today: the date and time, for people to read.
        """
        view = reading.view
        if view is None:
            name = "nobody" if reading.leader is None else reading.leader.host
            return Decision(f"{name} decides, and this node waits"), False
        self._forget_orphaned(reading, view)
        self._nonces += 1
        nonce = f"{self._signature}.{self._nonces}"
        decision = decide(attrs.evolve(view, nonce=nonce, today=today))
        if decision.write is None:
            return decision, False
        return decision, self._write(decision.write, reading, nonce)

    def _forget_orphaned(self, reading: Reading, view: View) -> None:
        """A memory that nobody here shares must not hide another that somebody has."""
        entry, memory = reading.memory_entry, reading.memory
        if entry is None or memory is None or view.patience > 0:
            return
        if not any(node.membership == memory.membership for node in view.live):
            self.store.delete(entry.key, expected=entry.version)

    def _write(self, document: Document, reading: Reading, nonce: str) -> bool:
        """Put the document in place of the one that was read."""
        state, view = reading.state, present(reading.view, "what the document was decided on")
        membership = document.membership
        enrolled = view.document is not None and view.document.membership == membership
        if not enrolled:
            self._enrol(document, reading)
        won = self._write_state(document, reading)
        if won:
            self._document = document
            if not enrolled or (state is not None and state.incarnation != document.incarnation):
                self._delete(reading.left_over(membership))
        elif membership.endswith(f".{nonce}"):
            self._delete((self.keys.master_endpoint(membership),))
            self._delete(self.keys.shard(membership, number) for number in deal_shards(document))
        return won

    def _write_state(self, state: State, reading: Reading) -> bool:
        expected = _version(reading.state_entry)
        return self.store.compare_set(
            self.keys.state, encode_state(state), expected=expected
        ).succeeded

    def _enrol(self, document: Document, job: StoredJob) -> None:
        """Write who the members are, before the state that says that they are."""
        if not document.membership:
            return
        # From now on, what is written under an earlier generation is refused.
        master_key = self.keys.master_endpoint(document.membership)
        self._delete(key for key in job.master_keys() if key != master_key)
        for number, rows in self._in_turns(deal_shards(document).items(), SHARDS_AT_ONCE):
            self.store.set(self.keys.shard(document.membership, number), encode_shard(rows))
        if document.phase is Phase.SETTLED:
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

    def _remind(self, reading: Reading) -> bool:
        """Say what this node remembers of a job that the store has forgotten; whether it had to."""
        memory = self.intent.memory
        if memory is None or not gives_way(reading.state, memory.incarnation):
            return False
        said = reading.memory
        if said is not None and said.generation >= memory.generation:
            return False
        expected = _version(reading.memory_entry)
        return self.store.compare_set(
            self.keys.memory, encode_state(memory), expected=expected
        ).succeeded

    def report(self, reading: Reading, today: str = "", *, endpoint: str | None = None) -> bool:
        """What this node has to say of its job and of its generation, until the store has it;
        whether the job's end is among that, so that there is nothing to decide.

        endpoint: where this node serves torch's store of the held generation, if it does.
        """
        intent, current = self.intent, reading.stage[0]
        if intent.closing:
            state = reading.state or State(self.limits, f"closed by {self._me}")
            ending = Ending(intent.node.host, today)
            if state.phase.terminal or self._write_state(
                end(state, Phase.ABORTED, intent.closing, ending=ending), reading
            ):
                self.intent = attrs.evolve(intent, closing="")
            return True
        master = reading.master_entry
        is_awaited = master is not None and not master.value
        if endpoint and master is not None and is_awaited and intent.node.membership == current:
            # Refused where the generation is over: its key is gone then, or another's.
            self.store.compare_set(master.key, endpoint.encode(), expected=master.version)
        if intent.finished and intent.finished == current != self._finish_said:
            # It outlives the node.
            self.store.set(self.keys.finished(current, self._me), b"")
            self._finish_said = current
        return False

    # -- waiting ------------------------------------------------------------------------------

    def answered(self, now: float) -> None:
        """The store answers; if it was away, what is missing there has its time from now on."""
        if self._misses:
            self._misses, self._found_at = 0, now

    def missed(self, error: StoreError, now: float) -> float:
        """The store does not answer: how long to pause. Raises PatienceSpent at the end of our
        patience."""
        grace, knob = self.timing.store_grace, "store_grace, --store-grace"
        if self.seen is None:
            grace, knob = self.timing.join, "join_timeout"
        self.note = Note(reason=str(error))
        if self._misses == 0:
            log.warning("the store is unreachable, retrying for %g s (%s): %s", grace, knob, error)
            if self.seen is None:
                log.warning(
                    "this node has not reached the store yet: either the node that serves it has "
                    "not started, or the job is already over; without a store this node fails "
                    "after %g s",
                    grace,
                )
            self._missing_since = now
        self._misses += 1
        if now - self._missing_since >= grace:
            never = NEVER_REACHED if self.seen is None else ""
            raise PatienceSpent(
                f"the store was unreachable for {grace:g} s ({knob}): {error}{never}"
            )
        return backoff(self._misses)

    def goes_elsewhere(self, now: float) -> bool:
        """Where the store has forgotten the job, or too few are here to go on, the others have
        until the end of our patience to come; and they may be elsewhere. Whether we have gone
        there, so that what was read here counts for nothing. Raises PatienceSpent at the end of
        our patience."""
        grace, missing = self.timing.store_grace, now - self._found_at
        if not self._finds_nothing() and not self.note.stuck:
            self._found_at = now
        elif missing >= grace and self.intent.memory is not None:
            raise PatienceSpent(
                f"too few nodes of generation {self.intent.held} came back to the store within "
                f"{grace:g} s (store_grace, --store-grace): {self.note.reason}"
            )
        elif missing >= self._lease and self.store.try_other_endpoints(self._is_further):
            log.warning("too few nodes were at the store: this node has moved to another store")
            return True
        return False

    def _finds_nothing(self) -> bool:
        """Whether no generation of the job is in the store."""
        return self.state is None or not self.state.membership

    def _is_further(self, other: Store, earlier: bool) -> bool:
        """Whether the job is further at another store than it is here; or, where neither has it,
        whether the other comes first, so that all look at the same one."""
        entry = other.get(self.keys.state)
        there = None if entry is None else decode_state(entry.value)
        if there is None or not there.membership:
            return self._finds_nothing() and earlier
        here = self.state
        if here is None or self._finds_nothing():
            return True
        return there.incarnation == here.incarnation and there.generation > here.generation

    def explain(self, decision: Decision, reading: Reading, now: float) -> float:
        """Let the others know, or hear from the node that leads, what is being waited for; and log
        it while this node waits, when it changes and every so often. Seconds until there may be
        something to say again."""
        again = self._share_note(decision, reading, now)
        waits = self.intent.joining and not self.intent.silent and not reading.settled
        if not waits or self.intent.final_change(reading.state) is not None:
            log.debug("%s", decision.reason)
            return again
        note = self.note
        new = note.reason != self._reminded or now - self._reminded_at >= REMIND_SECONDS
        if new and note not in (UNANSWERED, Note()):
            self._reminded, self._reminded_at = note.reason, now
            limit = f"gives up after {self.timing.join:g} s (join_timeout)"
            log.info("waiting: %s (%s); %s", note.reason, note.names, limit)
        return max(0.01, min(again, self.note_at - now))

    def _share_note(self, decision: Decision, reading: Reading, now: float) -> float:
        if reading.view is None:
            if now >= self.note_at:
                entry = self.store.get(self.keys.note)
                self.note = Note() if entry is None else decode(Note, entry.value, "the note")
                self.note_at = now + self._lease
            return float("inf")
        self.note = note_of(decision, reading.view)
        self.note_at = now + REMIND_SECONDS
        if self.note == self._shared:
            return float("inf")
        if now - self._shared_at < NOTE_SECONDS:
            return self._shared_at + NOTE_SECONDS - now
        self.store.set(self.keys.note, encode(self.note))
        self._shared, self._shared_at = self.note, now
        return float("inf")


def note_of(decision: Decision, view: View) -> Note:
    """What the others may know of a decision: why, who is here, and how many wait to be let in."""
    names = sorted((node.host for node in view.live), key=natural)
    return Note(
        reason=decision.reason,
        here=tuple(names[:NAMES_IN_A_NOTE]),
        count=len(names),
        waiting=waiting(view),
        membership="" if view.document is None else view.document.membership,
        stuck=decision.stuck,
    )


def _worth_a_write(said: Node, record: Node) -> bool:
    """Not where only its place differs: a member is in the generation whose members name it."""
    if record == said:
        return False
    if said.runs and not record.runs:
        return True
    moved = attrs.evolve(said, membership=record.membership, rank=record.rank, runs=record.runs)
    return record != moved


def _version(entry: Entry | None) -> int:
    return ABSENT if entry is None else entry.version
