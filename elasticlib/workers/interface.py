"""Interface between an agent and the object that runs its workers: start, observe, stop.

Workers can be local processes, or containers or actors on other machines. `Workers` is the class
that an implementation subclasses. `Heartbeat` and `StopNotice` are the values that a worker and
its agent exchange while the worker runs.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import attrs

from ..errors import ConfigError

if TYPE_CHECKING:
    # Workers import this module too, and do not need these.
    from ..event_loop import EventLoop
    from .exits import WorkerExit
    from .spec import WorkerGroup, WorkerSpec

NO_STEP = -1  # a step that was not reported
RESTORE_SOURCES = ("memory", "peer", "disk")  # where restored state was read from, fastest first
PREEMPTED, RESIZE, DRAIN, RESTART = "preempted", "resize", "drain", "restart"
STOP_REASONS = (PREEMPTED, RESIZE, DRAIN, RESTART)


@attrs.frozen
class RestoreReport:
    """The state that a worker restored last. Times are on this machine's monotonic clock."""

    step: int
    source: str  # one of RESTORE_SOURCES
    started_at: float
    finished_at: float


@attrs.frozen
class Heartbeat:
    """The progress that a worker has reported. Times are on this machine's monotonic clock."""

    step: int = NO_STEP  # last reported step
    num_steps: int = 0  # number of reported steps
    last_step_at: float = 0.0
    last_activity_at: float = 0.0  # last step, save, or call of should_stop()
    step_durations: tuple[float, ...] = ()  # seconds of the last few steps, unordered
    last_saved_step: int = NO_STEP
    num_saves: int = 0
    can_dump_stacks: bool = False  # the worker writes its stacks on request
    is_attached: bool = False  # the worker has called context()
    first_step: int = NO_STEP
    first_at: float = 0.0  # time of the first step, 0 before
    last_restore: RestoreReport | None = None
    num_restores: int = 0
    last_snapshot_step: int = NO_STEP
    num_snapshots: int = 0
    loss: float | None = None  # last reported loss
    num_samples: float = 0.0  # samples of all steps
    # Seconds of the modules that a forked worker imported before its first step, if it took long.
    slow_imports: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class StopNotice:
    """A request to the workers to save and exit by themselves, before any signal is sent."""

    # preempted: the machine is reclaimed; resize: nodes change; drain: a node leaves, or the job is
    # stopped; restart: all workers are restarted
    reason: str
    grace_s: float  # time that the workers have

    def __attrs_post_init__(self) -> None:
        if self.reason not in STOP_REASONS or self.grace_s < 0:
            raise ConfigError(
                f"a stop notice has a reason ({', '.join(STOP_REASONS)}) and grace_s >= 0, "
                f"got {self.reason!r} and {self.grace_s}"
            )


