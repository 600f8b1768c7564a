"""Result of an agent's run, and the service that stores snapshots for its workers."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import attrs

from ..constants import DRAINED_EXIT_CODE, STOPPED_EXIT_CODE, UNFIT_NODE_EXIT_CODE
from ..rendezvous.interface import RendezvousInfo
from ..workers.exits import WorkerExit
from ..workers.spec import WorkerGroup, WorkerState


@attrs.frozen
class RootCause:
    """The first failure of a generation, over all nodes.

    If a node cannot run such workers, or workers hang, no single worker has failed: `rank` and
    `local_rank` are then -1.
    """

    host: str
    generation: int
    rank: int
    local_rank: int
    pid: int
    returncode: int
    signal: str
    summary: str  # one line: which worker, how it failed, and why
    message: str = ""
    traceback: str = ""
    stderr_tail: str = ""  # the end of its stderr, if it has written no traceback
    log_dir: str = ""  # directory of the worker's files on `host`
    subsequent_ranks: tuple[int, ...] = ()  # global ranks that are known to have failed later


@attrs.frozen
class RunResult:
    """The result of one agent's run."""

    state: WorkerState
    reason: str  #: one line
    return_values: dict[int, Any] = attrs.field(factory=dict)  #: of functions, by global rank
    #: Failed workers of this node in the last generation by global rank, in order of their failure.
    failures: dict[int, WorkerExit] = attrs.field(factory=dict)
    generation: int = 0
    restarts: int = 0
    signal: int = 0  #: the signal that stopped or drained the node, or 0
    root_cause: RootCause | None = None  #: the failure for which the job failed
    evicted: bool = False  #: the job continues without this node
    is_unfit: bool = False  #: the node failed its check, or the job has excluded its host

    @property
    def exit_code(self) -> int:
        """0 for success, 1 for failure, 69 for an unfit node, 75 after a drain, 76 after a stop.

        After a stop by signal n, it is 128 + n.
        """
        if self.is_unfit:
            return UNFIT_NODE_EXIT_CODE
        if self.state is WorkerState.DRAINED:
            return DRAINED_EXIT_CODE
        if self.state is WorkerState.STOPPED:
            return 128 + self.signal if self.signal else STOPPED_EXIT_CODE
        return 0 if self.state is WorkerState.SUCCEEDED else 1


class SnapshotService(abc.ABC):
    """Stores the snapshots of an agent's workers over all generations.

    The agent's thread calls all methods. Only `close` may block for long.
    """

    saved_step: int | None = None
    """The step in durable storage that `close` or another node wrote, None if there is none."""

    @abc.abstractmethod
    def on_workers_starting(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        """Prepare for the workers of a generation. No worker is in a group of an earlier one.

        Raises:
            ConfigError: the rendezvous of `info` does not have what the service needs, such as a
                store that all nodes share.
        """

    def on_workers_stopped(self) -> None:  # noqa: B027 - optional
        """Note that no worker is in a group, and that the node waits for its next generation."""

    def on_job_ended(self) -> None:  # noqa: B027 - optional
        """Note before `close` that the job has ended on all nodes, with any result."""

    @abc.abstractmethod
    def close(self, *, flush: bool, cancel_reason: Callable[[], str] = str) -> str:
        """Free everything at the end of the run.

        Args:
            flush: the job ends early, so write to durable storage what exists only in memory.
            cancel_reason: returns why the writing must end now, or an empty string. The calling
                thread must call it several times per second.

        Returns:
            What could not be written, in one line, or an empty string if nothing is lost.
        """
