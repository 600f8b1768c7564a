"""Jobs with thousands of nodes: in processes over a real store, and in the simulator."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
from crowd import Crowd, Told, crowd
from simulation import Faults, Simulation

from elasticlib.rendezvous.membership import JobPhase, RendezvousSettings

NODES = 10_000
SIMULATED = 20_000
PROCESSES = 8


def check_one_generation(told: list[Told], nodes: int) -> int:
    """Check that all nodes are in one generation with unique ranks, and return its number."""
    generations, ranks, sizes, masters = map(list, zip(*told, strict=True))
    assert set(sizes) == {nodes}
    assert sorted(ranks) == list(range(nodes))
    assert len(set(masters)) == 1
    (generation,) = set(generations)
    return int(generation)


def play(crowd: Crowd, nodes: int, some: int) -> dict[str, float]:
    """Run a job: all nodes join, some leave, as many join, and all finish.

    Returns:
        The duration of each part in seconds.
    """
    taken = {}
    told, taken["settle"] = crowd.ask("join", "join")
    assert check_one_generation(told, nodes) == 1
    told, taken["lose some"] = crowd.ask(f"change {some} 0", "change 0 0")
    assert check_one_generation(told, nodes - some) == 2
    told, taken["let others in"] = crowd.ask(f"change 0 {some}", "change 0 0")
    assert check_one_generation(told, nodes) == 3
    told, taken["end"] = crowd.ask("end", "end")
    assert told == [["succeeded"]] * nodes
    return taken


@pytest.fixture
def port() -> Iterator[int]:
    """The port of an `elasticlib store` process."""
    command = [sys.executable, "-m", "elasticlib.launch.cli", "store", "--bind", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        yield int(store.stdout.readline().split()[2].rpartition(":")[2])
        store.terminate()


def test_a_job_in_several_processes_settles_and_resizes_and_ends(port: int) -> None:
    with crowd(port, 24, 3) as few:
        play(few, 24, 4)


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_a_job_of_ten_thousand_nodes_settles_and_resizes_and_ends(port: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NODES + 100:
        pytest.fail(f"the store needs {NODES} descriptors, and may have {hard}: ulimit -Hn")
    with crowd(port, NODES, PROCESSES) as many:
        print(play(many, NODES, 100))


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_invariants_hold_for_twenty_thousand_simulated_nodes() -> None:
    """The agents run in turns. Some crash, leave, join, pause or fail."""
    limits = RendezvousSettings(1, SIMULATED + 10, max_restarts=10)
    faults = Faults(leaves=3, span=6.0)
    played = Simulation(1, limits, nodes=SIMULATED, faults=faults).run()
    settled = [d for d in played.documents if d.phase is JobPhase.ACTIVE]
    assert len(settled) > 1
    assert len(settled[-1].members) == len(played.alive_nodes) > SIMULATED - 10
