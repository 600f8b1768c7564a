"""The agent's loop over workers and a handler of a user: threads as workers, and one node."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Mapping

import attrs
import pytest

from elasticlib.agent.elastic_agent import ElasticAgent
from elasticlib.agent.interface import RunResult
from elasticlib.agent.machine import Phase
from elasticlib.errors import ConfigError, RendezvousClosedError, WorkerStartError
from elasticlib.options import AgentOptions, RendezvousSettings
from elasticlib.rendezvous.interface import (
    RankAssignment,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    Report,
)
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import StopHow, StopNotice, Workers, WorkerView
from elasticlib.workers.spec import Command, WorkerGroup, WorkerSpec, WorkerState

Script = Callable[["ThreadWorker"], int]


@attrs.define(eq=False)
class ThreadWorker:
    """A worker that is a thread. Its script returns an exit code."""

    local_rank: int
    rank: int
    generation: int
    asked: threading.Event = attrs.field(factory=threading.Event)  # by a notice, or SIGTERM
    has_notice: bool = False
    takes_notices: bool = False
    stop_call: int | None = None
    code: int | None = None


class ThreadWorkers(Workers):
    """Workers that are threads of this process."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.running: dict[int, ThreadWorker] = {}
        self.groups: list[WorkerGroup] = []
        self.on_change: Callable[[], None] = lambda: None
        self.is_closed = False
        self.error: Exception | None = None

    def prepare(
        self, spec: WorkerSpec, on_ready: Callable[[str], None], on_change: Callable[[], None]
    ) -> None:
        del spec
        self.on_change = on_change
        on_ready("")

    def start(self, group: WorkerGroup, on_exit: Callable[[WorkerExit, str], None]) -> None:
        self.groups.append(group)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        for one in group.workers:
            worker = ThreadWorker(one.local_rank, one.rank, group.info.generation)
            self.running[one.local_rank] = worker
            threading.Thread(target=self._run, args=(worker, on_exit), daemon=True).start()

    def _run(self, worker: ThreadWorker, on_exit: Callable[[WorkerExit, str], None]) -> None:
        code = self.script(worker)
        code = worker.code if worker.code is not None else code
        self.running.pop(worker.local_rank, None)
        was_asked = worker.asked.is_set()
        exit_ = WorkerExit(
            worker.local_rank,
            worker.rank,
            1,
            code,
            stop_was_requested=was_asked,
            failed_before_stop=not was_asked,
            signal_sent_by_agent=code < 0,
        )
        on_exit(exit_, "")

    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        for local in local_ranks:
            if (worker := self.running.get(local)) is not None:
                worker.code = -9 if how is StopHow.KILL else -15
                worker.asked.set()

    def notify(self, notice: StopNotice, call: int | None = None) -> None:
        del notice
        for worker in self.running.values():
            worker.has_notice, worker.stop_call = True, 1
            if call is not None:
                worker.asked.set()
        self.on_change()

    def view(self) -> Mapping[int, WorkerView]:
        return {
            local: WorkerView(
                "a thread",
                takes_notices=one.takes_notices,
                has_called_should_stop=one.takes_notices,
                stop_call=one.stop_call,
            )
            for local, one in self.running.items()
        }

    def close(self, grace_s: float = 0.0) -> None:
        del grace_s
        self.stop(tuple(self.running), StopHow.KILL)
        self.is_closed = True


