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
from .bootstrap_store import (
    IMPORT_SECONDS,
    TORCH_STORE_OPENERS,
    BootstrapStore,
    BootstrapStoreServer,
    StoreProxy,
    import_torch,
    open_torch_store,
)
from .interface import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    check_restart_budget,
)
from .local_node import (
    NEVER_REACHED,
    NOTE_SECONDS,
    JobSnapshot,
    LocalNode,
    StoreGraceExpired,
    backoff,
)
from .membership import (
    Change,
    ChangeKind,
    GenerationTrigger,
    MembershipState,
    Node,
    RendezvousSettings,
    RendezvousTimeouts,
)

log = logging.getLogger("elasticlib.rendezvous")

OVERDUE_SECONDS = 1.0
"""Between looks whether the join timeout has passed, while the store keeps the thread."""
UNKNOWN_SECONDS = 1.0
EXIT_SECONDS = 1.0
"""In which nodes that nobody shut down may leave, when their process ends."""
PACE_SECONDS = 2e-4  # for each node that is there, between two looks of the one that leads
RACE_SECONDS = 0.01
"""Before the next look of a node that lost a race to write."""

JoinCallback = Callable[[RendezvousInfo | Change | Exception], None]


class RendezvousClosedByChange(RendezvousClosedError):
    """There will be no further generation for this node; `change` says why."""

    def __init__(self, change: Change) -> None:
        super().__init__(f"{change.kind.value}: {change.reason}")
        self.change = change


@attrs.frozen
class NodeRequest:
    """What a caller, or a change in the store, gives the thread to do; after each it looks."""

    is_join: bool = False
    failure: tuple[str, bool] | None = None
    drain_reason: str = ""
    slots: tuple[int, bool] | None = None
    can_regroup: bool = False
    is_success: bool = False
    close_reason: str = ""
    store_changed: bool = False
    listing: Listing | None = None


@attrs.define(eq=False)
class PendingJoin:
    """One call of `join`: since when it waits for its next step, whether the thread has begun to
    seek a generation for it, and whether it was given one."""

    callback: JoinCallback
    waiting_since: float
    is_seeking: bool = False
    has_info: bool = False


_BEGUN: weakref.WeakValueDictionary[tuple[int, str, str], NodeThread] = (
    weakref.WeakValueDictionary()
)
"""The last of this process to begin for each store, job and node id."""


