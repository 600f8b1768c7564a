"""Thread for a rendezvous handler that has only blocking calls, such as one written for torch."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable

from ..clock import monotonic
from ..errors import format_error
from ..rendezvous.interface import RendezvousHandler, RendezvousInfo
from ..rendezvous.membership import Change, ChangeKind
from ..threads import daemon_thread

log = logging.getLogger("elasticlib.agent")

LOG_INTERVAL_S = 10.0  # between two log messages about one wait
JOIN_TIMEOUT_S = 5.0


class BlockingHandlerThread:
    """Calls `next_rendezvous` and `wait_for_change` of a handler in a thread.

    Args:
        handler: the handler.
        monitor_interval: seconds between two polls of a handler that does not wait for changes.
        on_result: receives the number of the attempt with its generation, change or error.
        on_error: receives a message if the thread fails.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        monitor_interval: float,
        on_result: Callable[[int, RendezvousInfo | Change | Exception], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._handler = handler
        self._monitor_interval = monitor_interval
        self._on_result = on_result
        self._joined_at = 0.0  # start of the last attempt
        self._log_at = float("inf")  # time of the next log message about it
        self._attempts: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # None ends the thread
        self._thread = daemon_thread(self._serve, "agent-rendezvous", on_error)

    def join(self, attempt: int, now: float) -> None:
        """Request the next generation, and report its changes from then on."""
        self._joined_at, self._log_at = now, now + LOG_INTERVAL_S
        if self._thread.ident is None:
            self._thread.start()
        self._attempts.put(attempt)

    def log_progress(self, now: float, reason: str) -> None:
        """Log every 10 s that the handler has not returned a generation yet.

        Args:
            now: the time on the clock of `join`.
            reason: why the node joins.
        """
        if now < self._log_at:
            return
        self._log_at = now + LOG_INTERVAL_S
        handler = self._handler
        log.info(
            "waiting for the other nodes for %.0f s: next_rendezvous of %s (backend %s, run %s) "
            "has not returned; reason for this rendezvous: %s",
            *(now - self._joined_at, type(handler).__name__),
            *(handler.get_backend(), handler.get_run_id(), reason),
        )

    def close(self) -> None:
        """End the thread. The handler must be shut down before, which ends its calls."""
        self._attempts.put(None)
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)

    def _serve(self) -> None:
        attempt = self._attempts.get()
        while attempt is not None:
            try:
                info = self._handler.next_rendezvous()
            except Exception as error:
                # A user's handler may raise any exception, and the agent waits for this thread.
                self._on_result(attempt, error)
                attempt = self._attempts.get()
            else:
                self._on_result(attempt, info)
                attempt = self._monitor(attempt)

    def _monitor(self, attempt: int) -> int | None:
        """Report the change that ends this generation. Return the next attempt."""
        while True:
            started_at = monotonic()
            try:
                change = self._handler.wait_for_change(self._monitor_interval)
            except Exception as error:
                change = Change(ChangeKind.STORE_LOST, format_error(error))
            if change is not None:
                self._on_result(attempt, change)
                return self._attempts.get()
            with contextlib.suppress(queue.Empty):
                # A handler that cannot wait returns at once, and is polled.
                rest_s = self._monitor_interval - (monotonic() - started_at)
                return self._attempts.get(timeout=max(0.0, rest_s))
