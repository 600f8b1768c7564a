"""Discrete-event simulation of a job: many nodes, one store, and random faults.

The simulation runs the object that the driver runs, `RendezvousNode` over a `MemoryStore`, without
threads and without waiting. Simulated are time, the agent and the workers of a node, and faults:

- A priority queue holds all future events. The simulation sets its clock to the time of the next
  event and executes it. Each node reads a clock of its own, which differs in origin and in rate.
- Before each call of the store, other nodes may have their turns, and time may pass. A node may
  also be paused there, or end, and the call or its answer may be lost.
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
from contextlib import contextmanager, suppress
from functools import partial

import attrs

from elasticlib.errors import StoreConnectionError
from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.interface import (
    Joined,
    MembershipChanged,
    RendezvousInfo,
    Report,
    ReportKind,
)
from elasticlib.rendezvous.membership import JobPhase, Membership, Node
from elasticlib.rendezvous.node import (
    JoinRequest,
    NodeReport,
    NodeRequest,
    Poll,
    RendezvousNode,
    ServeStore,
    StoreServed,
)
from elasticlib.rendezvous.rank_assignment import RankAssignment
from elasticlib.rendezvous.store_layout import JobListing, StoreKeys
from elasticlib.stores.interface import Entry
from elasticlib.stores.key_space import KeySpace
from elasticlib.stores.memory_store import MemoryStore

INTERRUPTION_PROBABILITY = 0.1  # that other events come before a call of the store
MAX_INTERRUPTED = 3  # nodes at the same time, besides those that are paused
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
    lost_calls: float = 0.01  # probability that a call of the store, or its answer, is lost
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
    WRITES = "writes the document"


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


class Crashed(Exception):
    """The node has crashed during a call of the store."""


class WatchedStore(MemoryStore):
    """A memory store of the simulation. The client of a node is interrupted before its calls."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(clock=lambda: simulation.now)
        self._simulation = simulation
        self._node: SimulatedNode | None = None

    def client_of(self, node: SimulatedNode) -> WatchedStore:
        """Return the client of a node."""
        client = self.client()
        assert isinstance(client, WatchedStore)
        client._simulation, client._node = self._simulation, node
        return client

    def document(self) -> Membership | None:
        """Return the current document."""
        with super()._exclusive() as space:
            return read_document(space)

    @contextmanager
    def _exclusive(self) -> Iterator[KeySpace]:
        if self._node is not None:
            self._node.before_call()
        with super()._exclusive() as space:
            yield space
            entry = space.get(StoreKeys(RUN_ID).state)
            if self._node is not None and entry is not None:
                self._simulation.note_document(self._node.name, entry, read_document(space))
        if self._node is not None:
            self._node.after_call()


