"""Groups of real workers shrink and grow, and their training is not affected.

The tests play the part of the agent: see `played.Agent`.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from played import Agent
from training import (
    BATCH,
    SAMPLES,
    train,
    train_in_parallel,
    train_sharded,
    train_with_a_late_error,
)

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"),
    reason="torch older than 2.14 cannot replace the members of a group",
)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path) as played:
        yield played


def last(agent: Agent, number: int) -> dict[str, Any]:
    return agent.lines(number)[-1]


def worlds(agent: Agent, number: int) -> list[int]:
    """Return the sequence of world sizes in which a worker trained."""
    found: list[int] = []
    for line in agent.lines(number):
        if "world" in line and (not found or found[-1] != line["world"]):
            found.append(line["world"])
    return found


def undisturbed(disturbed: Agent, work: Callable[..., None]) -> dict[str, Any]:
    """Return the result of one worker after as many steps."""
    folder = disturbed.folder / "undisturbed"
    folder.mkdir()
    shutil.copy(disturbed.folder / "last", folder)
    with Agent(folder) as agent:
        agent.start(work, 1)
        agent.wait([0])
        return last(agent, 0)


def test_a_killed_member_and_its_replacement_do_not_affect_the_weights(agent: Agent) -> None:
    agent.start(train, 3, 0.02)
    agent.until_step([0, 1, 2], 5)
    pids = [process.pid for process in agent.processes]
    agent.kill(2)
    agent.regroup([0, 1])
    agent.until_step([0, 1], agent.steps([0, 1]) + 3)
    new = agent.start_replacement(train, 0.02)
    agent.until_out([new])
    agent.ask_for_resize([0, 1])
    agent.regroup([0, 1, new], told=False)
    agent.wait([0, 1, new])
    digests = {last(agent, number)["digest"] for number in (0, 1, new)}
    assert digests == {undisturbed(agent, train)["digest"]}
    assert worlds(agent, 0) == worlds(agent, 1) == [3, 2, 3]
    assert [process.pid for process in agent.processes[:3]] == pids
    committed = [line["step"] for line in agent.lines(0) if "step" in line]
    assert committed == [*range(1, len(committed) + 1)]


def test_data_parallel_workers_have_equal_weights(agent: Agent) -> None:
    agent.start(train_in_parallel, 3, 0.02)
    agent.until_step([0, 1, 2], 5)
    agent.kill(0)
    agent.regroup([1, 2])
    agent.until_step([1, 2], agent.steps([1, 2]) + 3)
    new = agent.start_replacement(train_in_parallel, 0.02)
    agent.until_out([new])
    agent.ask_for_resize([1, 2])
    agent.regroup([1, 2, new], told=False)
    agent.wait([1, 2, new])
    assert len({last(agent, number)["digest"] for number in (1, 2, new)}) == 1


def test_a_collective_with_a_stopped_peer_is_aborted(agent: Agent) -> None:
    agent.start(train, 3, 0.02)
    agent.until_step([0, 1, 2], 5)
    os.kill(agent.processes[1].pid, signal.SIGSTOP)
    time.sleep(0.5)  # the others are in a collective by then, and no harm if not
    assert agent.regroup([0, 2]) < 2
    agent.kill(1)
    agent.wait([0, 2])
    assert (
        last(agent, 0)["digest"] == last(agent, 2)["digest"] == undisturbed(agent, train)["digest"]
    )


def test_a_second_member_is_lost_while_the_next_group_forms(agent: Agent) -> None:
    agent.start(train, 4, 0.02)
    agent.until_step([0, 1, 2, 3], 5)
    agent.kill(3)
    agent.request_leave([0, 1, 2])
    agent.until_out([0, 1, 2])
    agent.kill(0)
    agent.give_places([0, 1, 2])  # before the agent has seen it
    time.sleep(0.3)
    agent.regroup([1, 2])
    agent.wait([1, 2])
    assert (
        last(agent, 1)["digest"] == last(agent, 2)["digest"] == undisturbed(agent, train)["digest"]
    )


def test_a_group_whose_store_cannot_be_reached_is_left(agent: Agent) -> None:
    agent.start(train, 2, 0.02)
    agent.until_step([0, 1], 3)
    agent.request_leave([0, 1])
    agent.until_out([0, 1])
    agent.give_places([0, 1], reachable=False)
    time.sleep(0.2)
    agent.regroup([0, 1])
    agent.wait([0, 1])
    assert last(agent, 0)["digest"] == last(agent, 1)["digest"]


def test_a_step_that_the_optimizer_has_applied_is_not_applied_again(agent: Agent) -> None:
    agent.start(train_with_a_late_error, 3, 0.05)
    agent.until_step([0, 1, 2], 3)
    agent.until_step([2], 5)
    agent.until_applied(2, 6)
    agent.kill(2)
    agent.regroup([0, 1])
    agent.wait([0, 1])
    assert last(agent, 0)["digest"] == last(agent, 1)["digest"]
    assert [line["step"] for line in agent.lines(0) if "step" in line] == [
        *range(1, SAMPLES // BATCH + 1)
    ]
    (agent.folder / "undisturbed").mkdir()
    with Agent(agent.folder / "undisturbed") as alone:
        alone.start(train_with_a_late_error, 1)
        alone.wait([0])
        assert last(agent, 0)["weights"] == pytest.approx(last(alone, 0)["weights"], abs=1e-4)


def test_a_partly_applied_step_without_a_saved_state_is_an_error(agent: Agent) -> None:
    agent.start(train_with_a_late_error, 3, 0.0, False, 4)
    for number in range(3):
        agent.until_applied(number, 4)
    agent.kill(2)
    agent.request_leave([0, 1])
    (agent.folder / "released").touch()
    agent.regroup([0, 1])
    agent.wait([0, 1])
    for number in (0, 1):
        assert "step 4 was interrupted" in last(agent, number)["error"]
        assert max(line.get("applied", 0) for line in agent.lines(number)) == 4


def test_a_sharded_state_is_restored_in_the_next_group(agent: Agent) -> None:
    agent.start(train_sharded, 3, 0.05)
    agent.until_step([0, 1, 2], 5)
    agent.kill(1)
    agent.regroup([0, 2])
    agent.until_step([0, 2], agent.steps([0, 2]) + 3)
    new = agent.start_replacement(train_sharded, 0.05)
    agent.until_out([new])
    agent.ask_for_resize([0, 2])
    agent.regroup([0, 2, new], told=False)
    agent.wait([0, 2, new])
    assert worlds(agent, 0) == worlds(agent, 2) == [3, 2, 3]
    expected = undisturbed(agent, train_sharded)["weights"]
    for number in (0, 2, new):
        assert last(agent, number)["weights"] == pytest.approx(expected, abs=0.01)
