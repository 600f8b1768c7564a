"""What an agent wants said of its node, as a value.

A node asks for a generation only when no workers of an earlier one are left, and it falls silent
rather than speak for workers that the others have gone on without.
"""

from __future__ import annotations

import attrs

from .document import Document, Node, Phase


@attrs.frozen
class Intent:
    """The node's record, the generation whose workers it runs, and whether it seeks another."""

    node: Node
    held: int = 0
    joining: bool = True
    incarnation: str = ""

    def seek(self) -> Intent:
        """Our workers are gone; we want the generation after the one that we held."""
        node = attrs.evolve(self.node, after=self.held, holds=self.held)
        return attrs.evolve(self, node=node, joining=True)

    def meet(self, document: Document | None) -> Intent:
        """While joining, whatever was held in another incarnation counts for nothing."""
        if document is None or not self.joining or document.incarnation == self.incarnation:
            return self
        node = attrs.evolve(self.node, after=0, holds=0, claim=None, claim_generation=0)
        return Intent(node, incarnation=document.incarnation)

    def enter(self, generation: int) -> Intent:
        """We are a member of this generation and may run its workers."""
        return attrs.evolve(self, held=generation, joining=False)

    def fail(self, reason: str) -> Intent:
        """Our workers of the held generation failed."""
        node = attrs.evolve(self.node, claim=reason, claim_generation=self.held)
        return attrs.evolve(self, node=node)

    def record(self, document: Document | None) -> Node | None:
        """What should stand in the store for this node; None for nothing."""
        if self.joining:
            return self._waiting(document)
        if document is not None and (document.incarnation, document.generation) != (
            self.incarnation,
            self.held,
        ):
            return None
        return attrs.evolve(self.node, holds=self.held)

    def _waiting(self, document: Document | None) -> Node:
        # A generation that came and went while this node slept is one that it has no workers of;
        # unless it says so, the others wait for ever for it to stop them.
        if document is None or document.phase is not Phase.OPEN:
            return self.node
        return attrs.evolve(self.node, after=max(self.node.after, document.generation))
