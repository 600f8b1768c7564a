"""What a node's events add up to; and that status, metrics, exit summary and history, which all
show that, agree to the digit."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from told_runs import Agent, files

from elasticlib.observe.aggregate import NodeAggregate
from elasticlib.observe.event import KINDS, Event, decode, encode
from elasticlib.observe.history import RecoveryCost
from elasticlib.observe.history_reader import history_of
from elasticlib.observe.job_status import document_of_node
from elasticlib.observe.metrics import FAMILIES, MetricsFormatter, MetricsSnapshot, samples
from elasticlib.observe.node_status import NodeReport
from elasticlib.observe.node_status import decode as decode_status
from elasticlib.observe.node_status import encode as encode_status
from elasticlib.observe.totals import BUCKETS_S, DurationHistogram, NodeTotals, totals_of

Told = tuple[float, str, dict[str, Any]]
PHASES = (
    "detection",
    "shutdown",
    "imports",
    "rendezvous",
    "startup",
    "restore",
    "stalled",
    "repeated",
)


def folded(*events: Told) -> NodeTotals:
    """Of a node whose agent began at 0."""
    story, number = NodeAggregate(), 0
    for at, kind, facts in ((0.0, "run.started", {}), *events):
        number += kind == "generation.started"
        story.apply(Event(kind, "job", "n1", number, 1e9 + at, at, None, facts))
    return totals_of(story)


def phases(cost: RecoveryCost) -> dict[str, float]:
    return {name: getattr(cost, name) for name in PHASES if getattr(cost, name)}


def began(at: float, restarts: int) -> Told:
    return (at, "generation.started", {"restarts": restarts})


FAULT = (
    began(1.0, 0),
    (3.0, "training.started", {"step": 0, "duration_seconds": 2.0}),
    (10.0, "progress", {"step": 70, "steps_per_second": 10.0, "loss": 0.5}),
    (20.0, "worker.exited", {"succeeded": False, "stopped": False}),
    (20.5, "failure", {"failure_kind": "killed", "seconds_since_heartbeat": 0.25}),
    (20.6, "stopping", {"notice": ""}),
    (21.6, "stopped", {"duration_seconds": 1.0}),
    (21.7, "rendezvous.started", {"reason": "killed"}),
    began(22.0, 1),
    (24.0, "state.restored", {"step": 50, "duration_seconds": 0.5}),
    (25.0, "training.started", {"step": 51, "duration_seconds": 3.0}),
)


def test_a_fault_costs_what_its_phases_took_and_the_steps_that_are_made_again() -> None:
    sums = folded(*FAULT, (29.0, "progress", {"step": 100}))
    assert sums.failures == {"killed": 1}
    assert (sums.restarts, sums.num_generations, sums.cost.repeated_steps) == (1, 2, 20)
    lost = {"detection": 0.25, "shutdown": 1.6, "rendezvous": 0.4, "startup": 2.5, "restore": 0.5}
    assert phases(sums.lost) == pytest.approx({**lost, "repeated": 19 * 0.1})
    assert phases(sums.startup) == pytest.approx({"rendezvous": 1.0, "startup": 2.0})
    assert sums.cost.seconds == pytest.approx(sums.lost.seconds + 3.0)


def test_a_recovery_is_counted_from_its_first_sign_until_started_and_until_trained() -> None:
    sums = folded(*FAULT)
    assert (sums.restart_times.count, sums.restart_times.seconds) == (1, 2.0)
    assert (sums.recovery_times.count, sums.recovery_times.seconds) == (1, 5.0)


def test_a_first_start_and_an_end_are_no_recoveries() -> None:
    sums = folded(began(1.0, 0), (9.0, "worker.exited", {"succeeded": True}))
    assert (sums.restart_times.count, sums.recovery_times.count) == (0, 0)


def test_restarts_that_are_earned_back_stay_counted() -> None:
    sums = folded(*(began(float(n), charged) for n, charged in enumerate((0, 1, 2, 0, 1))))
    assert sums.restarts == 3


@given(st.lists(st.floats(0, 1000), max_size=30))
def test_a_histogram_holds_each_duration_in_all_buckets_that_are_wide_enough(
    seconds: list[float],
) -> None:
    durations = DurationHistogram()
    for one in seconds:
        durations = durations.add(one)
    assert durations.count == len(seconds)
    want = tuple(sum(one <= most for one in seconds) for most in BUCKETS_S)
    assert durations.bucket_counts == want


FACTS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3))


@example(
    [(0.0, "generation.started", {"duration_seconds": float("nan")}), (0.0, "drain.requested", {})]
)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 100),
            st.sampled_from(sorted(KINDS)),
            st.dictionaries(
                st.sampled_from(
                    ["duration_seconds", "restarts", "step", "steps_per_second", "succeeded"]
                ),
                FACTS,
            ),
        ),
        max_size=12,
    )
)
def test_no_event_however_odd_stops_the_counting_or_takes_anything_back(
    events: list[Told],
) -> None:
    story = NodeAggregate()
    exposition = MetricsFormatter(
        lambda: MetricsSnapshot(story.status, totals_of(story), story.last_progress)
    )
    before: dict[str, float] = {}
    for at, kind, facts in events:
        story.apply(Event(kind, "job", "n1", 1, at, at, None, facts))
        for name, value in counters(exposition).items():
            assert value >= before.get(name, 0.0), name
            before[name] = value
    for sample in samples(MetricsSnapshot(story.status, totals_of(story), story.last_progress)):
        assert len(sample.labels) == len(FAMILIES[sample.family].labels)


def counters(exposition: MetricsFormatter) -> dict[str, float]:
    kinds, found = dict[str, str](), dict[str, float]()
    for line in exposition.text().splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("# TYPE"):
            kinds[name.split()[2]] = value
        elif kinds.get(name.partition("{")[0]) == "counter":
            found[name] = float(value)
    return found


# -- who shows it ----------------------------------------------------------------------------------


def shown(story: NodeAggregate) -> dict[str, float]:
    """What /metrics says; the sum of a histogram."""
    found: dict[str, float] = {}
    for sample in samples(MetricsSnapshot(story.status, totals_of(story), story.last_progress)):
        value = sample.value
        number = value if isinstance(value, (int, float)) else value.seconds
        found[".".join((sample.family.removeprefix("elasticlib_"), *sample.labels))] = number
    return found


def drawn(random: Random) -> Agent:
    """A node's run of some generations, as an agent has them."""
    agent = Agent("n1").launch(0.0)
    at, step, restarts, why = random.uniform(0.1, 9.0), 0, 0, "start"
    for number in range(1, random.randint(2, 8)):
        agent.begin(at, number, restarts=restarts, why=why)
        if random.random() < 0.6:
            agent.restore(at + 0.5, step, random.uniform(0.0, 0.4))
        lasts = random.uniform(1.0, 50.0)
        if random.random() < 0.8:
            agent.train(at + 0.9, step + 1)
            done = step + random.randint(2, 90)
            agent.steps(at + 0.9 + lasts, done, 1.0)
            if random.random() < 0.6:
                step = random.randint(step, done)
                agent.tell(at + lasts, "checkpoint.saved", step=step)
        at += 1.0 + lasts + random.choice((0.0, 5.0))
        why = random.choice((None, "loss"))
        if random.random() < 0.6:
            restarts += why is None
            agent.fail(at, "it fell", silent=random.choice((None, 0.25)))
            agent.stop(at, at + 0.5)
        else:
            agent.stop(at, at + random.uniform(0.1, 3.0), "" if why else "n2 joined")
        at += random.uniform(3.0, 5.0)
    agent.begin(at, number + 1, restarts=restarts, why=why).train(at + 1.0, step + 1)
    return agent.steps(at + 9.0, step + 9).succeed(at + 10.0)


