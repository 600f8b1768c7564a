"""Values that differ by rank: a save of them fails on all ranks, or saves them by rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from managers import capture_errors
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from elasticlib import CheckpointManager
from elasticlib.checkpoint.end_save import EndSave


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 200), torch.nn.BatchNorm1d(200))


def big_net(rank: int) -> torch.nn.Module:
    """Return a module with a parameter that is not read completely, and differs by rank."""
    module = torch.nn.Linear(300, 200)
    with torch.no_grad():
        module.weight.fill_(1.0).add_(rank * 1e-7)
        module.bias.zero_()
    return module


def generator(rank: int) -> torch.Generator:
    made = torch.Generator().manual_seed(0)
    torch.rand(rank, generator=made)
    return made


def optimizer(rank: int) -> torch.optim.Optimizer:
    made = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    made.param_groups[0]["params"][0].grad = torch.ones(2) * (rank + 1)
    made.step()
    return made


# Each of them differs between the ranks, and the path is that of the difference.
DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "a value": (lambda rank: {"a": [0, rank]}, "state['x']['a'][1]"),
    "a generator": (generator, "state['x']"),
    "a parameter": (big_net, "state['x']['weight']"),
    "a small tensor": (lambda rank: torch.tensor([0, rank]), "state['x']"),
    "an optimizer": (optimizer, "state['x']['state'][0]['momentum_buffer']"),
    "keys": (lambda rank: {"both": 0, f"of rank {rank}": 0}, "state['x']"),
    "a shape": (lambda rank: torch.zeros(2 + rank), "state['x']"),
}


def save_different(kind: str, is_sharded: bool, folder: Path) -> list[str]:
    """Save a state that differs by rank, and return the error of `wait` and of the next save."""
    rank = dist.get_rank()
    module = net()
    if is_sharded:
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {"net": module, "x": DIFFERENT[kind][0](rank)}
    with CheckpointManager(folder / "checkpoints") as manager:
        handle = manager.save(1, state)
        with capture_errors() as errors:
            handle.wait()
        dist.barrier()  # The digest of the other rank has arrived.
        if not errors:
            with capture_errors() as errors:
                manager.save(2, state)
    return errors


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
def test_a_save_fails_on_all_ranks_with_the_path_of_what_differs(
    ranks: Ranks, tmp_path: Path, is_sharded: bool
) -> None:
    for kind, (_, path) in DIFFERENT.items():
        folder = tmp_path / kind
        for errors in ranks.run(save_different, 2, kind, is_sharded, folder):
            assert len(errors) == 1, (kind, errors)
            assert f" {path} " in errors[0], (kind, errors)
            assert "rank 1" in errors[0]
            assert "per_rank=('x',)" in errors[0]


def save_similar(folder: Path) -> tuple[list[int], float]:
    """Save what may differ by rank: statistics of BatchNorm, devices and strides; and on rank 0."""
    rank = dist.get_rank()
    module = net()
    module.get_buffer("1.running_mean").fill_(rank)
    table = torch.arange(40_000.0).view(200, 200)
    table = table.t().contiguous().t() if rank else table
    given = net().state_dict()
    given["1.running_var"].fill_(rank)
    state = {"net": module, "dict": given, "table": table, "number": 1.0}
    with CheckpointManager(folder) as manager:
        for step in (1, 2):
            manager.save(step, state)
            dist.barrier()
            manager.wait()
        if rank == 0:
            state["number"] = 2.0
            manager.save(3, state)
        manager.wait()
        dist.barrier()
        return manager.steps(), float(manager.load()["net"]["1.running_mean"][0])


def test_buffers_may_differ_by_rank_and_rank_0_may_save_alone(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(save_similar, 2, tmp_path) == [([1, 2, 3], 0.0)] * 2


def save_after_rank_0(folder: Path) -> tuple[list[str], list[str], list[int]]:
    """Save on rank 1 only when the checkpoint of rank 0 is durable."""
    rank, late = dist.get_rank(), []
    state = {"x": rank}
    with CheckpointManager(folder) as manager:
        if rank == 0:
            manager.save(1, state).wait()
        dist.barrier()
        if rank == 1:
            with capture_errors() as late:
                manager.save(1, state).wait()
        dist.barrier()
        with capture_errors() as next_errors:
            state["x"] = 0
            manager.save(2, state)
        with capture_errors():
            manager.wait()
        dist.barrier()
        return late, next_errors, manager.steps()


def test_a_difference_that_is_found_after_the_commit_is_raised_by_the_next_call(
    ranks: Ranks, tmp_path: Path
) -> None:
    (none, first, steps), (late, nothing, _) = ranks.run(save_after_rank_0, 2, tmp_path)
    expected = "step 1 was saved with rank 0's values only: state['x'] is not the same on rank 1"
    assert (none, nothing) == ([], [])
    assert late[0].startswith(expected)
    assert first[0].startswith(expected)
    assert steps == [1]


def give_objects_that_torch_has_sharded(folder: Path) -> list[list[str]]:
    """Return the errors of each call with each such object, after a step of the optimizers."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # This warns, outside of ranks.

    flat = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
    flat_adam = torch.optim.Adam(flat.parameters())
    plain = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.Adam)
    for module, optimizer in ((flat, flat_adam), (plain, zero)):
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    found = []
    with CheckpointManager(folder) as manager:
        for given in (torch.nn.Sequential(flat), flat_adam, zero):
            state = {"given": [given]}
            calls = (
                lambda state: manager.save(1, state),
                lambda state: manager.snapshot(1, state),
                manager.restore,
            )
            for call in calls:
                with capture_errors() as errors:
                    call(state)
                found.append(errors)
        with capture_errors():
            manager.wait()
    return found


