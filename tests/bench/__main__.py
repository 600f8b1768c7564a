"""Run all benchmarks in turn, and write docs/benchmarks.md.

    python tests/bench [--only NAME,NAME] [--quick] [--into FOLDER] [--quote]

Sections that are not run stay as they are. One that fails is told in the page, and makes the exit
code 1. `--quote` puts the page's first table into README.md too, if nothing has failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from page import (
    ALL,
    Benchmark,
    Record,
    Section,
    page,
    quoted,
    record_from_plain,
    record_to_plain,
    with_table,
)
from runs import missing, run

ROOT = Path(__file__).parent.parent.parent
KEPT, PAGE = "benchmarks.json", "benchmarks.md"


def chosen(only: str | None) -> list[Benchmark]:
    names = [benchmark.name for benchmark in ALL]
    wanted = names if only is None else only.split(",")
    if unknown := set(wanted) - set(names):
        raise SystemExit(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    return [benchmark for benchmark in ALL if benchmark.name in wanted]


def read(folder: Path | None) -> dict[str, Section]:
    if folder is None or not (folder / KEPT).exists():
        return {}
    return record_from_plain(json.loads((folder / KEPT).read_text()))


def write(folder: Path, record: Record) -> None:
    (folder / KEPT).write_text(json.dumps(record_to_plain(record), indent=1) + "\n")
    (folder / PAGE).write_text(page(record))


def measured(benchmarks: list[Benchmark], quick: bool) -> Iterator[tuple[str, Section]]:
    """Each that could be run here, when it is done."""
    for benchmark in benchmarks:
        if lacking := missing(benchmark):
            needs = f"{', '.join(lacking)}: `make {benchmark.make}` runs it where they are"
            print(f"{benchmark.name}: not run, as it needs {needs}\n", flush=True)
            continue
        print(f"{benchmark.command(quick)} (at most {benchmark.limit:g} s)", flush=True)
        section = run(benchmark, quick)
        print(f"{section.error or 'done'} after {section.seconds:.0f} s\n", flush=True)
        yield benchmark.name, section


def keep(
    folder: Path | None, record: dict[str, Section], sections: Iterable[tuple[str, Section]]
) -> bool:
    """Whether all came through. Each is written at once, so that no later one can lose it."""
    good = True
    for name, section in sections:
        record[name] = section
        good = good and not section.error
        if folder is not None:
            write(folder, record)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAMES", help="of benchmarks, with commas")
    parser.add_argument("--quick", action="store_true", help="in sizes that only show that it runs")
    parser.add_argument("--into", type=Path, help="the folder of the page (default: docs)")
    parser.add_argument("--quote", action="store_true", help="into README.md as well")
    given = parser.parse_args()
    # Numbers of quick sizes go into the docs only if somebody says so.
    folder = given.into or (None if given.quick else ROOT / "docs")
    # So that what it runs is ended, as with SIGINT.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    record = read(folder)
    good = keep(folder, record, measured(chosen(given.only), given.quick))
    if folder is None:
        print(page(record))
        return int(not good)
    print(f"written: {folder / PAGE}")
    if given.quote and good:
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text(), quoted(record)))
        print(f"quoted: {readme}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
