"""`elasticlib status` and `elasticlib stacks` of real jobs: running, hung, stopped and finished."""

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


def wait_for_workers(job: Job, *arguments: str) -> dict[str, Any]:
    """Wait until the status contains all workers, and return it.

    An agent publishes its workers a moment after they have started.
    """

    def read_status() -> dict[str, Any] | None:
        status = job.status(*arguments)
        num_workers = sum(len(node["workers"]) for node in status["nodes"])
        return status if num_workers == status["world_size"] else None

    return wait_until("all workers in the status", read_status)


def start_agent(job: Job, name: str, *flags: str) -> Node:
    """Start an agent whose workers make steps."""
    command = job.agent_command(*SPAWN, *flags, program=STEPS)
    return job.start(name, *command, PYTHONPATH=WITHOUT_TORCH, NODE=name)


@pytest.mark.parametrize("backend", ["tcp", "file"])
def test_status_shows_two_running_nodes_and_the_age_of_a_stopped_one(
    job: Job, backend: str
) -> None:
    endpoint = job.start_store() if backend == "tcp" else str(job.folder / "meeting")
    meet = ("--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", endpoint)
    # The lease of the stopped node lasts longer than the test looks at its status.
    lease = ("--rdzv-conf", "keep_alive_interval=4")
    flags = (*meet, "--rdzv-id", "the job", "--max-restarts", "2", *lease)
    nodes = [start_agent(job, name, *flags) for name in "ab"]
    reports = job.wait_for_world(2)
    colon = ":" if backend == "file" else "://"
    status = wait_for_workers(job, f"{backend}{colon}{endpoint}/the%20job")
    assert job.status(f"{backend}{colon}{endpoint}/")["run"] == "the job"
    assert (status["run"], status["state"], status["source"]) == ("the job", "RUNNING", "nodes")
    assert (status["generation"], status["world_size"], status["max_restarts"]) == (1, 2, 2)
    assert [node["rank"] for node in status["nodes"]] == [0, 1]
    assert {node["pid"] for node in status["nodes"]} == {node.pid for node in nodes}
    assert {w["name"] for n in status["nodes"] for w in n["workers"]} == {
        f"pid {report['pid']}" for report in reports
    }
    # The records on this machine contain the endpoint, so that the job id is sufficient.
    first_step = status["step"] or 0
    later = wait_until("more steps", lambda: status_after(first_step, job))
    assert later["steps_per_second"] > 0
    if backend == "tcp":
        # The store still has the last status of the stopped agent.
        os.kill(nodes[1].pid, signal.SIGSTOP)
        old = wait_until("an old status", lambda: status_older_than(3.0, nodes[1].pid, job))
        assert old["state"] == "RUNNING"
        assert all(node["reporting"] and node["workers"] for node in old["nodes"])
        os.kill(nodes[1].pid, signal.SIGCONT)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    final = job.status("the job")
    assert (final["state"], final["exit_code"]) == ("SUCCEEDED", 0)


def status_older_than(seconds: float, pid: int, job: Job) -> dict[str, Any] | None:
    """Return the status if the part of this agent is older than so many seconds."""
    status = job.status("the job")
    (age,) = (node["age_seconds"] for node in status["nodes"] if node["pid"] == pid)
    return status if age > seconds else None


def status_after(step: int, job: Job) -> dict[str, Any] | None:
    """Return the status if it contains a later step and a speed."""
    status = job.status("the job")
    return status if (status["step"] or 0) > step and status["steps_per_second"] else None


def test_status_shows_a_job_waiting_then_restarted_then_failed(job: Job) -> None:
    secret = job.folder / "secret"
    secret.write_text("the secret of all nodes")
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
    store = ("--secret-file", str(secret), meet[3])
    waiting = wait_until("a waiting node", lambda: waiting_status(job, *store))
    assert waiting["nodes"][0]["state"] == "RENDEZVOUS"
    _, refused = job.run_command("status", *PATIENT, meet[3], code=4)
    assert "secret" in refused
    nodes.append(job.start_agent("b", *flags, *budget, PYTHONPATH=WITHOUT_TORCH, NODE="b"))
    first = job.wait_for_world(2)
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = job.wait_for_world(2, after=generation_of(first))
    restarted = job.status("job")
    assert (restarted["restarts"], restarted["generation"]) == (1, 2)
    assert "SIGKILL" in restarted["reason"]
    os.kill(second[0]["pid"], signal.SIGKILL)
    assert [node.exit_code() for node in nodes] == [1, 1]
    assert job.status("job", code=1)["state"] == "FAILED"


def waiting_status(job: Job, *store: str) -> dict[str, Any] | None:
    """Return the status if the job waits for nodes."""
    out, _ = job.run_command("status", "--json", *PATIENT, *store, code=None)
    status: dict[str, Any] | None = json.loads(out) if out else None
    return status if status and status["state"] == "WAITING" else None


