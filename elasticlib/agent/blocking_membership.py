"""The membership of a handler that has blocking methods only, such as one written by a user."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from ..clock import monotonic
from ..errors import RendezvousClosedError, format_error
from ..options import RendezvousSettings
from ..rendezvous.interface import (
    Joined,
    MembershipChanged,
    PeerMessages,
    Publish,
    RendezvousHandler,
    Report,
    ReportKind,
    Topic,
    check_restart_budget,
)
from ..rendezvous.membership import Change, ChangeKind
from ..threads import daemon_thread

if TYPE_CHECKING:
    from ..stores.interface import Store

CLOSE_POLL_S = 0.01
WAIT_LOG_INTERVAL_S = 10.0
NEVER = float("inf")
CLOSE_TIMEOUT_S = 10.0  # for the threads to end, after the handler was shut down

log = logging.getLogger("elasticlib.agent")


class BlockingMembership:
    """Calls a handler's blocking methods in two threads: one waits, and one reports.

    If the handler does not count restarts, this object counts those of its own node. The nodes of a
    generation cannot publish anything for each other, so they stop without a common call.

    Args:
        handler: the handler.
        job: the settings of the job, whose restart budget counts if the handler has none.
        monitor_interval: seconds between two polls of a handler that does not wait for changes.
        wait_log_interval: seconds between two log messages while the handler waits for other nodes.
    """

    takes_slots = False
    store: Store | None = None

    def __init__(
        self,
        handler: RendezvousHandler,
        job: RendezvousSettings | None,
        monitor_interval: float,
        wait_log_interval: float = WAIT_LOG_INTERVAL_S,
    ) -> None:
        self._handler, self._given = handler, job
        self._job = job or RendezvousSettings()
        self._monitor_interval = monitor_interval
        self._wait_log_interval = wait_log_interval
        self._waits_since = NEVER  # when the handler was asked for a generation; NEVER: it is there
        self._world_size = 1  # nodes of the generation
        self.run_id = handler.get_run_id()
        self._restarts = 0
        self._failed_attempt = 0  # the last one that was charged
        self._attempt = 0  # the last one that was asked for
        self._attempts: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # None ends the thread
        # Each report with the attempt in which it was made. None instead of a report: a join.
        self._reports: queue.SimpleQueue[tuple[int, Report | None] | None] = queue.SimpleQueue()
        self._is_over = False  # this node joins no further generation
        self._post: Callable[[Joined | MembershipChanged | PeerMessages], None]
        self._threads = [
            daemon_thread(self._wait, "agent-rendezvous", self._on_error),
            daemon_thread(self._report_all, "agent-reports", self._on_error),
        ]

    def prepare(self) -> tuple[bool, bool]:
        """Do nothing: such a handler knows nothing of other nodes before it joins."""
        return False, False

    def open(
        self,
        post: Callable[[Joined | MembershipChanged | PeerMessages], None],
        turned_at: Callable[[], float],
    ) -> None:
        """Start the threads."""
        del turned_at
        self._post = post
        for thread in self._threads:
            thread.start()

    def join(self, attempt: int) -> None:
        """Ask for the next generation, after all earlier reports have been delivered."""
        self._attempt = attempt
        self._reports.put((attempt, None))

    def report(self, report: Report) -> None:
        """Report to the handler, in a thread."""
        self._reports.put((self._attempt, report))

    def publish(self, message: Publish) -> None:
        """Drop the message: such a handler cannot pass it on."""

    def close(self, timeout_s: float | None = None) -> bool:
        """Shut the handler down, which ends its waiting call, and end the threads."""
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        is_done = self._handler.shutdown()
        self._attempts.put(None)
        self._reports.put(None)
        deadline = monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - monotonic()))
        return is_done

    # In the threads

    def _on_error(self, reason: str) -> None:
        self._post(MembershipChanged(self._attempt, Change(ChangeKind.STORE_LOST, reason)))

    def _wait(self) -> None:
        attempt = self._attempts.get()
        while attempt is not None:
            self._waits_since = monotonic()
            try:
                info = self._handler.next_rendezvous()
            except Exception as error:
                self._waits_since = NEVER
                # A user's handler may raise any exception, and the agent waits for this thread.
                is_end = isinstance(error, RendezvousClosedError)
                self._post(MembershipChanged(attempt, change_of(error), None if is_end else error))
                attempt = self._attempts.get()
                continue
            self._waits_since, self._world_size = NEVER, info.world_size
            check_restart_budget(self._given, info.max_restarts)
            own = info.max_restarts is None
            info = attrs.evolve(
                info,
                restarts=info.restarts + self._restarts,
                max_restarts=self._job.max_restarts if own else info.max_restarts,
            )
            self._post(Joined(attempt, info))
            if info.world_size > 1:
                # No node can publish a call of `should_stop` at which all stop.
                self._post(PeerMessages(attempt, Topic.STOP, None))
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
                self._post(MembershipChanged(attempt, change))
                return self._attempts.get()
            # A handler that cannot wait returns at once, and is polled.
            rest_s = self._monitor_interval - (monotonic() - started_at)
            try:
                return self._attempts.get(timeout=max(CLOSE_POLL_S, rest_s))
            except queue.Empty:
                continue

    def _report_all(self) -> None:
        while True:
            try:
                item = self._reports.get(timeout=self._wait_log_interval)
            except queue.Empty:
                self._log_wait()
                continue
            if item is None:
                return
            attempt, report = item
            if report is None:
                if not self._is_over:
                    self._attempts.put(attempt)
                continue
            try:
                is_taken = self._handler.report(report)
            except Exception as error:
                self._post(
                    MembershipChanged(attempt, Change(ChangeKind.STORE_LOST, format_error(error)))
                )
                continue
            if not is_taken:
                self._do_without(report, attempt)

    def _log_wait(self) -> None:
        seconds = monotonic() - self._waits_since
        if seconds > 0:
            log.info(
                "waiting for the other nodes for %.0f s: next_rendezvous of %s (backend %s, run "
                "%s) has not returned",
                *(seconds, type(self._handler).__name__, self._handler.get_backend(), self.run_id),
            )

    def _do_without(self, report: Report, attempt: int) -> None:
        """Do what a handler that does not take this report leaves to its agent."""
        name = type(self._handler).__name__
        if report.kind is ReportKind.RESTART:
            log.warning("%s does not support a restart on request: the workers continue", name)
        elif report.kind is ReportKind.SUCCESS:
            if self._world_size > 1:
                log.info(
                    "%s takes no report of success: this node leaves without waiting for the other "
                    "nodes; if workers of another node fail later, the job restarts without it",
                    name,
                )
            done = Change(ChangeKind.SUCCEEDED, "this node is done")
            self._post(MembershipChanged(attempt, done))
        elif report.kind is ReportKind.FAILURE and attempt != self._failed_attempt:
            # A generation is charged once, however many workers have failed in it.
            self._failed_attempt = attempt
            self._restarts += 1
            budget = self._job.max_restarts
            if self._restarts > budget:
                self._is_over = True
                reason = f"{report.reason} ({budget} of {budget} restarts used)"
                self._post(MembershipChanged(attempt, Change(ChangeKind.FAILED, reason)))
                self._close_job()

    def _close_job(self) -> None:
        # Without it, the other nodes would wait for this one until their join timeout.
        try:
            self._handler.set_closed()
        except Exception as error:
            log.warning(
                "cannot end the job for the other nodes, which wait until their join timeout: %s",
                format_error(error),
            )


def change_of(error: Exception) -> Change:
    """Return the change that an exception of `next_rendezvous` stands for."""
    if isinstance(error, RendezvousClosedError) and isinstance(error.change, Change):
        return error.change
    return Change(ChangeKind.FAILED, format_error(error))
