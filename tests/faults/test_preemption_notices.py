"""Notices that machines will be taken away: their nodes leave in time, and a spare takes over.

Each of the hosts has a metadata service at the address that clouds use.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from context_steps import check_no_step_is_lost, read_stop_request, wait_for_steps
from hosts import Cluster, Host
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node, check_consistent_world, generation_of

from elasticlib import CheckpointManager
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

CONTEXT = str(PROGRAMS / "context_worker.py")
SAVING = str(PROGRAMS / "saving_worker.py")
NOTICE_AGENT = str(PROGRAMS / "notice_agent.py")
METADATA = str(Path(__file__).parent.parent / "metadata_server.py")
SERVICE_ADDRESS = "169.254.169.254"
TIME_LEFT_S = 30.0
LEASE = ("--rdzv-conf", "last_call_timeout=0.3")


def notice_folder(host: Host, job: Job) -> Path:
    return job.folder / f"metadata.{host}"


def start_service(host: Host, job: Job, kind: str) -> None:
    """Serve a cloud's metadata at its usual address, to this host only."""
    folder = notice_folder(host, job)
    folder.mkdir()
    host.namespaces.ip(f"address add {SERVICE_ADDRESS}/32 dev lo", "link set lo up")
    arguments = (kind, SERVICE_ADDRESS, "80", str(folder), str(TIME_LEFT_S))
    host.start(f"metadata-{host}", sys.executable, METADATA, *arguments)
    wait_until("the service", (folder / "ready").exists)


def start_node(cluster: Cluster, host: Host, flags: tuple[str, ...], source: str) -> Node:
    """Start an agent of the job whose workers poll `should_stop` at each step."""
    job = cluster.job
    if source == "file":
        notice_folder(host, job).mkdir()
        source = f"file:{notice_folder(host, job)}/notice"
    else:
        start_service(host, job, source)
    notice = ("--preemption-notice", "auto" if source == "gcp" else source)
    command = job.agent_command(*flags, *notice, program=CONTEXT)
    return host.start(host.name, *command, PYTHONPATH=WITHOUT_TORCH)


@pytest.mark.parametrize("source", ["aws", "gcp", "azure", "file"])
def test_a_node_with_a_notice_leaves_in_time_and_a_spare_replaces_it(
    cluster: Cluster, source: str
) -> None:
    job = cluster.job
    flags = (*cluster.start_rendezvous("tcp"), *LEASE, "--nnodes", "1:3")
    hosts = cluster.add_hosts(4)
    nodes = {host.name: start_node(cluster, host, flags, source) for host in hosts[:3]}
    before = job.wait_for_world(3)
    nodes[hosts[3].name] = start_node(cluster, hosts[3], flags, source)
    nodes[hosts[3].name].wait_for_log("waiting|standby|spare")
    wait_for_steps(job)
    leaving = before[-1]["node"]
    (notice_folder(cluster.hosts[leaving], job) / "notice").touch()
    assert nodes.pop(leaving).exit_code(TIME_LEFT_S) == 75
    after = job.wait_for_world(3, after=generation_of(before))
    check_consistent_world(after)
    assert hosts[3].name in {report["node"] for report in after}
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
    assert read_stop_request(job, before)["reason"] == "preempted"
    wait_for_steps(job)
    job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0, 0, 0], job.logs
    check_no_step_is_lost(job)


LONG_SAVE = """
import sys, time
from pathlib import Path
import torch
from elasticlib import CheckpointManager, context

folder = Path(sys.argv[1])
state = {"numbers": torch.zeros(4)}
with CheckpointManager(folder / "checkpoints") as manager:
    step = manager.restore(state).step
    (folder / f"resumed.{step}").touch()
    while True:
        step += 1
        state["numbers"].fill_(step)
        manager.snapshot(step, state)
        context().step(step)
        (folder / "last").write_text(str(step))
        if context().should_stop():
            (folder / f"saving.{step}").touch()
            time.sleep(600)
        time.sleep(0.01)
"""


