"""What an agent needs of whatever runs its workers: start, observe, stop.

Workers may be processes here, containers or actors elsewhere; an agent only starts a group, is
told of each end once, and sends the group up the stopping ladder.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

from .exits import WorkerExit
from .spec import WorkerGroup, WorkerSpec


class Workers(abc.ABC):
    """Runs one group at a time."""

    def prepare(self, spec: WorkerSpec) -> None:  # noqa: B027
        """Begin what can be done before the first start, and return; called at most once a run."""

    def await_prepared(self) -> None:  # noqa: B027
        """Block, in any thread, until a start will not have to; `close` ends it."""

    @abc.abstractmethod
    def start(self, group: WorkerGroup, ended: Callable[[int], None]) -> None:
        """Start all workers of the group.

        `ended(local_rank)` is called from any thread, once for each worker that ends; it only
        enqueues.

        Raises:
            WorkerStartError: one could not be started; those that were are still running.
        """

    @abc.abstractmethod
    def collect(self, local_rank: int) -> WorkerExit:
        """After `ended`: how it ended, with all that it left behind cleared away."""

    @abc.abstractmethod
    def running(self) -> dict[int, str]:
        """Those not yet collected, by local rank, each with a name for people ("pid 123")."""

    @abc.abstractmethod
    def terminate(self) -> None:
        """Ask all running workers, in parallel, to stop."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End all running workers by force."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything; nothing that was started is left. Closing twice is harmless."""
