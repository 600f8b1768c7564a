"""Results of a benchmark: samples, rows, and the Markdown table that shows them.

Samples are stored as they were measured. Medians, spreads and ratios are computed when a table is
written.
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

# The scales of each unit, from the largest to the smallest. Smaller values use the last one.
SCALES: Mapping[str, Sequence[tuple[float, str]]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes")),
    "of a core": ((0.01, "% of a core"),),
}


def format_number(value: float) -> str:
    """Return the value rounded to two significant digits, because no machine repeats a third."""
    rounded = float(f"{value:.2g}")
    places = 1 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(0, places)}f}"


def format_quantity(value: float, unit: str) -> str:
    """Return the value in the fitting scale of its unit, such as `0.25 s` or `1.4 a second`."""
    scales = SCALES.get(unit, ((1.0, unit),))
    fitting = (scale for scale in scales if abs(value) >= scale[0] * 0.0995)
    size, name = next(fitting, scales[-1])
    return f"{format_number(value / size)} {name}".rstrip()


@attrs.frozen
class Samples:
    """The values of one measurement that was repeated, in the order in which they were taken."""

    unit: str  # "s", "bytes", "of a core" (a share of one CPU core) or any other text
    values: tuple[float, ...] = attrs.field(default=(), converter=tuple)  # of successful attempts
    failed: int = 0  # the number of attempts that failed
    reason: str = ""  # why attempts failed ("not within 20 s"), or why there was no attempt

    @property
    def max_text(self) -> str:
        """The largest value with its unit, or `-` if there is none."""
        return format_quantity(max(self.values), self.unit) if self.values else "-"

    @property
    def count(self) -> str:
        """The number of attempts, and how many of them failed."""
        attempts = len(self.values) + self.failed
        has_both = self.failed and self.values
        return f"{attempts}, {self.failed} failed" if has_both else f"{attempts}"

    @property
    def spread(self) -> str:
        """The smallest and the largest value, or nothing if there are fewer than two."""
        if len(self.values) < 2:
            return ""
        minimum = format_quantity(min(self.values), self.unit)
        number, _, unit = minimum.partition(" ")
        # The unit is written once if both values have the same one.
        has_same_unit = self.max_text.endswith(f" {unit}")
        return f"{number if has_same_unit else minimum} to {self.max_text}"

    def __str__(self) -> str:
        """Return the median with its unit, or the reason why there is none."""
        if not self.values:
            return self.reason or "-"
        median = format_quantity(statistics.median(self.values), self.unit)
        attempts = len(self.values) + self.failed
        return f"{median}; {self.failed} of {attempts} {self.reason}" if self.failed else median


@attrs.frozen
class Row:
    """A measurement of elasticlib and, in the same run, of the system it is compared with."""

    name: str  # the key of the row in page.md and compare_checkouts.py
    description: str  # the first cell of the row in a table
    elasticlib: Samples
    baseline: Samples | None = None
    baseline_name: str = ""
    paired: bool = False  # both sides were measured in the same rounds, so ratios are per round

    @property
    def ratio(self) -> str:
        """The value of elasticlib divided by that of the baseline; empty if one is missing.

        The ratio is that of the medians. For paired samples it is the median of the rounds' ratios.
        """
        if self.baseline is None:
            return ""
        values, baseline = self.elasticlib.values, self.baseline.values
        if not values or not baseline:
            return ""
        if self.paired:
            pairs = zip(values, baseline, strict=True)
            return format_number(statistics.median(value / other for value, other in pairs))
        divisor = statistics.median(baseline)
        return format_number(statistics.median(values) / divisor) if divisor else ""


@attrs.frozen
class Results:
    """The results of one run of a benchmark: its rows, and notes that are shown below them."""

    rows: tuple[Row, ...] = attrs.field(default=(), converter=tuple)
    notes: tuple[str, ...] = attrs.field(default=(), converter=tuple)

    def __getitem__(self, name: str) -> Row:
        """Return the row with this name, or raise KeyError."""
        return {row.name: row for row in self.rows}[name]


def results_to_json(results: Results) -> dict[str, Any]:
    """Return the results as JSON values, with six significant digits of each sample."""
    plain: dict[str, Any] = attrs.asdict(results)
    for row in plain["rows"]:
        for samples in filter(None, (row["elasticlib"], row["baseline"])):
            samples["values"] = [float(f"{value:.6g}") for value in samples["values"]]
    return plain


def results_from_json(plain: Mapping[str, Any]) -> Results:
    """Return the results that `results_to_json` wrote."""

    def read_row(row: dict[str, Any]) -> Row:
        sides = {name: row[name] and Samples(**row[name]) for name in ("elasticlib", "baseline")}
        return Row(**{**row, **sides})

    return Results(map(read_row, plain["rows"]), plain["notes"])


HEADER = (
    "measurement",
    "elasticlib",
    "min to max",
    "samples",
    "compared with",
    "min to max",
    "samples",
    "ratio",
)


def table_cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row, in the order of HEADER."""
    samples, baseline = row.elasticlib, row.baseline
    cells = (row.description, str(samples), samples.spread, samples.count)
    if baseline is None:
        return (*cells, "", "", "", "")
    median = f"{row.baseline_name}: {baseline}"
    if not baseline.values and not baseline.failed:
        return (*cells, median, "", "", "")
    return (*cells, median, baseline.spread, baseline.count, row.ratio)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with these cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in lines)


def run_command_line(measure: Callable[..., Iterable[Row | str]], doc: str | None) -> None:
    """Run a benchmark from its command line, and print its table.

    Args:
        measure: Yields the rows of the benchmark, and notes about them. Each of its keyword
            parameters is an option of the command line.
        doc: The text that `--help` prints.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all samples to FILE")
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        kind = {"action": "store_true"} if default is False else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
    options = vars(parser.parse_args())
    file = options.pop("json")
    items = list(measure(**options))
    rows = [item for item in items if isinstance(item, Row)]
    results = Results(rows, [item for item in items if isinstance(item, str)])
    print("\n".join((markdown_table(HEADER, map(table_cells, results.rows)), *results.notes)))
    if file is not None:
        file.write_text(json.dumps(results_to_json(results)))
