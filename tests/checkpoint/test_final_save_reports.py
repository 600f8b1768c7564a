"""A final save waits for every node that may still report, and for no other node."""

from __future__ import annotations

import os
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_final_save import nodes

from elasticlib.checkpoint.boxes import Box, TensorShard
from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.final_save import FinalSave, Timeouts, snapshot_sets
from elasticlib.checkpoint.final_save_plan import (
    AgentReport,
    Finish,
    PartOffer,
    SnapshotState,
    Task,
    next_action,
)
from elasticlib.checkpoint.final_save_reports import ReportExchange
from elasticlib.checkpoint.pack import plan_layout
from elasticlib.checkpoint.snapshot_slots import SnapshotHeader, SnapshotSlots
from elasticlib.checkpoint.storage import DiskCalls, LocalStorage
from elasticlib.testing.waiting import wait_until


class Nodes:
    """Nodes with one rank each, whose workers have exited. Each node has a part of one tensor."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.directory, self.checkpoints = directory, directory / "checkpoints"
        self._pool = pool
        self.final_saves: list[FinalSave] = []  # stopped when the test ends

    def keep(self, step: int, *, holders: list[int], count: int, name: str = "state") -> None:
        for node in holders:
            shard = TensorShard("w", "float32", (4 * count,), Box((4 * node,), (4,)))
            meta = {"step": step, "shards": [shard.to_row()]}
            layout = plan_layout({"w": torch.full((4,), float(step))}, meta)
            header = SnapshotHeader(
                name, step, step, layout.size, "job", 3, node, count, str(self.checkpoints), "one"
            )
            attempt = self.directory / f"memory{node}" / "1"
            attempt.mkdir(parents=True, exist_ok=True)
            with SnapshotSlots(attempt).open_for_writing(header) as view:
                layout.copy_to(view)

    def final_save(
        self, node: int, count: int, *, is_leaving: bool = True, total_s: float = 60.0
    ) -> FinalSave:
        memory, info = self.directory / f"memory{node}", nodes(count)[node]
        limits = Timeouts(poll_s=0.01, total_s=total_s)
        final_save = FinalSave(memory, info, is_leaving=is_leaving, limits=limits)
        self.final_saves.append(final_save)
        return final_save

    def exchange(self, node: int, count: int) -> ReportExchange:
        """Return the report exchange of a node of the test, after another node has reported."""
        memory, info = self.directory / f"memory{node}", nodes(count)[node]
        [snapshots] = snapshot_sets(memory)
        final_save = FinalSave(memory, info)
        saver = final_save._create_saver(snapshots)
        saver.exchange.publish_chunks(snapshots.chunks)
        return saver.exchange

    def offers(self, node: int) -> list[PartOffer]:
        [snapshots] = snapshot_sets(self.directory / f"memory{node}")
        return snapshots.offers

    def start(self, final_save: FinalSave) -> Future[str]:
        return self._pool.submit(final_save.run)

    def save(self, count: int) -> None:
        """Let all agents write their newest snapshots."""
        results = [self.start(self.final_save(node, count)) for node in range(count)]
        assert [result.result(30) for result in results] == [""] * count

    def steps(self) -> list[int]:
        entries = CheckpointCatalog(LocalStorage(self.checkpoints)).list_entries()
        return [entry.step for entry in entries]

    def num_reports(self) -> int:
        names = [path.name.split(".") for path in self.checkpoints.glob("final-save.*/*")]
        return len({agent for agent, kind in names if kind.isdecimal()})


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Nodes]:
    with ThreadPoolExecutor() as pool:
        job = Nodes(tmp_path, pool)
        try:
            yield job
        finally:
            for final_save in job.final_saves:
                final_save.stop()


def test_node_that_helps_and_then_leaves_does_not_count_as_two_nodes(job: Nodes) -> None:
    job.keep(3, holders=[0, 1, 2], count=3)
    first = job.start(job.final_save(1, 3))
    wait_until("1 reports", lambda: job.num_reports() == 1)
    helping = job.final_save(0, 3, is_leaving=False)
    helped = job.start(helping)
    wait_until("2 reports", lambda: job.num_reports() == 2)
    helping.stop()
    assert helped.result(30) == ""
    second = job.start(job.final_save(0, 3))
    wait_until("3 reports", lambda: job.num_reports() == 3)
    # The workers of the last node take longer to end.
    third = job.start(job.final_save(2, 3))
    assert [result.result(30) for result in (first, second, third)] == ["", "", ""]
    assert job.steps() == [3]
    assert not list(job.checkpoints.glob("final-save.*"))


def test_node_helps_however_long_it_has_waited(job: Nodes) -> None:
    job.keep(3, holders=[0, 1], count=2)
    helping = job.start(job.final_save(0, 2, is_leaving=False, total_s=0.1))
    with pytest.raises(TimeoutError):
        helping.result(0.5)
    assert job.start(job.final_save(1, 2)).result(30) == ""
    assert helping.result(30) == ""
    assert job.steps() == [3]


def test_node_waits_for_another_node_that_is_busy(job: Nodes) -> None:
    job.keep(3, holders=[0, 1], count=2)
    busy = job.exchange(1, 2)
    # The other node publishes the part that it is writing, and renews its report for a while.
    offer = job.offers(1)[0]
    busy.publish(offers=(offer,), task=Task(offer.state, offer.share))
    waiting = job.start(job.final_save(0, 2, total_s=0.3))
    for _ in range(10):
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        busy.publish()
    busy.publish(task=None, can_write=False, problem="the disk is full", is_finished=True)
    assert "the disk is full" in waiting.result(30)


def test_node_whose_newest_step_is_saved_is_not_waited_for(job: Nodes) -> None:
    job.keep(2, holders=[0, 1], count=2)
    job.save(2)
    # Only one rank made a snapshot of step 3 before the job failed.
    job.keep(3, holders=[1], count=2)
    assert job.final_save(0, 2).run() == ""
    final_save = job.final_save(1, 2)
    assert job.start(final_save).result(30) == ""
    assert (final_save.saved, job.steps()) == (2, [2])
    assert not list(job.checkpoints.glob("final-save.*"))


def test_committed_state_is_accepted_though_its_parts_are_not_offered_any_more() -> None:
    state, newer = SnapshotState(1, 5, 2, True), SnapshotState(1, 6, 2, True)
    reports = {
        "a": AgentReport((PartOffer(newer, 0), PartOffer(state, 0))),
        "b": AgentReport(committed=(state,), can_write=False, is_finished=True),
    }

    def act(*, is_settled: bool) -> object:
        return next_action(
            "a", reports, lambda _: None, is_settled=is_settled, has_all_reports=is_settled
        )

    assert act(is_settled=True) == Finish(5)
    # An agent that is late may complete step 6.
    assert act(is_settled=False) is None


def test_node_that_helps_does_not_wait_for_a_state_that_no_node_writes(job: Nodes) -> None:
    job.keep(3, holders=[0], count=2, name="a")
    job.keep(3, holders=[0, 1], count=2, name="b")
    helping = job.final_save(0, 2, is_leaving=False)
    result = job.start(helping)
    assert job.start(job.final_save(1, 2)).result(30) == ""
    assert job.steps() == [3]
    helping.stop()
    assert result.result(30) == ""


class DiskThatFailsOnce(DiskCalls):
    """A disk on which one sync of a directory fails."""

    def __init__(self) -> None:
        self.fails = False

    def sync(self, handle: int) -> None:
        if self.fails and os.path.isdir(f"/proc/self/fd/{handle}"):
            self.fails = False
            raise OSError(5, "Input/output error")


def test_report_is_published_after_an_error_of_the_disk(tmp_path: Path) -> None:
    disk = DiskThatFailsOnce()
    own, other = (ReportExchange(LocalStorage(tmp_path, disk), "s", a, 2) for a in ("a", "b"))
    own.publish()
    disk.fails = True
    with pytest.raises(OSError, match="Input/output error"):
        own.publish(problem="first")
    own.publish(problem="second")
    assert other.read()["a"].problem == "second"


def test_list_of_shards_that_grows_when_decompressed_is_ignored_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offer = PartOffer(SnapshotState(1, 3, 2, True), 0, "share")
    own, other = (ReportExchange(LocalStorage(tmp_path), "s", agent, 2) for agent in "ab")
    other.publish(offers=(offer,))
    chunks = [TensorShard("w", "float32", (8,), Box((0,), (4,)))]
    other.publish_chunks({"share": chunks})
    path = tmp_path / "s" / "b.chunks"
    valid = path.read_bytes()
    bomb = zlib.compress(b" " * (300 << 20))
    tracemalloc.start()
    try:
        for hostile in (bomb, valid[:-1], b"x" + valid, zlib.compress(b"[]")):
            path.write_bytes(hostile)
            assert own.load_chunks("share") is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 150 << 20  # decompressing is limited to 64 MiB, and its buffer grows twofold
    [line] = [record.message for record in caplog.records]
    assert "agent b is ignored" in line
    assert "when decompressed" in line
    path.write_bytes(valid)
    assert own.load_chunks("share") == chunks
