"""One node's part in the protocol: announce, read, lead if nobody does, decide, write.

It touches the store and nothing else. Whoever drives it (the handler's loop, the simulator)
supplies the time and chooses when each step happens, so that both run the very same steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import attrs

from ..errors import LeaseLost, RendezvousMismatch, present
from ..stores.interface import ABSENT, Entry, Listing, Store
from .codec import (
    decode_head,
    encode_head,
    encode_leader,
    encode_node,
    encode_shard,
    find_seat,
)
from .decide import Decision, View, decide, gives_way, is_empty
from .document import Document, Ending, Head, Limits, Node, Phase, end
from .intent import Intent, Leader
from .keys import Keys, Read
from .notes import Notes
from .ranks import Seat, deal_shards, shard_of

SHARDS_AT_ONCE = 4
KEYS_AT_ONCE = 64
KEEP_SHARE = 0.1
"""Of a lease: who has spoken for it so lately need not do so again."""
RETURN_SECONDS = 6.0
"""For a node to find that the store does not answer, to pause, and to connect."""


@attrs.frozen
class Snapshot:
    """What was read at one moment.

    seat: this node's in the head's generation. view: what there is to decide on, for the node
    that leads. version: of the store, to wait past.
    """

    head: Head | None
    leader: Leader | None
    seat: Seat | None
    view: View | None
    version: int
    read: Read

    @property
    def master(self) -> str | None:
        """Where the generation's torch store is, once its first node has said so."""
        gate = self.read.gate
        return gate.value.decode() if gate is not None and gate.value else None


