"""The page of benchmarks is what the record says, the README quotes it, and a run is bounded."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from jobs import alive

sys.path.append(str(Path(__file__).parent / "benchmarks"))

from catalogue import ALL, HERE
from figures import Found, Row, Samples
from page import QUOTES, Section, page, quoted, record_from_plain, record_to_plain, with_table

ROOT = HERE.parent.parent
KEPT = ROOT / "docs" / "benchmarks.json"
MACHINE = {"processor": "some, 2 cores"}
SECTION = Section("python tests/benchmarks/startup.py", "2026-01-02", 3.0, 0.1, MACHINE)
HELP = Row("help", "`--help`", Samples("s", (0.1,)), Samples("s", (1.4,)), "torchrun")
RECORD = {"startup": attrs.evolve(SECTION, found=Found([HELP], ["A note."]))}


@pytest.fixture
def kept() -> dict[str, Section]:
    if not KEPT.exists():
        pytest.fail("docs/benchmarks.json is not there: `make bench` makes it")
    return record_from_plain(json.loads(KEPT.read_text()))


def test_the_page_is_made_of_the_samples_that_are_kept_and_of_nothing_else(
    kept: dict[str, Section],
) -> None:
    assert page(kept, ALL) == (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_readme_quotes_the_pages_numbers(kept: dict[str, Section]) -> None:
    assert quoted(kept) in (ROOT / "README.md").read_text(), "`make bench` puts the table there"
    assert "not measured" not in quoted(kept)


def test_the_page_names_no_path_and_no_failure(kept: dict[str, Section]) -> None:
    assert not [name for name, section in kept.items() if section.error]
    assert not re.findall(r"(?<![\w.`/])/(?:home|tmp|root|work)/\S*", page(kept, ALL))


def test_each_benchmark_has_a_section_a_file_and_flags_that_it_takes() -> None:
    texts = {path.stem: path.read_text() for path in HERE.glob("*.py")}
    programs = {name for name, text in texts.items() if "parser_of(__doc__)" in text}
    assert programs == {benchmark.name for benchmark in ALL}
    for benchmark in ALL:
        # The command stands in the docstring, and so on the page.
        usage = re.findall(r"^    .*", benchmark.about()[1], re.MULTILINE)
        assert f"python tests/benchmarks/{benchmark.name}.py" in usage[0]
        given = " ".join((benchmark.flags, benchmark.quick, *usage))
        flags = re.findall(r"(?<!\w)--[a-z-]+", given)
        assert not [flag for flag in flags if f'"{flag}"' not in texts[benchmark.name]]


def test_all_that_is_quoted_is_measured_by_a_benchmark_of_that_name() -> None:
    names = {benchmark.name for benchmark in ALL}
    for _, ours, theirs, name in QUOTES:
        assert {name} == set(re.findall(r"\{(\w+)\[", ours + theirs)) <= names


def test_nothing_is_left_out_of_the_page_silently() -> None:
    failed = attrs.evolve(SECTION, found=Found([]), error="not done within 5 s")
    text = page({**RECORD, "recovery": failed}, ALL)
    assert [line for line in text.splitlines() if line.startswith("## ")][1:] == [
        f"## {benchmark.about()[0]}" for benchmark in ALL
    ]
    assert "**It failed, and there are no numbers**: not done within 5 s." in text
    assert text.count("**Not measured yet**") == len(ALL) - 2
    assert "`make bench-integrations` does it, which needs lightning" in text
    assert "| `--help` | 0.10 s | torchrun" not in text
    assert "| `--help` | 0.10 s | | 1 | torchrun: 1.4 s | | 1 | 0.071 |" in text
    assert "- A note." in text


def test_sections_of_two_machines_say_which_is_whose() -> None:
    other = attrs.evolve(SECTION, machine={"processor": "another"})
    text = page({**RECORD, "context": other}, ALL)
    assert text.index("Of startup:") < text.index("Of context:")
    assert "Of startup:" not in page(RECORD, ALL)


def test_a_record_is_read_as_it_was_written() -> None:
    assert record_from_plain(json.loads(json.dumps(record_to_plain(RECORD)))) == RECORD


def test_the_table_is_put_where_the_readmes_is_and_nowhere_else() -> None:
    readme = "| a |\n\n## Numbers\n\nWords.\n\n| b |\n| c |\n\nMore.\n\n| d |\n"
    now = "| a |\n\n## Numbers\n\nWords.\n\n| x |\n\nMore.\n\n| d |\n"
    assert with_table(readme, "| x |") == now
    assert with_table(now, "| x |") == now
    with pytest.raises(ValueError, match="no table"):
        with_table("| a |", "| x |")


THREE_RUNS = """
import json, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from catalogue import Benchmark
from runs import adopt_orphans, run
adopt_orphans()
folder = Path(sys.argv[2])
for name in ("good", "bad", "hangs", "silent"):
    benchmark = Benchmark(name, limit=3.0 if name == "hangs" else 60.0, folder=folder)
    section = run(benchmark, patience=0.3)
    print(json.dumps([section.error, [*section.found.notes], len(section.found.rows)]))
"""
PROGRAMS = {
    "good": """
import argparse, subprocess, sys
sys.path.append(BENCHMARKS)
from figures import Row, Samples
from results import parser_of, tell
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(FOLDER + "/left", "w").write(str(left.pid))
sys.stdout = sys.stderr
tell(parser_of("").parse_args(), [Row("a", "A", Samples("s", [1.0]))])
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
    open(FOLDER + "/orphan", "w").write(str(os.getpid()))
time.sleep(1000)
""",
    "silent": "",
}


def test_a_run_is_ended_when_its_time_is_over_and_leaves_no_process(tmp_path: Path) -> None:
    for name, code in PROGRAMS.items():
        names = f"BENCHMARKS, FOLDER = {str(HERE)!r}, {str(tmp_path)!r}\n"
        (tmp_path / f"{name}.py").write_text(names + code)
    command = [sys.executable, "-c", THREE_RUNS, str(HERE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    pids = [int((tmp_path / name).read_text()) for name in ("left", "orphan")]
    surviving = [pid for pid in pids if alive(pid)]
    for pid in surviving:
        os.kill(pid, signal.SIGKILL)
    assert not surviving
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["", ["It left 1 processes behind, which were ended."], 1],
        ["exit code 3", [], 0],
        ["not done within 3 s", [], 0],
        ["it has told nothing", [], 0],
    ]


def test_the_command_measures_what_it_is_asked_for_and_writes_the_page(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE), "--quick", "--only", "context", "--into"]
    tmp_path /= "new/folder"
    command.append(str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| `context().should_stop()` |" in text
    record = record_from_plain(json.loads((tmp_path / "benchmarks.json").read_text()))
    assert page(record, ALL) == text


def test_what_was_measured_is_kept_whatever_comes_of_the_next(tmp_path: Path) -> None:
    def sections() -> Iterator[tuple[str, Section]]:
        yield from RECORD.items()
        raise KeyboardInterrupt

    keep = runpy.run_path(str(HERE / "__main__.py"))["keep"]
    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path, {}, sections())
    assert record_from_plain(json.loads((tmp_path / "benchmarks.json").read_text())) == RECORD
