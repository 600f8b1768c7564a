"""Simulated cluster for tests of the rendezvous: many nodes, one store, and faults from a seed.

Each node runs the real `LocalNode` step by step; the simulator chooses when each step happens,
what fails, and how each node's clock differs in origin and rate. The same seed is the same run.
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
    """Numbers of random faults.

    With worker losses, about half of the nodes retain the other workers, join the next generation
    with these, and admit a replacement later. Such a node starts its workers before it joins if it
    has none left, or if the leader can regroup.
    """

    crashes: int = 3
    joins: int = 3
    leaves: int = 1
    worker_failures: int = 2
    pauses: int = 2  # a node does not run for a while (SIGSTOP)
    partitions: int = 0  # a node does not reach the store for a while
    store_resets: int = 0  # the store is empty afterwards
    duplicate_wakeups: int = 0  # a node acts on an old snapshot again, later
    span: float = 30.0  # seconds over which the faults are distributed
    drains: int = 0  # a node announces that it leaves, and leaves when its workers have stopped
    worker_losses: int = 0  # one of several workers of a node is lost
    bad_nodes: int = 0  # the workers of so many nodes fail soon after each start, during `span`


class SimEventKind(enum.Enum):
    """Kind of an event of the simulation."""

    JOINS = "joins"
    STARTS = "its workers start"
    STOPS = "its workers have stopped"
    FAILS = "its workers fail"
    ADMITS_WORKERS = "its replacement workers are ready"
    STARTS_EARLY = "starts workers before it joins"
    PAUSES = "is paused"
    CRASHES = "crashes"
    LEAVES = "leaves"
    PARTITIONED = "does not reach the store"
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


# -- one agent, and the store as it reaches it -----------------------------------------------------


class WatchedStore(MemoryStore):
    """A memory store that reports each document that is written, and supports partitions."""

    def __init__(self, clock: Callable[[], float], seen: Callable[[Membership], None]) -> None:
        super().__init__(clock=clock)
        self._seen = seen
        self._is_cut: Callable[[], bool] = lambda: False

    def client_of(self, node: SimulatedNode) -> WatchedStore:
        """Return a client that raises errors while the node is partitioned from the store."""
        client = self.client()
        assert isinstance(client, WatchedStore)
        client._seen, client._is_cut = self._seen, lambda: node.cut
        return client

    def document(self) -> Membership | None:
        """Return the current document."""
        keys = StoreKeys(RUN_ID)
        with super()._exclusive() as space:
            return JobListing(keys, space.list(keys.job_prefix)).membership(None)[0]

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        outcome = super().compare_set(key, value, expected=expected, ttl=ttl)
        if outcome.succeeded and key == StoreKeys(RUN_ID).state:
            document = self.document()
            assert document is not None
            self._seen(document)
        return outcome

    @contextmanager
    def _exclusive(self) -> Iterator[KeySpace]:
        if self._is_cut():
            raise StoreConnectionError("cut from the store")
        with super()._exclusive() as space:
            yield space


class SimulatedNode:
    """An agent with its own clock, and workers that take time to stop."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        self._simulation = simulation
        draw = simulation.random
        self.name = f"node{index}"
        self.alive = True
        self.paused_until = 0.0
        self.cut_until = 0.0
        self._origin = draw.uniform(-1e6, 1e6)
        self._rate = draw.uniform(0.9, 1.1)
        hint = index % simulation.limits.max_nodes if simulation.limits.has_fixed_ranks else None
        loses = simulation.faults.worker_losses > 0
        self.workers = draw.randint(1, 3) if loses else 1
        self.retains_workers = loses and draw.random() < 0.5
        node = Node(f"{self.name}-1", self.name, "127.0.0.1", slots=self.workers, rank_hint=hint)
        self.id = node.id
        self.alive_workers = self.workers
        self._starts = 0
        # The numbers of workers that the node has announced for the next generation.
        self.announced: set[int] = {self.workers}
        self.part = LocalNode(
            simulation.store.client_of(self),
            RUN_ID,
            node,
            simulation.limits,
            RendezvousTimeouts(
                lease_ttl=simulation.lease, keep_alive_interval=simulation.lease / 5
            ),
        )
        self.part.intent = self.intent.request_join()
        self._stopping = False
        self._is_bad = index < simulation.faults.bad_nodes

    @property
    def intent(self) -> NodeIntent:
        return self.part.intent

    @property
    def training(self) -> int:
        """Return the generation whose workers run on this node, or 0."""
        return 0 if self.intent.is_joining else self.intent.current_generation

    @property
    def cut(self) -> bool:
        """True if the node does not reach the store at present."""
        return self._simulation.now < self.cut_until

    def turn(self) -> None:
        """Publish and read now, but decide and write later, so that another node can be faster."""
        if not self.alive or self._wait_out_pause(self.turn):
            return
        try:
            reading = self._look()
        except StoreConnectionError:
            self._simulation.after(self._simulation.random.uniform(0.05, 1.0), self.turn)
            return
        delay = self._simulation.random.choice((0.0, 0.001, 0.05, 0.3))
        self._simulation.after(delay, lambda: self._act(reading))

    def _look(self) -> JobSnapshot:
        now = self._simulation.now * self._rate + self._origin
        if self.part.snapshot is None:
            leader = self.part.read(now).leader
            if self.retains_workers and leader is not None and leader.can_regroup:
                self._start_early()
        self.part.publish(now)
        reading = self.part.poll(now)
        self._handle(reading)
        return reading

    def _act(self, reading: JobSnapshot) -> None:
        if not self.alive or self._wait_out_pause(lambda: self._act(reading)):
            return
        pause = self._write(reading)
        self._simulation.after(pause, self.turn)

    def _write(self, reading: JobSnapshot) -> float:
        """Reconcile, and return the seconds until the next turn."""
        try:
            decision, won = self.part.reconcile_and_write(reading)
        except StoreConnectionError:
            return 0.1
        if decision.new_membership is None:
            return self._simulation.random.uniform(0.05, 1.0)
        kind = SimEventKind.WRITES if won else SimEventKind.LOSES
        lost = "" if won else "lost the race: "
        self._simulation.record(self.name, kind, f"{lost}{decision.reason}")
        return 0.01

    def _wait_out_pause(self, then: Callable[[], None]) -> bool:
        left = self.paused_until - self._simulation.now
        if left > 0:
            self._simulation.after(left, then)
        return left > 0

    def _handle(self, reading: JobSnapshot) -> None:
        if self.intent.final_change(reading.state) is not None:
            self.leave()
        elif self.intent.is_joining:
            if self.part.enter_generation() is not None:
                self._start()
        elif not self._stopping and self.intent.change(reading.state) is not None:
            self._stopping = True
            self._simulation.after(self._simulation.random.uniform(0.0, 2.0), self._stopped)

    def _start(self) -> None:
        assignment = self._simulation.check_assignment(self)
        what = f"rank {assignment.group_rank} of {assignment.num_nodes} in {self.training}"
        self._simulation.record(self.name, SimEventKind.STARTS, what)
        self.alive_workers, self.announced = (
            assignment.local_world_size,
            {assignment.local_world_size},
        )
        self.part.can_regroup = self.retains_workers
        self.part.intent = self.intent.with_node_fields(slots=assignment.local_world_size)
        if self._is_bad:
            fail = partial(self._fail_again, self.intent.node.membership_id)
            self._simulation.after(self._simulation.random.uniform(0.0, 2.0), fail)
        if assignment.local_world_size < self.workers:
            ready = partial(self._admit_workers, self.intent.node.membership_id)
            self._simulation.after(self._simulation.random.uniform(0.0, 3.0), ready)

    def _admit_workers(self, membership: str) -> None:
        """Admit the replacement workers, if their generation is still current."""
        held = self.intent.node.membership_id
        if self.alive and self.training and held == membership and not self._stopping:
            self._simulation.record(
                self.name, SimEventKind.ADMITS_WORKERS, f"has {self.workers} workers ready"
            )
            self.alive_workers = self.workers
            self._announce(self.workers)

    def _start_early(self) -> None:
        """Start workers before joining. The other nodes continue until the workers are ready."""
        self._simulation.record(
            self.name, SimEventKind.STARTS_EARLY, f"starts {self.workers} workers"
        )
        self.alive_workers = self.workers
        self._starts += 1
        self._announce(0)
        ready = partial(self._on_ready, self._starts)
        self._simulation.after(self._simulation.random.uniform(0.0, 5.0), ready)

    def _on_ready(self, start: int) -> None:
        gone = not self.alive or self.training or start != self._starts
        if not gone and not self._wait_out_pause(lambda: self._on_ready(start)):
            self._announce(self.alive_workers or self.workers)

    def _announce(self, slots: int, *, kept: bool = False) -> None:
        self.announced.add(slots)
        self.part.intent = self.intent.with_node_fields(slots=slots, has_retained_workers=kept)

    def _stopped(self) -> None:
        if self.alive and not self._wait_out_pause(self._stopped):
            self._simulation.record(
                self.name, SimEventKind.STOPS, f"has stopped those of {self.training}"
            )
            self._stopping = False
            if self.intent.node.drain_reason:
                self.leave()
                return
            self.announced.clear()
            self._starts += 1
            kept = self.alive_workers if self.retains_workers else 0
            self._announce(kept or self.workers, kept=kept > 0)
            state = self.part.state
            if self.retains_workers and not kept and state is not None and state.num_nodes > 1:
                self.announced.clear()
                self._start_early()
            self.part.intent = self.intent.request_join()

    def reset_store(self) -> None:
        """Empty the store, like a restart of a store in memory."""
        self._simulation.record("store", SimEventKind.RESETS, "is empty again")
        for entry in self._simulation.store.list("").entries:
            self._simulation.store.delete(entry.key)
        self._simulation.forget_documents()

    def crash(self) -> None:
        self._simulation.record(self.name, SimEventKind.CRASHES, "crashes")
        self.alive = False

    def leave(self) -> None:
        self._simulation.record(self.name, SimEventKind.LEAVES, "leaves")
        self.alive = False
        if not self.cut:
            self.part.delete_leases()

    def fail_workers(self) -> None:
        if self.training and not self._stopping:
            self._simulation.record(self.name, SimEventKind.FAILS, "its workers fail")
            self.alive_workers = 0
            self.part.intent = self.intent.record_failure("exit code 1")

    def _fail_again(self, membership: str) -> None:
        """Fail as a bad node does, if this generation is still current."""
        is_current = self.intent.node.membership_id == membership
        if self.alive and is_current and self._simulation.now < self._simulation.faults.span:
            self.fail_workers()

    def lose_worker(self) -> None:
        """Lose one of several workers. The others are stopped, if they are not retained."""
        if not self.alive_workers or self.intent.has_not_joined:
            return
        self._simulation.record(self.name, SimEventKind.FAILS, "one of its workers is lost")
        self.alive_workers -= 1
        if not self.training:
            left, ahead = self.alive_workers, not self.intent.node.slots
            if not left or not self.retains_workers:
                self._announce(self.workers)
            elif not ahead:
                self._announce(left, kept=self.intent.node.has_retained_workers)
        elif not self._stopping:
            self.part.intent = self.intent.record_failure("killed")

    def drain(self) -> None:
        """Leave at once if there are no workers, else after all nodes have stopped theirs."""
        if not self.training:
            self.leave()
        elif not self.intent.node.drain_reason:
            self._simulation.record(self.name, SimEventKind.DRAINS, "announces that it leaves")
            self.part.intent = self.intent.with_node_fields(drain_reason="drain")

    def pause(self, seconds: float) -> None:
        self.paused_until = self._simulation.now + seconds
        what = f"is paused for {seconds:.1f} s"
        self._simulation.record(self.name, SimEventKind.PAUSES, what)

    def cut_off(self, seconds: float) -> None:
        self.cut_until = self._simulation.now + seconds
        what = f"does not reach the store for {seconds:.1f} s"
        self._simulation.record(self.name, SimEventKind.PARTITIONED, what)

    def repeat(self, delay: float) -> None:
        """Act again on the current snapshot after a delay."""
        reading = self.part.snapshot
        if reading is not None:
            self._simulation.record(self.name, SimEventKind.REPEATS, f"acts again in {delay:.1f} s")
            self._simulation.after(delay, lambda: self._act_again(reading))

    def _act_again(self, reading: JobSnapshot) -> None:
        if self.alive and not self._wait_out_pause(lambda: self._act_again(reading)):
            self._write(reading)


