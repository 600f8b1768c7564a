"""The handle of a save, its result on all ranks, restores of a given step, and pins."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import GatedStorage, capture_errors, step_folder
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from elasticlib import CheckpointManager, KeepEvery, KeepLast, any_of
from elasticlib.errors import CheckpointError
from elasticlib.launch.cli import main
from elasticlib.testing.waiting import wait_until


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), float(value))}


# -- the handle --------------------------------------------------------------------------------


def test_handle_reports_when_a_save_is_durable(tmp_path: Path) -> None:
    place = GatedStorage(tmp_path)
    with CheckpointManager(place) as manager:
        save = manager.save(3, state(1))
        assert (save.step, save.done(), save.error) == (3, False, None)
        assert repr(save) == "<SaveHandle of step 3: in progress>"
        with pytest.raises(CheckpointError, match="step 3 is still being written"):
            save.wait(timeout=0.01)
        with pytest.raises(CheckpointError, match="step 3 is still being written"):
            manager.wait(timeout=0.01)
        place.gate.set()
        save.wait()
        assert (save.done(), save.error, manager.steps()) == (True, None, [3])
        save.wait(timeout=0)
        assert repr(save) == "<SaveHandle of step 3: durable>"
        place.gate.clear()
        child = manager.save(4, state(2))
        if not (pid := os.fork()):
            with capture_errors() as errors:
                child.wait()
            os._exit(0 if "forked from" in errors[0] and "in progress" in repr(child) else 1)
        place.gate.set()
        assert os.waitpid(pid, 0)[1] == 0


def test_a_failure_that_was_checked_is_not_raised_again(tmp_path: Path) -> None:
    place = GatedStorage(tmp_path)
    place.full = True
    place.gate.set()
    manager = CheckpointManager(place)
    full = os.strerror(errno.ENOSPC)
    seen = manager.save(1, state(1))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=full):
            seen.wait()
    other = manager.save(2, state(2))
    with pytest.raises(CheckpointError, match=full):
        manager.wait()  # no caller has checked it
    manager.wait()
    assert full in str(other.error)
    last = manager.save(3, state(3))
    wait_until("the end of the last save", last.done)
    assert full in str(last.error)
    assert full in repr(last)
    place.full = False
    manager.save(4, state(4)).wait()
    manager.close()
    assert manager.steps() == [4]


def sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((5,), value), mesh, [Shard(0)])}


def save_and_wait(folder: Path) -> list[Any]:
    """Return the results of plain and sharded saves, then of failures of both."""
    place = GatedStorage(folder)
    place.gate.set()
    results: list[Any] = []
    with CheckpointManager(place) as manager:
        for step, made in ((1, state(1)), (2, sharded(2))):
            save = manager.save(step, made)
            save.wait()
            results.append((save.done(), save.error, manager.steps()))
        place.full = dist.get_rank() == 0
        for step, made in ((3, state(3)), (4, sharded(4))):
            save = manager.save(step, made)
            with capture_errors() as errors:
                save.wait()
            results.append((save.done(), errors[0] == str(save.error), errors[0]))
        manager.wait()  # all failures were checked
    return results


def test_all_ranks_learn_whether_a_save_is_durable_or_why_it_failed(
    ranks: Ranks, tmp_path: Path
) -> None:
    writer, other = ranks.run(save_and_wait, 2, tmp_path)
    assert writer[:2] == other[:2] == [(True, None, [1]), (True, None, [1, 2])]
    full = os.strerror(errno.ENOSPC)
    assert all(done and same for done, same, _ in writer[2:] + other[2:])
    assert full in writer[2][2]
    assert other[2][2] == f"step 3 was not saved by rank 0: {writer[2][2]}"
    assert full in writer[3][2]
    assert other[3][2] == f"rank 0 could not save step 4: {writer[3][2]}"


def fail_and_continue(folder: Path) -> list[Any]:
    """Make a save that fails, one that is not started, one that is rejected, and one that works."""
    place, first = GatedStorage(folder), dist.get_rank() == 0
    place.gate.set()
    results: list[Any] = []
    with CheckpointManager(place) as manager:
        place.full = True
        manager.save(1, state(1))
        for step, made in ((2, state(2)), (3, {"w": object() if first else 0})):
            with capture_errors() as errors:
                manager.save(step, made).wait()
            results.append(errors)
            place.full = False
        manager.save(4, state(4)).wait()
        results.append(manager.steps())
        with capture_errors() as errors:
            manager.wait()
        results.append(errors)
    return results


def test_ranks_agree_on_results_after_a_save_that_was_not_started(
    ranks: Ranks, tmp_path: Path
) -> None:
    writer, other = ranks.run(fail_and_continue, 2, tmp_path)
    full = os.strerror(errno.ENOSPC)
    assert full in writer[0][0]
    assert other[0] == [f"step 2 was not saved by rank 0: {writer[0][0]}"]
    assert "state['w'] is an object" in writer[1][0]
    assert other[1] == [f"step 3 was not saved by rank 0: {writer[1][0]}"]
    assert writer[2] == other[2] == [4]
    # The failure of step 1, which no caller on this rank has checked.
    assert (writer[3], len(other[3])) == ([], 1)
    assert other[3][0].startswith("step 1 was not saved by rank 0: ")


def total(tensor: Any) -> float:
    return float((tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).sum())


def restore_steps(folder: Path) -> list[Any]:
    """Restore existing steps of plain and sharded states, a missing one, and different ones."""
    results: list[Any] = []
    with CheckpointManager(folder, keep_last=9) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).wait()
        for step in (3, 4):
            manager.save(step, {"w": sharded(float(step))["w"], "n": step}).wait()
        plain, cut = state(0), {"w": sharded(0.0)["w"], "n": 0}
        for step, made in ((1, plain), (3, cut), (4, cut)):
            restored = manager.restore(made, step)
            results.append((restored.step, restored.source, total(made["w"])))
        try:
            manager.restore(plain, step=9)
        except FileNotFoundError as error:
            results.append(str(error))
        plain = state(0)
        with capture_errors() as errors:
            manager.restore(plain, step=1 + dist.get_rank())
        results.append((errors, total(plain["w"])))
    return results


def test_all_ranks_restore_the_step_that_all_of_them_give(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(restore_steps, 2, tmp_path)
    assert first[:3] == second[:3] == [(1, "disk", 3.0), (3, "disk", 15.0), (4, "disk", 20.0)]
    for missing in (first[3], second[3]):
        assert missing.startswith("there is no step 9 in ")
        assert missing.endswith("; there are 1, 2, 3, 4")
    errors = (
        "rank 0 asked for step 1, and rank 1 for step 2: all ranks have to ask for the same step, "
        "and nothing was restored"
    )
    assert first[4] == second[4] == ([errors], 0.0)


# -- pinned checkpoints ------------------------------------------------------------------------


def test_a_pinned_checkpoint_is_never_pruned_even_by_a_later_manager(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointManager(tmp_path, keep=any_of(KeepLast(1), KeepEvery(50))) as manager:
        for step in (10, 20, 30, 40, 50, 60):
            manager.save(step, state(step), pin=step in (20, 40))
        manager.wait()
        assert manager.steps() == [20, 40, 50, 60]
    with CheckpointManager(tmp_path, keep_last=1) as later:
        assert later.restore(state(0)).step == 60
        later.save(70, state(70)).wait()
        later.prune()
        assert (later.steps(), later.steps(pinned_only=True)) == ([20, 40, 70], [20, 40])
        live = state(0)
        assert later.restore(live, step=40).step == 40
        assert live["w"].tolist() == [40] * 3
        assert main(["checkpoints", str(tmp_path)]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
        assert [(row[0], "pinned" in row) for row in rows] == [
            ("70", False),
            ("40", True),
            ("20", True),
        ]
        # The restore has gone back, so 70 is abandoned. A pinned step takes no place.
        later.save(50, state(50)).wait()
        assert later.steps() == [20, 40, 50]
        later.unpin(20)
        later.prune()
        assert later.steps() == [40, 50]


def test_a_pinned_checkpoint_with_a_truncated_file_is_not_deleted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(1, state(1), pin=True).wait()
        (path,) = step_folder(tmp_path, 1).glob("state.*")
        os.truncate(path, 100)
        manager.save(2, state(2)).wait()
    assert path.exists()
    assert CheckpointManager(tmp_path).verify().keys() == {1}


def save_sharded(folder: Path) -> list[int]:
    with CheckpointManager(folder, keep_last=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, sharded(step), pin=step == 1)
        manager.wait()
        return manager.steps(pinned_only=True)


def test_a_sharded_checkpoint_is_pinned_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(save_sharded, 2, tmp_path) == [[1], [1]]
    assert CheckpointManager(tmp_path).steps() == [1, 3]
