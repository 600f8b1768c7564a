"""Benchmarks: formatting of results, the pages written from them, and the limits of a run."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import attrs
import benchmark_process
import compare_checkouts
import pytest
from page import (
    ALL,
    HERE,
    TABLE,
    Benchmark,
    Section,
    page,
    record_from_json,
    record_to_json,
    summary_table,
    with_table,
)
from processes import find_processes
from results import (
    Results,
    Row,
    Samples,
    format_quantity,
    markdown_table,
    results_from_json,
    results_to_json,
    table_cells,
)

ROOT = HERE.parent.parent
MACHINE = {"processor": "some, 2 cores"}
SECTION = Section("python tests/bench/startup.py", "2026-01-02", 3.0, 0.1, MACHINE)
HELP = Row("help", "`--help`", Samples("s", (0.1,)), Samples("s", (1.4,)), "torchrun")
RECORD = {"startup": attrs.evolve(SECTION, results=Results([HELP], ["A note."]))}
OF_TEN = Samples("s", (2.0, 1.0, 4.0), 7, "not within 20 s")

# -- results ----------------------------------------------------------------------------------


def test_quantity_has_two_digits_and_a_unit_of_its_size() -> None:
    values = (0.0, 2.71828, 9.96, 14.4, 123.0, 0.0996)
    assert [format_quantity(value, "s") for value in values] == [
        *("0 ns", "2.7 s", "10 s", "14 s", "120 s", "0.10 s")
    ]
    assert [format_quantity(value, "s") for value in (0.05, 0.00203, 2e-7, 55e-9)] == [
        *("50 ms", "2.0 ms", "0.20 µs", "55 ns")
    ]
    assert [format_quantity(value, "bytes") for value in (46 * 2**20, 0)] == ["46 MiB", "0 bytes"]
    assert format_quantity(0.0034, "of a core") == "0.34 % of a core"
    assert format_quantity(1.41, "a second") == "1.4 a second"
    assert format_quantity(12345, "operations") == "12,000 operations"


def test_failed_attempts_are_counted_and_not_part_of_the_median() -> None:
    assert str(OF_TEN) == "2.0 s; 7 of 10 not within 20 s"
    assert (OF_TEN.spread, OF_TEN.count) == ("1.0 to 4.0 s", "10, 7 failed")
    never = Samples("s", failed=2, reason="not within 20 s")
    assert (str(never), never.spread, never.count) == ("not within 20 s", "", "2")
    assert Samples("s", (0.05, 0.5)).spread == "50 ms to 0.50 s"


def test_ratio_is_that_of_medians_or_the_median_of_paired_ratios() -> None:
    samples, baseline = Samples("s", (1.0, 2.0, 9.0)), Samples("s", (2.0, 10.0, 3.0))
    assert Row("a", "a", samples, baseline, "torch").ratio == "0.67"
    assert Row("a", "a", samples, baseline, "torch", paired=True).ratio == "0.50"
    failed = Samples("s", failed=1, reason="not within 20 s")
    for other in (None, failed, Samples("bytes", (0.0,))):
        assert Row("a", "a", samples, other).ratio == ""
    with pytest.raises(ValueError, match="shorter"):
        _ = Row("a", "a", samples, Samples("s", (1.0,)), paired=True).ratio


def test_results_and_record_are_unchanged_after_a_round_trip_through_json() -> None:
    baseline = Samples("s", (1.25,))
    rows = [Row("a", "A", OF_TEN, baseline, "torch"), Row("b", "B", baseline)]
    results = Results(rows, ["a note"])
    assert results_from_json(json.loads(json.dumps(results_to_json(results)))) == results
    assert record_from_json(json.loads(json.dumps(record_to_json(RECORD)))) == RECORD
    with pytest.raises(KeyError):
        results["c"]


def test_each_row_of_a_table_has_as_many_cells_as_the_header() -> None:
    not_tried = Row("c", "C", OF_TEN, Samples("s", reason="not tried"), "torch")
    rows = [Row("a", "A", OF_TEN, OF_TEN, "torch"), Row("b", "B", OF_TEN), not_tried]
    lines = markdown_table("abcdefgh", map(table_cells, rows)).splitlines()
    assert {line.count("|") for line in lines} == {9}


# -- comparison of checkouts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([2.0, 2.1, 2.2, 2.3, 2.4], "slower"),
        ([0.5, 0.5, 0.6, 0.6, 9.0], "faster"),
        ([1.2, 1.3, 1.4, 1.9, 2.0], "same"),
        ([9.0, 9.0], "too few turns"),
    ],
)
def test_difference_is_reported_if_interquartile_ranges_do_not_overlap(
    after: list[float], verdict: str
) -> None:
    row = compare_checkouts.Comparison("a", "s", [1.0, 1.1, 1.2, 1.3, 1.4], after)
    assert row.verdict() == verdict
    assert f"| {verdict} |" in compare_checkouts.comparison_table({"a": row})


# A benchmark of this checkout, and the results that one of an older checkout writes.
PROGRAM = """
import sys
sys.path.append(HERE)
from results import Row, Samples, run_command_line
samples = Samples("s", [1.0, 3.0, 2.0])
def measure(*, mib=8):
    assert mib == 1
    yield from (Row(name, "training waits", samples) for name in ("save", "save.torch"))
    yield from (Row("load", "a load", samples), Row("other", "another row", samples))
