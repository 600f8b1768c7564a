"""Requests of operators to the nodes of a job, and the answers: the one protocol in the store.

A client writes a request under one key; each addressed node writes one answer, and for some kinds a
body. If the job has a secret, all of them carry a MAC over their key and their bytes.

A request may be written again at any time by whoever has read it. What such a replay can do is
bounded by the meaning of each kind, and not by a memory of requests:

- `stop` names the incarnation that it ends, and a later run of the job is another one;
- `restart` names the generation whose workers it restarts, and a later one is another one;
- `drain` names a node by its id, which no other agent ever has;
- `stacks` only reads, and a node signals its workers at most once a second.

What is read here was written by other machines: it is checked strictly, and bounded in size.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from ..clock import Clock, monotonic, sleep
from ..codec import from_json, to_json
from ..errors import ConfigError, RendezvousConfigError, RunNotFoundError, StoreError
from ..rendezvous.overview import live_ids_of, read_overview
from ..rendezvous.store_layout import StoreKeys, decode_node, decode_state
from ..sanitize import escape_to_one_line
from ..stores.authentication import SECRET_ENV
from ..stores.interface import Entry, Store
from ..threads import BackgroundQueue
from .event import read_versioned_object
from .event_kinds import MAX_NUMBER
from .formatting import NOT_JOINED_TEXT, format_list

log = logging.getLogger("elasticlib.observe")

Message = TypeVar("Message")

VERSION = 1
MAX_REQUEST_BYTES = 8 * 1024
MAX_ANSWER_BYTES = 512  # those of 10,000 nodes fit into one listing
MAX_BODY_BYTES = 256 * 1024
MAX_TEXT_LENGTH = 512  # of one field of a request
MAX_PAYLOAD_LENGTH = 7 * 1024
MAX_ANSWER_TEXT_BYTES = 200
MAX_LIMIT_S = 3600.0
NO_SECRET = f"this job has no secret: unset {SECRET_ENV}, and leave out --secret-file"
REFUSAL = f"this job has a secret: set {SECRET_ENV} to it, or give its file by --secret-file"
UNSIGNED = b"-"  # in place of a MAC
_ID = re.compile(r"[0-9a-f]{16}")


# -- requests and answers --------------------------------------------------------------------------


class RequestKind(enum.Enum):
    """What an operator can request."""

    DRAIN = "drain"  # one node leaves after its workers have saved
    STOP = "stop"  # all nodes leave after their workers have saved, and the job is over
    RESTART = "restart"  # all workers are restarted after they have saved
    STACKS = "stacks"  # the Python stacks of the workers


def _check_text(_: object, field: attrs.Attribute[str], text: str) -> None:
    # Reasons and log messages contain the texts.
    limit = MAX_PAYLOAD_LENGTH if field.name == "payload" else MAX_TEXT_LENGTH
    if len(text) > limit or (text and not text.isprintable()):
        raise ValueError(
            f"{field.name} must be printable, of at most {limit} characters, got {text!r:.60}"
        )


def _check_length(_: object, field: attrs.Attribute[str], text: str) -> None:
    # These are only compared. The id of a run may be any text.
    if len(text) > MAX_TEXT_LENGTH:
        raise ValueError(f"{field.name} must have up to {MAX_TEXT_LENGTH} characters")


def _check_id(_: object, __: object, id: str) -> None:
    if _ID.fullmatch(id) is None:
        raise ValueError(f"id must be 16 hexadecimal digits, got {id!r:.60}")


def _check_generation(_: object, __: object, generation: int) -> None:
    if not 0 <= generation < MAX_NUMBER:
        raise ValueError(f"generation must be a number from 0, got {generation!r:.60}")


def _check_limit(_: object, __: object, limit_s: float) -> None:
    if not 0 < limit_s <= MAX_LIMIT_S:
        raise ValueError(f"limit_s must be above 0 and up to {MAX_LIMIT_S:g}, got {limit_s!r:.60}")


@attrs.frozen
class Request:
    """A request to one node or to all nodes of a run. Invalid values raise ValueError."""

    id: str = attrs.field(validator=_check_id)
    kind: RequestKind
    target: str = attrs.field(validator=_check_length)  # id of a node; empty for all nodes
    run: str = attrs.field(validator=_check_length)
    incarnation: str = attrs.field(validator=_check_length)  # a later run of `run` ignores it
    generation: int = attrs.field(validator=_check_generation)  # in which it was made
    by: str = attrs.field(validator=_check_text)  # the operator, as user@host
    limit_s: float = attrs.field(validator=_check_limit)  # a node does nothing later than this
    payload: str = attrs.field(default="", validator=_check_text)  # stacks: the ranks, or empty

    @property
    def source(self) -> str:
        """The request as a phrase, for reasons and log messages."""
        return f"a {self.kind.value} request from {self.by}"


@attrs.frozen
class Answer:
    """The answer of a node to a request."""

    host: str
    done: bool  # the node does what was requested
    text: str  # what it does, or why it does not
    size: int = 0  # bytes of the body, 0 without one
    refused: bool = False  # the request was not signed with the secret of the job


def new_request_id() -> str:
    """Return an id that no other request has."""
    return secrets.token_hex(8)


def encode_request(request: Request) -> bytes:
    """Return a request as JSON.

    Raises:
        ConfigError: the request is too long.
    """
    data = _encode(request)
    if len(data) > MAX_REQUEST_BYTES:
        raise ConfigError(
            f"a request has at most {MAX_REQUEST_BYTES} bytes, got {len(data)}: name fewer ranks"
        )
    return data


def encode_answer(answer: Answer) -> bytes:
    """Return an answer as JSON; its texts are cut."""
    text = _cut(answer.text, MAX_ANSWER_TEXT_BYTES)
    return _encode(attrs.evolve(answer, host=_cut(answer.host, 64), text=text))


def decode_request(data: bytes) -> Request:
    """Decode a request.

    Raises:
        ValueError: the data is not a valid request; the error names the field.
    """
    return _decode(Request, data, MAX_REQUEST_BYTES)


def decode_answer(data: bytes) -> Answer:
    """Decode an answer.

    Raises:
        ValueError: the data is not a valid answer; the error names the field.
    """
    return _decode(Answer, data, MAX_ANSWER_BYTES)


def _encode(message: Request | Answer) -> bytes:
    fields = {"version": VERSION, **to_json(message)}
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def _decode(kind: type[Message], data: bytes, limit: int) -> Message:
    label = f"a message of the kind {kind.__name__}"
    if len(data) > limit:
        raise ValueError(f"{label} must have at most {limit} bytes, got {len(data)}")
    fields = read_versioned_object(data, label, VERSION)
    del fields["version"]
    return from_json(kind, fields)


def _cut(text: str, num_bytes: int) -> str:
    return text.encode(errors="backslashreplace")[:num_bytes].decode(errors="ignore")


# -- keys and signatures ---------------------------------------------------------------------------


class RequestKeys:
    """The keys of the requests and answers of one job."""

    def __init__(self, run: str) -> None:
        prefix = StoreKeys(run).observers
        self.requests = f"{prefix}request/"
        self.answers = f"{prefix}answer/"
        self._bodies = f"{prefix}body/"

    def request(self, id: str) -> str:
        return f"{self.requests}{id}"

    def answer(self, id: str, node: str = "") -> str:
        """The key of a node's answer, or the prefix of all answers to a request."""
        return f"{self.answers}{id}/{node}"

    def body(self, id: str, node: str) -> str:
        return f"{self._bodies}{id}/{node}"


