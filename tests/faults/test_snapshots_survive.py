"""Snapshots of the last step survive killed workers and nodes, and are written at the end.

No file is left in shared memory.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import sys
from pathlib import Path

import pytest
from hosts import Cluster, Host
from jobs import PROGRAMS, Job, Node, generation_of, is_alive, owner_of

from elasticlib import CheckpointManager
from elasticlib.checkpoint import snapshot_slots
from elasticlib.dir_lock import is_locked
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

LAUNCH = (sys.executable, "-m", "elasticlib.launch")
WORKER = str(PROGRAMS / "snapshot_worker.py")
WORKER_PARTS = ("parts", "paced")
QUICK = ("--monitor-interval", "0.02")


def start_node(job: Job, name: str, *flags: str, worker: tuple[str, ...]) -> Node:
    return job.start(name, *LAUNCH, *QUICK, *flags, WORKER, str(job.folder), *worker)


def read_progress(job: Job, rank: int = 0) -> tuple[int, int]:
    """Return the steps of the last snapshot that this rank has started and has completed."""
    data = (job.folder / "ranks.progress").read_bytes()
    started, completed = struct.unpack_from("qq", data, 16 * rank)
    return started, completed


def permit(job: Job, step: int) -> None:
    """Let the workers make steps up to this one."""
    (job.folder / "permit.part").write_text(str(step))
    (job.folder / "permit.part").rename(job.folder / "permit")


def test_a_worker_killed_during_a_snapshot_leaves_the_last_complete_one_for_a_drain(
    job: Job, kills: int
) -> None:
    flags = ("--standalone", "--max-restarts", "1000")
    agent = start_node(job, "a", *flags, worker=("size", str(1 << 21)))
    generation, num_incomplete, started, completed = 0, 0, 0, 0
    for _ in range(kills):
        (report,) = job.wait_for_world(1, after=generation)
        assert report["wrong"] == []
        newest = report["snapshots"][0][0] if report["snapshots"] else 0
        assert newest in {started, completed}, "a step was lost"
        generation, before = generation_of([report]), completed
        wait_until("two more snapshots", lambda before=before: read_progress(job)[1] >= before + 2)
        wait_until("an incomplete snapshot", lambda: read_progress(job)[0] > read_progress(job)[1])
        os.kill(report["pid"], signal.SIGKILL)
        wait_until("the worker to exit", lambda pid=report["pid"]: not is_alive(pid))
        started, completed = read_progress(job)
        num_incomplete += started > completed
    assert num_incomplete > kills // 2, "most workers were not killed during a snapshot"
    (report,) = job.wait_for_world(1, after=generation)
    wait_until("a step", lambda: read_progress(job)[1] > completed)
    agent.signal(signal.SIGUSR2)
    assert agent.exit_code() == 75
    started, completed = read_progress(job)
    manager = CheckpointManager(job.folder / "disk")
    (written,) = manager.steps()
    assert written in {started, completed}
    agent.wait_for_log(f"last checkpoint: step {written}")
    state = manager.load()
    assert (state["step"], set(state["numbers"].tolist())) == (written, {float(written)})
    assert len(state["numbers"]) == 1 << 21
    assert not Path(report["memory"]).exists()


def test_the_third_sigint_gives_up_a_final_write_that_waits_for_another_node(job: Job) -> None:
    permit(job, 5)
    flags = ("--nnodes", "2", "--rdzv-endpoint", job.start_store())
    # No lease expires, so that the stopped node counts as one that may still report its parts.
    flags = (*flags, "--rdzv-conf", "keep_alive_max_attempt=1000")
    nodes = {name: start_node(job, name, *flags, worker=WORKER_PARTS) for name in "ab"}
    job.wait_for_world(2)
    wait_until("step 5", lambda: [read_progress(job, rank)[1] for rank in (0, 1)] == [5, 5])
    nodes["b"].signal(signal.SIGSTOP)
    nodes["a"].signal(signal.SIGTERM)
    nodes["a"].wait_for_log("still writing the last snapshots, .*; the third SIGINT gives them up")
    nodes["a"].signal(signal.SIGTERM)
    for left in (2, 1):
        nodes["a"].signal(signal.SIGINT)
        nodes["a"].wait_for_log(
            f"SIGINT: the final write of snapshots continues; {left} more will end it"
        )
    assert nodes["a"].process.poll() is None
    nodes["a"].signal(signal.SIGINT)
    assert nodes["a"].exit_code() == 128 + signal.SIGTERM
    last_line = nodes["a"].text.splitlines()[-1]
    assert re.search(
        "STOPPED: received SIGTERM; the snapshot of step 5 was not written to .*disk: "
        "the final write of snapshots was given up at SIGINT number 3",
        last_line,
    )
    nodes["b"].kill()


def has_parts(folder: str, step: int, owner: str, parts: set[int]) -> bool:
    """Return True if an agent's memory has these parts of a step from `owner`."""
    snapshots = snapshot_slots.list_snapshots(folder)
    selected = [one for one in snapshots if (one.step, owner_of(one)) == (step, owner)]
    return parts <= {one.part for one in selected}


