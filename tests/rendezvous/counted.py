"""A store that counts its operations, and nodes that run in turns on a simulated clock."""

from __future__ import annotations

import itertools
from collections import Counter

from elasticlib.errors import StoreConnectionError
from elasticlib.rendezvous.local_node import JobSnapshot, LocalNode
from elasticlib.rendezvous.membership import (
    JobPhase,
    Membership,
    Node,
    RendezvousSettings,
    RendezvousTimeouts,
)
from elasticlib.rendezvous.store_layout import JobListing, StoreKeys
from elasticlib.stores.interface import CompareSetResult, Entry, Listing, Store
from elasticlib.stores.memory_store import MemoryStore

RUN = "run"
KEYS = StoreKeys(RUN)
LEASE = 5.0


class CountedStore(Store):
    """A client of one node that counts operations by kind and key, and bytes."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.listed: Counter[str] = Counter()
        self.got: Counter[str] = Counter()
        self.bytes = 0
        self.breaks_after: int | None = None  # number of operations after which all others fail

    @property
    def operations(self) -> int:
        """Number of operations except `wait`, which costs nothing without a change."""
        return sum(count for kind, count in self.calls.items() if kind != "wait")

    def begin(self) -> None:
        """Count from zero."""
        self.calls, self.listed, self.got, self.bytes = Counter(), Counter(), Counter(), 0

    def _count(self, kind: str, *values: bytes) -> None:
        if self.breaks_after == self.operations:
            raise StoreConnectionError("as if the node had died here")
        self.calls[kind] += 1
        self.bytes += sum(map(len, values))

    def get(self, key: str) -> Entry | None:
        entry = self.inner.get(key)
        self._count("get", b"" if entry is None else entry.value)
        self.got[key] += 1
        return entry

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        self._count("set", value)
        return self.inner.set(key, value, ttl=ttl)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        self._count("compare_set", value)
        return self.inner.compare_set(key, value, expected=expected, ttl=ttl)

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        self._count("delete")
        return self.inner.delete(key, expected=expected)

    def refresh(self, key: str, version: int) -> None:
        self._count("refresh")
        self.inner.refresh(key, version)

    def list(self, prefix: str) -> Listing:
        listing = self.inner.list(prefix)
        self._count("list", *(entry.value for entry in listing.entries))
        self.listed[prefix] += 1
        return listing

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        self.calls["wait"] += 1
        return self.inner.wait(prefix, after=after, timeout=timeout)

    def close(self) -> None:
        self.inner.close()


class Member:
    """A node that acts only when `turn` or `look` is called."""

    def __init__(self, crew: Crew, name: str, limits: RendezvousSettings) -> None:
        self._crew = crew
        self.name = name
        self.store = CountedStore(crew.memory.client())
        node = Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=1)
        self.id = node.id
        self.part = LocalNode(self.store, RUN, node, limits, RendezvousTimeouts(lease_ttl=LEASE))
        self.part.intent = self.part.intent.request_join()
        self.publishes = True

    @property
    def seen(self) -> JobSnapshot:
        assert self.part.snapshot is not None
        return self.part.snapshot

    @property
    def generation(self) -> int:
        """Return the generation whose workers run on this node, or 0."""
        return 0 if self.part.intent.is_joining else self.part.intent.current_generation

    def turn(self) -> None:
        """Do what the handler's loop does once. Workers stop as soon as they are asked to."""
        joined = self.part.snapshot is None
        if joined:
            self.part.read(self._crew.now)
        self.part.publish(self._crew.now)
        if (joined and self.seen.leader is None) or self._stirred():
            self.look()

    def _stirred(self) -> bool:
        return self.store.inner.wait(self.part.watch_prefix, after=self.seen.version, timeout=0.0)

    def look(self) -> None:
        now = self._crew.now
        reading = self.part.poll(now)
        self._heed(reading)
        self.part.reconcile_and_write(reading)
        self.part.publish(now)

    def finish(self) -> None:
        self.part.intent = self.part.intent.record_success()

    def fail(self, *, killed: bool = False) -> None:
        self.part.intent = self.part.intent.record_failure("its workers failed", killed=killed)

    def leave(self) -> None:
        self.part.leave()
        self.store.close()

    def _heed(self, reading: JobSnapshot) -> None:
        if self.part.intent.is_joining:
            seat = self.part.enter_generation()
            if seat is not None and seat.group_rank == 0 and self.publishes:
                self.part.write_reports(reading, endpoint="127.0.0.1:1")
        elif self.part.intent.change(reading.state) is not None:
            self.part.intent = self.part.intent.request_join()


class Crew:
    """Nodes over a memory store, with a simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.memory = MemoryStore(clock=lambda: self.now)
        self.members: list[Member] = []
        self._numbers = itertools.count()

    def add(self, count: int, limits: RendezvousSettings) -> None:
        self.members += [Member(self, f"n{next(self._numbers)}", limits) for _ in range(count)]

    def turns(self, count: int = 1, seconds: float = 0.0) -> None:
        """Let all nodes take `count` turns, and advance the clock by `seconds` before each."""
        for _ in range(count):
            self.now += seconds
            for member in self.members:
                member.turn()

    def lose(self, member: Member) -> None:
        self.members.remove(member)
        member.leave()

    def settle(self) -> Membership:
        """Let all nodes take turns until they are in one generation, and return the document."""
        for _ in range(12):
            self.turns()
            document = self.document()
            if document is not None and document.phase is JobPhase.ACTIVE:
                held = {member.generation for member in self.members}
                if held == {document.generation}:
                    return document
        raise AssertionError("no common generation in twelve turns")

    def document(self) -> Membership | None:
        return JobListing(KEYS, self.memory.list(KEYS.job_prefix)).membership(None)[0]

    @property
    def leader(self) -> Member:
        (leader,) = [member for member in self.members if member.part.is_leader]
        return leader

    @property
    def followers(self) -> list[Member]:
        return [member for member in self.members if not member.part.is_leader]
