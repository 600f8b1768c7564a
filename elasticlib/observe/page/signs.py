"""The signs of a timeline: what each looks like, whatever its colour, and what it means."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .markup import Markup, element, percent


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
    "restored": Sign("M0-5 5 4H-5z", "good", "state taken up"),
    "SUCCEEDED": Sign("M-5.5.5-4-1-1.6 1.4 4-4.5 5.5-3-1.6 4.4z", "good", "succeeded"),
    "FAILED": Sign(f"M-5.5-5.5H5.5V5.5H-5.5z{_SMALL_CROSS}", "bad", "node failed"),
    "PREEMPTED": Sign("M-5-5.5H5L0 2.5zM-5 3.5H5V5.5H-5z", "leave", "left, drained"),
    "STOPPED": Sign("M-4.5-4.5H4.5V4.5H-4.5z", "leave", "stopped by a signal"),
}


def place(name: str, across: float, down: float, words: str) -> Markup:
    """A sign in a drawing, at so many per cent and pixels; words are its tooltip."""
    sign = SIGNS[name]
    shape = element(
        "path",
        element("title", words),
        d=sign.path,
        class_=f"{sign.hue} halo",
        fill_rule="evenodd",
        data_sign=name,
    )
    return element("svg", shape, x=percent(across), y=down, overflow="visible")


def picture(name: str) -> Markup:
    """A sign in a line of words, which says what it means."""
    sign = SIGNS[name]
    path = element("path", d=sign.path, class_=sign.hue, fill_rule="evenodd")
    return element(
        "svg", path, class_="sign", width=14, height=14, viewBox="-7 -7 14 14", aria_hidden="true"
    )


def legend(names: list[str], *more: Markup) -> Markup:
    """What those signs mean that are in a drawing, and what else it holds."""
    rows = [element("li", picture(name), SIGNS[name].means) for name in SIGNS if name in names]
    return element("ul", *more, *rows, class_="legend")
