"""Every supported state is restored exactly into live objects from each kind of storage.

The rows of the matrix are containers, scalars, NumPy arrays, states of random generators, and all
optimizers of torch in each of their forms with parameters of each memory layout. The columns are
the disk, agent memory, a replica, and another number of ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from fidelity import (
    FORMS,
    OPTIMIZERS,
    create_containers,
    create_matrix,
    create_trained,
    describe_objects,
    restore_matrix,
    restore_sharded,
    save_sharded,
    train,
)
from managers import open_memory
from ranks import Ranks

from elasticlib import CheckpointManager
from elasticlib.checkpoint.restore import restore_from

COLUMNS = ["disk", "memory", "replica"]


def round_trip(folder: Path, column: str, saved: dict[str, Any], live: dict[str, Any]) -> None:
    """Save a state, and restore it into another one."""
    if column == "disk":
        with CheckpointManager(folder) as manager:
            manager.save(1, saved).wait()
            assert manager.restore(live)
        return
    memory = open_memory(folder / "own")
    memory.snapshot(1, saved)
    if column == "replica":
        other = open_memory(folder / "other")
        for path in (folder / "own" / "1").glob("own.*"):
            shutil.copyfile(path, folder / "other" / "1" / f"from.0.{path.name[4:]}")
        memory.close()
        memory = other
    assert restore_from([memory], live).step == 1
    memory.close()


def test_every_optimizer_of_torch_is_in_the_matrix() -> None:
    assert {"Adam", "AdamW", "SGD", "LBFGS", "Adafactor"} <= OPTIMIZERS.keys()
    assert {name for name, _ in FORMS} == OPTIMIZERS.keys()
    assert ("AdamW", "fused") in FORMS


@pytest.mark.parametrize("column", COLUMNS)
def test_containers_and_values_are_restored(tmp_path: Path, column: str) -> None:
    live = create_containers(7)
    identities = {name: id(live[name]) for name in ("dict", "ordered", "list")}
    round_trip(tmp_path, column, create_containers(3), live)
    assert describe_objects(live) == describe_objects(create_containers(3))
    assert identities == {name: id(live[name]) for name in identities}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(("optimizer", "form"), FORMS)
def test_restored_optimizer_continues_as_without_interruption(
    tmp_path: Path, optimizer: str, form: str, column: str
) -> None:
    saved, live = create_trained(optimizer, form, 2), create_trained(optimizer, form, 0)
    tensors = [*live["model"].parameters()]
    round_trip(tmp_path, column, saved, live)
    assert describe_objects(live) == describe_objects(saved)
    assert all(a is b for a, b in zip(tensors, live["model"].parameters(), strict=True))
    assert live["model"].tied is live["model"].contiguous
    for state in (saved, live):
        train(state, range(2, 4))
    assert describe_objects(live) == describe_objects(saved)


def test_the_whole_matrix_is_restored_at_another_number_of_ranks(
    tmp_path: Path, ranks: Ranks
) -> None:
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(1, create_matrix(2))
    assert ranks.run(restore_matrix, 2, tmp_path) == [(True, "disk")] * 2


def test_sharded_optimizers_are_restored_at_other_numbers_of_ranks(
    tmp_path: Path, ranks: Ranks
) -> None:
    [saved, _] = ranks.run(save_sharded, 2, tmp_path)
    assert {f"AdamW {form}" for form in ("plain", "foreach", "fused")} <= saved.keys()
    names = [*saved]
    assert len(names) > len(FORMS) / 2
    for world_size in (1, 2, 3):
        for source, restored in ranks.run(restore_sharded, world_size, tmp_path, names, []):
            assert (source, restored) == ("disk", saved)
    # Rank 0 is on the node of rank 1, and the others are on new nodes.
    shutil.copytree(tmp_path / "memory0" / "1", tmp_path / "memory1" / "1", dirs_exist_ok=True)
    results = ranks.run(restore_sharded, 3, tmp_path, names, ["memory1", "new1", "new2"])
    assert [source for source, _ in results] == ["memory", "peer", "peer"]
    assert all(restored == saved for _, restored in results)
