"""Ranks of one node read an unsharded checkpoint once, into memory that they share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from managers import step_folder
from ranks import Ranks
from restored_memory import make_state, restore

from elasticlib import CheckpointManager

SIZE = 64  # of the tensor, in MiB
WORLD = 4


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Save steps 1 and 2 of a state."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, make_state(SIZE, float(step)))
    return tmp_path


def restored(results: list[dict[str, Any]]) -> list[list[float]]:
    """Return the step, and the least and the greatest element of the tensor, of each rank."""
    return [[result["step"], *result["values"]] for result in results]


def test_memory_of_four_ranks_is_that_of_one_checkpoint_and_is_freed(
    ranks: Ranks, checkpoints: Path
) -> None:
    results = ranks.run(restore, WORLD, checkpoints, SIZE, {})
    assert restored(results) == [[2, 2.0, 2.0]] * WORLD
    private, shares = zip(*(result["during"] for result in results), strict=True)
    assert sum(private) < SIZE
    assert sum(shares) < 2 * SIZE
    assert max(growth for result in results for growth in result["after"]) < SIZE / 2
    assert [result["left"] for result in results] == [[]] * WORLD


def test_ranks_read_for_themselves_where_there_is_no_room_for_shared_memory(
    ranks: Ranks, checkpoints: Path
) -> None:
    results = ranks.run(restore, WORLD, checkpoints, SIZE, {"file_bytes": SIZE << 19})
    assert restored(results) == [[2, 2.0, 2.0]] * WORLD
    assert min(result["during"][0] for result in results) > SIZE / 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change what is mounted")
def test_a_rank_that_cannot_reach_the_memory_of_another_reads_for_itself(
    ranks: Ranks, checkpoints: Path
) -> None:
    results = ranks.run(restore, WORLD, checkpoints, SIZE, {"without_proc": 2})
    assert restored(results) == [[2, 2.0, 2.0]] * WORLD
    assert [result["during"][0] > SIZE / 2 for result in results] == [False, False, True, False]


def test_a_damaged_checkpoint_is_read_once_and_all_ranks_use_the_one_before(
    ranks: Ranks, checkpoints: Path
) -> None:
    [path] = step_folder(checkpoints, 2).glob("state.*")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    results = ranks.run(restore, WORLD, checkpoints, SIZE, {})
    assert restored(results) == [[1, 1.0, 1.0]] * WORLD
    for result in results:
        [reason] = result["skipped"]
        assert reason.startswith("rank 0's step 2 (disk, ")
        assert "checksum" in reason
        assert sum(result["during"]) < SIZE


def test_a_checkpoint_that_is_cut_is_skipped(ranks: Ranks, checkpoints: Path) -> None:
    [path] = step_folder(checkpoints, 2).glob("state.*")
    os.truncate(path, path.stat().st_size // 2)
    assert restored(ranks.run(restore, 2, checkpoints, SIZE, {})) == [[1, 1.0, 1.0]] * 2
