"""An agent writes the last snapshot of its workers as a normal checkpoint when a job ends early."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from managers import create_manager, step_folder

from elasticlib import CheckpointManager, Node
from elasticlib.checkpoint.end_save import EndSave, Growth, Timeouts, growing_end_folders
from elasticlib.checkpoint.refs import StateRef, Writer, begin
from elasticlib.checkpoint.snapshot_source import SnapshotSource
from elasticlib.checkpoint.storage import (
    CheckpointStorage,
    DiskCalls,
    FsspecStorage,
    LocalStorage,
    claim_name,
)
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo, assign_ranks
from elasticlib.testing.waiting import wait_until

PLACE: dict[str, object] = {"run": "job", "launch": "first", "generation": 3}
DATA = "state.safetensors"


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step))}


def has_thread(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


class Host:
    """A node whose workers have exited and left snapshots in the memory of its agent."""

    def __init__(self, memory: Path, checkpoints: Path | str) -> None:
        self.memory, self.checkpoints = memory, checkpoints
        (memory / "1").mkdir(parents=True)

    @contextmanager
    def worker(self, rank: int = 0) -> Iterator[CheckpointManager]:
        """Enter the only worker of this node, and yield its manager."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ELASTICLIB_SNAPSHOTS", str(self.memory / "1"))
            for name, value in {"GENERATION": 3, "INCARNATION": "first"}.items():
                patch.setenv(f"ELASTICLIB_{name}", str(value))
            patch.setenv("TORCHELASTIC_RUN_ID", "job")
            for name, number in {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": rank + 1}.items():
                patch.setenv(name, str(number))
            with CheckpointManager(self.checkpoints) as manager:
                yield manager

    def keep(self, *steps: int, rank: int = 0) -> Host:
        with self.worker(rank) as manager:
            for step in steps:
                assert manager.snapshot(step, state(step))
            # The claim, for which no snapshot waits, must not come later in a test.
            writer = manager._writer
            wait_until("the claim", lambda: not (writer._claims or writer._work.is_running))
        return self

    def save(self, info: RendezvousInfo | None = None, disk: DiskCalls | None = None) -> str:
        return self.end_save(info, disk).run()

    def end_save(
        self,
        info: RendezvousInfo | None = None,
        disk: DiskCalls | CheckpointStorage | None = None,
        *,
        is_leaving: bool = True,
        **limits: float,
    ) -> EndSave:
        if isinstance(disk, DiskCalls):
            disk = LocalStorage(self.checkpoints, disk)
        times = Timeouts(**limits)
        return EndSave(self.memory, info, is_leaving=is_leaving, storage=disk, limits=times)


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


def saved(folder: Path, *steps: int, **place: object) -> None:
    with create_manager(folder, {**PLACE, **place}) as manager:
        for step in steps:
            manager.save(step, state(step))


def files_of(folder: Path, step: int) -> set[str]:
    return {path.name for path in step_folder(folder, step).iterdir()}


# -- which state is written ------------------------------------------------------------------------


def test_end_save_adds_a_checkpoint_to_those_of_the_job(host: Host, checkpoints: Path) -> None:
    saved(checkpoints, 5)
    last = host.keep(6, 7).end_save()
    assert (last.run(), last.saved) == ("", 7)
    manager = CheckpointManager(checkpoints)
    assert (manager.steps(), manager.verify()) == ([5, 7], {})
    assert torch.equal(manager.load()["weight"], torch.full((100,), 7.0))
    assert files_of(checkpoints, 7) == {DATA, "manifest.json"}


def test_step_that_has_a_checkpoint_is_written_again_only_if_the_checkpoint_is_corrupt(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 7)
    data = step_folder(checkpoints, 7) / DATA
    assert host.keep(6).save() == host.keep(7).save() == ""
    assert list(checkpoints.glob("*/state*")) == [data]
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    assert host.save() == ""
    assert CheckpointManager(checkpoints).latest() == 7


def test_the_last_step_after_a_rollback_is_written_and_the_next_start_continues_it(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 500, 1000, launch="before", generation=9)
    with host.worker() as manager:
        assert manager.restore(state(0), step=500).step == 500
        for step in range(501, 521):
            manager.snapshot(step, state(step))
    last = host.end_save()
    assert (last.run(), last.saved) == ("", 520)
    with create_manager(checkpoints, {**PLACE, "launch": "next"}) as manager:
        restored = state(0)
        assert manager.restore(restored).step == 520
        assert float(restored["weight"][0]) == 520.0
        assert manager.steps() == [500, 520]
        assert manager.load(1000)["weight"][0] == 1000.0


def test_a_step_that_was_abandoned_is_not_written(host: Host, checkpoints: Path) -> None:
    host.keep(1000)
    saved(checkpoints, 500)
    with create_manager(checkpoints, {**PLACE, "generation": 4}) as manager:
        manager.restore(state(0), step=500)
        manager.save(501, state(501))
    last = host.end_save(nodes(1, 4)[0])
    assert (last.run(), last.saved) == ("", None)
    assert CheckpointManager(checkpoints).steps() == [500, 501]


def test_nothing_is_written_if_a_later_generation_has_the_directory(
    host: Host, checkpoints: Path
) -> None:
    host.keep(7)
    saved(checkpoints, 5, generation=4)
    assert host.save() == ""
    assert CheckpointManager(checkpoints).steps() == [5]


def test_directory_of_another_launch_is_refused(host: Host, checkpoints: Path) -> None:
    saved(checkpoints, 5)
    saved(checkpoints, 6, launch="second")
    problem = host.keep(7).save()
    assert problem.startswith(f"the snapshot of step 7 was not written to {checkpoints}: ")
    assert "took this directory over from the launch of" in problem


def test_snapshot_without_a_checkpoint_directory_is_not_written(
    host: Host, checkpoints: Path
) -> None:
    source = SnapshotSource(str(host.memory / "1"), Writer("job", "first", 3))
    assert source.snapshot(7, state(7))
    source.close()
    assert host.save() == ""
    assert not checkpoints.exists()


def test_a_generation_that_has_made_no_snapshot_writes_that_of_the_one_before(
    host: Host, checkpoints: Path
) -> None:
    """Its workers may have exited before or after they claimed the directory."""
    assert host.keep(7).save(nodes(1, 4)[0]) == ""
    assert CheckpointManager(checkpoints).steps() == [7]
    host.keep(8)
    with create_manager(checkpoints, {**PLACE, "generation": 5}) as manager:
        manager.claim()
    assert host.save(nodes(1, 5)[0]) == ""
    assert CheckpointManager(checkpoints).steps() == [7, 8]


def test_each_manager_of_a_program_has_an_end_save_of_its_own(tmp_path: Path) -> None:
    hosts = [Host(tmp_path / "a", tmp_path / "model"), Host(tmp_path / "b", tmp_path / "average")]
    for number, host in enumerate(hosts):
        host.memory = hosts[0].memory
        with host.worker() as manager:
            manager.snapshot(number + 1, state(number + 1))
    assert hosts[0].save() == ""
    for number, host in enumerate(hosts):
        assert CheckpointManager(host.checkpoints).steps() == [number + 1]


def test_end_save_does_not_import_torch() -> None:
    code = "import sys, elasticlib.checkpoint.snapshot_service; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


# -- several agents --------------------------------------------------------------------------------


class DataDisk(DiskCalls):
    """A disk whose `write_data` is called for data files, and not for manifests and fences."""

    def __init__(self) -> None:
        self.tried = threading.Event()
        self.num_created = 0
        self._data_files: set[int] = set()

    def create(self, path: str) -> int:
        handle = super().create(path)
        is_data = ".safetensors" in path
        self.num_created += is_data
        self._data_files = self._data_files - {handle} | ({handle} if is_data else set())
        return handle

    def write(self, handle: int, data: memoryview) -> int:
        if handle in self._data_files:
            self.tried.set()
            return self.write_data(handle, data)
        return super().write(handle, data)

    def write_data(self, handle: int, data: memoryview) -> int:
        return super().write(handle, data)


class FullDisk(DataDisk):
    """A disk without space for data files."""

    def write_data(self, *_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def several(tmp_path: Path, checkpoints: Path, count: int) -> list[Host]:
    return [Host(tmp_path / str(rank), checkpoints).keep(4, rank=rank) for rank in range(count)]


def test_a_common_state_is_written_by_one_node_and_committed_once_or_more(
    tmp_path: Path, checkpoints: Path
) -> None:
    infos, disks = nodes(3), [DataDisk() for _ in range(3)]
    hosts = several(tmp_path, checkpoints, 3)
    ends = [h.end_save(i, d) for h, i, d in zip(hosts, infos, disks, strict=True)]
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(EndSave.run, ends)) == ["", "", ""]
    assert CheckpointManager(checkpoints).verify() == {}
    assert sum(disk.num_created for disk in disks) == 1
    assert files_of(checkpoints, 4) == {DATA, "manifest.json"}


def test_another_node_writes_a_common_state_if_the_disk_of_the_first_is_full(
    tmp_path: Path, checkpoints: Path
) -> None:
    infos, full = nodes(3), FullDisk()
    hosts = several(tmp_path, checkpoints, 3)
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(hosts[0].end_save(infos[0], full, settle_s=30.0).run)]
        assert full.tried.wait(60)
        results += [
            pool.submit(hosts[rank].end_save(infos[rank], settle_s=0.3).run) for rank in (1, 2)
        ]
        # Nothing is lost, so no node reports a problem.
        assert [result.result(60) for result in results] == ["", "", ""]
    assert CheckpointManager(checkpoints).verify() == {}


