"""Context of a worker: a training script reports to its agent, and learns when to stop.

`elasticlib.context()` returns the context of this process. Calls cost less than a microsecond, so a
script can make them in each step. In a script that no agent started, and in processes that a worker
starts, the context is detached: reports are dropped and `should_stop` returns None. This module
uses the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import attrs

from ..clock import monotonic
from .import_timer import take_slow_imports
from .interface import RESIZE, RESTORE_SOURCES, RestoreReport
from .stack_dump import register_dump_handler
from .worker_channel import CHANNEL_ENV, WorkerChannel

AGREEMENT_POLL_INTERVAL_S = 2e-4  # the agents agree within about one call of the store


@attrs.frozen
class StopRequest:
    """A request to save and exit, which all ranks get at the same call of `should_stop`.

    Attributes:
        reason: `preempted` (the machine is taken away), `resize` (the job continues with other
            nodes), `drain` (a node leaves on purpose, or an operator stops the job) or `restart`
            (an operator restarts the workers).
        deadline: The time on this machine's monotonic clock at which the agent stops this worker
            by a signal.
    """

    reason: str
    deadline: float

    def __repr__(self) -> str:
        return f"StopRequest(reason={self.reason!r}, seconds_left={self.seconds_left:.1f})"

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; 0 when it has passed."""
        return max(0.0, self.deadline - monotonic())


