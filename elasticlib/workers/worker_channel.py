"""The memory that one worker shares with its agent: a page, each number in it written by one side.

The worker counts its calls, steps and saves; the agent writes what it asks for. Nobody waits for
a lock, and each number is written and read as one word. Workers import this.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import sys
import threading
from collections.abc import Mapping

from ..clock import monotonic
from ..errors import ConfigError
from .interface import (
    LOSS_POINT,
    MAX_LOSS_POINTS,
    NO_STEP,
    RESTORE_SOURCES,
    STOP_REASONS,
    Heartbeat,
    LossHistory,
    RestoreReport,
    StopNotice,
    is_sampled,
    num_sampled_before,
)

CHANNEL_ENV = "ELASTICLIB_CHANNEL"
"""Names it, in a worker's environment."""

PAGE_BYTES = 8192
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAGIC = 0x656C6173 << 32  # "elas"
VERSION = 2  # of the words below; the first word is MAGIC + VERSION
FIRST_POLL_TIMEOUT_S = 10.0
"""For which a worker that has begun may be about to make its first step."""
NUM_STEP_DURATIONS = 32
"""So many of the last steps' durations are kept."""

# The worker's words. A call of should_stop is entered, and then either passed (answered with no)
# or held (waiting to be told at which call all ranks stop).
_MAGIC, _OWNER, _ENTERED, _PASSED, _HELD = range(5)
_WORKER = 5
_STEP, _STEPS, _STEPPED_AT, _SAVED, _SAVES, _DUMPS, _ALIVE_AT, _STARTED_AT = range(8, 16)
_FIRST_STEP, _FIRST_AT, _SNAPSHOT, _SNAPSHOTS, _LOSS, _LOSSES, _SAMPLES = range(16, 23)
_RESTORED_STEP, _SOURCE, _RESTORE_BEGAN, _RESTORE_ENDED, _RESTORES = range(23, 28)
_DUMPS_TO, _COUNT = 28, 29  # _COUNT: of losses
_DURATIONS = 64
_POINTS = 96
_FARTHEST = 2**31
"""Steps from the first one on for which a point has no room."""
# The agent's.
_ASKED, _STOP_AT, _REASON, _DEADLINE = range(32, 36)
# A worker that outlives its group. The agent's: the generation to leave, and how many places it
# has given, the last of them written as JSON; the worker's: whether it can outlive a group, how
# many places it has taken, out of how many groups it is by now, and the place in whose group
# something has broken.
_LEAVE, _PLACES = 36, 37
_CAN_KEEP, _TAKEN, _OUT, _BROKEN = 40, 41, 42, 43
_OF_ONE_PLACE = (
    *(_ENTERED, _PASSED, _HELD, _STEPS, _SAVES, _FIRST_AT, _SNAPSHOTS),
    *(_LOSSES, _SAMPLES, _RESTORES, _COUNT),
)
_PLACE = 4096
"""The byte at which the last place stands: its length in 8 bytes, and its JSON."""
MAX_ASSIGNMENT_BYTES = PAGE_BYTES - _PLACE - 8


