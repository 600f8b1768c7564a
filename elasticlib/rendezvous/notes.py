"""What the node that leads tells those who wait, where nobody is woken by it."""

from __future__ import annotations

from ..stores.interface import Store
from .codec import Note, decode_note, encode_note
from .decide import Decision, View, waiting
from .ranks import natural

NOTE_SECONDS = 1.0
NAMES_IN_A_NOTE = 16


class Notes:
    """The one note of a job, at a key of its own."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._told = Note()
        self._told_at = float("-inf")

    def read(self) -> Note:
        entry = self._store.get(self._key)
        return Note() if entry is None else decode_note(entry.value)

    def tell(self, note: Note, now: float) -> float:
        """As the node that leads. If it is too soon after the last time, nothing is told, and the
        answer is in how many seconds it can be."""
        if note == self._told:
            return float("inf")
        if now - self._told_at < NOTE_SECONDS:
            return self._told_at + NOTE_SECONDS - now
        self._store.set(self._key, encode_note(note))
        self._told, self._told_at = note, now
        return float("inf")


def noted(decision: Decision, view: View) -> Note:
    """What there is to tell of a decision: why, who is here, and how many wait to be let in."""
    names = sorted((node.host for node in view.live), key=natural)
    return Note(
        reason=decision.reason,
        here=tuple(names[:NAMES_IN_A_NOTE]),
        count=len(names),
        waiting=waiting(view),
        roll="" if view.document is None else view.document.roll,
        stuck=decision.stuck,
    )
