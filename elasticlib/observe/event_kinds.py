"""The kinds of events: one class each, whose fields are the data of the event. Pure.

A file of events may have been written by anyone, or by another version of elasticlib. A value that
is missing or of another type is therefore unknown: the field is then None, an empty text or False.
Values without a field are skipped. `OtherEvent` holds the data of a kind that this version does not
know, or of an event of your own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import attrs

from .formatting import (
    UNKNOWN,
    format_count,
    format_duration,
    format_number,
    format_ranges,
    plural,
)

MAX_EVENT_BYTES = 64 * 1024  # longer texts in an event are truncated
MAX_VALUES = MAX_EVENT_BYTES // 2  # in one value of an event; a line has no room for more
MAX_DEPTH = 8  # of lists and objects within each other
MAX_INTEGER_BITS = 8192  # Python converts integers of up to 4,300 digits to text
MAX_NAME_CHARS = 128  # names in the data of an event are cut
MAX_NUMBER = 2**62  # no plausible step, time or generation is larger

Kind = TypeVar("Kind", bound="type[EventBody]")


@attrs.frozen
class EventBody:
    """The base of all kinds: it contains what happened, without the time and the node."""

    kind_name: ClassVar[str] = ""

    @property
    def kind(self) -> str:
        """The kind, for example "worker.exited"."""
        return self.kind_name

    @property
    def data(self) -> Mapping[str, Any]:
        """The values by name."""
        return {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}

    @property
    def timeline_text(self) -> str | None:
        """The text on the timeline of a report; None if the report omits the event."""
        return None

    @property
    def text(self) -> str:
        """The text that `elasticlib events` shows."""
        if self.timeline_text is not None:
            return self.timeline_text
        return ", ".join(f"{name}: {value}" for name, value in self.data.items())


KINDS: dict[str, type[EventBody]] = {}
"""The class of each kind that this version knows."""


def _kind(name: str) -> Callable[[Kind], Kind]:
    """Make a class the one of a kind."""

    def register(cls: Kind) -> Kind:
        cls.kind_name = name
        KINDS[name] = cls
        return cls

    return register


# -- JSON values -----------------------------------------------------------------------------------


def check_bits(value: int) -> None:
    """Raise an error if an integer is too long for a line."""
    if value.bit_length() > MAX_INTEGER_BITS:
        raise ValueError(
            f"integers of an event must have at most {MAX_INTEGER_BITS} bits, got one of "
            f"{value.bit_length()}"
        )


class _PlainCopier:
    """Copies one value of an event into JSON values, of which there are at most `MAX_VALUES`.

    The limit holds for lists that share items as well, and so bounds the time of a copy.
    """

    def __init__(self) -> None:
        self._num_left = MAX_VALUES

    def copy(self, value: object, depth: int = 0) -> Any:
        self._num_left -= 1
        try:
            return self._copy(value, depth)
        except Exception:  # `str` of a value, for example, may raise anything
            return f"<{type(value).__name__}>"

    def _copy(self, value: object, depth: int) -> Any:
        if depth > MAX_DEPTH and isinstance(value, (Mapping, list, tuple)):
            raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
        if isinstance(value, Mapping):
            items = ((str(name)[:MAX_NAME_CHARS], item) for name, item in value.items())
            return {name: self.copy(item, depth + 1) for name, item in items if self._num_left > 0}
        if isinstance(value, list | tuple):
            return [self.copy(item, depth + 1) for item in value if self._num_left > 0]
        if isinstance(value, int):
            check_bits(value)
        elif isinstance(value, float):
            return finite_or_text(value)
        elif value is not None:
            return cut(str(value), MAX_EVENT_BYTES)
        return value


def plain_data(data: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of the data of an event that consists of JSON values.

    A value that has no JSON form is replaced by the name of its type: its `str` raises, it is
    nested more than 8 deep, or it is an integer of more than 8,192 bits.
    """
    copies = ((_PlainCopier().copy(name), value) for name, value in data.items())
    return {str(name)[:MAX_NAME_CHARS]: _PlainCopier().copy(value) for name, value in copies}


def finite_or_text(value: float) -> float | str:
    """Return the number, or its text: JSON has no infinite numbers and NaN."""
    return value if math.isfinite(value) else str(value)


def cut(text: str, limit: int) -> str:
    """Return a text, shortened to a limit."""
    return text if len(text) <= limit else f"{text[:limit]}..."


# -- reading values of unknown types ---------------------------------------------------------------


