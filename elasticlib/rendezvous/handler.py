"""The rendezvous handlers over any `Store`: membership that changes while the job runs, and the
static one.

They wait for what their loop makes known, so that a store that is away blocks nobody for longer
than the caller's own timeout.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable

from ..clock import Clock, monotonic
from ..errors import ConfigError, RendezvousClosed
from ..stores.interface import Store
from .bootstrap import (
    OF_TORCH,
    BootstrapServer,
    BootstrapStore,
    Front,
    import_torch,
    open_torch_store,
)
from .document import Change, FailureKind, Limits, Node, Timing
from .interface import RendezvousHandler, RendezvousInfo
from .loop import Event, Loop, Put
from .node import NOTE_SECONDS, LocalNode

QUICK_SHARE = 1 / 8
"""Of a lease: what takes no longer may be done by the thread that keeps it."""
OVERDUE_SECONDS = 1.0
"""Between looks whether the join timeout has passed, while the store keeps the loop."""


class DynamicRendezvousHandler(RendezvousHandler):
    """Membership that changes while the job runs, over any store.

    One that is dropped without `shutdown` leaves as well, as soon as that is noticed (one that
    `join` was called on, once its `put` is dropped as well). Where another takes its place over the
    same store, with the same node id, they meet in a new generation.

    Args:
        store: reached by every node of the job; closed by who made it, after `shutdown`.
        run_id: the job's name, the same on all nodes.
        node: what this one says of itself, with an id that no other process ever had.
        limits: the same on all nodes, or this one is refused.
        open_bootstrap: serves torch's store at an address of this node.
        find_front: the port of this node at which workers are to look for torch's store, which
            then is at no address that others reach; None where it is at a port of its own.
        find_address: for a node without an address: called before the node first speaks, as
            often as it raises a StoreError.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node: Node,
        limits: Limits,
        *,
        timing: Timing | None = None,
        backend: str = "tcp",
        open_bootstrap: Callable[[str], BootstrapStore] = open_torch_store,
        find_address: Callable[[], str] | None = None,
        find_front: Callable[[], Front | None] = lambda: None,
        clock: Clock = monotonic,
    ) -> None:
        self._run_id = run_id
        self._backend = backend
        self._open_bootstrap = open_bootstrap
        self._timing = timing or Timing()
        self._clock = clock
        self._asked_at = float("-inf")
        self._loop = Loop(
            LocalNode(store, run_id, node, limits, self._timing),
            BootstrapServer(open_bootstrap, find_front, self._timing.lease * QUICK_SHARE),
            find_address,
            clock,
        )
        weakref.finalize(self, self._loop.abandon).atexit = False

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def prepare(self) -> None:
        if self._open_bootstrap in OF_TORCH:
            # Beside whatever else a node does before it joins: it takes seconds.
            import_torch()

    def follow(self, silent: Callable[[], float]) -> None:
        self._loop.silent = silent

    def join(self, put: Put) -> bool:
        self._loop.join(put)
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        outcomes: queue.SimpleQueue[RendezvousInfo | Change | Exception] = queue.SimpleQueue()
        join = self._loop.join(outcomes.put)
        while True:
            outcome: RendezvousInfo | Change | Exception | None
            try:
                outcome = outcomes.get(timeout=OVERDUE_SECONDS)
            except queue.Empty:
                # The store may be keeping the thread that would put it.
                outcome = self._loop.overdue(join)
                if self._loop.has_replaced(join) and outcomes.empty():
                    outcome = RendezvousClosed("another call of next_rendezvous took its place")
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, RendezvousInfo):
                return outcome

    def wait_for_change(self, timeout: float) -> Change | None:
        return self._loop.wait_for_change(timeout)

    def report_failure(self, reason: str) -> bool:
        return self.report_failure_as(FailureKind.ORDINARY, reason)

    def report_failure_as(self, kind: FailureKind, reason: str) -> bool:
        self._loop.post(Event(failed=(reason, kind)))
        return True

    def report_draining(self, reason: str) -> bool:
        self._loop.post(Event(draining=reason))
        return True

    def report_done(self) -> bool:
        self._loop.post(Event(finished=True))
        return True

    def is_closed(self) -> bool:
        return self._loop.is_over(self._timing.lease)

    def set_closed(self) -> None:
        self._loop.close_job()

    def num_nodes_waiting(self) -> int:
        now = self._clock()
        if now - self._asked_at >= NOTE_SECONDS:
            # Perhaps it is asked many times a second; the store is not.
            self._asked_at = now
            self._loop.post(Event(asks_note=True))
        node = self._loop.node
        # What was counted before this generation settled was for the one before.
        return node.note.waiting if node.note.membership == node.intent.node.membership else 0

    def heard(self) -> float | None:
        """Seconds since the store last took this node's word; None if it never has."""
        at = self._loop.node.heard_at
        return None if at is None else max(0.0, self._clock() - at)

    def shutdown(self) -> bool:
        return self._loop.leave()


class StaticRendezvousHandler(DynamicRendezvousHandler):
    """All of `nnodes` nodes, `node.hint` being each one's rank.

    It is the dynamic one with nothing left to vary, so that a restart, or a node that comes back
    under its old rank, meets the others in a generation of its own here as well.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node: Node,
        nnodes: int,
        *,
        max_restarts: int = 0,
        timing: Timing | None = None,
        open_bootstrap: Callable[[str], BootstrapStore] = open_torch_store,
        find_address: Callable[[], str] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if node.hint is None or not 0 <= node.hint < nnodes:
            raise ConfigError(f"need 0 <= node rank < nnodes={nnodes}, got {node.hint}")
        super().__init__(
            store,
            run_id,
            node,
            Limits(nnodes, nnodes, max_restarts, last_call=0.0, fixed_ranks=True),
            timing=timing,
            backend="static",
            open_bootstrap=open_bootstrap,
            find_address=find_address,
            clock=clock,
        )
