"""The one way in which workers are stopped: ask, wait, end, and say what would not.

A rung follows from the seconds since the stop began, and from nothing else, so every path that
stops workers climbs the same ladder at the same pace.
"""

from __future__ import annotations

import enum

import attrs

from ..errors import ConfigError


class Rung(enum.IntEnum):
    """TERM: asked to stop. KILL: ended by force. GIVE_UP: not even that helped."""

    TERM = 1
    KILL = 2
    GIVE_UP = 3


@attrs.frozen
class Ladder:
    """grace: seconds between SIGTERM and SIGKILL. reap: seconds that a killed process may take."""

    grace: float = 30.0
    reap: float = 10.0

    def __attrs_post_init__(self) -> None:
        if self.grace < 0 or self.reap < 0:
            raise ConfigError(
                f"the ladder needs seconds >= 0, got grace={self.grace} and reap={self.reap}"
            )

    def rung(self, elapsed: float) -> Rung:
        """Where a stop stands that began `elapsed` seconds ago."""
        if elapsed < self.grace:
            return Rung.TERM
        return Rung.KILL if elapsed < self.grace + self.reap else Rung.GIVE_UP

    def left(self, elapsed: float) -> float:
        """Seconds until the next rung."""
        edge = self.grace if elapsed < self.grace else self.grace + self.reap
        return max(0.0, edge - elapsed)
