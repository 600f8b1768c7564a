"""Requests of operators to a running job: drain a node, stop the job, restart its workers.

A `ControlClient` writes a request into the store of the job. A `ControlResponder` in each agent
reads it, decides by `decide` how its node reacts, answers, and passes the request to the agent.
Everyone who can write to the store can control the job. What is read was written by other machines:
it is checked strictly, and bounded in size.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..clock import Clock, monotonic
from ..errors import ConfigError, RunNotFoundError, StoreError
from ..rendezvous.store_layout import JobListing, StoreKeys, decode_node, decode_state
from ..sanitize import escape_to_one_line
from ..stores.interface import Entry, Store
from ..threads import BackgroundQueue
from .event import read_versioned_object
from .formatting import NOT_JOINED_TEXT, format_list, plural
from .node_status import observer_prefix, read_field
from .responder import StoreResponder

log = logging.getLogger("elasticlib.observe")

VERSION = 1
MAX_MESSAGE_BYTES = 8 * 1024  # of a request or an answer
MAX_TEXT_LENGTH = 512  # of one field
MAX_TIME_LIMIT_S = 3600.0


# -- requests and answers --------------------------------------------------------------------------


class ControlAction(enum.Enum):
    """An action that an operator can request."""

    DRAIN = "drain"  # one node leaves after its workers have saved
    STOP = "stop"  # all nodes leave after their workers have saved, and the job is over
    RESTART = "restart"  # all workers are restarted after they have saved


@attrs.frozen
class ControlRequest:
    """A request to some or all nodes of one run of a job."""

    id: str  # unique
    action: ControlAction
    by: str  # the operator, as user@host
    incarnation: str  # the run; a later run of the same job id ignores the request
    generation: int  # the generation in which it was made
    time_limit_s: float  # a node does not react later than this
    node_id: str = ""  # the node, or empty for all nodes

    @property
    def source(self) -> str:
        """The request as a phrase, for reasons and log messages."""
        return f"a {self.action.value} request from {self.by}"


@attrs.frozen
class ControlAnswer:
    """The answer of a node to a request."""

    node_id: str
    host: str
    has_effect: bool  # the node does what was requested
    text: str  # what it does


def encode_request(request: ControlRequest) -> bytes:
    """Return a request as JSON."""
    return _dump({**attrs.asdict(request), "action": request.action.value})


def decode_request(data: bytes) -> ControlRequest:
    """Decode a request.

    Raises:
        ValueError: the data is not a valid request; the error names the field.
    """
    fields = _read_message(data, "a request")
    actions = {action.value: action for action in ControlAction}
    action = fields.get("action")
    if not isinstance(action, str) or action not in actions:
        raise ValueError(f"action must be one of {', '.join(actions)}, got {action!r:.60}")
    time_limit_s = read_field("time_limit_s", fields.get("time_limit_s"), (float,))
    if not 0 < time_limit_s <= MAX_TIME_LIMIT_S:
        raise ValueError(f"time_limit_s must be up to {MAX_TIME_LIMIT_S:g}, got {time_limit_s!r}")
    texts = {name: _read_text(fields, name) for name in ("id", "by", "incarnation", "node_id")}
    return ControlRequest(
        action=actions[action],
        generation=read_field("generation", fields.get("generation"), (int,)),
        time_limit_s=float(time_limit_s),
        **texts,
    )


def encode_answer(answer: ControlAnswer) -> bytes:
    """Return an answer as JSON."""
    return _dump(attrs.asdict(answer))


def decode_answer(data: bytes) -> ControlAnswer:
    """Decode an answer.

    Raises:
        ValueError: the data is not a valid answer; the error names the field.
    """
    fields = _read_message(data, "an answer")
    texts = {name: _read_text(fields, name) for name in ("node_id", "host", "text")}
    has_effect = read_field("has_effect", fields.get("has_effect"), (bool,))
    return ControlAnswer(has_effect=has_effect, **texts)


def _dump(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **fields}, separators=(",", ":")).encode()


def _read_message(data: bytes, label: str) -> dict[str, Any]:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{label} must have at most {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
    return read_versioned_object(data, label, VERSION)


def _read_text(fields: Mapping[str, Any], name: str) -> str:
    text: str = read_field(name, fields.get(name), (str,))
    # Reasons and log messages contain the text.
    if len(text) > MAX_TEXT_LENGTH or (text and not text.isprintable()):
        raise ValueError(
            f"{name} must be printable, of at most {MAX_TEXT_LENGTH} characters, got {text!r:.60}"
        )
    return text


# -- decision of a node ----------------------------------------------------------------------------


@attrs.frozen
class NodeActivity:
    """The activity of a node when it reads a request."""

    generation: int = 0  # the last one that it was a member of
    num_workers: int = 0  # running workers
    is_training: bool = False  # its workers run in the current generation and are not being stopped
    is_leaving: bool = False  # it is about to leave the job


@attrs.frozen
class Reaction:
    """The reaction of a node to a request."""

    has_effect: bool  # the node does what was requested
    text: str  # what it does, for the operator


def decide(
    request: ControlRequest,
    node_id: str,
    incarnation: str,
    activity: NodeActivity,
    *,
    age_s: float,
) -> Reaction | None:
    """Decide how a node reacts to a request that it has not answered yet.

    Args:
        request: the request.
        node_id: id of the node.
        incarnation: the run that the node is part of.
        activity: what the node is doing.
        age_s: seconds since the node first read the request.

    Returns:
        The reaction, or None if the request is not for this node, not for this run, or too old.
    """
    is_addressed = request.node_id in ("", node_id)
    if not is_addressed or request.incarnation != incarnation or age_s > request.time_limit_s:
        return None
    if request.action is ControlAction.RESTART:
        return _decide_restart(request, activity)
    if activity.is_leaving:
        # A node that drains must not be started again if the whole job is stopped.
        has_effect = request.action is ControlAction.STOP
        return Reaction(has_effect, "was leaving the job already")
    verb = "leaves the job" if request.action is ControlAction.DRAIN else "ends"
    if not activity.num_workers:
        return Reaction(True, verb)
    workers = plural(activity.num_workers, "worker")
    have = "has" if activity.num_workers == 1 else "have"
    return Reaction(True, f"{verb} once its {workers} {have} stopped")


def _decide_restart(request: ControlRequest, activity: NodeActivity) -> Reaction:
    if activity.is_leaving:
        return Reaction(False, "is leaving the job")
    if not activity.is_training:
        is_stopping = activity.num_workers > 0
        text = "is stopping its workers already" if is_stopping else "has no workers to restart"
        return Reaction(False, text)
    if activity.generation > request.generation:
        return Reaction(False, f"has started generation {activity.generation} since the request")
    return Reaction(True, f"restarts its {plural(activity.num_workers, 'worker')}")


# -- nodes of the job ------------------------------------------------------------------------------

MAX_CANDIDATES = 24  # nodes that an error message names


@attrs.frozen
class TargetNode:
    """A live node of a job, as `elasticlib status` shows it."""

    id: str
    host: str
    rank: int | None = None  # among the members; None if it waits

    @property
    def names(self) -> tuple[str, ...]:
        """The id, the host and the rank, by which an operator can name the node."""
        return (self.id, self.host, *(() if self.rank is None else (str(self.rank),)))

    @property
    def label(self) -> str:
        """The host and the rank, for messages."""
        return f"{self.host} ({'waiting' if self.rank is None else f'rank {self.rank}'})"


@attrs.frozen
class TargetJob:
    """A running job, and its live nodes."""

    run_id: str
    incarnation: str
    generation: int
    nodes: tuple[TargetNode, ...]  # members by rank, then waiting nodes


def read_target_job(store: Store, run_id: str) -> TargetJob:
    """Return the job that runs under this id.

    Raises:
        StoreError: the store cannot be read.
        RunNotFoundError: no node of the job is alive, or the job has finished.
    """
    keys = StoreKeys(run_id)
    listing = JobListing(keys, store.list(keys.job_prefix))
    membership, _ = listing.membership(None)
    if membership is not None and membership.phase.is_terminal:
        raise RunNotFoundError(f"run {run_id!r} has {membership.phase.value}: {membership.reason}")
    live = {} if membership is None else {node.id: node for node in listing.live_nodes()}
    if membership is None or not live:
        raise RunNotFoundError(f"no node of run {run_id!r} is alive: {NOT_JOINED_TEXT}")
    ranks = {node.id: rank for rank, node in enumerate(membership.members)}
    nodes = [TargetNode(node.id, node.host, ranks.get(node.id)) for node in live.values()]
    nodes.sort(key=lambda node: (node.rank is None, node.rank or 0))
    return TargetJob(run_id, membership.incarnation, membership.generation, tuple(nodes))


def find_node(selector: str, nodes: Sequence[TargetNode]) -> TargetNode:
    """Return the one node with this id, host name or rank.

    Raises:
        ConfigError: there is no such node, or several; the error names the candidates.
    """
    found = [node for node in nodes if selector in node.names]
    if len(found) == 1:
        return found[0]
    problem = "is ambiguous" if found else "is not the id, host or rank of a live node"
    candidates = [f"{node.id} ({node.label})" for node in found or nodes]
    raise ConfigError(
        f"NODE {selector!r} {problem}; choose one of {format_list(candidates, MAX_CANDIDATES)}"
    )


# -- client ----------------------------------------------------------------------------------------

TTL_MARGIN_S = 5.0  # a request expires so long after its time limit, if its client is gone
MIN_PAUSE_S, PAUSE_PER_NODE_S = 0.02, 5e-5  # between listings of answers
LIVENESS_INTERVAL_S = 0.5  # between checks whether missing nodes are still alive
CLEANUP_TIMEOUT_S = 2.0  # to delete what was written, if the store is gone


class ControlKeys:
    """Prefixes of the keys of a job's requests and answers."""

    def __init__(self, run_id: str) -> None:
        self.requests = observer_prefix(run_id, "control_request")
        self.answers = observer_prefix(run_id, "control_answer")


