"""What a run came to, counted as it goes on, and the lines that say so."""

from __future__ import annotations

import re

import pytest
from told_runs import Agent

from elasticlib.agent.interface import RunResult
from elasticlib.launch.exit_summary import format_result, summary_lines
from elasticlib.observe.aggregate import NodeAggregate
from elasticlib.observe.event import Event
from elasticlib.observe.history import GenerationTrigger
from elasticlib.observe.history_reader import history_of
from elasticlib.observe.totals import MAX_LISTED_GENERATIONS, NodeTotals, totals_of
from elasticlib.workers.spec import WorkerState


def summed(events: list[Event]) -> NodeTotals:
    story = NodeAggregate()
    for event in events:
        story.apply(event)
    return totals_of(story)


def many(generations: int) -> Agent:
    """Each makes 10 steps, of which the next makes 2 again; each third node is lost; one stop
    takes long."""
    one = Agent("n1").launch(0.0)
    at, step = 1.0, 1
    for number in range(1, generations + 1):
        lost, restarts = number % 3 == 0, number - 1 - number // 3
        cause = "n2 left" if lost else "n1: rank 0 raised" if number > 1 else "the job starts"
        one.begin(at, number, restarts=restarts, cause=cause).restore(at + 1.5, step - 1, 0.5)
        one.train(at + 2, step).steps(at + 11, step + 9, 1.0)
        if (number + 1) % 3:
            one.fail(at + 12, "rank 0 raised")
        one.stop(at + 12, at + 12.5 + 30 * (number == 7))
        at, step = at + 13 + 30 * (number == 7), step + 8
    return one.end(at, "failed", "no restarts left")


def test_generations_are_counted_by_reason_and_the_most_expensive_ones_kept() -> None:
    sums = summed(many(30).events)
    assert sums.lost.repeated_steps == 29 * 2
    assert sums.triggers == {
        GenerationTrigger.START: 1,
        GenerationTrigger.FAILURE: 19,
        GenerationTrigger.NODE_LOSS: 10,
    }
    assert len(sums.most_expensive) == MAX_LISTED_GENERATIONS
    assert 8 in [generation.number for generation in sums.most_expensive], "the stop that took long"


def test_the_lines_say_what_was_lost_and_of_what() -> None:
    lines = list(summary_lines(summed(many(3).events)))
    assert lines == [
        "40 s in 3 generations, first step after 3.0 s (rendezvous 1.0 s, startup 1.5 s, "
        "restore 0.50 s), goodput 67.5 % (this node)",
        "  generation 2 after a failure, 4.0 s lost: n1: rank 0 raised",
        "  generation 3 after a loss, 5.0 s lost: n2 left",
        "  time lost on this node: detection 1.0 s, shutdown 1.0 s, rendezvous 1.0 s, "
        "startup 3.0 s, restore 1.0 s, 4 steps repeated in 2.0 s",
    ]


def test_where_no_steps_are_told_it_is_said_that_nobody_knows_what_was_lost() -> None:
    agent = Agent("n1").launch(0.0).begin(1.0, 1, nodes=2).stop(9.0, 9.5)
    agent.begin(10.0, 2, cause="n2 left", why="loss").succeed(20.0)
    assert list(summary_lines(summed(agent.events))) == [
        "20 s in 2 generations, first workers started after rendezvous 1.0 s",
        "  generation 2 after a loss, workers started after 1.0 s: n2 left",
        "  time lost on this node: shutdown 0.50 s, rendezvous 0.50 s; lost training time is "
        "unknown because no worker reported a step (context().step)",
    ]


def test_a_reason_of_many_lines_is_one_at_the_end() -> None:
    result = RunResult(WorkerState.FAILED, reason="a: ValueError\n[... 9 lines ...]\n  at last")
    line = "elasticrun: FAILED: a: ValueError [... 9 lines ...] at last\n"
    assert format_result(result) == line


def test_many_generations_are_counted_and_those_that_cost_most_are_named() -> None:
    lines = list(summary_lines(summed(many(300).events)))
    assert len(lines) == 3 + MAX_LISTED_GENERATIONS
    assert lines[1] == "  199 after a failure, 100 after a loss; most expensive:"
    assert any(re.match("  generation 8 after a failure, 34 s lost", line) for line in lines)


def test_a_stall_is_lost_in_a_single_generation_too() -> None:
    agent = Agent("n1").launch(0.0).begin(2.0, 1).train(5.0, 1).steps(15.0, 101, 10.0)
    head, lost = summary_lines(summed(agent.steps(115.0, 201, 1.0).succeed(120.0).events))
    assert head.endswith("goodput 20.8 % (this node)")
    assert lost == "  time lost on this node: stalled 1 min 30 s"


def test_a_run_that_lost_nothing_is_one_line() -> None:
    agent = (
        Agent("n1").launch(0.0).begin(2.0, 1).tell(5.0, "checkpoint.saved", step=4).succeed(70.0)
    )
    (line,) = summary_lines(summed(agent.events))
    assert line == (
        "1 min 10 s in 1 generation, first workers started after rendezvous 2.0 s, "
        "last checkpoint: step 4"
    )


def test_time_of_imports_before_the_first_start_is_told_apart_from_its_rendezvous() -> None:
    agent = Agent("n1").launch(0.0).begin(23.7, 1, imports=23.5).train(25.0, 1).succeed(70.0)
    (line,) = summary_lines(summed(agent.events))
    assert "step after 25 s (imports 24 s, rendezvous 0.20 s, startup 1.3 s)" in line
    cost = history_of({"n1": agent.events}).generations[0].cost
    assert (cost.imports, cost.rendezvous) == (23.5, pytest.approx(0.2))


def test_imports_of_a_job_are_those_of_its_slowest_node() -> None:
    one = Agent("n1").launch(0.0).begin(10.0, 1, nodes=2, imports=2.0)
    two = Agent("n2").launch(1.0).begin(10.0, 1, nodes=2, rank=1, imports=8.0)
    (made,) = history_of({"n1": one.events, "n2": two.events}).generations
    assert (made.cost.imports, made.cost.rendezvous) == (8.0, 2.0)
