"""Event: one thing that happened on one node, as a value and as one line of JSON (`events.jsonl`).

Readers skip kinds and data that they do not know. A change of the format that is not only an
addition raises `VERSION`, and readers reject other versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import attrs

from ..errors import format_error

VERSION = 3
MAX_EVENT_BYTES = 64 * 1024  # longer texts in an event are truncated
MAX_VALUES = MAX_EVENT_BYTES // 2  # in one value of an event; a line has no room for more
MAX_DEPTH = 8  # of lists and objects within each other
MAX_INTEGER_BITS = 8192  # Python converts integers of up to 4,300 digits to text
MAX_NAME_CHARS = 128  # names in the data of an event are cut
MAX_HEAD_CHARS = 1024  # of kind, run and node
MAX_NUMBER = 2**62  # no plausible step, time or generation is larger

KINDS: Mapping[str, Mapping[str, str]] = {
    "run.started": {
        "host": "name of the node",
        "pid": "process id of the agent",
        "slots": "number of workers on this node",
        "settings": "settings that were given, as text by name",
        "endpoint": "where this node serves the store of the job, empty if it does not",
        "log_dir": "directory of the workers' logs, empty if they are not kept",
        "lease_ttl_seconds": "time without a lease renewal after which other nodes consider this "
        "node lost",
        "versions": "versions of elasticlib, torch and Python, by name",
        "command": "command line of the agent, as text",
    },
    "rendezvous.started": {
        "reason": "why the previous generation ended, or that the node is new",
        "is_planned": "true if nodes join or leave on purpose and nothing has failed or was lost",
    },
    "generation.started": {
        "duration_seconds": "time since the last worker exited, or since the start of the run",
        "import_seconds": "part of this time until the node had imported torch and other modules "
        "that workers need; 0 after its first rendezvous",
        "attempt": "how often this agent had started its workers before, as in attempt_N",
        "node_rank": "rank of this node",
        "node_count": "number of nodes",
        "ranks": "first and last global rank of this node's workers",
        "world_size": "number of workers in the job",
        "role": "first role rank of this node's workers, and number of workers of this role",
        "restarts": "restarts of the job so far",
        "max_restarts": "restart budget of the job",
        "reason": "why the rendezvous for this generation took place",
        "trigger": "start, failure, loss, resize or restart; null if the rendezvous does not "
        "report it",
        "incarnation": "name of this start of the job: its generations count from 1; empty if the "
        "rendezvous does not report it",
    },
    "worker.started": {
        "local_rank": "local rank of the worker",
        "name": "name of the process, such as pid 123",
        "attempt": "attempt in which the process was started; an earlier one if it regrouped",
    },
    "worker.exited": {
        "local_rank": "local rank of the worker",
        "exit_code": "exit code; negative for a signal",
        "succeeded": "true if the worker succeeded",
        "stopped": "true if this agent had asked the worker to stop",
        "description": "how the worker exited, as text",
        "error": "message of its failure, or else how it exited; empty if it succeeded",
        "traceback": "traceback of its failure, empty if there is none",
        "uptime_seconds": "time since the start of its generation",
    },
    "failure": {
        "reason": "the failure, as text",
        "failure_kind": "ordinary, killed or hang",
        "seconds_since_heartbeat": "of a hang: time since the last sign of life; otherwise null",
    },
    "stopping": {
        "notice": "reason that the workers are given; empty if they are not asked to save",
        "grace_seconds": "time that the workers have to save; 0 if they are not asked to",
        "reason": "why the workers are stopped",
    },
    "stopped": {
        "duration_seconds": "time that stopping took",
        "survivors": "processes that could not be killed, empty if there are none",
    },
    "control.requested": {
        "action": "what an operator has requested: drain, stop or restart",
        "by": "the operator, as user@host",
    },
    "drain.requested": {
        "signal": "name of the signal, or what else has requested it",
        "reason": "reason given to the workers",
    },
    "state.restored": {
        "step": "step of the state that the workers restored",
        "source": "memory (of this node), peer (memory of another node) or disk",
        "duration_seconds": "time that the restore took, after the last worker asked for it",
        "delay_seconds": "time from the start of the workers until the last one asked for it",
    },
    "training.started": {
        "step": "smallest first step of this node's workers in this generation",
        "duration_seconds": "time from the start of the workers until the slowest one had "
        "completed its first step",
        "slow_imports": "seconds by module: what the slowest worker imported before its first "
        "step and --preload could import in advance; 0.1 s or more each, at most 4",
    },
    "progress": {
        "step": "smallest last step of this node's workers",
        "steps_per_second": "rate since the previous event, or the first step; null if unknown",
        "seconds_since_heartbeat": "largest time since a worker's last sign of life",
        "loss": "last loss of the lowest rank that reports one, else null; text if not finite",
        "samples_per_second": "rate of all workers of this node together; null if unknown",
    },
    "snapshot.taken": {
        "step": "newest step of which this node's workers have a complete snapshot in memory",
        "count": "snapshots since the previous event, this one included",
    },
    "checkpoint.saved": {
        "step": "step of the newest durable checkpoint",
        "count": "checkpoints since the previous event, this one included",
    },
    "run.finished": {
        "state": "succeeded, failed, stopped or drained",
        "reason": "why, as text",
        "exit_code": "exit code of the launcher; 69 for an unfit node, 75 after a drain, whatever "
        "--drain-exit-code is",
        "root_cause": "first failure on any node: host, rank, what; null if there is none",
        "expelled": "true if the job continues without this node",
    },
    "events.dropped": {
        "count": "events that could not be written: the disk was full or too slow, or a value of "
        "the event had no JSON form"
    },
}
"""Each kind of event, with the names of its data and their meaning."""

COMMON_KEYS = {
    "version": "version of this format",
    "kind": "one of KINDS",
    "run": "id of the job",
    "node": "id of the node",
    "generation": "0 before the first generation",
    "timestamp": "seconds since 1970 by the node's clock, for people",
    "monotonic": "seconds by the node's monotonic clock, for differences within one file",
    "rank": "global rank, if the event is about one worker",
    "data": "values of the kind, by name",
}
"""Keys of every event."""

_TEXT_FACTS: Mapping[str, str] = {
    "failure": "reason",
    "worker.exited": "description",
    "drain.requested": "reason",
}


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
    if not isinstance(value, str):
        raise ValueError(f"{field.name} of an event must be a str, got {value!r:.60}")
    if len(value) > MAX_HEAD_CHARS:
        raise ValueError(
            f"{field.name} of an event must have at most {MAX_HEAD_CHARS} characters, got "
            f"{len(value)}"
        )


def _check_integer(_: object, field: attrs.Attribute[int], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field.name} of an event must be an integer, got {value!r:.60}")
    _check_bits(value)


def _check_bits(value: int) -> None:
    if value.bit_length() > MAX_INTEGER_BITS:
        raise ValueError(
            f"integers of an event must have at most {MAX_INTEGER_BITS} bits, got one of "
            f"{value.bit_length()}"
        )


def _check_time(_: object, field: attrs.Attribute[float], value: object) -> None:
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise ValueError(f"{field.name} of an event must be a float, got {value!r:.60}")


class _PlainCopier:
    """Copies one value of an event into JSON values, of which there are at most `MAX_VALUES`.

    The limit holds for lists that share items as well, and so bounds the time of a copy.
    """

    def __init__(self) -> None:
        self._num_left = MAX_VALUES

    def copy(self, value: object, depth: int = 0) -> Any:
        self._num_left -= 1
        if depth > MAX_DEPTH:
            raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
        if isinstance(value, Mapping):
            items = ((str(name)[:MAX_NAME_CHARS], item) for name, item in value.items())
            return {name: self.copy(item, depth + 1) for name, item in items if self._num_left > 0}
        if isinstance(value, list | tuple):
            return [self.copy(item, depth + 1) for item in value if self._num_left > 0]
        if isinstance(value, int):
            _check_bits(value)
        elif isinstance(value, float):
            return _finite_or_text(value)
        elif value is not None:
            return _cut(str(value), MAX_EVENT_BYTES)
        return value


def _plain_data(data: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of the data of an event that consists of JSON values.

    Raises:
        ValueError: a value has no JSON form.
    """
    plain = {}
    for name, value in data.items():
        try:
            plain[str(name)[:MAX_NAME_CHARS]] = _PlainCopier().copy(value)
        except Exception as error:  # `str` of a value, for example, may raise anything
            reason = format_error(error)
            raise ValueError(f"its value {name!r:.60} has no JSON form: {reason}") from error
    return plain


