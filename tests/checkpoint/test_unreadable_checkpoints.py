"""A checkpoint that cannot be read is not corrupt: it is neither deleted nor skipped."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from managers import step_folder
from ranks import Ranks

from elasticlib import (
    CheckpointManager,
    KeepEvery,
    KeepLast,
    any_of,
    load_checkpoint,
    save_checkpoint,
)
from elasticlib.checkpoint.catalog import (
    MANIFEST_NAME,
    append_checksum,
)
from elasticlib.checkpoint.storage import LocalStorage
from elasticlib.errors import CheckpointCorruptError, CheckpointError


class UnreadableFiles(LocalStorage):
    """A directory in which files with certain endings cannot be read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.unreadable: tuple[str, ...] = ()  # endings of the names

    def read(self, name: str) -> bytes | None:
        self._check_readable(name)
        return super().read(name)

    def read_into(self, name: str, buffer: memoryview, **options: Any) -> int:
        self._check_readable(name)
        return super().read_into(name, buffer, **options)

    def _check_readable(self, name: str) -> None:
        if self.unreadable and name.endswith(self.unreadable):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)


class ShortReads(LocalStorage):
    """A directory in which every read ends three bytes before the end of the file."""

    def read_into(self, name: str, buffer: memoryview, **options: Any) -> int:
        return super().read_into(name, buffer, **options) - 3


def test_file_that_ends_early_is_damaged(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        save(manager, 1)
    manager = CheckpointManager(ShortReads(tmp_path))
    (reason,) = manager.verify().values()
    data = tmp_path / data_file(tmp_path, 1)
    size = data.stat().st_size
    assert reason == f"{data.name} has {size - 3} of {size} bytes"
    with pytest.raises(CheckpointCorruptError, match="none of the checkpoints in"):
        manager.load()


def manifests(folder: Path, *steps: int) -> tuple[str, ...]:
    return tuple(f"{step_folder(folder, step).name}/{MANIFEST_NAME}" for step in steps)


def data_file(folder: Path, step: int) -> str:
    return f"{step_folder(folder, step).name}/state.safetensors"


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, {"w": torch.full((3,), float(step))})
    manager.wait()


def steps(folder: Path) -> list[int]:
    return CheckpointManager(folder).steps()


def test_save_does_not_prune_checkpoints_that_it_cannot_read(
    tmp_path: Path,
) -> None:
    place = UnreadableFiles(tmp_path)
    with CheckpointManager(place, keep=any_of(KeepLast(3), KeepEvery(100))) as manager:
        save(manager, 100, 200, 210, 220)
        place.unreadable = manifests(tmp_path, 100, 220)
        save(manager, 230)
        # Unreadable checkpoints do not count for keep_last: three readable ones are kept, too.
        assert steps(tmp_path) == [100, 200, 210, 220, 230]
        place.unreadable = ()
        save(manager, 240)
        assert steps(tmp_path) == [100, 200, 220, 230, 240]


def test_prune_keeps_the_newest_readable_checkpoint_and_unreadable_ones(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path) as manager:
        save(manager, 1, 2, 3)
    place = UnreadableFiles(tmp_path)
    with CheckpointManager(place, keep_last=1) as manager:
        place.unreadable = (data_file(tmp_path, 3), *manifests(tmp_path, 1))
        assert manager.prune().kept == (1, 2, 3)
        place.unreadable = ("",)
        assert manager.verify().keys() == {1, 2, 3}
        with pytest.raises(CheckpointError, match="pruned"):
            manager.prune()
        place.unreadable = ()
        assert manager.prune().kept == (3,)


@pytest.mark.parametrize("part", ["manifest", "data"])
def test_nothing_older_is_restored_while_the_newest_checkpoint_is_unreadable(
    tmp_path: Path, part: str
) -> None:
    place = UnreadableFiles(tmp_path)
    with CheckpointManager(place) as manager:
        save(manager, 1, 2)
    place.unreadable = manifests(tmp_path, 2) if part == "manifest" else (data_file(tmp_path, 2),)
    state = {"w": torch.zeros(3)}
    with CheckpointManager(place) as manager:
        with pytest.raises(CheckpointError, match=r"000002.* nothing older"):
            manager.restore(state)
        for read in (manager.load, manager.latest):
            with pytest.raises(CheckpointError, match="000002"):
                read()
        assert state["w"].tolist() == [0, 0, 0]
        place.unreadable = manifests(tmp_path, 1)
        assert manager.restore(state).step == manager.latest() == 2


def test_checkpoint_of_a_newer_format_is_neither_deleted_nor_skipped(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        save(manager, 1)
        save(manager, 2)
    newer = step_folder(tmp_path, 2)
    body = (newer / MANIFEST_NAME).read_bytes().rpartition(b"\ncrc32")[0]
    body = body.replace(b'"format":5', b'"format":9')
    (newer / MANIFEST_NAME).write_bytes(append_checksum(body))
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        with pytest.raises(CheckpointError, match=r"format 9.* nothing older"):
            manager.restore({"w": torch.zeros(3)})
        save(manager, 3)
    assert newer.is_dir()
    with pytest.raises(CheckpointError, match="format 9") as raised:
        CheckpointManager(tmp_path).load(2)
    assert not isinstance(raised.value, CheckpointCorruptError)


def load_with_other_torch(folder: Path) -> list[str]:
    """Return the errors of reading a state with a torch that lacks one of its dtypes."""
    state = {"w": torch.zeros(2, dtype=torch.complex32), "n": 7}
    save_checkpoint(folder / "step-7.pt", state)
    with CheckpointManager(folder) as manager:
        manager.save(7, state).wait()
    del torch.complex32
    manager = CheckpointManager(folder)
    errors = []
    for read in (
        lambda: manager.restore({"w": None, "n": 0}),
        manager.load,
        lambda: load_checkpoint(folder / "step-7.pt"),
    ):
        with pytest.raises(CheckpointError) as raised:
            read()
        assert not isinstance(raised.value, CheckpointCorruptError)
        errors.append(str(raised.value))
    return errors


def test_state_with_a_dtype_that_torch_lacks_is_not_called_corrupt(
    ranks: Ranks, tmp_path: Path
) -> None:
    [errors] = ranks.run(load_with_other_torch, 1, tmp_path, backend="")
    for error in errors:
        assert "has tensors of complex32, and torch " in error
        assert "use the version of torch that saved the state" in error
        assert "from the start" not in error
