"""One node's part in the protocol: announce, read, decide, write.

It touches the store and nothing else. Whoever drives it (the handler's loop, the simulator)
supplies the time and chooses when each step happens, so that both run the very same steps.
"""

from __future__ import annotations

import logging
from urllib.parse import quote

import attrs

from ..errors import LeaseLost, RendezvousMismatch
from ..stores.interface import ABSENT, Entry, Store
from .codec import decode_document, decode_node, encode_document, encode_node
from .decide import Decision, View, decide
from .document import Document, Limits, Node, Phase, end
from .intent import Intent

log = logging.getLogger("elasticlib.rendezvous")


def job_prefix(run_id: str) -> str:
    """What all keys of a job begin with."""
    return f"{quote(run_id, safe='')}/"


def node_prefix(run_id: str) -> str:
    """Where the leased keys of a job's living nodes are."""
    return f"{job_prefix(run_id)}node/"


@attrs.frozen
class Snapshot:
    """What was read at one moment: the view to decide on, and the fences for what follows."""

    view: View
    document_version: int
    version: int
    master: str | None

    @property
    def document(self) -> Document | None:
        return self.view.document


class Participant:
    """Speaks for one node to the store of one job."""

    def __init__(self, store: Store, run_id: str, node: Node, limits: Limits, lease: float):
        self.limits = limits
        self.prefix = job_prefix(run_id)
        self._store = store
        self._lease = lease
        self._me = node.id
        self._document_key = f"{self.prefix}document"
        self._node_prefix = node_prefix(run_id)
        self._node_key = f"{self._node_prefix}{node.id}"
        self._said: Node | None = None
        self._lease_version = ABSENT
        self._known: frozenset[str] = frozenset()
        self._last_arrival: float | None = None
        self._foreign: set[str] = set()
        self._begun = 0

    def speak(self, intent: Intent, document: Document | None) -> None:
        """Keep the lease, and have what the intent wants stand under it."""
        record = intent.record(document)
        if not self._keep():
            self._said = None
        if record is None:
            self.withdraw()
        elif self._said is None or attrs.evolve(self._said, holds=record.holds) != record:
            # A change of `holds` alone is not worth a write: a member holds its generation.
            entry = self._store.set(self._node_key, encode_node(record), ttl=self._lease)
            self._said, self._lease_version = record, entry.version

    def _keep(self) -> bool:
        if self._lease_version == ABSENT:
            return False
        try:
            self._store.refresh(self._node_key, self._lease_version)
        except LeaseLost:
            self._lease_version = ABSENT
        return self._lease_version != ABSENT

    def withdraw(self) -> None:
        """Leave: the lease ends now."""
        version, self._lease_version = self._lease_version, ABSENT
        self._said = None
        if version != ABSENT:
            self._store.delete(self._node_key, expected=version)

    def read(self, now: float) -> Snapshot:
        """What the store holds; changes nothing there.

        `now` is the caller's monotonic clock, in seconds.
        """
        listing = self._store.list(self.prefix)
        entries = {entry.key: entry for entry in listing.entries}
        found = entries.get(self._document_key)
        document = None if found is None else decode_document(found.value)
        if document is not None and document.limits != self.limits:
            raise RendezvousMismatch(_difference(self.limits, document.limits))
        generation = 0 if document is None else document.generation
        live = self._live(listing.entries)
        self._listen(live, now)
        done = f"{self.prefix}done/{generation}/"
        master = entries.get(self._master_key(generation))
        quiet = 0.0 if self._last_arrival is None else now - self._last_arrival
        view = View(
            me=self._me,
            limits=self.limits,
            document=document,
            live=live,
            done=frozenset(k.removeprefix(done) for k in entries if k.startswith(done)),
            quiet=quiet,
            fresh=self._fresh,
        )
        return Snapshot(
            view=view,
            document_version=ABSENT if found is None else found.version,
            version=listing.version,
            master=None if master is None else master.value.decode(),
        )

    def act(self, snapshot: Snapshot) -> tuple[Decision, bool]:
        """Decide on the snapshot and write; whether the write (if any) won."""
        decision = decide(snapshot.view)
        if decision.write is None:
            return decision, False
        return decision, self._write(decision.write, snapshot.document_version)

    @property
    def _fresh(self) -> str:
        return f"{self._me}/{self._begun}"

    def close(self, snapshot: Snapshot, phase: Phase, cause: str) -> bool:
        """End the job, unless it has ended; False if it has to be tried on a newer snapshot."""
        document = snapshot.document or Document(self.limits, self._fresh)
        if document.phase.terminal:
            return True
        return self._write(end(document, phase, cause), snapshot.document_version)

    def publish_master(self, generation: int, endpoint: str) -> None:
        """As group rank 0: tell the members where torch's store is, and tidy up behind."""
        self._store.set(self._master_key(generation), endpoint.encode())
        for kind in ("master", "done"):
            for entry in self._store.list(f"{self.prefix}{kind}/").entries:
                number = entry.key.removeprefix(f"{self.prefix}{kind}/").split("/")[0]
                if number.isdigit() and int(number) < generation:
                    self._store.delete(entry.key)

    def report_done(self, generation: int) -> None:
        """Leave a record, which outlives the node, that its workers succeeded."""
        self._store.set(f"{self.prefix}done/{generation}/{self._me}", b"")

    def _write(self, document: Document, expected: int) -> bool:
        value = encode_document(document)
        self._begun += expected == ABSENT
        return self._store.compare_set(self._document_key, value, expected=expected).won

    def _live(self, entries: tuple[Entry, ...]) -> tuple[Node, ...]:
        spoken = sorted(
            (e for e in entries if e.key.startswith(self._node_prefix)), key=lambda e: e.version
        )
        return tuple(node for entry in spoken if (node := self._decoded(entry)) is not None)

    def _decoded(self, entry: Entry) -> Node | None:
        """A node, or None for one that speaks another version's language: it is not let in."""
        try:
            return decode_node(entry.value)
        except RendezvousMismatch as error:
            if entry.key not in self._foreign:
                self._foreign.add(entry.key)
                log.warning("%s is passed over: %s", entry.key, error)
            return None

    def _listen(self, live: tuple[Node, ...], now: float) -> None:
        ids = frozenset(node.id for node in live)
        if self._last_arrival is None or not ids <= self._known:
            self._last_arrival = now
        self._known = ids

    def _master_key(self, generation: int) -> str:
        return f"{self.prefix}master/{generation}"


def _difference(mine: Limits, jobs: Limits) -> str:
    ours, theirs = attrs.asdict(mine), attrs.asdict(jobs)
    parts = [f"{k} is {ours[k]} here and {theirs[k]} there" for k in ours if ours[k] != theirs[k]]
    return f"this node's settings are not the job's: {', '.join(parts)}; start all nodes alike"