def _as_number(value: object) -> float | None:
    """Return a finite number of plausible size, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -MAX_NUMBER < value < MAX_NUMBER else None


def _as_seconds(value: object) -> float | None:
    number = _as_number(value)
    return None if number is None or number < 0 else number


def _as_loss(value: object) -> float | None:
    if isinstance(value, float) or value in ("nan", "inf", "-inf"):
        return float(value)
    return _as_number(value)


def _as_count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_NUMBER:
        return None
    return value


def _as_integer(value: object) -> int | None:
    return int(value) if isinstance(value, int) and _as_number(value) is not None else None


def _as_text(value: object) -> str:
    return cut(value, MAX_EVENT_BYTES) if isinstance(value, str) else ""


def _as_texts(value: object) -> dict[str, str]:
    items = plain_data(value).items() if isinstance(value, Mapping) else ()
    return {name: str(item) for name, item in items}


def _as_seconds_by_name(value: object) -> dict[str, float]:
    items = value.items() if isinstance(value, Mapping) else ()
    known = ((str(name), _as_seconds(item)) for name, item in items)
    return {name: seconds for name, seconds in known if seconds is not None}


def _as_pair(value: object) -> tuple[int, int] | None:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    first, last = map(_as_count, value)
    return None if first is None or last is None else (first, last)


def _as_object(value: object) -> Mapping[str, Any] | None:
    return plain_data(value) if isinstance(value, Mapping) else None


def _field(read: Callable[[object], object]) -> Any:
    """Return a field whose values are converted by this function, which accepts anything."""
    return attrs.field(default=None, converter=read)


def _count() -> Any:
    return _field(_as_count)


def _seconds() -> Any:
    return _field(_as_seconds)


def _text() -> Any:
    return _field(_as_text)


def _flag() -> Any:
    return _field(lambda value: value is True)


# -- the kinds -------------------------------------------------------------------------------------


@_kind("run.started")
@attrs.frozen(kw_only=True)
class RunStarted(EventBody):
    """An agent has started."""

    host: str = _text()  #: name of the node
    pid: int | None = _count()  #: process id of the agent
    slots: int | None = _count()  #: number of workers on this node
    #: settings that were given, as text by name
    settings: Mapping[str, str] = _field(_as_texts)
    #: where this node serves the store of the job, empty if it does not
    endpoint: str = _text()
    log_dir: str = _text()  #: directory of the workers' logs, empty if they are not kept
    #: time without a lease renewal after which other nodes consider this node lost
    lease_ttl_seconds: float | None = _seconds()
    #: versions of elasticlib, torch and Python, by name
    versions: Mapping[str, str] = _field(_as_texts)
    command: str = _text()  #: command line of the agent, as text

    @property
    def text(self) -> str:
        workers = f"{plural(self.slots or 0, 'worker')} on {self.host}"
        return workers + (f": {self.command}" if self.command else "")


@_kind("rendezvous.started")
@attrs.frozen(kw_only=True)
class RendezvousStarted(EventBody):
    """The node waits for a generation."""

    reason: str = _text()  #: why the previous generation ended, or that the node is new
    #: true if nodes join or leave on purpose and nothing has failed or was lost
    is_planned: bool = _flag()

    @property
    def text(self) -> str:
        return self.reason


@_kind("generation.started")
@attrs.frozen(kw_only=True)
class GenerationStarted(EventBody):
    """The workers of a generation are started on this node."""

    #: time since the last worker exited, or since the start of the run
    duration_seconds: float | None = _seconds()
    #: part of this time until the node had imported torch and other modules that workers need; 0
    #: after its first rendezvous
    import_seconds: float | None = _seconds()
    #: how often this agent had started its workers before, as in attempt_N
    attempt: int | None = _count()
    node_rank: int | None = _count()  #: rank of this node
    node_count: int | None = _count()  #: number of nodes
    #: first and last global rank of this node's workers
    ranks: tuple[int, int] | None = _field(_as_pair)
    world_size: int | None = _count()  #: number of workers in the job
    #: first role rank of this node's workers, and number of workers of this role
    role: tuple[int, int] | None = _field(_as_pair)
    restarts: int | None = _count()  #: restarts of the job so far
    max_restarts: int | None = _count()  #: restart budget of the job
    reason: str = _text()  #: why the rendezvous for this generation took place
    #: start, failure, loss, resize or restart; empty if the rendezvous does not report it
    trigger: str = _text()
    #: name of this start of the job: its generations count from 1; empty if the rendezvous does
    #: not report it
    incarnation: str = _text()

    @property
    def text(self) -> str:
        first, last = self.ranks or (0, -1)
        ranks = format_ranges(range(first, last + 1)) if last - first < 1 << 20 else ""
        workers = plural(self.world_size or 0, "worker")
        nodes = plural(self.node_count or 0, "node")
        restarts = f"{self.restarts or 0} of {self.max_restarts or 0} restarts"
        return f"{workers} on {nodes}, ranks {ranks} here, {restarts}; {self.reason}"


@_kind("worker.started")
@attrs.frozen(kw_only=True)
class WorkerStarted(EventBody):
    """A worker has started, or continues in another generation."""

    local_rank: int | None = _count()  #: local rank of the worker
    name: str = _text()  #: name of the process, such as pid 123
    #: attempt in which the process was started; an earlier one if it regrouped
    attempt: int | None = _count()

    @property
    def text(self) -> str:
        return self.name


@_kind("worker.exited")
@attrs.frozen(kw_only=True)
class WorkerExited(EventBody):
    """A worker has exited."""

    local_rank: int | None = _count()  #: local rank of the worker
    exit_code: int | None = _field(_as_integer)  #: exit code; negative for a signal
    succeeded: bool = _flag()  #: true if the worker succeeded
    stopped: bool = _flag()  #: true if this agent had requested the stop
    description: str = _text()  #: how the worker exited, as text
    #: message of its failure, or else how it exited; empty if it succeeded
    error: str = _text()
    traceback: str = _text()  #: traceback of its failure, empty if there is none
    uptime_seconds: float | None = _seconds()  #: time since the start of its generation

    @property
    def is_expected(self) -> bool:
        """True if the worker succeeded or this agent stopped it."""
        return self.succeeded or self.stopped

    @property
    def timeline_text(self) -> str | None:
        return None if self.is_expected else self.description

    @property
    def text(self) -> str:
        return self.description


@_kind("failure")
@attrs.frozen(kw_only=True)
class Failure(EventBody):
    """This node has reported a failure to the others."""

    reason: str = _text()  #: the failure, as text
    failure_kind: str = _text()  #: ordinary, killed or hang
    #: of a hang: time since the last sign of life; otherwise null
    seconds_since_heartbeat: float | None = _seconds()

    @property
    def timeline_text(self) -> str:
        return self.reason


@_kind("stopping")
@attrs.frozen(kw_only=True)
class Stopping(EventBody):
    """The workers of this node are being stopped."""

    notice: str = _text()  #: reason that the workers are given; empty if they have no time to save
    #: time that the workers have to save; 0 if there is no notice
    grace_seconds: float | None = _seconds()
    reason: str = _text()  #: why the workers are stopped

    @property
    def text(self) -> str:
        grace = self.grace_seconds
        suffix = f"; they have {format_duration(grace)} to save" if grace else ""
        return f"stopping the workers: {self.reason}{suffix}"


@_kind("stopped")
@attrs.frozen(kw_only=True)
class Stopped(EventBody):
    """The workers of this node have exited after a stop."""

    duration_seconds: float | None = _seconds()  #: time that stopping took
    survivors: str = _text()  #: processes that could not be killed, empty if there are none

    @property
    def text(self) -> str:
        suffix = f", except {self.survivors}" if self.survivors else ""
        return f"the workers exited within {_format_seconds(self.duration_seconds)}{suffix}"


@_kind("control.requested")
@attrs.frozen(kw_only=True)
class ControlRequested(EventBody):
    """An operator has requested something."""

    action: str = _text()  #: what an operator has requested: drain, stop or restart
    by: str = _text()  #: the operator, as user@host

    @property
    def timeline_text(self) -> str:
        return f"{self.action or 'something unknown'} by {self.by}"


@_kind("drain.requested")
@attrs.frozen(kw_only=True)
class DrainRequested(EventBody):
    """This node leaves the job, and its workers may save before."""

    signal: str = _text()  #: name of the signal, or what else has requested it
    reason: str = _text()  #: reason given to the workers

    @property
    def timeline_text(self) -> str:
        return self.reason


@_kind("state.restored")
@attrs.frozen(kw_only=True)
class StateRestored(EventBody):
    """The workers of this node have restored a state."""

    step: int | None = _count()  #: step of the state that the workers restored
    source: str = _text()  #: memory (of this node), peer (memory of another node) or disk
    #: time that the restore took, after the last worker requested it
    duration_seconds: float | None = _seconds()
    #: time from the start of the workers until the last one requested it
    delay_seconds: float | None = _seconds()

    @property
    def timeline_text(self) -> str:
        return f"step {self.step} from {self.source or 'an unknown source'}"


@_kind("training.started")
@attrs.frozen(kw_only=True)
class TrainingStarted(EventBody):
    """All workers of this node have completed a step in this generation."""

    step: int | None = _count()  #: smallest first step of this node's workers in this generation
    #: time from the start of the workers until the slowest one had completed its first step
    duration_seconds: float | None = _seconds()
    #: seconds by module: what the slowest worker imported before its first step and --preload
    #: could import in advance; 0.1 s or more each, at most 4
    slow_imports: Mapping[str, float] = _field(_as_seconds_by_name)

    @property
    def text(self) -> str:
        duration = _format_seconds(self.duration_seconds)
        return f"step {_format_step(self.step)} completed after {duration}"


@_kind("progress")
@attrs.frozen(kw_only=True)
class Progress(EventBody):
    """The workers of this node have completed more steps."""

    step: int | None = _count()  #: smallest last step of this node's workers
    #: rate since the previous event, or the first step; null if unknown
    steps_per_second: float | None = _seconds()
    #: largest time since a worker's last sign of life
    seconds_since_heartbeat: float | None = _seconds()
    #: last loss of the lowest rank that reports one, else null; text if not finite
    loss: float | None = _field(_as_loss)
    #: rate of all workers of this node together; null if unknown
    samples_per_second: float | None = _seconds()

    @property
    def text(self) -> str:
        rates = {"steps/s": self.steps_per_second, "samples/s": self.samples_per_second}
        known = {unit: rate for unit, rate in rates.items() if rate is not None}
        texts = [f"step {_format_step(self.step)}"]
        texts += [f"{format_number(rate)} {unit}" for unit, rate in known.items()]
        texts += [] if self.loss is None else [f"loss {format_number(self.loss)}"]
        return ", ".join(texts)


@attrs.frozen(kw_only=True)
class StateSaved(EventBody):
    """The base of the events that report saved states."""

    step: int | None = _count()
    count: int | None = _count()

    @property
    def timeline_text(self) -> str | None:
        return None if self.step is None else f"step {self.step}"


@_kind("snapshot.taken")
@attrs.frozen(kw_only=True)
class SnapshotTaken(StateSaved):
    """The workers of this node have snapshots in memory."""

    #: newest step of which this node's workers have a complete snapshot in memory
    step: int | None = _count()
    count: int | None = _count()  #: snapshots since the previous event, this one included


@_kind("checkpoint.saved")
@attrs.frozen(kw_only=True)
class CheckpointSaved(StateSaved):
    """A checkpoint is durable."""

    step: int | None = _count()  #: step of the newest durable checkpoint
    count: int | None = _count()  #: checkpoints since the previous event, this one included


@_kind("run.finished")
@attrs.frozen(kw_only=True)
class RunFinished(EventBody):
    """The run of an agent has finished."""

    state: str = _text()  #: succeeded, failed, stopped or drained
    reason: str = _text()  #: why, as text
    #: exit code of the launcher; 69 for an unfit node, 75 after a drain, whatever
    #: --drain-exit-code is
    exit_code: int | None = _count()
    #: first failure on any node: host, rank, what; null if there is none
    root_cause: Mapping[str, Any] | None = _field(_as_object)
    expelled: bool = _flag()  #: true if the job continues without this node

    @property
    def text(self) -> str:
        return f"{self.state}: {self.reason} (exit code {self.exit_code})"


@_kind("events.dropped")
@attrs.frozen(kw_only=True)
class EventsDropped(EventBody):
    """Events are missing in this file."""

    #: events that could not be written, because the disk was full or too slow
    count: int | None = _count()

    @property
    def timeline_text(self) -> str:
        return f"{self.count or 0} events could not be written"


@attrs.frozen
class OtherEvent(EventBody):
    """An event of your own, or of another version.

    The data is copied and consists of JSON values: infinite numbers, NaN and other objects become
    text, long texts are cut, and tuples become lists. A value is replaced by the name of its type
    if its `str` raises, if it is nested more than 8 deep, or if it is an integer of more than 8,192
    bits.
    """

    kind: str  #: the kind, for example "my.kind"
    #: the values, by name
    data: Mapping[str, Any] = attrs.field(factory=dict, converter=plain_data)


def body_of(kind: str, data: Mapping[str, Any]) -> EventBody:
    """Return the body of an event that was read from a file."""
    cls = KINDS.get(kind)
    if cls is None:
        return OtherEvent(kind, data)
    return cls(**{one.name: data.get(one.name) for one in attrs.fields(cls)})


def _format_seconds(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else format_duration(seconds)


def _format_step(step: int | None) -> str:
    return UNKNOWN if step is None else format_count(step)
