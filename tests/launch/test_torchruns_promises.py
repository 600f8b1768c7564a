"""What torchrun's page promises, by real processes of elasticrun: one named test a promise.

What elasticity and faults do is in tests/faults, and what workers see beside torchrun's own in
test_elasticrun.py. Here few jobs are run, without torch, and each is looked at from many sides.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import PROGRAMS, WITHOUT_TORCH

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

RUN = (sys.executable, "-m", "elasticlib.launch")
PROGRAM = str(PROGRAMS / "record_and_fail.py")
LOUD = {"PYTHONPATH": WITHOUT_TORCH, "LOGLEVEL": "INFO"}


class Ran:
    """A job that is over: how it ended, and what its workers have written down."""

    def __init__(self, folder: Path, *flags: str, args: tuple[str, ...] = (), **extra: str) -> None:
        self.folder = folder / "seen"
        self.folder.mkdir(parents=True)
        inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [*RUN, *flags, str(self.folder), *args],
            env={**inherited, **LOUD, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder.parent,
        )

    def end(self) -> Ran:
        try:
            self.out, self.err = self.process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.code = self.process.returncode
        return self

    def attempt(self, restart: int) -> list[dict[str, Any]]:
        """What each rank has seen in it."""
        files = sorted(self.folder.glob(f"{restart}.*.json"))
        return [json.loads(file.read_text()) for file in files]

    def told(self, name: str, restart: int = 0) -> list[str]:
        return [seen["environment"][name] for seen in self.attempt(restart)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an interpreter that says that it was used, and a module."""
    folder = tmp_path_factory.mktemp("promises")
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=yes exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    (folder / "promised_module.py").write_text(Path(PROGRAM).read_text())
    return folder


@pytest.fixture(scope="module")
def restarted(place: Path) -> Ran:
    """Its workers fail twice, once by an exception and once by an exit code, and then do not."""
    return Ran(
        place / "restarted",
        *("--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-id", "job", "-r", "3"),
        *("--log-dir", str(place / "logs"), "--role", "trainer"),
        *("--start-method", "fork", PROGRAM),
        args=("0:1:raise", "1:0:3", "--rank=${local_rank}", "--nproc-per-node=9"),
        PYTHON_EXEC=str(place / "python"),
        STUB_TORCH_ARGUMENTS=str(place / "with"),
    ).end()


@pytest.fixture(scope="module")
def spent(place: Path) -> Ran:
    """It has no restart left."""
    return Ran(
        place / "spent",
        *("--nproc-per-node", "2", "--rdzv-id", "job", "--log-dir", str(place / "logs")),
        *("--start-method", "spawn", "--local-ranks-filter", "1", PROGRAM),
        args=("0:1:raise",),
        PYTHON_EXEC=str(place / "python"),
        TORCHELASTIC_ERROR_FILE=str(place / "error.json"),
        OMP_NUM_THREADS="3",
        LOGLEVEL="ERROR",
        USE_LIBUV="0",
        STUB_TORCH_ARGUMENTS=str(place / "without"),
    ).end()


def test_all_workers_are_stopped_and_restarted_when_one_fails(restarted: Ran) -> None:
    assert restarted.code == 0, restarted.err
    attempts = [restarted.attempt(restart) for restart in range(4)]
    assert [len(seen) for seen in attempts] == [2, 2, 2, 0]
    pids = {seen["pid"] for attempt in attempts for seen in attempt}
    assert len(pids) == 6
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_scripts_are_told_the_restart_its_limit_and_the_run(restarted: Ran) -> None:
    for restart in range(3):
        assert restarted.told("TORCHELASTIC_RESTART_COUNT", restart) == [str(restart)] * 2
        assert restarted.told("TORCHELASTIC_MAX_RESTARTS", restart) == ["2", "2"]
        assert restarted.told("TORCHELASTIC_RUN_ID", restart) == ["job", "job"]
        assert restarted.told("RANK", restart) == restarted.told("LOCAL_RANK", restart)
        assert restarted.told("ROLE_NAME", restart) == ["trainer", "trainer"]
    assert len({restarted.told("MASTER_PORT", restart)[0] for restart in range(3)}) == 3


def test_the_scripts_arguments_are_its_own_and_the_local_rank_is_filled_in(restarted: Ran) -> None:
    for rank, seen in enumerate(restarted.attempt(0)):
        assert seen["argv"][0] == PROGRAM
        assert seen["argv"][-2:] == [f"--rank={rank}", "--nproc-per-node=9"]
        assert seen["name"] == "__main__"


def test_python_exec_is_the_workers_interpreter_warm_and_cold(restarted: Ran, spent: Ran) -> None:
    assert restarted.told("WRAPPED", 2) == ["yes", "yes"]
    assert spent.told("WRAPPED") == ["yes", "yes"]
    assert "started cold" not in restarted.err