class NotSignedError(ValueError):
    """A value has no MAC, or that of another key or secret."""


class Seal:
    """Signs and verifies the values of one job. Without a secret it does neither.

    A value is `MAC CONTENT`; the MAC covers the whole key and the content, so that a value that was
    copied to another key is not valid. Without a secret the MAC is `-`.
    """

    def __init__(self, secret: bytes | None, run: str) -> None:
        purpose = b"elasticlib requests 1 " + run.encode(errors="surrogatepass")
        self._key = None if secret is None else hmac.digest(secret, purpose, hashlib.sha256)

    def sign(self, key: str, content: bytes) -> bytes:
        """Return the value to write at a key."""
        return self._mac(key, content) + b" " + content

    def open(self, key: str, value: bytes) -> bytes:
        """Return the content of the value at a key.

        Raises:
            NotSignedError: the job has a secret, and the value was not signed with it for this key.
            ValueError: the value has another form.
        """
        mac, content = split_value(value)
        if self._key is not None and not hmac.compare_digest(mac, self._mac(key, content)):
            raise NotSignedError(f"the value at {key!r} was not signed with the secret of the job")
        return content

    def _mac(self, key: str, content: bytes) -> bytes:
        if self._key is None:
            return UNSIGNED
        signed = key.encode(errors="surrogatepass") + b"\n" + content
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest().encode()


