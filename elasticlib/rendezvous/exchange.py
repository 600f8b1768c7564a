"""Where a handler's callers and its keeper's loop meet: wishes go one way, snapshots the other.

All of it stands under one condition; nothing here touches the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import attrs

from ..clock import Clock
from ..errors import ElasticError, RendezvousClosed, RendezvousTimeout
from .codec import Note
from .document import FailureKind, Head, Limits, Node, Phase
from .intent import Intent
from .participant import Snapshot
from .ranks import Seat

Answer = TypeVar("Answer")
UNANSWERED = Note(reason="the store has not answered")
"""Until something is told of what is waited for."""


@attrs.frozen
class Wishes:
    """What callers want said: of the node, where the bootstrap store of the generation with this
    roll is, the roll of the generation that is done here, and why the job is to end for all."""

    intent: Intent
    publish: tuple[str, str] | None = None
    done: str = ""
    closing: str | None = None


class Exchange:
    """Callers wish and wait; the loop tells. `wake` is called when there is something to do."""

    def __init__(self, node: Node, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._wake = wake
        self._changed = threading.Condition()
        self._awaited: list[Callable[[Snapshot], object]] = []
        self._snapshot: Snapshot | None = None
        self._error: ElasticError | None = None
        self._wishes = Wishes(Intent(node))
        self._stopping = False
        self._stood_at = float("-inf")
        self._note = UNANSWERED

    # -- for both -----------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether the node leaves, by itself or for an error."""
        with self._changed:
            return self._stopping

    @property
    def wishes(self) -> Wishes:
        with self._changed:
            return self._wishes

    @property
    def intent(self) -> Intent:
        return self.wishes.intent

    @property
    def snapshot(self) -> Snapshot | None:
        """The last one that was read; None before the store first answered."""
        with self._changed:
            return self._snapshot

    @property
    def head(self) -> Head | None:
        snapshot = self.snapshot
        return None if snapshot is None else snapshot.head

    @property
    def note(self) -> Note:
        """What the node that leads last told."""
        with self._changed:
            return self._note

    # -- for callers --------------------------------------------------------------------------

    @property
    def stood_at(self) -> float:
        """When a generation was last seen to stand, on the keeper's clock."""
        with self._changed:
            return self._clock() if settled(self._snapshot) else self._stood_at

    def seek(self) -> None:
        """Say that no workers of ours are left, and that we want another generation."""
        with self._changed:
            self._wishes = Wishes(self._wishes.intent.seek(), closing=self._wishes.closing)
        self._wake()

    def enter(self, head: Head, seat: Seat) -> None:
        """From now on we may run workers of this generation."""
        self._intend(lambda intent: intent.enter(head, seat))

    def fail(self, reason: str, kind: FailureKind) -> None:
        """Say that our workers of the held generation failed."""
        self._intend(lambda intent: intent.fail(reason, kind))
        self._wake()

    def drain(self, reason: str) -> None:
        """Say that this node is about to leave."""
        self._intend(lambda intent: intent.drain(reason))
        self._wake()

    def publish(self, roll: str, endpoint: str) -> None:
        """Say where the bootstrap store of the generation with this roll is."""
        self._wish(publish=(roll, endpoint))
        self._wake()

    def finish(self) -> None:
        """Say that our workers of the held generation succeeded."""
        self._wish(done=self.intent.node.roll)
        self._wake()

    def close_job(self, cause: str, timeout: float) -> None:
        """End the job for all its nodes; returns when the store has it, or the node has left."""
        with self._changed:
            self._wish(closing=cause)
            self._wake()
            self._changed.wait_for(lambda: self._wishes.closing is None or self._stopping, timeout)

    def stop(self) -> None:
        """Leave the job."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._wake()

    def abandon(self) -> None:
        """The same where no caller is left, and without the lock."""
        self._stopping = True
        self._wake()

    def wait_for(self, answer: Callable[[Snapshot], Answer | None], deadline: float) -> Answer:
        """The first answer that a snapshot gives.

        Raises:
            RendezvousTimeout: none until the deadline, on the keeper's clock.
            RendezvousClosed: the node has left. ElasticError: it could not go on.
        """
        with self._changed:
            self._awaited.append(answer)
            try:
                while True:
                    if self._error is not None:
                        raise self._error
                    if self._stopping:
                        raise RendezvousClosed("this node has left the rendezvous")
                    found = None if self._snapshot is None else answer(self._snapshot)
                    if found is not None:
                        return found
                    left = deadline - self._clock()
                    if left <= 0:
                        raise RendezvousTimeout(self._note.reason)
                    self._changed.wait(left)
            finally:
                self._awaited.remove(answer)

    # -- for the loop -------------------------------------------------------------------------

    def arrive(self, first: Snapshot, limits: Limits) -> None:
        """What was read before this node spoke."""
        self._intend(lambda intent: intent.arrive(first.head, limits, first.leader, first.seat))
        self.tell(first)

    def tell(self, snapshot: Snapshot) -> None:
        """What was read; wakes those whom it answers."""
        with self._changed:
            if settled(self._snapshot):
                self._stood_at = self._clock()
            self._snapshot = snapshot
            head, leader = snapshot.head, snapshot.leader
            live = () if snapshot.view is None else snapshot.view.live
            self._intend(lambda intent: intent.meet(head).notice(head, leader, live))
            if any(_answers(answer, snapshot) for answer in self._awaited):
                self._changed.notify_all()

    def tell_note(self, note: Note) -> None:
        with self._changed:
            self._note = note

    def be_at(self, address: str) -> None:
        """The address at which the others reach this node."""
        with self._changed:
            node = attrs.evolve(self._wishes.intent.node, address=address)
            self._intend(lambda intent: attrs.evolve(intent, node=node))

    def closed(self) -> None:
        """The store has it that the job is over."""
        with self._changed:
            self._wish(closing=None)
            self._changed.notify_all()

    def fail_all(self, error: ElasticError) -> None:
        """The node cannot go on: whoever waits is told why."""
        with self._changed:
            self._error, self._stopping = error, True
            self._changed.notify_all()

    def _intend(self, change: Callable[[Intent], Intent]) -> None:
        with self._changed:
            self._wish(intent=change(self._wishes.intent))

    def _wish(self, **wish: object) -> None:
        with self._changed:
            self._wishes = attrs.evolve(self._wishes, **wish)  # type: ignore[arg-type]


def settled(snapshot: Snapshot | None) -> bool:
    """Whether a generation stood when this was read."""
    return (
        snapshot is not None and snapshot.head is not None and snapshot.head.phase is Phase.SETTLED
    )


def _answers(answer: Callable[[Snapshot], object], snapshot: Snapshot) -> bool:
    """Whether it is worth waking who waits for that."""
    try:
        return answer(snapshot) is not None
    except ElasticError:
        return True
