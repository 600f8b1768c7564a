"""Why each generation was sought and what it cost to get to it, from the lives that nodes had in it
and in the one before: times on one axis, phases that follow one another without gap or overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from .history import Cost, Generation, NodeGeneration, Why


@attrs.frozen
class _End:
    """Of a generation: when it went wrong, or was told to end and made its last step; when that was
    known; and when no worker was left."""

    fault: float
    known: float
    gone: float


class Ledger:
    """Takes a job's generations in their order, and makes of each what a reader is to know."""

    def __init__(self) -> None:
        self._before: Sequence[NodeGeneration] = ()
        self._end: _End | None = None
        self._floor = 0.0
        self._newest: int | None = None
        self._pace: float | None = None

    def add(
        self,
        number: int,
        lives: Sequence[NodeGeneration],
        *,
        launched: float | None = None,
        following: float | None = None,
        until: float,
    ) -> Generation:
        """The generation that nodes had these lives in, one of them at least.

        launched: when the job was begun that this is the first generation of; None if it is not.
        following: when the next one began, None if it is the last. until: the last event of all.
        """
        if launched is not None:
            self._before, self._end = (), None
        # Of two that are in order no clock can say that they are not.
        began = max(self._floor, min(life.began for life in lives))
        end = _end_of(lives, began, following)
        trained = _latest(life.trained for life in lives)
        trained = None if trained is None else max(began, trained)
        steps = _steps(lives)
        pace = _middle(life.seconds_per_step for life in lives)
        ended = max(began, until) if end is None else end.fault
        cost = self._way_here(lives, began, trained, launched)
        redone = self._redone(steps)
        took = max(0, redone - 1) * (self._pace or pace or 0.0)
        took = min(took, max(0.0, ended - trained)) if trained is not None else 0.0
        generation = Generation(
            number=number,
            why=why_of(self._before, lives),
            cause=next((life.cause for life in lives if life.cause), ""),
            began=began,
            ended=None if end is None else end.fault,
            nodes=max(life.nodes for life in lives),
            world=max(life.world for life in lives),
            restarts=max(life.restarts for life in lives),
            trained=None if trained is None else min(trained, ended),
            first_step=steps[0],
            last_step=steps[1],
            cost=attrs.evolve(cost, redone=redone, redone_seconds=took),
        )
        self._before, self._end = lives, end
        self._floor = began if end is None else end.fault
        self._newest = max((s for s in (self._newest, steps[1]) if s is not None), default=None)
        self._pace = pace or self._pace
        return generation

    def _way_here(
        self,
        lives: Sequence[NodeGeneration],
        began: float,
        trained: float | None,
        launched: float | None,
    ) -> Cost:
        restore = _latest(life.restore_seconds for life in lives)
        asked = _latest(
            life.restored - (life.restore_seconds or 0.0)
            for life in lives
            if life.restored is not None
        )
        start = None
        if trained is not None:
            restore = None if restore is None else min(restore, trained - began)
            start = trained - began - (restore or 0.0)
        elif asked is not None:
            start = max(0.0, asked - began)
        end = self._end
        if end is None:
            sought = launched
            if sought is None:
                sought = min((x.sought for x in lives if x.sought is not None), default=None)
            waited = None if sought is None else max(0.0, began - sought)
            return Cost(rendezvous=waited, start=start, restore=restore)
        known, gone = min(end.known, began), min(end.gone, began)
        silent = any(life.silent is not None for life in self._before)
        return Cost(
            detect=known - min(end.fault, known) if silent else None,
            stop=gone - known,
            rendezvous=began - gone,
            start=start,
            restore=restore,
        )

    def _redone(self, steps: tuple[int | None, int | None]) -> int:
        """How many of these were done before; one that is told as n follows n - 1."""
        first, last = steps
        if first is None or last is None or self._newest is None:
            return 0
        return max(0, min(self._newest, last) - first + 1)


def as_start(made: Generation, until: float) -> Generation:
    """The same, of a job whose workers tell of steps: of one that made none all was a start."""
    if made.trained is not None:
        return made
    lasted = max(0.0, (until if made.ended is None else made.ended) - made.began)
    restore = None if made.cost.restore is None else min(made.cost.restore, lasted)
    cost = attrs.evolve(made.cost, start=lasted - (restore or 0.0), restore=restore)
    return attrs.evolve(made, cost=cost)


def why_of(before: Sequence[NodeGeneration], lives: Sequence[NodeGeneration]) -> Why:
    """Why it was sought, as the rendezvous told; where it did not, by what the nodes did in the one
    before."""
    told = next((life.why for life in lives if life.why is not None), None)
    if told is Why.START and before:
        return Why.LOSS  # begun anew, as what the store held is gone
    if told is not None:
        return told
    charged = max(x.restarts for x in lives) > max((x.restarts for x in before), default=0)
    if charged or any(life.failed for life in before):
        return Why.FAILURE
    if not before:
        return Why.START
    return Why.RESIZE if any(life.asked for life in before) else Why.LOSS


def _end_of(lives: Sequence[NodeGeneration], began: float, following: float | None) -> _End | None:
    """None while it stands."""
    troubles = [life.trouble for life in lives if life.trouble is not None]
    overs = [life.over for life in lives if life.over is not None]
    if not troubles and following is None and len(overs) < len(lives):
        return None
    known = min(troubles) if troubles else max(overs, default=following or began)
    # Who lives on tells; of those that were lost nothing is known, and nothing is awaited.
    gone = max((life.gone for life in lives if life.gone is not None), default=known)
    if following is not None:
        known, gone = min(known, following), min(gone, following)
    known = max(began, known)
    gone = max(known, gone)
    fault = max(began, known - (_latest(life.silent for life in lives) or 0.0))
    # Who is given notice may go on: what was done since then is lost only where it is done again.
    worked = _latest(life.last_at for life in lives if life.asked)
    if worked is not None:
        fault = max(fault, min(worked, gone))
    return _End(fault=fault, known=max(known, fault), gone=gone)


def _steps(lives: Iterable[NodeGeneration]) -> tuple[int | None, int | None]:
    firsts, lasts = [], []
    for life in lives:
        if life.first_step is not None and life.last_step is not None:
            firsts.append(life.first_step)
            lasts.append(max(life.first_step, life.last_step))
    return min(firsts, default=None), max(lasts, default=None)


def _latest(found: Iterable[float | None]) -> float | None:
    return max((value for value in found if value is not None), default=None)


def _middle(found: Iterable[float | None]) -> float | None:
    values = sorted(value for value in found if value is not None)
    return values[len(values) // 2] if values else None
