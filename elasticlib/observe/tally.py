"""What one agent's run came to, counted while it goes on: of each generation only what it cost is
kept, and of the dearest also why, so that a run of weeks takes no more room than one of minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from .costs import Ledger, as_start
from .event import Event
from .history import Cost, Generation, Why
from .strand import Strand

DEAREST = 4


@attrs.frozen
class Sums:
    """Of one node. seconds: from its first event to the last. trained: of these in steps that
    count; None where none was told. first_step: seconds until the first one's end.

    lost: phase by phase, of all generations but a first one that made steps; None where nobody
    told of it. dearest: those after the first that cost most, in order of time; all of them, where
    they are few.
    """

    seconds: float = 0.0
    trained: float | None = None
    first_step: float | None = None
    counts: Mapping[Why, int] = attrs.field(factory=dict)
    lost: Cost = attrs.field(factory=Cost)
    dearest: Sequence[Generation] = ()
    saved: int | None = None
    snapshot: int | None = None

    @property
    def generations(self) -> int:
        return sum(self.counts.values())

    @property
    def goodput(self) -> float | None:
        """As `History.goodput`, of what this node knows."""
        if self.trained is None or self.seconds <= 0:
            return None
        return max(0.0, min(1.0, self.trained / self.seconds))


class Tally:
    """Folds one agent's events as they come."""

    def __init__(self) -> None:
        self._strand = Strand(keep=False)
        self._ledger = Ledger()
        self._counts: dict[Why, int] = {}
        # If workers never tell of steps, and if they do, which may be told by the last generation.
        self._stepless, self._stepping = _Lost(), _Lost()
        self._trained: float | None = None
        self._first: float | None = None

    def tell(self, event: Event) -> None:
        """Once this has happened, too."""
        self._strand.fold(event)
        # The last two may still be told of.
        while len(self._strand.lives) > 2:
            self._settle()

    def sums(self) -> Sums:
        """All of it; nothing is told any more."""
        while self._strand.lives:
            self._settle()
        strand = self._strand
        lost = self._stepless if self._trained is None else self._stepping
        return Sums(
            seconds=strand.seen - (strand.began or 0.0),
            trained=self._trained,
            first_step=self._first,
            counts=self._counts,
            lost=lost.cost,
            dearest=tuple(sorted(lost.dearest, key=lambda generation: generation.began)),
            saved=None if strand.saved is None else strand.saved[1],
            snapshot=None if strand.snapshot is None else strand.snapshot[1],
        )

    def _settle(self) -> None:
        lives, began = self._strand.lives, self._strand.began or 0.0
        life = lives.pop(0)
        made = self._ledger.add(
            life.number,
            [life],
            launched=None if self._counts else began,
            following=lives[0].began if lives else None,
            until=self._strand.seen,
        )
        if made.trained is not None:
            ended = self._strand.seen if made.ended is None else made.ended
            self._trained = (self._trained or 0.0) + max(0.0, ended - made.trained)
            self._trained -= made.cost.redone_seconds
            self._first = made.trained - began if self._first is None else self._first
        whole = as_start(made, self._strand.seen)
        if self._counts:
            self._stepless.add(made)
            self._stepping.add(whole)
        elif made.trained is None:
            self._stepping.cost = whole.cost
        self._counts[made.why] = self._counts.get(made.why, 0) + 1


class _Lost:
    """What some generations cost, and the dearest of them."""

    def __init__(self) -> None:
        self.cost = Cost()
        self.dearest: list[Generation] = []

    def add(self, made: Generation) -> None:
        self.cost = _sum(self.cost, made.cost)
        self.dearest.append(made)
        self.dearest.sort(key=lambda generation: -generation.cost.seconds)
        del self.dearest[DEAREST:]


def _sum(one: Cost, other: Cost) -> Cost:
    def both(name: str) -> float | None:
        told = [value for cost in (one, other) if (value := getattr(cost, name)) is not None]
        return sum(told) if told else None

    return Cost(
        detect=both("detect"),
        stop=both("stop"),
        rendezvous=both("rendezvous"),
        start=both("start"),
        restore=both("restore"),
        redone=one.redone + other.redone,
        redone_seconds=one.redone_seconds + other.redone_seconds,
    )
