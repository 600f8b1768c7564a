"""What one node's events add up to since its agent began: failures, recoveries, seconds lost.

Each event makes new counts of those before, as it makes a new standing; what is told here goes
only up, but for what was told last.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .event import Event

BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds of a recovery, at most."""
PHASES = ("detect", "stop", "rendezvous", "start", "restore", "redone")


@attrs.frozen
class Durations:
    """How many there were, their sum in seconds, and how many of at most each of `BUCKETS`."""

    count: int = 0
    seconds: float = 0.0
    within: tuple[int, ...] = (0,) * len(BUCKETS)

    def plus(self, seconds: float) -> Durations:
        within = (n + (seconds <= most) for n, most in zip(self.within, BUCKETS, strict=True))
        return Durations(self.count + 1, self.seconds + seconds, tuple(within))


@attrs.frozen
class Counts:
    """failures: by kind. lost: seconds by phase, of the first start as well. redone: steps done
    again. started, trained: recoveries, from the first sign of what ended a generation until the
    workers of the next were started, and until they had all made a step, where they tell of steps.

    Told last, or None: step, per_second, loss, samples_per_second. The others keep in mind what
    the next event is to be held against: when this generation ended and the next has not begun
    (broken) or not trained (waiting), the restarts of the job, the seconds of the last restoring.
    Of a generation whose end is not counted yet: when it began (None if it is) and its workers
    had stopped, the silence that was found, and whether it was asked to end and has told a step.
    idle: seconds of generations without a step, of workers that may never tell of any (telling).
    """

    failures: Mapping[str, int] = attrs.field(factory=dict)
    restarts: int = 0
    generations: int = 0
    lost: Mapping[str, float] = attrs.field(factory=dict)
    redone: int = 0
    started: Durations = attrs.field(factory=Durations)
    trained: Durations = attrs.field(factory=Durations)
    step: int | None = None
    per_second: float | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    broken: float | None = None
    waiting: float | None = None
    charged: int = 0
    restoring: float = 0.0
    began: float | None = None
    gone: float | None = None
    silent: float = 0.0
    asked: bool = False
    stepped: bool = False
    idle: float = 0.0
    telling: bool = False


def counted(counts: Counts, event: Event) -> Counts:
    """The counts once this has happened; a kind that adds nothing changes nothing."""
    add = _ADDS.get(event.kind)
    return counts if add is None else add(counts, event)


def _lose(counts: Counts, phase: str, seconds: float | None) -> Counts:
    if not seconds or seconds < 0:
        return counts
    lost = {**counts.lost, phase: counts.lost.get(phase, 0.0) + seconds}
    return attrs.evolve(counts, lost=lost)


def _break(counts: Counts, event: Event) -> Counts:
    """The first sign counts, and before the first generation there is nothing to end."""
    if counts.broken is not None or not counts.generations:
        return counts
    return attrs.evolve(counts, broken=event.at)


def _ended(counts: Counts, event: Event) -> Counts:
    return counts if event.says("ok") or event.says("stopped") else _break(counts, event)


def _failure(counts: Counts, event: Event) -> Counts:
    kind = event.text("failure") or "ordinary"
    failures = {**counts.failures, kind: counts.failures.get(kind, 0) + 1}
    found = _break(attrs.evolve(counts, failures=failures), event)
    silent = max(0.0, event.number("silent") or 0.0)
    return _lose(attrs.evolve(found, silent=found.silent + silent), "detect", silent)


def _stopping(counts: Counts, event: Event) -> Counts:
    asked = counts.asked or bool(event.text("why"))
    return _break(attrs.evolve(counts, asked=asked), event)


def _stopped(counts: Counts, event: Event) -> Counts:
    return attrs.evolve(counts, gone=event.at)


def _over(counts: Counts, _event: Event) -> Counts:
    """No look at the workers of this generation is still to be told of."""
    if counts.began is None or counts.broken is None:
        return counts
    found = counts if counts.gone is None else _lose(counts, "stop", counts.gone - counts.broken)
    if not found.stepped:
        lasted = counts.broken - counts.silent - counts.began - counts.restoring
        found = attrs.evolve(found, idle=found.idle + max(0.0, lasted))
    return _started(attrs.evolve(found, began=None))


def _sought(counts: Counts, event: Event) -> Counts:
    return _over(_break(counts, event), event)


def _started(counts: Counts) -> Counts:
    """What had no step was a start, once it is known that steps are told of."""
    if not counts.telling:
        return counts
    return _lose(attrs.evolve(counts, idle=0.0), "start", counts.idle)


def _began(counts: Counts, event: Event) -> Counts:
    restarts = int(event.number("restarts") or 0)
    found = attrs.evolve(
        _lose(counts, "rendezvous", event.number("seconds")),
        generations=counts.generations + 1,
        # Restarts that are earned back make the job's number smaller, and this one not.
        restarts=counts.restarts + max(0, restarts - counts.charged),
        charged=restarts,
        broken=None,
        waiting=counts.broken,
        restoring=0.0,
        began=event.at,
        gone=None,
        silent=0.0,
        asked=False,
        stepped=False,
    )
    if counts.broken is None:
        return found
    return attrs.evolve(found, started=counts.started.plus(max(0.0, event.at - counts.broken)))


def _restored(counts: Counts, event: Event) -> Counts:
    seconds = event.number("seconds") or 0.0
    return attrs.evolve(_lose(counts, "restore", seconds), restoring=seconds)


def _training(counts: Counts, event: Event) -> Counts:
    seconds = event.number("seconds") or 0.0
    found = _started(attrs.evolve(counts, stepped=True, telling=True))
    found = _lose(found, "start", seconds - counts.restoring)
    if counts.waiting is not None:
        waited = max(0.0, event.at - counts.waiting)
        found = attrs.evolve(found, trained=counts.trained.plus(waited), waiting=None)
    step = event.number("step")
    if step is None or counts.step is None or step > counts.step:
        return found
    again = counts.step - int(step) + 1
    found = attrs.evolve(found, redone=counts.redone + again, step=int(step))
    return _lose(found, "redone", again / counts.per_second) if counts.per_second else found


def _steps(counts: Counts, event: Event) -> Counts:
    step, pace = event.number("step"), event.number("per_second")
    broken = counts.broken
    if broken is not None and counts.asked and counts.began is not None:
        # Who is given notice may go on.
        broken = max(broken, event.at - max(0.0, event.number("silent") or 0.0))
    return attrs.evolve(
        counts,
        broken=broken,
        step=counts.step if step is None else int(step),
        per_second=counts.per_second if pace is None else pace,
        loss=event.number("loss"),
        samples_per_second=event.number("samples_per_second"),
    )


_ADDS = {
    "worker.ended": _ended,
    "failure": _failure,
    "stopping": _stopping,
    "stopped": _stopped,
    "rendezvous.began": _sought,
    "run.ended": _over,
    "generation.began": _began,
    "restored": _restored,
    "training.began": _training,
    "steps": _steps,
}
