"""At which call of `should_stop` all ranks of a generation stop: what the nodes say, and the rule.

Each node says the first call at which its own workers all can; the last of these is one that no
worker has passed, whatever collectives tie them together, for each of them has been held before
it or will ask again. Ranks count their calls alike, as they take their steps together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs

from ..foreign import read_json
from ..workers.messages import REASONS, RESIZE


@attrs.frozen
class Need:
    """What one node says. call: the first at which it can stop; None if its workers do not ask.
    reason: as in a notice; seconds: that are left to it."""

    call: int | None
    reason: str = RESIZE
    seconds: float = 0.0


def agreed(needs: Mapping[int, Need], nodes: int) -> Need | None:
    """What all stop at, once all nodes (by rank) have spoken; None while some have not.

    Its call is None where there can be no such call. The reason is the most urgent that a node
    has, and the time is the shortest.
    """
    if any(need.call is None for need in needs.values()):
        return Need(None)
    if len(needs) < nodes:
        return None
    calls = [need.call for need in needs.values() if need.call is not None]
    return Need(
        max(calls),
        more_urgent(*(need.reason for need in needs.values())),
        min(need.seconds for need in needs.values()),
    )


def more_urgent(*reasons: str) -> str:
    """The most urgent of these."""
    return min(reasons, key=_URGENCY.index)


_URGENCY = ("preempted", "drain", "resize")


def encode_need(need: Need) -> bytes:
    return json.dumps(attrs.asdict(need)).encode()


def decode_need(data: bytes) -> Need:
    """What cannot be read is no agreement."""
    try:
        need = Need(**read_json(data))
        if need.reason in REASONS and (need.call is None or type(need.call) is int):
            return attrs.evolve(need, seconds=max(0.0, float(need.seconds)))
    except (ValueError, TypeError):
        pass
    return Need(None)