@attrs.frozen
class Event:
    """An event of one node: a line of `events.jsonl`, and the argument of an `on_event` function.

    A file may have been written by anyone. The methods therefore read the data by type: a value
    that is missing or of another type is unknown.

    The data is copied and consists of JSON values: infinite numbers, NaN and objects without a JSON
    form become text, long texts are cut, and tuples become lists.

    Raises:
        ValueError: a value has no JSON form: its `str` raises, it is nested more than 8 deep, or it
            is an integer of more than 8,192 bits; or a field before `data` has the wrong type.
    """

    kind: str = attrs.field(validator=_check_text)  # for example "worker.exited"
    run: str = attrs.field(validator=_check_text)  # id of the job
    node: str = attrs.field(validator=_check_text)  # id of the node
    generation: int = attrs.field(validator=_check_integer)  # 0 before the first generation
    # seconds since 1970 by the node's clock, for people
    timestamp: float = attrs.field(validator=_check_time)
    # seconds by the node's monotonic clock, for differences between its events
    monotonic: float = attrs.field(validator=_check_time)
    rank: int | None = attrs.field(  # global rank, if the event is about one worker
        default=None, validator=attrs.validators.optional(_check_integer)
    )
    # JSON values, by the names in `KINDS` or by other names
    data: Mapping[str, Any] = attrs.field(factory=dict, converter=_plain_data)

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
        limit = MAX_EVENT_BYTES
        while True:
            data = truncate(self.data, limit)
            line = json.dumps({**head, "data": data}, separators=(",", ":"))
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
        kind, step = self.kind, self.count("step")
        text = self.text(_TEXT_FACTS.get(kind, ""))
        if kind in ("checkpoint.saved", "snapshot.taken") and step is not None:
            text = f"step {step}"
        elif kind == "state.restored":
            text = f"step {step} from {self.text('source') or 'an unknown source'}"
        elif kind == "control.requested":
            text = f"{self.text('action') or 'something unknown'} by {self.text('by')}"
        elif kind == "events.dropped":
            text = f"{self.count('count') or 0} events could not be written"
        elif kind not in _TEXT_FACTS or (kind == "worker.exited" and self.is_expected_exit):
            return None
        at, traceback = self.monotonic, self.text("traceback")
        return TimelineEvent(at, kind, self.node, text, self.rank, step, traceback)

    @property
    def is_expected_exit(self) -> bool:
        """True if a worker succeeded or was told to stop (`worker.exited`)."""
        return self.is_true("succeeded") or self.is_true("stopped")

    def number(self, name: str) -> float | None:
        """Return the value of `name` in `data` if it is a finite number, else None."""
        return _as_number(self.data.get(name))

    def value(self, name: str) -> float | None:
        """Return the value of `name` if it is a number, infinite and NaN included, else None."""
        return _as_value(self.data.get(name))

    def seconds(self, name: str) -> float | None:
        """Return the value of `name` if it is a number that is not negative, else None."""
        number = self.number(name)
        return None if number is None or number < 0 else number

    def count(self, name: str) -> int | None:
        """Return the value of `name` if it is an integer that is not negative, else None."""
        return _as_count(self.data.get(name))

    def text(self, name: str) -> str:
        """Return the value of `name` if it is a text, else an empty text."""
        value = self.data.get(name)
        return value if isinstance(value, str) else ""

    def texts(self, name: str) -> dict[str, str]:
        """Return the value of `name` if it is an object, with its values as texts, else {}."""
        value = self.data.get(name)
        if not isinstance(value, Mapping):
            return {}
        return {str(key): str(item) for key, item in value.items()}

    def seconds_by_name(self, name: str) -> dict[str, float]:
        """Return the numbers that are not negative in the object `name`, else {}."""
        value = self.data.get(name)
        items = value.items() if isinstance(value, Mapping) else ()
        known = ((str(key), _as_number(item)) for key, item in items)
        return {key: number for key, number in known if number is not None and number >= 0}

    def pair(self, name: str) -> tuple[int, int] | None:
        """Return the value of `name` if it is two integers that are not negative, else None."""
        value = self.data.get(name)
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            return None
        first, last = map(_as_count, value)
        return None if first is None or last is None else (first, last)

    def is_true(self, name: str) -> bool:
        """Return True if the value of `name` is the boolean true, and not 1 or the text "true"."""
        return self.data.get(name) is True


