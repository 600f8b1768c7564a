"""The first snapshot finds its memory made, behind the training before it; where there is to be
none, that memory is given back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elasticlib import CheckpointManager
from elasticlib.checkpoint import memory
from elasticlib.testing.waiting import wait_until

KINDS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
}


def made(kind: str = "adamw") -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    return {"model": model, "optimizer": KINDS[kind](model), "note": "x", "step": 0}


def train(state: dict[str, Any], step: int) -> None:
    state["model"](torch.ones(2, 200)).sum().backward()
    state["optimizer"].step()
    state["step"] = step


def resident(era: Path) -> dict[str, int]:
    """Bytes of each slot that this process has pages of."""
    found: dict[str, int] = {}
    slot = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            slot = words[-1].removeprefix(f"{era}/") if f"{era}/own." in line else ""
        elif words[0] == "Rss:" and slot:
            found[slot] = found.get(slot, 0) + int(words[1]) * 1024
    return found


def size_of_the_newest(era: Path) -> tuple[str, int]:
    """Its slot, and the bytes that it needs there."""
    newest = max(memory.look(era.parent), key=lambda one: one.order)
    return Path(newest.file).name, memory.RECORD_BYTES + newest.record.size


def threads() -> list[str]:
    return [one.name for one in threading.enumerate()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_job_has_the_memory_of_its_first_snapshot_before_it_is_made(
    tmp_path: Path, generation_memory: Path, kind: str
) -> None:
    state = made(kind)
    size = sum(one.nbytes for one in state["model"].parameters())
    with CheckpointManager(tmp_path / "disk") as manager:
        assert not manager.restore(state)
        wait_until(
            "its pages", lambda: sum(resident(generation_memory).values()) >= size and idle(manager)
        )
        before = resident(generation_memory)
        train(state, 1)
        assert manager.snapshot(1, state)
        name, needed = size_of_the_newest(generation_memory)
        assert needed <= before[name] < needed * 1.1


def test_so_does_a_rank_that_has_a_part_of_a_sharded_state(
    tmp_path: Path, generation_memory: Path
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = made()
        fully_shard(state["model"], mesh=mesh)
        state["optimizer"] = KINDS["adamw"](state["model"])
        with CheckpointManager(tmp_path / "disk") as manager:
            assert not manager.restore(state)
            wait_until("its slot", lambda: resident(generation_memory) and idle(manager))
            before = resident(generation_memory)
            train(state, 1)
            assert manager.snapshot(1, state)
            name, needed = size_of_the_newest(generation_memory)
            assert needed <= before[name] < needed * 1.1
    finally:
        dist.destroy_process_group()


def idle(manager: CheckpointManager) -> bool:
    """Whether what is done behind the training is done, as far as pages go."""
    (slots,) = [manager._memory._slots._files] if manager._memory else [[]]
    return all(one.reserved == len(one.memory) for one in slots)


def test_a_job_that_goes_on_from_a_disk_has_it_too(tmp_path: Path, generation_memory: Path) -> None:
    state = made()
    with CheckpointManager(tmp_path / "disk") as manager:
        train(state, 1)
        manager.save(1, state).wait()
        assert resident(generation_memory) == {}
    state = made()
    with CheckpointManager(tmp_path / "disk") as manager:
        assert manager.restore(state).source == "disk"
        wait_until("its slot", lambda: resident(generation_memory) and idle(manager))
        before = resident(generation_memory)
        train(state, 2)
        assert manager.snapshot(2, state)
        name, needed = size_of_the_newest(generation_memory)
        assert needed <= before[name] < needed * 1.1


class Average:
    """Has a state of its own, and is neither a module nor an optimizer."""

    def __init__(self, asked: list[str]) -> None:
        self.values, self._asked = torch.ones(100_000), asked

    def state_dict(self) -> dict[str, Any]:
        self._asked.append("state_dict")
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"].clone()


def test_an_object_with_a_state_of_its_own_is_not_asked_and_the_slot_grows_for_it(
    tmp_path: Path, generation_memory: Path
) -> None:
    asked: list[str] = []
    state = made() | {"average": Average(asked)}
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.restore(state)
        wait_until("its slot", lambda: resident(generation_memory) and idle(manager))
        assert asked == []
        (before,) = resident(generation_memory)
        train(state, 1)
        assert manager.snapshot(1, state)
        name, needed = size_of_the_newest(generation_memory)
        assert name == before
    found = made() | {"average": Average(asked)}
    found["average"].values.zero_()
    with CheckpointManager(tmp_path / "disk") as manager:
        assert manager.restore(found).source == "memory"
        # How large the last one was is known.
        wait_until("its slot", lambda: resident(generation_memory) and idle(manager))
        (pages,) = resident(generation_memory).values()
        assert needed <= pages < needed + memory.RECORD_BYTES
    assert found["average"].values.eq(1).all()
    for name, value in state["model"].state_dict().items():
        assert torch.equal(found["model"].state_dict()[name], value)


@pytest.mark.usefixtures("generation_memory")
def test_a_state_whose_size_is_not_known_yet_is_gone_on_from_all_the_same(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)
    for name, unknown in {"lazy": torch.nn.LazyLinear(3), "itself": itself}.items():
        with CheckpointManager(tmp_path / name) as manager:
            assert not manager.restore({"a": unknown, "b": torch.ones(3)})
            assert manager.snapshot(1, {"b": torch.ones(3)})


def test_a_job_that_saves_without_snapshots_gets_the_memory_back(
    tmp_path: Path, generation_memory: Path
) -> None:
    state = made()
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.restore(state)
        wait_until("its slot", lambda: resident(generation_memory))
        manager.save(1, state).wait()
        assert [*generation_memory.iterdir()] == []
        assert manager.snapshot(2, state), "it may change its mind"
        manager.save(2, state).wait()
        assert len(memory.look(generation_memory.parent)) == 1


def test_a_manager_that_is_closed_or_dies_before_its_first_snapshot_leaves_no_memory(
    tmp_path: Path, generation_memory: Path
) -> None:
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.restore({"w": torch.zeros(8 << 20)})
    assert [*generation_memory.iterdir()] == []
    # One that dies leaves its slot to the next start of the workers.
    left = CheckpointManager(tmp_path / "disk")
    left.restore(made())
    wait_until("its slot", lambda: [*generation_memory.iterdir()])
    memory.remove_torn(generation_memory.parent, 2)
    assert [*generation_memory.iterdir()] == []
    left.close()


def test_no_memory_is_made_where_no_agent_keeps_snapshots(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "disk") as manager:
        manager.restore(made())
        assert "elasticlib-seal" not in threads()
