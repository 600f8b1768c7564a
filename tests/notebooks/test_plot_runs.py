"""Plots of a run show its history, and nothing for values that the history does not have."""

from __future__ import annotations

import attrs
import pytest
from matplotlib.axes import Axes
from plot_runs import COLORS, LOST_COLOR, format_cost, plot_crashes, plot_steps

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
COST = RecoveryCost(shutdown=0.5, rendezvous=0.5, startup=1.0, repeated_steps=15, repeated=2.0)
SECOND = Generation(2, GenerationTrigger.FAILURE, "killed", 11.0, 20.0, 1, 2, 1, 12.0, 41, 70, COST)
THIRD = Generation(3, GenerationTrigger.RESIZE, "node 2 joined", 21.0, None, 2, 3, 1, 22.0, 71, 90)
NODES = (NodeHistory("a", "a", 0.0, 30.0, 2), NodeHistory("b", "b", 9.0, 30.0, 1))
MEMBERSHIPS = (
    NodeMembership("a", 1, 0, (0, 1), 2.0, 10.0),
    NodeMembership("a", 2, 0, (0, 1), 11.0, 20.0),
    NodeMembership("a", 3, 0, (0, 1), 21.0),
    NodeMembership("b", 3, 1, (2, 2), 21.0),
)
RUN = History("job", 0.0, 30.0, JobState.RUNNING, NODES, MEMBERSHIPS, (FIRST, SECOND, THIRD))


def lines(axes: Axes, color: str) -> list[tuple[list[float], list[float]]]:
    """Return the x and y values of each solid line of this color."""
    return [
        ([*map(float, line.get_xdata())], [*map(float, line.get_ydata())])
        for line in axes.lines
        if line.get_color() == color and line.get_linestyle() == "-"
    ]


def test_each_generation_has_a_line_from_its_first_step_to_its_last() -> None:
    _, steps = plot_steps(RUN).axes
    assert lines(steps, COLORS[0]) == [([3.0, 10.0], [1, 55])]
    assert lines(steps, COLORS[1]) == [([12.0, 20.0], [41, 70])]
    assert lines(steps, COLORS[2]) == [([22.0, 30.0], [71, 90])]


def test_only_repeated_steps_are_red() -> None:
    _, steps = plot_steps(RUN).axes
    ((times, numbers),) = lines(steps, LOST_COLOR)
    assert numbers == [41, 55]
    assert times == pytest.approx([12.0, 12.0 + 8.0 * 14 / 29])


def test_failure_has_a_cross_and_a_resize_has_none() -> None:
    _, steps = plot_steps(RUN).axes
    crosses = [line for line in steps.lines if line.get_marker() == "X"]
    points = [(*map(float, one.get_xdata()), *map(float, one.get_ydata())) for one in crosses]
    assert points == [(10.0, 55.0)]


def test_each_node_has_a_row_and_each_generation_a_label() -> None:
    nodes, _ = plot_steps(RUN).axes
    assert [label.get_text() for label in nodes.get_yticklabels()] == ["node 1", "node 2"]
    labels = [text.get_text() for text in nodes.texts]
    assert labels == ["1", "start\n2 workers", "2", "failure\n2 workers", "3", "resize\n3 workers"]
    bars = [patch for patch in nodes.patches if patch.get_zorder() == 2]
    rows = [round(bar.get_y() + bar.get_height() / 2) for bar in bars]
    assert rows == [0, 0, 0, 1]
    assert bars[3].get_x() + bars[3].get_width() == RUN.duration_seconds


def test_plot_of_crashes_starts_with_the_first_step_and_contains_the_cost() -> None:
    (axes,) = plot_crashes({"every 20 steps": RUN}).axes
    assert lines(axes, COLORS[0])[0] == ([0.0, 7.0], [1, 55])
    assert axes.get_title(loc="left") == "every 20 steps"
    assert [text.get_text() for text in axes.texts] == ["15 steps repeated, 4.0 s lost"]


def test_cost_of_no_or_one_step_has_its_own_wording() -> None:
    one, none = (
        attrs.evolve(
            RUN,
            generations=(FIRST, attrs.evolve(SECOND, cost=RecoveryCost(0.5, repeated_steps=count))),
        )
        for count in (1, 0)
    )
    assert format_cost(one) == "1 step repeated, 0.5 s lost"
    assert format_cost(none) == "no step repeated, 0.5 s lost"


def test_run_without_recorded_steps_has_bands_and_no_line() -> None:
    without_steps = [
        attrs.evolve(generation, first_step_at=None, first_step=None, last_step=None)
        for generation in RUN.generations
    ]
    nodes, steps = plot_steps(attrs.evolve(RUN, generations=tuple(without_steps))).axes
    assert not steps.lines
    assert len(nodes.texts) == 6
    plot_steps(attrs.evolve(RUN, generations=(), memberships=()))
