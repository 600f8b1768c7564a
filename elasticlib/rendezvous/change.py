"""What a head means to a node that holds one of its generations.

A node compares the generation it holds with the current one, and nothing else: whatever is
cached belongs to the generation whose number it carries.
"""

from __future__ import annotations

import enum

import attrs

from ..errors import present
from .decide import NOT_RETRIED, gives_way
from .document import FailureKind, Head, Phase
from .intent import Intent
from .ranks import Seat


class ChangeKind(enum.Enum):
    """REOPENED: rendezvous anew. RESIZE: the same, on purpose and with all workers at work, so that
    they may first save and stop at a step that they agree on. SUCCEEDED, FAILED, ABORTED: the
    job is over. EXPELLED: leave. LOST: the store has been out of reach for longer than the
    handler allows.
    """

    REOPENED = "reopened"
    RESIZE = "resize"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"
    EXPELLED = "expelled"
    LOST = "lost"

    @property
    def final(self) -> bool:
        """Whether there is nothing left to rendezvous for."""
        return self not in (ChangeKind.REOPENED, ChangeKind.RESIZE)


@attrs.frozen
class Change:
    """What happened to the generation that this node holds, why, and because of which node."""

    kind: ChangeKind
    reason: str
    node: str = ""


def final_change(head: Head | None, intent: Intent) -> Change | None:
    """Why this node has nothing left to wait for, if so."""
    if head is None:
        return None
    me = intent.node.id
    if head.phase.terminal and intent.node.beyond != head.incarnation:
        node = "" if head.failure is None else head.failure.node
        return Change(ChangeKind(head.phase.value), head.cause, node)
    if me in head.expelled:
        spent = f"{head.restarts} of {head.limits.max_restarts} restarts used"
        if intent.node.claim_kind is FailureKind.AT_START:
            spent = NOT_RETRIED
        reason = f"this node's workers failed and the job goes on without it ({spent})"
        return Change(ChangeKind.EXPELLED, reason, me)
    if me in head.refused:
        wanted = f"{head.limits.max_nodes} nodes and {head.limits.spares} spares (--spares)"
        return Change(ChangeKind.EXPELLED, f"the job has all that it wants, {wanted}", me)
    return None


def change_since(head: Head | None, intent: Intent) -> Change | None:
    """What has become of the generation that this node is in; None while it stands.

    A store that has forgotten it is no news: those who remember are going to say it again.
    """
    final = final_change(head, intent)
    if final is not None or intent.joining or gives_way(head, intent.incarnation):
        return final
    head = present(head, "the head")
    if head.incarnation != intent.incarnation:
        return Change(ChangeKind.REOPENED, "the store was emptied, and the job began anew")
    if head.roll != intent.node.roll:
        return Change(ChangeKind.REOPENED, head.cause)
    if head.phase is Phase.SETTLED:
        return None
    return Change(ChangeKind.RESIZE if head.planned else ChangeKind.REOPENED, head.cause)


def has_entered(head: Head | None, seat: Seat | None, intent: Intent) -> bool:
    """Whether this node has a seat in a settled generation that it has not been in yet."""
    return (
        head is not None
        and seat is not None
        and head.phase is Phase.SETTLED
        and head.roll != intent.node.roll
    )
