"""A launch's failure in torch's shapes, and `record`, which passes the first one on."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import WITHOUT_TORCH
from torch.distributed.elastic.multiprocessing import errors as torchs

from elasticlib import ChildFailedError, RunResult, WorkerState, record
from elasticlib.agent.interface import RootCause
from elasticlib.compat.failures import ProcessFailure, to_process_failure, to_process_failures
from elasticlib.errors import NoFailureError
from elasticlib.workers.exits import WorkerExit

RECORD = {
    "message": {
        "message": "ValueError: no",
        "extraInfo": {"py_callstack": "Traceback\nValueError: no", "timestamp": "1700000000"},
    }
}


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of this process, as a launcher would name it."""
    path = tmp_path / "mine.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def written(folder: Path, content: object = RECORD) -> str:
    path = folder / "error.json"
    path.write_text(json.dumps(content))
    return str(path)


UNTIMED = {"message": "text"}


@pytest.mark.parametrize("exitcode", [1, -9])
@pytest.mark.parametrize("content", [RECORD, {"message": "text", "timestamp": 7}, UNTIMED])
def test_a_failure_made_of_an_error_file_is_what_torchs_is(
    tmp_path: Path, content: object, exitcode: int
) -> None:
    args = (2, 77, exitcode, written(tmp_path, content))
    mine, theirs = ProcessFailure(*args), torchs.ProcessFailure(*args)
    for name in ("local_rank", "pid", "exitcode", "error_file", "error_file_data", "message"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.timestamp == theirs.timestamp
    assert mine.signal_name() == theirs.signal_name()
    assert mine.timestamp_isoformat() == theirs.timestamp_isoformat()


def test_a_worker_that_left_no_error_file_is_told_by_its_end() -> None:
    killed = to_process_failure(WorkerExit(0, 3, 77, -9, failed_at=5.5))
    assert killed.error_file == torchs.ProcessFailure(0, 77, -9, "").error_file == "<N/A>"
    assert (killed.message, killed.timestamp) == (
        "was killed by SIGKILL (not sent by this agent)",
        5,
    )
    assert to_process_failure(WorkerExit(0, 3, 77, -40)).signal_name() == "<N/A>"
    assert ProcessFailure(0, 77, 3, "").text == "exited with code 3 and wrote no error file"


def exit_of(rank: int, returncode: int = 1, **more: Any) -> WorkerExit:
    return WorkerExit(rank, rank, 70 + rank, returncode, **more)


def test_the_first_failure_is_the_one_that_others_followed() -> None:
    wrote = {"failed_at": 4.0, "message": "first", "error_data": {"message": "first"}}
    first = exit_of(1, is_still_exiting=True, **wrote)
    follower = exit_of(0, -6, failed_at=5.0, preceding_failure=first)
    ended = exit_of(1, 7, **wrote)
    failures = to_process_failures({0: follower, 1: ended})
    assert list(failures) == [1, 0]
    assert ChildFailedError("train", failures).get_first_failure() == (1, failures[1])
    assert failures[1].exitcode == 7
    assert list(to_process_failures({0: follower})) == [1, 0]


def test_an_error_names_all_failures_and_ends_with_the_first_ones_traceback(tmp_path: Path) -> None:
    others = to_process_failure(exit_of(0, -6, failed_at=1700000001.0))
    error = ChildFailedError("train", {0: others, 1: ProcessFailure(1, 71, 1, written(tmp_path))})
    lines = str(error).splitlines()
    assert lines[0] == "train: workers failed"
    assert "  rank 0 (local rank 0, pid 70), signal 6 (SIGABRT): was killed by SIGABRT" in str(
        error
    )
    assert [line.strip() for line in lines[-2:]] == ["Traceback", "ValueError: no"]
    assert error.format_msg("*", "+").count("*" * 60) == 1
    assert error.get_first_failure()[0] == 1
    assert isinstance(error.get_first_failure()[1].message, dict)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.failures, again.name) == (str(error), error.failures, "train")


def result_of(cause: RootCause | None) -> RunResult:
    return RunResult(WorkerState.FAILED, "the job failed elsewhere", root_cause=cause)


def test_where_no_worker_of_this_node_failed_the_first_one_of_another_is_told() -> None:
    cause = RootCause("node7", 1, 5, 1, 99, 1, "", "worker of rank 5", "ValueError: there", "Trace")
    rank, failure = ChildFailedError("train", {}, result_of(cause)).get_first_failure()
    assert (rank, failure.local_rank, failure.pid, failure.host) == (5, 1, 99, "node7")
    assert (failure.text, failure.traceback) == ("ValueError: there", "Trace")
    error = ChildFailedError("train", {}, result_of(cause))
    assert error.failures == {}
    assert str(error).endswith("  host: node7\n  Trace")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "result", [None, result_of(None), result_of(RootCause("h", 1, -1, -1, 0, 0, "", "no place"))]
)
def test_where_nobody_is_known_to_have_failed_that_is_said(result: RunResult | None) -> None:
    error = ChildFailedError("train", {}, result)
    with pytest.raises(NoFailureError, match="train: no failure of a worker is known: "):
        error.get_first_failure()
    assert str(error).startswith("train: ")


