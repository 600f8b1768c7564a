"""What agents write of their workers' snapshots at the end is a checkpoint like any other."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from managers import manager_at

from elasticlib import CheckpointManager, MemoryStore, Node, Store
from elasticlib.checkpoint.folder import CheckpointFolder
from elasticlib.checkpoint.pack import plan_layout
from elasticlib.checkpoint.persist import LastWrites
from elasticlib.checkpoint.place import Disk, LocalPlace
from elasticlib.checkpoint.snapshot_slots import SnapshotHeader, SnapshotSlots
from elasticlib.rendezvous.interface import BootstrapStoreInfo, RendezvousInfo, deal_seats
from elasticlib.testing.waiting import wait_until

PLACE: dict[str, object] = {"run": "job", "launch": "first", "generation": 3}


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step))}


class Host:
    """A node whose workers have left snapshots in its agent's memory."""

    def __init__(self, memory: Path, checkpoints: Path) -> None:
        self.memory, self.checkpoints = memory, checkpoints
        (memory / "1").mkdir(parents=True)

    def keep(self, step: int, **more: Any) -> Host:
        layout = plan_layout(state(step), {"step": step})
        record = SnapshotHeader("state", step, step, layout.size, "job", 3, incarnation="first")
        record = attrs.evolve(record, **{"folder": str(self.checkpoints), **more})
        with SnapshotSlots(self.memory / "1").open_for_writing(record) as view:
            layout.copy_to(view)
        return self

    def write(self, info: RendezvousInfo | None = None, disk: Disk | None = None) -> str:
        return self.writes(info, disk).run()

    def writes(self, info: RendezvousInfo | None = None, disk: Disk | None = None) -> LastWrites:
        place = None if disk is None else LocalPlace(self.checkpoints, disk)
        return LastWrites(self.memory, info, MemoryStore, place=place)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def host(tmp_path: Path, checkpoints: Path) -> Host:
    return Host(tmp_path / "memory", checkpoints)


def nodes(count: int, store: Store, number: int = 3) -> list[RendezvousInfo]:
    """The last generation, as each of its nodes has it."""
    members = [Node(f"n{rank}", "h", "127.0.0.1", 1) for rank in range(count)]
    place = BootstrapStoreInfo("127.0.0.1", 1)
    return [
        RendezvousInfo("job", number, seat, place, store=store, board=f"job/board/{number}/")
        for seat in deal_seats(members)
    ]


def saved(folder: Path, step: int, place: dict[str, object] = PLACE) -> None:
    with manager_at(folder, place) as manager:
        manager.save(step, state(step))


def test_a_snapshot_is_a_checkpoint_beside_those_of_the_job(host: Host, checkpoints: Path) -> None:
    saved(checkpoints, 5)
    last = host.keep(6).keep(7).writes()
    assert (last.run(), last.saved) == ("", 7)
    manager = CheckpointManager(checkpoints)
    assert manager.steps() == [5, 7]
    assert manager.verify() == {}
    assert torch.equal(manager.load()["weight"], torch.full((100,), 7.0))


def test_what_is_there_already_is_not_written_unless_it_is_damaged(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 7)
    (data,) = checkpoints.glob("step-*/state.*.pack")
    assert host.keep(6).write() == host.keep(7).write() == ""
    assert list(checkpoints.glob("step-*/state.*.pack")) == [data]
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    assert host.write() == ""
    assert CheckpointManager(checkpoints).latest() == 7


def test_where_the_job_goes_on_in_a_later_generation_it_is_left_to_that(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 5, {**PLACE, "generation": 4})
    assert host.keep(7).write() == ""
    assert CheckpointManager(checkpoints).steps() == [5]


class Swept(LocalPlace):
    """Where a worker that saves clears away what is written, so many times."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(folder)
        self.times = times

    def write(self, name: str, data: memoryview) -> None:
        super().write(name, data)
        if self.times:
            self.times -= 1
            self.remove(name)


def test_what_a_worker_beside_us_clears_away_before_its_commit_is_written_again(
    host: Host, checkpoints: Path
) -> None:
    saved(checkpoints, 5)
    host.keep(7)
    assert LastWrites(host.memory, None, MemoryStore, place=Swept(checkpoints, 2)).run() == ""
    manager = CheckpointManager(checkpoints)
    assert (manager.steps(), manager.verify()) == ([5, 7], {})
    host.keep(8)
    said = LastWrites(host.memory, None, MemoryStore, place=Swept(checkpoints, 99)).run()
    assert said.startswith(f"the snapshot of step 8 was not written to {checkpoints}: ")
    assert "is missing" in said


def test_another_launchs_folder_is_refused(host: Host, checkpoints: Path) -> None:
    saved(checkpoints, 5)
    saved(checkpoints, 6, {**PLACE, "launch": "second"})
    said = host.keep(7).write()
    assert said.startswith(f"the snapshot of step 7 was not written to {checkpoints}: ")
    assert "took this folder over from the launch of" in said


def test_nothing_is_written_of_what_names_no_folder(host: Host, checkpoints: Path) -> None:
    assert host.keep(7, folder="").write() == ""
    assert not checkpoints.exists()


def test_a_snapshot_is_written_in_the_name_of_the_generation_that_the_agent_was_in_last(
    host: Host, checkpoints: Path
) -> None:
    """Its workers take the folder in that one, and die before they have made a step."""
    assert host.keep(7).write(nodes(1, MemoryStore(), 4)[0]) == ""
    found = CheckpointFolder(LocalPlace(checkpoints)).look(7)
    assert found is not None
    assert found.manifest is not None
    assert found.manifest.generation == 4


class Meanwhile(Disk):
    """Does something once, in the middle of writing data to the disk."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def write(self, handle: int, data: memoryview) -> int:
        act = self._act
        if act is not None and len(data) > 400:  # no manifest and no fence
            self._act = None
            act()
        return super().write(handle, data)


