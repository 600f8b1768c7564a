"""An agent writes the last snapshot of its workers as a normal checkpoint when a job ends early."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from managers import create_manager

from elasticlib import CheckpointManager, Node
from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.final_save import FinalSave, Timeouts
from elasticlib.checkpoint.pack import plan_layout
from elasticlib.checkpoint.snapshot_slots import SnapshotHeader, SnapshotSlots
from elasticlib.checkpoint.storage import DiskCalls, LocalStorage
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo, assign_ranks
from elasticlib.testing.waiting import wait_until

PLACE: dict[str, object] = {"run": "job", "launch": "first", "generation": 3}


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step))}


class Host:
    """A node whose workers have exited and left snapshots in the memory of its agent."""

    def __init__(self, memory: Path, checkpoints: Path) -> None:
        self.memory, self.checkpoints = memory, checkpoints
        (memory / "1").mkdir(parents=True)

    def keep(self, step: int, **more: Any) -> Host:
        layout = plan_layout(state(step), {"step": step})
        header = SnapshotHeader("state", step, step, layout.size, "job", 3, incarnation="first")
        header = attrs.evolve(header, **{"folder": str(self.checkpoints), **more})
        with SnapshotSlots(self.memory / "1").open_for_writing(header) as view:
            layout.copy_to(view)
        return self

    def save(self, info: RendezvousInfo | None = None, disk: DiskCalls | None = None) -> str:
        return self.final_save(info, disk).run()

    def final_save(
        self, info: RendezvousInfo | None = None, disk: DiskCalls | None = None, **limits: float
    ) -> FinalSave:
        storage = None if disk is None else LocalStorage(self.checkpoints, disk)
        return FinalSave(self.memory, info, storage=storage, limits=Timeouts(**limits))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def host(tmp_path: Path, checkpoints: Path) -> Host:
    return Host(tmp_path / "memory", checkpoints)


def nodes(count: int, number: int = 3) -> list[RendezvousInfo]:
    """Return the last generation as each of its nodes sees it."""
    members = [Node(f"n{rank}", "h", "127.0.0.1", 1) for rank in range(count)]
    place = RendezvousStoreInfo("127.0.0.1", 1)
    return [RendezvousInfo("job", number, seat, place) for seat in assign_ranks(members)]


def saved(folder: Path, step: int, place: dict[str, object] = PLACE) -> None:
    with create_manager(folder, place) as manager:
        manager.save(step, state(step))


def test_final_save_adds_a_checkpoint_to_those_of_the_job(host: Host, checkpoints: Path) -> None:
    saved(checkpoints, 5)
    last = host.keep(6).keep(7).final_save()
    assert (last.run(), last.saved) == ("", 7)
    manager = CheckpointManager(checkpoints)
    assert manager.steps() == [5, 7]
    assert manager.verify() == {}
    assert torch.equal(manager.load()["weight"], torch.full((100,), 7.0))


def test_step_that_has_a_checkpoint_is_written_again_only_if_the_checkpoint_is_corrupt(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 7)
    (data,) = checkpoints.glob("step-*/state.safetensors")
    assert host.keep(6).save() == host.keep(7).save() == ""
    assert list(checkpoints.glob("step-*/state.safetensors")) == [data]
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    assert host.save() == ""
    assert CheckpointManager(checkpoints).latest() == 7


@pytest.mark.parametrize(
    "before", [{**PLACE, "generation": 2}, {**PLACE, "launch": "before", "generation": 9}]
)
def test_the_last_step_after_a_return_to_an_earlier_one_is_written_and_later_ones_are_named(
    host: Host,
    checkpoints: Path,
    before: dict[str, object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step in (3, 5, 8):
        saved(checkpoints, step, before)
    with create_manager(checkpoints, PLACE) as manager:
        manager.restore(state(0), step=3)
    last = host.keep(4).final_save()
    assert (last.run(), last.saved) == ("", 4)
    assert float(CheckpointManager(checkpoints).load(4)["weight"][0]) == 4.0
    assert "step 4 was written after the job had gone back" in caplog.text
    assert "steps 5, 8, from before that, are still there: the next start uses 8" in caplog.text
    # A later step that this generation has saved is enough.
    saved(checkpoints, 7)
    last = host.keep(6).final_save()
    assert (last.run(), last.saved) == ("", None)


def test_nothing_is_written_if_a_later_generation_owns_the_directory(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 5, {**PLACE, "generation": 4})
    assert host.keep(7).save() == ""
    assert CheckpointManager(checkpoints).steps() == [5]


class SweptStorage(LocalStorage):
    """Storage in which another writer deletes the next `times` files after they are written."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(folder)
        self.times = times

    def write(self, name: str, data: memoryview) -> int:
        checksum = super().write(name, data)
        if self.times:
            self.times -= 1
            self.remove(name)
        return checksum


