"""Totals of the events of a node; status, metrics, exit summary and history show equal numbers."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_events import make_event
from recorded_runs import Agent, event_files

from elasticlib.observe.aggregate import NodeAggregate
from elasticlib.observe.event import decode, encode
from elasticlib.observe.event_kinds import KINDS, body_of
from elasticlib.observe.history import RecoveryCost
from elasticlib.observe.history_reader import history_of
from elasticlib.observe.job_status import document_of_node
from elasticlib.observe.metrics import FAMILIES, MetricsFormatter, MetricsSnapshot, samples
from elasticlib.observe.summary import NodeReport, decode_detail, detail_of, encode_detail
from elasticlib.observe.totals import BUCKETS_S, DurationHistogram, NodeTotals, totals_of

TimedEvent = tuple[float, str, dict[str, Any]]  # time, kind and data
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


def compute_totals(*events: TimedEvent) -> NodeTotals:
    """Return the totals of a node whose agent started at 0."""
    aggregate, generation = NodeAggregate(), 0
    for at, kind, data in ((0.0, "run.started", {}), *events):
        generation += kind == "generation.started"
        aggregate.apply(make_event(kind, "job", "n1", generation, 1e9 + at, at, None, data))
    return totals_of(aggregate)


def phases(cost: RecoveryCost) -> dict[str, float]:
    return {name: getattr(cost, name) for name in PHASES if getattr(cost, name)}


def generation_started(at: float, restarts: int) -> TimedEvent:
    return (at, "generation.started", {"restarts": restarts})


FAULT = (
    generation_started(1.0, 0),
    (3.0, "training.started", {"step": 0, "duration_seconds": 2.0}),
    (10.0, "progress", {"step": 70, "steps_per_second": 10.0, "loss": 0.5}),
    (20.0, "worker.exited", {"succeeded": False, "stopped": False}),
    (20.5, "failure", {"failure_kind": "killed", "seconds_since_heartbeat": 0.25}),
    (20.6, "stopping", {"notice": ""}),
    (21.6, "stopped", {"duration_seconds": 1.0}),
    (21.7, "rendezvous.started", {"reason": "killed"}),
    generation_started(22.0, 1),
    (24.0, "state.restored", {"step": 50, "duration_seconds": 0.5}),
    (25.0, "training.started", {"step": 51, "duration_seconds": 3.0}),
)


def test_cost_of_a_failure_is_the_sum_of_its_phases_and_of_the_repeated_steps() -> None:
    totals = compute_totals(*FAULT, (29.0, "progress", {"step": 100}))
    assert totals.failures == {"killed": 1}
    assert (totals.restarts, totals.num_generations, totals.cost.repeated_steps) == (1, 2, 20)
    lost = {"detection": 0.25, "shutdown": 1.6, "rendezvous": 0.4, "startup": 2.5, "restore": 0.5}
    assert phases(totals.lost) == pytest.approx({**lost, "repeated": 19 * 0.1})
    assert phases(totals.startup) == pytest.approx({"rendezvous": 1.0, "startup": 2.0})
    assert totals.cost.seconds == pytest.approx(totals.lost.seconds + 3.0)


def test_recovery_times_start_when_the_failure_is_detected() -> None:
    totals = compute_totals(*FAULT)
    assert (totals.restart_times.count, totals.restart_times.seconds) == (1, 2.0)
    assert (totals.recovery_times.count, totals.recovery_times.seconds) == (1, 5.0)


def test_first_start_and_end_of_a_run_are_not_counted_as_recoveries() -> None:
    totals = compute_totals(generation_started(1.0, 0), (9.0, "worker.exited", {"succeeded": True}))
    assert (totals.restart_times.count, totals.recovery_times.count) == (0, 0)


def test_restarts_before_a_reset_of_the_restart_count_are_still_counted() -> None:
    totals = compute_totals(
        *(generation_started(float(n), charged) for n, charged in enumerate((0, 1, 2, 0, 1)))
    )
    assert totals.restarts == 3


@given(st.lists(st.floats(0, 1000), max_size=30))
def test_histogram_counts_a_duration_in_each_bucket_with_a_sufficient_bound(
    seconds: list[float],
) -> None:
    durations = DurationHistogram()
    for duration in seconds:
        durations = durations.add(duration)
    assert durations.count == len(seconds)
    expected = tuple(sum(duration <= bound for duration in seconds) for bound in BUCKETS_S)
    assert durations.bucket_counts == expected


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3))


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
                VALUES,
            ),
        ),
        max_size=12,
    )
)
def test_no_event_decreases_a_counter_or_fails(
    events: list[TimedEvent],
) -> None:
    aggregate = NodeAggregate()
    formatter = MetricsFormatter(lambda: snapshot_of(aggregate))
    previous: dict[str, float] = {}
    for at, kind, data in events:
        aggregate.apply(make_event(kind, "job", "n1", 1, at, at, None, data))
        for name, value in parse_counters(formatter.text()).items():
            assert value >= previous.get(name, 0.0), name
            previous[name] = value
    for sample in samples(snapshot_of(aggregate)):
        assert len(sample.labels) == len(FAMILIES[sample.family].labels)


def snapshot_of(aggregate: NodeAggregate) -> MetricsSnapshot:
    return MetricsSnapshot(aggregate.status, totals_of(aggregate), aggregate.last_progress)


def parse_counters(text: str) -> dict[str, float]:
    """Return the values of all metrics that are counters, by name and labels."""
    types, counters = dict[str, str](), dict[str, float]()
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("# TYPE"):
            types[name.split()[2]] = value
        elif types.get(name.partition("{")[0]) == "counter":
            counters[name] = float(value)
    return counters


# -- equal numbers in all views --------------------------------------------------------------------


def metrics_of(aggregate: NodeAggregate) -> dict[str, float]:
    """Return the values of /metrics by name and labels; of a histogram, the sum."""
    metrics: dict[str, float] = {}
    for sample in samples(snapshot_of(aggregate)):
        value = sample.value
        number = value if isinstance(value, (int, float)) else value.seconds
        metrics[".".join((sample.family.removeprefix("elasticlib_"), *sample.labels))] = number
    return metrics


def random_run(random: Random) -> Agent:
    """Return an agent with the events of a run of several generations."""
    agent = Agent("n1").launch(0.0)
    at, step, restarts, trigger = random.uniform(0.1, 9.0), 0, 0, "start"
    for generation in range(1, random.randint(2, 8)):
        agent.join(at, generation, restarts=restarts, trigger=trigger)
        if random.random() < 0.6:
            agent.restore(at + 0.5, step, random.uniform(0.0, 0.4))
        duration = random.uniform(1.0, 50.0)
        if random.random() < 0.8:
            agent.train(at + 0.9, step + 1)
            last_step = step + random.randint(2, 90)
            agent.advance(at + 0.9 + duration, last_step, 1.0)
            if random.random() < 0.6:
                step = random.randint(step, last_step)
                agent.record(at + duration, "checkpoint.saved", step=step)
        at += 1.0 + duration + random.choice((0.0, 5.0))
        trigger = random.choice((None, "loss"))
        if random.random() < 0.6:
            restarts += trigger is None
            agent.fail(at, "it fell", seconds_since_heartbeat=random.choice((None, 0.25)))
            agent.stop(at, at + 0.5)
        else:
            agent.stop(at, at + random.uniform(0.1, 3.0), "" if trigger else "n2 joined")
        at += random.uniform(3.0, 5.0)
    agent.join(at, generation + 1, restarts=restarts, trigger=trigger).train(at + 1.0, step + 1)
    return agent.advance(at + 9.0, step + 9).succeed(at + 10.0)


def lost_peer(survivor: Agent, random: Random) -> Agent:
    """Return a second node of the survivor's run, which is lost in one of its generations.

    Its workers complete the same steps until the node is lost. Its file ends earlier than that, at
    a random event. If no generation of the survivor follows a loss, the node records no generation.
    """
    starts = [n for n, event in enumerate(survivor.events) if event.kind == "generation.started"]
    losses = [m for m, n in enumerate(starts) if survivor.events[n].data["trigger"] == "loss"]
    peer = Agent("n2").launch(0.0)
    if losses:
        following = random.choice(losses)
        first, end = starts[following - 1], starts[following]
        kinds = ("failure", "stopping", "worker.exited")
        end = next(n for n in range(first, end) if survivor.events[n].kind in kinds)
        for event in survivor.events[2 : random.randint(first + 1, end)]:
            if event.kind not in ("failure", "worker.exited"):
                data = {**event.data, "node_rank": 1}
                peer.events.append(attrs.evolve(event, node="n2", body=body_of(event.kind, data)))
    return peer


@given(st.integers(0, 2**32))
def test_metrics_totals_and_history_of_the_same_events_are_equal(seed: int) -> None:
    agent, aggregate = random_run(Random(seed)), NodeAggregate()
    for event in agent.events:
        aggregate.apply(event)
    peers = (lost_peer(agent, Random(seed)),) if seed % 2 else ()
    history = history_of(event_files(agent, *peers))
    totals, metrics = totals_of(aggregate), metrics_of(aggregate)
    costs = [generation.cost for generation in history.generations]
    for name in PHASES:
        expected = sum(getattr(cost, name) or 0.0 for cost in costs)
        assert metrics[f"lost_seconds_total.{name}"] == pytest.approx(expected)
        assert (getattr(totals.cost, name) or 0.0) == pytest.approx(expected)
    assert (
        metrics["steps_repeated_total"]
        == totals.cost.repeated_steps
        == sum(c.repeated_steps for c in costs)
    )
    assert metrics["restarts_total"] == totals.restarts == history.restarts
    assert metrics["generations_total"] == totals.num_generations == len(history.generations)
    assert (
        metrics["failures_total.ordinary"] == sum(totals.failures.values()) == history.num_failures
    )
    assert metrics.get("last_checkpoint_step") == totals.checkpoint_step == history.checkpoint_step
    assert (totals.seconds, totals.goodput) == pytest.approx(
        (history.duration_seconds, history.goodput)
    )


@example(550966528)
@given(st.integers(0, 2**32))
def test_status_in_the_agent_in_the_store_and_from_the_file_equals_the_metrics(
    seed: int,
) -> None:
    # The times in a file are rounded to microseconds.
    events = [decode(encode(event)) for event in random_run(Random(seed)).events]
    aggregate, file_aggregate = NodeAggregate(), NodeAggregate(keeps_samples=False)
    for event in events[: 1 + seed % len(events)]:
        aggregate.apply(event)
        file_aggregate.apply(event)
    now, metrics = events[0].monotonic + 1000.0, metrics_of(aggregate)
    report = NodeReport.at(now, aggregate.status)
    document = document_of_node(report)
    detail = detail_of(report.status)
    assert decode_detail(encode_detail(detail)) == detail
    other = document_of_node(NodeReport.at(now, file_aggregate.status))
    assert json.loads(json.dumps(other)) == json.loads(json.dumps(document))
    assert metrics[f"state.{document['state']}"] == 1.0
    assert metrics["generation"] == document["generation"]
    assert metrics["world_size"] == document["world_size"]
    assert metrics.get("last_checkpoint_step") == document["checkpoint_step"]
    remaining = metrics.get("restarts_remaining")
    budget = document["max_restarts"]
    assert remaining == (None if budget is None else max(0, budget - document["restarts"]))
