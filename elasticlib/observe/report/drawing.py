"""What drawings are made of: places, labels, strokes and signs.

A drawing has no width of its own, so a phone and a desk see the same one and text keeps its size:
places are per cent across and pixels down. What a label needs is judged for three widths, and it is
shown from the first where it fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ..wording import DAY, HOUR, MINUTE
from .markup import Markup, element, number, percent

LEFT, ACROSS = 1.5, 97.0
"""Per cent; the rest is room for half a sign at either end."""
WIDTHS = (320, 600, 940)
"""Pixels of a drawing, at least, for labels of the classes w0, w1 and w2."""
LETTER = 0.66
"""Of a letter's height, its width at most, on average, in the fonts that are about."""
TEXT = 12
_STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(MINUTE * many for many in (1, 2, 5, 10, 15, 30)),
    *(HOUR * many for many in (1, 2, 3, 6, 12)),
    *(DAY * many for many in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)
_UNITS = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (1.0, "s"))


@attrs.frozen
class Axis:
    """From first to last, left to right, in the middle 97 % of a drawing."""

    first: float
    last: float

    def __call__(self, value: float) -> float:
        """Its place in per cent; within the drawing, whatever the value."""
        return LEFT + ACROSS * self.part(value)

    def part(self, value: float) -> float:
        """The same from 0 to 1."""
        span = self.last - self.first
        return min(1.0, max(0.0, (value - self.first) / span)) if span > 0 else 0.0


def time_ticks(seconds: float, most: int = 5) -> list[tuple[float, str]]:
    """Round moments from 0 on, so that there are at most so many steps between them."""
    step = next((one for one in _STEPS if seconds / one <= most), _STEPS[-1])
    unit, name = next((pair for pair in _UNITS if step >= pair[0]), _UNITS[-1])
    many = min(int(seconds / step), most)
    return [(0.0, "0")] + [(step * at, f"{step * at / unit:g} {name}") for at in range(1, many + 1)]


