"""An agent checks its node before it joins, and reacts to the result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

import attrs
import pytest
from single_worker_agent import OneWorker, Run, SingleNodeHandler, running

from elasticlib import ElasticAgent, Node, WorkerSpec, WorkerState
from elasticlib.rendezvous.interface import (
    Change,
    ChangeKind,
    Report,
    ReportKind,
    assign_ranks,
)
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import StopHow, WorkerView
from elasticlib.workers.spec import Command, WorkerGroup


class CountedHandler(SingleNodeHandler):
    """A rendezvous of one node whose job counts restarts, and has other nodes that fail."""

    def __init__(self, slots: int = 1) -> None:
        super().__init__(assignment=assign_ranks([Node("n-1", "n", "127.0.0.1", slots=slots)])[0])
        self.other_node_failed = threading.Event()

    def report(self, report: Report) -> bool:
        return report.kind in (ReportKind.FAILURE, ReportKind.SLOTS)

    def wait_for_change(self, timeout: float) -> Change | None:
        if self.other_node_failed.wait(min(timeout, 0.02)):
            self.other_node_failed.clear()
            return Change(ChangeKind.GENERATION_ENDED, "the workers of another node failed")
        return None


class Checks:
    """A check that returns these results one after the other."""

    def __init__(self, *results: str) -> None:
        self.results = list(results)
        self.num_calls = 0

    def __call__(self, is_cancelled: Callable[[], bool]) -> str:
        del is_cancelled
        self.num_calls += 1
        return self.results.pop(0)


def test_a_node_is_checked_before_it_first_joins() -> None:
    workers, handler, check = OneWorker(), CountedHandler(), Checks("the fan is broken")
    agent = ElasticAgent(WorkerSpec(Command("none")), handler, workers, check_node=check)
    result = agent.run()
    assert (result.state, result.reason) == (WorkerState.FAILED, "the fan is broken")
    assert (result.exit_code, result.evicted, result.is_unfit) == (69, True, True)
    assert (handler.generation, workers.starts) == (0, 0)


def test_a_node_is_checked_again_after_its_own_workers_failed_only() -> None:
    workers, handler, check = OneWorker(), CountedHandler(), Checks("", "", "the fan is broken")
    with running(workers, handler, check_node=check) as run:
        assert check.num_calls == 1
        handler.other_node_failed.set()
        wait_until("the second generation", lambda: workers.starts == 2)
        assert check.num_calls == 1
        workers.end(1)
        wait_until("the third generation", lambda: workers.starts == 3)
        assert check.num_calls == 2
        workers.end(1)
        result = run.result()
    assert (result.exit_code, result.reason, workers.starts) == (69, "the fan is broken", 3)
    assert check.num_calls == 3


def test_a_check_that_raises_counts_as_failed() -> None:
    def check(_: Callable[[], bool]) -> str:
        raise OSError("no such tool")

    workers = OneWorker()
    agent = ElasticAgent(WorkerSpec(Command("none")), CountedHandler(), workers, check_node=check)
    result = agent.run()
    assert result.exit_code == 69
    assert "the check of this node failed: OSError: no such tool" in result.reason


@pytest.mark.parametrize("number", [15, 12])
def test_a_signal_cancels_a_check_and_the_run_waits_for_it(number: int) -> None:
    has_started, is_finished = threading.Event(), threading.Event()

    def check(is_cancelled: Callable[[], bool]) -> str:
        has_started.set()
        wait_until("the check to be cancelled", is_cancelled)
        is_finished.set()
        return "cancelled"

    workers = OneWorker()
    workers.up.set()
    with running(workers, CountedHandler(), check_node=check) as run:
        assert has_started.wait(60)
        run.agent.handle_signal(number)
        result = run.result()
        assert is_finished.is_set()
    assert result.state is (WorkerState.STOPPED if number == 15 else WorkerState.DRAINED)
    assert workers.starts == 0


class RetainedWorkers(OneWorker):
    """Two workers that can regroup. A stopped one exits when the test calls `end_worker`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stopped = threading.Event()
        self._views: dict[int, WorkerView] = {}  # of the running workers

    def start(self, group: WorkerGroup, on_exit: Callable[[WorkerExit, str], None]) -> None:
        self._views = {n: WorkerView(f"worker {n}", can_regroup=True) for n in (0, 1)}
        self.on_exit = on_exit
        super().start(group, on_exit)

    def end_worker(self, local_rank: int, code: int) -> None:
        del self._views[local_rank]
        exit_ = WorkerExit(local_rank, local_rank, 1, code, stop_was_requested=code < 0)
        self.on_exit(exit_, "")

    def view(self) -> Mapping[int, WorkerView]:
        return dict(self._views)

    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        if how is not StopHow.LEAVE:
            self.is_stopped.set()
            return
        for n in local_ranks:
            self._views[n] = attrs.evolve(self._views[n], has_left=True, is_ready=True)


def test_a_signal_cancels_a_check_while_retained_workers_are_stopped() -> None:
    num_calls, is_checking = 0, threading.Event()

    def check(is_cancelled: Callable[[], bool]) -> str:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            return ""
        is_checking.set()
        wait_until("the check to be cancelled", is_cancelled)
        return "cancelled"

    workers = RetainedWorkers()
    spec = WorkerSpec(Command("none"), local_world_size=2)
    run = Run(ElasticAgent(spec, CountedHandler(2), workers, check_node=check))
    assert workers.up.wait(60)
    workers.end_worker(0, 1)
    assert is_checking.wait(60)
    run.agent.handle_signal(12)
    assert workers.is_stopped.wait(60)
    # The agent receives the result of the check before the worker has exited.
    wait_until("the end of the check", lambda: not is_running("agent-prepare"))
    workers.end_worker(1, -15)
    result = run.result()
    assert (result.state, result.exit_code) == (WorkerState.DRAINED, 75), result.reason


def is_running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())
