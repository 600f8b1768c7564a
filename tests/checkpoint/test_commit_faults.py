"""A complete checkpoint exists after a kill or an error at any write of a commit.

All system calls that change the disk go through one `DiskCalls` object, which counts them and
injects the fault. A process that is killed is a fork of the test process, which has imported torch.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from managers import create_manager, step_folder

from elasticlib import CheckpointManager
from elasticlib.checkpoint.storage import DiskCalls, LocalStorage
from elasticlib.errors import CheckpointError

OLD, NEW = 1, 2
OTHERS = (errno.EIO, errno.EROFS)
# Prepares a directory. Returns the step to save, and the steps that may exist if the save fails.
Scene = Callable[[Path], tuple[int, set[int | None]]]


def state(value: int) -> dict[str, object]:
    return {"w": torch.full((3,), value), "step": value}


class FaultyDisk(DiskCalls):
    """A disk that counts its calls, and replaces the `boundary`-th call (from 1; 0 for none)."""

    def __init__(self, boundary: int = 0, fault: Callable[..., object] | None = None) -> None:
        self.boundary, self.fault, self.calls = boundary, fault, 0

    def _call(self, name: str, *args: object) -> object:
        self.calls += 1
        real = getattr(super(), name)
        if self.calls == self.boundary and self.fault is not None:
            return self.fault(name, real, *args)
        return real(*args)

    def create(self, path: str) -> int:
        return self._call("create", path)  # type: ignore[return-value]

    def write(self, handle: int, data: memoryview) -> int:
        return self._call("write", handle, data)  # type: ignore[return-value]

    def sync(self, handle: int) -> None:
        self._call("sync", handle)

    def rename(self, old: str, new: str) -> None:
        self._call("rename", old, new)

    def make_folder(self, path: str) -> None:
        self._call("make_folder", path)

    def remove(self, path: str) -> None:
        self._call("remove", path)

    def remove_folder(self, path: str) -> None:
        self._call("remove_folder", path)


def kill_self(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def kill_self_in_the_middle(name: str, real: Callable[..., object], *args: object) -> None:
    """Do half of a write, or a whole other call, and kill this process."""
    if name == "write":
        handle, data = args
        real(handle, data[: len(data) // 2])  # type: ignore[index,arg-type]
    else:
        real(*args)
    kill_self()


def create_failure(code: int) -> Callable[..., object]:
    def fault(name: str, real: Callable[..., object], *args: object) -> object:
        if name == "write":
            handle, data = args
            real(handle, data[: len(data) // 2])  # type: ignore[index,arg-type]
        raise OSError(code, os.strerror(code))

    return fault


def write_one_byte(name: str, real: Callable[..., object], *args: object) -> object:
    if name == "write":
        handle, data = args
        return real(handle, data[:1])  # type: ignore[index,arg-type]
    return real(*args)


def save(folder: Path, step: int, value: int, disk: DiskCalls | None = None) -> None:
    place = LocalStorage(folder, disk)
    with create_manager(place, {"run": "r", "launch": "l"}, keep_last=1) as manager:
        manager.save(step, state(value))


def first_save(folder: Path) -> tuple[int, set[int | None]]:
    shutil.rmtree(folder, ignore_errors=True)
    return 7, {None}


def later_save(folder: Path) -> tuple[int, set[int | None]]:
    """Prepare an old checkpoint to be deleted, and files that a crash has left."""
    first_save(folder)
    save(folder, 6, OLD)
    left = folder / "step-0000000007.0123abcd.1"
    left.mkdir()
    (left / "state.safetensors").write_bytes(b"half")
    (left / ".manifest.json.01234567.partial").write_bytes(b"half")
    (folder / ".fence.json.01234567.partial").write_bytes(b"half")
    return 7, {OLD}


def same_step_again(folder: Path) -> tuple[int, set[int | None]]:
    first_save(folder)
    save(folder, 7, OLD)
    return 7, {OLD}


SCENES = [first_save, later_save, same_step_again]


def count_calls(scene: Scene, folder: Path) -> int:
    step, _ = scene(folder)
    disk = FaultyDisk()
    save(folder, step, NEW, disk)
    return disk.calls


def load_value(folder: Path) -> int | None:
    try:
        loaded = CheckpointManager(folder).load()
    except FileNotFoundError:
        return None
    assert loaded["w"].tolist() == [loaded["step"]] * 3
    return int(loaded["step"])


def assert_recoverable(folder: Path, step: int, allowed: set[int | None], what: str) -> int | None:
    """Check that an old or the new state exists, and that the next save succeeds and cleans up."""
    loaded = load_value(folder)
    assert loaded in allowed | {NEW}, what
    save(folder, step + 1, 3)
    assert load_value(folder) == 3, what
    saved = step_folder(folder, step + 1)
    assert sorted(os.listdir(folder)) == [".lock", "fence.json", saved.name], what
    assert len(os.listdir(saved)) == 2, what
    return loaded


def run_in_fork(act: Callable[[], object]) -> int:
    """Call a function in a fork, and return the wait status."""
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            act()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "elasticlib.checkpoint"):
        yield


def kill_at(boundary: int, fault: Callable[..., None], scene: Scene, folder: Path) -> int | None:
    """Kill a save at a write, and return the state that is loaded afterwards."""
    step, allowed = scene(folder)
    disk = FaultyDisk(boundary, fault)
    status = run_in_fork(lambda: save(folder, step, NEW, disk))
    assert os.WTERMSIG(status) == signal.SIGKILL, boundary
    return assert_recoverable(folder, step, allowed, f"killed at {boundary}")


@pytest.mark.parametrize("scene", SCENES)
def test_a_kill_in_the_middle_of_a_commit_leaves_the_old_or_the_new_state(
    tmp_path: Path, scene: Scene
) -> None:
    """A sample of the writes; the next test, and `test_power_loss.py`, have all writes."""
    folder = tmp_path / "checkpoints"
    kill_at(count_calls(scene, folder) // 2, kill_self_in_the_middle, scene, folder)


@pytest.mark.release
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("fault", [kill_self, kill_self_in_the_middle])
def test_a_kill_at_any_write_leaves_the_old_or_the_new_state(
    tmp_path: Path, scene: Scene, fault: Callable[..., None]
) -> None:
    folder = tmp_path / "checkpoints"
    count = count_calls(scene, folder)
    assert count > 14
    seen = {kill_at(boundary, fault, scene, folder) for boundary in range(1, count + 1)}
    assert len(seen) == 2


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize(
    "code", [errno.ENOSPC, *(pytest.param(code, marks=pytest.mark.long) for code in OTHERS)]
)
def test_an_error_at_any_write_is_reported_and_loses_nothing(
    tmp_path: Path, scene: Scene, code: int
) -> None:
    folder = tmp_path / "checkpoints"
    num_errors = 0
    for boundary in range(1, count_calls(scene, folder) + 1):
        step, allowed = scene(folder)
        disk = FaultyDisk(boundary, create_failure(code))
        message = ""
        try:
            save(folder, step, NEW, disk)
            # A deletion failed after the commit, so the checkpoint is valid.
            assert load_value(folder) == NEW, boundary
        except CheckpointError as error:
            message = str(error)
            num_errors += 1
        assert not message or os.strerror(code) in message
        assert_recoverable(folder, step, allowed, f"failed at {boundary}")
    assert num_errors > 10


@pytest.mark.parametrize("scene", SCENES)
def test_a_short_write_is_continued(tmp_path: Path, scene: Scene) -> None:
    folder = tmp_path / "checkpoints"
    for boundary in range(1, count_calls(scene, folder) + 1):
        step, _ = scene(folder)
        save(folder, step, NEW, FaultyDisk(boundary, write_one_byte))
        assert load_value(folder) == NEW


def test_a_full_disk_and_a_read_only_one_keep_the_last_checkpoint(small_disk: Path) -> None:
    with CheckpointManager(small_disk, keep_last=1) as manager:
        manager.save(1, state(OLD))
        manager.wait()
        manager.save(2, {"w": torch.zeros(100_000)})
        with pytest.raises(CheckpointError, match="No space left on device"):
            manager.wait()
        assert load_value(small_disk) == OLD
        assert os.listdir(step_folder(small_disk, 1))
        remount = ["mount", "-o", "remount,ro", str(small_disk)]
        subprocess.run(remount, check=True)
        manager.save(3, state(NEW))
        with pytest.raises(CheckpointError, match="Read-only file system"):
            manager.wait()
        assert load_value(small_disk) == OLD
        subprocess.run([*remount[:2], "remount,rw", str(small_disk)], check=True)
        manager.save(4, state(NEW))
    assert load_value(small_disk) == NEW
    assert CheckpointManager(small_disk).steps() == [4]


class DiskThatWritesNothing(DiskCalls):
    """A disk that writes no byte and reports no error."""

    def write(self, handle: int, data: memoryview) -> int:  # noqa: ARG002
        return 0


def test_a_write_of_0_bytes_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    with pytest.raises(CheckpointError, match=r"write\(\) returned 0 bytes"):
        save(tmp_path, 2, 2, DiskThatWritesNothing())
    assert CheckpointManager(tmp_path).latest() == 1
