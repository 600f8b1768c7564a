"""What a document means to a node that holds one of its generations.

A node compares the generation it holds with the current one, and nothing else: whatever is
cached belongs to the generation whose number it carries.
"""

from __future__ import annotations

import enum

import attrs

from .document import Document, Phase


class ChangeKind(enum.Enum):
    """REOPENED: rendezvous anew. SUCCEEDED, FAILED, ABORTED: the job is over. EXPELLED: leave.

    LOST: the store has been out of reach for longer than the handler allows.
    """

    REOPENED = "reopened"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"
    EXPELLED = "expelled"
    LOST = "lost"

    @property
    def final(self) -> bool:
        """Whether there is nothing left to rendezvous for."""
        return self is not ChangeKind.REOPENED


@attrs.frozen
class Change:
    """What happened to the generation that this node holds, why, and because of which node."""

    kind: ChangeKind
    reason: str
    node: str = ""


def final_change(document: Document | None, me: str) -> Change | None:
    """Why this node has nothing left to wait for, if so."""
    if document is None:
        return None
    if document.phase.terminal:
        node = "" if document.failure is None else document.failure.node
        return Change(ChangeKind(document.phase.value), document.cause, node)
    if me in document.expelled:
        spent = f"{document.restarts} of {document.limits.max_restarts} restarts used"
        reason = f"this node's workers failed and the job goes on without it ({spent})"
        return Change(ChangeKind.EXPELLED, reason, me)
    return None


def change_since(document: Document | None, me: str, held: int, incarnation: str) -> Change | None:
    """What has become of generation `held`, whose member `me` is; None while it stands."""
    final = final_change(document, me)
    if final is not None:
        return final
    if document is None:
        return Change(ChangeKind.REOPENED, "the store has forgotten the job")
    if document.incarnation != incarnation:
        return Change(ChangeKind.REOPENED, "the store was emptied, and the job began anew")
    if document.generation == held and document.phase is Phase.SETTLED:
        return None
    return Change(ChangeKind.REOPENED, document.cause)


def entered(document: Document | None, me: str, after: int) -> int | None:
    """This node's rank in a settled generation later than `after`, if there is one."""
    if document is None or document.phase is not Phase.SETTLED or document.generation <= after:
        return None
    return document.rank_of(me)
