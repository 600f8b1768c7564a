"""A picture of samples shows each use, and what nobody used or several did."""

from __future__ import annotations

from typing import Any

from drawn_samples import HUES, Use, draw_samples, draw_turns
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

USES = [Use(0, 1, 0, 0), Use(1, 1, 1, 0), Use(3, 1, 0, 1), Use(1, 2, 0, 0), Use(5, 2, 2, 0)]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def cells(figure: Figure) -> list[Any]:
    return [patch for patch in figure.axes[0].patches if patch.get_y() > -0.6]


def test_each_sample_is_a_cell_in_the_colour_of_who_trained_on_it() -> None:
    drawn = cells(draw_samples(USES, 6))
    hues = [to_hex(cell.get_facecolor()) if cell.get_fill() else None for cell in drawn]
    blank = to_hex("none")
    assert hues == [HUES[0], HUES[0], blank, HUES[0], blank, HUES[2]]
    assert [cell.get_linewidth() > 1 for cell in drawn] == [False, True, *[False] * 4]


def test_what_was_never_used_or_more_than_once_is_counted() -> None:
    assert "of 6 samples 2 never, 1 more than once" in words(draw_samples(USES, 6))
    assert "1+2" in words(draw_samples(USES, 6))


def test_turns_stand_in_their_order_with_the_samples_numbers() -> None:
    figure = draw_turns(USES)
    drawn = [(round(cell.get_y() + 0.42), cell.get_x()) for cell in cells(figure)]
    assert [row for row, _ in drawn] == [use.rank for use in USES]
    places = dict(zip(USES, (x for _, x in drawn), strict=True))
    assert places[USES[0]] == places[USES[1]] < places[USES[2]] < places[USES[3]]
    assert [word for word in words(figure) if word.isdigit()] == ["0", "1", "3", "1", "5"]
    assert "generation 2: 2 ranks" in words(figure)
