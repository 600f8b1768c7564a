"""Whether an agent's loop turns: it is asked again and again, by way of its inbox, and what does
not answer does not turn. Nothing is done about it here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs

from ..clock import Clock, monotonic
from ..threads import helper
from .history import JobState

EVERY_SECONDS = 1.0
PATIENCE = 15.0
"""Seconds: longer than any one act of the loop takes, even the start of many workers."""


@attrs.frozen
class Health:
    """The answer, and why, in a line."""

    good: bool
    sentence: str


class LoopWatch:
    """A thread that asks, from `begin` to `end`.

    Args:
        ask: has a function called in the loop's own turn; false if there are no more turns.
        every: seconds between questions.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[], object]], object],
        *,
        every: float = EVERY_SECONDS,
        clock: Clock = monotonic,
    ) -> None:
        self._ask = ask
        self._every = every
        self._clock = clock
        self._turned = clock()
        self._over = False
        self._ended = threading.Event()
        self._thread = helper(self._watch, "agent-health")

    def begin(self) -> None:
        self._turned = self._clock()
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def silent(self) -> float:
        """Seconds since the loop last answered; 0 where it has done its work."""
        return 0.0 if self._over else max(0.0, self._clock() - self._turned)

    def _watch(self) -> None:
        while not self._over and not self._ended.wait(self._every):
            self._over = not self._ask(self._answer)

    def _answer(self) -> None:
        self._turned = self._clock()


def judge(state: JobState, reason: str, silent: float, patience: float = PATIENCE) -> Health:
    """Of a node in this state, whose agent's loop has been silent for so many seconds."""
    if state is JobState.FAILED:
        return Health(False, f"the node has failed: {reason}")
    if silent > patience and not state.over:
        return Health(False, f"the agent's loop has not turned for {silent:.1f} s")
    return Health(True, state.value)
