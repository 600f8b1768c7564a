"""`CheckpointManager(per_rank=...)`: values that each rank saves and restores for itself."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import capture_errors
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from elasticlib import CheckpointManager
from elasticlib.checkpoint.per_rank import decode_values
from elasticlib.errors import CheckpointCorruptError, ConfigError, StateMismatchError

Names = dict[str, Callable[[int], Any] | None] | tuple[str, ...]


def state_of(rank: int, *, is_sharded: bool) -> dict[str, Any]:
    tensor = torch.arange(6.0)
    if is_sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        tensor = distribute_tensor(tensor, mesh, [Shard(0)])
    generator = torch.Generator().manual_seed(10 + rank)
    return {"w": tensor, "rng": generator, "loss": rank / 2, "same": [1]}


def keep(is_sharded: bool, on_disk: bool, folder: Path) -> list[float]:
    """Save or snapshot twice. Return what each rank's generator gives next."""
    state = state_of(dist.get_rank(), is_sharded=is_sharded)
    with CheckpointManager(folder, per_rank=("rng", "loss")) as manager:
        for step in (1, 2):
            torch.rand(1, generator=state["rng"])
            if on_disk:
                manager.save(step, state).wait()
            else:
                assert manager.snapshot(step, state)
            dist.barrier()
    return [state["loss"], float(torch.rand(1, generator=state["rng"]))]


def restore(is_sharded: bool, names: Names, folder: Path) -> list[Any]:
    state = state_of(7, is_sharded=is_sharded)
    manager = CheckpointManager(folder, per_rank=names)
    found = manager.restore(state)
    same = state["w"].full_tensor() if is_sharded else state["w"]
    assert (found.step, state["same"], same.tolist()) == (2, [1], list(range(6)))
    return [state["loss"], float(torch.rand(1, generator=state["rng"]))]


def value_of_new_rank(rank: int) -> float:
    return 100.0 + rank


def generator_of_new_rank(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


WITH_FUNCTIONS: Names = {"loss": value_of_new_rank, "rng": generator_of_new_rank}


def restore_or_fail(is_sharded: bool, names: Names, folder: Path) -> str:
    try:
        restore(is_sharded, names, folder)
    except StateMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("on_disk", [True, False], ids=["disk", "memory"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
def test_each_rank_gets_its_values_back_and_functions_give_those_of_new_ranks(
    ranks: Ranks, tmp_path: Path, generation_memory: Path, is_sharded: bool, on_disk: bool
) -> None:
    saved = ranks.run(keep, 2, is_sharded, on_disk, tmp_path / "c")
    assert saved[0] != saved[1]
    if not on_disk:
        # The workers are started again.
        (generation_memory.parent / "2").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ELASTICLIB_SNAPSHOTS", str(generation_memory.parent / "2"))
            patch.setenv("ELASTICLIB_GENERATION", "2")
            assert ranks.run(restore, 2, is_sharded, ("rng", "loss"), tmp_path / "c") == saved
        return
    assert ranks.run(restore, 2, is_sharded, ("rng", "loss"), tmp_path / "c") == saved
    for errors in ranks.run(restore_or_fail, 3, is_sharded, ("rng", "loss"), tmp_path / "c"):
        assert "was saved by each of 2 ranks, and now there are 3" in errors
        assert "per_rank={" in errors
    *old, new = ranks.run(restore, 3, is_sharded, WITH_FUNCTIONS, tmp_path / "c")
    assert old == saved
    assert new == [102.0, float(torch.rand(1, generator=generator_of_new_rank(2)))]
    assert ranks.run(restore, 1, is_sharded, WITH_FUNCTIONS, tmp_path / "c") == saved[:1]
    loaded = CheckpointManager(tmp_path / "c").load()
    assert loaded["loss"] == [0.0, 0.5]
    assert not torch.equal(*loaded["rng"])


def test_a_single_process_saves_values_by_rank_and_old_checkpoints_need_a_function(
    tmp_path: Path,
) -> None:
    state = {"a": 1, "rng": 5}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state).wait()
    with CheckpointManager(tmp_path, per_rank=("rng",)) as manager:
        with pytest.raises(StateMismatchError, match=r"state\['rng'\] was not saved by rank"):
            manager.restore(state)
        manager.save(2, state).wait()
        state["rng"] = 0
        assert manager.restore(state).step == 2
        assert state == {"a": 1, "rng": 5}
        with capture_errors() as errors:
            manager.save(3, {"a": 1})
        assert "per_rank has 'rng', and the state has no such name" in errors[0]
    with CheckpointManager(tmp_path, per_rank={"rng": value_of_new_rank}) as manager:
        manager.restore(state, 1)
        assert state == {"a": 1, "rng": 100.0}
    with pytest.raises(ConfigError, match="per_rank must have names"):
        CheckpointManager(tmp_path, per_rank="rng")


def test_values_of_a_rank_have_a_limit_when_they_are_saved_and_when_they_are_restored(
    tmp_path: Path,
) -> None:
    large = torch.zeros(64 << 20, dtype=torch.uint8)  # a few KB when compressed
    with CheckpointManager(tmp_path, per_rank=("large",)) as manager:
        with capture_errors() as errors:
            manager.save(1, {"w": torch.ones(2), "large": large}).wait()
        assert "per_rank 'large' have" in errors[0]
        assert "at most 67108864 are saved by rank" in errors[0]
        assert manager.steps() == []
    text = base64.b64encode(zlib.compress(bytes((64 << 20) + 1))).decode()
    with pytest.raises(CheckpointCorruptError, match="more than 67108864 bytes when decompressed"):
        decode_values(text)
