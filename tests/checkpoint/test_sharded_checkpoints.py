"""Sharded state is committed by all ranks at once, and read at any other world size."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ranks import Ranks
from sharded_resume import go_on_with_each, save_each
from sharding import load_alone, load_beside_damage, save_and_fail


def test_a_fresh_optimizer_of_a_sharded_model_goes_on_bit_for_bit_at_two_ranks_and_at_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_each, 2, tmp_path)
    ranks.run(go_on_with_each, 2, tmp_path)
    ranks.run(go_on_with_each, 1, tmp_path)


def test_fsdp2_and_dtensors_saved_at_two_ranks_are_loaded_at_two_and_at_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks.run(save_and_fail, 2, tmp_path)
    assert os.strerror(errno.ENOSPC) in second
    assert first == f"rank 1 could not save step 4: {second}"
    ranks.run(load_alone, 1, tmp_path)
    folder = tmp_path / "checkpoints"
    steps = ["step-0000000002", "step-0000000003"]
    assert [name for name in sorted(os.listdir(folder)) if name.startswith("step")] == steps
    files = sorted(name.partition(".")[0] for name in os.listdir(folder / steps[1]))
    assert files == ["manifest", "part-00000", "part-00001"]


def test_who_has_loaded_its_share_does_not_take_the_whole_checkpoint_for_good(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run(load_beside_damage, 2, tmp_path) == ["damaged", None]
