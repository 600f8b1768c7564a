"""The rendezvous handler over any `Store`: one loop that refreshes, reads, decides and writes.

The loop's thread alone speaks to the store. Callers say what they want, wake it, and wait for a
snapshot that answers them; a second thread does nothing but wait for the store to change.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import attrs

from ..clock import Clock, monotonic
from ..endpoint import join_endpoint, split_endpoint
from ..errors import (
    ElasticError,
    RendezvousClosed,
    RendezvousError,
    RendezvousMismatch,
    RendezvousTimeout,
    StoreError,
    StoreRefused,
)
from ..stores.interface import Store
from .bootstrap import BootstrapStore, open_torch_store
from .change import Change, ChangeKind, change_since, entered, final_change
from .document import Limits, Node, Phase
from .intent import Intent
from .interface import BootstrapStoreInfo, RendezvousHandler, RendezvousInfo
from .participant import Participant, Snapshot
from .timing import Timing

log = logging.getLogger("elasticlib.rendezvous")

Answer = TypeVar("Answer")


class DynamicRendezvousHandler(RendezvousHandler):
    """Membership that changes while the job runs, over any store.

    Args:
        store: reached by every node of the job; closed by who made it, after `shutdown`.
        run_id: the job's name, the same on all nodes.
        node: what this one says of itself, with an id that no other process ever had.
        limits: the same on all nodes, or this one is refused.
        open_bootstrap: serves torch's store at an address of this node.
        find_address: for a node without an address: called in the handler's thread before the
            node first speaks, as often as it raises a StoreError.
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
        self._timing = timing or Timing()
        self._backend = backend
        self._open_bootstrap = open_bootstrap
        self._find_address = find_address
        self._clock = clock
        self._participant = Participant(store, run_id, node, limits, self._timing.lease)
        self._bootstrap: BootstrapStore | None = None
        self._threads: tuple[threading.Thread, ...] = ()
        self._inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._fences: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._watching = False
        self._reason = ""
        # All below is shared with callers, under the condition.
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._error: ElasticError | None = None
        self._intent = Intent(node)
        self._publish: tuple[int, str] | None = None
        self._done = 0
        self._closing: str | None = None
        self._stopping = False
        self._away_since: float | None = None

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    # -- what callers ask -------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = self._clock() + self._timing.join
        self._close_bootstrap()
        self._start()
        while True:
            snapshot, rank = self._await(partial(_entered, self._seek()), deadline)
            info = self._enter(snapshot, rank, deadline)
            if info is not None:
                return info

    def wait_for_change(self, timeout: float) -> Change | None:
        def change(snapshot: Snapshot) -> Change | None:
            return change_since(snapshot.document, snapshot.view.me, self._intent.held)

        try:
            return self._await(change, self._clock() + timeout)
        except RendezvousTimeout:
            return None
        except RendezvousClosed as error:
            return Change(ChangeKind.ABORTED, str(error))
        except ElasticError as error:
            return Change(ChangeKind.LOST, str(error))

    def report_failure(self, reason: str) -> bool:
        with self._changed:
            self._intent = self._intent.fail(reason)
        self._inbox.put("failed")
        return True

    def report_done(self) -> bool:
        with self._changed:
            self._done = self._intent.held
        self._inbox.put("done")
        return True

    def is_closed(self) -> bool:
        with self._changed:
            document = None if self._snapshot is None else self._snapshot.document
            return self._stopping or (document is not None and document.phase.terminal)

    def set_closed(self) -> None:
        with self._changed:
            self._closing = f"closed by {self._intent.node.host}"
        self._inbox.put("closed")

    def num_nodes_waiting(self) -> int:
        with self._changed:
            document = None if self._snapshot is None else self._snapshot.document
            if self._snapshot is None or document is None or document.phase is not Phase.SETTLED:
                return 0
            return sum(n.id not in document.member_ids for n in self._snapshot.view.live)

    def shutdown(self) -> bool:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._inbox.put("leave")
        deadline = self._clock() + self._timing.close
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        self._close_bootstrap()
        return not any(thread.is_alive() for thread in self._threads)

    # -- callers' steps -----------------------------------------------------------------------

    def _start(self) -> None:
        with self._changed:
            if self._threads or self._stopping:
                return
            self._threads = (
                threading.Thread(target=self._loop, name="rendezvous", daemon=True),
                threading.Thread(target=self._observe, name="rendezvous-watch", daemon=True),
            )
            for thread in self._threads:
                thread.start()

    def _seek(self) -> int:
        """Say that no workers of ours are left, and that we want the next generation."""
        with self._changed:
            self._intent = self._intent.seek()
            self._done = 0
            self._publish = None
            held = self._intent.held
        self._inbox.put("join")
        return held

    def _enter(self, snapshot: Snapshot, rank: int, deadline: float) -> RendezvousInfo | None:
        """Meet at torch's store; None if the generation ended before its workers began."""
        document = snapshot.document
        assert document is not None
        generation = document.generation
        with self._changed:
            self._intent = self._intent.enter(generation)
        if rank == 0:
            address = self._intent.node.address
            self._bootstrap = self._open_at(address)
            with self._changed:
                self._publish = (generation, join_endpoint(address, self._bootstrap.port))
            self._inbox.put("publish")

        def met(now: Snapshot) -> tuple[str | None] | None:
            if change_since(now.document, now.view.me, generation) is not None:
                return (None,)
            return None if now.master is None else (now.master,)

        (master,) = self._await(met, deadline)
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
            cause=document.cause,
            store=self._store,
        )

    def _await(self, answer: Callable[[Snapshot], Answer | None], deadline: float) -> Answer:
        """The first answer that a snapshot gives."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._stopping:
                    raise RendezvousClosed("this node has left the rendezvous")
                found = None if self._snapshot is None else answer(self._snapshot)
                if found is not None:
                    return found
                left = deadline - self._clock()
                if left <= 0:
                    raise RendezvousTimeout(self._waited_for())
                self._changed.wait(left)

    def _waited_for(self) -> str:
        limits = self._participant.limits
        here = () if self._snapshot is None else self._snapshot.view.live
        names = ", ".join(sorted(node.host for node in here)) or "nobody"
        return (
            f"no generation settled within join_timeout={self._timing.join:g} s: "
            f"{self._reason or 'the store has not answered'}; here: {names}; "
            f"at least {limits.min_nodes} nodes are needed (--nnodes)"
        )

    def _open_at(self, address: str) -> BootstrapStore:
        try:
            return self._open_bootstrap(address)
        except OSError as error:
            raise RendezvousError(
                f"cannot serve torch's store at {address}, this node's own address: {error}; "
                "name another with --local-addr"
            ) from error

    def _close_bootstrap(self) -> None:
        if self._bootstrap is not None:
            self._bootstrap.close()
            self._bootstrap = None

    # -- the loop -----------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopping:
            try:
                pause = self._round()
                self._away_since = None
            except (StoreRefused, RendezvousMismatch) as error:
                self._fail(error)
                break
            except StoreError as error:
                pause = self._away(error)
            self._next_event(pause)
        self._fences.put(None)
        try:
            self._participant.withdraw()
        except StoreError as error:
            log.info("left without a word, the store being away: %s", error)

    def _round(self) -> float:
        """One turn; how many seconds may pass until the next if nothing happens."""
        self._speak()
        snapshot = self._participant.read(self._clock())
        self._tell(snapshot)
        if not self._watching:
            self._watching = True
            self._fences.put(snapshot.version)
        if self._closing is not None and not self._stopping:
            if self._participant.close(snapshot, Phase.ABORTED, self._closing):
                self._closing = None
            return 0.0 if self._closing else self._timing.refresh
        decision, won = self._participant.act(snapshot)
        if decision.reason != self._reason:
            self._reason = decision.reason
            # What a waiting node waits for is news; the rest its agent tells.
            news = self._intent.joining and decision.write is None and not _settled(snapshot)
            log.log(logging.INFO if news else logging.DEBUG, "%s", decision.reason)
        if decision.write is not None:
            return 0.0 if won else 0.01
        return min(self._timing.refresh, decision.again or self._timing.refresh)

    def _speak(self) -> None:
        """Keep the lease, and say what callers want said."""
        self._learn_address()
        with self._changed:
            intent, publish, done = self._intent, self._publish, self._done
            document = None if self._snapshot is None else self._snapshot.document
        self._participant.speak(intent, document)
        if publish is not None:
            self._participant.publish_master(*publish)
        if done:
            self._participant.report_done(done)
        with self._changed:
            if self._publish == publish:
                self._publish = None
            if self._done == done:
                self._done = 0

    def _learn_address(self) -> None:
        if self._find_address is None or self._intent.node.address:
            return
        address = self._find_address()
        with self._changed:
            node = attrs.evolve(self._intent.node, address=address)
            self._intent = attrs.evolve(self._intent, node=node)

    def _tell(self, snapshot: Snapshot) -> None:
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()

    def _fail(self, error: ElasticError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _away(self, error: StoreError) -> float:
        """The store does not answer: how long to pause, or the end of our patience."""
        now = self._clock()
        first = self._snapshot is None
        grace = self._timing.join if first else self._timing.store_grace
        if self._away_since is None:
            self._away_since = now
            log.warning("the store is away, trying for %g s: %s", grace, error)
        if now - self._away_since >= grace:
            self._fail(error)
            self._stopping = True
        return 0.2

    def _next_event(self, pause: float) -> None:
        try:
            event = self._inbox.get(timeout=pause) if pause > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return
        if event == "look":
            self._watching = False

    def _observe(self) -> None:
        """Wait for the store to change, and say so; nothing else."""
        while (fence := self._fences.get()) is not None:
            try:
                self._store.wait(
                    self._participant.prefix, after=fence, timeout=self._timing.refresh
                )
            except StoreError as error:
                # The loop's own next call meets the same failure, and deals with it.
                log.debug("waiting on the store: %s", error)
            self._inbox.put("look")


class ClosedBecause(RendezvousClosed):
    """There will be no further generation for this node; `change` says why."""

    def __init__(self, change: Change) -> None:
        super().__init__(f"{change.kind.value}: {change.reason}")
        self.change = change


def _entered(after: int, snapshot: Snapshot) -> tuple[Snapshot, int] | None:
    """The snapshot in which this node is a member of a generation past `after`, and its rank."""
    document, me = snapshot.document, snapshot.view.me
    final = final_change(document, me)
    if final is not None:
        raise ClosedBecause(final)
    rank = entered(document, me, after)
    return None if rank is None else (snapshot, rank)


def _settled(snapshot: Snapshot) -> bool:
    return snapshot.document is not None and snapshot.document.phase is Phase.SETTLED
