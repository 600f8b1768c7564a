"""The rendezvous handlers of elasticlib, over any Store: dynamic and static membership."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial

from ..clock import Clock, monotonic, utc_now_text
from ..errors import ConfigError, RendezvousClosedError, require_not_none
from ..options import RendezvousSettings, RendezvousTimeouts
from ..stores.interface import Store
from .bootstrap_store import (
    IMPORT_TIMEOUT_S,
    TORCH_STORE_OPENERS,
    BootstrapStore,
    BootstrapStoreServer,
    StoreProxy,
    import_torch,
    open_torch_store,
)
from .driver import MembershipEvent, RendezvousDriver, as_change
from .interface import (
    Joined,
    MembershipChanged,
    RendezvousHandler,
    RendezvousInfo,
    Report,
    check_restart_budget,
)
from .membership import Change, Node
from .node import STATUS_INTERVAL_S, CloseJob, Poll, RendezvousNode

TIMEOUT_CHECK_INTERVAL_S = 1.0  # checks of the join timeout while the store blocks the thread


class DynamicRendezvousHandler(RendezvousHandler):
    """Rendezvous with a membership that changes while the job runs. Thread-safe.

    A handler that is garbage-collected without `shutdown` leaves the job, as if `shutdown` had been
    called, but nobody waits for that. Its thread keeps the store until then. If another handler
    with the same store and node id takes its place, the nodes meet in a new generation.

    Args:
        store: A store that all nodes of the job reach. The caller closes it after `shutdown`.
        run_id: The job id, equal on all nodes.
        node: The record of this node. No other process of the job may ever use its id.
        settings: The settings of the job. A node whose settings differ is rejected.
        timeouts: The timeouts of this node.
        backend: The name that `get_backend` returns.
        open_bootstrap_store: Opens torch's store at a local address.
        find_address: Returns the address of a node without one. It is called again after a
            StoreError.
        find_store_proxy: Returns the proxy through which workers reach torch's store. The store
            then listens at 127.0.0.1 only. Returns None to serve the store at its own port.
        clock: A monotonic clock.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node: Node,
        settings: RendezvousSettings,
        *,
        timeouts: RendezvousTimeouts | None = None,
        backend: str = "tcp",
        open_bootstrap_store: Callable[[str], BootstrapStore] = open_torch_store,
        find_address: Callable[[], str] | None = None,
        find_store_proxy: Callable[[], StoreProxy | None] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._backend = backend
        self._timeouts = timeouts or RendezvousTimeouts()
        self._clock = clock
        self._status_requested_at = float("-inf")  # last request of `num_nodes_waiting`
        self._mailbox = _Mailbox()
        uses_torch = open_bootstrap_store in TORCH_STORE_OPENERS
        self._driver = RendezvousDriver(
            RendezvousNode(
                store,
                run_id,
                node,
                settings,
                self._timeouts,
                find_address=find_address,
                wall_time=utc_now_text,
            ),
            partial(BootstrapStoreServer, open_bootstrap_store, find_store_proxy),
            (lambda: import_torch().join(IMPORT_TIMEOUT_S)) if uses_torch else (lambda: None),
            clock,
        )
        self._driver.open(self._mailbox.post)
        weakref.finalize(self, self._driver.request_stop).atexit = False

    def membership(
        self, *, slots: int, job: RendezvousSettings | None = None
    ) -> RendezvousDriver | None:
        """Return what an agent uses in place of the blocking methods of this handler.

        The caller keeps this handler as long as it uses the membership, and calls `open`. It does
        not call a blocking method that a subclass overrides: such a subclass returns None here.

        Args:
            slots: The number of workers that the agent starts.
            job: The settings that the agent was given; None if it was given none.

        Raises:
            ConfigError: The settings of the agent contradict this handler's own.
        """
        if slots != self.node.slots:
            raise ConfigError(
                f"the Node of this handler has slots={self.node.slots}, but the agent's "
                f"WorkerSpec has local_world_size={slots}: give both the same number"
            )
        check_restart_budget(job, self._driver.node.settings.max_restarts)
        return self._driver

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._driver.node.run_id

    @property
    def node(self) -> Node:
        """The record of this node."""
        return self._driver.node.intent.node

    @property
    def store(self) -> Store:
        """The store of the job."""
        return self._driver.store

    def next_rendezvous(self) -> RendezvousInfo:
        mailbox, since = self._mailbox, self._clock()
        attempt = mailbox.begin()
        self._driver.join(attempt)
        while True:
            with mailbox.condition:
                is_over = mailbox.condition.wait_for(
                    lambda: mailbox.is_over(attempt), TIMEOUT_CHECK_INTERVAL_S
                )
                if is_over:
                    return mailbox.result(attempt)
            # The thread may be blocked by the store and unable to check the timeout.
            error = self._driver.node.join_error(attempt, since, self._clock())
            if error is not None:
                raise error

    def wait_for_change(self, timeout: float) -> Change | None:
        mailbox, driver = self._mailbox, self._driver
        if not driver.is_stopping:
            with mailbox.condition:
                mailbox.condition.wait_for(lambda: mailbox.change, timeout)
        return as_change(driver.closed_error()) if driver.is_stopping else mailbox.change

    def report(self, report: Report) -> bool:
        self._driver.report(report)
        return True

    def is_closed(self) -> bool:
        """Return whether there is no further generation for this node.

        The call waits at most `lease_ttl` seconds for the first answer of the store.
        """
        node = self._driver.node
        self._driver.wait_until(lambda: node.snapshot, self._timeouts.lease_ttl)
        return self._driver.is_stopping or node.intent.final_change(node.state) is not None

    def set_closed(self) -> None:
        node = self._driver.node
        self._driver.request(CloseJob(f"closed by {self.node.host}"))
        self._driver.wait_until(
            lambda: node.state is not None and node.state.phase.is_terminal,
            self._timeouts.close_timeout,
        )

    def num_nodes_waiting(self) -> int:
        node, now = self._driver.node, self._clock()
        if now - self._status_requested_at >= STATUS_INTERVAL_S:
            # Callers may poll many times a second, and the store must not be.
            self._status_requested_at = now
            self._driver.request(Poll(reads_status=True))
        status = node.leader_status
        is_current = status.membership_id == node.intent.node.membership_id
        return status.num_waiting if is_current else 0

    def seconds_since_refresh(self) -> float | None:
        """Return the seconds since this node last updated its lease, or None if it never has."""
        return self._driver.seconds_since_refresh()

    def shutdown(self) -> bool:
        return self._driver.close()


