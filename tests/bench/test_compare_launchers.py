"""Comparison of launchers: statistics of a run, tables and page of the outcomes, and a real run."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import compare_launchers
import launcher_page
import pytest
from launcher_page import SLOW_START_S, Outcome, run_key
from launchers import LAUNCHERS
from results import markdown_table
from training_steps import (
    BATCH_SAMPLES,
    StepRecord,
    count_repeated,
    count_samples,
    last_step,
    longest_pauses,
    survivor_costs,
)

HALF = BATCH_SAMPLES // 2


def records(pid: int, *steps: tuple[int, float], samples: int = HALF) -> list[StepRecord]:
    """Return the steps of a process, from their numbers and times."""
    return [StepRecord(step, at, pid, samples) for step, at in steps]


# Two workers. One is killed at 1.1, and both resume after step 1 at 3.0.
RESTARTED = {
    ".0": [*records(7, (1, 0.0), (2, 0.5), (3, 1.0)), *records(9, (2, 3.0), (3, 3.5), (4, 4.0))],
    ".1": [*records(8, (1, 0.1), (2, 0.6)), *records(10, (2, 3.1), (3, 3.6))],
}
# Worker 1 keeps running, trains two steps alone, and is joined by a replacement in step 5.
KEPT_RUNNING = {
    ".0": records(7, (1, 0.0), (2, 0.5)) + records(9, (5, 3.0), (6, 3.5)),
    ".1": [
        *records(8, (1, 0.1), (2, 0.6)),
        *records(8, (3, 1.6), (4, 2.1), samples=BATCH_SAMPLES),
        *records(8, (5, 3.0), (6, 3.6)),
    ],
}
MACHINE = {"processor": "some, 2 cores", "memory": "8 GiB"}
OUTCOME = Outcome(
    version="1.2",
    date="2026-01-02",
    load=0.5,
    machine=MACHINE,
    duration_s=120.0,
    kill_interval_s=10.0,
    torch_version="2.14",
    baseline_steps=4000.0,
    last_step=3000,
    kills=10,
    missed_kills=1,
    repeated_steps=25,
    pauses_s=[*range(1, 10), 20.0],
    trained_samples=2800 * BATCH_SAMPLES,
    stalls_s=[0.1, 0.2, 0.4],
    join_costs_s=[0.01, 0.03],
)


def test_repeated_steps_count_once_and_later_steps_do_not_count() -> None:
    assert last_step(RESTARTED, 10.0) == 4
    assert last_step(RESTARTED, 3.5) == 3
    assert [count_repeated(of_worker) for of_worker in RESTARTED.values()] == [2, 1]


def test_samples_count_once_and_half_of_a_batch_counts_half() -> None:
    assert count_samples(RESTARTED, 3.6) == 3 * BATCH_SAMPLES
    assert count_samples(RESTARTED, 10.0) == 3.5 * BATCH_SAMPLES
    assert count_samples(KEPT_RUNNING, 10.0) == 6 * BATCH_SAMPLES
    # A worker was killed after its part of a step that the other one repeats alone.
    repeated = {**KEPT_RUNNING, ".0": [*KEPT_RUNNING[".0"], *records(7, (3, 1.0))]}
    assert count_samples(repeated, 10.0) == 6 * BATCH_SAMPLES


def test_pause_is_the_longest_time_without_a_step_from_a_kill_to_the_next() -> None:
    assert longest_pauses(RESTARTED, [1.1, 3.2], 5.0) == [pytest.approx(1.9), 1.0]
    # A job that never recovers has a pause until the end.
    assert longest_pauses(RESTARTED, [4.5], 10.0) == [5.5]


def test_stall_and_join_cost_are_those_of_a_worker_that_keeps_running() -> None:
    stalls, join_costs = survivor_costs(KEPT_RUNNING, [(0.7, 7)], 5.0)
    assert stalls == [pytest.approx(1.0)]
    assert join_costs == [pytest.approx(0.9 - 0.75)]
    # If all workers are restarted, no worker has stalled.
    assert survivor_costs(RESTARTED, [(1.1, 7)], 2.0) == ([], [])
    finishes_its_step = {".1": records(8, (1, 0.5), (2, 1.0), (3, 1.2))}
    assert survivor_costs(finishes_its_step, [(1.1, 7)], 5.0) == ([], [])


def test_readme_table_has_a_row_for_each_launcher_and_names_missing_runs() -> None:
    failed = Outcome("2.0", "", 0.0, MACHINE, 120.0, 10.0, error="no step within 120 s")
    slow = run_key("torchft", SLOW_START_S)
    outcomes = {"torchft": OUTCOME, slow: OUTCOME, "ray": failed}
    lines = launcher_page.readme_table(outcomes).splitlines()
    assert "| torchft 1.2 | 120 s | 70.0 % | 5.0 s | 20 s | 2.5 | 70.0 % |" in lines
    assert "| Ray Train | | no step within 120 s | | | | - |" in lines
    assert sum("not measured yet" in line for line in lines) == len(LAUNCHERS) - 2
    assert {line.count("|") for line in lines[2:]} == {8}


def test_page_has_a_row_for_each_run_with_its_time_and_kills() -> None:
    slow = attrs.evolve(OUTCOME, start_delay_s=SLOW_START_S, missed_kills=0)
    text = launcher_page.page({"torchft": OUTCOME, run_key("torchft", SLOW_START_S): slow})
    first = "| torchft | 1.2 | 0 s | 120 s | 10 (1 more found no worker) |"
    assert f"{first} 70.0 % | 5.0 s | 20 s | 2.5 |" in text
    assert "| torchft | 1.2 | 5 s | 120 s | 10 | 70.0 % | 5.0 s | 20 s | 2.5 |" in text
    assert text.count("not measured yet") == len(LAUNCHERS) - 1


def test_page_has_a_table_of_the_workers_that_kept_running() -> None:
    lines = launcher_page.page({"torchft": OUTCOME}).splitlines()
    assert "| torchft | 0 s | 10 | 0.20 s | 0.40 s | 0.40 s | 10 ms | 30 ms |" in lines
    restarted = attrs.evolve(OUTCOME, stalls_s=[], join_costs_s=[])
    text = launcher_page.page({"torchft": restarted})
    assert "cost of a joining worker, median" not in text


def test_page_contains_the_settings_commands_and_circumstances_of_each_launcher() -> None:
    text = launcher_page.page({"torchft": OUTCOME})
    for launcher in LAUNCHERS:
        assert f"{launcher.title}: {launcher.settings}" in text
    assert "    torchft_lighthouse '--bind=[::]:29500'" in text
    assert "--max-restarts=1000 tests/bench/trainers/in_place.py DIR\n" in text
    options = "`--only torchft --seconds 120 --every 10 --start-seconds 0`"
    versions = "torchft-nightly 1.2, torch 2.14"
    assert f"| torchft | 0 s | 2026-01-02 | {versions} | 0.5 | 3000 | 4000 | {options} |" in text
    assert "| processor | some, 2 cores |" in text


def test_page_and_readme_agree_with_the_stored_outcomes() -> None:
    redraw = "run `python tests/bench/compare_launchers.py --redraw`"
    outcomes = launcher_page.read_outcomes(launcher_page.OUTCOMES)
    assert launcher_page.PAGE.read_text() == launcher_page.page(outcomes), redraw
    readme = launcher_page.README.read_text()
    table = launcher_page.readme_table(outcomes)
    assert launcher_page.with_table(readme, table) == readme, redraw


def test_outcomes_are_unchanged_after_they_are_written_and_read(tmp_path: Path) -> None:
    launcher_page.write_outcomes(tmp_path / "outcomes", {"torchft": OUTCOME})
    assert launcher_page.read_outcomes(tmp_path / "outcomes") == {"torchft": OUTCOME}
    assert launcher_page.read_outcomes(tmp_path / "missing") == {}


def test_readme_without_the_markers_of_the_table_is_rejected() -> None:
    with pytest.raises(ValueError, match="no lines"):
        launcher_page.with_table("words", markdown_table("ab", ()))


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the program, and return its result."""
    command = [sys.executable, compare_launchers.__file__, *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # The program then ends the processes of its jobs.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--only", "mpirun"), "no launcher mpirun: there are elasticrun, in-place"),
        (("--python", "mpirun=python"), "no launcher mpirun"),
        (("--seconds", "5"), "below --seconds, got --every 10 and --seconds 5"),
    ],
)
def test_invalid_options_are_rejected(
    flags: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_launchers.py", *flags])
    with pytest.raises(SystemExit) as exit_info:
        compare_launchers.parse_arguments()
    assert (exit_info.value.code, reason in capsys.readouterr().err) == (2, True)


@pytest.mark.long
@pytest.mark.timeout(420)
def test_run_of_elasticrun_counts_kills_and_a_missing_launcher_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.json"
    # This interpreter has no launcher installed.
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    times = ("--seconds", "10", "--every", "4", "--json", str(file))
    result = run("--only", "elasticrun,torchft", "--python", f"torchft={python}", *times)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"torchft: torchft-nightly is not installed for {python}" in result.stdout
    outcome = json.loads(file.read_text())
    assert outcome.keys() == {"elasticrun"}
    assert outcome["elasticrun"]["kills"] == 2
    assert outcome["elasticrun"]["last_step"] > 0
