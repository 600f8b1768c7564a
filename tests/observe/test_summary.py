"""Summaries that nodes publish in the store: their encoding, when they are written, and reading."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed_jobs import JOB, RUN_ID, write_job

from elasticlib.clock import monotonic
from elasticlib.errors import StoreConnectionError
from elasticlib.launch.observer import NodeObserver
from elasticlib.launch.status_command import JobStatusReader
from elasticlib.observe.aggregate import NodeStatus, WorkerStatus
from elasticlib.observe.history import JobState
from elasticlib.observe.job_status import (
    MAX_NODE_ROWS,
    as_document,
    node_table,
    read_job,
    status_of,
)
from elasticlib.observe.summary import (
    MAX_DETAIL_BYTES,
    MAX_SUMMARY_BYTES,
    REFRESH_INTERVAL_S,
    STATUS_TTL_S,
    STEPS_INTERVAL_S,
    AgedSummary,
    NodeDetail,
    NodeReport,
    NodeSummary,
    StatusKeys,
    StatusReader,
    StatusWriter,
    decode_detail,
    decode_summary,
    detail_of,
    encode_detail,
    encode_summary,
    steps_interval,
    summarize,
)
from elasticlib.rendezvous.membership import Node, NodeRecord
from elasticlib.stores.interface import Entry, Listing, Store
from elasticlib.stores.key_space import KeySpaceLimits as StoreLimits
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing.waiting import wait_until

KEYS = StatusKeys(RUN_ID)
COUNTS = st.integers(0, 10**6)
SECONDS = st.floats(0, 1e6)
WORKERS = st.builds(
    WorkerStatus,
    COUNTS,
    COUNTS,
    st.text(max_size=20),
    st.booleans(),
    st.none() | COUNTS,
    st.none() | SECONDS,
    st.none() | SECONDS,
    st.none() | COUNTS,
)
STATUSES = st.builds(
    NodeStatus,
    st.text(max_size=20),
    st.text(max_size=20),
    state=st.sampled_from(JobState),
    generation=COUNTS,
    node_rank=st.none() | COUNTS,
    reason=st.text(max_size=50),
    expelled=st.booleans(),
    workers=st.lists(WORKERS, max_size=3).map(tuple),
)
REPORTS = st.builds(NodeReport, STATUSES, SECONDS, SECONDS, st.none() | SECONDS, SECONDS)
INVALID = st.sampled_from(
    [None, True, -1, 3, 1e400, "", "x", [], ["x"], [{}], {}, {"1": 2}, {"x": ""}, [[[]]]]
)
NODE = NodeRecord("id0", "h0", "", 1)


def make_summary(**fields: object) -> NodeSummary:
    return attrs.evolve(NodeSummary(JobState.RUNNING), **fields)


@given(REPORTS)
def test_decoding_returns_the_encoded_summary_and_details(report: NodeReport) -> None:
    summary = summarize(report, 1000.0)
    data = encode_summary(summary)
    assert len(data) <= MAX_SUMMARY_BYTES
    decoded = decode_summary(data)
    assert (decoded.state, decoded.step, decoded.checkpoint_step, decoded.first_rank) == (
        *(summary.state, summary.step, summary.checkpoint_step, summary.first_rank),
    )
    assert decoded.state_s == pytest.approx(summary.state_s, abs=0.006)
    assert decode_detail(encode_detail(detail_of(report.status))) == detail_of(report.status)


def test_the_longest_summary_fits_and_loses_only_a_part_of_its_reason() -> None:
    most: dict[str, object] = {
        field.name: 2**63 - 1 if "int" in str(field.type) else 1e17
        for field in attrs.fields(NodeSummary)
        if field.name not in ("state", "reason")
    }
    summary = make_summary(state=JobState.RENDEZVOUS, reason="rank 0 \U0001f600 raised" * 99)
    for one in (summary, attrs.evolve(summary, generation=10**6, step=10**9, last_step=10**9)):
        decoded = decode_summary(encode_summary(one))
        assert decoded.reason.startswith("rank 0 \U0001f600 raised")
    # Even impossible numbers leave a summary that is read or rejected.
    with contextlib.suppress(ValueError):
        decode_summary(encode_summary(attrs.evolve(summary, **most)))


@given(REPORTS, st.data())
def test_a_summary_with_an_invalid_field_is_rejected_or_can_be_shown(
    report: NodeReport, data: st.DataObject
) -> None:
    encoded = encode_summary(summarize(report, 1.0))
    for truncated in (encoded[:-1], data.draw(st.binary(max_size=40))):
        with pytest.raises(ValueError, match="a status must"):
            decode_summary(truncated)
    fields = json.loads(encoded)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(INVALID)
    with contextlib.suppress(ValueError):
        decoded = decode_summary(json.dumps(fields).encode())
        store = MemoryStore()
        write_job(store, (NODE,), ())
        reading = attrs.evolve(
            read_job(store, RUN_ID), summaries={NODE.id: AgedSummary(decoded, 1.0)}
        )
        status = status_of(reading)
        assert status is not None
        assert node_table(status)[1]
        json.dumps(as_document(status))


@given(STATUSES, st.data())
def test_details_with_an_invalid_field_are_rejected_or_valid(
    status: NodeStatus, data: st.DataObject
) -> None:
    fields = json.loads(encode_detail(detail_of(status)))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(INVALID)
    with contextlib.suppress(ValueError):
        decode_detail(json.dumps(fields).encode())


def test_long_values_are_truncated_or_rejected() -> None:
    for decode in (decode_summary, decode_detail):
        with pytest.raises(ValueError, match="must have at most"):
            decode(b"[" * (MAX_DETAIL_BYTES + 1))
    with pytest.raises(ValueError, match="must be a JSON object"):
        decode_detail(b"[" * 70_000)
    worker = WorkerStatus(0, 0, "pid " * 1000, step=7)
    detail = NodeDetail(1, "\0" * 10**6, (worker,) * 10_000)
    # Each text is truncated, but the names of so many workers still exceed the limit.
    with pytest.raises(ValueError, match="details must have at most"):
        decode_detail(encode_detail(detail))
    detail = attrs.evolve(detail, workers=(attrs.evolve(worker, name="pid 1"),) * 10_000)
    data = encode_detail(detail)
    assert len(data) <= MAX_DETAIL_BYTES
    decoded = decode_detail(data)
    assert len(decoded.reason) < 3000
    assert decoded.workers[0].step == 7


@pytest.mark.parametrize("name", ["pid", "blocked_s", "reason"])
def test_a_summary_without_one_of_its_fields_is_rejected(name: str) -> None:
    fields = json.loads(encode_summary(make_summary()))
    del fields[name]
    with pytest.raises(ValueError, match=f"invalid value of the field {name}"):
        decode_summary(json.dumps(fields).encode())


def test_a_summary_of_another_version_is_rejected_with_its_number() -> None:
    fields = json.loads(encode_summary(make_summary()))
    with pytest.raises(ValueError, match="a status must have version 3, got 4: use the version"):
        decode_summary(json.dumps({**fields, "version": 4}).encode())


class RecordingStore(MemoryStore):
    """A store that records its calls, and whose writes can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []
        self.got: list[str] = []
        self.written: list[str] = []
        self.is_unreachable = False
        self.num_failures = 0

    def get(self, key: str) -> Entry | None:
        self.got.append(key)
        return super().get(key)

    def list(self, prefix: str) -> Listing:
        self.listed.append(prefix)
        return super().list(prefix)

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        if self.is_unreachable:
            self.num_failures += 1
            raise StoreConnectionError("the store is unreachable")
        self.written.append(key)
        return super().set(key, value, ttl=ttl)