# -- the simulation --------------------------------------------------------------------------------


class Simulation:
    """A simulated job with random faults. `run` checks the invariants after each write."""

    def __init__(
        self,
        seed: int,
        limits: RendezvousSettings | None = None,
        *,
        nodes: int = 4,
        faults: Faults | None = None,
        lease: float = 5.0,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.limits = limits or RendezvousSettings(1, 6, max_restarts=100)
        self.lease = lease
        self.now = 0.0
        self.event_log: list[SimEvent] = []
        self.documents: list[Membership] = []  # every document written, in order
        self.faults = faults or Faults()
        self._fixed = self.limits.has_fixed_ranks
        self._last: dict[str, Membership] = {}
        self._assignments: dict[str, dict[int, str]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.store = WatchedStore(lambda: self.now, self._watch)
        self.nodes: list[SimulatedNode] = []
        for _ in range(nodes):
            self.after(self.random.uniform(0.0, 3.0), self.add_node)
        self._plan_faults()

    # -- events -------------------------------------------------------------------------------

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, event))

    def record(self, node: str, kind: SimEventKind, text: str) -> None:
        self.event_log.append(SimEvent(round(self.now, 3), node, kind, text))

    def add_node(self) -> None:
        node = SimulatedNode(self, len(self.nodes))
        self.nodes.append(node)
        self.record(node.name, SimEventKind.JOINS, "joins")
        node.turn()

    def run(self) -> Simulation:
        """Run the faults, and then until all nodes agree.

        Raises:
            InvariantViolation: An invariant is violated, or the nodes do not agree in time.
        """
        quiet_from = self.faults.span + 3.0
        self._play_until(quiet_from)
        deadline = quiet_from + 20 * self.lease + 20
        while not self._is_converged() and self.now < deadline:
            self._play_until(self.now + 1.0)
        if not self._is_converged():
            self._fail(f"no common generation {deadline - quiet_from:g} s after the last fault")
        return self

    def _play_until(self, time: float) -> None:
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
            (faults.pauses, lambda node: node.pause(self.random.uniform(0.0, 3 * self.lease))),
            (
                faults.partitions,
                lambda node: node.cut_off(self.random.uniform(0.0, 3 * self.lease)),
            ),
            (faults.store_resets, SimulatedNode.reset_store),
            (faults.duplicate_wakeups, lambda node: node.repeat(self.random.uniform(0.0, 3.0))),
            (faults.drains, SimulatedNode.drain),
            (faults.worker_losses, SimulatedNode.lose_worker),
        ]
        for count, fault in plan:
            for _ in range(count):
                self.after(
                    self.random.uniform(0.0, faults.span), partial(self._inject_fault, fault)
                )
        for _ in range(faults.joins):
            self.after(self.random.uniform(0.0, faults.span), self.add_node)

    def _inject_fault(self, fault: Callable[[SimulatedNode], None]) -> None:
        if self.alive_nodes:
            fault(self.random.choice(self.alive_nodes))

    # -- invariants ---------------------------------------------------------------------------

    @property
    def alive_nodes(self) -> list[SimulatedNode]:
        return [node for node in self.nodes if node.alive]

    def _is_converged(self) -> bool:
        """Return True if all nodes that are alive are in one generation or spares, or too few."""
        nodes = self.alive_nodes
        document = self.store.document()
        if any(node.intent.node.drain_reason for node in nodes):
            return False  # it has not left yet, perhaps because the leader is paused
        if document is None or document.phase.is_terminal:
            return not nodes
        wanted = len({n.intent.node.rank_hint for n in nodes}) if self._fixed else len(nodes)
        if wanted < self.limits.min_nodes:
            return not any(node.training for node in nodes)
        settled = document.phase is JobPhase.ACTIVE
        full = len(document.members) == min(wanted, self.limits.max_nodes)
        members = {node.id for node in nodes if node.training == document.generation}
        wanted_ids = document.member_ids
        idle = all(not n.training for n in nodes if n.id not in wanted_ids)
        workers = {node.id: node.workers for node in nodes}
        whole = all(member.slots == workers.get(member.id) for member in document.members)
        return settled and full and members == wanted_ids and idle and whole

    def forget_documents(self) -> None:
        """Forget the last documents, which only their members can remember after a reset."""
        self._last.clear()

    def check_assignment(self, node: SimulatedNode) -> RankAssignment:
        """Check that ranks are unique in a generation, and its size is equal on all nodes."""
        reading = node.part.snapshot
        assert reading is not None
        state, assignment = reading.state, reading.assignment
        assert state is not None
        assert assignment is not None
        taken = self._assignments.setdefault(state.membership_id, {})
        holder = taken.setdefault(assignment.group_rank, node.name)
        if holder != node.name:
            what = f"{holder} and {node.name} both have rank {assignment.group_rank}"
            self._fail(f"{what} in {state.membership_id}")
        if not assignment.group_rank < assignment.num_nodes == state.num_nodes:
            self._fail(
                f"{node.name} has rank {assignment.group_rank} of {assignment.num_nodes} in "
                f"{state.membership_id}"
            )
        if not assignment.local_world_size or assignment.local_world_size not in node.announced:
            numbers = " or ".join(map(str, sorted(node.announced)))
            self._fail(
                f"{node.name} announced {numbers} workers, and is assigned "
                f"{assignment.local_world_size}"
            )
        return assignment

    def _watch(self, document: Membership) -> None:
        last = self._last.get(document.incarnation)
        self._last[document.incarnation] = document
        self.documents.append(document)
        failures = sum(event.kind is SimEventKind.FAILS for event in self.event_log)
        if document.restarts > failures:
            self._fail(f"{document.restarts} restarts were charged for {failures} failures")
        if last is None:
            return
        if document.generation < last.generation:
            self._fail(f"generation {last.generation} was followed by {document.generation}")
        if last.phase.is_terminal:
            self._fail(f"the job continued after it had {last.phase.value}")
        if document.generation > last.generation:
            self._check_settled(document)
            return
        old, new = [m.id for m in last.members], [m.id for m in document.members]
        # After a reset of the store, fewer members than before may return.
        expected = [m for m in old if m in new] if document.phase is JobPhase.FORMING else old
        if new != expected:
            self._fail(f"the members of generation {document.generation} changed")

    def _check_settled(self, document: Membership) -> None:
        limits, ids = self.limits, [member.id for member in document.members]
        if not limits.min_nodes <= len(ids) <= limits.max_nodes:
            self._fail(f"generation {document.generation} has {len(ids)} nodes")
        members = frozenset(ids)
        if len(members) < len(ids):
            self._fail(f"generation {document.generation} has a node at two ranks: {ids}")
        if self._fixed and [m.rank_hint for m in document.members] != list(range(len(ids))):
            self._fail(f"generation {document.generation} has other ranks than were asked for")
        for node in self.alive_nodes:
            if node.id in members and node.training:
                self._fail(
                    f"{node.name} was put into generation {document.generation} "
                    f"while it ran workers of {node.training}"
                )

    def _fail(self, what: str) -> None:
        events = "\n".join(f"{m.time:8.3f} {m.node}: {m.text}" for m in self.event_log[-40:])
        raise InvariantViolation(f"seed {self.seed}: {what}\n{events}")