class WorkerChannel:
    """Either end of it: the worker's, by the path that it was told, or its agent's, by `made`.

    Raises:
        OSError: there is no channel at this path.
        ConfigError: the agent runs another version of elasticlib.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._made = -1
        handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            version = int.from_bytes(os.pread(handle, 8, 8 * _MAGIC), sys.byteorder) - MAGIC
            if not 0 <= version < 1 << 32:
                raise OSError(f"{path} is not a worker's channel")
            if version != VERSION:
                raise ConfigError(
                    f"this worker cannot talk to its agent: its elasticlib has version {VERSION} "
                    f"of the channel, the agent's has version {version}: install the same version "
                    "of elasticlib for the agent and its workers"
                )
            if os.fstat(handle).st_size != PAGE_BYTES:
                raise OSError(
                    f"{path} is not a worker's channel: it does not have {PAGE_BYTES} bytes"
                )
            self._memory = mmap.mmap(handle, PAGE_BYTES)
        finally:
            os.close(handle)
        self._view = memoryview(self._memory)
        self._words = self._view.cast("q")
        self._seconds = self._view.cast("d")

    @classmethod
    def create(cls) -> WorkerChannel:
        """A new one, which has no name in any folder and goes with this process and the worker.

        Sealed: a worker that cut it short would end its agent at the next look. Raises OSError.
        """
        handle = os.memfd_create("elasticlib-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Now, and not at the first write, which full memory would answer with SIGBUS.
            os.posix_fallocate(handle, 0, PAGE_BYTES)
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _FIXED)
            os.pwrite(handle, (MAGIC + VERSION).to_bytes(8, sys.byteorder), 8 * _MAGIC)
            # As this /proc counts processes, whichever namespace it is of.
            channel = cls(f"/proc/{os.readlink('/proc/self')}/fd/{handle}")
        except BaseException:
            os.close(handle)
            raise
        channel._made = handle
        channel._words[_STEP] = channel._words[_SAVED] = NO_STEP
        return channel

    def close(self) -> None:
        """Let go of the memory; closing twice is harmless."""
        for view in (self._words, self._seconds, self._view):
            view.release()
        self._memory.close()
        made, self._made = self._made, -1
        if made >= 0:
            os.close(made)

    # -- the worker's end ---------------------------------------------------------------------

    def own(self, pid: int) -> bool:
        """Whether this process speaks for the worker: the one that it was assigned to, else the
        first that asks."""
        if self._words[_WORKER] not in (0, pid):
            return False
        if not self._words[_OWNER]:
            self._words[_OWNER] = pid
        return self._words[_OWNER] == pid

    def enter(self, call: int, now: float = 0.0) -> bool:
        """Begin a call; whether the agent asks for a stop. (Written before read: the agent
        writes first, too, and then reads, so that one of the two sees the other.)"""
        self._words[_ENTERED] = call
        self._seconds[_ALIVE_AT] = now
        if self._words[_ASKED]:
            return True
        self._words[_PASSED] = call
        return False

    def hold(self, call: int) -> None:
        """This call waits to be told what to answer."""
        self._words[_HELD] = call

    def go_on(self, call: int) -> None:
        """This call was answered with no."""
        self._words[_PASSED] = call

    @property
    def stop_at(self) -> int:
        """The call at which all ranks stop; 0 while that is not known."""
        return self._words[_STOP_AT]

    @property
    def reason(self) -> int:
        return self._words[_REASON]

    @property
    def deadline(self) -> float:
        """On this machine's monotonic clock."""
        return self._seconds[_DEADLINE]

    def report_starting(self, now: float) -> None:
        """The first step is about to be made, and the first call after it."""
        self._seconds[_STARTED_AT] = now

    def report_step(
        self, step: int, now: float, loss: float | None = None, samples: float | None = None
    ) -> None:
        """Count a step, unless it is the last one again; its loss and samples are added then."""
        words, seconds = self._words, self._seconds
        if samples is not None:
            seconds[_SAMPLES] += samples
        seconds[_ALIVE_AT] = now
        if not words[_STEPS] or words[_STEP] != step:
            self._count_step(step, now)
        if loss is not None:
            self._tell_loss(step, now, loss)

    def _count_step(self, step: int, now: float) -> None:
        words, seconds = self._words, self._seconds
        count = words[_STEPS]
        if count:
            seconds[_DURATIONS + count % NUM_STEP_DURATIONS] = now - seconds[_STEPPED_AT]
        else:
            words[_FIRST_STEP] = step
            seconds[_FIRST_AT] = now
        words[_STEP] = step
        seconds[_STEPPED_AT] = now
        words[_STEPS] = count + 1

    def _tell_loss(self, step: int, now: float, loss: float) -> None:
        words, seconds = self._words, self._seconds
        seconds[_LOSS] = loss
        words[_LOSSES] = 1
        count = words[_COUNT]
        if is_sampled(count):
            at = 8 * _POINTS + num_sampled_before(count) % MAX_LOSS_POINTS * LOSS_POINT.size
            steps = min(max(step - words[_FIRST_STEP], -_FARTHEST), _FARTHEST - 1)
            LOSS_POINT.pack_into(self._memory, at, loss, now - seconds[_FIRST_AT], steps)
        words[_COUNT] = count + 1

    def report_saved(self, step: int, now: float = 0.0) -> None:
        self._words[_SAVED] = step
        self._seconds[_ALIVE_AT] = now
        self._words[_SAVES] += 1

    def report_snapshot(self, step: int, now: float = 0.0) -> None:
        self._words[_SNAPSHOT] = step
        self._seconds[_ALIVE_AT] = now
        self._words[_SNAPSHOTS] += 1

    def report_restored(self, state: RestoreReport) -> None:
        words, seconds = self._words, self._seconds
        words[_RESTORED_STEP], words[_SOURCE] = state.step, RESTORE_SOURCES.index(state.source)
        seconds[_RESTORE_BEGAN], seconds[_RESTORE_ENDED] = state.started_at, state.finished_at
        seconds[_ALIVE_AT] = state.finished_at
        words[_RESTORES] += 1

    def set_stack_dumper(self, pid: int, file: int) -> None:
        """From now on this process of the worker's writes its stacks when it gets the signal, to
        the file that it has open under this number."""
        self._words[_DUMPS_TO] = file
        self._words[_DUMPS] = pid

    def set_can_regroup(self, can: bool = True) -> None:
        """From now on the worker may be given a place in another group, once it is out of its
        own; or may not."""
        self._words[_CAN_KEEP] = can

    def report_left_group(self, taken: int) -> None:
        """The worker does nothing in the group of its place number `taken` any more (0: it has
        never been in one), and waits for the next."""
        self._words[_OUT] = taken + 1

    def report_group_failure(self, taken: int) -> None:
        """In the group of that place something has failed, as it does when a member is lost."""
        self._words[_BROKEN] = taken

    @property
    def leave(self) -> int:
        """The number of the last place whose group is over, so that it is to be left; 0 before."""
        return self._words[_LEAVE]

    def accept_assignment(self, after: int) -> tuple[int, dict[str, str]] | None:
        """The last place that the agent has given, if it is a later one: its number from 1, and
        what it says in variables. The worker's calls, and what it tells, are counted anew in it."""
        number = self._words[_PLACES]
        if number <= after:
            return None
        length = int.from_bytes(self._view[_PLACE : _PLACE + 8], sys.byteorder)
        text = bytes(self._view[_PLACE + 8 : _PLACE + 8 + length])
        for word in _OF_ONE_PLACE:
            self._words[word] = 0
        self._words[_STEP] = self._words[_SAVED] = NO_STEP
        self._words[_TAKEN] = number
        return number, json.loads(text)

    # -- the agent's end ----------------------------------------------------------------------

    @property
    def can_keep(self) -> bool:
        """Whether the worker can go on in another group."""
        return bool(self._words[_CAN_KEEP])

    @property
    def is_out(self) -> bool:
        """Whether it can, does nothing in a group now, and waits for its next place."""
        words = self._words
        return bool(words[_CAN_KEEP]) and words[_OUT] > words[_PLACES]

    @property
    def is_broken(self) -> bool:
        """Whether something has failed in the worker's group."""
        return 0 < self._words[_PLACES] == self._words[_BROKEN]

    @property
    def _is_elsewhere(self) -> bool:
        """Whether all that the worker has told was in another group than that of its place."""
        words = self._words
        return bool(words[_CAN_KEEP]) and 1 < words[_PLACES] > words[_TAKEN]

    def request_leave(self) -> None:
        """The group of the place that the worker has is over, whatever it is doing there."""
        self._words[_LEAVE] = self._words[_PLACES]

    def publish_assignment(self, variables: Mapping[str, str]) -> None:
        """To a worker that is out, or has not asked yet: its place in the next group, as variables
        of its environment. Raises ValueError if they are too long."""
        text = json.dumps(dict(variables)).encode()
        if len(text) > MAX_ASSIGNMENT_BYTES:
            raise ValueError(
                f"a place takes {len(text)} bytes, {MAX_ASSIGNMENT_BYTES} are the most"
            )
        self._words[_ASKED] = self._words[_STOP_AT] = 0
        self._view[_PLACE : _PLACE + 8] = len(text).to_bytes(8, sys.byteorder)
        self._view[_PLACE + 8 : _PLACE + 8 + len(text)] = text
        self._words[_PLACES] += 1

    @property
    def listens(self) -> bool:
        """Whether the worker has ever asked whether it should stop."""
        return self._words[_ENTERED] > 0

    def will_poll_should_stop(self, now: float) -> bool:
        """Whether it is about to ask for the first time: it called `starting` lately, and has
        neither reported a step nor saved since, as a worker that never asks would."""
        words = self._words
        done = words[_STEPS] or words[_SAVES]
        return not done and 0 < self._seconds[_STARTED_AT] > now - FIRST_POLL_TIMEOUT_S

    def assign(self, pid: int) -> None:
        """The worker is this process, whichever of those that it starts may ask before it does."""
        self._words[_WORKER] = pid

    @property
    def dumps(self) -> tuple[int, int]:
        """The process that writes its stacks when asked, and the number of its file; 0 for none."""
        return self._words[_DUMPS], self._words[_DUMPS_TO]

    def ask(self, reason: int, deadline: float) -> None:
        """Have the next call wait for `set_stop_call`."""
        self._words[_REASON] = reason
        self._seconds[_DEADLINE] = deadline
        self._words[_ASKED] = 1

    def earliest_stop(self) -> int | None:
        """Having asked: the first call at which the worker can stop; None while it is in one."""
        words = self._words
        if self._is_elsewhere:
            return 1
        entered = words[_ENTERED]
        if words[_PASSED] == entered:
            return entered + 1
        return entered if words[_HELD] == entered else None

    def set_stop_call(self, call: int, reason: int, deadline: float) -> None:
        """All ranks stop at this call."""
        self._words[_REASON] = reason
        self._seconds[_DEADLINE] = deadline
        self._words[_STOP_AT] = call

    def beat(self) -> Heartbeat:
        """The worker's heartbeat."""
        words, seconds = self._words, self._seconds
        if self._is_elsewhere:
            alive, dumps = seconds[_ALIVE_AT], bool(words[_DUMPS])
            return Heartbeat(
                last_activity_at=alive, can_dump_stacks=dumps, is_attached=bool(words[_OWNER])
            )
        steps = words[_STEPS]
        known = (
            range(_DURATIONS, _DURATIONS + NUM_STEP_DURATIONS)
            if steps > NUM_STEP_DURATIONS
            else range(_DURATIONS + 1, _DURATIONS + max(steps, 1))
        )
        return Heartbeat(
            step=words[_STEP],
            num_steps=steps,
            last_step_at=seconds[_STEPPED_AT],
            last_activity_at=seconds[_ALIVE_AT],
            step_durations=tuple(seconds[slot] for slot in known),
            last_saved_step=words[_SAVED],
            num_saves=words[_SAVES],
            can_dump_stacks=bool(words[_DUMPS]),
            is_attached=bool(words[_OWNER]),
            first_step=words[_FIRST_STEP] if seconds[_FIRST_AT] else NO_STEP,
            first_at=seconds[_FIRST_AT],
            last_restore=self._restored(),
            num_restores=words[_RESTORES],
            last_snapshot_step=words[_SNAPSHOT] if words[_SNAPSHOTS] else NO_STEP,
            num_snapshots=words[_SNAPSHOTS],
            loss=seconds[_LOSS] if words[_LOSSES] else None,
            loss_history=self._losses(),
            num_samples=seconds[_SAMPLES],
        )

    def _losses(self) -> LossHistory | None:
        count = self._words[_COUNT]
        if not count:
            return None
        at = 8 * _POINTS
        points = bytes(self._view[at : at + MAX_LOSS_POINTS * LOSS_POINT.size])
        first_step, first_at = self._words[_FIRST_STEP], self._seconds[_FIRST_AT]
        return LossHistory(count, self._words[_COUNT], points, first_step, first_at)

    def _restored(self) -> RestoreReport | None:
        words, seconds = self._words, self._seconds
        source = words[_SOURCE]
        if not words[_RESTORES] or not 0 <= source < len(RESTORE_SOURCES):
            return None
        return RestoreReport(
            step=words[_RESTORED_STEP],
            source=RESTORE_SOURCES[source],
            started_at=seconds[_RESTORE_BEGAN],
            finished_at=seconds[_RESTORE_ENDED],
        )


