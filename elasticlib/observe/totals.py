"""Totals of a run on one node, as metrics and the exit summary show them. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs

from .aggregate import NodeAggregate
from .history import Generation, GenerationTrigger, History, RecoveryCost
from .history_reader import history_of_node

BUCKETS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MAX_LISTED_GENERATIONS = 4


@attrs.frozen
class DurationHistogram:
    """Number and sum of durations, and how many are within each bound of BUCKETS_S."""

    count: int = 0
    seconds: float = 0.0
    bucket_counts: tuple[int, ...] = (0,) * len(BUCKETS_S)

    def add(self, seconds: float) -> DurationHistogram:
        bounds = zip(self.bucket_counts, BUCKETS_S, strict=True)
        counts = tuple(number + (seconds <= bound) for number, bound in bounds)
        return DurationHistogram(self.count + 1, self.seconds + seconds, counts)


@attrs.frozen
class NodeTotals:
    """Sums over the generations of a run, as far as one node knows them."""

    seconds: float = 0.0  # from the first event to the last
    productive_seconds: float | None = None  # None if no step is known
    first_step_seconds: float | None = None  # until the end of the first step
    triggers: Mapping[GenerationTrigger, int] = attrs.field(
        factory=dict
    )  # number of generations by trigger
    startup: RecoveryCost = attrs.field(factory=RecoveryCost)  # of the first generation
    lost: RecoveryCost = attrs.field(factory=RecoveryCost)  # everything else that was lost
    most_expensive: Sequence[Generation] = ()  # of those after the first, in order of time
    restarts: int = 0  # including restarts that the budget no longer counts
    failures: Mapping[str, int] = attrs.field(factory=dict)  # by kind
    restart_times: DurationHistogram = attrs.field(factory=DurationHistogram)
    recovery_times: DurationHistogram = attrs.field(factory=DurationHistogram)
    checkpoint_step: int | None = None
    snapshot_step: int | None = None
    # Seconds by module that the last restart spent on imports which --preload could do in advance.
    slow_imports: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def num_generations(self) -> int:
        return sum(self.triggers.values())

    @property
    def cost(self) -> RecoveryCost:
        """All time without productive steps, including the startup."""
        return self.startup.plus(self.lost)

    @property
    def goodput(self) -> float | None:
        """Share of the time spent on steps that were kept; None if no step is known."""
        if self.productive_seconds is None or self.seconds <= 0:
            return None
        return max(0.0, min(1.0, self.productive_seconds / self.seconds))


def totals_of(aggregate: NodeAggregate) -> NodeTotals:
    """Return the totals of a node. Thread-safe."""
    history, status = history_of_node(aggregate), aggregate.status
    startup, lost = _startup_and_lost_costs(history)
    trained = [at for made in history.generations if (at := made.first_step_at) is not None]
    later = sorted(history.generations[1:], key=lambda made: -made.cost.seconds)
    most_expensive = sorted(later[:MAX_LISTED_GENERATIONS], key=lambda made: made.started_at)
    restart_times, recovery_times = _restart_and_recovery_times(history)
    restarted = reversed(aggregate.generations[1:])
    restarts = [0, *(made.restarts for made in history.generations)]
    return NodeTotals(
        seconds=history.duration_seconds,
        productive_seconds=history.productive_seconds,
        first_step_seconds=min(trained, default=None),
        triggers=Counter(made.trigger for made in history.generations),
        startup=startup,
        lost=lost,
        most_expensive=most_expensive,
        restarts=sum(max(0, new - old) for old, new in pairwise(restarts)),
        failures=aggregate.failures,
        restart_times=restart_times,
        recovery_times=recovery_times,
        checkpoint_step=status.checkpoint_step,
        snapshot_step=status.snapshot_step,
        slow_imports=next((made.slow_imports for made in restarted if made.slow_imports), {}),
    )


def _startup_and_lost_costs(history: History) -> tuple[RecoveryCost, RecoveryCost]:
    """Return the cost of the startup, and of everything that was lost later.

    If the first generation completed no step but a later one did, its cost counts as lost.
    """
    startup, lost = RecoveryCost(), RecoveryCost()
    for number, made in enumerate(history.generations):
        cost = made.cost
        if number == 0 and (history.productive_seconds is None or made.first_step_at is not None):
            # The first generation did its work: only its stalls are lost.
            startup, cost = attrs.evolve(cost, stalled=None), RecoveryCost(stalled=cost.stalled)
        lost = lost.plus(cost)
    return startup, lost


def _restart_and_recovery_times(history: History) -> tuple[DurationHistogram, DurationHistogram]:
    """Return the times from the detection of a fault until workers started, and until a step."""
    restarts, recoveries = DurationHistogram(), DurationHistogram()
    for made in history.generations:
        if made.cost.shutdown is None or made.cost.rendezvous is None:
            continue
        seconds = made.cost.shutdown + made.cost.rendezvous
        restarts = restarts.add(seconds)
        if made.first_step_at is not None:
            recoveries = recoveries.add(seconds + made.first_step_at - made.started_at)
    return restarts, recoveries
