"""Nodes write sharded snapshots to the disk when they leave, although the script never saves.

Any number of ranks can continue from that step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import PROGRAMS, Job, Node, generation_of, owner_of

from elasticlib import CheckpointManager
from elasticlib.checkpoint import snapshot_slots
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

LAUNCH = (sys.executable, "-m", "elasticlib.launch")
SHORT_GRACE = ("--checkpoint-grace", "1")  # the script does not save
WORKER = str(PROGRAMS / "fsdp_worker.py")
START_TIMEOUT_S = 110.0  # workers import FSDP and form a group, on a busy machine


def permit(job: Job, step: int) -> None:
    """Let the workers make steps up to this one."""
    (job.folder / "permit.part").write_text(str(step))
    (job.folder / "permit.part").rename(job.folder / "permit")


def wait_for_snapshots(job: Job, step: int, world: int) -> str:
    """Wait until all ranks have a snapshot of a step, and return the digest of its state."""
    files = [job.folder / f"snapshot.{step}.{rank}" for rank in range(world)]
    wait_until(f"step {step}", lambda: all(file.exists() for file in files), START_TIMEOUT_S)
    (digest,) = {json.loads(file.read_text()) for file in files}
    return str(digest)


def start_two_nodes(job: Job, *flags: str) -> tuple[dict[str, Node], list[dict[str, Any]]]:
    """Start two nodes with two workers each; return the nodes and the reports of the workers.

    The workers make three steps.
    """
    permit(job, 3)
    meet = ("--rdzv-endpoint", job.start_store(), "--rdzv-id", "first")
    flags = ("--nproc-per-node", "2", *meet, *SHORT_GRACE, *flags)
    command = (*LAUNCH, *flags, WORKER, str(job.folder))
    nodes = {name: job.start(name, *command) for name in "ab"}
    return nodes, job.wait_for_world(4, seconds=START_TIMEOUT_S)


def check_restore_on_three_ranks(job: Job, step: int, digest: str) -> None:
    """Check that another launch with three ranks restores this state from the disk."""
    for file in job.folder.glob("report.*.json"):
        file.unlink()
    flags = ("--standalone", "--nproc-per-node", "3")
    node = job.start("again", *LAUNCH, *flags, WORKER, str(job.folder))
    reports = job.wait_for_world(3, seconds=START_TIMEOUT_S)
    assert {report["restored"] for report in reports} == {step}
    assert {report["source"] for report in reports} == {"disk"}
    assert {report["digest"] for report in reports} == {digest}
    job.finish()
    assert node.exit_code(START_TIMEOUT_S) == 0


@pytest.mark.timeout(300)
def test_two_nodes_that_get_sigterm_write_their_last_step_to_the_disk(job: Job) -> None:
    nodes, _ = start_two_nodes(job, "--nnodes", "2")
    digest = wait_for_snapshots(job, 3, world=4)
    for node in nodes.values():
        node.signal(signal.SIGTERM)
    for node in nodes.values():
        assert node.exit_code(START_TIMEOUT_S) == 75
        assert "was not written" not in node.text, node.text
    manager = CheckpointManager(job.folder / "checkpoints")
    assert (manager.steps(), manager.verify()) == ([3], {})
    check_restore_on_three_ranks(job, 3, digest)


@pytest.mark.timeout(300)
def test_replicas_of_a_killed_node_are_written_by_the_surviving_node(job: Job) -> None:
    nodes, reports = start_two_nodes(job, "--nnodes", "2", "--snapshot-replicas", "1")
    digest = wait_for_snapshots(job, 3, world=4)
    remaining, lost = reports[0], reports[2]
    wait_until("replicas", lambda: has_parts(remaining["memory"], 3, "1", {2, 3}))
    nodes[lost["node"]].signal(signal.SIGSTOP)  # so that it does not detect the loss of its workers
    for report in reports[2:]:
        os.kill(report["pid"], signal.SIGKILL)
    nodes[lost["node"]].kill()
    survivor = nodes[remaining["node"]]
    survivor.signal(signal.SIGTERM)
    # The node may already have detected the loss of the other one, and stopped its workers.
    assert survivor.exit_code(START_TIMEOUT_S) in (75, 143)
    assert CheckpointManager(job.folder / "checkpoints").steps() == [3], survivor.text
    check_restore_on_three_ranks(job, 3, digest)


def has_parts(folder: str, step: int, owner: str, parts: set[int]) -> bool:
    """Return True if an agent's memory has these parts of a step from `owner`."""
    snapshots = [
        one for one in snapshot_slots.list_snapshots(Path(folder)) if owner_of(one) == owner
    ]
    return parts <= {one.part for one in snapshots if one.step == step}


@pytest.mark.timeout(300)
def test_a_node_that_drains_and_the_other_nodes_write_its_last_step_together(
    job: Job,
) -> None:
    flags = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=60")
    nodes, reports = start_two_nodes(job, *flags)
    digest = wait_for_snapshots(job, 3, world=4)
    leaving = nodes[reports[2]["node"]]
    leaving.signal(signal.SIGTERM)
    assert leaving.exit_code(START_TIMEOUT_S) == 75
    assert "was not written" not in leaving.text, leaving.text
    after = job.wait_for_world(2, after=generation_of(reports), seconds=START_TIMEOUT_S)
    assert {report["restored"] for report in after} == {3}
    assert {report["digest"] for report in after} == {digest}
    job.finish()
    assert nodes[reports[0]["node"]].exit_code(START_TIMEOUT_S) == 0
