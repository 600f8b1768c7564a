"""A file system that does not answer delays neither the agent's loop nor further exits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_groups import GroupRunner, shell

from elasticlib.clock import monotonic
from elasticlib.testing.waiting import wait_until
from elasticlib.workers import worker_process
from elasticlib.workers.error_file import FailureReport, read_error_file
from elasticlib.workers.interface import StopHow


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Lets the file system of the workers' files answer; until then, each read of it hangs."""
    answer = threading.Event()

    def read(path: Path, reported: FailureReport) -> FailureReport:
        answer.wait()
        return read_error_file(path, reported)

    monkeypatch.setattr(worker_process, "FILES_TIMEOUT_S", 1.0)
    monkeypatch.setattr(worker_process, "read_error_file", read)
    yield answer
    answer.set()


def test_hung_disk_costs_one_wait_and_then_exits_come_without_a_tail(
    runner: GroupRunner, answer: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    begin = monotonic()
    runner.start(shell("echo why >&2; exit 3"), count=4)
    exits = [runner.wait_for_exit() for _ in range(4)]
    assert [exit_.returncode for exit_ in exits] == [3] * 4
    assert 1.0 < monotonic() - begin < 3.0
    assert caplog.text.count("could not be read within 1 s") == 1
    answer.set()
    runner.start(shell("echo why >&2; exit 3"), attempt=1)
    assert runner.wait_for_exit().describe().endswith("exited with code 3: why")


@pytest.mark.usefixtures("answer")
def test_worker_whose_files_cannot_be_opened_can_be_stopped(runner: GroupRunner) -> None:
    runner.start(shell("exit 3"))
    assert runner.wait_for_exit().returncode == 3
    begin = monotonic()
    runner.start(shell("sleep 600"), attempt=1)
    assert monotonic() - begin < 1.0
    wait_until("the start", lambda: 0 in runner.workers.view())
    runner.stop(StopHow.TERM)
    exit_ = runner.wait_for_exit()
    assert (exit_.pid, exit_.stop_was_requested, exit_.has_failed) == (0, True, False)
    assert exit_.describe().endswith("was stopped before it began")
