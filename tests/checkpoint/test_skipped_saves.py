"""`save(..., if_busy="skip")`: saves that are skipped while the previous save is being written."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import GatedStorage, capture_errors
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from elasticlib import CheckpointManager
from elasticlib.checkpoint.storage import LocalStorage
from elasticlib.errors import CheckpointError, ConfigError
from elasticlib.testing.waiting import wait_until


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), float(value))}


def test_a_save_is_skipped_only_while_the_previous_one_is_being_written(tmp_path: Path) -> None:
    storage = GatedStorage(tmp_path)
    with CheckpointManager(storage) as manager:
        first = manager.save(1, state_of(1), if_busy="skip")
        assert not first.is_skipped
        skipped = manager.save(2, state_of(2), if_busy="skip")
        assert (skipped.is_skipped, skipped.done(), skipped.error) == (True, True, None)
        assert repr(skipped) == "<SaveHandle of step 2: skipped>"
        skipped.wait()
        assert manager.last_stall_s < 10
        storage.gate.set()
        first.wait()
        assert not manager.save(3, state_of(3), if_busy="skip").is_skipped
        manager.wait()
        assert manager.steps() == [1, 3]
        assert manager.load(3)["w"].tolist() == [3, 3, 3]


def test_a_save_that_waits_is_the_default_and_is_never_skipped(tmp_path: Path) -> None:
    storage = GatedStorage(tmp_path)
    with CheckpointManager(storage) as manager:
        manager.save(1, state_of(1))
        threading.Timer(0.1, storage.gate.set).start()
        assert not manager.save(2, state_of(2)).is_skipped
        assert not manager.save(3, state_of(3), if_busy="wait").is_skipped
    assert manager.steps() == [1, 2, 3]


def test_save_rejects_other_values_of_if_busy(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ConfigError, match=r"if_busy must be .*, got 'drop'"),
    ):
        manager.save(1, state_of(1), if_busy="drop")  # type: ignore[arg-type]


def test_a_skipped_save_does_not_hide_the_failure_of_the_previous_one(tmp_path: Path) -> None:
    storage = GatedStorage(tmp_path)
    storage.full = True
    with CheckpointManager(storage) as manager:
        first = manager.save(1, state_of(1))
        assert manager.save(2, state_of(2), if_busy="skip").is_skipped
        storage.gate.set()
        wait_until("the end of the first save", first.done)
        with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
            manager.save(3, state_of(3), if_busy="skip")
        storage.full = False
        assert not manager.save(4, state_of(4), if_busy="skip").is_skipped
    assert manager.steps() == [4]


def sharded_state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((5,), float(value)), mesh, [Shard(0)])}


class GatedByFile(LocalStorage):
    """Writes no data before a file exists."""

    def __init__(self, folder: Path, gate: Path) -> None:
        super().__init__(folder)
        self.gate = gate

    def write(self, name: str, data: memoryview) -> int:
        wait_until("the gate", self.gate.exists)
        return super().write(name, data)


def skip_on_two_ranks(folder: Path, is_sharded: bool, gated_rank: int) -> list[Any]:
    """Save three times, the second time while one rank is still writing. Return what happened."""
    make, rank, gate = sharded_state if is_sharded else state_of, dist.get_rank(), folder / "gate"
    storage = LocalStorage(folder / "checkpoints")
    if rank == gated_rank:
        storage = GatedByFile(folder / "checkpoints", gate)
    with CheckpointManager(storage) as manager:
        saves = [manager.save(1, make(1), if_busy="skip")]
        saves.append(manager.save(2, make(2), if_busy="skip"))
        dist.barrier()
        gate.touch()
        saves[0].wait()
        dist.barrier()
        saves.append(manager.save(3, make(3), if_busy="skip"))
        manager.wait()
        return [[save.is_skipped for save in saves], manager.steps()]


@pytest.mark.parametrize(("is_sharded", "gated_rank"), [(False, 0), (True, 0), (True, 1)])
def test_all_ranks_skip_the_same_saves(
    ranks: Ranks, tmp_path: Path, is_sharded: bool, gated_rank: int
) -> None:
    results = ranks.run(skip_on_two_ranks, 2, tmp_path, is_sharded, gated_rank)
    assert results == [[[False, True, False], [1, 3]]] * 2


class SavesWithin:
    """An object that calls `save` while its own state is being saved."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager
        self.errors: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        with capture_errors() as errors:
            self.manager.save(2, {}, if_busy="skip")
        self.errors += errors
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def save_within_a_save_on_rank_0(folder: Path) -> list[str]:
    """Save twice, the second time within the first call on rank 0. Return the second errors."""
    with CheckpointManager(folder) as manager:
        state = SavesWithin(manager)
        if dist.get_rank() == 0:
            manager.save(1, {"object": state})
            return state.errors
        manager.save(1, {"object": {}})
        with capture_errors() as errors:
            manager.save(2, {}, if_busy="skip")
        return errors


def test_a_call_that_rank_0_rejects_fails_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (first,), (second,) = ranks.run(save_within_a_save_on_rank_0, 2, tmp_path)
    assert "another call of save()" in first
    assert second == f"step 2 was not saved by rank 0: {first}"


def test_skip_on_several_ranks_needs_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match=r"if_busy='skip' on several ranks.* no process group"),
    ):
        manager.save(1, state_of(1), if_busy="skip")
