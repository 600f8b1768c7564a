"""What an agent wants said of its node, and what its job's state means to it: as pure values.

A node asks for a generation only when no workers of an earlier one are left, and it falls silent
rather than speak for workers that the others have gone on without. It compares the generation it
holds with the current one, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from .decide import NOT_RETRIED, gives_way
from .document import Change, ChangeKind, FailureKind, Leader, Limits, Node, Phase, State
from .ranks import Seat


@attrs.frozen
class Intent:
    """The node's record, whether it seeks another generation than the one in it, and what it
    remembers of that: the last state of which it was a member. silent: it has not asked for one.
    """

    node: Node
    silent: bool = True
    joining: bool = True
    incarnation: str = ""
    memory: State | None = None

    @property
    def held(self) -> int:
        """The number of the last generation that it was in; 0 for none."""
        return 0 if self.memory is None else self.memory.generation

    def arrive(
        self, state: State | None, limits: Limits, leader: Leader | None, seat: Seat | None = None
    ) -> Intent:
        """What a first look at the store makes of us: one of the job, too late for it, or, where
        it is over and its nodes are gone, one of those with whom it begins anew."""
        if state is None:
            return self
        if seat is not None:
            # Another had it before us, under our id, and what it ran is gone with it.
            of = state.membership
            successor = self._saying(membership=of, rank=seat.rank, stopped=of)
            return attrs.evolve(successor, incarnation=state.incarnation)
        if late_for(state, limits, leader) if state.phase.terminal else _is_led(state, leader):
            return self
        return self._saying(came_after=state.incarnation)

    def seek(self) -> Intent:
        """Our workers are gone; we want the generation after the one that we held."""
        stopped = self._saying(runs=False, stopped=self.node.membership)
        return attrs.evolve(stopped, silent=False, joining=True)

    def meet(self, state: State | None) -> Intent:
        """While joining, whatever was held in another incarnation counts for nothing."""
        if state is not None and state.membership and state.membership == self.node.membership:
            return attrs.evolve(self, memory=state)
        if state is None or not self.joining or state.incarnation == self.incarnation:
            return self
        if self.memory is not None and gives_way(state, self.incarnation):
            return self
        new = self._saying(membership="", rank=0, stopped="")
        new = new._saying(claim=None, claim_membership="", claim_kind=FailureKind.ORDINARY)
        return Intent(new.node, self.silent, incarnation=state.incarnation)

    def notice(self, state: State | None, leader: Leader | None, live: Iterable[Node]) -> Intent:
        """One of the job is there after all, leading or (as the node that leads sees) among the
        live: it goes on, and we are of it."""
        if state is None or state.limits.launch or self.node.came_after != state.incarnation:
            return self
        if not _is_led(state, leader) and all(n.came_after == state.incarnation for n in live):
            return self
        return self._saying(came_after="")

    def enter(self, state: State, seat: Seat) -> Intent:
        """We are a member of this generation and may run its workers."""
        member = self._saying(membership=state.membership, rank=seat.rank, runs=True, came_after="")
        return attrs.evolve(member, memory=state, joining=False)

    def fail(self, reason: str, kind: FailureKind = FailureKind.ORDINARY) -> Intent:
        """Our workers of the held generation failed."""
        of = self.node.membership
        return self._saying(claim=reason, claim_membership=of, claim_kind=kind)

    def drain(self, reason: str) -> Intent:
        """We are about to leave, once our workers have saved, and want no other generation."""
        return self._saying(draining=reason)

    def at(self, address: str) -> Intent:
        """The address at which the others reach this node."""
        return self._saying(address=address)

    def _saying(self, **fields: Any) -> Intent:
        return attrs.evolve(self, node=attrs.evolve(self.node, **fields))

    def record(self, state: State | None) -> Node | None:
        """What should stand in the store for this node; None for nothing."""
        if self.silent:
            return None
        if self.joining:
            if state is None or state.phase is not Phase.OPEN:
                return self.node
            if self.node.stopped == state.membership:
                return self.node
            # A generation that came and went while this node slept is one that it has no workers
            # of; unless it says so, the others wait for ever for it to stop them.
            return attrs.evolve(self.node, stopped=state.membership)
        goes_on = state is not None and state.membership == self.node.membership
        return self.node if goes_on or gives_way(state, self.incarnation) else None

    def final_change(self, state: State | None) -> Change | None:
        """Why this node has nothing left to wait for, if so."""
        if state is None:
            return None
        me = self.node.id
        if state.phase.terminal and self.node.came_after != state.incarnation:
            node = "" if state.failure is None else state.failure.node
            return Change(ChangeKind(state.phase.value), state.cause, node)
        if me in state.expelled:
            spent = f"{state.restarts} of {state.limits.max_restarts} restarts used"
            if self.node.claim_kind is FailureKind.AT_START:
                spent = NOT_RETRIED
            reason = f"this node's workers failed and the job goes on without it ({spent})"
            return Change(ChangeKind.EXPELLED, reason, me)
        if me in state.refused:
            wanted = f"{state.limits.max_nodes} nodes and {state.limits.spares} spares (--spares)"
            return Change(ChangeKind.SURPLUS, f"the job has all that it wants, {wanted}", me)
        return None

    def change(self, state: State | None) -> Change | None:
        """What has become of the generation that this node is in; None while it stands.

        A store that has forgotten it is no news: those who remember are going to say it again.
        """
        final = self.final_change(state)
        if final is not None or self.joining or state is None:
            return final
        if gives_way(state, self.incarnation):
            return None
        if state.incarnation != self.incarnation:
            reason = "the store was emptied, and the job began anew"
            return Change(ChangeKind.REOPENED, reason)
        if state.membership != self.node.membership:
            return Change(ChangeKind.REOPENED, state.cause)
        if state.phase is Phase.SETTLED:
            return None
        return Change(ChangeKind.RESIZE if state.planned else ChangeKind.REOPENED, state.cause)


def late_for(state: State, limits: Limits, leader: Leader | None) -> bool:
    """Whether one who comes now belongs to the job that has ended, and not to its next start.

    Where starts have names, by the name. Else whoever finds one of the old nodes there is late;
    and so is who finds none of them, if there was room for it: it may have been on its way.
    """
    if limits.launch or state.limits.launch:
        return limits.launch == state.limits.launch
    return _is_led(state, leader) or state.nodes < state.limits.max_nodes


def _is_led(state: State, leader: Leader | None) -> bool:
    """Whether one who was there before the end leads."""
    return leader is not None and leader.came_after != state.incarnation
