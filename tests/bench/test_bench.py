"""Benchmarks: how figures are said, the page that is made of them, and how a run is bounded."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import attrs
import by_turns
import pytest
import runs
from figures import Found, Row, Samples, cells, from_plain, in_markdown, said, to_plain
from page import (
    ALL,
    HERE,
    TABLE,
    Benchmark,
    Section,
    page,
    quoted,
    record_from_plain,
    record_to_plain,
    with_table,
)
from processes import find_processes

ROOT = HERE.parent.parent
MACHINE = {"processor": "some, 2 cores"}
SECTION = Section("python tests/bench/startup.py", "2026-01-02", 3.0, 0.1, MACHINE)
HELP = Row("help", "`--help`", Samples("s", (0.1,)), Samples("s", (1.4,)), "torchrun")
RECORD = {"startup": attrs.evolve(SECTION, found=Found([HELP], ["A note."]))}
OF_TEN = Samples("s", (2.0, 1.0, 4.0), 7, "not within 20 s")

# -- figures ----------------------------------------------------------------------------------


def test_a_quantity_has_two_digits_and_a_unit_of_its_size() -> None:
    assert [said(value, "s") for value in (0.0, 2.71828, 9.96, 14.4, 123.0, 0.0996)] == [
        *("0 ns", "2.7 s", "10 s", "14 s", "120 s", "0.10 s")
    ]
    assert [said(value, "s") for value in (0.05, 0.00203, 2e-7, 55e-9)] == [
        *("50 ms", "2.0 ms", "0.20 µs", "55 ns")
    ]
    assert [said(value, "bytes") for value in (46 * 2**20, 0)] == ["46 MiB", "0 bytes"]
    assert said(0.0034, "of a core") == "0.34 % of a core"
    assert said(1.41, "a second") == "1.4 a second"
    assert said(12345, "operations") == "12,000 operations"


def test_what_did_not_come_through_is_counted_and_is_in_no_median() -> None:
    assert str(OF_TEN) == "2.0 s; 7 of 10 not within 20 s"
    assert (OF_TEN.spread, OF_TEN.count) == ("1.0 to 4.0 s", "10, 7 failed")
    never = Samples("s", failed=2, why="not within 20 s")
    assert (str(never), never.spread, never.count) == ("not within 20 s", "", "2")
    assert Samples("s", (0.05, 0.5)).spread == "50 ms to 0.50 s"


def test_a_ratio_is_ours_to_theirs_of_medians_or_of_rounds() -> None:
    mine, theirs = Samples("s", (1.0, 2.0, 9.0)), Samples("s", (2.0, 10.0, 3.0))
    assert Row("a", "a", mine, theirs, "torch").ratio == "0.67"
    assert Row("a", "a", mine, theirs, "torch", paired=True).ratio == "0.50"
    none = Samples("s", failed=1, why="not within 20 s")
    for beside in (None, none, Samples("bytes", (0.0,))):
        assert Row("a", "a", mine, beside).ratio == ""
    with pytest.raises(ValueError, match="shorter"):
        _ = Row("a", "a", mine, Samples("s", (1.0,)), paired=True).ratio


def test_what_is_written_is_what_is_read() -> None:
    theirs = Samples("s", (1.25,))
    found = Found([Row("a", "A", OF_TEN, theirs, "torch"), Row("b", "B", theirs)], ["a note"])
    assert from_plain(json.loads(json.dumps(to_plain(found)))) == found
    assert record_from_plain(json.loads(json.dumps(record_to_plain(RECORD)))) == RECORD
    with pytest.raises(KeyError):
        found["c"]


def test_a_table_has_a_cell_for_each_head_in_every_row() -> None:
    untried = Row("c", "C", OF_TEN, Samples("s", why="not tried"), "torch")
    rows = [Row("a", "A", OF_TEN, OF_TEN, "torch"), Row("b", "B", OF_TEN), untried]
    lines = in_markdown("abcdefgh", map(cells, rows)).splitlines()
    assert {line.count("|") for line in lines} == {9}


# -- by turns ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([2.0, 2.1, 2.2, 2.3, 2.4], "slower"),
        ([0.5, 0.5, 0.6, 0.6, 9.0], "faster"),
        ([1.2, 1.3, 1.4, 1.9, 2.0], "same"),
        ([9.0, 9.0], "too few turns"),
    ],
)
def test_beyond_noise_is_where_the_quartiles_of_two_sides_do_not_overlap(
    after: list[float], verdict: str
) -> None:
    row = by_turns.Row("a", "s", [1.0, 1.1, 1.2, 1.3, 1.4], after)
    assert row.verdict() == verdict
    assert f"| {verdict} |" in by_turns.table({"a": row})


PROGRAM = """
import sys
from pathlib import Path
sys.path.append(HERE)
from figures import Row, Samples, run
mine = Samples("s", [1.0, 3.0, 2.0])
def measure(*, mib=8):
    assert mib == 1
    yield from (Row(name, "A step waits", mine) for name in ("save", "save.torch"))
    yield from (Row("load", "It loads", mine), Row("else", "No", mine))
