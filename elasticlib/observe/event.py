"""Event: one thing that happened on one node, as a value and as one line of JSON (`events.jsonl`).

Readers skip kinds and data that they do not know. A change of the format that is not only an
addition raises `VERSION`, and readers reject other versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from .event_kinds import (
    MAX_EVENT_BYTES,
    MAX_NUMBER,
    EventBody,
    StateRestored,
    StateSaved,
    WorkerExited,
    body_of,
    check_bits,
    cut,
    finite_or_text,
    plain_data,
)

VERSION = 3
MAX_HEAD_CHARS = 1024  # of kind, run and node

COMMON_KEYS = {
    "version": "version of this format",
    "kind": "a kind of the list below, or one of your own",
    "run": "id of the job",
    "node": "id of the node",
    "generation": "0 before the first generation",
    "timestamp": "seconds since 1970 by the node's clock, for people",
    "monotonic": "seconds by the node's monotonic clock, for differences within one file",
    "rank": "global rank, if the event is about one worker",
    "data": "values of the kind, by name",
}
"""Keys of every event."""


@attrs.frozen
class TimelineEvent:
    """An event as reports show it."""

    at: float  # seconds
    kind: str
    node: str
    text: str  # description, or the step
    rank: int | None = None
    step: int | None = None
    traceback: str = ""  # of a worker that failed, if it left one


def _check_text(_: object, field: attrs.Attribute[str], value: object) -> None:
    _check_text_of(field.name, value)


def _check_text_of(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} of an event must be a str, got {value!r:.60}")
    if len(value) > MAX_HEAD_CHARS:
        raise ValueError(
            f"{name} of an event must have at most {MAX_HEAD_CHARS} characters, got {len(value)}"
        )


def _check_integer(_: object, field: attrs.Attribute[int], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field.name} of an event must be an integer, got {value!r:.60}")
    check_bits(value)


def _check_time(_: object, field: attrs.Attribute[float], value: object) -> None:
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise ValueError(f"{field.name} of an event must be a float, got {value!r:.60}")


@attrs.frozen
class Event:
    """An event of one node: a line of `events.jsonl`, and the argument of an `on_event` function.

    Raises:
        ValueError: A field has the wrong type, or is too long.
    """

    body: EventBody  #: what happened: an instance of a class of `observe.event_kinds`
    run: str = attrs.field(validator=_check_text)  #: id of the job
    node: str = attrs.field(validator=_check_text)  #: id of the node
    generation: int = attrs.field(validator=_check_integer)  #: 0 before the first generation
    #: seconds since 1970 by the node's clock, for people
    timestamp: float = attrs.field(validator=_check_time)
    #: seconds by the node's monotonic clock, for differences between its events
    monotonic: float = attrs.field(validator=_check_time)
    #: global rank, if the event is about one worker
    rank: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_check_integer)
    )

    def __attrs_post_init__(self) -> None:
        _check_text_of("kind", self.kind)

    @property
    def kind(self) -> str:
        """The kind of the event, for example `worker.exited`."""
        return self.body.kind

    @property
    def data(self) -> Mapping[str, Any]:
        """The values of the kind as JSON values, by name."""
        return plain_data(self.body.data)

    def to_json(self) -> str:
        """Return the event as one line of JSON without a newline, as in `events.jsonl`.

        Texts, lists and objects are cut where the line would be longer than 64 KiB.
        """
        head = {
            "version": VERSION,
            "kind": self.kind,
            "run": self.run,
            "node": self.node,
            "generation": self.generation,
            "timestamp": round(self.timestamp, 6),
            "monotonic": round(self.monotonic, 6),
        }
        if self.rank is not None:
            head["rank"] = self.rank
        limit, data = MAX_EVENT_BYTES, self.data
        while True:
            shortened = truncate(data, limit)
            line = json.dumps({**head, "data": shortened}, separators=(",", ":"))
            if len(line) < MAX_EVENT_BYTES or limit == 0:
                return line
            limit //= 4

    @property
    def is_plausible(self) -> bool:
        """True if the times and the generation are within sensible bounds."""
        times = max(abs(self.monotonic), abs(self.timestamp))
        return 0 <= self.generation < MAX_NUMBER and times < MAX_NUMBER

    @property
    def on_timeline(self) -> TimelineEvent | None:
        """The event as reports show it; None for kinds, and expected exits, that they omit."""
        text, body = self.body.timeline_text, self.body
        if text is None:
            return None
        step = body.step if isinstance(body, (StateSaved, StateRestored)) else None
        traceback = body.traceback if isinstance(body, WorkerExited) else ""
        return TimelineEvent(self.monotonic, self.kind, self.node, text, self.rank, step, traceback)


def encode(event: Event) -> bytes:
    """Return an event as a line of `events.jsonl`."""
    return event.to_json().encode() + b"\n"


def truncate(value: Any, limit: int) -> Any:
    """Return a JSON value with texts of `limit` characters and about `limit` items at most.

    Infinite numbers and NaN become text.
    """
    if isinstance(value, str):
        return cut(value, limit)
    if isinstance(value, Mapping):
        return {str(key): truncate(item, limit) for key, item in list(value.items())[: limit + 1]}
    if isinstance(value, list | tuple):
        return [truncate(item, limit) for item in value[: limit + 1]]
    return finite_or_text(value) if isinstance(value, float) else value


def decode(line: bytes | str) -> Event:
    """Return the event of one line.

    Raises:
        ValueError: the line is no event, or one of another version.
    """
    fields = read_versioned_object(line, "an event", VERSION)
    names = ("run", "node", "generation", "timestamp", "monotonic", "rank")
    head: dict[str, Any] = {name: fields.get(name) for name in names}
    for name in ("timestamp", "monotonic"):
        if isinstance(head[name], int) and not isinstance(head[name], bool):
            head[name] = _as_float(name, head[name])
    kind, data = fields.get("kind"), fields.get("data")
    _check_text_of("kind", kind)
    if not isinstance(data, dict):
        raise ValueError(f"data of an event must be an object, got {data!r:.60}")
    return Event(body_of(str(kind), data), **head)


def read_versioned_object(data: bytes | str, label: str, version: int) -> dict[str, Any]:
    """Parse a JSON object whose field `version` is `version`.

    Raises:
        ValueError: the data is no such object. The message starts with `label`.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:  # brackets can be nested too deep
        raise ValueError(f"{label} must be a JSON object, got {data[:60]!r}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{label} must be a JSON object, got {data[:60]!r}")
    if fields.get("version") != version:
        raise ValueError(
            f"{label} must have version {version}, got {fields.get('version')!r:.20}: use the "
            "version of elasticlib that wrote it"
        )
    return fields


def _as_float(name: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError as error:
        size = f"a number of {value.bit_length()} bits"
        raise ValueError(f"{name} of an event must be a float, got {size}") from error
