"""Run the benchmarks one after the other, and write docs/benchmarks.md.

    python tests/bench [--only NAME,NAME] [--quick] [--into DIR] [--quote] [--redraw]

Sections that are not run keep their last results. A section that fails is reported in the page, and
makes the exit code 1. `--quote` also writes the summary table into README.md, unless a section has
failed. `--redraw` runs nothing and writes the page from the stored results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmark_process import run_benchmark
from page import (
    ALL,
    Benchmark,
    Section,
    page,
    record_from_json,
    record_to_json,
    summary_table,
    with_table,
)

ROOT = Path(__file__).parent.parent.parent


def measure(
    benchmarks: list[Benchmark],
    directory: Path | None,
    run: Callable[[Benchmark], Section],
) -> dict[str, Section]:
    """Run the benchmarks and return the record, which also contains the stored sections.

    The record and the page are written after each section, so that a later one cannot lose it.
    """
    file = None if directory is None else directory / "benchmarks.json"
    record: dict[str, Section] = {}
    if file is not None and file.exists():
        record = record_from_json(json.loads(file.read_text()))
    for benchmark in benchmarks:
        missing = [name for name in benchmark.needs if importlib.util.find_spec(name) is None]
        if missing:
            needs = f"{', '.join(missing)}, which `make {benchmark.make_target}` installs"
            print(f"{benchmark.name}: not run, because it needs {needs}\n", flush=True)
            continue
        print(f"{benchmark.name} (at most {benchmark.timeout_s:g} s)", flush=True)
        section = record[benchmark.name] = run(benchmark)
        print(f"{section.error or 'done'} after {section.duration_s:.0f} s\n", flush=True)
        write_page(record, file)
    return record


def write_page(record: dict[str, Section], file: Path | None) -> None:
    """Write the record and the page into the same directory."""
    if file is not None:
        file.write_text(json.dumps(record_to_json(record), indent=1) + "\n")
        file.with_suffix(".md").write_text(page(record))


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAMES", help="comma-separated benchmarks (default: all)")
    parser.add_argument("--quick", action="store_true", help="use sizes that show that it runs")
    parser.add_argument("--into", type=Path, help="directory of the page (default: docs)")
    parser.add_argument("--quote", action="store_true", help="also write the table of README.md")
    parser.add_argument("--redraw", action="store_true", help="write the page from stored results")
    options = parser.parse_args()
    names = [benchmark.name for benchmark in ALL]
    options.names = options.only.split(",") if options.only else names
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    return options


def main() -> int:
    """Run the benchmarks that the command line names; return the exit code."""
    options = parse_arguments()
    # The numbers of quick sizes are written into docs/ only if the command line names it.
    directory = options.into or (None if options.quick else ROOT / "docs")
    # SIGTERM ends a benchmark like SIGINT, so that the processes that it has started end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    chosen = [one for one in ALL if one.name in options.names and not options.redraw]
    record = measure(chosen, directory, lambda benchmark: run_benchmark(benchmark, options.quick))
    has_failed = any(record[name].error for name in options.names if name in record)
    if directory is None:
        print(page(record))
    elif options.redraw:
        write_page(record, directory / "benchmarks.json")
    if directory is not None and options.quote and not has_failed:
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text(), summary_table(record)))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
