"""The root cause of a failure of a job: message size, the order of reports, and time limits."""

from __future__ import annotations

import threading

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from single_worker_agent import OneWorker, SingleNodeHandler, running

from elasticlib import MemoryStore, Node, Store
from elasticlib.agent.interface import RootCause
from elasticlib.agent.run_reporter import (
    merge_root_cause,
    publish_failed_ranks,
    publish_root_cause,
    root_cause_of,
)
from elasticlib.errors import RendezvousClosedError, RendezvousTimeoutError
from elasticlib.rendezvous.blame import FailureKind
from elasticlib.rendezvous.interface import Change, ChangeKind, RendezvousInfo, assign_ranks
from elasticlib.rendezvous.store_layout import JobListing, StoreKeys
from elasticlib.stores.interface import CompareSetResult, Listing
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.spec import WorkerState

NODES = tuple(Node(f"n{i}", f"n{i}", "127.0.0.1", 1) for i in range(2))
PREFIX = "run/board/1.a/"
RAISED = FailureKind.RAISED


def encode(cause: RootCause) -> bytes:
    return publish_root_cause(cause, RAISED).value


def decode(data: bytes) -> RootCause | None:
    return merge_root_cause({"first/raised": data})


def create_exit(rank: int, message: str = "") -> WorkerExit:
    return WorkerExit(0, rank, 70 + rank, 1, message=message, traceback=f"Traceback\n{message}")


@given(st.text(max_size=50))
def test_a_root_cause_is_decoded_as_it_was_encoded(text: str) -> None:
    cause = root_cause_of(create_exit(1, text), "host", 3)
    assert decode(encode(cause)) == cause


def test_an_encoded_root_cause_is_bounded_and_keeps_the_end_of_the_traceback() -> None:
    huge = attrs.evolve(create_exit(1, "é" * 10**6 + " the end"), stderr_tail="y\n" * 10**6)
    published = encode(root_cause_of(huge, "h", 1))
    assert len(published) < 128 * 1024
    messages = decode(published)
    assert messages is not None
    assert messages.traceback.endswith("the end")
    assert messages.traceback.startswith("Traceback")


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[]", b"{}", b"\xff", b'{"host": "h"}', b'{"subsequent_ranks": 3}', b"null"),
        *(b"[" * 200_000, b"9" * 9_000),
        encode(root_cause_of(WorkerExit(0, 0, 1, 1), "h", 1)).replace(
            b'"stderr_tail":""', b'"stderr_tail":5'
        ),
        encode(root_cause_of(WorkerExit(0, 0, 1, 1), "h", 1)).replace(b"{", b'{"new":1,'),
    ],
)
def test_a_message_that_is_no_root_cause_is_ignored(data: bytes) -> None:
    assert decode(data) is None
    first = encode(root_cause_of(create_exit(1), "h", 1))
    assert merge_root_cause({"first/raised": first, "also/0": data}) == decode(first)


def test_subsequent_failures_are_listed_without_the_root_cause() -> None:
    messages = {"first/raised": encode(root_cause_of(create_exit(1, "no"), "h", 1))}
    messages |= {
        "also/0": publish_failed_ranks(0, [4, 1]).value,
        "also/2": publish_failed_ranks(2, [2]).value,
    }
    cause = merge_root_cause(messages)
    assert cause is not None
    assert (cause.rank, cause.subsequent_ranks) == (1, (2, 4))
    assert len(publish_failed_ranks(0, range(10**6)).value) < 1000


def test_messages_of_earlier_generations_are_deleted_with_their_keys() -> None:
    store, keys = MemoryStore(), StoreKeys("run")
    for membership in ("1.a", "2.b"):
        store.set(f"{keys.exchange_prefix(membership)}first", b"")
    stale = JobListing(keys, store.list(keys.job_prefix)).stale_keys("2.b")
    assert stale == (f"{keys.exchange_prefix('1.a')}first",)


