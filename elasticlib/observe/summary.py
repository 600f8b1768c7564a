"""What each node publishes of its status in the store of its job: a summary, and details.

A summary is short, so that those of 10,000 nodes fit into one listing. The details of a node are
read only if they are shown. What is read here was written by other machines: it is checked
strictly, and bounded in size.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from ..clock import Clock, wall
from ..codec import from_json, to_json
from ..rendezvous.store_layout import StoreKeys
from ..stores.interface import Entry, Store
from .aggregate import NodeStatus, WorkerStatus
from .event import read_versioned_object, truncate
from .event_kinds import MAX_NUMBER
from .history import JobState

log = logging.getLogger("elasticlib.observe")

VERSION = 3
MAX_SUMMARY_BYTES = 512
MAX_DETAIL_BYTES = 512 * 1024
MAX_REASON_BYTES = 200  # of a summary; the details have the whole reason
MAX_TEXT_LENGTH = 2048
MAX_WORKERS = 2048


@attrs.frozen
class NodeSummary:
    """The status of a node in a few plain values. None where a value is not known."""

    state: JobState
    generation: int = 0
    pid: int = 0  # of the agent
    reason: str = ""  # of the state; cut in the store
    state_s: float = 0.0  # seconds in the state
    uptime_s: float = 0.0  # seconds since the agent started
    contact_s: float | None = None  # seconds since the last contact with the store
    blocked_s: float = 0.0  # seconds since the agent's event loop last ran
    num_workers: int = 0
    first_rank: int | None = None  # of its workers, whose ranks follow each other
    step: int | None = None  # of the slowest worker
    last_step: int | None = None  # of the fastest worker
    rate: float | None = None  # steps per second of the slowest worker
    best_rate: float | None = None  # and of the fastest one
    silence_s: float | None = None  # seconds since the oldest last heartbeat of a worker
    checkpoint_step: int | None = None
    snapshot_step: int | None = None
    written_at: float = 0.0  # wall clock of the node, in seconds since 1970


@attrs.frozen
class NodeDetail:
    """What a summary leaves out. It belongs to the summary of the same generation."""

    generation: int
    reason: str = ""
    workers: tuple[WorkerStatus, ...] = ()


@attrs.frozen
class NodeReport:
    """The status of a node with durations that only its own clock can measure."""

    status: NodeStatus
    state_seconds: float  # in its state
    uptime_seconds: float  # since its agent started
    store_contact_age_seconds: float | None = None  # None if it is not known
    loop_blocked_seconds: float = 0.0  # since the agent's event loop last ran

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


def summarize(report: NodeReport, written_at: float = 0.0) -> NodeSummary:
    """Return the summary of a report.

    Args:
        report: the report.
        written_at: the current time, in seconds since 1970.
    """
    status, workers = report.status, report.status.workers
    steps = _known((worker.step for worker in workers), status.step)
    rates = _known((worker.steps_per_second for worker in workers), status.steps_per_second)
    saved = _known((status.checkpoint_step, *(worker.checkpoint_step for worker in workers)), None)
    silences = _known((worker.seconds_since_heartbeat for worker in workers), None)
    return NodeSummary(
        state=status.state,
        generation=status.generation,
        pid=status.pid,
        reason=status.reason,
        state_s=report.state_seconds,
        uptime_s=report.uptime_seconds,
        contact_s=report.store_contact_age_seconds,
        blocked_s=report.loop_blocked_seconds,
        num_workers=len(workers),
        first_rank=min((worker.rank for worker in workers), default=None),
        step=min(steps, default=None),
        last_step=max(steps, default=None),
        rate=min(rates, default=None),
        best_rate=max(rates, default=None),
        silence_s=max(silences, default=None),
        checkpoint_step=max(saved, default=None),
        snapshot_step=status.snapshot_step,
        written_at=written_at,
    )


def _known(values: Iterable[Any], otherwise: Any) -> list[Any]:
    found = [value for value in values if value is not None]
    return found or ([] if otherwise is None else [otherwise])


def detail_of(status: NodeStatus) -> NodeDetail:
    """Return the details of a status."""
    return NodeDetail(status.generation, status.reason, status.workers)


# -- encoding --------------------------------------------------------------------------------------


def encode_summary(summary: NodeSummary) -> bytes:
    """Return a summary as JSON of up to MAX_SUMMARY_BYTES; the reason is cut."""
    fields = {"version": VERSION, **to_json(summary)}
    for name, value in fields.items():
        if type(value) is float:
            fields[name] = round(value, 2)
    reason = summary.reason.encode(errors="backslashreplace")[:MAX_REASON_BYTES]
    while True:
        fields["reason"] = reason.decode(errors="ignore")
        data = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        if len(data) <= MAX_SUMMARY_BYTES or not reason:
            return data
        reason = reason[: -max(1, len(data) - MAX_SUMMARY_BYTES)]


def decode_summary(data: bytes) -> NodeSummary:
    """Read a summary from bytes.

    Raises:
        ValueError: the data is not a valid summary; the error names the problem.
    """
    if len(data) > MAX_SUMMARY_BYTES:
        raise ValueError(f"a status must have at most {MAX_SUMMARY_BYTES} bytes, got {len(data)}")
    fields = read_versioned_object(data, "a status", VERSION)
    values = []
    for name, types in _SUMMARY_TYPES:
        value = fields.get(name, fields)
        kind = type(value)
        if kind not in types or (kind in _NUMBERS and not -MAX_NUMBER < value < MAX_NUMBER):
            raise ValueError(f"invalid value of the field {name} of a status: {value!r:.60}")
        values.append(value)
    state, *others = values
    if state not in _STATES:
        raise ValueError(f"unknown state {state!r:.60}")
    return NodeSummary(_STATES[state], *others)


_NUMBERS = (int, float)
_STATES = {state.value: state for state in JobState}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "JobState": (str,),
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
}
# A loop over this is three times as fast as the codec, which counts for 10,000 summaries.
_SUMMARY_TYPES = tuple((field.name, _TYPES[str(field.type)]) for field in attrs.fields(NodeSummary))


def encode_detail(detail: NodeDetail) -> bytes:
    """Return details as JSON; long texts and lists of workers are truncated."""
    cut = attrs.evolve(detail, workers=detail.workers[:MAX_WORKERS])
    document = {"version": VERSION, **to_json(cut)}
    return json.dumps(truncate(document, MAX_TEXT_LENGTH), separators=(",", ":")).encode()


def decode_detail(data: bytes) -> NodeDetail:
    """Read details from bytes.

    Raises:
        ValueError: the data is no valid details; the error names the problem.
    """
    if len(data) > MAX_DETAIL_BYTES:
        raise ValueError(f"details must have at most {MAX_DETAIL_BYTES} bytes, got {len(data)}")
    fields = read_versioned_object(data, "details", VERSION)
    del fields["version"]
    detail = from_json(NodeDetail, fields)
    for worker in detail.workers:
        for value in attrs.astuple(worker):
            if type(value) in _NUMBERS and not abs(value) < MAX_NUMBER:
                raise ValueError(f"a worker has an impossible number: {value!r:.60}")
    return detail


# -- in the store ----------------------------------------------------------------------------------


class StatusKeys:
    """The keys of the summaries and the details of a job's nodes."""

    def __init__(self, run_id: str) -> None:
        self.summaries = f"{StoreKeys(run_id).observers}status/"
        self.details = f"{StoreKeys(run_id).observers}detail/"


