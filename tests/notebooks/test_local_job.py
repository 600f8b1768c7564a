"""A local job has real nodes, which join, fail and leave; after it is closed, nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import local_job
import pytest
from jobs import PROGRAMS, WITHOUT_TORCH
from local_job import JobTimeoutError, LocalJob

from elasticlib.errors import ConfigError
from elasticlib.observe.history import GenerationTrigger, JobState
from elasticlib.testing.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.long]

PROGRAM = str(PROGRAMS / "context_worker.py")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalJob]:
    monkeypatch.setenv("PYTHONPATH", WITHOUT_TORCH)
    job = LocalJob("checkpoint", "10", script=PROGRAM)
    yield job
    job.close()


def has_exited(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pids(job: LocalJob) -> list[int]:
    """Return the pids of all workers and agents."""
    status = job.status()
    assert status is not None
    workers = [worker for node in status.nodes for worker in node.workers or ()]
    agents = [node.summary.pid for node in status.nodes if node.summary is not None]
    return [*(int(worker.name.removeprefix("pid ")) for worker in workers), *agents]


def test_history_contains_the_failure_and_the_resizes_of_a_job(
    job: LocalJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start_node("first", 2)
    job.wait_for_step(5)
    with pytest.raises(ConfigError, match=r"one of the running ranks \[0, 1\], got 2"):
        job.kill_worker(2)
    job.kill_worker(1)
    job.wait_until(lambda status: status.restarts == 1 and status.step is not None)
    job.wait_for_steps(5)
    job.start_node("second", 1)
    job.wait_until(lambda status: status.world_size == 3 and status.state is JobState.RUNNING)
    job.show()
    assert "local: RUNNING" in capsys.readouterr().out
    assert job.drain("second") == 75
    job.wait_until(lambda status: status.world_size == 2 and status.step is not None)
    assert job.finish() == [0, 75]
    history = job.report().history
    assert history.state is JobState.SUCCEEDED
    assert [generation.trigger for generation in history.generations] == [
        GenerationTrigger.START,
        GenerationTrigger.FAILURE,
        GenerationTrigger.RESIZE,
        GenerationTrigger.RESIZE,
    ]
    assert [generation.world_size for generation in history.generations] == [2, 2, 3, 2]


def test_close_ends_all_processes_and_deletes_the_directory(job: LocalJob) -> None:
    job.start_node("first", 2)
    job.wait_for_step(1)
    processes = pids(job)
    assert len(processes) == 3
    job.close()
    assert not job.dir.exists()
    wait_until("its processes to exit", lambda: all(map(has_exited, processes)), 10.0)
    job.close()


def test_wait_fails_with_the_logs_if_all_nodes_have_exited(job: LocalJob) -> None:
    job.start_node("first", 2, "--max-restarts=0")
    job.wait_for_step(1)
    job.kill_worker(0)
    with pytest.raises(JobTimeoutError, match=r"all nodes have exited(.|\n)*killed by SIGKILL"):
        job.wait_for_step(1_000_000)
    with pytest.raises(JobTimeoutError, match="all nodes have exited"):
        job.wait_until(lambda status: status.step == -1, timeout=0.0)


def test_job_that_is_not_closed_ends_with_its_interpreter(tmp_path: Path) -> None:
    code = (
        "from local_job import LocalJob\n"
        f"job = LocalJob(script={PROGRAM!r})\n"
        "job.start_node('first', 1)\n"
        "job.wait_for_step(1)\n"
        "print(job.status().nodes[0].summary.pid, job.dir)\n"
    )
    notebooks = str(Path(local_job.__file__).parent)
    path = os.pathsep.join((WITHOUT_TORCH, notebooks))
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    assert has_exited(int(process.stdout.split()[0]))
    assert not list(tmp_path.glob("elasticlib-*"))
