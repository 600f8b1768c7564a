"""Whether a node is well: by how it stands, and by whether its agent's loop turns."""

from __future__ import annotations

import attrs

from .history import JobState

PATIENCE = 15.0
"""Seconds: longer than any one act of the loop takes, even the start of many workers."""


@attrs.frozen
class Health:
    """The answer, and why, in a line."""

    good: bool
    sentence: str


def judge(state: JobState, reason: str, silent: float, patience: float = PATIENCE) -> Health:
    """Of a node in this state, whose agent's loop has been silent for so many seconds."""
    if state is JobState.FAILED:
        return Health(False, f"the node has failed: {reason}")
    if silent > patience and not state.over:
        return Health(False, f"the agent's loop has not turned for {silent:.1f} s")
    return Health(True, state.value)
