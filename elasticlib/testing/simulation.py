"""A seeded cluster that never was: many nodes, one store, and whatever can go wrong between.

Each node runs the real `Participant` step by step; the simulator chooses when each step happens,
what fails, and how each node's clock differs in origin and rate. The same seed is the same run.
"""

from __future__ import annotations

import enum
import heapq
import random
from collections.abc import Callable
from functools import partial

import attrs

from ..rendezvous.change import change_since, entered, final_change
from ..rendezvous.codec import decode_document
from ..rendezvous.document import Document, Limits, Node, Phase
from ..rendezvous.intent import Intent
from ..rendezvous.participant import Participant, Snapshot
from ..stores.interface import CompareSet
from ..stores.memory import MemoryStore


class InvariantBroken(AssertionError):
    """A promise of the rendezvous did not hold; the message tells the seed and the story."""


@attrs.frozen
class Faults:
    """How many of each fault a run draws, and over how many seconds they are spread."""

    crashes: int = 3
    arrivals: int = 3
    leaves: int = 1
    worker_failures: int = 2
    stalls: int = 2
    forgets: int = 0
    span: float = 30.0


class Mark(enum.Enum):
    """What kind of thing a moment tells of."""

    ARRIVES = "arrives"
    STARTS = "its workers start"
    STOPS = "its workers are gone"
    FAILS = "its workers fail"
    STALLS = "stands still"
    CRASHES = "crashes"
    LEAVES = "leaves"
    FORGETS = "comes back empty"
    WRITES = "writes the document"
    LOSES = "loses the race to write it"


@attrs.frozen
class Moment:
    """One line of a run's story, at the simulator's own time in seconds.

    generation: whose workers start. until: when a node that stands still wakes.
    """

    time: float
    node: str
    mark: Mark
    what: str
    generation: int = 0
    until: float = 0.0


@attrs.frozen
class Written:
    """A document, and when it was written."""

    time: float
    document: Document


@attrs.frozen
class Shift:
    """One node running the workers of one generation, from `start` to `end`."""

    node: str
    generation: int
    start: float
    end: float


class WatchedStore(MemoryStore):
    """A memory store that shows each document as it is written."""

    def __init__(self, clock: Callable[[], float], seen: Callable[[Document], None]) -> None:
        super().__init__(clock=clock)
        self._seen = seen

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
        outcome = super().compare_set(key, value, expected=expected, ttl=ttl)
        if outcome.won and key.endswith("/document"):
            self._seen(decode_document(value))
        return outcome


