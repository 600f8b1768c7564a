"""What a worker and its agent tell each other, as values: heartbeat, notice, error.json.

Both ends import this, so it takes little more than the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from ..errors import ConfigError
from ..foreign import read_object

NOTHING = -1
"""In place of a step that was not reported."""
SOURCES = ("memory", "peer", "disk")
"""Where a worker's state came from: its own node's memory, another node's, or a disk; the
quickest first."""


@attrs.frozen
class TakenUp:
    """The state that a worker took up: of which step, from which of the SOURCES, and from when
    until when that took, on this machine's monotonic clock."""

    step: int
    source: str
    began: float
    ended: float


@attrs.frozen
class Heartbeat:
    """What a worker has reported of its steps.

    step: the last, or NOTHING. steps: how many it reported. at: when, on this machine's monotonic
    clock; alive: when it last reported a step or a save, or asked whether to stop. durations:
    seconds of the last few, in no order. saved: the last step saved, or NOTHING; saves: how many.
    dumps: whether it writes its stacks where it is asked to. attached: whether it has asked for
    its context at all. first_step, first_at: the first step that it reported, and when; NOTHING
    and 0.0 before. restored: the state that it took up last; restores: how many it did. snapshot:
    the step of the last one kept, or NOTHING. loss: the last reported; samples: all of them.
    """

    step: int = NOTHING
    steps: int = 0
    at: float = 0.0
    alive: float = 0.0
    durations: tuple[float, ...] = ()
    saved: int = NOTHING
    saves: int = 0
    dumps: bool = False
    attached: bool = False
    first_step: int = NOTHING
    first_at: float = 0.0
    restored: TakenUp | None = None
    restores: int = 0
    snapshot: int = NOTHING
    loss: float | None = None
    samples: float = 0.0


PREEMPTED, RESIZE, DRAIN = "preempted", "resize", "drain"
REASONS = (PREEMPTED, RESIZE, DRAIN)


@attrs.frozen
class Notice:
    """What workers are told when they are asked to end by themselves, before any signal.

    reason: `preempted` (the machine is taken away), `resize` (the job goes on with other
    nodes), or `drain` (a node was asked to leave). seconds: in which the workers may save and
    end by themselves. after_save: they are told when they next have saved, or at half the time.
    """

    reason: str
    seconds: float
    after_save: bool = False

    def __attrs_post_init__(self) -> None:
        if self.reason not in REASONS or self.seconds < 0:
            raise ConfigError(
                f"a notice has a reason ({', '.join(REASONS)}) and seconds >= 0, "
                f"got {self.reason!r} and {self.seconds}"
            )


# -- error.json: torch's shape, and its bounds ------------------------------------------------

NO_RECORD = {"message": "<NONE>"}
"""torch's word for the content of an error.json that there is not."""
LONGEST_RECORD = 1 << 20
"""Bytes of an error.json that are looked at: it may be anything that the user's code writes."""
LONGEST = 1 << 16
"""Characters of a traceback, or of a message, that are kept."""
_CUT = "\n[... {} characters are left out ...]\n"


def failure_record(
    kind: str, text: str, traceback: str, timestamp: int, *, thread: str = ""
) -> bytes:
    """The file's content; timestamp in whole seconds since 1970.

    thread: the name of the one that alone has ended so, and not yet the process.
    """
    extra = {"py_callstack": shorten(traceback, LONGEST), "timestamp": str(timestamp)}
    if thread:
        extra["thread"] = thread
    record = {"message": {"message": shorten(f"{kind}: {text}", LONGEST), "extraInfo": extra}}
    return json.dumps(record).encode()


def read_record(data: bytes) -> dict[str, Any]:
    """All that an error.json holds; nothing where it is none."""
    try:
        record = read_object(data)
    except ValueError:
        return {}
    return record if "message" in record else {}


def read_failure(record: Mapping[str, Any]) -> tuple[str, str]:
    """Message and traceback of what `read_record` found; empty where it has none."""
    message = record.get("message")
    if isinstance(message, str):
        return message, ""
    if not isinstance(message, dict):
        return "", ""
    extra = message.get("extraInfo")
    trace = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return str(message.get("message", "")), str(trace)


def ends_process(record: Mapping[str, Any]) -> bool:
    """Whether this error.json tells of an exception that ends its process."""
    try:
        return "thread" not in record["message"]["extraInfo"]
    except (KeyError, TypeError):
        return False


def shorten(text: str, limit: int) -> str:
    """The text in about `limit` characters: where it begins and, mostly, how it ends."""
    if len(text) <= limit:
        return text
    head = limit // 4
    tail = limit - head
    return text[:head] + _CUT.format(len(text) - limit) + text[-tail:]