def lost_peer(survivor: Agent, random: Random) -> Agent:
    """Of a generation that another one followed after a loss: a node whose workers went in step
    with the survivor's, until it was killed there, and which told of less before that."""
    began = [n for n, event in enumerate(survivor.events) if event.kind == "generation.started"]
    losses = [m for m, n in enumerate(began) if survivor.events[n].text("trigger") == "loss"]
    peer = Agent("n2").launch(0.0)
    if losses:
        next_one = random.choice(losses)
        first, over = began[next_one - 1], began[next_one]
        ends = ("failure", "stopping", "worker.exited")
        over = next(n for n in range(first, over) if survivor.events[n].kind in ends)
        for event in survivor.events[2 : random.randint(first + 1, over)]:
            if event.kind not in ("failure", "worker.exited"):
                facts = {**event.data, "node_rank": 1}
                peer.events.append(attrs.evolve(event, node="n2", data=facts))
    return peer


@given(st.integers(0, 2**32))
def test_metrics_summary_and_history_of_the_same_events_are_the_same_numbers(seed: int) -> None:
    agent, story = drawn(Random(seed)), NodeAggregate()
    for event in agent.events:
        story.apply(event)
    peers = (lost_peer(agent, Random(seed)),) if seed % 2 else ()
    sums, history, metrics = totals_of(story), history_of(files(agent, *peers)), shown(story)
    costs = [generation.cost for generation in history.generations]
    for name in PHASES:
        want = sum(getattr(cost, name) or 0.0 for cost in costs)
        assert metrics[f"lost_seconds_total.{name}"] == pytest.approx(want)
        assert (getattr(sums.cost, name) or 0.0) == pytest.approx(want)
    assert (
        metrics["steps_repeated_total"]
        == sums.cost.repeated_steps
        == sum(c.repeated_steps for c in costs)
    )
    assert metrics["restarts_total"] == sums.restarts == history.restarts
    assert metrics["generations_total"] == sums.num_generations == len(history.generations)
    assert metrics["failures_total.ordinary"] == sum(sums.failures.values()) == history.num_failures
    assert metrics.get("last_checkpoint_step") == sums.checkpoint_step == history.checkpoint_step
    assert (sums.seconds, sums.goodput) == pytest.approx(
        (history.duration_seconds, history.goodput)
    )


@example(550966528)
@given(st.integers(0, 2**32))
def test_status_of_the_agent_of_its_store_and_of_its_file_and_metrics_are_the_same_numbers(
    seed: int,
) -> None:
    # A file has times to the microsecond.
    events = [decode(encode(event)) for event in drawn(Random(seed)).events]
    story, log = NodeAggregate(), NodeAggregate(keeps_samples=False)
    for event in events[: 1 + seed % len(events)]:
        story.apply(event)
        log.apply(event)
    now, metrics = events[0].monotonic + 1000.0, shown(story)
    live = NodeReport.at(now, story.status)
    document = document_of_node(live)
    stored = decode_status(encode_status(live, 5.0), lambda written: 5.0 - written)
    for other in (stored, NodeReport.at(now, log.status)):
        again = document_of_node(other)
        again["nodes"][0]["age_seconds"] = None
        assert json.loads(json.dumps(again)) == json.loads(json.dumps(document))
    assert metrics[f"state.{document['state']}"] == 1.0
    assert metrics["generation"] == document["generation"]
    assert metrics["world_size"] == document["world_size"]
    assert metrics.get("last_checkpoint_step") == document["checkpoint_step"]
    left = metrics.get("restarts_remaining")
    most = document["max_restarts"]
    assert left == (None if most is None else max(0, most - document["restarts"]))