def split_value(value: bytes) -> tuple[bytes, bytes]:
    """Return the MAC and the content of a value, which are not verified."""
    mac, space, content = value.partition(b" ")
    if not space:
        raise ValueError(f"a value must be a MAC, a space and a text, got {value!r:.60}")
    return mac, content


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

    run: str
    incarnation: str
    generation: int
    nodes: tuple[TargetNode, ...]  # members by rank, then waiting nodes


def read_target_job(store: Store, run: str) -> TargetJob:
    """Return the job that runs under this id.

    Raises:
        StoreError: the store cannot be read.
        RunNotFoundError: no node of the job is alive, or the job has finished.
    """
    job = read_overview(store, run)
    state = job.state
    if state is not None and state.phase.is_terminal:
        raise RunNotFoundError(f"run {run!r} has {state.phase.value}: {state.reason}")
    if state is None or not job.live_nodes:
        raise RunNotFoundError(f"no node of run {run!r} is alive: {NOT_JOINED_TEXT}")
    ranks = {node.id: rank for rank, node in enumerate(job.members)}
    nodes = [TargetNode(node.id, node.host, ranks.get(node.id)) for node in job.live_nodes]
    nodes.sort(key=lambda node: (node.rank is None, node.rank or 0))
    return TargetJob(run, state.incarnation, state.generation, tuple(nodes))


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

TTL_MARGIN_S = 5.0  # a request expires so long after its limit, if its client is gone
MIN_PAUSE_S, PAUSE_PER_NODE_S = 0.02, 5e-5  # between listings of answers
LIVENESS_INTERVAL_S = 0.5  # between checks whether missing nodes are still alive
CLEANUP_TIMEOUT_S = 2.0  # to delete what was written, if the store is gone
LEFT_TEXT = "has left the job"


@attrs.frozen
class RequestResult:
    """The answers to a request."""

    request: Request
    nodes: tuple[TargetNode, ...]  # that should answer
    answers: Mapping[str, Answer]  # by node id; also of nodes that have joined meanwhile

    @property
    def missing(self) -> tuple[TargetNode, ...]:
        """The nodes that have not answered, and have not left."""
        return tuple(node for node in self.nodes if node.id not in self.answers)

    @property
    def refused(self) -> tuple[TargetNode, ...]:
        """The nodes that did not accept the signature of the request, or have none themselves."""
        nodes = (node for node in self.nodes if node.id in self.answers)
        return tuple(node for node in nodes if self.answers[node.id].refused)


