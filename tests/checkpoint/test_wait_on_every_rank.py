"""What one rank writes is waited for on all: each hears whether it is durable, and if not, why."""

from __future__ import annotations

import errno
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import until

from elasticlib import CheckpointManager
from elasticlib.checkpoint.disk import Disk, LocalPlace
from elasticlib.errors import CheckpointError

Act = Callable[[Path], object]


class Gated(Disk):
    """Syncs nothing before a file is there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def sync(self, handle: int) -> None:
        until("the gate", self.gate.exists)
        super().sync(handle)


class Full(Disk):
    def write(self, handle: int, data: memoryview) -> int:  # noqa: ARG002
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), value)}


def manager(folder: Path, disk: Disk | None = None, **more: Any) -> CheckpointManager:
    return CheckpointManager(LocalPlace(folder / "checkpoints", disk), **more)


def play(folder: Path, writer: Act, other: Act) -> list[Any]:
    """What the two ranks come to; None for one that was killed."""
    children = []
    for rank, act in enumerate((writer, other)):
        child = os.fork()
        if not child:
            try:
                torch.set_num_threads(1)
                store = dist.FileStore(str(folder / "meet"), 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                found = act(folder)
                (folder / f"{rank}.part").write_text(json.dumps(found))
                (folder / f"{rank}.part").rename(folder / f"{rank}.json")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        children.append(child)
    ends = []

    def ended() -> bool:
        for child in [child for child in children if child not in ends]:
            if os.waitpid(child, os.WNOHANG)[0]:
                ends.append(child)
        return len(ends) == 2

    try:
        until("both ranks' ends", ended)
    finally:
        for child in children:
            if child not in ends:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    paths = [folder / f"{rank}.json" for rank in (0, 1)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


@contextmanager
def told() -> Iterator[list[str]]:
    """The sentence of what is raised."""
    said: list[str] = []
    try:
        yield said
    except CheckpointError as error:
        said.append(str(error))


def test_wait_returns_once_another_rank_has_made_it_durable_and_not_before(
    tmp_path: Path,
) -> None:
    with manager(tmp_path) as before:
        # That there is one of this step already says nothing of the one that is on its way.
        before.save(1, state(0))

    def writes(folder: Path) -> object:
        with manager(folder, Gated(folder / "gate")) as mine:
            mine.save(1, state(1))
        return None

    def waits(folder: Path) -> object:
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

    _, (early, never, steps, value) = play(tmp_path, writes, waits)
    for said, step in ((early, 1), (never, 2)):
        assert said[0].startswith(f"nothing was heard of the save of step {step}, which rank 0")
    assert (steps, value) == ([1], 1.0)

    def writes_both(folder: Path) -> object:
        with manager(folder, Gated(folder / "again")) as mine:
            for step in (1, 2):
                mine.save(step, state(10 + step))
        return None

    def waits_alone(folder: Path) -> object:
        with manager(folder) as mine:
            for step in (1, 2):
                mine.save(step, state(10 + step))
            (folder / "again").touch()
            mine.wait()
            return [mine.steps(), float(mine.load()["w"][0]), float(mine.load(1)["w"][0])]

    (tmp_path / "meet").unlink()
    assert play(tmp_path, writes_both, waits_alone)[1] == [[1, 2], 12.0, 11.0]


def test_all_ranks_hear_why_one_could_not_save_and_that_one_is_gone(tmp_path: Path) -> None:
    def fails(folder: Path) -> object:
        mine = manager(folder, Full())
        mine.save(1, state(1))
        with told() as said:
            mine.wait()
        mine.close()
        return said

    def hears(folder: Path) -> object:
        mine = manager(folder)
        mine.save(1, state(1))
        with told() as said:
            mine.wait()
        mine.wait()  # it was told once
        mine.close()
        return said

    here, there = play(tmp_path, fails, hears)
    assert os.strerror(errno.ENOSPC) in here[0]
    assert there == [f"step 1 was not saved by rank 0: {here[0]}"]

    def dies(folder: Path) -> object:
        mine = manager(folder, Gated(folder / "never"))
        mine.save(1, state(1))
        os._exit(0)

    def misses(folder: Path) -> object:
        with manager(folder) as mine:
            mine.save(1, state(1))
            with told() as said:
                mine.wait(timeout=1.0)
            return said

    (tmp_path / "meet").unlink()
    (tmp_path / "0.json").unlink()
    gone, (said,) = play(tmp_path, dies, misses)
    assert gone is None
    assert "nothing was heard of the save of step 1, which rank 0 makes: it has died" in said


def test_ranks_that_do_not_make_the_same_calls_are_told_so(tmp_path: Path) -> None:
    def at(step: int) -> Act:
        def act(folder: Path) -> object:
            with manager(folder) as mine:
                mine.save(step, state(step))
                with told() as said:
                    mine.wait()
                return said

        return act

    _, said = play(tmp_path, at(3), at(4))
    assert said == [
        "rank 0 was asked to save step 3, and this rank step 4: all ranks have to make the same "
        "calls"
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_has_met_nobody_looks_for_the_checkpoint_itself(
    tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    mine = manager(tmp_path, shared=shared)
    mine.save(1, state(1))
    with pytest.raises(CheckpointError, match=r"no checkpoint .*000001, which another rank"):
        mine.wait(timeout=0.2)
    mine.save(1, state(1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with manager(tmp_path, shared=shared) as writer:
        writer.save(1, state(1))
    mine.wait()
    assert mine.steps() == [1]
    mine.close()
