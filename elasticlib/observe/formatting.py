"""Formatting of numbers, lists, tables and stacks for people, with few digits and with units.

Each function returns plain text. A message that names the value of a setting shows it as it was
given (`{seconds:g} s`); measured values are formatted by these functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

Item = TypeVar("Item")

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
UNKNOWN = "-"  # in a table cell

NOT_JOINED_TEXT = (
    "its agents have not joined yet, because they import the modules that the workers need, or "
    "they have left"
)
TERMINATED_TEXT = "terminated unexpectedly (killed?)"  # a job whose agents reported no end
NO_STEPS_TEXT = "lost training time is unknown because no worker reported a step (context().step)"
LOST_SNAPSHOT_TEXT = "lost with its agents"  # a snapshot newer than the last checkpoint


def format_duration(seconds: float) -> str:
    """Format with two digits or two units: `0.34 s`, `45 s`, `2 min 5 s`, `2 d 5 h`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0.995:
        is_tiny = 0 < seconds < 0.005
        return "under 0.01 s" if is_tiny else f"{seconds:.2f} s" if seconds > 0 else "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < MINUTE:
        return f"{rounded} s"
    if rounded < HOUR:
        return _two_units(rounded, (MINUTE, "min"), (1.0, "s"))
    if rounded < DAY:
        return _two_units(rounded, (HOUR, "h"), (MINUTE, "min"))
    return _two_units(rounded, (DAY, "d"), (HOUR, "h"))


def _two_units(seconds: int, large: tuple[float, str], small: tuple[float, str]) -> str:
    rest = int(seconds % large[0] // small[0])
    text = f"{int(seconds // large[0])} {large[1]}"
    return f"{text} {rest} {small[1]}" if rest else text


def format_count(value: float) -> str:
    """Format an integer: `1,234,567`."""
    return f"{value:,.0f}"


def plural(value: int, singular: str, plural_form: str = "") -> str:
    """Format a number of things: `1 node`, `1,200 nodes`, `2 recoveries`."""
    return f"{format_count(value)} {singular if value == 1 else plural_form or singular + 's'}"


def format_number(value: float) -> str:
    """Format a measured value with three digits, or all digits before the point."""
    if value and (abs(value) < 0.001 or abs(value) >= 1e7):
        return f"{value:.2e}"
    return format_count(value) if abs(value) >= 100 else f"{value:.3g}"


def format_percent(share: float | None) -> str:
    """Format a share as `98.1 %`; only 1.0 is `100 %`."""
    if share is None:
        return "unknown"
    shown = f"{100 * min(share, 0.999 if share < 1 else 1.0):.1f}"
    return f"{shown.removesuffix('.0')} %"


def format_bytes(value: float) -> str:
    """Format in powers of 1024: `512 B`, `3.2 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < (1024 if unit == "B" else 1023.95):
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_ranges(numbers: Iterable[int], max_ranges: int | None = None) -> str:
    """Format ranks as flags take them: `0-3, 7`; above `max_ranges` ranges `20 from 0 to 38`."""
    ranges: list[list[int]] = []
    for value in sorted(set(numbers)):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    if max_ranges is not None and len(ranges) > max_ranges:
        total = sum(last - first + 1 for first, last in ranges)
        return f"{format_count(total)} from {ranges[0][0]} to {ranges[-1][1]}"
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def format_ranks(numbers: Collection[int]) -> str:
    """Format ranks with a noun: `rank 0`, `ranks 0-3, 7`."""
    return f"rank{'s' * (len(numbers) > 1)} {format_ranges(numbers)}"


def format_list(names: Sequence[str], max_names: int = 3) -> str:
    """Format the first names and the number of others: `a, b, c and 4 more`."""
    more = len(names) - max_names
    return ", ".join(names[:max_names]) + (f" and {more} more" if more > 0 else "")


def format_cell(value: Item | None, shown: Callable[[Item], str] = str) -> str:
    """Format a table cell; UNKNOWN for None."""
    return UNKNOWN if value is None else shown(value)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a text table, none if it has no rows. The head may be empty."""
    if not rows:
        return []
    shown = [row for row in (head, *rows) if row]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]


# -- stacks ----------------------------------------------------------------------------------------

_STARTUP_FRAMES = re.compile(
    r"^ *File \".*/elasticlib/workers/(run_program|process_entry|fork_server)\.py\".*\n?",
    re.MULTILINE,
)


@attrs.frozen
class StackGroup:
    """Ranks that have the same stack."""

    ranks: tuple[int, ...]
    text: str


def group_stacks(texts: Mapping[int, str]) -> list[StackGroup]:
    """Group equal stacks by text; the group with the fewest ranks, usually the cause, is first."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks_by_text.setdefault(_STARTUP_FRAMES.sub("", text).strip(), []).append(rank)
    groups = [StackGroup(tuple(ranks), text) for text, ranks in ranks_by_text.items()]
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks))
