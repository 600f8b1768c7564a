"""Whether an agent is well: a stuck loop is found out, and one that is done is not blamed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest
from jobs import until

from elasticlib.observe.health import PATIENCE, LoopWatch, judge
from elasticlib.observe.history import JobState


class Loop:
    """One that turns in a thread of its own, as an agent's does, by a clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.over = False
        self.inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.watch = LoopWatch(self.ask, every=0.001, clock=lambda: self.now)
        self._thread = threading.Thread(target=self._turn)
        self._thread.start()

    def ask(self, call: Callable[[], None]) -> bool:
        self.inbox.put(call)
        return not self.over

    def _turn(self) -> None:
        while (call := self.inbox.get()) is not None:
            call()

    def close(self) -> None:
        self.watch.end()
        self.inbox.put(None)
        self._thread.join(10)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_a_loop_that_is_stuck_is_not_well_until_it_turns_again(loop: Loop) -> None:
    loop.watch.begin()
    loop.now = 100.0
    until("the loop to answer", lambda: loop.watch.silent() == 0)
    stuck, free = threading.Event(), threading.Event()
    loop.inbox.put(lambda: (stuck.set(), free.wait(60)))
    assert stuck.wait(10)
    loop.now += PATIENCE + 1
    found = judge(JobState.RUNNING, "", loop.watch.silent())
    assert not found.good
    assert found.sentence == "the agent's loop has not turned for 16.0 s"
    free.set()
    until("the loop to answer again", lambda: loop.watch.silent() == 0)
    assert judge(JobState.RUNNING, "", loop.watch.silent()).good


def test_a_loop_that_has_done_its_work_is_not_called_stuck(loop: Loop) -> None:
    loop.over = True
    loop.watch.begin()
    until("the watch to end", lambda: not loop.watch._thread.is_alive())
    loop.now = 1000.0
    assert loop.watch.silent() == 0


@pytest.mark.parametrize("state", JobState)
def test_only_a_failed_node_and_a_stuck_one_are_not_well(state: JobState) -> None:
    good = judge(state, "rank 0 raised", 0.0)
    assert good.good is (state is not JobState.FAILED)
    assert good.good or "rank 0 raised" in good.sentence
    stuck = judge(state, "", PATIENCE + 1)
    assert stuck.good is (state.over and state is not JobState.FAILED)