def test_each_attempt_has_a_folder_in_one_of_the_runs(restarted: Ran, spent: Ran) -> None:
    assert spent.code == 1
    logs = restarted.folder.parents[1] / "logs"
    runs = sorted(logs.iterdir(), key=lambda run: len(list(run.iterdir())))
    assert [run.name.startswith("job_") for run in runs] == [True, True]
    attempts = {"attempt_0", "attempt_1", "attempt_2"}
    assert {path.name for path in runs[1].iterdir()} == {*attempts, "events.jsonl"}
    for restart in range(3):
        for rank in range(2):
            folder = runs[1] / f"attempt_{restart}" / str(rank)
            assert (folder / "stdout.log").read_text() == f"out {rank}\n"
            assert (folder / "stderr.log").read_text().startswith(f"err {rank}\n")
    assert "out" not in restarted.out


def test_a_failure_without_record_leaves_torchs_error_file(restarted: Ran, place: Path) -> None:
    (run,) = [path.parent for path in (place / "logs").glob("job_*/attempt_2")]
    path = run / "attempt_0" / "1" / "error.json"
    assert restarted.code == 0
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: the loss is not finite"
    assert message["extraInfo"]["py_callstack"].startswith("Traceback")
    assert message["extraInfo"]["timestamp"].isdigit()


def test_the_launchers_own_error_file_has_the_first_failure(spent: Ran, place: Path) -> None:
    assert spent.code == 1
    message = json.loads((place / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: the loss is not finite"
    assert "in main" in message["extraInfo"]["py_callstack"]
    assert message["errorCode"] == 1


def test_a_job_that_fails_for_good_ends_with_1_and_its_cause_last(spent: Ran) -> None:
    assert spent.code == 1
    assert "ValueError: the loss is not finite" in spent.err.splitlines()[-1]


def test_the_console_shows_the_ranks_that_are_asked_for(spent: Ran) -> None:
    assert spent.out == "out 1\n"
    assert "err 1" in spent.err
    assert "err 0" not in spent.err


def test_loglevel_is_the_agents(restarted: Ran, spent: Ran) -> None:
    assert "generation 1" in restarted.err
    assert "generation" not in spent.err.partition("Traceback")[0]


def test_omp_num_threads_is_kept_and_otherwise_shared_out(restarted: Ran, spent: Ran) -> None:
    assert spent.told("OMP_NUM_THREADS") == ["3", "3"]
    shared = max(1, len(os.sched_getaffinity(0)) // 2)
    assert restarted.told("OMP_NUM_THREADS") == [str(shared)] * 2


def test_the_workers_store_is_served_without_libuv_if_asked(
    restarted: Ran, spent: Ran, place: Path
) -> None:
    assert (restarted.code, spent.code) == (0, 1)
    told = [json.loads((place / name).read_text())["use_libuv"] for name in ("with", "without")]
    assert told == [True, False]


@pytest.fixture(scope="module")
def stacked(place: Path) -> list[Ran]:
    """Two jobs of modules beside each other, in torchrun's words for a port of one's own."""
    flags = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1", "-m")
    jobs = []
    for name in "ab":
        job = Ran(
            place / name, *flags, "promised_module", args=("0:0:0",), PYTHONPATH=WITHOUT_TORCH
        )
        jobs.append(job)
    return [job.end() for job in jobs]


def test_jobs_on_one_host_are_kept_apart(stacked: list[Ran]) -> None:
    assert [job.code for job in stacked] == [0, 0], stacked[0].err
    assert [job.told("WORLD_SIZE") for job in stacked] == [["1"], ["1"]]
    assert len({job.told("MASTER_PORT")[0] for job in stacked}) == 2
    assert len({job.told("TORCHELASTIC_RUN_ID")[0] for job in stacked}) == 2


def test_a_module_runs_as_under_python_m(stacked: list[Ran]) -> None:
    (seen,) = stacked[0].attempt(0)
    assert seen["name"] == "__main__"
    assert Path(seen["argv"][0]).name == "promised_module.py"


def test_run_path_runs_a_script_in_our_interpreter_whatever_else_is_said(place: Path) -> None:
    flags = ("--run-path", "--no-python", PROGRAM)
    ran = Ran(place / "path", *flags, args=("x",), PYTHON_EXEC=str(place / "python")).end()
    assert ran.code == 0, ran.err
    (seen,) = ran.attempt(0)
    assert "WRAPPED" not in seen["environment"]
    assert (seen["name"], seen["argv"]) == ("__main__", [PROGRAM, str(ran.folder), "x"])
    assert "ignoring --no-python=True: --run-path takes precedence" in ran.err


def test_a_signal_that_is_to_be_handled_stops_the_workers_and_is_in_the_exit_code(
    place: Path,
) -> None:
    flags = ("--signals-to-handle", "SIGTERM,SIGUSR1", "--nproc-per-node", "2")
    error = place / "signal.json"
    ran = Ran(
        place / "signal", *flags, PROGRAM, args=("0:9:0",), TORCHELASTIC_ERROR_FILE=str(error)
    )
    wait_until("both workers", lambda: len(ran.attempt(0)) == 2)
    ran.process.send_signal(signal.SIGUSR1)
    assert ran.end().code == 128 + signal.SIGUSR1
    assert not [s for s in ran.attempt(0) if Path(f"/proc/{s['pid']}").exists()]
    assert "SIGUSR1" in json.loads(error.read_text())["message"]["message"]
