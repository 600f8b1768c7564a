"""The exit summary of a run: its totals and the lines that it prints."""

from __future__ import annotations

import re

import pytest
from recorded_runs import Agent

from elasticlib.agent.interface import RunResult
from elasticlib.launch.exit_summary import format_result, summary_lines
from elasticlib.observe.aggregate import NodeAggregate
from elasticlib.observe.event import Event
from elasticlib.observe.history import GenerationTrigger, RecoveryCost
from elasticlib.observe.history_reader import history_of
from elasticlib.observe.totals import MAX_LISTED_GENERATIONS, NodeTotals, totals_of
from elasticlib.workers.spec import WorkerState


def compute_totals(events: list[Event]) -> NodeTotals:
    aggregate = NodeAggregate()
    for event in events:
        aggregate.apply(event)
    return totals_of(aggregate)


def run_generations(generations: int) -> Agent:
    """Return a run in which each generation completes 10 steps and the next one repeats 2 of them.

    Every third generation starts after a node loss and the others after a failure. Stopping the
    workers of generation 7 takes 30 s.
    """
    one = Agent("n1").launch(0.0)
    at, step = 1.0, 1
    for number in range(1, generations + 1):
        is_loss, restarts = number % 3 == 0, number - 1 - number // 3
        reason = "n2 left" if is_loss else "n1: rank 0 raised" if number > 1 else "the job starts"
        one.join(at, number, restarts=restarts, reason=reason).restore(at + 1.5, step - 1, 0.5)
        one.train(at + 2, step).advance(at + 11, step + 9, 1.0)
        if (number + 1) % 3:
            one.fail(at + 12, "rank 0 raised")
        one.stop(at + 12, at + 12.5 + 30 * (number == 7))
        at, step = at + 13 + 30 * (number == 7), step + 8
    return one.finish(at, "failed", "no restarts left")


def test_totals_count_generations_by_trigger_and_keep_the_most_expensive_ones() -> None:
    totals = compute_totals(run_generations(30).events)
    assert totals.lost.repeated_steps == 29 * 2
    assert totals.triggers == {
        GenerationTrigger.START: 1,
        GenerationTrigger.FAILURE: 19,
        GenerationTrigger.NODE_LOSS: 10,
    }
    assert len(totals.most_expensive) == MAX_LISTED_GENERATIONS
    assert 8 in [generation.number for generation in totals.most_expensive]


def test_summary_lists_the_lost_time_by_generation_and_by_phase() -> None:
    lines = list(summary_lines(compute_totals(run_generations(3).events)))
    assert lines == [
        "40 s in 3 generations, first step after 3.0 s (rendezvous 1.0 s, startup 1.5 s, "
        "restore 0.50 s), goodput 67.5 % (this node)",
        "  generation 2 after a failure, 4.0 s lost: n1: rank 0 raised",
        "  generation 3 after a loss, 5.0 s lost: n2 left",
        "  time lost on this node: detection 1.0 s, shutdown 1.0 s, rendezvous 1.0 s, "
        "startup 3.0 s, restore 1.0 s, 4 steps repeated in 2.0 s",
    ]


def test_summary_without_reported_steps_calls_the_lost_training_time_unknown() -> None:
    agent = Agent("n1").launch(0.0).join(1.0, 1, nodes=2).stop(9.0, 9.5)
    agent.join(10.0, 2, reason="n2 left", trigger="loss").succeed(20.0)
    assert list(summary_lines(compute_totals(agent.events))) == [
        "20 s in 2 generations, first workers started after rendezvous 1.0 s",
        "  generation 2 after a loss, workers started after 1.0 s: n2 left",
        "  time lost on this node: shutdown 0.50 s, rendezvous 0.50 s; lost training time is "
        "unknown because no worker reported a step (context().step)",
    ]


def test_reason_of_many_lines_is_printed_in_one_line() -> None:
    result = RunResult(WorkerState.FAILED, reason="a: ValueError\n[... 9 lines ...]\n  at last")
    line = "elasticrun: FAILED: a: ValueError [... 9 lines ...] at last\n"
    assert format_result(result) == line


def test_summary_of_many_generations_counts_them_and_names_the_most_expensive_ones() -> None:
    lines = list(summary_lines(compute_totals(run_generations(300).events)))
    assert len(lines) == 3 + MAX_LISTED_GENERATIONS
    assert lines[1] == "  199 after a failure, 100 after a loss; most expensive:"
    assert any(re.match("  generation 8 after a failure, 34 s lost", line) for line in lines)


def test_stall_counts_as_lost_time_in_a_single_generation() -> None:
    agent = Agent("n1").launch(0.0).join(2.0, 1).train(5.0, 1).advance(15.0, 101, 10.0)
    head, lost = summary_lines(compute_totals(agent.advance(115.0, 201, 1.0).succeed(120.0).events))
    assert head.endswith("goodput 20.8 % (this node)")
    assert lost == "  time lost on this node: stalled 1 min 30 s"


def test_summary_of_an_undisturbed_run_is_one_line() -> None:
    agent = (
        Agent("n1").launch(0.0).join(2.0, 1).record(5.0, "checkpoint.saved", step=4).succeed(70.0)
    )
    (line,) = summary_lines(compute_totals(agent.events))
    assert line == (
        "1 min 10 s in 1 generation, first workers started after rendezvous 2.0 s, "
        "last checkpoint: step 4"
    )


def test_time_of_imports_is_separate_from_the_time_of_the_rendezvous() -> None:
    agent = Agent("n1").launch(0.0).join(23.7, 1, imports=23.5).train(25.0, 1).succeed(70.0)
    (line,) = summary_lines(compute_totals(agent.events))
    assert "step after 25 s (imports 24 s, rendezvous 0.20 s, startup 1.3 s)" in line
    cost = history_of({"n1": agent.events}).generations[0].cost
    assert (cost.imports, cost.rendezvous) == (23.5, pytest.approx(0.2))


def test_time_of_imports_of_a_job_is_that_of_its_slowest_node() -> None:
    one = Agent("n1").launch(0.0).join(10.0, 1, nodes=2, imports=2.0)
    two = Agent("n2").launch(1.0).join(10.0, 1, nodes=2, rank=1, imports=8.0)
    (generation,) = history_of({"n1": one.events, "n2": two.events}).generations
    assert (generation.cost.imports, generation.cost.rendezvous) == (8.0, 2.0)


@pytest.mark.parametrize(
    ("startup", "imports", "shutdown", "is_suggested"),
    [
        (8.0, 3.1, 1.0, True),
        (2.0, 0.9, 1.0, False),  # too little time
        (8.0, 1.2, 1.0, False),  # too small a part of the start, which takes 4 s
        (8.0, 3.1, 9.0, False),  # other time was lost
    ],
)
def test_preload_is_suggested_if_imports_are_a_large_part_of_the_lost_time(
    startup: float, imports: float, shutdown: float, is_suggested: bool
) -> None:
    totals = NodeTotals(
        triggers={GenerationTrigger.START: 1, GenerationTrigger.FAILURE: 2},
        lost=RecoveryCost(startup=startup, shutdown=shutdown),
        slow_imports={"transformers.trainer": imports - 0.5, "pandas": 0.5},
    )
    line = (
        "  most of the lost time was the start of workers: add pandas,transformers.trainer to "
        f"--preload to import {imports:.1f} s of each start in advance"
    )
    assert list(summary_lines(totals))[2:] == [line] * is_suggested
