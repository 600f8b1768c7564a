"""What an agent's loop says of itself as it goes: to the log for people, and to the journal.

Each sentence and each event is made here, where a decision is carried out, and none of it is
asked for in return.
"""

from __future__ import annotations

import logging

from ..clock import Clock
from ..observe.interface import Journal, Journals
from ..rendezvous.interface import ChangeKind, FailureKind, RendezvousInfo
from ..workers.exits import WorkerExit
from ..workers.notice import Notice
from ..workers.spec import WorkerGroup
from .hang_watch import HangWatch
from .interface import RunResult
from .policy import Changed, DrainAsked, Event, GroupStopped, Hung
from .summary import summary

log = logging.getLogger("elasticlib.agent")


class Telling:
    """Of one node's run, in the order in which it happens."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = Journals(journal)
        self._clock = clock
        self._generation = 0
        self._idle_since = self._began_at = self._stopping_at = clock()
        self._why, self._planned, self._hung = "this node is new", False, False

    def began(self) -> None:
        self._idle_since = self._clock()

    def idle(self, event: Event) -> None:
        """The workers are not to work any more, for this; those that must be stopped are not gone
        before `stopped`."""
        self._idle_since, self._why = self._clock(), summary(event)
        resized = isinstance(event, Changed) and event.change.kind is ChangeKind.RESIZE
        self._planned = resized or isinstance(event, DrainAsked)
        self._hung = isinstance(event, Hung)

    def joining(self) -> None:
        self._tell("rendezvous.began", why=self._why, planned=self._planned)

    def starting(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        self._generation, self._began_at = info.generation, self._clock()
        waited = self._began_at - self._idle_since
        first, last = group.workers[0], group.workers[-1]
        log.info(
            "generation %d after %.2f s: node %d of %d, ranks %d-%d of %d, %d of %d restarts; %s",
            info.generation,
            waited,
            info.rank,
            info.world_size,
            first.rank,
            last.rank,
            first.world_size,
            group.restarts,
            group.max_restarts,
            info.cause,
        )
        self._tell(
            "generation.began",
            seconds=round(waited, 6),
            attempt=group.attempt,
            node_rank=info.rank,
            nodes=info.world_size,
            ranks=[first.rank, last.rank],
            world=first.world_size,
            restarts=group.restarts,
            max_restarts=group.max_restarts,
            cause=info.cause,
            why=None if info.why is None else info.why.value,
        )

    def started(self, group: WorkerGroup, names: dict[int, str]) -> None:
        for local_rank, name in sorted(names.items()):
            rank = group.worker(local_rank).rank
            self._tell("worker.began", rank, local_rank=local_rank, name=name)

    def ended(self, exit_: WorkerExit) -> None:
        self._tell(
            "worker.ended",
            exit_.rank,
            local_rank=exit_.local_rank,
            code=exit_.returncode,
            ok=exit_.ok,
            stopped=exit_.stopped,
            how=exit_.describe(),
            uptime=round(self._clock() - self._began_at, 6),
        )

    def failure(self, kind: FailureKind, reason: str, hang: HangWatch | None) -> None:
        """hang: who finds those."""
        log.warning("%s", reason)
        found = hang if self._hung else None
        word = (kind.value or "ordinary") if found is None else "hang"
        silent = None if found is None else round(found.silent, 3)
        self._tell("failure", reason=reason, failure=word, silent=silent)

    def draining(self, signal: str, why: str) -> None:
        self._tell("drain.asked", signal=signal, why=why)

    def stopping(self, notice: Notice | None) -> None:
        self._stopping_at = self._clock()
        why, seconds = ("", 0.0) if notice is None else (notice.reason, notice.seconds)
        self._tell("stopping", why=why, seconds=seconds, because=self._why)

    def stopped(self, end: GroupStopped) -> None:
        self._idle_since = self._clock()
        seconds = round(self._idle_since - self._stopping_at, 6)
        self._tell("stopped", seconds=seconds, left=end.left)

    def over(self, result: RunResult) -> None:
        cause = result.cause
        self._tell(
            "run.ended",
            state=result.state.value,
            reason=result.reason,
            exit_code=result.exit_code,
            expelled=result.expelled,
            cause=None
            if cause is None
            else {"host": cause.host, "rank": cause.rank, "what": cause.sentence},
        )

    def end(self) -> None:
        """Nothing more is told; what was has been heard, unless that takes too long."""
        self._journal.settle()

    def _tell(self, kind: str, rank: int | None = None, **facts: object) -> None:
        self._journal.tell(kind, generation=self._generation, rank=rank, **facts)
