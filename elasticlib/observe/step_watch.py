"""Looks at the workers' steps now and then, and tells a journal how they move on.

It hears what the agent tells, and passes it on: by that it knows when workers were started, and
when they have ended, at which it looks a last time before anything else is told. What there is to
tell is found by pure functions of two looks; seconds are between the moments that the workers
named, and not between looks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import attrs

from ..clock import Clock, monotonic
from ..threads import helper
from ..workers.interface import NOTHING, SOURCES, Heartbeat, Workers
from .interface import Journal

log = logging.getLogger("elasticlib.observe")

EVERY_SECONDS = 10.0
SOON_SECONDS = 1.0
_ENDS = ("rendezvous.began", "run.ended")
"""Told when none of a generation's workers is left."""

Told = list[tuple[str, dict[str, Any]]]
"""Kinds and facts."""


@attrs.frozen
class Look:
    """All workers of a node at one moment.

    generation: whose workers they are. at, began: seconds by the node's clock, now and when these
    workers were started. final: whether they tell nothing more, as they have ended.
    """

    generation: int
    at: float
    beats: Mapping[int, Heartbeat] = attrs.field(factory=dict)
    began: float = attrs.field(default=0.0, kw_only=True)
    final: bool = attrs.field(default=False, kw_only=True)

    @property
    def stepping(self) -> list[Heartbeat]:
        """Of those that tell of steps."""
        return [beat for beat in self.beats.values() if beat.steps]

    @property
    def step(self) -> int:
        """The last that all workers which tell of steps have told of; NOTHING if none does."""
        return min((beat.step for beat in self.stepping), default=NOTHING)

    @property
    def reached(self) -> float:
        """When the last of them told of that one."""
        return max(beat.at for beat in self.stepping if beat.step == self.step)

    @property
    def first(self) -> tuple[int, float] | None:
        """The first step, and when all of them had made it; None where that is not known."""
        begun = [beat for beat in self.stepping if beat.first_at]
        if not begun:
            return None
        return min(beat.first_step for beat in begun), max(beat.first_at for beat in begun)


@attrs.frozen
class Known:
    """What has been told of a generation.

    restores: so many times has each worker taken up a state. trained: whether training has begun.
    steps: the look that was told of last.
    """

    generation: int = 0
    restores: int = 0
    trained: bool = False
    steps: Look | None = None
    saved: int = NOTHING
    snapshot: int = NOTHING

    def of(self, generation: int) -> Known:
        """The same, or nothing if that is another's."""
        return self if self.generation == generation else Known(generation)


def beginnings(known: Known, now: Look) -> tuple[Known, Told]:
    """How the workers came to train, once that is over for all of them."""
    known, found = known.of(now.generation), Told()
    trains = bool(now.stepping) and (_all_train(now) or now.final)
    restores = _restores(now, whole=not (trains or now.final))
    if restores > known.restores:
        known = attrs.evolve(known, restores=restores)
        found.append(("restored", _restored(now)))
    if trains and not known.trained:
        known = attrs.evolve(known, trained=True)
        if now.first is not None:
            step, at = now.first
            found.append(("training.began", {"step": step, "seconds": round(at - now.began, 6)}))
    return known, found


def progress(known: Known, now: Look) -> tuple[Known, Told]:
    """How far they are; nothing where nothing has moved."""
    known, found = known.of(now.generation), Told()
    before = known.steps
    if now.step != NOTHING and (before is None or now.step != before.step):
        known = attrs.evolve(known, steps=now)
        found.append(("steps", _steps(before, now)))
    kept = [beat.snapshot for beat in now.beats.values() if beat.snapshot != NOTHING]
    # Of a state in parts each worker keeps its own, and it is whole once the last of them has.
    snapshot = min(kept, default=NOTHING)
    saved = max((beat.saved for beat in now.beats.values()), default=NOTHING)
    if snapshot not in (NOTHING, known.snapshot):
        known = attrs.evolve(known, snapshot=snapshot)
        found.append(("snapshot", {"step": snapshot}))
    if saved not in (NOTHING, known.saved):
        known = attrs.evolve(known, saved=saved)
        found.append(("saved", {"step": saved}))
    return known, found


def _all_train(now: Look) -> bool:
    """Whether nobody's first step is still to come: who has made none while another makes its
    second leaves it to others to tell of steps."""
    return len(now.stepping) == len(now.beats) or max(beat.steps for beat in now.stepping) > 1


def _restores(now: Look, *, whole: bool) -> int:
    """How often the workers have taken up a state; whole: each of them that is there."""
    # A source that a newer worker knows of is passed over.
    counts = [beat.restores if beat.restored else 0 for beat in now.beats.values()]
    told = [count for count in counts if count]
    return 0 if whole and len(told) < len(counts) else min(told, default=0)