run(measure, "")
"""


@pytest.mark.parametrize("folder", by_turns.FOLDERS)
def test_a_checkout_brings_one_row_for_each_thing_it_measures(tmp_path: Path, folder: str) -> None:
    programs = tmp_path / folder
    programs.mkdir(parents=True)
    (programs / "launched.py").write_text("LAUNCHERS = {'torchrun': ()}\n")
    (programs / "checkpoint.py").write_text(f"HERE = {str(HERE)!r}\n{PROGRAM}")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    part = by_turns.Part("checkpoint", "--mib 1", ("save", "load"))
    found = [(name, value) for name, _, _, value in by_turns.measured(tmp_path, part)]
    assert found == [("save", 2.0), ("load", 2.0)]


# -- the page ---------------------------------------------------------------------------------


@pytest.fixture
def kept() -> dict[str, Section]:
    return record_from_plain(json.loads((ROOT / "docs" / "benchmarks.json").read_text()))


def test_the_page_and_the_readme_are_made_of_the_samples_that_are_kept(
    kept: dict[str, Section],
) -> None:
    assert page(kept) == (ROOT / "docs" / "benchmarks.md").read_text()
    assert quoted(kept) in (ROOT / "README.md").read_text(), "`make bench` puts the table there"
    assert "not measured" not in quoted(kept)
    assert not [name for name, section in kept.items() if section.error]
    assert not re.findall(r"(?<![\w.`/])/(?:home|tmp|root|work)/\S*", page(kept))


def test_each_benchmark_has_a_section_a_file_and_flags_that_it_takes() -> None:
    flags = {path.stem: flags_of(path) for path in HERE.glob("[!t]*.py")}
    assert {name for name, taken in flags.items() if taken} == {one.name for one in ALL}
    for benchmark in ALL:
        # The command stands in the docstring, and so on the page.
        usage = re.findall(r"^    .*", benchmark.about()[1], re.MULTILINE)
        assert f"python tests/bench/{benchmark.name}.py" in usage[0]
        given = " ".join((benchmark.flags, benchmark.quick, *usage))
        assert set(re.findall(r"(?<!\w)--[a-z-]+", given)) <= flags[benchmark.name]
    for line in TABLE.splitlines()[2:]:
        assert set(re.findall(r"\{(\w+)\[", line)) == set(re.findall(r"bench/(\w+)\.py`", line))


def flags_of(program: Path) -> set[str]:
    """Of its function `measure`; the file is not imported."""
    for part in ast.parse(program.read_text()).body:
        if isinstance(part, ast.FunctionDef) and part.name == "measure":
            return {f"--{one.arg.replace('_', '-')}" for one in part.args.kwonlyargs}
    return set()


def test_nothing_is_left_out_of_the_page_silently() -> None:
    failed = attrs.evolve(SECTION, found=Found(), error="not done within 5 s")
    other = attrs.evolve(SECTION, machine={"processor": "another"})
    text = page({**RECORD, "recovery": failed, "context": other})
    titles = [line for line in text.splitlines() if line.startswith("## ")][1:]
    assert titles == [f"## {benchmark.about()[0]}" for benchmark in ALL]
    assert "**It failed, and there are no numbers**: not done within 5 s." in text
    assert text.count("**Not measured yet**") == len(ALL) - 3
    assert "`make bench-integrations` does it, which needs lightning" in text
    assert "| `--help` | 0.10 s | | 1 | torchrun: 1.4 s | | 1 | 0.071 |" in text
    assert "- A note." in text
    # Of two machines it is said which is whose.
    assert text.index("Of startup, recovery:") < text.index("Of context:")
    assert "Of startup:" not in page(RECORD)


def test_the_table_is_put_where_the_readmes_is_and_nowhere_else() -> None:
    readme = "| a |\n\n## Benchmarks\n\nWords.\n\n| b |\n| c |\n\nMore.\n\n| d |\n"
    now = "| a |\n\n## Benchmarks\n\nWords.\n\n| x |\n\nMore.\n\n| d |\n"
    assert with_table(readme, "| x |") == now
    assert with_table(now, "| x |") == now
    with pytest.raises(ValueError, match="no table"):
        with_table("| a |", "| x |")


# -- a run ------------------------------------------------------------------------------------

PROGRAMS = {
    "good": """