def test_the_last_snapshot_of_a_killed_node_survives_on_its_peer_and_its_memory_is_removed(
    job: Job,
) -> None:
    permit(job, 5)
    meet = ("--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-endpoint", job.start_store())
    # Both nodes must be in the first generation: a single one would make all permitted steps.
    flags = (*meet, "--rdzv-conf", "last_call_timeout=60", "--snapshot-replicas", "1")
    nodes = {name: start_node(job, name, *flags, worker=WORKER_PARTS) for name in "ab"}
    reports = job.wait_for_world(4)
    remaining, lost = reports[0], reports[2]
    wait_until("replicas", lambda: has_parts(remaining["memory"], 5, "1", {2, 3}))
    wait_until("replicas", lambda: has_parts(lost["memory"], 5, "0", {0, 1}))
    # The workers are killed, perhaps during the next snapshot. The agent is stopped before, so that
    # it does not detect this, and is killed then.
    permit(job, 6)
    nodes[lost["node"]].signal(signal.SIGSTOP)
    for report in reports[2:]:
        os.kill(report["pid"], signal.SIGKILL)
    nodes[lost["node"]].kill()
    restarted = job.wait_for_world(2, after=generation_of(reports))
    assert {report["node"] for report in restarted} == {remaining["node"]}
    for report in restarted:
        assert report["wrong"] == []
        parts_by_step: dict[int, set[int]] = {}
        for step, part, parts in report["snapshots"]:
            assert parts == 4
            parts_by_step.setdefault(step, set()).add(part)
        newest = max(step for step, parts in parts_by_step.items() if parts == {0, 1, 2, 3})
        assert newest in (5, 6)
    wait_until(
        "the memory of the killed node to be removed", lambda: not Path(lost["memory"]).exists()
    )
    # Once the smaller world has snapshots of its own, those of the larger world are removed.
    permit(job, 9)
    wait_until("step 9", lambda: [read_progress(job, rank)[1] for rank in (0, 1)] == [9, 9])
    assert {
        snapshot_slots.era_of(one) for one in snapshot_slots.list_snapshots(remaining["memory"])
    } == {1}
    assert {one.parts for one in snapshot_slots.list_snapshots(remaining["memory"])} == {2}
    (job.folder / "disk").touch()  # a file in place of the directory
    survivor = nodes[remaining["node"]]
    survivor.signal(signal.SIGUSR2)
    assert survivor.exit_code() == 75
    survivor.wait_for_log(
        r"DRAINED: received SIGUSR2; the snapshot of step 9 was not written to .*disk"
    )
    assert not Path(remaining["memory"]).exists()


def test_the_last_snapshot_of_a_lost_rack_survives_in_another_rack(job: Job) -> None:
    permit(job, 5)
    meet = ("--nnodes", "2:4", "--rdzv-endpoint", job.start_store())
    flags = (*meet, "--rdzv-conf", "last_call_timeout=60", "--snapshot-replicas", "1")
    nodes = {
        name: start_node(
            job, name, *flags, "--topology", f"rack{name in 'cd'}", worker=WORKER_PARTS
        )
        for name in "abcd"
    }
    reports = job.wait_for_world(4)
    racks = [{report["node"] for report in half} for half in (reports[:2], reports[2:])]
    assert sorted(map(sorted, racks)) == [["a", "b"], ["c", "d"]]
    lost, remaining = reports[:2], reports[2:]
    for report, owner in zip(remaining, "01", strict=True):
        wait_until("a replica", lambda r=report, o=owner: has_parts(r["memory"], 5, o, {int(o)}))
    for report in lost:
        nodes[report["node"]].signal(signal.SIGSTOP)
    for report in lost:
        os.kill(report["pid"], signal.SIGKILL)
        nodes[report["node"]].kill()
    restarted = job.wait_for_world(2, after=generation_of(reports))
    assert [report["wrong"] for report in restarted] == [[], []]
    left = [one for report in restarted for one in report["snapshots"]]
    assert {part for step, part, _ in left if step == 5} == {0, 1, 2, 3}
    job.finish()
    assert [nodes[report["node"]].exit_code() for report in restarted] == [0, 0]


def start_container(host: Host, job: Job, name: str) -> Node:
    """Start a job of one node in a PID namespace of its own, which shares `/dev/shm` of the host.

    Its worker takes three snapshots, and waits for a file with the name `finish`. If the process of
    the node is killed, the kernel kills all processes of the namespace with it.
    """
    enter = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    folder = job.folder / name
    folder.mkdir()
    (folder / "permit").write_text("3")
    agent = (*LAUNCH, *QUICK, "--standalone", WORKER, str(folder), "paced")
    return host.start(name, *enter, *agent)


def snapshot_dir_of(job: Job, name: str) -> Path:
    """Return the directory of snapshots on the host that the worker of a container has reported."""

    def find_report() -> list[Path]:
        return list((job.folder / name).glob("report.*.json"))

    (report,) = wait_until("a report", find_report, details=lambda: job.logs)
    return Path(json.loads(report.read_text())["memory"])


def test_a_node_removes_what_a_killed_one_has_left_and_nothing_of_a_running_one(
    cluster: Cluster, job: Job
) -> None:
    host = cluster.add_host()
    shared = Path(f"/proc/{host.namespaces.pid}/root")
    nodes, memory = {}, {}
    for name in ("running", "killed"):
        nodes[name] = start_container(host, job, name)
        memory[name] = shared / snapshot_dir_of(job, name).relative_to("/")
        wait_until("a snapshot", lambda name=name: snapshot_slots.list_snapshots(memory[name]))
    nodes["killed"].kill()
    wait_until("its processes to end", lambda: not is_locked(memory["killed"]))
    assert snapshot_slots.list_snapshots(memory["killed"])
    nodes["later"] = start_container(host, job, "later")
    left = memory.pop("killed").name
    nodes["later"].wait_for_log(rf"removed .* that killed agents have left: .*{left}")
    memory["later"] = shared / snapshot_dir_of(job, "later").relative_to("/")
    assert set((shared / "dev/shm").iterdir()) == set(memory.values())
    assert snapshot_slots.list_snapshots(memory["running"])
    for name in memory:
        (job.folder / name / "finish").touch()
        assert nodes[name].exit_code() == 0
    assert not list((shared / "dev/shm").iterdir())
