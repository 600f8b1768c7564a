"""Row A1: a worker is killed, again and again; the group comes back every time, and its agents
hold no more after it than before."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import Counter
from typing import Any

import pytest
from jobs import PROGRAMS, Job, Node, generation_of, is_alive, leftover_files
from processes import count_resources, find_second_servers

from elasticlib.testing.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

SCRIPT = str(PROGRAMS / "allreduce.py")
WARM_UP = 4
# Memory is mapped as its allocator pleases; whoever leaks a mapping leaks one at each kill.
MAPPINGS = 8


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a1_every_kill_is_one_recovery_and_one_restart_and_leaks_nothing(
    job: Job, kills: int, nodes: int
) -> None:
    meet = (
        ("--nnodes", "2", "--rdzv-endpoint", job.start_store()) if nodes == 2 else ("--standalone",)
    )
    kills //= nodes
    flags = (*meet, "--nproc-per-node", str(4 // nodes), "--max-restarts", str(kills))
    command = job.agent_command(*flags, program=SCRIPT)
    agents = [job.start(name, *command) for name in "ab"[:nodes]]
    draw = random.Random(1)
    reports = job.wait_for_world(4)
    before: Counter[str] = Counter()
    for kill in range(1, kills + 1):
        reports = _kill_one(job, draw, reports, kill)
        if kill == min(WARM_UP, kills):
            # It begins when a fork server is idle, and stays.
            wait_until(
                "a second fork server", lambda: all(find_second_servers(a.pid) for a in agents)
            )
            before = _held(job, agents)
    grown: dict[str, int] = {}

    def back_to_before() -> bool:
        # What an earlier generation held goes a moment after the next one works.
        grown.clear()
        grown.update(_held(job, agents) - before)
        return not any(more > MAPPINGS * ("mappings" in what) for what, more in grown.items())

    try:
        wait_until("the agents to hold no more than before", back_to_before)
    except AssertionError as error:
        raise AssertionError(f"{error}; they hold {grown} more") from None
    job.finish()
    assert [agent.exit_code() for agent in agents] == [0] * nodes


def _kill_one(
    job: Job, draw: random.Random, reports: list[dict[str, Any]], kill: int
) -> list[dict[str, Any]]:
    """The places after this kill, which has been recovered from at once."""
    os.kill(draw.choice(reports)["pid"], signal.SIGKILL)
    after = job.wait_for_world(4, after=generation_of(reports))
    assert generation_of(after) == generation_of(reports) + 1
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {str(kill)}
    assert not any(is_alive(report["pid"]) for report in reports)
    # Torch's store is one that the attempt before has not written to.
    [before], [now] = ({report["MASTER_PORT"] for report in found} for found in (reports, after))
    assert now != before
    return after


def _held(job: Job, agents: list[Node]) -> Counter[str]:
    held: Counter[str] = Counter()
    for agent in agents:
        held.update(
            {f"{what} of {agent.name}": n for what, n in count_resources(agent.pid).items()}
        )
    held["processes"] = len(job.processes())
    # Unlike a glob, a walk does not mind what goes meanwhile.
    walks = itertools.chain.from_iterable(map(os.walk, leftover_files(job.temporary)))
    held["temporary files"] = sum(len(folders) + len(files) for _, folders, files in walks)
    return held
