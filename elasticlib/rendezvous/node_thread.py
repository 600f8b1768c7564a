"""The thread that runs the rendezvous protocol of one node.

Only this thread uses the store. Callers post requests to it and wait for results, so a store that
is unreachable blocks no caller for longer than the caller's own timeout.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import attrs

from ..clock import Clock, monotonic, utc_now_text
from ..endpoint import split_endpoint
from ..errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConfigError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreError,
    StoreRejectedError,
    format_error,
    require_not_none,
)
from ..event_loop import EventLoop
from ..stores.interface import CancelWatch, Listing, WatchResult
from ..threads import daemon_thread
from .bootstrap_store import BootstrapStoreServer
from .interface import RendezvousInfo, RendezvousStoreInfo
from .local_node import NEVER_REACHED, JobSnapshot, LocalNode, StoreGraceExpiredError, backoff
from .membership import Change, ChangeKind, GenerationTrigger, MembershipState
from .node_intent import NodeIntent

log = logging.getLogger("elasticlib.rendezvous")

EXIT_TIMEOUT_S = 1.0  # time for nodes to leave when the process exits without `shutdown`
# The leader reads the records of all nodes. It polls at most once per this time and node.
POLL_INTERVAL_PER_NODE_S = 2e-4
RETRY_INTERVAL_S = 0.01  # pause before the next poll after another node wrote first
# A requested task starts so much later. It then delays no rendezvous, and requests are combined.
TASK_DELAY_S = 0.05
# After this many failed watches in a row, a warning is logged.
FAILED_WATCHES_BEFORE_WARNING = 3

JoinCallback = Callable[[RendezvousInfo | Change | Exception], None]


class RendezvousClosedByChangeError(RendezvousClosedError):
    """There is no further generation for this node. `change` is the reason."""

    def __init__(self, change: Change) -> None:
        super().__init__(f"{change.kind.value}: {change.reason}")
        self.change = change


@attrs.define(eq=False)
class PendingJoin:
    """A call of `start_join`."""

    callback: JoinCallback
    waiting_since: float  # since when it waits for its next step
    is_seeking: bool = False  # the thread has requested a generation
    has_info: bool = False  # the callback has received a generation


@attrs.define(eq=False)
class _Task:
    """Work with the store that is no part of the rendezvous."""

    run: Callable[[], float]  # returns the seconds until the next call
    due_at: float


# The newest thread of this process for each store, job and node id.
_THREADS: weakref.WeakValueDictionary[tuple[int, str, str], NodeThread] = (
    weakref.WeakValueDictionary()
)


class NodeThread:
    """Runs a LocalNode in a thread until it is stopped. Thread-safe.

    It does not refer to its handler, so that a handler without `shutdown` can be collected.

    Args:
        node: The protocol of the node. Only the thread calls it.
        new_server: Returns a server for the bootstrap store of a new generation.
        find_address: Returns the node's address if its record has none. A StoreError is retried.
        clock: A monotonic clock.
    """

    def __init__(
        self,
        node: LocalNode,
        new_server: Callable[[], BootstrapStoreServer],
        find_address: Callable[[], str] | None,
        clock: Clock,
    ) -> None:
        self.node = node
        self._new_server = new_server
        self._find_address = find_address
        self._clock = clock
        self._timeouts = node.timeouts
        self.progress_due = float("inf")  # when the agent's loop must have made progress
        self.is_stopping = False
        self.change: Change | None = None  # the change that finished the current generation
        # Requests, each with whether the store is to be polled after it.
        self._requests: deque[tuple[Callable[[], None], bool]] = deque()
        # The thread also reads the store's connection while it waits for requests.
        self._loop = node.store.event_loop or EventLoop()
        self._tasks: list[_Task] = []
        self._takes_part = False  # a caller has asked for the job; until then, it is not read
        self._bootstrap_store: BootstrapStoreServer | None = None  # if this node is rank 0
        self._is_watching = False
        self._cancel_watch: CancelWatch | None = None  # cancels the last watch
        self._failed_watches = 0  # in a row
        self._listing: Listing | None = None  # delivered by the last watch
        self._poll_at = float("-inf")
        self._earliest_poll = float("-inf")  # a change is not read before this time
        self._condition = threading.Condition()  # guards the fields below; notified on changes
        self._thread: threading.Thread | None = None
        self._join: PendingJoin | None = None
        self._error: Exception | None = None  # the error that stopped the thread

    # -- for callers -------------------------------------------------------------------------------

    def post(self, request: Callable[[], None] = lambda: None) -> None:
        """Run a request in the thread, and then poll the store."""
        self._post(request, polls=True)

    def _post(self, request: Callable[[], None], *, polls: bool) -> None:
        self._requests.append((request, polls))
        self._loop.wake()

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
            due_at = self._clock() + TASK_DELAY_S
            if task.due_at > due_at:
                self._post(partial(setattr, task, "due_at", due_at), polls=False)

        self._post(partial(self._tasks.append, task), polls=False)
        self._start()
        return request

    def update_intent(self, update: Callable[[NodeIntent], NodeIntent]) -> None:
        """Replace the node's intent by `update(intent)` in the thread."""

        def request() -> None:
            self.node.intent = update(self.node.intent)

        self.post(request)

    def start_join(self, callback: JoinCallback) -> PendingJoin:
        """Ask for a generation. A new call replaces the pending join of an earlier call.

        The callback gets the generation and then each change, up to a final one, or an error.
        The callback runs in the node's thread, in `stop`, or at once if that thread is stopping.
        """
        join = PendingJoin(callback, self._clock())
        with self._condition:
            if self.is_stopping:
                callback(self.closed_error())
                return join
            self._join = join
        # This is posted before the thread starts, so that its first read already serves the join.
        self.post(lambda: self._request_join(self._join))
        self._start_taking_part()
        return join

    def wait_until(self, condition: Callable[[], object], timeout: float) -> None:
        """Wait until the condition holds or the thread stops, at most `timeout` seconds."""
        self._start_taking_part()
        with self._condition:
            self._condition.wait_for(lambda: self.is_stopping or condition(), timeout)

    def stop(self, error: Exception | None = None) -> None:
        """Make the thread leave the job and end. A pending join gets the error."""
        with self._condition:
            self.is_stopping, self._error = True, self._error or error
            join, self._join = self._join, None
            if join is not None:
                closed = self.closed_error()
                join.callback(as_change(closed) if join.has_info else closed)
            self._condition.notify_all()
        self.post()

    def wait_for_exit(self, timeout: float) -> bool:
        """Return whether the thread ends within `timeout` seconds, or was never started."""
        if self._thread is None:
            return True
        self._thread.join(max(timeout, 0.0))
        return not self._thread.is_alive()

    def request_stop(self) -> None:
        """Leave the job soon, without taking a lock: the garbage collector calls this."""
        self.is_stopping = True
        self.post()

    def closed_error(self) -> Exception:
        """Return the error of calls after the thread was stopped."""
        return self._error or RendezvousClosedError("this node has left the rendezvous")

    def join_timeout_error(self, join: PendingJoin) -> Exception | None:
        """Return the error if this join has timed out or was replaced, or None if it still waits.

        The timeout does not run while a generation is active, so that a spare can wait for a place.
        """
        node, timeout = self.node, self._timeouts.join_timeout
        with self._condition:
            if self._join is not join:
                return RendezvousClosedError("another call of next_rendezvous took its place")
        if join.has_info:
            return None
        if not node.intent.is_joining:
            if self._clock() < join.waiting_since + timeout:
                return None
            return RendezvousTimeoutError(
                f"group rank 0 of generation {node.intent.current_generation} has not opened "
                f"torch's store within join_timeout={timeout:g} s"
            )
        if node.snapshot is not None and node.snapshot.is_active:
            return None
        if self._clock() < max(join.waiting_since, node.last_active_at) + timeout:
            return None
        error = RendezvousTimeoutError(
            f"no generation settled within join_timeout={timeout:g} s: "
            f"{node.leader_status.reason}; here: {node.leader_status.present_names}; at least "
            f"min_nodes={node.settings.min_nodes} are needed (--nnodes)"
            + NEVER_REACHED
            * (node.snapshot is None)
        )
        error.is_node_loss = (
            node.state is not None and node.state.trigger is GenerationTrigger.NODE_LOSS
        )
        return error

    def _start_taking_part(self) -> None:
        """Make the thread read the job. No record is published before a generation is requested."""
        if not self._takes_part:
            self._takes_part = True
            self.post()
            self._start()

    def _start(self) -> None:
        """Start the thread unless it was started, and stop an earlier thread of the same node."""
        with self._condition:
            if self._thread is not None or self.is_stopping:
                return
            key = (id(self.node.store), self.node.run_id, self.node.intent.node.id)
            earlier = _THREADS.get(key)
            if earlier is not None:
                # Otherwise, the two threads would take the lease from each other.
                earlier.request_stop()
            _THREADS[key] = self
            self._thread = daemon_thread(
                self._run, "rendezvous", lambda reason: self.stop(RendezvousError(reason))
            )
            self._thread.start()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.adopt()
        try:
            self._take_part()
        finally:
            self._loop.release()
            if self.node.store.event_loop is not self._loop:
                self._loop.close()

    def _take_part(self) -> None:
        while not self.is_stopping:
            self._run_requests()
            pause = 0.0 if self._takes_part else math.inf
            try:
                if self._takes_part:
                    pause = self._run_once()
            except (StoreError, RendezvousConfigError, ConfigError) as error:
                self.stop(error)
            except Exception as error:
                log.exception("the rendezvous thread failed: this node leaves the job")
                self.stop(RendezvousError(f"the rendezvous failed: {format_error(error)}"))
            self._wait_for_requests(self._run_added_tasks(pause))
        self.stop()
        self.close_bootstrap_store()
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
        # Without this, the watch and late requests would keep this object, and so the store, alive.
        if self._cancel_watch is not None:
            self._cancel_watch()
        self._requests.clear()

    def _run_once(self) -> float:
        """Publish, and poll if it is time. Return the seconds to wait if no request arrives before.

        Raises the errors that end the node.
        """
        node = self.node
        try:
            pause = self._publish_and_poll()
            node.on_store_success(self._clock())
        except (StoreGraceExpiredError, StoreRejectedError):
            raise
        except StoreError as error:
            self._poll_at = now = self._clock()
            pause = node.on_store_error(error, now)
        join = self._join
        if join is not None and join.is_seeking:
            error_of_join = self.join_timeout_error(join)
            if error_of_join is not None:
                self._finish_join(join, error_of_join)
        return pause

    def _publish_and_poll(self) -> float:
        node = self.node
        listing, self._listing = self._listing, None
        if node.snapshot is None:
            # Read first: a node that will be rejected must not be seen by the others.
            first = node.read(self._clock())
            self._advance()
            if self.is_stopping:
                return 0.0
            if first.leader is not None:
                # Another node decides, so there is nothing to read before the next change.
                self._watch(first)
                self._poll_at = node.next_status_read_at
        if self._find_address is not None and not node.intent.node.address:
            node.intent = node.intent.with_node_fields(address=self._find_address())
        now = self._clock()
        node.publish(now, self.progress_due)
        if now >= self._poll_at:
            self._poll_at = now + self._poll(now, listing)
        self._advance()
        until_poll = self._poll_at - self._clock()
        return max(0.0, min(self._timeouts.keep_alive_interval, until_poll))

    def _poll(self, now: float, listing: Listing | None) -> float:
        """Read, write reports and decide. Return the seconds until the next poll."""
        node = self.node
        snapshot = node.poll(now, listing)
        self._advance()
        if node.try_other_store(now):
            return 0.0
        self._watch(snapshot)
        endpoint = "" if self._bootstrap_store is None else self._bootstrap_store.endpoint
        if node.write_reports(snapshot, utc_now_text(), endpoint=endpoint):
            return RETRY_INTERVAL_S if node.intent.close_reason else 0.0
        result, has_written = node.reconcile_and_write(snapshot, utc_now_text())
        if snapshot.view is not None:
            self._earliest_poll = now + POLL_INTERVAL_PER_NODE_S * len(snapshot.view.live_nodes)
        if result.new_membership is not None:
            return 0.0 if has_written else RETRY_INTERVAL_S
        again = node.publish_status(result, snapshot, now)
        return min(again, result.requeue_after_s or self._timeouts.lease_ttl)

    def _run_added_tasks(self, pause: float) -> float:
        """Run the due tasks of `add_task`, unless the rendezvous has something to do.

        Args:
            pause: the seconds until the rendezvous has something to do without a request.

        Returns:
            The seconds to wait after that for the next task or the end of the pause.
        """
        if pause <= 0 or self.is_stopping or self.node.is_store_away:
            return pause
        started_at = self._clock()
        for task in self._tasks:
            if self._clock() >= task.due_at and not self._requests:
                task.due_at = self._clock() + task.run()
        now = self._clock()
        until_due = min((task.due_at - now for task in self._tasks), default=math.inf)
        return max(0.0, min(pause - (now - started_at), until_due))

    def _wait_for_requests(self, timeout: float) -> None:
        """Wait until a request is posted, at most `timeout` seconds."""
        if timeout > 0 and not self._requests:
            self._loop.run_until(lambda: self._requests, timeout)

    def _run_requests(self) -> None:
        """Run all posted requests."""
        while self._requests:
            request, polls = self._requests.popleft()
            request()
            if polls:
                self._poll_at = min(self._poll_at, self._earliest_poll)

    # -- watching the store ------------------------------------------------------------------------

    def _watch(self, snapshot: JobSnapshot) -> None:
        """Watch for the next change: by `Store.watch`, or with a thread that calls `Store.wait`."""
        if self._is_watching:
            return
        node, after = self.node, snapshot.version
        self._cancel_watch = None
        if not self._failed_watches:
            # The leader collects changes for a while before it lists the job: it needs no listing.
            self._cancel_watch = node.store.watch(
                node.watch_prefix,
                after=after,
                callback=self._on_watch_result,
                with_listing=not node.is_leader,
            )
        if self._cancel_watch is None:
            daemon_thread(
                partial(self._wait_for_change, node.watch_prefix, after), "rendezvous-watch"
            ).start()
        self._is_watching = True

    def _on_watch_result(self, result: WatchResult) -> None:
        if result is False:
            # Watching failed. The next watch uses a thread, which limits the rate of attempts.
            self._failed_watches += 1
        listing = result if isinstance(result, Listing) else None
        self.post(partial(self._finish_watch, listing))

    def _finish_watch(self, listing: Listing | None) -> None:
        self._is_watching, self._listing = False, listing

    def _wait_for_change(self, prefix: str, after: int) -> None:
        store, timeout = self.node.store, self._timeouts.lease_ttl
        try:
            while not self.is_stopping and not store.wait(prefix, after=after, timeout=timeout):
                continue
            self._failed_watches = 0
        except StoreError as error:
            self._failed_watches += 1
            is_new = self._failed_watches == FAILED_WATCHES_BEFORE_WARNING
            log.log(
                logging.WARNING if is_new else logging.DEBUG,
                "cannot wait for changes in the store, retrying: %s",
                error,
            )
            if not self.is_stopping:
                threading.Event().wait(backoff(self._failed_watches))
        self._on_watch_result(True)

    # -- joining -----------------------------------------------------------------------------------

    def _request_join(self, join: PendingJoin | None) -> None:
        """Ask for the next generation. No workers of the current one may be running here."""
        self.close_bootstrap_store()
        self.node.intent = self.node.intent.request_join()
        with self._condition:
            self.change = None
            if join is not None:
                join.is_seeking, join.waiting_since = True, self._clock()

    def _advance(self) -> None:
        """Pass the results of the last read to the pending join and to waiting callers."""
        node, join = self.node, self._join
        if join is not None and join.is_seeking and not join.has_info:
            self._advance_join(join)
        with self._condition:
            # A finished generation stays so, even if a store has lost that information.
            change = node.intent.change(node.state) or self.change
            is_new, self.change = change != self.change, change
            self._condition.notify_all()
            if join is None or not join.has_info or join is not self._join:
                return
            if is_new and change is not None:
                join.callback(change)
                if change.kind.is_final:
                    self._join = None

    def _advance_join(self, join: PendingJoin) -> None:
        """Take the join one step further, without blocking.

        The node first enters a generation. The join then ends when torch's store has an address.
        """
        node = self.node
        if node.intent.is_joining:
            final = node.intent.final_change(node.state)
            if final is not None:
                if not node.intent.current_generation:
                    final = _as_late_result(final, node.state)
                node.intent = node.intent.receive_result()
                self._finish_join(join, RendezvousClosedByChangeError(final))
                return
            assignment = node.enter_generation()
            if assignment is None:
                return
            join.waiting_since = self._clock()
            if assignment.group_rank == 0:
                self._open_bootstrap_store()
        if node.intent.change(node.state) is not None:
            # The generation finished before its workers were started.
            self._request_join(join)
            self.post()
            return
        if self._bootstrap_store is not None and self._bootstrap_store.error is not None:
            self._finish_join(join, self._bootstrap_store.error)
            return
        snapshot = require_not_none(node.snapshot, "a snapshot")
        if snapshot.master_endpoint is not None:
            info = self._make_info(snapshot, snapshot.master_endpoint)
            with self._condition:
                if join is self._join:
                    join.has_info = True
                    join.callback(info)

    def _finish_join(self, join: PendingJoin, error: Exception) -> None:
        with self._condition:
            if join is self._join:
                self._join = None
                join.callback(error)

    def _open_bootstrap_store(self) -> None:
        """Open torch's store in a helper thread, as importing torch must not delay the lease."""
        server = self._bootstrap_store = self._new_server()
        address = self.node.intent.node.address

        def open_store() -> None:
            server.open(address)
            self.post()

        daemon_thread(open_store, "rendezvous-open").start()

    def close_bootstrap_store(self) -> None:
        """Close the bootstrap store of this node, if there is one."""
        server, self._bootstrap_store = self._bootstrap_store, None
        if server is not None:
            server.close()

    def _make_info(self, snapshot: JobSnapshot, endpoint: str) -> RendezvousInfo:
        node, state = self.node, require_not_none(snapshot.state, "the state")
        return RendezvousInfo(
            run_id=node.run_id,
            generation=state.generation,
            assignment=require_not_none(snapshot.assignment, "the assignment"),
            bootstrap_store_info=RendezvousStoreInfo(*split_endpoint(endpoint)),
            restarts=state.restarts,
            max_restarts=state.settings.max_restarts,
            reason=state.reason,
            trigger=state.trigger,
            store=node.store,
            exchange_prefix=node.keys.exchange_prefix(state.membership_id),
            incarnation=state.incarnation,
        )


def as_change(error: Exception) -> Change:
    """Return the change that ends the generation of a member if this error stops the thread."""
    is_closed = isinstance(error, RendezvousClosedError)
    return Change(ChangeKind.ABORTED if is_closed else ChangeKind.STORE_LOST, str(error))


def _as_late_result(change: Change, state: MembershipState | None) -> Change:
    reason = f"{change.reason}; no workers ran on this node"
    job_end = None if state is None else state.job_end
    if job_end is not None:
        reason += (
            f" (reported by {job_end.written_by} at {job_end.finished_at}; to run it again, start "
            "it once all of its nodes have ended)"
        )
    return attrs.evolve(change, reason=reason)


def _leave_at_exit() -> None:
    """Stop all threads when the process exits, including those that are leaving already.

    A lease may otherwise outlive the process, and closing torch's store at exit could abort it.
    """
    threads = [thread for ref in _THREADS.valuerefs() if (thread := ref()) is not None]
    for thread in threads:
        thread.request_stop()
    deadline = monotonic() + EXIT_TIMEOUT_S
    for thread in threads:
        thread.wait_for_exit(deadline - monotonic())


atexit.register(_leave_at_exit)
