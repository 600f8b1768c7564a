"""Rollbacks: what is saved after a restore is continued, and what it left behind is abandoned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from managers import create_manager

from elasticlib import CheckpointManager, KeepBest, KeepEvery, KeepLast, any_of
from elasticlib.errors import CheckpointError, CheckpointFencedError, ConfigError
from elasticlib.launch.cli import main


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.full((3,), float(step)), "step": step}


def save(manager: CheckpointManager, steps: Sequence[int], **options: Any) -> None:
    for step in steps:
        manager.save(step, state_of(step), **options).wait()


def restored(manager: CheckpointManager, step: int | str | None = None) -> int:
    """Restore, and return the step, after a check that the values are those of the step."""
    state = state_of(-1)
    result = manager.restore(state, step)
    if result:
        assert state["step"] == result.step
        assert state["x"].tolist() == [float(result.step)] * 3
    return result.step


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_rollback_is_continued_and_the_abandoned_steps_give_way(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        save(manager, [500, 1000])
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        assert restored(manager, 500) == 500
        save(manager, [510, 520])
        assert manager.steps() == [500, 510, 520]
        assert manager.latest() == 520
        # The abandoned step is not deleted before three newer ones exist.
        assert any("0000001000." in path for path in files(tmp_path))
    with CheckpointManager(tmp_path, keep_last=3) as manager:
        assert restored(manager) == 520
        save(manager, [530, 1100, 1200])
        assert manager.steps() == [530, 1100, 1200]
        assert not any("0000001000." in path for path in files(tmp_path))


def test_loading_a_step_for_an_evaluation_leaves_the_job_where_it_was(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        save(manager, [500, 1000])
    before = files(tmp_path)
    with CheckpointManager(tmp_path) as manager:
        assert restored(manager, 500) == 500
        assert restored(manager) == 1000
    assert files(tmp_path) == before


def test_a_second_rollback_in_one_process_begins_another_branch(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=9) as manager:
        save(manager, [10, 20])
        assert restored(manager, 10) == 10
        save(manager, [20, 30])
        assert restored(manager, 20) == 20
        save(manager, [25])
        assert manager.steps() == [10, 20, 25]
        assert restored(manager) == 25
        # Both abandoned states of step 30 and 20 are of one step each.
        assert restored(manager, 30) == 30


def test_of_several_abandoned_states_of_a_step_the_folder_is_named(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=9) as manager:
        save(manager, [10, 20])
        for step in (20, 15):
            restored(manager, 10)
            save(manager, [step])
        with pytest.raises(CheckpointError, match=r"name one of the folders.*step-0000000020"):
            restored(manager, 20)
        folders = sorted(path.name for path in tmp_path.glob("step-0000000020.*"))
        assert [restored(manager, folder) for folder in folders] == [20, 20]
        with pytest.raises(FileNotFoundError, match=r"there is no step step-0000000020\.x"):
            restored(manager, "step-0000000020.x")


def test_a_pinned_step_that_was_abandoned_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        save(manager, [500])
        save(manager, [1000], pin=True)
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        restored(manager, 500)
        save(manager, [510, 520, 530])
        assert manager.steps() == [520, 530]
        pinned = manager.path(1000)
        assert os.path.isfile(os.path.join(pinned, "pinned"))
        manager.unpin(1000)
        assert manager.prune().deleted == (1000,)
        assert not os.path.exists(pinned)
        manager.pin(520)
        save(manager, [540, 550])
        assert manager.steps() == [520, 540, 550]
        assert manager.steps(pinned_only=True) == [520]


def test_a_training_that_restores_nothing_abandons_what_is_there(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        save(manager, [100, 200])
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        save(manager, [1])
        assert manager.steps() == [1]
        assert sorted(path.name[:15] for path in tmp_path.glob("step-*")) == [
            "step-0000000001",
            "step-0000000100",
            "step-0000000200",
        ]
        save(manager, [2])
    assert len(list(tmp_path.glob("step-*"))) == 2
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        assert restored(manager) == 2


def test_the_restore_of_a_part_does_not_move_the_job(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=9) as manager:
        save(manager, [10, 20])
        partial = {"x": torch.zeros(3)}
        assert manager.restore(partial, 10, strict=False).step == 10
        save(manager, [30])
        assert manager.steps() == [10, 20, 30]


def test_a_process_without_a_launcher_cannot_end_a_job(tmp_path: Path) -> None:
    job = create_manager(tmp_path, {"run": "job7", "launch": "a", "generation": 1})
    save(job, [10])
    notebook = CheckpointManager(tmp_path)
    assert restored(notebook) == 10
    save(job, [20])
    with pytest.raises(
        CheckpointFencedError, match=r"'job7'.*use another directory, or call claim"
    ):
        save(notebook, [21])
    save(job, [30])
    # A new launch, and the next generation, take the directory without a question.
    later = create_manager(tmp_path, {"run": "job7", "launch": "a", "generation": 2})
    restored(later)
    save(later, [40])
    notebook.claim()
    assert restored(notebook) == 40
    with pytest.raises(CheckpointFencedError, match="took the directory over"):
        save(later, [50])
    save(notebook, [41])
    assert notebook.steps()[-1] == 41


def test_an_evaluation_of_the_same_launcher_takes_the_directory_only_when_it_saves(
    tmp_path: Path,
) -> None:
    job = create_manager(tmp_path, {"run": "job", "launch": "a", "generation": 1})
    save(job, [10])
    evaluation = create_manager(tmp_path, {"run": "eval", "launch": "b", "generation": 1})
    assert restored(evaluation) == 10
    save(job, [20])
    save(evaluation, [11])
    with pytest.raises(CheckpointFencedError, match="took the directory over"):
        save(job, [30])


def test_rules_are_combined(tmp_path: Path) -> None:
    rule = any_of(KeepLast(1), KeepEvery(100), KeepBest("loss"), KeepBest("accuracy", highest=True))
    with CheckpointManager(tmp_path, keep=rule) as manager:
        for step, loss, accuracy in [
            (50, 9, 1),
            (100, 5, 2),
            (150, 1, 3),
            (200, 2, 8),
            (250, 3, 4),
        ]:
            save(manager, [step], metrics={"loss": loss, "accuracy": accuracy})
        save(manager, [300 + 10])
        assert manager.steps() == [100, 150, 200, 310]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "KeepLast must be an int >= 1, got 0"),
        ({"keep_last": 3, "keep": KeepLast(3)}, "not both"),
        ({"keep": 3}, "a rule such as KeepLast"),
    ],
)
def test_invalid_rules_are_rejected(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointManager(tmp_path, **options)


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: KeepEvery(0), "KeepEvery must be an int >= 1, got 0"),
        (lambda: KeepBest(""), "the name of a metric"),
        (lambda: any_of(), "at least one rule"),
        (lambda: any_of(3), "combines rules"),
    ],
)
def test_invalid_rules_raise_when_they_are_created(create: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create()


def test_metrics_that_are_no_numbers_are_rejected(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(ConfigError, match="'loss': nan"):
        manager.save(1, state_of(1), metrics={"loss": float("nan")})


def test_the_command_lists_what_is_abandoned_and_since_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointManager(tmp_path) as manager:
        save(manager, [500, 1000])
        restored(manager, 500)
        save(manager, [510])
    assert main(["checkpoints", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["1000", "510", "500"]
    assert rows[1].endswith("complete, abandoned when the job went back to 500")
    assert "abandoned" not in "".join(rows[2:])


@pytest.mark.usefixtures("generation_memory")
def test_a_rollback_is_continued_from_memory(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with CheckpointManager(folder) as manager:
        save(manager, [500, 1000])
        manager.snapshot(1010, state_of(1010))
    with CheckpointManager(folder) as manager:
        assert restored(manager) == 1010
        assert restored(manager, 500) == 500
        assert restored(manager) == 1010
        restored(manager, 500)
        manager.snapshot(501, state_of(501))
    with CheckpointManager(folder) as manager:
        assert restored(manager) == 501


def test_many_damaged_abandoned_states_hide_no_damage_of_the_line(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=99) as manager:
        save(manager, [500, *range(1000, 1020)])
        assert restored(manager, 500) == 500
        save(manager, [510, 520])
    for manifest in tmp_path.glob("step-*/manifest.json"):
        if "step-0000000500" not in str(manifest) and "step-0000000510" not in str(manifest):
            manifest.write_bytes(b"damaged")
    with CheckpointManager(tmp_path) as manager:
        state = state_of(-1)
        result = manager.restore(state)
        assert (result.step, state["step"]) == (510, 510)
        assert any("step-0000000520" in reason for reason in result.skipped), result.skipped