def test_a_notice_with_less_time_than_a_save_takes_is_met_from_the_snapshots(job: Job) -> None:
    script, notice = job.folder / "long_save.py", job.folder / "notice"
    script.write_text(LONG_SAVE)
    flags = ("--standalone", "--checkpoint-grace", "600", f"--preemption-notice=file:{notice}")
    command = job.agent_command(*flags, program=str(script))
    node = job.start("one", *command)
    wait_until("a step", (job.folder / "last").exists)
    part = job.folder / "notice.part"
    part.write_text('{"reason": "spot price", "deadline_s": 4}')
    part.rename(notice)
    assert node.exit_code() == 75
    node.wait_for_log(r"preempted: the workers have (2\.\d+|3) s to save and exit")
    node.wait_for_log(r"DRAINED: received a preemption notice \(file: spot price, 4 s left\)")
    (saved,) = CheckpointManager(job.folder / "checkpoints").steps()
    (stopped,) = job.folder.glob("saving.*")
    assert saved == int(stopped.suffix[1:])


def test_a_notice_during_a_save_shortens_it_to_the_deadline(job: Job) -> None:
    notice = job.folder / "notice"
    flags = ("--standalone", "--checkpoint-grace", "600", "--shutdown-timeout", "600")
    command = (sys.executable, NOTICE_AGENT, *flags, f"--preemption-notice=file:{notice}")
    node = job.start("a", *command, SAVING, str(job.folder), "0", PYTHONPATH=WITHOUT_TORCH)
    job.wait_for_world(1)
    (job.folder / "hold.0").touch()
    node.signal(signal.SIGUSR2)
    node.wait_for_log("drain: the workers have 600 s to save")
    part = job.folder / "notice.part"
    part.write_text('{"deadline_s": 2}')
    part.rename(notice)
    assert node.exit_code() == 75
    assert "killing: pid" in node.text


def test_a_notice_without_time_to_save_does_not_delay_the_other_nodes(job: Job) -> None:
    """The other node would wait in `should_stop` for longer than this test."""
    flags = (*LEASE, "--nnodes", "1:2", "--rdzv-endpoint", job.start_store())
    flags = (*flags, "--checkpoint-grace", "600")
    nodes = {}
    for name in "ab":
        notice = f"--preemption-notice=file:{job.folder / name}.notice"
        command = job.agent_command(*flags, notice, program=CONTEXT)
        nodes[name] = job.start(name, *command, PYTHONPATH=WITHOUT_TORCH)
    before = job.wait_for_world(2)
    wait_for_steps(job)
    leaving = before[-1]["node"]
    part = job.folder / "notice.part"
    part.write_text('{"deadline_s": 0}')
    part.rename(job.folder / f"{leaving}.notice")
    assert nodes.pop(leaving).exit_code() == 75
    (after,) = job.wait_for_world(1, after=generation_of(before))
    assert after["TORCHELASTIC_RESTART_COUNT"] == "0"
    job.finish()
    (other,) = nodes.values()
    assert other.exit_code() == 0, job.logs


def test_a_node_that_waits_for_others_leaves_at_a_notice(job: Job) -> None:
    notice = job.folder / "notice"
    flags = ("--nnodes", "2", "--rdzv-endpoint", job.start_store(), "--rdzv-id", "job")
    command = job.agent_command(*flags, f"--preemption-notice=file:{notice}", program=CONTEXT)
    node = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    node.wait_for_log("waiting: 1 of at least 2")
    notice.touch()
    assert node.exit_code() == 75


def test_a_notice_while_the_node_recovers_from_a_failure_is_a_drain(job: Job) -> None:
    notice = job.folder / "notice"
    flags = ("--standalone", "--max-restarts", "9", f"--preemption-notice=file:{notice}")
    script = job.folder / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    node = job.start("a", *job.agent_command(*flags, program=str(script)))
    node.wait_for_log(r"delayed by 5 s")
    notice.touch()
    assert node.exit_code() == 75
