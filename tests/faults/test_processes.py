"""Workers crash, and agents are killed or get signals: no process is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys

import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node, generation_of, is_alive
from processes import find_workers

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

TWO_WORKERS = ("--standalone", "--nproc-per-node", "2")
METHODS = pytest.mark.parametrize("method", ["spawn", "forkserver"])


def start_agent(job: Job, method: str, *flags: str, worker: tuple[str, ...]) -> Node:
    """Start an agent whose workers and fork server use no torch."""
    flags = (*TWO_WORKERS, f"--start-method={method}", *flags)
    return job.start_agent("a", *flags, worker=worker, PYTHONPATH=WITHOUT_TORCH)


@pytest.mark.parametrize(
    ("method", "number"),
    [("spawn", signal.SIGKILL), ("forkserver", signal.SIGKILL), ("forkserver", signal.SIGUSR1)],
)
def test_no_process_outlives_a_killed_agent(job: Job, method: str, number: signal.Signals) -> None:
    agent = start_agent(job, method, worker=("ignore-term", "child"))
    reports = job.wait_for_world(2)
    agent.signal(number)
    job.wait_until_gone()
    assert agent.exit_code() == -number
    pids = [report[kind] for report in reports for kind in ("pid", "child")]
    assert not any(map(is_alive, pids))


@METHODS
def test_the_child_of_a_crashed_worker_is_killed(job: Job, method: str) -> None:
    flags = ("--max-restarts", "1", "--checkpoint-grace", "1")
    agent = start_agent(job, method, *flags, worker=("child",))
    before = job.wait_for_world(2)
    os.kill(before[0]["pid"], signal.SIGKILL)
    after = job.wait_for_world(2, after=generation_of(before))
    children = [report["child"] for report in before]
    assert not any(is_alive(child) for child in children)
    job.finish()
    assert agent.exit_code() == 0
    job.wait_until_gone()
    # A child of a worker that has succeeded may go on for the grace time.
    assert not any(is_alive(report["child"]) for report in after)
    killed = re.search("killed processes that workers of this node had started.*", agent.text)
    assert killed is not None, agent.text
    assert all(str(report["child"]) in killed[0] for report in after)


# Rank 0 starts a process that ends its work only after all workers have ended.
UPLOADING_WORKER = """
import os, pathlib, subprocess, sys
from elasticlib.testing.waiting import wait_until

folder = pathlib.Path(sys.argv[1])
pid = folder / "pid"
if os.environ["RANK"] == "0":
    upload = "until [ -e %s/all-ended ]; do sleep 0.05; done; echo uploaded > %s/uploaded"
    subprocess.Popen(["sh", "-c", upload % (folder, folder)])
    pid.with_suffix(".part").write_text(str(os.getpid()))
    pid.with_suffix(".part").rename(pid)
else:
    def has_exited():
        state = pathlib.Path(f"/proc/{pid.read_text()}/stat").read_text()
        return state.rpartition(")")[2].split()[0] == "Z"

    wait_until("the exit of rank 0", lambda: pid.exists() and has_exited())