class NodeThread:
    """The thread that turns one node until it is stopped. It knows nothing of the handler, or that
    would never be dropped.

    progress_due: the time at which the agent's loop must have made progress again. change: what
    has become of the generation that the node holds.
    """

    def __init__(
        self,
        node: LocalNode,
        new_serving: Callable[[], BootstrapStoreServer],
        find_address: Callable[[], str] | None,
        clock: Clock,
    ) -> None:
        self.node = node
        self.progress_due = float("inf")  # an agent that never marks progress is not observed
        self.stopping = False
        self.change: Change | None = None
        self._new_serving = new_serving
        self._serving: BootstrapStoreServer | None = None
        self._find_address = find_address
        self._clock = clock
        self._timeouts = node.timeouts
        self._inbox: queue.SimpleQueue[NodeRequest] = queue.SimpleQueue()
        self._watching, self._watches_failed = False, 0
        self._listing: Listing | None = None
        self._look_at = self._pace_until = float("-inf")
        # What callers wait for, and what it is made known under.
        self._known = threading.Condition()
        self._thread: threading.Thread | None = None
        self._join: PendingJoin | None = None
        self._error: Exception | None = None

    # -- for callers --------------------------------------------------------------------------

    def post(self, event: NodeRequest) -> None:
        self._inbox.put(event)

    def _start(self) -> None:
        """Begin to look; the node is not announced before a generation is sought."""
        with self._known:
            if self._thread is not None or self.stopping:
                return
            name = (id(self.node.store), self.node.run_id, self.node.intent.node.id)
            before = _BEGUN.get(name)
            if before is not None:
                before.request_stop()  # or the two would take the lease from each other in turns
            _BEGUN[name] = self
            self._thread = helper(
                self._run, "rendezvous", lambda why: self.stop(RendezvousError(why))
            )
            self._thread.start()

    def start_join(self, put: JoinCallback) -> PendingJoin:
        """Seek a generation; the call takes the place of the one before it."""
        join = PendingJoin(put, self._clock())
        with self._known:
            if self.stopping:
                put(self.closed_error())
                return join
            self._join = join
        self._start()
        self.post(NodeRequest(is_join=True))
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
                refusal = self.closed_error()
                join.callback(_as_change(refusal) if join.has_info else refusal)
            self._known.notify_all()
        self.post(NodeRequest())

    def ended(self, seconds: float) -> bool:
        """Whether the thread ends within so many seconds, if it ever began."""
        if self._thread is None:
            return True
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()

    def request_stop(self) -> None:
        """Have the thread leave the job when it can. Takes no lock and waits for nothing: it is
        called when a handler is found to be gone, which may be in the midst of anything."""
        self.stopping = True
        self.post(NodeRequest())

    def closed_error(self) -> Exception:
        return self._error or RendezvousClosedError("this node has left the rendezvous")

    def join_timeout_error(self, join: PendingJoin) -> Exception | None:
        """What ends this call: that another took its place, or the join timeout, once that has
        passed. It runs while no generation stands, so that a spare waits for as long as one does.
        """
        node, limit = self.node, self._timeouts.join_timeout
        with self._known:
            if self._join is not join:
                return RendezvousClosedError("another call of next_rendezvous took its place")
        if join.has_info:
            return None
        if not node.intent.is_joining:
            if self._clock() < join.waiting_since + limit:
                return None
            return RendezvousTimeoutError(
                f"group rank 0 of generation {node.intent.current_generation} has not opened "
                f"torch's store within join_timeout={limit:g} s"
            )
        if node.snapshot is not None and node.snapshot.is_active:
            return None
        if self._clock() < max(join.waiting_since, node.last_active_at) + limit:
            return None
        reason = (
            f"no generation settled within join_timeout={limit:g} s: {node.leader_status.reason}; "
            f"here: {node.leader_status.present_names}; at least "
            f"min_nodes={node.settings.min_nodes} are needed (--nnodes)"
        )
        late = RendezvousTimeoutError(reason + NEVER_REACHED * (node.snapshot is None))
        late.lost = node.state is not None and node.state.trigger is GenerationTrigger.NODE_LOSS
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
            node.on_store_success(self._clock())
        except (StoreGraceExpired, StoreRejectedError):
            raise
        except StoreError as error:
            self._look_at = now = self._clock()
            pause = node.on_store_error(error, now)
        join = self._join
        if (
            join is not None
            and join.is_seeking
            and (late := self.join_timeout_error(join)) is not None
        ):
            self._end_join(join, late)
        return pause

    def _speak_and_look(self) -> float:
        node = self.node
        listing, self._listing = self._listing, None
        if node.snapshot is None:
            # Look before we speak: whoever is going to be refused must not be let in first.
            first = node.read(self._clock())
            self._advance()
            if self.stopping:
                return 0.0
            if first.leader is not None:
                # There is nothing here for us to decide: the next look is for what changes.
                self._watch(first)
                self._look_at = node.next_status_read_at
        if self._find_address is not None and not node.intent.node.address:
            node.intent = node.intent.with_node_fields(address=self._find_address())
        now = self._clock()
        node.publish(now, self.progress_due)
        if now >= self._look_at:
            self._look_at = now + self._look(now, listing)
        self._advance()
        return max(0.0, min(self._timeouts.keep_alive_interval, self._look_at - self._clock()))

    def _look(self, now: float, listing: Listing | None) -> float:
        """Read, say what the agent wants said, decide and write; seconds until the next look."""
        node = self.node
        reading = node.poll(now, listing)
        self._advance()
        if node.try_other_store(now):
            return 0.0
        self._watch(reading)
        serving = self._serving
        endpoint = "" if serving is None else serving.endpoint
        if node.write_reports(reading, today(), endpoint=endpoint):
            return RACE_SECONDS if node.intent.close_reason else 0.0
        decision, won = node.reconcile_and_write(reading, today())
        if reading.view is not None:
            self._pace_until = now + PACE_SECONDS * len(reading.view.live_nodes)
        if decision.new_membership is not None:
            return 0.0 if won else RACE_SECONDS
        return min(
            node.publish_status(decision, reading, now),
            decision.requeue_after_s or self._timeouts.lease_ttl,
        )

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

    def _take(self, event: NodeRequest) -> None:
        node = self.node
        if event.store_changed:
            self._watching, self._listing = False, event.listing
        if event.is_join:
            self._seek(self._join)
        if event.failure is not None:
            reason, killed = event.failure
            node.intent = node.intent.record_failure(reason, killed=killed)
        if event.drain_reason:
            node.intent = node.intent.with_node_fields(drain_reason=event.drain_reason)
        if event.slots is not None:
            slots, kept = event.slots
            node.intent = node.intent.with_node_fields(slots=slots, has_retained_workers=kept)
        node.can_regroup = node.can_regroup or event.can_regroup
        if event.is_success:
            node.intent = node.intent.record_success()
        if event.close_reason:
            node.intent = attrs.evolve(node.intent, close_reason=event.close_reason)

    # -- what changes in the store ------------------------------------------------------------

    def _watch(self, reading: JobSnapshot) -> None:
        """Have the next change post an event: by the store's `watch`, and where it has only `wait`
        to offer, or watching it fails, by a thread that waits for one change and ends."""
        if self._watching:
            return
        node, after = self.node, reading.version
        # The node that leads waits for more of what all say before it reads that.
        if self._watches_failed or not node.store.watch(
            node.watch_prefix,
            after=after,
            callback=self._on_change,
            with_listing=not node.is_leader,
        ):
            helper(partial(self._wait, node.watch_prefix, after), "rendezvous-watch").start()
        self._watching = True

    def _on_change(self, watched: WatchResult) -> None:
        if watched is False:
            # The next call meets the same failure; where only watching fails, waiting sees to it
            # that nobody tries too often.
            self._watches_failed += 1
        self.post(
            NodeRequest(
                store_changed=True, listing=watched if isinstance(watched, Listing) else None
            )
        )

    def _wait(self, prefix: str, after: int) -> None:
        store, patience = self.node.store, self._timeouts.lease_ttl
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

    def _seek(self, join: PendingJoin | None) -> None:
        """No workers are left: the next generation is sought for this call, if there is one."""
        self.end_serving()
        self.node.intent = self.node.intent.request_join()
        with self._known:
            self.change = None
            if join is not None:
                join.is_seeking, join.waiting_since = True, self._clock()

    def _advance(self) -> None:
        """Make known what the last reading means for this node."""
        node, join = self.node, self._join
        if join is not None and join.is_seeking and not join.has_info:
            self._bring_in(join)
        with self._known:
            # What has ended stays so, even if a store has forgotten it meanwhile.
            change = node.intent.change(self.node.state) or self.change
            is_news, self.change = change != self.change, change
            self._known.notify_all()
            if join is None or not join.has_info or join is not self._join:
                return
            if is_news and change is not None:
                join.callback(change)
                if change.kind.is_final:
                    self._join = None

    def _bring_in(self, join: PendingJoin) -> None:
        """Take this node a step further into the generation that has settled."""
        node = self.node
        if node.intent.is_joining:
            final = node.intent.final_change(self.node.state)
            if final is not None:
                if not node.intent.current_generation:
                    final = _to_a_latecomer(final, node.state)
                node.intent = node.intent.receive_result()
                self._end_join(join, RendezvousClosedByChange(final))
                return
            seat = node.enter_generation()
            if seat is None:
                return
            join.waiting_since = self._clock()
            if seat.group_rank == 0:
                self._serve()
        if node.intent.change(self.node.state) is not None:
            # The generation ended before its workers began.
            self._seek(join)
            self.post(NodeRequest())
            return
        serving = self._serving
        if serving is not None and serving.error is not None:
            self._end_join(join, serving.error)
            return
        seen = present(node.snapshot, "a reading")
        if seen.master_endpoint is not None:
            info = self._info(seen, seen.master_endpoint)
            with self._known:
                if join is self._join:
                    join.has_info = True
                    join.callback(info)

    def _serve(self) -> None:
        """Open torch's store of this generation in a thread of its own, so that this thread keeps
        the lease while torch is imported or this node's name is looked up."""
        serving = self._serving = self._new_serving()
        address = self.node.intent.node.address

        def open_it() -> None:
            serving.open(address)
            self.post(NodeRequest())

        helper(open_it, "rendezvous-open").start()

    def end_serving(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()

    def _end_join(self, join: PendingJoin, error: Exception) -> None:
        with self._known:
            if join is self._join:
                self._join = None
                join.callback(error)

    def _info(self, seen: JobSnapshot, master: str) -> RendezvousInfo:
        node, state = self.node, present(seen.state, "the state")
        return RendezvousInfo(
            run_id=node.run_id,
            generation=state.generation,
            assignment=present(seen.assignment, "the seat"),
            bootstrap_store_info=RendezvousStoreInfo(*split_endpoint(master)),
            restarts=state.restarts,
            max_restarts=state.settings.max_restarts,
            reason=state.reason,
            trigger=state.trigger,
            store=node.store,
            exchange_prefix=node.keys.exchange_prefix(state.membership_id),
            incarnation=state.incarnation,
        )


def _as_change(error: Exception) -> Change:
    kind = ChangeKind.ABORTED if isinstance(error, RendezvousClosedError) else ChangeKind.STORE_LOST
    return Change(kind, str(error))


def _to_a_latecomer(change: Change, state: MembershipState | None) -> Change:
    reason = f"{change.reason}; no workers ran on this node"
    ending = None if state is None else state.job_end
    if ending is not None:
        reason += (
            f" (reported by {ending.written_by} at {ending.ended_at}; to run it again, start it "
        )
        reason += "once all of its nodes have ended)"
    return attrs.evolve(change, reason=reason)


def _leave_at_exit() -> None:
    """Those whose handlers nobody has shut down: a lease that no connection holds would outlive
    the process. And those that are still leaving: one that closes torch's store would abort it."""
    left = [loop for loop in (found() for found in _BEGUN.valuerefs()) if loop is not None]
    for loop in left:
        loop.request_stop()
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
        settings: the same on all nodes, or this one is refused.
        open_bootstrap_store: serves torch's store at an address of this node.
        find_store_proxy: the port of this node at which workers look for torch's store, which
            then is at no address that others reach; None where it is at a port of its own.
        find_address: for a node without an address: called before the node first speaks, as
            often as it raises a StoreError.
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
        self._asked_at = float("-inf")
        self._loop = NodeThread(
            LocalNode(store, run_id, node, settings, self._timeouts),
            partial(BootstrapStoreServer, open_bootstrap_store, find_store_proxy),
            find_address,
            clock,
        )
        weakref.finalize(self, self._loop.request_stop).atexit = False

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
        check_restart_budget(max_restarts, self._loop.node.settings.max_restarts)

    def prepare(self) -> None:
        if self._open_bootstrap_store in TORCH_STORE_OPENERS:
            import_torch().join(IMPORT_SECONDS)

    def mark_progress(self, allowance_s: float = 0.0) -> None:
        self._loop.progress_due = self._clock() + self._timeouts.loop_timeout + allowance_s

    def start_join(self, put: JoinCallback) -> bool:
        self._loop.start_join(put)
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        outcomes: queue.SimpleQueue[RendezvousInfo | Change | Exception] = queue.SimpleQueue()
        join = self._loop.start_join(outcomes.put)
        while True:
            outcome: RendezvousInfo | Change | Exception | None
            try:
                outcome = outcomes.get(timeout=OVERDUE_SECONDS)
            except queue.Empty:
                # The store may be keeping the thread that would put it.
                late = self._loop.join_timeout_error(join)
                outcome = late if outcomes.empty() else None
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, RendezvousInfo):
                return outcome

    def wait_for_change(self, timeout: float) -> Change | None:
        loop = self._loop
        loop.wait(lambda: loop.change, timeout)
        return _as_change(loop.closed_error()) if loop.stopping else loop.change

    def report_failure(self, reason: str, *, killed: bool = False) -> bool:
        self._loop.post(NodeRequest(failure=(reason, killed)))
        return True

    def report_slots(self, slots: int, *, retained: bool = False) -> bool:
        self._loop.post(NodeRequest(slots=(slots, retained)))
        return True

    def report_can_regroup(self) -> None:
        self._loop.post(NodeRequest(can_regroup=True))

    def peers_can_regroup(self) -> bool:
        loop = self._loop
        loop.wait(lambda: loop.node.snapshot, self._timeouts.lease_ttl)
        seen = loop.node.snapshot
        if seen is None or seen.state is None or seen.state.phase.is_terminal:
            return False
        return seen.leader is not None and seen.leader.can_regroup

    def report_drain(self, reason: str) -> bool:
        self._loop.post(NodeRequest(drain_reason=reason))
        return True

    def report_success(self) -> bool:
        self._loop.post(NodeRequest(is_success=True))
        return True

    def is_closed(self) -> bool:
        # As far as the store has answered within a lease.
        loop = self._loop
        loop.wait(lambda: loop.node.snapshot, self._timeouts.lease_ttl)
        return loop.stopping or loop.node.intent.final_change(loop.node.state) is not None

    def set_closed(self) -> None:
        loop = self._loop
        loop.post(NodeRequest(close_reason=f"closed by {loop.node.intent.node.host}"))
        loop.wait(
            lambda: loop.node.state is not None and loop.node.state.phase.is_terminal,
            self._timeouts.close_timeout,
        )

    def num_nodes_waiting(self) -> int:
        node, now = self._loop.node, self._clock()
        if now - self._asked_at >= NOTE_SECONDS:
            # Perhaps it is asked many times a second; the store is not.
            self._asked_at = node.next_status_read_at = now
            self._loop.post(NodeRequest())
        # What was counted before this generation settled was for the one before.
        return (
            node.leader_status.num_waiting
            if node.leader_status.membership_id == node.intent.node.membership_id
            else 0
        )

    def seconds_since_refresh(self) -> float | None:
        """Seconds since the store last took this node's word; None if it never has."""
        at = self._loop.node.last_refresh_at
        return None if at is None else max(0.0, self._clock() - at)

    def shutdown(self) -> bool:
        # Where no store was ever reached there is nothing to leave, and looking for one may take
        # long. A thread that waits for a change ends with its wait, or when the store is closed.
        self._loop.stop()
        seconds = self._timeouts.close_timeout
        if self._loop.node.snapshot is None:
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
        timeouts: RendezvousTimeouts | None = None,
        open_bootstrap_store: Callable[[str], BootstrapStore] = open_torch_store,
        find_address: Callable[[], str] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if node.rank_hint is None or not 0 <= node.rank_hint < nnodes:
            raise ConfigError(f"need 0 <= node rank < nnodes={nnodes}, got {node.rank_hint}")
        super().__init__(
            store,
            run_id,
            node,
            RendezvousSettings(
                nnodes, nnodes, max_restarts, last_call_timeout=0.0, has_fixed_ranks=True
            ),
            timeouts=timeouts,
            backend="static",
            open_bootstrap_store=open_bootstrap_store,
            find_address=find_address,
            clock=clock,
        )