def _as_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -MAX_NUMBER < value < MAX_NUMBER else None


def _as_value(value: object) -> float | None:
    if isinstance(value, float) or value in ("nan", "inf", "-inf"):
        return float(value)
    return _as_number(value)


def _as_count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_NUMBER:
        return None
    return value


def encode(event: Event) -> bytes:
    """Return an event as a line of `events.jsonl`."""
    return event.to_json().encode() + b"\n"


def truncate(value: Any, limit: int) -> Any:
    """Return a JSON value with texts of `limit` characters and about `limit` items at most.

    Infinite numbers and NaN become text.
    """
    if isinstance(value, str):
        return _cut(value, limit)
    if isinstance(value, Mapping):
        return {str(key): truncate(item, limit) for key, item in list(value.items())[: limit + 1]}
    if isinstance(value, list | tuple):
        return [truncate(item, limit) for item in value[: limit + 1]]
    return _finite_or_text(value) if isinstance(value, float) else value


def _finite_or_text(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no infinite numbers and NaN


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def decode(line: bytes | str) -> Event:
    """Return the event of one line.

    Raises:
        ValueError: the line is no event, or one of another version.
    """
    fields = read_versioned_object(line, "an event", VERSION)
    names = ("kind", "run", "node", "generation", "timestamp", "monotonic", "rank")
    head: dict[str, Any] = {name: fields.get(name) for name in names}
    for name in ("timestamp", "monotonic"):
        if isinstance(head[name], int) and not isinstance(head[name], bool):
            head[name] = _as_float(name, head[name])
    data = fields.get("data")
    if not isinstance(data, dict):
        raise ValueError(f"data of an event must be an object, got {data!r:.60}")
    return Event(**head, data=data)


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
