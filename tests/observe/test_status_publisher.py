"""Statuses that nodes publish in the store: their encoding, when they are written, and reading."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.clock import monotonic, wall
from elasticlib.errors import StoreConnectionError
from elasticlib.observe.aggregate import NodeStatus, WorkerStatus
from elasticlib.observe.history import JobState
from elasticlib.observe.job_status import as_document, node_table, read_job, status_of
from elasticlib.observe.node_status import (
    MAX_STATUS_BYTES,
    REFRESH_INTERVAL_S,
    STEPS_INTERVAL_S,
    NodeReport,
    StatusPublisher,
    StatusReader,
    decode,
    encode,
    observer_prefix,
)
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.membership import Membership, NodeRecord, form_generation
from elasticlib.rendezvous.rank_assignment import shard_members
from elasticlib.rendezvous.store_layout import StoreKeys, encode_shard, encode_state
from elasticlib.rendezvous.store_layout import encode as encode_record
from elasticlib.stores.interface import Entry, Store
from elasticlib.stores.key_space import KeySpaceLimits as StoreLimits
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing.waiting import wait_until

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


def age_at(now: float) -> Callable[[float], float]:
    return lambda written_at: now - written_at


@given(REPORTS)
def test_decoding_returns_the_encoded_status_and_its_age(report: NodeReport) -> None:
    data = encode(report, 1000.0)
    assert decode(data, age_at(1007.5)) == attrs.evolve(report, age_seconds=7.5)
    # The age is never negative, even if the reader's clock is slow.
    assert decode(data, age_at(0.0)) == attrs.evolve(report, age_seconds=0.0)


@given(REPORTS, st.data())
def test_status_with_an_invalid_field_is_rejected_or_can_be_shown(
    report: NodeReport, data: st.DataObject
) -> None:
    encoded = encode(report, 1.0)
    for truncated in (encoded[:-1], data.draw(st.binary(max_size=40))):
        with pytest.raises(ValueError, match="a status must"):
            decode(truncated, age_at(2.0))
    fields = json.loads(encoded)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(INVALID)
    with contextlib.suppress(ValueError):
        decoded = decode(json.dumps(fields).encode(), age_at(2.0))
        reading = attrs.evolve(read_job(MemoryStore(), "job"), alive_nodes=(NODE,))
        status = status_of(attrs.evolve(reading, reports={NODE.id: decoded}))
        assert status is not None
        assert node_table(status)[1]
        json.dumps(as_document(status))


def test_long_status_is_truncated_or_rejected() -> None:
    with pytest.raises(ValueError, match="a status must have at most"):
        decode(b"[" * (MAX_STATUS_BYTES + 1), age_at(0.0))
    with pytest.raises(ValueError, match="must be a JSON object"):
        decode(b"[" * 70_000, age_at(0.0))
    worker = WorkerStatus(0, 0, "pid " * 1000, step=7)
    status = NodeStatus("job", "n", reason="\0" * 10**6, workers=(worker,) * 10_000)
    # Each text is truncated, but the names of so many workers still exceed the limit.
    data = encode(NodeReport(status, 0.0, 0.0), 0.0)
    with pytest.raises(ValueError, match="a status must have at most"):
        decode(data, age_at(0.0))
    status = attrs.evolve(status, workers=(attrs.evolve(worker, name="pid 1"),) * 10_000)
    data = encode(NodeReport(status, 0.0, 0.0), 0.0)
    assert len(data) <= MAX_STATUS_BYTES
    decoded = decode(data, age_at(0.0)).status
    assert len(decoded.reason) < 3000
    assert decoded.workers[0].step == 7


NODE = NodeRecord("id0", "h0", "", 1)


@pytest.mark.parametrize("name", ["run", "expelled", "loop_blocked_seconds"])
def test_status_without_one_of_its_fields_is_rejected(name: str) -> None:
    fields = json.loads(
        encode(NodeReport(NodeStatus("job", "n", checkpoint_step=4), 1.0, 2.0), 0.0)
    )
    del fields[name]
    with pytest.raises(ValueError, match=f"the field {name} is missing"):
        decode(json.dumps(fields).encode(), age_at(0.0))


def test_status_of_another_version_is_rejected_with_its_number() -> None:
    fields = json.loads(encode(NodeReport(NodeStatus("job", "n"), 1.0, 2.0), 0.0))
    with pytest.raises(ValueError, match="a status must have version 2, got 3: use the version"):
        decode(json.dumps({**fields, "version": 3}).encode(), age_at(0.0))


class RecordingStore(MemoryStore):
    """A store that records its listings and writes, and whose writes can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []
        self.written: list[str] = []
        self.is_unreachable = False

    def list(self, prefix: str):  # type: ignore[no-untyped-def]
        self.listed.append(prefix)
        return super().list(prefix)

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        if self.is_unreachable:
            raise StoreConnectionError("the store is unreachable")
        self.written.append(key)
        return super().set(key, value, ttl=ttl)


