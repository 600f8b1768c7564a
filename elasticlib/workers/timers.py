"""The timers that workers set for themselves: which are running, and which have run out.

The words are those of torch's `FileTimerClient`: a line of JSON sets a timer, or lets go of it. A
worker has one timer of each name (`scope_id`), and when one runs out all of that worker's go.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ..foreign import read_json

LONGEST_NAME = 1024


@attrs.frozen
class Timer:
    """`signal` is for process `pid` at `at`, on the reader's own clock; 0: nothing is sent."""

    pid: int
    scope: str
    at: float
    signal: int


@attrs.frozen
class Timers:
    """Those that are running, by process and name."""

    running: Mapping[tuple[int, str], Timer] = attrs.field(factory=dict)

    def heed(self, line: bytes, *, wall: float, now: float) -> Timers:
        """What they are after this line; wall, now: the time on the clock that workers go by, which
        is this machine's, and on ours. What is no request changes nothing."""
        try:
            said = read_json(line)
            pid, scope, at = int(said["pid"]), str(said["scope_id"]), float(said["expiration_time"])
            number = int(said["signal"])
        except (ValueError, KeyError, TypeError, OverflowError):
            return self
        running = dict(self.running)
        running.pop((pid, scope), None)
        if at >= 0 and len(scope) <= LONGEST_NAME:
            running[pid, scope] = Timer(pid, scope, now + at - wall, number)
        return Timers(running)

    def next(self) -> float | None:
        """When the first one runs out."""
        return min((timer.at for timer in self.running.values()), default=None)

    def expire(self, now: float) -> tuple[Timers, tuple[Timer, ...]]:
        """Without those processes of which one has run out; and the first of each of them that
        sends a signal."""
        over = sorted((t for t in self.running.values() if t.at <= now), key=lambda t: t.at)
        gone = {timer.pid for timer in over}
        first: dict[int, Timer] = {}
        for timer in over:
            if timer.signal > 0:
                first.setdefault(timer.pid, timer)
        left = {key: timer for key, timer in self.running.items() if timer.pid not in gone}
        return Timers(left), tuple(first.values())

    def without(self, pids: set[int]) -> Timers:
        """Without those of these processes, which have ended."""
        return Timers({key: t for key, t in self.running.items() if t.pid not in pids})
