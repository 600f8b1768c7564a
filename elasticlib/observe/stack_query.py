"""Python stacks of a job's workers, queried through the store of the job.

`elasticlib stacks` writes a query with a `StackClient`; a `StackResponder` in each agent answers.
Its failures never affect the job. Everyone who can write to the store can query. What is read was
written by other machines: it is checked strictly, and bounded in size.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from ..clock import monotonic
from ..errors import StoreError
from ..rendezvous.membership import NodeRecord
from ..rendezvous.store_layout import JobListing, StoreKeys
from ..sanitize import escape_to_one_line
from ..stores.interface import Entry, Store
from ..untrusted import decompress
from .event import read_versioned_object
from .formatting import format_ranges, format_ranks, group_stacks
from .node_status import observer_prefix, read_field
from .responder import StoreResponder

log = logging.getLogger("elasticlib.observe")

VERSION = 2
MAX_QUERY_BYTES = 64 * 1024
MAX_STACK_LENGTH = 64 * 1024  # of one rank
MAX_STACKS_BYTES = 1024 * 1024  # compressed, of one node; longer stacks are truncated
MAX_UNCOMPRESSED_BYTES = 64 * 1024 * 1024


@attrs.frozen
class StackQuery:
    """A query for the stacks of some ranks."""

    number: int  # counts the queries with one key
    ranks: frozenset[int] | None = None  # None for all


@attrs.frozen
class NodeStacks:
    """Stacks of one node's workers."""

    texts: Mapping[int, str]  # by rank
    unresponsive_ranks: tuple[int, ...] = ()  # returned no stack in time
    unsupported: Mapping[int, str] = attrs.field(factory=dict)  # process names by rank


# -- encoding --------------------------------------------------------------------------------------


def encode_query(query: StackQuery) -> bytes:
    """Return a query as JSON."""
    ranks = None if query.ranks is None else sorted(query.ranks)
    return _dump({"number": query.number, "ranks": ranks})


def decode_query(data: bytes) -> StackQuery:
    """Decode a query.

    Raises:
        ValueError: the data is not a valid query; the error names the field.
    """
    if len(data) > MAX_QUERY_BYTES:
        raise ValueError(f"a query must have at most {MAX_QUERY_BYTES} bytes, got {len(data)}")
    fields = read_versioned_object(data, "a query", VERSION)
    ranks = fields.get("ranks")
    chosen = None if ranks is None else frozenset(_read_ranks(ranks, "ranks of a query"))
    return StackQuery(read_field("number", fields.get("number"), (int,)), chosen)


def encode_stacks(stacks: NodeStacks) -> bytes:
    """Return stacks as compressed JSON, with texts cut so that it has up to MAX_STACKS_BYTES."""
    limit = MAX_STACK_LENGTH
    unsupported = {str(rank): name for rank, name in stacks.unsupported.items()}
    while True:
        texts = {
            str(rank): text if len(text) <= limit else f"{text[:limit]}...\n"
            for rank, text in stacks.texts.items()
        }
        fields = {"texts": texts, "unresponsive_ranks": list(stacks.unresponsive_ranks)}
        packed = zlib.compress(_dump({**fields, "unsupported": unsupported}))
        if len(packed) <= MAX_STACKS_BYTES or limit == 0:
            return packed
        limit //= 2


def decode_stacks(data: bytes) -> NodeStacks:
    """Decode the stacks of a node.

    Raises:
        ValueError: `encode_stacks` cannot have returned the data; the error names the problem.
    """
    try:
        text = decompress(data, MAX_UNCOMPRESSED_BYTES)
    except ValueError as error:
        raise ValueError(f"stacks must be compressed by zlib: {error}") from error
    fields = read_versioned_object(text, "stacks", VERSION)
    unresponsive = _read_ranks(fields.get("unresponsive_ranks"), "unresponsive_ranks")
    texts, unsupported = (_read_texts(fields, name) for name in ("texts", "unsupported"))
    return NodeStacks(texts, unresponsive, unsupported)


def _read_ranks(value: Any, label: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(rank) is int and rank >= 0 for rank in value):
        raise ValueError(f"{label} must be a list of integers >= 0, got {value!r:.60}")
    return tuple(value)


