"""A watched job is real: its nodes come, are disturbed and go, and nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import watched_job
from jobs import PROGRAMS, WITHOUT_TORCH
from watched_job import JobStuck, WatchedJob

from elasticlib.errors import ConfigError
from elasticlib.observe.history import GenerationTrigger, JobState
from elasticlib.testing.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.long]

PROGRAM = str(PROGRAMS / "context_worker.py")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedJob]:
    monkeypatch.setenv("PYTHONPATH", WITHOUT_TORCH)
    job = WatchedJob("checkpoint", "10", script=PROGRAM)
    yield job
    job.close()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pids(job: WatchedJob) -> list[int]:
    status = job.status()
    assert status is not None
    told = [node.status for node in status.nodes if node.status is not None]
    workers = [int(worker.name.removeprefix("pid ")) for one in told for worker in one.workers]
    return [*workers, *(one.pid for one in told)]


def test_a_job_is_disturbed_and_goes_on_and_its_history_tells_of_it(
    job: WatchedJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start_node("first", 2)
    job.until_step(5)
    with pytest.raises(ConfigError, match=r"the ranks that run are \[0, 1\], got 2"):
        job.kill_worker(2)
    job.kill_worker(1)
    job.until(lambda status: status.restarts == 1 and status.step is not None)
    job.more_steps(5)
    job.start_node("second", 1)
    job.until(lambda status: status.world_size == 3 and status.state is JobState.RUNNING)
    job.show()
    assert "watched: RUNNING" in capsys.readouterr().out
    assert job.drain("second") == 75
    job.until(lambda status: status.world_size == 2 and status.step is not None)
    assert job.finish() == [0, 75]
    history = job.report().history
    assert history.state is JobState.SUCCEEDED
    assert [one.trigger for one in history.generations] == [
        GenerationTrigger.START,
        GenerationTrigger.FAILURE,
        GenerationTrigger.RESIZE,
        GenerationTrigger.RESIZE,
    ]
    assert [one.world_size for one in history.generations] == [2, 2, 3, 2]


def test_closing_ends_all_processes_and_takes_the_folder(job: WatchedJob) -> None:
    job.start_node("first", 2)
    job.until_step(1)
    found = pids(job)
    assert len(found) == 3
    job.close()
    assert not job.folder.exists()
    wait_until("its processes to be gone", lambda: all(map(gone, found)), 10.0)
    job.close()


def test_what_cannot_come_any_more_is_said_with_the_nodes_words(job: WatchedJob) -> None:
    job.start_node("first", 2, "--max-restarts=0")
    job.until_step(1)
    job.kill_worker(0)
    with pytest.raises(JobStuck, match=r"all nodes have ended(.|\n)*killed by SIGKILL"):
        job.until_step(1_000_000)
    with pytest.raises(JobStuck, match="all nodes have ended"):
        job.until(lambda status: status.step == -1, seconds=0.0)


def test_a_job_that_is_left_open_goes_with_its_python(tmp_path: Path) -> None:
    code = (
        "from watched_job import WatchedJob\n"
        f"job = WatchedJob(script={PROGRAM!r})\n"
        "job.start_node('first', 1)\n"
        "job.until_step(1)\n"
        "print(job.status().nodes[0].status.pid, job.folder)\n"
    )
    beside = str(Path(watched_job.__file__).parent)
    path = os.pathsep.join((WITHOUT_TORCH, beside))
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert gone(int(done.stdout.split()[0]))
    assert not list(tmp_path.glob("elasticlib-*"))
