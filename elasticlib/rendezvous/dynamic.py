"""The rendezvous handler over any `Store`: membership that changes while the job runs.

It asks a keeper for what it wants and waits for snapshots that answer; it never touches the store
itself, so a store that is away blocks nobody for longer than the caller's own timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs

from ..clock import Clock, monotonic
from ..endpoint import join_endpoint, split_endpoint
from ..errors import ElasticError, RendezvousClosed, RendezvousError, RendezvousTimeout
from ..stores.interface import Store
from .bootstrap import BootstrapStore, open_torch_store
from .change import Change, ChangeKind, change_since, entered, final_change
from .document import Limits, Node, Phase
from .interface import BootstrapStoreInfo, RendezvousHandler, RendezvousInfo
from .keeper import Keeper
from .participant import Snapshot
from .timing import Timing


class DynamicRendezvousHandler(RendezvousHandler):
    """Membership that changes while the job runs, over any store.

    Args:
        store: reached by every node of the job; closed by who made it, after `shutdown`.
        run_id: the job's name, the same on all nodes.
        node: what this one says of itself, with an id that no other process ever had.
        limits: the same on all nodes, or this one is refused.
        open_bootstrap: serves torch's store at an address of this node.
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
        clock: Clock = monotonic,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._limits = limits
        self._timing = timing or Timing()
        self._backend = backend
        self._open_bootstrap = open_bootstrap
        self._clock = clock
        self._opening = threading.Lock()
        self._bootstrap: BootstrapStore | None = None
        self._keeper = Keeper(
            store,
            run_id,
            node,
            limits,
            timing=self._timing,
            clock=clock,
            find_address=find_address,
        )

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._close_bootstrap()
        self._keeper.start()
        while True:
            info = self._enter(*self._join())
            if info is not None:
                return info

    def wait_for_change(self, timeout: float) -> Change | None:
        held = self._keeper.intent

        def change(snapshot: Snapshot) -> Change | None:
            me = snapshot.view.me
            return change_since(snapshot.document, me, held.held, held.incarnation)

        try:
            return self._keeper.wait_for(change, self._clock() + timeout)
        except RendezvousTimeout:
            return None
        except RendezvousClosed as error:
            return Change(ChangeKind.ABORTED, str(error))
        except ElasticError as error:
            return Change(ChangeKind.LOST, str(error))

    def report_failure(self, reason: str) -> bool:
        self._keeper.fail(reason)
        return True

    def report_done(self) -> bool:
        self._keeper.finish()
        return True

    def is_closed(self) -> bool:
        document = self._keeper.document
        return self._keeper.stopping or (document is not None and document.phase.terminal)

    def set_closed(self) -> None:
        self._keeper.close_job(f"closed by {self._keeper.intent.node.host}")

    def num_nodes_waiting(self) -> int:
        snapshot = self._keeper.snapshot
        document = None if snapshot is None else snapshot.document
        if snapshot is None or document is None or document.phase is not Phase.SETTLED:
            return 0
        return sum(node.id not in document.member_ids for node in snapshot.view.live)

    def shutdown(self) -> bool:
        ended = self._keeper.stop()
        self._close_bootstrap()
        return ended

    def _join(self) -> tuple[Snapshot, int]:
        """Wait to be a member; the join timeout runs while no generation stands, so that a spare
        waits for as long as one does."""
        self._keeper.seek()
        began = self._clock()
        deadline = began + self._timing.join
        while True:
            try:
                return self._keeper.wait_for(self._entered, deadline)
            except RendezvousTimeout as error:
                deadline = max(began, self._keeper.stood_at) + self._timing.join
                if self._clock() >= deadline:
                    raise RendezvousTimeout(self._waited_for(error)) from None

    def _entered(self, snapshot: Snapshot) -> tuple[Snapshot, int] | None:
        """The snapshot in which this node is a member of a new generation, and its rank."""
        document, me = snapshot.document, snapshot.view.me
        held = self._keeper.intent.held
        final = final_change(document, me)
        if final is not None:
            raise ClosedBecause(final, never_in=held == 0)
        rank = entered(document, me, held)
        return None if rank is None else (snapshot, rank)

    def _enter(self, snapshot: Snapshot, rank: int) -> RendezvousInfo | None:
        """Meet at torch's store; None if the generation ended before its workers began."""
        document = snapshot.document
        assert document is not None
        generation, incarnation = document.generation, document.incarnation
        self._keeper.enter(generation)
        if rank == 0:
            address = self._keeper.intent.node.address
            port = self._open_at(address)
            self._keeper.publish(generation, join_endpoint(address, port))

        def met(now: Snapshot) -> tuple[str | None] | None:
            if change_since(now.document, now.view.me, generation, incarnation) is not None:
                return (None,)
            return None if now.master is None else (now.master,)

        (master,) = self._keeper.wait_for(met, self._clock() + self._timing.join)
        if master is None:
            self._close_bootstrap()
            return None
        return RendezvousInfo(
            run_id=self._run_id,
            generation=generation,
            rank=rank,
            members=document.members,
            bootstrap_store_info=BootstrapStoreInfo(*split_endpoint(master)),
            restarts=document.restarts,
            max_restarts=document.limits.max_restarts,
            cause=document.cause,
            store=self._store,
        )

    def _waited_for(self, error: RendezvousTimeout) -> str:
        snapshot = self._keeper.snapshot
        here = () if snapshot is None else snapshot.view.live
        names = ", ".join(sorted(node.host for node in here)) or "nobody"
        return (
            f"no generation settled within join_timeout={self._timing.join:g} s: {error}; "
            f"here: {names}; at least {self._limits.min_nodes} nodes are needed (--nnodes)"
        )

    def _open_at(self, address: str) -> int:
        """Serve torch's store there; returns its port."""
        try:
            bootstrap = self._open_bootstrap(address)
        except OSError as error:
            raise RendezvousError(
                f"cannot serve torch's store at {address}, this node's own address: {error}; "
                "name another with --local-addr"
            ) from error
        with self._opening:
            # Opening takes seconds the first time, in which we may have been shut down.
            if self._keeper.stopping:
                bootstrap.close()
                raise RendezvousClosed("this node has left the rendezvous")
            self._bootstrap = bootstrap
        return bootstrap.port

    def _close_bootstrap(self) -> None:
        with self._opening:
            bootstrap, self._bootstrap = self._bootstrap, None
        if bootstrap is not None:
            bootstrap.close()


class ClosedBecause(RendezvousClosed):
    """There will be no further generation for this node; `change` says why."""

    def __init__(self, change: Change, *, never_in: bool) -> None:
        if never_in:
            told = f"{change.reason}; nothing was run here (a new job needs another run id)"
            change = attrs.evolve(change, reason=told)
        super().__init__(f"{change.kind.value}: {change.reason}")
        self.change = change
