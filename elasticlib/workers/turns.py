"""Waits for threads in many short turns rather than in one.

A machine that stands still for a while (paused, or a container that has used up its share of
processors) would otherwise end the wait before the thread has had any of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

TURNS, LONGEST_TURN = 20, 0.05
Kind = TypeVar("Kind", bound=threading.Thread)


def end_within(
    threads: Sequence[Kind], seconds: float, *, unless: Callable[[Kind], bool] = lambda _: False
) -> bool:
    """Whether all of them end in so many seconds, in which they could run. unless: who is not
    waited for, at whatever moment that is so."""
    turns = max(TURNS, round(seconds / LONGEST_TURN))
    for _ in range(turns):
        left = [thread for thread in threads if thread.is_alive() and not unless(thread)]
        if not left:
            break
        for thread in left:
            thread.join(seconds / turns / len(left))
    return not any(thread.is_alive() for thread in threads)
