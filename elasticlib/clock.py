"""Clocks. This is the only module of the core that imports `time`.

Decisions use the monotonic clock, whose values are comparable only within one machine. The wall
clock is for people.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime

Clock = Callable[[], float]


monotonic: Clock = time.monotonic  # seconds since an arbitrary origin; never decreases
wall: Clock = time.time  # seconds since 1970 by this machine's wall clock; never for decisions
sleep: Callable[[float], None] = time.sleep  # blocks the calling thread


def to_timedelta(seconds: float) -> timedelta:
    """Return the duration as a `timedelta`, the type of timeouts in torch."""
    return timedelta(seconds=seconds)


def utc_now_text() -> str:
    """Return the current date and time in UTC by this machine's wall clock."""
    return format_utc(time.time())


def format_utc(timestamp: float) -> str:
    """Format a value of `wall` as date and time in UTC: 2026-01-31 23:59:59 UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timestamp))


def format_local_time(timestamp: float) -> str:
    """Format a value of `wall` in this machine's time zone, as torch does: 2026-01-31_23:59:59."""
    return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(timestamp))


def parse_utc(text: str) -> float:
    """Parse a date and time, in the format of ISO 8601 or of HTTP, into a value of `wall`.

    A time without a zone is in UTC.

    Raises:
        ValueError: the text has neither format.
    """
    try:
        at = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        at = parsedate_to_datetime(text)
    return (at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)).timestamp()
