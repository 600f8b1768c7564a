"""The demo: what its output contains, and what it leaves when it is stopped."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from jobs import PROGRAMS, Job

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults
NO_NUMPY = str(PROGRAMS / "no_numpy")
WARNING = "Failed to initialize NumPy"


def processes_of(job: Job) -> list[int]:
    """Return the processes that have the variable of the job, which their children inherit."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if job.tag.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except (OSError, ValueError):  # it has ended, or belongs to another user
            continue
    return found


def test_stopped_demo_leaves_no_process_and_no_directory_and_prints_no_numpy_warning(
    job: Job,
) -> None:
    demo = job.start("demo", sys.executable, "-m", "elasticlib.examples.demo", PYTHONPATH=NO_NUMPY)
    demo.wait_for_log(r"baseline: .* run .* started")
    demo.signal(signal.SIGTERM)
    assert demo.exit_code() == 128 + signal.SIGTERM
    wait_until("its processes to end", lambda: not processes_of(job), details=lambda: demo.text)
    assert not [*job.temporary.glob("elasticlib-demo-*")]
    assert WARNING not in demo.text
    assert "Traceback" not in demo.text


def test_fork_server_and_agent_hide_only_the_warning_about_a_missing_numpy(job: Job) -> None:
    (job.folder / "warns.py").write_text("import warnings\nwarnings.warn('something else')\n")
    script = job.folder / "train.py"
    script.write_text("import torch\nprint('sum', int(torch.ones(2).sum()))\n")
    agent = job.start(
        *("a", sys.executable, "-m", "elasticlib.launch", "--standalone", "--preload", "warns"),
        str(script),
        PYTHONPATH=os.pathsep.join([NO_NUMPY, str(job.folder)]),
    )
    assert agent.exit_code() == 0
    assert "sum 2" in agent.text
    assert "UserWarning: something else" in agent.text
    assert WARNING not in agent.text
