"""Status that each node publishes in the store of its job, next to its lease.

A node writes its status when its state changes, and from time to time while its workers complete
steps. What is read here was written by other machines: it is checked strictly, and bounded in size.
"""

from __future__ import annotations

import json
import logging
import typing
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import attrs

from ..clock import Clock, monotonic, wall
from ..errors import StoreConnectionError, StoreTimeoutError, format_error
from ..rendezvous.store_layout import StoreKeys
from ..stores.interface import Store
from ..threads import BackgroundQueue
from .aggregate import NodeStatus, WorkerStatus
from .event import read_versioned_object, truncate
from .event_kinds import MAX_NUMBER
from .history import JobState

log = logging.getLogger("elasticlib.observe")

VERSION = 2
MAX_STATUS_BYTES = 512 * 1024
MAX_TEXT_LENGTH = 2048
MAX_WORKERS = 2048

STATUS_TTL_S = 60.0  # longer than a lease, so that writing it costs little
REFRESH_INTERVAL_S = 20.0  # between writes of an unchanged status
STEPS_INTERVAL_S = 2.0  # between writes while workers complete steps, in a small job
STEPS_INTERVAL_PER_NODE_S = 0.01  # in a large one: all nodes together write 100 times a second
STATE_INTERVAL_S = 0.2  # between writes while the state changes
RETRY_INTERVAL_S = 2.0
CLOSE_TIMEOUT_S = 2.0  # limit for the last write; a store that answers needs milliseconds


@attrs.frozen
class NodeReport:
    """The status of a node with durations that only its own clock can measure."""

    status: NodeStatus
    state_seconds: float  # in its state
    uptime_seconds: float  # since its agent started
    store_contact_age_seconds: float | None = None  # None if it is not known
    loop_blocked_seconds: float = 0.0  # since the agent's event loop last ran
    age_seconds: float | None = None  # since it was written; None if not read from a store

    @property
    def current_state_seconds(self) -> float:
        """Seconds in the state, up to when this report was made or read from the store."""
        return round(self.state_seconds + (self.age_seconds or 0.0), 3)

    @property
    def current_uptime_seconds(self) -> float:
        """Seconds since the start of the agent, at the time when this report was made or read."""
        return round(self.uptime_seconds + (self.age_seconds or 0.0), 3)

    @classmethod
    def at(cls, now: float, status: NodeStatus, **durations: float | None) -> NodeReport:
        """Return the report of a status at the time `now`, by the clock of the status."""
        durations = {
            "store_contact_age_seconds": None,
            "loop_blocked_seconds": 0.0,
            **durations,
            "state_seconds": now - status.state_since,
            "uptime_seconds": now - status.started_at,
        }
        rounded = {
            name: None if value is None else round(max(0.0, value), 3)
            for name, value in durations.items()
        }
        return cls(status, **rounded)  # type: ignore[arg-type]


_LOCAL_TIMES = ("state_since", "started_at")  # meaningless by another clock
_DURATIONS = (
    *("state_seconds", "uptime_seconds", "store_contact_age_seconds", "loop_blocked_seconds"),
)


def encode(report: NodeReport, written_at: float) -> bytes:
    """Return a report as JSON; long texts and lists of workers are truncated.

    Args:
        report: the report.
        written_at: the current time, in seconds since 1970.
    """
    fields = attrs.asdict(report.status, recurse=False)
    for name in _LOCAL_TIMES:
        del fields[name]
    fields["state"] = report.status.state.value
    fields["workers"] = [attrs.asdict(worker) for worker in report.status.workers[:MAX_WORKERS]]
    durations = {name: getattr(report, name) for name in _DURATIONS}
    document = {"version": VERSION, "written_at": written_at, **durations, **fields}
    return json.dumps(truncate(document, MAX_TEXT_LENGTH), separators=(",", ":")).encode()


def decode(data: bytes, age_of: Callable[[float], float]) -> NodeReport:
    """Read a report from bytes.

    Args:
        data: what `encode` returned.
        age_of: converts the time of writing, by the writer's clock, into the age in seconds.

    Raises:
        ValueError: the data is not a valid report; the error names the problem.
    """
    if len(data) > MAX_STATUS_BYTES:
        raise ValueError(f"a status must have at most {MAX_STATUS_BYTES} bytes, got {len(data)}")
    fields = read_versioned_object(data, "a status", VERSION)
    state, workers = fields.get("state"), fields.get("workers")
    if state not in [known.value for known in JobState]:
        raise ValueError(f"unknown state {state!r:.60}")
    if not isinstance(workers, list) or not all(isinstance(item, dict) for item in workers):
        raise ValueError(f"workers of a status must be a list of objects, got {workers!r:.60}")
    status = NodeStatus(
        **_read_fields(NodeStatus, fields, without=("state", "workers", *_LOCAL_TIMES)),
        state=JobState(state),
        workers=tuple(WorkerStatus(**_read_fields(WorkerStatus, item)) for item in workers),
    )
    durations = _read_fields(NodeReport, fields, without=("status", "age_seconds"))
    written_at = read_field("written_at", fields.get("written_at"), (float,))
    age = round(max(0.0, age_of(written_at)), 3)
    return NodeReport(status, **durations, age_seconds=age)


