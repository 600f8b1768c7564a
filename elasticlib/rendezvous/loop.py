"""The one thread of a rendezvous handler, which turns its node.

It alone speaks to the store, and opens the bootstrap store. Callers post events to it, and wait for
what it makes known of the node, so that a store that is away blocks nobody for longer than the
caller's own timeout.
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
from ..endpoint import split_endpoint
from ..errors import (
    ConfigError,
    RendezvousClosed,
    RendezvousError,
    RendezvousMismatch,
    RendezvousTimeout,
    StoreError,
    StoreRefused,
    describe,
    present,
)
from ..stores.interface import Listing, Store, Watched
from ..threads import helper
from .bootstrap import BootstrapServer
from .document import FailureKind, State
from .interface import BootstrapStoreInfo, Change, ChangeKind, RendezvousInfo
from .node import NEVER_REACHED, LocalNode, PatienceSpent, Reading, backoff

log = logging.getLogger("elasticlib.rendezvous")

UNKNOWN_SECONDS = 1.0
EXIT_SECONDS = 1.0
"""In which nodes that nobody shut down may leave, when their process ends."""
PACE_SECONDS = 2e-4  # for each node that is there, between two looks of the one that leads
RACE_SECONDS = 0.01
"""Before the next look of a node that lost a race to write."""

Put = Callable[[RendezvousInfo | Change | Exception], None]


class ClosedBecause(RendezvousClosed):
    """There will be no further generation for this node; `change` says why."""

    def __init__(self, change: Change) -> None:
        super().__init__(f"{change.kind.value}: {change.reason}")
        self.change = change


@attrs.frozen
class Event:
    """What a caller, or a change in the store, gives the loop to do; after each it looks."""

    joins: bool = False
    failed: tuple[str, FailureKind] | None = None
    draining: str = ""
    finished: bool = False
    closing: str = ""
    asks_note: bool = False
    changed: bool = False
    listing: Listing | None = None


@attrs.define(eq=False)
class Join:
    """One call of `join`: since when it waits for its next step, and what it was given last."""

    put: Put
    since: float
    taken_up: bool = False
    info: RendezvousInfo | None = None
    change: Change | None = None


_BEGUN: weakref.WeakValueDictionary[tuple[int, str, str], Loop] = weakref.WeakValueDictionary()
"""The last of this process to begin for each store, job and node id."""


class Loop:
    """Turns one node until it is stopped. It knows nothing of the handler, or that would never be
    dropped.

    find_address is called before a node without an address first speaks, as often as it raises
    a StoreError.
    """

    def __init__(
        self,
        node: LocalNode,
        bootstrap: BootstrapServer,
        find_address: Callable[[], str] | None,
        clock: Clock,
    ) -> None:
        self.node = node
        self.silent: Callable[[], float] = lambda: 0.0
        """Seconds for which the loop of this node's agent has not turned."""
        self.stopping = False
        self._bootstrap = bootstrap
        self._find_address = find_address
        self._clock = clock
        self._timing = node.timing
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._watcher = Watcher(node.store, node.timing.lease, self._on_change)
        self._watching = False
        self._listing: Listing | None = None
        self._look_at = self._pace_until = float("-inf")
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        # What callers wait for, and what it is made known under.
        self._known = threading.Condition()
        self._join: Join | None = None
        self._change: Change | None = None
        self._answered = self._closing = False
        self._error: Exception | None = None

    # -- for callers --------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    def start(self) -> None:
        """Begin to look; the node is not announced before a generation is sought."""
        with self._starting:
            if self._thread is not None or self.stopping:
                return
            name = (id(self.node.store), self.node.run_id, self.node.intent.node.id)
            before = _BEGUN.get(name)
            if before is not None:
                before.abandon()  # or the two would take the lease from each other in turns
            _BEGUN[name] = self
            self._thread = helper(self._run, "rendezvous", self._broke)
            self._thread.start()

    def join(self, put: Put) -> Join:
        """Seek a generation; the call takes the place of the one before it."""
        join = Join(put, self._clock())
        with self._known:
            if self.stopping:
                put(self._refusal())
                return join
            self._join = join
        self.start()
        self.post(Event(joins=True))
        return join

    def has_replaced(self, join: Join) -> bool:
        """Whether that call will be given nothing more."""
        return self._join is not join

    def wait_for_change(self, timeout: float) -> Change | None:
        self.start()
        with self._known:
            self._known.wait_for(lambda: self.stopping or self._change is not None, timeout)
            return _as_change(self._refusal()) if self.stopping else self._change

    def is_over(self, timeout: float) -> bool:
        """Whether there will be no other generation for this node, as far as the store has
        answered within so many seconds."""
        self.start()
        with self._known:
            self._known.wait_for(lambda: self.stopping or self.node.seen is not None, timeout)
        seen = self.node.seen
        state = None if seen is None else seen.state
        return self.stopping or self.node.intent.final_change(state) is not None

    def close_job(self) -> None:
        """End the job for all its nodes; returns when the store has it, or the node has left."""
        self.start()
        with self._known:
            self._closing = True
            self.post(Event(closing=f"closed by {self.node.intent.node.host}"))
            self._known.wait_for(lambda: self.stopping or not self._closing, self._timing.close)

    def overdue(self, join: Join) -> RendezvousTimeout | None:
        """The join timeout, once that has passed: it runs while no generation stands, so that a
        spare waits for as long as one does."""
        node, limit = self.node, self._timing.join
        if join.info is not None:
            return None
        if not node.intent.joining:
            if self._clock() < join.since + limit:
                return None
            return RendezvousTimeout(
                f"group rank 0 of generation {node.intent.held} has not opened torch's store "
                f"within join_timeout={limit:g} s"
            )
        if node.seen is not None and node.seen.settled:
            return None
        if self._clock() < max(join.since, node.settled_at) + limit:
            return None
        names = ", ".join(node.note.here) or "nobody"
        reason = (
            f"no generation settled within join_timeout={limit:g} s: {node.note.reason}; "
            f"here: {names}; at least {node.limits.min_nodes} nodes are needed (--nnodes)"
        )
        if node.seen is None:
            reason += NEVER_REACHED
        return RendezvousTimeout(reason)

    def stop(self, error: Exception | None = None) -> None:
        """Leave the job, by itself or for an error, which is given to whoever waits."""
        with self._known:
            self.stopping, self._error = True, self._error or error
            join, self._join = self._join, None
            if join is not None:
                refusal = self._refusal()
                join.put(refusal if join.info is None else _as_change(refusal))
            self._known.notify_all()
        self.post(Event())

    def leave(self) -> bool:
        """Leave the job; whether that was done within the timing's `close` seconds. Where no store
        was ever reached there is nothing to leave, and looking for one may take long.

        A thread that waits for changes ends with its wait, or when the store is closed.
        """
        self.stop()
        close = self._timing.close
        ended = self.ended(min(UNKNOWN_SECONDS, close) if self.node.seen is None else close)
        self._bootstrap.close()
        return ended

    def ended(self, seconds: float) -> bool:
        """Whether the thread ends within so many seconds, if it ever began."""
        with self._starting:
            thread = self._thread
        if thread is None:
            return True
        thread.join(max(seconds, 0.0))
        return not thread.is_alive()

    def abandon(self) -> None:
        """Have the thread leave the job when it can. Takes no lock and waits for nothing: it is
        called when a handler is found to be gone, which may be in the midst of anything."""
        self.stopping = True
        self.post(Event())

    def _refusal(self) -> Exception:
        return self._error or RendezvousClosed("this node has left the rendezvous")

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.stopping:
            pause = 0.0
            try:
                pause = self._turn()
            except (StoreError, RendezvousMismatch, ConfigError) as error:
                self.stop(error)
            except Exception as error:
                # Callers wait on this thread: it must not end without telling them.
                log.exception("the rendezvous broke")
                self.stop(RendezvousError(f"the rendezvous broke: {describe(error)}"))
            self._take_events(pause)
        self.stop()
        self._watcher.stop()
        self._bootstrap.close()
        try:
            self.node.leave()
        except StoreError as error:
            log.info("left without a word, the store being away: %s", error)

    def _broke(self, sentence: str) -> None:
        self.stop(RendezvousError(sentence))

    def _turn(self) -> float:
        """Speak, and look if there is something to look for; how many seconds may pass until the
        next turn if nothing happens. Raises what ends the node."""
        node = self.node
        try:
            pause = self._speak_and_look()
            node.answered(self._clock())
        except (PatienceSpent, StoreRefused):
            raise
        except StoreError as error:
            self._look_at = now = self._clock()
            pause = node.missed(error, now)
        join = self._join
        late = None if join is None or not join.taken_up else self.overdue(join)
        if join is not None and late is not None:
            self._end_join(join, late)
        return pause

    def _speak_and_look(self) -> float:
        node, timing = self.node, self._timing
        listing, self._listing = self._listing, None
        if node.seen is None:
            # Look before we speak: whoever is going to be refused must not be let in first.
            first = node.read(self._clock())
            self._advance()
            if self.stopping:
                return 0.0
            if first.leader is not None:
                # There is nothing here for us to decide: the next look is for what changes.
                self._watch(first)
                self._look_at = node.note_at
        if self._find_address is not None and not node.intent.node.address:
            node.intent = node.intent.saying(address=self._find_address())
        now = self._clock()
        node.speak(now, self.silent())
        if now >= self._look_at:
            self._look_at = now + self._look(now, listing)
        self._advance()
        return max(0.0, min(timing.refresh, self._look_at - self._clock()))

    def _look(self, now: float, listing: Listing | None) -> float:
        """Read, say what the agent wants said, decide and write; seconds until the next look."""
        node = self.node
        reading = node.look(now, listing)
        self._advance()
        if node.goes_elsewhere(now):
            return 0.0
        self._watch(reading)
        endpoint = self._bootstrap.serving
        if node.report(reading, today(), endpoint=endpoint):
            return RACE_SECONDS if node.intent.closing else self._closed()
        decision, won = node.act(reading, today())
        if reading.view is not None:
            self._pace_until = now + PACE_SECONDS * len(reading.view.live)
        if decision.write is not None:
            return 0.0 if won else RACE_SECONDS
        return min(node.explain(decision, reading, now), decision.again or self._timing.lease)

    def _closed(self) -> float:
        with self._known:
            self._closing = False
            self._known.notify_all()
        return 0.0

    def _watch(self, reading: Reading) -> None:
        if not self._watching:
            # The node that leads waits for more of what all say before it reads that.
            node = self.node
            self._watcher.arm(node.prefix, reading.job.version, listing=not node.leads)
            self._watching = True

    def _on_change(self, listing: Listing | None) -> None:
        self.post(Event(changed=True, listing=listing))

    def _take_events(self, pause: float) -> None:
        """What has come until now, or what comes first within so many seconds."""
        try:
            event = self._inbox.get(timeout=pause) if pause > 0 else self._inbox.get_nowait()
            while True:
                self._take(event)
                self._look_at = min(self._look_at, self._pace_until)
                event = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, event: Event) -> None:
        node = self.node
        if event.changed:
            self._watching, self._listing = False, event.listing
        if event.joins:
            self._take_up_join()
        if event.failed is not None:
            node.intent = node.intent.fail(*event.failed)
        if event.draining:
            node.intent = node.intent.saying(draining=event.draining)
        if event.finished:
            node.intent = node.intent.finish()
        if event.closing:
            node.intent = attrs.evolve(node.intent, closing=event.closing)
        if event.asks_note:
            node.note_at = self._clock()

    # -- who joins ----------------------------------------------------------------------------

    def _take_up_join(self) -> None:
        self._seek()
        with self._known:
            join, self._change = self._join, None
            if join is not None:
                join.taken_up, join.since = True, self._clock()

    def _seek(self) -> None:
        self._bootstrap.close()
        self.node.intent = self.node.intent.seek()

    def _advance(self) -> None:
        """Make known what the last reading means for this node."""
        node, join = self.node, self._join
        state = None if node.seen is None else node.seen.state
        if join is not None and join.taken_up and join.info is None:
            self._bring_in(join, state)
        with self._known:
            change = node.intent.change(state)
            if change != self._change or (node.seen is not None and not self._answered):
                self._change, self._answered = change, node.seen is not None
                self._known.notify_all()
            if join is None or join.info is None or join is not self._join:
                return
            if change is not None and change != join.change:
                join.change = change
                join.put(change)
                if change.kind.final:
                    self._join = None

    def _bring_in(self, join: Join, state: State | None) -> None:
        """Take this node a step further into the generation that has settled."""
        node = self.node
        if node.intent.joining:
            final = node.intent.final_change(state)
            if final is not None:
                late = final if node.intent.held else _to_a_latecomer(final, state)
                self._end_join(join, ClosedBecause(late))
                return
            seat = node.enter()
            if seat is None:
                return
            join.since = self._clock()
            if seat.rank == 0:
                place = node.intent.node
                self._bootstrap.open(place.membership, place.address, lambda: self.post(Event()))
        if node.intent.change(state) is not None:
            # The generation ended before its workers began.
            self._seek()
            join.since = self._clock()
            self.post(Event())
            return
        try:
            self._bootstrap.endpoint(node.intent.node.membership)
        except Exception as error:  # whatever opening it has raised ends the call
            self._end_join(join, error)
            return
        master = present(node.seen, "a reading").master_endpoint
        if master is not None:
            self._give(join, self._info(master))

    def _give(self, join: Join, info: RendezvousInfo) -> None:
        with self._known:
            self._change = None
            if join is self._join:
                join.info = info
                join.put(info)

    def _end_join(self, join: Join, error: Exception) -> None:
        with self._known:
            if join is self._join:
                self._join = None
                join.put(error)

    def _info(self, master: str) -> RendezvousInfo:
        node = self.node
        seen = present(node.seen, "a reading")
        state = present(seen.state, "the state")
        return RendezvousInfo(
            run_id=node.run_id,
            generation=state.generation,
            seat=present(seen.seat, "the seat"),
            bootstrap_store_info=BootstrapStoreInfo(*split_endpoint(master)),
            restarts=state.restarts,
            max_restarts=state.limits.max_restarts,
            cause=state.cause,
            why=state.why,
            store=node.store,
            board=node.keys.board(state.membership),
            incarnation=state.incarnation,
        )


