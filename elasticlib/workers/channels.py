"""The agent's ends of its workers' channels: one file a worker, in a private folder in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from ..clock import Clock, monotonic
from ..held_folder import FolderLock, try_to_hold
from .beat import Beat
from .channel import Channel
from .notice import REASONS, Notice
from .stacks import beside

SHARED_MEMORY = "/dev/shm"


class Channels:
    """Of one group at a time; for several threads.

    listed, unlisted: told of the folder, so that it goes with us even if we are killed.
    """

    def __init__(
        self,
        listed: Callable[[str], None],
        unlisted: Callable[[str], None],
        clock: Clock = monotonic,
    ) -> None:
        self._listed = listed
        self._unlisted = unlisted
        self._clock = clock
        self._lock = threading.RLock()
        usable = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
        self._place = SHARED_MEMORY if usable else None
        self._folder: Path | None = None
        self._folders: dict[Path, FolderLock | None] = {}
        self._number = 0
        self._open: dict[int, tuple[Channel, Path]] = {}
        self._last: dict[int, Beat] = {}
        self._notice: Notice | None = None
        self._deadline = 0.0
        self._saves = 0
        self._asked = False
        self._listened = False

    def open(self, local_rank: int) -> str:
        """The file of a worker that is about to start. Raises OSError."""
        with self._lock:
            self._number += 1
            try:
                return self._made(local_rank)
            except OSError:
                # Shared memory may be full, of what DataLoaders keep there.
                if self._place is None:
                    raise
                self._leave_folder()
                self._place = None
                return self._made(local_rank)

    def assign(self, local_rank: int, pid: int) -> None:
        """A Python worker's process, which none that it starts can pass for."""
        with self._lock:
            self._open[local_rank][0].assign(pid)

    def close(self, local_rank: int) -> None:
        """The worker is gone."""
        with self._lock:
            channel, path = self._open.pop(local_rank, (None, None))
            if channel is not None and path is not None:
                self._listened = self._listened or channel.listens
                self._last[local_rank] = channel.beat()
                channel.close()
                path.unlink(missing_ok=True)
                Path(beside(str(path))).unlink(missing_ok=True)

    def close_all(self) -> None:
        """Leave nothing behind."""
        with self._lock:
            for local_rank in list(self._open):
                self.close(local_rank)
            for folder, lock in self._folders.items():
                shutil.rmtree(folder, ignore_errors=True)
                if lock is not None:
                    lock.close()
                self._unlisted(str(folder))
            self._folders.clear()
            self._folder = None

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
            now, channels = self._clock(), [channel for channel, _ in self._open.values()]
            if not self._listened and not any(c.listens or c.listens_soon(now) for c in channels):
                return False
            self._notice, self._deadline = notice, self._clock() + notice.seconds
            self._saves, self._asked = self._saved(), False
            if not notice.after_save:
                self._ask()
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
                self._ask()
                return None  # they have to see it first
            calls = [channel.earliest_stop() for channel, _ in list(self._open.values())]
            known = [call for call in calls if call is not None]
            return max(known, default=1) if len(known) == len(calls) else None

    def stop_at(self, call: int, notice: Notice) -> None:
        """All ranks stop at this call, for this reason."""
        with self._lock:
            deadline = min(self._deadline, self._clock() + notice.seconds)
            for channel, _ in self._open.values():
                channel.tell_stop(call, REASONS.index(notice.reason), deadline)

    def beats(self) -> dict[int, Beat]:
        """What each worker has told of its steps, by local rank."""
        with self._lock:
            return {local: channel.beat() for local, (channel, _) in list(self._open.items())}

    def last_beats(self) -> dict[int, Beat]:
        """The same, and what those of this group had told that have ended since."""
        with self._lock:
            return {**self._last, **self.beats()}

    def dumpers(self) -> dict[int, tuple[int, int, str]]:
        """The processes that write their stacks when asked, by local rank, each with the number
        and the name of its file."""
        with self._lock:
            return {
                local: (*channel.dumps, beside(str(path)))
                for local, (channel, path) in list(self._open.items())
                if channel.dumps[0]
            }

    def _ask(self) -> None:
        assert self._notice is not None
        for channel, _ in self._open.values():
            channel.ask(REASONS.index(self._notice.reason), self._deadline)
        self._asked = True

    def _saved(self) -> int:
        return sum(channel.beat().saves for channel, _ in self._open.values())

    def _made(self, local_rank: int) -> str:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="elasticlib-", dir=self._place))
            self._folders[self._folder] = try_to_hold(self._folder)
            self._listed(str(self._folder))
        path = self._folder / f"{self._number}"
        try:
            self._open[local_rank] = (Channel(str(path), create=True), path)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return str(path)

    def _leave_folder(self) -> None:
        """Those that are open there go on."""
        self._folder = None
