"""Each rank can wait for a save that another rank writes, and gets its result or its error."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import capture_errors
from ranks import Ranks

from elasticlib import CheckpointManager
from elasticlib.checkpoint.storage import DiskCalls, LocalStorage
from elasticlib.errors import CheckpointError
from elasticlib.testing.waiting import wait_until

Act = Callable[[Path], object]
Play = Callable[[Act, Act], list[Any]]


class GatedDisk(DiskCalls):
    """A disk that syncs nothing before a file exists."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def sync(self, handle: int) -> None:
        wait_until("the file that opens the gate", self.gate.exists)
        super().sync(handle)


class FullDisk(DiskCalls):
    def write(self, handle: int, data: memoryview) -> int:  # noqa: ARG002
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), value)}


def create_manager(folder: Path, disk: DiskCalls | None = None, **more: Any) -> CheckpointManager:
    return CheckpointManager(LocalStorage(folder / "checkpoints", disk), **more)


def run_one(functions: Sequence[Act], folder: Path) -> object:
    return functions[dist.get_rank()](folder)


@pytest.fixture
def run_two(ranks: Ranks, tmp_path: Path) -> Play:
    """Run two ranks, and return their results. The first of them writes."""
    return lambda writer, waiter: ranks.run(run_one, 2, (writer, waiter), tmp_path)


def save_gated(steps: Sequence[int], gate: str, folder: Path) -> None:
    with create_manager(folder, GatedDisk(folder / gate)) as manager:
        for step in steps:
            manager.save(step, state(10))


def time_out_twice(folder: Path) -> list[Any]:
    with create_manager(folder) as manager:
        manager.save(1, state(10))
        with capture_errors() as first_errors:
            manager.wait(timeout=0.5)
        manager.save(2, state(10))
        (folder / "gate").touch()
        with capture_errors() as second_errors:
            manager.wait(timeout=0.5)
    with create_manager(folder) as manager:
        wait_until("the save of the other rank", lambda: manager.load()["w"][0] == 10)
        return [first_errors, second_errors, manager.steps(), float(manager.load()["w"][0])]


def wait_for_both(folder: Path) -> list[Any]:
    with create_manager(folder) as manager:
        for step in (1, 2):
            manager.save(step, state(10))
        (folder / "again").touch()
        manager.wait()
        return [manager.steps(), float(manager.load()["w"][0]), float(manager.load(1)["w"][0])]


def test_wait_returns_after_the_writing_rank_has_made_the_save_durable(
    run_two: Play, tmp_path: Path
) -> None:
    with create_manager(tmp_path) as before:
        # The earlier checkpoint of this step is not the result of the save.
        before.save(1, state(0))
    writes = partial(save_gated, (1,), "gate")
    _, (first_errors, second_errors, steps, value) = run_two(writes, time_out_twice)
    for errors, step in ((first_errors, 1), (second_errors, 2)):
        assert errors[0].startswith(f"rank 0 has not reported the result of saving step {step}: ")
    assert (steps, value) == ([1], 10.0)
    writes = partial(save_gated, (1, 2), "again")
    assert run_two(writes, wait_for_both)[1] == [[1, 2], 10.0, 10.0]


def fail_to_save(folder: Path) -> list[str]:
    manager = create_manager(folder, FullDisk())
    manager.save(1, state(1))
    with capture_errors() as errors:
        manager.wait()
    manager.close()
    return errors


def wait_twice(folder: Path) -> list[str]:
    manager = create_manager(folder)
    manager.save(1, state(1))
    with capture_errors() as errors:
        manager.wait()
    manager.wait()
    manager.close()
    return errors


def save_and_be_killed(folder: Path) -> None:
    create_manager(folder, GatedDisk(folder / "never")).save(1, state(1))
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_killed_rank(folder: Path) -> list[str]:
    with create_manager(folder) as manager:
        manager.save(1, state(1))
        with capture_errors() as errors:
            manager.wait(timeout=1.0)
        return errors


def test_all_ranks_report_why_a_rank_could_not_save_and_that_it_has_exited(
    run_two: Play, ranks: Ranks, tmp_path: Path
) -> None:
    writer_errors, waiter_errors = run_two(fail_to_save, wait_twice)
    assert os.strerror(errno.ENOSPC) in writer_errors[0]
    assert waiter_errors == [f"step 1 was not saved by rank 0: {writer_errors[0]}"]
    killed, waiter = ranks.results(run_one, 2, (save_and_be_killed, wait_for_killed_rank), tmp_path)
    assert killed.status == -signal.SIGKILL
    [errors] = waiter.value
    assert "rank 0 has not reported the result of saving step 1: it has exited" in errors


def save_and_wait(step: int, folder: Path) -> list[str]:
    with create_manager(folder) as manager:
        manager.save(step, state(step))
        with capture_errors() as errors:
            manager.wait()
        return errors


def test_ranks_that_save_different_steps_get_an_error_that_names_both(run_two: Play) -> None:
    _, errors = run_two(partial(save_and_wait, 3), partial(save_and_wait, 4))
    assert errors == [
        "rank 0 called save for step 3, and this rank for step 4: all ranks must make the same "
        "calls"
    ]


def test_a_rank_without_a_process_group_waits_for_the_checkpoint_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    manager = create_manager(tmp_path)
    manager.save(1, state(1))
    with pytest.raises(CheckpointError, match=r"rank 0 was to save step 1 in"):
        manager.wait(timeout=0.2)
    manager.save(1, state(1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with create_manager(tmp_path) as writer:
        writer.save(1, state(1))
    manager.wait()
    assert manager.steps() == [1]
    manager.close()
