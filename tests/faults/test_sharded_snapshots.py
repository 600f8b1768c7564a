"""An FSDP2 job grows and shrinks while its nodes are killed, and goes on from memory alone: its
folder of checkpoints is empty all the time, and no step is lost that was committed."""

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
BOUND = 120.0

Reports = list[dict[str, Any]]


class Resizing:
    """A job whose nodes have a worker each."""

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
            call = (*self.flags, "--rdzv-conf", "last_call_timeout=2", PROGRAM)
            command = (sys.executable, "-m", "elasticlib.launch", *call, str(self.job.folder))
            self.nodes[name] = self.job.start(name, *command)

    def permit(self, step: int) -> None:
        aside = self.job.folder / "permit.part"
        aside.write_text(str(step))
        aside.rename(self.job.folder / "permit")

    def wait_for_world(self, world: int, after: int = 0) -> Reports:
        return self.job.wait_for_world(world, after=after, seconds=BOUND)

    def commit(self, step: int, reports: Reports) -> str:
        """Train up to this step, until it is committed; the sum of the whole state."""
        self.permit(step)
        self.is_kept(step, reports)
        path = self.job.folder / f"bits.{generation_of(reports)}.{step}"
        return str(json.loads(path.read_text()))

    def is_kept(self, step: int, reports: Reports) -> None:
        """Wait until each part of this step lies on as many nodes as there are to be."""
        world = len(reports)
        copies = min(REPLICAS + 1, world)

        def is_committed() -> bool:
            held = [part for report in reports for part in parts_of(report["memory"], step, world)]
            return all(held.count(part) >= copies for part in range(world))

        wait_until(f"step {step} on {copies} nodes each", is_committed, BOUND)

    def kill(self, reports: Reports) -> None:
        """These nodes, worker and agent at one moment."""
        for report in reports:
            self.nodes[report["node"]].signal(signal.SIGSTOP)
        for report in reports:
            os.kill(report["pid"], signal.SIGKILL)
            self.nodes[report["node"]].kill()


def parts_of(folder: str, step: int, parts: int) -> set[int]:
    """The parts of a step, cut up for so many ranks, that an agent's memory has."""
    found = (one.header for one in snapshot_slots.list_snapshots(folder))
    return {one.part for one in found if (one.step, one.parts, one.sharded) == (step, parts, True)}


def check(reports: Reports, step: int, whole: str) -> None:
    """All have gone on from this step, with these bits."""
    assert {report["step"] for report in reports} == {step}, reports
    assert {report["bits"] for report in reports} == {whole}
    assert {report["source"] for report in reports} <= {"memory", "peer"}


@pytest.mark.timeout(600)
def test_fsdp2_goes_from_2_to_3_to_1_to_4_ranks_without_a_disk_and_loses_no_committed_step(
    job: Job,
) -> None:
    run = Resizing(job)
    run.start("a", "b")
    two = run.wait_for_world(2)
    whole = run.commit(5, two)
    # One more comes, and at the same time a worker is killed.
    run.start("c")
    os.kill(two[1]["pid"], signal.SIGKILL)
    three = run.wait_for_world(3, after=generation_of(two))
    check(three, 5, whole)
    whole = run.commit(9, three)
    stays = next(report for report in three if report["node"] == "a")
    run.kill([report for report in three if report is not stays])
    one = run.wait_for_world(1, after=generation_of(three))
    check(one, 9, whole)
    whole = run.commit(12, one)
    run.start("d", "e", "f")
    os.kill(one[0]["pid"], signal.SIGKILL)
    four = run.wait_for_world(4, after=generation_of(one))
    check(four, 12, whole)
    # Who had it all is lost before the next step: the others have their parts by then.
    run.is_kept(12, four)
    run.kill([report for report in four if report["node"] == "a"])
    others = run.wait_for_world(3, after=generation_of(four))
    check(others, 12, whole)
    whole = run.commit(15, others)
    kept = Path(job.folder, "no checkpoints").iterdir()
    assert not [path for path in kept if path.name.startswith("step")]
    job.finish()
    for name in "def":
        assert run.nodes[name].exit_code(BOUND) == 0
