"""Channel between one worker and its agent: a page of shared memory.

The worker reports its steps, saves and calls of `should_stop`; the agent writes its requests. Each
word of the page has one writer, and is read and written as a whole, so neither side takes a lock.
What the agent must know at once is also announced by a byte in a pipe of the agent, which
the worker opens by its path and closes again; so the agent does not poll the page. A worker is
trusted as much as its agent's user; the kernel only prevents that the page is shortened
while the agent has it mapped. Workers import this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import sys
from collections.abc import Mapping

import attrs

from ..clock import monotonic
from ..errors import ConfigError
from ..untrusted import read_object
from .heartbeat import NO_STEP, RESTORE_SOURCES, Heartbeat, RestoreReport
from .interface import STOP_REASONS, WorkerView

CHANNEL_ENV = "ELASTICLIB_CHANNEL"  # holds the path of the page in a worker's environment
PAGE_BYTES = 8192
LAYOUT_VERSION = (0x656C6173 << 32) + 5  # "elas", and the version of the words below
NUM_STEP_DURATIONS = 32  # enough for a median of the recent steps
FIRST_POLL_TIMEOUT_S = 10.0  # a worker that starts to train calls should_stop within this time
CALLS_SETTLE_S = 0.001  # see `WorkerChannel.request_stop`

# Words that the agent writes once.
_LAYOUT = 0
_WORKER_PID = 1  # only this process may report; 0 while the agent does not know it

# Words that the worker writes. A call of should_stop starts, and then either finishes with None or
# blocks until the agent names the call at which all ranks stop.
_OWNER_PID = 2  # the process that reports for the worker
_CALL_STARTED = 3
_CALL_FINISHED = 4
_CALL_BLOCKED = 5
_ACTIVE_AT = 6  # seconds: the last call, step, save or restore
_STARTING_AT = 7  # seconds: the first step was about to start
_STEP = 8
_NUM_STEPS = 9
_STEP_AT = 10  # seconds
_FIRST_STEP = 11
_FIRST_STEP_AT = 12  # seconds
_HAS_LOSS = 13
_LOSS = 14
_NUM_SAMPLES = 15
_SAVED_STEP = 16
_NUM_SAVES = 17
_SNAPSHOT_STEP = 18
_NUM_SNAPSHOTS = 19
_RESTORED_STEP = 20
_RESTORE_SOURCE = 21  # index in RESTORE_SOURCES
_RESTORE_STARTED_AT = 22  # seconds
_RESTORE_FINISHED_AT = 23  # seconds
_NUM_RESTORES = 24
_DUMPER_PID = 25  # the process that writes its stacks when it gets the signal
_DUMPER_FD = 26  # the number of the file that it writes them to
_CAN_REGROUP = 27
_ACCEPTED = 28  # number of the last assignment that the worker accepted
_LEFT = 29  # 1 + number of the last assignment whose group the worker has left
_FAILED_GROUP = 30  # number of the assignment in whose group something failed

_HAS_FINISHED = 31  # the program has finished, and its process may exist
_EXIT_CODE = 39  # of the program; 0 while it runs
_FAILED_AT = 40  # seconds of the wall clock: the first failure of the program

# Words that the agent writes.
_STOP_REQUESTED = 32
_STOP_CALL = 33  # the call at which all ranks stop; 0 until the agents have agreed
_STOP_REASON = 34  # index in STOP_REASONS
_STOP_DEADLINE = 35  # seconds
_ASSIGNED = 36  # number of the last assignment that the agent published
_LAST_FINISHED_GROUP = 37  # number of the last assignment whose group has finished
_WAKE_FD = 38  # the number of the pipe's writing end in the agent; 0 without one

_DURATIONS = 64  # NUM_STEP_DURATIONS words of the worker
_SLOW_IMPORTS = 96  # the length in bytes of JSON in the words that follow; 0 without a report
MAX_SLOW_IMPORTS, MAX_SLOW_IMPORTS_BYTES = 4, 248
_ASSIGNMENT = 1024  # byte offset of the last assignment: its length in 8 bytes, then JSON
MAX_ASSIGNMENT_BYTES = PAGE_BYTES - _ASSIGNMENT - 8

_RESET_BY_ASSIGNMENT = (
    *(_CALL_STARTED, _CALL_FINISHED, _CALL_BLOCKED, _NUM_STEPS, _FIRST_STEP_AT),
    *(_HAS_LOSS, _NUM_SAMPLES, _NUM_SAVES, _NUM_SNAPSHOTS, _NUM_RESTORES),
    _SLOW_IMPORTS,
)


class WorkerChannel:
    """An end of a channel: the worker's, opened by path, or the agent's, from `create`.

    Times are seconds of this machine's monotonic clock.

    Args:
        path: The value of CHANNEL_ENV.

    Raises:
        OSError: There is no channel at this path.
        ConfigError: The agent runs a different version of elasticlib.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1  # the memory file in the agent, which created it; -1 in the worker
        self._requested_at: float | None = None  # in the agent: time of the last `request_stop`
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            layout = int.from_bytes(os.pread(fd, 8, 8 * _LAYOUT), sys.byteorder)
            if os.fstat(fd).st_size != PAGE_BYTES or layout >> 32 != LAYOUT_VERSION >> 32:
                raise OSError(f"{path} is not a worker's channel of {PAGE_BYTES} bytes")
            if layout != LAYOUT_VERSION:
                raise ConfigError(
                    f"the worker's elasticlib has channel layout {_number(LAYOUT_VERSION)}, "
                    f"the agent's has layout {_number(layout)}: install the same version of "
                    "elasticlib for the agent and its workers"
                )
            self._memory = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self._view = memoryview(self._memory)
        self._words = self._view.cast("q")  # the words of the page as integers
        self._seconds = self._view.cast("d")  # the same words as floating point numbers

    @classmethod
    def create(cls, wake_fd: int = 0) -> WorkerChannel:
        """Create a channel without a name in any directory; it exists while a process has it open.

        Args:
            wake_fd: the descriptor of a pipe that gets a byte when `view` should be called again.

        Raises:
            OSError: The memory or the file descriptor cannot be had.
        """
        fd = os.memfd_create("elasticlib-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Reserve the memory now: a later write without memory would end in SIGBUS.
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            # Reading past the end of a shortened file would kill the agent.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            os.pwrite(fd, LAYOUT_VERSION.to_bytes(8, sys.byteorder), 8 * _LAYOUT)
            # /proc may belong to another PID namespace, where this process has another number.
            channel = cls(f"/proc/{os.readlink('/proc/self')}/fd/{fd}")
        except BaseException:
            os.close(fd)
            raise
        channel._fd = fd
        channel._words[_STEP] = channel._words[_SAVED_STEP] = NO_STEP
        channel._words[_WAKE_FD] = wake_fd
        return channel

    def close(self) -> None:
        """Unmap the page. A second call does nothing."""
        for view in (self._words, self._seconds, self._view):
            view.release()
        self._memory.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # -- the worker's end ---------------------------------------------------------------------

    def claim(self, pid: int) -> bool:
        """Claim the channel for a process; return whether this process reports for the worker.

        Only the process that the agent named reports. If the agent named none, it is the first
        process that claims the channel.
        """
        words = self._words
        if words[_WORKER_PID] not in (0, pid):
            return False
        if not words[_OWNER_PID]:
            words[_OWNER_PID] = pid
        return words[_OWNER_PID] == pid

    def begin_call(self, call: int, now: float = 0.0) -> bool:
        """Begin a call of `should_stop`; return whether it must block for the agent's answer.

        The worker writes before it reads, and so does the agent: at least one of them sees what the
        other has written. This relies on the order of a store and a load of different words, which
        a processor may change, and Python has no fence. See `request_stop` for what makes it safe.
        """
        words = self._words
        words[_CALL_STARTED] = call
        if call == 1:
            self._wake_agent()  # The agent can give notices to this worker from now on.
        self._seconds[_ACTIVE_AT] = now
        if words[_STOP_REQUESTED]:
            return True
        words[_CALL_FINISHED] = call
        return False

    def block_call(self, call: int) -> None:
        """Report that this call waits until the agent names the call at which all ranks stop."""
        self._words[_CALL_BLOCKED] = call
        self._wake_agent()

    def finish_call(self, call: int) -> None:
        """Report that this call returns None."""
        self._words[_CALL_FINISHED] = call

    @property
    def stop_call(self) -> int:
        """The call at which all ranks stop; 0 until it is known."""
        return self._words[_STOP_CALL]

    @property
    def stop_reason(self) -> str:
        return STOP_REASONS[self._words[_STOP_REASON]]

    @property
    def stop_deadline(self) -> float:
        return self._seconds[_STOP_DEADLINE]

    def report_starting(self, now: float) -> None:
        self._seconds[_STARTING_AT] = now

    def report_step(
        self, step: int, now: float, loss: float | None = None, samples: float | None = None
    ) -> None:
        """Count a step, unless it repeats the last one; set the loss and add the samples anyway."""
        words, seconds = self._words, self._seconds
        seconds[_ACTIVE_AT] = now
        count = words[_NUM_STEPS]
        if not count or words[_STEP] != step:
            if count:
                seconds[_DURATIONS + count % NUM_STEP_DURATIONS] = now - seconds[_STEP_AT]
            else:
                words[_FIRST_STEP] = step
                seconds[_FIRST_STEP_AT] = now
            words[_STEP] = step
            seconds[_STEP_AT] = now
            words[_NUM_STEPS] = count + 1
        if samples is not None:
            seconds[_NUM_SAMPLES] += samples
        if loss is not None:
            seconds[_LOSS] = loss
            words[_HAS_LOSS] = 1

    def report_slow_imports(self, seconds: Mapping[str, float]) -> None:
        """Report how long modules took to be imported; the slowest are kept."""
        slowest = sorted(seconds.items(), key=lambda item: -item[1])[:MAX_SLOW_IMPORTS]
        text = b""
        for count in range(1, len(slowest) + 1):
            longer = json.dumps({name: round(took, 3) for name, took in slowest[:count]}).encode()
            text = longer if len(longer) <= MAX_SLOW_IMPORTS_BYTES else text
        begin = 8 * (_SLOW_IMPORTS + 1)
        self._view[begin : begin + len(text)] = text
        self._words[_SLOW_IMPORTS] = len(text)

    def report_saved(self, step: int, now: float = 0.0) -> None:
        self._words[_SAVED_STEP] = step
        self._seconds[_ACTIVE_AT] = now
        self._words[_NUM_SAVES] += 1

    def report_snapshot(self, step: int, now: float = 0.0) -> None:
        self._words[_SNAPSHOT_STEP] = step
        self._seconds[_ACTIVE_AT] = now
        self._words[_NUM_SNAPSHOTS] += 1

    def report_restored(self, report: RestoreReport) -> None:
        words, seconds = self._words, self._seconds
        words[_RESTORED_STEP] = report.step
        words[_RESTORE_SOURCE] = RESTORE_SOURCES.index(report.source)
        seconds[_RESTORE_STARTED_AT] = report.started_at
        seconds[_RESTORE_FINISHED_AT] = seconds[_ACTIVE_AT] = report.finished_at
        words[_NUM_RESTORES] += 1

    def set_stack_dumper(self, pid: int, fd: int) -> None:
        """Report that this process writes its stacks to this descriptor when it gets the signal."""
        self._words[_DUMPER_FD] = fd
        self._words[_DUMPER_PID] = pid

    def set_can_regroup(self, can_regroup: bool = True) -> None:
        """Report whether the worker can leave its group and continue in another one."""
        self._words[_CAN_REGROUP] = can_regroup
        self._wake_agent()

    def report_left_group(self, assignment: int) -> None:
        """Report that the worker has left the group of this assignment; 0 if it was in none."""
        self._words[_LEFT] = assignment + 1
        self._wake_agent()

    def report_group_failure(self, assignment: int) -> None:
        """Report that something failed in the group of this assignment, such as a lost peer."""
        self._words[_FAILED_GROUP] = assignment
        self._wake_agent()

    def report_program_end(self, exit_code: int, now: float) -> None:
        """Report that the worker's program has finished. Its process may need long to exit.

        Args:
            exit_code: the exit code; not 0 if the program has raised.
            now: the time of the wall clock. The time of the first failure is kept.
        """
        if exit_code:
            self._seconds[_FAILED_AT] = self._seconds[_FAILED_AT] or now
        self._words[_EXIT_CODE] = exit_code
        self._words[_HAS_FINISHED] = 1
        self._wake_agent()

    def _wake_agent(self) -> None:
        """Let the agent look at this page now."""
        wake_fd = self._words[_WAKE_FD]
        with contextlib.suppress(OSError):  # The agent has exited, or the pipe is full.
            if wake_fd:
                path = f"{os.path.dirname(self.path)}/{wake_fd}"
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.write(fd, b"x")
                finally:
                    os.close(fd)

    @property
    def finished_group(self) -> int:
        """The number of the last assignment whose group has finished; 0 before the first one."""
        return self._words[_LAST_FINISHED_GROUP]

    def accept_assignment(self, after: int) -> tuple[int, dict[str, str]] | None:
        """Return the number and the variables of the last assignment if it is newer than `after`.

        The first number is 1. Calls, steps, saves and restores are counted from 0 again.
        """
        words = self._words
        number = words[_ASSIGNED]
        if number <= after:
            return None
        begin = _ASSIGNMENT + 8
        length = int.from_bytes(self._view[_ASSIGNMENT:begin], sys.byteorder)
        variables: dict[str, str] = json.loads(bytes(self._view[begin : begin + length]))
        for index in _RESET_BY_ASSIGNMENT:
            words[index] = 0
        words[_STEP] = words[_SAVED_STEP] = NO_STEP
        words[_ACCEPTED] = number
        return number, variables

    # -- the agent's end ----------------------------------------------------------------------

    def set_worker_pid(self, pid: int) -> None:
        """Let only this process report, although its children may claim the channel first."""
        self._words[_WORKER_PID] = pid

    def view(self, name: str, *, is_member: bool, has_called_should_stop: bool) -> WorkerView:
        """Return what the agent knows of the worker.

        Args:
            name: the worker's name, for logs.
            is_member: the worker is a member of the group.
            has_called_should_stop: an earlier worker of this node has called `should_stop`. Then
                this one is expected to call it as well: otherwise it would lose the steps since its
                last save.
        """
        words, now = self._words, monotonic()
        has_called = has_called_should_stop or self.has_called_should_stop
        # The worker has left its last group, or has never been in one.
        is_ready = bool(words[_CAN_REGROUP]) and words[_LEFT] > words[_ASSIGNED]
        return WorkerView(
            name=name,
            is_ready=is_ready,
            can_regroup=bool(words[_CAN_REGROUP]),
            has_left=is_ready and words[_ASSIGNED] > 0,
            group_failed=is_member and 0 < words[_ASSIGNED] == words[_FAILED_GROUP],
            takes_notices=is_member and (has_called or self._will_call_should_stop(now)),
            has_called_should_stop=has_called,
            stop_call=self._earliest_stop_call(now) if is_member else None,
            has_failed=words[_EXIT_CODE] != 0,
            has_returned=words[_HAS_FINISHED] != 0 and words[_EXIT_CODE] == 0,
            heartbeat=self.heartbeat(),
        )

    @property
    def failure(self) -> tuple[float, int]:
        """The time of the wall clock when the program failed, and its exit code.

        The time is infinite, and the code is 0, if no failure was reported.
        """
        code = self._words[_EXIT_CODE]
        return (self._seconds[_FAILED_AT], code) if code else (float("inf"), 0)

    @property
    def can_regroup(self) -> bool:
        return bool(self._words[_CAN_REGROUP])

    @property
    def _is_between_groups(self) -> bool:
        """Return whether all reports of the worker belong to an earlier group."""
        words = self._words
        return bool(words[_CAN_REGROUP]) and 1 < words[_ASSIGNED] > words[_ACCEPTED]

    def request_leave(self) -> None:
        """Report to the worker that its group has finished."""
        self._words[_LAST_FINISHED_GROUP] = self._words[_ASSIGNED]

    def publish_assignment(self, variables: Mapping[str, str]) -> None:
        """Give the worker its place in the next group, as variables of its environment.

        The worker is a standby worker, or has not accepted any assignment yet.

        Raises:
            ValueError: The variables are longer than MAX_ASSIGNMENT_BYTES.
        """
        text = json.dumps(dict(variables)).encode()
        if len(text) > MAX_ASSIGNMENT_BYTES:
            raise ValueError(
                f"a worker's assignment must have at most {MAX_ASSIGNMENT_BYTES} bytes, "
                f"got {len(text)}"
            )
        self._words[_STOP_REQUESTED] = self._words[_STOP_CALL] = 0
        self._requested_at = None
        content = len(text).to_bytes(8, sys.byteorder) + text
        self._view[_ASSIGNMENT : _ASSIGNMENT + len(content)] = content
        self._words[_ASSIGNED] += 1

    @property
    def has_called_should_stop(self) -> bool:
        """Return whether the worker has called `should_stop` in its group."""
        return self._words[_CALL_STARTED] > 0

    def _will_call_should_stop(self, now: float) -> bool:
        """Return whether the first call of `should_stop` is expected soon.

        This is so if the worker has reported within the last FIRST_POLL_TIMEOUT_S that its first
        step is about to begin, and has reported no step or save. A worker that reports a step or a
        save before its first call of `should_stop` is taken for one that never calls it.
        """
        words = self._words
        has_reported = words[_NUM_STEPS] or words[_NUM_SAVES]
        return not has_reported and 0 < self._seconds[_STARTING_AT] > now - FIRST_POLL_TIMEOUT_S

    @property
    def stack_dumper(self) -> tuple[int, int]:
        """The pid of the process that writes its stacks on a signal, and its descriptor for them.

        The pid is 0 if there is no such process.
        """
        return self._words[_DUMPER_PID], self._words[_DUMPER_FD]

    def request_stop(self, reason: str, deadline: float) -> None:
        """Make the next call of `should_stop` block until `set_stop_call`.

        The agent may read the worker's calls only when the worker surely sees the request, or has
        surely shown the call that does not see it. So `view` shows a call only at least
        CALLS_SETTLE_S after the request, and in a later turn of the agent's loop, that is after a
        system call. By then, each processor has long written back its stores; an architecture that
        delayed a store for longer would break the agreement on the call.
        """
        self._words[_STOP_REASON] = STOP_REASONS.index(reason)
        self._seconds[_STOP_DEADLINE] = deadline
        self._words[_STOP_REQUESTED] = 1
        if self._requested_at is None:
            self._requested_at = monotonic()

    def _earliest_stop_call(self, now: float) -> int | None:
        """Return the first call of `should_stop` at which the worker can stop.

        Returns None while that is not known: no stop was requested, or it was requested just now,
        or the worker is inside a call that does not wait for the agent yet.
        """
        if self._requested_at is None or now < self._requested_at + CALLS_SETTLE_S:
            return None
        words = self._words
        if self._is_between_groups:
            return 1
        call = words[_CALL_STARTED]
        if words[_CALL_FINISHED] == call:
            return call + 1
        return call if words[_CALL_BLOCKED] == call else None

    def set_stop_call(self, call: int, reason: str, deadline: float) -> None:
        """Make all ranks stop at this call."""
        self._words[_STOP_REASON] = STOP_REASONS.index(reason)
        self._seconds[_STOP_DEADLINE] = deadline
        self._words[_STOP_CALL] = call

    def heartbeat(self) -> Heartbeat:
        words, seconds = self._words, self._seconds
        heartbeat = Heartbeat(
            last_activity_at=seconds[_ACTIVE_AT],
            can_dump_stacks=bool(words[_DUMPER_PID]),
            is_attached=bool(words[_OWNER_PID]),
        )
        if self._is_between_groups:
            return heartbeat
        count = words[_NUM_STEPS]
        durations = (
            range(NUM_STEP_DURATIONS) if count > NUM_STEP_DURATIONS else range(1, max(count, 1))
        )
        return attrs.evolve(
            heartbeat,
            step=words[_STEP],
            num_steps=count,
            last_step_at=seconds[_STEP_AT],
            step_durations=tuple(seconds[_DURATIONS + slot] for slot in durations),
            first_step=words[_FIRST_STEP] if seconds[_FIRST_STEP_AT] else NO_STEP,
            first_at=seconds[_FIRST_STEP_AT],
            loss=seconds[_LOSS] if words[_HAS_LOSS] else None,
            num_samples=seconds[_NUM_SAMPLES],
            last_saved_step=words[_SAVED_STEP],
            num_saves=words[_NUM_SAVES],
            last_snapshot_step=words[_SNAPSHOT_STEP] if words[_NUM_SNAPSHOTS] else NO_STEP,
            num_snapshots=words[_NUM_SNAPSHOTS],
            last_restore=self._last_restore() if words[_NUM_RESTORES] else None,
            num_restores=words[_NUM_RESTORES],
            slow_imports=self._slow_imports(),
        )

    def _slow_imports(self) -> Mapping[str, float]:
        length, begin = self._words[_SLOW_IMPORTS], 8 * (_SLOW_IMPORTS + 1)
        if not 0 < length <= MAX_SLOW_IMPORTS_BYTES:
            return {}
        try:
            found = read_object(bytes(self._view[begin : begin + length]))
        except ValueError:  # A program may have written anything to this memory.
            return {}
        return {name: took for name, took in found.items() if isinstance(took, float)}

    def _last_restore(self) -> RestoreReport:
        return RestoreReport(
            step=self._words[_RESTORED_STEP],
            source=RESTORE_SOURCES[self._words[_RESTORE_SOURCE]],
            started_at=self._seconds[_RESTORE_STARTED_AT],
            finished_at=self._seconds[_RESTORE_FINISHED_AT],
        )


def _number(layout: int) -> int:
    return layout & 0xFFFFFFFF
