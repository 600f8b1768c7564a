"""How numbers are written for people, in every message, table and page: in few digits, with units;
and how stacks are, of which many are the same.

Each function returns plain text with ordinary spaces. A message that names a setting's value writes
that value as it was given (`{seconds:g} s`); what was measured is written by these functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

Item = TypeVar("Item")

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
UNKNOWN = "-"
"""In a cell of a table."""
KILLED = "ended without a word (killed?)"
"""Of a job of which no agent lives and none said how it ended."""

STEPLESS = "what training lost is not known, as no worker reported a step (context().step)"
LOST_SNAPSHOT = "lost with its agents"
"""Of one that is newer than the last checkpoint: it was in the memory of agents."""


def duration(seconds: float) -> str:
    """Two digits, or two units: `0.34 s`, `6.4 s`, `45 s`, `2 min 5 s`, `3 h 12 min`, `2 d 5 h`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0.995:
        small = 0 < seconds < 0.005
        return "under 0.01 s" if small else f"{seconds:.2f} s" if seconds > 0 else "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return _two(whole, (MINUTE, "min"), (1.0, "s"))
    if whole < DAY:
        return _two(whole, (HOUR, "h"), (MINUTE, "min"))
    return _two(whole, (DAY, "d"), (HOUR, "h"))


def _two(whole: int, big: tuple[float, str], small: tuple[float, str]) -> str:
    rest = int(whole % big[0] // small[0])
    words = f"{int(whole // big[0])} {big[1]}"
    return f"{words} {rest} {small[1]}" if rest else words


def count(value: float) -> str:
    """A whole number: `1,234,567`."""
    return f"{value:,.0f}"


def plural(value: int, one: str, many: str = "") -> str:
    """`1 node`, `1,200 nodes`, `2 recoveries` where many is given."""
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


def rate(value: float) -> str:
    """A measured value, such as steps a second or a loss: three digits, or all before the point."""
    if value and (abs(value) < 0.001 or abs(value) >= 1e7):
        return f"{value:.2e}"
    return count(value) if abs(value) >= 100 else f"{value:.3g}"


def percentage(part: float | None) -> str:
    """Of a part of a whole, `98.1 %`; never `100 %` where anything is missing."""
    if part is None:
        return "unknown"
    shown = f"{100 * min(part, 0.999 if part < 1 else 1.0):.1f}"
    return f"{shown.removesuffix('.0')} %"


def size(value: float) -> str:
    """Bytes, in powers of 1024: `512 B`, `3.2 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < (1024 if unit == "B" else 1023.95):
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def spans(numbers: Iterable[int], most: int | None = None) -> str:
    """Ranks, or other whole numbers, as flags take them: `0-3, 7`.

    most: where there are more spans, `20 from 0 to 38` is said instead.
    """
    found: list[list[int]] = []
    for value in sorted(set(numbers)):
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    if most is not None and len(found) > most:
        many = sum(last - first + 1 for first, last in found)
        return f"{count(many)} from {found[0][0]} to {found[-1][1]}"
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def ranks_of(numbers: Collection[int]) -> str:
    """`rank 0`, `ranks 0-3, 7`."""
    return f"rank{'s' * (len(numbers) > 1)} {spans(numbers)}"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are: `a, b, c and 4 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def cell(value: Item | None, shown: Callable[[Item], str] = str) -> str:
    """Of a table: the value as `shown` writes it, or UNKNOWN if there is none."""
    return UNKNOWN if value is None else shown(value)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in plain text, column beside column; none if there is no row. head: may
    be empty."""
    if not rows:
        return []
    shown = [row for row in (head, *rows) if row]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]


# -- stacks ----------------------------------------------------------------------------------------

_OURS = re.compile(
    r"^ *File \".*/elasticlib/workers/(run_program|bootstrap|fork_server)\.py\".*\n?", re.MULTILINE
)
"""How elasticlib came to run the program."""


@attrs.frozen
class Shared:
    """One text, and the ranks whose stacks it is."""

    ranks: tuple[int, ...]
    text: str


def grouped(texts: Mapping[int, str]) -> list[Shared]:
    """Equal stacks together. Those that the fewest ranks share come first: they are the ones to
    look at."""
    found: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        found.setdefault(_OURS.sub("", text).strip(), []).append(rank)
    groups = [Shared(tuple(ranks), text) for text, ranks in found.items()]
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks))
