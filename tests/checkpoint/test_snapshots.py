"""Snapshots of workers in the memory of their agent are complete, separate and restorable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from managers import snapshot_ref
from removed_dirs import dir_removed_when_listed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from elasticlib import Node, Script, WorkerSpec
from elasticlib.checkpoint import snapshot_slots
from elasticlib.checkpoint.pack import PackImage, plan_layout, unpack
from elasticlib.checkpoint.refs import StateRef, Writer, begin
from elasticlib.checkpoint.snapshot_service import NodeSnapshotService
from elasticlib.checkpoint.snapshot_source import SnapshotSource
from elasticlib.checkpoint.state_search import RestoreAgreement
from elasticlib.errors import CheckpointError
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo, assign_ranks
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.spec import WorkerGroup


class AgentMemory:
    """The memory directory of an agent, and the snapshot sources of its successive workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: list[SnapshotSource] = []

    def worker(self, era: int, **more: Any) -> SnapshotSource:
        folder = self.folder / str(era)
        folder.mkdir(exist_ok=True)
        writer = Writer("run", "launch", era)
        self.sources.append(source := SnapshotSource(str(folder), writer, **more))
        found = [ref for ref in source.list_states() if ref.writer.generation < era]
        if found:
            source.begin(writer, begin(found[0], writer))
        return source

    def files(self) -> list[Path]:
        """Return the slots of all workers."""
        return list(self.folder.glob("*/own.*"))

    def eras(self) -> set[int]:
        """Return the attempts that have complete snapshots."""
        refs = snapshot_slots.list_snapshots(self.folder)
        return {snapshot_slots.era_of(ref) for ref in refs if ref.tier == "memory"}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentMemory]:
    agent = AgentMemory(tmp_path)
    yield agent
    for source in agent.sources:
        source.close()


def state(step: int, size: int = 5) -> dict[str, Any]:
    return {"model": {"w": torch.full((size,), float(step))}, "step": step}


def make_snapshot(worker: SnapshotSource, step: int, parts: int) -> None:
    """Make a snapshot of the first part of a sharded state, or of a state with one part."""
    part = 0 if parts else None
    worker.keep(step, plan_layout(state(step)), part=part, parts=parts)


def read(source: SnapshotSource, stored: StateRef) -> Any:
    """Check a snapshot, and return its state."""
    source.check(stored)
    found = unpack(source.view(stored))
    source.release()
    return found


def steps(source: SnapshotSource) -> list[int]:
    return [stored.step for stored in source.list_states()]


def test_a_snapshot_does_not_change_while_it_is_read(agent: AgentMemory) -> None:
    worker, now = agent.worker(1), state(3)
    assert worker.snapshot(3, now)
    now["model"]["w"].fill_(-1)
    (stored,) = agent.worker(2).list_states()
    assert (stored.step, stored.tier, stored.part, stored.parts) == (3, "memory", None, 0)
    other = agent.worker(2)
    pinned = unpack(other.view(stored), copy=False)
    assert torch.equal(pinned["model"]["w"], torch.full((5,), 3.0))
    # The slot that is being read is not overwritten.
    for step in (4, 5, 6):
        worker.snapshot(step, state(step))
    assert torch.equal(pinned["model"]["w"], torch.full((5,), 3.0))
    other.release()
    worker.snapshot(7, state(7))
    assert torch.equal(pinned["model"]["w"], torch.full((5,), 3.0)), (
        "a view of the slot still exists"
    )
    del pinned
    worker.snapshot(8, state(8))
    with pytest.raises(CheckpointError, match="step 3"):
        worker.view(stored)
    with pytest.raises(CheckpointError, match="step"):
        worker.view(StateRef("0123abcd", 9, tier="memory", place="1/own.x.1"))


