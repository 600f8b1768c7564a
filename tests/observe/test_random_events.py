"""Invariants of a history that is read from arbitrary, truncated or mixed events."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from made_events import make_event
from recorded_runs import Agent

from elasticlib.observe.event import Event, decode, encode
from elasticlib.observe.event_kinds import KINDS
from elasticlib.observe.history import GenerationTrigger, History
from elasticlib.observe.history_reader import history_of

NUMBERS = (
    *("step", "steps_per_second", "samples_per_second", "loss", "count", "attempt"),
    *("node_rank", "node_count", "world_size", "restarts", "max_restarts", "local_rank"),
)
BOOLEANS = ("succeeded", "stopped", "is_planned", "expelled")
TEXTS = ("the job starts", "n1: it fell", "n2 left", "n3 joined", "n2 drains (SIGUSR2)", "")
STATES = ("succeeded", "failed", "stopped", "drained", "unknown")
TRIGGERS = (*(trigger.value for trigger in GenerationTrigger), None)
INVALID = (None, True, "x", [1, 2], [], {}, -1, float("nan"), float("inf"), 10**400)


def random_value(name: str, random: Random) -> Any:
    """Return a plausible value of this name in an event, or now and then an invalid one."""
    if random.random() < 0.1:
        return random.choice(INVALID)
    if name in BOOLEANS:
        return random.random() < 0.5
    if name == "state":
        return random.choice(STATES)
    if name == "trigger":
        return random.choice(TRIGGERS)
    if name in NUMBERS or "seconds" in name or random.random() < 0.3:
        return random.choice((random.randint(0, 6), random.uniform(0, 50)))
    return random.choice(TEXTS)


def random_events(random: Random) -> list[Event]:
    """Return events of up to three nodes in random order, with missing and invalid data."""
    events = []
    for _ in range(random.randint(0, 40)):
        kind = random.choice(sorted(KINDS))
        names = [*KINDS[kind]().data, "seconds_since_heartbeat", "is_planned", "lease_ttl_seconds"]
        data = {name: random_value(name, random) for name in names if random.random() < 0.8}
        node, generation = random.choice(("n1", "n2", "n3")), random.randint(0, 4)
        times = random.uniform(0, 1e4), random.choice((0.0, random.uniform(0, 1e3)))
        rank = random.choice((None, 1))
        events.append(make_event(kind, "job", node, generation, *times, rank, data))
    return events


def check_invariants(history: History) -> None:
    numbers = [generation.number for generation in history.generations]
    assert numbers == sorted(set(numbers))
    previous_end = 0.0
    for generation in history.generations:
        assert previous_end <= generation.started_at + 1e-6
        end = history.duration_seconds if generation.finished_at is None else generation.finished_at
        assert generation.started_at <= end + 1e-6 <= history.duration_seconds + 2e-6
        if generation.first_step_at is not None:
            assert generation.started_at <= generation.first_step_at <= end + 1e-6
        previous_end = end
        cost = generation.cost
        phases = (cost.detection, cost.shutdown, cost.rendezvous, cost.startup, cost.restore)
        known = [phase for phase in phases if phase is not None]
        assert min((*known, cost.repeated, cost.repeated_steps)) >= 0
    assert history.goodput is None or 0 <= history.goodput <= 1 + 1e-9
    assert all(
        membership.finished_at is None or membership.finished_at >= membership.started_at
        for membership in history.memberships
    )
    assert {membership.node for membership in history.memberships} <= {
        node.node for node in history.nodes
    }
    assert {membership.generation for membership in history.memberships} == set(numbers)


@given(st.integers(0, 2**32), st.booleans())
def test_history_of_random_events_satisfies_the_invariants(seed: int, is_ordered: bool) -> None:
    random = Random(seed)
    files = {name: random_events(random) for name in ("first", "second")}
    if is_ordered:
        for events in files.values():
            events.sort(key=lambda event: event.monotonic)
    check_invariants(history_of(files))


def record_run(agent: Agent, rank: int, delay: float) -> list[bytes]:
    """Return the lines of a run of three generations; the node stops `delay` seconds later."""
    agent.launch(0.0).join(2.0, 1, rank=rank, nodes=2).train(3.0, 1).advance(9.0, 61)
    agent.fail(10.0, "it fell").stop(10.0, 12.0 + delay)
    agent.join(13.0, 2, rank=rank, nodes=2, restarts=1, reason="n1: it fell").restore(14.0, 30, 0.5)
    agent.train(15.0, 31).record(16.0, "checkpoint.saved", step=60).stop(17.0, 18.0, "resize")
    agent.join(19.0, 3, rank=rank, nodes=2, restarts=1, reason="n3 joined").succeed(20.0)
    return [encode(event) for event in agent.events]


LINES = (
    record_run(Agent("n1"), 0, 0.0),
    record_run(Agent("n2", clock_error=60.0, booted_at=-9.0), 1, 0.5),
)
BOUND = st.integers(0, len(LINES[0]))


@given(BOUND, BOUND, BOUND, BOUND, st.randoms(use_true_random=False))
def test_history_of_truncated_and_mixed_events_satisfies_the_invariants(
    start: int, stop: int, other_start: int, other_stop: int, random: Random
) -> None:
    first = [decode(line) for line in LINES[0][start:stop]]
    second = [decode(line) for line in LINES[1][other_start:other_stop]]
    mixed = [*first, *second]
    random.shuffle(mixed)
    for files in ({"a": first, "b": second}, {"all": mixed}):
        history = history_of(files)
        check_invariants(history)
        assert len(history.nodes) >= bool(first) + bool(second)
