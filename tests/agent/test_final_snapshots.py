"""The agent writes snapshots at the end of a run, unless the run has succeeded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
from single_worker_agent import OneWorker, running

from elasticlib import AgentOptions, WorkerState
from elasticlib.agent.interface import SnapshotService
from elasticlib.observe.journal import NodeJournal
from elasticlib.rendezvous.interface import RendezvousInfo
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.spec import WorkerGroup


class RecordingService(SnapshotService):
    def __init__(self) -> None:
        self.calls: list[object] = []

    def on_workers_starting(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        del group
        self.calls.append(info.generation)

    def close(self, *, flush: bool, cancel_reason: Callable[[], str]) -> str:
        del cancel_reason
        self.calls.append(flush)
        self.saved_step = 7 if flush else None
        return ""


@pytest.mark.parametrize(
    ("state", "is_written"),
    [
        (WorkerState.SUCCEEDED, False),
        (WorkerState.FAILED, True),
        (WorkerState.DRAINED, True),
        (WorkerState.STOPPED, True),
    ],
)
def test_snapshots_are_written_unless_the_job_has_succeeded(
    state: WorkerState, is_written: bool
) -> None:
    workers, service = OneWorker(), RecordingService()
    journal = NodeJournal("job", "n1")
    options = AgentOptions(drain_signals=(signal.SIGUSR1,), stop_signals=(signal.SIGUSR2,))
    with running(workers, snapshot_service=service, options=options, journal=journal) as run:
        if state is WorkerState.DRAINED:
            run.agent.handle_signal(signal.SIGUSR1)
        elif state is WorkerState.STOPPED:
            run.agent.handle_signal(signal.SIGUSR2)
        else:
            workers.end(int(state is WorkerState.FAILED))
        assert run.result().state is state
    assert service.calls == [1, is_written]
    assert journal.aggregate.status.checkpoint_step == (7 if is_written else None), (
        "the run summary contains the step"
    )


class HangingService(RecordingService):
    """A service whose disk hangs. The final write ends only when the agent cancels it."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.polls = threading.Event(), threading.Semaphore(0)

    def close(self, *, flush: bool, cancel_reason: Callable[[], str]) -> str:
        assert flush
        self.writing.set()
        while not (reason := cancel_reason()):
            self.polls.release()
            threading.Event().wait(0.01)
        return f"step 7 was not written: {reason}"

    def wait_for_polls(self, times: int) -> bool:
        """Return True once the service has polled the signals `times` more times."""
        return all(self.polls.acquire(timeout=30) for _ in range(times))


@pytest.mark.parametrize("cause", ["SIGTERM", "a failure"])
def test_only_the_third_sigint_ends_the_final_write(
    cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    workers, service = OneWorker(), HangingService()
    with running(workers, snapshot_service=service) as run:
        if cause == "SIGTERM":
            run.agent.handle_signal(signal.SIGTERM)
        else:
            workers.end(1)
        assert service.writing.wait(30)
        # Batch systems repeat these.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2) * 3:
            run.agent.handle_signal(number)
        for left in (2, 1):
            run.agent.handle_signal(signal.SIGINT)
            wait_until("a warning", lambda left=left: f"{left} more will end it" in caplog.text)
        assert service.wait_for_polls(times=20)
        run.agent.handle_signal(signal.SIGINT)
        result = run.result()
    lost = "step 7 was not written: the final write of snapshots was given up at SIGINT number 3"
    assert result.reason.endswith(lost)
    assert result.state is (WorkerState.STOPPED if cause == "SIGTERM" else WorkerState.FAILED)
    assert lost in [record.message for record in caplog.records if record.levelname == "WARNING"]
