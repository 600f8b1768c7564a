"""A job without threads whose nodes run step by step on a simulated clock.

Each node is the real `RendezvousNode` with a client that counts its store operations. Nothing
happens unless the test calls `step`, `poll` or `form_generation`, so the order of all operations is
fixed.
"""

from __future__ import annotations

import itertools
from collections import Counter

from elasticlib.errors import StoreConnectionError
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.blame import Evidence, FailureKind
from elasticlib.rendezvous.membership import JobPhase, Membership, Node
from elasticlib.rendezvous.node import JobSnapshot, RendezvousNode
from elasticlib.rendezvous.store_layout import JobListing, StoreKeys
from elasticlib.stores.interface import CompareSetResult, Entry, Listing, Store
from elasticlib.stores.memory_store import MemoryStore

RUN_ID = "run"
KEYS = StoreKeys(RUN_ID)
LEASE_TTL = 5.0


class CountingStore(Store):
    """The store client of one node. It counts operations by kind and by key, and bytes."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.listed: Counter[str] = Counter()
        self.got: Counter[str] = Counter()
        self.bytes = 0
        self.fails_after: int | None = None  # all operations after this number of them fail

    @property
    def operations(self) -> int:
        """Number of operations except `wait`, which costs nothing without a change."""
        return sum(count for kind, count in self.calls.items() if kind != "wait")

    def reset_counts(self) -> None:
        """Set all counts to zero."""
        self.calls, self.listed, self.got, self.bytes = Counter(), Counter(), Counter(), 0

    def _count(self, kind: str, *values: bytes) -> None:
        if self.fails_after == self.operations:
            raise StoreConnectionError("the test simulates a node that dies here")
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


class StepwiseNode:
    """A node that acts only when `step` or `poll` is called."""

    def __init__(self, cluster: StepwiseCluster, name: str, settings: RendezvousSettings) -> None:
        self._cluster = cluster
        self.name = name
        self.store = CountingStore(cluster.memory.client())
        record = Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=1)
        self.id = record.id
        self.local_node = RendezvousNode(
            self.store, RUN_ID, record, settings, RendezvousTimeouts(lease_ttl=LEASE_TTL)
        )
        self.local_node.intent = self.local_node.intent.request_join()
        self.publishes_endpoint = True

    @property
    def last_snapshot(self) -> JobSnapshot:
        assert self.local_node.snapshot is not None
        return self.local_node.snapshot

    @property
    def generation(self) -> int:
        """Return the generation whose workers run on this node, or 0."""
        return 0 if self.local_node.intent.is_joining else self.local_node.intent.current_generation

    def step(self) -> None:
        """Run one iteration of the handler's loop. Workers stop as soon as the node stops them."""
        is_first_step = self.local_node.snapshot is None
        if is_first_step:
            self.local_node.read(self._cluster.now)
        self.local_node.publish(self._cluster.now)
        if (is_first_step and self.last_snapshot.leader is None) or self._has_change():
            self.poll()

    def _has_change(self) -> bool:
        return self.store.inner.wait(
            self.local_node.watch_prefix, after=self.last_snapshot.version, timeout=0.0
        )

    def poll(self) -> None:
        now = self._cluster.now
        snapshot = self.local_node.poll(now)
        self._follow_membership(snapshot)
        self.local_node.reconcile_and_write(snapshot)
        self.local_node.publish(now)

    def finish(self) -> None:
        self.local_node.intent = self.local_node.intent.record_success()

    def fail(self, *, killed: bool = False) -> None:
        self.local_node.intent = self.local_node.intent.record_evidence(
            Evidence(FailureKind.KILLED if killed else FailureKind.RAISED, "its workers failed")
        )

    def leave(self) -> None:
        self.local_node.leave()
        self.store.close()

    def _follow_membership(self, snapshot: JobSnapshot) -> None:
        if self.local_node.intent.is_joining:
            assignment = self.local_node.enter_generation()
            if assignment is not None and assignment.group_rank == 0 and self.publishes_endpoint:
                self.local_node.write_endpoint(snapshot, "127.0.0.1:1")
        elif self.local_node.intent.change(snapshot.state) is not None:
            self.local_node.intent = self.local_node.intent.request_join()


class StepwiseCluster:
    """Nodes over a memory store, with a simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.memory = MemoryStore(clock=lambda: self.now)
        self.nodes: list[StepwiseNode] = []
        self._numbers = itertools.count()

    def add(self, count: int, settings: RendezvousSettings) -> None:
        self.nodes += [
            StepwiseNode(self, f"n{next(self._numbers)}", settings) for _ in range(count)
        ]

    def step_all(self, count: int = 1, seconds: float = 0.0) -> None:
        """Run `count` steps of each node, and advance the clock by `seconds` before each step."""
        for _ in range(count):
            self.now += seconds
            for node in self.nodes:
                node.step()

    def remove(self, node: StepwiseNode) -> None:
        self.nodes.remove(node)
        node.leave()

    def form_generation(self) -> Membership:
        """Step all nodes until they are in one active generation, and return its document."""
        for _ in range(12):
            self.step_all()
            document = self.document()
            if document is None or document.phase is not JobPhase.ACTIVE:
                continue
            if {node.generation for node in self.nodes} == {document.generation}:
                return document
        raise AssertionError("no common generation after twelve steps of each node")

    def document(self) -> Membership | None:
        return JobListing(KEYS, self.memory.list(KEYS.job_prefix)).membership(None)[0]

    @property
    def leader(self) -> StepwiseNode:
        (leader,) = [node for node in self.nodes if node.local_node.is_leader]
        return leader

    @property
    def followers(self) -> list[StepwiseNode]:
        return [node for node in self.nodes if not node.local_node.is_leader]
