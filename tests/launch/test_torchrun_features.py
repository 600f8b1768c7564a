"""The features that torchrun's documentation describes, each in one test of real elasticrun jobs.

Tests of elasticity and faults are in tests/faults. A few jobs run here, without torch, and several
tests examine each of them.
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
from launch_commands import ELASTICRUN

from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

PROGRAM = str(PROGRAMS / "record_and_fail.py")
ENVIRONMENT = {"PYTHONPATH": WITHOUT_TORCH, "LOGLEVEL": "INFO"}


class Launch:
    """A job of elasticrun: its output, its exit code and the reports that its workers wrote."""

    def __init__(
        self, directory: Path, *flags: str, args: tuple[str, ...] = (), **extra: str
    ) -> None:
        self.reports = directory / "reports"
        self.reports.mkdir(parents=True)
        inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [*ELASTICRUN, *flags, str(self.reports), *args],
            env={**inherited, **ENVIRONMENT, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory.parent,
        )

    def wait(self) -> Launch:
        try:
            self.out, self.err = self.process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.code = self.process.returncode
        return self

    def attempt(self, restart: int) -> list[dict[str, Any]]:
        """Return the report of each rank after this many restarts."""
        files = sorted(self.reports.glob(f"{restart}.*.json"))
        return [json.loads(file.read_text()) for file in files]

    def variable(self, name: str, restart: int = 0) -> list[str]:
        """Return the value of an environment variable in each worker after this many restarts."""
        return [report["environment"][name] for report in self.attempt(restart)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an interpreter that sets WRAPPED in the environment, and a module."""
    directory = tmp_path_factory.mktemp("features")
    wrapper = directory / "python"
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=yes exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    (directory / "promised_module.py").write_text(Path(PROGRAM).read_text())
    return directory


@pytest.fixture(scope="module")
def restarted_job(directory: Path) -> Launch:
    """A job whose workers fail with an exception, then with an exit code, and then succeed."""
    return Launch(
        directory / "restarted_job",
        *("--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-id", "job", "-r", "3"),
        *("--log-dir", str(directory / "logs"), "--role", "trainer"),
        *("--start-method", "fork", PROGRAM),
        args=("0:1:raise", "1:0:3", "--rank=${local_rank}", "--nproc-per-node=9"),
        PYTHON_EXEC=str(directory / "python"),
        STUB_TORCH_ARGUMENTS=str(directory / "with"),
    ).wait()


@pytest.fixture(scope="module")
def failed_job(directory: Path) -> Launch:
    """A job that fails, because it has no restarts."""
    return Launch(
        directory / "failed_job",
        *("--nproc-per-node", "2", "--rdzv-id", "job", "--log-dir", str(directory / "logs")),
        *("--start-method", "spawn", "--local-ranks-filter", "1", PROGRAM),
        args=("0:1:raise",),
        PYTHON_EXEC=str(directory / "python"),
        TORCHELASTIC_ERROR_FILE=str(directory / "error.json"),
        OMP_NUM_THREADS="3",
        LOGLEVEL="ERROR",
        USE_LIBUV="0",
        STUB_TORCH_ARGUMENTS=str(directory / "without"),
    ).wait()


def test_all_workers_are_stopped_and_restarted_when_one_fails(restarted_job: Launch) -> None:
    assert restarted_job.code == 0, restarted_job.err
    attempts = [restarted_job.attempt(restart) for restart in range(4)]
    assert [len(reports) for reports in attempts] == [2, 2, 2, 0]
    pids = {report["pid"] for reports in attempts for report in reports}
    assert len(pids) == 6
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_workers_have_the_restart_count_its_limit_and_the_run_id_in_the_environment(
    restarted_job: Launch,
) -> None:
    for restart in range(3):
        assert restarted_job.variable("TORCHELASTIC_RESTART_COUNT", restart) == [str(restart)] * 2
        assert restarted_job.variable("TORCHELASTIC_MAX_RESTARTS", restart) == ["2", "2"]
        assert restarted_job.variable("TORCHELASTIC_RUN_ID", restart) == ["job", "job"]
        assert restarted_job.variable("RANK", restart) == restarted_job.variable(
            "LOCAL_RANK", restart
        )
        assert restarted_job.variable("ROLE_NAME", restart) == ["trainer", "trainer"]
    assert len({restarted_job.variable("MASTER_PORT", restart)[0] for restart in range(3)}) == 3


def test_arguments_of_the_script_are_passed_on_with_the_local_rank_substituted(
    restarted_job: Launch,
) -> None:
    for rank, report in enumerate(restarted_job.attempt(0)):
        assert report["argv"][0] == PROGRAM
        assert report["argv"][-2:] == [f"--rank={rank}", "--nproc-per-node=9"]
        assert report["name"] == "__main__"


def test_python_exec_is_the_interpreter_of_workers_with_each_start_method(
    restarted_job: Launch, failed_job: Launch
) -> None:
    assert restarted_job.variable("WRAPPED", 2) == ["yes", "yes"]
    assert failed_job.variable("WRAPPED") == ["yes", "yes"]
    assert "started cold" not in restarted_job.err


