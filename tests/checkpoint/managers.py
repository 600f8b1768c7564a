"""Managers of workers of any rank, storage that blocks or fails, and captured errors."""

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
from elasticlib.checkpoint.refs import MEMORY, StateRef, Writer, begin
from elasticlib.checkpoint.snapshot_source import SnapshotSource
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


def create_manager(folder: Any, place: dict[str, object], **options: Any) -> CheckpointManager:
    """Return the manager of a worker. The keys of `place` are keys of `NAMES`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(NAMES[name], str(value))
        manager = CheckpointManager(folder, **options)
        assert manager.is_writer in (True, False)  # This reads the environment.
    return manager


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the only checkpoint of a step."""
    (path,) = folder.glob(f"step-{step:010d}.*")
    return path


WRITER = Writer("run", "launch", 1)


def snapshot_ref(name: str, step: int, size: int, **more: Any) -> StateRef:
    """Return a snapshot whose number is its step."""
    fields = {"number": step, "writer": WRITER, "tier": MEMORY, "place": "own.", **more}
    line = begin(None, fields["writer"])
    return StateRef(line[-1].id, step, name=name, size=size, line=line, **fields)


class GatedStorage(LocalStorage):
    """Storage that writes no data before `gate` is set, and fails like a full disk if `full`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_writing, self.gate, self.full = threading.Event(), threading.Event(), False

    def write(self, name: str, data: memoryview) -> int:
        self.is_writing.set()
        assert self.gate.wait(60)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(name, data)


def open_memory(folder: Path) -> SnapshotSource:
    """Return the snapshot source of a worker whose agent has its memory in this directory."""
    (folder / "1").mkdir(parents=True)
    return SnapshotSource(str(folder / "1"), Writer("run", generation=1))


@contextmanager
def no_new_threads() -> Iterator[None]:
    """The kernel refuses each new thread, because it cannot give it a stack of this size."""
    before = threading.stack_size(1 << 60)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def capture_errors() -> Iterator[list[str]]:
    """Yield a list, and append the message of a CheckpointError that the block raises."""
    messages: list[str] = []
    try:
        yield messages
    except CheckpointError as error:
        messages.append(str(error))
