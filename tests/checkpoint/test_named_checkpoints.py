"""A step can be saved again. Then the later save counts, and each of them can be named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointError


def save_twice(folder: Path) -> tuple[CheckpointManager, str, str]:
    """Save step 5 twice, and pin the first save. Return the manager and both folders."""
    manager = CheckpointManager(folder, keep_last=1)
    manager.save(5, {"value": 1}, pin=True).wait()
    first = Path(manager.path(5)).name
    manager.save(5, {"value": 2}).wait()
    return manager, first, Path(manager.path(5)).name


def test_the_later_save_of_a_step_is_restored(tmp_path: Path) -> None:
    manager, *_ = save_twice(tmp_path)
    with manager, CheckpointManager(tmp_path) as other:
        for reader in (manager, other):
            state: dict[str, Any] = {"value": 0}
            assert reader.restore(state).step == 5
            assert state == reader.load() == {"value": 2}


def test_each_save_of_a_step_can_be_named(tmp_path: Path) -> None:
    manager, first, second = save_twice(tmp_path)
    with manager:
        for step, value in ((5, 2), (first, 1), (second, 2)):
            assert manager.load(step) == {"value": value}
            assert Path(manager.path(step)).name == (first if value == 1 else second)
            state: dict[str, Any] = {"value": 0}
            assert manager.restore(state, step=step).step == 5
            assert state == {"value": value}


def test_the_pin_of_an_earlier_save_of_a_step_stays_until_it_is_removed_by_name(
    tmp_path: Path,
) -> None:
    manager, first, second = save_twice(tmp_path)
    with manager:
        manager.unpin(5)
        manager.save(6, {"value": 3}).wait()
        assert not (tmp_path / second).exists()
        assert (manager.steps(pinned_only=True), manager.load(5)) == ([5], {"value": 1})
        manager.unpin(first)
        manager.prune()
        assert manager.steps() == [6]


def test_a_folder_that_is_damaged_is_not_replaced_by_another_save_of_its_step(
    tmp_path: Path,
) -> None:
    manager, first, second = save_twice(tmp_path)
    with manager:
        path = tmp_path / first / "state.safetensors"
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
        state: dict[str, Any] = {"value": 0}
        with pytest.raises(CheckpointError, match=f"{first}.*cannot be restored"):
            manager.restore(state, step=first)
        assert state == {"value": 0}
        assert manager.restore(state, step=second).step == 5
