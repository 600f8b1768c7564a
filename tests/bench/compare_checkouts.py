"""Compare the speed of this checkout with that of another checkout, in one run.

    python tests/bench/compare_checkouts.py OTHER [--turns 10] [--only recovery,...] [--json FILE]

OTHER is a checkout with its own `.venv`, for example a worktree of an earlier commit:

    git worktree add ../before COMMIT && make -C ../before .venv/installed

Each measurement is one of the benchmark programs, which runs in its own process with the
interpreter and the files of one checkout. The two checkouts take turns, so that both find the same
machine. A row has one value per turn and checkout: the median of the samples of that turn. The
verdict is `slower` or `faster` if the interquartile ranges of the two checkouts do not overlap, and
otherwise `same`, because the difference is not larger than the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from results import format_quantity, markdown_table

THIS_CHECKOUT = Path(__file__).resolve().parent.parent.parent
PROGRAM_DIRS = ("tests/bench", "tests/benchmarks")  # the second is that of early commits
PROGRAM_TIMEOUT_S = 300.0  # for one program in one turn
MIN_VALUES = 5  # fewer values of one checkout have no meaningful quartiles

# torchrun is not measured here. Not every checkout has an option that leaves it out. In older
# checkouts, the module of jobs is called `launched`.
RUN_WITHOUT_TORCHRUN = """
import importlib.util, runpy, sys
directory, name, *sys.argv[1:] = sys.argv[1:]
sys.path.insert(0, directory)
sys.argv[0] = f"{directory}/{name}.py"
module = "timed_jobs" if importlib.util.find_spec("timed_jobs") else "launched"
importlib.import_module(module).LAUNCHERS.pop("torchrun")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@attrs.frozen
class Part:
    """A call of a benchmark program."""

    program: str
    flags: str
    rows: tuple[str, ...]  # the prefixes of the names of the rows that are compared


PARTS = {
    "recovery": Part("recovery", "--parts restart --rounds 1 --kills 5", ("",)),
    "start": Part("recovery", "--parts start --repeat 3", ("",)),
    "join": Part("recovery", "--parts join,loss --repeat 1", ("",)),
    "rest": Part("recovery", "--parts rest --repeat 1 --rest 5", ("",)),
    "nodes": Part(
        "rendezvous",
        "--nodes  --torch-up-to 0 --apart 1000 --standing  --repeat 1",
        ("apart.",),
    ),
    "checkpoint": Part(
        "checkpoint",
        "--mib 512 --repeat 2 --parts compare",
        ("save", "snapshot", "durable", "load", "restore", "memory"),
    ),
    "sampler": Part(
        "sampler",
        "--lengths 1000000000000 --worlds 8 --repeat 2 --torch-until 0",
        ("first", "each"),
    ),
    "help": Part("startup", "--runs 5", ("help",)),
}


@attrs.define
class Comparison:
    """A measurement of both checkouts, with one value per turn in the order of the turns."""

    description: str
    unit: str
    before: list[float] = attrs.Factory(list)  # of the other checkout
    after: list[float] = attrs.Factory(list)  # of this checkout

    def verdict(self) -> str:
        """Return `slower`, `faster` or `same`, or `too few turns`."""
        if min(len(self.before), len(self.after)) < MIN_VALUES:
            return "too few turns"
        before_low, before_high = quartiles(self.before)
        after_low, after_high = quartiles(self.after)
        if after_low > before_high:
            return "slower"
        return "faster" if after_high < before_low else "same"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@attrs.frozen
class Measurement:
    """The median of one row of one run."""

    name: str
    description: str
    unit: str
    median: float


