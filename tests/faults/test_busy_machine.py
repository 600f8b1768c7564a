"""On a machine that is busy with other things no healthy node is taken for a stuck one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from jobs import Job, generation_of

pytestmark = [
    *(pytest.mark.faults, pytest.mark.release),
    # Whoever is that busy takes its time to begin, too.
    pytest.mark.timeout(600),
]

BUSY = 20
SECONDS = 50.0
"""More than an agent's loop may stand still."""


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """So many others want to run all the time, as eagerly as the agents do."""
    command = (sys.executable, "-c", "while True: pass")
    others = [subprocess.Popen(command) for _ in range(BUSY)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


@pytest.mark.timeout(400)
def test_nodes_on_a_busy_machine_keep_their_places(job: Job) -> None:
    # A lease that outlasts such a load, so that the loop alone is judged.
    conf = ("--rdzv-conf", "keep_alive_interval=3,keep_alive_max_attempt=10")
    place = ("--rdzv-backend=tcp", f"--rdzv-endpoint={job.start_store()}", "--nproc-per-node=2")
    nodes = [job.start_agent(name, "--nnodes=1:2", *place, *conf) for name in "ab"]
    before = job.wait_for_world(4)
    with busy_machine():
        threading.Event().wait(SECONDS)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert not [node.name for node in nodes if "gives up its place" in node.text]
    assert generation_of(job.wait_for_world(4)) == generation_of(before)
