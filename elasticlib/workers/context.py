"""What a training script can ask its agent, and tell it: `elasticlib.context()`.

It costs a step less than a microsecond. In a script that no agent of ours started, and in the
processes that a worker starts, it asks nobody and tells nobody. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import attrs

from ..clock import monotonic
from .interface import RESTORE_SOURCES, STOP_REASONS, RestoreReport
from .stack_dump import register_dump_handler
from .worker_channel import CHANNEL_ENV, WorkerChannel

LOOK_SECONDS = 2e-4
"""Between two looks, while the ranks agree: a call of the store, in all."""


@attrs.frozen
class StopRequest:
    """Save, and end. reason: `preempted`, `resize` or `drain`; see `StopNotice`.
    deadline: until when, on this machine's monotonic clock; then the agent ends this worker."""

    reason: str
    deadline: float

    def __repr__(self) -> str:
        return f"StopRequest(reason={self.reason!r}, seconds_left={self.seconds_left:.1f})"

    @property
    def seconds_left(self) -> float:
        """Until the deadline; 0 when it has passed."""
        return max(0.0, self.deadline - monotonic())


class WorkerContext:
    """One worker's, from the agent that started it.

    All ranks make the same calls of `should_stop`, at most one a step, in the same order; that is
    what the agents count to name a call at which all of them stop.
    """

    def __init__(self, channel: WorkerChannel | None) -> None:
        self._of_worker = channel
        self._pid = os.getpid()
        self._calls = self._place = 0
        self._stop: StopRequest | None = None
        self._pause = threading.Event()
        self._before_stop: list[Callable[[], object]] = []

    @property
    def _channel(self) -> WorkerChannel | None:
        """The channel to the agent; None in a forked child, which is no worker."""
        return self._of_worker if self._pid == os.getpid() else None

    @property
    def is_attached(self) -> bool:
        """Whether there is an agent that listens."""
        return self._channel is not None

    def should_stop(self) -> StopRequest | None:
        """Whether to save and end now: None, or why and until when.

        Call it between two steps, on every rank. All ranks get the same answer at the same call,
        and after a stop it stays the same. If an agent wants a stop, the call blocks until all
        agents have agreed on the step, which takes a few milliseconds; otherwise it returns at
        once.
        """
        channel = self._channel
        if channel is None or self._stop is not None:
            return self._stop
        self._calls = call = self._calls + 1
        if channel.enter(call, monotonic()):
            self._stop = self._agreed(channel, call)
            # A worker that goes on elsewhere ends nothing for it.
            if self._stop is not None and not (channel.can_keep and self._stop.reason == "resize"):
                self._run_before_stop()
        return self._stop

    def on_stop(self, act: Callable[[], object]) -> Callable[[], None]:
        """Call `act()` when a stop is agreed, before `should_stop` returns it.

        For work in the background that must end before the process does. Functions are called in
        the order in which they were added. If one raises, the others are called all the same;
        `should_stop` raises its error, and returns the stop at its next call.

        Returns:
            A function that removes `act`; a second call does nothing.
        """
        self._before_stop.append(act)

        def take_back() -> None:
            with contextlib.suppress(ValueError):
                self._before_stop.remove(act)

        return take_back

    def _run_before_stop(self) -> None:
        with contextlib.ExitStack() as stack:
            # An ExitStack calls the last first, and all of them whatever they raise.
            for act in reversed(self._before_stop):
                stack.callback(act)

    def report_starting(self) -> None:
        """Report that the first step is about to begin: a stop that is asked for by then waits for
        the first call of `should_stop` after it."""
        if self._channel is not None:
            self._channel.report_starting(monotonic())

    def step(self, step: int, *, loss: float | None = None, samples: float | None = None) -> None:
        """Report that this step is done, as a sign of life and of progress.

        A second report of the same step, as of a loss that is known later, adds its loss and its
        samples; it is a sign of life, and does not count as another step.

        Args:
            loss: of this step, any number, shown in status and report. Reading one on a GPU waits
                for the GPU, as `item()` does.
            samples: how many samples (or tokens, or another unit of throughput) this worker has
                trained on in this step; all workers use the same unit.
        """
        if self._channel is not None:
            if loss is not None:
                loss = float(loss)  # before the time is looked at: it may be waited for
            self._channel.report_step(step, monotonic(), loss, samples)

    def report_saved(self, step: int) -> None:
        """Report that a checkpoint of this step is durable."""
        if self._channel is not None:
            self._channel.report_saved(step, monotonic())

    def report_snapshot(self, step: int) -> None:
        """Report that a snapshot of this step is in memory that survives this process."""
        if self._channel is not None:
            self._channel.report_snapshot(step, monotonic())

    def report_restored(self, step: int, *, source: str = "disk", seconds: float = 0.0) -> None:
        """Report that the state after this step was restored, and that training resumes from it.

        `CheckpointManager.restore` does this itself.

        Args:
            source: `memory` (this node's), `peer` (another node's) or `disk`.
            seconds: how long it took, until now.

        Raises:
            ValueError: unknown source, or negative seconds.
        """
        if source not in RESTORE_SOURCES or not seconds >= 0:
            raise ValueError(
                f"a state comes from {', '.join(RESTORE_SOURCES)} in 0 seconds or more, "
                f"got {source!r} in {seconds}"
            )
        if self._channel is not None:
            now = monotonic()
            self._channel.report_restored(RestoreReport(step, source, now - seconds, now))

    # -- for a worker that outlives its group ------------------------------------------------------

    def set_can_regroup(self, can: bool = True) -> None:
        """Say whether this worker can leave its group and go on in another, from now on."""
        if self._channel is not None:
            self._channel.set_can_regroup(can)

    def report_left_group(self) -> None:
        """Say that this worker does nothing in its group any more, and waits for its next place."""
        if self._channel is not None:
            self._channel.report_left_group(self._place)
            self._calls, self._stop = 0, None

    def report_group_failure(self) -> None:
        """Say that something has failed in the group, as it does when a member is lost."""
        if self._channel is not None:
            self._channel.report_group_failure(self._place)

    def should_leave_group(self) -> bool:
        """Whether the group that this worker is in is over. For any thread."""
        channel = self._channel
        return channel is not None and channel.leave >= self._place > 0

    def accept_assignment(self) -> dict[str, str] | None:
        """Its next place, once its agent has given it one: what differs in its environment (RANK,
        WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ELASTICLIB_GENERATION and others)."""
        found = None if self._channel is None else self._channel.accept_assignment(self._place)
        if found is None:
            return None
        self._place, variables = found
        self._calls, self._stop = 0, None
        return variables

    def _agreed(self, channel: WorkerChannel, call: int) -> StopRequest | None:
        channel.hold(call)
        while not (stop_at := channel.stop_at):
            # The agent that asked ends us when the time is over, if it lives.
            if self.should_leave_group() or monotonic() > channel.deadline:
                break
            self._pause.wait(LOOK_SECONDS)
        if not stop_at or call < stop_at:
            channel.go_on(call)
            return None
        return StopRequest(STOP_REASONS[channel.reason], channel.deadline)


_context: WorkerContext | None = None


def context() -> WorkerContext:
    """This process's context; the same one each time."""
    global _context
    if _context is None:
        _context = WorkerContext(_reached(os.environ.get(CHANNEL_ENV, "")))
    return _context


def _reached(path: str) -> WorkerChannel | None:
    if not path:
        return None
    with contextlib.suppress(OSError):  # of an agent that is gone
        channel = WorkerChannel(path)
        if channel.own(os.getpid()):
            register_dump_handler(channel)
            return channel
        channel.close()
    return None