def test_a_save_that_is_under_way_on_another_node_is_neither_cleared_nor_refused(
    host: Host, checkpoints: Path
) -> None:
    said: list[str] = []
    disk = Meanwhile(lambda: said.append(host.keep(7).write()))
    with manager_at(LocalPlace(checkpoints, disk), PLACE) as manager:
        manager.save(8, state(8))
        manager.wait()
        manager.save(9, state(9))
    assert said == [""]
    assert CheckpointManager(checkpoints).steps() == [7, 8, 9]
    assert CheckpointManager(checkpoints).verify() == {}


@pytest.mark.parametrize(("step", "more", "steps"), [(7, 5, [4, 5, 7]), (10, 12, [4, 12])])
def test_what_a_worker_clears_away_is_written_again_unless_its_own_is_there(
    host: Host, checkpoints: Path, step: int, more: int, steps: list[int]
) -> None:
    worker = manager_at(checkpoints, PLACE)

    def save(step: int = more) -> None:
        worker.save(step, state(step))
        worker.wait()

    save(4)
    assert host.keep(step).write(disk=Meanwhile(save)) == ""
    worker.close()
    assert CheckpointManager(checkpoints).steps() == steps


class Full(Disk):
    """Takes no data; `tried` says that some was to be written."""

    def __init__(self) -> None:
        self.tried = threading.Event()

    def write(self, handle: int, data: memoryview) -> int:
        if len(data) > 400:
            self.tried.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(handle, data)


def test_of_what_several_hold_one_node_writes_and_another_if_that_fails(
    tmp_path: Path, checkpoints: Path
) -> None:
    infos = nodes(3, MemoryStore())
    hosts = [Host(tmp_path / str(rank), checkpoints).keep(4) for rank in range(3)]
    full, said = Full(), ["?"] * 3

    def write(rank: int) -> None:
        said[rank] = hosts[rank].write(infos[rank], full if rank == 0 else None)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(3)]
    threads[0].start()
    assert full.tried.wait(60)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(60)
    # Nothing is lost, so no node says so.
    assert said == ["", "", ""]
    assert CheckpointManager(checkpoints).verify() == {}
    assert len(list(checkpoints.glob("step-*/state.*.pack"))) == 1


def test_what_no_node_can_write_is_told_by_each(host: Host, checkpoints: Path) -> None:
    said = host.keep(4).write(nodes(2, MemoryStore())[0], Full())
    assert said.startswith(f"the snapshot of step 4 was not written to {checkpoints}: ")
    assert "No space left on device" in said
    assert not CheckpointManager(checkpoints).steps()


def test_a_node_writes_by_itself_where_the_store_is_gone(host: Host, checkpoints: Path) -> None:
    store = MemoryStore()
    infos = nodes(2, store)
    store.close()
    assert host.keep(4).write(infos[0]) == ""
    assert CheckpointManager(checkpoints).steps() == [4]


class Hanging(Disk):
    """Data that is written waits for this."""

    def __init__(self) -> None:
        self.tried, self.go_on = threading.Event(), threading.Event()

    def write(self, handle: int, data: memoryview) -> int:
        if len(data) > 400:
            self.tried.set()
            self.go_on.wait(60)
        return super().write(handle, data)


def test_a_disk_that_hangs_holds_nobody_for_ever(host: Host, checkpoints: Path) -> None:
    disk = Hanging()
    said = host.keep(4).writes(None, disk).run(seconds=0.05)
    assert said.startswith(f"the snapshot of step 4 was not written to {checkpoints}: ")
    assert said.endswith("it was not there after 0.05 s")
    disk.go_on.set()
    wait_until("the thread", lambda: all(t.name != "agent-persist" for t in threading.enumerate()))


def test_who_writes_says_so_for_as_long_as_it_takes(host: Host) -> None:
    store, disk = MemoryStore(), Hanging()
    info, said = nodes(2, store)[0], set()
    writes = host.keep(4).writes(info, disk)
    thread = threading.Thread(target=lambda: writes.run(renewed=0.01))
    thread.start()

    def look() -> bool:
        said.update(e.version for e in store.list(info.board).entries if "/written/" in e.key)
        return len(said) > 2

    wait_until("two more words", look)
    disk.go_on.set()
    thread.join(60)


def test_an_agent_needs_no_torch_for_it() -> None:
    code = "import sys, elasticlib.checkpoint.snapshot_service; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
