"""`elasticrun.main` called from a program, as `torch.distributed.run.main` is: it raises."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import WITHOUT_TORCH

pytestmark = pytest.mark.faults

CALL = """
import json, sys
from elasticlib.launch.elasticrun import main
try:
    print(json.dumps(["returned", main(sys.argv[1:])]))
except BaseException as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""
BOTH = """
import sys
from torch.distributed.run import main
try:
    main(sys.argv[1:])
    print("returned")
except BaseException as error:
    print(type(error).__name__)
"""


def call(code: str, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        env={**os.environ, **extra},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def ours(*argv: str, **extra: str) -> list[str | None]:
    done = call(CALL, *argv, PYTHONPATH=WITHOUT_TORCH, **extra)
    found: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


SHELL = ("--start-method=spawn", "--no-python", "sh", "-c")


def test_success_is_to_return_and_nothing_else_is() -> None:
    assert ours(*SHELL, "true") == ["returned", None]


def test_a_failed_job_raises_the_first_failure(tmp_path: Path) -> None:
    left = tmp_path / "error.json"
    kind, said = ours(*SHELL, "exit 3", TORCHELASTIC_ERROR_FILE=str(left))
    assert (kind, "exited with code 3" in str(said)) == ("ChildFailedError", True)
    assert "exited with code 3" in left.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_raises_whether_it_stops_the_job_or_has_it_save_and_leave(
    number: signal.Signals,
) -> None:
    # The shell that is the worker was started by the supervisor process, a child of the launcher.
    launcher = r"$(sed -n 's/^PPid:\t//p' /proc/$PPID/status)"
    kind, said = ours(*SHELL, f"kill -{number.name[3:]} {launcher}; exec sleep 60")
    assert (kind, number.name in str(said)) == ("SignalException", True)


def test_a_command_line_that_cannot_work_raises_before_anything_starts(tmp_path: Path) -> None:
    started = str(tmp_path / "started")
    told = ours("--nnodes=0", "--no-python", "touch", started)
    assert told == ["ConfigError", "--nnodes must be MIN:MAX with 1 <= MIN <= MAX, got '0'"]
    assert ours("--no-such-flag", "--no-python", "touch", started) == ["SystemExit", "2"]
    assert not Path(started).exists()


@pytest.mark.parametrize("worker", ["true", "exit 3"])
def test_torchs_main_ends_in_the_same_way(worker: str) -> None:
    argv = ("--standalone", "--no-python", "sh", "-c", worker)
    assert call(BOTH, *argv).stdout.split() == [ours(*argv)[0]]
