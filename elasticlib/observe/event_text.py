"""Text of an event for people, as one line."""

from __future__ import annotations

from ..clock import format_local_time
from ..sanitize import escape_to_one_line
from .event import Event
from .event_kinds import WorkerStarted
from .formatting import UNKNOWN

MAX_TEXT_CHARS = 300
_KIND_WIDTH = 18  # of the longest kind


def format_event(event: Event) -> str:
    """Return local time, node, generation, kind and description of an event as one line."""
    generation = str(event.generation or UNKNOWN)
    head = f"{_format_time(event.timestamp)}  {event.node}  {generation:>3}"
    return escape_to_one_line(f"{head}  {event.kind:<{_KIND_WIDTH}}  {describe(event)}").rstrip()


def describe(event: Event) -> str:
    """Return what happened as one line, without the time, node and kind."""
    rank = f"rank {event.rank}: " if isinstance(event.body, WorkerStarted) else ""
    text = rank + " ".join(event.body.text.split())
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}..."


def _format_time(timestamp: float) -> str:
    try:
        seconds = format_local_time(timestamp).replace("_", " ")
    except (OverflowError, OSError, ValueError):  # a file may contain any number
        return UNKNOWN
    return f"{seconds}.{int(timestamp % 1 * 1000):03d}"
