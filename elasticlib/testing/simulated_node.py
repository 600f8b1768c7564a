"""One agent of a simulated cluster, and the store as it reaches it.

It runs the real `LocalNode`; what is simulated is when each step happens, and what fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import StoreUnavailable
from ..rendezvous.decide import Intent
from ..rendezvous.document import Document, Node, Timing
from ..rendezvous.layout import Keys, StoredJob
from ..rendezvous.node import LocalNode, Reading
from ..stores.interface import CompareSet
from ..stores.keyspace import KeySpace
from ..stores.memory import MemoryStore
from .story import Mark

if TYPE_CHECKING:
    from .simulation import Simulation

RUN_ID = "sim"


class WatchedStore(MemoryStore):
    """A memory store that shows each document as it is written, and that a node may be cut from."""

    def __init__(self, clock: Callable[[], float], seen: Callable[[Document], None]) -> None:
        super().__init__(clock=clock)
        self._seen = seen
        self._is_cut: Callable[[], bool] = lambda: False

    def client_of(self, node: SimulatedNode) -> WatchedStore:
        """A client that reaches the store only while the node is not cut from it."""
        client = self.client()
        assert isinstance(client, WatchedStore)
        client._seen, client._is_cut = self._seen, lambda: node.cut
        return client

    def document(self) -> Document | None:
        """What stands there now."""
        keys = Keys(RUN_ID)
        with super()._turn() as space:
            return StoredJob(keys, space.list(keys.job)).document(None)[0]

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
        outcome = super().compare_set(key, value, expected=expected, ttl=ttl)
        if outcome.won and key == Keys(RUN_ID).state:
            document = self.document()
            assert document is not None
            self._seen(document)
        return outcome

    @contextmanager
    def _turn(self) -> Iterator[KeySpace]:
        if self._is_cut():
            raise StoreUnavailable("cut from the store")
        with super()._turn() as space:
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
        hint = index % simulation.limits.max_nodes if simulation.limits.fixed_ranks else None
        node = Node(id=f"{self.name}-1", host=self.name, address="127.0.0.1", slots=1, hint=hint)
        self.id = node.id
        self.part = LocalNode(
            simulation.store.client_of(self),
            RUN_ID,
            node,
            simulation.limits,
            Timing(lease=simulation.lease, refresh=simulation.lease / 5),
        )
        self.part.intent = self.intent.seek()
        self._stopping = False

    @property
    def intent(self) -> Intent:
        return self.part.intent

    @property
    def training(self) -> int:
        """The generation whose workers run here, or 0."""
        return 0 if self.intent.joining else self.intent.held

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
        except StoreUnavailable:
            self._simulation.after(self._simulation.random.uniform(0.05, 1.0), self.turn)
            return
        delay = self._simulation.random.choice((0.0, 0.001, 0.05, 0.3))
        self._simulation.after(delay, lambda: self._act(reading))

    def _look(self) -> Reading:
        now = self._simulation.now * self._rate + self._origin
        if self.part.seen is None:
            self.part.read(now)
        self.part.speak(now)
        reading = self.part.look(now)
        self._heed(reading)
        return reading

    def _act(self, reading: Reading) -> None:
        if not self.alive or self._wait_out_stall(lambda: self._act(reading)):
            return
        pause = self._write(reading)
        self._simulation.after(pause, self.turn)

    def _write(self, reading: Reading) -> float:
        """Seconds until the next turn."""
        try:
            decision, won = self.part.act(reading)
        except StoreUnavailable:
            return 0.1
        if decision.write is None:
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

    def _heed(self, reading: Reading) -> None:
        if self.intent.final_change(reading.state) is not None:
            self.leave()
        elif self.intent.joining:
            if self.part.enter() is not None:
                self._start()
        elif not self._stopping and self.intent.change(reading.state) is not None:
            self._stopping = True
            self._simulation.after(self._simulation.random.uniform(0.0, 2.0), self._stopped)

    def _start(self) -> None:
        seat = self._simulation.check_seat(self)
        what = f"rank {seat.rank} of {seat.nodes} in {self.training}"
        self._simulation.tell(self.name, Mark.STARTS, what, generation=self.training)

    def _stopped(self) -> None:
        if self.alive and not self._wait_out_stall(self._stopped):
            self._simulation.tell(self.name, Mark.STOPS, f"has stopped those of {self.training}")
            self._stopping = False
            if self.intent.node.draining:
                self.leave()
                return
            self.part.intent = self.intent.seek()

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
            self.part.withdraw()

    def fail_workers(self) -> None:
        if self.training and not self._stopping:
            self._simulation.tell(self.name, Mark.FAILS, "its workers fail")
            self.part.intent = self.intent.fail("exit code 1")

    def drain(self) -> None:
        """It leaves at once if it has no workers, else when all who hear of it have stopped."""
        if not self.training:
            self.leave()
        elif not self.intent.node.draining:
            self._simulation.tell(self.name, Mark.DRAINS, "is about to leave")
            self.part.intent = self.intent.saying(draining="drain")

    def stall(self, seconds: float) -> None:
        self.stalled_until = self._simulation.now + seconds
        what = f"stands still for {seconds:.1f} s"
        self._simulation.tell(self.name, Mark.STALLS, what, until=self.stalled_until)

    def cut_off(self, seconds: float) -> None:
        self.cut_until = self._simulation.now + seconds
        what = f"does not reach the store for {seconds:.1f} s"
        self._simulation.tell(self.name, Mark.CUT, what, until=self.cut_until)

    def echo(self, delay: float) -> None:
        """A wake-up comes twice, the second time late: what was read is acted upon again."""
        reading = self.part.seen
        if reading is not None:
            self._simulation.tell(self.name, Mark.ECHOES, f"acts again in {delay:.1f} s")
            self._simulation.after(delay, lambda: self._act_again(reading))

    def _act_again(self, reading: Reading) -> None:
        if self.alive and not self._wait_out_stall(lambda: self._act_again(reading)):
            self._write(reading)
