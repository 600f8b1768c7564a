"""Waits in the blocking calls of a rendezvous handler that has no `join`, as torch's have none."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable

from ..clock import monotonic
from ..errors import describe
from ..rendezvous.interface import RendezvousHandler, RendezvousInfo
from ..rendezvous.membership import Change, ChangeKind
from ..threads import helper

log = logging.getLogger("elasticlib.agent")

REMIND_SECONDS = 10.0  # between two log lines about one wait


class BlockingHandlerThread:
    """Waits in the calls of a handler that has only blocking ones, in a thread of its own."""

    def __init__(
        self,
        handler: RendezvousHandler,
        interval: float,
        put: Callable[[int, RendezvousInfo | Change | Exception], None],
        broke: Callable[[str], None],
    ) -> None:
        self._handler = handler
        self._interval = interval
        self._put = put
        self._joined_at = 0.0
        self._remind_at = float("inf")  # no wait has begun
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = helper(self._wait, "agent-rendezvous", broke)

    def join(self, attempt: int, now: float) -> None:
        """Ask for the next generation, and from then on watch it."""
        self._joined_at, self._remind_at = now, now + REMIND_SECONDS
        if self._thread.ident is None:
            self._thread.start()
        self._asked.put(attempt)

    def remind(self, now: float, why: str) -> None:
        """Log at regular intervals that the handler has found no generation yet.

        The agent's loop calls this while the node has no generation.

        Args:
            now: The time on the clock that `join` was given.
            why: Why the generation is sought.
        """
        if now < self._remind_at:
            return
        self._remind_at = now + REMIND_SECONDS
        handler = self._handler
        log.info(
            "waiting for the other nodes for %.0f s: next_rendezvous of %s (backend %s, run %s) "
            "has not returned; reason for this rendezvous: %s",
            *(now - self._joined_at, type(handler).__name__),
            *(handler.get_backend(), handler.get_run_id(), why),
        )

    def stop(self) -> None:
        """After the handler's shutdown, which ends whatever the thread waits for."""
        self._asked.put(None)
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _wait(self) -> None:
        attempt = self._asked.get()
        while attempt is not None:
            try:
                info = self._handler.next_rendezvous()
            except Exception as error:
                # Somebody else's handler may raise anything; an agent that waits for a thread
                # that is no more would wait for ever.
                self._put(attempt, error)
                attempt = self._asked.get()
            else:
                self._put(attempt, info)
                attempt = self._watch(attempt)

    def _watch(self, attempt: int) -> int | None:
        """Tell the one change that ends this generation; returns what is asked next."""
        while True:
            began = monotonic()
            try:
                change = self._handler.wait_for_change(self._interval)
            except Exception as error:
                change = Change(ChangeKind.STORE_LOST, describe(error))
            if change is not None:
                self._put(attempt, change)
                return self._asked.get()
            with contextlib.suppress(queue.Empty):
                # A handler that cannot push answers at once, and is polled.
                rest = self._interval - (monotonic() - began)
                return self._asked.get(timeout=max(0.0, rest))
