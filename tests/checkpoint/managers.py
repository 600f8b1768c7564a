"""Managers of workers at any place in a job, storages that block or fail, and captured errors."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticlib import CheckpointManager
from elasticlib.checkpoint.snapshot_source import SnapshotLocation, SnapshotSource
from elasticlib.checkpoint.storage import LocalStorage
from elasticlib.errors import CheckpointError

NAMES = {
    "run": "TORCHELASTIC_RUN_ID",
    "launch": "ELASTICLIB_INCARNATION",
    "generation": "ELASTICLIB_GENERATION",
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world": "WORLD_SIZE",
}


def manager_at(folder: Any, place: dict[str, object], **options: Any) -> CheckpointManager:
    """Return the manager of a worker whose place in its job is given by the keys of `NAMES`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(NAMES[name], str(value))
        manager = CheckpointManager(folder, **options)
        assert manager.is_writer in (True, False)  # This reads the environment.
    return manager


class Gated(LocalStorage):
    """Writes no data before `gate` is set. Raises the error of a full disk if `full` is true."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked, self.gate, self.full = threading.Event(), threading.Event(), False

    def write(self, name: str, data: memoryview) -> int:
        self.asked.set()
        assert self.gate.wait(60)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(name, data)


def memory_of(folder: Path) -> SnapshotSource:
    """That of a worker whose agent has its memory there."""
    (folder / "1").mkdir(parents=True)
    return SnapshotSource(SnapshotLocation(str(folder / "1"), "run", 1))


@contextmanager
def told() -> Iterator[list[str]]:
    """Yield a list, and append the message of a CheckpointError that the block raises."""
    messages: list[str] = []
    try:
        yield messages
    except CheckpointError as error:
        messages.append(str(error))