def wait_for_stacks(job: Job, *patterns: str, ranks: tuple[str, ...] = ()) -> str:
    """Wait until the output of `elasticlib stacks` matches all patterns, and return it.

    A rank may reach its final function late, or write its stack slowly.
    """
    output = ""

    def matches() -> bool:
        nonlocal output
        output, _ = job.run_command("stacks", *PATIENT, *ranks)
        return all(re.search(pattern, output) for pattern in patterns)

    wait_until(f"stacks with {patterns}", matches, details=lambda: output)
    return output


SLEEP = """
import ctypes, os, sys, time
from pathlib import Path

def sleep_in_python():
    time.sleep(600)

Path(sys.argv[1], f"started.{os.environ['RANK']}").touch()
if os.environ["RANK"] == "2":
    while True:  # the signal interrupts the sleep of the C library
        ctypes.CDLL(None).sleep(600)
sleep_in_python()
"""


def test_stacks_shows_ranks_that_sleep_in_python_and_in_c_and_names_a_stopped_one(
    job: Job,
) -> None:
    script = job.folder / "sleep_forever.py"
    script.write_text(SLEEP)
    flags = ("--standalone", "--start-method", "spawn", "--nproc-per-node", "4")
    node = job.start(
        "a", *job.agent_command(*flags, program=str(script)), PYTHONPATH=WITHOUT_TORCH, NODE="a"
    )
    wait_until("all ranks", lambda: len(list(job.folder.glob("started.*"))) == 4)
    wait_for_stacks(
        job,
        r"rank 2:\n  .*\n.*sleep_forever.py\", line 11 in <module>",
        r"ranks 0-1, 3:\n  .*\n.*line 6 in sleep_in_python\n.*line 12 in <module>",
    )
    worker = int(wait_for_workers(job)["nodes"][0]["workers"][3]["name"].split()[1])
    os.kill(worker, signal.SIGSTOP)
    no_stack = "rank 3 returned no stack within 1 s"
    no_rank = "no node that answered has a worker of rank 9"
    output = wait_for_stacks(job, "rank 2:", no_stack, no_rank, ranks=("-r", "2-3,9"))
    assert "in sleep_in_python" not in output
    os.kill(worker, signal.SIGCONT)
    node.signal(signal.SIGTERM)
    node.exit_code()
    assert job.status(code=5)["state"] == "STOPPED"
    assert (
        "has finished (STOPPED) and has no running workers" in job.run_command("stacks", code=4)[1]
    )


EXEC_SLEEP = """
import os

os.execvp("sleep", ["sleep", "600"])
"""


def test_stacks_does_not_stop_a_worker_that_executed_another_program(job: Job) -> None:
    script = job.folder / "exec_sleep.py"
    script.write_text(EXEC_SLEEP)
    flags = ("--standalone", "--start-method", "spawn")
    node = job.start("a", *job.agent_command(*flags, program=str(script)), PYTHONPATH=WITHOUT_TORCH)

    def find_sleep() -> list[int]:
        return [pid for pid in job.processes() if read_name(pid) == "sleep"]

    workers = wait_until("the worker to execute another program", find_sleep)
    wait_for_stacks(job, "has become another program")
    # The agent publishes its status a moment after a change.
    wait_until("the job to run", lambda: job.status(code=None)["state"] == "RUNNING")
    status = job.status()
    assert (status["generation"], status["restarts"]) == (1, 0)
    assert find_sleep() == workers
    node.signal(signal.SIGTERM)
    node.exit_code()


def test_status_watch_ends_with_the_run_and_on_sigint(job: Job) -> None:
    agent = start_agent(job, "a", "--standalone")
    job.wait_for_world(1)
    watch = (sys.executable, "-m", "elasticlib.launch.cli", "status", "--watch")
    often = (*watch, "--every", "0.1")
    stopped, following = job.start("w1", *often), job.start("w2", *often, "--json")
    stopped.wait_for_log(r": RUNNING for")
    following.wait_for_log(r'"state": "RUNNING"')
    stopped.signal(signal.SIGINT)
    assert stopped.exit_code() == 0
    assert "Traceback" not in stopped.text
    job.finish()
    assert agent.exit_code() == 0
    assert following.exit_code() == 0
    assert json.loads(following.text.splitlines()[-1])["state"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nothing",), 4, "nothing"),
        (("127.0.0.1:1", "--timeout", "0.2"), 4, "127.0.0.1:1 could not be reached"),
        (("tcp:///x",), 2, "a run is named tcp://HOST:PORT/JOB, file:/DIR/JOB"),
        (("zk://h/x",), 2, "--rdzv-backend must be one of tcp,"),
        (("file:/nowhere/x",), 4, "directory /nowhere does not exist"),
        (("--timeout", "0"), 2, "a positive number of seconds"),
        (
            ("127.0.0.1:1", "--rdzv-conf", "cacert=x"),
            2,
            "cacert applies only to",
        ),
    ],
)
def test_status_errors_name_the_problem(
    job: Job, arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert message in job.run_command("status", *arguments, code=code)[1]
