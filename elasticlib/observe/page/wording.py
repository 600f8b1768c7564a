"""Numbers as people read them: seconds, counts, rates and parts of a whole, in few digits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


def seconds_text(seconds: float) -> str:
    """Two units at most: `0.34 s`, `6.4 s`, `2 min 5 s`, `3 h 12 min`, `2 d 5 h`."""
    if not math.isfinite(seconds):
        return "unknown"
    if 0 < seconds < 0.005:
        return _with("s", "under 0.01")
    if seconds < 0.995:
        return _with("s", f"{seconds:.2f}" if seconds > 0 else "0")
    if seconds < 9.95:
        return _with("s", f"{seconds:.1f}")
    whole = round(seconds)
    if whole < MINUTE:
        return _with("s", whole)
    if whole < HOUR:
        return _two(whole, (MINUTE, "min"), (1.0, "s"))
    if whole < DAY:
        return _two(whole, (HOUR, "h"), (MINUTE, "min"))
    return _two(whole, (DAY, "d"), (HOUR, "h"))


def _two(whole: int, big: tuple[float, str], small: tuple[float, str]) -> str:
    rest = int(whole % big[0] // small[0])
    words = _with(big[1], int(whole // big[0]))
    return f"{words} {_with(small[1], rest)}" if rest else words


def _with(unit: str, value: object) -> str:
    """A number never stands at a line's end without its unit."""
    return f"{value}\u00a0{unit}"


def count_text(count: float) -> str:
    return f"{count:,.0f}"


def rate_text(value: float) -> str:
    """Three digits, or all those before the point."""
    if value and (abs(value) < 0.001 or abs(value) >= 1e7):
        return f"{value:.2e}"
    return count_text(value) if abs(value) >= 100 else f"{value:.3g}"


def part_text(part: float | None) -> str:
    """Of a whole, in percent; never 100 where a part is missing."""
    if part is None:
        return "unknown"
    return f"{min(part, 0.999 if part < 1 else 1.0):.1%}".replace(".0%", "%").replace(
        "%", "\u00a0%"
    )


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count_text(count)} {one if count == 1 else many or one + 's'}"


def spans_text(numbers: Iterable[int], most: int = 6) -> str:
    """Of whole numbers: `0, 2\u20135, 9`; where there are too many spans, how many they are."""
    found: list[list[int]] = []
    for value in sorted(set(numbers)):
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    if len(found) > most:
        many = sum(last - first + 1 for first, last in found)
        return f"{count_text(many)} from {found[0][0]} to {found[-1][1]}"
    return ", ".join(str(a) if a == b else f"{a}\u2013{b}" for a, b in found)


def some_text(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def middle(values: Sequence[float]) -> float:
    """The median; values is not empty."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
