"""One lane of the timeline: a drawing with words for who does not see it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .markup import Markup, element
from .strokes import upright


@attrs.frozen
class Lane:
    """parts: what is drawn; height: in pixels. name, told: its title and what else is said of it.
    rules: from where down rules of failures go through it, None for none."""

    name: str
    parts: Sequence[Markup]
    height: float
    told: str = ""
    rules: float | None = 0.0


def drawn(lane: Lane, faults: Sequence[float]) -> Markup:
    """With a rule behind it at each of these per cent."""
    rules: list[Markup] = []
    if lane.rules is not None:
        rules = [upright(across, lane.rules, lane.height, "fault") for across in faults]
    about = [element("desc", lane.told)] if lane.told else []
    return element(
        "svg",
        element("title", lane.name),
        *about,
        *rules,
        *lane.parts,
        class_="drawing",
        role="img",
        height=lane.height,
    )
