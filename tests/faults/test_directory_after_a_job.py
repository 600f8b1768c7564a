"""What a job leaves in its checkpoint directory when it ends, and who may write there then."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
from jobs import PROGRAMS, Job, Node

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointFencedError
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

LAUNCH = (sys.executable, "-m", "elasticlib.launch", "--standalone", "--max-restarts", "0")
WORKER = str(PROGRAMS / "rollback_worker.py")
START_TIMEOUT_S = 110.0


def start(job: Job, name: str, restored: int = 0, saved: str = "", kept: str = "") -> Node:
    """Start a job, and wait until its worker has saved and snapshotted these steps."""
    for flag in ("ready", "finish"):
        (job.folder / flag).unlink(missing_ok=True)
    node = job.start(name, *LAUNCH, WORKER, str(job.folder), str(restored), saved, kept)
    wait_until(
        "the worker", (job.folder / "ready").exists, START_TIMEOUT_S, details=lambda: node.text
    )
    return node


def restored_step(job: Job) -> int:
    state = {"w": torch.ones(4), "step": -1}
    with CheckpointManager(job.folder / "checkpoints") as manager:
        assert manager.restore(state).step == state["step"]
    return int(state["step"])


def test_a_drain_after_a_rollback_writes_the_last_step_and_the_next_start_continues_it(
    job: Job,
) -> None:
    first = start(job, "first", saved="500,1000")
    job.finish()
    assert first.exit_code() == 0
    second = start(job, "second", restored=500, kept="501,520")
    second.signal(signal.SIGUSR2)
    assert second.exit_code() == 75
    second.wait_for_log("last checkpoint: step 520")
    assert restored_step(job) == 520
    assert CheckpointManager(job.folder / "checkpoints").load(1000)["step"] == 1000


@pytest.mark.parametrize("end", ["finish", "fail", "SIGTERM", "SIGUSR2"])
def test_a_process_without_a_launcher_may_write_once_the_job_has_ended(job: Job, end: str) -> None:
    node = start(job, "job", saved="5", kept="6")
    bystander = CheckpointManager(job.folder / "checkpoints")
    with pytest.raises(CheckpointFencedError, match="claim"):
        bystander.save(7, {"w": torch.zeros(1)}).wait()
    if end.startswith("SIG"):
        os.kill(node.process.pid, getattr(signal, end))
    else:
        (job.folder / end).touch()
    node.exit_code()
    assert restored_step(job) == (5 if end == "finish" else 6)
    with CheckpointManager(job.folder / "checkpoints") as manager:
        manager.restore({"w": torch.zeros(4), "step": 0})
        manager.save(7, {"w": torch.zeros(4), "step": 7}).wait()
        assert manager.latest() == 7
