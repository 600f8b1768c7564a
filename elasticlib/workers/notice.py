"""What workers are told when they are asked to end by themselves.

A notice comes before any signal: who listens has the seconds to save and to end; who does not is
stopped as if there had been none.
"""

from __future__ import annotations

import attrs

from ..errors import ConfigError

PREEMPTED, RESIZE, DRAIN = "preempted", "resize", "drain"
REASONS = (PREEMPTED, RESIZE, DRAIN)


@attrs.frozen
class Notice:
    """reason: `preempted` (the machine is taken away), `resize` (the job goes on with other
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