@pytest.mark.parametrize(("parts", "slots"), [(0, 2), (2, 3)])
def test_slots_are_reused_and_a_failed_snapshot_loses_none(
    agent: AgentMemory, parts: int, slots: int
) -> None:
    worker = agent.worker(1)
    for step in range(9):
        make_snapshot(worker, step, parts)
    assert len(agent.files()) == slots
    before = steps(worker)
    assert before[: slots - 1] == [8, 7][: slots - 1]
    with pytest.raises(CheckpointError, match="state"):
        worker.snapshot(9, {"model": object()})
    slots_of = snapshot_slots.SnapshotSlots(agent.folder / "1")
    record = snapshot_ref("state", 99, 64)
    with slots_of.open_for_writing(record):
        assert 99 not in steps(worker)
    assert 99 in steps(worker)
    with (
        contextlib.suppress(ZeroDivisionError),
        slots_of.open_for_writing(attrs.evolve(record, step=100)),
    ):
        raise ZeroDivisionError
    assert 100 not in steps(worker)
    snapshot_slots.remove_snapshots(
        agent.folder,
        [one for one in snapshot_slots.list_snapshots(agent.folder) if one.step == 99],
    )
    slots_of.close()
    assert steps(worker) == before


def test_states_of_changing_size_are_kept_and_memory_of_larger_ones_is_released(
    agent: AgentMemory,
) -> None:
    worker = agent.worker(1)
    for step, size in enumerate((5, 100_000, 100_000, 5, 5, 5)):
        worker.snapshot(step, state(step, size))
        (newest, *_) = worker.list_states()
        assert read(worker, newest)["model"]["w"].shape == (size,)
    assert len(agent.files()) == 2
    assert sum(path.stat().st_size for path in agent.folder.glob("1/*")) < 50_000


FILL_MEMORY = """
import sys
from elasticlib.checkpoint.refs import StateRef, Writer, begin
from elasticlib.checkpoint.snapshot_slots import SnapshotSlots, list_snapshots
from elasticlib.errors import CheckpointError
folder, slots = sys.argv[1] + "/1", SnapshotSlots(sys.argv[1] + "/1")
for step, size in enumerate((1000, 1 << 22), 1):
    writer = Writer("run")
    line = begin(None, writer)
    ref = StateRef(line[-1].id, step, number=step, size=size, writer=writer, line=line)
    try:
        with slots.open_for_writing(ref) as view:
            view[:] = bytes(size)
    except CheckpointError as error:
        print(error)
print([found.step for found in list_snapshots(sys.argv[1])])
"""


def test_full_memory_raises_an_error_with_the_remedy_and_no_sigbus(
    tmp_path: Path,
) -> None:
    mount = 'mount -t tmpfs -o size=1m none "$1" || exit 77; mkdir "$1/1"; exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, FILL_MEMORY]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if process.returncode in (1, 77) and "permitted" in process.stderr:
        pytest.skip("mounting is not permitted here")
    assert process.returncode == 0, process.stderr
    message, steps_found = process.stdout.splitlines()
    assert message.startswith(f"no memory for a snapshot of 4194304 bytes at {tmp_path}/1: ")
    assert message.endswith(" bytes are free; give /dev/shm more (docker: --shm-size)")
    assert steps_found == "[1]"


def test_a_worker_without_the_directory_of_its_agent_gets_an_error(agent: AgentMemory) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory"):
        SnapshotSource(str(agent.folder / "missing" / "memory" / "9"), Writer("run")).snapshot(
            1, state(1)
        )


def test_an_error_of_a_reader_is_raised_although_it_references_the_snapshot(
    agent: AgentMemory,
) -> None:
    agent.worker(1).snapshot(1, state(1))
    (found,) = snapshot_slots.list_snapshots(agent.folder)

    def read() -> None:
        with snapshot_slots.map_snapshot(agent.folder, found) as view:
            assert view is not None
            raise ZeroDivisionError(view[4:8])

    with pytest.raises(ZeroDivisionError) as raised:
        read()
    # The exception references a view, which keeps the memory mapped.
    assert len(bytes(raised.value.args[0])) == 4


def test_concurrent_readers_see_complete_snapshots_only(agent: AgentMemory) -> None:
    worker, is_finished = agent.worker(1), threading.Event()
    worker.snapshot(0, state(0, 50_000))
    seen: list[tuple[int, bool]] = []

    def read() -> None:
        while not is_finished.is_set():
            for one in snapshot_slots.list_snapshots(agent.folder):
                with snapshot_slots.map_snapshot(agent.folder, one) as view:
                    if view is not None:
                        found = unpack(memoryview(bytearray(view)))
                        same = bool((found["model"]["w"] == one.step).all())
                        seen.append((one.step, same and found["step"] == one.step))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until("the first snapshot that was read", lambda: seen)
        for step in range(1, 150):
            worker.snapshot(step, state(step, 50_000))
    finally:
        is_finished.set()
        reader.join(10)
    assert all(whole for _, whole in seen)


