"""What an agent needs of whatever runs its workers: start, observe, stop.

Workers may be local processes, or containers or actors on other machines; an agent only starts a
group, is told of each end once, and sends the group up the stopping ladder. What a worker and its
agent tell each other meanwhile are values: a heartbeat and a notice.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import attrs

from ..errors import ConfigError

if TYPE_CHECKING:
    # Workers import this as well, and have no use for these.
    from .exits import WorkerExit
    from .spec import WorkerGroup, WorkerSpec

NO_STEP = -1
"""In place of a step that was not reported."""
RESTORE_SOURCES = ("memory", "peer", "disk")
"""Where a worker's state came from: its own node's memory, another node's, or a disk; the
quickest first."""


@attrs.frozen
class RestoreReport:
    """The state that a worker restored last. Times are on this machine's monotonic clock."""

    step: int
    source: str
    started_at: float
    finished_at: float


@attrs.frozen
class Heartbeat:
    """What a worker has reported of its steps.

    step: the last, or NOTHING. steps: how many it reported. at: when, on this machine's monotonic
    clock; alive: when it last reported a step or a save, or asked whether to stop. durations:
    seconds of the last few, in no order. saved: the last step saved, or NOTHING; saves: how many.
    dumps: whether it writes its stacks where it is asked to. attached: whether it has asked for
    its context at all. first_step, first_at: the first step that it reported, and when; NOTHING
    and 0.0 before. restored: the state that it took up last; restores: how many it did. snapshot:
    the step of the last one kept, or NOTHING; snapshots: how many. loss: the last reported.
    num_samples: the sum of all reports.
    """

    step: int = NO_STEP
    num_steps: int = 0
    last_step_at: float = 0.0
    last_activity_at: float = 0.0
    step_durations: tuple[float, ...] = ()
    last_saved_step: int = NO_STEP
    num_saves: int = 0
    can_dump_stacks: bool = False
    is_attached: bool = False
    first_step: int = NO_STEP
    first_at: float = 0.0
    last_restore: RestoreReport | None = None
    num_restores: int = 0
    last_snapshot_step: int = NO_STEP
    num_snapshots: int = 0
    loss: float | None = None
    num_samples: float = 0.0


PREEMPTED, RESIZE, DRAIN = "preempted", "resize", "drain"
STOP_REASONS = (PREEMPTED, RESIZE, DRAIN)


@attrs.frozen
class StopNotice:
    """What workers are told when they are asked to end by themselves, before any signal.

    reason: `preempted` (the machine is taken away), `resize` (the job goes on with other
    nodes), or `drain` (a node was asked to leave). seconds: in which the workers may save and
    end by themselves.
    """

    reason: str
    grace_s: float

    def __attrs_post_init__(self) -> None:
        if self.reason not in STOP_REASONS or self.grace_s < 0:
            raise ConfigError(
                f"a notice has a reason ({', '.join(STOP_REASONS)}) and seconds >= 0, "
                f"got {self.reason!r} and {self.grace_s}"
            )


class Workers(abc.ABC):
    """Runs one group at a time."""

    def prepare(self, spec: WorkerSpec) -> None:  # noqa: B027
        """Begin preparations for the first start, and return; called at most once in a run."""

    def wait_until_prepared(self) -> None:  # noqa: B027
        """Block until these preparations are done; `close` ends it. For any thread."""

    @abc.abstractmethod
    def start(self, group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
        """Start all workers of the group, and its newcomers.

        Those that run already go on: they are given their place in the group, and newcomers wait
        for theirs. `ended(local_rank)` is called from any thread, once for each worker that ends,
        with which it was started; it only enqueues.

        Raises:
            ConfigError: this node cannot run these workers at all; the agent ends its run.
            WorkerStartError: one could not be started; those that were are still running. The agent
                counts a failure, and starts the workers again if restarts are left.
        """

    @abc.abstractmethod
    def reap(self, local_rank: int) -> WorkerExit:
        """After `ended`: how it ended, with all that it left behind cleared away."""

    @abc.abstractmethod
    def running(self) -> dict[int, str]:
        """Those not yet collected, by local rank, each with a name for people ("pid 123")."""

    def notify(self, notice: StopNotice) -> bool:
        """Ask the workers to save and end at a step they all agree on.

        True: they have `notice.seconds` to end by themselves, with any exit code. False (the
        default): no worker listens, and all are stopped by a signal at once.
        """
        del notice
        return False

    supports_coordinated_stop = False
    """Whether those who were notified wait to be told at which call of `should_stop` to end, so
    that all ranks of the job end at the same; then there are the next two."""

    def earliest_stop_call(self) -> int | None:
        """Return the first call at which all workers here can stop; None while one is in a call.

        Called from any thread, after `notify` returned True.
        """
        return None

    def stop_at_call(self, call: int, notice: StopNotice) -> None:  # noqa: B027 - not all agree
        """Have all workers stop at this call, for the reason and in the time of this notice."""

    reports_heartbeats = False
    """Whether `beats` returns anything; hangs are found by that."""

    def heartbeats(self) -> Mapping[int, Heartbeat]:
        """The workers' heartbeats, by local rank. For any thread."""
        return {}

    def final_heartbeats(self) -> Mapping[int, Heartbeat]:
        """The same, and the last heartbeats of the workers of the group that have ended; until the
        next start, and after `close`."""
        return self.heartbeats()

    def dump_stacks(self) -> Mapping[int, str]:
        """Have the workers write down what each of their threads is doing; the texts, by local
        rank, of those who did so within a second, or cannot be asked, which is said then. What is
        kept for people is added to."""
        return {}

    def dump_stacks_of(self, local_ranks: Collection[int]) -> Mapping[int, str]:
        """The same of these alone, for an observer: nothing is kept."""
        return {n: text for n, text in self.dump_stacks().items() if n in local_ranks}

    def regroupable_ranks(self) -> Collection[int]:
        """Those of the running workers, by local rank, that can go on in another group, also if
        theirs breaks; the next four are for these."""
        return ()

    def leave_group(self) -> None:  # noqa: B027
        """Tell all that are in a group that it is over, so that they leave it as soon as they can,
        and wait for a place in the next."""

    def has_group_failure(self) -> bool:
        """Whether one of them has said that something has failed in its group."""
        return False

    def standby_ranks(self) -> Mapping[int, bool]:
        """Those that are in no group, by local rank, each with whether it waits for a place by now:
        those that have left theirs, and newcomers."""
        return {}

    def stop_ranks(  # noqa: B027
        self, local_ranks: Collection[int], *, force: bool = False
    ) -> None:
        """Ask these alone to stop, or end them by force."""

    @abc.abstractmethod
    def terminate(self) -> None:
        """Ask all running workers to stop, in parallel."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End all running workers by force."""

    def kill_and_wait(self) -> None:  # noqa: B027 - `close` does it as well
        """End all workers by force, and wait for it within bounds; what they kept stays until
        `close`. No others will be started."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything, and leave no process behind. A second call does nothing."""
