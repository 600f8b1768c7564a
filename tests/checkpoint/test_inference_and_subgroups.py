"""Managers that are used in inference mode, and managers of some of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from elasticlib import CheckpointManager


@pytest.mark.usefixtures("generation_memory")
def test_saves_and_restores_in_inference_mode_do_not_affect_later_ones(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 3)
    adam = torch.optim.Adam(net.parameters())
    state: dict[str, Any] = {"net": net, "adam": adam, "more": torch.zeros(2)}
    net(torch.ones(3)).sum().backward()
    adam.step()
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        with torch.inference_mode():
            manager.snapshot(1, state)
            manager.save(1, state).wait()
        for step in (2, 3):
            manager.snapshot(step, state)
            manager.save(step, state).wait()
        with torch.inference_mode():
            assert manager.restore(state).step == 3
        net(torch.ones(3)).sum().backward()
        adam.step()
        state["more"] = torch.ones(2, requires_grad=True)
        manager.save(4, state).wait()
        manager.snapshot(4, state)
        assert manager.steps() == [2, 3, 4]


def save_in_subgroups(folder: Path) -> list[list[int]]:
    """Save a sharded state in each of two groups, repeatedly, with new managers."""
    rank, found = dist.get_rank(), []
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # Ranks may have other groups besides.
    half = rank % 2
    mesh = DeviceMesh.from_group(groups[half], "cpu", mesh_dim_names=("dp",))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    for turn in range(3):
        place = folder / f"{half}.{turn % 2}"  # The third manager has the directory of the first.
        with CheckpointManager(place, group=groups[half]) as manager:
            for step in (1, 2):
                manager.save(10 * turn + step, state).wait()
            found.append(manager.steps())
        assert manager.load()["w"].tolist() == list(range(8))
    return found


@pytest.mark.parametrize("turn", range(2))
def test_managers_of_disjoint_groups_of_ranks_save_sharded_states(
    ranks: Ranks, tmp_path: Path, turn: int
) -> None:
    found = ranks.run(save_in_subgroups, 4, tmp_path / str(turn))
    # The third manager has restored nothing, so it continues nothing.
    assert found == [[[1, 2], [11, 12], [21, 22]]] * 4
