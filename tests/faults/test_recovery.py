"""Workers are killed again and again: the job recovers, and its agents leak no resources."""

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
WARM_UP_KILLS = 4  # resources are compared with those after so many kills
# The number of memory mappings varies by a few. A leak would add one or more at each kill.
MAPPING_TOLERANCE = 8


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_killed_worker_uses_one_restart_and_leaks_no_resources(
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
        reports = kill_one(job, draw, reports, kill)
        if kill == min(WARM_UP_KILLS, kills):
            # An idle fork server starts a second one, which then stays.
            wait_until(
                "a second fork server", lambda: all(find_second_servers(a.pid) for a in agents)
            )
            before = count_all_resources(job, agents)
    grown: dict[str, int] = {}

    def has_no_growth() -> bool:
        # Resources of a generation are released a moment after the next one has started.
        grown.clear()
        grown.update(count_all_resources(job, agents) - before)
        tolerances = {kind: MAPPING_TOLERANCE * ("mappings" in kind) for kind in grown}
        return all(grown[kind] <= tolerances[kind] for kind in grown)

    try:
        wait_until("the agents to use no more resources than before", has_no_growth)
    except AssertionError as error:
        raise AssertionError(f"{error}; they use {grown} more") from None
    job.finish()
    assert [agent.exit_code() for agent in agents] == [0] * nodes


def kill_one(
    job: Job, draw: random.Random, reports: list[dict[str, Any]], kill: int
) -> list[dict[str, Any]]:
    """Kill a worker, check that the job recovers at once, and return the new reports."""
    os.kill(draw.choice(reports)["pid"], signal.SIGKILL)
    after = job.wait_for_world(4, after=generation_of(reports))
    assert generation_of(after) == generation_of(reports) + 1
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {str(kill)}
    assert not any(is_alive(report["pid"]) for report in reports)
    # The new attempt has a new torch store, to which no earlier worker has written.
    [before], [now] = ({report["MASTER_PORT"] for report in group} for group in (reports, after))
    assert now != before
    return after


def count_all_resources(job: Job, agents: list[Node]) -> Counter[str]:
    """Count the resources of the agents, all processes, and all temporary files of the job."""
    total: Counter[str] = Counter()
    for agent in agents:
        total.update(
            {f"{what} of {agent.name}": n for what, n in count_resources(agent.pid).items()}
        )
    total["processes"] = len(job.processes())
    # Unlike a glob, a walk ignores directories that are removed at the same time.
    walks = itertools.chain.from_iterable(map(os.walk, leftover_files(job.temporary)))
    total["temporary files"] = sum(len(folders) + len(files) for _, folders, files in walks)
    return total