def _read_texts(fields: Mapping[str, Any], name: str) -> dict[int, str]:
    value = fields.get(name)
    if not isinstance(value, dict) or not all(
        key.isascii() and key.isdigit() and len(key) < 10 and isinstance(text, str)
        for key, text in value.items()
    ):
        raise ValueError(f"{name} of stacks must be texts by rank, got {value!r:.60}")
    return {int(key): text for key, text in value.items()}


def _dump(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **fields}, separators=(",", ":")).encode()


# -- client ----------------------------------------------------------------------------------------

QUERY_TTL_MARGIN_S = 5.0  # a query expires so long after its timeout, if its client is gone
MIN_PAUSE_S, PAUSE_PER_NODE_S = 0.02, 5e-5  # between listings of answers
LIVENESS_INTERVAL_S = 0.5  # between checks whether missing nodes are still alive


class StackKeys:
    """Prefixes of the keys of a job's queries and answers."""

    def __init__(self, run_id: str) -> None:
        self.queries = observer_prefix(run_id, "stack_query")
        self.answers = observer_prefix(run_id, "stack_answer")
        self.texts = observer_prefix(run_id, "stack_text")


@attrs.frozen
class JobStacks:
    """Stacks of the nodes of a job."""

    alive_nodes: tuple[NodeRecord, ...]  # that were queried
    stacks: Mapping[str, NodeStacks]  # of nodes that answered, by node id


class StackClient:
    """Queries the stacks of one job repeatedly; leaving the context deletes the last query."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._job = StoreKeys(run_id)
        self._keys = StackKeys(run_id)
        self._id = secrets.token_hex(8)
        self._query_key = f"{self._keys.queries}{self._id}"
        self._number = 0  # of the last query
        self._pause = threading.Event()  # never set; allows to wait

    def query(self, timeout: float, ranks: frozenset[int] | None = None) -> JobStacks:
        """Return the stacks that arrive before the timeout, or until all live nodes have answered.

        Args:
            timeout: seconds to wait.
            ranks: ranks to query; None for all.

        Raises:
            StoreError: the store cannot be used.
        """
        alive = JobListing(self._job, self._store.list(self._job.node())).live_nodes()
        if not alive:
            return JobStacks(alive, {})
        self._number += 1
        value = encode_query(StackQuery(self._number, ranks))
        self._store.set(self._query_key, value, ttl=timeout + QUERY_TTL_MARGIN_S)
        answered = self._wait_for_answers({node.id for node in alive}, timeout)
        return JobStacks(alive, self._read_stacks(answered))

    def __enter__(self) -> StackClient:
        return self

    def __exit__(self, *_: object) -> None:
        # If the store is unreachable, the query expires.
        with contextlib.suppress(StoreError):
            if self._number:
                self._store.delete(self._query_key)

    def _wait_for_answers(self, awaited: set[str], timeout: float) -> set[str]:
        prefix = f"{self._keys.answers}{self._id}/"
        deadline = monotonic() + timeout
        checked_at = monotonic()
        while True:
            listing = self._store.list(prefix)
            current = (entry for entry in listing.entries if self._is_current(entry))
            answered = {entry.key.removeprefix(prefix) for entry in current}
            now = monotonic()
            if now - checked_at > LIVENESS_INTERVAL_S:
                alive = self._store.list(self._job.node()).entries
                awaited &= {entry.key.removeprefix(self._job.node()) for entry in alive}
                checked_at = now
            if now >= deadline or awaited <= answered:
                return answered
            # Answers that arrive together are read together.
            self._pause.wait(MIN_PAUSE_S + PAUSE_PER_NODE_S * len(awaited))
            remaining = min(deadline - monotonic(), LIVENESS_INTERVAL_S)
            self._store.wait(prefix, after=listing.version, timeout=max(remaining, 0.0))

    def _is_current(self, entry: Entry) -> bool:
        try:
            fields = read_versioned_object(entry.value, "an answer", VERSION)
        except ValueError as error:
            log.warning("ignoring the invalid answer of a node at %s: %s", entry.key, error)
            return False
        return bool(fields.get("number") == self._number)

    def _read_stacks(self, nodes: Iterable[str]) -> dict[str, NodeStacks]:
        stacks = {}
        for node in nodes:  # one at a time, because all together can exceed a response
            entry = self._store.get(f"{self._keys.texts}{self._id}/{node}")
            if entry is None:
                continue
            try:
                stacks[node] = decode_stacks(entry.value)
            except ValueError as error:
                log.warning("ignoring the invalid stacks of node %s: %s", node, error)
        return stacks


# -- responder -------------------------------------------------------------------------------------

ANSWER_TTL_S = 30.0
MAX_QUERIES = 16  # answered per poll
MAX_ID_LENGTH = 64


class StackResponder(StoreResponder):
    """Answers queries on one node.

    Args:
        store: the store of the job.
        run_id: id of the job.
        node_id: id of the node.
        read_stacks: returns the stacks of some ranks or of all; can take some seconds.
        poll_interval: seconds between two listings of the requests; 0 to call `Store.wait`.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node_id: str,
        read_stacks: Callable[[frozenset[int] | None], NodeStacks],
        *,
        poll_interval: float = 0.0,
    ) -> None:
        self._keys = StackKeys(run_id)
        super().__init__(
            "stack-responder",
            store,
            self._keys.queries,
            "elasticlib stacks gets no answer from this node",
            poll_interval=poll_interval,
        )
        self._node_id = node_id
        self._read_stacks = read_stacks
        self._answered: dict[str, int] = {}  # version of each query that was answered

    def answer_all(self, entries: Iterable[Entry]) -> bool:
        """Answer new queries, and delete answers to deleted ones. Return True if one was new."""
        queries = {entry.key: entry for entry in entries}
        for key in self._answered.keys() - queries.keys():
            del self._answered[key]
            for prefix in (self._keys.answers, self._keys.texts):
                self._store.delete(self._answer_key(prefix, key))
        new = [q for q in queries.values() if self._answered.get(q.key) != q.version]
        for entry in sorted(new, key=lambda entry: entry.version)[-MAX_QUERIES:]:
            self._answered[entry.key] = entry.version
            self._answer(entry)
        return bool(new)

    def _answer(self, entry: Entry) -> None:
        try:
            query = decode_query(entry.value)
            if len(entry.key) > len(self._keys.queries) + MAX_ID_LENGTH:
                raise ValueError(f"its key is too long: {entry.key:.100}")
        except ValueError as error:
            log.debug("ignoring an invalid stack query: %s", error)
            return
        stacks = encode_stacks(self._read_stacks(query.ranks))
        answer = _dump({"number": query.number})
        # The answer wakes the client, which then reads the stacks.
        for prefix, value in ((self._keys.texts, stacks), (self._keys.answers, answer)):
            self._store.set(self._answer_key(prefix, entry.key), value, ttl=ANSWER_TTL_S)

    def _answer_key(self, prefix: str, query_key: str) -> str:
        return f"{prefix}{query_key.removeprefix(self._keys.queries)}/{self._node_id}"


