"""What an event's facts say, for who folds them: a fact that is missing, or is of another type than
the schema has it, was not told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LARGEST = 2**62


def number(facts: Mapping[str, Any], name: str) -> float | None:
    """A finite number, or None."""
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not -LARGEST < value < LARGEST or not math.isfinite(value):
        return None
    return float(value)


def value(facts: Mapping[str, Any], name: str) -> float | None:
    """A number of whatever size, or one that is none: JSON has no word for these, so they are told
    as text. None where neither is told."""
    told = facts.get(name)
    if isinstance(told, float) or told in ("nan", "inf", "-inf"):
        return float(told)
    return number(facts, name)


def seconds(facts: Mapping[str, Any], name: str) -> float | None:
    """A number that is not negative, or None."""
    found = number(facts, name)
    return None if found is None or found < 0 else found


def count(facts: Mapping[str, Any], name: str) -> int | None:
    """A whole number that is not negative, or None."""
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST:
        return None
    return value


def text(facts: Mapping[str, Any], name: str) -> str:
    """A text, empty where there is none."""
    value = facts.get(name)
    return value if isinstance(value, str) else ""


def texts(facts: Mapping[str, Any], name: str) -> dict[str, str]:
    """Texts by name, empty where there are none."""
    value = facts.get(name)
    if not isinstance(value, Mapping):
        return {}
    return {str(key): str(item) for key, item in value.items()}


def pair(facts: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Two whole numbers, or None."""
    value = facts.get(name)
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    first, last = (count({name: item}, name) for item in value)
    return None if first is None or last is None else (first, last)