class RequestClient:
    """Sends requests to one job; leaving the context deletes them and their answers.

    Args:
        store: the store of the job.
        run: id of the job.
        secret: the secret of the job, or None.
        clock: monotonic clock.
    """

    def __init__(
        self, store: Store, run: str, secret: bytes | None = None, *, clock: Clock = monotonic
    ) -> None:
        self._store = store
        self._run = run
        self._keys = RequestKeys(run)
        self._seal = Seal(secret, run)
        self._clock = clock
        self._ids: list[str] = []  # of the requests that were written

    def send(self, request: Request, nodes: Sequence[TargetNode]) -> RequestResult:
        """Send a request, and wait for the answers until its limit.

        A node that leaves the job meanwhile is not waited for: LEFT_TEXT is its answer.

        Args:
            request: the request.
            nodes: the nodes that should answer.

        Raises:
            StoreError: the store cannot be used.
            ConfigError: the request is too long.
        """
        key, content = self._keys.request(request.id), encode_request(request)
        self._ids.append(request.id)
        ttl = request.limit_s + TTL_MARGIN_S
        self._store.set(key, self._seal.sign(key, content), ttl=ttl)
        answers = self._wait_for_answers(request, {node.id: node for node in nodes})
        return RequestResult(request, tuple(nodes), answers)

    def read_body(self, request: Request, node: str) -> bytes | None:
        """Return the body of a node's answer; None if there is no valid one.

        Raises:
            StoreError: the store cannot be used.
        """
        key = self._keys.body(request.id, node)
        entry = self._store.get(key)
        if entry is None:
            return None
        try:
            return self._seal.open(key, entry.value)
        except ValueError as error:
            log.warning("ignoring the invalid body of node %s: %s", node, error)
            return None

    def __enter__(self) -> RequestClient:
        return self

    def __exit__(self, *_: object) -> None:
        # The store may be gone with the node that served it. Then, each call takes a while.
        queue = BackgroundQueue("request-cleanup", lambda _: None)
        queue.call(self._delete_requests_and_answers)
        queue.close(CLEANUP_TIMEOUT_S)

    def _delete_requests_and_answers(self) -> None:
        # If the store is unreachable, the requests expire.
        with contextlib.suppress(StoreError):
            for id in self._ids:
                for entry in self._store.list(self._keys.answer(id)).entries:
                    node = entry.key.rpartition("/")[2]
                    self._store.delete(entry.key)
                    self._store.delete(self._keys.body(id, node))
                # A node that serves the store waits for this before it exits.
                self._store.delete(self._keys.request(id))

    def _wait_for_answers(
        self, request: Request, nodes: Mapping[str, TargetNode]
    ) -> dict[str, Answer]:
        prefix, awaited = self._keys.answer(request.id), set(nodes)
        checked_at = self._clock()
        deadline = checked_at + request.limit_s
        answers: dict[str, Answer] = {}
        left: set[str] = set()
        try:
            while True:
                listing = self._store.list(prefix)
                answers = self._read_answers(prefix, listing.entries)
                now = self._clock()
                is_over = now >= deadline or awaited <= answers.keys()
                if is_over or now - checked_at > LIVENESS_INTERVAL_S:
                    checked_at = now
                    unanswered = awaited - answers.keys()
                    lost = unanswered and unanswered - live_ids_of(self._store, self._run)
                    if lost:
                        # A node may have answered just before it left: read the answers again.
                        awaited, left = awaited - lost, left | lost
                        continue
                if is_over:
                    break
                # Answers that arrive together are read together.
                sleep(MIN_PAUSE_S + PAUSE_PER_NODE_S * len(awaited))
                remaining = min(deadline - self._clock(), LIVENESS_INTERVAL_S)
                self._store.wait(prefix, after=listing.version, timeout=max(remaining, 0.0))
        except StoreError:
            if not answers:
                raise  # Otherwise the job may be over, and its store with it.
        ends = request.kind in (RequestKind.DRAIN, RequestKind.STOP)
        return {**{id: Answer(nodes[id].host, ends, LEFT_TEXT) for id in left}, **answers}

    def _read_answers(self, prefix: str, entries: Iterable[Entry]) -> dict[str, Answer]:
        answers = {}
        for entry in entries:
            with contextlib.suppress(ValueError):
                answers[entry.key.removeprefix(prefix)] = self._read_answer(entry)
        return answers

    def _read_answer(self, entry: Entry) -> Answer:
        """Return an answer. One that is not signed never counts as done."""
        try:
            return decode_answer(self._seal.open(entry.key, entry.value))
        except NotSignedError:
            mac, content = split_value(entry.value)
            answer = decode_answer(content)
            if mac == UNSIGNED and answer.refused:
                return attrs.evolve(answer, done=False)
            text = "its answer is not signed with this secret, and does not count"
            return Answer(answer.host, False, text, refused=True)


# -- responder -------------------------------------------------------------------------------------

