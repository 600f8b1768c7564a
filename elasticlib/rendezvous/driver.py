"""The thread that runs the rendezvous of one node: a Membership for the agent.

Only this thread uses the store, except where a store can only wait for changes. Callers leave
requests and return at once, so a store that is unreachable blocks no caller.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import attrs

from ..clock import Clock, monotonic
from ..errors import RendezvousClosedError, RendezvousError, StoreError, format_error
from ..event_loop import EventLoop
from ..stores.interface import Listing
from ..threads import daemon_thread
from .bootstrap_store import BootstrapStoreServer
from .interface import Joined, MembershipChanged, PeerMessages, Publish, Report
from .membership import Change, ChangeKind
from .node import (
    CloseStore,
    JoinRequest,
    NodeReport,
    NodeRequest,
    Poll,
    RendezvousNode,
    ServeStore,
    StoreServed,
)
from .peer_topics import PeerTopics
from .store_watcher import StoreWatcher

log = logging.getLogger("elasticlib.rendezvous")

EXIT_TIMEOUT_S = 1.0  # time for nodes to leave when the process exits without `close`
UNREACHED_CLOSE_TIMEOUT_S = 1.0  # maximum duration of `close` if no store was ever reached
# A requested task starts so much later. It then delays no rendezvous, and requests are combined.
TASK_DELAY_S = 0.05
FOREVER = float("inf")

MembershipEvent: TypeAlias = Joined | MembershipChanged | PeerMessages


@attrs.define(eq=False)
class _Task:
    """Work with the store that is no part of the rendezvous."""

    run: Callable[[], float]  # returns the seconds until the next call
    due_at: float


# The newest driver of this process for each store, job and node id.
_DRIVERS: weakref.WeakValueDictionary[tuple[int, str, str], RendezvousDriver] = (
    weakref.WeakValueDictionary()
)


class RendezvousDriver:
    """Runs a RendezvousNode in a thread until it is closed. Thread-safe.

    It does not refer to its handler, so that a handler without `shutdown` can be collected.

    Args:
        node: The rendezvous of the node. Only the thread calls it.
        new_server: Returns a server for torch's store in a new generation.
        prepare_server: Imports what such a server needs.
        clock: A monotonic clock.
    """

    takes_slots = True
    """Whether this node may offer fewer workers than its specification has."""

    def __init__(
        self,
        node: RendezvousNode,
        new_server: Callable[[], BootstrapStoreServer],
        prepare_server: Callable[[], object] = lambda: None,
        clock: Clock = monotonic,
    ) -> None:
        self.node = node
        self.run_id = node.run_id
        self.store = node.store
        self._new_server = new_server
        self._prepare_server = prepare_server
        self._clock = clock
        self._post: Callable[[MembershipEvent], None] = lambda _: None
        self._turned_at: Callable[[], float] | None = None  # None: the lease is never withdrawn
        self._requests: deque[NodeRequest | Publish] = deque()  # that the thread has not seen
        # The thread also reads the store's connection while it waits for requests.
        self._loop = self.store.event_loop or EventLoop()
        self._takes_part = False  # a caller has asked for the job; until then, it is not read
        self._server: BootstrapStoreServer | None = None  # of torch's store, if this is rank 0
        self._job_watch = StoreWatcher(self.store, self._loop.wake)
        self._topics = PeerTopics(self.store)
        self._topic_watch = StoreWatcher(self.store, self._loop.wake)
        self._tasks: list[_Task] = []
        self._task_requests: deque[_Task] = deque()  # tasks to call soon
        self._condition = threading.Condition()  # guards the fields below; notified after a turn
        self._thread: threading.Thread | None = None
        self._attempt = 0  # the last request to join
        self._awaits_events = False  # its result, or a final change after it, is not posted yet
        self._error: Exception | None = None  # the error that stopped the thread
        self.is_stopping = False

    # -- Membership, and what a handler needs ------------------------------------------------------

    def prepare(self) -> tuple[bool, bool]:
        """Import what this node needs, and find out what the workers of other nodes can do."""
        self._prepare_server()
        self.wait_until(lambda: self.node.snapshot, self.node.timeouts.lease_ttl)
        snapshot, can_regroup = self.node.snapshot, False
        if snapshot is not None and snapshot.state is not None and snapshot.leader is not None:
            can_regroup = snapshot.leader.can_regroup and not snapshot.state.phase.is_terminal
        return can_regroup, self.node.takes_notices

    def open(
        self,
        post: Callable[[MembershipEvent], None],
        turned_at: Callable[[], float] | None = None,
    ) -> None:
        """Begin: events go to `post`. Without `turned_at`, the lease is never withdrawn."""
        self._post, self._turned_at = post, turned_at

    def join(self, attempt: int) -> None:
        """Join the next generation. A later attempt replaces an earlier one."""
        with self._condition:
            self._attempt, self._awaits_events = attempt, True
            if self.is_stopping:
                self._post_closed()
                return
        # This is posted before the thread starts, so that its first read already serves the join.
        self.request(JoinRequest(attempt))
        self._start_taking_part()

    def report(self, report: Report) -> None:
        """Take note of what has happened on this node."""
        self.request(report)

    def publish(self, message: Publish) -> None:
        """Publish a value for the other nodes of the generation."""
        self.request(message)

    def close(self, timeout_s: float | None = None) -> bool:
        """Leave the job, by default within `close_timeout`. Return whether this ended in time."""
        if timeout_s is None:
            timeout_s = self.node.timeouts.close_timeout
        self._stop()
        if self.node.snapshot is None:
            timeout_s = min(UNREACHED_CLOSE_TIMEOUT_S, timeout_s)
        has_exited = self._wait_for_exit(timeout_s)
        self._close_server()
        return has_exited

    def request(self, request: NodeRequest | Publish) -> None:
        """Pass a request to the thread."""
        self._requests.append(request)
        self._loop.wake()

    def request_stop(self) -> None:
        """Leave the job soon, without taking a lock: the garbage collector calls this."""
        self.is_stopping = True
        self._loop.wake()

    def wait_until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait until the condition holds or the thread stops, at most `timeout_s` seconds."""
        self._start_taking_part()
        with self._condition:
            self._condition.wait_for(lambda: self.is_stopping or condition(), timeout_s)

    def closed_error(self) -> Exception:
        """Return the error of calls after the thread was stopped."""
        return self._error or RendezvousClosedError("this node has left the rendezvous")

    def seconds_since_refresh(self) -> float | None:
        """Return the seconds since this node last updated its lease, or None if it never has."""
        refreshed_at = self.node.last_refresh_at
        return None if refreshed_at is None else max(0.0, self._clock() - refreshed_at)

    def add_task(self, run: Callable[[], float]) -> Callable[[], None]:
        """Make the thread call `run` repeatedly, whenever the rendezvous has nothing to do.

        The thread does not call `run` while the store is unreachable.

        Args:
            run: Returns the seconds until its next call. Raises nothing.

        Returns:
            A function that requests a call soon.
        """
        task = _Task(run, self._clock())

        def request() -> None:
            if not self.is_stopping and task.due_at > self._clock() + TASK_DELAY_S:
                self._task_requests.append(task)
                self._loop.wake()

        self._tasks = [*self._tasks, task]
        self._task_requests.append(task)
        self._start()
        return request

    # -- the thread --------------------------------------------------------------------------------

    def _start_taking_part(self) -> None:
        """Make the thread read the job. No record is published before a generation is requested."""
        if not self._takes_part:
            self._takes_part = True
            self._loop.wake()
            self._start()

    def _start(self) -> None:
        """Start the thread unless it was started, and stop an earlier thread of the same node."""
        with self._condition:
            if self._thread is not None or self.is_stopping:
                return
            key = (id(self.store), self.run_id, self.node.intent.node.id)
            earlier = _DRIVERS.get(key)
            if earlier is not None:
                # Otherwise, the two threads would take the lease from each other.
                earlier.request_stop()
            _DRIVERS[key] = self
            self._thread = daemon_thread(self._run, "rendezvous", self._fail)
            self._thread.start()

    def _run(self) -> None:
        self._loop.adopt()
        try:
            while not self.is_stopping:
                takes_part = self._takes_part
                next_at = self._turn_safely() if takes_part else FOREVER
                next_at = self._run_tasks(next_at)
                timeout = next_at - self._clock()
                if timeout > 0:
                    self._loop.run_until(partial(self._has_news, takes_part), timeout)
            self._leave()
        finally:
            self._loop.release()
            if self.store.event_loop is not self._loop:
                self._loop.close()

    def _has_news(self, takes_part: bool) -> bool:
        """Return whether there is something to do before the time has come."""
        if self.is_stopping or self._takes_part is not takes_part:
            return True
        watches = (self._job_watch, self._topic_watch)
        if takes_part and (self._requests or any(watch.has_change for watch in watches)):
            return True
        return bool(self._task_requests)

    def _turn_safely(self) -> float:
        try:
            return self._turn()
        except Exception as error:
            log.exception("the rendezvous thread failed: this node leaves the job")
            self._stop(RendezvousError(f"the rendezvous failed: {format_error(error)}"))
            return FOREVER

    def _turn(self) -> float:
        """Do what is due, and return the time of the next turn without an event before."""
        requests: list[NodeRequest] = []
        has_published = False
        while self._requests:
            request = self._requests.popleft()
            if isinstance(request, Publish):
                self._topics.publish(request)
                has_published = True
            else:
                requests.append(request)
        change = self._job_watch.take_change()
        if change is not None:
            requests.append(Poll())
        progress_due = FOREVER
        if self._turned_at is not None:
            progress_due = self._turned_at() + self.node.timeouts.loop_timeout
        early: list[PeerMessages] = []
        if has_published:
            # A request to join ends the generation, and comes after what was published in it.
            early, _ = self._topics.turn(self._clock())
        started_at = self._clock()
        reports, next_at = self.node.turn(
            started_at,
            requests,
            change if isinstance(change, Listing) else None,
            progress_due=progress_due,
        )
        # The pause follows the turn: where many nodes share a processor, turns take long.
        next_at += self._clock() - started_at
        for report in reports:
            self._deliver(report)
        if self.node.error is not None:
            self._stop(self.node.error)
            return FOREVER
        messages, topics_at = self._topics.turn(self._clock(), self._topic_watch.take_change())
        for message in (*early, *messages):
            self._post(message)
        next_at = min(next_at, topics_at)
        # If the next turn follows at once, the last read may be of another store than the current.
        if next_at > self._clock():
            self._watch()
        with self._condition:
            self._condition.notify_all()
        return next_at

    def _deliver(self, report: NodeReport) -> None:
        if isinstance(report, ServeStore):
            self._open_server(report.address)
        elif isinstance(report, CloseStore):
            self._close_server()
            self._topics.end()
        else:
            with self._condition:
                if report.attempt != self._attempt or not self._awaits_events:
                    return  # A later request has replaced this one.
                if isinstance(report, Joined):
                    self._begin_topics(report)
                else:
                    self._awaits_events = not (report.change.kind.is_final or report.error)
                self._post(report)

    def _begin_topics(self, joined: Joined) -> None:
        snapshot = self.node.snapshot
        entry = None if snapshot is None else snapshot.state_entry
        # Callers of a handler's blocking methods do not read what other nodes publish.
        if entry is not None and self._turned_at is not None:
            self._topics.begin(joined.attempt, joined.generation, entry.version)

    def _watch(self) -> None:
        """Watch for the next change of what was read last."""
        node, snapshot = self.node, self.node.snapshot
        if snapshot is not None and not node.is_store_away:
            # The leader collects changes for a while before it lists the job: it needs no listing.
            self._job_watch.watch(
                node.watch_prefix, after=node.read_version, with_listing=not node.is_leader
            )
        prefix = self._topics.watch_prefix
        if prefix:
            self._topic_watch.watch(prefix, after=self._topics.version, with_listing=True)
        else:
            self._topic_watch.cancel()

    def _run_tasks(self, next_at: float) -> float:
        """Run the due tasks if the rendezvous has nothing to do. Return the time of the next turn.

        Args:
            next_at: when the rendezvous has something to do without a request.
        """
        while self._task_requests:
            task = self._task_requests.popleft()
            task.due_at = min(task.due_at, self._clock() + TASK_DELAY_S)
        if next_at <= self._clock() or self.is_stopping or self.node.is_store_away:
            return next_at
        for task in self._tasks:
            if self._clock() >= task.due_at and not self._requests:
                task.due_at = self._clock() + task.run()
        return min([next_at, *(task.due_at for task in self._tasks)])

    def _open_server(self, address: str) -> None:
        """Open torch's store in a helper thread, as importing torch must not delay the lease."""
        server = self._server = self._new_server()

        def open_store() -> None:
            server.open(address)
            if server is self._server:
                self.request(StoreServed(server.endpoint, server.error))

        daemon_thread(open_store, "rendezvous-open", self._fail).start()

    def _close_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # -- the end -----------------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        self._stop(RendezvousError(reason))

    def _stop(self, error: Exception | None = None) -> None:
        """Make the thread leave the job and end. A pending join gets the error."""
        with self._condition:
            self.is_stopping, self._error = True, self._error or error
            self._post_closed()
            self._condition.notify_all()
        self._loop.wake()

    def _post_closed(self) -> None:
        if self._awaits_events:
            self._awaits_events = False
            error = self.closed_error()
            self._post(MembershipChanged(self._attempt, as_change(error), error))

    def _leave(self) -> None:
        self._stop()
        self._close_server()
        # Without this, the watches and late requests would keep this object and the store alive.
        self._job_watch.cancel()
        self._topic_watch.cancel()
        self._requests.clear()
        try:
            self.node.leave()
        except StoreError as error:
            # The store may leave first. When the job is over, no node waits for another one.
            state = self.node.state
            is_over = state is not None and state.phase.is_terminal
            log.log(
                logging.DEBUG if is_over else logging.INFO,
                "this node left while the store was unreachable, and the other nodes notice it "
                "when its lease expires: %s",
                error,
            )

    def _wait_for_exit(self, timeout_s: float) -> bool:
        """Return whether the thread ends within `timeout_s` seconds, or was never started."""
        if self._thread is None:
            return True
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    @classmethod
    def leave_all(cls) -> None:
        """Stop all drivers when the process exits, including those that are leaving already.

        A lease may otherwise outlive the process, and closing torch's store at exit could abort it.
        """
        drivers = [driver for ref in _DRIVERS.valuerefs() if (driver := ref()) is not None]
        for driver in drivers:
            driver.request_stop()
        deadline = monotonic() + EXIT_TIMEOUT_S
        for driver in drivers:
            driver._wait_for_exit(deadline - monotonic())


def as_change(error: Exception) -> Change:
    """Return the change that ends the generation of a member if this error stops the driver."""
    if isinstance(error, RendezvousClosedError):
        return Change(ChangeKind.ABORTED, str(error))
    is_store = isinstance(error, StoreError)
    return Change(ChangeKind.STORE_LOST if is_store else ChangeKind.FAILED, str(error))


atexit.register(RendezvousDriver.leave_all)