def test_file_that_another_writer_deletes_before_the_commit_is_written_again(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 5)
    host.keep(7)
    assert FinalSave(host.memory, None, storage=SweptStorage(checkpoints, 2)).run() == ""
    manager = CheckpointManager(checkpoints)
    assert (manager.steps(), manager.verify()) == ([5, 7], {})
    host.keep(8)
    problem = FinalSave(host.memory, None, storage=SweptStorage(checkpoints, 99)).run()
    assert problem.startswith(f"the snapshot of step 8 was not written to {checkpoints}: ")
    assert "is missing" in problem


def test_directory_of_another_launch_is_refused(host: Host, checkpoints: Path) -> None:
    saved(checkpoints, 5)
    saved(checkpoints, 6, {**PLACE, "launch": "second"})
    problem = host.keep(7).save()
    assert problem.startswith(f"the snapshot of step 7 was not written to {checkpoints}: ")
    assert "took this directory over from the launch of" in problem


def test_snapshot_without_a_checkpoint_directory_is_not_written(
    host: Host, checkpoints: Path
) -> None:
    assert host.keep(7, folder="").save() == ""
    assert not checkpoints.exists()


def test_manifest_names_the_last_generation_of_the_agent(host: Host, checkpoints: Path) -> None:
    """Workers may acquire the directory in a generation and exit before their first snapshot."""
    assert host.keep(7).save(nodes(1, 4)[0]) == ""
    entry = CheckpointCatalog(LocalStorage(checkpoints)).read_entry(7)
    assert entry is not None
    assert entry.manifest is not None
    assert entry.manifest.generation == 4


