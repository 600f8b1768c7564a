"""A commit is cut off or fails at each of its writes in turn: a whole checkpoint is always there.

The system calls that change the disk go through one object, so the suite finds the boundaries by
itself; children are forked from here, where torch is loaded, and really killed.
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
from managers import manager_at

from elasticlib import CheckpointManager
from elasticlib.checkpoint.storage import DiskCalls, LocalStorage
from elasticlib.errors import CheckpointError

OLD, NEW = 1, 2
OTHERS = (errno.EIO, errno.EROFS)
Scene = Callable[[Path], tuple[int, set[int | None]]]
"""Prepares a folder; gives the step that is saved then, and what may be there if that fails."""


def state(value: int) -> dict[str, object]:
    return {"w": torch.full((3,), value), "step": value}


class Faulty(DiskCalls):
    """Does something else at the `boundary`-th call (from 1; 0 for none), and counts the calls."""

    def __init__(self, boundary: int = 0, fault: Callable[..., object] | None = None) -> None:
        self.boundary, self.fault, self.calls = boundary, fault, 0

    def _do(self, name: str, *args: object) -> object:
        self.calls += 1
        real = getattr(super(), name)
        if self.calls == self.boundary and self.fault is not None:
            return self.fault(name, real, *args)
        return real(*args)

    def create(self, path: str) -> int:
        return self._do("create", path)  # type: ignore[return-value]

    def write(self, handle: int, data: memoryview) -> int:
        return self._do("write", handle, data)  # type: ignore[return-value]

    def sync(self, handle: int) -> None:
        self._do("sync", handle)

    def rename(self, old: str, new: str) -> None:
        self._do("rename", old, new)

    def make_folder(self, path: str) -> None:
        self._do("make_folder", path)

    def remove(self, path: str) -> None:
        self._do("remove", path)

    def remove_folder(self, path: str) -> None:
        self._do("remove_folder", path)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def die_in_the_middle(name: str, real: Callable[..., object], *args: object) -> None:
    """Half of a write is done, and all of anything else."""
    if name == "write":
        handle, data = args
        real(handle, data[: len(data) // 2])  # type: ignore[index,arg-type]
    else:
        real(*args)
    die()


def fail(code: int) -> Callable[..., object]:
    def fault(name: str, real: Callable[..., object], *args: object) -> object:
        if name == "write":
            handle, data = args
            real(handle, data[: len(data) // 2])  # type: ignore[index,arg-type]
        raise OSError(code, os.strerror(code))

    return fault


def short(name: str, real: Callable[..., object], *args: object) -> object:
    if name == "write":
        handle, data = args
        return real(handle, data[:1])  # type: ignore[index,arg-type]
    return real(*args)


def save(folder: Path, step: int, value: int, disk: DiskCalls | None = None) -> None:
    place = LocalStorage(folder, disk)
    with manager_at(place, {"run": "r", "launch": "l"}, keep_last=1) as manager:
        manager.save(step, state(value))


def first_save(folder: Path) -> tuple[int, set[int | None]]:
    shutil.rmtree(folder, ignore_errors=True)
    return 7, {None}


def later_save(folder: Path) -> tuple[int, set[int | None]]:
    """Prepare an old checkpoint to be deleted, and files that a crash has left."""
    first_save(folder)
    save(folder, 6, OLD)
    left = folder / "step-0000000007"
    left.mkdir()
    (left / "state.0123456789abcdef.1.pack").write_bytes(b"half")
    (left / ".manifest.json.01234567.partial").write_bytes(b"half")
    (folder / ".fence.json.01234567.partial").write_bytes(b"half")
    return 7, {OLD}


def same_step_again(folder: Path) -> tuple[int, set[int | None]]:
    first_save(folder)
    save(folder, 7, OLD)
    return 7, {OLD}


SCENES = [first_save, later_save, same_step_again]


def boundaries(scene: Scene, folder: Path) -> int:
    step, _ = scene(folder)
    disk = Faulty()
    save(folder, step, NEW, disk)
    return disk.calls


def loaded(folder: Path) -> int | None:
    try:
        found = CheckpointManager(folder).load()
    except FileNotFoundError:
        return None
    assert found["w"].tolist() == [found["step"]] * 3
    return int(found["step"])


def check(folder: Path, step: int, allowed: set[int | None], what: str) -> int | None:
    """An old or the new state is there; the next save works, and clears up."""
    found = loaded(folder)
    assert found in allowed | {NEW}, what
    save(folder, step + 1, 3)
    assert loaded(folder) == 3, what
    assert sorted(os.listdir(folder)) == [".lock", "fence.json", f"step-{step + 1:010d}"], what
    assert len(os.listdir(folder / f"step-{step + 1:010d}")) == 2, what
    return found


def in_a_child(act: Callable[[], object]) -> int:
    """The wait status of a fork that does this."""
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


def killed_at(boundary: int, fault: Callable[..., None], scene: Scene, folder: Path) -> int | None:
    """Kill a save at a write, and return the state that is loaded afterwards."""
    step, allowed = scene(folder)
    disk = Faulty(boundary, fault)
    status = in_a_child(lambda: save(folder, step, NEW, disk))
    assert os.WTERMSIG(status) == signal.SIGKILL, boundary
    return check(folder, step, allowed, f"killed at {boundary}")


@pytest.mark.parametrize("scene", SCENES)
def test_a_kill_in_the_middle_of_a_commit_leaves_the_old_or_the_new_state(
    tmp_path: Path, scene: Scene
) -> None:
    """All writes: test_power_loss, with what a kill leaves, and the next, with real kills."""
    folder = tmp_path / "checkpoints"
    killed_at(boundaries(scene, folder) // 2, die_in_the_middle, scene, folder)


@pytest.mark.release
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("fault", [die, die_in_the_middle])
def test_a_kill_at_any_write_leaves_the_old_or_the_new_state(
    tmp_path: Path, scene: Scene, fault: Callable[..., None]
) -> None:
    folder = tmp_path / "checkpoints"
    count = boundaries(scene, folder)
    assert count > 14
    seen = {killed_at(boundary, fault, scene, folder) for boundary in range(1, count + 1)}
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
    for boundary in range(1, boundaries(scene, folder) + 1):
        step, allowed = scene(folder)
        disk = Faulty(boundary, fail(code))
        message = ""
        try:
            save(folder, step, NEW, disk)
            # What failed was a deletion, and the checkpoint counts.
            assert loaded(folder) == NEW, boundary
        except CheckpointError as error:
            message = str(error)
            num_errors += 1
        assert not message or os.strerror(code) in message
        check(folder, step, allowed, f"failed at {boundary}")
    assert num_errors > 10


@pytest.mark.parametrize("scene", SCENES)
def test_a_short_write_is_continued(tmp_path: Path, scene: Scene) -> None:
    folder = tmp_path / "checkpoints"
    for boundary in range(1, boundaries(scene, folder) + 1):
        step, _ = scene(folder)
        save(folder, step, NEW, Faulty(boundary, short))
        assert loaded(folder) == NEW


def test_a_full_disk_and_a_read_only_one_keep_the_last_checkpoint(small_disk: Path) -> None:
    with CheckpointManager(small_disk, keep_last=1) as manager:
        manager.save(1, state(OLD))
        manager.wait()
        manager.save(2, {"w": torch.zeros(100_000)})
        with pytest.raises(CheckpointError, match="No space left on device"):
            manager.wait()
        assert loaded(small_disk) == OLD
        assert os.listdir(small_disk / "step-0000000001")
        remount = ["mount", "-o", "remount,ro", str(small_disk)]
        subprocess.run(remount, check=True)
        manager.save(3, state(NEW))
        with pytest.raises(CheckpointError, match="Read-only file system"):
            manager.wait()
        assert loaded(small_disk) == OLD
        subprocess.run([*remount[:2], "remount,rw", str(small_disk)], check=True)
        manager.save(4, state(NEW))
    assert loaded(small_disk) == NEW
    assert CheckpointManager(small_disk).steps() == [4]


class Mute(DiskCalls):
    """Writes no byte, without an error."""

    def write(self, handle: int, data: memoryview) -> int:  # noqa: ARG002
        return 0


def test_a_write_of_0_bytes_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    with pytest.raises(CheckpointError, match=r"write\(\) returned 0 bytes"):
        save(tmp_path, 2, 2, Mute())
    assert CheckpointManager(tmp_path).latest() == 1
