"""An FSDP2 job is resized while its nodes are killed, and restores its state only from memory.

Its directory of checkpoints stays empty, and no committed step is lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import PROGRAMS, Job, Node, generation_of

from elasticlib.checkpoint import snapshot_slots
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

PROGRAM = str(PROGRAMS / "sharded_training.py")
FLAGS = ("--nnodes", "1:4", "--max-restarts", "100")
REPLICAS = 2
TIMEOUT_S = 120.0

Reports = list[dict[str, Any]]


class ResizedJob:
    """A job whose nodes have one worker each."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.nodes: dict[str, Node] = {}
        self.flags = (
            *FLAGS,
            "--rdzv-endpoint",
            job.start_store(),
            "--snapshot-replicas",
            str(REPLICAS),
        )
        self.permit(0)

    def start(self, *names: str) -> None:
        for name in names:
            args = (*self.flags, "--rdzv-conf", "last_call_timeout=2", PROGRAM)
            command = (sys.executable, "-m", "elasticlib.launch", *args, str(self.job.folder))
            self.nodes[name] = self.job.start(name, *command)

    def permit(self, step: int) -> None:
        """Let the workers make steps up to this one."""
        temporary = self.job.folder / "permit.part"
        temporary.write_text(str(step))
        temporary.rename(self.job.folder / "permit")

    def wait_for_world(self, world: int, after: int = 0) -> Reports:
        return self.job.wait_for_world(world, after=after, seconds=TIMEOUT_S)

    def commit(self, step: int, reports: Reports) -> str:
        """Train up to this step, wait until it is committed, and return its checksum."""
        self.permit(step)
        self.wait_for_copies(step, reports)
        path = self.job.folder / f"bits.{generation_of(reports)}.{step}"
        return str(json.loads(path.read_text()))

    def wait_for_copies(self, step: int, reports: Reports) -> None:
        """Wait until each part of this step is on the configured number of nodes."""
        world = len(reports)
        copies = min(REPLICAS + 1, world)

        def is_committed() -> bool:
            parts = [part for one in reports for part in list_parts(one["memory"], step, world)]
            return all(parts.count(part) >= copies for part in range(world))

        wait_until(f"step {step} on {copies} nodes", is_committed, TIMEOUT_S)

    def kill(self, reports: Reports) -> None:
        """Kill the workers and the agents of these nodes."""
        for report in reports:
            self.nodes[report["node"]].signal(signal.SIGSTOP)
        for report in reports:
            os.kill(report["pid"], signal.SIGKILL)
            self.nodes[report["node"]].kill()


def list_parts(folder: str, step: int, parts: int) -> set[int]:
    """Return which of so many parts of a step an agent's memory has."""
    snapshots = snapshot_slots.list_snapshots(folder)
    return {one.part for one in snapshots if (one.step, one.parts) == (step, parts)}


def check_restored(reports: Reports, step: int, bits: str) -> None:
    """Check that all ranks have restored this step with these bits from memory."""
    assert {report["step"] for report in reports} == {step}, reports
    assert {report["bits"] for report in reports} == {bits}
    assert {report["source"] for report in reports} <= {"memory", "peer"}


@pytest.mark.timeout(600)
def test_fsdp2_resizes_from_2_to_3_to_1_to_4_ranks_without_a_disk_and_loses_no_step(
    job: Job,
) -> None:
    run = ResizedJob(job)
    run.start("a", "b")
    two = run.wait_for_world(2)
    bits = run.commit(5, two)
    # Another node joins while a worker is killed.
    run.start("c")
    os.kill(two[1]["pid"], signal.SIGKILL)
    three = run.wait_for_world(3, after=generation_of(two))
    check_restored(three, 5, bits)
    bits = run.commit(9, three)
    survivor = next(report for report in three if report["node"] == "a")
    run.kill([report for report in three if report is not survivor])
    one = run.wait_for_world(1, after=generation_of(three))
    check_restored(one, 9, bits)
    bits = run.commit(12, one)
    run.start("d", "e", "f")
    os.kill(one[0]["pid"], signal.SIGKILL)
    four = run.wait_for_world(4, after=generation_of(one))
    check_restored(four, 12, bits)
    # The node that had all parts is lost before the next step. By then the others have copies.
    run.wait_for_copies(12, four)
    run.kill([report for report in four if report["node"] == "a"])
    others = run.wait_for_world(3, after=generation_of(four))
    check_restored(others, 12, bits)
    bits = run.commit(15, others)
    files = Path(job.folder, "no checkpoints").iterdir()
    assert not [path for path in files if path.name.startswith("step")]
    job.finish()
    for name in "def":
        assert run.nodes[name].exit_code(TIMEOUT_S) == 0