class SimulatedNode:
    """A node that publishes its status, with a simulated clock, which the test advances."""

    def __init__(self, store: Store, **status: object) -> None:
        self.now = 100.0
        self.status = NodeStatus("job", "id0", "h0", state=JobState.RUNNING, **status)  # type: ignore[arg-type]
        self.writer = StatusWriter(
            store,
            "job",
            "id0",
            lambda: NodeReport.at(self.now, self.status, store_contact_age_seconds=0.5),
        )

    def run_for(self, seconds: float, change: Callable[[], None] = lambda: None) -> None:
        """Write the status when it is due for this time, and call `change` after each time."""
        end = self.now + seconds
        while self.now < end:
            self.now = max(self.now + 0.01, self.writer.write(self.now))
            change()

    def complete_step(self) -> None:
        worker = WorkerStatus(
            0, 0, "pid 1", step=int(self.now), seconds_since_heartbeat=self.now % 1
        )
        self.status = attrs.evolve(self.status, workers=(worker,))


def num_writes(store: RecordingStore) -> int:
    """Return how many summaries were written; each one has its details beside it."""
    summaries = store.written.count(f"{KEYS.summaries}id0")
    assert store.written.count(f"{KEYS.details}id0") == summaries
    return summaries


def test_idle_node_writes_three_times_a_minute_and_lists_nothing() -> None:
    store = RecordingStore()
    SimulatedNode(store).run_for(600.0)
    assert num_writes(store) == pytest.approx(600 / REFRESH_INTERVAL_S, abs=1)
    assert store.listed == []


