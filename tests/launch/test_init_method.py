"""Scripts that name the launch's own address to torch, or bring a store of their own."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest
from jobs import PROGRAMS, Job, Node, generation_of
from ports import free_port

from elasticlib.launch.addresses import outward_address

pytestmark = pytest.mark.faults

ALLREDUCE = str(PROGRAMS / "allreduce.py")


def kill_one_of(reports: list[dict[str, Any]]) -> None:
    os.kill(reports[-1]["pid"], signal.SIGKILL)


def check_fresh(reports: list[dict[str, Any]], address: str, port: int) -> None:
    """All met at a store to which none but these have come, at the place that they were told."""
    assert sorted(report["arrival"] for report in reports) == list(range(1, len(reports) + 1))
    assert {(report["MASTER_ADDR"], report["MASTER_PORT"]) for report in reports} == {
        (address, str(port))
    }


def start(job: Job, rank: int, *flags: str, url: str, **extra: str) -> Node:
    own = ("--nproc-per-node=2", f"--node-rank={rank}", "--max-restarts=2", *flags)
    command = job.agent_command(*own, program=ALLREDUCE, worker=(url,))
    return job.start(f"n{rank}", *command, **extra)


@pytest.mark.parametrize(("nodes", "secret"), [(1, ""), (2, "nobody guesses this one")])
def test_static_workers_meet_by_tcp_at_the_master_port_in_each_generation(
    job: Job, nodes: int, secret: str
) -> None:
    port = free_port()
    place = (f"--nnodes={nodes}", "--master-addr=127.0.0.1", f"--master-port={port}")
    extra = {"ELASTICLIB_SECRET": secret} if secret else {}
    url = f"tcp://127.0.0.1:{port}"
    started = [start(job, rank, *place, url=url, **extra) for rank in range(nodes)]
    generation = 0
    for failures in range(3):
        reports = job.wait_for_world(2 * nodes, after=generation)
        generation = generation_of(reports)
        check_fresh(reports, "127.0.0.1", port)
        if failures < 2:
            kill_one_of(reports)
    job.finish()
    assert [node.exit_code() for node in started] == [0] * nodes


@pytest.mark.parametrize("host", ["localhost", socket.gethostname()])
def test_a_script_may_name_the_first_node_in_another_way_than_the_launch(
    job: Job, host: str
) -> None:
    address, port = outward_address(), free_port(outward_address())
    place = ("--nnodes=1", f"--master-addr={socket.gethostname()}", f"--master-port={port}")
    node = start(job, 0, *place, url=f"tcp://{host}:{port}")
    check_fresh(job.wait_for_world(2), address, port)
    job.finish()
    assert node.exit_code() == 0


def test_a_script_that_looks_for_torchs_store_where_none_is_is_told_of(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    place = ("--nnodes=1", f"--rdzv-endpoint={endpoint}")
    node = start(job, 0, *place, url=f"tcp://{endpoint}")
    node.wait_for_log(
        "a script tried to reach torch's store at the port .* use init_method='env://'"
    )
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 128 + signal.SIGTERM


@pytest.mark.parametrize("where", ["agents", "own", "tcp"])
def test_a_library_with_a_store_of_its_own_meets_again_after_each_failure(
    job: Job, where: str
) -> None:
    program = str(PROGRAMS / "library_store.py")
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=2")
    command = job.agent_command(*flags, program=program, worker=(where, str(free_port())))
    node = job.start("n0", *command)
    generation = 0
    for failures in range(3):
        reports = job.wait_for_world(2, after=generation)
        generation = generation_of(reports)
        assert sorted(report["arrival"] for report in reports) == [1, 2]
        assert [report["arrivals"] for report in reports] == [2, 2]
        if failures < 2:
            kill_one_of(reports)
    job.finish()
    assert node.exit_code() == 0