@attrs.frozen
class AgedSummary:
    """A summary that was read from a store."""

    summary: NodeSummary
    age_s: float  # since it was written


class StatusReader:
    """Reads the status of the nodes of a job, once or repeatedly.

    The age of a summary depends on the wall clocks of two machines at the first reading. Once a
    node has written again, the difference of the clocks is known, and only this machine's clock
    counts.
    """

    def __init__(self, store: Store, run_id: str, *, clock: Clock = wall) -> None:
        self._store = store
        self._clock = clock
        self._keys = StatusKeys(run_id)
        self._written_at: dict[str, float] = {}  # last time seen, by node
        self._clock_differences: dict[str, float] = {}  # upper bounds, by node

    def read(self) -> dict[str, AgedSummary]:
        """Return the valid summaries by node id.

        Raises:
            StoreError: the store cannot be read.
        """
        found, prefix = {}, self._keys.summaries
        for entry in self._store.list(prefix).entries:
            node = entry.key.removeprefix(prefix)
            summary = _decoded(entry, decode_summary)
            if summary is not None:
                found[node] = AgedSummary(summary, self._estimate_age(node, summary.written_at))
        return found

    def read_details(self, nodes: Iterable[str]) -> dict[str, NodeDetail]:
        """Return the details of these nodes, as far as the store has valid ones.

        Raises:
            StoreError: the store cannot be read.
        """
        found = {}
        for node in nodes:  # one at a time, because all together can exceed a response
            entry = self._store.get(f"{self._keys.details}{node}")
            detail = None if entry is None else _decoded(entry, decode_detail)
            if detail is not None:
                found[node] = detail
        return found

    def _estimate_age(self, node: str, written_at: float) -> float:
        age = self._clock() - written_at
        if self._written_at.setdefault(node, written_at) != written_at:
            # It was written since the last reading, so its age is mostly a clock difference.
            self._written_at[node] = written_at
            self._clock_differences[node] = min(age, self._clock_differences.get(node, age))
        return round(max(0.0, age - self._clock_differences.get(node, 0.0)), 3)


