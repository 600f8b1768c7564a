"""The rendezvous handler over any `Store`: membership that changes while the job runs.

It asks a keeper for what it wants and waits for snapshots that answer; it never touches the store
itself, so a store that is away blocks nobody for longer than the caller's own timeout.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable

import attrs

from ..clock import Clock, monotonic
from ..endpoint import join_endpoint, split_endpoint
from ..errors import ElasticError, RendezvousClosed, RendezvousError, RendezvousTimeout, present
from ..stores.interface import Store
from ..threads import helper
from .bootstrap import OF_TORCH, BootstrapStore, Front, import_torch, open_torch_store
from .change import Change, ChangeKind, change_since, final_change, has_entered
from .document import FailureKind, Head, Limits, Node
from .interface import BootstrapStoreInfo, RendezvousHandler, RendezvousInfo
from .keeper import Keeper
from .keys import Keys
from .participant import Snapshot
from .ranks import Seat
from .timing import Timing

LOOK_AGAIN_SECONDS = 1.0


class DynamicRendezvousHandler(RendezvousHandler):
    """Membership that changes while the job runs, over any store.

    One that is dropped without `shutdown` leaves as well, as soon as that is noticed. Where another
    takes its place over the same store, with the same node id, they meet in a new generation.

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
        self._store = store
        self._run_id = run_id
        self._keys = Keys(run_id)
        self._limits = limits
        self._timing = timing or Timing()
        self._backend = backend
        self._open_bootstrap = open_bootstrap
        self._find_front = find_front
        self._front: Front | None = None
        self._clock = clock
        self._joined: object = None
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
        self._exchange = self._keeper.exchange
        # The keeper and its thread know nothing of the handler, or it would never be dropped.
        weakref.finalize(self, self._keeper.abandon).atexit = False

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def prepare(self) -> None:
        if self._open_bootstrap in OF_TORCH:
            # Beside whatever else a node does before it joins: it takes seconds.
            helper(import_torch, "rendezvous-import").start()

    def follow(self, silent: Callable[[], float]) -> None:
        self._keeper.silent = silent

    def next_rendezvous(self) -> RendezvousInfo:
        self._close_bootstrap()
        self._keeper.start()
        while True:
            info = self._enter(*self._join())
            if info is not None:
                return info

    def wait_for_change(self, timeout: float) -> Change | None:
        self._keeper.start()
        return self._change_after(None, timeout)

    def _change_after(self, known: Change | None, timeout: float) -> Change | None:
        held = self._exchange.intent

        def change(snapshot: Snapshot) -> Change | None:
            found = change_since(snapshot.head, held)
            return None if found == known else found

        try:
            return self._exchange.wait_for(change, self._clock() + timeout)
        except RendezvousTimeout:
            return None
        except RendezvousClosed as error:
            return Change(ChangeKind.ABORTED, str(error))
        except ElasticError as error:
            return Change(ChangeKind.LOST, str(error))

    def join(self, put: Callable[[RendezvousInfo | Change | Exception], None]) -> bool:
        joined = self._joined = object()

        def told(outcome: RendezvousInfo | Change | Exception) -> None:
            if self._joined is joined:
                put(outcome)

        def follow() -> None:
            try:
                told(self.next_rendezvous())
            except Exception as error:
                told(error)
                return
            last = None
            while self._joined is joined and (last is None or not last.kind.final):
                change = self._change_after(last, LOOK_AGAIN_SECONDS)
                if change is not None:
                    last = change
                    told(change)

        helper(follow, "rendezvous-join").start()
        return True

    def report_failure(self, reason: str) -> bool:
        return self.report_failure_as(FailureKind.ORDINARY, reason)

    def report_failure_as(self, kind: FailureKind, reason: str) -> bool:
        self._exchange.fail(reason, kind)
        return True

    def report_draining(self, reason: str) -> bool:
        self._exchange.drain(reason)
        return True

    def report_done(self) -> bool:
        self._exchange.finish()
        return True

    def is_closed(self) -> bool:
        self._keeper.start()
        with contextlib.suppress(ElasticError):
            self._exchange.wait_for(lambda snapshot: snapshot, self._clock() + self._timing.lease)
        final = final_change(self._exchange.head, self._exchange.intent)
        return self._exchange.stopping or final is not None

    def set_closed(self) -> None:
        self._keeper.start()
        cause = f"closed by {self._exchange.intent.node.host}"
        self._exchange.close_job(cause, self._timing.close)

    def num_nodes_waiting(self) -> int:
        self._keeper.freshen_note()
        note = self._exchange.note
        # What was counted before this generation settled was for the one before.
        return note.waiting if note.roll == self._exchange.intent.node.roll else 0

    def heard(self) -> float | None:
        """Seconds since the store last took this node's word; None if it never has."""
        at = self._keeper.heard_at
        return None if at is None else max(0.0, self._clock() - at)

    def shutdown(self) -> bool:
        ended = self._keeper.stop()
        self._close_bootstrap()
        return ended

    def _join(self) -> tuple[Head, Seat]:
        """Wait to be a member; the join timeout runs while no generation stands, so that a spare
        waits for as long as one does."""
        self._exchange.seek()
        began = self._clock()
        deadline = began + self._timing.join
        while True:
            try:
                return self._exchange.wait_for(self._entered, deadline)
            except RendezvousTimeout as error:
                deadline = max(began, self._exchange.stood_at) + self._timing.join
                if self._clock() >= deadline:
                    raise RendezvousTimeout(self._waited_for(error)) from None

    def _entered(self, snapshot: Snapshot) -> tuple[Head, Seat] | None:
        """The generation that this node has become a member of, and its seat there."""
        intent = self._exchange.intent
        final = final_change(snapshot.head, intent)
        if final is not None:
            head = present(snapshot.head, "the head of a job that is over")
            raise ClosedBecause(final if intent.held else _to_a_latecomer(final, head))
        if not has_entered(snapshot.head, snapshot.seat, intent):
            return None
        return present(snapshot.head, "the head"), present(snapshot.seat, "the seat")

    def _enter(self, head: Head, seat: Seat) -> RendezvousInfo | None:
        """Meet at torch's store; None if the generation ended before its workers began."""
        self._exchange.enter(head, seat)
        intent = self._exchange.intent
        if seat.rank == 0:
            self._exchange.publish(head.roll, self._open_at(intent.node.address))

        def met(now: Snapshot) -> tuple[str | None] | None:
            if change_since(now.head, intent) is not None:
                return (None,)
            return None if now.master is None else (now.master,)

        try:
            (master,) = self._exchange.wait_for(met, self._clock() + self._timing.join)
        except RendezvousTimeout:
            raise RendezvousTimeout(
                f"group rank 0 of generation {head.generation} has not opened torch's store "
                f"within join_timeout={self._timing.join:g} s"
            ) from None
        if master is None:
            self._close_bootstrap()
            return None
        return RendezvousInfo(
            run_id=self._run_id,
            generation=head.generation,
            seat=seat,
            bootstrap_store_info=BootstrapStoreInfo(*split_endpoint(master)),
            restarts=head.restarts,
            max_restarts=head.limits.max_restarts,
            cause=head.cause,
            why=head.why,
            store=self._store,
            board=self._keys.board(head.roll),
            incarnation=head.incarnation,
        )

    def _waited_for(self, error: RendezvousTimeout) -> str:
        names = ", ".join(self._exchange.note.here) or "nobody"
        told = (
            f"no generation settled within join_timeout={self._timing.join:g} s: {error}; "
            f"here: {names}; at least {self._limits.min_nodes} nodes are needed (--nnodes)"
        )
        if self._exchange.snapshot is None:
            told += "; the store was never reached: if the job was over already, it is gone, too"
        return told

    def _open_at(self, address: str) -> str:
        """Serve torch's store there, or behind the front; returns where workers find it."""
        front = self._find_front()
        address = address if front is None else "127.0.0.1"
        try:
            bootstrap = self._open_bootstrap(address)
        except OSError as error:
            raise RendezvousError(
                f"cannot serve torch's store at {address}, this node's own address: {error}; "
                "name another with --local-addr"
            ) from error
        with self._opening:
            # Opening takes seconds the first time, in which we may have been shut down.
            if self._exchange.stopping:
                bootstrap.close()
                raise RendezvousClosed("this node has left the rendezvous")
            self._bootstrap, self._front = bootstrap, front
        if front is None:
            return join_endpoint(address, bootstrap.port)
        front.lead_to(address, bootstrap.port)
        return join_endpoint(front.address, front.port)

    def _close_bootstrap(self) -> None:
        with self._opening:
            bootstrap, self._bootstrap = self._bootstrap, None
            front, self._front = self._front, None
        if front is not None:
            front.lead_nowhere()
        if bootstrap is not None:
            bootstrap.close()


def _to_a_latecomer(change: Change, head: Head) -> Change:
    told = "nothing was run here"
    if head.ending is not None:
        told += f" (said by {head.ending.by} at {head.ending.at}; "
        told += "to start it anew: another --rdzv-id, or --rdzv-conf launch=NAME on all nodes)"
    return attrs.evolve(change, reason=f"{change.reason}; {told}")


class ClosedBecause(RendezvousClosed):
    """There will be no further generation for this node; `change` says why."""

    def __init__(self, change: Change) -> None:
        super().__init__(f"{change.kind.value}: {change.reason}")
        self.change = change
