"""Phases of one recovery, computed from the events of the nodes and the trace of the workers.

All times are of the monotonic clock of one machine. The times of the restore and of the first step
are those that the training script records. Agents record them up to a second later, when they poll,
and the next fault does not wait for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import attrs

from elasticlib.observe.event import Event

from .training_history import Generation

PHASES = ("detection", "shutdown", "rendezvous", "startup", "restore", "repeated")
# The events that show that a node has detected the fault, and that its workers have stopped.
_DETECTIONS = ("worker.exited", "failure", "stopping", "rendezvous.started")
_STOPS = ("worker.exited", "stopped", "rendezvous.started")


@attrs.frozen
class Recovery:
    """The duration of a recovery."""

    total: float  # seconds from the fault until the step that it prevented was done
    # Seconds from the end of the last step before the recovery until that step was done. It may be
    # shorter than the total, because the job may train after a fault.
    pause: float
    generation: int  # the generation that did the step
    seconds: Mapping[str, float] = attrs.field(factory=dict)  # the total by phase


@attrs.frozen
class GenerationTimes:
    """The times at which a generation reached three points."""

    agreed_at: float  # all agents had the generation
    joined_at: float  # all workers had joined the process group
    restored_at: float  # all workers had restored the state


def generation_times(generation: Generation, events: Iterable[Event]) -> GenerationTimes | None:
    """Return the times of a generation, or None if it did not restore."""
    agreed = [event.monotonic for event in events if _is_agreement(event, generation.number)]
    if not agreed or not generation.restores:
        return None
    joined_at = max(line["at"] - line["seconds"] for line in generation.restores)
    restored_at = max(line["at"] for line in generation.restores)
    return GenerationTimes(max(agreed), joined_at, restored_at)


def measure_recovery(
    fault_at: float, step: int, events: Sequence[Event], generations: Sequence[Generation]
) -> Recovery | None:
    """Return the duration of the recovery from a fault.

    Args:
        fault_at: The time of the fault.
        step: The step that the fault prevented.
        events: The events since the fault.
        generations: The generations in their order. The first one met the fault.

    Returns:
        None if the step was not done after the fault. The phases are empty if no worker was
        restarted.
    """
    before = generations[0]
    # If the step was in a snapshot and its worker was stopped before it recorded the end of the
    # step, a later step is the first one that was done.
    ends = [
        (record.done_at, generation.number)
        for generation in generations
        for number, record in generation.steps.items()
        if number >= step
    ]
    end, resumed = min((found for found in ends if found[0] > fault_at), default=(0.0, 0))
    if not resumed:
        return None
    last = max((s.done_at for s in before.steps.values() if s.done_at < end), default=fault_at)
    recovery = Recovery(end - fault_at, end - last, resumed)
    first = next((g for g in generations[1:] if any(s.done_at for s in g.steps.values())), None)
    times = None if first is None else generation_times(first, events)
    if resumed == before.number or first is None or times is None:
        return recovery
    agreed_at = min(e.monotonic for e in events if _is_agreement(e, first.number))
    earlier = range(before.number, first.number)
    between = [
        e for e in events if e.generation in earlier and fault_at <= e.monotonic <= agreed_at
    ]
    return attrs.evolve(recovery, seconds=_phases(fault_at, end, times, between))


def _is_agreement(event: Event, generation: int) -> bool:
    return event.kind == "generation.started" and event.generation == generation


def _phases(
    fault_at: float, end: float, times: GenerationTimes, between: Sequence[Event]
) -> dict[str, float]:
    """Return the seconds of each phase. A phase that ended before the one before it has none."""
    detections = (e.monotonic for e in between if e.kind in _DETECTIONS)
    detected_at = min(detections, default=times.agreed_at)
    stopped_at = max((e.monotonic for e in between if e.kind in _STOPS), default=detected_at)
    borders = [fault_at]
    for border in (
        *(detected_at, stopped_at, times.agreed_at),
        *(times.joined_at, times.restored_at, end),
    ):
        borders.append(max(border, borders[-1]))
    lengths = (after - before for before, after in itertools.pairwise(borders))
    return dict(zip(PHASES, lengths, strict=True))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value at this share of the sorted values, or 0 if there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
