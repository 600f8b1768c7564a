"""What an agent writes of its workers' snapshots is a checkpoint like any other, or is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from managers import manager_at

from elasticlib import CheckpointManager
from elasticlib.checkpoint.disk import Disk, LocalPlace
from elasticlib.checkpoint.memory import Record
from elasticlib.checkpoint.pack import fill, lay_out
from elasticlib.checkpoint.persist import persist
from elasticlib.errors import CheckpointError, CheckpointRefused

PLACE: dict[str, object] = {"run": "job", "launch": "first", "generation": 3}


def packed(step: int) -> memoryview:
    layout = lay_out({"weight": torch.full((100,), float(step))}, {"step": step})
    buffer = torch.zeros(layout.size, dtype=torch.uint8)
    fill(layout, buffer)
    return memoryview(buffer.numpy())


def record(folder: Path, step: int, **more: object) -> Record:
    made = Record("state", step, 1, len(packed(step)), "job", 3, folder=str(folder), launch="first")
    return attrs.evolve(made, **more)


def saved(folder: Path, step: int, place: dict[str, object] = PLACE) -> None:
    with manager_at(folder, place) as manager:
        manager.save(step, {"weight": torch.full((100,), float(step))})


def test_a_snapshot_is_a_checkpoint_beside_those_of_the_job(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    assert persist(record(tmp_path, 7), packed(7)) is True
    manager = CheckpointManager(tmp_path)
    assert manager.steps() == [5, 7]
    assert manager.verify() == {}
    assert torch.equal(manager.load()["weight"], torch.full((100,), 7.0))


def test_what_is_there_already_is_not_written_unless_it_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    assert persist(record(tmp_path, 7), packed(7)) is False
    assert persist(record(tmp_path, 6), packed(6)) is False
    (data,) = tmp_path.glob("step-*/state.*.pack")
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    assert persist(record(tmp_path, 7), packed(7)) is True
    assert CheckpointManager(tmp_path).latest() == 7


def test_where_the_job_goes_on_in_a_later_generation_it_is_left_to_that(tmp_path: Path) -> None:
    saved(tmp_path, 5, {**PLACE, "generation": 4})
    assert persist(record(tmp_path, 7), packed(7)) is False
    assert CheckpointManager(tmp_path).steps() == [5]


def test_another_launchs_folder_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    saved(tmp_path, 6, {**PLACE, "launch": "second"})
    with pytest.raises(CheckpointRefused, match="launch"):
        persist(record(tmp_path, 7), packed(7))


class Meanwhile(Disk):
    """Does something once, in the middle of writing data to the disk."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def write(self, handle: int, data: memoryview) -> int:
        act = self._act
        if act is not None and len(data) > 400:  # no manifest and no fence
            self._act = None
            act()
        return super().write(handle, data)


def test_a_save_that_is_under_way_on_another_node_is_neither_cleared_nor_refused(
    tmp_path: Path,
) -> None:
    agents: list[bool] = []
    disk = Meanwhile(lambda: agents.append(persist(record(tmp_path, 7), packed(7))))
    with manager_at(LocalPlace(tmp_path, disk), PLACE) as manager:
        manager.save(8, {"weight": torch.full((100,), 8.0)})
        manager.wait()
        manager.save(9, {"weight": torch.full((100,), 9.0)})
    assert agents == [True]
    assert CheckpointManager(tmp_path).steps() == [7, 8, 9]
    assert CheckpointManager(tmp_path).verify() == {}


def test_what_a_worker_clears_away_is_written_again_unless_its_own_is_there(
    tmp_path: Path,
) -> None:
    for step, more in ((7, 5), (10, 12)):
        worker = manager_at(tmp_path, PLACE)

        def save(worker: CheckpointManager = worker, step: int = more) -> None:
            worker.save(step, {"weight": torch.full((100,), float(step))})
            worker.wait()

        save(step=4)
        place = LocalPlace(tmp_path, Meanwhile(save))
        assert persist(record(tmp_path, step), packed(step), place=place) is (more < step)
        worker.close()
    manager = CheckpointManager(tmp_path)
    assert manager.steps()[-1] == 12
    assert 7 in manager.steps()
    assert 10 not in manager.steps()


def test_a_part_of_a_sharded_state_is_refused_by_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="workers"):
        persist(record(tmp_path, 7, part=1, parts=2), packed(7))
    # Nor one rank's, all of it, which two ranks could not read.
    with pytest.raises(CheckpointError, match="workers"):
        persist(record(tmp_path, 7, sharded=True), packed(7))
    # Nothing is lost where the workers have saved it.
    saved(tmp_path, 7)
    assert persist(record(tmp_path, 7, part=1, parts=2), packed(7)) is False


def test_an_agent_needs_no_torch_for_it() -> None:
    code = "import sys, elasticlib.checkpoint.persist; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