class _Mailbox:
    """The events of the last call of `next_rendezvous`, for the blocking methods."""

    def __init__(self) -> None:
        self.condition = threading.Condition()  # guards the fields; notified when they change
        self.change: Change | None = None  # the last one since the call
        self._attempt = 0
        self._info: RendezvousInfo | None = None
        self._error: Exception | None = None

    def begin(self) -> int:
        """Begin an attempt to join. A call that waits for an earlier one ends."""
        with self.condition:
            self._attempt += 1
            self._info = self.change = self._error = None
            self.condition.notify_all()
            return self._attempt

    def post(self, event: MembershipEvent) -> None:
        """Take note of an event, in any thread."""
        with self.condition:
            if event.attempt == self._attempt:
                if isinstance(event, Joined):
                    self._info = event.generation
                elif isinstance(event, MembershipChanged):
                    self.change, self._error = event.change, event.error
                self.condition.notify_all()

    def is_over(self, attempt: int) -> bool:
        """Return whether an attempt has a result, or was replaced by another one."""
        has_result = self._info is not None or self.change is not None
        return attempt != self._attempt or has_result

    def result(self, attempt: int) -> RendezvousInfo:
        """Return the generation of an attempt, or raise the error."""
        if attempt != self._attempt:
            raise RendezvousClosedError("another call of next_rendezvous took its place")
        if self._info is not None:
            return self._info
        change = require_not_none(self.change, "the change")
        raise self._error or RendezvousClosedError(f"{change.kind.value}: {change.reason}", change)


class StaticRendezvousHandler(DynamicRendezvousHandler):
    """Rendezvous of exactly `nnodes` nodes, where `node.rank_hint` is the rank of each.

    A node that restarts or returns under its rank meets the others in a new generation.

    Args:
        store: A store that all nodes of the job reach. The caller closes it after `shutdown`.
        run_id: The job id, equal on all nodes.
        node: The record of this node, with its rank as `rank_hint`.
        nnodes: The number of nodes.
        max_restarts: The restart budget of the job.
        timeouts: The timeouts of this node.
        open_bootstrap_store: Opens torch's store at a local address.
        find_address: Returns the address of a node without one.
        clock: A monotonic clock.

    Raises:
        ConfigError: The rank is missing or not below `nnodes`.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node: Node,
        nnodes: int,
        *,
        max_restarts: int = 0,
        timeouts: RendezvousTimeouts | None = None,
        open_bootstrap_store: Callable[[str], BootstrapStore] = open_torch_store,
        find_address: Callable[[], str] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if node.rank_hint is None or not 0 <= node.rank_hint < nnodes:
            raise ConfigError(
                f"the rank of a static node must be from 0 to {nnodes - 1}, got {node.rank_hint}"
            )
        settings = RendezvousSettings(
            nnodes, nnodes, max_restarts, last_call_timeout=0.0, has_fixed_ranks=True
        )
        super().__init__(
            store,
            run_id,
            node,
            settings,
            timeouts=timeouts,
            backend="static",
            open_bootstrap_store=open_bootstrap_store,
            find_address=find_address,
            clock=clock,
        )
