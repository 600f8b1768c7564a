"""Workers that ask their context stop at one step, save it, and no step is lost or done twice."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node, check_consistent_world, generation_of
from processes import count_waits

from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until

pytestmark = pytest.mark.faults

CONTEXT = str(PROGRAMS / "context_worker.py")
# Where a notice did not hold SIGTERM and SIGKILL back, nothing could be saved.
SHORT = ("--shutdown-timeout", "0.1")


def asking(
    job: Job, name: str, *flags: str, worker: tuple[str, ...] = (), resize: str = ""
) -> Node:
    fields = {"agent": {"resize_mode": resize}} if resize else None
    command = job.agent_command(*flags, program=CONTEXT, worker=worker, fields=fields)
    return job.start(name, *command, PYTHONPATH=WITHOUT_TORCH)


def trained(job: Job) -> list[int]:
    """The steps done, in the order in which they were."""
    path = job.folder / "steps"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def goes_on(job: Job) -> None:
    """Waits for some steps more."""
    count = len(trained(job))
    wait_until("more steps", lambda: len(trained(job)) > count + 3)


def stopped(job: Job, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks of a generation were told, which is the same; `left` is the least."""
    generation = generation_of(reports)
    said = []
    for rank in range(len(reports)):
        path = job.folder / f"stopped.{generation}.{rank}"
        wait_until(f"rank {rank} to stop", path.exists)
        said.append(json.loads(path.read_text()))
    left = [one.pop("left") for one in said]
    assert said == [said[0]] * len(said)
    return {**said[0], "left": min(left)}


def test_all_ranks_stop_at_one_step_whatever_the_reason_and_no_step_is_lost(
    job: Job, save_seconds: float
) -> None:
    meet = ("--nnodes", "1:3", "--nproc-per-node", "2", "--rdzv-endpoint", job.start_store())
    last = ("--rdzv-conf", "last_call_timeout=0.3")
    seconds, bound = save_seconds + 15, save_seconds + DEFAULT_TIMEOUT_S
    grace = ("--checkpoint-grace", f"{seconds:g}")
    save = ("save", str(save_seconds))
    nodes = {name: asking(job, name, *meet, *last, *SHORT, *grace, worker=save) for name in "ab"}
    two = job.wait_for_world(4)
    goes_on(job)
    nodes["c"] = asking(job, "c", *meet, *last, *SHORT, *grace, worker=save)
    three = job.wait_for_world(6, after=generation_of(two), seconds=bound)
    resize = stopped(job, two)
    assert resize["reason"] == "resize"
    assert 0 < resize["left"] <= seconds
    goes_on(job)
    leaves = three[0]["node"]
    nodes[leaves].signal(signal.SIGUSR2)
    assert nodes.pop(leaves).exit_code(bound) == 75
    again = job.wait_for_world(4, after=generation_of(three))
    drain = stopped(job, three)
    assert drain["reason"] == "drain"
    assert 0 < drain["left"] <= seconds
    goes_on(job)
    nodes[again[0]["node"]].signal(signal.SIGTERM)
    assert nodes.pop(again[0]["node"]).exit_code(bound) == 75
    rest = job.wait_for_world(2, after=generation_of(again))
    assert stopped(job, again)["reason"] == "preempted"
    check_consistent_world(rest)
    assert rest[0]["TORCHELASTIC_RESTART_COUNT"] == "0"
    job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0]
    steps = trained(job)
    assert steps == list(range(len(steps)))


def test_a_resize_that_is_to_be_immediate_asks_nobody(job: Job) -> None:
    meet = ("--nnodes", "1:2", "--rdzv-endpoint", job.start_store())
    last = ("--rdzv-conf", "last_call_timeout=0.3")
    nodes = [asking(job, "a", *meet, *last, resize="immediate")]
    one = job.wait_for_world(1)
    goes_on(job)
    nodes.append(asking(job, "b", *meet, *last, resize="immediate"))
    job.wait_for_world(2, after=generation_of(one))
    assert not list(job.folder.glob("stopped.*"))
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_workers_that_hang_are_restarted_once_their_stacks_are_written(job: Job) -> None:
    meet = ("--nnodes", "2", "--rdzv-endpoint", job.start_store(), "--max-restarts", "1")
    logs = {name: job.folder / f"logs-{name}" for name in "ab"}
    watch = ("--hang-timeout", "1.5", "--log-dir")
    hang = ("hang", "1", "20")
    nodes = [
        asking(job, name, *meet, *SHORT, *watch, str(logs[name]), worker=hang) for name in "ab"
    ]
    first = job.wait_for_world(2)
    again = job.wait_for_world(2, after=generation_of(first))
    assert [report["TORCHELASTIC_RESTART_COUNT"] for report in again] == ["1", "1"]
    told = r"hung: rank \d on \S+ is at step 19, inactive for \d\.\d s; so are the others"
    for node in nodes:
        assert re.search(told, node.text), node.text
        (stacks,) = logs[node.name].glob("*/attempt_0/0/stacks.txt")
        assert re.search(r"Stack .*\n  File .*context_worker", stacks.read_text())
    # Two that find the hang before they hear of each other each take their own for the slowest.
    assert any("the stacks of rank" in node.text for node in nodes)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    check_silences(job)


def test_a_job_that_is_paused_as_a_whole_goes_on_and_has_not_hung(job: Job) -> None:
    meet = ("--nnodes", "2", "--rdzv-endpoint", job.start_store(), "--max-restarts", "1")
    nodes = [asking(job, name, *meet, *SHORT, "--hang-timeout", "1.5") for name in "ab"]
    before = job.wait_for_world(2)
    goes_on(job)
    # As `scontrol suspend` does, or a freezer of containers.
    paused = job.processes()
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    job.check_unchanged(before, 4.0)
    workers = {report["pid"] for report in before}
    before_turns = {node.pid: count_waits(node.pid) for node in nodes}
    for pid in paused - workers:
        os.kill(pid, signal.SIGCONT)

    def turn() -> bool:
        return all(count_waits(pid) > waits + 1 for pid, waits in before_turns.items())

    wait_until("the agents to be at work again, before any worker makes a step", turn)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    goes_on(job)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert not any("hung" in node.text for node in nodes)
    assert job.wait_for_world(2) == before


def check_silences(job: Job) -> None:
    """Of a job with one hang, which each node has found, or has heard of from the other."""
    hangs = 0
    for events in job.events():
        began = next(event.monotonic for event in events if event.kind == "generation.started")
        for event in events:
            if event.kind == "failure":
                hangs += 1
                assert event.data["failure_kind"] == "hang"
                assert 0.7 < event.data["seconds_since_heartbeat"] < event.monotonic - began
    assert hangs
