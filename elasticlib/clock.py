"""The only module that reads a clock, and it reads the monotonic one.

Seconds as float, from an origin of this process's own: fit for differences taken here, never
for comparison with another machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

Clock = Callable[[], float]


monotonic: Clock = time.monotonic
"""Seconds since an arbitrary origin, never going back."""

sleep: Callable[[float], None] = time.sleep
"""Block this thread for a number of seconds."""


def duration(seconds: float) -> timedelta:
    """So many seconds, as torch's stores take them."""
    return timedelta(seconds=seconds)


wall: Clock = time.time
"""Seconds since 1970 by this machine's wall clock: to show to people, never to decide."""


def today() -> str:
    """The date and time in UTC by this machine's wall clock, for people to read."""
    return date_of(time.time())


def date_of(wall_seconds: float) -> str:
    """What `wall` answered, as a date and time in UTC, for people to read."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_seconds))


def local_date_of(wall_seconds: float) -> str:
    """The same in this machine's time zone, as torch writes it: 2026-01-31_23:59:59."""
    return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(wall_seconds))
