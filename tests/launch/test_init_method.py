"""Scripts that pass the address of the launch to torch, or that open a store themselves."""

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


def kill_last_worker(reports: list[dict[str, Any]]) -> None:
    os.kill(reports[-1]["pid"], signal.SIGKILL)


def check_new_store(reports: list[dict[str, Any]], address: str, port: int) -> None:
    """Check that the workers share a new store at this address, which no other worker has used."""
    assert sorted(report["arrival"] for report in reports) == list(range(1, len(reports) + 1))
    assert {(report["MASTER_ADDR"], report["MASTER_PORT"]) for report in reports} == {
        (address, str(port))
    }


def start(job: Job, rank: int, *flags: str, url: str, **extra: str) -> Node:
    own = ("--nproc-per-node=2", f"--node-rank={rank}", "--max-restarts=2", *flags)
    command = job.agent_command(*own, program=ALLREDUCE, worker=(url,))
    return job.start(f"n{rank}", *command, **extra)


@pytest.mark.parametrize(("nodes", "secret"), [(1, ""), (2, "a secret of 16 bytes or more")])
def test_static_workers_share_a_new_store_at_the_master_port_in_each_generation(
    job: Job, nodes: int, secret: str
) -> None:
    port = free_port()
    endpoint_flags = (f"--nnodes={nodes}", "--master-addr=127.0.0.1", f"--master-port={port}")
    extra = {"ELASTICLIB_SECRET": secret} if secret else {}
    url = f"tcp://127.0.0.1:{port}"
    agents = [start(job, rank, *endpoint_flags, url=url, **extra) for rank in range(nodes)]
    generation = 0
    for num_failures in range(3):
        reports = job.wait_for_world(2 * nodes, after=generation)
        generation = generation_of(reports)
        check_new_store(reports, "127.0.0.1", port)
        if num_failures < 2:
            kill_last_worker(reports)
    job.finish()
    assert [node.exit_code() for node in agents] == [0] * nodes


@pytest.mark.parametrize("host", ["localhost", socket.gethostname()])
def test_script_may_use_another_name_of_the_first_node_than_the_launch(job: Job, host: str) -> None:
    address, port = outward_address(), free_port(outward_address())
    endpoint_flags = (
        "--nnodes=1",
        f"--master-addr={socket.gethostname()}",
        f"--master-port={port}",
    )
    node = start(job, 0, *endpoint_flags, url=f"tcp://{host}:{port}")
    check_new_store(job.wait_for_world(2), address, port)
    job.finish()
    assert node.exit_code() == 0


def test_script_that_connects_to_a_port_without_a_torch_store_gets_a_hint(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    endpoint_flags = ("--nnodes=1", f"--rdzv-endpoint={endpoint}")
    node = start(job, 0, *endpoint_flags, url=f"tcp://{endpoint}")
    node.wait_for_log(
        "a script tried to reach torch's store at the port .* use init_method='env://'"
    )
    node.signal(signal.SIGTERM)
    assert node.exit_code() == 128 + signal.SIGTERM


@pytest.mark.parametrize("store", ["agents", "own", "tcp"])
def test_library_that_opens_its_own_store_reconnects_after_each_failure(
    job: Job, store: str
) -> None:
    program = str(PROGRAMS / "library_store.py")
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=2")
    command = job.agent_command(*flags, program=program, worker=(store, str(free_port())))
    node = job.start("n0", *command)
    generation = 0
    for num_failures in range(3):
        reports = job.wait_for_world(2, after=generation)
        generation = generation_of(reports)
        assert sorted(report["arrival"] for report in reports) == [1, 2]
        assert [report["arrivals"] for report in reports] == [2, 2]
        if num_failures < 2:
            kill_last_worker(reports)
    job.finish()
    assert node.exit_code() == 0
