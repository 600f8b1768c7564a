"""A seeded cluster that never was: many nodes, one store, and whatever can go wrong between.

Each node runs the real `LocalNode` step by step; the simulator chooses when each step happens,
what fails, and how each node's clock differs in origin and rate. The same seed is the same run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial

from ..rendezvous.document import Document, Limits, Phase
from ..rendezvous.ranks import Seat
from .simulated_node import SimulatedNode, WatchedStore
from .story import Faults as Faults
from .story import Mark as Mark
from .story import Moment as Moment
from .story import Shift as Shift
from .story import Written as Written


class InvariantBroken(AssertionError):
    """A promise of the rendezvous did not hold; the message tells the seed and the story."""


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
        self._fixed = self.limits.fixed_ranks
        self._last: dict[str, Document] = {}
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
            (faults.cuts, lambda node: node.cut_off(self.random.uniform(0.0, 3 * self.lease))),
            (faults.forgets, SimulatedNode.forget),
            (faults.echoes, lambda node: node.echo(self.random.uniform(0.0, 3.0))),
            (faults.drains, SimulatedNode.drain),
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
        document = self.store.document()
        if any(node.intent.node.draining for node in living):
            return False  # it has yet to leave, perhaps past a leader that stands still
        if document is None or document.phase.terminal:
            return not living
        wanted = len({n.intent.node.hint for n in living}) if self._fixed else len(living)
        if wanted < self.limits.min_nodes:
            return not any(node.training for node in living)
        settled = document.phase is Phase.SETTLED
        full = len(document.members) == min(wanted, self.limits.max_nodes)
        members = {node.id for node in living if node.training == document.generation}
        wanted_ids = document.member_ids
        idle = all(not n.training for n in living if n.id not in wanted_ids)
        return settled and full and members == wanted_ids and idle

    def forgotten(self) -> None:
        """From now on, nobody can know of a generation but those who were in it."""
        self._last.clear()

    def check_seat(self, node: SimulatedNode) -> Seat:
        """Each node sees its own rank: no two the same one, in one generation of one size."""
        reading = node.part.seen
        assert reading is not None
        state, seat = reading.state, reading.seat
        assert state is not None
        assert seat is not None
        taken = self._seats.setdefault(state.membership, {})
        holder = taken.setdefault(seat.rank, node.name)
        if holder != node.name:
            what = f"{holder} and {node.name} both have rank {seat.rank}"
            self._broken(f"{what} in {state.membership}")
        if not seat.rank < seat.nodes == state.nodes:
            self._broken(f"{node.name} has rank {seat.rank} of {seat.nodes} in {state.membership}")
        return seat

    def _watch(self, document: Document) -> None:
        last = self._last.get(document.incarnation)
        self._last[document.incarnation] = document
        self.written.append(Written(round(self.now, 3), document))
        failures = sum(moment.mark is Mark.FAILS for moment in self.story)
        if document.restarts > failures:
            self._broken(f"{document.restarts} restarts were charged for {failures} failures")
        if last is None:
            return
        if document.generation < last.generation:
            self._broken(f"generation {last.generation} was followed by {document.generation}")
        if last.phase.terminal:
            self._broken(f"the job went on after it had {last.phase.value}")
        if document.generation > last.generation:
            self._check_settled(document)
            return
        known, now = [m.id for m in last.members], [m.id for m in document.members]
        # Those who come to a store that has forgotten the job may be fewer than before.
        came = [m for m in known if m in now] if document.phase is Phase.OPEN else known
        if now != came:
            self._broken(f"the members of generation {document.generation} changed")

    def _check_settled(self, document: Document) -> None:
        limits, ids = self.limits, [member.id for member in document.members]
        if not limits.min_nodes <= len(ids) <= limits.max_nodes:
            self._broken(f"generation {document.generation} has {len(ids)} nodes")
        members = frozenset(ids)
        if len(members) < len(ids):
            self._broken(f"generation {document.generation} has a node at two ranks: {ids}")
        if self._fixed and [m.hint for m in document.members] != list(range(len(ids))):
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