def _restored(now: Look) -> dict[str, Any]:
    states = [beat.restored for beat in now.beats.values() if beat.restored is not None]
    asked = max((state.began for state in states), default=now.began)
    ended = max((state.ended for state in states), default=now.began)
    return {
        "step": min((state.step for state in states), default=NOTHING),
        "source": max((state.source for state in states), key=SOURCES.index, default=""),
        "seconds": round(max(0.0, ended - asked), 6),
        "after": round(max(0.0, asked - now.began), 6),
    }


def _steps(before: Look | None, now: Look) -> dict[str, Any]:
    since = now.first if before is None else (before.step, before.reached)
    told_loss = {local: beat.loss for local, beat in now.beats.items() if beat.loss is not None}
    return {
        "step": now.step,
        "per_second": None if since is None else _rate(now.step - since[0], now.reached - since[1]),
        "silent": round(max(0.0, now.at - min(beat.alive for beat in now.stepping)), 3),
        "loss": told_loss[min(told_loss)] if told_loss else None,
        "samples_per_second": _throughput(before, now),
    }


def _throughput(before: Look | None, now: Look) -> float | None:
    rates = []
    for local, beat in now.beats.items():
        then = None if before is None else before.beats.get(local)
        if then is not None and then.steps:
            rates.append(_rate(beat.samples - then.samples, beat.at - then.at))
        elif beat.steps > 1 and beat.first_at:
            # Without those of the first step, in which no time had passed: an equal part of all.
            after_it = beat.samples * (beat.steps - 1) / beat.steps
            rates.append(_rate(after_it, beat.at - beat.first_at))
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 3) if known else None


def _rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 3) if count > 0 and seconds > 0 else None


class StepWatch(Journal):
    """A thread that only looks, from `with` to its end; and what the agent tells its journal by.

    Args:
        workers: whose steps, where they tell of them.
        journal: is told what the agent tells, and what is seen.
        every: seconds between looks; soon: until training has begun.
    """

    prompt = True

    def __init__(
        self,
        workers: Workers,
        journal: Journal,
        *,
        every: float = EVERY_SECONDS,
        soon: float = SOON_SECONDS,
        clock: Clock = monotonic,
    ) -> None:
        self._workers = workers
        self._journal = journal
        self._every = every
        self._soon = soon
        self._clock = clock
        # Held while something is told, so that a look is never told for another generation's.
        self._lock = threading.Lock()
        self._known = Known()
        self._generation = 0
        self._began = self._looked = clock()
        self._started = False
        self._over = False
        self._woken = threading.Event()
        self._thread = helper(self._watch, "agent-steps")

    def __enter__(self) -> StepWatch:
        if self._workers.tell_steps:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        with self._lock:
            if kind in _ENDS:
                self._look(final=True)
                self._started = False
            elif kind == "generation.began":
                self._generation = generation
                self._began = self._looked = self._clock()
                self._started = False
            elif kind == "worker.began" and not self._started:
                self._started = True
                self._woken.set()
            self._journal.tell(kind, generation=generation, rank=rank, **facts)

    def _watch(self) -> None:
        while True:
            self._woken.wait(self._pause())
            self._woken.clear()
            if self._over:
                return
            self._look_aside()

    def _pause(self) -> float:
        if not self._started:
            return self._every  # it is woken when they are
        if not self._known.of(self._generation).trained:
            return self._soon
        return max(0.01, self._looked + self._every - self._clock())

    def _look_aside(self) -> None:
        """Between what is told. Some Workers are not ours, and who tells waits for none of them."""
        if not self._started:
            return
        try:
            look, due = self._seen(final=False)
            with self._lock:
                # Of workers that have ended since, more is known by now, and has been told.
                if self._started and look.generation == self._generation:
                    self._tell_of(look, due)
        except Exception:
            self._fail()

    def _look(self, *, final: bool) -> None:
        """Tell what has moved; how far the workers are only now and then, and at the end."""
        if not self._started or not self._workers.tell_steps:
            return
        try:
            self._tell_of(*self._seen(final=final))
        except Exception:
            self._fail()

    def _fail(self) -> None:
        # What is seen is never worth the end of the training.
        self._looked = self._clock()
        log.exception("the workers' steps could not be looked at")

    def _seen(self, *, final: bool) -> tuple[Look, bool]:
        beats = self._workers.beats()
        ended = final or not beats
        # Of those that have ended something is known as long as no others were started.
        beats = self._workers.last_beats() if ended else beats
        now = self._clock()
        look = Look(self._generation, now, dict(beats), began=self._began, final=ended)
        return look, ended or now >= self._looked + self._every

    def _tell_of(self, look: Look, due: bool) -> None:
        self._known, found = beginnings(self._known, look)
        if due:
            self._looked = look.at
            self._known, more = progress(self._known, look)
            found += more
        for kind, facts in found:
            self._journal.tell(kind, generation=look.generation, **facts)
