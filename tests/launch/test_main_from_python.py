"""`elasticrun.main` called from a program raises errors, as `torch.distributed.run.main` does."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from jobs import WITHOUT_TORCH
from launch_commands import run

pytestmark = pytest.mark.faults

CALL = """
import json, sys
from elasticlib.launch.elasticrun import main
try:
    print(json.dumps(["returned", main(sys.argv[1:])]))
except BaseException as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""
CALL_TORCHS_MAIN = """
import sys
from torch.distributed.run import main
try:
    main(sys.argv[1:])
    print("returned")
except BaseException as error:
    print(type(error).__name__)
"""


def call_main(*argv: str, **extra: str) -> list[str | None]:
    """Call `main` in a new process, and return the type and the message of what it raised."""
    done = run(sys.executable, "-c", CALL, *argv, PYTHONPATH=WITHOUT_TORCH, **extra)
    outcome: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return outcome


SHELL = ("--start-method=spawn", "--no-python", "sh", "-c")


def test_main_returns_none_only_if_the_job_succeeds() -> None:
    assert call_main(*SHELL, "true") == ["returned", None]


def test_failed_job_raises_the_first_failure(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    kind, message = call_main(*SHELL, "exit 3", TORCHELASTIC_ERROR_FILE=str(error_file))
    assert (kind, "exited with code 3" in str(message)) == ("ChildFailedError", True)
    assert "exited with code 3" in error_file.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_signal_that_stops_or_drains_the_job_raises_an_exception(
    number: signal.Signals,
) -> None:
    # The worker is a shell, a child of the launcher.
    kind, message = call_main(*SHELL, f"kill -{number.name[3:]} $PPID; exec sleep 60")
    assert (kind, number.name in str(message)) == ("SignalException", True)


def test_invalid_command_line_raises_before_anything_starts(tmp_path: Path) -> None:
    started = str(tmp_path / "started")
    error = call_main("--nnodes=0", "--no-python", "touch", started)
    assert error == ["ConfigError", "--nnodes must be MIN:MAX with 1 <= MIN <= MAX, got '0'"]
    assert call_main("--no-such-flag", "--no-python", "touch", started) == ["SystemExit", "2"]
    assert not Path(started).exists()


@pytest.mark.parametrize("worker", ["true", "exit 3"])
def test_main_raises_the_same_type_of_error_as_torchs_main(worker: str) -> None:
    argv = ("--standalone", "--no-python", "sh", "-c", worker)
    torchs = run(sys.executable, "-c", CALL_TORCHS_MAIN, *argv)
    assert torchs.stdout.split() == [call_main(*argv)[0]]
