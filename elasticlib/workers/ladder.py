"""The one way in which workers are stopped: tell, ask, wait, end, and say what would not.

A rung follows from the seconds since the stop began, and from nothing else, so every path that
stops workers climbs the same ladder at the same pace.
"""

from __future__ import annotations

import enum

import attrs

from ..errors import ConfigError


class Rung(enum.IntEnum):
    """NOTICE: told to save and end. TERM: asked to stop. KILL: ended by force. GIVE_UP: not even
    that helped."""

    NOTICE = 0
    TERM = 1
    KILL = 2
    GIVE_UP = 3


@attrs.frozen
class Ladder:
    """notice: seconds before SIGTERM, for those who listen. grace: seconds between SIGTERM and
    SIGKILL. reap: seconds that a killed process may take."""

    grace: float = 30.0
    reap: float = 10.0
    notice: float = 0.0

    def __attrs_post_init__(self) -> None:
        if min(self.grace, self.reap, self.notice) < 0:
            raise ConfigError(
                f"the ladder needs seconds >= 0, got notice={self.notice}, grace={self.grace} "
                f"and reap={self.reap}"
            )

    def noticed(self, seconds: float) -> Ladder:
        """The ladder of workers that were told, and may take so long to end by themselves."""
        return attrs.evolve(self, notice=seconds)

    def rung(self, elapsed: float) -> Rung:
        """Where a stop stands that began `elapsed` seconds ago."""
        for rung in (Rung.NOTICE, Rung.TERM, Rung.KILL):
            if elapsed < self._end(rung):
                return rung
        return Rung.GIVE_UP

    def left(self, elapsed: float) -> float:
        """Seconds until the next rung."""
        return max(0.0, self._end(min(self.rung(elapsed), Rung.KILL)) - elapsed)

    def _end(self, rung: Rung) -> float:
        return sum((self.notice, self.grace, self.reap)[: rung + 1])
