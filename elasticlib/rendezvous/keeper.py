"""One node's conversation with the store, kept up by one thread for as long as the node is there.

The keeper's thread alone speaks to the store. Callers say what they want, wake it, and wait for a
snapshot that answers them; a watcher does nothing but wait for the store to change.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import attrs

from ..clock import Clock, today
from ..errors import (
    ElasticError,
    RendezvousClosed,
    RendezvousError,
    RendezvousMismatch,
    RendezvousTimeout,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    describe,
)
from ..stores.interface import Store
from .backoff import backoff
from .codec import Note
from .decide import Decision, gives_way
from .document import Ending, Head, Limits, Node, Phase
from .intent import Intent
from .participant import Participant, Snapshot, noted
from .ranks import Seat
from .reminder import REMIND_SECONDS, Reminder
from .timing import Timing
from .watcher import Watcher

log = logging.getLogger("elasticlib.rendezvous")

FIRST_NOTE_SECONDS = 1.0
PACE_SECONDS = 2e-4  # for each node that is there, between two looks of the one that leads

Answer = TypeVar("Answer")


class Keeper:
    """Refreshes the node's lease, reads, decides and writes, until it is stopped.

    find_address is called before a node without an address first speaks, as often as it raises
    a StoreError.
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
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._watcher = Watcher(store, timing.lease, lambda: self._inbox.put("look"))
        self._watching = False
        self._misses = 0
        self._look_at = float("-inf")
        self._pace_until = float("-inf")
        self._note_at = float("inf")
        self._answered = self._stood = clock()
        # All below is shared with callers, under the condition.
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._error: ElasticError | None = None
        self._intent = Intent(node)
        self._publish: tuple[str, str] | None = None
        self._done = ""
        self._closing: str | None = None
        self._stopping = False
        self._stood_at = float("-inf")
        self._note = Note(reason="the store has not answered")
        self._reminder = Reminder(timing.join)

    # -- for callers --------------------------------------------------------------------------

    def start(self) -> None:
        with self._changed:
            if self._thread is not None or self._stopping:
                return
            self._stood = self._answered = self._clock()
            self._note_at = self._answered + FIRST_NOTE_SECONDS
            self._thread = threading.Thread(target=self._loop, name="rendezvous", daemon=True)
            self._thread.start()
            self._watcher.start()

    def stop(self) -> bool:
        """Leave the job; whether that was done within the timing's `close` seconds.

        The thread that waits for changes ends with its wait, or when the store is closed.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._inbox.put("leave")
        if self._thread is None:
            return True
        self._thread.join(self._timing.close)
        return not self._thread.is_alive()

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
    def head(self) -> Head | None:
        return None if self.snapshot is None else self.snapshot.head

    @property
    def note(self) -> Note:
        """What the node that leads last told."""
        with self._changed:
            return self._note

    @property
    def stood_at(self) -> float:
        """When a generation was last seen to stand, on the keeper's clock."""
        with self._changed:
            standing = self._snapshot is not None and _settled(self._snapshot)
            return self._clock() if standing else self._stood_at

    def seek(self) -> int:
        """Say that no workers of ours are left; returns the generation that we held."""
        with self._changed:
            self._intent = self._intent.seek()
            self._done, self._publish = "", None
            held = self._intent.held
        self._inbox.put("seek")
        return held

    def enter(self, head: Head, seat: Seat) -> None:
        """From now on we may run workers of this generation."""
        with self._changed:
            self._intent = self._intent.enter(head, seat)

    def fail(self, reason: str) -> None:
        """Our workers failed."""
        with self._changed:
            self._intent = self._intent.fail(reason)
        self._inbox.put("fail")

    def publish(self, roll: str, endpoint: str) -> None:
        """Say where the bootstrap store of the generation with this roll is."""
        with self._changed:
            self._publish = (roll, endpoint)
        self._inbox.put("publish")

    def finish(self) -> None:
        """Say that our workers of the held generation succeeded."""
        with self._changed:
            self._done = self._intent.node.roll
        self._inbox.put("finish")

    def close_job(self, cause: str) -> None:
        """End the job for all its nodes; returns when the store has it, or the node has left."""
        self.start()
        with self._changed:
            self._closing = cause
            self._inbox.put("close")
            self._changed.wait_for(
                lambda: self._closing is None or self._stopping, self._timing.close
            )

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
                    raise RendezvousTimeout(self._note.reason)
                self._changed.wait(left)

    # -- the loop -----------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopping:
            pause = 0.0
            try:
                pause = self._round()
                self._misses = 0
            except (StoreRefused, RendezvousMismatch) as error:
                self._fail(error)
            except StoreError as error:
                pause = self._miss(error)
            except Exception as error:
                # Callers wait on this thread: it must not end without telling them.
                log.exception("the rendezvous broke")
                self._fail(RendezvousError(f"the rendezvous broke: {describe(error)}"))
            self._next_event(pause)
        self._watcher.stop()
        try:
            self._participant.leave(self._intent)
        except StoreError as error:
            log.info("left without a word, the store being away: %s", error)

    def _round(self) -> float:
        """One turn; how many seconds may pass until the next if nothing happens."""
        if self._snapshot is None:
            self._arrive()
        self._learn_address()
        now = self._clock()
        self._participant.speak(self._intent, self.head, now)
        if now >= self._look_at:
            self._look_at = now + self._look(now)
        self._answered = now
        return max(0.0, min(self._timing.refresh, self._look_at - self._clock()))

    def _arrive(self) -> None:
        """Look before we speak: whoever is going to be refused must not be let in first."""
        first = self._participant.read(self._intent, self._clock())
        with self._changed:
            self._intent = self._intent.arrive(first.head, self._participant.limits, first.leader)
        self._tell(first)
        if first.leader is not None:
            # There is nothing here for us to decide: the next look is for what changes.
            self._watch(first)
            self._look_at = self._note_at

    def _watch(self, snapshot: Snapshot) -> None:
        if not self._watching:
            self._watching = True
            self._watcher.arm(self._participant.prefix, snapshot.version)

    def _look(self, now: float) -> float:
        """Read, say what callers want said, decide and write; seconds until the next look."""
        snapshot = self._participant.look(self._intent, now)
        self._tell(snapshot)
        self._check_standing(snapshot, now)
        self._watch(snapshot)
        if self._closing is not None:
            return self._close(snapshot, self._closing)
        self._report(snapshot)
        decision, won = self._participant.act(snapshot, today())
        if snapshot.view is not None:
            self._pace_until = now + PACE_SECONDS * len(snapshot.view.live)
        if decision.write is not None:
            return 0.0 if won else 0.01
        return min(self._explain(decision, snapshot, now), decision.again or self._timing.lease)

    def _close(self, snapshot: Snapshot, cause: str) -> float:
        ending = Ending(self._intent.node.host, today())
        if not self._participant.close(snapshot, Phase.ABORTED, cause, ending):
            return 0.01
        with self._changed:
            self._closing = None
            self._changed.notify_all()
        return 0.0

    def _report(self, snapshot: Snapshot) -> None:
        """What this node has to say of its generation, until the store has it."""
        with self._changed:
            publish, done = self._publish, self._done
        if publish is not None and snapshot.master is None:
            self._participant.publish_master(snapshot, *publish)
        if done:
            self._participant.report_done(snapshot, done)

    def _check_standing(self, snapshot: Snapshot, now: float) -> None:
        """Where the store has forgotten the job, or too few are here to go on, the others have
        until the end of our patience to come; and they may be elsewhere."""
        intent, timing = self._intent, self._timing
        forgotten = intent.memory is not None and gives_way(snapshot.head, intent.incarnation)
        if not forgotten and not self._note.stuck:
            self._stood = now
        elif now - self._stood >= timing.store_grace and intent.memory is not None:
            reason = (
                f"for {timing.store_grace:g} s (--store-grace) too few nodes of generation "
                f"{intent.held} have come to the store: {self._note.reason}"
            )
            self._fail(StoreUnavailable(reason))
        elif now - self._stood >= timing.lease and self._store.look_elsewhere(
            self._participant.finds_more(snapshot.head, intent)
        ):
            log.warning("too few nodes were at the store: this one has gone to another")

    def _explain(self, decision: Decision, snapshot: Snapshot, now: float) -> float:
        """Say what a waiting node waits for, when that changes and every so often; seconds until
        there may be something to say again."""
        again = self._learn_note(decision, snapshot, now)
        # The rest its agent tells.
        waiting = self._intent.joining and not _settled(snapshot)
        if not waiting:
            log.debug("%s", decision.reason)
            return again
        self._reminder.remind(self._note, now)
        return max(0.01, min(again, self._note_at - now))

    def _learn_note(self, decision: Decision, snapshot: Snapshot, now: float) -> float:
        """Tell the others, or hear from the one that leads, what is being waited for; seconds
        until what could not be told yet can be."""
        again, note = float("inf"), self._note
        if snapshot.view is not None:
            note = noted(decision, snapshot.view)
            again = self._participant.tell(note, now)
            self._note_at = now + REMIND_SECONDS
        elif now >= self._note_at:
            note = self._participant.read_note()
            self._note_at = now + self._timing.lease
        with self._changed:
            self._note = note
        return again

    def _next_event(self, pause: float) -> None:
        try:
            event = self._inbox.get(timeout=pause) if pause > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return
        while True:
            if event == "look":
                self._watching = False
            self._look_at = min(self._look_at, self._pace_until)
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                return

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
            self._intent = self._intent.meet(snapshot.head)
            self._changed.notify_all()

    def _fail(self, error: ElasticError) -> None:
        with self._changed:
            self._error, self._stopping = error, True
            self._changed.notify_all()

    def _miss(self, error: StoreError) -> float:
        """The store does not answer: how long to pause, or the end of our patience."""
        now = self._clock()
        first = self._snapshot is None
        grace, knob = self._timing.store_grace, "--store-grace"
        if first:
            grace, knob = self._timing.join, "join_timeout"
        with self._changed:
            self._note = Note(reason=str(error))
        if self._misses == 0:
            log.warning("the store is away, trying for %g s (%s): %s", grace, knob, error)
        self._misses += 1
        self._look_at = now
        if now - self._answered >= grace:
            reason = f"the store was away for {grace:g} s ({knob}): {error}"
            self._fail(StoreUnavailable(reason))
        return backoff(self._misses)


def _settled(snapshot: Snapshot) -> bool:
    return snapshot.head is not None and snapshot.head.phase is Phase.SETTLED
