"""Events with any data, as a file may hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from elasticlib.observe.event import Event
from elasticlib.observe.event_kinds import body_of


def make_event(kind: str, *head: Any, data: Mapping[str, Any] | None = None) -> Event:
    """Return the event that a file with these values holds.

    Args:
        kind: the kind.
        *head: the fields of an `Event` after the body, and possibly the data.
        data: the data.
    """
    num_fields = len(attrs.fields(Event)) - 1
    if len(head) > num_fields:
        data = head[-1]
    return Event(body_of(kind, data or {}), *head[:num_fields])
