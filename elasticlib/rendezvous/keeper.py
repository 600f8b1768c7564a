"""One node's conversation with the store, kept up by one thread for as long as the node is there.

The keeper's thread alone speaks to the store. Callers say what they want, wake it, and wait for a
snapshot that answers them, in an `Exchange`; a watcher only waits for the store to change.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable

import attrs

from ..clock import Clock, monotonic, today
from ..errors import (
    ConfigError,
    RendezvousError,
    RendezvousMismatch,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    describe,
)
from ..stores.interface import Listing, Store
from ..threads import helper
from .backoff import backoff
from .change import final_change
from .codec import Note
from .decide import Decision, is_empty
from .document import Ending, Limits, Node, Phase
from .exchange import UNANSWERED, Exchange, Wishes, settled
from .notes import NOTE_SECONDS, noted
from .participant import Participant, Snapshot
from .reminder import REMIND_SECONDS, Reminder
from .standstill import Standstill
from .timing import Timing
from .watcher import Watcher

log = logging.getLogger("elasticlib.rendezvous")

FIRST_NOTE_SECONDS = 2.0
UNKNOWN_SECONDS = 1.0
EXIT_SECONDS = 1.0
"""In which nodes that nobody shut down may leave, when their process ends."""
PACE_SECONDS = 2e-4  # for each node that is there, between two looks of the one that leads


@attrs.frozen
class _Event:
    """Something to look for: a wish, or a change in the store, perhaps with what is there now."""

    changed: bool = False
    listing: Listing | None = None


_BEGUN: weakref.WeakValueDictionary[tuple[int, str, str], Keeper] = weakref.WeakValueDictionary()
"""The last of this process to begin for each store, job and node id."""


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
        self._name = (id(store), run_id, node.id)
        self._timing = timing
        self._clock = clock
        self._find_address = find_address
        self._participant = Participant(store, run_id, node, limits, timing.lease)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._watcher = Watcher(store, timing.lease, lambda now: self._inbox.put(_Event(True, now)))
        self._watching = False
        self._listing: Listing | None = None
        self._misses = 0
        self._look_at = float("-inf")
        self._pace_until = float("-inf")
        self._note_at = float("inf")
        self._freshened = float("-inf")
        self._missing_since = self._stood = clock()
        self._reminder = Reminder(timing.join)
        self._standstill, self._still = Standstill(timing.loop), False
        self.silent: Callable[[], float] = lambda: 0.0
        """Seconds for which the loop of this node's agent has not turned."""
        self.heard_at: float | None = None
        """When the store last took this node's word, by our clock; None before it has."""
        self.exchange = Exchange(node, clock, lambda: self._inbox.put(_Event()))

    def start(self) -> None:
        """Begin to look; the node is not announced before a generation is sought."""
        with self._starting:
            if self._thread is not None or self.exchange.stopping:
                return
            self._stood = self._clock()
            self._note_at = self._stood + FIRST_NOTE_SECONDS
            before = _BEGUN.get(self._name)
            if before is not None:
                before.abandon()  # or the two would take the lease from each other in turns
            _BEGUN[self._name] = self
            self._thread = helper(self._loop, "rendezvous", self._broke)
            self._thread.start()

    def _broke(self, sentence: str) -> None:
        self.exchange.fail_all(RendezvousError(sentence))

    def stop(self) -> bool:
        """Leave the job; whether that was done within the timing's `close` seconds. Where no store
        was ever reached there is nothing to leave, and looking for one may take long.

        The thread that waits for changes ends with its wait, or when the store is closed.
        """
        self.exchange.stop()
        unknown = self.exchange.snapshot is None
        return self._ended(
            min(UNKNOWN_SECONDS, self._timing.close) if unknown else self._timing.close
        )

    def abandon(self) -> None:
        """Have the thread leave the job when it can. Takes no lock and waits for nothing: it is
        called when a handler is found to be gone, which may be in the midst of anything."""
        self.exchange.abandon()

    def _ended(self, seconds: float) -> bool:
        """Whether the thread ends within so many seconds, if it ever began."""
        with self._starting:
            thread = self._thread
        if thread is None:
            return True
        thread.join(max(seconds, 0.0))
        return not thread.is_alive()

    def freshen_note(self) -> None:
        """Somebody asks for what the note tells, perhaps many times a second: read it again soon,
        but not that often."""
        now = self._clock()
        if now - self._freshened >= NOTE_SECONDS:
            self._freshened = self._note_at = now
            self._inbox.put(_Event())

    # -- the loop -----------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self.exchange.stopping:
            pause = 0.0
            try:
                pause = self._round()
                self._back()
            except (StoreRefused, RendezvousMismatch, ConfigError) as error:
                self.exchange.fail_all(error)
            except StoreError as error:
                pause = self._miss(error)
            except Exception as error:
                # Callers wait on this thread: it must not end without telling them.
                log.exception("the rendezvous broke")
                self.exchange.fail_all(RendezvousError(f"the rendezvous broke: {describe(error)}"))
            self._next_event(pause)
        self._watcher.stop()
        try:
            self._participant.leave(self.exchange.intent)
        except StoreError as error:
            log.info("left without a word, the store being away: %s", error)

    def _round(self) -> float:
        """One turn; how many seconds may pass until the next if nothing happens."""
        exchange = self.exchange
        listing, self._listing = self._listing, None
        if exchange.snapshot is None:
            self._arrive()
            if exchange.stopping:
                return 0.0
        self._learn_address()
        now = self._clock()
        self._speak(now)
        if now >= self._look_at:
            self._look_at = now + self._look(now, listing)
        return max(0.0, min(self._timing.refresh, self._look_at - self._clock()))

    def _speak(self, now: float) -> None:
        """Keep this node's place, unless its agent's loop stands still: it gives up its place, and
        what has become of the generation is read before it speaks again."""
        still = self._standstill.judge(self.silent(), now)
        if still and not self._still:
            log.warning(
                "the agent's loop has not turned for %g s: this node gives up its place among the "
                "others until it does",
                self._timing.loop,
            )
        if still:
            self._participant.withdraw()
        else:
            if self._still:
                log.warning("the agent's loop turns again, and this node speaks again")
                self.exchange.tell(self._participant.read(self.exchange.intent, now))
            self._participant.speak(self.exchange.intent, self.exchange.head, now)
            self.heard_at = now
        self._still = still

    def _arrive(self) -> None:
        """Look before we speak: whoever is going to be refused must not be let in first."""
        first = self._participant.read(self.exchange.intent, self._clock())
        self.exchange.arrive(first, self._participant.limits)
        if first.leader is not None:
            # There is nothing here for us to decide: the next look is for what changes.
            self._watch(first)
            self._look_at = self._note_at

    def _watch(self, snapshot: Snapshot) -> None:
        if not self._watching:
            # The node that leads waits for more of what all say before it reads that.
            leads = self._participant.leads
            self._watcher.arm(self._participant.prefix, snapshot.version, listing=not leads)
            self._watching = True

    def _look(self, now: float, listing: Listing | None) -> float:
        """Read, say what callers want said, decide and write; seconds until the next look."""
        before = self.exchange.snapshot
        if listing is not None and before is not None and listing.version < before.version:
            listing = None  # read for another reason in between, we know better
        snapshot = self._participant.look(self.exchange.intent, now, listing)
        self.exchange.tell(snapshot)
        if self._check_standing(snapshot, now):
            return 0.0
        self._watch(snapshot)
        wishes = self.exchange.wishes
        if wishes.closing is not None:
            return self._close(snapshot, wishes.closing)
        self._report(snapshot, wishes)
        decision, won = self._participant.act(snapshot, today())
        if snapshot.view is not None:
            self._pace_until = now + PACE_SECONDS * len(snapshot.view.live)
        if decision.write is not None:
            return 0.0 if won else 0.01
        return min(self._explain(decision, snapshot, now), decision.again or self._timing.lease)

    def _close(self, snapshot: Snapshot, cause: str) -> float:
        ending = Ending(self.exchange.intent.node.host, today())
        if not self._participant.close(snapshot, Phase.ABORTED, cause, ending):
            return 0.01
        self.exchange.closed()
        return 0.0

    def _report(self, snapshot: Snapshot, wishes: Wishes) -> None:
        """What this node has to say of its generation, until the store has it."""
        if wishes.publish is not None and snapshot.master is None:
            self._participant.publish_master(snapshot, *wishes.publish)
        if wishes.done:
            self._participant.report_done(snapshot, wishes.done)

    def _check_standing(self, snapshot: Snapshot, now: float) -> bool:
        """Where the store has forgotten the job, or too few are here to go on, the others have
        until the end of our patience to come; and they may be elsewhere. Whether we have gone
        there, so that what was read here counts for nothing."""
        intent, timing, note = self.exchange.intent, self._timing, self.exchange.note
        head = snapshot.head
        nothing = is_empty(head, intent.incarnation)
        if not nothing and not note.stuck:
            self._stood = now
        elif now - self._stood >= timing.store_grace and intent.memory is not None:
            reason = (
                f"for {timing.store_grace:g} s (--store-grace) too few nodes of generation "
                f"{intent.held} have come to the store: {note.reason}"
            )
            self.exchange.fail_all(StoreUnavailable(reason))
        elif now - self._stood >= timing.lease and self._store.look_elsewhere(
            self._participant.finds_more(head, intent)
        ):
            log.warning("too few nodes were at the store: this one has gone to another")
            return True
        return False

    def _explain(self, decision: Decision, snapshot: Snapshot, now: float) -> float:
        """Say what a waiting node waits for, when that changes and every so often; seconds until
        there may be something to say again."""
        again = self._learn_note(decision, snapshot, now)
        intent = self.exchange.intent
        # Its agent tells the rest: that the node gets itself ready, or what ends the wait for good.
        waiting = intent.joining and not intent.silent and not settled(snapshot)
        if not waiting or final_change(snapshot.head, intent) is not None:
            log.debug("%s", decision.reason)
            return again
        if self.exchange.note not in (UNANSWERED, Note()):
            self._reminder.remind(self.exchange.note, now)
        return max(0.01, min(again, self._note_at - now))

    def _learn_note(self, decision: Decision, snapshot: Snapshot, now: float) -> float:
        """Tell the others, or hear from the one that leads, what is being waited for; seconds
        until what could not be told yet can be."""
        again = float("inf")
        if snapshot.view is not None:
            note = noted(decision, snapshot.view)
            self.exchange.tell_note(note)
            again = self._participant.notes.tell(note, now)
            self._note_at = now + REMIND_SECONDS
        elif now >= self._note_at:
            self.exchange.tell_note(self._participant.notes.read())
            self._note_at = now + self._timing.lease
        return again

    def _next_event(self, pause: float) -> None:
        try:
            event = self._inbox.get(timeout=pause) if pause > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return
        while True:
            if event.changed:
                self._watching, self._listing = False, event.listing
            self._look_at = min(self._look_at, self._pace_until)
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _learn_address(self) -> None:
        if self._find_address is not None and not self.exchange.intent.node.address:
            self.exchange.be_at(self._find_address())

    def _back(self) -> None:
        """The store has answered: what is missing there has its time from now on."""
        if self._misses:
            self._misses, self._stood = 0, self._clock()

    def _miss(self, error: StoreError) -> float:
        """The store does not answer: how long to pause, or the end of our patience."""
        now = self._clock()
        first = self.exchange.snapshot is None
        grace, knob = self._timing.store_grace, "--store-grace"
        if first:
            grace, knob = self._timing.join, "join_timeout"
        self.exchange.tell_note(Note(reason=str(error)))
        if self._misses == 0:
            log.warning("the store is away, trying for %g s (%s): %s", grace, knob, error)
            if first:
                log.warning(
                    "this node has not reached the store yet: the node that serves it has not "
                    "started, or the job is over already, and its store with it; without a store "
                    "this node ends with a failure after %g s",
                    grace,
                )
            self._missing_since = now
        self._misses += 1
        self._look_at = now
        if now - self._missing_since >= grace:
            reason = f"the store was away for {grace:g} s ({knob}): {error}"
            self.exchange.fail_all(StoreUnavailable(reason))
        return backoff(self._misses)


def _leave_at_exit() -> None:
    """Those whose handlers nobody has shut down: a lease that no connection holds would outlive
    the process."""
    found = [reference() for reference in _BEGUN.valuerefs()]
    left = [keeper for keeper in found if keeper is not None and not keeper.exchange.stopping]
    for keeper in left:
        keeper.abandon()
    deadline = monotonic() + EXIT_SECONDS
    for keeper in left:
        keeper._ended(deadline - monotonic())


atexit.register(_leave_at_exit)