def test_each_attempt_has_a_directory_in_the_log_directory_of_its_run(
    restarted_job: Launch, failed_job: Launch
) -> None:
    assert failed_job.code == 1
    logs = restarted_job.reports.parents[1] / "logs"
    runs = sorted(logs.iterdir(), key=lambda run: len(list(run.iterdir())))
    assert [run.name.startswith("job_") for run in runs] == [True, True]
    attempts = {"attempt_0", "attempt_1", "attempt_2"}
    assert {path.name for path in runs[1].iterdir()} == {*attempts, "events.jsonl"}
    for restart in range(3):
        for rank in range(2):
            logs = runs[1] / f"attempt_{restart}" / str(rank)
            assert (logs / "stdout.log").read_text() == f"out {rank}\n"
            assert (logs / "stderr.log").read_text().startswith(f"err {rank}\n")
    assert "out" not in restarted_job.out


def test_failure_without_record_writes_an_error_file_in_the_format_of_torch(
    restarted_job: Launch, directory: Path
) -> None:
    (run,) = [path.parent for path in (directory / "logs").glob("job_*/attempt_2")]
    path = run / "attempt_0" / "1" / "error.json"
    assert restarted_job.code == 0
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: the loss is not finite"
    assert message["extraInfo"]["py_callstack"].startswith("Traceback")
    assert message["extraInfo"]["timestamp"].isdigit()


def test_error_file_of_the_launcher_has_the_first_failure(
    failed_job: Launch, directory: Path
) -> None:
    assert failed_job.code == 1
    message = json.loads((directory / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: the loss is not finite"
    assert "in main" in message["extraInfo"]["py_callstack"]
    assert message["errorCode"] == 1


def test_failed_job_exits_with_1_and_prints_its_root_cause_last(failed_job: Launch) -> None:
    assert failed_job.code == 1
    assert "ValueError: the loss is not finite" in failed_job.err.splitlines()[-1]


def test_console_shows_only_the_selected_ranks(failed_job: Launch) -> None:
    assert failed_job.out == "out 1\n"
    assert "err 1" in failed_job.err
    assert "err 0" not in failed_job.err


def test_loglevel_sets_the_log_level_of_the_agent(
    restarted_job: Launch, failed_job: Launch
) -> None:
    assert "generation 1" in restarted_job.err
    assert "generation" not in failed_job.err.partition("Traceback")[0]


def test_omp_num_threads_is_inherited_or_computed_from_the_processors(
    restarted_job: Launch, failed_job: Launch
) -> None:
    assert failed_job.variable("OMP_NUM_THREADS") == ["3", "3"]
    shared = max(1, len(os.sched_getaffinity(0)) // 2)
    assert restarted_job.variable("OMP_NUM_THREADS") == [str(shared)] * 2


def test_use_libuv_selects_the_server_of_the_workers_store(
    restarted_job: Launch, failed_job: Launch, directory: Path
) -> None:
    assert (restarted_job.code, failed_job.code) == (0, 1)
    records = [json.loads((directory / name).read_text()) for name in ("with", "without")]
    assert [record["use_libuv"] for record in records] == [True, False]


@pytest.fixture(scope="module")
def concurrent_jobs(directory: Path) -> list[Launch]:
    """Two jobs at the same time, with torchrun's endpoint for a port of the job's own."""
    flags = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1", "-m")
    jobs = []
    for name in "ab":
        job = Launch(
            directory / name, *flags, "promised_module", args=("0:0:0",), PYTHONPATH=WITHOUT_TORCH
        )
        jobs.append(job)
    return [job.wait() for job in jobs]


def test_concurrent_jobs_on_one_host_have_different_ports_and_run_ids(
    concurrent_jobs: list[Launch],
) -> None:
    assert [job.code for job in concurrent_jobs] == [0, 0], concurrent_jobs[0].err
    assert [job.variable("WORLD_SIZE") for job in concurrent_jobs] == [["1"], ["1"]]
    assert len({job.variable("MASTER_PORT")[0] for job in concurrent_jobs}) == 2
    assert len({job.variable("TORCHELASTIC_RUN_ID")[0] for job in concurrent_jobs}) == 2


def test_module_runs_as_with_python_m(concurrent_jobs: list[Launch]) -> None:
    (report,) = concurrent_jobs[0].attempt(0)
    assert report["name"] == "__main__"
    assert Path(report["argv"][0]).name == "promised_module.py"


def test_run_path_uses_the_interpreter_of_the_launcher_and_takes_precedence(
    directory: Path,
) -> None:
    flags = ("--run-path", "--no-python", PROGRAM)
    launch = Launch(
        directory / "path", *flags, args=("x",), PYTHON_EXEC=str(directory / "python")
    ).wait()
    assert launch.code == 0, launch.err
    (report,) = launch.attempt(0)
    assert "WRAPPED" not in report["environment"]
    assert (report["name"], report["argv"]) == ("__main__", [PROGRAM, str(launch.reports), "x"])
    assert "ignoring --no-python=True: --run-path takes precedence" in launch.err


def test_handled_signal_stops_the_workers_and_sets_the_exit_code(
    directory: Path,
) -> None:
    flags = ("--signals-to-handle", "SIGTERM,SIGUSR1", "--nproc-per-node", "2")
    error = directory / "signal.json"
    launch = Launch(
        directory / "signal", *flags, PROGRAM, args=("0:9:0",), TORCHELASTIC_ERROR_FILE=str(error)
    )
    wait_until("both workers", lambda: len(launch.attempt(0)) == 2)
    launch.process.send_signal(signal.SIGUSR1)
    assert launch.wait().code == 128 + signal.SIGUSR1
    assert not [s for s in launch.attempt(0) if Path(f"/proc/{s['pid']}").exists()]
    assert "SIGUSR1" in json.loads(error.read_text())["message"]["message"]
