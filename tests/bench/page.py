"""docs/benchmarks.md and the table in README.md, written from the stored results.

Both are pure functions of the record, so that a test can compare them with the files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from results import HEADER, Results, markdown_table, results_from_json, results_to_json, table_cells

HERE = Path(__file__).resolve().parent


@attrs.frozen
class Benchmark:
    """A benchmark program, which is one section of the page."""

    name: str  # the name of its file, without `.py`
    flags: str = ""  # its options in a full run
    quick: str = ""  # its options in a short run that only shows that the benchmark runs
    timeout_s: float = 120.0
    needs: tuple[str, ...] = ()  # the modules without which it is not run
    make_target: str = "bench"  # the make target whose environment has these modules
    directory: Path = HERE

    def command(self, quick: bool = False) -> str:
        """Return the command line that repeats the benchmark."""
        return f"python tests/bench/{self.name}.py {self.quick if quick else self.flags}".rstrip()

    def read_docstring(self) -> tuple[str, str]:
        """Return the title and the text of the section, without importing the program."""
        doc = ast.get_docstring(ast.parse((self.directory / f"{self.name}.py").read_text()))
        title, _, text = (doc or self.name).partition("\n\n")
        return " ".join(title.split()).rstrip("."), text


# The benchmarks in the order of the page. Together they take about 14 minutes on two cores. The
# quick sizes take a minute. They show that the programs run, and their numbers mean nothing.
ALL = (
    Benchmark(
        "recovery",
        "--spawn --rest 5",
        quick="--parts restart,start --rounds 1 --kills 1 --repeat 1",
        timeout_s=600,
    ),
    Benchmark(
        "rendezvous",
        quick="--nodes 8 --torch-up-to 8 --apart 8 --processes 2 --standing 8 --idle 1 --repeat 1",
        timeout_s=420,
    ),
    Benchmark("context", quick="--calls 10000 --repeat 2"),
    Benchmark("events", quick="--repeat 1 --idle-seconds 2 --idle-samples 1", timeout_s=240),
    Benchmark("sampler", quick="--lengths 1000000 --worlds 1 --repeat 1", timeout_s=180),
    Benchmark("checkpoint", quick="--mib 32 --repeat 1", timeout_s=600),
    Benchmark("logical", quick="--rounds 2", timeout_s=180),
    Benchmark("status", quick="--nodes 100 --runs 1", timeout_s=300),
    Benchmark("startup", quick="--runs 1"),
    Benchmark(
        "frameworks",
        quick="--frameworks accelerate --repeat 1",
        timeout_s=900,
        needs=("lightning", "transformers", "accelerate"),
        make_target="bench-integrations",
    ),
)


@attrs.frozen
class Section:
    """The last run of one benchmark."""

    command: str  # the command line that was run
    date: str  # the day of the run, as YYYY-MM-DD
    duration_s: float
    load: float  # the load average of the machine before the run
    machine: Mapping[str, str]  # the hardware and the versions, by name
    results: Results = attrs.field(factory=Results)
    error: str = ""  # why there are no rows, if the run failed


Record = Mapping[str, Section]  # the last run of each benchmark, by its name


def record_to_json(record: Record) -> dict[str, Any]:
    """Return the record as JSON values."""
    return {
        name: {
            **attrs.asdict(section, recurse=False),
            "results": results_to_json(section.results),
        }
        for name, section in record.items()
    }


def record_from_json(plain: Mapping[str, Any]) -> dict[str, Section]:
    """Return the record that `record_to_json` wrote."""
    return {
        name: Section(**{**section, "results": results_from_json(section["results"])})
        for name, section in plain.items()
    }


# The text above all sections, and the table that README.md contains as well.
INTRODUCTION, TABLE = (HERE / "page.md").read_text().split("{machines}\n\n## Summary\n\n")


def page(record: Record) -> str:
    """Return the text of docs/benchmarks.md."""
    parts = [INTRODUCTION.rstrip(), *machine_tables(record), "## Summary", summary_table(record)]
    for benchmark in ALL:
        parts += section_text(benchmark, record.get(benchmark.name))
    return "\n\n".join(parts) + "\n"


def machine_tables(record: Record) -> Iterator[str]:
    """Yield one table for each machine and set of versions, and the sections measured with it."""
    sections: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, section in record.items():
        sections.setdefault(tuple(section.machine.items()), []).append(name)
    for facts, names in sections.items():
        if len(sections) > 1:
            yield f"The machine and the versions of {', '.join(names)}:"
        yield markdown_table(("machine", ""), facts)


def section_text(benchmark: Benchmark, section: Section | None) -> Iterator[str]:
    """Yield the paragraphs of one section."""
    title, text = benchmark.read_docstring()
    yield f"## {title}"
    yield text
    if section is None:
        needs = f", which needs {', '.join(benchmark.needs)}" if benchmark.needs else ""
        yield f"**Not measured yet.** Run `make {benchmark.make_target}`{needs}."
        return
    yield (
        f"`{section.command}` ran on {section.date} and took {section.duration_s:.0f} s. The load "
        f"average before it was {section.load:.1f}."
    )
    if section.error:
        yield f"**The run failed, so there are no numbers**: {section.error}."
        return
    yield markdown_table(HEADER, map(table_cells, section.results.rows))
    if section.results.notes:
        yield "\n".join(f"- {note}" for note in section.results.notes)


def summary_table(record: Record) -> str:
    """Return the table of page.md with the measured values, as README.md contains it."""
    results = {name: section.results for name, section in record.items()}

    def fill(cell: str) -> str:
        try:
            return cell.format(**results)
        except KeyError:
            return " not measured "

    lines = TABLE.strip().splitlines()
    return "\n".join("|".join(map(fill, line.split("|"))) for line in lines)


def with_table(readme: str, table: str) -> str:
    """Return the README with this table below its heading `## Benchmarks`.

    Raises:
        ValueError: The README has no such heading, or no table below it.
    """
    before, heading, after = readme.partition("\n## Benchmarks\n")
    text, bar, rest = after.partition("\n| ")
    if not heading or not bar:
        raise ValueError("the README has no table under a heading `## Benchmarks`")
    lines = rest.splitlines(keepends=True)
    end = next((at for at, line in enumerate(lines) if at and line[:1] != "|"), len(lines))
    return "".join((before, heading, text, "\n", table, "\n", *lines[end:]))