MAX_REQUESTS = 16  # read per poll, the oldest first
BODY_TTL_S = 60.0
BUSY_INTERVAL_S = 0.05  # between polls while there are more; bounds the load that they can cause
UNDECIDED_INTERVAL_S = 0.5  # between polls while this node is not part of a request's run yet


@attrs.frozen
class Reply:
    """The answer that a node still has to write."""

    answer: Answer
    body: bytes | None = None
    is_signed: bool = True


class Responder:
    """Reads the requests to one node, and writes its answers. One thread calls the methods.

    Args:
        store: the store of the job.
        run: id of the job.
        node: id of the node.
        host: name of the node in its answers.
        take: receives each valid request once, and has it answered later by `reply`.
        read_incarnation: returns the run that the node takes part in, as its agent knows it; empty
            outside of a generation.
        secret: the secret of the job, or None.
        clock: monotonic clock.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        node: str,
        host: str,
        take: Callable[[Request], object],
        *,
        read_incarnation: Callable[[], str] = lambda: "",
        secret: bytes | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._store = store
        self._run = run
        self._node = node
        self._host = host
        self._take = take
        self._read_incarnation = read_incarnation
        self._has_secret = secret is not None
        self._seal = Seal(secret, run)
        self._clock = clock
        self._keys = RequestKeys(run)
        # By the id of each request that is in the store:
        self._first_read_at: dict[str, float] = {}
        self._settled: dict[str, int] = {}  # the version that was taken, refused or ignored
        self._replies: dict[str, Reply] = {}  # not written yet
        self._replied: set[str] = set()  # this node's answer is in the store

    @property
    def prefix(self) -> str:
        """The prefix of the keys of requests."""
        return self._keys.requests

    def poll(self) -> tuple[int, float | None]:
        """Read the requests, take new ones, and delete the answers to those that are gone.

        Returns:
            The version of the listing; and the seconds until the next poll. None: it is due once
            the requests have changed.

        Raises:
            StoreError: the store cannot be used.
        """
        listing = self._store.list(self.prefix)
        entries = {e.key.removeprefix(self.prefix): e for e in listing.entries}
        self._forget(entries.keys())
        new = [e for id, e in entries.items() if self._settled.get(id) != e.version]
        new.sort(key=lambda entry: entry.version)
        are_settled = [self._read(entry) for entry in new[:MAX_REQUESTS]]
        if len(new) > MAX_REQUESTS:
            return listing.version, BUSY_INTERVAL_S
        return listing.version, None if all(are_settled) else UNDECIDED_INTERVAL_S

    def reply(self, id: str, text: str, *, done: bool, body: bytes | None = None) -> None:
        """Have the request of this id answered by the next `flush`."""
        size = 0 if body is None else len(body)
        self._replies[id] = Reply(Answer(self._host, done, text, size), body)

    def flush(self) -> None:
        """Write the answers that are due.

        Raises:
            StoreError: the store cannot be used. The next call tries again.
        """
        for id, reply in list(self._replies.items()):
            if reply.body is not None:
                key = self._keys.body(id, self._node)
                self._store.set(key, self._seal.sign(key, reply.body), ttl=BODY_TTL_S)
            # The answer wakes the client. It has no lease, because a lease ends with the connection
            # of a node that leaves.
            key, content = self._keys.answer(id, self._node), encode_answer(reply.answer)
            is_signed = reply.is_signed
            value = self._seal.sign(key, content) if is_signed else UNSIGNED + b" " + content
            self._store.set(key, value)
            self._replied.add(id)
            del self._replies[id]

    def wait_until_read(self, deadline: float) -> None:
        """Wait until the operators have read this node's answers, and deleted their requests.

        Args:
            deadline: when to give up, by the clock.

        Raises:
            StoreError: the store cannot be used.
        """
        while self._replied and (left_s := deadline - self._clock()) > 0:
            listing = self._store.list(self.prefix)
            self._replied &= {entry.key.removeprefix(self.prefix) for entry in listing.entries}
            if self._replied:
                self._store.wait(self.prefix, after=listing.version, timeout=left_s)

    def delete_stale_answers(self) -> None:
        """Delete the answers of all nodes to requests that are gone.

        A node that has left with its client cannot delete its own. One node of each generation does
        this when the generation begins.

        Raises:
            StoreError: the store cannot be used.
        """
        answers = self._store.list(self._keys.answers).entries
        current = {
            entry.key.removeprefix(self.prefix) for entry in self._store.list(self.prefix).entries
        }
        for entry in answers:
            id, _, node = entry.key.removeprefix(self._keys.answers).partition("/")
            if id not in current:
                self._store.delete(entry.key)
                self._store.delete(self._keys.body(id, node))

    def _forget(self, current: Iterable[str]) -> None:
        gone = (self._first_read_at.keys() | self._settled.keys() | self._replied) - set(current)
        for id in gone:
            self._first_read_at.pop(id, None)
            self._replies.pop(id, None)
            if id in self._replied:
                self._store.delete(self._keys.answer(id, self._node))
                self._store.delete(self._keys.body(id, self._node))
                self._replied.discard(id)
            self._settled.pop(id, None)

    def _read(self, entry: Entry) -> bool:
        """Take, refuse or ignore a request. Return False if it must be read again later."""
        id = entry.key.removeprefix(self.prefix)
        now = self._clock()
        age_s = now - self._first_read_at.setdefault(id, now)
        try:
            request = decode_request(split_value(entry.value)[1])
            if id != request.id:
                raise ValueError(f"its key {entry.key!r:.100} is not that of its id")
            if request.target not in ("", self._node) or request.run != self._run:
                raise ValueError("it is for another node or another job")
            if not self._has_secret and split_value(entry.value)[0] != UNSIGNED:
                raise NotSignedError("it was signed, and this job has no secret")
            self._seal.open(entry.key, entry.value)
        except NotSignedError as error:
            log.debug("refusing a request: %s", error)
            text = REFUSAL if self._has_secret else NO_SECRET
            answer = Answer(self._host, False, text, refused=True)
            self._replies[id] = Reply(answer, is_signed=False)
        except ValueError as error:
            log.debug("ignoring a request at %s: %s", entry.key, error)
        else:
            is_current, is_part = self._find_run(request)
            if is_current and age_s <= request.limit_s:
                if not is_part:
                    return False
                self._take(request)
        self._settled[id] = entry.version
        return True

    def _find_run(self, request: Request) -> tuple[bool, bool]:
        """Return whether a request is for the present run, and whether this node is part of it.

        A node that starts publishes its record before it takes part in the run.
        """
        known = self._read_incarnation()
        if known:
            return request.incarnation == known, True
        keys = StoreKeys(self._run)
        state, record = self._store.get(keys.state), self._store.get(keys.node(self._node))
        try:
            incarnation = "" if state is None else decode_state(state.value).incarnation
            is_part = state is not None and record is not None
            if is_part and record is not None:
                is_part = decode_node(record.value).inactive_incarnation != incarnation
        except RendezvousConfigError:
            return True, False  # Any client of the store can write it, and it is written again.
        return state is None or request.incarnation == incarnation, is_part


# -- output ----------------------------------------------------------------------------------------


def result_lines(result: RequestResult) -> list[str]:
    """Return one line per node: what it does, or that it has not answered."""
    lines = []
    for node in result.nodes:
        answer = result.answers.get(node.id)
        lines.append(f"{node.label}: {'no response' if answer is None else answer.text}")
    known = {node.id for node in result.nodes}
    # Nodes may have joined since the job was read.
    later = [answer for id, answer in result.answers.items() if id not in known]
    lines += [f"{answer.host}: {answer.text}" for answer in later]
    return [escape_to_one_line(line) for line in lines]


def result_document(result: RequestResult) -> dict[str, Any]:
    """Return the JSON document of a result."""
    ranks = {node.id: node.rank for node in result.nodes}
    answers = [
        {"node": id, "rank": ranks.get(id), **attrs.asdict(answer)}
        for id, answer in result.answers.items()
    ]
    request = result.request
    return {
        "version": VERSION,
        "run": request.run,
        "kind": request.kind.value,
        "by": request.by,
        "answers": answers,
        "missing": [attrs.asdict(node) for node in result.missing],
    }