class WorkerChannels:
    """The agent's ends of the channels of one group at a time; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[int, WorkerChannel] = {}
        self._newcomers: set[int] = set()
        self._last: dict[int, Heartbeat] = {}
        self._deadline = 0.0
        self._listened = False

    def publish_assignment(self, local_rank: int, variables: Mapping[str, str]) -> None:
        """The worker is one of the group, in this place. Raises OSError."""
        with self._lock:
            channel = self._open[local_rank]
            self._newcomers.discard(local_rank)
            self._listened = self._listened or channel.listens
            try:
                channel.publish_assignment(variables)
            except ValueError as error:
                raise OSError(str(error)) from error

    def keepers(self) -> set[int]:
        """Those that can go on in another group; newcomers among them, whatever they are."""
        with self._lock:
            return self._newcomers | {n for n, page in self._open.items() if page.can_keep}

    def leave(self) -> None:
        """The group is over."""
        with self._lock:
            for channel in self._members():
                channel.request_leave()

    def broken(self) -> bool:
        """Whether something has failed in the group of one of them."""
        with self._lock:
            return any(page.is_broken for page in self._members())

    def spare(self) -> dict[int, bool]:
        """Those that are in no group, each with whether it waits for a place."""
        with self._lock:
            out = {local: page.is_out for local, page in self._open.items()}
            return {
                local: ready for local, ready in out.items() if ready or local in self._newcomers
            }

    def open(self, local_rank: int, *, newcomer: bool = False) -> str:
        """The path of the channel of a worker that is about to start. Raises OSError.

        newcomer: it is in no group before it is given a place.
        """
        with self._lock:
            self._open[local_rank] = channel = WorkerChannel.create()
            if newcomer:
                self._newcomers.add(local_rank)
            return channel.path

    def assign(self, local_rank: int, pid: int) -> None:
        """A Python worker's process, which none that it starts can pass for."""
        with self._lock:
            self._open[local_rank].assign(pid)

    def close(self, local_rank: int) -> None:
        """The worker is gone."""
        with self._lock:
            channel = self._open.pop(local_rank, None)
            self._newcomers.discard(local_rank)
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
            self._last.clear()

    def notify(self, notice: StopNotice) -> bool:
        """Ask for a stop; False if no worker here ever looks.

        Where workers of an earlier group have looked, these are about to: they may have stepped
        already, and what they have done since the last save would be lost.
        """
        with self._lock:
            now, channels = monotonic(), self._members()
            if not self._listened and not any(
                c.listens or c.will_poll_should_stop(now) for c in channels
            ):
                return False
            self._deadline = now + notice.grace_s
            for channel in channels:
                channel.ask(STOP_REASONS.index(notice.reason), self._deadline)
            return True

    def earliest_stop(self) -> int | None:
        """Return the first call at which all can stop; None while one of them is in a call."""
        with self._lock:
            calls = [channel.earliest_stop() for channel in self._members()]
            known = [call for call in calls if call is not None]
            return max(known, default=1) if len(known) == len(calls) else None

    def stop_at(self, call: int, notice: StopNotice) -> None:
        """All ranks stop at this call, for this reason."""
        with self._lock:
            deadline = min(self._deadline, monotonic() + notice.grace_s)
            for channel in self._members():
                channel.set_stop_call(call, STOP_REASONS.index(notice.reason), deadline)

    def beats(self) -> dict[int, Heartbeat]:
        """The heartbeat of each worker, by local rank."""
        with self._lock:
            return {local: channel.beat() for local, channel in self._open.items()}

    def last_beats(self) -> dict[int, Heartbeat]:
        """The same, and the last heartbeats of the workers of this group that have ended since."""
        with self._lock:
            return {**self._last, **self.beats()}

    def dumpers(self) -> dict[int, tuple[int, int]]:
        """The processes that write their stacks when asked, by local rank, each with the number
        of its file."""
        with self._lock:
            found = {local: channel.dumps for local, channel in self._open.items()}
        return {local: dumps for local, dumps in found.items() if dumps[0]}

    def _members(self) -> list[WorkerChannel]:
        return [page for local, page in self._open.items() if local not in self._newcomers]