def value_ticks(low: float, high: float, most: int = 3) -> list[float]:
    """Round values within the two, at most so many steps apart."""
    rough = (high - low) / most
    if not max(1e-300, 1e-12 * max(abs(low), abs(high))) < rough < 1e300:
        return [low]  # nothing lies between them that could be told from them
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(ten * many for many in (1, 2, 5, 10) if ten * many >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


@attrs.frozen
class Label:
    """Words at a place in per cent. anchor: start, middle or end, as in SVG."""

    at: float
    words: str
    anchor: str = "middle"

    def reach(self, width: float, size: float) -> tuple[float, float]:
        """Its left and right end in pixels, in a drawing of that width."""
        wide = len(self.words) * size * LETTER
        begin = {"start": 0.0, "middle": wide / 2, "end": wide}[self.anchor]
        left = self.at / 100 * width - begin
        return left, left + wide


def inward(label: Label, size: float = TEXT) -> Label:
    """The same label, turned inward where it would reach over an end of the narrowest drawing."""
    left, right = label.reach(WIDTHS[0], size)
    if left < 0:
        return attrs.evolve(label, anchor="start")
    return attrs.evolve(label, anchor="end") if right > WIDTHS[0] else label


def placed(labels: Iterable[Label], size: float = TEXT) -> list[tuple[Label, str]]:
    """Those labels that fit side by side, each with the class of the narrowest width where it does;
    the first of them come first."""
    chosen: list[tuple[Label, int]] = []
    for label in labels:
        rung = next((rung for rung in range(len(WIDTHS)) if _fits(label, chosen, rung, size)), None)
        if rung is not None:
            chosen.append((label, rung))
    return [(label, f"w{rung}") for label, rung in chosen]


def _fits(label: Label, chosen: Sequence[tuple[Label, int]], rung: int, size: float) -> bool:
    """At this width and at the wider ones, where others are shown as well."""
    for wider in range(rung, len(WIDTHS)):
        left, right = label.reach(WIDTHS[wider], size)
        if left < 0 or right > WIDTHS[wider]:
            return False
        for other, shown in chosen:
            begin, end = other.reach(WIDTHS[wider], size)
            if shown <= wider and left < end + size / 2 and begin < right + size / 2:
                return False
    return True


def inside(share: float, words: str, size: float = TEXT, *, room: float = 4) -> str | None:
    """The class of words that stand in a bar of so many per cent, with so many pixels of room
    around them; None where they never fit."""
    need = len(words) * size * LETTER + room
    for rung, width in enumerate(WIDTHS):
        if share / 100 * width >= need:
            return f"w{rung}"
    return None


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Points in order of their first number, at most so many: in each stretch the first, the
    lowest, the highest and the last, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, most // 4)
    found: list[tuple[float, float]] = []
    for at in range(stretches):
        part = range(at * len(points) // stretches, (at + 1) * len(points) // stretches)
        lowest = min(part, key=lambda index: points[index][1])
        highest = max(part, key=lambda index: points[index][1])
        found += [points[index] for index in sorted({part[0], lowest, highest, part[-1]})]
    return found


THINNEST = 0.08
"""Per cent of the width that a box has at least, so that it shows."""


def drawing(title: str, parts: Iterable[Markup], height: float, *, desc: str = "") -> Markup:
    """A drawing as wide as its page, with words for people who do not see it."""
    words = [element("title", title), *([element("desc", desc)] if desc else [])]
    return element("svg", *words, *parts, class_="drawing", role="img", height=height)


def words_at(label: Label, down: float, classes: str, *, title: str = "") -> Markup:
    """title: the tooltip, where there is more to say."""
    return element(
        "text",
        *_tooltip(title),
        label.words,
        x=percent(label.at),
        y=down,
        text_anchor=None if label.anchor == "start" else label.anchor,
        class_=classes,
    )


def _tooltip(title: str) -> list[Markup]:
    return [element("title", title)] if title else []


def left_words(words: str, down: float, classes: str = "halo", *, title: str = "") -> Markup:
    return words_at(Label(0.0, words, "start"), down, classes, title=title)


def level(down: float, classes: str = "rule", *, span: tuple[float, float] = (0, 100)) -> Markup:
    """A line across, from one per cent to the other."""
    x1, x2 = map(percent, span)
    return element("line", x1=x1, x2=x2, y1=down, y2=down, class_=classes)


def upright(across: float, top: float, down: float, classes: str = "rule") -> Markup:
    x = percent(across)
    return element("line", x1=x, x2=x, y1=top, y2=down, class_=classes)


def box(
    span: tuple[float, float], top: float, height: float, classes: str, *, title: str = ""
) -> Markup:
    """A rectangle from one per cent to the other."""
    x, width = percent(span[0]), percent(max(span[1] - span[0], THINNEST))
    shown = _tooltip(title)
    return element("rect", *shown, x=x, width=width, y=top, height=height, class_=classes)


def small(*parts: Markup, width: float, height: float, view: str | None = None) -> Markup:
    """A picture in a line of words, which say what it means."""
    about = {"class_": "sign", "viewBox": view, "aria_hidden": "true"}
    return element("svg", *parts, width=width, height=height, **about)


def swatch(*classes: str, width: float = 10.0) -> Markup:
    """A bar in these colours, in a line of words."""
    each = width / len(classes)
    bars = [
        element(
            "rect",
            x=1 + at * each,
            y=1,
            width=each - (at + 1 < len(classes)),
            height=10,
            class_=one,
        )
        for at, one in enumerate(classes)
    ]
    return small(*bars, width=width + 2, height=12)


def curve(
    lines: Sequence[Sequence[tuple[float, float]]],
    across: Axis,
    up: Axis,
    place: tuple[float, float],
) -> Markup:
    """Lines of points in one strip of the drawing, from so many pixels down, so many high; a point
    alone is a dot that can be seen."""
    kinds = {
        "curve": [line for line in lines if len(line) != 1],
        "curve alone": [line for line in lines if len(line) == 1],
    }
    paths = {kind: "".join(_path(x, across, up) for x in some) for kind, some in kinds.items()}
    return element(
        "svg",
        *(element("path", d=path, class_=kind) for kind, path in paths.items() if path),
        x=percent(LEFT),
        y=place[0],
        width=percent(ACROSS),
        height=place[1],
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
        overflow="visible",
    )


def _path(line: Sequence[tuple[float, float]], across: Axis, up: Axis) -> str:
    places = [
        f"{number(round(across.part(x) * 1000, 1))} {number(round(1000 - up.part(y) * 1000, 1))}"
        for x, y in line
    ]
    # A line without length, with a round end, is a dot.
    return f"M{places[0]}h.01" if len(places) == 1 else f"M{'L'.join(places)}"


@attrs.frozen
class Sign:
    """path: filled, around its middle, within 6 pixels. hue: a class of the style."""

    path: str
    hue: str
    means: str


_CROSS = "M-5-3.2-3.2-5 0-1.8 3.2-5 5-3.2 1.8 0 5 3.2 3.2 5 0 1.8-3.2 5-5 3.2-1.8 0z"
_SMALL_CROSS = "M-4-2.4-2.4-4 0-1.6 2.4-4 4-2.4 1.6 0 4 2.4 2.4 4 0 1.6-2.4 4-4 2.4-1.6 0z"
_RING = "M0-3.8a3.8 3.8 0 1 1-.01 0zM0-2a2 2 0 1 0 .01 0z"

SIGNS: Mapping[str, Sign] = {
    "failure": Sign(_CROSS, "bad", "failure"),
    "vanished": Sign("M0-5.5 5.5 0 0 5.5-5.5 0zM0-2.9-2.9 0 0 2.9 2.9 0z", "gone", "node lost"),
    "drain.asked": Sign("M-5-4H5L0 5z", "leave", "asked to drain"),
    "lost": Sign(
        "M-1.4-5.5H1.4L.9 1.5H-.9zM0 2.8a1.5 1.5 0 1 1-.01 0z", "leave", "events lost here"
    ),
    "saved": Sign("M0-3.5a3.5 3.5 0 1 1-.01 0z", "ink", "checkpoint"),
    "snapshot": Sign(_RING, "ink", "snapshot in memory"),
    "restored": Sign("M0-5 5 4H-5z", "good", "state restored"),
    "SUCCEEDED": Sign("M-5.5.5-4-1-1.6 1.4 4-4.5 5.5-3-1.6 4.4z", "good", "succeeded"),
    "FAILED": Sign(f"M-5.5-5.5H5.5V5.5H-5.5z{_SMALL_CROSS}", "bad", "node failed"),
    "DRAINED": Sign("M-5-5.5H5L0 2.5zM-5 3.5H5V5.5H-5z", "leave", "drained"),
    "STOPPED": Sign("M-4.5-4.5H4.5V4.5H-4.5z", "leave", "stopped by a signal"),
}


def place(name: str, across: float, down: float, title: str) -> Markup:
    """A sign in a drawing, at so many per cent and pixels."""
    sign = SIGNS[name]
    shape = element(
        "path",
        *_tooltip(title),
        d=sign.path,
        class_=f"{sign.hue} halo",
        fill_rule="evenodd",
        data_sign=name,
    )
    return element("svg", shape, x=percent(across), y=down, overflow="visible")


def picture(name: str) -> Markup:
    """A sign in a line of words; none of that name: nothing."""
    sign = SIGNS.get(name)
    if sign is None:
        return Markup("")
    path = element("path", d=sign.path, class_=sign.hue, fill_rule="evenodd")
    return small(path, width=14, height=14, view="-7 -7 14 14")
