"""What holds of a history whatever is told: cut, mixed, repeated, or by clocks that lie."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from told_runs import Agent

from elasticlib.observe.event import KINDS, Event, decode, encode
from elasticlib.observe.history import History
from elasticlib.observe.history_reader import history_of

NUMERIC = ("seconds", "step", "nodes", "world", "restarts", "node_rank", "silent", "per_second")
TRUTHS = ("ok", "stopped", "planned")
WORDS = ("the job starts", "n1: it fell", "n2 left", "n3 joined", "n2 drains (SIGUSR2)", "")
STATES = ("succeeded", "failed", "stopped", "drained", "odd")
ODD = (None, True, "x", [1, 2], [], {}, -1, float("nan"), float("inf"), 10**400)


def fact(name: str, random: Random) -> Any:
    if random.random() < 0.1:
        return random.choice(ODD)
    if name in TRUTHS:
        return random.random() < 0.5
    if name == "state":
        return random.choice(STATES)
    if name in NUMERIC or random.random() < 0.3:
        return random.choice((random.randint(0, 6), random.uniform(0, 50)))
    return random.choice(WORDS)


def any_events(random: Random) -> list[Event]:
    """In no order, of up to three nodes, with facts that may be missing or odd."""
    found = []
    for _ in range(random.randint(0, 40)):
        kind = random.choice(sorted(KINDS))
        names = [*KINDS[kind], "silent", "planned", "after", "lease"]
        facts = {name: fact(name, random) for name in names if random.random() < 0.8}
        node, number = random.choice(("n1", "n2", "n3")), random.randint(0, 4)
        times = random.uniform(0, 1e4), random.choice((0.0, random.uniform(0, 1e3)))
        found.append(Event(kind, "job", node, number, *times, random.choice((None, 1)), facts))
    return found


def holds(history: History) -> None:
    numbers = [generation.number for generation in history.generations]
    assert numbers == sorted(set(numbers))
    before = 0.0
    for generation in history.generations:
        assert before <= generation.started_at + 1e-6
        ended = (
            history.duration_seconds if generation.finished_at is None else generation.finished_at
        )
        assert generation.started_at <= ended + 1e-6 <= history.duration_seconds + 2e-6
        if generation.first_step_at is not None:
            assert generation.started_at <= generation.first_step_at <= ended + 1e-6
        before = ended
        cost = generation.cost
        phases = (cost.detection, cost.shutdown, cost.rendezvous, cost.startup, cost.restore)
        told = [phase for phase in phases if phase is not None]
        assert min((*told, cost.repeated, cost.repeated_steps)) >= 0
    assert history.goodput is None or 0 <= history.goodput <= 1 + 1e-9
    assert all(
        stay.finished_at is None or stay.finished_at >= stay.started_at
        for stay in history.memberships
    )
    assert {stay.node for stay in history.memberships} <= {node.node for node in history.nodes}
    assert {stay.generation for stay in history.memberships} == set(numbers)


@given(st.integers(0, 2**32), st.booleans())
def test_any_events_make_a_history(seed: int, ordered: bool) -> None:
    random = Random(seed)
    one, other = any_events(random), any_events(random)
    if ordered:
        one.sort(key=lambda event: event.monotonic)
        other.sort(key=lambda event: event.monotonic)
    holds(history_of({"one": one, "other": other}))


def tell(agent: Agent, rank: int, ahead: float) -> list[bytes]:
    agent.launch(0.0).begin(2.0, 1, rank=rank, nodes=2).train(3.0, 1).steps(9.0, 61)
    agent.fail(10.0, "it fell").stop(10.0, 12.0 + ahead)
    agent.begin(13.0, 2, rank=rank, nodes=2, restarts=1, cause="n1: it fell").restore(14.0, 30, 0.5)
    agent.train(15.0, 31).tell(16.0, "checkpoint.saved", step=60).stop(17.0, 18.0, "resize")
    agent.begin(19.0, 3, rank=rank, nodes=2, restarts=1, cause="n3 joined").succeed(20.0)
    return [encode(event) for event in agent.events]


LINES = (tell(Agent("n1"), 0, 0.0), tell(Agent("n2", ahead=60.0, booted=-9.0), 1, 0.5))
CUT = st.integers(0, len(LINES[0]))


@given(CUT, CUT, CUT, CUT, st.randoms(use_true_random=False))
def test_any_cut_and_any_mixture_of_a_runs_events_makes_a_history(
    head: int, tail: int, other_head: int, other_tail: int, random: Random
) -> None:
    one = [decode(line) for line in LINES[0][head:tail]]
    other = [decode(line) for line in LINES[1][other_head:other_tail]]
    mixed = [(event, 0) for event in one] + [(event, 1) for event in other]
    random.shuffle(mixed)
    for told in ({"a": one, "b": other}, {"all": [event for event, _ in mixed]}):
        history = history_of(told)
        holds(history)
        assert len(history.nodes) >= bool(one) + bool(other)
