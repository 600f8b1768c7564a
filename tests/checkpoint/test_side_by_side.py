"""What docs/checkpoints.md says of DCP beside us, seen in the torch that is installed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from managers import Gated

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointError

W = torch.arange(4096.0)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def loaded(path: Path) -> torch.Tensor:
    state = {"w": torch.zeros(4096)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state["w"]


def flip(path: Path, at: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.find(at) + 3] ^= 0x40
    path.write_bytes(data)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError("the disk is full")


def test_a_flipped_byte_is_loaded_by_dcp_and_found_by_us(tmp_path: Path) -> None:
    some = W[1000:1010].numpy().tobytes()
    save(tmp_path / "dcp", {"w": W})
    flip(tmp_path / "dcp" / "__0_0.distcp", some)
    assert not torch.equal(loaded(tmp_path / "dcp"), W)
    with CheckpointManager(tmp_path / "ours") as manager:
        for step in (1, 2):
            manager.save(step, {"w": W}).wait()
        (path,) = (tmp_path / "ours" / "step-0000000002").glob("state.*")
        flip(path, some)
        state = {"w": torch.zeros(4096)}
        found = manager.restore(state)
    assert (found.step, torch.equal(state["w"], W)) == (1, True)
    assert "step-0000000002 is damaged" in str(found)


def test_a_save_that_fails_takes_dcps_older_one_with_it_and_not_ours(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"w": W})
    with pytest.raises(dcp.CheckpointException):
        save(tmp_path / "dcp", {"w": W + 1, "z": Unpicklable()})
    with pytest.raises(dcp.CheckpointException):
        loaded(tmp_path / "dcp")
    with CheckpointManager(tmp_path / "ours") as manager:
        manager.save(1, {"w": W}).wait()
        with pytest.raises(CheckpointError):
            manager.save(1, {"w": W + 1, "z": Unpicklable()})
        assert torch.equal(manager.load(1)["w"], W)


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_what_dcp_reads_can_run_code_and_what_we_read_cannot(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"a": Runs(tmp_path / "it-ran")})
    dcp.load({"a": None}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert (tmp_path / "it-ran").is_dir()
    with (
        CheckpointManager(tmp_path / "ours") as manager,
        pytest.raises(CheckpointError, match=r"state\['a'\] is a .*Runs"),
    ):
        manager.save(1, {"a": Runs(tmp_path / "again")})


def test_dcp_takes_a_part_of_a_state_from_anywhere_in_it(tmp_path: Path) -> None:
    save(tmp_path / "dcp", {"a": {"w": W, "v": W + 1}, "b": 1})
    state = {"a": {"w": torch.zeros(4096)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["a"]["w"], W)
    with CheckpointManager(tmp_path / "ours") as manager:
        manager.save(1, {"a": {"w": W, "v": W + 1}, "b": 1}).wait()
        top = {"b": 0}
        assert manager.restore(top, strict=False)
    assert top == {"b": 1}


def test_dcp_syncs_files_and_not_their_folders_and_we_sync_both(
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
    """DCP copies it; to write it fails."""

    def __deepcopy__(self, _: object) -> HalfPicklable:
        return self


def test_what_failed_behind_dcps_step_is_told_to_who_asks_and_ours_to_the_next_call(
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
    place = Gated(tmp_path / "ours")
    place.full = True
    place.gate.set()
    manager = CheckpointManager(place)
    manager.save(1, {"w": W})
    with pytest.raises(CheckpointError, match="No space left on device"):
        manager.save(2, {"w": W})
    manager.close()
