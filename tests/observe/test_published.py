"""Statuses that nodes publish: read back as they were, and nothing else is read; written when there
is something to say, and seldom; and of a thousand nodes read in one listing."""

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
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.membership import (
    Membership,
    NodeRecord,
    RendezvousSettings,
    form_generation,
)
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
PUBLISHED = st.builds(NodeReport, STATUSES, SECONDS, SECONDS, st.none() | SECONDS, SECONDS)
WRONG = st.sampled_from(
    [None, True, -1, 3, 1e400, "", "x", [], ["x"], [{}], {}, {"1": 2}, {"x": ""}, [[[]]]]
)


def since(now: float) -> Callable[[float], float]:
    return lambda written: now - written


@given(PUBLISHED)
def test_a_status_is_read_as_it_was_written_with_its_age(published: NodeReport) -> None:
    data = encode(published, 1000.0)
    assert decode(data, since(1007.5)) == attrs.evolve(published, age_seconds=7.5)
    # A clock that is behind makes nothing younger than now.
    assert decode(data, since(0.0)) == attrs.evolve(published, age_seconds=0.0)


@given(PUBLISHED, st.data())
def test_what_is_not_whole_is_refused_and_nothing_else_happens(
    published: NodeReport, data: st.DataObject
) -> None:
    whole = encode(published, 1.0)
    said = json.loads(whole)
    said[data.draw(st.sampled_from(sorted(said)))] = data.draw(WRONG)
    for wrong in (data.draw(st.binary(max_size=40)), json.dumps(said).encode(), whole[:-1]):
        with contextlib.suppress(ValueError):
            found = decode(wrong, since(2.0))
            # Whatever was accepted can be shown.
            view = attrs.evolve(read_job(MemoryStore(), "job"), alive_nodes=(NODE,))
            status = status_of(attrs.evolve(view, reports={NODE.id: found}))
            assert status is not None
            assert node_table(status)[1]
            json.dumps(as_document(status))


def test_what_would_fill_the_memory_or_the_screen_is_cut_or_refused() -> None:
    with pytest.raises(ValueError, match="a status must have at most"):
        decode(b"[" * (MAX_STATUS_BYTES + 1), since(0.0))
    with pytest.raises(ValueError, match="must be a JSON object"):
        decode(b"[" * 70_000, since(0.0))
    worker = WorkerStatus(0, 0, "pid " * 1000, step=7)
    status = NodeStatus("job", "n", reason="\0" * 10**6, workers=(worker,) * 10_000)
    data = encode(NodeReport(status, 0.0, 0.0), 0.0)
    with contextlib.suppress(ValueError):
        decode(data, since(0.0))
    one = attrs.evolve(status, workers=(attrs.evolve(worker, name="pid 1"),) * 10_000)
    data = encode(NodeReport(one, 0.0, 0.0), 0.0)
    assert len(data) <= MAX_STATUS_BYTES
    found = decode(data, since(0.0)).status
    assert len(found.reason) < 3000
    assert found.workers[0].step == 7


NODE = NodeRecord("id0", "h0", "", 1)


@pytest.mark.parametrize("name", ["run", "expelled", "loop_blocked_seconds"])
def test_a_status_without_one_of_its_fields_is_rejected(name: str) -> None:
    said = json.loads(encode(NodeReport(NodeStatus("job", "n", checkpoint_step=4), 1.0, 2.0), 0.0))
    del said[name]
    with pytest.raises(ValueError, match=f"the field {name} is missing"):
        decode(json.dumps(said).encode(), since(0.0))


def test_a_status_of_another_version_is_rejected_with_its_number() -> None:
    said = json.loads(encode(NodeReport(NodeStatus("job", "n"), 1.0, 2.0), 0.0))
    with pytest.raises(ValueError, match="a status must have version 2, got 3: use the version"):
        decode(json.dumps({**said, "version": 3}).encode(), since(0.0))


