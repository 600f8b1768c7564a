"""Waits for threads in many short turns rather than in one.

A machine that stands still for a while (paused, or a container that has used up its share of
processors) would otherwise end the wait before the thread has had any of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

TURNS = 20


def end_within(threads: Sequence[threading.Thread], seconds: float) -> bool:
    """Whether all of them end in so many seconds, in which they could run."""
    left = [thread for thread in threads if thread.is_alive()]
    for _ in range(TURNS):
        for thread in left:
            thread.join(seconds / TURNS / len(left))
        left = [thread for thread in left if thread.is_alive()]
        if not left:
            break
    return not left