run_command_line(measure, "")
"""
OLDER_PROGRAM = """
import json, sys
assert sys.argv[1:4] == ["--mib", "1", "--json"]
samples = {"unit": "s", "values": [1.0, 3.0, 2.0]}
texts = {"save": "A step waits", "save.torch": "A step waits", "load": "It loads", "else": "No"}
rows = [{"name": name, "what": text, "ours": samples} for name, text in texts.items()]
open(sys.argv[4], "w").write(json.dumps({"rows": rows}))
"""


@pytest.mark.parametrize("directory", compare_checkouts.PROGRAM_DIRS)
@pytest.mark.parametrize(
    ("module", "program"), [("timed_jobs", PROGRAM), ("launched", OLDER_PROGRAM)]
)
def test_checkout_of_any_age_yields_one_row_for_each_measurement(
    tmp_path: Path, directory: str, module: str, program: str
) -> None:
    programs = tmp_path / directory
    programs.mkdir(parents=True)
    (programs / f"{module}.py").write_text("LAUNCHERS = {'torchrun': ()}\n")
    (programs / "checkpoint.py").write_text(f"HERE = {str(HERE)!r}\n{program}")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    part = compare_checkouts.Part("checkpoint", "--mib 1", ("save", "load"))
    rows = [(row.name, row.median) for row in compare_checkouts.run_part(tmp_path, part)]
    assert rows == [("save", 2.0), ("load", 2.0)]


# -- the page ---------------------------------------------------------------------------------


@pytest.fixture
def stored() -> dict[str, Section]:
    return record_from_json(json.loads((ROOT / "docs" / "benchmarks.json").read_text()))


def test_page_and_readme_agree_with_the_stored_samples(stored: dict[str, Section]) -> None:
    redraw = "run `python tests/bench --redraw --quote`"
    assert page(stored) == (ROOT / "docs" / "benchmarks.md").read_text(), redraw
    assert summary_table(stored) in (ROOT / "README.md").read_text(), redraw
    assert "not measured" not in summary_table(stored)
    assert not [name for name, section in stored.items() if section.error]
    assert not re.findall(r"(?<![\w.`/])/(?:home|tmp|root|work)/\S*", page(stored))


def test_each_benchmark_has_a_file_and_commands_with_existing_options() -> None:
    options = {path.stem: options_of(path) for path in HERE.glob("[!t]*.py")}
    assert {name for name, taken in options.items() if taken} == {one.name for one in ALL}
    for benchmark in ALL:
        # The docstring, which is the text of the section, contains the command.
        usage = re.findall(r"^    .*", benchmark.read_docstring()[1], re.MULTILINE)
        assert f"python tests/bench/{benchmark.name}.py" in usage[0]
        commands = " ".join((benchmark.flags, benchmark.quick, *usage))
        assert set(re.findall(r"(?<!\w)--[a-z-]+", commands)) <= options[benchmark.name]
    for line in TABLE.splitlines()[2:]:
        assert set(re.findall(r"\{(\w+)\[", line)) == set(re.findall(r"bench/(\w+)\.py`", line))


def options_of(program: Path) -> set[str]:
    """Return the options of a program, from the parameters of its function `measure`."""
    for node in ast.parse(program.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == "measure":
            return {f"--{arg.arg.replace('_', '-')}" for arg in node.args.kwonlyargs}
    return set()


def test_page_reports_failed_and_missing_sections() -> None:
    failed = attrs.evolve(SECTION, results=Results(), error="not finished within 5 s")
    other = attrs.evolve(SECTION, machine={"processor": "another"})
    text = page({**RECORD, "recovery": failed, "context": other})
    titles = [line for line in text.splitlines() if line.startswith("## ")][1:]
    assert titles == [f"## {benchmark.read_docstring()[0]}" for benchmark in ALL]
    assert "**The run failed, so there are no numbers**: not finished within 5 s." in text
    assert text.count("**Not measured yet.**") == len(ALL) - 3
    assert "Run `make bench-integrations`, which needs lightning" in text
    assert "| `--help` | 0.10 s | | 1 | torchrun: 1.4 s | | 1 | 0.071 |" in text
    assert "- A note." in text
    # Two machines have one table each, which names its sections.
    title = "The machine and the versions of"
    assert text.index(f"{title} startup, recovery:") < text.index(f"{title} context:")
    assert title not in page(RECORD)


def test_readme_table_is_replaced_only_below_its_heading() -> None:
    readme = "| a |\n\n## Benchmarks\n\nWords.\n\n| b |\n| c |\n\nMore.\n\n| d |\n"
    expected = "| a |\n\n## Benchmarks\n\nWords.\n\n| x |\n\nMore.\n\n| d |\n"
    assert with_table(readme, "| x |") == expected
    assert with_table(expected, "| x |") == expected
    with pytest.raises(ValueError, match="no table"):
        with_table("| a |", "| x |")


# -- a run ------------------------------------------------------------------------------------

PROGRAMS = {
    "good": """