class Counted(MemoryStore):
    """Counts the calls that cost a client an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []
        self.written: list[str] = []
        self.away = False

    def list(self, prefix: str):  # type: ignore[no-untyped-def]
        self.listed.append(prefix)
        return super().list(prefix)

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        if self.away:
            raise StoreConnectionError("the store is away")
        self.written.append(key)
        return super().set(key, value, ttl=ttl)


class Publishing:
    """A publisher that is turned by hand, on a clock of its own."""

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

    def turn_for(self, seconds: float, change: Callable[[], None] = lambda: None) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += max(0.01, self.publisher.poll())
            change()

    def steps(self) -> None:
        worker = WorkerStatus(
            0, 0, "pid 1", step=int(self.now), seconds_since_heartbeat=self.now % 1
        )
        self.status = attrs.evolve(self.status, workers=(worker,))


def test_at_rest_a_node_writes_three_times_a_minute_and_reads_nothing() -> None:
    store = Counted()
    Publishing(store).turn_for(600.0)
    assert len(store.written) == pytest.approx(600 / REFRESH_INTERVAL_S, abs=1)
    assert store.listed == []


@pytest.mark.parametrize(("nodes", "every"), [(1, STEPS_INTERVAL_S), (100, 2.0), (1000, 10.0)])
def test_while_steps_are_made_all_nodes_together_write_a_hundred_times_a_second_at_most(
    nodes: int, every: float
) -> None:
    store = Counted()
    one = Publishing(store, node_count=nodes)
    one.turn_for(600.0, one.steps)
    assert len(store.written) == pytest.approx(600 / every, abs=2)


def test_another_state_is_written_at_once_and_a_silence_alone_is_nothing_new() -> None:
    store = Counted()
    one = Publishing(store)
    one.steps()
    one.turn_for(2.0)
    before = len(store.written)
    one.status = attrs.evolve(one.status, state=JobState.RESTARTING)
    one.turn_for(0.01)
    assert len(store.written) == before + 1
    (found,) = StatusReader(store, "job").read().values()
    assert (found.status.state, found.store_contact_age_seconds) == (JobState.RESTARTING, 0.5)
    one.steps()
    one.turn_for(2.0)
    worker = attrs.evolve(one.status.workers[0], seconds_since_heartbeat=9.0)
    one.status = attrs.evolve(one.status, workers=(worker,))
    before = len(store.written)
    one.turn_for(10.0)
    assert len(store.written) == before


def settled(store: Store, nodes: tuple[NodeRecord, ...]) -> None:
    """A job of which all nodes live."""
    keys = StoreKeys("job")
    document = form_generation(
        Membership(RendezvousSettings(1, len(nodes))), nodes, charged=False, nonce="m"
    )
    for number, rows in shard_members(document).items():
        store.set(keys.shard(document.membership_id, number), encode_shard(rows))
    for node in nodes:
        store.set(keys.node(node.id), encode_record(node), ttl=60.0)
    store.set(keys.state, encode_state(document))


def test_a_thousand_nodes_are_read_in_one_listing_and_none_is_asked() -> None:
    store = Counted()
    nodes = tuple(NodeRecord(f"id{n}", f"h{n}", "", 8) for n in range(1000))
    settled(store, nodes)
    for n, node in enumerate(nodes):
        workers = tuple(WorkerStatus(8 * n + k, k, f"pid {k}", step=50 + n % 3) for k in range(8))
        status = NodeStatus("job", node.id, state=JobState.RUNNING, workers=workers)
        data = encode(NodeReport(status, 1.0, 2.0), wall())
        store.set(f"{observer_prefix('job', 'status')}{node.id}", data, ttl=60.0)
    store.listed.clear()
    store.written.clear()
    began = monotonic()
    status = status_of(read_job(store, "job"))
    assert monotonic() - began < 20.0
    assert status is not None
    assert (status.state, status.step, len(status.not_reporting)) == (JobState.RUNNING, 50, 0)
    assert [prefix for prefix in store.listed if prefix.startswith("?")] == ["?job/status/"]
    assert store.written == []


def test_a_status_goes_with_its_node_and_wakes_no_node_that_leads(
    stores: tuple[Store, Store],
) -> None:
    theirs, ours = stores
    settled(ours, (NODE,))
    version = ours.list(StoreKeys("job").job_prefix).version
    running = NodeStatus("job", "id0", state=JobState.RUNNING, reason="it goes on")
    now = [NodeReport(running, 1.0, 2.0)]

    def state() -> JobState | None:
        found = status_of(read_job(ours, "job"))
        assert found is not None
        assert found.state is JobState.RUNNING or not found.not_reporting
        return found.state

    handler = DynamicRendezvousHandler(theirs, "job", NODE, RendezvousSettings(1, 1))
    request = handler.add_task(StatusPublisher(theirs, "job", "id0", lambda: now[0]).poll)
    wait_until("its status", lambda: StatusReader(ours, "job").read())
    assert state() is JobState.RUNNING
    now[0] = NodeReport(attrs.evolve(running, state=JobState.DRAINING), 0.0, 3.0)
    request()
    wait_until("its new state", lambda: state() is JobState.DRAINING)
    handler.shutdown()
    assert not ours.wait(StoreKeys("job").job_prefix, after=version, timeout=0.0)
    theirs.close()
    wait_until("its status to be gone", lambda: not StatusReader(ours, "job").read())


@pytest.mark.parametrize("skew", [-3600.0, -50.0, 0.0, 50.0, 3600.0])
def test_who_has_seen_a_status_change_needs_no_clock_of_another_machine(skew: float) -> None:
    store, now = MemoryStore(), [10_000.0]
    settled(store, (NODE,))
    reader = StatusReader(store, "job", clock=lambda: now[0])

    def write() -> None:
        data = encode(NodeReport(NodeStatus("job", "id0"), 1.0, 2.0), now[0] + skew)
        store.set(f"{observer_prefix('job', 'status')}id0", data, ttl=60.0)

    def age() -> float | None:
        view = read_job(store, "job", reader)
        status = status_of(view)
        assert status is not None
        # What clocks say alone is shown, and is no verdict where the node's lease stands.
        assert (status.not_reporting, status.has_no_reports) == ((), False)
        return view.reports["id0"].age_seconds

    write()
    assert age() == max(0.0, -skew)
    for _ in range(3):
        now[0] += 1.0
        write()
        now[0] += 0.5
        found = age()
        assert found is not None
        assert found <= 1.5
        now[0] += 7.0
        assert age() == pytest.approx(found + 7.0)


def test_a_status_is_published_again_after_failures() -> None:
    store = Counted()
    one = Publishing(store)
    store.away = True
    one.turn_for(10.0)
    one.status, running = None, one.status  # type: ignore[assignment]
    one.turn_for(10.0)
    assert store.written == []
    store.away, one.status = False, running
    one.turn_for(2.0)
    assert len(store.written) == 1


def test_the_last_status_is_published_although_another_was_written_just_before() -> None:
    store = Counted()
    one = Publishing(store)
    one.turn_for(0.01)
    one.status = attrs.evolve(one.status, state=JobState.SUCCEEDED)
    one.publisher.publish_last()
    wait_until("its last status", lambda: len(store.written) == 2)
    (found,) = StatusReader(store, "job").read().values()
    assert found.status.state is JobState.SUCCEEDED


def test_store_that_rejects_the_status_of_a_node_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Publishing(MemoryStore(limits=StoreLimits(value_bytes=16)))
    one.turn_for(10.0)
    (warning,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert "elasticlib status cannot show this node: a value is at most 16 bytes" in (
        warning.getMessage()
    )
