"""What failures cost a job: which of them count as quick repeats, how long the next restart is
held back for them, and when the restarts that were used are forgiven.

All seconds are of the deciding node's own clock, since it first saw the document as it stands.
"""

from __future__ import annotations

import zlib

import attrs

from .document import Document, Failure, FailureKind

QUICK_SECONDS = 10.0
"""A generation that fails sooner than this has repeated what the one before it did."""
FREE_RESTARTS = 2
"""Quick failures in a row that are not held back: most are mended by the first restart."""
FIRST_PAUSE = 0.5


def quick_failures(document: Document, failure: Failure, stood: float) -> int:
    """How many quick failures in a row there are with this one, after `stood` seconds.

    What was killed from outside repeats nothing of its own, and is no more likely to be killed
    again for being started at once.
    """
    if stood >= QUICK_SECONDS:
        return 0
    return document.quick + (failure.kind is not FailureKind.KILLED)


def lasted(document: Document, stood: float) -> Document:
    """The generation as it is after so many seconds: one that lasts ends the row of quick ones,
    whatever it is ended by itself."""
    return attrs.evolve(document, quick=0) if stood >= QUICK_SECONDS else document


def pause(document: Document) -> float:
    """Seconds to hold back the restart that this document waits for; no two jobs draw alike."""
    beyond = document.quick - FREE_RESTARTS
    longest = document.limits.restart_backoff
    if beyond <= 0 or longest <= 0:
        return 0.0
    # Bounded before it is raised: the exponent grows for as long as the budget lasts.
    grown = min(longest, FIRST_PAUSE * 2.0 ** min(beyond - 1, 30))
    draw = zlib.crc32(f"{document.incarnation} {document.roll}".encode()) / 0xFFFFFFFF
    return grown * (0.5 + 0.5 * draw)


def forgiven(document: Document) -> Document:
    """The same generation, with all of the job's restarts to use again."""
    return attrs.evolve(document, restarts=0, quick=0)


def forgiven_in(document: Document, stood: float) -> float | None:
    """Seconds until the generation that stands has earned the restarts back; None for never."""
    window = document.limits.restart_window
    if window <= 0 or not (document.restarts or document.quick):
        return None
    return max(0.0, window - stood)