def test_states_of_fsdp1_and_zero_are_rejected_with_the_remedy(
    ranks: Ranks, tmp_path: Path
) -> None:
    for found in ranks.run(give_objects_that_torch_has_sharded, 2, tmp_path):
        for errors, kind in zip(found, ["FSDP1"] * 6 + ["ZeroRedundancy"] * 3, strict=True):
            assert errors[0].startswith("state['given'][0] "), found
            assert kind in errors[0]
            assert "fully_shard" in errors[0]


def snapshot_state(rank: int, *, is_sharded: bool) -> dict[str, Any]:
    module = net()
    if is_sharded:
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"net": module, "rng": generator(rank), "same": 1}


def keep_snapshots(is_sharded: bool, folder: Path) -> bool:
    """Keep snapshots whose generators differ by rank. Each rank is on a node of its own."""
    rank = dist.get_rank()
    enter_node(folder, rank, attempt=1)
    with CheckpointManager(folder / "checkpoints") as manager:
        kept = [manager.snapshot(s, snapshot_state(rank, is_sharded=is_sharded)) for s in (1, 2)]
        dist.barrier()
    return all(kept)


def restore_snapshots(is_sharded: bool, folder: Path) -> list[str]:
    """Restore after a restart. Return the error, or else warnings and what a generator gives."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elasticlib.checkpoint").addHandler(handler)
    rank = dist.get_rank()
    enter_node(folder, rank, attempt=2)
    state = snapshot_state(7, is_sharded=is_sharded)
    with capture_errors() as errors:
        CheckpointManager(folder / "checkpoints").restore(state)
    return errors or [*warnings, str(float(torch.rand(1, generator=state["rng"])))]


def enter_node(folder: Path, node: int, attempt: int) -> None:
    memory = folder / f"node{node}" / str(attempt)
    memory.mkdir(parents=True, exist_ok=True)
    os.environ["LOCAL_RANK"] = "0"
    os.environ["ELASTICLIB_GENERATION"] = str(attempt)
    os.environ["ELASTICLIB_INCARNATION"] = "one"  # The ranks are one launch.
    os.environ["ELASTICLIB_SNAPSHOTS"] = str(memory)


def test_snapshots_whose_values_differ_are_noticed_by_a_restore_and_by_the_end_save(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run(keep_snapshots, 2, False, tmp_path / "a") == [True, True]
    for [error] in ranks.run(restore_snapshots, 2, False, tmp_path / "a"):
        assert "the snapshots of step 2 on ranks 0 and 1 have other values at state['rng']" in error
        assert "per_rank=" in error
    assert ranks.run(keep_snapshots, 2, True, tmp_path / "b") == [True, True]
    [warning, first], [second] = ranks.run(restore_snapshots, 2, True, tmp_path / "b")
    assert "have other values at state['rng']" in warning
    numbers = [str(float(torch.rand(1, generator=generator(rank)))) for rank in (0, 1)]
    assert [first, second] == numbers
    # All parts are on one node now. One rank would get the values of part 0 only.
    for slot in (tmp_path / "b" / "node1" / "1").glob("own.*"):
        slot.rename(tmp_path / "b" / "node0" / "1" / slot.name)
    [[error]] = ranks.run(restore_snapshots, 1, True, tmp_path / "b")
    assert "have other values at state['rng']" in error
    problem = EndSave(tmp_path / "b" / "node0", None).run()
    assert "step 2 was written with the values of one rank only" in problem
    assert "per_rank=" in problem
    assert CheckpointManager(tmp_path / "b" / "checkpoints").steps() == [2]
