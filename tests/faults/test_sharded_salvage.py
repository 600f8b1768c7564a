"""Sharded state that was in memory alone is on the disk when a job has been told to leave, though
its script never saves: any number of ranks goes on from that very step."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import PROGRAMS, Job, Node, generation_of

from elasticlib import CheckpointManager
from elasticlib.checkpoint import snapshot_slots
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

LAUNCH = (sys.executable, "-m", "elasticlib.launch")
SOON = ("--checkpoint-grace", "1")  # the script does not save
WORKER = str(PROGRAMS / "fsdp_worker.py")
PATIENT = 110.0
"""Seconds for workers to import FSDP and meet, on a machine that has much else to do."""


def permit(job: Job, step: int) -> None:
    (job.folder / "permit.part").write_text(str(step))
    (job.folder / "permit.part").rename(job.folder / "permit")


def kept(job: Job, step: int, world: int) -> str:
    """The digest of the state of a step, once all ranks have kept their part of it."""
    files = [job.folder / f"kept.{step}.{rank}" for rank in range(world)]
    wait_until(f"step {step}", lambda: all(file.exists() for file in files), PATIENT)
    (digest,) = {json.loads(file.read_text()) for file in files}
    return str(digest)


def two_nodes(job: Job, *flags: str) -> tuple[dict[str, Node], list[dict[str, Any]]]:
    """Of two workers each, which have kept step 3."""
    permit(job, 3)
    meet = ("--rdzv-endpoint", job.start_store(), "--rdzv-id", "first")
    place = ("--nproc-per-node", "2", *meet, *SOON, *flags)
    nodes = {n: job.start(n, *LAUNCH, *place, WORKER, str(job.folder)) for n in "ab"}
    return nodes, job.wait_for_world(4, seconds=PATIENT)


def goes_on(job: Job, step: int, digest: str) -> None:
    """Another launch, of three ranks, begins with this state."""
    for file in job.folder.glob("report.*.json"):
        file.unlink()
    flags = ("--standalone", "--nproc-per-node", "3")
    node = job.start("again", *LAUNCH, *flags, WORKER, str(job.folder))
    reports = job.wait_for_world(3, seconds=PATIENT)
    assert {report["restored"] for report in reports} == {step}
    assert {report["source"] for report in reports} == {"disk"}
    assert {report["digest"] for report in reports} == {digest}
    job.finish()
    assert node.exit_code(PATIENT) == 0


@pytest.mark.timeout(300)
def test_a_job_of_two_nodes_that_is_told_to_end_leaves_its_last_step_on_the_disk(job: Job) -> None:
    nodes, _ = two_nodes(job, "--nnodes", "2")
    digest = kept(job, 3, world=4)
    for node in nodes.values():
        node.signal(signal.SIGTERM)
    for node in nodes.values():
        assert node.exit_code(PATIENT) == 75
        assert "was not written" not in node.text, node.text
    manager = CheckpointManager(job.folder / "checkpoints")
    assert (manager.steps(), manager.verify()) == ([3], {})
    goes_on(job, 3, digest)


@pytest.mark.timeout(300)
def test_what_a_killed_node_had_given_away_is_written_by_those_that_have_it(job: Job) -> None:
    nodes, reports = two_nodes(job, "--nnodes", "2", "--snapshot-replicas", "1")
    digest = kept(job, 3, world=4)
    stays, goes = reports[0], reports[2]
    wait_until("replicas", holds(stays["memory"], step=3, owner="1", parts={2, 3}))
    nodes[goes["node"]].signal(signal.SIGSTOP)  # it is not to see that its workers are gone
    for report in reports[2:]:
        os.kill(report["pid"], signal.SIGKILL)
    nodes[goes["node"]].kill()
    survivor = nodes[stays["node"]]
    survivor.signal(signal.SIGTERM)
    # By then it may have missed the other node, and ended its workers.
    assert survivor.exit_code(PATIENT) in (75, 143)
    assert CheckpointManager(job.folder / "checkpoints").steps() == [3], survivor.text
    goes_on(job, 3, digest)


def holds(folder: str, step: int, owner: str, parts: set[int]) -> Callable[[], bool]:
    """Whether an agent's memory has these parts of a step from `owner`."""

    def look() -> bool:
        found = [one for one in snapshot_slots.list_snapshots(Path(folder)) if one.owner == owner]
        return parts <= {one.header.part for one in found if one.header.step == step}

    return look


@pytest.mark.timeout(300)
def test_a_node_that_drains_alone_and_those_that_stay_write_its_last_step_together(
    job: Job,
) -> None:
    flags = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=60")
    nodes, reports = two_nodes(job, *flags)
    digest = kept(job, 3, world=4)
    goes = nodes[reports[2]["node"]]
    goes.signal(signal.SIGTERM)
    assert goes.exit_code(PATIENT) == 75
    assert "was not written" not in goes.text, goes.text
    after = job.wait_for_world(2, after=generation_of(reports), seconds=PATIENT)
    assert {report["restored"] for report in after} == {3}
    assert {report["digest"] for report in after} == {digest}
    job.finish()
    assert nodes[reports[0]["node"]].exit_code(PATIENT) == 0
