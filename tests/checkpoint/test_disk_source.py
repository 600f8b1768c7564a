"""A directory of checkpoints is a source of states for restore."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elasticlib import CheckpointManager
from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.pack import unpack
from elasticlib.checkpoint.restore import DiskSource
from elasticlib.checkpoint.storage import LocalStorage
from elasticlib.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointUnreadableError,
)


def test_a_damaged_checkpoint_is_detected_and_not_listed_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((3,), step)})
    source = DiskSource(CheckpointCatalog(LocalStorage(tmp_path)))
    newest, older = source.list_states()
    assert (newest.step, newest.kind, older.step) == (2, "disk", 1)
    assert unpack(source.view(newest))["w"].tolist() == [2, 2, 2]
    (path,) = step_folder(tmp_path, 2).glob("state.*")
    source.release()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\1")
    with pytest.raises(CheckpointCorruptError, match="checksum"):
        source.view(newest)
    assert [stored.step for stored in source.list_states()] == [1]
    (step_folder(tmp_path, 1) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="was deleted after"):
        source.view(older)


def test_a_checkpoint_that_is_saved_again_while_it_is_read_is_not_skipped(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": torch.zeros(3)}).wait()
        source = DiskSource(CheckpointCatalog(LocalStorage(tmp_path)))
        [stored] = source.list_states()
        manager.save(1, {"w": torch.ones(3)}).wait()
    with pytest.raises(CheckpointUnreadableError, match="was replaced after it was chosen"):
        source.view(stored)