@pytest.mark.parametrize(
    ("nodes", "every"), [(1, STEPS_INTERVAL_S), (100, 2.0), (1000, 10.0), (10_000, 20.0)]
)
def test_nodes_of_a_job_write_together_at_a_bounded_rate_and_before_a_status_ends(
    nodes: int, every: float
) -> None:
    store = RecordingStore()
    simulated = SimulatedNode(store, node_count=nodes)
    simulated.run_for(600.0, simulated.complete_step)
    assert num_writes(store) == pytest.approx(600 / every, abs=2)


@given(st.integers(1, 10**6))
def test_a_status_lives_for_three_intervals_in_a_job_of_any_size(nodes: int) -> None:
    assert STEPS_INTERVAL_S <= steps_interval(nodes) <= STATUS_TTL_S / 3


def test_new_state_is_written_at_once_and_a_missing_heartbeat_is_not() -> None:
    store = RecordingStore()
    simulated = SimulatedNode(store)
    simulated.complete_step()
    simulated.run_for(2.0)
    before = num_writes(store)
    simulated.status = attrs.evolve(simulated.status, state=JobState.RESTARTING)
    simulated.run_for(0.01)
    assert num_writes(store) == before + 1
    (found,) = StatusReader(store, RUN_ID).read().values()
    assert (found.summary.state, found.summary.contact_s) == (JobState.RESTARTING, 0.5)
    simulated.complete_step()
    simulated.run_for(2.0)
    worker = attrs.evolve(simulated.status.workers[0], seconds_since_heartbeat=9.0)
    simulated.status = attrs.evolve(simulated.status, workers=(worker,))
    before = num_writes(store)
    simulated.run_for(10.0)
    assert num_writes(store) == before


# -- reading ---------------------------------------------------------------------------------------


def write_statuses(store: Store, nodes: tuple[NodeRecord, ...]) -> None:
    """Write the status of each node, with eight workers."""
    for n, node in enumerate(nodes):
        workers = tuple(WorkerStatus(8 * n + k, k, f"pid {k}", step=50 + n % 3) for k in range(8))
        status = NodeStatus("job", node.id, state=JobState.RUNNING, workers=workers)
        summary = summarize(NodeReport(status, 1.0, 2.0), 1e9)
        store.set(f"{KEYS.summaries}{node.id}", encode_summary(summary), ttl=60.0)
        store.set(f"{KEYS.details}{node.id}", encode_detail(detail_of(status)), ttl=60.0)


def test_the_status_of_ten_thousand_nodes_is_read_without_listing_the_job() -> None:
    store = RecordingStore()
    nodes = tuple(NodeRecord(f"id{n:05}", f"host-{n:05}", "", 8) for n in range(10_000))
    membership = write_job(store, nodes, ())
    write_statuses(store, nodes)
    store.listed.clear()
    store.written.clear()
    status = status_of(JobStatusReader(store, RUN_ID).read())
    assert status is not None
    assert (status.state, status.step, len(status.not_reporting)) == (JobState.RUNNING, 50, 0)
    assert (len(status.nodes), status.world_size) == (10_000, 80_000)
    assert [node.rank for node in status.nodes] == [*range(10_000)]
    assert sorted(store.listed) == sorted(
        [JOB.shard(membership.membership_id), JOB.node(), KEYS.summaries]
    )
    assert max(len(encode_summary(n.summary)) for n in status.nodes if n.summary) <= 512
    assert not any(key.startswith(KEYS.details) for key in store.got)
    assert store.written == []
    assert len(node_table(status)[1]) <= MAX_NODE_ROWS
    assert as_document(status)["nodes"][0]["workers"] is None


