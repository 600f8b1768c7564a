"""One node's conversation with the store, kept up by one thread for as long as the node is there.

The keeper's thread alone speaks to the store. Callers say what they want, wake it, and wait for a
snapshot that answers them; a second thread does nothing but wait for the store to change.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import attrs

from ..clock import Clock
from ..errors import (
    ElasticError,
    RendezvousClosed,
    RendezvousError,
    RendezvousMismatch,
    RendezvousTimeout,
    StoreError,
    StoreRefused,
    describe,
)
from ..stores.interface import Store
from .decide import Decision
from .document import Document, Limits, Node, Phase
from .intent import Intent
from .participant import Participant, Snapshot
from .timing import Timing

log = logging.getLogger("elasticlib.rendezvous")

REMIND_SECONDS = 10.0

Answer = TypeVar("Answer")


class Keeper:
    """Refreshes the node's lease, reads, decides and writes, until it is stopped.

    find_address is called in the keeper's thread before the node first speaks, for a node
    without an address; as often as it raises a StoreError.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node: Node,
        limits: Limits,
        *,
        timing: Timing,
        clock: Clock,
        find_address: Callable[[], str] | None,
    ) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        self._find_address = find_address
        self._participant = Participant(store, run_id, node, limits, timing.lease)
        self._threads: tuple[threading.Thread, ...] = ()
        self._inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._fences: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._watching = False
        self._away = False
        self._answered = clock()
        # All below is shared with callers, under the condition.
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._error: ElasticError | None = None
        self._intent = Intent(node)
        self._publish: tuple[int, str] | None = None
        self._done = 0
        self._closing: str | None = None
        self._stopping = False
        self._stood_at = float("-inf")
        self._reason = "the store has not answered"
        self._explained = float("-inf")

    # -- for callers --------------------------------------------------------------------------

    def start(self) -> None:
        with self._changed:
            if self._threads or self._stopping:
                return
            self._threads = (
                threading.Thread(target=self._loop, name="rendezvous", daemon=True),
                threading.Thread(target=self._observe, name="rendezvous-watch", daemon=True),
            )
            for thread in self._threads:
                thread.start()

    def stop(self) -> bool:
        """Leave the job; whether the threads ended within the timing's `close` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._inbox.put("leave")
        deadline = self._clock() + self._timing.close
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def stopping(self) -> bool:
        with self._changed:
            return self._stopping

    @property
    def intent(self) -> Intent:
        with self._changed:
            return self._intent

    @property
    def snapshot(self) -> Snapshot | None:
        """The last one that was read; None before the store first answered."""
        with self._changed:
            return self._snapshot

    @property
    def document(self) -> Document | None:
        snapshot = self.snapshot
        return None if snapshot is None else snapshot.document

    @property
    def stood_at(self) -> float:
        """When a settled generation was last seen to stand, on the keeper's clock."""
        with self._changed:
            standing = self._snapshot is not None and _settled(self._snapshot)
            return self._clock() if standing else self._stood_at

    def seek(self) -> int:
        """Say that no workers of ours are left; returns the generation that we held."""
        with self._changed:
            self._intent = self._intent.seek()
            self._done, self._publish = 0, None
            held = self._intent.held
        self._inbox.put("seek")
        return held

    def enter(self, generation: int) -> None:
        """From now on we may run workers of this generation."""
        with self._changed:
            self._intent = self._intent.enter(generation)

    def fail(self, reason: str) -> None:
        """Say that our workers of the held generation failed."""
        with self._changed:
            self._intent = self._intent.fail(reason)
        self._inbox.put("fail")

    def publish(self, generation: int, endpoint: str) -> None:
        """Say where the generation's bootstrap store is."""
        with self._changed:
            self._publish = (generation, endpoint)
        self._inbox.put("publish")

    def finish(self) -> None:
        """Say that our workers of the held generation succeeded."""
        with self._changed:
            self._done = self._intent.held
        self._inbox.put("finish")

    def close_job(self, cause: str) -> None:
        """End the job for all its nodes."""
        with self._changed:
            self._closing = cause
        self._inbox.put("close")

    def wait_for(self, answer: Callable[[Snapshot], Answer | None], deadline: float) -> Answer:
        """The first answer that a snapshot gives.

        Raises:
            RendezvousTimeout: none until the deadline, on the keeper's clock.
            RendezvousClosed: the keeper was stopped. ElasticError: it could not go on.
        """
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
                    raise RendezvousTimeout(self._reason)
                self._changed.wait(left)

    # -- the loop -----------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopping:
            try:
                pause = self._round()
                self._away = False
            except (StoreRefused, RendezvousMismatch) as error:
                self._fail(error)
                break
            except StoreError as error:
                pause = self._miss(error)
            except Exception as error:
                # Callers wait on this thread: it must not end without telling them.
                log.exception("the rendezvous broke")
                self._fail(RendezvousError(f"the rendezvous broke: {describe(error)}"))
                break
            self._next_event(pause)
        self._fences.put(None)
        try:
            self._participant.withdraw()
        except StoreError as error:
            log.info("left without a word, the store being away: %s", error)

    def _round(self) -> float:
        """One turn; how many seconds may pass until the next if nothing happens."""
        if self._snapshot is None:
            # Whoever is going to be refused must not be let in first.
            self._tell(self._participant.read(self._clock()))
        self._speak()
        snapshot = self._participant.read(self._clock())
        self._tell(snapshot)
        self._answered = self._clock()
        if not self._watching:
            self._watching = True
            self._fences.put(snapshot.version)
        if self._closing is not None:
            if not self._participant.close(snapshot, Phase.ABORTED, self._closing):
                return 0.01
            self._closing = None
            return 0.0
        decision, won = self._participant.act(snapshot)
        self._explain(decision, snapshot)
        if decision.write is not None:
            return 0.0 if won else 0.01
        return min(self._timing.refresh, decision.again or self._timing.refresh)

    def _explain(self, decision: Decision, snapshot: Snapshot) -> None:
        """Say what a waiting node waits for, when that changes and every so often."""
        now, same = self._clock(), decision.reason == self._reason
        # The rest its agent tells.
        waiting = self._intent.joining and decision.write is None and not _settled(snapshot)
        if same and not (waiting and now - self._explained >= REMIND_SECONDS):
            return
        self._reason, self._explained = decision.reason, now
        if not waiting:
            log.debug("%s", decision.reason)
            return
        here = ", ".join(sorted(node.host for node in snapshot.view.live))
        log.info(
            "%s; here: %s; join_timeout=%g s ends the wait",
            decision.reason,
            here or "nobody",
            self._timing.join,
        )

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
            if self._snapshot is not None and _settled(self._snapshot):
                self._stood_at = self._clock()
            self._snapshot = snapshot
            self._intent = self._intent.meet(snapshot.document)
            self._changed.notify_all()

    def _fail(self, error: ElasticError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _miss(self, error: StoreError) -> float:
        """The store does not answer: how long to pause, or the end of our patience."""
        now = self._clock()
        first = self._snapshot is None
        grace = self._timing.join if first else self._timing.store_grace
        self._reason = str(error)
        if not self._away:
            self._away = True
            log.warning("the store is away, trying for %g s: %s", grace, error)
        if now - self._answered >= grace:
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


def _settled(snapshot: Snapshot) -> bool:
    return snapshot.document is not None and snapshot.document.phase is Phase.SETTLED