def _decoded(entry: Entry, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(entry.value)
    except ValueError as error:
        log.warning("ignoring the invalid status of a node at %s: %s", entry.key, error)
        return None


STATUS_TTL_S = 60.0  # longer than a lease, so that writing it costs little
REFRESH_INTERVAL_S = 20.0  # between writes of an unchanged status: a third of the ttl
STEPS_INTERVAL_S = 2.0  # between writes while workers complete steps, in a small job
STEPS_INTERVAL_PER_NODE_S = 0.01  # in a large one: its nodes together write 100 times a second
STATE_INTERVAL_S = 0.2  # between writes while the state changes


def steps_interval(node_count: int) -> float:
    """Return the seconds between writes of a status while workers complete steps.

    It is at most a third of the ttl, so that no status ends while its node writes.
    """
    interval = max(STEPS_INTERVAL_S, STEPS_INTERVAL_PER_NODE_S * node_count)
    return min(interval, REFRESH_INTERVAL_S)


class StatusWriter:
    """Keeps the status of one node in the store, until the client of the store is closed.

    One thread, which may wait for the store, calls the methods.

    Args:
        store: the store of the job.
        run_id: id of the job.
        node_id: id of the node.
        read_report: returns the current report.
    """

    def __init__(
        self, store: Store, run_id: str, node_id: str, read_report: Callable[[], NodeReport]
    ) -> None:
        keys = StatusKeys(run_id)
        self._store = store
        self._summary_key = f"{keys.summaries}{node_id}"
        self._detail_key = f"{keys.details}{node_id}"
        self._read_report = read_report
        self._written_at = float("-inf")
        self._last: NodeStatus | None = None  # last status written, None after a failure

    def write(self, now: float, *, is_last: bool = False) -> float:
        """Write the status if that is due, or if `is_last` is true.

        Args:
            now: the time of a monotonic clock.
            is_last: this is the last call.

        Returns:
            When the next call is due.

        Raises:
            StoreError: the store cannot be written.
        """
        report = self._read_report()
        status = _without_heartbeats(report.status)
        interval = steps_interval(status.node_count)
        due_at = self._written_at + _write_interval(self._last, status, interval)
        if now < due_at and not is_last:
            return min(due_at, now + interval)
        self._last = None
        detail = encode_detail(detail_of(report.status))
        # A reader that has the summary finds details of the same generation.
        self._store.set(self._detail_key, detail, ttl=STATUS_TTL_S)
        summary = encode_summary(summarize(report, wall()))
        self._store.set(self._summary_key, summary, ttl=STATUS_TTL_S)
        self._written_at, self._last = now, status
        return now + interval


def _write_interval(last: NodeStatus | None, status: NodeStatus, interval: float) -> float:
    if last is None or (last.state, last.generation) != (status.state, status.generation):
        return STATE_INTERVAL_S
    return REFRESH_INTERVAL_S if status == last else interval


def _without_heartbeats(status: NodeStatus) -> NodeStatus:
    workers = (attrs.evolve(worker, seconds_since_heartbeat=None) for worker in status.workers)
    return attrs.evolve(status, workers=tuple(workers))
