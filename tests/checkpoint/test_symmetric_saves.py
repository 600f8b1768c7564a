"""A sharded save that fails on one rank fails on all, and the next save works on all of them."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import GatedStorage
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointError


def sharded(value: float, size: int = 5) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.full((size,), float(value)), mesh, [Shard(0)])


class Part:
    """An object of the script, whose sharded tensor only its `state_dict` shows."""

    def __init__(self) -> None:
        self.tensor: Any = None
        self.error: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"w": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["w"]


def save(manager: CheckpointManager, step: int, state: dict[str, Any]) -> str:
    """Save and wait. Return the error of `save` or of its handle."""
    try:
        manager.save(step, state).wait()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_while_one_rank_fails(
    failing: int, kind: type[BaseException], folder: Path
) -> tuple[list[str], list[int]]:
    """Save four steps, of which the first and the third fail on one rank."""
    part, errors = Part(), []
    with CheckpointManager(folder, keep_last=9) as manager:
        for step in (1, 2, 3, 4):
            part.tensor = sharded(step)
            is_bad = step % 2 == 1 and dist.get_rank() == failing
            part.error = kind("no state") if is_bad else None
            errors.append(save(manager, step, {"part": part}))
        for step in manager.steps():
            assert manager.load(step)["part"]["w"].tolist() == [step] * 5
        return errors, manager.steps()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_dict_that_raises_on_one_rank_fails_the_save_on_all(
    ranks: Ranks, tmp_path: Path, failing: int, kind: type[BaseException]
) -> None:
    results = ranks.run(save_while_one_rank_fails, 2, failing, kind, tmp_path)
    reason = "no state" if kind is ValueError else "KeyboardInterrupt interrupted save()"
    for rank, (errors, steps) in enumerate(results):
        assert steps == [2, 4]
        assert (errors[1], errors[3]) == ("", "")
        for step in (1, 3):
            expected = "no state" if rank == failing else reason
            assert expected in errors[step - 1]
            if rank != failing:
                assert f"rank {failing}" in errors[step - 1]
                assert f"step {step}" in errors[step - 1]


def save_plain_states_that_fail(folder: Path) -> tuple[list[str], list[int]]:
    """Save plain states, of which the first cannot be saved on rank 1."""
    with CheckpointManager(folder) as manager:
        value = object() if dist.get_rank() else 0
        errors = [save(manager, 1, {"w": value}), save(manager, 2, {"w": 1})]
        errors.append(save(manager, 3, {"w": sharded(3)}))
        return errors, manager.steps()


def test_a_call_that_fails_on_a_rank_that_writes_nothing_blocks_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    (first, steps), (second, _) = ranks.run(save_plain_states_that_fail, 2, tmp_path)
    assert first == ["", "", ""]
    assert steps == [1, 2, 3]
    assert "state['w'] is an object" in second[0]
    assert second[1:] == ["", ""]


def save_without_memory(folder: Path) -> tuple[list[str], list[int]]:
    """Save twice, the first time without memory for the copy on rank 1."""
    state = {"w": sharded(1.0, size=1 << 25)}
    with CheckpointManager(folder) as manager:
        errors = [save(manager, 1, {"w": sharded(1.0)})]  # the connections are there
        limits = resource.getrlimit(resource.RLIMIT_AS)
        if dist.get_rank() == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            allowed = pages * resource.getpagesize() + (32 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (allowed, limits[1]))
        errors.append(save(manager, 2, state))
        resource.setrlimit(resource.RLIMIT_AS, limits)
        errors.append(save(manager, 3, state))
        return errors, manager.steps()


def test_a_rank_without_memory_for_the_copy_fails_the_save_on_all(
    ranks: Ranks, tmp_path: Path
) -> None:
    for errors, steps in ranks.run(save_without_memory, 2, tmp_path):
        assert re.search("no memory for a copy|can't allocate memory", errors[1])
        assert (errors[0], errors[2], steps) == ("", "", [1, 3])


def read_a_failure_on_one_rank(folder: Path) -> tuple[str, str, list[int]]:
    """Make a save that fails, whose failure only rank 0 looks at. Then save twice."""
    storage, first = GatedStorage(folder), dist.get_rank() == 0
    storage.gate.set()
    storage.full = first
    with CheckpointManager(storage) as manager:
        handle = manager.save(1, {"w": sharded(1)})
        if first:
            try:
                handle.wait()
            except CheckpointError:
                assert handle.error is not None
        storage.full = False
        errors = [save(manager, step, {"w": sharded(step)}) for step in (2, 3)]
        return errors[0], errors[1], manager.steps()


def test_a_failure_that_only_rank_0_has_read_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for second, third, steps in ranks.run(read_a_failure_on_one_rank, 2, tmp_path):
        assert os.strerror(errno.ENOSPC) in second
        assert (third, steps) == ("", [3])


def save_on_rank_0_between(folder: Path) -> list[int]:
    with CheckpointManager(folder, keep_last=9) as manager:
        for step in (1, 3, 5):
            manager.save(step, {"w": sharded(step)}).wait()
            if dist.get_rank() == 0:
                manager.save(step + 1, {"w": float(step)}).wait()
        return manager.steps()


def test_saves_that_only_rank_0_makes_do_not_disturb_sharded_saves(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run(save_on_rank_0_between, 2, tmp_path)[0] == [1, 2, 3, 4, 5, 6]


def save_different_steps(folder: Path) -> tuple[str, str]:
    with CheckpointManager(folder) as manager:
        return save(manager, 3 + dist.get_rank(), {"w": sharded(1)}), save(
            manager, 5, {"w": sharded(1)}
        )


def test_ranks_that_save_different_steps_of_a_sharded_state_get_an_error_that_names_both(
    ranks: Ranks, tmp_path: Path
) -> None:
    for error, second in ranks.run(save_different_steps, 2, tmp_path):
        assert "rank 0 called save for step 3, and rank 1 for step 4" in error
        assert second == ""
