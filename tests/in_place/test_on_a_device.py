"""Workers keep their device context and their compiled model when their group is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled_training import train_compiled
from scripted_agent import ScriptedAgent

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"),
    reason="torch older than 2.14 cannot replace the members of a group",
)
ON_GPU = torch.cuda.is_available()
REGROUPS = 100 if ON_GPU else 10


def records_of_group(agent: ScriptedAgent, number: int, group: int) -> list[dict[str, Any]]:
    return [line for line in agent.lines(number) if line.get("group") == group]


def regroup_repeatedly(
    folder: Path, count: int, device: str, backend: str
) -> list[list[dict[str, Any]]]:
    """Return the last line that each of `count` workers wrote in each of 1 + REGROUPS groups."""
    with ScriptedAgent(folder) as agent:
        numbers = [*range(count)]
        agent.start(train_compiled, count, device, backend)
        for group in range(1, REGROUPS + 2):
            for number in numbers:
                wait_until(
                    f"{number} in group {group}",
                    lambda n=number, g=group: records_of_group(agent, n, g),
                )
            if group <= REGROUPS:
                agent.regroup(numbers)
        groups = range(1, REGROUPS + 2)
        return [
            [records_of_group(agent, number, group)[-1] for group in groups] for number in numbers
        ]


def assert_nothing_rebuilt(records: list[list[dict[str, Any]]], count: int) -> None:
    for lines in records:
        assert {line["world"] for line in lines} == {count}
        assert len({line["pid"] for line in lines}) == 1
        # The first group may compile twice, because there are no gradients before its first step.
        assert lines[-1]["graphs"] == lines[1]["graphs"], "the model was compiled again"
        assert lines[-1]["allocated_bytes"] <= lines[1]["allocated_bytes"] * 1.01 + 4096, (
            "memory grew"
        )


@pytest.mark.timeout(400)  # Each process imports the compiler.
def test_two_gloo_ranks_keep_their_device_context_and_compiled_model(tmp_path: Path) -> None:
    assert_nothing_rebuilt(regroup_repeatedly(tmp_path, 2, "cuda" if ON_GPU else "cpu", "gloo"), 2)


@pytest.mark.skipif(not ON_GPU, reason="nccl2 needs a CUDA device")
def test_an_nccl2_rank_keeps_its_device_context_and_compiled_model(tmp_path: Path) -> None:
    assert_nothing_rebuilt(regroup_repeatedly(tmp_path, 1, "cuda", "cpu:gloo,cuda:nccl2"), 1)
