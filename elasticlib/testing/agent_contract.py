"""Contract of an agent as pytest suites.

Subclass `AgentContract` in a test file and override the fixture `make_agent`. The suite runs your
agent with workers of its own. It checks the results, and that no process is left.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..agent.options import AgentOptions
from ..defaults import DEFAULT_DRAIN_EXIT_CODE
from ..errors import WorkerStartError
from ..workers.exits import WorkerExit
from ..workers.spec import WorkerGroup, WorkerState
from .agent_acts import FAIL_EXIT_CODE, Act
from .agent_job import WORKERS, Job, MakeAgent
from .agent_stage import Scene, Stage, place
from .waiting import wait_until

SUCCEED, FAIL, STAY, KEEP = Act.SUCCEED, Act.FAIL, Act.STAY, Act.KEEP


class AgentSuite:
    """Fixtures of the contracts below.

    A node has two workers. They are shell scripts, or Python functions if `functions` is True, and
    report through named pipes in a directory of this machine. If your workers cannot reach these
    pipes, override the fixture `stage`.
    """

    patience = 20.0  # seconds after which an expected event counts as missing
    moment = 1.0  # seconds in which a worker exits after SIGTERM, and a killed process disappears

    functions = False

    @pytest.fixture
    def make_agent(self) -> MakeAgent:
        """Override: a callable that makes an agent for an `AgentRequest`.

        Usually `lambda request: MyAgent(request.spec, request.handler, **request.settings)`.
        """
        raise NotImplementedError("override the fixture make_agent")

    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[Stage]:
        """Directory of the pipes. Override it for workers that cannot reach a directory here."""
        with contextlib.closing(Stage(tmp_path, self.patience, functions=self.functions)) as stage:
            yield stage

    @pytest.fixture
    def job(self, make_agent: MakeAgent, stage: Stage) -> Iterator[Job]:
        """A job. After the test, its agents are stopped, and no process may be left."""
        with contextlib.closing(Job(make_agent, stage, self.patience, self.moment)) as job:
            yield job


class AgentContract(AgentSuite):
    """The promises of `ElasticAgent` and `Workers`. The name of a test states the promise."""

    # Success

    def test_run_succeeds_if_all_workers_succeed(self, job: Job) -> None:
        node = job.node(Scene.of(SUCCEED, SUCCEED))
        assert node.agent.get_worker_group() is None
        result = node.runs()
        assert (result.state, result.exit_code) == (WorkerState.SUCCEEDED, 0), result.reason
        assert (result.generation, result.restarts) == (1, 0)
        assert result.return_values == {rank: job.stage.value(rank) for rank in range(WORKERS)}
        assert result.failures == {}
        group = node.agent.get_worker_group()
        assert group is not None
        assert [worker.rank for worker in group.workers] == [0, 1]

    def test_each_worker_gets_its_ranks_and_addresses(self, job: Job) -> None:
        scene = Scene.of(*[SUCCEED] * (2 * WORKERS))
        nodes = [job.node(scene, nodes=(2, 2)) for _ in range(2)]
        for node in nodes:
            node.begin()
        results = [node.result() for node in nodes]
        assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
        groups = [node.agent.get_worker_group() for node in nodes]
        expected = [place(group, local) for group in groups if group for local in range(WORKERS)]
        assert sorted(job.stage.up(1)) == sorted(expected)

    # Failure

    def test_failure_uses_a_restart_and_restarts_all_workers(self, job: Job) -> None:
        result = job.node(Scene.of(STAY, FAIL), max_restarts=1).runs()
        assert result.state is WorkerState.SUCCEEDED, result.reason
        assert (result.generation, result.restarts) == (2, 1)
        assert len(job.stage.up(2)) == WORKERS

    def test_run_fails_and_names_the_rank_if_no_restart_is_left(self, job: Job) -> None:
        result = job.node(Scene.of(STAY, FAIL, later=(STAY, FAIL)), max_restarts=1).runs()
        assert (result.state, result.exit_code) == (WorkerState.FAILED, 1)
        assert (result.generation, result.restarts) == (2, 1)
        assert "rank 1" in result.reason
        assert list(result.failures) == [1], "only who failed has failed, and not who was stopped"
        failure = result.failures[1]
        assert (failure.rank, failure.local_rank, failure.returncode) == (1, 1, FAIL_EXIT_CODE)
        assert result.root_cause is not None
        assert result.root_cause.rank == 1

    def test_killed_worker_counts_as_failed(self, job: Job) -> None:
        result = job.node(Scene.of(STAY, Act.DIE)).runs()
        assert result.state is WorkerState.FAILED
        assert list(result.failures) == [1]
        assert "rank 1" in result.reason

    def test_program_that_does_not_exist_is_reported_as_failure(self, job: Job) -> None:
        result = job.node(job.stage.missing()).runs()
        assert result.state is WorkerState.FAILED
        assert "rank" in result.reason

    def test_start_that_fails_halfway_uses_a_restart_and_leaves_no_process(self, job: Job) -> None:
        node = job.node(Scene.of(STAY, STAY, later=(STAY, STAY)), max_restarts=1)
        start = node.agent.start

        def start_and_fail(group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
            start(group, on_exit)
            job.stage.until_up(group.generation, WORKERS)
            raise WorkerStartError("there is no room for one more")

        node.agent.start = start_and_fail  # type: ignore[method-assign]
        result = node.runs()
        assert (result.state, result.generation) == (WorkerState.FAILED, 2)
        assert "there is no room for one more" in result.reason
        assert result.root_cause is not None
        assert result.root_cause.summary == "there is no room for one more"

    # Stopping

    def test_worker_that_ignores_sigterm_is_killed_after_the_timeout(self, job: Job) -> None:
        node = job.node(Scene.of(STAY, Act.STAY_DEAF), grace=self.moment)
        node.begin()
        job.stage.until_up(1, WORKERS)
        node.handler.set_closed()
        result = node.result()
        assert result.state is WorkerState.FAILED
        assert "survived SIGKILL" not in result.reason
        assert job.stage.asked(1) == {0, 1}, "each worker is asked before it is killed"

    def test_child_processes_of_a_worker_are_killed_with_it(self, job: Job) -> None:
        result = job.node(Scene.of(Act.LEAVE_CHILD, Act.LEAVE_CHILD)).runs()
        assert result.state is WorkerState.SUCCEEDED, result.reason
        assert not job.stage.busy(1)

    @pytest.mark.parametrize(
        ("number", "state", "code"),
        [
            (signal.SIGUSR1, WorkerState.STOPPED, 128 + signal.SIGUSR1),
            (signal.SIGUSR2, WorkerState.DRAINED, DEFAULT_DRAIN_EXIT_CODE),
        ],
        ids=["ended", "drained"],
    )
    def test_signal_stops_or_drains_the_node(
        self, job: Job, number: int, state: WorkerState, code: int
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            pytest.skip("Python lets only the main thread hear signals")
        options = AgentOptions(stop_signals=(signal.SIGUSR1,), drain_signals=(signal.SIGUSR2,))
        node = job.node(Scene.of(STAY, STAY), options=options)

        def ask() -> None:
            job.stage.until_up(1, WORKERS)
            # To this thread, as the kernel may: it does not interrupt what the main one waits in.
            signal.pthread_kill(threading.get_ident(), number)

        # The signal must not kill the tests if the agent does not handle it.
        before = signal.signal(number, lambda *_: None)
        try:
            result = node.runs_here(ask)
        finally:
            signal.signal(number, before)
        assert (result.state, result.exit_code, result.signal) == (state, code, number)
        assert job.stage.asked(1) == {0, 1}

    # Several nodes

    def test_joining_node_restarts_workers_without_using_a_restart(self, job: Job) -> None:
        scene = Scene.of(STAY, Act.STAY_DEAF, later=(SUCCEED,) * 4)
        first, second = (job.node(scene, nodes=(1, 2), grace=self.moment) for _ in range(2))
        first.begin()
        job.stage.until_up(1, WORKERS)
        second.begin()
        job.stage.until_up(2, 1)
        assert not job.stage.busy(1), "workers were started before those they replace had ended"
        results = [first.result(), second.result()]
        assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
        assert [(result.generation, result.restarts) for result in results] == [(2, 0)] * 2
        assert [sorted(result.return_values) for result in results] == [[0, 1], [2, 3]]
        assert len(job.stage.up(2)) == 2 * WORKERS

    def test_failure_on_one_node_restarts_both_and_both_report_the_cause(self, job: Job) -> None:
        acts = (STAY, STAY, STAY, FAIL)
        scene = Scene.of(*acts, later=acts)
        nodes = [job.node(scene, nodes=(2, 2), max_restarts=1) for _ in range(2)]
        for node in nodes:
            node.begin()
        results = [node.result() for node in nodes]
        assert [result.state for result in results] == [WorkerState.FAILED] * 2
        assert [(result.generation, result.restarts) for result in results] == [(2, 1)] * 2
        assert [result.root_cause and result.root_cause.rank for result in results] == [3, 3]
        assert sorted(rank for result in results for rank in result.failures) == [3]

    # Errors in the agent or its workers

    def test_repeated_or_late_exit_callback_is_ignored(self, job: Job) -> None:
        node = job.node(Scene.of(STAY, FAIL), max_restarts=1)
        start, late = node.agent.start, []

        def start_with_echo(group: WorkerGroup, on_exit: Callable[[int], None]) -> None:
            def twice(local_rank: int) -> None:
                on_exit(local_rank)
                threading.Thread(target=on_exit, args=(local_rank,)).start()

            start(group, twice)
            late.append(on_exit)
            for report in late[:-1]:
                for local_rank in range(WORKERS):
                    report(local_rank)

        node.agent.start = start_with_echo  # type: ignore[method-assign]
        result = node.runs()
        assert (result.state, result.generation) == (WorkerState.SUCCEEDED, 2), result.reason
        assert sorted(result.return_values) == [0, 1]
        late[-1](0)

    def test_exception_of_workers_ends_the_run_with_its_message(self, job: Job) -> None:
        node = job.node(Scene.of(STAY, FAIL), max_restarts=1)

        def collect(local_rank: int) -> WorkerExit:
            # A worker is running that could be left.
            job.stage.until_up(1, WORKERS)
            raise RuntimeError(f"where worker {local_rank} ran, there is fire")

        node.agent.reap = collect  # type: ignore[method-assign]
        result = node.runs()
        assert result.state is WorkerState.FAILED
        assert result.reason == "RuntimeError: where worker 1 ran, there is fire"


class RegroupContract(AgentSuite):
    """The promises of `Workers` that can regroup.

    The workers must be able to reach this agent through `elasticlib.context()`.
    """

    functions = True

    def test_surviving_worker_regroups_and_new_worker_is_admitted(self, job: Job) -> None:
        node = job.node(Scene.of(Act.DIE_ON_CUE, KEEP, later=(KEEP, KEEP)), max_restarts=1)
        node.begin()
        (first,) = job.stage.until_kept(1, 1).values()
        job.stage.cue()
        (second,) = job.stage.until_kept(2, 1).items()
        whole = job.stage.until_kept(3, WORKERS)
        result = node.result()
        assert (result.state, result.generation) == (WorkerState.SUCCEEDED, 3), result.reason
        assert result.restarts == 1, "who is let in costs nothing"
        assert second[1] == first, "the one that can be kept has gone on"
        assert second[0][:4] == ("0", "1", "1", str(WORKERS)), "in a group of its own"
        assert first in whole.values()
        assert len(set(whole.values())) == WORKERS
        group = node.agent.get_worker_group()
        assert group is not None
        assert set(whole) == {place(group, local) for local in range(WORKERS)}
        assert result.return_values == {rank: rank for rank in range(WORKERS)}

    def test_no_standby_worker_is_left_at_the_end(self, job: Job) -> None:
        scene = Scene.of(*[KEEP] * (2 * WORKERS))
        node, other = (job.node(scene, nodes=(2, 2)) for _ in range(2))
        node.begin()
        other.begin()
        job.stage.until_kept(1, 2 * WORKERS)
        other.handler.shutdown()
        spare = node.agent.workers.standby_ranks
        wait_until("the others to wait", lambda: sum(spare().values()) == WORKERS, self.patience)
        node.handler.set_closed()
        results = [node.result(), other.result()]
        assert [result.state for result in results] == [WorkerState.FAILED] * 2
        assert not job.stage.busy(1)