class SimulatedNode:
    """One agent: a participant, workers that take time to stop, and a clock of its own."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        self._simulation = simulation
        draw = simulation.random
        self.name = f"node{index}"
        self.alive = True
        self.stalled_until = 0.0
        self._origin = draw.uniform(-1e6, 1e6)
        self._rate = draw.uniform(0.9, 1.1)
        node = Node(id=f"{self.name}-1", host=self.name, address="127.0.0.1", slots=1)
        self.id = node.id
        self.intent = Intent(node)
        self._participant = Participant(
            simulation.store, "sim", node, simulation.limits, simulation.lease
        )
        self._stopping = False
        self._seen: Snapshot | None = None

    @property
    def training(self) -> int:
        """The generation whose workers run here, or 0."""
        return 0 if self.intent.joining else self.intent.held

    def turn(self) -> None:
        """Speak and read; decide and write only after a while, so that races can be lost."""
        if not self.alive or self._wait_out_stall(self.turn):
            return
        self._participant.speak(self.intent, None if self._seen is None else self._seen.document)
        now = self._simulation.now * self._rate + self._origin
        snapshot = self._participant.read(now)
        self._seen = snapshot
        self._heed(snapshot)
        delay = self._simulation.random.choice((0.0, 0.001, 0.05, 0.3))
        self._simulation.after(delay, lambda: self._act(snapshot))

    def _act(self, snapshot: Snapshot) -> None:
        if not self.alive or self._wait_out_stall(lambda: self._act(snapshot)):
            return
        decision, won = self._participant.act(snapshot)
        if decision.write is not None:
            mark = Mark.WRITES if won else Mark.LOSES
            lost = "" if won else "lost the race: "
            self._simulation.tell(self.name, mark, f"{lost}{decision.reason}")
        pause = 0.01 if decision.write is not None else self._simulation.random.uniform(0.05, 1.0)
        self._simulation.after(pause, self.turn)

    def _wait_out_stall(self, then: Callable[[], None]) -> bool:
        left = self.stalled_until - self._simulation.now
        if left > 0:
            self._simulation.after(left, then)
        return left > 0

    def _heed(self, snapshot: Snapshot) -> None:
        document = snapshot.document
        self.intent = self.intent.meet(document)
        if final_change(document, self.id) is not None:
            self.leave()
        elif self.intent.joining:
            rank = entered(document, self.id, self.intent.held)
            if rank is not None and document is not None:
                self._start(document, rank)
        elif not self._stopping:
            held = self.intent
            if change_since(document, self.id, held.held, held.incarnation) is not None:
                self._stopping = True
                self._simulation.after(self._simulation.random.uniform(0.0, 2.0), self._stopped)

    def _start(self, document: Document, rank: int) -> None:
        generation = document.generation
        self.intent = self.intent.enter(generation)
        what = f"rank {rank} of {len(document.members)} in {generation}"
        self._simulation.tell(self.name, Mark.STARTS, what, generation=generation)

    def _stopped(self) -> None:
        if self.alive and not self._wait_out_stall(self._stopped):
            self._simulation.tell(self.name, Mark.STOPS, f"has stopped those of {self.training}")
            self._stopping = False
            self.intent = self.intent.seek()

    def forget(self) -> None:
        """The store is emptied, as by a restart without its memory."""
        self._simulation.tell("store", Mark.FORGETS, "comes back empty")
        for entry in self._simulation.store.list("").entries:
            self._simulation.store.delete(entry.key)

    def crash(self) -> None:
        self._simulation.tell(self.name, Mark.CRASHES, "crashes")
        self.alive = False

    def leave(self) -> None:
        self._simulation.tell(self.name, Mark.LEAVES, "leaves")
        self.alive = False
        self._participant.withdraw()

    def fail_workers(self) -> None:
        if self.training and not self._stopping:
            self._simulation.tell(self.name, Mark.FAILS, "its workers fail")
            self.intent = self.intent.fail("exit code 1")

    def stall(self, seconds: float) -> None:
        self.stalled_until = self._simulation.now + seconds
        what = f"stands still for {seconds:.1f} s"
        self._simulation.tell(self.name, Mark.STALLS, what, until=self.stalled_until)


class Simulation:
    """A run of one seed. `run()` plays it to its end and checks every promise on the way."""

    def __init__(
        self,
        seed: int,
        limits: Limits | None = None,
        *,
        nodes: int = 4,
        faults: Faults | None = None,
        lease: float = 5.0,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.limits = limits or Limits(1, 6, max_restarts=100)
        self.lease = lease
        self.now = 0.0
        self.story: list[Moment] = []
        self.written: list[Written] = []
        self._faults = faults or Faults()
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

    def tell(
        self, node: str, mark: Mark, what: str, *, generation: int = 0, until: float = 0.0
    ) -> None:
        self.story.append(Moment(round(self.now, 3), node, mark, what, generation, until))

    def arrive(self) -> None:
        node = SimulatedNode(self, len(self.nodes))
        self.nodes.append(node)
        self.tell(node.name, Mark.ARRIVES, "arrives")
        node.turn()

    def run(self) -> Simulation:
        """Play the faults, then quiet; raises InvariantBroken if a promise does not hold."""
        quiet_from = self._faults.span + 3.0
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
        faults = self._faults
        plan: list[tuple[int, Callable[[SimulatedNode], None]]] = [
            (faults.crashes, SimulatedNode.crash),
            (faults.leaves, SimulatedNode.leave),
            (faults.worker_failures, SimulatedNode.fail_workers),
            (faults.stalls, lambda node: node.stall(self.random.uniform(0.0, 3 * self.lease))),
        ]
        plan.append((faults.forgets, SimulatedNode.forget))
        for count, fault in plan:
            for _ in range(count):
                self.after(self.random.uniform(0.0, faults.span), partial(self._strike, fault))
        for _ in range(faults.arrivals):
            self.after(self.random.uniform(0.0, faults.span), self.arrive)

    def _strike(self, fault: Callable[[SimulatedNode], None]) -> None:
        living = [node for node in self.nodes if node.alive]
        if living:
            fault(self.random.choice(living))

    # -- what it was -----------------------------------------------------------------------------

    @property
    def documents(self) -> list[Document]:
        """All that were written, in order."""
        return [written.document for written in self.written]

    @property
    def shifts(self) -> list[Shift]:
        """Who ran workers of which generation, and from when to when, as the story tells."""
        found: list[Shift] = []
        running: dict[str, Moment] = {}
        for moment in self.story:
            if moment.mark is Mark.STARTS:
                running[moment.node] = moment
            elif moment.mark in (Mark.STOPS, Mark.CRASHES, Mark.LEAVES):
                begun = running.pop(moment.node, None)
                if begun is not None:
                    shift = Shift(moment.node, begun.generation, begun.time, moment.time)
                    found.append(shift)
        still = [Shift(m.node, m.generation, m.time, self.now) for m in running.values()]
        return [*found, *still]

    # -- promises -----------------------------------------------------------------------------

    @property
    def living(self) -> list[SimulatedNode]:
        return [node for node in self.nodes if node.alive]

    def _at_rest(self) -> bool:
        """All living nodes train in one generation, are its spares, or are too few for one."""
        living = self.living
        document = self.written[-1].document if self.written else None
        if document is None or document.phase.terminal:
            return not living
        if len(living) < self.limits.min_nodes:
            return not any(node.training for node in living)
        settled = document.phase is Phase.SETTLED
        full = len(document.members) == min(len(living), self.limits.max_nodes)
        members = {node.id for node in living if node.training == document.generation}
        idle = all(not n.training for n in living if n.id not in document.member_ids)
        return settled and full and members == document.member_ids and idle

    def _watch(self, document: Document) -> None:
        last = self.written[-1].document if self.written else None
        self.written.append(Written(round(self.now, 3), document))
        if last is None or last.incarnation != document.incarnation:
            return
        if document.generation < last.generation:
            self._broken(f"generation {last.generation} was followed by {document.generation}")
        if last.phase.terminal:
            self._broken(f"the job went on after it had {last.phase.value}")
        if document.generation == last.generation and document.members != last.members:
            self._broken(f"the members of generation {document.generation} changed")
        if document.generation > last.generation:
            self._check_settled(document)

    def _check_settled(self, document: Document) -> None:
        limits, ids = self.limits, [member.id for member in document.members]
        if not limits.min_nodes <= len(ids) <= limits.max_nodes:
            self._broken(f"generation {document.generation} has {len(ids)} nodes")
        ranks = [document.rank_of(node_id) for node_id in ids]
        if ranks != list(range(len(ids))):
            self._broken(f"generation {document.generation} has ranks {ranks}")
        for node in self.living:
            if node.id in ids and node.training and node.stalled_until <= self.now:
                self._broken(
                    f"{node.name} was put into generation {document.generation} "
                    f"while it ran workers of {node.training}"
                )

    def _broken(self, what: str) -> None:
        story = "\n".join(f"{m.time:8.3f} {m.node}: {m.what}" for m in self.story[-40:])
        raise InvariantBroken(f"seed {self.seed}: {what}\n{story}")
