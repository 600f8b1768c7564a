"""Sharded checkpoints are committed by all ranks together and loaded at any world size."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ranks import Ranks
from sharded_resume import resume_each, save_each
from sharding import (
    drop_sharded_state,
    load_on_one_rank,
    load_shards_of_damaged_checkpoint,
    save_and_fail,
)


def test_training_resumes_bit_for_bit_with_new_optimizer_at_two_ranks_and_at_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_each, 2, tmp_path)
    ranks.run(resume_each, 2, tmp_path)
    ranks.run(resume_each, 1, tmp_path)


def test_state_saved_at_two_ranks_is_loaded_at_two_and_at_one(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(save_and_fail, 2, tmp_path)
    assert os.strerror(errno.ENOSPC) in second
    assert first == f"rank 1 could not save step 4: {second}"
    ranks.run(load_on_one_rank, 1, tmp_path)
    folder = tmp_path / "checkpoints"
    steps = sorted(name for name in os.listdir(folder) if name.startswith("step"))
    assert [int(name[5:15]) for name in steps] == [2, 3]
    files = sorted(name.partition(".")[0] for name in os.listdir(folder / steps[1]))
    assert files == ["manifest", "part-00000", "part-00001"]


def test_rank_that_loaded_its_shards_does_not_consider_the_checkpoint_verified(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run(load_shards_of_damaged_checkpoint, 2, tmp_path) == ["damaged", None]


def test_no_cache_keeps_the_mesh_of_a_dropped_state_and_so_its_process_groups(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run(drop_sharded_state, 2, tmp_path) == [False, False]