def test_node_does_not_wait_for_a_node_that_never_comes(host: Host, checkpoints: Path) -> None:
    end = host.keep(4).end_save(nodes(2)[0], settle_s=1e6, peers_s=1e6)
    assert end.run() == ""
    assert CheckpointManager(checkpoints).steps() == [4]


class HangingDisk(DataDisk):
    """A disk that blocks each write of a data file until `is_released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_released = threading.Event()

    def write_data(self, handle: int, data: memoryview) -> int:
        self.is_released.wait(60)
        return super().write_data(handle, data)


class CreepingDisk(DataDisk):
    """A disk that writes 16 bytes ten times per second, until `is_released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_released = threading.Event()

    def write_data(self, handle: int, data: memoryview) -> int:
        is_released = self.is_released.wait(0.1)
        return super().write_data(handle, data if is_released else data[:16])


def test_slow_writer_is_not_replaced_while_its_file_grows(
    tmp_path: Path, checkpoints: Path
) -> None:
    (slow, other), disk, infos = several(tmp_path, checkpoints, 2), CreepingDisk(), nodes(2)
    limits = {"settle_s": 0.2, "stall_s": 3.0, "peers_s": 5.0}
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(slow.end_save(infos[0], disk).run)]
        assert disk.tried.wait(60)
        results.append(pool.submit(other.end_save(infos[1], **limits).run))
        assert not wait(results, timeout=6.0).done
        disk.is_released.set()
        assert [result.result(60) for result in results] == ["", ""]
    assert files_of(checkpoints, 4) == {DATA, "manifest.json"}


def test_another_node_writes_for_a_writer_whose_file_does_not_grow(
    tmp_path: Path, checkpoints: Path
) -> None:
    (silent, other), disk, infos = several(tmp_path, checkpoints, 2), HangingDisk(), nodes(2)
    with ThreadPoolExecutor() as pool:
        result = pool.submit(silent.save, infos[0], disk)
        assert disk.tried.wait(60)
        end = other.end_save(infos[1], settle_s=0.1, stall_s=0.5)
        assert (end.run(), end.saved) == ("", 4)
        disk.is_released.set()
        assert result.result(60) == ""
    assert CheckpointManager(checkpoints).verify() == {}
    assert files_of(checkpoints, 4) == {"state.1.safetensors", "manifest.json"}


def test_a_node_that_stays_writes_nothing_unless_another_node_leaves(
    tmp_path: Path, checkpoints: Path
) -> None:
    (leaving, staying), infos = several(tmp_path, checkpoints, 2), nodes(2)
    helping = staying.end_save(infos[1], is_leaving=False, settle_s=0.0, poll_s=0.01)
    with ThreadPoolExecutor() as pool:
        result = pool.submit(helping.run)
        assert not wait([result], timeout=0.5).done
        assert not checkpoints.exists() or not list(checkpoints.glob("step-*"))
        assert leaving.save(infos[0]) == ""
        assert result.result(60) == ""
    assert CheckpointManager(checkpoints).steps() == [4]


# -- workers that save at the same time ------------------------------------------------------------


class SweptStorage(LocalStorage):
    """Storage in which another process deletes the next `times` files after they are written."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(folder)
        self.times = times

    def put(self, name: str, data: memoryview) -> bool:
        is_written = super().put(name, data)
        if self.times:
            self.times -= 1
            self.remove(name)
        return is_written


def test_file_that_another_process_deletes_before_the_commit_is_written_again(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 5)
    assert host.keep(7).end_save(None, SweptStorage(checkpoints, 2)).run() == ""
    manager = CheckpointManager(checkpoints)
    assert (manager.steps(), manager.verify()) == ([5, 7], {})
    problem = host.keep(8).end_save(None, SweptStorage(checkpoints, 99)).run()
    assert problem.startswith(f"the snapshot of step 8 was not written to {checkpoints}: ")
    assert "has deleted" in problem


class DiskThatCallsDuringWrite(DataDisk):
    """A disk that calls a function once in the middle of writing a data file."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act: Callable[[], object] | None = act

    def write_data(self, handle: int, data: memoryview) -> int:
        act, self._act = self._act, None
        if act is not None:
            act()
        return super().write_data(handle, data)


def test_end_save_does_not_disturb_a_save_of_a_worker_on_another_node(
    host: Host, checkpoints: Path
) -> None:
    problems: list[str] = []
    host.keep(7)
    disk = DiskThatCallsDuringWrite(lambda: problems.append(host.save()))
    with create_manager(LocalStorage(checkpoints, disk), PLACE) as manager:
        manager.save(8, state(8))
        manager.wait()
        manager.save(9, state(9))
    assert problems == [""]
    assert CheckpointManager(checkpoints).steps() == [7, 8, 9]
    assert CheckpointManager(checkpoints).verify() == {}


# -- disks that fail -------------------------------------------------------------------------------


class FlakyDisk(DataDisk):
    """A disk on which the first `times` calls of a kind fail."""

    def __init__(self, kind: str, times: int) -> None:
        super().__init__()
        self.kind, self.times = kind, times

    def fail(self, kind: str) -> None:
        if kind == self.kind and self.times:
            self.times -= 1
            raise OSError(errno.EIO, "Input/output error")

    def write_data(self, handle: int, data: memoryview) -> int:
        self.fail("write of data")
        return super().write_data(handle, data)

    def rename(self, old: str, new: str) -> None:
        self.fail("rename")
        super().rename(old, new)

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


@pytest.mark.parametrize("kind", ["write of data", "rename", "sync"])
def test_errors_of_the_disk_that_do_not_last_are_retried(
    host: Host, checkpoints: Path, kind: str
) -> None:
    disk = FlakyDisk(kind, 2)
    assert host.keep(4).end_save(None, disk, retry_pause_s=0.01).run() == ""
    assert disk.times == 0
    assert CheckpointManager(checkpoints).verify() == {}
    assert CheckpointManager(checkpoints).steps() == [4]


def test_errors_of_reading_the_directory_are_retried(host: Host, checkpoints: Path) -> None:
    end = host.keep(4).end_save(None, FlakyStorage(checkpoints), retry_pause_s=0.01)
    assert end.run() == ""
    assert CheckpointManager(checkpoints).steps() == [4]


def test_errors_of_the_disk_that_last_are_reported(host: Host, checkpoints: Path) -> None:
    disk = FlakyDisk("write of data", 10**9)
    problem = host.keep(4).end_save(None, disk, poll_s=0.01, retry_pause_s=0.01, retry_s=0.5).run()
    assert problem.startswith(f"the snapshot of step 4 was not written to {checkpoints}: ")
    assert "Input/output error" in problem
    assert disk.times < 10**9 - 2


def test_node_reports_why_no_node_could_write(host: Host, checkpoints: Path) -> None:
    problem = host.keep(4).end_save(nodes(2)[0], FullDisk(), settle_s=0.2).run()
    assert problem.startswith(f"the snapshot of step 4 was not written to {checkpoints}: ")
    assert "No space left on device" in problem
    assert not CheckpointManager(checkpoints).steps()
    # The next writer deletes what was left.
    saved(checkpoints, 5, generation=4)
    assert not list(checkpoints.glob("*.end"))


def test_end_save_gives_up_on_a_disk_that_hangs(host: Host, checkpoints: Path) -> None:
    disk = HangingDisk()
    problem = host.keep(4).end_save(None, disk, total_s=1.0).run()
    assert disk.tried.is_set(), "the write was interrupted and not only its preparation"
    assert problem.startswith(f"the snapshot of step 4 was not written to {checkpoints}: ")
    assert problem.endswith("it was not written, and there was no progress for 1 s")
    assert CheckpointManager(checkpoints).steps() == []
    disk.is_released.set()
    wait_until("the end of the writing thread", lambda: not has_thread("agent-end-save"))


def test_end_save_ends_with_the_callers_reason(host: Host) -> None:
    disk = HangingDisk()
    reason = "the final write of snapshots was given up at SIGINT number 3"
    end = host.keep(4).end_save(None, disk)
    assert end.run(lambda: reason if disk.tried.is_set() else "").endswith(reason)
    disk.is_released.set()


# -- URLs, and restores that wait ------------------------------------------------------------------


@pytest.fixture
def url() -> Iterator[str]:
    MemoryFileSystem.store.clear()
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()


def test_agents_write_a_state_once_at_a_url(tmp_path: Path, url: str) -> None:
    infos = nodes(2)
    ends = [
        Host(tmp_path / str(rank), url).keep(4, rank=rank).end_save(infos[rank], settle_s=30.0)
        for rank in range(2)
    ]
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(EndSave.run, ends)) == ["", ""]
    manager = CheckpointManager(url)
    assert (manager.steps(), manager.verify()) == ([4], {})
    names = {name.rpartition("/")[2] for name in MemoryFileSystem.store if ".end/" in name}
    assert names == {DATA, "manifest.json"}


def test_the_claim_of_a_killed_agent_at_a_url_ends(tmp_path: Path, url: str) -> None:
    host = Host(tmp_path / "memory", url).keep(4)
    (branch,) = {ref.branch for ref in list_refs(host)}
    FsspecStorage(url).replace(f"step-0000000004.{branch}.end/{claim_name(DATA)}", b"x")
    limits = Timeouts(settle_s=0.1, peers_s=0.5)
    end = EndSave(host.memory, nodes(2)[0], limits=limits)
    assert (end.run(), end.saved) == ("", 4)
    assert CheckpointManager(url).verify() == {}
    names = {name.rpartition("/")[2] for name in MemoryFileSystem.store if ".end/" in name}
    assert names == {"state.1.safetensors", "manifest.json"}


def list_refs(host: Host) -> list[StateRef]:
    with host.worker() as manager:
        assert manager._snapshots is not None
        return list(manager._snapshots.list_states())


def test_a_restore_waits_only_for_newer_states_of_the_line_that_are_not_committed(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 5)
    with host.worker() as manager:
        base = manager.restore(state(0))
        manager.snapshot(7, state(7))
    disk, storage = HangingDisk(), LocalStorage(checkpoints)
    (line,) = {ref.line for ref in list_refs(host)}
    old = StateRef(line[0].id, base.step)
    assert growing_end_folders(storage, line, old, Growth()) == []
    with ThreadPoolExecutor() as pool:
        result = pool.submit(host.save, None, disk)
        assert disk.tried.wait(60)
        (folder,) = growing_end_folders(storage, line, old, Growth())
        assert folder.startswith("step-0000000007.")
        assert growing_end_folders(storage, line, StateRef(line[-1].id, 8), Growth()) == []
        assert growing_end_folders(storage, begin(None, Writer()), None, Growth()) == []
        disk.is_released.set()
        assert result.result(60) == ""
    assert growing_end_folders(storage, line, old, Growth()) == []