class SimulatedPublisher:
    """A publisher with a simulated clock, which the test advances."""

    def __init__(self, store: Store, **status: object) -> None:
        self.now = 100.0
        self.status = NodeStatus("job", "id0", "h0", state=JobState.RUNNING, **status)  # type: ignore[arg-type]
        self.publisher = StatusPublisher(
            store,
            "job",
            "id0",
            lambda: NodeReport.at(self.now, self.status, store_contact_age_seconds=0.5),
            clock=lambda: self.now,
        )

    def run_for(self, seconds: float, change: Callable[[], None] = lambda: None) -> None:
        """Poll the publisher for this time, and call `change` after each poll."""
        end = self.now + seconds
        while self.now < end:
            self.now += max(0.01, self.publisher.poll())
            change()

    def complete_step(self) -> None:
        worker = WorkerStatus(
            0, 0, "pid 1", step=int(self.now), seconds_since_heartbeat=self.now % 1
        )
        self.status = attrs.evolve(self.status, workers=(worker,))


def test_idle_node_writes_three_times_a_minute_and_lists_nothing() -> None:
    store = RecordingStore()
    SimulatedPublisher(store).run_for(600.0)
    assert len(store.written) == pytest.approx(600 / REFRESH_INTERVAL_S, abs=1)
    assert store.listed == []


@pytest.mark.parametrize(("nodes", "every"), [(1, STEPS_INTERVAL_S), (100, 2.0), (1000, 10.0)])
def test_nodes_of_a_job_together_write_at_most_a_hundred_times_a_second_during_training(
    nodes: int, every: float
) -> None:
    store = RecordingStore()
    simulated = SimulatedPublisher(store, node_count=nodes)
    simulated.run_for(600.0, simulated.complete_step)
    assert len(store.written) == pytest.approx(600 / every, abs=2)


def test_new_state_is_written_at_once_and_a_missing_heartbeat_is_not() -> None:
    store = RecordingStore()
    simulated = SimulatedPublisher(store)
    simulated.complete_step()
    simulated.run_for(2.0)
    num_writes = len(store.written)
    simulated.status = attrs.evolve(simulated.status, state=JobState.RESTARTING)
    simulated.run_for(0.01)
    assert len(store.written) == num_writes + 1
    (report,) = StatusReader(store, "job").read().values()
    assert (report.status.state, report.store_contact_age_seconds) == (JobState.RESTARTING, 0.5)
    simulated.complete_step()
    simulated.run_for(2.0)
    worker = attrs.evolve(simulated.status.workers[0], seconds_since_heartbeat=9.0)
    simulated.status = attrs.evolve(simulated.status, workers=(worker,))
    num_writes = len(store.written)
    simulated.run_for(10.0)
    assert len(store.written) == num_writes


def write_job(store: Store, nodes: tuple[NodeRecord, ...]) -> None:
    """Write a job whose nodes are all alive."""
    keys = StoreKeys("job")
    document = form_generation(
        Membership(RendezvousSettings(1, len(nodes))), nodes, charged=False, nonce="m"
    )
    for number, rows in shard_members(document).items():
        store.set(keys.shard(document.membership_id, number), encode_shard(rows))
    for node in nodes:
        store.set(keys.node(node.id), encode_record(node), ttl=60.0)
    store.set(keys.state, encode_state(document))


def test_status_of_a_thousand_nodes_is_read_in_one_listing_without_writes() -> None:
    store = RecordingStore()
    nodes = tuple(NodeRecord(f"id{n}", f"h{n}", "", 8) for n in range(1000))
    write_job(store, nodes)
    for n, node in enumerate(nodes):
        workers = tuple(WorkerStatus(8 * n + k, k, f"pid {k}", step=50 + n % 3) for k in range(8))
        status = NodeStatus("job", node.id, state=JobState.RUNNING, workers=workers)
        data = encode(NodeReport(status, 1.0, 2.0), wall())
        store.set(f"{observer_prefix('job', 'status')}{node.id}", data, ttl=60.0)
    store.listed.clear()
    store.written.clear()
    start = monotonic()
    status = status_of(read_job(store, "job"))
    assert monotonic() - start < 20.0
    assert status is not None
    assert (status.state, status.step, len(status.not_reporting)) == (JobState.RUNNING, 50, 0)
    assert [prefix for prefix in store.listed if prefix.startswith("?")] == ["?job/status/"]
    assert store.written == []


