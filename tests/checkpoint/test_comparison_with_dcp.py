"""The comparison with DCP in docs/reference/checkpoints.md is true of the installed torch."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from managers import GatedStorage, step_folder

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointError

W = torch.arange(4096.0)


@pytest.fixture(autouse=True)
def ignore_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def load(path: Path) -> torch.Tensor:
    state = {"w": torch.zeros(4096)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state["w"]


def flip_bit(path: Path, after: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.find(after) + 3] ^= 0x40
    path.write_bytes(data)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError("the disk is full")


def test_flipped_bit_is_loaded_by_dcp_and_detected_by_elasticlib(tmp_path: Path) -> None:
    values = W[1000:1010].numpy().tobytes()
    save(tmp_path / "dcp", {"w": W})
    flip_bit(tmp_path / "dcp" / "__0_0.distcp", values)
    assert not torch.equal(load(tmp_path / "dcp"), W)
    with CheckpointManager(tmp_path / "ours") as manager:
        for step in (1, 2):
            manager.save(step, {"w": W}).wait()
        (path,) = step_folder(tmp_path / "ours", 2).glob("state.*")
        flip_bit(path, values)
        state = {"w": torch.zeros(4096)}
        result = manager.restore(state)
    assert (result.step, torch.equal(state["w"], W)) == (1, True)
    assert re.search("step-0000000002.* is corrupt", str(result))


def test_failed_save_destroys_the_older_checkpoint_of_dcp_only(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"w": W})
    with pytest.raises(dcp.CheckpointException):
        save(tmp_path / "dcp", {"w": W + 1, "z": Unpicklable()})
    with pytest.raises(dcp.CheckpointException):
        load(tmp_path / "dcp")
    with CheckpointManager(tmp_path / "ours") as manager:
        manager.save(1, {"w": W}).wait()
        with pytest.raises(CheckpointError):
            manager.save(1, {"w": W + 1, "z": Unpicklable()})
        assert torch.equal(manager.load(1)["w"], W)


class RunsCode:
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_reading_can_run_code_with_dcp_only(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"a": RunsCode(tmp_path / "it-ran")})
    dcp.load({"a": None}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert (tmp_path / "it-ran").is_dir()
    with (
        CheckpointManager(tmp_path / "ours") as manager,
        pytest.raises(CheckpointError, match=r"state\['a'\] is a .*RunsCode"),
    ):
        manager.save(1, {"a": RunsCode(tmp_path / "again")})


def test_dcp_loads_any_subset_and_elasticlib_top_level_names(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"a": {"w": W, "v": W + 1}, "b": 1})
    state = {"a": {"w": torch.zeros(4096)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["a"]["w"], W)
    with CheckpointManager(tmp_path / "ours") as manager:
        manager.save(1, {"a": {"w": W, "v": W + 1}, "b": 1}).wait()
        top = {"b": 0}
        assert manager.restore(top, strict=False)
    assert top == {"b": 1}


def test_dcp_syncs_files_and_elasticlib_also_their_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").is_dir())
    )
    save(tmp_path / "dcp", {"w": W})
    assert set(synced) == {False}
    synced.clear()
    with CheckpointManager(tmp_path / "ours") as manager:
        manager.save(1, {"w": W}).wait()
    assert set(synced) == {False, True}


class HalfPicklable(Unpicklable):
    """An object that can be copied, but not written."""

    def __deepcopy__(self, _: object) -> HalfPicklable:
        return self


def test_failed_async_save_is_reported_to_waiters_by_dcp_and_to_the_next_call_by_elasticlib(
    tmp_path: Path,
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        bad = {"w": W, "z": HalfPicklable()}
        future: Any = dcp.async_save(bad, checkpoint_id=tmp_path / "one")
        dcp.async_save({"w": W}, checkpoint_id=tmp_path / "two").result()
        with pytest.raises(dcp.CheckpointException):
            future.result()
    finally:
        dist.destroy_process_group()
    place = GatedStorage(tmp_path / "ours")
    place.full = True
    place.gate.set()
    manager = CheckpointManager(place)
    manager.save(1, {"w": W})
    with pytest.raises(CheckpointError, match="No space left on device"):
        manager.save(2, {"w": W})
    manager.close()
