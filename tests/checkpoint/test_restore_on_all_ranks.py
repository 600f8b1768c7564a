"""Ranks that restore together restore one state or raise together: real processes over gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from restoring_ranks import restore, restore_without_cpu_backend, run_scenario, train_and_resume

Scenario = Callable[[int, Path, dict[str, Any]], dict[str, Any]]
Play = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def play(ranks: Ranks, tmp_path: Path) -> Play:
    """Run a scenario on some ranks, or on 0 ranks: in one process without a group.

    Returns the result of each rank; a rank that was killed has none.
    """
    numbers = itertools.count()

    def run(scenario: Scenario, world_size: int, **options: Any) -> list[dict[str, Any]]:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        backend = options.pop("backend", "gloo") if world_size else ""
        args = (scenario, folder, options)
        ends = ranks.results(run_scenario, max(1, world_size), *args, backend=backend)
        assert not any(end.error for end in ends if end.status >= 0), ends
        return [end.value or {} for end in ends]

    return run


@pytest.fixture
def restored(play: Play) -> Play:
    """Restore what the ranks hold, see `restoring_ranks.restore`."""

    def run(holds: list[list[Any]], **options: Any) -> list[dict[str, Any]]:
        return play(options.pop("scenario", restore), len(holds), holds=holds, **options)

    return run


def common(results: list[dict[str, Any]], key: str) -> Any:
    """Return the value that all ranks have in common."""
    values = [result.get(key, result) for result in results]
    assert all(value == values[0] for value in values), values
    return values[0]


def each(results: list[dict[str, Any]], key: str) -> list[Any]:
    return [result[key] for result in results]


def test_all_ranks_restore_the_newest_step_of_any_rank_in_place(restored: Play) -> None:
    results = restored([[[10, 1.0]], [[10, 1.0], [20, 2.0]], []])
    assert common(results, "step") == common(results, "n") == 20
    assert common(results, "values") == [2.0]
    assert common(results, "holder") == 1
    assert common(results, "in_place")
    assert common(results, "skipped") == []


def test_without_any_state_nothing_is_changed(restored: Play) -> None:
    results = restored([[], []])
    agreed = tuple(common(results, key) for key in ("step", "kind", "holder"))
    assert agreed == (0, "", -1)
    assert common(results, "values") == [0.0]


def test_all_ranks_skip_a_state_that_is_corrupt_on_its_only_holder(restored: Play) -> None:
    results = restored([[[10, 1.0]], [[20, 2.0, {"damage": True}]], [[5, 0.5]]])
    assert common(results, "step") == 10
    assert common(results, "values") == [1.0]
    assert common(results, "skipped") == ["rank 1's step 20 (disk, step-20): step-20 is damaged"]


def test_all_ranks_raise_if_all_checkpoints_are_corrupt_and_there_is_no_snapshot(
    restored: Play,
) -> None:
    damaged = [10, 1.0, {"damage": True}]
    error = common(restored([[damaged], []]), "error")
    assert error.startswith(
        "CheckpointCorruptError: there are checkpoints, and none of them can be us"
    )
    assert "rank 0's step 10" in error
    results = restored([[damaged], [damaged]], if_unusable="start_over")
    assert (common(results, "step"), common(results, "n")) == (0, 0)
    assert len(common(results, "skipped")) == 2
    results = restored([[damaged], [[5, 0.5, {"tier": "memory"}]]])
    assert common(results, "step") == 5
    # Snapshots are lost with their agents anyway, so a corrupt one does not prevent a new start.
    results = restored([[[10, 1.0, {"damage": True, "tier": "memory"}]], []])
    assert common(results, "step") == 0


def test_rank_whose_copy_is_corrupt_receives_the_copy_of_another_rank(restored: Play) -> None:
    results = restored([[[20, 2.0, {"damage": True}]], [[20, 2.0]]])
    assert common(results, "step") == 20
    assert common(results, "values") == [2.0]
    assert common(results, "holder") == 1


def test_all_ranks_skip_a_holder_whose_read_fails(restored: Play) -> None:
    results = restored([[[10, 1.0], [20, 2.0]], []], faults={0: {"read": 20}})
    assert common(results, "step") == 10
    assert common(results, "values") == [1.0]
    [reason] = common(results, "skipped")
    assert reason == "rank 0's step 20 (disk, step-20): OSError: [Errno 5] Input/output error"


def test_all_ranks_raise_if_one_cannot_list_its_states(restored: Play) -> None:
    results = restored([[[10, 1.0]], [[20, 2.0]]], faults={1: {"list": True}})
    error = common(results, "error")
    assert (
        error == "CheckpointError: rank 1 could not list its states: OSError: the disk was removed"
    )


def test_receivers_of_50_mib_need_memory_for_one_pack(restored: Play) -> None:
    results = restored([[], [[7, 3.0]], []], elements=50 << 18)
    assert common(results, "step") == 7
    assert common(results, "values") == [3.0]
    # The pages of the state itself are allocated in this time, too.
    assert results[0]["peak_kib"] < 2 * (50 << 10) + (16 << 10)
    assert results[2]["peak_kib"] < 2 * (50 << 10) + (16 << 10)


def test_holders_take_part_in_a_broadcast_and_keep_their_own_copy(restored: Play) -> None:
    results = restored([[[7, 3.0]], [[7, 3.0]], []], elements=12 << 20)
    assert common(results, "values") == [3.0]
    assert each(results, "holder") == [0, 1, 0]


def test_copies_that_differ_are_replaced_by_the_copy_of_most_ranks(restored: Play) -> None:
    results = restored([[[7, 1.0]], [[7, 2.0]], [[7, 2.0]]])
    assert common(results, "values") == [2.0]
    assert each(results, "holder") == [1, 1, 2]
    [reason] = common(results, "skipped")
    assert reason == (
        "rank 0's step 7 (disk, step-7): it differs from that of rank 1, which is used"
    )


def test_all_ranks_raise_if_a_pack_is_changed_in_transit(restored: Play) -> None:
    error = common(restored([[[7, 1.0]], []], noisy=True), "error")
    assert "CheckpointCorruptError: step 7 was corrupted in transit: rank 0 sent" in error


def test_all_ranks_raise_if_one_cannot_load_the_state(restored: Play) -> None:
    error = common(restored([[[7, 1.0]], []], fails_to_load=1), "error")
    assert error == (
        "CheckpointError: rank 1 failed to restore step 7: state['object'], a FailsToLoad,"
        " could not load its state: ValueError: not mine"
    )


def test_names_on_one_side_are_an_error_on_all_ranks_unless_allowed(restored: Play) -> None:
    holds: list[list[Any]] = [[[7, 1.0]], []]
    error = common(restored(holds, names=["w", "extra"]), "error")
    assert error.startswith(
        "StateMismatchError: rank 0 cannot restore step 7: nothing was saved under"
    )
    assert "'extra'; the state has no 'n', which was saved" in error
    results = restored(holds, names=["w", "extra"], strict=False)
    assert (common(results, "step"), common(results, "values")) == (7, [1.0])


def test_sharded_state_is_skipped_if_elements_are_missing(restored: Play) -> None:
    two, three = {"parts": 2, "tier": "memory"}, {"parts": 3, "tier": "memory"}
    results = restored(
        [
            [[9, 1.0, {**three, "part": 0}], [8, 2.0, {**two, "part": 0}], [5, 4.0]],
            [[9, 1.0, {**three, "part": 1}], [7, 3.0, {**two, "part": 1}]],
        ]
    )
    assert common(results, "step") == 5
    missing = "is incomplete: no rank has part"
    assert common(results, "skipped") == [
        f"step 9 (memory) {missing} 2 of 3, so 332 of the 1000 elements of w are missing",
        f"step 8 (memory) {missing} 1 of 2, so 500 of the 1000 elements of w are missing",
        f"step 7 (memory) {missing} 0 of 2, so 500 of the 1000 elements of w are missing",
    ]


def part(number: int, num_parts: int, **more: Any) -> list[Any]:
    options = {"tier": "memory", "part": number, "parts": num_parts, **more}
    return [8, float(number), options]


def test_ranks_receive_the_parts_that_other_ranks_hold(restored: Play) -> None:
    results = restored([[part(1, 3), part(2, 3)], [part(0, 3)], []], sharded=True)
    assert common(results, "step") == common(results, "n") == 8
    assert each(results, "values") == [[0.0], [1.0], [2.0]]
    assert each(results, "holder") == [1, 0, 0]
    assert common(results, "in_place")


def test_parts_of_any_number_of_ranks_are_restored_and_each_byte_is_sent_once(
    restored: Play,
) -> None:
    results = restored([[part(0, 2)], [part(1, 2)], []], sharded=True, elements=900)
    assert common(results, "step") == 8
    assert each(results, "values") == [[0.0], [0.0, 1.0], [1.0]]
    # The first rank has all elements that it needs, and the others receive 150 and 300.
    assert each(results, "received") == [0, 600, 1200]
    results = restored([[part(0, 3), part(2, 3)], [part(1, 3)]], sharded=True, elements=900)
    assert each(results, "values") == [[0.0, 1.0], [1.0, 2.0]]
    assert each(results, "received") == [600, 1200]
    results = restored([[part(number, 4) for number in range(4)]], sharded=True)
    assert results[0]["values"] == [0.0, 1.0, 2.0, 3.0]
    results = restored([[], [part(0, 1)], [], []], sharded=True, elements=3)
    assert each(results, "values") == [[0.0], [0.0], [0.0], []]


def test_part_that_is_corrupt_or_unreadable_is_read_from_another_holder(restored: Play) -> None:
    both = [part(0, 2), part(1, 2)]
    damaged = [part(0, 2, damage=True), part(1, 2)]
    results = restored([damaged, both], sharded=True, nodes=[0, 1])
    assert (common(results, "step"), each(results, "values")) == (8, [[0.0], [1.0]])
    assert common(results, "skipped") == ["rank 0's step 8 (memory, step-8): step-8 is damaged"]
    assert each(results, "holder") == [1, 1]
    results = restored([both, both], sharded=True, faults={1: {"read": 8}})
    assert each(results, "values") == [[0.0], [1.0]]
    assert each(results, "holder") == [0, 0]
    results = restored([[part(0, 2)], [part(1, 2, damage=True)]], sharded=True)
    assert (common(results, "step"), results[0]["in_place"]) == (0, True)
    assert len(common(results, "skipped")) == 2


def test_all_ranks_raise_if_shards_are_changed_in_transit(restored: Play) -> None:
    lacks_all = [[part(0, 1)], []]
    # Both ranks have the values that are not sharded, so only shards are sent.
    lacks_shards = [[part(0, 3), part(1, 3)], [part(0, 3), part(2, 3)]]
    for holds in (lacks_all, lacks_shards):
        assert "error" not in restored(holds, sharded=True, elements=900)[0]
        error = common(restored(holds, sharded=True, elements=900, noisy=True), "error")
        assert "CheckpointCorruptError: step 8 was corrupted in transit: rank 0 sent" in error


def test_sharded_checkpoint_is_read_by_each_rank_and_sent_to_ranks_that_cannot(
    restored: Play,
) -> None:
    def checkpoint(step: int, **more: Any) -> list[Any]:
        return [step, float(step), {"parts": 3, **more}]

    both = [checkpoint(9), checkpoint(8)]
    results = restored([both, both], sharded=True)
    assert (common(results, "step"), common(results, "kind")) == (9, "disk")
    assert common(results, "values") == [9.0]
    assert common(results, "received") == 0
    damaged = [checkpoint(9, damage=True), checkpoint(8)]
    results = restored([both, damaged], sharded=True)
    assert (common(results, "step"), common(results, "values")) == (8, [8.0])
    results = restored([both, [checkpoint(8)]], sharded=True)
    assert (common(results, "step"), common(results, "values")) == (9, [9.0])
    assert each(results, "received") == [0, 2000]


def test_no_rank_waits_for_a_holder_that_was_killed(restored: Play) -> None:
    results = restored([[[7, 1.0]], [], []], faults={0: {"die": 7}})
    assert results[0] == {}
    assert "error" in results[1]
    assert "error" in results[2]


def test_one_process_without_a_group_restores_its_newest_intact_state(play: Play) -> None:
    holds = [[[5, 1.0], [6, 2.0], [7, 3.0, {"damage": True}]]]
    [result] = play(restore, 0, holds=holds)
    assert (result["step"], result["values"], result["holder"]) == (6, [2.0], 0)


def test_temporary_group_is_used_if_the_default_group_transfers_no_cpu_tensors(
    restored: Play,
) -> None:
    scenario, holds = restore_without_cpu_backend, [[[7, 1.0]], []]
    results = restored(holds, scenario=scenario, backend="cuda:gloo")
    assert (common(results, "step"), common(results, "values")) == (7, [1.0])
    assert common(results, "temporary")
    assert common(results, "left") == 0
    assert common(results, "gathered") == [[2, 0], [2, 1]]
    [no_cpu, not_a_member], [again] = each(results, "errors")
    assert no_cpu == again
    assert no_cpu.startswith("the given group uses cuda:gloo and transfers no CPU tensors: give")
    assert not_a_member == "this process is not in the given group, so it cannot restore with it"


@pytest.mark.parametrize("at", [[0, 1], [1, 0]], ids=["own", "exchanged"])
def test_sharded_model_and_optimizer_continue_as_without_interruption(play: Play, at: Any) -> None:
    results = play(train_and_resume, 2, at=at)
    assert (common(results, "step"), common(results, "n")) == (3, 3)
    assert common(results, "same")
    assert each(results, "values") == [[1.0], [2.0]]
    assert each(results, "shape") == [[3, 2], [2, 2]]
