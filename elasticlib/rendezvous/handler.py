"""The rendezvous handlers of elasticlib, over any Store: dynamic and static membership."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable
from functools import partial

import attrs

from ..clock import Clock, monotonic
from ..errors import ConfigError
from ..stores.interface import Store
from .blame import FailureKind
from .bootstrap_store import (
    IMPORT_TIMEOUT_S,
    TORCH_STORE_OPENERS,
    BootstrapStore,
    BootstrapStoreServer,
    StoreProxy,
    import_torch,
    open_torch_store,
)
from .interface import RendezvousHandler, RendezvousInfo, check_restart_budget
from .local_node import STATUS_INTERVAL_S, LocalNode
from .membership import Change, Node, RendezvousSettings, RendezvousTimeouts
from .node_intent import NodeIntent
from .node_thread import JoinCallback, NodeThread, as_change

TIMEOUT_CHECK_INTERVAL_S = 1.0  # checks of the join timeout while the store blocks the thread
UNREACHED_CLOSE_TIMEOUT_S = 1.0  # maximum duration of `shutdown` if no store was ever reached


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
        self._run_id = run_id
        self._backend = backend
        self._open_bootstrap_store = open_bootstrap_store
        self._timeouts = timeouts or RendezvousTimeouts()
        self._clock = clock
        self._status_requested_at = float("-inf")  # last request of `num_nodes_waiting`
        self._thread = NodeThread(
            LocalNode(store, run_id, node, settings, self._timeouts),
            partial(BootstrapStoreServer, open_bootstrap_store, find_store_proxy),
            find_address,
            clock,
        )
        weakref.finalize(self, self._thread.request_stop).atexit = False

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def node(self) -> Node:
        """The record of this node."""
        return self._thread.node.intent.node

    @property
    def store(self) -> Store:
        """The store of the job."""
        return self._thread.node.store

    def check_agent(self, *, slots: int, max_restarts: int | None) -> None:
        node = self._thread.node
        if slots != node.intent.node.slots:
            raise ConfigError(
                f"the Node of this handler has slots={node.intent.node.slots}, but the agent's "
                f"WorkerSpec has local_world_size={slots}: give both the same number"
            )
        check_restart_budget(max_restarts, node.settings.max_restarts)

    def prepare(self) -> None:
        if self._open_bootstrap_store in TORCH_STORE_OPENERS:
            import_torch().join(IMPORT_TIMEOUT_S)

    def mark_progress(self, allowance_s: float = 0.0) -> None:
        self._thread.progress_due = self._clock() + self._timeouts.loop_timeout + allowance_s

    def start_join(self, callback: JoinCallback) -> bool:
        self._thread.start_join(callback)
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        outcomes: queue.SimpleQueue[RendezvousInfo | Change | Exception] = queue.SimpleQueue()
        join = self._thread.start_join(outcomes.put)
        while True:
            outcome: RendezvousInfo | Change | Exception | None
            try:
                outcome = outcomes.get(timeout=TIMEOUT_CHECK_INTERVAL_S)
            except queue.Empty:
                # The thread may be blocked by the store and unable to check the timeout.
                error = self._thread.join_timeout_error(join)
                outcome = error if outcomes.empty() else None
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, RendezvousInfo):
                return outcome

    def wait_for_change(self, timeout: float) -> Change | None:
        thread = self._thread
        thread.wait_until(lambda: thread.change, timeout)
        return as_change(thread.closed_error()) if thread.is_stopping else thread.change

    def report_failure(
        self, reason: str, *, kind: FailureKind = FailureKind.RAISED, hung_node_rank: int = -1
    ) -> bool:
        self.report_evidence(reason, kind=kind, hung_node_rank=hung_node_rank)
        return True

    def report_evidence(self, reason: str, *, kind: FailureKind, hung_node_rank: int = -1) -> None:
        record = partial(
            NodeIntent.record_failure, reason=reason, kind=kind, hung_node_rank=hung_node_rank
        )
        self._thread.update_intent(record)

    def report_slots(self, slots: int, *, retained: bool = False) -> bool:
        self._thread.update_intent(
            partial(NodeIntent.with_node_fields, slots=slots, has_retained_workers=retained)
        )
        return True

    def report_can_regroup(self) -> None:
        self._thread.post(partial(setattr, self._thread.node, "can_regroup", True))

    def peers_can_regroup(self) -> bool:
        node = self._thread.node
        self._thread.wait_until(lambda: node.snapshot, self._timeouts.lease_ttl)
        snapshot = node.snapshot
        if snapshot is None or snapshot.state is None or snapshot.state.phase.is_terminal:
            return False
        return snapshot.leader is not None and snapshot.leader.can_regroup

    def report_takes_notices(self) -> None:
        self._thread.update_intent(partial(NodeIntent.with_node_fields, takes_notices=True))

    def peers_take_notices(self) -> bool:
        return self._thread.node.takes_notices

    def report_drain(self, reason: str) -> None:
        self._thread.update_intent(partial(NodeIntent.with_node_fields, drain_reason=reason))

    def report_stop(self, reason: str) -> None:
        self._thread.update_intent(partial(NodeIntent.request_stop, reason=reason))

    def report_restart(self, reason: str) -> bool:
        self._thread.update_intent(partial(NodeIntent.request_restart, reason=reason))
        return True

    def report_success(self) -> bool:
        self._thread.update_intent(NodeIntent.record_success)
        return True

    def is_closed(self) -> bool:
        """Return whether there is no further generation for this node.

        The call waits at most `lease_ttl` seconds for the first answer of the store.
        """
        node = self._thread.node
        self._thread.wait_until(lambda: node.snapshot, self._timeouts.lease_ttl)
        return self._thread.is_stopping or node.intent.final_change(node.state) is not None

    def set_closed(self) -> None:
        node = self._thread.node
        reason = f"closed by {node.intent.node.host}"
        self._thread.update_intent(partial(attrs.evolve, close_reason=reason))
        self._thread.wait_until(
            lambda: node.state is not None and node.state.phase.is_terminal,
            self._timeouts.close_timeout,
        )

    def num_nodes_waiting(self) -> int:
        node, now = self._thread.node, self._clock()
        if now - self._status_requested_at >= STATUS_INTERVAL_S:
            # Callers may poll many times a second, and the store must not be.
            self._status_requested_at = node.next_status_read_at = now
            self._thread.post()
        status = node.leader_status
        is_current = status.membership_id == node.intent.node.membership_id
        return status.num_waiting if is_current else 0

    def add_task(self, run: Callable[[], float]) -> Callable[[], None]:
        """Make the thread that uses the store call a function repeatedly, until `shutdown`.

        The thread calls it only if the rendezvous has nothing to do and the store is reachable.

        Args:
            run: Returns the seconds until its next call. Raises nothing.

        Returns:
            A function that requests a call soon.
        """
        return self._thread.add_task(run)

    def seconds_since_refresh(self) -> float | None:
        """Return the seconds since this node last updated its lease, or None if it never has."""
        refreshed_at = self._thread.node.last_refresh_at
        return None if refreshed_at is None else max(0.0, self._clock() - refreshed_at)

    def shutdown(self) -> bool:
        self._thread.stop()
        timeout = self._timeouts.close_timeout
        if self._thread.node.snapshot is None:
            timeout = min(UNREACHED_CLOSE_TIMEOUT_S, timeout)
        has_exited = self._thread.wait_for_exit(timeout)
        self._thread.close_bootstrap_store()
        return has_exited


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