# -- record -------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def test_the_first_failure_of_a_launch_is_passed_on_as_torchs_record_does(
    tmp_path: Path, error_file: Path
) -> None:
    path = written(tmp_path)
    for mine, theirs in ((1, 1), (-11, -11)):
        with pytest.raises(ChildFailedError):
            record(raising(ChildFailedError("in", {1: ProcessFailure(1, 71, mine, path)})))()
        said = error_file.read_text()
        assert json.loads(said)["message"]["errorCode"] == mine
        failure = torchs.ProcessFailure(1, 71, theirs, path)
        with pytest.raises(torchs.ChildFailedError):
            torchs.record(raising(torchs.ChildFailedError("in", {1: failure})))()
        assert error_file.read_text() == said
        error_file.unlink()
        with pytest.raises(torchs.ChildFailedError):
            record(raising(torchs.ChildFailedError("in", {1: failure})))()
        assert error_file.read_text() == said


def test_a_record_that_went_with_its_run_is_passed_on_and_the_temporary_one_removed(
    tmp_path: Path, error_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    failure = to_process_failure(exit_of(0, error_data=RECORD))
    assert failure.error_file == "<N/A>"
    error = ChildFailedError("train", {0: failure})
    for handler in (None, torchs.get_error_handler()):
        with pytest.raises(ChildFailedError):
            record(raising(error), handler)()
        said = json.loads(error_file.read_text())["message"]
        assert (said["message"], said["errorCode"]) == ("ValueError: no", 1)
        error_file.unlink()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "failures", [{}, {0: to_process_failure(exit_of(0, -9))}], ids=["none", "killed"]
)
def test_a_launch_without_a_record_of_its_failure_is_recorded_itself(
    failures: dict[int, ProcessFailure], error_file: Path
) -> None:
    with pytest.raises(ChildFailedError):
        record(raising(ChildFailedError("train", failures)))()
    message = json.loads(error_file.read_text())["message"]
    assert message["message"].startswith("ChildFailedError: train: workers failed")
    assert int(message["extraInfo"]["timestamp"]) > 0


@pytest.mark.parametrize("code", [0, None, 3, "text"])
def test_an_exit_is_treated_as_torchs_record_treats_it(code: object, error_file: Path) -> None:
    def outcome(decorate: Callable[..., Callable[[], Any]]) -> object:
        try:
            return ("returned", decorate(raising(SystemExit(code)))())
        except SystemExit as end:
            return ("raised", end.code)

    assert outcome(record) == outcome(torchs.record)
    assert not error_file.exists()


def test_a_handler_is_asked_in_place_of_the_default_one(tmp_path: Path, error_file: Path) -> None:
    calls: list[object] = []

    class Handler(torchs.ErrorHandler):
        def initialize(self) -> None:
            calls.append("initialize")

        def record_exception(self, e: BaseException) -> None:
            calls.append(e)

        def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
            calls.append((rootcause_error_file, error_code))

    error, path = ValueError("no"), written(tmp_path)
    with pytest.raises(ValueError, match="no"):
        record(raising(error), Handler())()
    with pytest.raises(ChildFailedError):
        record(raising(ChildFailedError("in", {0: ProcessFailure(0, 7, 3, path)})), Handler())()
    assert calls == ["initialize", error, "initialize", (path, 3)]
    assert not error_file.exists()


LAUNCHER = """
import elasticlib
def fail(): raise ValueError("deep down")
if __name__ == "__main__":
    config = elasticlib.LaunchConfig(max_restarts=0, start_method="spawn")
    elasticlib.record(elasticlib.elastic_launch(config, fail))()
"""


@pytest.mark.faults
def test_whoever_runs_a_launcher_as_a_worker_finds_the_first_cause_in_its_error_file(
    tmp_path: Path, error_file: Path
) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    failing = tmp_path / "fail.py"
    failing.write_text("raise ValueError('deep down')\n")
    run = (sys.executable, "-m", "elasticlib.launch", "--start-method=spawn", str(failing))
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    for command in ((sys.executable, str(script)), run):
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 1, done.stderr
        said = json.loads(error_file.read_text())["message"]
        assert (said["message"], said["errorCode"]) == ("ValueError: deep down", 1)
        assert "raise ValueError" in said["extraInfo"]["py_callstack"]
        error_file.unlink()
