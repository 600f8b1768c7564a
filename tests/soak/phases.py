"""Where the time of one recovery went, read off the nodes' events and the workers' own lines.

All seconds are of one machine's monotonic clock. The restore and the first step are told by the
training script here: agents' events tell of them only when the agents look, up to a second later,
and the next fault does not wait for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import attrs

from elasticlib.observe.event import Event

from .ledger import Generation

PHASES = ("detect", "stop", "rendezvous", "start", "restore", "redone")
_NOTICES = ("worker.exited", "failure", "stopping", "rendezvous.started")
_ENDS = ("worker.exited", "stopped", "rendezvous.started")


@attrs.frozen
class Recovery:
    """total: from the fault until the step that it kept from being done was done. pause: the same
    from the end of the last step before, as the job may go on training after a fault. seconds:
    the total by phase. generation: in which training went on."""

    total: float
    pause: float
    generation: int
    seconds: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Marks:
    """When a generation came so far: its agents had it, its workers had joined and restored."""

    had: float
    joined: float
    restored: float


def marks_of(generation: Generation, events: Iterable[Event]) -> Marks | None:
    had = [event.monotonic for event in events if _had(event, generation.number)]
    if not had or not generation.resumed:
        return None
    joined = max(line["at"] - line["seconds"] for line in generation.resumed)
    return Marks(max(had), joined, max(line["at"] for line in generation.resumed))


def recovery(
    at: float, step: int, events: Sequence[Event], generations: Sequence[Generation]
) -> Recovery | None:
    """What a fault cost that struck at this time, and kept this step from being done.

    generations: in their order; the first is the one that was struck.

    Returns:
        None where that step was not done since; without phases where nothing was restarted.
    """
    before = generations[0]
    # Where it was snapshotted and its worker stopped before it said so, a later one is the first.
    ends = [(one.done, g.number) for g in generations for n, one in g.steps.items() if n >= step]
    end, again = min((found for found in ends if found[0] > at), default=(0.0, 0))
    if not again:
        return None
    last = max((s.done for s in before.steps.values() if s.done < end), default=at)
    whole = Recovery(end - at, end - last, again)
    first = next((g for g in generations[1:] if any(s.done for s in g.steps.values())), None)
    marks = None if first is None else marks_of(first, events)
    if again == before.number or first is None or marks is None:
        return whole
    had = [e.monotonic for e in events if _had(e, first.number)]
    old = range(before.number, first.number)
    between = [e for e in events if e.generation in old and at <= e.monotonic <= min(had)]
    return attrs.evolve(whole, seconds=_split(at, end, marks, between))


def _had(event: Event, generation: int) -> bool:
    return event.kind == "generation.started" and event.generation == generation


def _split(at: float, end: float, marks: Marks, between: Sequence[Event]) -> dict[str, float]:
    """The phases one after another; one that was over before another began takes no time."""
    noticed = min((e.monotonic for e in between if e.kind in _NOTICES), default=marks.had)
    stopped = max((e.monotonic for e in between if e.kind in _ENDS), default=noticed)
    borders = [at]
    for border in (noticed, stopped, marks.had, marks.joined, marks.restored, end):
        borders.append(max(border, borders[-1]))
    lengths = (after - before for before, after in itertools.pairwise(borders))
    return dict(zip(PHASES, lengths, strict=True))


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest of the values; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
