"""The agent's ends of its workers' channels, each in memory that has no name in any folder."""

from __future__ import annotations

import threading

from ..clock import Clock, monotonic
from .beat import Beat
from .channel import Channel
from .notice import REASONS, Notice


class Channels:
    """Of one group at a time; for several threads."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._open: dict[int, Channel] = {}
        self._last: dict[int, Beat] = {}
        self._notice: Notice | None = None
        self._deadline = 0.0
        self._saves = 0
        self._asked = False
        self._listened = False

    def open(self, local_rank: int) -> str:
        """The path of the channel of a worker that is about to start. Raises OSError."""
        with self._lock:
            self._open[local_rank] = Channel.made()
            return self._open[local_rank].path

    def assign(self, local_rank: int, pid: int) -> None:
        """A Python worker's process, which none that it starts can pass for."""
        with self._lock:
            self._open[local_rank].assign(pid)

    def close(self, local_rank: int) -> None:
        """The worker is gone."""
        with self._lock:
            channel = self._open.pop(local_rank, None)
            if channel is not None:
                self._listened = self._listened or channel.listens
                self._last[local_rank] = channel.beat()
                channel.close()

    def close_all(self) -> None:
        """Leave nothing behind."""
        with self._lock:
            for local_rank in list(self._open):
                self.close(local_rank)

    def begin(self) -> None:
        """Another group starts, which has been asked nothing."""
        with self._lock:
            self._notice, self._asked = None, False
            self._last.clear()

    def notify(self, notice: Notice) -> bool:
        """Ask for a stop, now or after the next save; False if no worker here ever looks.

        Where workers of an earlier group have looked, these are about to: they may have stepped
        already, and what they have done since the last save would be lost.
        """
        with self._lock:
            now, channels = self._clock(), self._open.values()
            if not self._listened and not any(c.listens or c.listens_soon(now) for c in channels):
                return False
            self._notice, self._deadline = notice, self._clock() + notice.seconds
            self._saves, self._asked = self._saved(), False
            if not notice.after_save:
                self._ask(notice)
            return True

    def earliest_stop(self, *, now: bool) -> int | None:
        """The first call at which all can stop; None while one of them is in a call or, where a
        save is waited for, that has not come. now: it has, elsewhere."""
        with self._lock:
            notice = self._notice
            if notice is None:
                return None
            if not self._asked:
                late = self._deadline - self._clock() <= notice.seconds / 2
                if not (now or late or self._saved() > self._saves):
                    return None
                self._ask(notice)
                return None  # they have to see it first
            calls = [channel.earliest_stop() for channel in self._open.values()]
            known = [call for call in calls if call is not None]
            return max(known, default=1) if len(known) == len(calls) else None

    def stop_at(self, call: int, notice: Notice) -> None:
        """All ranks stop at this call, for this reason."""
        with self._lock:
            deadline = min(self._deadline, self._clock() + notice.seconds)
            for channel in self._open.values():
                channel.tell_stop(call, REASONS.index(notice.reason), deadline)

    def beats(self) -> dict[int, Beat]:
        """What each worker has told of its steps, by local rank."""
        with self._lock:
            return {local: channel.beat() for local, channel in self._open.items()}

    def last_beats(self) -> dict[int, Beat]:
        """The same, and what those of this group had told that have ended since."""
        with self._lock:
            return {**self._last, **self.beats()}

    def dumpers(self) -> dict[int, tuple[int, int]]:
        """The processes that write their stacks when asked, by local rank, each with the number
        of its file."""
        with self._lock:
            found = {local: channel.dumps for local, channel in self._open.items()}
        return {local: dumps for local, dumps in found.items() if dumps[0]}

    def _ask(self, notice: Notice) -> None:
        for channel in self._open.values():
            channel.ask(REASONS.index(notice.reason), self._deadline)
        self._asked = True

    def _saved(self) -> int:
        return sum(channel.beat().saves for channel in self._open.values())
