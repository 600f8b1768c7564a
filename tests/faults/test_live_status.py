"""`elasticlib status` and `stacks` of real jobs: what runs, what stands still, what is over."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import Any

import pytest
from jobs import PATIENT, PROGRAMS, WITHOUT_TORCH, Job, Node, generation_of
from processes import read_name

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

STEPS = str(PROGRAMS / "context_worker.py")
SHORT = ("--rdzv-conf", "last_call_timeout=0.3")
SPAWN = ("--start-method", "spawn", *SHORT)


def at_work(job: Job, *arguments: str) -> dict[str, Any]:
    """The status once all workers are told of: one may be at work before its agent says so."""

    def look() -> dict[str, Any] | None:
        found = job.status(*arguments)
        begun = sum(len(node["workers"]) for node in found["nodes"])
        return found if begun == found["world_size"] else None

    return wait_until("all workers in the status", look)


def stepping(job: Job, name: str, *flags: str) -> Node:
    command = job.agent_command(*SPAWN, *flags, program=STEPS)
    return job.start(name, *command, PYTHONPATH=WITHOUT_TORCH, NODE=name)


@pytest.mark.parametrize("backend", ["tcp", "file"])
def test_two_nodes_tell_where_they_stand_and_who_stands_still_is_named(
    job: Job, backend: str
) -> None:
    endpoint = job.start_store() if backend == "tcp" else str(job.folder / "meeting")
    meet = ("--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", endpoint)
    # Whoever stands still keeps its lease for as long as that is looked at.
    lease = ("--rdzv-conf", "keep_alive_interval=4")
    flags = (*meet, "--rdzv-id", "the job", "--max-restarts", "2", *lease)
    nodes = [stepping(job, name, *flags) for name in "ab"]
    reports = job.wait_for_world(2)
    place = ("--rdzv-backend", backend, endpoint)
    found = at_work(job, *place)
    assert (found["run"], found["state"], found["source"]) == ("the job", "RUNNING", "nodes")
    assert (found["generation"], found["world_size"], found["max_restarts"]) == (1, 2, 2)
    assert [node["rank"] for node in found["nodes"]] == [0, 1]
    assert {node["pid"] for node in found["nodes"]} == {node.pid for node in nodes}
    assert {w["name"] for n in found["nodes"] for w in n["workers"]} == {
        f"pid {report['pid']}" for report in reports
    }
    # By the job's name, as this machine remembers it, and its steps go on.
    again = wait_until("steps", lambda: _past(found["step"] or 0, job.status("the job")))
    assert again["steps_per_second"] > 0
    if backend == "tcp":
        # Nobody is asked: its last status is there, and grows old.
        os.kill(nodes[1].pid, signal.SIGSTOP)
        still = wait_until("its status to be old", lambda: _older_than(3.0, nodes[1].pid, job))
        assert still["state"] == "RUNNING"
        assert all(node["reporting"] and node["workers"] for node in still["nodes"])
        os.kill(nodes[1].pid, signal.SIGCONT)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    over = job.status("the job")
    assert (over["state"], over["exit_code"]) == ("SUCCEEDED", 0)


def _older_than(seconds: float, pid: int, job: Job) -> dict[str, Any] | None:
    found = job.status("the job")
    (age,) = (node["age_seconds"] for node in found["nodes"] if node["pid"] == pid)
    return found if age > seconds else None


def _past(step: int, found: dict[str, Any]) -> dict[str, Any] | None:
    return found if (found["step"] or 0) > step and found["steps_per_second"] else None


def test_a_job_is_seen_waiting_restarting_and_failed(job: Job) -> None:
    secret = job.folder / "secret"
    secret.write_text("known to all the nodes")
    meet = (
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        job.start_store("--secret-file", str(secret)),
        "--rdzv-id",
        "job",
    )
    flags = (*meet, "--rdzv-conf", f"last_call_timeout=0.3,secret_file={secret}")
    budget = ("--max-restarts", "1")
    nodes = [job.start_agent("a", *flags, *budget, PYTHONPATH=WITHOUT_TORCH, NODE="a")]
    known = ("--secret-file", str(secret), meet[3])
    waits = wait_until("a node", lambda: _waits(job, *known))
    assert waits["nodes"][0]["state"] == "RENDEZVOUS"
    _, refused = job.run_command("status", *PATIENT, meet[3], code=4)
    assert "secret" in refused
    nodes.append(job.start_agent("b", *flags, *budget, PYTHONPATH=WITHOUT_TORCH, NODE="b"))
    first = job.wait_for_world(2)
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = job.wait_for_world(2, after=generation_of(first))
    again = job.status("job")
    assert (again["restarts"], again["generation"]) == (1, 2)
    assert "SIGKILL" in again["reason"]
    os.kill(second[0]["pid"], signal.SIGKILL)
    assert [node.exit_code() for node in nodes] == [1, 1]
    assert job.status("job", code=1)["state"] == "FAILED"


def _waits(job: Job, *place: str) -> dict[str, Any] | None:
    out, _ = job.run_command("status", "--json", *PATIENT, *place, code=None)
    found: dict[str, Any] | None = json.loads(out) if out else None
    return found if found and found["state"] == "WAITING" else None


def stacks(job: Job, *patterns: str, ranks: tuple[str, ...] = ()) -> str:
    """What they are once all of this is there: a rank may be on its way, or slow to write."""
    shown = ""

    def look() -> bool:
        nonlocal shown
        shown, _ = job.run_command("stacks", *PATIENT, *ranks)
        return all(re.search(pattern, shown) for pattern in patterns)

    try:
        wait_until(f"stacks with {patterns}", look)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{shown}") from None
    return shown


SLEEPS = """
import ctypes, os, sys, time
from pathlib import Path

