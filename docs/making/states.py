"""Picture of states and the arrows between them, as an SVG without external files.

The picture has a background of its own, light or dark as the reader's system is, so that it can be
read on any page. The caller chooses the positions of boxes and arrows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import hypot

Point = tuple[float, float]
Arrow = tuple[str, str]

BOX_WIDTH, BOX_HEIGHT, LINE_HEIGHT = 118.0, 42.0, 15.0
CORNER_RADIUS = 12.0
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
.state { font-weight: 600; font-size: 14px; }
.label { font-size: 12px; paint-order: stroke; stroke: #ffffff; stroke-width: 5px; }
.ground { fill: #ffffff; }
.box { fill: #e8f0fb; stroke: #3b5b8c; stroke-width: 1.5; }
.arrow { fill: none; stroke: #6b7684; stroke-width: 1.4; }
.head, .dot { fill: #6b7684; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ee; }
  .label { stroke: #171b21; }
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
    positions: Mapping[str, Point],
    arrows: Mapping[Arrow, Sequence[str]],
    routes: Mapping[Arrow, tuple[Sequence[Point], Point]],
    dots: Mapping[str, Point],
) -> str:
    """Return the text of the SVG.

    Args:
        title: The title of the picture.
        size: Its width and height.
        positions: The center of the box of each state.
        arrows: The labels of each arrow, one per line.
        routes: The bends of an arrow and the start of its labels. An arrow without a route is
            straight.
        dots: The dot of each first or last state.

    Raises:
        LookupError: A route belongs to no arrow, or an arrow leads to a state without a position.
    """
    if unknown := routes.keys() - arrows.keys():
        raise LookupError(f"these routes belong to no arrow: {sorted(unknown)}")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:g} {size[1]:g}" '
        f'width="{size[0]:g}" height="{size[1]:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{size[0]:g}" height="{size[1]:g}" rx="8"/>',
    ]
    labels = []
    for (source, target), texts in arrows.items():
        (x1, y1), (x2, y2) = positions[source], positions[target]
        bends, label_start = routes.get((source, target), ((), ((x1 + x2) / 2, (y1 + y2) / 2)))
        lines += _arrow(_clip((x1, y1), bends, (x2, y2)))
        labels += _labels(label_start, texts)
    for name, (x, y) in dots.items():
        is_last = (x, y) > positions[name]
        edge = _box_edge(positions[name], (x, y))
        lines += _arrow([edge, (x - 11, y)] if is_last else [(x, y), edge])
        lines.append(f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="7"/>')
        if is_last:
            lines.append(f'<circle class="arrow" cx="{x:g}" cy="{y:g}" r="10"/>')
    for name, (x, y) in positions.items():
        corner = f'x="{x - BOX_WIDTH / 2:g}" y="{y - BOX_HEIGHT / 2:g}"'
        size_text = f'width="{BOX_WIDTH:g}" height="{BOX_HEIGHT:g}"'
        lines.append(f'<rect class="box" {corner} {size_text} rx="8"/>')
        lines.append(f'<text class="state" x="{x:g}" y="{y + 5:g}">{escape(name)}</text>')
    return "\n".join([*lines, *labels, "</svg>", ""])


def _clip(source: Point, bends: Sequence[Point], target: Point) -> list[Point]:
    """Return the path from the edge of one box to the edge of the other."""
    path = [source, *bends, target]
    return [_box_edge(source, path[1]), *bends, _box_edge(target, path[-2])]


def _box_edge(center: Point, other: Point) -> Point:
    """Return the point at which a line to `other` leaves a box.

    The line is vertical if the other point is directly above or below the box.
    """
    dx, dy = other[0] - center[0], other[1] - center[1]
    if 0 < abs(dx) < BOX_WIDTH / 2:
        return (other[0], center[1] + (BOX_HEIGHT / 2 if dy > 0 else -BOX_HEIGHT / 2))
    fraction = min(
        BOX_WIDTH / 2 / abs(dx) if dx else float("inf"),
        BOX_HEIGHT / 2 / abs(dy) if dy else float("inf"),
    )
    return (center[0] + dx * fraction, center[1] + dy * fraction)


def _arrow(path: Sequence[Point]) -> list[str]:
    """Return a line with round corners, and its head."""
    commands = [f"M{path[0][0]:.1f} {path[0][1]:.1f}"]
    for before, corner, after in zip(path, path[1:], path[2:], strict=False):
        start, end = _move(corner, before, CORNER_RADIUS), _move(corner, after, CORNER_RADIUS)
        commands.append(f"L{start[0]:.1f} {start[1]:.1f}")
        commands.append(f"Q{corner[0]:.1f} {corner[1]:.1f} {end[0]:.1f} {end[1]:.1f}")
    tip, base = path[-1], _move(path[-1], path[-2], 9.0)
    commands.append(f"L{base[0]:.1f} {base[1]:.1f}")
    normal = ((tip[1] - base[1]) * 0.45, (base[0] - tip[0]) * 0.45)
    corners = [(base[0] + sign * normal[0], base[1] + sign * normal[1]) for sign in (1, -1)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (tip, *corners))
    return [
        f'<path class="arrow" d="{" ".join(commands)}"/>',
        f'<polygon class="head" points="{points}"/>',
    ]


def _move(point: Point, other: Point, length: float) -> Point:
    """Return the point that is `length` away from `point` in the direction of `other`."""
    dx, dy = other[0] - point[0], other[1] - point[1]
    distance = hypot(dx, dy) or 1.0
    return (point[0] + dx / distance * length, point[1] + dy / distance * length)


def _labels(start: Point, texts: Sequence[str]) -> list[str]:
    x, y = start
    return [
        f'<text class="label" x="{x:g}" y="{y + LINE_HEIGHT * line:g}">{escape(text)}</text>'
        for line, text in enumerate(texts)
    ]
