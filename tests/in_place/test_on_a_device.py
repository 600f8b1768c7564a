"""Workers that go on from group to group keep what a start costs: the device's context, the
compiled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from played import Agent
from regrouping import train_compiled

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch cannot form a group anew: 2.14 can"
)
ON_GPU = torch.cuda.is_available()
REGROUPS = 100 if ON_GPU else 10


def in_group(agent: Agent, number: int, group: int) -> list[dict[str, Any]]:
    return [line for line in agent.lines(number) if line.get("group") == group]


def regrouped(folder: Path, count: int, device: str, backend: str) -> list[list[dict[str, Any]]]:
    """What each of so many workers wrote down in each of 1 + REGROUPS groups: its last line."""
    with Agent(folder) as agent:
        numbers = [*range(count)]
        agent.start(train_compiled, count, device, backend)
        for group in range(1, REGROUPS + 2):
            for number in numbers:
                wait_until(
                    f"{number} in group {group}", lambda n=number, g=group: in_group(agent, n, g)
                )
            if group <= REGROUPS:
                agent.regroup(numbers)
        groups = range(1, REGROUPS + 2)
        return [[in_group(agent, number, group)[-1] for group in groups] for number in numbers]


def check(found: list[list[dict[str, Any]]], count: int) -> None:
    for lines in found:
        assert {line["world"] for line in lines} == {count}
        assert len({line["pid"] for line in lines}) == 1
        # The first group may compile more than once, as gradients come to be there.
        assert lines[-1]["graphs"] == lines[1]["graphs"], "the model was compiled again"
        assert lines[-1]["held"] <= lines[1]["held"] * 1.01 + 4096, "memory grew"


def test_two_gloo_ranks_on_one_device_keep_it_and_their_compiled_model(tmp_path: Path) -> None:
    check(regrouped(tmp_path, 2, "cuda" if ON_GPU else "cpu", "gloo"), 2)


@pytest.mark.skipif(not ON_GPU, reason="torch sees no CUDA device here, which nccl2 needs")
def test_a_rank_of_nccl2_keeps_its_context_and_its_compiled_model(tmp_path: Path) -> None:
    check(regrouped(tmp_path, 1, "cuda", "cpu:gloo,cuda:nccl2"), 1)
