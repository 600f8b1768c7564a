"""Workers and nodes are killed, and the snapshots of their last steps are found: in memory, and on
the disk when the job ends; and nothing is left of them in shared memory."""

from __future__ import annotations

import os
import signal
import struct
import sys
from pathlib import Path

import pytest
from jobs import PROGRAMS, Job, Node, generation_of, is_alive

from elasticlib import CheckpointManager
from elasticlib.checkpoint import snapshot_slots
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

LAUNCH = (sys.executable, "-m", "elasticlib.launch")
WORKER = str(PROGRAMS / "snapshot_worker.py")
QUICK = ("--monitor-interval", "0.02")


def run(job: Job, name: str, *flags: str, worker: tuple[str, ...]) -> Node:
    return job.start(name, *LAUNCH, *QUICK, *flags, WORKER, str(job.folder), *worker)


def progress(job: Job, rank: int = 0) -> tuple[int, int]:
    """The last step that this rank has begun to snapshot, and the last that is done."""
    data = (job.folder / "ranks.progress").read_bytes()
    begun, done = struct.unpack_from("qq", data, 16 * rank)
    return begun, done


def permit(job: Job, step: int) -> None:
    (job.folder / "permit.part").write_text(str(step))
    (job.folder / "permit.part").rename(job.folder / "permit")


def test_a_worker_killed_while_it_snapshots_leaves_the_last_whole_one_and_a_drain_writes_it(
    job: Job, kills: int
) -> None:
    flags = ("--standalone", "--max-restarts", "1000")
    agent = run(job, "a", *flags, worker=("size", str(1 << 21)))
    generation, halves, begun, done = 0, 0, 0, 0
    for _ in range(kills):
        (report,) = job.wait_for_world(1, after=generation)
        assert report["wrong"] == []
        assert (report["held"][0][0] if report["held"] else 0) in {begun, done}, "a step was lost"
        generation, before = generation_of([report]), done
        wait_until("two more", lambda before=before: progress(job)[1] >= before + 2)
        wait_until("one begun", lambda: progress(job)[0] > progress(job)[1])
        os.kill(report["pid"], signal.SIGKILL)
        wait_until("its end", lambda pid=report["pid"]: not is_alive(pid))
        begun, done = progress(job)
        halves += begun > done
    assert halves > kills // 2, "they were to be killed in the middle"
    (report,) = job.wait_for_world(1, after=generation)
    wait_until("a step", lambda: progress(job)[1] > done)
    agent.signal(signal.SIGUSR2)
    assert agent.exit_code() == 75
    begun, done = progress(job)
    manager = CheckpointManager(job.folder / "disk")
    (written,) = manager.steps()
    assert written in {begun, done}
    agent.wait_for_log(f"last checkpoint: step {written}")
    state = manager.load()
    assert (state["step"], set(state["numbers"].tolist())) == (written, {float(written)})
    assert len(state["numbers"]) == 1 << 21
    assert not Path(report["memory"]).exists()


def test_a_second_sigterm_gives_up_a_final_write_that_waits_for_another_node(job: Job) -> None:
    permit(job, 5)
    flags = ("--nnodes", "2", "--rdzv-endpoint", job.start_store())
    # No lease ends: the stopped node counts as one that may still say which parts it has.
    flags = (*flags, "--rdzv-conf", "keep_alive_max_attempt=1000")
    nodes = {name: run(job, name, *flags, worker=("parts", "paced")) for name in "ab"}
    job.wait_for_world(2)
    wait_until("step 5", lambda: [progress(job, rank)[1] for rank in (0, 1)] == [5, 5])
    nodes["b"].signal(signal.SIGSTOP)
    nodes["a"].signal(signal.SIGTERM)
    nodes["a"].wait_for_log("still writing the last snapshots, .*; a further SIGTERM gives them up")
    assert nodes["a"].process.poll() is None
    nodes["a"].signal(signal.SIGTERM)
    assert nodes["a"].exit_code(20.0) == 128 + signal.SIGTERM
    nodes["a"].wait_for_log(
        "the snapshot of step 5 was not written to .*disk: the agent received SIGTERM again during "
        "the final write"
    )
    nodes["b"].kill()


def held_by(folder: str, step: int, owner: str, parts: set[int]) -> bool:
    """Whether an agent's memory has these parts of a step from `owner`."""
    found = snapshot_slots.list_snapshots(folder)
    return parts <= {o.header.part for o in found if (o.header.step, o.owner) == (step, owner)}


def test_a_node_that_is_killed_leaves_its_last_snapshot_with_its_buddy_and_nothing_in_memory(
    job: Job,
) -> None:
    permit(job, 5)
    meet = ("--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-endpoint", job.start_store())
    # Both begin together: who began alone would come to step 5 as well, and be held there.
    flags = (*meet, "--rdzv-conf", "last_call_timeout=60", "--snapshot-replicas", "1")
    nodes = {name: run(job, name, *flags, worker=("parts", "paced")) for name in "ab"}
    reports = job.wait_for_world(4)
    stays, goes = reports[0], reports[2]
    wait_until("replicas", lambda: held_by(stays["memory"], 5, "1", {2, 3}))
    wait_until("replicas", lambda: held_by(goes["memory"], 5, "0", {0, 1}))
    # In the middle of the next one, perhaps, its workers and then the agent, which is not to see
    # that they are gone.
    permit(job, 6)
    nodes[goes["node"]].signal(signal.SIGSTOP)
    for report in reports[2:]:
        os.kill(report["pid"], signal.SIGKILL)
    nodes[goes["node"]].kill()
    left = job.wait_for_world(2, after=generation_of(reports))
    assert {report["node"] for report in left} == {stays["node"]}
    for report in left:
        assert report["wrong"] == []
        of_step: dict[int, set[int]] = {}
        for step, part, parts in report["held"]:
            assert parts == 4
            of_step.setdefault(step, set()).add(part)
        newest = max(step for step, parts in of_step.items() if parts == {0, 1, 2, 3})
        assert newest in (5, 6)
    wait_until("the dead one's memory to be gone", lambda: not Path(goes["memory"]).exists())
    # The smaller world goes on, and when it stands on its own what the larger one left goes.
    permit(job, 9)
    wait_until("steps", lambda: [progress(job, rank)[1] for rank in (0, 1)] == [9, 9])
    assert {found.era for found in snapshot_slots.list_snapshots(stays["memory"])} == {1}
    assert {found.header.parts for found in snapshot_slots.list_snapshots(stays["memory"])} == {2}
    (job.folder / "disk").touch()  # where a folder is to be
    survivor = nodes[stays["node"]]
    survivor.signal(signal.SIGUSR2)
    assert survivor.exit_code() == 75
    survivor.wait_for_log(
        r"DRAINED: received SIGUSR2; the snapshot of step 9 was not written to .*disk"
    )
    assert not Path(stays["memory"]).exists()
