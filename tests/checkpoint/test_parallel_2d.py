"""States of FSDP2 with tensor parallelism are restored at any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel_2d import restore, restore_different_norms, save, save_different_norms
from ranks import Ranks


@pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])
def test_state_of_two_meshes_is_restored_at_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, in_memory: bool
) -> None:
    expected = ranks.run(save, 4, tmp_path, (2, 2), in_memory)[0]
    for attempt, shape in enumerate([(1, 2), (2, 1), (4, 1), (2, 2)], 2):
        for result in ranks.run(restore, shape[0] * shape[1], tmp_path, shape, attempt):
            assert result == (2, expected), shape


def test_tensors_that_differ_between_meshes_are_restored_by_as_many_ranks_or_rejected(
    ranks: Ranks, tmp_path: Path
) -> None:
    name = "model/0.norm.weight"
    for error in ranks.run(save_different_norms, 4, tmp_path):
        assert error.startswith(f"{name} is not the same tensor on all ranks")
    results = ranks.run(restore_different_norms, 4, tmp_path, (2, 2))
    assert [(error, values) for error, values, _ in results] == [("", [0.0]), ("", [1.0])] * 2
    for shape in ((1, 2), (4, 1)):
        for error, _, is_unchanged in ranks.run(
            restore_different_norms, shape[0] * shape[1], tmp_path, shape
        ):
            assert f"{name} was " in error
            assert "only 4 ranks can restore it" in error or "on several meshes" in error
            assert is_unchanged
