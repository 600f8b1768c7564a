"""Looks at the workers' steps now and then, and tells a journal how they move on.

It hears what the agent tells, and passes it on: by that it knows when workers were started, and
when they have ended, at which it looks a last time before anything else is told.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from ..clock import Clock, monotonic
from ..threads import helper
from ..workers.interface import Workers
from .interface import Journal
from .pace import Known, Look, beginnings, progress

log = logging.getLogger("elasticlib.observe")

EVERY_SECONDS = 10.0
SOON_SECONDS = 1.0
_ENDS = ("rendezvous.began", "run.ended")
"""Told when none of a generation's workers is left."""


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
