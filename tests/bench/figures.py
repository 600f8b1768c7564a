"""What a benchmark has found, as values, and how it is said: medians, spread, ratios, a table.

Samples are kept as they were taken. All else is computed from them where it is shown.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
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
    two = float(f"{value:.2g}")
    places = 1 - math.floor(math.log10(abs(two))) if two else 0
    return f"{two:,.{max(0, places)}f}"


def said(value: float, unit: str) -> str:
    """A quantity in words, such as 0.25 s or 1.4 a second."""
    scales = SCALES.get(unit, ((1.0, unit),))
    fitting = (scale for scale in scales if abs(value) >= scale[0] * 0.0995)
    least, word = next(fitting, scales[-1])
    return f"{digits(value / least)} {word}".rstrip()


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
        least = said(min(self.values), self.unit)
        number, _, unit = least.partition(" ")
        # The unit is said once if it is the same.
        return f"{number if self.most.endswith(f' {unit}') else least} to {self.most}"

    def __str__(self) -> str:
        """The median, or what became of it."""
        if not self.values:
            return self.why or "-"
        middle = said(statistics.median(self.values), self.unit)
        tried = len(self.values) + self.failed
        return f"{middle}; {self.failed} of {tried} {self.why}" if self.failed else middle


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

    rows: tuple[Row, ...] = attrs.field(default=(), converter=tuple)
    notes: tuple[str, ...] = attrs.field(default=(), converter=tuple)

    def __getitem__(self, name: str) -> Row:
        """The row of this name; KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]


def to_plain(found: Found) -> dict[str, Any]:
    """As JSON has it; six digits of each sample."""
    plain: dict[str, Any] = attrs.asdict(found)
    for row in plain["rows"]:
        for samples in filter(None, (row["ours"], row["theirs"])):
            samples["values"] = [float(f"{value:.6g}") for value in samples["values"]]
    return plain


def from_plain(plain: Mapping[str, Any]) -> Found:
    def row_of(row: dict[str, Any]) -> Row:
        sides = {name: row[name] and Samples(**row[name]) for name in ("ours", "theirs")}
        return Row(**{**row, **sides})

    return Found(map(row_of, plain["rows"]), plain["notes"])


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


def in_markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in lines)


def run(measure: Callable[..., Iterable[Row | str]], doc: str | None) -> None:
    """A benchmark's command line: each keyword of `measure` is a flag. What it yields, rows and
    sentences that belong to them, is shown as a table, and goes to the file that was asked for."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all samples there as well")
    for name, keyword in inspect.signature(measure).parameters.items():
        usual = keyword.default
        kind = {"action": "store_true"} if usual is False else {"type": type(usual)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=usual, **kind)
    given = vars(parser.parse_args())
    file = given.pop("json")
    told = list(measure(**given))
    rows = [one for one in told if isinstance(one, Row)]
    found = Found(rows, [one for one in told if isinstance(one, str)])
    print("\n".join((in_markdown(HEAD, map(cells, found.rows)), *found.notes)))
    if file is not None:
        file.write_text(json.dumps(to_plain(found)))
