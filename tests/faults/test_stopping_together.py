"""Workers that ask their context stop at one step and save it: no step is lost or redone."""

from __future__ import annotations

import os
import re
import signal

import pytest
from context_steps import check_no_step_is_lost, read_stop_request, wait_for_steps
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node, check_consistent_world, generation_of
from processes import count_waits

from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until

pytestmark = pytest.mark.faults

CONTEXT = str(PROGRAMS / "context_worker.py")
# With this timeout, a worker can save only if a notice delays SIGTERM and SIGKILL.
SHORT = ("--shutdown-timeout", "0.1")


def start_agent(job: Job, name: str, *flags: str, worker: tuple[str, ...] = ()) -> Node:
    """Start an agent whose workers ask their context whether to stop."""
    command = job.agent_command(*flags, program=CONTEXT, worker=worker)
    return job.start(name, *command, PYTHONPATH=WITHOUT_TORCH)


def test_all_ranks_stop_at_one_step_for_each_reason_and_no_step_is_lost(
    job: Job, save_seconds: float
) -> None:
    meet = ("--nnodes", "1:3", "--nproc-per-node", "2", "--rdzv-endpoint", job.start_store())
    last = ("--rdzv-conf", "last_call_timeout=0.3")
    grace_s, timeout_s = save_seconds + 15, save_seconds + DEFAULT_TIMEOUT_S
    grace = ("--checkpoint-grace", f"{grace_s:g}")
    save = ("save", str(save_seconds))
    nodes = {
        name: start_agent(job, name, *meet, *last, *SHORT, *grace, worker=save) for name in "ab"
    }
    two = job.wait_for_world(4)
    wait_for_steps(job)
    nodes["c"] = start_agent(job, "c", *meet, *last, *SHORT, *grace, worker=save)
    three = job.wait_for_world(6, after=generation_of(two), seconds=timeout_s)
    resize = read_stop_request(job, two)
    assert resize["reason"] == "resize"
    assert 0 < resize["seconds_left"] <= grace_s
    wait_for_steps(job)
    drained = three[0]["node"]
    nodes[drained].signal(signal.SIGUSR2)
    assert nodes.pop(drained).exit_code(timeout_s) == 75
    again = job.wait_for_world(4, after=generation_of(three))
    drain = read_stop_request(job, three)
    assert drain["reason"] == "drain"
    assert 0 < drain["seconds_left"] <= grace_s
    wait_for_steps(job)
    nodes[again[0]["node"]].signal(signal.SIGTERM)
    assert nodes.pop(again[0]["node"]).exit_code(timeout_s) == 75
    rest = job.wait_for_world(2, after=generation_of(again))
    assert read_stop_request(job, again)["reason"] == "preempted"
    check_consistent_world(rest)
    assert rest[0]["TORCHELASTIC_RESTART_COUNT"] == "0"
    job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0]
    check_no_step_is_lost(job)


def test_hung_workers_are_restarted_after_their_stacks_are_written(job: Job) -> None:
    meet = ("--nnodes", "2", "--rdzv-endpoint", job.start_store(), "--max-restarts", "1")
    logs = {name: job.folder / f"logs-{name}" for name in "ab"}
    watch = ("--hang-timeout", "1.5", "--log-dir")
    hang = ("hang", "1", "20")
    nodes = [
        start_agent(job, name, *meet, *SHORT, *watch, str(logs[name]), worker=hang) for name in "ab"
    ]
    first = job.wait_for_world(2)
    again = job.wait_for_world(2, after=generation_of(first))
    assert [report["TORCHELASTIC_RESTART_COUNT"] for report in again] == ["1", "1"]
    message = r"hung: ranks? [01].* at step 19, inactive for .*no rank stands out"
    for node in nodes:
        assert re.search(message, node.text), node.text
        (stacks,) = logs[node.name].glob("*/attempt_0/0/stacks.txt")
        assert re.search(r"Stack .*\n  File .*context_worker", stacks.read_text())
    assert any("the stacks of rank" in node.text for node in nodes)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    check_hang_events(job)


def test_a_job_that_is_paused_as_a_whole_continues_and_does_not_count_as_hung(job: Job) -> None:
    meet = ("--nnodes", "2", "--rdzv-endpoint", job.start_store(), "--max-restarts", "1")
    nodes = [start_agent(job, name, *meet, *SHORT, "--hang-timeout", "1.5") for name in "ab"]
    before = job.wait_for_world(2)
    wait_for_steps(job)
    # `scontrol suspend` and the freezer of containers do the same.
    paused = job.processes()
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    job.check_unchanged(before, 4.0)
    workers = {report["pid"] for report in before}
    num_waits = {node.pid: count_waits(node.pid) for node in nodes}
    for pid in paused - workers:
        os.kill(pid, signal.SIGCONT)

    def agents_run() -> bool:
        return all(count_waits(pid) > waits + 1 for pid, waits in num_waits.items())

    wait_until("the agents to run again, before any worker makes a step", agents_run)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    wait_for_steps(job)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert not any("hung" in node.text for node in nodes)
    assert job.wait_for_world(2) == before


def check_hang_events(job: Job) -> None:
    """Check the failure events of a job with one hang.

    Each node has detected the hang or received it from the other node.
    """
    num_hangs = 0
    for events in job.events():
        started_at = next(event.monotonic for event in events if event.kind == "generation.started")
        for event in events:
            if event.kind == "failure":
                num_hangs += 1
                assert event.data["failure_kind"] == "hang"
                assert 0.7 < event.data["seconds_since_heartbeat"] < event.monotonic - started_at
    assert num_hangs
