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

VERSION = 2
MAX_EVENT_BYTES = 64 * 1024  # longer texts in an event are truncated
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
    "events.dropped": {"count": "events that could not be written: disk full or too slow"},
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


@attrs.frozen
class Event:
    """An event of one node: a line of `events.jsonl`, and the argument of an `on_event` function.

    A file may have been written by anyone. The methods therefore read the data by type: a value
    that is missing or of another type is unknown.
    """

    kind: str  # a key of `KINDS`, for example "worker.exited"
    run: str  # id of the job
    node: str  # id of the node
    generation: int  # 0 before the first generation
    timestamp: float  # seconds since 1970 by the node's clock, for people
    monotonic: float  # seconds by the node's monotonic clock, for differences between its events
    rank: int | None = None  # global rank, if the event is about one worker
    data: Mapping[str, Any] = attrs.field(factory=dict)  # JSON values, by the names in `KINDS`

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
    """Return an event as a line of JSON; long texts are cut to keep it below MAX_EVENT_BYTES."""
    head = {
        "version": VERSION,
        "kind": event.kind,
        "run": event.run,
        "node": event.node,
        "generation": event.generation,
        "timestamp": round(event.timestamp, 6),
        "monotonic": round(event.monotonic, 6),
    }
    if event.rank is not None:
        head["rank"] = event.rank
    limit = MAX_EVENT_BYTES
    while True:
        data = {name: truncate(value, limit) for name, value in event.data.items()}
        line = json.dumps({**head, **data}, separators=(",", ":"), default=str).encode() + b"\n"
        if len(line) <= MAX_EVENT_BYTES or limit == 0:
            return line
        limit //= 4


def truncate(value: Any, limit: int) -> Any:
    """Return a JSON value with texts of `limit` characters and about `limit` items at most.

    Infinite numbers and NaN become text.
    """
    if isinstance(value, str) and len(value) > limit:
        return value[:limit] + "..."
    if isinstance(value, Mapping):
        return {str(key): truncate(item, limit) for key, item in list(value.items())[: limit + 1]}
    if isinstance(value, (list, tuple)):
        return [truncate(item, limit) for item in value[: limit + 1]]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON cannot express it as a number
    return value


def decode(line: bytes | str) -> Event:
    """Return the event of one line.

    Raises:
        ValueError: the line is no event, or one of another version.
    """
    fields = read_versioned_object(line, "an event", VERSION)
    types = {"kind": str, "run": str, "node": str, "generation": int}
    types |= {"timestamp": float, "monotonic": float}
    common: dict[str, Any] = {}
    for name, wanted in types.items():
        value = fields.get(name)
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = _as_float(name, value)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{name} of an event must be a {wanted.__name__}, got {value!r}")
        common[name] = value
    rank = fields.get("rank")
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
        raise ValueError(f"rank of an event must be an integer, got {rank!r}")
    data = {name: value for name, value in fields.items() if name not in COMMON_KEYS}
    return Event(**common, rank=rank, data=data)


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
