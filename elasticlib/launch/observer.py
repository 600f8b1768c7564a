"""The part of an agent that operators see through the store: its status, and answers to requests.

One thread of each agent, that of its `NodeObserver`, publishes the status of the node and answers
requests. Nothing here affects the job: the agent's own thread only posts to it, and a store that
fails is tried again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ..agent.answers import describe_reaction
from ..agent.elastic_agent import ElasticAgent
from ..agent.machine import MachineState
from ..agent.messages import Action, Effect, Event, Requested
from ..clock import monotonic
from ..errors import ConfigError, StoreConnectionError, StoreTimeoutError, format_error
from ..observe.formatting import plural
from ..observe.requests import Request, RequestKind, Responder
from ..observe.stacks import NodeStacks, encode_stacks
from ..observe.summary import NodeReport, StatusWriter
from ..rendezvous.membership import Node
from ..stores.interface import CancelWatch, Store, WatchResult
from ..threads import daemon_thread, only_logged, start_thread
from ..workers.interface import DRAIN, Heartbeat, WorkerView
from ..workers.output_plan import parse_ranks

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("elasticlib.launch")

CLOSE_TIMEOUT_S = 2.0  # for the last status and answers; a store that answers needs milliseconds
POLL_INTERVAL_S = 1.0  # between listings of the requests, in a store that cannot report changes
# A store that replaced another one counts its versions from 0, so that a watch may miss requests.
WATCH_LIMIT_S = 30.0
RETRY_INTERVAL_S = 2.0  # after a failure
STACKS_TIMEOUT_S = 5.0  # workers write their stacks within about a second
STACKS_INTERVAL_S = 1.0  # a request that is written again and again must not signal more often
NEVER = float("inf")


class NodeObserver:
    """Publishes the status of one node, and answers requests to it, from `start` until `close`.

    Args:
        store: the store of the job.
        run_id: id of the job.
        node: the node.
        read_report: returns the current status.
        agent: the agent to which requests go. Without one, requests get no answer.
        secret: the secret of the job, or None.
        serves_store: returns whether this process serves the store, so that operators must have
            read the answers before it ends.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node: Node,
        read_report: Callable[[], NodeReport],
        *,
        agent: ElasticAgent | None = None,
        secret: bytes | None = None,
        serves_store: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._serves_store = serves_store
        self._writer = StatusWriter(store, run_id, node.id, read_report)
        self._responder = Responder(
            store,
            run_id,
            node.id,
            node.host,
            self._take,
            read_incarnation=self._read_incarnation,
            secret=secret,
        )
        self._agent = agent
        self._stacks = None if agent is None else StackDumps(agent, self.wake)
        self._status_failures = FailureLog("elasticlib status cannot show this node")
        self._request_failures = FailureLog("this node does not answer requests of operators")
        self._thread: threading.Thread | None = None
        # Guards the next four fields; notified when one of them changes.
        self._condition = threading.Condition()
        self._is_woken = False  # there may be something to do
        self._have_requests_changed = True
        self._is_closing = False
        self._decided: deque[tuple[Requested, bool, str]] = deque()  # requests, and the answers
        # Written by the agent's thread:
        self._state = MachineState()  # of the machine
        # Owned by the thread of this object:
        self._posted: dict[str, Requested] = {}  # requests that the machine has not handled yet
        self._cleaned_generation = 0  # in which this node has deleted answers of other nodes
        self._cancel_watch: CancelWatch | None = None
        self._write_at = self._serve_at = float("-inf")  # when to try again at the latest
        self._list_at = float("-inf")  # when to list the requests, although no change is known

    def start(self) -> None:
        """Start the thread. If that is impossible, the job goes on without it."""
        if self._agent is not None:
            self._agent.observe_turns(self._on_turn)
        thread = daemon_thread(self._run, "node-observer", only_logged)
        try:
            start_thread(thread)
        except OSError as error:
            log.warning("elasticlib status, stacks, drain, stop and restart do not work: %s", error)
            return
        self._thread = thread

    def close(self) -> None:
        """Publish the last status and the last answers, for up to CLOSE_TIMEOUT_S."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)
        if self._cancel_watch is not None:
            try:
                self._cancel_watch()
            except Exception as error:  # a user's store may raise any exception
                log.debug("cannot cancel the watch for requests: %s", format_error(error))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wake(self) -> None:
        """Note that the status may have changed. For any thread; does not block."""
        with self._condition:
            self._is_woken = True
            self._condition.notify_all()

    # -- in the agent's thread -----------------------------------------------------------------

    def _on_turn(
        self, event: Event, before: MachineState, after: MachineState, effects: Sequence[Effect]
    ) -> None:
        self._state = after
        if isinstance(event, Requested) and event.id:
            reaction = describe_reaction(event, before, after, effects)
            with self._condition:
                self._decided.append((event, reaction.done, reaction.text))
                self._is_woken = True
                self._condition.notify_all()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            due_at = min(self._write_status(), self._serve())
            with self._condition:
                self._condition.wait_for(
                    lambda: self._is_woken or self._is_closing, max(0.0, due_at - monotonic())
                )
                self._is_woken = False
        self._end(monotonic() + CLOSE_TIMEOUT_S)

    def _end(self, deadline: float) -> None:
        self._write_at = self._serve_at = self._list_at = float("-inf")
        self._write_status(is_last=True)
        self._serve()
        self._answer_for_the_machine()
        self._serve()
        try:
            if self._serves_store():
                self._responder.wait_until_read(deadline)
        except Exception as error:  # a user's store may raise any exception
            self._request_failures.log(error)

    def _answer_for_the_machine(self) -> None:
        """Answer the requests that the machine does not handle any more, by its last state."""
        state = self._state
        with self._condition:
            decided = {request.id for request, _, _ in self._decided}
            for request in self._posted.values():
                if request.id not in decided:
                    reaction = describe_reaction(request, state, state, ())
                    self._decided.append((request, reaction.done, reaction.text))

    def _write_status(self, *, is_last: bool = False) -> float:
        """Publish the status if that is due. Return when to call this again."""
        now = monotonic()
        if self._write_at > now and self._status_failures.is_failing:
            return self._write_at
        try:
            self._write_at = self._writer.write(now, is_last=is_last)
            self._status_failures.clear()
        except Exception as error:  # a user's store may raise any exception
            self._status_failures.log(error)
            self._write_at = now + RETRY_INTERVAL_S
        return self._write_at

    def _serve(self) -> float:
        """Read requests, and write answers. Return when to call this again."""
        if self._stacks is None:
            return NEVER
        now = monotonic()
        if self._serve_at > now and self._request_failures.is_failing:
            return self._serve_at
        try:
            self._serve_at = self._try_to_serve(self._stacks, now)
            self._request_failures.clear()
        except Exception as error:  # a user's store may raise any exception
            self._request_failures.log(error)
            self._list_at = float("-inf")
            self._serve_at = now + RETRY_INTERVAL_S
        return self._serve_at

    def _try_to_serve(self, stacks: StackDumps, now: float) -> float:
        if self._have_requests_changed or now >= self._list_at:
            self._list_requests(now)
        with self._condition:
            decided = [*self._decided]
            self._decided.clear()
        for request, done, text in decided:
            self._posted.pop(request.id, None)
            self._responder.reply(request.id, text, done=done)
        for id, found in stacks.poll(now):
            text = f"sends {plural(len(found.texts), 'stack')}"
            self._responder.reply(id, text, done=True, body=encode_stacks(found))
        self._responder.flush()
        generation = self._state.generation
        if generation is not None and generation.generation != self._cleaned_generation:
            self._cleaned_generation = generation.generation
            if generation.rank == 0:
                self._responder.delete_stale_answers()
        return min(self._list_at, stacks.due_at)

    def _list_requests(self, now: float) -> None:
        with self._condition:
            self._have_requests_changed = False
        version, pause = self._responder.poll()
        if pause is not None:
            self._list_at = now + pause
            return
        if self._cancel_watch is not None:
            self._cancel_watch()
        self._cancel_watch = self._store.watch(
            self._responder.prefix, after=version, callback=self._on_change
        )
        has_watch = self._cancel_watch is not None
        self._list_at = now + (WATCH_LIMIT_S if has_watch else POLL_INTERVAL_S)

    def _on_change(self, _: WatchResult) -> None:
        with self._condition:
            self._have_requests_changed = self._is_woken = True
            self._condition.notify_all()

    def _read_incarnation(self) -> str:
        generation = self._state.generation
        return "" if generation is None else generation.incarnation

    def _take(self, request: Request) -> None:
        """Pass a valid request on."""
        agent, stacks = self._agent, self._stacks
        if agent is None or stacks is None:
            return
        if request.kind is RequestKind.STACKS:
            try:
                ranks = parse_ranks(request.payload) if request.payload else None
                stacks.add(request.id, ranks, monotonic())
            except ConfigError as error:
                self._responder.reply(request.id, str(error), done=False)
            return
        posted = Requested(
            Action(request.kind.value),
            request.source,
            reason=DRAIN,
            generation=request.generation,
            id=request.id,
            by=request.by,
        )
        self._posted[request.id] = posted
        agent.post(posted)


class FailureLog:
    """Logs the failures of something that never affects the job, the first one as a warning.

    An unreachable store is logged at DEBUG only, because the agent reports it.

    Args:
        consequence: what does not work, as a part of the log message.
    """

    def __init__(self, consequence: str) -> None:
        self.is_failing = False  # the last call has failed
        self._consequence = consequence
        self._has_warned = False

    def log(self, error: Exception) -> None:
        """Log a failure."""
        self.is_failing, level = True, logging.DEBUG
        if not self._has_warned and not isinstance(error, StoreConnectionError | StoreTimeoutError):
            self._has_warned, level = True, logging.WARNING
        message = "%s: %s; retrying every %g s"
        log.log(level, message, self._consequence, format_error(error), RETRY_INTERVAL_S)

    def clear(self) -> None:
        """Note that it works."""
        self.is_failing = False


# -- stacks ----------------------------------------------------------------------------------------


@attrs.frozen
class _Wish:
    """The stacks that a request asks for."""

    ranks: frozenset[int] | None  # None: all
    arrived_at: float


@attrs.frozen
class _Dump:
    """Stacks that workers write, or have written."""

    number: int
    ranks: frozenset[int] | None  # None: all
    started_at: float
    stacks: NodeStacks | None = None  # None until they are there

    def fulfils(self, wish: _Wish) -> bool:
        """Return whether it has the stacks of a request, and is not too old for it."""
        has_ranks = self.ranks is None or (wish.ranks is not None and wish.ranks <= self.ranks)
        return has_ranks and wish.arrived_at < self.started_at + STACKS_INTERVAL_S


class StackDumps:
    """The Python stacks of this node's workers, which write them at most once a second.

    Requests that arrive in between share the last result, if it has their ranks, or the next one.
    One thread calls the methods.

    Args:
        agent: the agent.
        on_ready: called in any thread when `poll` has something to do.
    """

    def __init__(self, agent: ElasticAgent, on_ready: Callable[[], object]) -> None:
        self._agent = agent
        self._on_ready = on_ready
        self._wishes: dict[str, _Wish] = {}  # by the id of the request
        self._dump: _Dump | None = None  # the last one
        self._found: deque[tuple[int, NodeStacks]] = deque()  # appended by any thread
        self.due_at = NEVER  # when `poll` has something to do

    def add(self, id: str, ranks: frozenset[int] | None, now: float) -> None:
        """Add a request for the stacks of these ranks; None for all."""
        self._wishes[id] = _Wish(ranks, now)

    def poll(self, now: float) -> list[tuple[str, NodeStacks]]:
        """Return the requests that have their stacks now, and let workers write more if needed."""
        dump = self._dump = self._with_result(self._dump, now)
        answers = []
        if dump is not None and dump.stacks is not None:
            for id in [id for id, wish in self._wishes.items() if dump.fulfils(wish)]:
                answers.append((id, dump.stacks.of(self._wishes.pop(id).ranks)))
        if dump is not None and dump.stacks is None:
            self.due_at = dump.started_at + STACKS_TIMEOUT_S
        elif not self._wishes:
            self.due_at = NEVER
        elif dump is not None and now < dump.started_at + STACKS_INTERVAL_S:
            self.due_at = dump.started_at + STACKS_INTERVAL_S
        else:
            self._start(now)
            self.due_at = now + STACKS_TIMEOUT_S
        return answers

    def _with_result(self, dump: _Dump | None, now: float) -> _Dump | None:
        """Return the last dump with its stacks, if they are there, or are not waited for longer."""
        while self._found:
            number, stacks = self._found.popleft()
            if dump is not None and dump.number == number and dump.stacks is None:
                dump = attrs.evolve(dump, stacks=stacks)
        if dump is not None and dump.stacks is None and now >= dump.started_at + STACKS_TIMEOUT_S:
            dump = attrs.evolve(dump, stacks=NodeStacks({}))
        return dump

    def _start(self, now: float) -> None:
        """Let the workers write the stacks that the waiting requests need."""
        number = 1 if self._dump is None else self._dump.number + 1
        named = [wish.ranks for wish in self._wishes.values() if wish.ranks is not None]
        is_for_all = len(named) < len(self._wishes)
        ranks = None if is_for_all else frozenset[int]().union(*named)
        self._dump = _Dump(number, ranks, now)
        group, view = self._agent.get_worker_group(), self._agent.view()
        rank_of = {} if group is None else {w.local_rank: w.rank for w in group.workers}
        running = {
            local: one
            for local, one in view.items()
            if local in rank_of and (ranks is None or rank_of[local] in ranks)
        }
        if not running:
            self._note(number, NodeStacks({}))
            return
        self._agent.dump_stacks(
            tuple(running),
            lambda texts: self._note(number, stacks_of(running, rank_of, texts)),
        )

    def _note(self, number: int, stacks: NodeStacks) -> None:
        self._found.append((number, stacks))
        self._on_ready()


def stacks_of(
    running: Mapping[int, WorkerView], rank_of: Mapping[int, int], texts: Mapping[int, str]
) -> NodeStacks:
    """Return what workers have written, and why others have not.

    Args:
        running: the workers by local rank.
        rank_of: their ranks, by local rank.
        texts: the stacks, by local rank.
    """
    missing = [local for local in running if local not in texts]
    heartbeats = heartbeats_of(running)
    unresponsive = [n for n in missing if n in heartbeats and heartbeats[n].can_dump_stacks]
    return NodeStacks(
        {rank_of[n]: text for n, text in texts.items() if n in running},
        unresponsive_ranks=tuple(sorted(rank_of[n] for n in unresponsive)),
        unsupported={rank_of[n]: running[n].name for n in missing if n not in unresponsive},
    )


def heartbeats_of(view: Mapping[int, WorkerView]) -> dict[int, Heartbeat]:
    """Return the heartbeats of the workers that report any, by local rank."""
    beats = {local: one.heartbeat for local, one in view.items()}
    return {local: beat for local, beat in beats.items() if beat is not None}