class Participant:
    """Speaks for one node to the store of one job."""

    def __init__(self, store: Store, run_id: str, node: Node, limits: Limits, lease: float):
        self.limits = limits
        self.keys = Keys(run_id)
        self._store = store
        self._lease = lease
        self._me = node.id
        self._signature = hashlib.blake2s(node.id.encode(), digest_size=6).hexdigest()
        self._said: Node | None = None
        self._leases: dict[str, int] = {}
        self._kept_at = float("-inf")
        self._away = 0.0
        self._spoke_at = float("-inf")
        self._known: frozenset[str] = frozenset()
        self._last_arrival: float | None = None
        self._foreign: set[str] = set()
        self._marks = 0
        self._document: Document | None = None
        self._seat: tuple[str, Seat | None] = ("", None)
        self._stands: tuple[tuple[str, Phase] | None, float] = (None, 0.0)
        self._done: str | None = None
        self.notes = Notes(store, self.keys.note)

    # -- announcing ---------------------------------------------------------------------------

    def speak(self, intent: Intent, head: Head | None, now: float) -> None:
        """Keep the leases, and have what the intent wants stand under this node's.

        `now` here and below is the caller's monotonic clock, in seconds.
        """
        record = intent.record(head)
        if record is None:
            self.withdraw()
            return
        key = self.keys.node(self._me)
        if now - self._kept_at >= self._lease * KEEP_SHARE:
            self._keep_all(key, now)
        if self._said is None or _worth_a_write(self._said, record):
            self._spoke_at = now if self._said is None else self._spoke_at
            entry = self._store.set(key, encode_node(record), ttl=self._lease)
            self._said, self._leases[key], self._kept_at = record, entry.version, now

    def _keep_all(self, key: str, now: float) -> None:
        if self._said is not None and not self._keep(key):
            # The store was away or is another: what we told it may be gone as well.
            self._said, self._done = None, None
            self._away = max(self._lease, now - self._kept_at)
        self._keep(self.keys.leader)
        self._kept_at = now

    def _keep(self, key: str) -> bool:
        version = self._leases.get(key, ABSENT)
        if version == ABSENT:
            return False
        try:
            self._store.refresh(key, version)
        except LeaseLost:
            del self._leases[key]
            return False
        return True

    def leave(self, intent: Intent) -> None:
        """Withdraw for good; where a quorum counts, in words that outlive the node."""
        if self.limits.quorum and intent.memory is not None and self._said is not None:
            self._store.set(self.keys.gone(intent.memory.roll, self._me), b"")
        self.withdraw()

    def withdraw(self) -> None:
        """Fall silent: the leases end now."""
        leases, self._leases, self._said = self._leases, {}, None
        for key, version in leases.items():
            self._store.delete(key, expected=version)

    # -- reading ------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this node held the leader's lease when it last looked."""
        return self.keys.leader in self._leases

    @property
    def prefix(self) -> str:
        """What a change under is worth reading for."""
        return self.keys.job if self.leads else self.keys.watched

    def read(self, intent: Intent, now: float, listing: Listing | None = None) -> Snapshot:
        """What the store holds for this node; changes nothing there.

        listing: of what this node watches, as just read; not for one that leads.
        """
        if listing is None or self.leads:
            listing = self._store.list(self.prefix)
        read = Read(self.keys, listing)
        head = read.head
        stands = None if head is None else (head.roll, head.phase)
        if stands != self._stands[0]:
            self._stands = (stands, now)
        if read.leader is not None and head is not None and read.leader.beyond != head.incarnation:
            self._check_limits(head)
            if read.leader.id != self._me:
                # Who leads was here all the time: the store was, and it was we who were away.
                self._away = 0.0
        entry = read.leader_entry
        leads = entry is not None and self._leases.get(self.keys.leader) == entry.version
        return Snapshot(
            head=head,
            leader=read.leader,
            seat=self._find_seat(head),
            view=self._view(read, intent, now) if leads else None,
            version=read.version,
            read=read,
        )

    def _check_limits(self, head: Head) -> None:
        """Of a job that somebody is in; what was left behind is not asked for its limits."""
        if head.limits != self.limits and not head.phase.terminal:
            raise RendezvousMismatch(_difference(self.limits, head.limits))

    def _find_seat(self, head: Head | None) -> Seat | None:
        if head is None or head.phase is not Phase.SETTLED:
            return None
        if self._seat[0] != head.roll:
            number = shard_of(self._me, head.nodes)
            entry = self._store.get(self.keys.shard(head.roll, number))
            seat = None if entry is None else find_seat(entry.value, self._me)
            self._seat = (head.roll, seat)
        return self._seat[1]

    def _view(self, read: Read, intent: Intent, now: float) -> View:
        document, whole = read.document(self._document)
        memory = read.memory
        if not whole and document is not None:
            # Its members are lost, and only they themselves can tell who they were.
            memory, document = document.head, None
        self._document = document
        live = read.live(self._foreign)
        if document is not None and any(n.beyond != document.incarnation for n in live):
            self._check_limits(document)
        return View(
            me=self._me,
            limits=self.limits,
            document=document,
            live=live,
            done=read.done(),
            gone=read.gone(),
            memory=memory,
            quiet=self._quiet(live, now),
            patience=self._patience(memory, now),
            stands=now - self._stands[1],
            beyond=intent.node.beyond,
        )

    def _patience(self, memory: Head | None, now: float) -> float:
        """How long others may still take to come back, after an absence of the store's that
        ended our own lease as well: they may find it later than we by as long as it was away."""
        away = self._away if memory is None else max(self._away, self._lease)
        away = min(away, self._lease + RETURN_SECONDS)
        return max(0.0, away - (now - self._spoke_at))

    def _quiet(self, live: tuple[Node, ...], now: float) -> float:
        ids = frozenset(node.id for node in live)
        if self._last_arrival is None or not ids <= self._known:
            self._last_arrival = now
        self._known = ids
        return now - self._last_arrival

    # -- leading ------------------------------------------------------------------------------

    def look(self, intent: Intent, now: float, listing: Listing | None = None) -> Snapshot:
        """Read; lead if nobody does, and remind a store that has forgotten the job."""
        snapshot = self.read(intent, now, listing)
        reminded = self.remind(snapshot, intent)
        if self.stand(snapshot, intent) or reminded:
            return self.read(intent, now)
        return snapshot

    def stand(self, snapshot: Snapshot, intent: Intent) -> bool:
        """Lead, if nobody does, and say as whom; whether that was written now."""
        leader = Leader(self._me, intent.node.host, intent.node.beyond)
        stays = snapshot.leader is not None
        if self._said is None or snapshot.leader == leader or (stays and not self.leads):
            return False
        if not stays and self._is_preceded(snapshot.head, intent):
            return False
        expected = self._leases.get(self.keys.leader, ABSENT) if stays else ABSENT
        taken = self._store.compare_set(
            self.keys.leader, encode_leader(leader), expected=expected, ttl=self._lease
        )
        if taken.won and taken.entry is not None:
            self._leases[self.keys.leader] = taken.entry.version
        if taken.won and not stays:
            self._last_arrival, self._known = None, frozenset()
        return taken.won

    def _is_preceded(self, head: Head | None, intent: Intent) -> bool:
        """Whether the job was over when we came, and one who was in it is here still: it is for
        that one to lead, so that who comes now hears of the end and does not wait for another."""
        if head is None or not head.phase.terminal or intent.node.beyond != head.incarnation:
            return False
        here = Read(self.keys, self._store.list(self.keys.node())).live(self._foreign)
        return any(node.beyond != head.incarnation for node in here)

    def act(self, snapshot: Snapshot, today: str = "") -> tuple[Decision, bool]:
        """Decide on the snapshot and write; whether the write (if any) won.

        today: the date and time, for people to read.
        """
        view = snapshot.view
        if view is None:
            name = "nobody" if snapshot.leader is None else snapshot.leader.host
            return Decision(f"{name} decides, and this node waits"), False
        self._forget_orphaned(snapshot, view)
        self._marks += 1
        mark = f"{self._signature}.{self._marks}"
        decision = decide(attrs.evolve(view, mark=mark, today=today))
        if decision.write is None:
            return decision, False
        return decision, self._write(decision.write, snapshot, mark)

    def _forget_orphaned(self, snapshot: Snapshot, view: View) -> None:
        """A memory that nobody here shares must not hide another that somebody has."""
        entry, memory = snapshot.read.memory_entry, snapshot.read.memory
        if entry is None or memory is None or view.patience > 0:
            return
        if not any(node.roll == memory.roll for node in view.live):
            self._store.delete(entry.key, expected=entry.version)

    def close(self, snapshot: Snapshot, phase: Phase, cause: str, ending: Ending) -> bool:
        """End the job, unless it has ended; False if it has to be tried on a newer snapshot."""
        head = snapshot.head or Head(self.limits, f"closed by {self._me}")
        if head.phase.terminal:
            return True
        value = encode_head(end(head, phase, cause, ending=ending))
        expected = _version(snapshot.read.head_entry)
        return self._store.compare_set(self.keys.head, value, expected=expected).won

    def _write(self, document: Document, snapshot: Snapshot, mark: str) -> bool:
        """Put the document in place of the one that was read."""
        head, view = snapshot.head, present(snapshot.view, "what the document was decided on")
        enrolled = view.document is not None and view.document.roll == document.roll
        if not enrolled:
            self._enrol(document, snapshot.read)
        entry = self._store.compare_set(
            self.keys.head, encode_head(document), expected=_version(snapshot.read.head_entry)
        )
        if entry.won:
            self._document = document
            if not enrolled or (head is not None and head.incarnation != document.incarnation):
                self._delete(snapshot.read.left_over(document.roll))
        elif document.roll.endswith(f".{mark}"):
            self._delete((self.keys.gate(document.roll),))
            self._delete(self.keys.shard(document.roll, number) for number in deal_shards(document))
        return entry.won

    def _enrol(self, document: Document, read: Read) -> None:
        """Write who the members are, before the head that says that they are."""
        if not document.roll:
            return
        # From now on, what is written under an earlier generation is refused.
        self._delete(key for key in read.gates() if key != self.keys.gate(document.roll))
        for number, rows in deal_shards(document).items():
            self._store.set(self.keys.shard(document.roll, number), encode_shard(rows))
            if number % SHARDS_AT_ONCE == SHARDS_AT_ONCE - 1:
                self._stay()
        if document.phase is Phase.SETTLED:
            self._store.compare_set(self.keys.gate(document.roll), b"", expected=ABSENT)

    def _delete(self, keys: Iterable[str]) -> None:
        for number, key in enumerate(keys, 1):
            self._store.delete(key)
            if number % KEYS_AT_ONCE == 0:
                self._stay()

    def _stay(self) -> None:
        """On a slow store our own leases must not end while we write."""
        self._keep(self.keys.node(self._me))
        self._keep(self.keys.leader)

    # -- as a member --------------------------------------------------------------------------

    def remind(self, snapshot: Snapshot, intent: Intent) -> bool:
        """Say what this node remembers of a job that the store has forgotten; whether it had to."""
        memory = intent.memory
        if memory is None or not gives_way(snapshot.head, intent.incarnation):
            return False
        said = snapshot.read.memory
        if said is not None and said.generation >= memory.generation:
            return False
        expected = _version(snapshot.read.memory_entry)
        return self._store.compare_set(self.keys.memory, encode_head(memory), expected=expected).won

    def publish_master(self, snapshot: Snapshot, roll: str, endpoint: str) -> bool:
        """As group rank 0: tell the members where torch's store is; False if they cannot be
        told, as their generation is over or the store has forgotten it."""
        gate = snapshot.read.gate
        if snapshot.head is None or snapshot.head.roll != roll or gate is None:
            return False
        if gate.value:
            return True
        return self._store.compare_set(gate.key, endpoint.encode(), expected=gate.version).won

    def finds_more(self, head: Head | None, intent: Intent) -> Callable[[Store, bool], bool]:
        """Whether the job is further at another store than it is here, where this is its head;
        or, where neither has it, whether the other comes first, so that all look at the same one.
        """
        nothing = is_empty(head, intent.incarnation)

        def accept(other: Store, earlier: bool) -> bool:
            entry = other.get(self.keys.head)
            there = None if entry is None else decode_head(entry.value)
            if there is None or not there.roll:
                return nothing and earlier
            if nothing or head is None:
                return True
            return there.incarnation == head.incarnation and there.generation > head.generation

        return accept

    def report_done(self, snapshot: Snapshot, roll: str) -> None:
        """Leave a record, which outlives the node, that its workers succeeded."""
        if self._done != roll and snapshot.head is not None and snapshot.head.roll == roll:
            self._store.set(self.keys.done(roll, self._me), b"")
            self._done = roll


def _worth_a_write(said: Node, record: Node) -> bool:
    """Not where only its place differs: a member is in the generation whose roll names it."""
    if said.runs and not record.runs:
        return True
    return record != attrs.evolve(said, runs=record.runs, roll=record.roll, rank=record.rank)


def _version(entry: Entry | None) -> int:
    return ABSENT if entry is None else entry.version


def _difference(mine: Limits, jobs: Limits) -> str:
    ours, theirs = attrs.asdict(mine), attrs.asdict(jobs)
    parts = [f"{k} is {ours[k]} here and {theirs[k]} there" for k in ours if ours[k] != theirs[k]]
    return f"this node's settings are not the job's: {', '.join(parts)}; start all nodes alike"