def _as_change(error: Exception) -> Change:
    kind = ChangeKind.ABORTED if isinstance(error, RendezvousClosed) else ChangeKind.LOST
    return Change(kind, str(error))


def _to_a_latecomer(change: Change, state: State | None) -> Change:
    reason = f"{change.reason}; nothing was run here"
    ending = None if state is None else state.ending
    if ending is not None:
        reason += f" (said by {ending.by} at {ending.at}; "
        reason += "to start it anew: another --rdzv-id, or --rdzv-conf launch=NAME on all nodes)"
    return attrs.evolve(change, reason=reason)


class Watcher:
    """Calls `changed` once for each time that it was armed, from another thread; perhaps with
    what is there now.

    Where a store has only `wait` to offer, or watching it fails, that takes a thread of its own,
    which ends with the wait that it is in, or when the store is closed; nobody need wait for that.
    patience: seconds that one call on the store may take.
    """

    def __init__(
        self, store: Store, patience: float, changed: Callable[[Listing | None], None]
    ) -> None:
        self._store = store
        self._patience = patience
        self._changed = changed
        self._stopping = threading.Event()
        self._waits: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._thread = helper(self._wait, "rendezvous-watch")
        self._failures = 0

    def arm(self, prefix: str, version: int, *, listing: bool) -> None:
        """Call once when something under the prefix has changed since that version; with a
        listing of it, if one is wanted and to be had.

        To be called from one thread. Raises StoreError.
        """
        if not self._failures and self._store.watch(
            prefix, after=version, changed=self._watched, listing=listing
        ):
            return
        self._waits.put((prefix, version))
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._waits.put(None)

    def _watched(self, watched: Watched) -> None:
        if watched is False:
            # Who armed us meets the same failure at its next call; where only watching fails,
            # the thread sees to it that nobody tries too often.
            self._failures += 1
        self._changed(watched if isinstance(watched, Listing) else None)

    def _wait(self) -> None:
        while (wait := self._waits.get()) is not None:
            prefix, version = wait
            try:
                while not self._stopping.is_set() and not self._store.wait(
                    prefix, after=version, timeout=self._patience
                ):
                    continue
                self._failures = 0
            except StoreError as error:
                # It is a poll from now on, and no faster than others' tries.
                self._failures += 1
                level = logging.WARNING if self._failures == 3 else logging.DEBUG
                log.log(level, "waiting: %s", error)
                self._stopping.wait(backoff(self._failures))
            self._changed(None)


def _leave_at_exit() -> None:
    """Those whose handlers nobody has shut down: a lease that no connection holds would outlive
    the process. And those that are still leaving: one that closes torch's store would abort it."""
    left = [loop for loop in (found() for found in _BEGUN.valuerefs()) if loop is not None]
    for loop in left:
        loop.abandon()
    deadline = monotonic() + EXIT_SECONDS
    for loop in left:
        loop.ended(deadline - monotonic())


atexit.register(_leave_at_exit)