def test_status_is_deleted_with_its_node_and_never_wakes_the_leader(
    stores: tuple[Store, Store],
) -> None:
    node_store, reader_store = stores
    write_job(reader_store, (NODE,))
    version = reader_store.list(StoreKeys("job").job_prefix).version
    running = NodeStatus("job", "id0", state=JobState.RUNNING, reason="no failure")
    reports = [NodeReport(running, 1.0, 2.0)]

    def read_state() -> JobState | None:
        status = status_of(read_job(reader_store, "job"))
        assert status is not None
        assert status.state is JobState.RUNNING or not status.not_reporting
        return status.state

    handler = DynamicRendezvousHandler(node_store, "job", NODE, RendezvousSettings(1, 1))
    publisher = StatusPublisher(node_store, "job", "id0", lambda: reports[-1])
    request_poll = handler.add_task(publisher.poll)
    wait_until("its status", lambda: StatusReader(reader_store, "job").read())
    assert read_state() is JobState.RUNNING
    reports.append(NodeReport(attrs.evolve(running, state=JobState.DRAINING), 0.0, 3.0))
    request_poll()
    wait_until("its new state", lambda: read_state() is JobState.DRAINING)
    handler.shutdown()
    assert not reader_store.wait(StoreKeys("job").job_prefix, after=version, timeout=0.0)
    node_store.close()
    wait_until("its status to be deleted", lambda: not StatusReader(reader_store, "job").read())


@pytest.mark.parametrize("skew", [-3600.0, -50.0, 0.0, 50.0, 3600.0])
def test_age_of_a_renewed_status_does_not_depend_on_clocks_of_other_nodes(skew: float) -> None:
    store, now = MemoryStore(), [10_000.0]
    write_job(store, (NODE,))
    reader = StatusReader(store, "job", clock=lambda: now[0])

    def write() -> None:
        data = encode(NodeReport(NodeStatus("job", "id0"), 1.0, 2.0), now[0] + skew)
        store.set(f"{observer_prefix('job', 'status')}id0", data, ttl=60.0)

    def age() -> float | None:
        reading = read_job(store, "job", reader)
        status = status_of(reading)
        assert status is not None
        # The age by clocks is shown, but a node with a valid lease counts as reporting.
        assert (status.not_reporting, status.has_no_reports) == ((), False)
        return reading.reports["id0"].age_seconds

    write()
    assert age() == max(0.0, -skew)
    for _ in range(3):
        now[0] += 1.0
        write()
        now[0] += 0.5
        first_age = age()
        assert first_age is not None
        assert first_age <= 1.5
        now[0] += 7.0
        assert age() == pytest.approx(first_age + 7.0)


def test_status_is_published_again_after_failures() -> None:
    store = RecordingStore()
    simulated = SimulatedPublisher(store)
    store.is_unreachable = True
    simulated.run_for(10.0)
    simulated.status, running = None, simulated.status  # type: ignore[assignment]
    simulated.run_for(10.0)
    assert store.written == []
    store.is_unreachable, simulated.status = False, running
    simulated.run_for(2.0)
    assert len(store.written) == 1


def test_last_status_is_published_just_after_another_one() -> None:
    store = RecordingStore()
    simulated = SimulatedPublisher(store)
    simulated.run_for(0.01)
    simulated.status = attrs.evolve(simulated.status, state=JobState.SUCCEEDED)
    simulated.publisher.publish_last()
    wait_until("its last status", lambda: len(store.written) == 2)
    (report,) = StatusReader(store, "job").read().values()
    assert report.status.state is JobState.SUCCEEDED


def test_store_that_rejects_the_status_causes_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulated = SimulatedPublisher(MemoryStore(limits=StoreLimits(value_bytes=16)))
    simulated.run_for(10.0)
    (warning,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert "elasticlib status cannot show this node: a value is at most 16 bytes" in (
        warning.getMessage()
    )
