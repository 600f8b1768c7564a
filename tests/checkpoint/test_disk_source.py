"""A folder of checkpoints as a source for restore, and as where an agent persists a pack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elasticlib import CheckpointManager
from elasticlib.checkpoint.disk import LocalPlace
from elasticlib.checkpoint.fence import Writer
from elasticlib.checkpoint.folder import CheckpointFolder
from elasticlib.checkpoint.here import Here
from elasticlib.checkpoint.pack import fill, lay_out, unpack
from elasticlib.checkpoint.persist import persist
from elasticlib.checkpoint.source import DiskSource
from elasticlib.errors import CheckpointCorrupt, CheckpointError, CheckpointRefused


def packed(value: int) -> memoryview:
    layout = lay_out({"w": torch.full((3,), value)})
    buffer = bytearray(layout.size)
    fill(layout, torch.frombuffer(buffer, dtype=torch.uint8))
    return memoryview(buffer)


def test_a_source_gives_packs_of_its_own_and_forgets_what_is_damaged(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((3,), step)})
    source = DiskSource(CheckpointFolder(LocalPlace(tmp_path)))
    newest, older = source.held()
    assert (newest.step, newest.kind, older.step) == (2, "disk", 1)
    assert unpack(memoryview(source.read(newest)))["w"].tolist() == [2, 2, 2]
    assert source.values(older, None)["w"].tolist() == [1, 1, 1]
    (path,) = (tmp_path / "step-0000000002").glob("state.*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\1")
    with pytest.raises(CheckpointCorrupt, match="CRC-32"):
        source.read(newest)
    assert [held.step for held in source.held()] == [1]
    source.check(older)
    (tmp_path / "step-0000000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not there any more"):
        source.check(older)


def writer(generation: int, token: str) -> Writer:
    return Writer("job", "l", generation, token * 16)


def test_a_pack_is_persisted_once_and_only_if_it_is_newer(tmp_path: Path) -> None:
    assert persist(tmp_path, 7, packed(7), writer(2, "a"))
    assert not persist(tmp_path, 7, packed(8), writer(2, "b"))
    assert not persist(tmp_path, 6, packed(6), writer(2, "c"))
    with pytest.raises(CheckpointRefused, match=r"generation 1 .* is older"):
        persist(tmp_path, 8, packed(8), writer(1, "d"))
    manager = CheckpointManager(tmp_path, here=Here(run="job", launch="l", generation=3))
    assert manager.load()["w"].tolist() == [7, 7, 7]
    manager.claim()
    with pytest.raises(CheckpointRefused, match=r"generation 2 .* is older"):
        persist(tmp_path, 9, packed(9), writer(2, "e"))
    manager.close()


def test_persisting_needs_no_torch() -> None:
    code = "import sys, elasticlib.checkpoint.persist; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