@attrs.frozen
class ControlResult:
    """The answers to a request."""

    request: ControlRequest
    nodes: tuple[TargetNode, ...]  # that should answer
    answers: Mapping[str, ControlAnswer]  # by node id

    @property
    def missing(self) -> tuple[TargetNode, ...]:
        """The nodes that have not answered."""
        return tuple(node for node in self.nodes if node.id not in self.answers)


class ControlClient:
    """Sends requests to one job; leaving the context deletes the requests and their answers."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._node_prefix = StoreKeys(run_id).node()
        self._keys = ControlKeys(run_id)
        self._ids: list[str] = []  # of the requests that were written
        self._pause = threading.Event()  # never set; allows to wait

    def send(self, request: ControlRequest, nodes: Sequence[TargetNode]) -> ControlResult:
        """Send a request, and wait for the answers until its time limit.

        A node that is lost is not waited for any longer.

        Args:
            request: the request.
            nodes: the nodes that should answer.

        Raises:
            StoreError: the store cannot be used.
        """
        self._ids.append(request.id)
        self._store.set(
            f"{self._keys.requests}{request.id}",
            encode_request(request),
            ttl=request.time_limit_s + TTL_MARGIN_S,
        )
        answers = self._wait_for_answers(request, {node.id for node in nodes})
        if request.action is ControlAction.STOP:
            answers = self._with_stopped_nodes(nodes, answers)
        return ControlResult(request, tuple(nodes), answers)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        # The store may be gone with the node that served it. Then, each call takes a while.
        queue = BackgroundQueue("control-cleanup", lambda _: None)
        queue.call(self._delete_requests_and_answers)
        queue.close(CLEANUP_TIMEOUT_S)

    def _delete_requests_and_answers(self) -> None:
        # If the store is unreachable, the requests expire.
        with contextlib.suppress(StoreError):
            for id in self._ids:
                for entry in self._store.list(f"{self._keys.answers}{id}/").entries:
                    self._store.delete(entry.key)
                # A node that serves the store waits for this before it exits.
                self._store.delete(f"{self._keys.requests}{id}")

    def _wait_for_answers(
        self, request: ControlRequest, awaited: set[str]
    ) -> dict[str, ControlAnswer]:
        prefix = f"{self._keys.answers}{request.id}/"
        checked_at = monotonic()
        deadline = checked_at + request.time_limit_s
        answers: dict[str, ControlAnswer] = {}
        try:
            while True:
                listing = self._store.list(prefix)
                answers = self._read_answers(prefix, listing.entries)
                now = monotonic()
                if now - checked_at > LIVENESS_INTERVAL_S:
                    checked_at = now
                    if lost := awaited - self._live_node_ids() - answers.keys():
                        # A node may have answered just before it left: read the answers again.
                        awaited -= lost
                        continue
                if now >= deadline or awaited <= answers.keys():
                    return answers
                # Answers that arrive together are read together.
                self._pause.wait(MIN_PAUSE_S + PAUSE_PER_NODE_S * len(awaited))
                remaining = min(deadline - monotonic(), LIVENESS_INTERVAL_S)
                self._store.wait(prefix, after=listing.version, timeout=max(remaining, 0.0))
        except StoreError:
            if not answers:
                raise
            return answers  # the job may be over, and its store with it

    def _with_stopped_nodes(
        self, nodes: Iterable[TargetNode], answers: Mapping[str, ControlAnswer]
    ) -> dict[str, ControlAnswer]:
        """Return the answers, and one for each node that ended with the job before it answered."""
        try:
            live_ids = self._live_node_ids()
        except StoreError:
            return dict(answers)
        stopped = {
            node.id: ControlAnswer(node.id, node.host, True, "has left the job")
            for node in nodes
            if node.id not in live_ids
        }
        return {**stopped, **answers}

    def _live_node_ids(self) -> set[str]:
        entries = self._store.list(self._node_prefix).entries
        return {entry.key.removeprefix(self._node_prefix) for entry in entries}

    def _read_answers(self, prefix: str, entries: Iterable[Entry]) -> dict[str, ControlAnswer]:
        answers = {}
        for entry in entries:
            try:
                answers[entry.key.removeprefix(prefix)] = decode_answer(entry.value)
            except ValueError as error:
                log.warning("ignoring the invalid answer of a node at %s: %s", entry.key, error)
        return answers


# -- responder -------------------------------------------------------------------------------------

MAX_REQUESTS = 16  # considered per poll
MAX_ID_LENGTH = 64
MAX_REMEMBERED = 256  # answered requests, to which the node does not react again


class ControlResponder(StoreResponder):
    """Answers requests on one node, and passes each one to the agent once.

    Args:
        store: the store of the job.
        run_id: id of the job.
        node_id: id of the node.
        read_activity: returns what the node is doing.
        act: passes a request to the agent; returns at once.
        host: name of the node in its answers.
        poll_interval: seconds between two listings of the requests; 0 to call `Store.wait`.
        clock: monotonic clock.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node_id: str,
        read_activity: Callable[[], NodeActivity],
        act: Callable[[ControlRequest], object],
        *,
        host: str = "",
        poll_interval: float = 0.0,
        clock: Clock = monotonic,
    ) -> None:
        self._keys = ControlKeys(run_id)
        super().__init__(
            "control-responder",
            store,
            self._keys.requests,
            "this node does not react to elasticlib drain, stop and restart",
            poll_interval=poll_interval,
        )
        self._job = StoreKeys(run_id)
        self._node_id = node_id
        self._host = host or node_id
        self._read_activity = read_activity
        self._act = act
        self._clock = clock
        self._first_read_at: dict[str, float] = {}  # of each request in the store, by its key
        self._finished: deque[str] = deque(maxlen=MAX_REMEMBERED)  # keys that need no reaction

    def answer_all(self, entries: Iterable[Entry]) -> bool:
        """React to new requests, and delete the answers to requests that are gone.

        Returns:
            True if the requests should be listed again soon, because this node has answered one
            or is not part of the run yet.
        """
        by_version = sorted(entries, key=lambda entry: entry.version)
        current = {entry.key for entry in by_version}
        for key in self._first_read_at.keys() - current:
            del self._first_read_at[key]
            self._store.delete(self._answer_key(key))
        newest = by_version[-MAX_REQUESTS:]
        reactions = [self._react(entry) for entry in newest if entry.key not in self._finished]
        return any(reactions)

    def wait_until_read(self, timeout: float) -> None:
        """Wait until the operators have read this node's answers, and deleted their requests.

        A node that serves the store calls this before it exits.

        Args:
            timeout: seconds to wait at most.
        """
        deadline = self._clock() + timeout
        with contextlib.suppress(StoreError):
            while (left_s := deadline - self._clock()) > 0:
                listing = self._store.list(self._keys.requests)
                if not any(entry.key in self._finished for entry in listing.entries):
                    return
                self._store.wait(self._keys.requests, after=listing.version, timeout=left_s)

    def _react(self, entry: Entry) -> bool:
        """React to a request.

        Returns:
            True if the requests should be read again soon, because this node has answered, or is
            not part of the run yet.
        """
        try:
            request = decode_request(entry.value)
            if entry.key != f"{self._keys.requests}{request.id}" or len(request.id) > MAX_ID_LENGTH:
                raise ValueError(f"its key {entry.key!r:.100} is not that of its id")
        except ValueError as error:
            log.debug("ignoring an invalid request of an operator: %s", error)
            self._finished.append(entry.key)
            return False
        if request.node_id not in ("", self._node_id):
            return False
        now = self._clock()
        age_s = now - self._first_read_at.setdefault(entry.key, now)
        incarnation, is_part = self._read_run()
        if not is_part:
            # A node that starts publishes its record before it takes part in the run.
            return request.incarnation == incarnation and age_s <= request.time_limit_s
        reaction = decide(request, self._node_id, incarnation, self._read_activity(), age_s=age_s)
        if reaction is None:
            return False
        answer = ControlAnswer(self._node_id, self._host, reaction.has_effect, reaction.text)
        # The node answers before it acts, because a node that leaves may close its connection at
        # once. The answer has no lease, which would end with that connection.
        self._store.set(self._answer_key(entry.key), encode_answer(answer))
        self._finished.append(entry.key)
        if reaction.has_effect:
            self._act(request)
        return True

    def _read_run(self) -> tuple[str, bool]:
        """Return the current run of the job, and whether this node is part of it."""
        state = self._store.get(self._job.state)
        if state is None:
            return "", False
        incarnation = decode_state(state.value).incarnation
        record = self._store.get(self._job.node(self._node_id))
        is_part = record is not None and (
            decode_node(record.value).inactive_incarnation != incarnation
        )
        return incarnation, is_part

    def _answer_key(self, request_key: str) -> str:
        id = request_key.removeprefix(self._keys.requests)
        return f"{self._keys.answers}{id}/{self._node_id}"


