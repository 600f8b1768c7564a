"""What a simulated run is told, faults, and what it tells: moments, documents and shifts."""

from __future__ import annotations

import enum

import attrs

from ..rendezvous.document import Document


@attrs.frozen
class Faults:
    """How many of each fault a run draws, and over how many seconds they are spread.

    stalls: a node stands still (SIGSTOP). cuts: it does not reach the store (a partition).
    forgets: the store comes back empty. echoes: what a node once read, it acts upon again, late.
    drains: a node says that it is about to leave, and does once its workers have stopped.
    """

    crashes: int = 3
    arrivals: int = 3
    leaves: int = 1
    worker_failures: int = 2
    stalls: int = 2
    cuts: int = 0
    forgets: int = 0
    echoes: int = 0
    span: float = 30.0
    drains: int = 0


class Mark(enum.Enum):
    """What kind of thing a moment tells of."""

    ARRIVES = "arrives"
    STARTS = "its workers start"
    STOPS = "its workers are gone"
    FAILS = "its workers fail"
    STALLS = "stands still"
    CRASHES = "crashes"
    LEAVES = "leaves"
    CUT = "does not reach the store"
    FORGETS = "comes back empty"
    DRAINS = "is about to leave"
    ECHOES = "acts upon what it read before"
    WRITES = "writes the document"
    LOSES = "loses the race to write it"


@attrs.frozen
class Moment:
    """One line of a run's story, at the simulator's own time in seconds.

    generation: whose workers start. until: when a node that stands still wakes.
    """

    time: float
    node: str
    mark: Mark
    what: str
    generation: int = 0
    until: float = 0.0


@attrs.frozen
class Written:
    """A document, and when it was written."""

    time: float
    document: Document


@attrs.frozen
class Shift:
    """One node running the workers of one generation, from `start` to `end`."""

    node: str
    generation: int
    start: float
    end: float
