"""What an agent remembers of how its workers ended, and says of it when the run is over.

It holds one generation's ends at a time. Those of workers that did as they were told are no
failures, and why the job failed is asked of all nodes.
"""

from __future__ import annotations

from ..clock import Clock
from ..rendezvous.interface import Change, ChangeKind, RendezvousInfo
from ..workers.exits import WorkerExit
from ..workers.spec import WorkerGroup, WorkerState
from .board import CauseBoard
from .causes import Cause
from .interface import RunResult
from .policy import Outcome, OutcomeKind

_STATES = {
    OutcomeKind.SUCCEEDED: WorkerState.SUCCEEDED,
    OutcomeKind.FAILED: WorkerState.FAILED,
    OutcomeKind.SIGNALLED: WorkerState.STOPPED,
    OutcomeKind.DRAINED: WorkerState.DRAINED,
}


class Account:
    """Of one node's run; host: what people know the node by."""

    def __init__(self, host: str, clock: Clock) -> None:
        self._exits: dict[int, WorkerExit] = {}
        self._board = CauseBoard(host, clock=clock)
        self._failed_elsewhere = False
        self._cause: Cause | None = None
        self.lost = ""
        """What was in memory alone and could not be put where it lasts."""

    def begin(self) -> None:
        """Another generation's workers are started."""
        self._exits, self._failed_elsewhere = {}, False

    def ended(self, exit_: WorkerExit, info: RendezvousInfo, *, supervised: bool) -> None:
        """A worker ended; supervised: while nothing was being stopped."""
        # What ends while it is being stopped did what it was told, and failed at nothing; unless
        # it had said before that it failed.
        if exit_.ok or exit_.failed or supervised:
            self._exits[exit_.local_rank] = exit_
        if not exit_.ok and supervised:
            self._board.tell(info, exit_)

    def no_exit(self, reason: str, info: RendezvousInfo) -> None:
        """The workers could not all be started, or hang: no exit will tell of it."""
        self._board.tell_start(info, reason)

    def heard(self, change: Change) -> Change:
        """Remember whether it tells that workers of some node have ended the job."""
        self._failed_elsewhere = change.kind is ChangeKind.FAILED and bool(change.node)
        return change

    def find_cause(self, info: RendezvousInfo | None, outcome: Outcome | None) -> None:
        """Learn why the job failed, while the store can still be asked."""
        if outcome is None or outcome.kind is not OutcomeKind.FAILED or info is None:
            return
        exits = list(self._exits.values())
        self._cause = self._board.first(info, exits, elsewhere=self._failed_elsewhere)

    def result(self, outcome: Outcome, group: WorkerGroup | None) -> RunResult:
        """How the run ended, its last generation's group being this one."""
        succeeded = outcome.kind is OutcomeKind.SUCCEEDED
        exits = self._exits.values()
        return RunResult(
            state=_STATES[outcome.kind],
            reason=f"{outcome.reason}; {self.lost}" if self.lost else outcome.reason,
            values={e.rank: e.value for e in exits} if succeeded else {},
            failures={} if succeeded else {e.rank: e for e in exits if not e.ok},
            generation=0 if group is None else group.generation,
            restarts=0 if group is None else group.restarts,
            signal=outcome.signal,
            cause=None if succeeded else self._cause,
            expelled=outcome.expelled,
        )

    def close(self) -> None:
        self._board.close()
