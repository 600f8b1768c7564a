"""The snapshot service writes snapshots at the end of a run, depending on its result."""

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


class Kept(SnapshotService):
    def __init__(self) -> None:
        self.told: list[object] = []

    def on_workers_starting(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        del group
        self.told.append(info.generation)

    def close(self, *, flush: bool, cancel_reason: Callable[[], str]) -> str:
        del cancel_reason
        self.told.append(flush)
        self.saved_step = 7 if flush else None
        return ""


@pytest.mark.parametrize(
    ("state", "keep"),
    [
        (WorkerState.SUCCEEDED, False),
        (WorkerState.FAILED, True),
        (WorkerState.DRAINED, True),
        (WorkerState.STOPPED, True),
    ],
)
def test_snapshots_are_written_unless_the_job_has_succeeded(state: WorkerState, keep: bool) -> None:
    workers, memory = OneWorker(), Kept()
    journal = NodeJournal("job", "n1")
    options = AgentOptions(drain_signals=(signal.SIGUSR1,), stop_signals=(signal.SIGUSR2,))
    with running(workers, snapshot_service=memory, options=options, journal=journal) as run:
        if state is WorkerState.DRAINED:
            run.agent.handle_signal(signal.SIGUSR1)
        elif state is WorkerState.STOPPED:
            run.agent.handle_signal(signal.SIGUSR2)
        else:
            workers.finish(int(state is WorkerState.FAILED))
        assert run.result().state is state
    assert memory.told == [1, keep]
    assert journal.aggregate.status.checkpoint_step == (7 if keep else None), "it is in the summary"


class Hangs(Kept):
    """The disk hangs, so that the final write ends only if it is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.looks = threading.Event(), threading.Semaphore(0)

    def close(self, *, flush: bool, cancel_reason: Callable[[], str]) -> str:
        assert flush
        self.writing.set()
        while not (reason := cancel_reason()):
            self.looks.release()
            threading.Event().wait(0.01)
        return f"step 7 was not written: {reason}"

    def looked(self, times: int) -> bool:
        """Return True if the signals are read `times` more times."""
        return all(self.looks.acquire(timeout=30) for _ in range(times))


@pytest.mark.parametrize("ended_by", ["SIGTERM", "a failure"])
def test_a_second_sigterm_ends_the_final_write(
    ended_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    workers, memory = OneWorker(), Hangs()
    with running(workers, snapshot_service=memory) as run:
        if ended_by == "SIGTERM":
            run.agent.handle_signal(signal.SIGTERM)
            assert memory.writing.wait(30)
        else:
            workers.finish(1)
            assert memory.writing.wait(30)
            run.agent.handle_signal(signal.SIGTERM)
            wait_until("a word on the first one", lambda: "a second one ends" in caplog.text)
        # Signals that do not end a run change nothing.
        run.agent.handle_signal(signal.SIGUSR2)
        assert memory.looked(times=20)
        run.agent.handle_signal(signal.SIGTERM)
        result = run.result()
    given_up = "step 7 was not written: the agent received SIGTERM again during the final write"
    assert result.reason.endswith(given_up)
    assert result.state is (WorkerState.STOPPED if ended_by == "SIGTERM" else WorkerState.FAILED)
    assert given_up in [
        record.message for record in caplog.records if record.levelname == "WARNING"
    ]
