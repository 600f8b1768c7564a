"""Jobs with thousands of nodes: in several processes over a TCP store, and in the simulation."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
from process_cluster import NodeResult, ProcessCluster, start_cluster
from simulation import Faults, Simulation

from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.membership import JobPhase

NODES = 10_000
SIMULATED_NODES = 20_000
PROCESSES = 8


def assert_one_generation(results: list[NodeResult], nodes: int) -> int:
    """Check that all nodes are in one generation with unique ranks, and return its number."""
    generations, ranks, sizes, masters = map(list, zip(*results, strict=True))
    assert set(sizes) == {nodes}
    assert sorted(ranks) == list(range(nodes))
    assert len(set(masters)) == 1
    (generation,) = set(generations)
    return int(generation)


def run_job(cluster: ProcessCluster, nodes: int, num_changed: int) -> dict[str, float]:
    """Run a job: all nodes join, some leave, the same number joins, and all succeed.

    Returns:
        The duration of each part in seconds.
    """
    duration_s = {}
    results, duration_s["form"] = cluster.send("join", "join")
    assert assert_one_generation(results, nodes) == 1
    results, duration_s["shrink"] = cluster.send(f"change {num_changed} 0", "change 0 0")
    assert assert_one_generation(results, nodes - num_changed) == 2
    results, duration_s["grow"] = cluster.send(f"change 0 {num_changed}", "change 0 0")
    assert assert_one_generation(results, nodes) == 3
    results, duration_s["finish"] = cluster.send("finish", "finish")
    assert results == [["succeeded"]] * nodes
    return duration_s


@pytest.fixture
def store_port() -> Iterator[int]:
    """Start an `elasticlib store` process, and return its port."""
    command = [sys.executable, "-m", "elasticlib.launch.cli", "store", "--bind", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        yield int(store.stdout.readline().split()[2].rpartition(":")[2])
        store.terminate()


def test_a_job_in_several_processes_forms_resizes_and_succeeds(store_port: int) -> None:
    with start_cluster(store_port, 24, 3) as cluster:
        run_job(cluster, 24, 4)


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_a_job_of_ten_thousand_nodes_forms_resizes_and_succeeds(store_port: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NODES + 100:
        pytest.fail(
            f"the store needs {NODES} file descriptors, but the hard limit is {hard} (ulimit -Hn)"
        )
    with start_cluster(store_port, NODES, PROCESSES) as cluster:
        print(run_job(cluster, NODES, 100))


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_invariants_hold_for_twenty_thousand_simulated_nodes() -> None:
    """Some nodes crash, leave, join, pause or fail."""
    settings = RendezvousSettings(1, SIMULATED_NODES + 10, max_restarts=10)
    faults = Faults(leaves=3, span=6.0)
    simulation = Simulation(1, settings, nodes=SIMULATED_NODES, faults=faults).run()
    active = [d for d in simulation.documents if d.phase is JobPhase.ACTIVE]
    assert len(active) > 1
    assert len(active[-1].members) == len(simulation.alive_nodes) > SIMULATED_NODES - 10
