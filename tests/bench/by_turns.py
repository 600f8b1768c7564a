"""This checkout beside another one of the same project, by turns in one run.

    python tests/bench/by_turns.py OTHER [--turns 10] [--only recovery,apart,...] [--json FILE]

OTHER is a checkout with its own `.venv`, such as a worktree of the commit before a rebuild:

    git worktree add ../first 0335914 && make -C ../first .venv/installed

Each measurement is one of this folder's programs, run in a process of its own by either checkout's
interpreter and from either checkout's files, so that both meet the same machine. Of what a program
repeats within a turn the median counts, and so a row has one value for each turn and side. "Slower"
or "faster" stands where the interquartile ranges do not overlap, and "same" where they do: then a
difference is not beyond noise.
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

import attrs
from figures import in_markdown, said

HERE = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("tests/bench", "tests/benchmarks")
"""Where a checkout has its programs: the second is the first house's."""
BOUND = 300.0
"""Seconds for one program in one turn."""
LEAST = 5
"""Values of a side, below which its quartiles say nothing."""

# torch's side is not asked here; nor has every checkout a flag that leaves it out.
RUN = """
import runpy, sys
folder, name, *sys.argv[1:] = sys.argv[1:]
sys.path.insert(0, folder)
sys.argv[0] = f"{folder}/{name}.py"
import launched
launched.LAUNCHERS.pop("torchrun")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@attrs.frozen
class Part:
    """What is measured by one call of a program: its flags, and the rows that are kept, by the
    beginnings of their names."""

    program: str
    flags: str
    rows: tuple[str, ...]


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
class Row:
    """One value a turn for each side, in the order of the turns."""

    what: str
    unit: str
    before: list[float] = attrs.Factory(list)
    after: list[float] = attrs.Factory(list)

    def verdict(self) -> str:
        if min(len(self.before), len(self.after)) < LEAST:
            return "too few turns"
        (low, high), (least, most) = quartiles(self.before), quartiles(self.after)
        return "slower" if least > high else "faster" if most < low else "same"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def measured(checkout: Path, part: Part) -> Iterator[tuple[str, str, str, float]]:
    """Name, words, unit and median of each row that one run of a part brings.

    A program tells of the same samples again beside each of torch's ways: those are one row.
    """
    folder = next(path for name in FOLDERS if (path := checkout / name).exists())
    with tempfile.TemporaryDirectory(prefix="turns-") as into:
        found = Path(into) / "found"
        command = [str(checkout / ".venv" / "bin" / "python"), "-c", RUN, str(folder)]
        subprocess.run(
            [*command, part.program, *part.flags.split(" "), "--json", str(found)],
            cwd=into,
            stdout=subprocess.DEVNULL,
            timeout=BOUND,
            check=True,
        )
        rows = json.loads(found.read_text())["rows"]
    seen: set[str] = set()
    for row in rows:
        values = row["ours"]["values"]
        if values and row["name"].startswith(part.rows) and row["what"] not in seen:
            seen.add(row["what"])
            yield row["name"], row["what"], row["ours"]["unit"], statistics.median(values)


def take_turns(other: Path, parts: Sequence[str], turns: int, rows: dict[str, Row]) -> None:
    for turn in range(turns):
        for name in parts:
            # Whoever comes second finds a warmer machine, so that they change places.
            sides = [("before", other), ("after", HERE)]
            for side, checkout in sides if turn % 2 == 0 else sides[::-1]:
                try:
                    for row, what, unit, value in measured(checkout, PARTS[name]):
                        kept = rows.setdefault(f"{name}.{row}", Row(what, unit))
                        getattr(kept, side).append(value)
                except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                    print(f"turn {turn + 1}, {name}, {side}: {error}", file=sys.stderr)
            print(f"turn {turn + 1}: {name}", file=sys.stderr, flush=True)


def table(rows: dict[str, Row]) -> str:
    head = ("what", "before: median (quartiles)", "after", "after / before", "beyond noise")
    return in_markdown(head, map(_cells, rows.values()))


def _cells(row: Row) -> tuple[str, ...]:
    if not row.before or not row.after:
        return (row.what, f"{len(row.before)} values", f"{len(row.after)} values", "", "")
    ratio = statistics.median(row.after) / (statistics.median(row.before) or 1.0)
    sides = (_side(values, row.unit) for values in (row.before, row.after))
    return (row.what, *sides, f"{ratio:.2f}", row.verdict())


def _side(values: Sequence[float], unit: str) -> str:
    middle = said(statistics.median(values), unit)
    if len(values) < 2:
        return middle
    low, high = quartiles(values)
    return f"{middle} ({said(low, unit)} to {said(high, unit)}, n = {len(values)})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the checkout before, with its own .venv")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--only", default=",".join(PARTS), help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="write all values there as well")
    given = parser.parse_args()
    parts = given.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    other = given.other.resolve()
    if not (other / ".venv" / "bin" / "python").exists():
        parser.error(f"{other} has no .venv: make -C {other} .venv/installed")
    rows: dict[str, Row] = {}
    # Whoever has no more time is shown what there is.
    with contextlib.suppress(KeyboardInterrupt):
        take_turns(other, parts, given.turns, rows)
    print(f"load at the end {os.getloadavg()[0]:.2f}")
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps({name: attrs.asdict(row) for name, row in rows.items()}))
    return int(any(row.verdict() == "slower" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
