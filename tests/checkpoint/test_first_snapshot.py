"""A restore allocates memory for the next snapshot in the background, and frees unused memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import no_new_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elasticlib import CheckpointManager
from elasticlib.checkpoint import snapshot_slots
from elasticlib.testing.waiting import wait_until


def create_state() -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
        "note": "x",
        "step": 0,
    }


def train(state: dict[str, Any], step: int) -> None:
    state["model"](torch.ones(2, 200)).sum().backward()
    state["optimizer"].step()
    state["step"] = step


def read_resident_bytes(era: Path) -> dict[str, int]:
    """Return the resident bytes of each slot in this process."""
    sizes: dict[str, int] = {}
    slot = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            slot = words[-1].removeprefix(f"{era}/") if f"{era}/own." in line else ""
        elif words[0] == "Rss:" and slot:
            sizes[slot] = sizes.get(slot, 0) + int(words[1]) * 1024
    return sizes


def find_newest(era: Path) -> tuple[str, int]:
    """Return the slot and the size of the newest snapshot."""
    found = snapshot_slots.list_snapshots(era.parent)
    newest = max(found, key=lambda one: (one.writer.order, one.number))
    return Path(newest.place).name, snapshot_slots.HEADER_BYTES + newest.size


def list_threads() -> list[str]:
    return [one.name for one in threading.enumerate()]


def has_memory_for_the_next_snapshot(
    manager: CheckpointManager, era: Path, step: int, state: dict[str, Any]
) -> bool:
    """Wait for the memory that was prepared. Return whether the next snapshot is written there."""
    wait_for_prepared_memory(era)
    before = read_resident_bytes(era)
    train(state, step)
    assert manager.snapshot(step, state)
    name, needed = find_newest(era)
    return needed <= before.get(name, 0) < needed * 1.1


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded() -> dict[str, Any]:
    state = create_state()
    fully_shard(state["model"], mesh=init_device_mesh("cpu", (1,)))
    return state | {"optimizer": torch.optim.AdamW(state["model"].parameters(), lr=0.1)}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make", [create_state, sharded])
def test_restore_from_memory_prepares_the_next_snapshot(
    tmp_path: Path,
    generation_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], dict[str, Any]],
) -> None:
    state = make()
    with CheckpointManager(tmp_path / "disk") as manager:
        train(state, 1)
        assert manager.snapshot(1, state)
    (era := generation_memory.parent / "2").mkdir()
    monkeypatch.setenv("ELASTICLIB_INCARNATION", "launch")
    monkeypatch.setenv("ELASTICLIB_SNAPSHOTS", str(era))
    monkeypatch.setenv("ELASTICLIB_GENERATION", "2")
    state = make()
    with CheckpointManager(tmp_path / "disk") as manager:
        assert manager.restore(state).source == "memory"
        assert has_memory_for_the_next_snapshot(manager, era, 2, state)


def is_idle() -> bool:
    """Return whether no memory is being prepared."""
    return "elasticlib-save" not in list_threads()


def wait_for_prepared_memory(era: Path) -> None:
    """Wait until the memory of the only slot in this process was allocated."""

    def is_prepared() -> bool:
        # The slot exists before the thread begins, and has no memory then.
        return any(read_resident_bytes(era).values()) and is_idle()

    wait_until("the memory for the next snapshot", is_prepared)


def test_restore_from_a_disk_prepares_the_next_snapshot(
    tmp_path: Path, generation_memory: Path
) -> None:
    state = create_state()
    with CheckpointManager(tmp_path / "disk") as manager:
        train(state, 1)
        manager.save(1, state).wait()
    assert read_resident_bytes(generation_memory) == {}
    state = create_state()
    with CheckpointManager(tmp_path / "disk") as manager:
        assert manager.restore(state).source == "disk"
        assert has_memory_for_the_next_snapshot(manager, generation_memory, 2, state)


def save_trained_state(folder: Path) -> dict[str, Any]:
    """Save step 1 of a trained state, and return it."""
    state = create_state()
    with CheckpointManager(folder) as manager:
        train(state, 1)
        manager.save(1, state)
    return state


def test_a_save_after_a_restore_is_copied_to_the_memory_that_was_prepared(
    tmp_path: Path, generation_memory: Path
) -> None:
    state = save_trained_state(tmp_path / "disk")
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.restore(state)
        wait_for_prepared_memory(generation_memory)
        before = read_resident_bytes(generation_memory)
        for step in (2, 3):
            manager.save(step, state).wait()
        assert read_resident_bytes(generation_memory) == before, "no other memory was used"
        assert not snapshot_slots.list_snapshots(generation_memory.parent)
        assert manager.snapshot(4, state)
        assert find_newest(generation_memory)[0] in before
    assert len([*generation_memory.glob("own.*")]) == 1, "only the snapshot stays"


def test_a_manager_that_is_closed_or_dies_before_its_first_snapshot_leaves_no_memory(
    tmp_path: Path, generation_memory: Path
) -> None:
    state = save_trained_state(tmp_path / "disk")
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.restore(state)
    assert [*generation_memory.glob("own.*")] == []
    # The next start of the workers removes the slot of a manager that was killed.
    left = CheckpointManager(tmp_path / "disk")
    left.restore(state)
    wait_until("the slot for the next snapshot", lambda: [*generation_memory.glob("own.*")])
    snapshot_slots.remove_leftovers(generation_memory.parent, 2)
    assert [*generation_memory.glob("own.*")] == []
    left.close()


@pytest.mark.usefixtures("generation_memory")
def test_snapshots_need_no_new_thread(tmp_path: Path) -> None:
    state = create_state()
    with CheckpointManager(tmp_path / "disk") as manager, no_new_threads():
        for step in (1, 2, 3):
            train(state, step)
            assert manager.snapshot(step, state)
    with CheckpointManager(tmp_path / "disk") as manager:
        assert manager.restore(state).step == 3


def test_no_memory_is_allocated_without_an_agent(tmp_path: Path) -> None:
    state = save_trained_state(tmp_path / "disk")
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.restore(state)
        assert is_idle()
