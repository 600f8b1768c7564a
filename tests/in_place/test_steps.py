"""The step loop in a group whose members are fixed, as with an older torch or without an agent."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.utils.data import DataLoader
from training import Job

import elasticlib
from elasticlib import CheckpointManager, ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.errors import ConfigError
from elasticlib.in_place.step_loop import StepLoop


def create_batches(samples: int = 10, batch: int = 4) -> ElasticBatchSampler:
    sampler = ElasticDistributedSampler(range(samples), 1, 0, shuffle=False, tail="exact")
    return ElasticBatchSampler(sampler, batch)


def test_each_batch_of_each_epoch_is_one_step() -> None:
    seen = []
    loop = elasticlib.steps(create_batches(), {}, epochs=2)
    for attempt in loop:
        with attempt as indices:
            seen.append((attempt.step, attempt.epoch, attempt.is_new_group, indices))
        assert attempt.is_committed
    first, second, third = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]
    assert seen == [
        *((1, 0, True, first), (2, 0, False, second), (3, 0, False, third)),
        *((4, 1, False, first), (5, 1, False, second), (6, 1, False, third)),
    ]
    assert (loop.step, loop.stop_request) == (6, None)


def test_a_job_resumes_after_its_last_saved_step(tmp_path: Path) -> None:
    def run(until: int) -> list[int]:
        counts, seen = {"n": 0}, list[int]()
        with CheckpointManager(tmp_path) as manager:
            loop = elasticlib.steps(
                create_batches(), {"counts": counts}, manager=manager, save_every=1
            )
            for attempt in loop:
                with attempt as indices:
                    counts["n"] += 1
                    seen += indices
                if attempt.step == until:
                    break
        assert counts["n"] == loop.step
        return seen

    assert run(2) + run(3) == [*range(10)]


def test_the_last_step_and_a_pinned_step_are_saved_even_if_no_save_is_due(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for attempt in elasticlib.steps(create_batches(), {"n": 1}, manager=manager):
            with attempt:
                attempt.report(loss=0.5, samples=4, pin=attempt.step == 2)
        manager.wait()
        assert (manager.steps(), manager.steps(pinned_only=True)) == ([2, 3], [2])


def test_a_finished_job_that_is_run_again_saves_nothing(tmp_path: Path) -> None:
    def run() -> int:
        with CheckpointManager(tmp_path) as manager:
            loop = elasticlib.steps(create_batches(), {"n": 1}, manager=manager, epochs=2)
            for attempt in loop:
                with attempt:
                    pass
        return loop.step

    def list_checkpoints() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("step-*/*")}

    assert run() == 6
    saved = list_checkpoints()
    assert saved
    for _ in range(2):
        assert run() == 6
        assert list_checkpoints() == saved


def test_values_that_the_script_assigns_in_its_state_are_saved_and_restored(tmp_path: Path) -> None:
    def run(until: int) -> dict[str, Any]:
        state = {"n": 0, "sum": torch.zeros(1)}
        with CheckpointManager(tmp_path) as manager:
            for attempt in elasticlib.steps(create_batches(), state, manager=manager, save_every=1):
                with attempt:
                    state["n"] += 1
                    state["sum"] = state["sum"] + 1
                if attempt.step == until:
                    break
        return state

    assert run(2) == {"n": 2, "sum": torch.full((1,), 2.0)}
    assert run(3) == {"n": 3, "sum": torch.full((1,), 3.0)}


def test_values_that_the_script_assigns_in_its_state_are_rolled_back() -> None:
    state = {"n": 0, "sum": torch.zeros(1)}
    loop, has_failed = elasticlib.steps(create_batches(), state), False
    while loop.step < 3:
        with contextlib.suppress(ZeroDivisionError):
            for attempt in loop:
                with attempt:
                    state["n"] += 1
                    state["sum"] = state["sum"] + 1
                    if attempt.step == 2 and not has_failed:
                        has_failed = True
                        _ = 1 / 0
    assert state == {"n": 3, "sum": torch.full((1,), 3.0)}


def test_an_object_that_the_script_puts_into_its_state_is_saved_and_restored(
    tmp_path: Path,
) -> None:
    def run(until: int) -> tuple[Any, int]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        state: dict[str, Any] = {"rates": torch.optim.lr_scheduler.ConstantLR(optimizer)}
        with CheckpointManager(tmp_path) as manager:
            loop = elasticlib.steps(create_batches(), state, manager=manager, save_every=1)
            for attempt in loop:
                with attempt:
                    optimizer.step()
                    if attempt.step == 2:
                        state["rates"] = torch.optim.lr_scheduler.StepLR(optimizer, 7)
                        state["counts"] = {"n": 0}
                    state["rates"].step()
                if attempt.step == until:
                    break
            manager.wait()
            return manager.load(), loop.step

    saved, step = run(3)
    assert (saved["rates"]["step_size"], saved["rates"]["last_epoch"], step) == (7, 2, 3)
    assert saved["counts"] == {"n": 0}


@pytest.mark.parametrize(
    ("length", "message"),
    [(2, "ended 1 batches before the end of epoch 0"), (4, "more items in epoch 0")],
)
def test_a_loader_of_another_length_is_an_error(length: int, message: str) -> None:
    loop = elasticlib.steps(create_batches(), {}, epochs=2, loader=lambda _: range(length))

    def iterate() -> None:
        for attempt in loop:
            with attempt:
                pass

    with pytest.raises(ConfigError, match=message):
        iterate()
    assert loop.step == min(length, 3)


def test_a_state_that_has_another_value_under_the_name_of_the_batches_is_rejected() -> None:
    with pytest.raises(ConfigError, match="the state has another 'batches'"):
        elasticlib.steps(create_batches(), {"batches": [1]})


def fail_in_second_step(loop: StepLoop) -> None:
    for attempt in loop:
        with attempt:
            _ = 1 / (2 - attempt.step)


def test_an_error_of_the_script_is_raised_and_its_step_is_not_counted() -> None:
    loop = elasticlib.steps(create_batches(), {})
    with pytest.raises(ZeroDivisionError):
        fail_in_second_step(loop)
    assert loop.step == 1


def test_a_loader_is_created_for_each_epoch() -> None:
    lengths, seen = [], list[int]()

    def loader(local_batches: Any) -> DataLoader[Any]:
        lengths.append(len(local_batches))
        return DataLoader(torch.arange(10), batch_sampler=local_batches)  # type: ignore[arg-type]

    for attempt in elasticlib.steps(create_batches(), {}, epochs=2, loader=loader):
        with attempt as numbers:
            seen += numbers.tolist()
    assert lengths == [3, 3]
    assert seen == [*range(10), *range(10)]


def test_an_attempt_must_be_entered_once() -> None:
    with pytest.raises(ConfigError, match="must be entered"):
        for _ in elasticlib.steps(create_batches(), {}):
            pass
    for attempt in elasticlib.steps(create_batches(), {}):
        with attempt:
            pass
        with pytest.raises(ConfigError, match="was entered before"):
            attempt.__enter__()


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes an ElasticBatchSampler, got a range"):
        elasticlib.steps(range(3), {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="save_every >= 0, got -1"):
        elasticlib.steps(create_batches(), {}, save_every=-1)
    with (
        CheckpointManager(tmp_path, per_rank=("rng",)) as manager,
        pytest.raises(ConfigError, match=r"a manager with per_rank=\('rng',\)"),
    ):
        elasticlib.steps(create_batches(), {}, manager=manager)


def steps_of_sharded_state() -> str:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 2)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    with pytest.raises(ConfigError, match="the state has sharded tensors") as rejected:
        elasticlib.steps(create_batches(), {"model": model})
    return str(rejected.value)


def test_a_sharded_state_is_rejected(ranks: Ranks) -> None:
    ranks.run(steps_of_sharded_state, 2)


def train_local_batches(logical: bool) -> list[list[int]]:
    job, seen = Job(logical=logical), []
    for attempt in elasticlib.steps(job.batches, job.state, logical_workers=job.logical):
        with attempt as indices:
            seen.append(indices)
    return seen


@pytest.mark.parametrize("logical", [False, True])
def test_each_worker_gets_its_part_of_each_batch(ranks: Ranks, logical: bool) -> None:
    first, second = ranks.run(train_local_batches, 2, logical)
    [all_batches] = ranks.run(train_local_batches, 1, logical)
    for first_part, second_part, batch in zip(first, second, all_batches, strict=True):
        assert sorted(first_part + second_part) == sorted(batch)
        assert len(first_part) in (3, 4, 5)


def create_group() -> tuple[int, bool]:
    elasticlib.init_process_group("gloo")
    dist.barrier()
    world_size, is_initialized = dist.get_world_size(), dist.is_initialized()
    dist.destroy_process_group()
    return world_size, is_initialized


def test_without_an_agent_torch_creates_the_group(ranks: Ranks) -> None:
    assert ranks.run(create_group, 2, launched=True) == [(2, True), (2, True)]
