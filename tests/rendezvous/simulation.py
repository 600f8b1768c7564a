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


# -- what a run is told, and what it tells ---------------------------------------------------------


@attrs.frozen
class Faults:
    """How many of each fault a run draws, and over how many seconds they are spread.

    stalls: a node stands still (SIGSTOP). cuts: it does not reach the store (a partition).
    forgets: the store comes back empty. echoes: what a node once read, it acts upon again, late.
    drains: a node says that it is about to leave, and does once its workers have stopped.
    worker_losses: one worker of several on a node is lost. Where there are such, about half of the
    nodes keep the others, come to the next generation with these, and have the lost one's successor
    let in later. One of these that has no worker left, or finds that the node that leads keeps its
    own, starts its workers before it is let in.
    """

    crashes: int = 3
    arrivals: int = 3
    leaves: int = 1
    worker_failures: int = 2
    stalls: int = 2
    cuts: int = 0
    forgets: int = 0
    echoes: int = 0
    span: float = 30.0
    drains: int = 0
    worker_losses: int = 0


class Mark(enum.Enum):
    """What kind of thing a moment tells of."""

    ARRIVES = "arrives"
    STARTS = "its workers start"
    STOPS = "its workers are gone"
    FAILS = "its workers fail"
    LETS_IN = "its newcomers are ready"
    AHEAD = "starts workers before it is let in"
    STALLS = "stands still"
    CRASHES = "crashes"
    LEAVES = "leaves"
    CUT = "does not reach the store"
    FORGETS = "comes back empty"
    DRAINS = "is about to leave"
    ECHOES = "acts upon what it read before"
    WRITES = "writes the document"
    LOSES = "loses the race to write it"


@attrs.frozen
class Moment:
    """One line of a run's story, at the simulator's own time in seconds."""

    time: float
    node: str
    mark: Mark
    what: str


class InvariantBroken(AssertionError):
    """A promise of the rendezvous did not hold; the message tells the seed and the story."""


# -- one agent, and the store as it reaches it -----------------------------------------------------


