"""Several managers in a process, in a group of ranks, and before the group exists."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from elasticlib import CheckpointManager
from elasticlib.checkpoint.snapshot_slots import list_snapshots
from elasticlib.checkpoint.storage import LocalStorage
from elasticlib.errors import CheckpointError
from elasticlib.testing.waiting import wait_until


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((2,), value)}


def test_each_of_two_managers_restores_its_own_snapshots(
    generation_memory: Path, tmp_path: Path
) -> None:
    names = ("generator", "critic")
    for turn, (name, value) in enumerate(zip(names, (1.0, 2.0), strict=True)):
        with CheckpointManager(tmp_path / name) as manager:
            assert not manager.restore(state(0.0))
            assert manager.snapshot(5 + turn, state(value))
    for turn, (name, value) in enumerate(zip(names, (1.0, 2.0), strict=True)):
        live = state(0.0)
        with CheckpointManager(tmp_path / name) as manager:
            assert manager.restore(live).step == 5 + turn
        assert live["weight"].tolist() == [value, value]
    assert list(generation_memory.iterdir())


def test_a_manager_that_is_dropped_without_close_keeps_only_its_snapshots(
    generation_memory: Path, tmp_path: Path
) -> None:
    def save_with_dropped_manager(name: str) -> None:
        manager = CheckpointManager(tmp_path / name)
        assert not manager.restore(state(0.0))
        manager.snapshot(1, state(1.0))
        for step in (2, 3):
            manager.save(step, state(float(step)))

    for number in range(3):
        save_with_dropped_manager(f"{number}")
        gc.collect()

    def count_mapped_files() -> int:
        gc.collect()  # The thread of the last save may just have ended.
        return Path("/proc/self/maps").read_text().count(str(generation_memory))

    wait_until("the copies to be freed", lambda: not count_mapped_files())
    found = list_snapshots(generation_memory.parent)
    assert [one.step for one in found] == [1, 1, 1]
    assert len(list(generation_memory.glob("own.*"))) == 3
    for number in range(3):
        with CheckpointManager(tmp_path / f"{number}") as manager:
            assert manager.restore(state(0.0)).step == 3


def test_a_manager_that_is_made_again_leaves_no_copy_of_the_state(
    generation_memory: Path, tmp_path: Path
) -> None:
    """A cell of a notebook that runs again replaces its manager, and closes none of them."""

    def run_cell() -> weakref.ref[CheckpointManager]:
        manager = CheckpointManager(tmp_path / "kept")
        manager.restore(state(0.0))
        manager.save(1, state(1.0), snapshot=True).wait()
        with pytest.raises(CheckpointError, match="an object"):
            manager.save(2, {"weight": object()})
        manager.save(2, state(2.0)).wait()
        return weakref.ref(manager)

    cells = [run_cell() for _ in range(3)]

    def count_copies() -> int:
        gc.collect()  # The thread of the last save may just have ended.
        mapped = Path("/proc/self/maps").read_text().count(str(generation_memory))
        return mapped + sum(cell() is not None for cell in cells)

    wait_until("the copies to be freed", lambda: not count_copies())


class StorageThatWaits(LocalStorage):
    """Storage that waits after it has written a data file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.has_written, self.gate = threading.Event(), threading.Event()

    def write(self, name: str, data: memoryview) -> int:
        checksum = super().write(name, data)
        self.has_written.set()
        assert self.gate.wait(60)
        return checksum


@pytest.mark.usefixtures("generation_memory")
def test_a_late_claim_of_another_manager_deletes_no_save_in_progress(tmp_path: Path) -> None:
    storage = StorageThatWaits(tmp_path / "disk")
    with CheckpointManager(storage) as manager, CheckpointManager(tmp_path / "disk") as other:
        save = manager.save(1, state(1.0))
        assert storage.has_written.wait(60)
        # The writer thread claims the directory later, perhaps when this manager is closed already.
        assert other.snapshot(2, state(2.0))
        fence = tmp_path / "disk" / "fence.json"
        wait_until("the late claim", lambda: '"epoch":2' in fence.read_text().replace(" ", ""))
        storage.gate.set()
        save.wait()
        assert manager.steps() == [1]


def test_restoring_an_earlier_step_deletes_no_later_snapshot(
    generation_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_worker(attempt: int) -> CheckpointManager:
        (memory := generation_memory.parent / str(attempt)).mkdir()
        monkeypatch.setenv("ELASTICLIB_SNAPSHOTS", str(memory))
        return CheckpointManager(tmp_path / "kept")

    with CheckpointManager(tmp_path / "kept") as manager:
        assert not manager.restore(state(0.0))
        manager.save(3, state(3.0)).wait()
        for step in (4, 5):
            assert manager.snapshot(step, state(float(step)))
    live = state(0.0)
    for attempt in (2, 3):
        with start_worker(attempt) as manager:
            assert manager.restore(live, step=3).source == "disk"
            assert live["weight"].tolist() == [3.0, 3.0]
            assert manager.restore(live, step=4).source == "memory"
    with start_worker(4) as manager:
        newest = manager.restore(live)
        assert (newest.step, newest.source) == (5, "memory")
        assert str(newest) == "step 5 from this node's memory"
        # The first snapshot after a return to an earlier step abandons those of later steps.
        manager.restore(live, step=3)
        assert manager.snapshot(4, state(40.0))
    with start_worker(5) as manager:
        assert manager.restore(live).step == 4
        assert live["weight"].tolist() == [40.0, 40.0]


def test_several_ranks_without_a_process_group_get_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match="init_process_group"),
    ):
        manager.restore(state(0.0))


@pytest.mark.usefixtures("generation_memory")
@pytest.mark.parametrize(("local_rank", "is_written"), [("0", True), ("3", False)])
def test_only_the_first_rank_of_a_node_snapshots_if_all_ranks_have_local_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: str, is_written: bool
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("ELASTICLIB_LOCAL_RANK", local_rank)
    with CheckpointManager(tmp_path / "kept") as manager:
        assert manager.snapshot(1, state(1.0)) is is_written


def save_in_separate_group(folder: Path) -> int | None:
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        return None
    with CheckpointManager(folder / "kept", group=group) as manager:
        step = manager.restore({"weight": torch.zeros(2)}).step
        manager.save(1, {"weight": torch.ones(2)})
    return step


def test_the_first_rank_of_a_group_saves_the_state_of_the_group(
    ranks: Ranks, tmp_path: Path
) -> None:
    _, step = ranks.run(save_in_separate_group, 2, tmp_path)
    assert step == 0
    assert CheckpointManager(tmp_path / "kept").steps() == [1]


FORKED_DURING_A_COMMIT = """
import os, sys
from elasticlib.checkpoint.storage import LocalStorage

place = LocalStorage(sys.argv[1])
with place.lock():
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:  # a DataLoader forks its workers in the same way
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
with place.lock():
    print("again")
os.close(write_end)
os.waitpid(child, 0)
"""


def test_a_process_forked_during_a_commit_does_not_block_the_next_commit(
    tmp_path: Path,
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FORKED_DURING_A_COMMIT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (process.returncode, process.stdout) == (0, "again\n"), process.stderr