class SecondNodeHandler(SingleNodeHandler):
    """The second of two nodes. The job fails when the worker of either node has failed."""

    def __init__(self, store: Store, failed: str = "n0") -> None:
        super().__init__()
        self.store, self.has_failed, self.failed = store, threading.Event(), failed

    def next_rendezvous(self) -> RendezvousInfo:
        change = self.wait_for_change(0.0)
        if change is not None:
            error = RendezvousClosedError(change.reason)
            error.change = change  # type: ignore[attr-defined]
            raise error
        assignment = assign_ranks(NODES)[1]
        return attrs.evolve(
            super().next_rendezvous(),
            assignment=assignment,
            store=self.store,
            exchange_prefix=PREFIX,
        )

    def report_failure(self, reason: str, **evidence: object) -> bool:
        del reason, evidence
        self.has_failed.set()
        return True

    def wait_for_change(self, timeout: float) -> Change | None:
        if self.has_failed.wait(timeout):
            return Change(ChangeKind.FAILED, "a worker has failed", self.failed)
        return None


class WorkerOfRankOne(OneWorker):
    """The worker of the second node."""

    def reap(self, local_rank: int) -> WorkerExit:
        return attrs.evolve(super().reap(local_rank), rank=1)


def test_the_first_published_failure_is_the_root_cause_and_later_ones_are_subsequent() -> None:
    workers, store = WorkerOfRankOne(), MemoryStore()
    with running(workers, SecondNodeHandler(store)) as run:
        published = encode(root_cause_of(create_exit(0, "the cause"), "n0", 1))
        store.set(f"{PREFIX}cause/first/raised", published)
        workers.finish(7)
        cause = run.result().root_cause
    assert cause is not None
    assert (cause.host, cause.rank, cause.message) == ("n0", 0, "the cause")
    assert cause.subsequent_ranks == (1,)
    entry = store.get(f"{PREFIX}cause/first/raised")
    assert entry is not None
    assert entry.value == published


def test_the_node_that_failed_first_publishes_the_root_cause() -> None:
    workers, store = WorkerOfRankOne(), MemoryStore()
    with running(workers, SecondNodeHandler(store, failed="n1")) as run:
        workers.finish(7)
        cause = run.result().root_cause
    entry = store.get(f"{PREFIX}cause/first/raised")
    assert entry is not None
    assert cause is not None
    assert (decode(entry.value), cause.rank, cause.returncode) == (cause, 1, 7)


class StoreThatReportsListing(MemoryStore):
    """A store that sets an event when the messages about a failure are listed."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = threading.Event()

    def list(self, prefix: str) -> Listing:
        listing = super().list(prefix)
        if prefix.endswith("cause/"):
            self.listed.set()
        return listing


def test_a_node_waits_for_the_root_cause_of_the_failed_node() -> None:
    workers, store = WorkerOfRankOne(), StoreThatReportsListing()
    handler = SecondNodeHandler(store)
    with running(workers, handler) as run:
        handler.has_failed.set()
        assert store.listed.wait(30)
        store.set(
            f"{PREFIX}cause/first/raised", encode(root_cause_of(create_exit(0, "late"), "n0", 1))
        )
        cause = run.result().root_cause
    assert cause is not None
    assert cause.message == "late"


class HandlerThatLosesPeer(SingleNodeHandler):
    """A handler whose peer is lost. The worker fails because of it, and no other node joins."""

    def next_rendezvous(self) -> RendezvousInfo:
        if self.generation:
            error = RendezvousTimeoutError("1 of at least 2 nodes are here; n1 was lost")
            error.is_node_loss = True
            raise error
        return super().next_rendezvous()

    def report_failure(self, reason: str, **evidence: object) -> bool:
        del reason, evidence
        return True


def test_a_worker_that_failed_because_a_node_was_lost_is_not_the_root_cause() -> None:
    workers = OneWorker()
    with running(workers, HandlerThatLosesPeer(restarts=0, max_restarts=3)) as run:
        workers.finish(7)
        result = run.result()
    assert (result.state, result.root_cause) == (WorkerState.FAILED, None)
    assert result.reason == "1 of at least 2 nodes are here; n1 was lost"
    assert result.failures[0].returncode == 7


class HangingStore(MemoryStore):
    """A store that does not answer until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = threading.Event()

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        self.answer.wait(30)
        return super().compare_set(key, value, expected=expected, ttl=ttl)


def test_a_node_reports_its_own_failure_if_the_store_hangs() -> None:
    workers, store = WorkerOfRankOne(), HangingStore()
    with running(workers, SecondNodeHandler(store)) as run:
        workers.finish(7)
        cause = run.result().root_cause
        assert not store.answer.is_set()
        store.answer.set()
    assert cause is not None
    assert (cause.rank, cause.returncode) == (1, 7)
