"""The copy of a job that a node keeps during a turn is what a listing would show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from stepwise_cluster import KEYS, RUN_ID, CountingStore

from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.interface import Joined, Report, ReportKind
from elasticlib.rendezvous.job_store import JobStore
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.node import JoinRequest, NodeRequest, RendezvousNode, StoreServed
from elasticlib.stores.interface import ABSENT
from elasticlib.stores.memory_store import MemoryStore

PREFIX = "job/"
NAMES = st.sampled_from(("job/a", "job/b", "job/c", "other"))
OPERATIONS = st.sampled_from(("set", "lease", "compare_set", "delete", "list", "refresh"))


@given(st.lists(st.tuples(st.booleans(), OPERATIONS, NAMES), max_size=30))
def test_a_copy_is_what_a_listing_would_show(operations: list[tuple[bool, str, str]]) -> None:
    with MemoryStore() as store, store.client() as other:
        job = JobStore(store, 100.0)
        for number, (is_own, operation, key) in enumerate(operations):
            value, entry = str(number).encode(), store.get(key)
            version = ABSENT if entry is None else entry.version
            if not is_own:
                if operation == "delete":
                    other.delete(key)
                else:
                    other.set(key, value)
                continue
            if operation in ("set", "lease"):
                job.set(key, value, is_leased=operation == "lease")
            elif operation == "compare_set":
                job.compare_set(key, value, expected=version)
            elif operation == "delete":
                job.delete(key)
            elif operation == "list":
                job.list(PREFIX)
            else:
                job.refresh(key)
                continue
            copy = job.copy(PREFIX)
            assert copy in (None, store.list(PREFIX))
            assert copy is not None or operation != "list"


def test_a_node_that_nobody_interrupts_lists_the_job_once_for_several_writes() -> None:
    with MemoryStore() as store, store.client() as other:
        job = JobStore(store, 100.0)
        job.list(PREFIX)
        job.set("job/a", b"1", is_leased=True)
        job.set("elsewhere", b"")
        assert job.compare_set("job/b", b"2", expected=ABSENT) is not None
        copy = job.copy(PREFIX)
        assert copy is not None
        assert [entry.key for entry in copy.entries] == ["job/a", "job/b"]
        other.set("elsewhere", b"")
        job.set("job/c", b"3")
        assert job.copy(PREFIX) is None


def test_a_restart_on_one_node_takes_few_operations() -> None:
    with MemoryStore(clock=lambda: 0.0) as memory:
        store, now = CountingStore(memory), 0.0
        record = Node(id="n0-1", host="n0", address="127.0.0.1", slots=1)
        settings = RendezvousSettings(1, 1, max_restarts=10)
        node = RendezvousNode(store, RUN_ID, record, settings, RendezvousTimeouts())

        def join(attempt: int, *requests: NodeRequest) -> None:
            nonlocal now
            waiting: list[NodeRequest] = [*requests, JoinRequest(attempt)]
            for _ in range(10):
                now += 0.1
                reports, _ = node.turn(now, waiting)
                waiting = [StoreServed("127.0.0.1:1")]
                if any(isinstance(report, Joined) for report in reports):
                    return
            raise AssertionError("the node has not joined within ten turns")

        join(1)
        store.reset_counts()
        join(2, Report(ReportKind.FAILURE, "the worker failed"))
    # Record, details and the end of the generation; then shard, state and endpoint.
    assert store.calls["set"] + store.calls["compare_set"] <= 9
    assert store.listed == {KEYS.job_prefix: 2}  # one for each turn that writes
    assert not store.got
