"""Discrete-event simulation of a job: many nodes, one store, and random faults.

The simulation runs the real rendezvous code, `LocalNode` over a `MemoryStore`, without threads and
without waiting. Simulated are time, the workers of a node, and the faults:

- A priority queue holds all future events. The simulation sets its clock to the time of the next
  event and executes it. Each node reads a clock of its own, which differs in origin and in rate.
- A node alternates between two events: it publishes its record and polls the store, and later it
  decides on what it has read and writes. Other nodes act between the two, so races happen.
- Faults are crashes, pauses, partitions, store resets, lost workers and others, see `Faults`.

Safety is checked after each write of the membership document, and liveness after the last fault:
all nodes that are alive must then agree on one generation within a bounded time. All random numbers
derive from one seed, so a run with the same seed has the same events.
"""

from __future__ import annotations

import enum
import heapq
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import attrs

from elasticlib.errors import StoreConnectionError
from elasticlib.rendezvous.local_node import JobSnapshot, LocalNode
from elasticlib.rendezvous.membership import (
    JobPhase,
    Membership,
    Node,
    RendezvousSettings,
    RendezvousTimeouts,
)
from elasticlib.rendezvous.node_intent import NodeIntent
from elasticlib.rendezvous.rank_assignment import RankAssignment
from elasticlib.rendezvous.store_layout import JobListing, StoreKeys
from elasticlib.stores.interface import CompareSetResult
from elasticlib.stores.key_space import KeySpace
from elasticlib.stores.memory_store import MemoryStore

RUN_ID = "sim"


# -- faults and events -----------------------------------------------------------------------------


@attrs.frozen
class Faults:
    """Number of random faults of each kind.

    If there are worker losses, about half of the nodes retain their other workers, join the next
    generation with these, and admit a replacement later. Such a node starts its workers before it
    joins if it has none left, or if the leader can regroup.
    """

    crashes: int = 3
    joins: int = 3
    leaves: int = 1
    worker_failures: int = 2
    pauses: int = 2  # a node does not run for a while (SIGSTOP)
    partitions: int = 0  # a node cannot reach the store for a while
    store_resets: int = 0  # the store loses all keys
    duplicate_wakeups: int = 0  # a node acts on an old snapshot again, later
    span: float = 30.0  # seconds over which the faults are distributed
    drains: int = 0  # a node announces that it leaves, and leaves when its workers have stopped
    worker_losses: int = 0  # one of several workers of a node is lost
    restart_requests: int = 0  # a node passes on the request to restart all workers
    bad_nodes: int = 0  # the workers of so many nodes fail soon after each start, during `span`


class SimEventKind(enum.Enum):
    """Kind of an event of the simulation."""

    JOINS = "joins"
    STARTS = "its workers start"
    STOPS = "its workers have stopped"
    FAILS = "its workers fail"
    REQUESTS = "requests a restart"
    ADMITS_WORKERS = "its replacement workers are ready"
    STARTS_EARLY = "starts workers before it joins"
    PAUSES = "is paused"
    CRASHES = "crashes"
    LEAVES = "leaves"
    PARTITIONED = "cannot reach the store"
    RESETS = "is empty again"
    DRAINS = "announces that it leaves"
    REPEATS = "acts on an old snapshot"
    WRITES = "writes the document"
    LOSES = "does not write it, because another node was faster"


@attrs.frozen
class SimEvent:
    """An event of the simulation, with the simulated time in seconds."""

    time: float
    node: str
    kind: SimEventKind
    text: str


class InvariantViolation(AssertionError):
    """An invariant of the rendezvous is violated. The message has the seed and the last events."""


# -- a node and its store --------------------------------------------------------------------------