def test_details_are_read_for_nodes_that_have_a_row_each() -> None:
    store = RecordingStore()
    nodes = tuple(NodeRecord(f"id{n:02}", f"h{n}", "", 8) for n in range(MAX_NODE_ROWS))
    write_job(store, nodes, ())
    write_statuses(store, nodes)
    reading = read_job(store, RUN_ID)
    assert reading.details.keys() == {node.id for node in nodes}
    status = status_of(reading)
    assert status is not None
    assert [len(node.workers or ()) for node in status.nodes] == [8] * MAX_NODE_ROWS


def test_details_of_another_generation_are_not_shown() -> None:
    store = MemoryStore()
    write_job(store, (NODE,), ())
    write_statuses(store, (NODE,))
    older = NodeDetail(-1, "older", (WorkerStatus(0, 0, "pid 1"),))
    store.set(f"{KEYS.details}{NODE.id}", encode_detail(older))
    status = status_of(read_job(store, RUN_ID))
    assert status is not None
    (entry,) = status.nodes
    assert entry.workers == ()
    assert entry.summary is not None
    assert entry.summary.reason != "older"


def test_status_is_deleted_with_its_node_and_never_wakes_the_leader(
    stores: tuple[Store, Store],
) -> None:
    node_store, reader_store = stores
    write_job(reader_store, (NODE,), ())
    version = reader_store.list(JOB.job_prefix).version
    reports = [NodeReport(NodeStatus("job", "id0", state=JobState.RUNNING), 1.0, 2.0)]

    def read_state() -> JobState | None:
        status = status_of(read_job(reader_store, RUN_ID))
        assert status is not None
        return None if status.not_reporting else status.state

    node = Node("id0", "h0", "", 1)
    with NodeObserver(node_store, RUN_ID, node, lambda: reports[-1]) as observer:
        wait_until("its status", lambda: read_state() is JobState.RUNNING)
        draining = NodeStatus("job", "id0", state=JobState.DRAINING)
        reports.append(NodeReport(draining, 0.0, 3.0))
        observer.wake()
        wait_until("its new state", lambda: read_state() is JobState.DRAINING)
    assert not reader_store.wait(JOB.job_prefix, after=version, timeout=0.0)
    node_store.close()
    wait_until("its status to be deleted", lambda: not StatusReader(reader_store, RUN_ID).read())
    assert not reader_store.list(KEYS.details).entries


@pytest.mark.parametrize("skew", [-3600.0, -50.0, 0.0, 50.0, 3600.0])
def test_age_of_a_renewed_status_does_not_depend_on_clocks_of_other_nodes(skew: float) -> None:
    store, now = MemoryStore(), [10_000.0]
    write_job(store, (NODE,), ())
    reader = StatusReader(store, RUN_ID, clock=lambda: now[0])

    def write() -> None:
        data = encode_summary(make_summary(written_at=now[0] + skew))
        store.set(f"{KEYS.summaries}id0", data, ttl=60.0)

    def age() -> float:
        reading = read_job(store, RUN_ID, reader)
        status = status_of(reading)
        assert status is not None
        # The age by clocks is shown, but a node with a valid lease counts as reporting.
        assert (status.not_reporting, status.has_no_reports) == ((), False)
        return reading.summaries["id0"].age_s

    write()
    assert age() == max(0.0, -skew)
    for _ in range(3):
        now[0] += 1.0
        write()
        now[0] += 0.5
        first_age = age()
        assert first_age <= 1.5
        now[0] += 7.0
        assert age() == pytest.approx(first_age + 7.0)


# -- failures of the store -------------------------------------------------------------------------


def observe(store: Store) -> NodeObserver:
    status = NodeStatus("job", "id0", state=JobState.RUNNING)
    node = Node("id0", "h0", "", 1)
    return NodeObserver(store, RUN_ID, node, lambda: NodeReport.at(monotonic(), status))


def test_status_is_published_again_after_failures() -> None:
    store = RecordingStore()
    store.is_unreachable = True
    with observe(store):
        wait_until("a try", lambda: store.num_failures)
        store.is_unreachable = False
        wait_until("the status", lambda: StatusReader(store, RUN_ID).read())


def test_store_that_rejects_the_status_causes_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with observe(MemoryStore(limits=StoreLimits(value_bytes=16))):
        wait_until("a warning", lambda: caplog.records)
    (warning,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert "elasticlib status cannot show this node: a value is at most 16 bytes" in (
        warning.getMessage()
    )
