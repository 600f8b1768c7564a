"""Managers side by side, in a group of ranks, and in a job that has not met yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointError


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((2,), value)}


def test_each_of_two_managers_goes_on_from_its_own_snapshots(
    generation_memory: Path, tmp_path: Path
) -> None:
    names = ("generator", "critic")
    for turn, (name, value) in enumerate(zip(names, (1.0, 2.0), strict=True)):
        with CheckpointManager(tmp_path / name) as manager:
            assert not manager.restore(state(0.0))
            assert manager.snapshot(5 + turn, state(value))
    for turn, (name, value) in enumerate(zip(names, (1.0, 2.0), strict=True)):
        found = state(0.0)
        with CheckpointManager(tmp_path / name) as manager:
            assert manager.restore(found).step == 5 + turn
        assert found["weight"].tolist() == [value, value]
    assert list(generation_memory.iterdir())


def test_to_go_back_to_a_step_on_the_disk_gives_up_what_was_snapshot_after_it(
    generation_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "kept") as manager:
        assert not manager.restore(state(0.0))
        manager.save(3, state(3.0)).wait()
        for step in (4, 5):
            assert manager.snapshot(step, state(float(step)))
    # The workers are started again.
    (later := generation_memory.parent / "2").mkdir()
    monkeypatch.setenv("ELASTICLIB_SNAPSHOTS", str(later))
    found = state(0.0)
    with CheckpointManager(tmp_path / "kept") as manager:
        newest = manager.restore(found)
        assert (newest.step, newest.source) == (5, "memory")
        assert str(newest) == "step 5 from this node's memory"
        assert manager.restore(found, step=3).source == "disk"
        assert found["weight"].tolist() == [3.0, 3.0]
        with pytest.raises(FileNotFoundError, match=r"there is no step 5 in .*; there are 3$"):
            manager.restore(found, step=5)
        assert manager.restore(found).step == 3


def test_ranks_that_have_not_met_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match="init_process_group"),
    ):
        manager.restore(state(0.0))


@pytest.mark.usefixtures("generation_memory")
@pytest.mark.parametrize(("local_rank", "keeps"), [("0", True), ("3", False)])
def test_the_first_rank_of_a_node_keeps_the_snapshot_where_all_have_local_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: str, keeps: bool
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("ELASTICLIB_LOCAL_RANK", local_rank)
    with CheckpointManager(tmp_path / "kept") as manager:
        assert manager.snapshot(1, state(1.0)) is keeps


def save_in_a_group_of_its_own(folder: Path) -> int | None:
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        return None
    with CheckpointManager(folder / "kept", group=group) as manager:
        step = manager.restore({"weight": torch.zeros(2)}).step
        manager.save(1, {"weight": torch.ones(2)})
    return step


def test_the_first_rank_of_a_group_writes_what_the_group_shares(
    ranks: Ranks, tmp_path: Path
) -> None:
    _, step = ranks.run(save_in_a_group_of_its_own, 2, tmp_path)
    assert step == 0
    assert CheckpointManager(tmp_path / "kept").steps() == [1]


FORKED_DURING_A_COMMIT = """
import os, sys
from elasticlib.checkpoint.storage import LocalStorage

place = LocalStorage(sys.argv[1])
with place.lock():
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:  # as a DataLoader's worker, which an epoch begins with, and which goes on reading
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
with place.lock():
    print("again")
os.close(theirs)
os.waitpid(child, 0)
"""


def test_a_process_forked_during_a_commit_does_not_keep_the_folder_from_the_next_one(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED_DURING_A_COMMIT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "again\n"), done.stderr