def read_document(space: KeySpace) -> Membership | None:
    """Return the document of the job."""
    keys = StoreKeys(RUN_ID)
    return JobListing(keys, space.list(keys.job_prefix)).membership(None)[0]


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
        record = Node(
            f"{self.name}-1", self.name, "127.0.0.1", slots=self.num_workers, rank_hint=hint
        )
        self.id = record.id
        self.node = RendezvousNode(
            simulation.store.client_of(self),
            RUN_ID,
            record,
            simulation.settings,
            RendezvousTimeouts(
                lease_ttl=simulation.lease_ttl, keep_alive_interval=simulation.lease_ttl / 5
            ),
        )
        # The agent
        self._requests: list[NodeRequest] = []  # that the node has not seen
        self._attempt = 0
        self._joined: RendezvousInfo | None = None  # the generation whose workers run
        self._is_stopping = False  # these workers are being stopped
        self._is_leaving = False
        self._is_draining = False
        self.num_alive_workers = self.num_workers
        self._starts = 0
        self._offered = self.num_workers
        # Numbers of workers that the node has announced since its last generation.
        self.announced_slots: set[int] = {self.num_workers}
        self._is_bad = index < simulation.faults.bad_nodes

    @property
    def training_generation(self) -> int:
        """Return the generation whose workers may run on this node, or 0."""
        intent = self.node.intent
        return 0 if intent.is_joining else intent.current_generation

    @property
    def is_draining(self) -> bool:
        """True if the node leaves once its workers have stopped."""
        return self._is_draining

    # -- calls of the store ----------------------------------------------------------------------

    def before_call(self) -> None:
        """Let other nodes act before a call of the store, and lose some calls."""
        self._simulation.interrupt(self)
        if not self.is_alive:
            raise Crashed
        if self._simulation.now < self.partitioned_until:
            raise StoreConnectionError("the node is partitioned from the store")
        self._lose("the call was lost")

    def after_call(self) -> None:
        """Lose some answers of the store."""
        self._lose("the answer was lost")

    def _lose(self, reason: str) -> None:
        simulation = self._simulation
        if simulation.random.random() < simulation.loss_probability:
            raise StoreConnectionError(reason)

    # -- turns -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Take a turn, and plan the next one."""
        if not self.is_alive or self._wait_out_pause(self.step):
            return
        requests, self._requests = self._requests, []
        try:
            if self._is_leaving:
                self._leave_now()
                return
            # A watch of the store may fire at any time.
            now = self._simulation.now * self._rate + self._origin
            reports, next_at = self.node.turn(now, [*requests, Poll()])
        except Crashed:
            return
        if self.node.error is not None:
            self._simulation.fail(f"{self.name} cannot take part any more: {self.node.error}")
        for report in reports:
            self._follow(report)
        if self._attempt == 0 and self.node.snapshot is not None:
            leader = self.node.snapshot.leader
            if self.retains_workers and leader is not None and leader.can_regroup:
                self._start_early()
            self._join()
        pause = 0.01 if next_at <= now else self._simulation.random.uniform(0.05, 1.0)
        self._simulation.schedule(pause, self.step)

    def _follow(self, report: NodeReport) -> None:
        if isinstance(report, ServeStore):
            self._requests.append(StoreServed("127.0.0.1:1"))
        elif isinstance(report, Joined) and report.attempt == self._attempt:
            self._start(report.generation)
        elif isinstance(report, MembershipChanged) and report.attempt == self._attempt:
            if report.change.kind.is_final:
                self.leave()
            elif not self._is_stopping:
                self._is_stopping = True
                seconds = self._simulation.random.uniform(0.0, 2.0)
                self._simulation.schedule(seconds, self._on_stopped)

    def _wait_out_pause(self, then: Callable[[], None]) -> bool:
        remaining_s = self.paused_until - self._simulation.now
        if remaining_s > 0:
            self._simulation.schedule(remaining_s, then)
        return remaining_s > 0

    # -- the agent -------------------------------------------------------------------------------

    def _join(self) -> None:
        self._attempt += 1
        self._joined, self._is_stopping = None, False
        self._requests.append(JoinRequest(self._attempt))

    def _start(self, info: RendezvousInfo) -> None:
        assignment = self._simulation.check_assignment(self, info)
        text = (
            f"starts as rank {assignment.group_rank} of {assignment.num_nodes} in generation "
            f"{info.generation}"
        )
        self._simulation.record(self.name, SimEventKind.STARTS, text)
        self._joined = info
        self.num_alive_workers = assignment.local_world_size
        self.announced_slots = {assignment.local_world_size}
        if self.retains_workers:
            self._requests.append(Report(ReportKind.CAN_REGROUP))
        self._announce(assignment.local_world_size)
        if self._is_bad:
            fail = partial(self._fail_again, info)
            self._simulation.schedule(self._simulation.random.uniform(0.0, 2.0), fail)
        if assignment.local_world_size < self.num_workers:
            ready = partial(self._admit_workers, info)
            self._simulation.schedule(self._simulation.random.uniform(0.0, 3.0), ready)

    def _admit_workers(self, info: RendezvousInfo) -> None:
        """Admit the replacement workers, if their generation is still current."""
        if self.is_alive and self._joined is info and not self._is_stopping:
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
        is_outdated = not self.is_alive or self._joined is not None or start != self._starts
        if not is_outdated and not self._wait_out_pause(lambda: self._on_ready(start)):
            self._announce(self.num_alive_workers or self.num_workers)

    def _announce(self, slots: int, *, retained: bool = False) -> None:
        self._offered = slots
        self.announced_slots.add(slots)
        self._requests.append(Report(ReportKind.SLOTS, slots=slots, is_retained=retained))

    def _on_stopped(self) -> None:
        if not self.is_alive or self._wait_out_pause(self._on_stopped):
            return
        stopped = self._joined
        number = 0 if stopped is None else stopped.generation
        text = f"has stopped the workers of generation {number}"
        self._simulation.record(self.name, SimEventKind.STOPS, text)
        if self._is_draining:
            self.leave()
            return
        self.announced_slots.clear()
        self._starts += 1
        retained = self.num_alive_workers if self.retains_workers else 0
        self._announce(retained or self.num_workers, retained=retained > 0)
        if self.retains_workers and not retained and stopped is not None and stopped.world_size > 1:
            self.announced_slots.clear()
            self._start_early()
        self._join()

    # -- faults ----------------------------------------------------------------------------------

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
        """Leave with the next turn."""
        self._is_leaving = True

    def _leave_now(self) -> None:
        self._simulation.record(self.name, SimEventKind.LEAVES, "leaves")
        with suppress(StoreConnectionError):
            self.node.leave()
        self.is_alive = False

    def fail_workers(self) -> None:
        if self._joined is not None and not self._is_stopping:
            self._simulation.record(self.name, SimEventKind.FAILS, "its workers fail")
            self.num_alive_workers = 0
            self._requests.append(Report(ReportKind.FAILURE, "exit code 1"))

    def _fail_again(self, info: RendezvousInfo) -> None:
        """Fail as a bad node does, if this generation is still current."""
        is_current = self._joined is info
        if self.is_alive and is_current and self._simulation.now < self._simulation.faults.span:
            self.fail_workers()

    def lose_worker(self) -> None:
        """Lose one of several workers. The others are stopped, if they are not retained."""
        if not self.num_alive_workers or not self._attempt:
            return
        self._simulation.record(self.name, SimEventKind.FAILS, "one of its workers is lost")
        self.num_alive_workers -= 1
        if self._joined is None:
            if not self.num_alive_workers or not self.retains_workers:
                self._announce(self.num_workers)
            elif self._offered:
                self._announce(self.num_alive_workers, retained=True)
        elif not self._is_stopping:
            self._requests.append(Report(ReportKind.FAILURE, "killed"))

    def drain(self) -> None:
        """Leave at once if the node has no workers, or else after all nodes have stopped theirs."""
        if self._joined is None:
            self.leave()
        elif not self._is_draining:
            self._simulation.record(self.name, SimEventKind.DRAINS, "announces that it leaves")
            self._is_draining = True
            self._requests.append(Report(ReportKind.DRAIN, "drain"))

    def request_restart(self) -> None:
        if self._joined is not None and not self._is_stopping:
            self._simulation.record(self.name, SimEventKind.REQUESTS, "requests a restart")
            self._requests.append(Report(ReportKind.RESTART, "a restart request"))

    def pause(self, seconds: float) -> None:
        self.paused_until = self._simulation.now + seconds
        self._simulation.record(self.name, SimEventKind.PAUSES, f"is paused for {seconds:.1f} s")

    def partition(self, seconds: float) -> None:
        self.partitioned_until = self._simulation.now + seconds
        text = f"cannot reach the store for {seconds:.1f} s"
        self._simulation.record(self.name, SimEventKind.PARTITIONED, text)


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
        self._last_document: dict[str, Membership] = {}  # by incarnation
        self._formed: dict[str, Membership] = {}  # each generation with all of its members
        self._assignments: dict[str, dict[int, str]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0
        self._state_version = 0  # of the last document
        self._num_interrupted = 0  # nodes that wait in a call of the store for the end of others
        self.store = WatchedStore(self)
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
            self.fail(f"no common generation {deadline - last_fault_at:g} s after the last fault")
        return self

    def _run_until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            at, _, event = heapq.heappop(self._events)
            self.now = max(self.now, at)  # It is late if it had to wait for the turn of a node.
            event()
        self.now = max(self.now, time)

    def interrupt(self, node: SimulatedNode) -> None:
        """Execute other events before a call of the store by this node."""
        draw = self.random.random()
        if draw < INTERRUPTION_PROBABILITY and self._num_interrupted < MAX_INTERRUPTED:
            delay = self.random.choice((0.0, 0.001, 0.05, 0.3))
            node.paused_until = max(node.paused_until, self.now + delay)
        while node.is_alive and node.paused_until > self.now:
            self._num_interrupted += 1
            self._run_until(node.paused_until)
            self._num_interrupted -= 1

    @property
    def loss_probability(self) -> float:
        """The probability that a call of the store is lost now."""
        return self.faults.lost_calls if self.now < self.faults.span else 0.0

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
        if any(node.is_draining for node in nodes):
            return False  # The node has not left yet, perhaps because the leader is paused.
        if document is None or document.phase.is_terminal:
            return not nodes
        # Only one of several nodes with the same fixed rank is a member.
        num_ranks = (
            len({n.node.intent.node.rank_hint for n in nodes})
            if self._has_fixed_ranks
            else len(nodes)
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

    def check_assignment(self, node: SimulatedNode, info: RendezvousInfo) -> RankAssignment:
        """Check that ranks are unique in a generation, and that all nodes see the same size."""
        assignment, state = info.assignment, node.node.state
        assert state is not None
        name_of_rank = self._assignments.setdefault(state.membership_id, {})
        first = name_of_rank.setdefault(assignment.group_rank, node.name)
        if first != node.name:
            self.fail(
                f"{first} and {node.name} both have rank {assignment.group_rank} in "
                f"{state.membership_id}"
            )
        if not assignment.group_rank < assignment.num_nodes == state.num_nodes:
            self.fail(
                f"{node.name} has rank {assignment.group_rank} of {assignment.num_nodes} in "
                f"{state.membership_id}"
            )
        if (
            not assignment.local_world_size
            or assignment.local_world_size not in node.announced_slots
        ):
            numbers = " or ".join(map(str, sorted(node.announced_slots)))
            self.fail(
                f"{node.name} announced {numbers} workers, and is assigned "
                f"{assignment.local_world_size}"
            )
        return assignment

    def note_document(self, name: str, entry: Entry, document: Membership | None) -> None:
        """Check the document if a node has just written it."""
        if entry.version > self._state_version:
            self._state_version = entry.version
            assert document is not None
            self.record(name, SimEventKind.WRITES, document.reason)
            self._check_write(document)

    def _check_write(self, document: Membership) -> None:
        previous = self._last_document.get(document.incarnation)
        self._last_document[document.incarnation] = document
        self.documents.append(document)
        failures = sum(event.kind is SimEventKind.FAILS for event in self.event_log)
        if document.restarts > failures:
            self.fail(f"{document.restarts} restarts were charged for {failures} failures")
        if previous is None:
            return
        if document.generation < previous.generation:
            self.fail(f"generation {previous.generation} was followed by {document.generation}")
        if previous.phase.is_terminal:
            self.fail(f"the job continued after it had {previous.phase.value}")
        if document.membership_id not in self._formed:
            self._check_new_generation(document)
            self._formed[document.membership_id] = document
            return
        # A reset of the store between two writes may have lost the list of members.
        formed = self._formed[document.membership_id]
        is_known = previous.membership_id == formed.membership_id and previous.members
        expected = [member.id for member in (previous if is_known else formed).members]
        new_ids = [member.id for member in document.members]
        if JobPhase.FORMING in (previous.phase, document.phase):
            # After a reset of the store, fewer members may return, and others of them later.
            expected = [member.id for member in formed.members if member.id in new_ids]
        if new_ids != expected:
            self.fail(f"the members of generation {document.generation} changed")

    def _check_new_generation(self, document: Membership) -> None:
        settings, ids = self.settings, [member.id for member in document.members]
        if not settings.min_nodes <= len(ids) <= settings.max_nodes:
            self.fail(f"generation {document.generation} has {len(ids)} nodes")
        members = frozenset(ids)
        if len(members) < len(ids):
            self.fail(f"generation {document.generation} has a node at two ranks: {ids}")
        if self._has_fixed_ranks and [m.rank_hint for m in document.members] != list(
            range(len(ids))
        ):
            self.fail(
                f"generation {document.generation} has members at other ranks than their rank hints"
            )
        for node in self.alive_nodes:
            if node.id in members and node.training_generation:
                self.fail(
                    f"{node.name} was put into generation {document.generation} "
                    f"while it ran workers of {node.training_generation}"
                )

    def fail(self, violation: str) -> None:
        lines = [f"{event.time:8.3f} {event.node}: {event.text}" for event in self.event_log[-40:]]
        raise InvariantViolation("\n".join([f"seed {self.seed}: {violation}", *lines]))
