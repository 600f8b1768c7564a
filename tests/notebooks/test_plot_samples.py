"""Plots of samples show each use, and samples that were not used or used more than once."""

from __future__ import annotations

from typing import Any

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from plot_samples import COLORS, SampleUse, plot_samples, plot_turns

USES = [
    SampleUse(0, 1, 0, 0),
    SampleUse(1, 1, 1, 0),
    SampleUse(3, 1, 0, 1),
    SampleUse(1, 2, 0, 0),
    SampleUse(5, 2, 2, 0),
]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def cells(figure: Figure) -> list[Any]:
    return [patch for patch in figure.axes[0].patches if patch.get_y() > -0.6]


def test_each_sample_is_a_cell_in_the_color_of_its_rank() -> None:
    patches = cells(plot_samples(USES, 6))
    colors = [to_hex(patch.get_facecolor()) if patch.get_fill() else None for patch in patches]
    blank = to_hex("none")
    assert colors == [COLORS[0], COLORS[0], blank, COLORS[0], blank, COLORS[2]]
    assert [patch.get_linewidth() > 1 for patch in patches] == [False, True, *[False] * 4]


def test_unused_and_repeated_samples_are_counted() -> None:
    assert "6 samples: 2 unused, 1 used more than once" in texts(plot_samples(USES, 6))
    assert "1+2" in texts(plot_samples(USES, 6))


def test_turns_are_in_their_order_with_the_numbers_of_the_samples() -> None:
    figure = plot_turns(USES)
    positions = [(round(cell.get_y() + 0.42), cell.get_x()) for cell in cells(figure)]
    assert [row for row, _ in positions] == [use.rank for use in USES]
    columns = dict(zip(USES, (x for _, x in positions), strict=True))
    assert columns[USES[0]] == columns[USES[1]] < columns[USES[2]] < columns[USES[3]]
    assert [text for text in texts(figure) if text.isdigit()] == ["0", "1", "3", "1", "5"]
    assert "generation 2: 2 ranks" in texts(figure)