import subprocess, sys
sys.path.append(HERE)
from figures import Row, Samples, run
subprocess.Popen(["sleep", "1000"], start_new_session=True)
sys.stdout = sys.stderr
run(lambda: [Row("a", "A", Samples("s", [1.0]))], "")
""",
    "bad": "raise SystemExit(3)",
    "hangs": """
import os, signal, time
if not os.fork():
    # Its parent ends; it is deaf, and in a session of its own.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
time.sleep(1000)
""",
    "silent": "",
}


@pytest.mark.long
def test_a_run_is_ended_when_its_time_is_over_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setenv("FOLDER_OF_THIS_TEST", str(tmp_path))
    for name, code in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(f"HERE = {str(HERE)!r}\n{code}")
        limit = 5.0 if name == "hangs" else 60.0
        section = runs.run(Benchmark(name, limit=limit, folder=tmp_path), patience=0.3)
        found.append((section.error, section.found.notes, len(section.found.rows)))
    assert not find_processes("FOLDER_OF_THIS_TEST", str(tmp_path))
    assert found == [
        ("", ("It left 1 processes behind, which were ended.",), 1),
        ("exit code 3", (), 0),
        ("not done within 5 s", (), 0),
        ("it has told nothing", (), 0),
    ]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("context", "| `context().should_stop()` |"),
        pytest.param("startup", "| `--help`, a whole process |", marks=pytest.mark.long),
        # It reaches behind what is public, to leave sums out.
        pytest.param(
            "checkpoint",
            "`restore` without its sums |",
            marks=[pytest.mark.long, pytest.mark.timeout(600)],
        ),
    ],
)
def test_the_command_measures_what_it_is_asked_for_and_writes_the_page(
    tmp_path: Path, name: str, told: str
) -> None:
    into = tmp_path / "new" / "folder"
    command = [sys.executable, str(HERE), "--quick", "--only", name, "--into", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (into / "benchmarks.md").read_text()
    assert told in text
    assert page(record_from_plain(json.loads((into / "benchmarks.json").read_text()))) == text


def test_what_was_measured_is_kept_whatever_comes_of_the_next(tmp_path: Path) -> None:
    def once(benchmark: Benchmark) -> Section:
        if benchmark.name in RECORD:
            return RECORD[benchmark.name]
        raise KeyboardInterrupt

    measure = runpy.run_path(str(HERE / "__main__.py"))["measure"]
    with pytest.raises(KeyboardInterrupt):
        measure([Benchmark("startup"), Benchmark("recovery")], tmp_path, once)
    assert record_from_plain(json.loads((tmp_path / "benchmarks.json").read_text())) == RECORD
