"""A picture of states and the arrows between them, as an SVG that stands by itself.

It brings its own ground, light or dark as its reader's system is, so that it can be read on a page
of either kind. Where boxes and arrows lie is said by whoever draws; what they are is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import hypot

Point = tuple[float, float]
Arrow = tuple[str, str]

WIDE, HIGH, LINE = 118.0, 42.0, 15.0
ROUND = 12.0
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
.state { font-weight: 600; font-size: 14px; }
.said { font-size: 12px; paint-order: stroke; stroke: #ffffff; stroke-width: 5px; }
.ground { fill: #ffffff; }
.box { fill: #e8f0fb; stroke: #3b5b8c; stroke-width: 1.5; }
.arrow { fill: none; stroke: #6b7684; stroke-width: 1.4; }
.head, .dot { fill: #6b7684; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ee; }
  .said { stroke: #171b21; }
  .ground { fill: #171b21; }
  .box { fill: #22324a; stroke: #86a9dd; }
  .arrow { stroke: #9aa5b3; }
  .head, .dot { fill: #9aa5b3; }
}
"""


def picture(
    title: str,
    size: Point,
    *,
    places: Mapping[str, Point],
    arrows: Mapping[Arrow, Sequence[str]],
    routes: Mapping[Arrow, tuple[Sequence[Point], Point]],
    ends: Mapping[str, Point],
) -> str:
    """The SVG's text.

    places: the middle of each state's box. arrows: what leads from one to the other. routes: where
    an arrow bends, and where its words begin; without one it is straight. ends: of states that
    begin or end it all, the dot's place.

    Raises:
        LookupError: a route for an arrow that there is not, or an arrow to a state without a place.
    """
    if strays := routes.keys() - arrows.keys():
        raise LookupError(f"routes of arrows that there are not: {sorted(strays)}")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:g} {size[1]:g}" '
        f'width="{size[0]:g}" height="{size[1]:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{size[0]:g}" height="{size[1]:g}" rx="8"/>',
    ]
    said = []
    for (before, after), words in arrows.items():
        middle = [(places[name][0], places[name][1]) for name in (before, after)]
        straight = ((middle[0][0] + middle[1][0]) / 2, (middle[0][1] + middle[1][1]) / 2)
        bends, label = routes.get((before, after), ((), straight))
        lines += _arrow(_clipped(middle[0], bends, middle[1]))
        said += _words(label, words)
    for name, (x, y) in ends.items():
        into = (x, y) > places[name]
        box = _edge(places[name], (x, y))
        lines += _arrow([box, (x - 11, y)] if into else [(x, y), box])
        lines.append(f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="7"/>')
        if into:
            lines.append(f'<circle class="arrow" cx="{x:g}" cy="{y:g}" r="10"/>')
    for name, (x, y) in places.items():
        corner = f'x="{x - WIDE / 2:g}" y="{y - HIGH / 2:g}"'
        lines.append(f'<rect class="box" {corner} width="{WIDE:g}" height="{HIGH:g}" rx="8"/>')
        lines.append(f'<text class="state" x="{x:g}" y="{y + 5:g}">{escape(name)}</text>')
    return "\n".join([*lines, *said, "</svg>", ""])


def _clipped(before: Point, bends: Sequence[Point], after: Point) -> list[Point]:
    """The whole way from one box's edge to the other's."""
    way = [before, *bends, after]
    return [_edge(before, way[1]), *bends, _edge(after, way[-2])]


def _edge(middle: Point, towards: Point) -> Point:
    """Where a line to there leaves a box: upright if it is right above or below it."""
    dx, dy = towards[0] - middle[0], towards[1] - middle[1]
    if 0 < abs(dx) < WIDE / 2:
        return (towards[0], middle[1] + (HIGH / 2 if dy > 0 else -HIGH / 2))
    share = min(
        WIDE / 2 / abs(dx) if dx else float("inf"), HIGH / 2 / abs(dy) if dy else float("inf")
    )
    return (middle[0] + dx * share, middle[1] + dy * share)


def _arrow(way: Sequence[Point]) -> list[str]:
    """A line with round corners, and its head."""
    drawn = [f"M{way[0][0]:.1f} {way[0][1]:.1f}"]
    for before, corner, after in zip(way, way[1:], way[2:], strict=False):
        start, end = _towards(corner, before, ROUND), _towards(corner, after, ROUND)
        drawn.append(f"L{start[0]:.1f} {start[1]:.1f}")
        drawn.append(f"Q{corner[0]:.1f} {corner[1]:.1f} {end[0]:.1f} {end[1]:.1f}")
    tip, back = way[-1], _towards(way[-1], way[-2], 9.0)
    drawn.append(f"L{back[0]:.1f} {back[1]:.1f}")
    aside = ((tip[1] - back[1]) * 0.45, (back[0] - tip[0]) * 0.45)
    sides = [(back[0] + sign * aside[0], back[1] + sign * aside[1]) for sign in (1, -1)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (tip, *sides))
    return [
        f'<path class="arrow" d="{" ".join(drawn)}"/>',
        f'<polygon class="head" points="{points}"/>',
    ]


def _towards(point: Point, other: Point, length: float) -> Point:
    dx, dy = other[0] - point[0], other[1] - point[1]
    far = hypot(dx, dy) or 1.0
    return (point[0] + dx / far * length, point[1] + dy / far * length)


def _words(label: Point, words: Sequence[str]) -> list[str]:
    x, y = label
    return [
        f'<text class="said" x="{x:g}" y="{y + LINE * at:g}">{escape(word)}</text>'
        for at, word in enumerate(words)
    ]
