"""Earlier writers cannot prune, skipped checkpoints are reported, and locks are required."""

from __future__ import annotations

import errno
import fcntl
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from managers import create_manager, step_folder

from elasticlib import CheckpointManager, FileStore
from elasticlib.errors import CheckpointError, CheckpointFencedError, StoreRejectedError


def test_an_older_generation_cannot_prune(tmp_path: Path) -> None:
    places = ({"run": "r", "launch": "l", "generation": number} for number in (1, 2))
    old, new = (create_manager(tmp_path, place, keep_last=1) for place in places)
    for step in (1, 2):
        new.save(step, {"a": step}, pin=True).wait()
    new.unpin(1)
    with pytest.raises(CheckpointFencedError, match=r"pruned.*older"):
        old.prune()
    assert new.steps() == [1, 2]


def truncate_data(folder: Path) -> None:
    pack = next(folder.glob("*.safetensors"))
    pack.write_bytes(pack.read_bytes()[:-1])


def truncate_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("damage", [truncate_data, truncate_manifest])
def test_restore_reports_why_it_skipped_a_truncated_checkpoint(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"a": step})
            manager.wait()
    damage(step_folder(tmp_path, 2))
    with CheckpointManager(tmp_path) as manager:
        result = manager.restore({"a": 0})
        assert result.step == 1
        [why] = result.skipped
    assert re.search("step-0000000002.* is corrupt: ", why)
    assert why in caplog.text


def test_a_file_system_without_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        CheckpointManager(tmp_path / "checkpoints") as manager,
        pytest.raises(CheckpointError, match="could not be"),
    ):
        manager.claim()
    with (
        FileStore(tmp_path / "store") as store,
        pytest.raises(StoreRejectedError, match="lock files in"),
    ):
        store.set("key", b"")