import subprocess, sys
sys.path.append(HERE)
from results import Row, Samples, run_command_line
subprocess.Popen(["sleep", "1000"], start_new_session=True)
sys.stdout = sys.stderr
run_command_line(lambda: [Row("a", "A", Samples("s", [1.0]))], "")
""",
    "bad": "raise SystemExit(3)",
    "hangs": """
import os, signal, time
if not os.fork():
    # The parent exits. The grandchild ignores SIGINT and has its own session.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
time.sleep(1000)
""",
    "silent": "",
}


@pytest.mark.long
def test_run_ends_at_its_time_limit_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    monkeypatch.setenv("DIRECTORY_OF_THIS_TEST", str(tmp_path))
    for name, code in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(f"HERE = {str(HERE)!r}\n{code}")
        timeout_s = 5.0 if name == "hangs" else 60.0
        benchmark = Benchmark(name, timeout_s=timeout_s, directory=tmp_path)
        section = benchmark_process.run_benchmark(benchmark, exit_timeout_s=0.3)
        ends.append((section.error, section.results.notes, len(section.results.rows)))
    assert not find_processes("DIRECTORY_OF_THIS_TEST", str(tmp_path))
    assert ends == [
        ("", ("The benchmark left 1 processes, which were killed.",), 1),
        ("exit code 3", (), 0),
        ("not finished within 5 s", (), 0),
        ("the benchmark wrote no results", (), 0),
    ]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("context", "| `context().should_stop()` |"),
        pytest.param("startup", "| `--help`, a whole process |", marks=pytest.mark.long),
        # This benchmark replaces private functions to leave checksums out.
        pytest.param(
            "checkpoint",
            "`restore` without checksums |",
            marks=[pytest.mark.long, pytest.mark.timeout(600)],
        ),
    ],
)
def test_command_runs_the_named_benchmark_and_writes_the_page(
    tmp_path: Path, name: str, row: str
) -> None:
    directory = tmp_path / "new" / "directory"
    command = [sys.executable, str(HERE), "--quick", "--only", name, "--into", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    text = (directory / "benchmarks.md").read_text()
    assert row in text
    assert page(record_from_json(json.loads((directory / "benchmarks.json").read_text()))) == text


def test_measured_section_is_stored_before_the_next_benchmark_runs(tmp_path: Path) -> None:
    def run(benchmark: Benchmark) -> Section:
        if benchmark.name in RECORD:
            return RECORD[benchmark.name]
        raise KeyboardInterrupt

    measure = runpy.run_path(str(HERE / "__main__.py"))["measure"]
    with pytest.raises(KeyboardInterrupt):
        measure([Benchmark("startup"), Benchmark("recovery")], tmp_path, run)
    assert record_from_json(json.loads((tmp_path / "benchmarks.json").read_text())) == RECORD
