"""What `save` returns, which checkpoints are kept and gone back to, and which is the best."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import Gated, told
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from elasticlib import CheckpointManager
from elasticlib.checkpoint.folder import summed
from elasticlib.errors import CheckpointError, ConfigError
from elasticlib.testing.waiting import wait_until


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), float(value))}


# -- the handle --------------------------------------------------------------------------------


def test_a_save_says_when_it_is_durable_and_can_be_asked_again(tmp_path: Path) -> None:
    place = Gated(tmp_path)
    with CheckpointManager(place) as manager:
        save = manager.save(3, state(1))
        assert (save.step, save.done(), save.error) == (3, False, None)
        assert repr(save) == "<Save of step 3: under way>"
        with pytest.raises(CheckpointError, match="step 3 is still being written"):
            save.wait(timeout=0.01)
        with pytest.raises(CheckpointError, match="step 3 is still being written"):
            manager.wait(timeout=0.01)
        place.gate.set()
        save.wait()
        assert (save.done(), save.error, manager.steps()) == (True, None, [3])
        save.wait(timeout=0)
        assert repr(save) == "<Save of step 3: durable>"
        place.gate.clear()
        child = manager.save(4, state(2))
        if not (pid := os.fork()):
            with told() as said:
                child.wait()
            os._exit(0 if "forked from" in said[0] and "under way" in repr(child) else 1)
        place.gate.set()
        assert os.waitpid(pid, 0)[1] == 0


def test_a_failure_that_somebody_has_seen_is_not_raised_again(tmp_path: Path) -> None:
    place = Gated(tmp_path)
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
        manager.wait()  # nobody has asked about it yet
    manager.wait()
    assert full in str(other.error)
    last = manager.save(3, state(3))
    wait_until("its end", last.done)
    assert full in str(last.error)
    assert full in repr(last)
    place.full = False
    manager.save(4, state(4)).wait()
    manager.close()
    assert manager.steps() == [4]


def sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((5,), value), mesh, [Shard(0)])}


def save_and_ask(folder: Path) -> list[Any]:
    """Of a state that one rank writes, and of one that all do; then of failures of both."""
    place = Gated(folder)
    place.gate.set()
    found: list[Any] = []
    with CheckpointManager(place) as manager:
        for step, made in ((1, state(1)), (2, sharded(2))):
            save = manager.save(step, made)
            save.wait()
            found.append((save.done(), save.error, manager.steps()))
        place.full = dist.get_rank() == 0
        for step, made in ((3, state(3)), (4, sharded(4))):
            save = manager.save(step, made)
            with told() as said:
                save.wait()
            found.append((save.done(), said[0] == str(save.error), said[0]))
        manager.wait()  # all have been asked about
    return found


def test_on_every_rank_it_is_known_whether_a_save_is_durable_or_why_not(
    ranks: Ranks, tmp_path: Path
) -> None:
    writer, other = ranks.run(save_and_ask, 2, tmp_path)
    assert writer[:2] == other[:2] == [(True, None, [1]), (True, None, [1, 2])]
    full = os.strerror(errno.ENOSPC)
    assert all(done and same for done, same, _ in writer[2:] + other[2:])
    assert full in writer[2][2]
    assert other[2][2] == f"step 3 was not saved by rank 0: {writer[2][2]}"
    assert full in writer[3][2]
    assert other[3][2] == f"rank 0 could not save step 4: {writer[3][2]}"


def fail_and_go_on(folder: Path) -> list[Any]:
    """A save that fails, one that is not begun for that, one that cannot be, and one that is."""
    place, first = Gated(folder), dist.get_rank() == 0
    place.gate.set()
    found: list[Any] = []
    with CheckpointManager(place) as manager:
        place.full = True
        manager.save(1, state(1))
        for step, made in ((2, state(2)), (3, {"w": object() if first else 0})):
            with told() as said:
                manager.save(step, made).wait()
            found.append(said)
            place.full = False
        manager.save(4, state(4)).wait()
        found.append(manager.steps())
        with told() as said:
            manager.wait()
        found.append(said)
    return found


def test_after_a_save_that_was_not_begun_all_ranks_still_mean_the_same_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    writer, other = ranks.run(fail_and_go_on, 2, tmp_path)
    full = os.strerror(errno.ENOSPC)
    assert full in writer[0][0]
    assert other[0] == [f"step 2 was not saved by rank 0: {writer[0][0]}"]
    assert "state['w'] is an object" in writer[1][0]
    assert other[1] == [f"step 3 was not saved by rank 0: {writer[1][0]}"]
    assert writer[2] == other[2] == [4]
    # That of step 1, which nobody on this rank has asked about.
    assert (writer[3], len(other[3])) == ([], 1)
    assert other[3][0].startswith("step 1 was not saved by rank 0: ")


def total(tensor: Any) -> float:
    return float((tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).sum())


def go_back(folder: Path) -> list[Any]:
    """To steps that are kept, of states that one rank has written, and that all have; to one that
    is not; and each rank to another one."""
    found: list[Any] = []
    with CheckpointManager(folder, keep_last=9) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).wait()
        for step in (3, 4):
            manager.save(step, {"w": sharded(float(step))["w"], "n": step}).wait()
        plain, cut = state(0), {"w": sharded(0.0)["w"], "n": 0}
        for step, made in ((1, plain), (3, cut), (4, cut)):
            restored = manager.restore(made, step)
            found.append((restored.step, restored.source, total(made["w"])))
        try:
            manager.restore(plain, step=9)
        except FileNotFoundError as error:
            found.append(str(error))
        plain = state(0)
        with told() as said:
            manager.restore(plain, step=1 + dist.get_rank())
        found.append((said, total(plain["w"])))
    return found


def test_all_ranks_go_back_to_the_step_that_all_of_them_ask_for(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks.run(go_back, 2, tmp_path)
    assert first[:3] == second[:3] == [(1, "disk", 3.0), (3, "disk", 15.0), (4, "disk", 20.0)]
    for missing in (first[3], second[3]):
        assert missing.startswith("there is no step 9 in ")
        assert missing.endswith("; there are 1, 2, 3, 4")
    said = (
        "rank 0 asked for step 1, and rank 1 for step 2: all ranks have to ask for the same one, "
        "and nothing was restored"
    )
    assert first[4] == second[4] == ([said], 0.0)


# -- metrics -----------------------------------------------------------------------------------


def trained(folder: Path, losses: dict[int, float], **options: Any) -> CheckpointManager:
    manager = CheckpointManager(folder, **options)
    for step, loss in losses.items():
        manager.save(step, state(loss), {"loss": loss, "lr": 0.1})
    manager.wait()
    return manager


LOSSES = {10: 0.9, 20: 0.3, 30: 0.7, 40: 0.2, 50: 0.8, 60: 0.5}


def test_the_best_stay_beside_the_newest_and_those_of_each_so_many_steps(tmp_path: Path) -> None:
    manager = trained(tmp_path, LOSSES, keep_last=1, keep_every=50, keep_best=("loss", "min", 2))
    assert manager.steps() == [20, 40, 50, 60]
    assert manager.best() == 40
    assert manager.best(("loss", "max")) == 50
    assert manager.best(("lr", "max")) == 60  # as good as the others, and the newest
    assert manager.best(("top1", "max")) is None
    manager.close()
    # What was measured is kept with it: whoever comes later knows it, and goes on keeping it.
    with trained(tmp_path, {70: 0.4}, keep_last=1, keep_best=("loss", "min")) as later:
        assert later.steps() == [40, 70]
        found = state(0)
        assert later.restore(found, step=later.best()).step == 40
        assert found["w"].tolist() == pytest.approx([0.2] * 3)


def test_a_damaged_best_one_is_passed_over_and_one_that_cannot_be_read_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, LOSSES, keep_last=9).close()
    (path,) = (tmp_path / "step-0000000040").glob("state.*")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert CheckpointManager(tmp_path).best(("loss", "min")) == 20
    assert "step-0000000040 is damaged" in caplog.text
    (tmp_path / "step-0000000050" / "manifest.json").write_bytes(summed(b'{"format":999}'))
    with pytest.raises(CheckpointError, match="this version reads"):
        CheckpointManager(tmp_path).best(("loss", "min"))


def test_a_metric_that_is_no_number_costs_the_metric_and_not_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, keep_best=("loss", "min")) as manager:
        manager.save(1, state(1), {"loss": torch.tensor(2.0)})
        manager.save(2, state(2), {"loss": float("nan")})
        manager.save(3, state(3), {"loss": torch.tensor(float("inf"))})
        manager.save(4, state(4)).wait()
        assert (manager.best(), manager.steps()) == (1, [1, 2, 3, 4])
    assert "step 2: the metric 'loss' is nan, and is left out" in caplog.text


NO_NUMBERS = (None, 1j, 10**1000, torch.ones(2))


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"lr": 0.1}, r"step 1 has no metric 'loss', which keep_best goes by; it has 'lr'"),
        ({"loss": "0.1"}, r"metrics\['loss'\] is '0.1'"),
        ({"loss": [0.1]}, r"metrics\['loss'\] is \[0.1\]"),
        ({"loss": 0.1, 3: 0.1}, r"metrics\[3\]"),
        *(({"loss": value}, r"metrics\['loss'\] is .* a finite number") for value in NO_NUMBERS),
    ],
)
def test_metrics_that_cannot_be_kept_are_refused_before_anything_is_written(
    tmp_path: Path, metrics: Any, said: str
) -> None:
    with CheckpointManager(tmp_path, keep_best=("loss", "min")) as manager:
        with pytest.raises(CheckpointError, match=said):
            manager.save(1, state(1), metrics)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "best", [("loss",), ("loss", "least"), ("loss", "min", 0), ("loss", "min", True), "loss", 3]
)
def test_a_rule_for_the_best_that_says_nothing_is_refused(tmp_path: Path, best: Any) -> None:
    with pytest.raises(ConfigError, match="keep_best"):
        CheckpointManager(tmp_path, keep_best=best)


def test_the_best_of_nothing_that_was_named_is_no_guess(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"best\(\) needs a metric"):
        CheckpointManager(tmp_path).best()
