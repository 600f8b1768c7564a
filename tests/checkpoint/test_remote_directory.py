"""Checkpoints at an fsspec URL, and failures of each operation of its file system."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from elasticlib import CheckpointManager
from elasticlib.checkpoint.storage import FsspecStorage
from elasticlib.errors import CheckpointError


class UnreliableFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system that fails in the middle of the `failing`-th operation that changes a file."""

    protocol = "unreliable"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failing, count = 0, 0

    class Broken(Exception):
        pass

    def _count_operation(self) -> None:
        UnreliableFileSystem.count += 1
        if UnreliableFileSystem.count == UnreliableFileSystem.failing:
            raise self.Broken("the network is down")

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            self._count_operation()
        return super().open(path, mode, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        # An object store creates the object as a whole or not at all.
        self._count_operation()
        super().pipe_file(path, value, **options)

    def rm_file(self, path: str) -> None:
        self._count_operation()
        super().rm_file(path)


@pytest.fixture
def url() -> Iterator[str]:
    fsspec.register_implementation("unreliable", UnreliableFileSystem, clobber=True)
    UnreliableFileSystem.store.clear()
    UnreliableFileSystem.pseudo_dirs[:] = [""]
    UnreliableFileSystem.failing = 0
    yield "unreliable://bucket/run"
    UnreliableFileSystem.store.clear()


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((3,), value), "step": value}


def save(url: str, step: int, value: int) -> None:
    UnreliableFileSystem.count = 0
    with CheckpointManager(url, keep_last=1) as manager:
        manager.save(step, state(value))


@pytest.mark.parametrize("place", ["memory://a/b", "file"])
def test_save_load_verify_and_prune_work_at_any_url(place: str, tmp_path: Any) -> None:
    url = f"file://{tmp_path}/new" if place == "file" else place
    with CheckpointManager(url, keep_last=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.wait()
        assert manager.steps() == [2, 3]
        assert manager.load()["w"].tolist() == [3, 3, 3]
        assert manager.load(2)["step"] == 2
        assert manager.verify() == {}
        assert manager.prune().kept == (2, 3)
    with CheckpointManager(url, keep_last=1) as manager:
        assert manager.prune().deleted == (2,)
        assert manager.latest() == 3
    if place == "file":
        assert ".lock" in os.listdir(tmp_path / "new")


def test_an_error_of_any_operation_leaves_the_old_or_the_new_state(url: str) -> None:
    save(url, 6, 1)
    save(url, 7, 2)
    count = UnreliableFileSystem.count
    assert count >= 5
    seen = set()
    for failing in range(1, count + 1):
        UnreliableFileSystem.failing = 0
        UnreliableFileSystem.store.clear()
        save(url, 6, 1)
        UnreliableFileSystem.failing = failing
        message = ""
        try:
            save(url, 7, 2)
        except CheckpointError as error:
            message = str(error)
        assert "the network is down" in (message or "the network is down")
        UnreliableFileSystem.failing = 0
        step = CheckpointManager(url).load()["step"]
        assert step == 2 or (message and step == 1)
        seen.add(step)
        save(url, 8, 3)
        assert CheckpointManager(url).steps() == [8]
        assert CheckpointManager(url).load()["step"] == 3
    assert seen == {1, 2}


def test_a_damaged_byte_of_a_remote_checkpoint_is_detected(url: str) -> None:
    save(url, 6, 1)
    with CheckpointManager(url, keep_last=2) as manager:
        manager.restore(state(0))
        manager.save(7, state(2))
    (path,) = (name for name in UnreliableFileSystem.store if "0007." in name and "/state" in name)
    data = UnreliableFileSystem.store[path].getvalue()
    UnreliableFileSystem().pipe_file(path, data[:-1] + b"\1")
    manager = CheckpointManager(url)
    assert manager.load()["step"] == 1
    assert "checksum" in manager.skipped[7]


def test_an_unknown_url_and_a_missing_fsspec_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CheckpointError, match="nosuch://a"):
        FsspecStorage("nosuch://a")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(CheckpointError, match=r"pip install 'elasticlib\[fsspec\]'"):
        CheckpointManager("memory://a").steps()


class HangingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose operation `hanging` does not return until `released` is set."""

    protocol = "hanging"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    hanging = ""
    released = threading.Event()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hang("connect")

    def _hang(self, operation: str, *_: Any) -> None:
        if operation == HangingFileSystem.hanging:
            HangingFileSystem.released.wait()

    def ls(self, path: str, **options: Any) -> Any:
        self._hang("ls")
        return super().ls(path, **options)

    def cat_file(self, path: str, **options: Any) -> Any:
        self._hang("cat_file")
        return super().cat_file(path, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._hang("pipe_file")
        super().pipe_file(path, value, **options)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        is_data = mode == "wb" and "/state." in path
        if is_data:
            self._hang("open")
        file = super().open(path, mode, **options)
        if is_data and self.hanging in ("write", "close"):
            setattr(file, self.hanging, partial(self._hang, self.hanging))
        return file


@pytest.fixture
def hanging_url() -> Iterator[str]:
    fsspec.register_implementation("hanging", HangingFileSystem, clobber=True)
    HangingFileSystem.hanging = ""
    HangingFileSystem.released.clear()
    yield "hanging://bucket/run"
    HangingFileSystem.released.set()
    HangingFileSystem.store.clear()


def restore_with_limit(url: str) -> None:
    CheckpointManager(FsspecStorage(url, timeout_s=0.5)).restore(state(0))


def save_with_limit(url: str) -> None:
    with CheckpointManager(FsspecStorage(url, timeout_s=0.5)) as manager:
        manager.save(8, state(8))


@pytest.mark.parametrize(
    ("act", "operation"),
    [
        *((restore_with_limit, operation) for operation in ("connect", "ls", "cat_file")),
        *((save_with_limit, operation) for operation in ("pipe_file", "open", "write", "close")),
    ],
)
def test_an_object_store_that_does_not_answer_is_an_error(
    hanging_url: str, act: Callable[[str], None], operation: str
) -> None:
    with CheckpointManager(hanging_url) as manager:
        manager.save(7, state(7))
    HangingFileSystem.clear_instance_cache()  # so that it connects again
    HangingFileSystem.hanging = operation
    # The test replaces methods of open files by functions without a name.
    shown = {"connect": "url_to_fs", "write": "a call", "close": "a call"}.get(operation, operation)
    message = rf"hanging://bucket/run/.*: {shown} was not answered \(it has not ended within 0\.5"
    with pytest.raises(CheckpointError, match=message):
        act(hanging_url)
    HangingFileSystem.hanging = ""
    assert CheckpointManager(hanging_url).load()["step"] == 7
