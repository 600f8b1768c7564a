"""What an agent keeps for its workers is told how the run ended."""

from __future__ import annotations

import signal

import pytest
from lone_agent import OneWorker, running

from elasticlib import AgentOptions, RendezvousInfo, WorkerGroup, WorkerState
from elasticlib.agent.interface import Memory
from elasticlib.observe.journal import NodeJournal


class Kept(Memory):
    def __init__(self) -> None:
        self.told: list[object] = []

    def begin(self, info: RendezvousInfo, group: WorkerGroup) -> None:
        del group
        self.told.append(info.generation)

    def finish(self, *, keep: bool) -> str:
        self.told.append(keep)
        self.saved = 7 if keep else None
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
def test_what_is_in_memory_is_kept_unless_the_job_is_done(state: WorkerState, keep: bool) -> None:
    workers, memory = OneWorker(), Kept()
    journal = NodeJournal("job", "n1")
    options = AgentOptions(drain_signals=(signal.SIGUSR1,), signals=(signal.SIGUSR2,))
    with running(workers, memory=memory, options=options, journal=journal) as run:
        if state is WorkerState.DRAINED:
            run.agent.heed(signal.SIGUSR1)
        elif state is WorkerState.STOPPED:
            run.agent.heed(signal.SIGUSR2)
        else:
            workers.finish(int(state is WorkerState.FAILED))
        assert run.result().state is state
    assert memory.told == [1, keep]
    assert journal.story.sums().saved == (7 if keep else None), "it is in the summary"