def test_snapshots_of_a_paused_worker_of_an_earlier_attempt_are_ignored(agent: AgentMemory) -> None:
    stale = agent.worker(1)
    stale.snapshot(10, state(10))
    successor = agent.worker(2)
    assert steps(successor) == [10]
    successor.snapshot(11, state(11))
    assert agent.eras() == {2}, "the snapshots of the first attempt have been removed"
    stale.snapshot(11, state(-11))
    stale.snapshot(12, state(-12, 100_000))
    newest = successor.list_states()[0]
    assert [ref.writer.generation for ref in successor.list_states()] == [2, 1, 1]
    assert read(successor, newest)["step"] == newest.step == 11


@pytest.mark.parametrize(("parts", "max_slots"), [(0, 2), (2, 4)])
def test_a_restart_uses_no_more_slots_than_documented(
    agent: AgentMemory, parts: int, max_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use: list[int] = []

    copy_to = PackImage.copy_to

    def count_files_and_copy(image: PackImage, *memory: Any) -> None:
        in_use.append(len(agent.files()))
        copy_to(image, *memory)

    first = agent.worker(1)
    for step in range(1, 6):
        make_snapshot(first, step, parts)
    monkeypatch.setattr(PackImage, "copy_to", count_files_and_copy)
    for era in (2, 3):
        worker = agent.worker(era)
        snapshot_slots.remove_leftovers(agent.folder, era)
        newest = steps(worker)[0]
        for step in range(newest + 1, newest + 5):
            make_snapshot(worker, step, parts)
    assert max(in_use) == max_slots


def test_incomplete_snapshots_of_workers_and_peers_that_exited_are_removed(
    agent: AgentMemory,
) -> None:
    spec = WorkerSpec(Script("train.py"))
    assignment = assign_ranks([Node("n", "h", "127.0.0.1", 1)])[0]
    info = RendezvousInfo("run", 2, assignment, RendezvousStoreInfo("127.0.0.1", 1))
    group = WorkerGroup(spec, info, (), attempt=2)
    first = agent.worker(1)
    first.snapshot(1, state(1))
    first.close()
    (agent.folder / "2").mkdir()
    record = snapshot_ref("state", 9, 1)
    for owner in ("", "1"):
        slots = snapshot_slots.SnapshotSlots(agent.folder / "1", owner)
        with contextlib.suppress(ZeroDivisionError), slots.open_for_writing(record):
            raise ZeroDivisionError
    assert len(list(agent.folder.glob("1/*.*"))) >= 3
    service = NodeSnapshotService(lambda number: agent.folder / str(number))
    with snapshot_slots.SnapshotSlots(agent.folder / "1").open_for_writing(record):
        service.on_workers_starting(info, group)
        # The slot that is still being written is kept.
        assert len(list(agent.folder.glob("1/*.*"))) == 2
    assert sorted(one.step for one in snapshot_slots.list_snapshots(agent.folder)) == [1, 9]


def test_an_attempt_directory_that_is_removed_during_a_listing_is_skipped(
    agent: AgentMemory,
) -> None:
    agent.worker(1).snapshot(1, state(1))
    with dir_removed_when_listed(agent.folder / "2"):
        assert [one.step for one in snapshot_slots.list_snapshots(agent.folder)] == [1]


def test_sharded_snapshots_of_the_earlier_attempt_are_kept_until_two_new_ones_exist(
    agent: AgentMemory,
) -> None:
    make_snapshot(agent.worker(1), 5, 2)
    worker = agent.worker(2)
    for step, eras in ((5, {1, 2}), (6, {1, 2}), (7, {2})):
        make_snapshot(worker, step, 2)
        assert agent.eras() == eras


def test_a_state_with_dtensors_is_marked_as_sharded_on_a_single_rank(agent: AgentMemory) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for step, places in enumerate(([Shard(0)], [Replicate()]), 1):
            cut = {"w": distribute_tensor(torch.arange(8.0), mesh, places)}
            agent.worker(1, name=f"kind {step}").snapshot(step, cut)
    finally:
        dist.destroy_process_group()
    agent.worker(1, name="plain").snapshot(3, state(3))
    kinds = {
        (one.step, one.part is not None) for one in snapshot_slots.list_snapshots(agent.folder)
    }
    assert kinds == {(1, True), (2, True), (3, False)}


def test_names_and_runs_have_separate_snapshots_and_a_new_source_continues_the_sequence(
    agent: AgentMemory,
) -> None:
    one, other = agent.worker(1, name="one"), agent.worker(1, name="other")
    one.snapshot(1, state(1))
    other.snapshot(7, state(7))
    assert (steps(one), steps(other)) == ([1], [7])
    agent.worker(1, name="one").snapshot(2, state(2))
    assert steps(one) == [2, 1]
    other_run = SnapshotSource(str(agent.folder / "1"), Writer("another run"), name="one")
    assert other_run.list_states() == []
    assert agent.worker(1, writes=False).snapshot(1, state(1)) is False
    with pytest.raises(CheckpointError, match="got 2 of 2"):
        agent.worker(1, rank=2, world_size=2)


def test_a_snapshot_wakes_the_agent_which_removes_earlier_attempts_itself(
    agent: AgentMemory,
) -> None:
    agent.worker(1).snapshot(1, state(1))
    worker = agent.worker(2)
    os.mkfifo(agent.folder / "2" / snapshot_slots.WAKEUP_PIPE)
    pipe = os.open(agent.folder / "2" / snapshot_slots.WAKEUP_PIPE, os.O_RDWR | os.O_NONBLOCK)
    worker.snapshot(2, state(2))
    assert os.read(pipe, 9) == b"\n"
    assert agent.eras() == {1, 2}
    os.close(pipe)


def test_snapshots_continue_after_their_directory_was_removed(agent: AgentMemory) -> None:
    agent.folder = agent.folder / "memory"
    agent.folder.mkdir()
    worker = agent.worker(1)
    for step in (1, 2):
        worker.snapshot(step, state(step))
    shutil.rmtree(agent.folder)
    assert steps(worker) == []
    worker.snapshot(3, state(3))
    assert steps(agent.worker(2)) == [3]
    (stored,) = agent.worker(2).list_states()
    assert torch.equal(read(agent.worker(2), stored)["model"]["w"], torch.full((5,), 3.0))


def test_a_truncated_slot_raises_an_error_and_no_sigbus(agent: AgentMemory) -> None:
    worker = agent.worker(1)
    worker.snapshot(1, state(1, size=100_000))
    (stored,) = worker.list_states()
    (found,) = snapshot_slots.list_snapshots(agent.folder)
    slot = agent.folder / found.place
    os.truncate(slot, 8192)
    with pytest.raises(CheckpointError, match="step"):
        agent.worker(2).view(stored)


def test_memory_for_the_next_snapshot_is_allocated_in_the_background(agent: AgentMemory) -> None:
    """The second snapshot, and the first one after a restart, are written to allocated memory.

    No additional slot is allocated.
    """
    worker = agent.worker(1)
    for step in (1, 2, 3, 4):
        worker.snapshot(step, state(step, size=100_000))
        wait_until(
            "the memory of the snapshot and of the next one",
            lambda: count_allocated_slots(agent, 1) == 2,
        )
    again = agent.worker(2)
    base = again.list_states()[0]
    again.adopt_restored_state(RestoreAgreement(base, 0, 0), state(4, size=100_000))
    wait_until("the memory of the first slot", lambda: count_allocated_slots(agent, 2) == 1)
    again.snapshot(5, state(5, size=100_000))
    wait_until(
        "the memory of the second slot",
        lambda: (count_allocated_slots(agent, 1), count_allocated_slots(agent, 2)) == (0, 2),
    )
    found = unpack(again.view(again.list_states()[0]))
    assert torch.equal(found["model"]["w"], torch.full((100_000,), 5.0))


def count_allocated_slots(agent: AgentMemory, era: int) -> int:
    """Return the number of slots whose memory is allocated."""
    paths = list(agent.folder.glob(f"{era}/own.*"))
    found = [os.stat(path) for path in paths]
    return sum(one.st_blocks * 512 > 400_000 for one in found)
