"""Run all benchmarks in turn, and write docs/benchmarks.md.

    python tests/bench [--only NAME,NAME] [--quick] [--into FOLDER] [--quote]

Sections that are not run stay as they are. One that fails is told in the page, and makes the exit
code 1. `--quote` puts the page's first table into README.md too, if nothing has failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from page import (
    ALL,
    Benchmark,
    Section,
    page,
    quoted,
    record_from_plain,
    record_to_plain,
    with_table,
)
from runs import run

ROOT = Path(__file__).parent.parent.parent


def measure(
    benchmarks: list[Benchmark],
    folder: Path | None,
    once: Callable[[Benchmark], Section],
) -> dict[str, Section]:
    """All sections that there are now. Each is written at once, so that no later one can lose
    it."""
    kept = None if folder is None else folder / "benchmarks.json"
    record: dict[str, Section] = {}
    if kept is not None and kept.exists():
        record = record_from_plain(json.loads(kept.read_text()))
    for benchmark in benchmarks:
        lacking = [name for name in benchmark.needs if importlib.util.find_spec(name) is None]
        if lacking:
            needs = f"{', '.join(lacking)}: `make {benchmark.make}` runs it where they are"
            print(f"{benchmark.name}: not run, as it needs {needs}\n", flush=True)
            continue
        print(f"{benchmark.name} (at most {benchmark.limit:g} s)", flush=True)
        section = record[benchmark.name] = once(benchmark)
        print(f"{section.error or 'done'} after {section.seconds:.0f} s\n", flush=True)
        if kept is not None:
            kept.write_text(json.dumps(record_to_plain(record), indent=1) + "\n")
            kept.with_suffix(".md").write_text(page(record))
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAMES", help="of benchmarks, with commas")
    parser.add_argument("--quick", action="store_true", help="in sizes that only show that it runs")
    parser.add_argument("--into", type=Path, help="the folder of the page (default: docs)")
    parser.add_argument("--quote", action="store_true", help="into README.md as well")
    given = parser.parse_args()
    names = [benchmark.name for benchmark in ALL]
    wanted = given.only.split(",") if given.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    # Numbers of quick sizes go into the docs only if somebody says so.
    folder = given.into or (None if given.quick else ROOT / "docs")
    # So that what it runs is ended, as with SIGINT.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    chosen = [benchmark for benchmark in ALL if benchmark.name in wanted]
    record = measure(chosen, folder, lambda benchmark: run(benchmark, given.quick))
    good = not any(record[name].error for name in wanted if name in record)
    if folder is None:
        print(page(record))
    elif given.quote and good:
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text(), quoted(record)))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
