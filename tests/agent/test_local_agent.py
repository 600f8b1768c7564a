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
    StopTimeouts,
    WorkerSpec,
    WorkerState,
)
from elasticlib.errors import RendezvousTimeoutError
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


class Supervised:
    """An agent that runs a shell line on two workers, with its handler at hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handler = OneNode()
        self.result: RunResult | None = None
        self._thread: threading.Thread | None = None

    def agent(self, line: str, max_restarts: int = 0, grace: float = 30.0) -> ElasticAgent:
        spec = WorkerSpec(Command("sh", ("-c", line, "sh", str(self.folder))), 2)
        return ElasticAgent(
            spec,
            self.handler,
            LocalWorkers(os.environ),
            max_restarts=max_restarts,
            stop_timeouts=StopTimeouts(grace),
            monitor_interval=0.02,
        )

    def run(self, line: str, max_restarts: int = 0, grace: float = 30.0) -> RunResult:
        return self.agent(line, max_restarts, grace).run()

    def begin(self, line: str) -> ElasticAgent:
        agent = self.agent(line)

        def work() -> None:
            self.result = agent.run()

        self._thread = threading.Thread(target=work)
        self._thread.start()
        return agent

    def end(self) -> RunResult:
        assert self._thread is not None
        self._thread.join(30)
        assert self.result is not None
        return self.result

    def poll(self, name: str) -> None:
        wait_until(name, (self.folder / name).exists)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    before = set(threading.enumerate())
    yield Supervised(tmp_path)
    # The thread that reported the exit of a worker finishes a moment later.
    wait_until("its threads to end", lambda: set(threading.enumerate()) <= before)


def test_successful_workers_give_a_successful_result(supervised: Supervised) -> None:
    result = supervised.run("exit 0")
    assert (result.state, result.exit_code, result.generation) == (WorkerState.SUCCEEDED, 0, 1)
    assert result.return_values == {0: None, 1: None}


def test_the_agents_restart_budget_is_used_if_the_handler_has_none(supervised: Supervised) -> None:
    result = supervised.run('[ "$RANK" = 0 ] || exit 5', max_restarts=2)
    assert (result.state, result.generation) == (WorkerState.FAILED, 3)
    assert "exited with code 5 (2 of 2 restarts used)" in result.reason
    assert [failure.returncode for failure in result.failures.values()] == [5]


def test_a_run_succeeds_after_a_restart(supervised: Supervised) -> None:
    line = 'if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then exit 1; fi'
    result = supervised.run(line, max_restarts=1)
    assert (result.state, result.restarts) == (WorkerState.SUCCEEDED, 1)


def test_a_waiting_node_restarts_the_workers_without_using_a_restart(
    supervised: Supervised,
) -> None:
    supervised.begin('touch "$1/up.$ELASTICLIB_GENERATION"; until [ -e "$1/end" ]; do :; done')
    supervised.poll("up.1")
    supervised.handler.waiting = 1
    supervised.poll("up.2")
    (supervised.folder / "end").touch()
    result = supervised.end()
    assert (result.state, result.generation, result.restarts) == (WorkerState.SUCCEEDED, 2, 0)


def test_a_closed_rendezvous_ends_the_run(supervised: Supervised) -> None:
    supervised.begin('touch "$1/up"; while :; do :; done')
    supervised.poll("up")
    supervised.handler.set_closed()
    result = supervised.end()
    assert (result.state, result.reason) == (WorkerState.FAILED, "the rendezvous was closed")


def test_a_failure_stops_the_other_worker_with_sigterm_and_sigkill(supervised: Supervised) -> None:
    line = 'trap "" TERM; [ "$RANK" = 0 ] && exit 9; while :; do sleep 1; done'
    result = supervised.run(line, grace=0.2)
    assert result.state is WorkerState.FAILED
    assert list(result.failures) == [0]


def test_workers_that_fail_at_once_are_restarted_within_the_budget(
    supervised: Supervised,
) -> None:
    result = supervised.run("exit 2", max_restarts=2)
    assert (result.state, result.generation) == (WorkerState.FAILED, 3)
    assert result.reason.endswith("exited with code 2 (2 of 2 restarts used)")


class Broken(OneNode):
    def next_rendezvous(self) -> RendezvousInfo:
        raise OSError("the network is on fire")


def test_an_exception_of_the_handler_ends_the_run_with_its_message(supervised: Supervised) -> None:
    supervised.handler = Broken()
    result = supervised.run("exit 0")
    assert (result.state, result.reason) == (
        WorkerState.FAILED,
        "OSError: the network is on fire",
    )


def test_an_agent_in_a_thread_is_stopped_with_handle_signal(
    supervised: Supervised,
) -> None:
    agent = supervised.begin('touch "$1/up"; exec sleep 600')
    supervised.poll("up")
    agent.handle_signal(signal.SIGINT)
    result = supervised.end()
    assert (result.state, result.signal) == (WorkerState.STOPPED, signal.SIGINT)


def test_the_agent_closes_the_rendezvous_after_its_last_restart(
    supervised: Supervised,
) -> None:
    assert supervised.run("exit 5", max_restarts=1).state is WorkerState.FAILED
    assert supervised.handler.closed


class CannotClose(OneNode):
    def set_closed(self) -> None:
        raise OSError("the network is on fire")


def test_a_job_that_cannot_be_closed_keeps_the_reason_of_its_failure(
    supervised: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    supervised.handler = CannotClose()
    result = supervised.run("exit 5")
    assert result.state is WorkerState.FAILED
    assert result.reason.endswith("exited with code 5 (0 of 0 restarts used)")
    assert "cannot end the job for the other nodes" in caplog.text
    assert "OSError: the network is on fire" in caplog.text


class Deserted(OneNode):
    """A rendezvous in which no second generation settles."""

    def next_rendezvous(self) -> RendezvousInfo:
        if self.generation:
            raise RendezvousTimeoutError("1 node waits, and at least 2 are needed")
        return super().next_rendezvous()


def test_a_node_without_a_new_generation_reports_why_the_last_one_ended(
    supervised: Supervised,
) -> None:
    supervised.handler = Deserted()
    result = supervised.run("exit 5", max_restarts=2)
    assert result.state is WorkerState.FAILED
    assert result.root_cause is not None
    assert result.reason == (
        f"{result.root_cause.summary}; then this node could not join another generation: "
        "1 node waits, and at least 2 are needed"
    )


def test_the_log_line_of_a_generation_names_the_reason_if_the_handler_does_not(
    supervised: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "elasticlib.agent"):
        supervised.run("exit 5", max_restarts=1)
    first, second = (
        record.getMessage() for record in caplog.records if "; reason: " in record.getMessage()
    )
    assert first.endswith(", restarts 0/1; reason: the first generation of this node")
    assert re.search(r", restarts 1/1; reason: worker of rank . .* exited with code 5$", second)


@pytest.mark.parametrize("made", [False, True], ids=["removed", "a file"])
def test_a_temporary_directory_that_cannot_be_used_is_reported_once_and_uses_no_restart(
    supervised: Supervised,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    made: bool,
) -> None:
    gone = tmp_path / "gone"
    if made:
        gone.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(gone))
    with caplog.at_level("INFO", "elasticlib"):
        result = supervised.run("exit 0", max_restarts=3)
    assert result.state is WorkerState.FAILED
    assert (result.generation, result.restarts, supervised.handler.generation) == (1, 0, 1)
    why = os.strerror(errno.ENOTDIR if made else errno.ENOENT)
    assert result.reason == (
        f"cannot create the log directory of this run in '{gone}': {why}; TMPDIR must name a "
        "directory that exists and is writable for as long as the job runs (or set log_dir, "
        "--log-dir)"
    )
    assert result.root_cause is not None
    assert result.root_cause.summary == result.reason
    assert "rank 1" not in caplog.text.replace("ranks 0-1", "")
