"""What an event was, in a few words for the log."""

from __future__ import annotations

from .policy import Broke, Changed, DrainAsked, Event, SignalArrived, WorkerEnded


def summary(event: Event) -> str:
    """Its own words where it has some."""
    if isinstance(event, WorkerEnded):
        return event.exit.describe()
    if isinstance(event, Changed):
        return event.change.reason
    if isinstance(event, Broke):
        return event.reason
    if isinstance(event, SignalArrived | DrainAsked):
        return event.name
    return type(event).__name__
