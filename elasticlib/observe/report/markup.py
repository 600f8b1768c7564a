"""Markup, made so that no text of others can become markup: what is not `Markup` is escaped.

Reasons and names come from workers and their exceptions; what would hide, move or colour the text
around it is made visible instead.
"""

from __future__ import annotations

import html

from ...visible import visible
from ..wording import duration

VOID = frozenset({"meta"})
SHAPES = frozenset({"circle", "line", "path", "rect"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def cut(value: str, most: int) -> str:
    """The text in at most so many characters, and how many more there were."""
    if len(value) <= most:
        return value
    return f"{value[:most]}\u2026 ({len(value) - most:,} more characters)"


def short(value: str, most: int) -> str:
    """The text in at most so many characters, its end gone."""
    return value if len(value) <= most else f"{value[: most - 1]}\u2026"


def escaped(value: str) -> Markup:
    """As it stands in a page, in a text or an attribute."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(visible(value), quote=True))


def unbroken(words: str) -> str:
    """The same words, never parted at a line's end."""
    return words.replace(" ", "\u00a0")


def seconds_text(seconds: float) -> str:
    return unbroken(duration(seconds))


def joined(*parts: str) -> Markup:
    return Markup("".join(map(escaped, parts)))


def element(name: str, *inside: str, **attributes: object) -> Markup:
    """One element. An attribute is named as in Python: `class_`, `text_anchor` for `text-anchor`;
    one of None is left out. Numbers have at most two places."""
    named = (
        f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None
    )
    opening = f"<{name}{''.join(named)}"
    if name in VOID:
        return Markup(f"{opening}>")
    if name in SHAPES and not inside:
        return Markup(f"{opening}/>")
    return Markup(f"{opening}>{joined(*inside)}</{name}>")


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else escaped(str(value))


def number(value: float) -> str:
    """With two places at most, and no more than it needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def percent(value: float) -> str:
    return f"{number(float(value))}%"
