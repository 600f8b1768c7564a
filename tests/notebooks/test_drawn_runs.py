"""A picture of a run shows what its history tells, and nothing where it tells nothing."""

from __future__ import annotations

import attrs
import pytest
from drawn_runs import HUES, LOST, cost_of, draw_crashes, draw_steps
from matplotlib.axes import Axes

from elasticlib.observe.history import (
    Generation,
    GenerationTrigger,
    History,
    JobState,
    NodeHistory,
    NodeMembership,
    RecoveryCost,
)

FIRST = Generation(1, GenerationTrigger.START, "the job starts", 2.0, 10.0, 1, 2, 0, 3.0, 1, 55)
AGAIN = RecoveryCost(shutdown=0.5, rendezvous=0.5, startup=1.0, repeated_steps=15, repeated=2.0)
SECOND = Generation(
    2, GenerationTrigger.FAILURE, "killed", 11.0, 20.0, 1, 2, 1, 12.0, 41, 70, AGAIN
)
THIRD = Generation(3, GenerationTrigger.RESIZE, "node 2 joined", 21.0, None, 2, 3, 1, 22.0, 71, 90)
NODES = (NodeHistory("a", "a", 0.0, 30.0, 2), NodeHistory("b", "b", 9.0, 30.0, 1))
STAYS = (
    NodeMembership("a", 1, 0, (0, 1), 2.0, 10.0),
    NodeMembership("a", 2, 0, (0, 1), 11.0, 20.0),
    NodeMembership("a", 3, 0, (0, 1), 21.0),
    NodeMembership("b", 3, 1, (2, 2), 21.0),
)
RUN = History("job", 0.0, 30.0, JobState.RUNNING, NODES, STAYS, (FIRST, SECOND, THIRD))


def lines(axes: Axes, colour: str) -> list[tuple[list[float], list[float]]]:
    return [
        ([*map(float, line.get_xdata())], [*map(float, line.get_ydata())])
        for line in axes.lines
        if line.get_color() == colour and line.get_linestyle() == "-"
    ]


def test_steps_are_drawn_from_the_first_of_each_generation_to_its_last() -> None:
    _, steps = draw_steps(RUN).axes
    assert lines(steps, HUES[0]) == [([3.0, 10.0], [1, 55])]
    assert lines(steps, HUES[1]) == [([12.0, 20.0], [41, 70])]
    assert lines(steps, HUES[2]) == [([22.0, 30.0], [71, 90])]


def test_steps_that_were_done_before_are_red_and_no_others() -> None:
    _, steps = draw_steps(RUN).axes
    ((times, done),) = lines(steps, LOST)
    assert done == [41, 55]
    assert times == pytest.approx([12.0, 12.0 + 8.0 * 14 / 29])


def test_what_was_lost_has_a_cross_and_a_resize_has_none() -> None:
    _, steps = draw_steps(RUN).axes
    crosses = [line for line in steps.lines if line.get_marker() == "X"]
    assert [(*map(float, one.get_xdata()), *map(float, one.get_ydata())) for one in crosses] == [
        (10.0, 55.0)
    ]


def test_each_node_has_a_row_and_each_generation_its_words() -> None:
    nodes, _ = draw_steps(RUN).axes
    assert [label.get_text() for label in nodes.get_yticklabels()] == ["node 1", "node 2"]
    said = [text.get_text() for text in nodes.texts]
    assert said == ["1", "start\n2 workers", "2", "failure\n2 workers", "3", "resize\n3 workers"]
    bars = [patch for patch in nodes.patches if patch.get_zorder() == 2]
    rows = [round(bar.get_y() + bar.get_height() / 2) for bar in bars]
    assert rows == [0, 0, 0, 1]
    assert bars[3].get_x() + bars[3].get_width() == RUN.duration_seconds


def test_crashes_begin_with_the_first_step_and_say_what_they_cost() -> None:
    (axes,) = draw_crashes({"each 20 steps": RUN}).axes
    assert lines(axes, HUES[0])[0] == ([0.0, 7.0], [1, 55])
    assert axes.get_title(loc="left") == "each 20 steps"
    assert [text.get_text() for text in axes.texts] == ["15 steps done again, 4.0 s lost"]


def test_a_cost_of_no_or_one_step_is_said_so() -> None:
    one, calm = (
        attrs.evolve(
            RUN,
            generations=(FIRST, attrs.evolve(SECOND, cost=RecoveryCost(0.5, repeated_steps=count))),
        )
        for count in (1, 0)
    )
    assert cost_of(one) == "1 step done again, 0.5 s lost"
    assert cost_of(calm) == "no step done again, 0.5 s lost"


def test_a_run_that_told_of_no_steps_has_bands_and_no_line() -> None:
    silent = [
        attrs.evolve(one, first_step_at=None, first_step=None, last_step=None)
        for one in RUN.generations
    ]
    nodes, steps = draw_steps(attrs.evolve(RUN, generations=tuple(silent))).axes
    assert not steps.lines
    assert len(nodes.texts) == 6
    draw_steps(attrs.evolve(RUN, generations=(), memberships=()))
