"""What cannot be read at the moment is not damaged: it is neither deleted nor gone past."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticlib import CheckpointManager
from elasticlib.checkpoint.catalog import (
    MANIFEST_NAME,
    DataFile,
    Manifest,
    append_checksum,
    encode_manifest,
    folder_of,
)
from elasticlib.checkpoint.storage import LocalStorage
from elasticlib.errors import CheckpointCorrupt, CheckpointError


class Away(LocalStorage):
    """Of the files whose names end in one of `away`, nothing can be read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.away: tuple[str, ...] = ()

    def read(self, name: str) -> bytes | None:
        self._reach(name)
        return super().read(name)

    def read_into(self, name: str, buffer: memoryview, **options: Any) -> int:
        self._reach(name)
        return super().read_into(name, buffer, **options)

    def _reach(self, name: str) -> None:
        if self.away and name.endswith(self.away):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)


class Short(LocalStorage):
    """Says that the file has ended three bytes before its end."""

    def read_into(self, name: str, buffer: memoryview, **options: Any) -> int:
        return super().read_into(name, buffer, **options) - 3


def test_a_file_of_which_fewer_bytes_come_than_it_has_is_damaged(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
    manager = CheckpointManager(Short(tmp_path))
    (why,) = manager.verify().values()
    data = tmp_path / data_of(tmp_path, 1)
    size = data.stat().st_size
    assert why == f"{data.name} has {size - 3} of {size} bytes"
    with pytest.raises(CheckpointCorrupt, match="none of the checkpoints in"):
        manager.load()


def names(*steps: int) -> tuple[str, ...]:
    return tuple(f"{folder_of(step)}/{MANIFEST_NAME}" for step in steps)


def data_of(folder: Path, step: int) -> str:
    (path,) = (folder / folder_of(step)).glob("state.*")
    return f"{folder_of(step)}/{path.name}"


def saved(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, {"w": torch.full((3,), float(step))})
    manager.wait()


def steps(folder: Path) -> list[int]:
    return CheckpointManager(folder).steps()


def test_what_could_not_be_read_as_a_save_cleared_up_is_there_when_it_can_be(
    tmp_path: Path,
) -> None:
    place = Away(tmp_path)
    with CheckpointManager(place, keep_last=3, keep_every=100) as manager:
        saved(manager, 100, 200, 210, 220)
        place.away = names(100, 220)
        saved(manager, 230)
        # Nor does a whole one go in their place: the last three that can be read are there.
        assert steps(tmp_path) == [100, 200, 210, 220, 230]
        place.away = ()
        saved(manager, 240)
        assert steps(tmp_path) == [100, 200, 220, 230, 240]


def test_the_newest_whole_one_stays_when_nothing_else_can_be_read_and_pruning_reads(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1, 2, 3)
    place = Away(tmp_path)
    with CheckpointManager(place, keep_last=1) as manager:
        place.away = (data_of(tmp_path, 3), *names(1))
        assert manager.prune().kept == (1, 2, 3)
        place.away = ("",)
        assert manager.verify().keys() == {1, 2, 3}
        with pytest.raises(CheckpointError, match="pruned"):
            manager.prune()
        place.away = ()
        assert manager.prune().kept == (3,)


@pytest.mark.parametrize("part", ["manifest", "data"])
def test_nothing_older_is_gone_on_from_while_the_newest_cannot_be_read(
    tmp_path: Path, part: str
) -> None:
    place = Away(tmp_path)
    with CheckpointManager(place) as manager:
        saved(manager, 1, 2)
    place.away = names(2) if part == "manifest" else (data_of(tmp_path, 2),)
    state = {"w": torch.zeros(3)}
    with CheckpointManager(place) as manager:
        with pytest.raises(CheckpointError, match=r"000002.* nothing older"):
            manager.restore(state)
        for look in (manager.load, manager.latest):
            with pytest.raises(CheckpointError, match="000002"):
                look()
        assert state["w"].tolist() == [0, 0, 0]
        place.away = names(1)
        assert manager.restore(state).step == manager.latest() == 2


def test_a_checkpoint_of_a_newer_format_is_neither_deleted_nor_gone_past(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        saved(manager, 1)
    newer = tmp_path / folder_of(2)
    newer.mkdir()
    data = encode_manifest(Manifest(2, (DataFile("state.pack", 1, 0),)))
    body = data.rpartition(b"\ncrc32")[0].replace(b'"format":4', b'"format":9')
    (newer / MANIFEST_NAME).write_bytes(append_checksum(body))
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        with pytest.raises(CheckpointError, match=r"format 9.* nothing older"):
            manager.restore({"w": torch.zeros(3)})
        saved(manager, 3)
    assert newer.is_dir()
    with pytest.raises(CheckpointError, match="format 9") as raised:
        CheckpointManager(tmp_path).load(2)
    assert not isinstance(raised.value, CheckpointCorrupt)
