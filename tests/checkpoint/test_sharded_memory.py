"""Sharded snapshots in the memory of agents, restored by other numbers of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from sharded_memory import (
    LARGE_STATE_BYTES,
    restore,
    restore_large,
    restore_part_and_later_all,
    restore_saved_stages,
    restore_stages,
    save_stages,
    snapshot,
    snapshot_stages,
    store_large,
)


def lose_nodes(folder: Path, *nodes: int) -> None:
    for node in nodes:
        shutil.rmtree(folder / f"node{node}")


def common(results: list[dict[str, Any]], key: str) -> Any:
    """Return the value that all ranks have in common."""
    values = [result[key] for result in results]
    assert all(value == values[0] for value in values), results
    return values[0]


@pytest.mark.parametrize(
    ("lost", "mesh", "nodes"),
    [
        # One copy of each half is left, on nodes of different replicas.
        ((0, 3), (3,), [1, 2, 9]),
        ((0,), (2, 2), [1, 2, 3, 9]),
    ],
)
def test_replicas_of_hsdp_replace_lost_nodes_at_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, lost: tuple[int, ...], mesh: tuple[int, ...], nodes: list[int]
) -> None:
    ranks.run(snapshot, 4, tmp_path, (2, 2))
    lose_nodes(tmp_path, *lost)
    results = ranks.run(restore, len(nodes), tmp_path, mesh, nodes)
    assert common(results, "step") == 4
    assert common(results, "right")
    assert common(results, "skipped") == ()
    # Each rank keeps a snapshot of its new part in its own node's memory.
    for rank, result in enumerate(results):
        assert (4, rank, len(nodes)) in result["parts"]


def test_a_part_that_fewer_ranks_restore_does_not_replace_the_state(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(snapshot, 4, tmp_path, (2, 2))
    lose_nodes(tmp_path, 0, 3)
    results = ranks.run(restore_part_and_later_all, 2, tmp_path, (2,), [1, 2])
    assert common(results, "steps") == (4, 4)
    assert common(results, "kept") == []
    assert common(results, "right")


def test_state_with_lost_elements_is_skipped_and_nothing_is_changed(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(snapshot, 4, tmp_path, (2, 2))
    lose_nodes(tmp_path, 0, 2)
    results = ranks.run(restore, 2, tmp_path, (2,), [1, 3])
    assert (common(results, "step"), common(results, "unchanged")) == (0, True)
    [reason] = common(results, "skipped")
    assert reason.startswith(
        "step 4 (memory) is incomplete: no rank has parts 0, 2 of 4, so 20 of the 35 elements"
    )


def test_tensors_of_one_name_in_two_pipeline_stages_are_never_confused(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(snapshot_stages, 4, tmp_path)
    results = ranks.run(restore_stages, 4, tmp_path, [3, 2, 1, 0], 2)
    assert common(results, "step") == 4
    assert [each["values"] for each in results] == [[0.0] * 2, [0.0] * 2, [1.0] * 2, [1.0] * 2]
    # A half of one stage is lost. The other stage has a tensor of the same name and indices.
    lose_nodes(tmp_path, 3)
    results = ranks.run(restore_stages, 4, tmp_path, [0, 1, 2, 9], 3)
    assert (common(results, "step"), results[0]["values"]) == (0, [-1.0] * 2)
    assert all("2 of the 4 elements of w" in reason for reason in common(results, "skipped"))
    # Another number of ranks cannot know which stage a tensor belongs to.
    ranks.run(snapshot_stages, 4, tmp_path / "more")
    results = ranks.run(restore_stages, 6, tmp_path / "more", [0, 1, 2, 3, 8, 9], 2)
    assert results[0]["values"] == [-1.0] * 2
    assert common(results, "error") == (
        "rank 0 cannot restore step 4: w/w was not saved as the same tensor on all ranks, as in "
        "pipeline stages: only 4 ranks can restore it (5 other ranks failed as well)"
    )


@pytest.mark.parametrize("other", ["", "name", "size"])
def test_pipeline_stages_on_disk_are_restored_or_rejected(
    ranks: Ranks, tmp_path: Path, other: str
) -> None:
    errors = ranks.run(save_stages, 4, tmp_path, other)
    assert all("not the same tensor on all ranks" in error for error in errors)
    results = ranks.run(restore_saved_stages, 4, tmp_path, other)
    assert results == [([0.0], ""), ([0.0], ""), ([1.0], ""), ([1.0], "")]
    # Another number of ranks cannot know which stage a tensor belongs to.
    results = ranks.run(restore_saved_stages, 6, tmp_path, other)
    assert all("as in pipeline stages: only 4 ranks can restore it" in e for _, e in results)


@pytest.mark.parametrize(
    "disk",
    [pytest.param(False, id="memory"), pytest.param(True, id="disk", marks=pytest.mark.long)],
)
def test_restore_at_more_ranks_needs_a_tenth_of_the_state_as_memory_and_sends_each_byte_once(
    ranks: Ranks, tmp_path: Path, disk: bool
) -> None:
    ranks.run(store_large, 2, tmp_path, disk)
    # Two of the four ranks can read a half each, and the others nothing.
    results = ranks.run(restore_large, 4, tmp_path, [0, 1, 8, 9])
    assert max(peak for peak, _ in results) < LARGE_STATE_BYTES / 10, results
    received = sum(size for _, size in results)
    assert received == 0 if disk else 0 < received < LARGE_STATE_BYTES
