"""Ranks that restore together come to one state, or raise together: real processes over gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from restoring import found_by, own_group, restore, sharded

Scenario = Callable[[int, Path, dict[str, Any]], dict[str, Any]]
Play = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def play(ranks: Ranks, tmp_path: Path) -> Play:
    """Runs a scenario on as many ranks, or in one process without a group, and gives what each
    found; nothing for one that was killed."""
    plays = itertools.count()

    def run(scenario: Scenario, world: int, **options: Any) -> list[dict[str, Any]]:
        folder = tmp_path / str(next(plays))
        folder.mkdir()
        backend = options.pop("backend", "gloo") if world else ""
        ends = ranks.ends(found_by, max(1, world), scenario, folder, options, backend=backend)
        assert not any(end.error for end in ends if end.status >= 0), ends
        return [end.value or {} for end in ends]

    return run


@pytest.fixture
def together(play: Play) -> Play:
    """Ranks restore what they hold."""

    def run(holds: list[list[Any]], **options: Any) -> list[dict[str, Any]]:
        return play(options.pop("scenario", restore), len(holds), holds=holds, **options)

    return run


def one(found: list[dict[str, Any]], key: str) -> Any:
    """What all ranks found alike."""
    values = [each.get(key, each) for each in found]
    assert all(value == values[0] for value in values), values
    return values[0]


def test_all_take_the_newest_step_of_any_rank_in_place(together: Play) -> None:
    found = together([[[10, 1.0]], [[10, 1.0], [20, 2.0]], []])
    assert one(found, "step") == one(found, "n") == 20
    assert one(found, "values") == [2.0]
    assert one(found, "holder") == 1
    assert one(found, "in_place")
    assert one(found, "passed_over") == []


def test_with_nothing_anywhere_all_start_at_0_and_nothing_is_changed(together: Play) -> None:
    found = together([[], []])
    assert (one(found, "step"), one(found, "kind"), one(found, "holder")) == (0, "", -1)
    assert one(found, "values") == [0.0]


def test_what_is_damaged_on_its_only_holder_is_passed_over_by_all(together: Play) -> None:
    found = together([[[10, 1.0]], [[20, 2.0, {"damage": True}]], [[5, 0.5]]])
    assert one(found, "step") == 10
    assert one(found, "values") == [1.0]
    assert one(found, "passed_over") == ["rank 1's step 20 (disk, step-20): step-20 is damaged"]


def test_all_ranks_raise_if_all_checkpoints_are_damaged_and_no_snapshot_is_there(
    together: Play,
) -> None:
    damaged = [10, 1.0, {"damage": True}]
    error = one(together([[damaged], []]), "error")
    assert error.startswith("CheckpointCorrupt: there are checkpoints, and none of them can be us")
    assert "rank 0's step 10" in error
    found = together([[damaged], [damaged]], if_unusable="start_over")
    assert (one(found, "step"), one(found, "n")) == (0, 0)
    assert len(one(found, "passed_over")) == 2
    found = together([[damaged], [[5, 0.5, {"kind": "memory"}]]])
    assert one(found, "step") == 5
    # Snapshots end with their agents anyway: without them there is nothing to protect.
    found = together([[[10, 1.0, {"damage": True, "kind": "memory"}]], []])
    assert one(found, "step") == 0


def test_whose_copy_is_damaged_is_sent_anothers(together: Play) -> None:
    found = together([[[20, 2.0, {"damage": True}]], [[20, 2.0]]])
    assert one(found, "step") == 20
    assert one(found, "values") == [2.0]
    assert one(found, "holder") == 1


def test_a_holder_whose_read_fails_is_passed_over_by_all(together: Play) -> None:
    found = together([[[10, 1.0], [20, 2.0]], []], faults={0: {"read": 20}})
    assert one(found, "step") == 10
    assert one(found, "values") == [1.0]
    [why] = one(found, "passed_over")
    assert why == "rank 0's step 20 (disk, step-20): OSError: [Errno 5] Input/output error"


def test_who_cannot_say_what_it_holds_fails_all_rather_than_losing_steps(together: Play) -> None:
    found = together([[[10, 1.0]], [[20, 2.0]]], faults={1: {"held": True}})
    error = one(found, "error")
    assert error.startswith(
        "CheckpointError: rank 1 could not list the states that it holds: OSError"
    )


def test_two_with_empty_disks_get_50_mib_in_chunks_and_one_pack_of_memory(together: Play) -> None:
    elements = 50 << 18
    found = together([[], [[7, 3.0]], []], elements=elements, chunk=3 << 20)
    assert one(found, "step") == 7
    assert one(found, "values") == [3.0]
    # The state itself is touched for the first time here, too.
    assert found[0]["peak_kib"] < 2 * (50 << 10) + (16 << 10)
    assert found[2]["peak_kib"] < 2 * (50 << 10) + (16 << 10)


def test_copies_that_differ_are_replaced_by_what_most_hold(together: Play) -> None:
    found = together([[[7, 1.0]], [[7, 2.0]], [[7, 2.0]]])
    assert one(found, "values") == [2.0]
    assert [each["holder"] for each in found] == [1, 1, 2]
    [why] = one(found, "passed_over")
    assert why == ("rank 0's step 7 (disk, step-7): it differs from that of rank 1, which is used")


def test_a_pack_that_is_changed_on_its_way_fails_all(together: Play) -> None:
    found = together([[[7, 1.0]], []], noisy=True)
    assert "CheckpointCorrupt: step 7 was corrupted in transit: rank 0 sent" in one(found, "error")


def test_a_state_that_one_rank_cannot_load_fails_all(together: Play) -> None:
    found = together([[[7, 1.0]], []], fragile=1)
    error = one(found, "error")
    assert error == (
        "CheckpointError: rank 1 failed to restore step 7: state['fragile'], a Fragile,"
        " could not load its state: ValueError: not mine"
    )


def test_names_on_one_side_only_are_refused_by_all_unless_allowed(together: Play) -> None:
    holds: list[list[Any]] = [[[7, 1.0]], []]
    error = one(together(holds, names=["w", "extra"]), "error")
    assert error.startswith("StateMismatch: rank 0 cannot restore step 7: nothing was saved under")
    assert "'extra'; the state has no 'n', which was saved" in error
    found = together(holds, names=["w", "extra"], strict=False)
    assert (one(found, "step"), one(found, "values")) == (7, [1.0])


def test_parts_count_only_if_all_their_elements_are_there(together: Play) -> None:
    two, three = {"parts": 2}, {"parts": 3}
    found = together(
        [
            [[9, 1.0, {**three, "part": 0}], [8, 2.0, {**two, "part": 0}], [5, 4.0]],
            [[9, 1.0, {**three, "part": 1}], [7, 3.0, {**two, "part": 1}]],
        ]
    )
    assert one(found, "step") == 5
    lacks = "is not whole: nobody holds part"
    assert one(found, "passed_over") == [
        f"step 9 (disk) {lacks} 2 of 3, and so 332 of the 1000 elements of w",
        f"step 8 (disk) {lacks} 1 of 2, and so 500 of the 1000 elements of w",
        f"step 7 (disk) {lacks} 0 of 2, and so 500 of the 1000 elements of w",
    ]


def part(number: int, parts: int, **more: Any) -> list[Any]:
    return [8, float(number), {"kind": "memory", "part": number, "parts": parts, **more}]


def test_parts_that_lie_with_one_another_are_exchanged(together: Play) -> None:
    found = together([[part(1, 3), part(2, 3)], [part(0, 3)], []], sharded=True)
    assert one(found, "step") == one(found, "n") == 8
    assert [each["values"] for each in found] == [[0.0], [1.0], [2.0]]
    assert [each["holder"] for each in found] == [1, 0, 0]
    assert one(found, "in_place")


def test_parts_of_any_number_of_ranks_are_read_where_they_lie_and_each_byte_is_sent_once(
    together: Play,
) -> None:
    found = together([[part(0, 2)], [part(1, 2)], []], sharded=True, elements=900)
    assert one(found, "step") == 8
    assert [each["values"] for each in found] == [[0.0], [0.0, 1.0], [1.0]]
    # The first rank has all that it needs, and the others are sent 150 and 300 numbers.
    assert [each["received"] for each in found] == [0, 600, 1200]
    found = together([[part(0, 3), part(2, 3)], [part(1, 3)]], sharded=True, elements=900)
    assert [each["values"] for each in found] == [[0.0, 1.0], [1.0, 2.0]]
    assert [each["received"] for each in found] == [600, 1200]
    found = together([[part(number, 4) for number in range(4)]], sharded=True)
    assert found[0]["values"] == [0.0, 1.0, 2.0, 3.0]
    found = together([[], [part(0, 1)], [], []], sharded=True, elements=3)
    assert [each["values"] for each in found] == [[0.0], [0.0], [0.0], []]


def test_a_part_that_is_damaged_or_cannot_be_read_comes_from_another_holder(together: Play) -> None:
    both = [part(0, 2), part(1, 2)]
    damaged = [part(0, 2, damage=True), part(1, 2)]
    found = together([damaged, both], sharded=True, nodes=[0, 1])
    assert (one(found, "step"), [each["values"] for each in found]) == (8, [[0.0], [1.0]])
    assert one(found, "passed_over") == ["rank 0's step 8 (memory, step-8): step-8 is damaged"]
    assert [each["holder"] for each in found] == [1, 1]
    found = together([both, both], sharded=True, faults={1: {"read": 8}})
    assert [each["values"] for each in found] == [[0.0], [1.0]]
    assert [each["holder"] for each in found] == [0, 0]
    found = together([[part(0, 2)], [part(1, 2, damage=True)]], sharded=True)
    assert (one(found, "step"), found[0]["in_place"]) == (0, True)
    assert len(one(found, "passed_over")) == 2


def test_shards_that_are_changed_on_their_way_fail_all(together: Play) -> None:
    lacks_all = [[part(0, 1)], []]
    # What is not sharded both have, so shards are all that is sent.
    lacks_shards = [[part(0, 3), part(1, 3)], [part(0, 3), part(2, 3)]]
    for held in (lacks_all, lacks_shards):
        assert "error" not in together(held, sharded=True, elements=900)[0]
        found = together(held, sharded=True, elements=900, noisy=True)
        said = "CheckpointCorrupt: step 8 was corrupted in transit: rank 0 sent"
        assert said in one(found, "error")


def test_a_sharded_disk_is_read_by_each_for_itself_and_sent_to_who_cannot(together: Play) -> None:
    def kept(step: int, **more: Any) -> list[Any]:
        return [step, float(step), {"kind": "sharded disk", "parts": 3, **more}]

    both = [kept(9), kept(8)]
    found = together([both, both], sharded=True)
    assert (one(found, "step"), one(found, "kind"), one(found, "values")) == (
        9,
        *("sharded disk", [9.0]),
    )
    assert one(found, "received") == 0
    found = together([both, [kept(9, damage=True), kept(8)]], sharded=True)
    assert (one(found, "step"), one(found, "values")) == (8, [8.0])
    found = together([both, [kept(8)]], sharded=True)
    assert (one(found, "step"), one(found, "values")) == (9, [9.0])
    assert [each["received"] for each in found] == [0, 2000]


def test_a_holder_that_is_killed_leaves_nobody_waiting(together: Play) -> None:
    found = together([[[7, 1.0]], [], []], faults={0: {"die": 7}})
    assert found[0] == {}
    assert "error" in found[1]
    assert "error" in found[2]


def test_one_process_without_a_group_takes_its_newest_whole_one(play: Play) -> None:
    holds = [[[5, 1.0], [6, 2.0], [7, 3.0, {"damage": True}]]]
    [found] = play(restore, 0, holds=holds)
    assert (found["step"], found["values"], found["holder"]) == (6, [2.0], 0)


def test_where_the_group_moves_no_cpu_tensors_one_is_made_for_the_time(together: Play) -> None:
    found = together([[[7, 1.0]], []], scenario=own_group, backend="cuda:gloo")
    assert (one(found, "step"), one(found, "values")) == (7, [1.0])
    assert one(found, "other")
    assert one(found, "left") == 0
    assert one(found, "told") == [[2, 0], [2, 1]]
    [moves_none, not_in_it], [again] = (each["refused"] for each in found)
    assert moves_none == again
    assert moves_none.startswith("the group given is of cuda:gloo and moves no CPU tensors: give")
    assert not_in_it == "this process is not in the group given, and restores nothing with it"


@pytest.mark.parametrize("at", [[0, 1], [1, 0]], ids=["own", "exchanged"])
def test_sharded_modules_and_optimizers_go_on_as_if_nothing_had_been(play: Play, at: Any) -> None:
    found = play(sharded, 2, at=at)
    assert (one(found, "step"), one(found, "n")) == (3, 3)
    assert one(found, "same")
    assert [each["bare"] for each in found] == [[1.0], [2.0]]
    assert [each["shape"] for each in found] == [[3, 2], [2, 2]]