class WatchedStore(MemoryStore):
    """A memory store that calls a function after each write of the document, and has partitions."""

    def __init__(self, clock: Callable[[], float], on_write: Callable[[Membership], None]) -> None:
        super().__init__(clock=clock)
        self._on_write = on_write
        self._is_partitioned: Callable[[], bool] = lambda: False

    def client_of(self, node: SimulatedNode) -> WatchedStore:
        """Return a client that raises errors while the node is partitioned from the store."""
        client = self.client()
        assert isinstance(client, WatchedStore)
        client._on_write, client._is_partitioned = self._on_write, lambda: node.is_partitioned
        return client

    def document(self) -> Membership | None:
        """Return the current document."""
        keys = StoreKeys(RUN_ID)
        with super()._exclusive() as space:
            return JobListing(keys, space.list(keys.job_prefix)).membership(None)[0]

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        result = super().compare_set(key, value, expected=expected, ttl=ttl)
        if result.succeeded and key == StoreKeys(RUN_ID).state:
            document = self.document()
            assert document is not None
            self._on_write(document)
        return result

    @contextmanager
    def _exclusive(self) -> Iterator[KeySpace]:
        if self._is_partitioned():
            raise StoreConnectionError("the node is partitioned from the store")
        with super()._exclusive() as space:
            yield space