# -- text ------------------------------------------------------------------------------------------


def stack_lines(job: JobStacks, ranks: frozenset[int] | None) -> list[str]:
    """Return the stacks as text, equal stacks once, then the ranks and nodes without a stack.

    Args:
        job: the stacks of the job.
        ranks: the ranks that were queried.
    """
    nodes = job.stacks.values()
    texts = {rank: text for node in nodes for rank, text in node.texts.items()}
    lines: list[str] = []
    for group in group_stacks(texts):
        lines += [f"{format_ranks(group.ranks)}:"]
        lines += [f"  {line}" if line else "" for line in group.text.splitlines()] + [""]
    lines += _missing_lines(job)
    without = {rank for node in nodes for rank in (*node.unresponsive_ranks, *node.unsupported)}
    if ranks is not None and (unknown := ranks - texts.keys() - without):
        lines.append(f"no node that answered has a worker of rank {format_ranges(unknown)}")
    return [escape_to_one_line(line) for line in lines]


def _missing_lines(job: JobStacks) -> list[str]:
    lines = []
    hosts = {node.id: node.host for node in job.alive_nodes}
    for node_id, node in job.stacks.items():
        host = hosts.get(node_id, node_id)
        if node.unresponsive_ranks:
            lines.append(
                f"{host}: {format_ranks(node.unresponsive_ranks)} returned no stack within 1 s: "
                "the process is stopped, blocks or handles the signal, or gets no CPU time"
            )
        if node.unsupported:
            names = ", ".join(node.unsupported.values())
            lines.append(
                f"{host}: {format_ranks(node.unsupported)} ({names}) is not a Python process "
                "started by elasticlib, so no stack is available; try "
                f'"py-spy dump --pid PID" on {host}'
            )
    missing = (host for node_id, host in hosts.items() if node_id not in job.stacks)
    return [*lines, *(f"{host}: no response" for host in missing)]
