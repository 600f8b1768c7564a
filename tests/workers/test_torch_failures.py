"""`ChildFailedError` and `ProcessFailure` with the fields of torch's classes, and `record`."""

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
from torch.distributed.elastic.multiprocessing import errors as torch_errors

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
    """The error file of this process, which a launcher would name in the environment."""
    path = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def write_error_file(directory: Path, content: object = RECORD) -> str:
    path = directory / "error.json"
    path.write_text(json.dumps(content))
    return str(path)


WITHOUT_TIME = {"message": "text"}


@pytest.mark.parametrize("exitcode", [1, -9])
@pytest.mark.parametrize("content", [RECORD, {"message": "text", "timestamp": 7}, WITHOUT_TIME])
def test_failure_with_an_error_file_has_the_same_fields_as_torchs(
    tmp_path: Path, content: object, exitcode: int
) -> None:
    args = (2, 77, exitcode, write_error_file(tmp_path, content))
    failure, expected = ProcessFailure(*args), torch_errors.ProcessFailure(*args)
    for name in ("local_rank", "pid", "exitcode", "error_file", "error_file_data", "message"):
        assert getattr(failure, name) == getattr(expected, name), name
    assert failure.timestamp == expected.timestamp
    assert failure.signal_name() == expected.signal_name()
    assert failure.timestamp_isoformat() == expected.timestamp_isoformat()


def test_failure_without_an_error_file_is_described_by_its_exit() -> None:
    killed = to_process_failure(WorkerExit(0, 3, 77, -9, failed_at=5.5))
    assert killed.error_file == torch_errors.ProcessFailure(0, 77, -9, "").error_file == "<N/A>"
    assert (killed.message, killed.timestamp) == (
        "was killed by SIGKILL (not sent by this agent)",
        5,
    )
    assert to_process_failure(WorkerExit(0, 3, 77, -40)).signal_name() == "<N/A>"
    assert ProcessFailure(0, 77, 3, "").text == "exited with code 3 and wrote no error file"


def make_exit(rank: int, returncode: int = 1, **fields: Any) -> WorkerExit:
    return WorkerExit(rank, rank, 70 + rank, returncode, **fields)


def test_first_failure_is_the_one_that_preceded_the_others() -> None:
    recorded = {"failed_at": 4.0, "message": "first", "error_data": {"message": "first"}}
    first = make_exit(1, is_still_exiting=True, **recorded)
    follower = make_exit(0, -6, failed_at=5.0, preceding_failure=first)
    failures = to_process_failures({0: follower, 1: make_exit(1, 7, **recorded)})
    assert list(failures) == [1, 0]
    assert ChildFailedError("train", failures).get_first_failure() == (1, failures[1])
    assert failures[1].exitcode == 7
    assert list(to_process_failures({0: follower})) == [1, 0]


def test_error_names_all_failures_and_ends_with_the_traceback_of_the_first(tmp_path: Path) -> None:
    others = to_process_failure(make_exit(0, -6, failed_at=1700000001.0))
    error = ChildFailedError(
        "train", {0: others, 1: ProcessFailure(1, 71, 1, write_error_file(tmp_path))}
    )
    lines = str(error).splitlines()
    assert lines[0] == "train: workers failed"
    assert "  rank 0 (local rank 0, pid 70), signal 6 (SIGABRT): was killed by SIGABRT" in str(
        error
    )
    assert [line.strip() for line in lines[-2:]] == ["Traceback", "ValueError: no"]
    assert error.format_msg("*", "+").count("*" * 60) == 1
    assert error.get_first_failure()[0] == 1
    assert isinstance(error.get_first_failure()[1].message, dict)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.failures, copy.name) == (str(error), error.failures, "train")


def failed_result(cause: RootCause | None) -> RunResult:
    return RunResult(WorkerState.FAILED, "the job failed on another node", root_cause=cause)


def test_error_without_local_failures_has_the_root_cause_of_another_node() -> None:
    cause = RootCause("node7", 1, 5, 1, 99, 1, "", "worker of rank 5", "ValueError: there", "Trace")
    rank, failure = ChildFailedError("train", {}, failed_result(cause)).get_first_failure()
    assert (rank, failure.local_rank, failure.pid, failure.host) == (5, 1, 99, "node7")
    assert (failure.text, failure.traceback) == ("ValueError: there", "Trace")
    error = ChildFailedError("train", {}, failed_result(cause))
    assert error.failures == {}
    assert str(error).endswith("  host: node7\n  Trace")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "result",
    [None, failed_result(None), failed_result(RootCause("h", 1, -1, -1, 0, 0, "", "no rank"))],
)
def test_error_without_any_known_failure_has_no_first_failure(result: RunResult | None) -> None:
    error = ChildFailedError("train", {}, result)
    with pytest.raises(NoFailureError, match="train: no failure of a worker is known: "):
        error.get_first_failure()
    assert str(error).startswith("train: ")


