"""Workers crash, agents are killed and signalled: rows A8, A9, A11, A19 and A20."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node, generation_of, is_alive
from processes import find_workers

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

ALONE = ("--standalone", "--nproc-per-node", "2")
METHODS = pytest.mark.parametrize("method", ["spawn", "forkserver"])


def run(job: Job, method: str, *flags: str, worker: tuple[str, ...]) -> Node:
    """An agent whose workers use no torch, nor does their fork server."""
    flags = (*ALONE, f"--start-method={method}", *flags)
    return job.start_agent("a", *flags, worker=worker, PYTHONPATH=WITHOUT_TORCH)


@pytest.mark.parametrize(
    ("method", "number"),
    [("spawn", signal.SIGKILL), ("forkserver", signal.SIGKILL), ("forkserver", signal.SIGUSR1)],
)
def test_a8_nothing_outlives_an_agent_that_was_killed(
    job: Job, method: str, number: signal.Signals
) -> None:
    agent = run(job, method, worker=("ignore-term", "child"))
    reports = job.wait_for_world(2)
    agent.signal(number)
    job.wait_until_gone()
    assert agent.exit_code() == -number
    assert not any(is_alive(p[kind]) for p in reports for kind in ("pid", "child"))


@METHODS
def test_a9_the_child_of_a_crashed_worker_goes_with_it(job: Job, method: str) -> None:
    agent = run(job, method, "--max-restarts", "1", worker=("child",))
    before = job.wait_for_world(2)
    os.kill(before[0]["pid"], signal.SIGKILL)
    after = job.wait_for_world(2, after=generation_of(before))
    children = [report["child"] for report in before]
    assert not any(is_alive(child) for child in children)
    job.finish()
    assert agent.exit_code() == 0
    job.wait_until_gone()
    assert not any(is_alive(report["child"]) for report in after)


@METHODS
def test_a11_an_ignored_hangup_stays_ignored(job: Job, method: str) -> None:
    command = job.agent_command(*ALONE, f"--start-method={method}")
    agent = job.start("a", "nohup", *command, PYTHONPATH=WITHOUT_TORCH)
    reports = job.wait_for_world(2)
    for pid in (agent.pid, *(report["pid"] for report in reports)):
        os.kill(pid, signal.SIGHUP)
    job.finish()
    assert agent.exit_code() == 0
    assert not job.reports(generation_of(reports) + 1)


def test_a19_an_agent_that_is_asked_to_leave_says_so_and_leaves_nothing(job: Job) -> None:
    agent = job.start_agent("a", *ALONE)
    job.wait_for_world(2)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert "STOPPED: received SIGTERM" in agent.text
    assert "Traceback" not in agent.text
    job.wait_until_gone()


@METHODS
def test_a_worker_that_is_deaf_to_sigterm_is_killed_after_the_grace(job: Job, method: str) -> None:
    agent = run(job, method, "--shutdown-timeout", "0.5", worker=("ignore-term",))
    job.wait_for_world(2)
    agent.signal(signal.SIGINT)
    assert agent.exit_code() == 128 + signal.SIGINT
    assert "still running 0.5 s after SIGTERM, killing: pid" in agent.text
    job.wait_until_gone()


@pytest.mark.parametrize("where", ["store is there", "store is not"])
def test_a20_a_waiting_node_leaves_when_it_is_asked_to(job: Job, where: str) -> None:
    endpoint = job.start_store() if where == "store is there" else "localhost:1"
    agent = job.start_agent(
        "a", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=false"
    )
    agent.wait_for_log(r"1 of at least 2 nodes are here|the store is unreachable")
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert "Traceback" not in agent.text


def run_with_deferred_import(job: Job, text: str) -> Node:
    """An agent whose fork server imports a module of this text once its workers have begun."""
    modules = job.folder / "modules"
    shutil.copytree(PROGRAMS / "stub_torch", modules)
    begins = f"open({str(job.folder / 'begun')!r}, 'w').close()\n"
    (modules / "torch" / "_dynamo.py").write_text(begins + text)
    paths = os.pathsep.join((str(modules), WITHOUT_TORCH))
    flags = (*ALONE, "--start-method=forkserver", "--max-restarts", "1")
    return job.start_agent("a", *flags, PYTHONPATH=paths)


def test_a_module_that_fails_when_it_is_imported_late_costs_no_worker_and_no_restart(
    job: Job,
) -> None:
    agent = run_with_deferred_import(job, "raise RuntimeError('as if it were broken')")
    reports = job.wait_for_world(2)
    agent.wait_for_log("torch._dynamo cannot be imported: RuntimeError: as if it were broken")
    assert sorted(find_workers(agent.pid)) == sorted(report["pid"] for report in reports)
    job.finish()
    assert agent.exit_code() == 0, agent.text
    assert job.reports(generation_of(reports)) == reports
    assert not job.reports(generation_of(reports) + 1)
    assert "SIGKILL" not in agent.text


def test_a_worker_that_is_killed_while_a_module_is_imported_late_is_restarted_at_once(
    job: Job,
) -> None:
    os.mkfifo(job.folder / "pipe")
    agent = run_with_deferred_import(job, f"open({str(job.folder / 'pipe')!r}).read()")
    before = job.wait_for_world(2)
    wait_until("the import to begin", (job.folder / "begun").exists)
    os.kill(before[0]["pid"], signal.SIGKILL)
    after = job.wait_for_world(2, after=generation_of(before))
    # Forked by the same server, which would have been given up if it had not answered.
    assert sorted(find_workers(agent.pid)) == sorted(report["pid"] for report in after)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert "was killed by SIGKILL" in agent.text
    assert "fork server" not in agent.text
    assert "did not exit in time" not in agent.text
    job.wait_until_gone()
