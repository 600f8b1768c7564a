"""Simulated jobs with random faults, and each seed that has found a fault of the rendezvous.

`simulation.py` describes the simulation. `--seeds` sets the number of seeds, and a failure prints
its seed and the last events.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from simulation import Faults, SimEventKind, Simulation

from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.membership import GenerationTrigger, JobPhase

SLICES = 20


def random_simulation(seed: int) -> Simulation:
    """Return a simulation whose size, limits and faults are random."""
    rng = random.Random(seed)
    max_nodes = rng.randint(1, 7)
    settings = RendezvousSettings(rng.randint(1, max_nodes), max_nodes, max_restarts=100)
    return Simulation(seed, settings, nodes=rng.randint(1, 8))


def harsh_simulation(seed: int) -> Simulation:
    """Return a simulation that also has partitions, store resets and fixed ranks."""
    rng = random.Random(seed)
    max_nodes = rng.randint(1, 7)
    has_fixed_ranks = rng.random() < 0.2
    min_nodes = max_nodes if has_fixed_ranks else rng.randint(1, max_nodes)
    settings = RendezvousSettings(
        min_nodes, max_nodes, max_restarts=100, has_fixed_ranks=has_fixed_ranks
    )
    faults = Faults(partitions=2, store_resets=rng.randint(0, 2))
    return Simulation(seed, settings, nodes=rng.randint(1, 8), faults=faults)


@pytest.mark.parametrize("create_simulation", [random_simulation, harsh_simulation])
@pytest.mark.parametrize("first_seed", range(SLICES))
def test_invariants_hold_for_every_seed(
    first_seed: int, create_simulation: Callable[[int], Simulation], request: pytest.FixtureRequest
) -> None:
    """Half of the seeds of --seeds are used for each kind of cluster."""
    for seed in range(first_seed, request.config.getoption("--seeds") // 2, SLICES):
        create_simulation(seed).run()


@pytest.mark.parametrize("seed", [441, 2433, 2769])
def test_a_generation_is_restored_although_the_store_is_emptied_while_it_is_written(
    seed: int,
) -> None:
    harsh_simulation(seed).run()


def test_a_generation_that_was_restored_in_part_is_followed_by_a_later_one() -> None:
    """The only node that had restored it has left, and another one remembers an earlier one."""
    retaining_simulation(675).run()


def run_drained_simulation(seed: int) -> Simulation:
    """Run a simulation with drains, and check that the drained nodes have left."""
    rng = random.Random(seed)
    max_nodes = rng.randint(1, 7)
    settings = RendezvousSettings(
        rng.randint(1, max_nodes), max_nodes, max_restarts=100, quorum=False
    )
    simulation = Simulation(seed, settings, nodes=rng.randint(1, 8), faults=Faults(drains=3)).run()
    drained = {event.node for event in simulation.event_log if event.kind is SimEventKind.DRAINS}
    assert not drained & {node.name for node in simulation.alive_nodes}
    return simulation


def test_invariants_hold_with_drained_nodes(request: pytest.FixtureRequest) -> None:
    num_planned = 0
    for seed in range(request.config.getoption("--seeds") // 10):
        documents = run_drained_simulation(seed).documents
        num_planned += sum("drain" in d.reason and d.is_planned for d in documents)
    assert num_planned


def test_invariants_hold_with_requested_restarts(request: pytest.FixtureRequest) -> None:
    restarted = 0
    for seed in range(request.config.getoption("--seeds") // 10):
        limits = RendezvousSettings(1, 4, max_restarts=100)
        faults = Faults(restart_requests=4, drains=1)
        documents = Simulation(seed, limits, nodes=3, faults=faults).run().documents
        for before, after in pairwise(documents):
            if after.trigger is GenerationTrigger.RESTART and after.phase is JobPhase.ACTIVE:
                restarted += before.phase is JobPhase.FORMING
                # A worker that fails while workers stop for the restart is charged.
                assert after.restarts == before.restarts or before.verdict is not None
    assert restarted


def retaining_simulation(seed: int) -> Simulation:
    """Return a simulation in which some nodes retain workers after a loss, and others do not."""
    rng = random.Random(seed)
    max_nodes = rng.randint(1, 5)
    settings = RendezvousSettings(rng.randint(1, max_nodes), max_nodes, max_restarts=100)
    fault_counts = {
        "partitions": rng.randint(0, 1),
        "store_resets": rng.randint(0, 1),
        "drains": rng.randint(0, 1),
    }
    faults = Faults(worker_losses=rng.randint(2, 8), **fault_counts)
    return Simulation(seed, settings, nodes=rng.randint(1, 5), faults=faults)


def test_invariants_hold_with_retained_workers(
    request: pytest.FixtureRequest,
) -> None:
    num_smaller = num_admitted = num_early = 0
    for seed in range(request.config.getoption("--seeds") // 5):
        simulation = retaining_simulation(seed).run()
        workers = {node.id: node.num_workers for node in simulation.nodes}
        active = [d for d in simulation.documents if d.phase is JobPhase.ACTIVE]
        num_smaller += sum(any(m.slots < workers[m.id] for m in d.members) for d in active)
        num_admitted += sum("ready" in d.reason and d.is_planned for d in simulation.documents)
        num_early += sum(event.kind is SimEventKind.STARTS_EARLY for event in simulation.event_log)
    assert num_smaller
    assert num_admitted
    assert num_early


def test_store_resets_without_other_faults_stop_no_workers() -> None:
    num_checked = 0
    for seed in range(60):
        nodes = 1 + seed % 4
        settings, faults = RendezvousSettings(nodes, nodes), Faults(0, 0, 0, 0, 0, store_resets=2)
        simulation = Simulation(seed, settings, nodes=nodes, faults=faults).run()
        kinds = [event.kind for event in simulation.event_log]
        if SimEventKind.STARTS in kinds[kinds.index(SimEventKind.RESETS) :]:
            continue  # No node can remember a generation that it had not read before.
        active = {
            (d.generation, d.membership_id)
            for d in simulation.documents
            if d.phase is JobPhase.ACTIVE
        }
        assert [generation for generation, _ in active] == [1]
        assert SimEventKind.STOPS not in kinds
        num_checked += 1
    assert num_checked > 40


def test_a_lost_job_continues_if_a_node_remembers_it_and_else_starts_again() -> None:
    # Generation numbers start at 1 again in a new incarnation.
    num_restarted = 0
    for seed in range(100):
        settings = RendezvousSettings(1, 4, max_restarts=100)
        simulation = Simulation(seed, settings, nodes=3, faults=Faults(store_resets=2)).run()
        num_restarted += (
            len({d.incarnation for d in simulation.documents if d.phase is JobPhase.ACTIVE}) > 1
        )
    assert 0 < num_restarted < 50


def test_a_seed_is_reproducible() -> None:
    assert random_simulation(7).run().event_log == random_simulation(7).run().event_log


def test_without_faults_there_is_one_generation() -> None:
    no_faults = Faults(crashes=0, joins=0, leaves=0, worker_failures=0, pauses=0, span=5.0)
    simulation = Simulation(1, RendezvousSettings(2, 4), nodes=4, faults=no_faults).run()
    assert [d.generation for d in simulation.documents if d.phase is JobPhase.ACTIVE] == [1]


def test_failures_beyond_the_restart_budget_end_the_job_for_all_nodes() -> None:
    faults = Faults(crashes=0, joins=0, leaves=0, worker_failures=6, pauses=0, span=60.0)
    simulation = Simulation(
        3, RendezvousSettings(3, 3, max_restarts=1), nodes=3, faults=faults
    ).run()
    assert simulation.documents[-1].phase is JobPhase.FAILED
    assert simulation.documents[-1].restarts == 1
    assert not simulation.alive_nodes


def bad_node_simulation(
    seed: int, *, num_bad: int, num_good: int, min_nodes: int, **faults: int
) -> Simulation:
    """Return a simulation in which the first nodes always fail, with these other faults only."""
    quiet = {"crashes": 0, "joins": 0, "leaves": 0, "worker_failures": 0, "pauses": 0}
    settings = RendezvousSettings(min_nodes, num_bad + num_good, max_restarts=1000)
    return Simulation(
        seed,
        settings,
        nodes=num_bad + num_good,
        faults=Faults(span=100.0, bad_nodes=num_bad, **{**quiet, **faults}),
    )


def bad_names(num_bad: int) -> set[str]:
    return {f"node{index}" for index in range(num_bad)}


def test_nodes_that_always_fail_are_excluded_and_the_job_continues_on_the_others(
    request: pytest.FixtureRequest,
) -> None:
    for seed in range(request.config.getoption("--seeds") // 15):
        draw = random.Random(seed)
        num_bad, num_good = draw.randint(1, 2), draw.randint(1, 4)
        played = bad_node_simulation(
            seed, num_bad=num_bad, num_good=num_good, min_nodes=draw.randint(1, num_good)
        ).run()
        last = played.documents[-1]
        assert {item.host for item in last.excluded_hosts} == bad_names(num_bad)
        assert all("failed first in" in item.reason for item in last.excluded_hosts)
        assert last.phase is JobPhase.ACTIVE
        assert len(last.members) == num_good
        # Each bad node was excluded by a failure that was not charged.
        failures = sum(event.kind is SimEventKind.FAILS for event in played.event_log)
        assert last.restarts <= failures - num_bad


def test_no_node_is_excluded_that_the_job_needs(request: pytest.FixtureRequest) -> None:
    num_explained = 0
    for seed in range(request.config.getoption("--seeds") // 30):
        num_good = 1 + seed % 3
        played = bad_node_simulation(
            seed, num_bad=1, num_good=num_good, min_nodes=num_good + 1
        ).run()
        last = played.documents[-1]
        assert not last.excluded_hosts
        assert len(last.members) == num_good + 1
        reasons = [document.reason for document in played.documents]
        num_explained += any("node0 stays in the job although" in text for text in reasons)
    assert num_explained


def test_a_job_of_one_node_never_excludes_it() -> None:
    played = bad_node_simulation(1, num_bad=1, num_good=0, min_nodes=1).run()
    assert not any(document.excluded_hosts for document in played.documents)
    assert not any("stays in the job" in document.reason for document in played.documents)
    assert len(played.alive_nodes) == 1


def test_good_nodes_are_never_excluded(request: pytest.FixtureRequest) -> None:
    num_excluded = 0
    for seed in range(request.config.getoption("--seeds") // 15):
        draw = random.Random(seed)
        num_bad, num_good = draw.randint(1, 2), draw.randint(1, 5)
        others = {
            "crashes": 2,
            "joins": 3,
            "leaves": 1,
            "pauses": 2,
            "partitions": 2,
            "store_resets": draw.randint(0, 1),
        }
        played = bad_node_simulation(
            seed, num_bad=num_bad, num_good=num_good, min_nodes=draw.randint(1, num_good), **others
        ).run()
        excluded = {item.host for d in played.documents for item in d.excluded_hosts}
        assert excluded <= bad_names(num_bad)
        num_excluded += len(excluded)
    assert num_excluded