class DiskThatCallsDuringWrite(DiskCalls):
    """A disk that calls a function once in the middle of writing a data file."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def write(self, handle: int, data: memoryview) -> int:
        act = self._act
        if act is not None and len(data) > 400:  # a data file, not a manifest or a fence
            self._act = None
            act()
        return super().write(handle, data)


def test_final_save_does_not_disturb_a_save_of_a_worker_on_another_node(
    host: Host, checkpoints: Path
) -> None:
    problems: list[str] = []
    disk = DiskThatCallsDuringWrite(lambda: problems.append(host.keep(7).save()))
    with create_manager(LocalStorage(checkpoints, disk), PLACE) as manager:
        manager.save(8, state(8))
        manager.wait()
        manager.save(9, state(9))
    assert problems == [""]
    assert CheckpointManager(checkpoints).steps() == [7, 8, 9]
    assert CheckpointManager(checkpoints).verify() == {}


@pytest.mark.parametrize(("step", "more", "steps"), [(7, 5, [4, 5, 7]), (10, 12, [4, 12])])
def test_deleted_file_is_not_written_again_if_the_worker_saved_a_later_step(
    host: Host, checkpoints: Path, step: int, more: int, steps: list[int]
) -> None:
    worker = create_manager(checkpoints, PLACE)

    def save(step: int = more) -> None:
        worker.save(step, state(step))
        worker.wait()

    save(4)
    assert host.keep(step).save(disk=DiskThatCallsDuringWrite(save)) == ""
    worker.close()
    assert CheckpointManager(checkpoints).steps() == steps


class DataDisk(DiskCalls):
    """A disk whose `write_data` is called for data files, and not for manifests and reports."""

    def __init__(self) -> None:
        self.tried = threading.Event()
        self._data_files: set[int] = set()

    def create(self, path: str) -> int:
        handle = super().create(path)
        is_data = path.endswith(".safetensors")
        self._data_files = self._data_files - {handle} | ({handle} if is_data else set())
        return handle

    def write(self, handle: int, data: memoryview) -> int:
        if handle in self._data_files:
            self.tried.set()
            self.write_data()
        return super().write(handle, data)

    def write_data(self) -> None:
        raise NotImplementedError


class FullDisk(DataDisk):
    """A disk without space for data files."""

    def write_data(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_one_node_writes_a_common_state_and_another_one_if_its_disk_is_full(
    tmp_path: Path, checkpoints: Path
) -> None:
    infos, full = nodes(3), FullDisk()
    hosts = [Host(tmp_path / str(rank), checkpoints).keep(4) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(hosts[0].save, infos[0], full)]
        assert full.tried.wait(60)
        results += [pool.submit(hosts[rank].save, infos[rank]) for rank in (1, 2)]
        # Nothing is lost, so no node reports a problem.
        assert [result.result(60) for result in results] == ["", "", ""]
    assert CheckpointManager(checkpoints).verify() == {}
    assert len(list(checkpoints.glob("step-*/state.safetensors"))) == 1


class SlowDisk(DataDisk):
    """A disk that needs a second to write data."""

    def write_data(self) -> None:
        time.sleep(1.0)


class DiskThatStartsLate(DiskCalls):
    """A disk that writes the report of a task after another disk is asked to write data.

    It waits at most a second for that.
    """

    def __init__(self, other: DataDisk) -> None:
        self.other, self.is_reporting = other, threading.Event()

    def write(self, handle: int, data: memoryview) -> int:
        if b'"task": {' in data.tobytes():
            self.is_reporting.set()
            self.other.tried.wait(1.0)
        return super().write(handle, data)


def test_a_node_that_reports_late_does_not_write_a_common_state_again(
    tmp_path: Path, checkpoints: Path
) -> None:
    infos, slow = nodes(2), SlowDisk()
    late = DiskThatStartsLate(slow)
    hosts = [Host(tmp_path / str(rank), checkpoints).keep(4) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(hosts[0].save, infos[0], late)
        assert late.is_reporting.wait(60)
        assert hosts[1].save(infos[1], slow) == first.result(60) == ""
    assert CheckpointManager(checkpoints).verify() == {}
    assert len(list(checkpoints.glob("step-*/state.safetensors"))) == 1


class FlakyDisk(DiskCalls):
    """A disk on which the first `times` calls of a kind fail."""

    def __init__(self, kind: str, times: int) -> None:
        self.kind, self.times = kind, times

    def fail(self, kind: str) -> None:
        if kind == self.kind and self.times:
            self.times -= 1
            raise OSError(errno.EIO, "Input/output error")

    def write(self, handle: int, data: memoryview) -> int:
        self.fail("write of data" if len(data) > 400 else "write")
        return super().write(handle, data)

    def sync(self, handle: int) -> None:
        self.fail("sync")
        super().sync(handle)


class FlakyStorage(LocalStorage):
    """Storage on which the first two listings of directories fail."""

    times = 2

    def list_folders(self) -> list[str]:
        if self.times:
            self.times -= 1
            raise OSError(errno.EIO, "Input/output error")
        return super().list_folders()


@pytest.mark.parametrize("kind", ["write of data", "write", "sync"])
def test_errors_of_the_disk_that_do_not_last_are_retried(
    host: Host, checkpoints: Path, kind: str
) -> None:
    disk = FlakyDisk(kind, 2)
    assert host.keep(4).final_save(None, disk, retry_pause_s=0.01).run() == ""
    assert disk.times == 0
    assert CheckpointManager(checkpoints).verify() == {}
    assert CheckpointManager(checkpoints).steps() == [4]


def test_errors_of_reading_the_directory_are_retried(host: Host, checkpoints: Path) -> None:
    storage, limits = FlakyStorage(checkpoints), Timeouts(retry_pause_s=0.01)
    assert FinalSave(host.keep(4).memory, None, storage=storage, limits=limits).run() == ""
    assert CheckpointManager(checkpoints).steps() == [4]


def test_errors_of_the_disk_that_last_are_reported(host: Host, checkpoints: Path) -> None:
    disk = FlakyDisk("write of data", 10**9)
    problem = host.keep(4).final_save(None, disk, retry_pause_s=0.01, retry_s=0.2).run()
    assert problem.startswith(f"the snapshot of step 4 was not written to {checkpoints}: ")
    assert "Input/output error" in problem
    assert disk.times < 10**9 - 2


def test_node_reports_why_no_node_could_write(host: Host, checkpoints: Path) -> None:
    problem = host.keep(4).final_save(nodes(2)[0], FullDisk(), settle_s=0.2).run()
    assert problem.startswith(f"the snapshot of step 4 was not written to {checkpoints}: ")
    assert "No space left on device" in problem
    assert not CheckpointManager(checkpoints).steps()


def test_node_does_not_wait_for_a_node_that_never_reports(host: Host, checkpoints: Path) -> None:
    assert host.keep(4).save(nodes(2)[0]) == ""
    assert CheckpointManager(checkpoints).steps() == [4]
    # The next generation deletes the reports, because the other node has not finished.
    assert list(checkpoints.glob("final-save.*"))
    saved(checkpoints, 5, {**PLACE, "generation": 4})
    assert not list(checkpoints.glob("final-save.*"))


class HangingDisk(DataDisk):
    """A disk that blocks each write of a data file until `is_released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_writing, self.is_released = threading.Event(), threading.Event()

    def write_data(self) -> None:
        self.is_writing.set()
        self.is_released.wait(60)


def test_final_save_gives_up_on_a_disk_that_hangs(host: Host, checkpoints: Path) -> None:
    disk = HangingDisk()
    problem = host.keep(4).final_save(None, disk, total_s=1.0).run()
    assert disk.is_writing.is_set(), "the write was interrupted and not only its preparation"
    assert problem.startswith(f"the snapshot of step 4 was not written to {checkpoints}: ")
    assert problem.endswith("it was not written, and there was no progress for 1 s")
    assert CheckpointManager(checkpoints).steps() == []
    disk.is_released.set()
    name = "agent-final-save"
    wait_until(
        "the end of the writing thread", lambda: all(t.name != name for t in threading.enumerate())
    )


def test_final_save_ends_with_the_callers_reason(host: Host) -> None:
    disk = HangingDisk()
    reason = "the agent received SIGTERM again"
    final_save = host.keep(4).final_save(None, disk)
    assert final_save.run(lambda: reason if disk.tried.is_set() else "").endswith(reason)
    disk.is_released.set()


def two_savers(
    tmp_path: Path, checkpoints: Path, heartbeat_s: float
) -> tuple[HangingDisk, FinalSave, FinalSave]:
    """Return a disk that hangs, the final save of a node that writes there, and of another node."""
    infos, disk = nodes(2), HangingDisk()
    first, second = (Host(tmp_path / str(rank), checkpoints).keep(4) for rank in range(2))
    return (
        disk,
        first.final_save(infos[0], disk, heartbeat_s=heartbeat_s),
        second.final_save(infos[1], lost_s=0.5),
    )


def test_slow_writer_is_not_replaced_while_it_renews_its_report(
    tmp_path: Path, checkpoints: Path
) -> None:
    disk, slow, other = two_savers(tmp_path, checkpoints, heartbeat_s=0.02)
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(slow.run)]
        assert disk.tried.wait(60)
        results.append(pool.submit(other.run))
        assert not wait(results, timeout=1.5).done
        disk.is_released.set()
        assert [result.result(60) for result in results] == ["", ""]
    assert len(list(checkpoints.glob("step-*/state.safetensors"))) == 1
    assert not list(checkpoints.glob("final-save.*"))


def test_another_node_writes_for_a_writer_that_stops_responding(
    tmp_path: Path, checkpoints: Path
) -> None:
    disk, silent, other = two_savers(tmp_path, checkpoints, heartbeat_s=60.0)
    with ThreadPoolExecutor() as pool:
        result = pool.submit(silent.run)
        assert disk.tried.wait(60)
        assert (other.run(), other.saved) == ("", 4)
        disk.is_released.set()
        assert result.result(60) == ""
    assert CheckpointManager(checkpoints).verify() == {}


def test_final_save_does_not_import_torch() -> None:
    code = "import sys, elasticlib.checkpoint.snapshot_service; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
