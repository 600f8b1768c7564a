"""Managers of workers that stand anywhere in a job, as their launcher would say it, and what they
write to."""

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
from elasticlib.checkpoint.place import LocalPlace
from elasticlib.checkpoint.snapshot_source import SnapshotLocation, SnapshotSource
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
    """That of a worker with this place in its job, by `NAMES`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(NAMES[name], str(value))
        manager = CheckpointManager(folder, **options)
        assert manager.writes in (True, False)  # it has looked for its place
    return manager


class Gated(LocalPlace):
    """Writes no data before the gate is open, and then none if it is full."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked, self.gate, self.full = threading.Event(), threading.Event(), False

    def write(self, name: str, data: memoryview) -> None:
        self.asked.set()
        assert self.gate.wait(60)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(name, data)


def memory_of(folder: Path) -> SnapshotSource:
    """That of a worker whose agent has its memory there."""
    (folder / "1").mkdir(parents=True)
    return SnapshotSource(SnapshotLocation(str(folder / "1"), "run", 1))


@contextmanager
def told() -> Iterator[list[str]]:
    """The sentence of what is raised."""
    said: list[str] = []
    try:
        yield said
    except CheckpointError as error:
        said.append(str(error))
