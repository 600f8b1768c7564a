"""The same training under other launchers: what is read off a run, and what is made of outcomes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import attrs
import field
import pytest
from figures import in_markdown

HALF = field.BATCH // 2


def done(pid: int, *steps: tuple[int, float], samples: int = HALF) -> list[field.Done]:
    return [field.Done(step, at, pid, samples) for step, at in steps]


STEPS = {
    ".0": [*done(7, (1, 0.0), (2, 0.5), (3, 1.0)), *done(9, (2, 3.0), (3, 3.5), (4, 4.0))],
    ".1": [*done(8, (1, 0.1), (2, 0.6)), *done(10, (2, 3.1), (3, 3.6))],
}
"""Of two workers: one is killed at 1.1, and both go on after step 1 at 3.0."""
KEPT = {
    ".0": done(7, (1, 0.0), (2, 0.5)) + done(9, (5, 3.0), (6, 3.5)),
    ".1": [
        *done(8, (1, 0.1), (2, 0.6)),
        *done(8, (3, 1.6), (4, 2.1), samples=field.BATCH),
        *done(8, (5, 3.0), (6, 3.6)),
    ],
}
"""The other goes on, does two steps alone and is joined in step 5."""
MACHINE = {"processor": "some, 2 cores", "memory": "8 GiB"}
OUTCOME = field.Outcome(
    version="1.2",
    date="2026-01-02",
    load=0.5,
    machine=MACHINE,
    seconds=120.0,
    every=10.0,
    possible=4000.0,
    kept=3000,
    kills=10,
    missed=1,
    redone=25,
    pauses=[*range(1, 10), 20.0],
    samples=2800 * field.BATCH,
    stalls=[0.1, 0.2, 0.4],
    joins=[0.01, 0.03],
)


def test_steps_that_are_done_again_count_once_and_later_ones_do_not_count() -> None:
    assert field.last_step(STEPS, 10.0) == 4
    assert field.last_step(STEPS, 3.5) == 3
    assert [field.redone(taken) for taken in STEPS.values()] == [2, 1]


def test_samples_count_once_and_half_of_a_batch_counts_half() -> None:
    assert field.samples(STEPS, 3.6) == 3 * field.BATCH
    assert field.samples(STEPS, 10.0) == 3.5 * field.BATCH
    assert field.samples(KEPT, 10.0) == 6 * field.BATCH
    # Of a worker that is killed when it has done its part of a step, which the other does again.
    again = {**KEPT, ".0": [*KEPT[".0"], *done(7, (3, 1.0))]}
    assert field.samples(again, 10.0) == 6 * field.BATCH


def test_a_pause_is_the_longest_time_without_a_step_from_a_kill_to_the_next() -> None:
    assert field.pauses(STEPS, [1.1, 3.2], 5.0) == [pytest.approx(1.9), 1.0]
    # One from which the job never comes back lasts to the end.
    assert field.pauses(STEPS, [4.5], 10.0) == [5.5]


def test_a_stall_is_of_a_worker_that_goes_on_and_a_newcomer_costs_its_first_step() -> None:
    stalls, joins = field.survivors(KEPT, [(0.7, 7)], 5.0)
    assert stalls == [pytest.approx(1.0)]
    assert joins == [pytest.approx(0.9 - 0.75)]
    # Where all are started anew, nobody is there that has stalled.
    assert field.survivors(STEPS, [(1.1, 7)], 2.0) == ([], [])
    ends_its_step = {".1": done(8, (1, 0.5), (2, 1.0), (3, 1.2))}
    assert field.survivors(ends_its_step, [(1.1, 7)], 5.0) == ([], [])


def test_the_table_has_a_row_for_each_launcher_and_says_what_was_not_measured() -> None:
    failed = field.Outcome("2.0", "", 0.0, MACHINE, 120.0, 10.0, error="no step within 120 s")
    slow = field.key("torchft", field.SLOW)
    outcomes = {"torchft": OUTCOME, slow: OUTCOME, "ray": failed}
    lines = field.table(outcomes).splitlines()
    assert "| torchft 1.2 | 120 s | 70.0 % | 5.0 s | 20 s | 2.5 | 70.0 % |" in lines
    assert "| Ray Train | | no step within 120 s | | | | - |" in lines
    assert sum("not measured yet" in line for line in lines) == len(field.LAUNCHERS) - 2
    assert {line.count("|") for line in lines} == {8}


def test_the_page_has_a_table_of_the_workers_that_went_on() -> None:
    lines = field.page({"torchft": OUTCOME}).splitlines()
    assert "| torchft | 0 s | 10 | 0.20 s | 0.40 s | 0.40 s | 10 ms | 30 ms |" in lines
    still = attrs.evolve(OUTCOME, stalls=[], joins=[])
    assert "Where the other worker goes on:" not in field.page({"torchft": still})


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


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--only", "mpirun"), "no launcher mpirun: there are elasticrun, in-place"),
        (("--python", "mpirun=python"), "no launcher mpirun"),
        (("--seconds", "5"), "no kill every 10 s within 5 s"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    flags: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["field.py", *flags])
    with pytest.raises(SystemExit) as ended:
        field.arguments()
    assert (ended.value.code, reason in capsys.readouterr().err) == (2, True)


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
