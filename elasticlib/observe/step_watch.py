"""Which events the workers' steps are worth: found in their heartbeats at two looks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..workers.interface import NO_STEP, RESTORE_SOURCES, Heartbeat

EVERY_SECONDS = 10.0
"""Between lines on how far the workers are, at most; as many as training has lasted until then."""
SOON_SECONDS = 1.0
"""At least; and between looks until training has begun."""

Told = list[tuple[str, dict[str, Any]]]
"""Kinds and facts."""


@attrs.frozen
class Look:
    """All workers of a node at one moment.

    at, began: seconds by the node's clock, now and when these workers were started. final: whether
    nothing more is to come, as they have ended.
    """

    at: float
    beats: Mapping[int, Heartbeat] = attrs.field(factory=dict)
    began: float = attrs.field(default=0.0, kw_only=True)
    final: bool = attrs.field(default=False, kw_only=True)

    @property
    def stepping(self) -> list[Heartbeat]:
        """Of those that report steps."""
        return [beat for beat in self.beats.values() if beat.num_steps]

    @property
    def step(self) -> int:
        """The last that all workers which report steps have done; NOTHING if none does."""
        return min((beat.step for beat in self.stepping), default=NO_STEP)

    @property
    def reached(self) -> float:
        """When the last of them had done that one."""
        return max(beat.last_step_at for beat in self.stepping if beat.step == self.step)

    @property
    def first(self) -> tuple[int, float] | None:
        """The first step, and when all of them had made it; None where none reports steps."""
        begun = self.stepping
        if not begun:
            return None
        return min(beat.first_step for beat in begun), max(beat.first_at for beat in begun)


@attrs.frozen
class StepWatch:
    """Of one generation's workers: what their events have said. Each look makes the next watch.

    began: its workers were started; due: the next look is; line: an event on how far they are
    last was, or could have been. restores: so many times has each worker taken up a state. trained:
    when it was seen that training has begun. steps: the look that the last of these was made of.
    """

    began: float
    due: float = attrs.field(default=attrs.Factory(lambda self: self.began, takes_self=True))
    line: float = attrs.field(default=attrs.Factory(lambda self: self.began, takes_self=True))
    restores: int = 0
    trained: float | None = None
    steps: Look | None = None
    saves: int = 0  # checkpoints and snapshots that the events have counted
    snapshots: int = 0

    def look(
        self, now: float, beats: Mapping[int, Heartbeat], *, final: bool = False
    ) -> tuple[StepWatch, Told]:
        """The events of now: how far the workers are only now and then, and at the end.
        Seconds are between the moments that the workers name, and not between looks."""
        look = Look(now, dict(beats), began=self.began, final=final)
        watch, found = self._beginnings(look)
        if final or now >= self.line + self._pause:
            watch, more = attrs.evolve(watch, line=now)._progress(look)
            found += more
        pause = max(0.0, watch.line + watch._pause - now)
        due = now + (pause if watch.trained is not None else min(SOON_SECONDS, pause))
        return attrs.evolve(watch, due=due), found

    @property
    def _pause(self) -> float:
        """Seconds between lines: few at first, so that a short run has some lines, too."""
        lasted = EVERY_SECONDS if self.trained is None else self.line - self.trained
        return min(EVERY_SECONDS, max(SOON_SECONDS, lasted))

    def _beginnings(self, now: Look) -> tuple[StepWatch, Told]:
        """How the workers came to train, once that is over for all of them."""
        watch, found = self, Told()
        trains = bool(now.stepping) and (_all_train(now) or now.final)
        restores = _restores(now, whole=not (trains or now.final))
        if restores > watch.restores:
            watch = attrs.evolve(watch, restores=restores)
            found.append(("restored", _restored(now)))
        if trains and watch.trained is None:
            watch = attrs.evolve(watch, trained=now.at, line=now.at)
            if now.first is not None:
                step, at = now.first
                facts = {"step": step, "seconds": round(at - now.began, 6)}
                found.append(("training.began", facts))
        return watch, found

    def _progress(self, now: Look) -> tuple[StepWatch, Told]:
        """How far they are; nothing where nothing has moved."""
        watch, found = self, Told()
        before = watch.steps
        if now.step != NO_STEP and (before is None or now.step != before.step):
            watch = attrs.evolve(watch, steps=now)
            found.append(("steps", _steps(before, now)))
        # Each worker keeps its part of a sharded state, so a snapshot is complete once the last
        # worker has kept its part. A checkpoint is complete when any worker says so.
        kept = [beat for beat in now.beats.values() if beat.num_snapshots]
        snapshots = min((beat.num_snapshots for beat in kept), default=0)
        if snapshots > watch.snapshots:
            facts = {
                "step": min(b.last_snapshot_step for b in kept),
                "count": snapshots - watch.snapshots,
            }
            watch = attrs.evolve(watch, snapshots=snapshots)
            found.append(("snapshot", facts))
        saves = max((beat.num_saves for beat in now.beats.values()), default=0)
        if saves > watch.saves:
            step = max(beat.last_saved_step for beat in now.beats.values())
            found.append(("saved", {"step": step, "count": saves - watch.saves}))
            watch = attrs.evolve(watch, saves=saves)
        return watch, found


def _all_train(now: Look) -> bool:
    """Whether nobody's first step is still to come: a worker that has made none while another
    makes its second does not report steps."""
    return len(now.stepping) == len(now.beats) or max(beat.num_steps for beat in now.stepping) > 1


def _restores(now: Look, *, whole: bool) -> int:
    """How often the workers have taken up a state; whole: each of them that is there."""
    # A source that a newer worker knows of is passed over.
    counts = [beat.num_restores if beat.last_restore else 0 for beat in now.beats.values()]
    known = [count for count in counts if count]
    return 0 if whole and len(known) < len(counts) else min(known, default=0)


def _restored(now: Look) -> dict[str, Any]:
    states = [beat.last_restore for beat in now.beats.values() if beat.last_restore is not None]
    asked = max((state.started_at for state in states), default=now.began)
    ended = max((state.finished_at for state in states), default=now.began)
    return {
        "step": min((state.step for state in states), default=NO_STEP),
        "source": max((state.source for state in states), key=RESTORE_SOURCES.index, default=""),
        "seconds": round(max(0.0, ended - asked), 6),
        "after": round(max(0.0, asked - now.began), 6),
    }


def _steps(before: Look | None, now: Look) -> dict[str, Any]:
    since = now.first if before is None else (before.step, before.reached)
    losses = {local: beat.loss for local, beat in now.beats.items() if beat.loss is not None}
    return {
        "step": now.step,
        "per_second": None if since is None else _rate(now.step - since[0], now.reached - since[1]),
        "silent": round(max(0.0, now.at - min(beat.last_activity_at for beat in now.stepping)), 3),
        "loss": losses[min(losses)] if losses else None,
        "samples_per_second": _throughput(before, now),
    }


def _throughput(before: Look | None, now: Look) -> float | None:
    rates = []
    for local, beat in now.beats.items():
        then = None if before is None else before.beats.get(local)
        if then is not None and then.num_steps:
            rates.append(
                _rate(beat.num_samples - then.num_samples, beat.last_step_at - then.last_step_at)
            )
        elif beat.num_steps > 1 and beat.first_at:
            # Without those of the first step, in which no time had passed: an equal part of all.
            after_it = beat.num_samples * (beat.num_steps - 1) / beat.num_steps
            rates.append(_rate(after_it, beat.last_step_at - beat.first_at))
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 3) if known else None


def _rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 3) if count > 0 and seconds > 0 else None
