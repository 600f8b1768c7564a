"""Which rank and which host is named for a failure: only the one that failed by itself."""

from __future__ import annotations

import os
import re
import signal

import pytest
from hosts import Cluster
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

CONF = "keep_alive_interval=0.2,keep_alive_max_attempt=5,last_call_timeout=1"


def start_pair(job: Job, way: str, *flags: str) -> Node:
    """Start two workers on one node. Rank 1 ends in this way, and rank 0 waits for it."""
    flags = ("--standalone", "--nproc-per-node", "2", *flags)
    program = str(PROGRAMS / "gloo_victims.py")
    return job.start("a", *job.agent_command(*flags, program=program, worker=(way,)))


def read_root_cause(node: Node) -> str:
    """Return the last line, which names the root cause."""
    assert "elasticrun: root cause in" in node.text
    return node.text.splitlines()[-1]


def test_a_host_whose_collective_times_out_is_never_excluded(cluster: Cluster) -> None:
    hosts = cluster.add_hosts(3)
    common = (*cluster.start_rendezvous("tcp"), "--nnodes", "2:3", "--max-restarts", "3")
    program = str(PROGRAMS / "time_out_worker.py")
    flags = (*common, "--rdzv-conf", CONF, "--start-method", "spawn")
    command = cluster.job.agent_command(*flags, program=program, worker=("h1",))
    nodes = [host.start(host.name, *command, PYTHONPATH=WITHOUT_TORCH) for host in hosts]
    # The budget pays for the failures, and nobody is evicted when it is used up.
    assert [node.exit_code() for node in nodes] == [1, 1, 1]
    for node in nodes:
        assert not re.search("excluded|must leave|stays in the job", node.text), node.text
        assert "3 of 3 restarts used" in node.text.splitlines()[-1]
        assert "Timed out waiting" in read_root_cause(node)


def test_a_worker_that_aborts_is_the_root_cause_of_the_errors_of_its_peers(job: Job) -> None:
    node = start_pair(job, "abort")
    assert node.exit_code() == 1
    assert re.search("worker of rank 1 .* was killed by SIGABRT", read_root_cause(node))


def test_a_worker_that_gets_a_signal_is_the_root_cause_of_the_errors_of_its_peers(
    job: Job,
) -> None:
    node = start_pair(job, "pause")
    wait_until("rank 1 to write its pid", (job.folder / "pid").exists)
    os.kill(int((job.folder / "pid").read_text()), signal.SIGTERM)
    assert node.exit_code() == 1
    assert re.search("worker of rank 1 .* was killed by SIGTERM", read_root_cause(node))


def test_a_rank_that_has_left_is_named_in_the_error_of_a_rank_that_still_communicates(
    job: Job,
) -> None:
    node = start_pair(job, "leave")
    assert node.exit_code() == 1
    cause = read_root_cause(node)
    # Whether gloo says that the connection was closed or reset depends on when it notices.
    assert re.search("worker of rank 0 .*: RuntimeError: .*remote worker", cause), cause
    assert "; rank 1 had exited with code 0 before (" in cause


def test_the_rank_that_hangs_is_named_and_not_the_rank_that_waits_for_it(job: Job) -> None:
    node = start_pair(job, "hang", "--hang-timeout", "2")
    assert node.exit_code() == 1
    assert re.search(
        r"hung: rank 1 on \S+ is at step 2, .*is in no collective, while another rank waits in one",
        read_root_cause(node),
    )


@pytest.mark.parametrize(
    ("way", "flags", "cause"),
    [
        ("thread", (), "failed and did not end.*: ValueError: no more samples"),
        # Rank 0 waits for it, but neither rank hangs.
        (
            "atexit",
            ("--hang-timeout", "1"),
            "failed and did not end.*: ValueError: no more samples",
        ),
        ("code", (), "exits with code 3 and did not end"),
    ],
)
def test_a_worker_that_has_failed_and_does_not_exit_is_killed_and_is_the_root_cause(
    job: Job, way: str, flags: tuple[str, ...], cause: str
) -> None:
    node = start_pair(job, way, "--shutdown-timeout", "3", *flags)
    assert node.exit_code() == 1
    assert re.search("rank 1 .* is still exiting.*it has 3 s to end", node.text), node.text
    assert re.search(f"worker of rank 1 .*{cause}", read_root_cause(node)), node.text
    assert "hung" not in node.text


def test_a_worker_that_has_succeeded_and_does_not_exit_is_named_and_may_finish(job: Job) -> None:
    node = start_pair(job, "done", "--shutdown-timeout", "1")
    node.wait_for_log("all other workers of this node have ended.*rank 1 .*has succeeded")
    job.finish()
    assert node.exit_code() == 0
