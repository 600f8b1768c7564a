"""Groups of worker processes shrink and grow without an effect on the result of the training.

Each test acts as the agent of the workers, see `scripted_agent.ScriptedAgent`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from scripted_agent import ScriptedAgent
from training import (
    BATCH,
    SAMPLES,
    train,
    train_in_parallel,
    train_sharded,
    train_sharded_without_numpy,
    train_with_a_late_error,
)

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"),
    reason="torch older than 2.14 cannot replace the members of a group",
)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[ScriptedAgent]:
    with ScriptedAgent(tmp_path) as agent:
        yield agent


def last_record(agent: ScriptedAgent, number: int) -> dict[str, Any]:
    return agent.lines(number)[-1]


def world_sizes(agent: ScriptedAgent, number: int) -> list[int]:
    """Return the sequence of world sizes in which a worker trained."""
    sizes: list[int] = []
    for line in agent.lines(number):
        if "world" in line and (not sizes or sizes[-1] != line["world"]):
            sizes.append(line["world"])
    return sizes


def train_undisturbed(
    tested_agent: ScriptedAgent, train_worker: Callable[..., None]
) -> dict[str, Any]:
    """Return the last record of a single worker after the same number of steps."""
    folder = tested_agent.folder / "undisturbed"
    folder.mkdir()
    shutil.copy(tested_agent.folder / "last", folder)
    with ScriptedAgent(folder) as agent:
        agent.start(train_worker, 1)
        agent.wait_for_success([0])
        return last_record(agent, 0)


def test_a_killed_member_and_its_replacement_do_not_affect_the_weights(
    agent: ScriptedAgent,
) -> None:
    agent.start(train, 3, 0.02)
    agent.wait_for_step([0, 1, 2], 5)
    pids = [process.pid for process in agent.processes]
    agent.kill(2)
    agent.regroup([0, 1])
    agent.wait_for_step([0, 1], agent.steps([0, 1]) + 3)
    replacement = agent.start_replacement(train, 0.02)
    agent.wait_until_left([replacement])
    agent.request_resize([0, 1])
    agent.regroup([0, 1, replacement], leave=False)
    agent.wait_for_success([0, 1, replacement])
    digests = {last_record(agent, number)["digest"] for number in (0, 1, replacement)}
    assert digests == {train_undisturbed(agent, train)["digest"]}
    assert world_sizes(agent, 0) == world_sizes(agent, 1) == [3, 2, 3]
    assert [process.pid for process in agent.processes[:3]] == pids
    committed = [line["step"] for line in agent.lines(0) if "step" in line]
    assert committed == [*range(1, len(committed) + 1)]


def test_data_parallel_workers_have_equal_weights(agent: ScriptedAgent) -> None:
    agent.start(train_in_parallel, 3, 0.02)
    agent.wait_for_step([0, 1, 2], 5)
    agent.kill(0)
    agent.regroup([1, 2])
    agent.wait_for_step([1, 2], agent.steps([1, 2]) + 3)
    replacement = agent.start_replacement(train_in_parallel, 0.02)
    agent.wait_until_left([replacement])
    agent.request_resize([1, 2])
    agent.regroup([1, 2, replacement], leave=False)
    agent.wait_for_success([1, 2, replacement])
    assert len({last_record(agent, number)["digest"] for number in (1, 2, replacement)}) == 1


def test_a_collective_with_a_stopped_peer_is_aborted(agent: ScriptedAgent) -> None:
    agent.start(train, 3, 0.02, True, (1, 6))
    agent.wait_until_reducing([0, 2], 6)
    assert agent.regroup([0, 2]) < 2
    agent.kill(1)
    agent.wait_for_success([0, 2])
    assert (
        last_record(agent, 0)["digest"]
        == last_record(agent, 2)["digest"]
        == train_undisturbed(agent, train)["digest"]
    )


def test_a_second_member_is_lost_while_the_next_group_forms(agent: ScriptedAgent) -> None:
    agent.start(train, 4, 0.02)
    agent.wait_for_step([0, 1, 2, 3], 5)
    agent.kill(3)
    agent.request_leave([0, 1, 2])
    agent.wait_until_left([0, 1, 2])
    agent.kill(0)
    agent.assign([0, 1, 2])  # The agent has not noticed the lost worker yet.
    agent.wait_until_accepted([1, 2])
    agent.regroup([1, 2])
    agent.wait_for_success([1, 2])
    assert (
        last_record(agent, 1)["digest"]
        == last_record(agent, 2)["digest"]
        == train_undisturbed(agent, train)["digest"]
    )


def test_a_group_whose_store_cannot_be_reached_is_left(agent: ScriptedAgent) -> None:
    agent.start(train, 2, 0.02)
    agent.wait_for_step([0, 1], 3)
    agent.request_leave([0, 1])
    agent.wait_until_left([0, 1])
    agent.assign([0, 1], reachable=False)
    agent.wait_until_accepted([0, 1])
    agent.regroup([0, 1])
    agent.wait_for_success([0, 1])
    assert last_record(agent, 0)["digest"] == last_record(agent, 1)["digest"]


def test_a_step_that_the_optimizer_has_applied_is_not_applied_again(agent: ScriptedAgent) -> None:
    agent.start(train_with_a_late_error, 3, 0.05)
    agent.wait_for_step([0, 1, 2], 3)
    agent.wait_for_step([2], 5)
    agent.wait_until_applied(2, 6)
    agent.kill(2)
    agent.regroup([0, 1])
    agent.wait_for_success([0, 1])
    assert last_record(agent, 0)["digest"] == last_record(agent, 1)["digest"]
    assert [line["step"] for line in agent.lines(0) if "step" in line] == [
        *range(1, SAMPLES // BATCH + 1)
    ]
    (agent.folder / "undisturbed").mkdir()
    with ScriptedAgent(agent.folder / "undisturbed") as single:
        single.start(train_with_a_late_error, 1)
        single.wait_for_success([0])
        assert last_record(agent, 0)["weights"] == pytest.approx(
            last_record(single, 0)["weights"], abs=1e-4
        )


def test_a_partly_applied_step_without_a_saved_state_is_an_error(agent: ScriptedAgent) -> None:
    agent.start(train_with_a_late_error, 3, 0.0, False, 4)
    for number in range(3):
        agent.wait_until_applied(number, 4)
    agent.kill(2)
    agent.request_leave([0, 1])
    (agent.folder / "released").touch()
    agent.regroup([0, 1])
    agent.wait_for_success([0, 1])
    for number in (0, 1):
        assert "step 4 was interrupted" in last_record(agent, number)["error"]
        assert max(line.get("applied", 0) for line in agent.lines(number)) == 4


@pytest.mark.parametrize("train_worker", [train_sharded, train_sharded_without_numpy])
def test_a_sharded_state_is_restored_in_the_next_group(
    agent: ScriptedAgent, train_worker: Callable[..., None]
) -> None:
    agent.start(train_worker, 3, 0.05)
    agent.wait_for_step([0, 1, 2], 5)
    agent.kill(1)
    agent.regroup([0, 2])
    agent.wait_for_step([0, 2], agent.steps([0, 2]) + 3)
    replacement = agent.start_replacement(train_worker, 0.05)
    agent.wait_until_left([replacement])
    agent.request_resize([0, 2])
    agent.regroup([0, 2, replacement], leave=False)
    agent.wait_for_success([0, 2, replacement])
    assert world_sizes(agent, 0) == world_sizes(agent, 2) == [3, 2, 3]
    expected = train_undisturbed(agent, train_sharded)["weights"]
    for number in (0, 2, replacement):
        assert last_record(agent, number)["weights"] == pytest.approx(expected, abs=0.01)
