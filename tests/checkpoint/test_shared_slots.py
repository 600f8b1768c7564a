"""Saves and snapshots that share memory: one copy of a state, and slots that a save reserves."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import GatedStorage
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import elasticlib
from elasticlib import CheckpointManager, ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.checkpoint import snapshot_slots
from elasticlib.checkpoint.save_handle import LocalSave
from elasticlib.errors import CheckpointError
from elasticlib.testing.waiting import wait_until


class Counter:
    """A part of a state that counts the calls of its `state_dict`."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        self.count += 1
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Take nothing."""


def state_of(step: int, size: int = 100) -> dict[str, Any]:
    return {"n": step, "w": torch.full((size,), float(step))}


def snapshot_steps(memory: Path) -> list[int]:
    return sorted(ref.step for ref in snapshot_slots.list_snapshots(memory))


def slots(manager: CheckpointManager) -> list[snapshot_slots.MappedSlot]:
    memory = manager._snapshots
    return [*manager._private_slots._slots, *(memory.slots._slots if memory else ())]


def private_slots(manager: CheckpointManager) -> int:
    return sum(slot.path is None for slot in slots(manager))


def test_a_step_with_a_save_and_a_snapshot_copies_the_state_once(
    tmp_path: Path, agent_memory: Path
) -> None:
    counter = Counter()
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.save(1, {**state_of(1), "counter": counter}, snapshot=True).wait()
        assert counter.count == 1
        # The other file is the memory for the next snapshot.
        assert sum(slot.is_used for slot in slots(manager)) == 1
        assert (snapshot_steps(agent_memory), manager.steps(), private_slots(manager)) == (
            [1],
            [1],
            0,
        )
        assert manager.load(1)["n"] == 1


def test_the_step_loop_copies_the_state_once_if_a_save_and_a_snapshot_are_due(
    tmp_path: Path, agent_memory: Path
) -> None:
    counter = Counter()
    sampler = ElasticDistributedSampler(range(8), 1, 0, shuffle=False)
    batches = ElasticBatchSampler(sampler, 2)
    with CheckpointManager(tmp_path / "disk") as manager:
        loop = elasticlib.steps(batches, {"counter": counter}, manager=manager, save_every=2)
        for attempt in loop:
            before = counter.count
            with attempt:
                pass
            assert counter.count == before + 1
        manager.wait()
        assert (manager.steps(), snapshot_steps(agent_memory)[-1]) == ([2, 4], 4)


def test_snapshots_are_copied_to_other_slots_while_a_save_is_written(
    tmp_path: Path, agent_memory: Path
) -> None:
    storage = GatedStorage(tmp_path / "disk")
    with CheckpointManager(storage) as manager:
        for first, is_snapshot in ((1, True), (11, False)):
            storage.gate.clear()
            save = manager.save(first, state_of(first), snapshot=is_snapshot)
            for step in range(first + 1, first + 8):
                assert manager.snapshot(step, state_of(step))
                assert snapshot_steps(agent_memory)[-1] == step
            storage.gate.set()
            save.wait()
            assert manager.load(first)["w"].unique().tolist() == [first]
        assert len([*agent_memory.glob("1/own.*")]) <= 3
        assert private_slots(manager) == 0


def test_a_snapshot_of_a_save_that_is_skipped_or_waits_is_taken_at_once(
    tmp_path: Path, agent_memory: Path
) -> None:
    storage = GatedStorage(tmp_path / "disk")
    with CheckpointManager(storage) as manager:
        manager.save(1, state_of(1))
        assert manager.save(2, state_of(2), if_busy="skip", snapshot=True).is_skipped
        assert snapshot_steps(agent_memory) == [2]
        thread = threading.Thread(target=lambda: manager.save(3, state_of(3), snapshot=True))
        thread.start()
        wait_until("the snapshot of step 3", lambda: snapshot_steps(agent_memory)[-1:] == [3])
        assert thread.is_alive()
        storage.gate.set()
        thread.join(60)
        manager.wait()
        assert manager.steps() == [1, 3]


def test_without_an_agent_all_saves_are_copied_to_one_private_slot(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), snapshot=True)
        assert private_slots(manager) == 1
    assert private_slots(manager) == 0
    assert manager.steps() == [1, 2, 3]
    assert manager.load(2)["w"].unique().tolist() == [2]


def test_the_memory_of_a_save_is_freed_while_the_writer_still_ends_its_work(tmp_path: Path) -> None:
    may_end = threading.Event()

    def stop_after_the_save(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not LocalSave.run.__code__:
            return None
        if event == "return":
            may_end.wait(60)
        return stop_after_the_save

    threading.settrace(stop_after_the_save)
    try:
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, state_of(1))
        assert private_slots(manager) == 0
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
        may_end.set()


@pytest.fixture
def full_memory(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create agent memory of 200 KiB."""
    folder = small_disk / "1"
    folder.mkdir()
    monkeypatch.setenv("ELASTICLIB_INCARNATION", "launch")
    monkeypatch.setenv("ELASTICLIB_SNAPSHOTS", str(folder))
    monkeypatch.setenv("ELASTICLIB_GENERATION", "1")
    return small_disk


