"""One rank that saves or loads sharded state, and says what it found: see its test.

python sharding_worker.py FOLDER STORE RANK WORLD ACT
"""

from __future__ import annotations

import os
import sys
import traceback

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointError


def trained() -> dict[str, object]:
    """An FSDP2 model with its optimizer, both after a step, and tensors sharded in other ways."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    columns = distribute_tensor(torch.arange(15.0).view(3, 5), mesh, [Shard(1)])
    same = distribute_tensor(torch.arange(4), mesh, [Replicate()])
    return {"model": model, "optimizer": optimizer, "more": [columns, (same, "text")]}


def whole(value: object) -> object:
    """The state with every sharded tensor put together, by all ranks."""
    if isinstance(value, DTensor):
        return value.full_tensor().tolist()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if hasattr(value, "state_dict"):
        return whole(value.state_dict())
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list | tuple) else value


def load(manager: CheckpointManager, state: dict[str, object]) -> None:
    """As sharded as the state given, at this world size; and whole, by each rank by itself."""
    want = whole(state)
    found = manager.load(like=state)
    more, given = found["more"][0], state["more"][0]  # type: ignore[index]
    assert isinstance(more, DTensor)
    assert more.placements == given.placements
    assert whole(found) == want, (whole(found), want)
    assert not any(isinstance(t, DTensor) for t in manager.load()["model"].values())
    assert whole(manager.load()) == want
    state["model"].load_state_dict(found["model"])  # type: ignore[attr-defined]
    state["optimizer"].load_state_dict(found["optimizer"])  # type: ignore[attr-defined]
    assert whole(state) == want


def save(manager: CheckpointManager, state: dict[str, object]) -> None:
    for step in (1, 2, 3):
        manager.save(step, state)
    manager.wait()
    assert manager.steps() == [2, 3], manager.steps()
    load(manager, state)


def fail_on_one(manager: CheckpointManager, state: dict[str, object]) -> None:
    """One rank's part cannot be written: none of the ranks counts it as saved."""
    if dist.get_rank() == 1:
        manager._commits()._place = None  # type: ignore[assignment]
    manager.save(4, state)
    try:
        manager.wait()
    except (CheckpointError, AttributeError) as error:
        print(f"rank {dist.get_rank()}: {error}", flush=True)
    assert manager.latest() == 3


def refuse_own_folders(folder: str, state: dict[str, object]) -> None:
    try:
        CheckpointManager(folder, shared=False).save(5, state)
    except CheckpointError as error:
        print(error, flush=True)


def be_a_rank(folder: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store.{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    state = trained()
    with CheckpointManager(f"{folder}/checkpoints", keep_last=2) as manager:
        if world == 2:
            save(manager, state)
            fail_on_one(manager, state)
        else:
            load(manager, state)
            refuse_own_folders(folder, state)
    dist.destroy_process_group()


def run(folder: str, world: int) -> None:
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            status = 1
            try:
                be_a_rank(folder, rank, world)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert not any(statuses), statuses


if __name__ == "__main__":
    run(sys.argv[1], 2)
    run(sys.argv[1], 1)
    print("done")
