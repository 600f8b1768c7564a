"""What an agent wants said of its node, as a value.

A node asks for a generation only when no workers of an earlier one are left, and it falls silent
rather than speak for workers that the others have gone on without.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from .decide import gives_way
from .document import FailureKind, Head, Limits, Node, Phase
from .ranks import Seat


@attrs.frozen
class Leader:
    """Which node decides for now, and which incarnation had ended before it came."""

    id: str
    host: str
    beyond: str = ""


@attrs.frozen
class Intent:
    """The node's record, whether it seeks another generation than the one in it, and what it
    remembers of that: the last head of which it was a member. silent: it has not asked for one.
    """

    node: Node
    silent: bool = True
    joining: bool = True
    incarnation: str = ""
    memory: Head | None = None

    @property
    def held(self) -> int:
        """The number of the last generation that it was in; 0 for none."""
        return 0 if self.memory is None else self.memory.generation

    def arrive(
        self, head: Head | None, limits: Limits, leader: Leader | None, seat: Seat | None = None
    ) -> Intent:
        """What a first look at the store makes of us: one of the job, too late for it, or, where
        it is over and its nodes are gone, one of those with whom it begins anew."""
        if head is None:
            return self
        if seat is not None:
            # Another had it before us, under our id, and what it ran is gone with it.
            node = attrs.evolve(self.node, roll=head.roll, rank=seat.rank, left=head.roll)
            return attrs.evolve(self, node=node, incarnation=head.incarnation)
        if late_for(head, limits, leader) if head.phase.terminal else _is_led(head, leader):
            return self
        return attrs.evolve(self, node=attrs.evolve(self.node, beyond=head.incarnation))

    def seek(self) -> Intent:
        """Our workers are gone; we want the generation after the one that we held."""
        node = attrs.evolve(self.node, runs=False, left=self.node.roll)
        return attrs.evolve(self, node=node, silent=False, joining=True)

    def meet(self, head: Head | None) -> Intent:
        """While joining, whatever was held in another incarnation counts for nothing."""
        if head is not None and head.roll and head.roll == self.node.roll:
            return attrs.evolve(self, memory=head)
        if head is None or not self.joining or head.incarnation == self.incarnation:
            return self
        if self.memory is not None and gives_way(head, self.incarnation):
            return self
        node = attrs.evolve(self.node, roll="", rank=0, left="", claim=None, claim_roll="")
        node = attrs.evolve(node, claim_kind=FailureKind.ORDINARY)
        return Intent(node, self.silent, incarnation=head.incarnation)

    def notice(self, head: Head | None, leader: Leader | None, live: Iterable[Node] = ()) -> Intent:
        """One of the job is there after all, leading or (as one that leads sees) among the live:
        it goes on, and we are of it."""
        if head is None or head.limits.launch or self.node.beyond != head.incarnation:
            return self
        if not _is_led(head, leader) and all(n.beyond == head.incarnation for n in live):
            return self
        return attrs.evolve(self, node=attrs.evolve(self.node, beyond=""))

    def enter(self, head: Head, seat: Seat) -> Intent:
        """We are a member of this generation and may run its workers."""
        node = attrs.evolve(self.node, roll=head.roll, rank=seat.rank, runs=True, beyond="")
        return attrs.evolve(self, node=node, memory=head, joining=False)

    def fail(self, reason: str, kind: FailureKind = FailureKind.ORDINARY) -> Intent:
        """Our workers of the held generation failed."""
        roll = self.node.roll
        node = attrs.evolve(self.node, claim=reason, claim_roll=roll, claim_kind=kind)
        return attrs.evolve(self, node=node)

    def drain(self, reason: str) -> Intent:
        """We are about to leave, once our workers have saved, and want no other generation."""
        return attrs.evolve(self, node=attrs.evolve(self.node, draining=reason))

    def record(self, head: Head | None) -> Node | None:
        """What should stand in the store for this node; None for nothing."""
        if self.silent:
            return None
        if self.joining:
            return self._waiting(head)
        if gives_way(head, self.incarnation) or (head is not None and head.roll == self.node.roll):
            return self.node
        return None

    def _waiting(self, head: Head | None) -> Node:
        # A generation that came and went while this node slept is one that it has no workers of;
        # unless it says so, the others wait for ever for it to stop them.
        if head is None or head.phase is not Phase.OPEN:
            return self.node
        return attrs.evolve(self.node, left=head.roll)


def late_for(head: Head, limits: Limits, leader: Leader | None) -> bool:
    """Whether one who comes now belongs to the job that has ended, and not to its next start.

    Where starts have names, by the name. Else whoever finds one of the old nodes there is late;
    and so is who finds none of them, if there was room for it: it may have been on its way.
    """
    if limits.launch or head.limits.launch:
        return limits.launch == head.limits.launch
    if _is_led(head, leader):
        return True
    return head.nodes < head.limits.max_nodes


def _is_led(head: Head, leader: Leader | None) -> bool:
    """Whether one who was there before the end leads."""
    return leader is not None and leader.beyond != head.incarnation
