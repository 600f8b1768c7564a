"""The strokes that drawings are made of: words, rules, boxes and lines at places of an axis."""

from __future__ import annotations

from collections.abc import Sequence

from .markup import Markup, element, number, percent
from .scale import ACROSS, LEFT, Axis, Label

THINNEST = 0.08
"""Per cent of the width that a box has at least, so that it shows."""


def words_at(label: Label, down: float, classes: str, *, told: str = "") -> Markup:
    """told: the tooltip, where there is more to say."""
    title = [element("title", told)] if told else []
    return element(
        "text",
        *title,
        label.words,
        x=percent(label.at),
        y=down,
        text_anchor=None if label.anchor == "start" else label.anchor,
        class_=classes,
    )


def left_words(words: str, down: float, classes: str = "halo", *, told: str = "") -> Markup:
    return words_at(Label(0.0, words, "start"), down, classes, told=told)


def right_words(words: str, down: float, classes: str = "note halo", *, told: str = "") -> Markup:
    return words_at(Label(100.0, words, "end"), down, classes, told=told)


def level(down: float, classes: str = "rule", *, span: tuple[float, float] = (0, 100)) -> Markup:
    """A line across, from one per cent to the other."""
    x1, x2 = map(percent, span)
    return element("line", x1=x1, x2=x2, y1=down, y2=down, class_=classes)


def upright(across: float, top: float, down: float, classes: str = "rule") -> Markup:
    x = percent(across)
    return element("line", x1=x, x2=x, y1=top, y2=down, class_=classes)


def box(
    span: tuple[float, float], top: float, height: float, classes: str, *, told: str = ""
) -> Markup:
    """A rectangle from one per cent to the other."""
    left, right = span
    title = [element("title", told)] if told else []
    return element(
        "rect",
        *title,
        x=percent(left),
        width=percent(max(right - left, THINNEST)),
        y=top,
        height=height,
        class_=classes,
    )


def curve(
    lines: Sequence[Sequence[tuple[float, float]]],
    across: Axis,
    up: Axis,
    place: tuple[float, float],
) -> Markup:
    """Lines of points in one strip of the drawing, from so many pixels down, so many high; a point
    alone is a dot that can be seen."""
    top, height = place
    kinds = {
        "curve": [line for line in lines if len(line) != 1],
        "curve alone": [line for line in lines if len(line) == 1],
    }
    paths = {kind: "".join(_path(x, across, up) for x in some) for kind, some in kinds.items()}
    return element(
        "svg",
        *(element("path", d=path, class_=kind) for kind, path in paths.items() if path),
        x=percent(LEFT),
        y=top,
        width=percent(ACROSS),
        height=height,
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
        overflow="visible",
    )


def _path(line: Sequence[tuple[float, float]], across: Axis, up: Axis) -> str:
    places = [
        f"{number(round(across.part(x) * 1000, 1))} {number(round(1000 - up.part(y) * 1000, 1))}"
        for x, y in line
    ]
    if len(places) == 1:
        # A line without length, with a round end, is a dot.
        return f"M{places[0]}h.01"
    return f"M{'L'.join(places)}"
