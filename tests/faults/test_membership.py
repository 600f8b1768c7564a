"""Nodes join, leave, are killed, and fail again and again."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from jobs import WITHOUT_TORCH, Job, Node, check_consistent_world, generation_of, is_alive
from modules import extend_pythonpath, write_module

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults


def agent_flags(endpoint: str, nodes: str, *more: str) -> tuple[str, ...]:
    return ("--nnodes", nodes, "--rdzv-backend", "tcp", "--rdzv-endpoint", endpoint, *more)


def test_a_second_node_joins_and_both_form_one_world(job: Job) -> None:
    endpoint = job.start_store()
    conf = ("--rdzv-conf", "last_call_timeout=0.5")
    first = job.start_agent("a", *agent_flags(endpoint, "1:3", *conf))
    generation = generation_of(job.wait_for_world(1))
    second = job.start_agent("b", *agent_flags(endpoint, "1:3", *conf))
    reports = job.wait_for_world(2, after=generation)
    check_consistent_world(reports)
    assert [report["node"] for report in reports] == ["a", "b"]
    job.finish()
    assert (first.exit_code(), second.exit_code()) == (0, 0)
    # The first node trained until the end of the last call.
    times = [{event.kind: event.monotonic for event in events} for events in job.events()]
    assert times[0]["stopping"] - times[1]["rendezvous.started"] >= 0.5


def test_survivors_of_rank_0_share_one_generation_and_master(job: Job) -> None:
    endpoint = job.start_store()
    nodes = {name: job.start_agent(name, *agent_flags(endpoint, "2:3")) for name in "abc"}
    before = job.wait_for_world(3)
    dead = before[0]["node"]
    nodes[dead].kill()
    reports = job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(reports)
    assert [one["node"] for one in reports] == [
        one["node"] for one in before if one["node"] != dead
    ]
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in reports} == {"0"}
    job.finish()
    assert [n.exit_code() for name, n in nodes.items() if name != dead] == [0, 0]


@pytest.mark.parametrize("backend", ["tcp", "file"])
def test_a_killed_agent_with_busy_workers_is_detected(
    job: Job, tmp_path: Path, backend: str
) -> None:
    endpoint = job.start_store() if backend == "tcp" else str(tmp_path / "meeting")
    meet = ("--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "job")
    flags = ("--nnodes", "1:3", *meet)
    nodes = {name: job.start_agent(name, *flags) for name in "ab"}
    before = job.wait_for_world(2)
    dead, survivor = before[1]["node"], before[0]["node"]
    nodes[dead].kill()
    reports = job.wait_for_world(1, after=generation_of(before))
    assert reports[0]["node"] == survivor
    job.finish()
    assert nodes[survivor].exit_code() == 0


def test_a_node_that_keeps_failing_leaves_and_the_other_continues(job: Job) -> None:
    endpoint = job.start_store()
    more = ("--max-restarts", "2")
    good = job.start_agent("good", *agent_flags(endpoint, "1:3", *more))
    bad = job.start_agent("bad", *agent_flags(endpoint, "1:3", *more))
    job.wait_for_world(2)
    (job.folder / "fail.bad").touch()
    assert bad.exit_code() == 1
    assert "the job continues without it (2 of 2 restarts used)" in bad.text
    reports = job.wait_for_world(1, after=3)
    assert reports[0]["node"] == "good"
    job.finish()
    assert good.exit_code() == 0


# A module that Python imports at its start.
WRONG_CLOCK = """
import pathlib, time
wall_clock = time.time
time.time = lambda: wall_clock() - 60
pathlib.Path({marker!r}).touch()
"""


def test_a_wall_clock_a_minute_off_has_no_effect(job: Job, tmp_path: Path) -> None:
    marker = tmp_path / "clock was changed"
    path = tmp_path / "wrong-clock"
    write_module(path, "sitecustomize", WRONG_CLOCK.format(marker=str(marker)))
    endpoint = job.start_store()
    right = job.start_agent("right", *agent_flags(endpoint, "2"))
    wrong = job.start_agent(
        "wrong", *agent_flags(endpoint, "2"), PYTHONPATH=extend_pythonpath(path)
    )
    reports = job.wait_for_world(2)
    check_consistent_world(reports)
    assert marker.exists()
    job.finish()
    assert (right.exit_code(), wrong.exit_code()) == (0, 0)
    assert not job.reports(generation_of(reports) + 1)


def test_a_stopped_agent_is_replaced_and_rejoins_when_it_runs_again(job: Job) -> None:
    endpoint = job.start_store()
    conf = ("--rdzv-conf", "keep_alive_interval=0.2,last_call_timeout=0.5")
    nodes = {name: job.start_agent(name, *agent_flags(endpoint, "1:2", *conf)) for name in "ab"}
    before = job.wait_for_world(2)
    stopped = nodes[before[1]["node"]]
    stopped.signal(signal.SIGSTOP)
    shrunk = job.wait_for_world(1, after=generation_of(before))
    stopped.signal(signal.SIGCONT)
    again = job.wait_for_world(2, after=generation_of(shrunk))
    check_consistent_world(again)
    assert before[1]["pid"] not in {report["pid"] for report in again}
    assert not is_alive(before[1]["pid"])
    job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0, 0]


def test_one_spare_waits_and_takes_over_and_a_second_one_is_rejected(job: Job) -> None:
    endpoint = job.start_store()
    more = ("--spares", "1", "--rdzv-conf", "keep_alive_interval=0.2")

    def start(name: str) -> Node:
        return job.start_agent(name, *agent_flags(endpoint, "2", *more), PYTHONPATH=WITHOUT_TORCH)

    members = {name: start(name) for name in "ab"}
    before = job.wait_for_world(2)
    extra = {name: start(name) for name in "cd"}
    wait_until(
        "one of them to exit", lambda: any(n.process.poll() is not None for n in extra.values())
    )
    (spare,) = [name for name, node in extra.items() if node.process.poll() is None]
    (rejected,) = extra.keys() - {spare}
    assert extra[rejected].exit_code() == 1
    (error,) = re.findall(r"^elasticrun: .*", extra[rejected].text, re.MULTILINE)
    assert "the job has all the nodes it wants, 2 nodes and 1 spares (--spares)" in error
    assert not job.reports(generation_of(before) + 1)
    members[before[0]["node"]].kill()
    after = job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(after)
    assert [report["node"] for report in after] == [before[1]["node"], spare]
    job.finish()
    assert (members[before[1]["node"]].exit_code(), extra[spare].exit_code()) == (0, 0)


def test_nodes_of_one_topology_get_adjacent_ranks(job: Job) -> None:
    endpoint = job.start_store()
    racks = dict(zip("abcdef", "xyzxyz", strict=True))
    nodes = [
        job.start_agent(
            name, *agent_flags(endpoint, "6", "--topology", rack), PYTHONPATH=WITHOUT_TORCH
        )
        for name, rack in racks.items()
    ]
    reports = job.wait_for_world(6)
    check_consistent_world(reports)
    order = [racks[report["node"]] for report in reports]
    assert order[0::2] == order[1::2]
    assert set(order[0::2]) == set("xyz")
    job.finish()
    assert [node.exit_code() for node in nodes] == [0] * 6
