"""docs/benchmarks.md and the README's table, made from what is kept of the runs.

Both are functions of the record, so that a test can compare them with what stands there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
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
    quick: str = attrs.field(default="", kw_only=True)
    limit: float = attrs.field(default=120.0, kw_only=True)
    needs: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    make: str = attrs.field(default="bench", kw_only=True)
    folder: Path = attrs.field(default=HERE, kw_only=True)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.py"

    def given(self, quick: bool) -> list[str]:
        return (self.quick if quick else self.flags).split()

    def command(self, quick: bool = False) -> str:
        """As somebody types it who repeats it."""
        return " ".join((COMMAND.format(self.name), *self.given(quick)))

    def about(self) -> tuple[str, str]:
        """Its title and its text, which are its docstring's; nothing of it is imported."""
        doc = ast.get_docstring(ast.parse(self.path.read_text())) or self.name
        title, _, text = doc.partition("\n\n")
        return " ".join(title.split()).rstrip("."), text


COMMAND = "python tests/bench/{}.py"
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
    Benchmark(
        "plugs",
        quick="--backends el-file --stories host",
        limit=480,
    ),
    Benchmark("context", quick="--calls 10000 --repeat 2"),
    Benchmark("events", quick="--repeat 1 --rest 2 --rests 1", limit=240),
    Benchmark("sampler", quick="--lengths 1000000 --worlds 1 --repeat 1", limit=180),
    Benchmark("checkpoint", quick="--mib 32 --repeat 1", limit=480),
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


HOW = """\
`make bench` runs all of this and writes this page; `python tests/bench --only NAME` does one
section again. Each benchmark is a process of its own, one after the other. What is compared is
measured in the same run, in turns or side by side, with torch's or torchrun's part on the same
work. A number is the median of so many samples, `from, to` is the least and the most of them, `of`
says how many there were, and a ratio below 1 says that elasticlib takes less. Where samples were
taken in turns step by step, the ratio is the median of the rounds' ratios. What did not happen
within a bound is counted as failed and is in no median. All samples are in
[`benchmarks.json`](benchmarks.json).

Small machines, loopback and CPU tensors: compare the columns, and do not take seconds for those of
a cluster. Ratios near 1 change from run to run.
"""


def page(record: Record, catalogue: Sequence[Benchmark] = ALL) -> str:
    parts = ["# Benchmarks", HOW.rstrip(), *machines(record), "## In short", quoted(record)]
    for benchmark in catalogue:
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


QUOTES: Sequence[tuple[str, str, str, str]] = (
    (
        "a worker dies → both ranks have a working group",
        "{recovery[restart].ours} (at most {recovery[restart].ours.most}"
        " of {recovery[restart].ours.count})",
        "{recovery[restart].theirs} (only with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`)",
        "recovery",
    ),
    (
        "an agent and its workers are killed → the survivor's group works",
        "{recovery[loss].ours}",
        "{recovery[loss].theirs}",
        "recovery",
    ),
    (
        "a second node joins → a world of two, from its start",
        "{recovery[join].ours}",
        "{recovery[join].theirs}",
        "recovery",
    ),
    (
        "a script's first line, from the command",
        "{recovery[start].ours} (`--start-method spawn`: {recovery[start.spawn].ours})",
        "{recovery[start].theirs}",
        "recovery",
    ),
    ("an agent at rest", "{recovery[rest].ours}", "{recovery[rest].theirs}", "recovery"),
    ("the event stream of it, steps told", "{events[stream].ours}", "", "events"),
    (
        "128 nodes settle (one process, loopback)",
        "{rendezvous[settle.128].ours}",
        "{rendezvous[settle.128].theirs}",
        "rendezvous",
    ),
    (
        "256 nodes; 1,000 nodes",
        "{rendezvous[settle.256].ours}; {rendezvous[settle.1000].ours}"
        " (in eight processes: {rendezvous[apart.1000].ours})",
        "",
        "rendezvous",
    ),
    (
        "rank 0 of 128 dies → the survivors' next generation",
        "{rendezvous[death.128].ours}",
        "{rendezvous[death.128].theirs}",
        "rendezvous",
    ),
    (
        "a node that stands idle",
        "{rendezvous[operations.128].ours} store operations, {rendezvous[cpu.128].ours}",
        "",
        "rendezvous",
    ),
    (
        "`should_stop()`, when nothing is asked",
        "{context[should_stop].ours}",
        "(all-reduce of a flag, one rank: {context[should_stop].theirs})",
        "context",
    ),
    (
        "first index of a shuffled epoch, 10^6 samples; 10^12",
        "{sampler[first.1e+06.1].ours}; {sampler[first.1e+12.1].ours};"
        " memory: {sampler[memory.1e+06.1].ours}; {sampler[memory.1e+12.1].ours}",
        "`DistributedSampler`, 10^6: {sampler[first.1e+06.1].theirs},"
        " {sampler[memory.1e+06.1].theirs}",
        "sampler",
    ),
    (
        "1 GiB of state: a step waits for `save`; for `snapshot`",
        "{checkpoint[save].ours}; {checkpoint[snapshot].ours}"
        " (a plain copy: {checkpoint[save].theirs})",
        "`torch.save` {checkpoint[save.torch].theirs};"
        " DCP `async_save` {checkpoint[save.dcp].theirs}",
        "checkpoint",
    ),
    (
        "the same until it is durable",
        "{checkpoint[durable].ours}",
        "write and fsync {checkpoint[durable].theirs};"
        " `async_save` {checkpoint[durable.dcp].theirs}",
        "checkpoint",
    ),
    (
        "the same weights at any world size: a step of 8 logical workers on 2 ranks",
        "{logical[step.8.1].ratio} steps of DDP, {logical[bytes.8].ratio} times its bytes",
        "1",
        "logical",
    ),
    ("`--help`", "{startup[help].ours}", "{startup[help].theirs}", "startup"),
)
"""Row by row: what it is, of elasticlib, of torchrun or torch, from which file."""


def quoted(record: Record) -> str:
    """The table that stands in the README as well, letter by letter."""
    found = {name: section.found for name, section in record.items()}

    def filled(text: str) -> str:
        try:
            return text.format(**found)
        except KeyError:
            return "not measured"

    return in_markdown(
        ("what", "elasticlib", "torchrun, torch", "repeat it"),
        (
            (what, filled(ours), filled(theirs), f"`{COMMAND.format(name)}`")
            for what, ours, theirs, name in QUOTES
        ),
    )


def with_table(readme: str, table: str) -> str:
    """A README whose table under `## Numbers` is this one; ValueError if it has none."""
    before, heading, after = readme.partition("\n## Numbers\n")
    text, bar, rest = after.partition("\n| ")
    if not heading or not bar:
        raise ValueError("the README has no table under a heading `## Numbers`")
    lines = rest.splitlines(keepends=True)
    end = next((at for at, line in enumerate(lines) if at and line[:1] != "|"), len(lines))
    return "".join((before, heading, text, "\n", table, "\n", *lines[end:]))
