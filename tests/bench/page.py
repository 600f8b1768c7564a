"""docs/benchmarks.md and the README's table, made from what is kept of the runs.

Both are functions of the record, so that a test can compare them with what stands there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from figures import HEAD, Found, cells, from_plain, in_markdown, to_plain

HERE = Path(__file__).resolve().parent


@attrs.frozen
class Benchmark:
    """One program of this folder.

    flags, quick: in its full size, and in one that is soon over. limit: seconds. needs: modules
    without which it is not run. make: the target whose environment has them.
    """

    name: str
    flags: str = ""
    quick: str = ""
    limit: float = 120.0
    needs: tuple[str, ...] = ()
    make: str = "bench"
    folder: Path = HERE

    def command(self, quick: bool = False) -> str:
        """As somebody types it who repeats it."""
        return f"python tests/bench/{self.name}.py {self.quick if quick else self.flags}".rstrip()

    def about(self) -> tuple[str, str]:
        """Its title and its text, which are its docstring's; nothing of it is imported."""
        doc = ast.get_docstring(ast.parse((self.folder / f"{self.name}.py").read_text()))
        title, _, text = (doc or self.name).partition("\n\n")
        return " ".join(title.split()).rstrip("."), text


ALL = (
    Benchmark(
        "recovery",
        "--spawn --rest 5",
        quick="--parts restart,start --rounds 1 --kills 1 --repeat 1",
        limit=420,
    ),
    Benchmark(
        "rendezvous",
        quick="--nodes 8 --torch-up-to 8 --apart 8 --processes 2 --standing 8 --idle 1 --repeat 1",
        limit=420,
    ),
    Benchmark("context", quick="--calls 10000 --repeat 2"),
    Benchmark("events", quick="--repeat 1 --rest 2 --rests 1", limit=240),
    Benchmark("sampler", quick="--lengths 1000000 --worlds 1 --repeat 1", limit=180),
    Benchmark("checkpoint", quick="--mib 32 --repeat 1", limit=600),
    Benchmark("logical", quick="--rounds 2", limit=180),
    Benchmark("startup", quick="--runs 1"),
    Benchmark(
        "frameworks",
        quick="--frameworks accelerate --repeat 1",
        limit=900,
        needs=("lightning", "transformers", "accelerate"),
        make="bench-integrations",
    ),
)
"""In the order of the page. Together they take about 14 minutes on two cores, and a minute in their
quick sizes, which show that they run and no number worth a look."""


@attrs.frozen
class Section:
    """The last run of one benchmark.

    command: what was run. date: its day. seconds: how long it took. load: the machine's average
    before it. machine: what is known of it, by name. error: why there are no rows, if so.
    """

    command: str
    date: str
    seconds: float
    load: float
    machine: Mapping[str, str]
    found: Found = attrs.field(factory=Found)
    error: str = ""


Record = Mapping[str, Section]
"""By the benchmark's name."""


def record_to_plain(record: Record) -> dict[str, Any]:
    return {
        name: {**attrs.asdict(section, recurse=False), "found": to_plain(section.found)}
        for name, section in record.items()
    }


def record_from_plain(plain: Mapping[str, Any]) -> dict[str, Section]:
    return {
        name: Section(**{**section, "found": from_plain(section["found"])})
        for name, section in plain.items()
    }


HEAD_OF_PAGE, TABLE = (HERE / "page.md").read_text().split("{machines}\n\n## In short\n\n")
"""The text above all sections, and the table that stands in the README as well."""


def page(record: Record) -> str:
    parts = [HEAD_OF_PAGE.rstrip(), *machines(record), "## In short", quoted(record)]
    for benchmark in ALL:
        parts += section_of(benchmark, record.get(benchmark.name))
    return "\n\n".join(parts) + "\n"


def machines(record: Record) -> Iterator[str]:
    """One table, if all was measured on one machine with one set of versions."""
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, section in record.items():
        kinds.setdefault(tuple(section.machine.items()), []).append(name)
    for facts, names in kinds.items():
        if len(kinds) > 1:
            yield f"Of {', '.join(names)}:"
        yield in_markdown(("machine", ""), facts)


def section_of(benchmark: Benchmark, section: Section | None) -> Iterator[str]:
    title, text = benchmark.about()
    yield f"## {title}"
    yield text
    if section is None:
        needs = f", which needs {', '.join(benchmark.needs)}" if benchmark.needs else ""
        yield f"**Not measured yet**: `make {benchmark.make}` does it{needs}."
        return
    yield (
        f"`{section.command}`, on {section.date}, took {section.seconds:.0f} s; the load average "
        f"before it was {section.load:.1f}."
    )
    if section.error:
        yield f"**It failed, and there are no numbers**: {section.error}."
        return
    yield in_markdown(HEAD, map(cells, section.found.rows))
    if section.found.notes:
        yield "\n".join(f"- {note}" for note in section.found.notes)


def quoted(record: Record) -> str:
    """The table that stands in the README as well, letter by letter."""
    found = {name: section.found for name, section in record.items()}

    def filled(cell: str) -> str:
        try:
            return cell.format(**found)
        except KeyError:
            return " not measured "

    lines = TABLE.strip().splitlines()
    return "\n".join("|".join(map(filled, line.split("|"))) for line in lines)


def with_table(readme: str, table: str) -> str:
    """A README whose table under `## Benchmarks` is this one; ValueError if it has none."""
    before, heading, after = readme.partition("\n## Benchmarks\n")
    text, bar, rest = after.partition("\n| ")
    if not heading or not bar:
        raise ValueError("the README has no table under a heading `## Benchmarks`")
    lines = rest.splitlines(keepends=True)
    end = next((at for at, line in enumerate(lines) if at and line[:1] != "|"), len(lines))
    return "".join((before, heading, text, "\n", table, "\n", *lines[end:]))
