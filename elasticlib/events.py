"""torch.distributed.elastic's events by their names, for programs that record events of their own.

As there, an event goes nowhere unless its destination says so, and `console` is stderr. The events
of an agent are elsewhere: `events.jsonl`, and `--event-log-handler console` in this shape.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import os
import socket
import sys
import traceback
from dataclasses import dataclass, field

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]

EventMetadataValue = str | int | float | bool | None
RENDEZVOUS = "dynamic_rendezvous"
_HANDLERS: dict[str, logging.Handler] = {
    "console": logging.StreamHandler(),
    RENDEZVOUS: logging.NullHandler(),
    "null": logging.NullHandler(),
}


class EventSource(str, enum.Enum):
    """Who tells."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, enum.Enum):
    """Where a node is in its rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class Event:
    """Something that happened. timestamp: milliseconds since 1970."""

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """What `serialize` made; an event is handed back as it is."""
        if isinstance(data, Event):
            return data
        said = json.loads(data)
        return Event(**{**said, "source": EventSource[said["source"]]})

    def serialize(self) -> str:
        """As a line of JSON."""
        return json.dumps(dataclasses.asdict(self))


@dataclass
class RdzvEvent:
    """Something that happened to a node on its way to the others."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """What `serialize` made; an event is handed back as it is."""
        if isinstance(data, RdzvEvent):
            return data
        said = json.loads(data)
        return RdzvEvent(**{**said, "node_state": NodeState[said["node_state"]]})

    def serialize(self) -> str:
        """As a line of JSON."""
        return json.dumps(dataclasses.asdict(self))


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """That of `null`, `console` or `dynamic_rendezvous`; KeyError for another."""
    return _HANDLERS[destination]


def record(event: Event, destination: str = "null") -> None:
    """Hand the event, a line of JSON, to the handler of its destination."""
    _logger(destination).info(event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """The same for an event of a rendezvous, whose destination is `dynamic_rendezvous`."""
    _logger(RENDEZVOUS).info(event.serialize())


def construct_and_record_rdzv_event(  # noqa: PLR0917 - the arguments are torch's
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Record an event with what is not given filled in: this host and process, the caller's name,
    and the exception that is being handled where the node has failed."""
    if isinstance(get_logging_handler(RENDEZVOUS), logging.NullHandler):
        return
    caller = sys._getframe(1)
    file = os.path.basename(caller.f_code.co_filename)
    failed = node_state is NodeState.FAILED
    event = RdzvEvent(
        name=f"{file}:{name or caller.f_code.co_name}",
        run_id=run_id,
        message=message,
        hostname=hostname or socket.getfqdn(),
        pid=pid or os.getpid(),
        node_state=node_state,
        master_endpoint=master_endpoint,
        rank=rank,
        local_id=local_id,
        error_trace=traceback.format_exc() if failed else "",
    )
    record_rdzv_event(event)


def _logger(destination: str) -> logging.Logger:
    logger = logging.getLogger(f"elasticlib-events-{destination}")
    handler = get_logging_handler(destination)
    if logger.handlers != [handler]:
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        # Once, and not by the root logger's handlers as well.
        logger.propagate = False
    return logger
