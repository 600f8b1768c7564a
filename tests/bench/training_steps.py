"""Statistics of a training whose workers are killed, computed from the steps that they finished."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import attrs
from trainers.work import PART_SAMPLES

BATCH_SAMPLES = 2 * PART_SAMPLES


@attrs.frozen
class StepRecord:
    """A step that a process has finished."""

    step: int
    finished_at: float  # on the monotonic clock
    pid: int
    samples: int  # how many samples of the batch this process computed


# The steps of each of the two workers, in the order in which it finished them. A worker and its
# replacements have one sequence.
Steps = Mapping[str, Sequence[StepRecord]]


def last_step(steps: Steps, until: float) -> int:
    """Return the number of the last step that any worker finished by then."""
    numbers = ([r.step for r in records if r.finished_at <= until] for records in steps.values())
    return max(of_worker[-1] for of_worker in numbers if of_worker)


def count_samples(steps: Steps, until: float) -> int:
    """Return the number of trained samples. Those of a repeated step count once."""
    last = last_step(steps, until)
    by_step: dict[int, dict[str, int]] = defaultdict(dict)
    for worker, records in steps.items():
        for record in records:
            if record.finished_at <= until and record.step <= last:
                by_step[record.step][worker] = record.samples
    # If a worker is killed after its part of a step, the other one may repeat the step alone.
    return sum(min(BATCH_SAMPLES, sum(parts.values())) for parts in by_step.values())


def count_repeated(records: Sequence[StepRecord]) -> int:
    """Return how many steps of a worker it had finished before."""
    return len(records) - len({record.step for record in records})


def longest_pauses(steps: Steps, killed_at: Sequence[float], end: float) -> list[float]:
    """Return for each kill the longest time without a finished step until the next kill."""
    times = sorted(record.finished_at for records in steps.values() for record in records)
    pauses = []
    for start, until in zip(killed_at, [*killed_at[1:], end], strict=True):
        points = [start, *(at for at in times if start < at < until), until]
        pauses.append(max(b - a for a, b in itertools.pairwise(points)))
    return pauses


def survivor_costs(
    steps: Steps, kills: Sequence[tuple[float, int]], end: float
) -> tuple[list[float], list[float]]:
    """Return what the kills cost the processes that kept running.

    Args:
        steps: All steps.
        kills: The time and the process of each kill.
        end: The end of the measurement.

    Returns:
        For each kill, the longest time between two steps of the other process until the next kill.
        For each replacement, how much longer than its median step was the step of the other process
        in which the replacement first took part.
    """
    by_pid: dict[int, list[StepRecord]] = defaultdict(list)
    for records in steps.values():
        for record in records:
            by_pid[record.pid].append(record)
    stalls, join_costs = [], []
    ends = [*(at for at, _ in kills[1:]), end]
    for (start, victim), until in zip(kills, ends, strict=True):
        first_steps = {
            records[0].step for records in by_pid.values() if start < records[0].finished_at < until
        }
        for records in _survivors(by_pid, victim, start, until):
            gaps = [(b.finished_at - a.finished_at, a, b) for a, b in itertools.pairwise(records)]
            median = statistics.median(gap for gap, _, _ in gaps)
            stalls.append(max(gap for gap, _, _ in gaps))
            join_costs += [
                gap - median
                for gap, a, b in gaps
                if a.finished_at > start and b.step in first_steps
            ]
    return stalls, join_costs


def _survivors(
    by_pid: Mapping[int, Sequence[StepRecord]], victim: int, start: float, until: float
) -> Iterator[Sequence[StepRecord]]:
    """Yield the steps of each process that ran before a kill and kept running after it.

    The first of these steps is the last one before the kill.
    """
    for pid, records in by_pid.items():
        num_before = sum(record.finished_at <= start for record in records)
        if pid == victim or not num_before:
            continue
        num_until = sum(record.finished_at < until for record in records)
        current = records[num_before - 1 : num_until]
        # A worker that is stopped because another one was lost may finish its current step.
        if len(current) >= 2 and current[-1].finished_at > (start + until) / 2:
            yield current


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value such that this share of the values is not above it."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