def _read_fields(
    kind: type, fields: Mapping[str, Any], without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the values of the fields of the class `kind`, after checking their types."""
    values = {}
    for name, hint in _type_hints(kind).items():
        if name in without:
            continue
        if name not in fields:
            raise ValueError(f"the field {name} is missing")
        values[name] = read_field(name, fields[name], typing.get_args(hint) or (hint,))
    return values


_type_hints = cache(typing.get_type_hints)


def read_field(name: str, value: Any, types: tuple[type, ...]) -> Any:
    """Return the value of a field if it has one of the types.

    An int is also accepted for a float, and a bool is no number.

    Raises:
        ValueError: the value has another type, or is too large.
    """
    has_type = type(value) in types or (type(value) is int and float in types)
    is_number = type(value) in (int, float)
    if not has_type or (is_number and not -MAX_NUMBER < value < MAX_NUMBER):
        raise ValueError(f"invalid value of the field {name}: {value!r:.60}")
    return value


# -- in the store ----------------------------------------------------------------------------------


def observer_prefix(run_id: str, name: str) -> str:
    """Return the prefix of the keys of an observer, which is not below the prefix of the job.

    The leader reads all keys of the job at each change, so observers use other keys. The id of a
    job never starts with the character used here.
    """
    return f"?{StoreKeys(run_id).job_prefix}{name}/"


class StatusReader:
    """Reads the status of all nodes of a job, once or repeatedly.

    The age of a status depends on the wall clocks of two machines at the first reading. Once a node
    has written again, the difference of the clocks is known, and only this machine's clock counts.
    """

    def __init__(self, store: Store, run_id: str, *, clock: Clock = wall) -> None:
        self._store = store
        self._clock = clock
        self._prefix = observer_prefix(run_id, "status")
        self._written_at: dict[str, float] = {}  # last time seen, by node
        self._clock_differences: dict[str, float] = {}  # upper bounds, by node

    def read(self) -> dict[str, NodeReport]:
        """Return the valid reports by node id.

        Raises:
            StoreError: the store cannot be read.
        """
        reports = {}
        for entry in self._store.list(self._prefix).entries:
            node = entry.key.removeprefix(self._prefix)
            try:
                reports[node] = decode(entry.value, partial(self._estimate_age, node))
            except ValueError as error:
                log.warning("ignoring the invalid status of node %s: %s", node, error)
        return reports

    def _estimate_age(self, node: str, written_at: float) -> float:
        age = self._clock() - written_at
        if self._written_at.setdefault(node, written_at) != written_at:
            # It was written since the last reading, so its age is mostly a clock difference.
            self._written_at[node] = written_at
            self._clock_differences[node] = min(age, self._clock_differences.get(node, age))
        return age - self._clock_differences.get(node, 0.0)


class FailureLog:
    """Logs the failures of something that never affects the job, the first one as a warning.

    An unreachable store is logged at DEBUG only, because the agent reports it.

    Args:
        consequence: what does not work, as a part of the log message.
        retry_interval: seconds until the next try, for the log message.
    """

    def __init__(self, consequence: str, retry_interval: float) -> None:
        self._consequence = consequence
        self._retry_interval = retry_interval
        self._has_warned = False

    def log(self, error: Exception) -> None:
        """Log a failure."""
        level = logging.DEBUG
        if not self._has_warned and not isinstance(error, StoreConnectionError | StoreTimeoutError):
            self._has_warned, level = True, logging.WARNING
        message = "%s: %s; retrying every %g s"
        log.log(level, message, self._consequence, format_error(error), self._retry_interval)


class StatusPublisher:
    """Keeps the status of one node in the store, until the client of the store is closed.

    It has no thread: `poll` is called by a thread that may wait for the store.

    Args:
        store: the store of the job.
        run_id: id of the job.
        node_id: id of the node.
        read_report: returns the current report.
        clock: monotonic clock.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node_id: str,
        read_report: Callable[[], NodeReport],
        *,
        clock: Clock = monotonic,
    ) -> None:
        self._store = store
        self._key = f"{observer_prefix(run_id, 'status')}{node_id}"
        self._read_report = read_report
        self._clock = clock
        self._failures = FailureLog("elasticlib status cannot show this node", RETRY_INTERVAL_S)
        self._written_at = float("-inf")
        self._last: NodeStatus | None = None  # last status written, None after a failure
        self._queue = BackgroundQueue("status-publisher", lambda _: None)  # for the last status

    def poll(self, *, is_last: bool = False) -> float:
        """Write the status if a write is due, or if `is_last` is true. Failures are only logged.

        Returns:
            Seconds until the next poll.
        """
        try:
            return self._poll(is_last)
        except Exception as error:
            self._failures.log(error)
            return RETRY_INTERVAL_S

    def publish_last(self) -> None:
        """Write the status in a thread of its own, and return. `poll` is not called any more."""
        self._queue.call(partial(self.poll, is_last=True))

    def close(self) -> None:
        """Wait for the last status to be written, up to CLOSE_TIMEOUT_S.

        Otherwise the process could end in the middle of a write, and leave a lease in an etcd.
        """
        self._queue.close(CLOSE_TIMEOUT_S)

    def _poll(self, is_last: bool) -> float:
        report, now = self._read_report(), self._clock()
        status = _without_heartbeats(report.status)
        steps_interval = max(STEPS_INTERVAL_S, STEPS_INTERVAL_PER_NODE_S * status.node_count)
        due_at = self._written_at + _write_interval(self._last, status, steps_interval)
        if now < due_at and not is_last:
            return min(due_at - now, steps_interval)
        self._last = None
        self._store.set(self._key, encode(report, wall()), ttl=STATUS_TTL_S)
        self._written_at, self._last = now, status
        return steps_interval


def _write_interval(last: NodeStatus | None, status: NodeStatus, steps_interval: float) -> float:
    if last is None or (last.state, last.generation) != (status.state, status.generation):
        return STATE_INTERVAL_S
    return REFRESH_INTERVAL_S if status == last else steps_interval


def _without_heartbeats(status: NodeStatus) -> NodeStatus:
    workers = (attrs.evolve(worker, seconds_since_heartbeat=None) for worker in status.workers)
    return attrs.evolve(status, workers=tuple(workers))
