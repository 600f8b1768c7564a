"""Text of an event for people, as one line.

A kind without an entry in `_DESCRIPTIONS` is shown with the names and values of its data, so a new
kind needs no change here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..clock import format_local_time
from ..sanitize import escape_to_one_line
from .event import Event
from .formatting import UNKNOWN, format_count, format_duration, format_number, format_ranges, plural

MAX_TEXT_CHARS = 300
_KIND_WIDTH = 18  # of the longest kind


def format_event(event: Event) -> str:
    """Return local time, node, generation, kind and description of an event as one line."""
    generation = str(event.generation or UNKNOWN)
    head = f"{_format_time(event.timestamp)}  {event.node}  {generation:>3}"
    return escape_to_one_line(f"{head}  {event.kind:<{_KIND_WIDTH}}  {describe(event)}").rstrip()


def describe(event: Event) -> str:
    """Return what happened as one line, without the time, node and kind."""
    on_timeline = event.on_timeline
    if on_timeline is not None:
        text = on_timeline.text
    elif event.kind in _DESCRIPTIONS:
        text = _DESCRIPTIONS[event.kind](event)
    else:
        text = ", ".join(f"{name}: {value}" for name, value in event.data.items())
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}..."


def _format_time(timestamp: float) -> str:
    try:
        seconds = format_local_time(timestamp).replace("_", " ")
    except (OverflowError, OSError, ValueError):  # a file may contain any number
        return UNKNOWN
    return f"{seconds}.{int(timestamp % 1 * 1000):03d}"


def _run_started(event: Event) -> str:
    workers = plural(event.count("slots") or 0, "worker")
    command = event.text("command")
    return f"{workers} on {event.text('host')}" + (f": {command}" if command else "")


def _generation_started(event: Event) -> str:
    workers = plural(event.count("world_size") or 0, "worker")
    nodes = plural(event.count("node_count") or 0, "node")
    first, last = event.pair("ranks") or (0, -1)
    ranks = format_ranges(range(first, last + 1)) if last - first < 1 << 20 else ""
    restarts = f"{event.count('restarts') or 0} of {event.count('max_restarts') or 0} restarts"
    return f"{workers} on {nodes}, ranks {ranks} here, {restarts}; {event.text('reason')}"


def _worker_started(event: Event) -> str:
    return f"rank {event.rank}: {event.text('name')}"


def _stopping(event: Event) -> str:
    grace = event.seconds("grace_seconds")
    suffix = f"; they have {format_duration(grace)} to save" if grace else ""
    return f"stopping the workers: {event.text('reason')}{suffix}"


def _stopped(event: Event) -> str:
    survivors = event.text("survivors")
    suffix = f", except {survivors}" if survivors else ""
    return f"the workers exited within {_duration(event)}{suffix}"


def _training_started(event: Event) -> str:
    return f"step {_step(event)} completed after {_duration(event)}"


def _progress(event: Event) -> str:
    rates = {
        "steps/s": event.number("steps_per_second"),
        "samples/s": event.number("samples_per_second"),
    }
    loss = event.value("loss")
    texts = [f"step {_step(event)}"]
    texts += [f"{format_number(rate)} {unit}" for unit, rate in rates.items() if rate is not None]
    texts += [] if loss is None else [f"loss {format_number(loss)}"]
    return ", ".join(texts)


def _run_finished(event: Event) -> str:
    return f"{event.text('state')}: {event.text('reason')} (exit code {event.count('exit_code')})"


def _duration(event: Event) -> str:
    seconds = event.seconds("duration_seconds")
    return "an unknown time" if seconds is None else format_duration(seconds)


def _step(event: Event) -> str:
    step = event.count("step")
    return UNKNOWN if step is None else format_count(step)


# Kinds that `Event.on_timeline` describes are not repeated, except for worker exits that it omits.
_DESCRIPTIONS: Mapping[str, Callable[[Event], str]] = {
    "run.started": _run_started,
    "rendezvous.started": lambda event: event.text("reason"),
    "generation.started": _generation_started,
    "worker.started": _worker_started,
    "worker.exited": lambda event: event.text("description"),
    "stopping": _stopping,
    "stopped": _stopped,
    "training.started": _training_started,
    "progress": _progress,
    "run.finished": _run_finished,
}
