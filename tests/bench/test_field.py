"""The same training under other launchers: what is read off a run, and what is made of outcomes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import field
import pytest
from figures import in_markdown

STEPS = {
    ".0": [(1, 0.0), (2, 0.5), (3, 1.0), (2, 3.0), (3, 3.5), (4, 4.0)],
    ".1": [(1, 0.1), (2, 0.6), (2, 3.1), (3, 3.6)],
}
"""Of two ranks: a worker is killed at 1.1, and both go on after step 1 at 3.0."""
MACHINE = {"processor": "some, 2 cores", "memory": "8 GiB"}
OUTCOME = field.Outcome(
    "1.2", "2026-01-02", 0.5, MACHINE, 120.0, 10.0, 4000.0, 3000, 10, 1, 25, [*range(1, 10), 20.0]
)


def test_steps_that_are_done_again_count_once_and_later_ones_do_not_count() -> None:
    assert field.last_step(STEPS, 10.0) == 4
    assert field.last_step(STEPS, 3.5) == 3
    assert [field.redone(taken) for taken in STEPS.values()] == [2, 1]


def test_a_pause_is_the_longest_time_without_a_step_from_a_kill_to_the_next() -> None:
    assert field.pauses(STEPS, [1.1, 3.2], 5.0) == [pytest.approx(1.9), 1.0]
    # One from which the job never comes back lasts to the end.
    assert field.pauses(STEPS, [4.5], 10.0) == [5.5]


def test_the_table_has_a_row_for_each_launcher_and_says_what_was_not_measured() -> None:
    failed = field.Outcome("2.0", "", 0.0, MACHINE, 120.0, 10.0, error="no step within 120 s")
    lines = field.table({"torchft": OUTCOME, "ray": failed}).splitlines()
    assert "| torchft 1.2 | 75.0 % | 5.0 s | 20 s | 2.5 |" in lines
    assert "| Ray Train | no step within 120 s | | | |" in lines
    assert sum("not measured yet" in line for line in lines) == len(field.LAUNCHERS) - 2
    assert {line.count("|") for line in lines} == {6}


def test_the_page_names_each_launchers_settings_and_each_run() -> None:
    text = field.page({"torchft": OUTCOME})
    for launcher in field.LAUNCHERS:
        assert f"- {launcher.title}: {launcher.settings}." in text
    assert "3000 of 4000 steps in 120 s, 10 kills; 1 more kills found no worker alive." in text


def test_the_page_and_the_readme_show_the_outcomes_that_are_kept() -> None:
    outcomes = field.read(field.KEPT)
    assert field.PAGE.read_text() == field.page(outcomes), "run field.py --quote"
    readme = field.README.read_text()
    assert field.quoted(readme, field.table(outcomes)) == readme, "run field.py --quote"


def test_outcomes_are_read_as_they_were_written(tmp_path: Path) -> None:
    field.write(tmp_path / "kept", {"torchft": OUTCOME})
    assert field.read(tmp_path / "kept") == {"torchft": OUTCOME}
    assert field.read(tmp_path / "none") == {}


def test_a_readme_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no lines"):
        field.quoted("words", in_markdown("ab", ()))


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, field.__file__, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_flags_that_cannot_work_are_refused() -> None:
    for flags, why in (
        (("--only", "mpirun"), "no launcher mpirun: there are elasticrun, torchrun"),
        (("--python", "mpirun=python"), "no launcher mpirun"),
        (("--seconds", "5"), "no kill every 10 s within 5 s"),
    ):
        done = run(*flags)
        assert (done.returncode, why in done.stderr) == (2, True), done.stderr


@pytest.mark.long
def test_elasticrun_keeps_steps_and_who_is_not_installed_is_said_to_be_missing(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept.json"
    # A stub for a Python in which no launcher is installed.
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    times = ("--seconds", "10", "--every", "4", "--json", str(kept))
    done = run("--only", "elasticrun,torchft", "--python", f"torchft={bare}", *times)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torchft: torchft-nightly is not installed for {bare}" in done.stdout
    outcome = json.loads(kept.read_text())
    assert outcome.keys() == {"elasticrun"}
    assert outcome["elasticrun"]["kills"] == 2
    assert outcome["elasticrun"]["kept"] > 0