"""


@METHODS
def test_a_process_that_a_succeeded_worker_has_started_ends_its_work(job: Job, method: str) -> None:
    script = job.folder / "script.py"
    script.write_text(UPLOADING_WORKER)
    command = (sys.executable, "-m", "elasticlib.launch", *TWO_WORKERS, f"--start-method={method}")
    agent = job.start("a", *command, str(script), str(job.folder), PYTHONPATH=WITHOUT_TORCH)
    agent.wait_for_log(
        "the workers of this node have succeeded; waiting up to 30 s for .* \\(sh\\)"
    )
    (job.folder / "all-ended").touch()
    assert agent.exit_code() == 0, agent.text
    assert (job.folder / "uploaded").read_text() == "uploaded\n"
    assert "killed processes" not in agent.text


def test_the_third_sigint_ends_the_wait_for_what_succeeded_workers_have_started(job: Job) -> None:
    agent = start_agent(job, "spawn", "--checkpoint-grace", "600", worker=("child",))
    reports = job.wait_for_world(2)
    job.finish()
    agent.wait_for_log("waiting up to 600 s for processes")
    agent.signal(signal.SIGTERM)
    for left in (2, 1):
        agent.signal(signal.SIGINT)
        agent.wait_for_log(f"processes that workers have started continues; {left} more")
    agent.signal(signal.SIGINT)
    assert agent.exit_code() == 0, agent.text
    job.wait_until_gone()
    assert not any(is_alive(report["child"]) for report in reports)


@METHODS
def test_a_hangup_that_was_ignored_at_start_stays_ignored(job: Job, method: str) -> None:
    command = job.agent_command(*TWO_WORKERS, f"--start-method={method}")
    agent = job.start("a", "nohup", *command, PYTHONPATH=WITHOUT_TORCH)
    reports = job.wait_for_world(2)
    for pid in (agent.pid, *(report["pid"] for report in reports)):
        os.kill(pid, signal.SIGHUP)
    job.finish()
    assert agent.exit_code() == 0
    assert not job.reports(generation_of(reports) + 1)


def test_an_agent_that_gets_sigterm_reports_it_and_leaves_no_process(job: Job) -> None:
    agent = job.start_agent("a", *TWO_WORKERS)
    job.wait_for_world(2)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert "STOPPED: received SIGTERM" in agent.text
    assert "Traceback" not in agent.text
    job.wait_until_gone()


@METHODS
def test_a_worker_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(
    job: Job, method: str
) -> None:
    agent = start_agent(job, method, "--shutdown-timeout", "0.5", worker=("ignore-term",))
    job.wait_for_world(2)
    agent.signal(signal.SIGINT)
    assert agent.exit_code() == 128 + signal.SIGINT
    assert "still running 0.5 s after SIGTERM, killing: pid" in agent.text
    job.wait_until_gone()


@pytest.mark.parametrize("where", ["store is there", "store is not"])
def test_a_waiting_node_leaves_on_sigterm(job: Job, where: str) -> None:
    endpoint = job.start_store() if where == "store is there" else "localhost:1"
    agent = job.start_agent(
        "a", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=false"
    )
    agent.wait_for_log(r"1 of at least 2 nodes are here|the store is unreachable")
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert "Traceback" not in agent.text


def start_with_deferred_import(job: Job, text: str) -> Node:
    """Start an agent whose fork server imports this module after its workers have started."""
    modules = job.folder / "modules"
    shutil.copytree(PROGRAMS / "stub_torch", modules)
    report_start = f"open({str(job.folder / 'started')!r}, 'w').close()\n"
    (modules / "torch" / "_dynamo.py").write_text(report_start + text)
    paths = os.pathsep.join((str(modules), WITHOUT_TORCH))
    flags = (*TWO_WORKERS, "--start-method=forkserver", "--max-restarts", "1")
    return job.start_agent("a", *flags, PYTHONPATH=paths)


def test_a_deferred_import_that_fails_affects_no_worker_and_uses_no_restart(
    job: Job,
) -> None:
    agent = start_with_deferred_import(job, "raise RuntimeError('as if it were broken')")
    reports = job.wait_for_world(2)
    agent.wait_for_log("torch._dynamo cannot be imported: RuntimeError: as if it were broken")
    workers = sorted(report["pid"] for report in reports)
    # The process that could not import the module may still be ending.
    wait_until("only the workers to be left", lambda: sorted(find_workers(agent.pid)) == workers)
    job.finish()
    assert agent.exit_code() == 0, agent.text
    assert job.reports(generation_of(reports)) == reports
    assert not job.reports(generation_of(reports) + 1)
    assert "SIGKILL" not in agent.text


def test_a_worker_killed_during_a_deferred_import_is_restarted_at_once(
    job: Job,
) -> None:
    os.mkfifo(job.folder / "pipe")
    agent = start_with_deferred_import(job, f"open({str(job.folder / 'pipe')!r}).read()")
    before = job.wait_for_world(2)
    wait_until("the import to start", (job.folder / "started").exists)
    os.kill(before[0]["pid"], signal.SIGKILL)
    after = job.wait_for_world(2, after=generation_of(before))
    # The same fork server has forked them; the agent would have replaced one that does not answer.
    assert sorted(find_workers(agent.pid)) == sorted(report["pid"] for report in after)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 128 + signal.SIGTERM
    assert "was killed by SIGKILL" in agent.text
    assert "fork server" not in agent.text
    assert "did not exit in time" not in agent.text
    job.wait_until_gone()