def deep():
    time.sleep(600)

Path(sys.argv[1], f"up.{os.environ['RANK']}").touch()
if os.environ["RANK"] == "2":
    while True:  # the signal ends a sleep of C's
        ctypes.CDLL(None).sleep(600)
deep()
"""


def test_stacks_of_ranks_that_sleep_in_python_and_in_c_and_of_one_that_is_stopped(
    job: Job,
) -> None:
    script = job.folder / "sleeps.py"
    script.write_text(SLEEPS)
    flags = ("--standalone", "--start-method", "spawn", "--nproc-per-node", "4")
    node = job.start(
        "a", *job.agent_command(*flags, program=str(script)), PYTHONPATH=WITHOUT_TORCH, NODE="a"
    )
    wait_until("all ranks", lambda: len(list(job.folder.glob("up.*"))) == 4)
    stacks(
        job,
        r"rank 2:\n  .*\n.*sleeps.py\", line 11 in <module>",
        r"ranks 0-1, 3:\n  .*\n.*line 6 in deep\n.*line 12 in <module>",
    )
    worker = int(at_work(job)["nodes"][0]["workers"][3]["name"].split()[1])
    os.kill(worker, signal.SIGSTOP)
    silent = "rank 3 returned no stack within 1 s"
    absent = "no node that answered has a worker of rank 9"
    shown = stacks(job, "rank 2:", silent, absent, ranks=("-r", "2-3,9"))
    assert "in deep" not in shown
    os.kill(worker, signal.SIGCONT)
    node.signal(signal.SIGTERM)
    node.exit_code()
    assert job.status(code=5)["state"] == "STOPPED"
    assert (
        "has finished (STOPPED) and has no running workers" in job.run_command("stacks", code=4)[1]
    )


BECOMES = """
import os, sys
from pathlib import Path

Path(sys.argv[1], "up").touch()
os.execvp("sleep", ["sleep", "600"])
"""


def test_a_worker_that_became_another_program_is_not_hurt_by_the_question(job: Job) -> None:
    script = job.folder / "becomes.py"
    script.write_text(BECOMES)
    flags = ("--standalone", "--start-method", "spawn")
    node = job.start("a", *job.agent_command(*flags, program=str(script)), PYTHONPATH=WITHOUT_TORCH)

    def became() -> bool:
        return "sleep" in map(read_name, job.processes())

    wait_until("the worker to be another program", became)
    stacks(job, "has become another program")
    # Its node's status is published a moment after it has changed.
    wait_until("it to run", lambda: job.status(code=None)["state"] == "RUNNING")
    node.signal(signal.SIGTERM)
    node.exit_code()


def test_watching_ends_with_the_run_and_with_a_signal(job: Job) -> None:
    agent = stepping(job, "a", "--standalone")
    job.wait_for_world(1)
    watch = (sys.executable, "-m", "elasticlib.launch.cli", "status", "--watch")
    often = (*watch, "--every", "0.1")
    stopped, lasting = job.start("w1", *often), job.start("w2", *often, "--json")
    stopped.wait_for_log(r": RUNNING for")
    lasting.wait_for_log(r'"state": "RUNNING"')
    stopped.signal(signal.SIGINT)
    assert stopped.exit_code() == 0
    assert "Traceback" not in stopped.text
    job.finish()
    assert agent.exit_code() == 0
    assert lasting.exit_code() == 0
    assert json.loads(lasting.text.splitlines()[-1])["state"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nothing",), 4, "nothing"),
        (("127.0.0.1:1", "--timeout", "0.2"), 4, "127.0.0.1:1 could not be reached"),
        (("--rdzv-id", "x"), 2, "require an ENDPOINT"),
        (("--rdzv-backend", "file", "/nowhere"), 4, "directory /nowhere does not exist"),
        (("--timeout", "0"), 2, "a positive number of seconds"),
        (
            ("127.0.0.1:1", "--rdzv-conf", "cacert=x"),
            2,
            "cacert applies only to",
        ),
    ],
)
def test_what_cannot_be_told_is_a_sentence(
    job: Job, arguments: tuple[str, ...], code: int, says: str
) -> None:
    assert says in job.run_command("status", *arguments, code=code)[1]
