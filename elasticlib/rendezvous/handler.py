"""The rendezvous handlers over any `Store`: membership that changes while the job runs, and the
static one; and the one thread that turns a handler's node.

That thread alone speaks to the store. Callers post events to it, and wait for what it makes known,
so that a store that is away blocks nobody for longer than the caller's own timeout.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial

import attrs

from ..clock import Clock, monotonic, today
from ..endpoint import split_endpoint
from ..errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConfigError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreError,
    StoreRejectedError,
    describe,
    present,
)
from ..stores.interface import Listing, Store, WatchResult
from ..threads import helper
from .bootstrap import (
    IMPORT_SECONDS,
    OF_TORCH,
    BootstrapStore,
    Front,
    Serving,
    import_torch,
    open_torch_store,
)
from .document import Change, ChangeKind, Limits, Node, State, Timing, Why
from .interface import (
    BootstrapStoreInfo,
    RendezvousHandler,
    RendezvousInfo,
    check_restart_budget,
)
from .node import NEVER_REACHED, NOTE_SECONDS, LocalNode, PatienceSpent, Reading, backoff

log = logging.getLogger("elasticlib.rendezvous")

OVERDUE_SECONDS = 1.0
"""Between looks whether the join timeout has passed, while the store keeps the thread."""
UNKNOWN_SECONDS = 1.0
EXIT_SECONDS = 1.0
"""In which nodes that nobody shut down may leave, when their process ends."""
PACE_SECONDS = 2e-4  # for each node that is there, between two looks of the one that leads
RACE_SECONDS = 0.01
"""Before the next look of a node that lost a race to write."""

Put = Callable[[RendezvousInfo | Change | Exception], None]


class ClosedBecause(RendezvousClosedError):
    """There will be no further generation for this node; `change` says why."""

    def __init__(self, change: Change) -> None:
        super().__init__(f"{change.kind.value}: {change.reason}")
        self.change = change


@attrs.frozen
class Event:
    """What a caller, or a change in the store, gives the thread to do; after each it looks."""

    joins: bool = False
    failed: tuple[str, bool] | None = None
    draining: str = ""
    slots: tuple[int, bool] | None = None
    keeps: bool = False
    finished: bool = False
    closing: str = ""
    changed: bool = False
    listing: Listing | None = None


@attrs.define(eq=False)
class Join:
    """One call of `join`: since when it waits for its next step, whether the thread has begun to
    seek a generation for it, and whether it was given one."""

    put: Put
    since: float
    taken_up: bool = False
    given: bool = False


_BEGUN: weakref.WeakValueDictionary[tuple[int, str, str], NodeLoop] = weakref.WeakValueDictionary()
"""The last of this process to begin for each store, job and node id."""


class NodeLoop:
    """The thread that turns one node until it is stopped. It knows nothing of the handler, or that
    would never be dropped.

    progress_due: the time at which the agent's loop must have made progress again. change: what
    has become of the generation that the node holds.
    """

    def __init__(
        self,
        node: LocalNode,
        new_serving: Callable[[], Serving],
        find_address: Callable[[], str] | None,
        clock: Clock,
    ) -> None:
        self.node = node
        self.progress_due = float("inf")  # an agent that never marks progress is not observed
        self.stopping = False
        self.change: Change | None = None
        self._new_serving = new_serving
        self._serving: Serving | None = None
        self._find_address = find_address
        self._clock = clock
        self._timing = node.timing
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._watching, self._watches_failed = False, 0
        self._listing: Listing | None = None
        self._look_at = self._pace_until = float("-inf")
        # What callers wait for, and what it is made known under.
        self._known = threading.Condition()
        self._thread: threading.Thread | None = None
        self._join: Join | None = None
        self._error: Exception | None = None

    # -- for callers --------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    def _start(self) -> None:
        """Begin to look; the node is not announced before a generation is sought."""
        with self._known:
            if self._thread is not None or self.stopping:
                return
            name = (id(self.node.store), self.node.run_id, self.node.intent.node.id)
            before = _BEGUN.get(name)
            if before is not None:
                before.abandon()  # or the two would take the lease from each other in turns
            _BEGUN[name] = self
            self._thread = helper(
                self._run, "rendezvous", lambda why: self.stop(RendezvousError(why))
            )
            self._thread.start()

    def join(self, put: Put) -> Join:
        """Seek a generation; the call takes the place of the one before it."""
        join = Join(put, self._clock())
        with self._known:
            if self.stopping:
                put(self.refusal())
                return join
            self._join = join
        self._start()
        self.post(Event(joins=True))
        return join

    def wait(self, known: Callable[[], object], seconds: float) -> None:
        """For something to be known, as long as the node has not left."""
        self._start()
        with self._known:
            self._known.wait_for(lambda: self.stopping or known(), seconds)

    def stop(self, error: Exception | None = None) -> None:
        """Leave the job, by itself or for an error, which is given to whoever waits."""
        with self._known:
            self.stopping, self._error = True, self._error or error
            join, self._join = self._join, None
            if join is not None:
                refusal = self.refusal()
                join.put(_as_change(refusal) if join.given else refusal)
            self._known.notify_all()
        self.post(Event())

    def ended(self, seconds: float) -> bool:
        """Whether the thread ends within so many seconds, if it ever began."""
        if self._thread is None:
            return True
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Have the thread leave the job when it can. Takes no lock and waits for nothing: it is
        called when a handler is found to be gone, which may be in the midst of anything."""
        self.stopping = True
        self.post(Event())

    def refusal(self) -> Exception:
        return self._error or RendezvousClosedError("this node has left the rendezvous")

    def overdue(self, join: Join) -> Exception | None:
        """What ends this call: that another took its place, or the join timeout, once that has
        passed. It runs while no generation stands, so that a spare waits for as long as one does.
        """
        node, limit = self.node, self._timing.join
        with self._known:
            if self._join is not join:
                return RendezvousClosedError("another call of next_rendezvous took its place")
        if join.given:
            return None
        if not node.intent.joining:
            if self._clock() < join.since + limit:
                return None
            return RendezvousTimeoutError(
                f"group rank 0 of generation {node.intent.held} has not opened torch's store "
                f"within join_timeout={limit:g} s"
            )
        if node.seen is not None and node.seen.settled:
            return None
        if self._clock() < max(join.since, node.settled_at) + limit:
            return None
        reason = (
            f"no generation settled within join_timeout={limit:g} s: {node.note.reason}; "
            f"here: {node.note.names}; at least min_nodes={node.limits.min_nodes} are needed "
            "(--nnodes)"
        )
        late = RendezvousTimeoutError(reason + NEVER_REACHED * (node.seen is None))
        late.lost = node.state is not None and node.state.why is Why.LOSS
        return late

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.stopping:
            pause = 0.0
            try:
                pause = self._turn()
            except (StoreError, RendezvousConfigError, ConfigError) as error:
                self.stop(error)
            except Exception as error:
                # Callers wait on this thread: it must not end without telling them.
                log.exception("the rendezvous failed")
                self.stop(RendezvousError(f"the rendezvous failed: {describe(error)}"))
            self._take_events(pause)
        self.stop()
        self.end_serving()
        try:
            self.node.leave()
        except StoreError as error:
            log.info(
                "left without notifying the other nodes, as the store is unreachable: %s", error
            )

    def _turn(self) -> float:
        """Speak, and look if there is something to look for; how many seconds may pass until the
        next turn if nothing happens. Raises what ends the node."""
        node = self.node
        try:
            pause = self._speak_and_look()
            node.answered(self._clock())
        except (PatienceSpent, StoreRejectedError):
            raise
        except StoreError as error:
            self._look_at = now = self._clock()
            pause = node.missed(error, now)
        join = self._join
        if join is not None and join.taken_up and (late := self.overdue(join)) is not None:
            self._end_join(join, late)
        return pause

    def _speak_and_look(self) -> float:
        node = self.node
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
        node.speak(now, self.progress_due)
        if now >= self._look_at:
            self._look_at = now + self._look(now, listing)
        self._advance()
        return max(0.0, min(self._timing.refresh, self._look_at - self._clock()))

    def _look(self, now: float, listing: Listing | None) -> float:
        """Read, say what the agent wants said, decide and write; seconds until the next look."""
        node = self.node
        reading = node.look(now, listing)
        self._advance()
        if node.goes_elsewhere(now):
            return 0.0
        self._watch(reading)
        serving = self._serving
        endpoint = "" if serving is None else serving.endpoint
        if node.report(reading, today(), endpoint=endpoint):
            return RACE_SECONDS if node.intent.closing else 0.0
        decision, won = node.act(reading, today())
        if reading.view is not None:
            self._pace_until = now + PACE_SECONDS * len(reading.view.live)
        if decision.write is not None:
            return 0.0 if won else RACE_SECONDS
        return min(node.explain(decision, reading, now), decision.again or self._timing.lease)

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
            self._seek(self._join)
        if event.failed is not None:
            reason, killed = event.failed
            node.intent = node.intent.fail(reason, killed=killed)
        if event.draining:
            node.intent = node.intent.saying(draining=event.draining)
        if event.slots is not None:
            slots, kept = event.slots
            node.intent = node.intent.saying(slots=slots, kept=kept)
        node.keeps = node.keeps or event.keeps
        if event.finished:
            node.intent = node.intent.finish()
        if event.closing:
            node.intent = attrs.evolve(node.intent, closing=event.closing)

    # -- what changes in the store ------------------------------------------------------------

    def _watch(self, reading: Reading) -> None:
        """Have the next change post an event: by the store's `watch`, and where it has only `wait`
        to offer, or watching it fails, by a thread that waits for one change and ends."""
        if self._watching:
            return
        node, after = self.node, reading.version
        # The node that leads waits for more of what all say before it reads that.
        if self._watches_failed or not node.store.watch(
            node.prefix, after=after, callback=self._on_change, with_listing=not node.leads
        ):
            helper(partial(self._wait, node.prefix, after), "rendezvous-watch").start()
        self._watching = True

    def _on_change(self, watched: WatchResult) -> None:
        if watched is False:
            # The next call meets the same failure; where only watching fails, waiting sees to it
            # that nobody tries too often.
            self._watches_failed += 1
        self.post(Event(changed=True, listing=watched if isinstance(watched, Listing) else None))

    def _wait(self, prefix: str, after: int) -> None:
        store, patience = self.node.store, self._timing.lease
        try:
            while not self.stopping and not store.wait(prefix, after=after, timeout=patience):
                continue
            self._watches_failed = 0
        except StoreError as error:
            # It is a poll from now on, and no faster than others' tries.
            self._watches_failed += 1
            level = logging.WARNING if self._watches_failed == 3 else logging.DEBUG
            log.log(level, "waiting: %s", error)
            if not self.stopping:
                threading.Event().wait(backoff(self._watches_failed))
        self._on_change(True)

    # -- who joins ----------------------------------------------------------------------------

    def _seek(self, join: Join | None) -> None:
        """No workers are left: the next generation is sought for this call, if there is one."""
        self.end_serving()
        self.node.intent = self.node.intent.seek()
        with self._known:
            self.change = None
            if join is not None:
                join.taken_up, join.since = True, self._clock()

    def _advance(self) -> None:
        """Make known what the last reading means for this node."""
        node, join = self.node, self._join
        if join is not None and join.taken_up and not join.given:
            self._bring_in(join)
        with self._known:
            # What has ended stays so, even if a store has forgotten it meanwhile.
            change = node.intent.change(self.node.state) or self.change
            is_news, self.change = change != self.change, change
            self._known.notify_all()
            if join is None or not join.given or join is not self._join:
                return
            if is_news and change is not None:
                join.put(change)
                if change.kind.final:
                    self._join = None

    def _bring_in(self, join: Join) -> None:
        """Take this node a step further into the generation that has settled."""
        node = self.node
        if node.intent.joining:
            final = node.intent.final_change(self.node.state)
            if final is not None:
                if not node.intent.held:
                    final = _to_a_latecomer(final, node.state)
                node.intent = node.intent.receive_result()
                self._end_join(join, ClosedBecause(final))
                return
            seat = node.enter()
            if seat is None:
                return
            join.since = self._clock()
            if seat.rank == 0:
                self._serve()
        if node.intent.change(self.node.state) is not None:
            # The generation ended before its workers began.
            self._seek(join)
            self.post(Event())
            return
        serving = self._serving
        if serving is not None and serving.error is not None:
            self._end_join(join, serving.error)
            return
        seen = present(node.seen, "a reading")
        if seen.master_endpoint is not None:
            info = self._info(seen, seen.master_endpoint)
            with self._known:
                if join is self._join:
                    join.given = True
                    join.put(info)

    def _serve(self) -> None:
        """Open torch's store of this generation in a thread of its own, so that this thread keeps
        the lease while torch is imported or this node's name is looked up."""
        serving = self._serving = self._new_serving()
        address = self.node.intent.node.address

        def open_it() -> None:
            serving.open(address)
            self.post(Event())

        helper(open_it, "rendezvous-open").start()

    def end_serving(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()

    def _end_join(self, join: Join, error: Exception) -> None:
        with self._known:
            if join is self._join:
                self._join = None
                join.put(error)

    def _info(self, seen: Reading, master: str) -> RendezvousInfo:
        node, state = self.node, present(seen.state, "the state")
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
    kind = ChangeKind.ABORTED if isinstance(error, RendezvousClosedError) else ChangeKind.LOST
    return Change(kind, str(error))


def _to_a_latecomer(change: Change, state: State | None) -> Change:
    reason = f"{change.reason}; no workers ran on this node"
    ending = None if state is None else state.ending
    if ending is not None:
        reason += f" (reported by {ending.by} at {ending.at}; to run it again, start it once all "
        reason += "of its nodes have ended)"
    return attrs.evolve(change, reason=reason)


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
        find_front: Callable[[], Front | None] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._run_id = run_id
        self._backend = backend
        self._open_bootstrap = open_bootstrap
        self._timing = timing or Timing()
        self._clock = clock
        self._asked_at = float("-inf")
        self._loop = NodeLoop(
            LocalNode(store, run_id, node, limits, self._timing),
            partial(Serving, open_bootstrap, find_front),
            find_address,
            clock,
        )
        weakref.finalize(self, self._loop.abandon).atexit = False

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def check_agent(self, *, slots: int, max_restarts: int | None) -> None:
        of_node = self._loop.node.intent.node.slots
        if slots != of_node:
            raise ConfigError(
                f"the Node of this handler has slots={of_node}, but the agent's WorkerSpec has "
                f"local_world_size={slots}: give both the same number"
            )
        check_restart_budget(max_restarts, self._loop.node.limits.max_restarts)

    def prepare(self) -> None:
        if self._open_bootstrap in OF_TORCH:
            import_torch().join(IMPORT_SECONDS)

    def mark_progress(self, allowance_s: float = 0.0) -> None:
        self._loop.progress_due = self._clock() + self._timing.loop + allowance_s

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
                late = self._loop.overdue(join)
                outcome = late if outcomes.empty() else None
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, RendezvousInfo):
                return outcome

    def wait_for_change(self, timeout: float) -> Change | None:
        loop = self._loop
        loop.wait(lambda: loop.change, timeout)
        return _as_change(loop.refusal()) if loop.stopping else loop.change

    def report_failure(self, reason: str, *, killed: bool = False) -> bool:
        self._loop.post(Event(failed=(reason, killed)))
        return True

    def report_slots(self, slots: int, *, kept: bool = False) -> bool:
        self._loop.post(Event(slots=(slots, kept)))
        return True

    def report_keeping(self) -> None:
        self._loop.post(Event(keeps=True))

    def others_keep(self) -> bool:
        loop = self._loop
        loop.wait(lambda: loop.node.seen, self._timing.lease)
        seen = loop.node.seen
        if seen is None or seen.state is None or seen.state.phase.terminal:
            return False
        return seen.leader is not None and seen.leader.keeps

    def report_draining(self, reason: str) -> bool:
        self._loop.post(Event(draining=reason))
        return True

    def report_done(self) -> bool:
        self._loop.post(Event(finished=True))
        return True

    def is_closed(self) -> bool:
        # As far as the store has answered within a lease.
        loop = self._loop
        loop.wait(lambda: loop.node.seen, self._timing.lease)
        return loop.stopping or loop.node.intent.final_change(loop.node.state) is not None

    def set_closed(self) -> None:
        loop = self._loop
        loop.post(Event(closing=f"closed by {loop.node.intent.node.host}"))
        loop.wait(
            lambda: loop.node.state is not None and loop.node.state.phase.terminal,
            self._timing.close,
        )

    def num_nodes_waiting(self) -> int:
        node, now = self._loop.node, self._clock()
        if now - self._asked_at >= NOTE_SECONDS:
            # Perhaps it is asked many times a second; the store is not.
            self._asked_at = node.note_at = now
            self._loop.post(Event())
        # What was counted before this generation settled was for the one before.
        return node.note.waiting if node.note.membership == node.intent.node.membership else 0

    def heard(self) -> float | None:
        """Seconds since the store last took this node's word; None if it never has."""
        at = self._loop.node.heard_at
        return None if at is None else max(0.0, self._clock() - at)

    def shutdown(self) -> bool:
        # Where no store was ever reached there is nothing to leave, and looking for one may take
        # long. A thread that waits for a change ends with its wait, or when the store is closed.
        self._loop.stop()
        seconds = self._timing.close
        if self._loop.node.seen is None:
            seconds = min(UNKNOWN_SECONDS, seconds)
        ended = self._loop.ended(seconds)
        self._loop.end_serving()
        return ended


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
