"""Where the nodes of a job tell one another why workers failed: under a key of its store.

A store may take its time to answer, so one thread speaks to it and the agent's loop only leaves
word; at the end of the run, and within bounds, the agent asks for what all nodes said.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import attrs

from ..clock import Clock, monotonic
from ..errors import ElasticError, present
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import ABSENT
from ..threads import helper
from ..workers.exit import WorkerExit
from .causes import (
    ALSO,
    FIRST,
    Cause,
    cause_of,
    cause_of_start,
    encode,
    encode_ranks,
    first_cause,
    followers,
)

log = logging.getLogger("elasticlib.agent")


class CauseBoard:
    """One node's conversation about failures; it starts a thread when there is something to say.

    host: what people know this node by. answer_seconds: how long the end of a run may wait for
    what other nodes know; their word is on its way when their failure has ended the job.
    """

    def __init__(self, host: str, *, answer_seconds: float = 3.0, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._host = host
        self._patience = answer_seconds
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, info: RendezvousInfo, failure: WorkerExit) -> None:
        """A worker of this generation has failed here."""
        self._tell(info, cause_of(failure, self._host, info.generation))

    def tell_start(self, info: RendezvousInfo, reason: str) -> None:
        """The workers of this generation could not be started here."""
        self._tell(info, cause_of_start(reason, self._host, info.generation))

    def _tell(self, info: RendezvousInfo, cause: Cause) -> None:
        if _shared(info):
            self._later(lambda: _write_first(info, cause))

    def first(
        self, info: RendezvousInfo, failures: list[WorkerExit], *, elsewhere: bool
    ) -> Cause | None:
        """Why the generation failed, over all nodes, as far as it can be had in time.

        failures: this node's own, the first one first. elsewhere: another node is known to have
        failed, so that its word is waited for.
        """
        failed = [failure for failure in failures if failure.failed]
        own = cause_of(failed[0], self._host, info.generation) if failed else None
        if own is not None:
            own = attrs.evolve(own, followed=followers(failed, own))
        if not _shared(info) or not (failed or elsewhere):
            return own
        answer: queue.SimpleQueue[Cause | None] = queue.SimpleQueue()
        deadline = self._clock() + self._patience

        def ask() -> None:
            try:
                answer.put(self._read(info, failed, deadline))
            except ElasticError as error:
                log.info("what other nodes know of the failure is not to be had: %s", error)
                answer.put(None)

        self._later(ask)
        try:
            return answer.get(timeout=self._patience + 0.5) or own
        except queue.Empty:
            log.info("the store did not say in %g s what other nodes know", self._patience)
            return own

    def close(self) -> None:
        """Say what is left to say, if the store takes it at once."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(1.0)

    def _read(
        self, info: RendezvousInfo, failed: list[WorkerExit], deadline: float
    ) -> Cause | None:
        store = present(info.store, "the store")
        if failed:
            ranks = encode_ranks([failure.rank for failure in failed])
            store.set(f"{info.causes}{ALSO}{info.rank}", ranks)
        while True:
            listing = store.list(info.causes)
            said = {e.key.removeprefix(info.causes): e.value for e in listing.entries}
            cause = first_cause(said)
            left = deadline - self._clock()
            if cause is not None or left <= 0:
                return cause
            store.wait(info.causes, after=listing.version, timeout=left)

    def _later(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = helper(self._loop, "agent-causes")
            self._thread.start()
        self._work.put(work)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                # Whatever a store raises: the failure itself is told by other means.
                log.info("the other nodes were not told of a failure here: %s", error)


def _shared(info: RendezvousInfo) -> bool:
    return info.store is not None and bool(info.causes)


def _write_first(info: RendezvousInfo, cause: Cause) -> None:
    # Whoever comes later has followed: it says so at the end of its run.
    store = present(info.store, "the store")
    store.compare_set(f"{info.causes}{FIRST}", encode(cause), expected=ABSENT)