class SimulatedNode:
    """An agent with its own clock, and workers that take time to stop."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        self._simulation = simulation
        rng = simulation.random
        self.name = f"node{index}"
        self.is_alive = True
        self.paused_until = 0.0
        self.partitioned_until = 0.0
        self._origin = rng.uniform(-1e6, 1e6)
        self._rate = rng.uniform(0.9, 1.1)
        hint = (
            index % simulation.settings.max_nodes if simulation.settings.has_fixed_ranks else None
        )
        has_worker_losses = simulation.faults.worker_losses > 0
        self.num_workers = rng.randint(1, 3) if has_worker_losses else 1
        self.retains_workers = has_worker_losses and rng.random() < 0.5
        node = Node(
            f"{self.name}-1", self.name, "127.0.0.1", slots=self.num_workers, rank_hint=hint
        )
        self.id = node.id
        self.num_alive_workers = self.num_workers
        self._starts = 0
        # Numbers of workers that the node has announced since its last generation.
        self.announced_slots: set[int] = {self.num_workers}
        self.local_node = LocalNode(
            simulation.store.client_of(self),
            RUN_ID,
            node,
            simulation.settings,
            RendezvousTimeouts(
                lease_ttl=simulation.lease_ttl, keep_alive_interval=simulation.lease_ttl / 5
            ),
        )
        self.local_node.intent = self.intent.request_join()
        self._is_stopping = False
        self._is_bad = index < simulation.faults.bad_nodes

    @property
    def intent(self) -> NodeIntent:
        return self.local_node.intent

    @property
    def training_generation(self) -> int:
        """Return the generation whose workers run on this node, or 0."""
        return 0 if self.intent.is_joining else self.intent.current_generation

    @property
    def is_partitioned(self) -> bool:
        """True while the node cannot reach the store."""
        return self._simulation.now < self.partitioned_until

    def step(self) -> None:
        """Publish and poll now, and decide and write later, so that another node can be faster."""
        if not self.is_alive or self._wait_out_pause(self.step):
            return
        try:
            snapshot = self._publish_and_poll()
        except StoreConnectionError:
            self._simulation.schedule(self._simulation.random.uniform(0.05, 1.0), self.step)
            return
        delay = self._simulation.random.choice((0.0, 0.001, 0.05, 0.3))
        self._simulation.schedule(delay, lambda: self._reconcile(snapshot))

    def _publish_and_poll(self) -> JobSnapshot:
        now = self._simulation.now * self._rate + self._origin
        if self.local_node.snapshot is None:
            leader = self.local_node.read(now).leader
            if self.retains_workers and leader is not None and leader.can_regroup:
                self._start_early()
        self.local_node.publish(now)
        snapshot = self.local_node.poll(now)
        self._follow_membership(snapshot)
        return snapshot

    def _reconcile(self, snapshot: JobSnapshot) -> None:
        if not self.is_alive or self._wait_out_pause(lambda: self._reconcile(snapshot)):
            return
        pause = self._reconcile_and_write(snapshot)
        self._simulation.schedule(pause, self.step)

    def _reconcile_and_write(self, snapshot: JobSnapshot) -> float:
        """Reconcile, and return the seconds until the next step."""
        try:
            decision, was_written = self.local_node.reconcile_and_write(snapshot)
        except StoreConnectionError:
            return 0.1
        if decision.new_membership is None:
            return self._simulation.random.uniform(0.05, 1.0)
        kind = SimEventKind.WRITES if was_written else SimEventKind.LOSES
        prefix = "" if was_written else "lost the race: "
        self._simulation.record(self.name, kind, f"{prefix}{decision.reason}")
        return 0.01

    def _wait_out_pause(self, then: Callable[[], None]) -> bool:
        remaining_s = self.paused_until - self._simulation.now
        if remaining_s > 0:
            self._simulation.schedule(remaining_s, then)
        return remaining_s > 0

    def _follow_membership(self, snapshot: JobSnapshot) -> None:
        if self.intent.final_change(snapshot.state) is not None:
            self.leave()
        elif self.intent.is_joining:
            if self.local_node.enter_generation() is not None:
                self._start()
        elif not self._is_stopping and self.intent.change(snapshot.state) is not None:
            self._is_stopping = True
            self._simulation.schedule(self._simulation.random.uniform(0.0, 2.0), self._on_stopped)

    def _start(self) -> None:
        assignment = self._simulation.check_assignment(self)
        text = (
            f"starts as rank {assignment.group_rank} of {assignment.num_nodes} in generation "
            f"{self.training_generation}"
        )
        self._simulation.record(self.name, SimEventKind.STARTS, text)
        self.num_alive_workers = assignment.local_world_size
        self.announced_slots = {assignment.local_world_size}
        self.local_node.can_regroup = self.retains_workers
        self.local_node.intent = self.intent.with_node_fields(slots=assignment.local_world_size)
        if self._is_bad:
            fail = partial(self._fail_again, self.intent.node.membership_id)
            self._simulation.schedule(self._simulation.random.uniform(0.0, 2.0), fail)
        if assignment.local_world_size < self.num_workers:
            ready = partial(self._admit_workers, self.intent.node.membership_id)
            self._simulation.schedule(self._simulation.random.uniform(0.0, 3.0), ready)

    def _admit_workers(self, membership: str) -> None:
        """Admit the replacement workers, if their generation is still current."""
        is_current = self.intent.node.membership_id == membership
        if self.is_alive and self.training_generation and is_current and not self._is_stopping:
            self._simulation.record(
                self.name, SimEventKind.ADMITS_WORKERS, f"has {self.num_workers} workers ready"
            )
            self.num_alive_workers = self.num_workers
            self._announce(self.num_workers)

    def _start_early(self) -> None:
        """Start workers before the node joins. The other nodes continue until these are ready."""
        self._simulation.record(
            self.name, SimEventKind.STARTS_EARLY, f"starts {self.num_workers} workers"
        )
        self.num_alive_workers = self.num_workers
        self._starts += 1
        self._announce(0)
        ready = partial(self._on_ready, self._starts)
        self._simulation.schedule(self._simulation.random.uniform(0.0, 5.0), ready)

    def _on_ready(self, start: int) -> None:
        is_outdated = not self.is_alive or self.training_generation or start != self._starts
        if not is_outdated and not self._wait_out_pause(lambda: self._on_ready(start)):
            self._announce(self.num_alive_workers or self.num_workers)

    def _announce(self, slots: int, *, retained: bool = False) -> None:
        self.announced_slots.add(slots)
        self.local_node.intent = self.intent.with_node_fields(
            slots=slots, has_retained_workers=retained
        )

    def _on_stopped(self) -> None:
        if self.is_alive and not self._wait_out_pause(self._on_stopped):
            self._simulation.record(
                self.name,
                SimEventKind.STOPS,
                f"has stopped the workers of generation {self.training_generation}",
            )
            self._is_stopping = False
            if self.intent.node.drain_reason:
                self.leave()
                return
            self.announced_slots.clear()
            self._starts += 1
            retained = self.num_alive_workers if self.retains_workers else 0
            self._announce(retained or self.num_workers, retained=retained > 0)
            state = self.local_node.state
            if self.retains_workers and not retained and state is not None and state.num_nodes > 1:
                self.announced_slots.clear()
                self._start_early()
            self.local_node.intent = self.intent.request_join()

    def reset_store(self) -> None:
        """Empty the store, like a restart of a store in memory."""
        self._simulation.record("store", SimEventKind.RESETS, "is empty again")
        for entry in self._simulation.store.list("").entries:
            self._simulation.store.delete(entry.key)
        self._simulation.forget_documents()

    def crash(self) -> None:
        self._simulation.record(self.name, SimEventKind.CRASHES, "crashes")
        self.is_alive = False

    def leave(self) -> None:
        self._simulation.record(self.name, SimEventKind.LEAVES, "leaves")
        self.is_alive = False
        if not self.is_partitioned:
            self.local_node.delete_leases()

    def fail_workers(self) -> None:
        if self.training_generation and not self._is_stopping:
            self._simulation.record(self.name, SimEventKind.FAILS, "its workers fail")
            self.num_alive_workers = 0
            self.local_node.intent = self.intent.record_failure("exit code 1")

    def _fail_again(self, membership: str) -> None:
        """Fail as a bad node does, if this generation is still current."""
        is_current = self.intent.node.membership_id == membership
        if self.is_alive and is_current and self._simulation.now < self._simulation.faults.span:
            self.fail_workers()

    def lose_worker(self) -> None:
        """Lose one of several workers. The others are stopped, if they are not retained."""
        if not self.num_alive_workers or self.intent.has_not_joined:
            return
        self._simulation.record(self.name, SimEventKind.FAILS, "one of its workers is lost")
        self.num_alive_workers -= 1
        if not self.training_generation:
            is_starting_early = not self.intent.node.slots
            if not self.num_alive_workers or not self.retains_workers:
                self._announce(self.num_workers)
            elif not is_starting_early:
                self._announce(
                    self.num_alive_workers, retained=self.intent.node.has_retained_workers
                )
        elif not self._is_stopping:
            self.local_node.intent = self.intent.record_failure("killed")

    def drain(self) -> None:
        """Leave at once if the node has no workers, or else after all nodes have stopped theirs."""
        if not self.training_generation:
            self.leave()
        elif not self.intent.node.drain_reason:
            self._simulation.record(self.name, SimEventKind.DRAINS, "announces that it leaves")
            self.local_node.intent = self.intent.with_node_fields(drain_reason="drain")

    def request_restart(self) -> None:
        if self.training_generation and not self._is_stopping:
            self._simulation.record(self.name, SimEventKind.REQUESTS, "requests a restart")
            self.local_node.intent = self.intent.request_restart("a restart request")

    def pause(self, seconds: float) -> None:
        self.paused_until = self._simulation.now + seconds
        self._simulation.record(self.name, SimEventKind.PAUSES, f"is paused for {seconds:.1f} s")

    def partition(self, seconds: float) -> None:
        self.partitioned_until = self._simulation.now + seconds
        text = f"cannot reach the store for {seconds:.1f} s"
        self._simulation.record(self.name, SimEventKind.PARTITIONED, text)

    def repeat(self, delay: float) -> None:
        """Act again on the current snapshot after a delay."""
        snapshot = self.local_node.snapshot
        if snapshot is not None:
            self._simulation.record(self.name, SimEventKind.REPEATS, f"acts again in {delay:.1f} s")
            self._simulation.schedule(delay, lambda: self._reconcile_again(snapshot))

    def _reconcile_again(self, snapshot: JobSnapshot) -> None:
        if self.is_alive and not self._wait_out_pause(lambda: self._reconcile_again(snapshot)):
            self._reconcile_and_write(snapshot)


# -- the simulation --------------------------------------------------------------------------------


class Simulation:
    """A simulated job with random faults. It checks the invariants after each write."""

    def __init__(
        self,
        seed: int,
        settings: RendezvousSettings | None = None,
        *,
        nodes: int = 4,
        faults: Faults | None = None,
        lease_ttl: float = 5.0,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.settings = settings or RendezvousSettings(1, 6, max_restarts=100)
        self.lease_ttl = lease_ttl
        self.now = 0.0
        self.event_log: list[SimEvent] = []
        self.documents: list[Membership] = []  # every document written, in order
        self.faults = faults or Faults()
        self._has_fixed_ranks = self.settings.has_fixed_ranks
        self._last_document: dict[str, Membership] = {}
        self._assignments: dict[str, dict[int, str]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0
        self.store = WatchedStore(lambda: self.now, self._check_write)
        self.nodes: list[SimulatedNode] = []
        for _ in range(nodes):
            self.schedule(self.random.uniform(0.0, 3.0), self.add_node)
        self._plan_faults()

    # -- events -------------------------------------------------------------------------------

    def schedule(self, delay: float, event: Callable[[], None]) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._events, (self.now + delay, self._num_scheduled, event))

    def record(self, node: str, kind: SimEventKind, text: str) -> None:
        self.event_log.append(SimEvent(round(self.now, 3), node, kind, text))

    def add_node(self) -> None:
        node = SimulatedNode(self, len(self.nodes))
        self.nodes.append(node)
        self.record(node.name, SimEventKind.JOINS, "joins")
        node.step()

    def run(self) -> Simulation:
        """Run until the last fault, and then until all nodes agree.

        Raises:
            InvariantViolation: An invariant is violated, or the nodes do not agree in time.
        """
        last_fault_at = self.faults.span + 3.0
        self._run_until(last_fault_at)
        deadline = last_fault_at + 20 * self.lease_ttl + 20
        while not self._is_converged() and self.now < deadline:
            self._run_until(self.now + 1.0)
        if not self._is_converged():
            self._fail(f"no common generation {deadline - last_fault_at:g} s after the last fault")
        return self

    def _run_until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = time

    def _plan_faults(self) -> None:
        faults = self.faults
        plan: list[tuple[int, Callable[[SimulatedNode], None]]] = [
            (faults.crashes, SimulatedNode.crash),
            (faults.leaves, SimulatedNode.leave),
            (faults.worker_failures, SimulatedNode.fail_workers),
            (faults.pauses, lambda node: node.pause(self.random.uniform(0.0, 3 * self.lease_ttl))),
            (
                faults.partitions,
                lambda node: node.partition(self.random.uniform(0.0, 3 * self.lease_ttl)),
            ),
            (faults.store_resets, SimulatedNode.reset_store),
            (faults.duplicate_wakeups, lambda node: node.repeat(self.random.uniform(0.0, 3.0))),
            (faults.drains, SimulatedNode.drain),
            (faults.worker_losses, SimulatedNode.lose_worker),
            (faults.restart_requests, SimulatedNode.request_restart),
        ]
        for count, fault in plan:
            for _ in range(count):
                self.schedule(
                    self.random.uniform(0.0, faults.span), partial(self._inject_fault, fault)
                )
        for _ in range(faults.joins):
            self.schedule(self.random.uniform(0.0, faults.span), self.add_node)

    def _inject_fault(self, fault: Callable[[SimulatedNode], None]) -> None:
        if self.alive_nodes:
            fault(self.random.choice(self.alive_nodes))

    # -- invariants ---------------------------------------------------------------------------

    @property
    def alive_nodes(self) -> list[SimulatedNode]:
        return [node for node in self.nodes if node.is_alive]

    def _is_converged(self) -> bool:
        """Return True if the job is in the state that it must reach without further faults.

        All nodes that are alive are then in one generation with all their workers, or spares. No
        node runs workers if fewer than the minimum are alive.
        """
        nodes = self.alive_nodes
        document = self.store.document()
        if any(node.intent.node.drain_reason for node in nodes):
            return False  # The node has not left yet, perhaps because the leader is paused.
        if document is None or document.phase.is_terminal:
            return not nodes
        # Only one of several nodes with the same fixed rank is a member.
        num_ranks = (
            len({n.intent.node.rank_hint for n in nodes}) if self._has_fixed_ranks else len(nodes)
        )
        if num_ranks < self.settings.min_nodes:
            return not any(node.training_generation for node in nodes)
        is_full = len(document.members) == min(num_ranks, self.settings.max_nodes)
        training_ids = {
            node.id for node in nodes if node.training_generation == document.generation
        }
        spares = [node for node in nodes if node.id not in document.member_ids]
        num_workers = {node.id: node.num_workers for node in nodes}
        return (
            document.phase is JobPhase.ACTIVE
            and is_full
            and training_ids == document.member_ids
            and not any(node.training_generation for node in spares)
            and all(member.slots == num_workers.get(member.id) for member in document.members)
        )

    def forget_documents(self) -> None:
        """Discard the last documents. After a store reset, only their members remember them."""
        self._last_document.clear()

    def check_assignment(self, node: SimulatedNode) -> RankAssignment:
        """Check that ranks are unique in a generation, and that all nodes see the same size."""
        snapshot = node.local_node.snapshot
        assert snapshot is not None
        state, assignment = snapshot.state, snapshot.assignment
        assert state is not None
        assert assignment is not None
        name_of_rank = self._assignments.setdefault(state.membership_id, {})
        first = name_of_rank.setdefault(assignment.group_rank, node.name)
        if first != node.name:
            self._fail(
                f"{first} and {node.name} both have rank {assignment.group_rank} in "
                f"{state.membership_id}"
            )
        if not assignment.group_rank < assignment.num_nodes == state.num_nodes:
            self._fail(
                f"{node.name} has rank {assignment.group_rank} of {assignment.num_nodes} in "
                f"{state.membership_id}"
            )
        if (
            not assignment.local_world_size
            or assignment.local_world_size not in node.announced_slots
        ):
            numbers = " or ".join(map(str, sorted(node.announced_slots)))
            self._fail(
                f"{node.name} announced {numbers} workers, and is assigned "
                f"{assignment.local_world_size}"
            )
        return assignment

    def _check_write(self, document: Membership) -> None:
        previous = self._last_document.get(document.incarnation)
        self._last_document[document.incarnation] = document
        self.documents.append(document)
        failures = sum(event.kind is SimEventKind.FAILS for event in self.event_log)
        if document.restarts > failures:
            self._fail(f"{document.restarts} restarts were charged for {failures} failures")
        if previous is None:
            return
        if document.generation < previous.generation:
            self._fail(f"generation {previous.generation} was followed by {document.generation}")
        if previous.phase.is_terminal:
            self._fail(f"the job continued after it had {previous.phase.value}")
        if document.generation > previous.generation:
            self._check_new_generation(document)
            return
        old_ids, new_ids = [m.id for m in previous.members], [m.id for m in document.members]
        # After a reset of the store, fewer members than before may return.
        expected = (
            [m for m in old_ids if m in new_ids] if document.phase is JobPhase.FORMING else old_ids
        )
        if new_ids != expected:
            self._fail(f"the members of generation {document.generation} changed")

    def _check_new_generation(self, document: Membership) -> None:
        settings, ids = self.settings, [member.id for member in document.members]
        if not settings.min_nodes <= len(ids) <= settings.max_nodes:
            self._fail(f"generation {document.generation} has {len(ids)} nodes")
        members = frozenset(ids)
        if len(members) < len(ids):
            self._fail(f"generation {document.generation} has a node at two ranks: {ids}")
        if self._has_fixed_ranks and [m.rank_hint for m in document.members] != list(
            range(len(ids))
        ):
            self._fail(
                f"generation {document.generation} has members at other ranks than their rank hints"
            )
        for node in self.alive_nodes:
            if node.id in members and node.training_generation:
                self._fail(
                    f"{node.name} was put into generation {document.generation} "
                    f"while it ran workers of {node.training_generation}"
                )

    def _fail(self, violation: str) -> None:
        lines = [f"{event.time:8.3f} {event.node}: {event.text}" for event in self.event_log[-40:]]
        raise InvariantViolation("\n".join([f"seed {self.seed}: {violation}", *lines]))
