"""A sharded state in agents' memories serves any ranks, as long as each element is somewhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from sharded_memory import (
    COLUMNS,
    ROWS,
    TENSORS,
    go_on,
    go_on_with_large,
    go_on_with_stages,
    keep,
    keep_large,
    keep_stages,
)

STATE = ROWS * COLUMNS * 4 * TENSORS


def lose(folder: Path, *nodes: int) -> None:
    for node in nodes:
        shutil.rmtree(folder / f"node{node}")


def one(found: list[dict[str, Any]], key: str) -> Any:
    values = [each[key] for each in found]
    assert all(value == values[0] for value in values), found
    return values[0]


@pytest.mark.parametrize(
    ("lost", "mesh", "nodes"),
    [
        # Of each half one copy is left, on a node of either replica.
        ((0, 3), (3,), [1, 2, 9]),
        ((0,), (2, 2), [1, 2, 3, 9]),
    ],
)
def test_the_second_copies_of_hsdp_stand_in_for_nodes_that_are_lost_at_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, lost: tuple[int, ...], mesh: tuple[int, ...], nodes: list[int]
) -> None:
    ranks.run(keep, 4, tmp_path, (2, 2))
    lose(tmp_path, *lost)
    found = ranks.run(go_on, len(nodes), tmp_path, mesh, nodes)
    assert one(found, "step") == 4
    assert one(found, "right")
    assert one(found, "passed_over") == ()
    # What is each rank's own is so again where there are as many ranks and its part is left.
    world, least = len(nodes), min(at for at in range(4) if at not in lost)
    own = [rank if world == 4 and rank not in lost else least for rank in range(world)]
    assert [each["own"] for each in found] == own
    # As these ranks cut it up, each has it in its own node's memory from now on.
    for rank, each in enumerate(found):
        assert (4, rank, world) in each["parts"]


def test_a_state_of_which_elements_are_lost_is_passed_over_and_nothing_is_changed(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(keep, 4, tmp_path, (2, 2))
    lose(tmp_path, 0, 2)
    found = ranks.run(go_on, 2, tmp_path, (2,), [1, 3])
    assert (one(found, "step"), one(found, "unchanged")) == (0, True)
    [why] = one(found, "passed_over")
    assert why.startswith(
        "step 4 (memory) is not whole: nobody holds parts 0, 2 of 4, and so 20 of the 35 elements"
    )


def test_stages_of_a_pipeline_whose_tensors_have_one_name_are_never_taken_for_each_other(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(keep_stages, 4, tmp_path)
    found = ranks.run(go_on_with_stages, 4, tmp_path, [3, 2, 1, 0], 2)
    assert one(found, "step") == 4
    assert [each["values"] for each in found] == [[0.0] * 2, [0.0] * 2, [1.0] * 2, [1.0] * 2]
    # Of a stage a half is lost, and the other one's has the same name and indices.
    lose(tmp_path, 3)
    found = ranks.run(go_on_with_stages, 4, tmp_path, [0, 1, 2, 9], 3)
    assert (one(found, "step"), found[0]["values"]) == (0, [-1.0] * 2)
    assert all("2 of the 4 elements of w" in why for why in one(found, "passed_over"))
    # Nor do other numbers of ranks guess which is whose.
    ranks.run(keep_stages, 4, tmp_path / "more")
    found = ranks.run(go_on_with_stages, 6, tmp_path / "more", [0, 1, 2, 3, 8, 9], 2)
    assert (one(found, "step"), found[0]["values"]) == (0, [-1.0] * 2)
    [why] = one(found, "passed_over")
    assert why == (
        "step 4 (memory) has w on several meshes, perhaps as several tensors: only 4 ranks, "
        "with all parts, can go on from it"
    )


@pytest.mark.parametrize(
    "disk",
    [pytest.param(False, id="memory"), pytest.param(True, id="disk", marks=pytest.mark.long)],
)
def test_more_ranks_restore_with_a_tenth_of_a_state_beside_it_and_each_byte_comes_once(
    ranks: Ranks, tmp_path: Path, disk: bool
) -> None:
    ranks.run(keep_large, 2, tmp_path, disk)
    # Of three ranks one holds nothing, and of the others each a half.
    found = ranks.run(go_on_with_large, 4, tmp_path, [0, 1, 8, 9])
    assert max(peak for peak, _ in found) < STATE / 10, found
    received = sum(size for _, size in found)
    assert received == 0 if disk else 0 < received < 1.0 * STATE