class WorkerContext:
    """Connection of this worker to the agent that started it.

    All ranks must call `should_stop` equally often, at most once per step, because the agents name
    the call at which all ranks stop by its number. The methods may be called from any thread, but
    `should_stop` from one thread only. A forked child of the worker has a detached context.
    """

    def __init__(self, channel: WorkerChannel | None) -> None:
        self._channel = channel  # None without an agent, and in a forked child
        self._num_calls = 0  # calls of should_stop in this group
        self._has_stepped = False  # in any group
        self._assignment = 0  # number of the last accepted assignment; 0 before the first one
        self._stop: StopRequest | None = None  # the answer once a stop is agreed
        self._stop_callbacks: list[Callable[[], object]] = []
        self._never = threading.Event()  # never set; its wait() is a sleep

    @property
    def is_attached(self) -> bool:
        """Return whether an agent receives the reports of this process."""
        return self._channel is not None

    def should_stop(self) -> StopRequest | None:
        """Return the request to save and exit now, or None to continue.

        Call this method between two steps, on every rank. All ranks must call it equally often,
        because the agents agree on the number of the call at which all ranks stop. A rank that
        calls it more often stops at an earlier step, and the next collective of the other ranks
        fails.

        All ranks get the same answer at the same call, and after a stop request the answer stays
        the same. The call returns at once, unless an agent wants a stop: then it blocks until all
        agents have agreed on the call, which takes a few milliseconds.

        Returns:
            The reason and the deadline of the stop, or None.

        Raises:
            Exception: The error of a function that `on_stop` registered.
        """
        channel = self._channel
        if channel is None or self._stop is not None:
            return self._stop
        self._num_calls = call = self._num_calls + 1
        if channel.begin_call(call, monotonic()):
            self._stop = stop = self._wait_for_agreement(channel, call)
            # A worker that regroups after a resize continues, so nothing has to finish.
            if stop is not None and not (channel.can_regroup and stop.reason == RESIZE):
                self._run_stop_callbacks()
        return self._stop

    def on_stop(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Register a function that `should_stop` calls before it first returns a stop request.

        Use it to end work in the background that must end before the process does. Functions are
        called in the order of their registration. They are not called for a resize in which this
        worker regroups, because its process continues. If a function raises, the others are still
        called; `should_stop` raises the error, and returns the request at its next call.

        Args:
            callback: The function, called without arguments.

        Returns:
            A function that removes the registration. A second call does nothing.
        """
        self._stop_callbacks.append(callback)

        def remove() -> None:
            with contextlib.suppress(ValueError):
                self._stop_callbacks.remove(callback)

        return remove

    def step(self, step: int, *, loss: float | None = None, samples: float | None = None) -> None:
        """Report that a step is finished; this is the worker's heartbeat.

        A second report of the same step does not count as another step; its loss replaces the
        earlier one, and its samples are added. The agent samples the reports into events, which
        `status` and `report` show.

        Args:
            step: The number of the step.
            loss: The loss of this step. Reading it from a GPU waits for the GPU, as `item()` does.
            samples: The number of samples, tokens or another unit that this worker has trained on
                in this step. All workers must use the same unit.
        """
        channel = self._channel
        if channel is not None:
            if loss is not None:
                loss = float(loss)  # may wait for the GPU, so the time is read afterwards
            if not self._has_stepped:
                self._has_stepped = True
                channel.report_slow_imports(take_slow_imports())
            channel.report_step(step, monotonic(), loss, samples)

    def report_starting(self) -> None:
        """Report that the first step is about to begin.

        An agent that wants a stop by then waits for the first call of `should_stop` after the step.
        `CheckpointManager.restore` makes this report.
        """
        if self._channel is not None:
            self._channel.report_starting(monotonic())

    def report_saved(self, step: int) -> None:
        """Report that a checkpoint is durable. `CheckpointManager` makes this report.

        Args:
            step: The step of the checkpoint.
        """
        if self._channel is not None:
            self._channel.report_saved(step, monotonic())

    def report_snapshot(self, step: int) -> None:
        """Report that a snapshot is stored in memory that remains when this process exits.

        Args:
            step: The step of the snapshot.
        """
        if self._channel is not None:
            self._channel.report_snapshot(step, monotonic())

    def report_restored(self, step: int, *, source: str = "disk", seconds: float = 0.0) -> None:
        """Report that training resumes from a restored state.

        `CheckpointManager.restore` makes this report.

        Args:
            step: The step after which the state was saved.
            source: `memory` (this node's), `peer` (another node's) or `disk`.
            seconds: How long the restore took; it has just finished.

        Raises:
            ValueError: The source is unknown, or the duration is negative.
        """
        if source not in RESTORE_SOURCES or not seconds >= 0:
            raise ValueError(
                f"a state is restored from {', '.join(RESTORE_SOURCES)} in 0 seconds or more, "
                f"got {source!r} in {seconds}"
            )
        if self._channel is not None:
            now = monotonic()
            self._channel.report_restored(RestoreReport(step, source, now - seconds, now))

    # -- for a worker that continues in another group ----------------------------------------------

    def set_can_regroup(self, can_regroup: bool = True) -> None:
        """Report whether this worker can leave its group and continue in another one.

        Args:
            can_regroup: Whether it can, from now on.
        """
        if self._channel is not None:
            self._channel.set_can_regroup(can_regroup)

    def report_left_group(self) -> None:
        """Report that this worker has left its group and waits for its next assignment."""
        if self._channel is not None:
            self._channel.report_left_group(self._assignment)
            self._num_calls, self._stop = 0, None

    def report_group_failure(self) -> None:
        """Report that something failed in the group, as it does when a member is lost."""
        if self._channel is not None:
            self._channel.report_group_failure(self._assignment)

    def should_leave_group(self) -> bool:
        """Return whether the group of this worker has finished; False before its first group."""
        channel = self._channel
        return channel is not None and channel.finished_group >= self._assignment > 0

    def accept_assignment(self) -> dict[str, str] | None:
        """Accept the place in the next group that the agent has assigned to this worker.

        Returns:
            The variables of the environment that differ in the next group (RANK, WORLD_SIZE,
            MASTER_ADDR, MASTER_PORT, ELASTICLIB_GENERATION and others), or None if there is no
            assignment that this worker has not accepted yet.
        """
        channel = self._channel
        found = None if channel is None else channel.accept_assignment(self._assignment)
        if found is None:
            return None
        self._assignment, variables = found
        self._num_calls, self._stop = 0, None
        return variables

    def _wait_for_agreement(self, channel: WorkerChannel, call: int) -> StopRequest | None:
        channel.block_call(call)
        while not (stop_call := channel.stop_call):
            # An agent that lives stops this worker at the deadline.
            if self.should_leave_group() or monotonic() > channel.stop_deadline:
                break
            self._never.wait(AGREEMENT_POLL_INTERVAL_S)
        if not stop_call or call < stop_call:
            channel.finish_call(call)
            return None
        return StopRequest(channel.stop_reason, channel.stop_deadline)

    def _run_stop_callbacks(self) -> None:
        with contextlib.ExitStack() as stack:
            # An ExitStack calls the last first, and all of them, even if some raise.
            for callback in reversed(self._stop_callbacks):
                stack.callback(callback)

    def _detach(self) -> None:
        self._channel = None


_context: WorkerContext | None = None  # of this process


def context() -> WorkerContext:
    """Return the context of this process, the same object at each call.

    Returns:
        The context. It is detached in a process that is not a worker of an elasticlib agent.

    Raises:
        ConfigError: The agent runs a different version of elasticlib.
    """
    global _context
    if _context is None:
        _context = WorkerContext(_open_channel(os.environ.get(CHANNEL_ENV, "")))
    return _context


def _open_channel(path: str) -> WorkerChannel | None:
    if not path:
        return None
    with contextlib.suppress(OSError):  # the agent has exited
        channel = WorkerChannel(path)
        if channel.claim(os.getpid()):
            register_dump_handler(channel)
            return channel
        channel.close()
    return None


def _detach_child() -> None:
    """Detach a context that a forked child inherits: the child is no worker."""
    global _context
    if _context is not None:
        _context._detach()
        _context = None


os.register_at_fork(after_in_child=_detach_child)