class WatchedStore(MemoryStore):
    """A memory store that shows each document as it is written, and that a node may be cut from."""

    def __init__(self, clock: Callable[[], float], seen: Callable[[Membership], None]) -> None:
        super().__init__(clock=clock)
        self._seen = seen
        self._is_cut: Callable[[], bool] = lambda: False

    def client_of(self, node: SimulatedNode) -> WatchedStore:
        """A client that reaches the store only while the node is not cut from it."""
        client = self.client()
        assert isinstance(client, WatchedStore)
        client._seen, client._is_cut = self._seen, lambda: node.cut
        return client

    def document(self) -> Membership | None:
        """What stands there now."""
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
    """One agent: its node, workers that take time to stop, and a clock of its own."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        self._simulation = simulation
        draw = simulation.random
        self.name = f"node{index}"
        self.alive = True
        self.stalled_until = 0.0
        self.cut_until = 0.0
        self._origin = draw.uniform(-1e6, 1e6)
        self._rate = draw.uniform(0.9, 1.1)
        hint = index % simulation.limits.max_nodes if simulation.limits.has_fixed_ranks else None
        loses = simulation.faults.worker_losses > 0
        self.workers = draw.randint(1, 3) if loses else 1
        self.keeps = loses and draw.random() < 0.5
        node = Node(f"{self.name}-1", self.name, "127.0.0.1", slots=self.workers, rank_hint=hint)
        self.id = node.id
        self.alive_workers = self.workers
        self._starts = 0
        self.said: set[int] = {self.workers}
        """With how many workers it has said that it comes to the next generation."""
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

    @property
    def intent(self) -> NodeIntent:
        return self.part.intent

    @property
    def training(self) -> int:
        """The generation whose workers run here, or 0."""
        return 0 if self.intent.is_joining else self.intent.current_generation

    @property
    def cut(self) -> bool:
        """Whether it does not reach the store just now."""
        return self._simulation.now < self.cut_until

    def turn(self) -> None:
        """Speak and read; decide and write only after a while, so that races can be lost."""
        if not self.alive or self._wait_out_stall(self.turn):
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
            if self.keeps and leader is not None and leader.can_regroup:
                self._start_ahead()
        self.part.publish(now)
        reading = self.part.poll(now)
        self._heed(reading)
        return reading

    def _act(self, reading: JobSnapshot) -> None:
        if not self.alive or self._wait_out_stall(lambda: self._act(reading)):
            return
        pause = self._write(reading)
        self._simulation.after(pause, self.turn)

    def _write(self, reading: JobSnapshot) -> float:
        """Seconds until the next turn."""
        try:
            decision, won = self.part.reconcile_and_write(reading)
        except StoreConnectionError:
            return 0.1
        if decision.new_membership is None:
            return self._simulation.random.uniform(0.05, 1.0)
        mark = Mark.WRITES if won else Mark.LOSES
        lost = "" if won else "lost the race: "
        self._simulation.tell(self.name, mark, f"{lost}{decision.reason}")
        return 0.01

    def _wait_out_stall(self, then: Callable[[], None]) -> bool:
        left = self.stalled_until - self._simulation.now
        if left > 0:
            self._simulation.after(left, then)
        return left > 0

    def _heed(self, reading: JobSnapshot) -> None:
        if self.intent.final_change(reading.state) is not None:
            self.leave()
        elif self.intent.is_joining:
            if self.part.enter_generation() is not None:
                self._start()
        elif not self._stopping and self.intent.change(reading.state) is not None:
            self._stopping = True
            self._simulation.after(self._simulation.random.uniform(0.0, 2.0), self._stopped)

    def _start(self) -> None:
        seat = self._simulation.check_seat(self)
        what = f"rank {seat.group_rank} of {seat.num_nodes} in {self.training}"
        self._simulation.tell(self.name, Mark.STARTS, what)
        self.alive_workers, self.said = seat.local_world_size, {seat.local_world_size}
        self.part.can_regroup = self.keeps
        self.part.intent = self.intent.with_node_fields(slots=seat.local_world_size)
        if seat.local_world_size < self.workers:
            ready = partial(self._let_in, self.intent.node.membership_id)
            self._simulation.after(self._simulation.random.uniform(0.0, 3.0), ready)

    def _let_in(self, membership: str) -> None:
        """All newcomers are ready, if the generation in which they were started stands."""
        held = self.intent.node.membership_id
        if self.alive and self.training and held == membership and not self._stopping:
            self._simulation.tell(self.name, Mark.LETS_IN, f"has {self.workers} workers ready")
            self.alive_workers = self.workers
            self._come_with(self.workers)

    def _start_ahead(self) -> None:
        """The others go on without it, until its workers are ready or have all been lost."""
        self._simulation.tell(self.name, Mark.AHEAD, f"starts {self.workers} workers")
        self.alive_workers = self.workers
        self._starts += 1
        self._come_with(0)
        ready = partial(self._come_ready, self._starts)
        self._simulation.after(self._simulation.random.uniform(0.0, 5.0), ready)

    def _come_ready(self, start: int) -> None:
        gone = not self.alive or self.training or start != self._starts
        if not gone and not self._wait_out_stall(lambda: self._come_ready(start)):
            self._come_with(self.alive_workers or self.workers)

    def _come_with(self, slots: int, *, kept: bool = False) -> None:
        self.said.add(slots)
        self.part.intent = self.intent.with_node_fields(slots=slots, has_retained_workers=kept)

    def _stopped(self) -> None:
        if self.alive and not self._wait_out_stall(self._stopped):
            self._simulation.tell(self.name, Mark.STOPS, f"has stopped those of {self.training}")
            self._stopping = False
            if self.intent.node.drain_reason:
                self.leave()
                return
            self.said.clear()
            self._starts += 1
            kept = self.alive_workers if self.keeps else 0
            self._come_with(kept or self.workers, kept=kept > 0)
            state = self.part.state
            if self.keeps and not kept and state is not None and state.num_nodes > 1:
                self.said.clear()
                self._start_ahead()
            self.part.intent = self.intent.request_join()

    def forget(self) -> None:
        """The store is emptied, as by a restart without its memory."""
        self._simulation.tell("store", Mark.FORGETS, "comes back empty")
        for entry in self._simulation.store.list("").entries:
            self._simulation.store.delete(entry.key)
        self._simulation.forgotten()

    def crash(self) -> None:
        self._simulation.tell(self.name, Mark.CRASHES, "crashes")
        self.alive = False

    def leave(self) -> None:
        self._simulation.tell(self.name, Mark.LEAVES, "leaves")
        self.alive = False
        if not self.cut:
            self.part.delete_leases()

    def fail_workers(self) -> None:
        if self.training and not self._stopping:
            self._simulation.tell(self.name, Mark.FAILS, "its workers fail")
            self.alive_workers = 0
            self.part.intent = self.intent.record_failure("exit code 1")

    def lose_worker(self) -> None:
        """One of several; the others are stopped, if they are not kept."""
        if not self.alive_workers or self.intent.has_not_joined:
            return
        self._simulation.tell(self.name, Mark.FAILS, "one of its workers is lost")
        self.alive_workers -= 1
        if not self.training:
            left, ahead = self.alive_workers, not self.intent.node.slots
            if not left or not self.keeps:
                self._come_with(self.workers)
            elif not ahead:
                self._come_with(left, kept=self.intent.node.has_retained_workers)
        elif not self._stopping:
            self.part.intent = self.intent.record_failure("killed")

    def drain(self) -> None:
        """It leaves at once if it has no workers, else when all who hear of it have stopped."""
        if not self.training:
            self.leave()
        elif not self.intent.node.drain_reason:
            self._simulation.tell(self.name, Mark.DRAINS, "is about to leave")
            self.part.intent = self.intent.with_node_fields(drain_reason="drain")

    def stall(self, seconds: float) -> None:
        self.stalled_until = self._simulation.now + seconds
        what = f"stands still for {seconds:.1f} s"
        self._simulation.tell(self.name, Mark.STALLS, what)

    def cut_off(self, seconds: float) -> None:
        self.cut_until = self._simulation.now + seconds
        what = f"does not reach the store for {seconds:.1f} s"
        self._simulation.tell(self.name, Mark.CUT, what)

    def echo(self, delay: float) -> None:
        """A wake-up comes twice, the second time late: what was read is acted upon again."""
        reading = self.part.snapshot
        if reading is not None:
            self._simulation.tell(self.name, Mark.ECHOES, f"acts again in {delay:.1f} s")
            self._simulation.after(delay, lambda: self._act_again(reading))

    def _act_again(self, reading: JobSnapshot) -> None:
        if self.alive and not self._wait_out_stall(lambda: self._act_again(reading)):
            self._write(reading)


# -- all of them -----------------------------------------------------------------------------------


class Simulation:
    """A run of one seed. `run()` plays it to its end and checks every promise on the way."""

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
        self.story: list[Moment] = []
        self.documents: list[Membership] = []  # every document written, in order
        self.faults = faults or Faults()
        self._fixed = self.limits.has_fixed_ranks
        self._last: dict[str, Membership] = {}
        self._seats: dict[str, dict[int, str]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.store = WatchedStore(lambda: self.now, self._watch)
        self.nodes: list[SimulatedNode] = []
        for _ in range(nodes):
            self.after(self.random.uniform(0.0, 3.0), self.arrive)
        self._plan_faults()

    # -- playing ------------------------------------------------------------------------------

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, event))

    def tell(self, node: str, mark: Mark, what: str) -> None:
        self.story.append(Moment(round(self.now, 3), node, mark, what))

    def arrive(self) -> None:
        node = SimulatedNode(self, len(self.nodes))
        self.nodes.append(node)
        self.tell(node.name, Mark.ARRIVES, "arrives")
        node.turn()

    def run(self) -> Simulation:
        """Play the faults, then quiet; raises InvariantBroken if a promise does not hold."""
        quiet_from = self.faults.span + 3.0
        self._play_until(quiet_from)
        deadline = quiet_from + 20 * self.lease + 20
        while not self._at_rest() and self.now < deadline:
            self._play_until(self.now + 1.0)
        if not self._at_rest():
            self._broken(f"no common generation {deadline - quiet_from:g} s after the last fault")
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
            (faults.stalls, lambda node: node.stall(self.random.uniform(0.0, 3 * self.lease))),
            (faults.cuts, lambda node: node.cut_off(self.random.uniform(0.0, 3 * self.lease))),
            (faults.forgets, SimulatedNode.forget),
            (faults.echoes, lambda node: node.echo(self.random.uniform(0.0, 3.0))),
            (faults.drains, SimulatedNode.drain),
            (faults.worker_losses, SimulatedNode.lose_worker),
        ]
        for count, fault in plan:
            for _ in range(count):
                self.after(self.random.uniform(0.0, faults.span), partial(self._strike, fault))
        for _ in range(faults.arrivals):
            self.after(self.random.uniform(0.0, faults.span), self.arrive)

    def _strike(self, fault: Callable[[SimulatedNode], None]) -> None:
        living = [node for node in self.nodes if node.alive]
        if living:
            fault(self.random.choice(living))

    # -- promises -----------------------------------------------------------------------------

    @property
    def living(self) -> list[SimulatedNode]:
        return [node for node in self.nodes if node.alive]

    def _at_rest(self) -> bool:
        """All living nodes train in one generation, are its spares, or are too few for one."""
        living = self.living
        document = self.store.document()
        if any(node.intent.node.drain_reason for node in living):
            return False  # it has yet to leave, perhaps past a leader that stands still
        if document is None or document.phase.is_terminal:
            return not living
        wanted = len({n.intent.node.rank_hint for n in living}) if self._fixed else len(living)
        if wanted < self.limits.min_nodes:
            return not any(node.training for node in living)
        settled = document.phase is JobPhase.ACTIVE
        full = len(document.members) == min(wanted, self.limits.max_nodes)
        members = {node.id for node in living if node.training == document.generation}
        wanted_ids = document.member_ids
        idle = all(not n.training for n in living if n.id not in wanted_ids)
        workers = {node.id: node.workers for node in living}
        whole = all(member.slots == workers.get(member.id) for member in document.members)
        return settled and full and members == wanted_ids and idle and whole

    def forgotten(self) -> None:
        """From now on, nobody can know of a generation but those who were in it."""
        self._last.clear()

    def check_seat(self, node: SimulatedNode) -> RankAssignment:
        """Each node sees its own rank: no two the same one, in one generation of one size."""
        reading = node.part.snapshot
        assert reading is not None
        state, seat = reading.state, reading.assignment
        assert state is not None
        assert seat is not None
        taken = self._seats.setdefault(state.membership_id, {})
        holder = taken.setdefault(seat.group_rank, node.name)
        if holder != node.name:
            what = f"{holder} and {node.name} both have rank {seat.group_rank}"
            self._broken(f"{what} in {state.membership_id}")
        if not seat.group_rank < seat.num_nodes == state.num_nodes:
            self._broken(
                f"{node.name} has rank {seat.group_rank} of {seat.num_nodes} in "
                f"{state.membership_id}"
            )
        if not seat.local_world_size or seat.local_world_size not in node.said:
            said = " or ".join(map(str, sorted(node.said)))
            self._broken(
                f"{node.name} comes with {said} workers, and is assigned {seat.local_world_size}"
            )
        return seat

    def _watch(self, document: Membership) -> None:
        last = self._last.get(document.incarnation)
        self._last[document.incarnation] = document
        self.documents.append(document)
        failures = sum(moment.mark is Mark.FAILS for moment in self.story)
        if document.restarts > failures:
            self._broken(f"{document.restarts} restarts were charged for {failures} failures")
        if last is None:
            return
        if document.generation < last.generation:
            self._broken(f"generation {last.generation} was followed by {document.generation}")
        if last.phase.is_terminal:
            self._broken(f"the job went on after it had {last.phase.value}")
        if document.generation > last.generation:
            self._check_settled(document)
            return
        known, now = [m.id for m in last.members], [m.id for m in document.members]
        # Those who come to a store that has forgotten the job may be fewer than before.
        came = [m for m in known if m in now] if document.phase is JobPhase.FORMING else known
        if now != came:
            self._broken(f"the members of generation {document.generation} changed")

    def _check_settled(self, document: Membership) -> None:
        limits, ids = self.limits, [member.id for member in document.members]
        if not limits.min_nodes <= len(ids) <= limits.max_nodes:
            self._broken(f"generation {document.generation} has {len(ids)} nodes")
        members = frozenset(ids)
        if len(members) < len(ids):
            self._broken(f"generation {document.generation} has a node at two ranks: {ids}")
        if self._fixed and [m.rank_hint for m in document.members] != list(range(len(ids))):
            self._broken(f"generation {document.generation} has other ranks than were asked for")
        for node in self.living:
            if node.id in members and node.training:
                self._broken(
                    f"{node.name} was put into generation {document.generation} "
                    f"while it ran workers of {node.training}"
                )

    def _broken(self, what: str) -> None:
        story = "\n".join(f"{m.time:8.3f} {m.node}: {m.what}" for m in self.story[-40:])
        raise InvariantBroken(f"seed {self.seed}: {what}\n{story}")