class OneNode(RendezvousHandler):
    """A rendezvous of one node, as a user may write it."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers, self.generation = num_workers, 0
        self.reports: list[Report] = []
        self.is_over = threading.Event()

    def get_run_id(self) -> str:
        return "job"

    def next_rendezvous(self) -> RendezvousInfo:
        if self.is_over.is_set():
            raise RendezvousClosedError("it was shut down")
        self.generation += 1
        n = self.num_workers
        place = RankAssignment(0, 1, n, 0, n, 0, n)
        return RendezvousInfo("job", self.generation, place, RendezvousStoreInfo("localhost", 1))

    def wait_for_change(self, timeout: float) -> None:
        self.is_over.wait(timeout)

    def report(self, report: Report) -> bool:
        self.reports.append(report)
        return False

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return self.is_over.is_set()

    def set_closed(self) -> None:
        """Nobody else waits."""

    def shutdown(self) -> bool:
        self.is_over.set()
        return True


def make_agent(script: Script, num_workers: int = 2, max_restarts: int = 2) -> ElasticAgent:
    spec = WorkerSpec(Command("unused"), num_workers)
    options = AgentOptions(shutdown_timeout=5.0, kill_timeout=5.0)
    job = RendezvousSettings(max_restarts=max_restarts)
    workers, handler = ThreadWorkers(script), OneNode(num_workers)
    return ElasticAgent(spec, handler, workers, job=job, options=options)


def run(agent: ElasticAgent) -> RunResult:
    """Run the agent in this thread, and check that it has closed its parts."""
    result = agent.run()
    assert agent.state is Phase.ENDED
    assert isinstance(agent.workers, ThreadWorkers)
    assert agent.workers.is_closed
    assert not agent.workers.running
    return result


def in_thread(agent: ElasticAgent) -> tuple[threading.Thread, list[RunResult]]:
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(run(agent)))
    thread.start()
    return thread, results


def end(thread: threading.Thread, results: list[RunResult]) -> RunResult:
    thread.join(60)
    assert not thread.is_alive()
    return results[0]


def wait_for_stop(worker: ThreadWorker) -> int:
    assert worker.asked.wait(60)
    return 0


def test_all_workers_succeed() -> None:
    result = run(make_agent(lambda _: 0))
    assert (result.state, result.reason, result.generation) == (
        WorkerState.SUCCEEDED,
        "this node is done",
        1,
    )
    assert result.exit_code == 0


def test_a_failed_worker_restarts_all_workers_until_the_budget_is_used() -> None:
    def fail_twice(worker: ThreadWorker) -> int:
        if worker.rank == 0:
            return 1 if worker.generation < 3 else 0
        return 0 if worker.generation == 3 else wait_for_stop(worker)

    agent = make_agent(fail_twice)
    result = run(agent)
    assert (result.state, result.generation, result.restarts) == (WorkerState.SUCCEEDED, 3, 2)
    result = run(make_agent(lambda _: 1, max_restarts=1))
    assert (result.state, result.generation) == (WorkerState.FAILED, 2)
    assert "1 of 1 restarts used" in result.reason
    assert result.root_cause is not None


def test_notified_workers_save_and_the_node_leaves() -> None:
    def script(worker: ThreadWorker) -> int:
        worker.takes_notices = True
        return wait_for_stop(worker)

    agent = make_agent(script)
    thread, results = in_thread(agent)
    workers = agent.workers
    assert isinstance(workers, ThreadWorkers)
    wait_until("workers", lambda: len(workers.running) == 2)
    agent.handle_signal(signal.SIGTERM)
    result = end(thread, results)
    assert (result.state, result.exit_code) == (WorkerState.DRAINED, 75)
    assert "received SIGTERM" in result.reason


def test_workers_without_notices_are_terminated() -> None:
    agent = make_agent(wait_for_stop)
    thread, results = in_thread(agent)
    workers = agent.workers
    assert isinstance(workers, ThreadWorkers)
    wait_until("workers", lambda: len(workers.running) == 2)
    agent.handle_signal(signal.SIGTERM)
    result = end(thread, results)
    assert (result.state, result.exit_code) == (WorkerState.STOPPED, 143)


@pytest.mark.parametrize(
    ("error", "state", "text"),
    [
        (ConfigError("no such GPU"), WorkerState.FAILED, "no such GPU"),
        (WorkerStartError("no memory"), WorkerState.SUCCEEDED, "this node is done"),
        (ValueError("a bug"), WorkerState.FAILED, "a bug"),
    ],
)
def test_a_start_that_raises(error: Exception, state: WorkerState, text: str) -> None:
    agent = make_agent(lambda _: 0)
    assert isinstance(agent.workers, ThreadWorkers)
    agent.workers.error = error
    result = run(agent)
    assert result.state is state
    assert text in result.reason


class UploadingWorkers(ThreadWorkers):
    """Workers whose uploads do not end until they are given up."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.is_waiting = threading.Event()
        self.on_done: Callable[[], None] | None = None

    def finish(self, until: float, on_done: Callable[[], None]) -> None:
        del until
        if self.on_done is not None:
            return self.on_done()
        self.on_done = on_done
        return self.is_waiting.set()


def test_the_third_sigint_gives_up_uploads_also_without_a_snapshot_service() -> None:
    workers = UploadingWorkers(lambda _: 0)
    agent = ElasticAgent(WorkerSpec(Command("unused"), 1), OneNode(1), workers)
    thread, results = in_thread(agent)
    assert workers.is_waiting.wait(60)
    for _ in range(3):
        agent.handle_signal(signal.SIGINT)
    assert end(thread, results).state is WorkerState.SUCCEEDED
