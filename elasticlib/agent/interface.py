"""What an agent comes to: it supervises one node's workers to the end, and says how that was.

`run` always returns a `RunResult`, be the end a success, a failure, a signal or a lost store. The
agent itself is in `loop.py`, and what it needs of its workers in `workers/interface.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import attrs

from ..flag_values import DRAIN_EXIT_CODE
from ..rendezvous.interface import RendezvousInfo
from ..workers.exits import WorkerExit
from ..workers.spec import WorkerGroup, WorkerState


@attrs.frozen
class RootCause:
    """The first failure of a generation, over all nodes.

    sentence: who, how and why. host: where. log: the folder there that holds the worker's files.
    followed: global ranks of workers that failed afterwards, as far as is known. Where workers
    could not be started, or hang, it is the failure of none: rank and local_rank are -1.
    """

    host: str
    generation: int
    rank: int
    local_rank: int
    pid: int
    returncode: int
    signal: str
    summary: str
    message: str = ""
    traceback: str = ""
    stderr_tail: str = ""
    log_dir: str = ""
    subsequent_ranks: tuple[int, ...] = ()


@attrs.frozen
class RunResult:
    """How a node's run ended.

    state: SUCCEEDED, FAILED, STOPPED (by `signal`), or DRAINED: this node was asked by `signal`
    to have its workers save, and to leave. reason: one sentence. values: what
    functions returned, by global rank. failures: the ends of this node's workers in the last
    generation, by global rank, where they did not succeed, the first one first. cause: the first
    failure over all nodes, which is what ended the job. expelled: the job goes on without this
    node, whose end is not the job's.
    """

    state: WorkerState
    reason: str
    return_values: dict[int, Any] = attrs.field(factory=dict)
    failures: dict[int, WorkerExit] = attrs.field(factory=dict)
    generation: int = 0
    restarts: int = 0
    signal: int = 0
    root_cause: RootCause | None = None
    evicted: bool = False

    @property
    def exit_code(self) -> int:
        """0 for success, 1 for failure, 75 after a drain, 128 + n after signal n."""
        if self.state is WorkerState.DRAINED:
            return DRAIN_EXIT_CODE
        if self.state is WorkerState.STOPPED:
            return 128 + self.signal
        return 0 if self.state is WorkerState.SUCCEEDED else 1


class SnapshotService(abc.ABC):
    """What an agent keeps for its workers over all generations, such as their snapshots.

    All methods are called by the agent's own thread, and none of them waits for long, but for
    `finish`.
    """

    saved_step: int | None = None
    """The step that `finish` put where it lasts, or another node did at the same time."""

    @abc.abstractmethod
    def on_workers_starting(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        """The workers of this group are about to start; none of an earlier one is left.

        Raises:
            ConfigError: what it was asked to do cannot be done with this rendezvous.
        """

    def on_workers_stopped(self) -> None:  # noqa: B027 - not all have something to do meanwhile
        """No worker is left, and this node asks for the next generation, or for its first."""

    @abc.abstractmethod
    def close(self, *, flush: bool, cancel_reason: Callable[[], str] = str) -> str:
        """Free everything: the run is over and no worker is left.

        Args:
            keep: the job ends before its work is done. What is only in memory is to be written to
                where it lasts.
            cancel_reason: returns why the writing must end now, or an empty text. It must be called
                several times a second, in the thread that called `finish`.

        Returns:
            What could not be written, as a sentence; empty if nothing is lost.
        """
