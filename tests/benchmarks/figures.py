"""What a benchmark has found, as values, and how it is said: medians, spread, ratios, tables.

Samples are kept as they were taken. All else is computed from them where it is shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

SCALES: Mapping[str, Sequence[tuple[float, str]]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes")),
    "of a core": ((0.01, "% of a core"),),
}
"""The words for sizes of a unit, the largest first; the last is for whatever is smaller."""


def digits(value: float) -> str:
    """Two of them, or more if it is whole: nobody's machine repeats a third."""
    if value and abs(value) >= 100:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{float(f'{value:.2g}'):.{_places(value)}f}"


def _places(value: float) -> int:
    if value == 0:
        return 0
    # Of 9.96 there are 10 left, which has no place more.
    exponent = int(f"{value:.1e}".partition("e")[2])
    return max(0, 1 - exponent)


def said(value: float, unit: str) -> str:
    """A quantity in words, such as 0.25 s or 1.4 a second."""
    for least, word in SCALES.get(unit, ()):
        if abs(value) >= least * 0.0995:
            return f"{digits(value / least)} {word}"
    if unit in SCALES:
        least, word = SCALES[unit][-1]
        return f"{digits(value / least)} {word}"
    return f"{digits(value)} {unit}".rstrip()


@attrs.frozen
class Samples:
    """What was measured of one thing, each time anew, in the order in which it was taken.

    unit: s, bytes, "of a core" (a share of one), or any other word. values: of the tries that came
    through. failed: how many did not. why: what became of those, such as "not within 20 s", or why
    nothing was tried.
    """

    unit: str
    values: tuple[float, ...] = attrs.field(default=(), converter=tuple)
    failed: int = 0
    why: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def least(self) -> str:
        return said(min(self.values), self.unit) if self.values else "-"

    @property
    def most(self) -> str:
        return said(max(self.values), self.unit) if self.values else "-"

    @property
    def count(self) -> str:
        """How often it was tried, and how often for nothing."""
        tried = len(self.values) + self.failed
        return f"{tried}, {self.failed} failed" if self.failed and self.values else f"{tried}"

    @property
    def spread(self) -> str:
        if len(self.values) < 2:
            return ""
        low, high = self.least.partition(" "), self.most.partition(" ")
        # The unit is said once if it is the same.
        return f"{low[0] if low[2] == high[2] else self.least} to {self.most}"

    def __str__(self) -> str:
        """The median, or what became of it."""
        if not self.values:
            return self.why or "-"
        middle = said(statistics.median(self.values), self.unit)
        if not self.failed:
            return middle
        return f"{middle}; {self.failed} of {len(self.values) + self.failed} {self.why}"


@attrs.frozen
class Row:
    """One thing measured, of ours, and of who is beside us.

    name: what the row is called by who quotes it. what: the same in words. beside: whose `theirs`
    is. paired: whether the two were taken in turns, so that the ratio is of the same round.
    """

    name: str
    what: str
    ours: Samples
    theirs: Samples | None = None
    beside: str = ""
    paired: bool = False

    @property
    def ratio(self) -> str:
        """Ours to theirs, or nothing if one is missing."""
        mine, their = self.ours, self.theirs
        if their is None or not mine.values or not their.values:
            return ""
        if self.paired:
            pairs = zip(mine.values, their.values, strict=True)
            return digits(statistics.median(a / b for a, b in pairs))
        below = statistics.median(their.values)
        return digits(statistics.median(mine.values) / below) if below else ""


@attrs.frozen
class Found:
    """What one run of a benchmark has brought: its rows, and sentences that belong to them."""

    rows: tuple[Row, ...] = attrs.field(converter=tuple)
    notes: tuple[str, ...] = attrs.field(default=(), converter=tuple)

    def __getitem__(self, name: str) -> Row:
        """The row of this name.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)


def to_plain(found: Found) -> dict[str, Any]:
    """As JSON has it; six digits of each sample."""
    plain: dict[str, Any] = attrs.asdict(found)
    for row in plain["rows"]:
        for samples in filter(None, (row["ours"], row["theirs"])):
            samples["values"] = [float(f"{value:.6g}") for value in samples["values"]]
    return plain


def from_plain(plain: Mapping[str, Any]) -> Found:
    rows = []
    for row in plain["rows"]:
        theirs = row["theirs"]
        both = {"ours": Samples(**row["ours"]), "theirs": theirs and Samples(**theirs)}
        rows.append(Row(**{**row, **both}))
    return Found(rows, plain["notes"])


HEAD = ("what", "elasticlib", "from, to", "of", "beside it", "from, to", "of", "ratio")


def cells(row: Row) -> tuple[str, ...]:
    """A row as its table has it, in the order of HEAD."""
    mine = (row.what, str(row.ours), row.ours.spread, row.ours.count)
    if row.theirs is None:
        return (*mine, "", "", "", "")
    whose = f"{row.beside}: {row.theirs}"
    if not row.theirs.values and not row.theirs.failed:
        return (*mine, whose, "", "", "")
    return (*mine, whose, row.theirs.spread, row.theirs.count, row.ratio)


def in_markdown(rows: Iterable[Row]) -> str:
    lines = [HEAD, ("---",) * len(HEAD), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in lines)


def in_plain_text(rows: Iterable[Row]) -> str:
    """For a terminal: columns as wide as what stands in them."""
    lines = [HEAD, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
