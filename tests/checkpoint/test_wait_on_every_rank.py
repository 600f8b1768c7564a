"""What one rank writes is waited for on all: each hears whether it is durable, and if not, why."""

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
from managers import told
from ranks import Ranks

from elasticlib import CheckpointManager
from elasticlib.checkpoint.storage import DiskCalls, LocalStorage
from elasticlib.errors import CheckpointError
from elasticlib.testing.waiting import wait_until

Act = Callable[[Path], object]
Play = Callable[[Act, Act], list[Any]]


class Gated(DiskCalls):
    """Syncs nothing before a file is there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def sync(self, handle: int) -> None:
        wait_until("the gate", self.gate.exists)
        super().sync(handle)


class Full(DiskCalls):
    def write(self, handle: int, data: memoryview) -> int:  # noqa: ARG002
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), value)}


def manager(folder: Path, disk: DiskCalls | None = None, **more: Any) -> CheckpointManager:
    return CheckpointManager(LocalStorage(folder / "checkpoints", disk), **more)


def act(each: Sequence[Act], folder: Path) -> object:
    return each[dist.get_rank()](folder)


@pytest.fixture
def play(ranks: Ranks, tmp_path: Path) -> Play:
    """What the two ranks come to, one that writes and another."""
    return lambda writer, other: ranks.run(act, 2, (writer, other), tmp_path)


def save_gated(steps: Sequence[int], gate: str, folder: Path) -> None:
    with manager(folder, Gated(folder / gate)) as mine:
        for step in steps:
            mine.save(step, state(10 + step))


def wait_early_and_for_the_next(folder: Path) -> list[Any]:
    with manager(folder) as mine:
        mine.save(1, state(1))
        with told() as early:
            mine.wait(timeout=0.5)
        mine.save(2, state(2))
        (folder / "gate").touch()
        with told() as never:
            mine.wait(timeout=0.5)
    with manager(folder) as mine:
        return [early, never, mine.steps(), float(mine.load()["w"][0])]


def wait_for_both(folder: Path) -> list[Any]:
    with manager(folder) as mine:
        for step in (1, 2):
            mine.save(step, state(0))
        (folder / "again").touch()
        mine.wait()
        return [mine.steps(), float(mine.load()["w"][0]), float(mine.load(1)["w"][0])]


def test_wait_returns_once_another_rank_has_made_it_durable_and_not_before(
    play: Play, tmp_path: Path
) -> None:
    with manager(tmp_path) as before:
        # That there is one of this step already says nothing of the one that is on its way.
        before.save(1, state(0))
    writes = partial(save_gated, (1,), "gate")
    _, (early, never, steps, value) = play(writes, wait_early_and_for_the_next)
    for said, step in ((early, 1), (never, 2)):
        assert said[0].startswith(f"rank 0 has not reported the result of saving step {step}: ")
    assert (steps, value) == ([1], 11.0)
    writes = partial(save_gated, (1, 2), "again")
    assert play(writes, wait_for_both)[1] == [[1, 2], 12.0, 11.0]


def fail_to_save(folder: Path) -> list[str]:
    mine = manager(folder, Full())
    mine.save(1, state(1))
    with told() as said:
        mine.wait()
    mine.close()
    return said


def hear_of_it_once(folder: Path) -> list[str]:
    mine = manager(folder)
    mine.save(1, state(1))
    with told() as said:
        mine.wait()
    mine.wait()
    mine.close()
    return said


def save_and_be_killed(folder: Path) -> None:
    manager(folder, Gated(folder / "never")).save(1, state(1))
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_the_killed(folder: Path) -> list[str]:
    with manager(folder) as mine:
        mine.save(1, state(1))
        with told() as said:
            mine.wait(timeout=1.0)
        return said


def test_all_ranks_hear_why_one_could_not_save_and_that_one_is_gone(
    play: Play, ranks: Ranks, tmp_path: Path
) -> None:
    here, there = play(fail_to_save, hear_of_it_once)
    assert os.strerror(errno.ENOSPC) in here[0]
    assert there == [f"step 1 was not saved by rank 0: {here[0]}"]
    killed, other = ranks.results(act, 2, (save_and_be_killed, wait_for_the_killed), tmp_path)
    assert killed.status == -signal.SIGKILL
    [said] = other.value
    assert "rank 0 has not reported the result of saving step 1: it has exited" in said


def save_and_hear(step: int, folder: Path) -> list[str]:
    with manager(folder) as mine:
        mine.save(step, state(step))
        with told() as said:
            mine.wait()
        return said


def test_ranks_that_do_not_make_the_same_calls_are_told_so(play: Play) -> None:
    _, said = play(partial(save_and_hear, 3), partial(save_and_hear, 4))
    assert said == [
        "rank 0 called save for step 3, and this rank for step 4: all ranks must make the same "
        "calls"
    ]


def test_a_rank_that_has_met_nobody_looks_for_the_checkpoint_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    mine = manager(tmp_path)
    mine.save(1, state(1))
    with pytest.raises(CheckpointError, match=r"rank 0 was to save .*000001"):
        mine.wait(timeout=0.2)
    mine.save(1, state(1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with manager(tmp_path) as writer:
        writer.save(1, state(1))
    mine.wait()
    assert mine.steps() == [1]
    mine.close()