class Workers(abc.ABC):
    """Runs the workers of one node, one group at a time.

    The agent calls the methods from one thread, one at a time, except where a method states
    otherwise, and handles no signal during a call. So no method waits for a worker to exit,
    except `kill_and_wait` and `close`.

    A subclass must implement `start`, `reap`, `running`, `stop` and `close`. The other methods
    have defaults for workers that do not support the feature.
    """

    supports_coordinated_stop = False
    """True if notified workers stop at the call of `should_stop` that `stop_at_call` gives them, so
    that all ranks of the job stop at the same step."""

    reports_heartbeats = False
    """True if `heartbeats` returns values. Hang detection needs them."""

    event_loop: EventLoop | None = None
    """The loop that the agent runs whenever it waits, if this object has descriptors or timers to
    handle. By default, the agent has a loop of its own, and `on_exit` wakes it from any thread."""

    def prepare(self, spec: WorkerSpec) -> None:  # noqa: B027 - optional
        """Begin preparations for the first start, and return. The agent calls it at most once."""

    def wait_until_prepared(self) -> None:  # noqa: B027 - optional
        """Block until the preparations are done, or `close` is called. Thread-safe."""

    @abc.abstractmethod
    def start(self, group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
        """Start all workers of the group, and its standby workers.

        Workers that are already running keep running, and get their assignment in the group.
        Standby workers start without one.

        Args:
            group: the workers of this node.
            on_exit: receives the local rank of each worker that exits. It only puts a message into
                a queue, so any thread may call it, even before `start` returns.

        Raises:
            ConfigError: this node cannot run such workers. The agent ends its run.
            WorkerStartError: a worker could not be started, and others may be running. The agent
                counts a failure, and starts the workers again if restarts are left.
        """

    @abc.abstractmethod
    def reap(self, local_rank: int) -> WorkerExit:
        """Return how a worker exited, and free its resources. Called once, after `on_exit`.

        Processes that the worker has started are killed before the next start of workers. If it
        has succeeded, they run until then, or until `close`.
        """

    @abc.abstractmethod
    def running(self) -> Mapping[int, str]:
        """Return the workers that were started and not reaped, as {local rank: name for logs}."""

    @abc.abstractmethod
    def stop(self, local_ranks: Collection[int], *, force: bool = False) -> None:
        """Ask these workers to stop, all at the same time, and return without waiting.

        Args:
            local_ranks: the workers to stop. Those that have exited are ignored.
            force: kill them (SIGKILL) instead of asking (SIGTERM).
        """

    def kill_and_wait(self) -> None:  # noqa: B027 - optional, `close` does it as well
        """Kill all workers and wait for their exits, for a bounded time.

        No worker is started afterwards. What the workers stored in memory exists until `close`.
        """

    def wait_for_background_processes(  # noqa: B027 - optional
        self, timeout_s: float, is_cancelled: Callable[[], object]
    ) -> None:
        """Wait for the end of processes that workers have started which have succeeded.

        The agent calls this at the end of a job that has succeeded, so that an upload that a script
        has started in the background is not cut.

        Args:
            timeout_s: the limit of the wait, in seconds.
            is_cancelled: returns a true value once the wait must end. It is called repeatedly, at
                least every second.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything, and leave no process running. A second call does nothing."""

    # Stop notices

    def notify(self, notice: StopNotice) -> bool:
        """Ask the workers to save and exit by themselves.

        Returns:
            True if the workers were asked. The agent then waits up to `notice.grace_s` seconds for
            their exits, and accepts any exit code. False, the default, if no worker can receive a
            notice. The agent then stops all workers at once.
        """
        del notice
        return False

    def takes_notices(self) -> bool:
        """Return whether a worker has called `should_stop`, in this or an earlier generation.

        Then SIGTERM to the agent is a drain at any time, also while no worker can receive a notice.
        """
        return False

    def earliest_stop_call(self) -> int | None:
        """Return the first call of `should_stop` at which all workers here can still stop.

        Returns:
            The number of the call, counted from 1, or None while a worker is inside a call that
            does not wait for the agent yet; always None if the workers receive no notices.
        """
        return None

    def stop_at_call(self, call: int, notice: StopNotice) -> None:  # noqa: B027 - optional
        """Make all workers stop at this call of `should_stop`, for the reason of `notice`."""

    # Progress

    def heartbeats(self) -> Mapping[int, Heartbeat]:
        """Return the heartbeats of the running workers by local rank. Thread-safe."""
        return {}

    def final_heartbeats(self) -> Mapping[int, Heartbeat]:
        """Return `heartbeats`, and the last one of each worker of the group that has exited.

        The values exist until the next start, and after `close`.
        """
        return self.heartbeats()

    def ending_workers(self) -> Mapping[int, WorkerExit]:
        """Return the workers whose program has ended and whose process still exists.

        Returns:
            What is known of their exits, by local rank, with `is_still_exiting`. The exit code is
            0 if the program has succeeded. The default is empty: such workers are not noticed.
        """
        return {}

    def dump_stacks(self, local_ranks: Collection[int], *, save: bool = False) -> Mapping[int, str]:
        """Return the Python stacks of these workers, at least of their main threads. Thread-safe.

        Args:
            local_ranks: the workers to ask.
            save: append the stacks to the workers' log directories too.

        Returns:
            The stacks as text, by local rank. A worker that does not answer within about a second
            is left out.
        """
        del local_ranks, save
        return {}

    # Workers that outlive their group: they are moved to the next group instead of restarted

    def regroupable_ranks(self) -> Collection[int]:
        """Return the local ranks of running workers that can join another group."""
        return ()

    def standby_ranks(self) -> Mapping[int, bool]:
        """Return the running workers that are in no group, as {local rank: ready for a group}."""
        return {}

    def leave_group(self) -> None:  # noqa: B027 - optional
        """Ask the workers to leave their group as soon as they can and to wait for the next."""

    def has_group_failure(self) -> bool:
        """Return True if a worker has reported that a collective of its group failed."""
        return False
