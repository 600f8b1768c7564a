"""On a busy machine, the event loop of a healthy agent does not count as blocked."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from jobs import Job, generation_of

pytestmark = [
    *(pytest.mark.faults, pytest.mark.release),
    # The start is slow on a busy machine, too.
    pytest.mark.timeout(600),
]

NUM_BUSY_PROCESSES = 20
BUSY_S = 50.0  # longer than an agent's loop may be blocked


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Run processes that compute all the time, with the same priority as the agents."""
    command = (sys.executable, "-c", "while True: pass")
    load = [subprocess.Popen(command) for _ in range(NUM_BUSY_PROCESSES)]
    try:
        yield
    finally:
        for process in load:
            process.kill()
        for process in load:
            process.wait()


@pytest.mark.timeout(400)
def test_nodes_on_a_busy_machine_stay_in_the_job(job: Job) -> None:
    # The lease is long, so that only a blocked loop could make a node leave.
    conf = ("--rdzv-conf", "keep_alive_interval=3,keep_alive_max_attempt=10")
    flags = ("--rdzv-backend=tcp", f"--rdzv-endpoint={job.start_store()}", "--nproc-per-node=2")
    nodes = [job.start_agent(name, "--nnodes=1:2", *flags, *conf) for name in "ab"]
    before = job.wait_for_world(4)
    with busy_machine():
        time.sleep(BUSY_S)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert not [node.name for node in nodes if "loop has been blocked" in node.text]
    assert generation_of(job.wait_for_world(4)) == generation_of(before)
