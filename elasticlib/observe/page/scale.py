"""Where things stand in a drawing as wide as its page: per cent across, pixels down.

A drawing has no width of its own, so a phone and a desk see the same one and text keeps its size.
What a label needs is judged for three widths, and it is shown from the first where it fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs

from ..wording import DAY, HOUR, MINUTE

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
