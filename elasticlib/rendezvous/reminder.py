"""The line that a waiting node prints: what is awaited, who is here, and which knob ends it."""

from __future__ import annotations

import logging

from .codec import Note

log = logging.getLogger("elasticlib.rendezvous")

REMIND_SECONDS = 10.0


class Reminder:
    """Prints a note when its reason is a new one, and every ten seconds."""

    def __init__(self, join_timeout: float) -> None:
        self._join_timeout = join_timeout
        self._reason = ""
        self._at = float("-inf")

    def remind(self, note: Note, now: float) -> None:
        """`now` is the caller's monotonic clock, in seconds."""
        if note.reason == self._reason and now - self._at < REMIND_SECONDS:
            return
        self._reason, self._at = note.reason, now
        here = ", ".join(note.here) or "nobody"
        more = f" and {note.count - len(note.here)} more" if note.count > len(note.here) else ""
        log.info(
            "%s; here: %s%s; join_timeout=%g s ends the wait",
            note.reason,
            here,
            more,
            self._join_timeout,
        )