# -- output ----------------------------------------------------------------------------------------


def result_lines(result: ControlResult) -> list[str]:
    """Return one line per node: what it does, or that it has not answered."""
    lines = []
    for node in result.nodes:
        answer = result.answers.get(node.id)
        text = "no response" if answer is None else answer.text
        lines.append(f"{node.label}: {text}")
    known_ids = {node.id for node in result.nodes}
    # Nodes may have joined since the job was read.
    later = [answer for id, answer in result.answers.items() if id not in known_ids]
    lines += [f"{answer.host}: {answer.text}" for answer in later]
    return [escape_to_one_line(line) for line in lines]


def result_document(run_id: str, result: ControlResult) -> dict[str, Any]:
    """Return the JSON document of a result."""
    ranks = {node.id: node.rank for node in result.nodes}
    answers = [
        {
            "node": id,
            "host": answer.host,
            "rank": ranks.get(id),
            "has_effect": answer.has_effect,
            "text": answer.text,
        }
        for id, answer in result.answers.items()
    ]
    missing = [{"node": n.id, "host": n.host, "rank": n.rank} for n in result.missing]
    request = result.request
    return {
        "version": VERSION,
        "run": run_id,
        "action": request.action.value,
        "by": request.by,
        "answers": answers,
        "missing": missing,
    }