def test_a_save_needs_no_memory_of_the_agent(tmp_path: Path, full_memory: Path) -> None:
    state = state_of(1, size=100_000)
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.save(1, state).wait()
        assert private_slots(manager) == 1
        with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
            manager.save(2, state, snapshot=True)
        assert [*full_memory.glob("1/own.*")] == []
        assert manager.load(1)["n"] == 1


def test_a_snapshot_in_memory_that_others_have_filled_raises_an_error(full_memory: Path) -> None:
    with (full_memory / "other").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    # The first page of a new slot has no memory, so reading its mapping would raise SIGBUS.
    with CheckpointManager(full_memory / "disk") as manager:
        for step in (1, 2):
            with pytest.raises(CheckpointError, match="no memory for a snapshot"):
                manager.snapshot(step, state_of(step))
    assert [*full_memory.glob("1/own.*")] == []


def test_a_snapshot_waits_for_a_save_if_the_agents_memory_is_full(
    tmp_path: Path, full_memory: Path
) -> None:
    def state(step: int) -> dict[str, Any]:
        return state_of(step, size=20_000)  # The memory has room for two of them.

    storage = GatedStorage(tmp_path / "disk")
    with CheckpointManager(storage) as manager:
        manager.save(1, state(1), snapshot=True)
        assert manager.snapshot(2, state(2))
        thread = threading.Thread(target=lambda: manager.snapshot(3, state(3)))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        storage.gate.set()
        thread.join(60)
        assert snapshot_steps(full_memory) == [2, 3]
        assert manager.load(1)["w"].unique().tolist() == [1]


def save_sharded(folder: Path, shape: tuple[int, ...]) -> tuple[int, int]:
    """Save a sharded state with a snapshot. Return its slots, and the bytes on disk."""
    rank = dist.get_rank()
    memory = folder / f"memory{rank}" / "1"
    memory.mkdir(parents=True)
    os.environ["ELASTICLIB_INCARNATION"] = "launch"
    os.environ["ELASTICLIB_SNAPSHOTS"] = str(memory)
    os.environ["ELASTICLIB_GENERATION"] = "1"
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    placements = [Shard(0)] if len(shape) == 1 else [Replicate(), Shard(0)]
    tensor = distribute_tensor(torch.arange(800_000.0), mesh, placements)
    state = {"w": tensor, "number": 7, "rest": torch.ones(3)}
    with CheckpointManager(folder / "disk") as manager:
        manager.save(4, state, snapshot=True).wait()
        num_slots = sum(slot.is_used for slot in slots(manager))
        loaded = manager.load(4)
        assert torch.equal(loaded["w"], torch.arange(800_000.0))
        assert (loaded["number"], loaded["rest"].tolist()) == (7, [1, 1, 1])
        state["w"].to_local().zero_()
        assert manager.restore(state, step=4)
        assert torch.equal(state["w"].full_tensor(), torch.arange(800_000.0))
    return num_slots, sum(file.stat().st_size for file in (folder / "disk").rglob("*.safetensors"))


def test_a_rank_copies_its_part_once_unless_other_ranks_save_much_of_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    for shape, copies in (((2,), [1, 1]), ((2, 1), [1, 2])):
        folder = tmp_path / str(len(shape))
        folder.mkdir()
        results = ranks.run(save_sharded, 2, folder, shape)
        assert [num_slots for num_slots, _ in results] == copies
        assert results[0][1] < 3_300_000, "each element is written once"