# -- record -------------------------------------------------------------------------------------


def make_raising_function(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def test_record_passes_the_first_failure_of_a_launch_on_as_torchs_record_does(
    tmp_path: Path, error_file: Path
) -> None:
    path = write_error_file(tmp_path)
    for exitcode in (1, -11):
        fail = make_raising_function(
            ChildFailedError("in", {1: ProcessFailure(1, 71, exitcode, path)})
        )
        with pytest.raises(ChildFailedError):
            record(fail)()
        content = error_file.read_text()
        assert json.loads(content)["message"]["errorCode"] == exitcode
        failure = torch_errors.ProcessFailure(1, 71, exitcode, path)
        fail = make_raising_function(torch_errors.ChildFailedError("in", {1: failure}))
        for decorate in (torch_errors.record, record):
            error_file.unlink()
            with pytest.raises(torch_errors.ChildFailedError):
                decorate(fail)()
            assert error_file.read_text() == content


def test_record_passes_on_a_failure_whose_error_file_was_removed(
    tmp_path: Path, error_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    failure = to_process_failure(make_exit(0, error_data=RECORD))
    assert failure.error_file == "<N/A>"
    error = ChildFailedError("train", {0: failure})
    for handler in (None, torch_errors.get_error_handler()):
        with pytest.raises(ChildFailedError):
            record(make_raising_function(error), handler)()
        message = json.loads(error_file.read_text())["message"]
        assert (message["message"], message["errorCode"]) == ("ValueError: no", 1)
        error_file.unlink()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "failures", [{}, {0: to_process_failure(make_exit(0, -9))}], ids=["none", "killed"]
)
def test_record_writes_the_error_of_a_launch_without_an_error_file(
    failures: dict[int, ProcessFailure], error_file: Path
) -> None:
    with pytest.raises(ChildFailedError):
        record(make_raising_function(ChildFailedError("train", failures)))()
    message = json.loads(error_file.read_text())["message"]
    assert message["message"].startswith("ChildFailedError: train: workers failed")
    assert int(message["extraInfo"]["timestamp"]) > 0


@pytest.mark.parametrize("code", [0, None, 3, "text"])
def test_record_handles_an_exit_as_torchs_record_does(code: object, error_file: Path) -> None:
    def outcome(decorate: Callable[..., Callable[[], Any]]) -> object:
        try:
            return ("returned", decorate(make_raising_function(SystemExit(code)))())
        except SystemExit as error:
            return ("raised", error.code)

    assert outcome(record) == outcome(torch_errors.record)
    assert not error_file.exists()


def test_given_error_handler_replaces_the_default_one(tmp_path: Path, error_file: Path) -> None:
    calls: list[object] = []

    class Handler(torch_errors.ErrorHandler):
        def initialize(self) -> None:
            calls.append("initialize")

        def record_exception(self, e: BaseException) -> None:
            calls.append(e)

        def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
            calls.append((rootcause_error_file, error_code))

    error, path = ValueError("no"), write_error_file(tmp_path)
    with pytest.raises(ValueError, match="no"):
        record(make_raising_function(error), Handler())()
    with pytest.raises(ChildFailedError):
        record(
            make_raising_function(ChildFailedError("in", {0: ProcessFailure(0, 7, 3, path)})),
            Handler(),
        )()
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
def test_error_file_of_a_launcher_that_is_a_worker_has_the_root_cause(
    tmp_path: Path, error_file: Path
) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    failing = tmp_path / "fail.py"
    failing.write_text("raise ValueError('deep down')\n")
    elasticrun = (sys.executable, "-m", "elasticlib.launch", "--start-method=spawn", str(failing))
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    for command in ((sys.executable, str(script)), elasticrun):
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 1, done.stderr
        message = json.loads(error_file.read_text())["message"]
        assert (message["message"], message["errorCode"]) == ("ValueError: deep down", 1)
        assert "raise ValueError" in message["extraInfo"]["py_callstack"]
        error_file.unlink()
