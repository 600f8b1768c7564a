"""What a worker tells of its steps, as a value."""

from __future__ import annotations

import attrs

NOTHING = -1
"""In place of a step that nobody has told of."""


@attrs.frozen
class Beat:
    """What a worker has told of its steps.

    step: the last, or NOTHING. steps: how many it told of. at: when, on this machine's monotonic
    clock; alive: when it last told of that or of a save, or asked whether to stop. durations:
    seconds of the last few, in no order. saved: the last step saved, or NOTHING; saves: how many.
    dumps: whether it writes its stacks where it is asked to. attached: whether it has asked for
    its context at all.
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
