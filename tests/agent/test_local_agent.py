"""The agent with real workers and a third-party handler."""

from __future__ import annotations

import errno
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib import (
    Command,
    ElasticAgent,
    LocalWorkers,
    Node,
    RendezvousHandler,
    RunResult,
    WorkerSpec,
    WorkerState,
)
from elasticlib.errors import RendezvousTimeoutError
from elasticlib.options import AgentOptions, RendezvousSettings
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo, assign_ranks
from elasticlib.testing.waiting import wait_until


class OneNode(RendezvousHandler):
    """A handler that implements only the methods that torch has."""

    def __init__(self) -> None:
        self.generation = 0
        self.waiting = 0
        self.closed = False

    def get_backend(self) -> str:
        return "one"

    def get_run_id(self) -> str:
        return "run"

    def next_rendezvous(self) -> RendezvousInfo:
        self.generation += 1
        self.waiting = 0
        node = Node("n-1", "n", "127.0.0.1", slots=2)
        place = RendezvousStoreInfo("127.0.0.1", 1)
        return RendezvousInfo("run", self.generation, assign_ranks([node])[0], place)

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        self.closed = True

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def shutdown(self) -> bool:
        return True


class ShellJob:
    """An agent that runs a shell command on two workers, with a third-party handler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handler = OneNode()
        self.result: RunResult | None = None
        self._thread: threading.Thread | None = None

    def agent(self, command: str, max_restarts: int = 0, grace: float = 30.0) -> ElasticAgent:
        spec = WorkerSpec(Command("sh", ("-c", command, "sh", str(self.folder))), 2)
        return ElasticAgent(
            spec,
            self.handler,
            LocalWorkers(os.environ),
            job=RendezvousSettings(max_restarts=max_restarts),
            options=AgentOptions(shutdown_timeout=grace, monitor_interval=0.02),
        )

    def run(self, command: str, max_restarts: int = 0, grace: float = 30.0) -> RunResult:
        return self.agent(command, max_restarts, grace).run()

    def start(self, command: str) -> ElasticAgent:
        agent = self.agent(command)

        def work() -> None:
            self.result = agent.run()

        self._thread = threading.Thread(target=work)
        self._thread.start()
        return agent

    def wait_for_result(self) -> RunResult:
        assert self._thread is not None
        self._thread.join(30)
        assert self.result is not None
        return self.result

    def wait_for_file(self, name: str) -> None:
        wait_until(name, (self.folder / name).exists)


@pytest.fixture
def shell_job(tmp_path: Path) -> Iterator[ShellJob]:
    before = set(threading.enumerate())
    yield ShellJob(tmp_path)
    # The thread that reported the exit of a worker finishes a moment later.
    wait_until("the end of all threads of the agent", lambda: set(threading.enumerate()) <= before)


def test_successful_workers_give_a_successful_result(shell_job: ShellJob) -> None:
    result = shell_job.run("exit 0")
    assert (result.state, result.exit_code, result.generation) == (WorkerState.SUCCEEDED, 0, 1)
    assert result.return_values == {0: None, 1: None}


def test_the_agents_restart_budget_is_used_if_the_handler_has_none(shell_job: ShellJob) -> None:
    result = shell_job.run('[ "$RANK" = 0 ] || exit 5', max_restarts=2)
    assert (result.state, result.generation) == (WorkerState.FAILED, 3)
    assert "exited with code 5 (2 of 2 restarts used)" in result.reason
    assert [failure.returncode for failure in result.failures.values()] == [5]


def test_a_run_succeeds_after_a_restart(shell_job: ShellJob) -> None:
    command = 'if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then exit 1; fi'
    result = shell_job.run(command, max_restarts=1)
    assert (result.state, result.restarts) == (WorkerState.SUCCEEDED, 1)


def test_a_waiting_node_restarts_the_workers_without_using_a_restart(
    shell_job: ShellJob,
) -> None:
    shell_job.start('touch "$1/up.$ELASTICLIB_GENERATION"; until [ -e "$1/end" ]; do :; done')
    shell_job.wait_for_file("up.1")
    shell_job.handler.waiting = 1
    shell_job.wait_for_file("up.2")
    (shell_job.folder / "end").touch()
    result = shell_job.wait_for_result()
    assert (result.state, result.generation, result.restarts) == (WorkerState.SUCCEEDED, 2, 0)


def test_a_closed_rendezvous_ends_the_run(shell_job: ShellJob) -> None:
    shell_job.start('touch "$1/up"; while :; do :; done')
    shell_job.wait_for_file("up")
    shell_job.handler.set_closed()
    result = shell_job.wait_for_result()
    assert (result.state, result.reason) == (WorkerState.FAILED, "the rendezvous was closed")


def test_a_failure_stops_the_other_worker_with_sigterm_and_sigkill(shell_job: ShellJob) -> None:
    command = 'trap "" TERM; [ "$RANK" = 0 ] && exit 9; while :; do sleep 1; done'
    result = shell_job.run(command, grace=0.2)
    assert result.state is WorkerState.FAILED
    assert list(result.failures) == [0]


def test_workers_that_fail_at_once_are_restarted_within_the_budget(
    shell_job: ShellJob,
) -> None:
    result = shell_job.run("exit 2", max_restarts=2)
    assert (result.state, result.generation) == (WorkerState.FAILED, 3)
    assert result.reason.endswith("exited with code 2 (2 of 2 restarts used)")


class BrokenHandler(OneNode):
    def next_rendezvous(self) -> RendezvousInfo:
        raise OSError("the network is on fire")


def test_an_exception_of_the_handler_ends_the_run_with_its_message(shell_job: ShellJob) -> None:
    shell_job.handler = BrokenHandler()
    result = shell_job.run("exit 0")
    assert (result.state, result.reason) == (
        WorkerState.FAILED,
        "OSError: the network is on fire",
    )


def test_an_agent_in_a_thread_is_stopped_with_handle_signal(
    shell_job: ShellJob,
) -> None:
    agent = shell_job.start('touch "$1/up"; exec sleep 600')
    shell_job.wait_for_file("up")
    agent.handle_signal(signal.SIGINT)
    result = shell_job.wait_for_result()
    assert (result.state, result.signal) == (WorkerState.STOPPED, signal.SIGINT)


def test_the_agent_closes_the_rendezvous_after_its_last_restart(
    shell_job: ShellJob,
) -> None:
    assert shell_job.run("exit 5", max_restarts=1).state is WorkerState.FAILED
    assert shell_job.handler.closed


class HandlerThatCannotClose(OneNode):
    def set_closed(self) -> None:
        raise OSError("the network is on fire")


def test_a_job_that_cannot_be_closed_keeps_the_reason_of_its_failure(
    shell_job: ShellJob, caplog: pytest.LogCaptureFixture
) -> None:
    shell_job.handler = HandlerThatCannotClose()
    result = shell_job.run("exit 5")
    assert result.state is WorkerState.FAILED
    assert result.reason.endswith("exited with code 5 (0 of 0 restarts used)")
    assert "cannot end the job for the other nodes" in caplog.text
    assert "OSError: the network is on fire" in caplog.text


class HandlerWithOneGeneration(OneNode):
    """A rendezvous that forms no second generation."""

    def next_rendezvous(self) -> RendezvousInfo:
        if self.generation:
            raise RendezvousTimeoutError("1 node waits, and at least 2 are needed")
        return super().next_rendezvous()


def test_a_node_without_a_new_generation_reports_the_failure_of_its_last_one(
    shell_job: ShellJob,
) -> None:
    shell_job.handler = HandlerWithOneGeneration()
    result = shell_job.run("exit 5", max_restarts=2)
    assert result.state is WorkerState.FAILED
    assert result.root_cause is not None
    assert result.reason == (
        f"{result.root_cause.summary}; then this node could not join another generation: "
        "1 node waits, and at least 2 are needed"
    )


def test_the_log_line_of_a_generation_names_the_reason_if_the_handler_does_not(
    shell_job: ShellJob, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "elasticlib.agent"):
        shell_job.run("exit 5", max_restarts=1)
    first, second = (
        record.getMessage() for record in caplog.records if "; reason: " in record.getMessage()
    )
    assert first.endswith(", restarts 0/1; reason: the first generation of this node")
    assert re.search(r", restarts 1/1; reason: worker of rank . .* exited with code 5$", second)


def test_directory_that_cannot_be_created_is_named_before_any_was_used(
    shell_job: ShellJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    reason = shell_job.run("exit 0").reason
    assert f"cannot create the log directory of this run in '{tmp_path / 'missing'}': No " in reason


@pytest.mark.parametrize("is_file", [False, True], ids=["removed", "a file"])
def test_an_unusable_temporary_directory_is_reported_once_and_uses_no_restart(
    shell_job: ShellJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_file: bool,
) -> None:
    unusable = tmp_path / "unusable"
    if is_file:
        unusable.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(unusable))
    with caplog.at_level("INFO", "elasticlib"):
        result = shell_job.run("exit 0", max_restarts=3)
    assert result.state is WorkerState.FAILED
    assert (result.generation, result.restarts, shell_job.handler.generation) == (1, 0, 1)
    reason = os.strerror(errno.ENOTDIR if is_file else errno.ENOENT)
    assert result.reason == (
        f"cannot create the log directory of this run in '{unusable}': {reason}; TMPDIR must "
        "name a directory that exists and is writable for as long as the job runs (or set log_dir, "
        "--log-dir)"
    )
    assert result.root_cause is not None
    assert result.root_cause.summary == result.reason
    assert "rank 1" not in caplog.text.replace("ranks 0-1", "")
