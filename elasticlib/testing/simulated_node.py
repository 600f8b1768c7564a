"""One agent of a simulated cluster, and the store as it reaches it.

It runs the real `Participant`; what is simulated is when each step happens, and what fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import StoreUnavailable
from ..rendezvous.change import change_since, final_change, has_entered
from ..rendezvous.document import Document, Head, Node
from ..rendezvous.intent import Intent
from ..rendezvous.keys import Keys, Read
from ..rendezvous.participant import Participant, Snapshot
from ..rendezvous.ranks import Seat
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
            return Read(keys, space.list(keys.job)).document(None)[0]

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
        outcome = super().compare_set(key, value, expected=expected, ttl=ttl)
        if outcome.won and key == Keys(RUN_ID).head:
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
    """One agent: a participant, workers that take time to stop, and a clock of its own."""

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
        self.intent = Intent(node).seek()
        self._participant = Participant(
            simulation.store.client_of(self), RUN_ID, node, simulation.limits, simulation.lease
        )
        self._stopping = False
        self._seen: Snapshot | None = None

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
            snapshot = self._look()
        except StoreUnavailable:
            self._simulation.after(self._simulation.random.uniform(0.05, 1.0), self.turn)
            return
        delay = self._simulation.random.choice((0.0, 0.001, 0.05, 0.3))
        self._simulation.after(delay, lambda: self._act(snapshot))

    def _look(self) -> Snapshot:
        now = self._simulation.now * self._rate + self._origin
        if self._seen is None:
            self._seen = self._participant.read(self.intent, now)
            seen = self._seen
            self.intent = self.intent.arrive(
                seen.head, self._simulation.limits, seen.leader, seen.seat
            ).meet(seen.head)
        self._participant.speak(self.intent, self._seen.head, now)
        self._seen = self._participant.look(self.intent, now)
        self._heed(self._seen)
        return self._seen

    def _act(self, snapshot: Snapshot) -> None:
        if not self.alive or self._wait_out_stall(lambda: self._act(snapshot)):
            return
        pause = self._write(snapshot)
        self._simulation.after(pause, self.turn)

    def _write(self, snapshot: Snapshot) -> float:
        """Seconds until the next turn."""
        try:
            decision, won = self._participant.act(snapshot)
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

    def _heed(self, snapshot: Snapshot) -> None:
        self.intent = self.intent.meet(snapshot.head)
        if final_change(snapshot.head, self.intent) is not None:
            self.leave()
        elif self.intent.joining:
            if has_entered(snapshot.head, snapshot.seat, self.intent):
                assert snapshot.head is not None
                assert snapshot.seat is not None
                self._start(snapshot.head, snapshot.seat)
        elif not self._stopping and change_since(snapshot.head, self.intent) is not None:
            self._stopping = True
            self._simulation.after(self._simulation.random.uniform(0.0, 2.0), self._stopped)

    def _start(self, head: Head, seat: Seat) -> None:
        self.intent = self.intent.enter(head, seat)
        what = f"rank {seat.rank} of {seat.nodes} in {head.generation}"
        self._simulation.tell(self.name, Mark.STARTS, what, generation=head.generation)
        self._simulation.check_seat(self, head, seat)

    def _stopped(self) -> None:
        if self.alive and not self._wait_out_stall(self._stopped):
            self._simulation.tell(self.name, Mark.STOPS, f"has stopped those of {self.training}")
            self._stopping = False
            if self.intent.node.draining:
                self.leave()
                return
            self.intent = self.intent.seek()

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
            self._participant.withdraw()

    def fail_workers(self) -> None:
        if self.training and not self._stopping:
            self._simulation.tell(self.name, Mark.FAILS, "its workers fail")
            self.intent = self.intent.fail("exit code 1")

    def drain(self) -> None:
        """It leaves at once if it has no workers, else when all who hear of it have stopped."""
        if not self.training:
            self.leave()
        elif not self.intent.node.draining:
            self._simulation.tell(self.name, Mark.DRAINS, "is about to leave")
            self.intent = self.intent.drain("drain")

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
        snapshot = self._seen
        if snapshot is not None:
            self._simulation.tell(self.name, Mark.ECHOES, f"acts again in {delay:.1f} s")
            self._simulation.after(delay, lambda: self._act_again(snapshot))

    def _act_again(self, snapshot: Snapshot) -> None:
        if self.alive and not self._wait_out_stall(lambda: self._act_again(snapshot)):
            self._write(snapshot)
