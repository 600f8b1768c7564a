"""A thousand clusters that never were, and each seed that once found a fault."""

from __future__ import annotations

import random

import pytest

from elasticlib.rendezvous.document import Limits, Phase
from elasticlib.testing.simulation import Faults, Simulation

SLICES = 20


def simulation(seed: int) -> Simulation:
    """The cluster of a seed: its size, limits and faults are all drawn from it."""
    draw = random.Random(seed)
    most = draw.randint(1, 7)
    limits = Limits(draw.randint(1, most), most, max_restarts=100)
    return Simulation(seed, limits, nodes=draw.randint(1, 8))


@pytest.mark.parametrize("part", range(SLICES))
def test_every_promise_holds_for_every_seed(part: int, request: pytest.FixtureRequest) -> None:
    for seed in range(part, request.config.getoption("--seeds"), SLICES):
        simulation(seed).run()


def test_seed_75_a_member_that_slept_through_its_generation_says_that_it_is_free() -> None:
    """It was put into generation 2 while it stood still, and woke when that was over.

    It waited for any generation after the one it had known, without a word that it ran no
    workers of the one it had missed; the others waited for it to stop them, for ever.
    """
    simulation(75).run()


def test_a_store_that_comes_back_empty_is_a_new_incarnation_for_all() -> None:
    """A generation's number alone says nothing there: it counts from 1 again."""
    for seed in range(150):
        faults = Faults(forgets=2)
        Simulation(seed, Limits(1, 4, max_restarts=100), nodes=3, faults=faults).run()


def test_the_same_seed_is_the_same_story() -> None:
    assert simulation(7).run().story == simulation(7).run().story


def test_without_faults_all_nodes_meet_once() -> None:
    quiet = Faults(crashes=0, arrivals=0, leaves=0, worker_failures=0, stalls=0, span=5.0)
    played = Simulation(1, Limits(2, 4), nodes=4, faults=quiet).run()
    assert [d.generation for d in played.documents if d.phase is Phase.SETTLED] == [1]


def test_failures_beyond_the_budget_end_the_job_for_all() -> None:
    faults = Faults(crashes=0, arrivals=0, leaves=0, worker_failures=6, stalls=0, span=60.0)
    played = Simulation(3, Limits(3, 3, max_restarts=1), nodes=3, faults=faults).run()
    assert played.documents[-1].phase is Phase.FAILED
    assert played.documents[-1].restarts == 1
    assert not played.living
