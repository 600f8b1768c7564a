"""Saves of processes that exit: they are durable, or the log has an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import PROGRAMS

from elasticlib import CheckpointManager


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory in which processes have saved and exited."""
    path = tmp_path_factory.mktemp("saves")
    program = str(PROGRAMS / "save_and_exit.py")
    subprocess.run([sys.executable, program, str(path)], check=True, timeout=100)
    return path


@pytest.mark.parametrize(
    ("way", "steps", "message"),
    [
        ("first_save_at_exit", [1], ""),
        ("save_at_exit_after_another", [1, 2], ""),
        ("failing_save_at_exit", [], "No space left on device"),
        ("save_in_a_thread_that_outlives_the_main_thread", [1], ""),
        ("exit_after_a_save", [1], ""),
        ("interrupt_after_a_save", [1], "KeyboardInterrupt"),
        ("interrupt_of_a_save_that_waits", [1], "KeyboardInterrupt"),
        ("exit_of_a_process_of_multiprocessing", [1], ""),
    ],
)
def test_a_process_that_exits_completes_its_saves(
    folder: Path, way: str, steps: list[int], message: str
) -> None:
    log = (folder / f"{way}.log").read_text()
    manager = CheckpointManager(folder / way)
    assert (manager.steps(), manager.verify()) == (steps, {}), log
    for step in steps:
        assert manager.load(step)["w"].unique().tolist() == [step]
    assert message in log
    assert message or not log
