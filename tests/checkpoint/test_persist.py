"""What an agent writes of its workers' snapshots is a checkpoint like any other, or is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

from elasticlib import CheckpointManager
from elasticlib.checkpoint.here import Here
from elasticlib.checkpoint.pack import fill, lay_out
from elasticlib.checkpoint.persist import persist
from elasticlib.checkpoint.slot import Record
from elasticlib.errors import CheckpointError, CheckpointRefused

HERE = Here(run="job", launch="first", generation=3)


def packed(step: int) -> memoryview:
    layout = lay_out({"weight": torch.full((100,), float(step))}, {"step": step})
    buffer = torch.zeros(layout.size, dtype=torch.uint8)
    fill(layout, buffer)
    return memoryview(buffer.numpy())


def record(folder: Path, step: int, **more: object) -> Record:
    made = Record("state", step, 1, len(packed(step)), "job", 3, folder=str(folder), launch="first")
    return attrs.evolve(made, **more)


def saved(folder: Path, step: int, here: Here = HERE) -> None:
    with CheckpointManager(folder, here=here) as manager:
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
    saved(tmp_path, 5, attrs.evolve(HERE, generation=4))
    assert persist(record(tmp_path, 7), packed(7)) is False
    assert CheckpointManager(tmp_path).steps() == [5]


def test_another_launchs_folder_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    saved(tmp_path, 6, attrs.evolve(HERE, launch="second"))
    with pytest.raises(CheckpointRefused, match="took this folder over"):
        persist(record(tmp_path, 7), packed(7))


def test_a_part_of_a_sharded_state_is_refused_by_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only the workers write"):
        persist(record(tmp_path, 7, part=1, parts=2), packed(7))


def test_an_agent_needs_no_torch_for_it() -> None:
    code = "import sys, elasticlib.checkpoint.persist; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
