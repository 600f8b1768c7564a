"""What a worker tells of its steps, as a value."""

from __future__ import annotations

import attrs

NOTHING = -1
"""In place of a step that nobody has told of."""
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
class Beat:
    """What a worker has told of its steps.

    step: the last, or NOTHING. steps: how many it told of. at: when, on this machine's monotonic
    clock; alive: when it last told of that or of a save, or asked whether to stop. durations:
    seconds of the last few, in no order. saved: the last step saved, or NOTHING; saves: how many.
    dumps: whether it writes its stacks where it is asked to. attached: whether it has asked for
    its context at all. first_step, first_at: the first step that it told of, and when; NOTHING
    and 0.0 before. restored: the state that it took up last; restores: how many it did. snapshot:
    the step of the last one kept, or NOTHING. loss: the last that it told; samples: all of them.
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
