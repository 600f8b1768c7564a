"""Interface between an agent and the object that runs its workers: start, observe, stop.

Workers can be local processes, or containers or actors on other machines. `Workers` is the class
that an implementation subclasses. `Heartbeat` and `StopNotice` are the values that a worker and
its agent exchange while the worker runs; the first one is defined in `heartbeat`.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import attrs

from ..errors import ConfigError
from .heartbeat import NO_STEP as NO_STEP
from .heartbeat import RESTORE_SOURCES as RESTORE_SOURCES
from .heartbeat import Heartbeat as Heartbeat
from .heartbeat import RestoreReport as RestoreReport

if TYPE_CHECKING:
    # Workers import this module too, and do not need these.
    from .exits import WorkerExit
    from .spec import WorkerGroup, WorkerSpec

PREEMPTED, RESIZE, DRAIN, RESTART = "preempted", "resize", "drain", "restart"
STOP_REASONS = (PREEMPTED, RESIZE, DRAIN, RESTART)


@attrs.frozen
class StopNotice:
    """A request to the workers to save and exit by themselves, before any signal is sent."""

    #: preempted: the machine is reclaimed; resize: nodes change; drain: a node leaves, or the job
    #: is stopped; restart: all workers are restarted
    reason: str
    grace_s: float  #: time that the workers have

    def __attrs_post_init__(self) -> None:
        if self.reason not in STOP_REASONS or self.grace_s < 0:
            raise ConfigError(
                f"a stop notice has a reason ({', '.join(STOP_REASONS)}) and grace_s >= 0, "
                f"got {self.reason!r} and {self.grace_s}"
            )


class StopHow(enum.IntEnum):
    """A way to stop a worker, in the order of the stages of a stop."""

    NOTICE = 0  #: a request to save and exit, or to leave its group at an agreed step
    LEAVE = 1  #: its group is over: it leaves the group, and waits for the next one
    TERM = 2  #: SIGTERM
    KILL = 3  #: SIGKILL


@attrs.frozen
class WorkerView:
    """The known facts of a running worker. Reading them does not involve the worker."""

    name: str = ""  #: for logs, such as "pid 12"; empty until there is a process
    is_ready: bool = False  #: it is in no group, and ready for one
    can_regroup: bool = False  #: it can leave its group, and continue in another one
    has_left: bool = False  #: it has left its group, and waits for the next one
    group_failed: bool = False  #: it has reported that a collective of its group failed
    takes_notices: bool = False  #: a notice to save and exit has an effect, now or soon
    has_called_should_stop: bool = False  #: this worker, or an earlier one of this node
    #: The first call of `should_stop` at which it can stop. None while it is in a call that does
    #: not wait for the agent, and before it has a notice.
    stop_call: int | None = None
    has_failed: bool = False  #: its failure is recorded, and its process is alive
    has_returned: bool = False  #: its program has succeeded, and its process is alive
    heartbeat: Heartbeat | None = None  #: its progress; None if it does not report any


class Workers(abc.ABC):
    """Runs the workers of one node, one group at a time.

    The agent's loop calls the methods, and each of them returns at once, except `close`. Callbacks
    may be called from any thread, also before the method that got them returns.

    A subclass must implement `start`, `stop` and `close`. The other methods have defaults for
    workers that do not support the feature.
    """

    reports_progress = False
    """True if `view` has heartbeats. Hang detection needs them."""

    def prepare(
        self, spec: WorkerSpec, on_ready: Callable[[str], None], on_change: Callable[[], None]
    ) -> None:
        """Begin preparations for the first start. The agent calls this once.

        Args:
            spec: what will run.
            on_ready: to be called once workers can start without delay, with an empty text; or with
                the reason why this node cannot run them.
            on_change: to be called when `view` may have changed.
        """
        del spec, on_change
        on_ready("")

    @abc.abstractmethod
    def start(self, group: WorkerGroup, on_exit: Callable[[WorkerExit, str], None]) -> None:
        """Start all workers of the group, and its standby workers.

        Workers that are already running keep running, and get their assignment in the group: `view`
        shows them as its members when this call returns. Standby workers start without one.

        Args:
            group: the workers of this node.
            on_exit: to be called exactly once for each worker that this call starts, when it has
                exited, or could not be started. The text is empty, or the reason why this node
                cannot run such workers, so that a restart would fail in the same way.

        Raises:
            ConfigError: this node cannot run such workers.
            ElasticError: the workers for which `on_exit` is not called were never started.
        """

    @abc.abstractmethod
    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        """Stop these workers. Those that have exited are ignored.

        Args:
            local_ranks: the workers.
            how: LEAVE requests that they leave their group as soon as they can, and wait for the
                next one. TERM sends SIGTERM, and KILL sends SIGKILL.
        """

    def notify(self, notice: StopNotice, call: int | None = None) -> None:  # noqa: B027 - optional
        """Ask all members to save and exit by themselves, or to leave their group.

        Args:
            notice: why, and how much time they have. A later one replaces it.
            call: the call of `should_stop` at which all of them stop, counted from 1. None while
                it is unknown: then `view` must show at which call each of them can stop.
        """

    def view(self) -> Mapping[int, WorkerView]:
        """Return what is known of the running workers, by local rank."""
        return {}

    def dump_stacks(
        self,
        local_ranks: Collection[int],
        on_done: Callable[[Mapping[int, str]], None],
        *,
        save: bool = False,
    ) -> None:
        """Make these workers write their Python stacks, and pass them to `on_done`, in any thread.

        This method is thread-safe. A worker that does not answer within about a second is left out.

        Args:
            local_ranks: the workers.
            on_done: to be called with the stacks, by local rank.
            save: also append the stacks to a file of each worker, if workers have files.
        """
        del local_ranks, save
        on_done({})

    def finish(self, until: float, on_done: Callable[[], None]) -> None:
        """Let what succeeded workers have started end, such as an upload in the background.

        Args:
            until: when the wait ends, on this machine's monotonic clock. A later call replaces it.
            on_done: to be called when the wait is over.
        """
        del until
        on_done()

    @abc.abstractmethod
    def close(self, grace_s: float = 0.0) -> None:
        """Kill all workers, free everything, and leave no process running. This may block.

        A second call does nothing.

        Args:
            grace_s: seconds that the workers have after SIGTERM.
        """