def run_part(checkout: Path, part: Part) -> Iterator[Measurement]:
    """Run a part in a checkout, and yield its rows.

    A program repeats a row of the same samples for each system that it is compared with. Such a row
    is yielded once.
    """
    directory = next(path for name in PROGRAM_DIRS if (path := checkout / name).exists())
    with tempfile.TemporaryDirectory(prefix="turns-") as temporary:
        file = Path(temporary) / "results"
        python = [str(checkout / ".venv" / "bin" / "python"), "-c", RUN_WITHOUT_TORCHRUN]
        arguments = [str(directory), part.program, *part.flags.split(" "), "--json", str(file)]
        subprocess.run(
            [*python, *arguments],
            cwd=temporary,
            stdout=subprocess.DEVNULL,
            timeout=PROGRAM_TIMEOUT_S,
            check=True,
        )
        rows = json.loads(file.read_text())["rows"]
    seen: set[str] = set()
    for row in rows:
        measurement = read_row(row)
        if measurement is None or not measurement.name.startswith(part.rows):
            continue
        if measurement.description not in seen:
            seen.add(measurement.description)
            yield measurement


def read_row(row: dict[str, Any]) -> Measurement | None:
    """Return the median of a row, or None if it has no samples.

    Older checkouts use the keys `what` and `ours` for `description` and `elasticlib`.
    """
    description = row["description"] if "description" in row else row["what"]
    samples = row["elasticlib"] if "elasticlib" in row else row["ours"]
    if not samples["values"]:
        return None
    median = statistics.median(samples["values"])
    return Measurement(row["name"], description, samples["unit"], median)


def take_turns(
    other: Path, parts: Sequence[str], turns: int, comparisons: dict[str, Comparison]
) -> None:
    """Run the parts in both checkouts, and add their values to the comparisons."""
    for turn in range(turns):
        for name in parts:
            # The second run of a turn finds warm caches, so the order changes with each turn.
            sides = [("before", other), ("after", THIS_CHECKOUT)]
            for side, checkout in sides if turn % 2 == 0 else sides[::-1]:
                try:
                    for row in run_part(checkout, PARTS[name]):
                        new = Comparison(row.description, row.unit)
                        comparison = comparisons.setdefault(f"{name}.{row.name}", new)
                        getattr(comparison, side).append(row.median)
                except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                    print(f"turn {turn + 1}, {name}, {side}: {error}", file=sys.stderr)
            print(f"turn {turn + 1}: {name}", file=sys.stderr, flush=True)


def comparison_table(comparisons: dict[str, Comparison]) -> str:
    """Return the Markdown table of all comparisons."""
    header = ("measurement", "before: median (quartiles)", "after", "after / before", "verdict")
    return markdown_table(header, map(_cells, comparisons.values()))


def _cells(row: Comparison) -> tuple[str, ...]:
    if not row.before or not row.after:
        counts = (f"{len(values)} values" for values in (row.before, row.after))
        return (row.description, *counts, "", "")
    ratio = statistics.median(row.after) / (statistics.median(row.before) or 1.0)
    sides = (_format_values(values, row.unit) for values in (row.before, row.after))
    return (row.description, *sides, f"{ratio:.2f}", row.verdict())


def _format_values(values: Sequence[float], unit: str) -> str:
    median = format_quantity(statistics.median(values), unit)
    if len(values) < 2:
        return median
    low, high = (format_quantity(value, unit) for value in quartiles(values))
    return f"{median} ({low} to {high}, n = {len(values)})"


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the checkout to compare with, with its own .venv")
    parser.add_argument("--turns", type=int, default=10, help="default: 10")
    parser.add_argument("--only", default=",".join(PARTS), help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="also write all values to this file")
    options = parser.parse_args()
    options.parts = options.only.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    options.other = options.other.resolve()
    if not (options.other / ".venv" / "bin" / "python").exists():
        parser.error(f"{options.other} has no .venv: make -C {options.other} .venv/installed")
    return options


def main() -> int:
    """Compare the checkouts; return 1 if a measurement is slower."""
    options = parse_arguments()
    comparisons: dict[str, Comparison] = {}
    # SIGINT shows the results of the turns so far.
    with contextlib.suppress(KeyboardInterrupt):
        take_turns(options.other, options.parts, options.turns, comparisons)
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    print(comparison_table(comparisons))
    if options.json:
        plain = {name: attrs.asdict(row) for name, row in comparisons.items()}
        options.json.write_text(json.dumps(plain))
    return int(any(row.verdict() == "slower" for row in comparisons.values()))


if __name__ == "__main__":
    sys.exit(main())
