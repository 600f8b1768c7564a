"""torch.distributed.elastic's events, by the name `elasticlib.events`: torch's own, as they are.

What an agent tells of itself is elsewhere: `events.jsonl`, or `--event-log-handler console`.
"""

from __future__ import annotations

from torch.distributed.elastic.events import (  # type: ignore[attr-defined]
    Event,
    EventMetadataValue,
    EventSource,
    NodeState,
    RdzvEvent,
    construct_and_record_rdzv_event,
    get_logging_handler,
    record,
    record_rdzv_event,
)

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
