"""Simulated clusters with random faults, and each seed that has found a fault."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from simulation import Faults, Mark, Simulation

from elasticlib.rendezvous.membership import JobPhase, RendezvousSettings

SLICES = 20


def simulation(seed: int) -> Simulation:
    """The cluster of a seed: its size, limits and faults are all drawn from it."""
    draw = random.Random(seed)
    most = draw.randint(1, 7)
    limits = RendezvousSettings(draw.randint(1, most), most, max_restarts=100)
    return Simulation(seed, limits, nodes=draw.randint(1, 8))


def harsh_simulation(seed: int) -> Simulation:
    """As above, and what its nodes ask for and all other faults are drawn too."""
    draw = random.Random(seed)
    most = draw.randint(1, 7)
    fixed = draw.random() < 0.2
    least = most if fixed else draw.randint(1, most)
    limits = RendezvousSettings(least, most, max_restarts=100, has_fixed_ranks=fixed)
    faults = Faults(cuts=2, forgets=draw.randint(0, 2), echoes=3)
    return Simulation(seed, limits, nodes=draw.randint(1, 8), faults=faults)


@pytest.mark.parametrize("cluster", [simulation, harsh_simulation])
@pytest.mark.parametrize("part", range(SLICES))
def test_invariants_hold_for_every_seed(
    part: int, cluster: Callable[[int], Simulation], request: pytest.FixtureRequest
) -> None:
    """Half of the seeds of --seeds are used for each kind of cluster."""
    for seed in range(part, request.config.getoption("--seeds") // 2, SLICES):
        cluster(seed).run()


def drained_simulation(seed: int) -> Simulation:
    """Played to its end, by which whoever drained has left."""
    draw = random.Random(seed)
    most = draw.randint(1, 7)
    limits = RendezvousSettings(draw.randint(1, most), most, max_restarts=100, quorum=False)
    played = Simulation(seed, limits, nodes=draw.randint(1, 8), faults=Faults(drains=3)).run()
    drained = {m.node for m in played.story if m.mark is Mark.DRAINS}
    assert not drained & {node.name for node in played.living}
    return played


def test_invariants_hold_with_drained_nodes(request: pytest.FixtureRequest) -> None:
    planned = 0
    for seed in range(request.config.getoption("--seeds") // 10):
        documents = drained_simulation(seed).documents
        planned += sum("drain" in d.reason and d.is_planned for d in documents)
    assert planned


def keeping_simulation(seed: int) -> Simulation:
    """Some nodes keep what is left of their workers and come with fewer, and others cannot."""
    draw = random.Random(seed)
    most = draw.randint(1, 5)
    limits = RendezvousSettings(draw.randint(1, most), most, max_restarts=100)
    draws = {
        "cuts": draw.randint(0, 1),
        "forgets": draw.randint(0, 1),
        "drains": draw.randint(0, 1),
    }
    faults = Faults(worker_losses=draw.randint(2, 8), echoes=draw.randint(0, 2), **draws)
    return Simulation(seed, limits, nodes=draw.randint(1, 5), faults=faults)


def test_invariants_hold_with_retained_workers(
    request: pytest.FixtureRequest,
) -> None:
    smaller = let_in = ahead = 0
    for seed in range(request.config.getoption("--seeds") // 5):
        played = keeping_simulation(seed).run()
        workers = {node.id: node.workers for node in played.nodes}
        settled = [d for d in played.documents if d.phase is JobPhase.ACTIVE]
        smaller += sum(any(m.slots < workers[m.id] for m in d.members) for d in settled)
        let_in += sum("ready" in d.reason and d.is_planned for d in played.documents)
        ahead += sum(moment.mark is Mark.AHEAD for moment in played.story)
    assert smaller
    assert let_in
    assert ahead


def test_seed_378_a_drain_completes_while_the_leader_is_paused() -> None:
    """The story was over with a drain under way, past a leader whose lease had yet to end."""
    drained_simulation(378)


def test_seed_75_a_member_that_missed_its_generation_reports_that_it_has_no_workers() -> None:
    """It was put into generation 2 while it stood still, and woke when that was over.

    It waited for any generation after the one it had known, without a word that it ran no
    workers of the one it had missed; the others waited for it to stop them, for ever.
    """
    simulation(75).run()


def test_seed_130_a_member_that_joined_while_the_store_was_reset_remembers_the_generation() -> None:
    """All had entered generation 4 and not read again when the store came back empty.

    A member that remembered only what it had read since would have had nothing to say of it:
    a stranger wrote down the limits of a new job, and the members waited for ever for theirs.
    """
    harsh_simulation(130).run()


def test_seed_112_acting_twice_on_one_snapshot_keeps_the_new_generation() -> None:
    """The node that led acted again on the snapshot of which generation 1 had come.

    Under the mark of the first time, it took what it had lost for its own, and removed it: the
    shards of the generation that stood. Its members were then put into it while they ran it.
    """
    harsh_simulation(112).run()


def test_store_resets_without_other_faults_stop_no_workers() -> None:
    stood = 0
    for seed in range(60):
        nodes = 1 + seed % 4
        limits, faults = RendezvousSettings(nodes, nodes), Faults(0, 0, 0, 0, 0, forgets=2)
        played = Simulation(seed, limits, nodes=nodes, faults=faults).run()
        marks = [moment.mark for moment in played.story]
        if Mark.STARTS in marks[marks.index(Mark.FORGETS) :]:
            continue  # Nobody can remember a generation that it had not heard of by then.
        settled = {
            (d.generation, d.membership_id) for d in played.documents if d.phase is JobPhase.ACTIVE
        }
        assert [generation for generation, _ in settled] == [1]
        assert Mark.STOPS not in marks
        stood += 1
    assert stood > 40


def test_a_lost_job_continues_if_a_node_remembers_it_and_else_starts_again() -> None:
    """A number alone says nothing then: a new incarnation counts from 1 again."""
    anew = 0
    for seed in range(100):
        limits = RendezvousSettings(1, 4, max_restarts=100)
        played = Simulation(seed, limits, nodes=3, faults=Faults(forgets=2)).run()
        anew += len({d.incarnation for d in played.documents if d.phase is JobPhase.ACTIVE}) > 1
    assert 0 < anew < 50


def test_a_seed_is_reproducible() -> None:
    assert simulation(7).run().story == simulation(7).run().story


def test_without_faults_there_is_one_generation() -> None:
    quiet = Faults(crashes=0, arrivals=0, leaves=0, worker_failures=0, stalls=0, span=5.0)
    played = Simulation(1, RendezvousSettings(2, 4), nodes=4, faults=quiet).run()
    assert [d.generation for d in played.documents if d.phase is JobPhase.ACTIVE] == [1]


def test_failures_beyond_the_restart_budget_end_the_job_for_all_nodes() -> None:
    faults = Faults(crashes=0, arrivals=0, leaves=0, worker_failures=6, stalls=0, span=60.0)
    played = Simulation(3, RendezvousSettings(3, 3, max_restarts=1), nodes=3, faults=faults).run()
    assert played.documents[-1].phase is JobPhase.FAILED
    assert played.documents[-1].restarts == 1
    assert not played.living
