"""A directory of checkpoints is a source of states for restore."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from managers import step_folder

from elasticlib import CheckpointManager
from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.pack import unpack
from elasticlib.checkpoint.refs import Integrity
from elasticlib.checkpoint.restore import DiskSource
from elasticlib.checkpoint.storage import LocalStorage
from elasticlib.errors import CheckpointCorruptError, CheckpointError


def test_a_damaged_checkpoint_is_detected_and_a_deleted_one_is_named(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((3,), step)})
    source = DiskSource(CheckpointCatalog(LocalStorage(tmp_path)))
    older, newest = source.list_states()
    assert (newest.step, newest.tier, older.step) == (2, "disk", 1)
    assert unpack(source.view(newest))["w"].tolist() == [2, 2, 2]
    path = step_folder(tmp_path, 2) / "state.safetensors"
    source.release()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointCorruptError, match="checksum"):
        source.view(newest)
    assert [ref.integrity for ref in source.list_states()] == [
        Integrity.UNKNOWN,
        Integrity.CORRUPT,
    ]
    (step_folder(tmp_path, 1) / "manifest.json").unlink()
    source.list_states()
    with pytest.raises(CheckpointError, match="was deleted after"):
        source.view(older)
