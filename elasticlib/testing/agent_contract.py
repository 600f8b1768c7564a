"""Contract of an agent as pytest suites.

Subclass `AgentContract` in a test file and override the fixture `make_agent`. The suite runs your
agent with workers of its own. It checks the results, and that no process is left.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from ..agent.messages import Effect, StartWorkers, WorkerExited
from ..constants import DRAINED_EXIT_CODE
from ..options import AgentOptions
from ..rendezvous.interface import Report, ReportKind
from ..workers.exits import WorkerExit
from ..workers.spec import WorkerState
from .agent_job import WORKERS_PER_NODE, AgentJob, Execute, MakeAgent
from .waiting import wait_until
from .worker_behavior import FAIL_EXIT_CODE, WorkerBehavior
from .worker_harness import Scenario, WorkerHarness, expected_variables

SUCCEED, FAIL, RUN = WorkerBehavior.SUCCEED, WorkerBehavior.FAIL, WorkerBehavior.RUN
IGNORE_SIGTERM, REGROUP = WorkerBehavior.IGNORE_SIGTERM, WorkerBehavior.REGROUP


class AgentSuite:
    """Fixtures of the contracts below.

    A node has two workers. They are shell scripts, or Python functions if `use_functions` is True,
    and report through named pipes in a directory of this machine. If your workers cannot reach
    these pipes, override the fixture `harness`.
    """

    timeout_s = 20.0  # seconds after which an expected event counts as missing
    exit_timeout_s = 1.0  # a worker exits so soon after SIGTERM, and a killed process disappears

    use_functions = False

    @pytest.fixture
    def make_agent(self) -> MakeAgent:
        """Override: return a function that creates an agent for an `AgentRequest`.

        Usually `lambda request: MyAgent(request.spec, request.handler, **request.settings)`.
        """
        raise NotImplementedError("override the fixture make_agent")

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[WorkerHarness]:
        """Entry points and reports of the workers.

        Override it for workers that cannot open a named pipe on this machine.
        """
        harness = WorkerHarness(tmp_path, self.timeout_s, use_functions=self.use_functions)
        with contextlib.closing(harness):
            yield harness

    @pytest.fixture
    def job(self, make_agent: MakeAgent, harness: WorkerHarness) -> Iterator[AgentJob]:
        """A job. After the test, its agents are stopped, and no process may be left."""
        job = AgentJob(make_agent, harness, self.timeout_s, self.exit_timeout_s)
        with contextlib.closing(job):
            yield job


class AgentContract(AgentSuite):
    """The promises of `ElasticAgent` and `Workers`. The name of a test states the promise."""

    # Success

    def test_run_succeeds_if_all_workers_succeed(self, job: AgentJob) -> None:
        node = job.node(Scenario.of(SUCCEED, SUCCEED))
        assert node.agent.get_worker_group() is None
        result = node.run()
        assert (result.state, result.exit_code) == (WorkerState.SUCCEEDED, 0), result.reason
        assert (result.generation, result.restarts) == (1, 0)
        assert result.return_values == {
            rank: job.harness.return_value(rank) for rank in range(WORKERS_PER_NODE)
        }
        assert result.failures == {}
        group = node.agent.get_worker_group()
        assert group is not None
        assert [worker.rank for worker in group.workers] == [0, 1]

    def test_each_worker_gets_its_ranks_and_addresses(self, job: AgentJob) -> None:
        scenario = Scenario.of(*[SUCCEED] * (2 * WORKERS_PER_NODE))
        nodes = [job.node(scenario, nodes=(2, 2)) for _ in range(2)]
        for node in nodes:
            node.start()
        results = [node.result() for node in nodes]
        assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
        groups = [node.agent.get_worker_group() for node in nodes]
        expected = [
            expected_variables(group, local)
            for group in groups
            if group
            for local in range(WORKERS_PER_NODE)
        ]
        assert sorted(job.harness.started_workers(1)) == sorted(expected)

    # Failure

    def test_failure_uses_a_restart_and_restarts_all_workers(self, job: AgentJob) -> None:
        result = job.node(Scenario.of(RUN, FAIL), max_restarts=1).run()
        assert result.state is WorkerState.SUCCEEDED, result.reason
        assert (result.generation, result.restarts) == (2, 1)
        assert len(job.harness.started_workers(2)) == WORKERS_PER_NODE

    def test_run_fails_and_names_the_rank_if_no_restart_is_left(self, job: AgentJob) -> None:
        result = job.node(Scenario.of(RUN, FAIL, later=(RUN, FAIL)), max_restarts=1).run()
        assert (result.state, result.exit_code) == (WorkerState.FAILED, 1)
        assert (result.generation, result.restarts) == (2, 1)
        assert "rank 1" in result.reason
        assert list(result.failures) == [1], "workers that the agent stopped count as failed"
        failure = result.failures[1]
        assert (failure.rank, failure.local_rank, failure.returncode) == (1, 1, FAIL_EXIT_CODE)
        assert result.root_cause is not None
        assert result.root_cause.rank == 1

    def test_killed_worker_counts_as_failed(self, job: AgentJob) -> None:
        result = job.node(Scenario.of(RUN, WorkerBehavior.KILL_SELF)).run()
        assert result.state is WorkerState.FAILED
        assert list(result.failures) == [1]
        assert "rank 1" in result.reason

    def test_program_that_does_not_exist_is_reported_as_failure(self, job: AgentJob) -> None:
        result = job.node(job.harness.missing_entrypoint()).run()
        assert result.state is WorkerState.FAILED
        assert "rank" in result.reason

    def test_start_that_fails_halfway_uses_a_restart_and_leaves_no_process(
        self, job: AgentJob
    ) -> None:
        # A shell may miss a signal that arrives just before it waits.
        scenario = Scenario.of(RUN, RUN, later=(RUN, RUN))
        node = job.node(scenario, max_restarts=1, shutdown_timeout=self.exit_timeout_s)
        generations = itertools.count(1)

        def start_one_only(execute: Execute, effect: Effect) -> None:
            if not isinstance(effect, StartWorkers):
                return execute(effect)
            execute(attrs.evolve(effect, members=effect.members[:1]))
            job.harness.wait_until_started(next(generations), 1)
            missing = WorkerExit(1, 1, 0, 1, reason="no memory for another worker")
            return node.agent.post(WorkerExited(effect.start, missing))

        node.intercept(start_one_only)
        result = node.run()
        assert (result.state, result.generation) == (WorkerState.FAILED, 2)
        assert "could not be started: no memory for another worker" in result.reason
        assert result.root_cause is not None
        assert result.root_cause.rank == 1
        assert "no memory for another worker" in result.root_cause.summary

    # Stopping

    def test_worker_that_ignores_sigterm_is_killed_after_the_timeout(self, job: AgentJob) -> None:
        node = job.node(Scenario.of(RUN, IGNORE_SIGTERM), shutdown_timeout=self.exit_timeout_s)
        node.start()
        job.harness.wait_until_started(1, WORKERS_PER_NODE)
        node.handler.set_closed()
        result = node.result()
        assert result.state is WorkerState.FAILED
        assert "survived SIGKILL" not in result.reason
        assert job.harness.terminated_ranks(1) == {0, 1}, "a worker was killed without SIGTERM"

    def test_child_processes_that_workers_leave_are_killed_at_the_end(self, job: AgentJob) -> None:
        scenario = Scenario.of(WorkerBehavior.LEAVE_CHILD, WorkerBehavior.LEAVE_CHILD)
        # Those of workers that have succeeded may go on for this time.
        result = job.node(scenario, options=AgentOptions(checkpoint_grace=0.1)).run()
        assert result.state is WorkerState.SUCCEEDED, result.reason
        assert not job.harness.is_running(1)

    @pytest.mark.parametrize(
        ("number", "state", "code"),
        [
            (signal.SIGUSR1, WorkerState.STOPPED, 128 + signal.SIGUSR1),
            (signal.SIGUSR2, WorkerState.DRAINED, DRAINED_EXIT_CODE),
        ],
        ids=["stopped", "drained"],
    )
    def test_signal_stops_or_drains_the_node(
        self, job: AgentJob, number: int, state: WorkerState, code: int
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            pytest.skip("Python runs signal handlers only in the main thread")
        options = AgentOptions(stop_signals=(signal.SIGUSR1,), drain_signals=(signal.SIGUSR2,))
        node = job.node(Scenario.of(RUN, RUN), options=options)

        def send_signal() -> None:
            job.harness.wait_until_started(1, WORKERS_PER_NODE)
            # The kernel may also choose a thread like this one, whose signal does not interrupt the
            # blocking calls of the main thread.
            signal.pthread_kill(threading.get_ident(), number)

        # The signal must not kill the tests if the agent does not handle it.
        before = signal.signal(number, lambda *_: None)
        try:
            result = node.run_in_current_thread(send_signal)
        finally:
            signal.signal(number, before)
        assert (result.state, result.exit_code, result.signal) == (state, code, number)
        assert job.harness.terminated_ranks(1) == {0, 1}

    # Several nodes

    def test_joining_node_restarts_workers_without_using_a_restart(self, job: AgentJob) -> None:
        scenario = Scenario.of(RUN, IGNORE_SIGTERM, later=(SUCCEED,) * 4)
        first, second = (
            job.node(scenario, nodes=(1, 2), shutdown_timeout=self.exit_timeout_s) for _ in range(2)
        )
        first.start()
        job.harness.wait_until_started(1, WORKERS_PER_NODE)
        second.start()
        job.harness.wait_until_started(2, 1)
        assert not job.harness.is_running(1), "new workers were started before the old ones exited"
        results = [first.result(), second.result()]
        assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
        assert [(result.generation, result.restarts) for result in results] == [(2, 0)] * 2
        assert [sorted(result.return_values) for result in results] == [[0, 1], [2, 3]]
        assert len(job.harness.started_workers(2)) == 2 * WORKERS_PER_NODE

    def test_failure_on_one_node_restarts_both_and_both_report_the_cause(
        self, job: AgentJob
    ) -> None:
        behaviors = (RUN, RUN, RUN, FAIL)
        scenario = Scenario.of(*behaviors, later=behaviors)
        nodes = [job.node(scenario, nodes=(2, 2), max_restarts=1) for _ in range(2)]
        for node in nodes:
            node.start()
        results = [node.result() for node in nodes]
        assert [result.state for result in results] == [WorkerState.FAILED] * 2
        assert [(result.generation, result.restarts) for result in results] == [(2, 1)] * 2
        assert [result.root_cause and result.root_cause.rank for result in results] == [3, 3]
        assert sorted(rank for result in results for rank in result.failures) == [3]

    # Errors in the agent or its workers

    def test_repeated_or_late_exit_callback_is_ignored(self, job: AgentJob) -> None:
        node = job.node(Scenario.of(RUN, FAIL), max_restarts=1)
        starts: list[int] = []

        def repeat_exits(execute: Execute, effect: Effect) -> None:
            execute(effect)
            if isinstance(effect, StartWorkers):
                for start in starts:
                    post_exits(start, 0, 1)
                starts.append(effect.start)
            elif isinstance(effect, Report) and effect.kind is ReportKind.FAILURE:
                post_exits(starts[-1], 1)

        def post_exits(start: int, *local_ranks: int) -> None:
            for local in local_ranks:
                exit_ = WorkerExit(local, local, 1, FAIL_EXIT_CODE)
                node.agent.post(WorkerExited(start, exit_))

        node.intercept(repeat_exits)
        result = node.run()
        assert (result.state, result.generation) == (WorkerState.SUCCEEDED, 2), result.reason
        assert sorted(result.return_values) == [0, 1]
        post_exits(starts[-1], 0, 1)

    def test_exception_of_an_effect_ends_the_run_with_its_message(self, job: AgentJob) -> None:
        node = job.node(Scenario.of(RUN, RUN), shutdown_timeout=self.exit_timeout_s)

        def start_and_fail(execute: Execute, effect: Effect) -> None:
            execute(effect)
            if isinstance(effect, StartWorkers):
                # The workers are running, and must not be left running.
                job.harness.wait_until_started(1, WORKERS_PER_NODE)
                raise RuntimeError("cannot watch the workers")

        node.intercept(start_and_fail)
        result = node.run()
        assert result.state is WorkerState.FAILED
        assert result.reason == "RuntimeError: cannot watch the workers"


class RegroupContract(AgentSuite):
    """The promises of `Workers` that can regroup.

    The workers must be able to reach the agent under test through `elasticlib.context()`.
    """

    use_functions = True

    def test_surviving_worker_regroups_and_new_worker_is_admitted(self, job: AgentJob) -> None:
        node = job.node(
            Scenario.of(WorkerBehavior.KILL_SELF_ON_FILE, REGROUP, later=(REGROUP, REGROUP)),
            max_restarts=1,
        )
        node.start()
        (first,) = job.harness.wait_until_regrouped(1, 1).values()
        job.harness.create_kill_file()
        (second,) = job.harness.wait_until_regrouped(2, 1).items()
        all_workers = job.harness.wait_until_regrouped(3, WORKERS_PER_NODE)
        result = node.result()
        assert (result.state, result.generation) == (WorkerState.SUCCEEDED, 3), result.reason
        assert result.restarts == 1, "admitting a worker used a restart"
        assert second[1] == first, "the surviving worker was restarted"
        assert second[0][:4] == ("0", "1", "1", str(WORKERS_PER_NODE)), (
            "the surviving worker is not in a group of one"
        )
        assert first in all_workers.values()
        assert len(set(all_workers.values())) == WORKERS_PER_NODE
        group = node.agent.get_worker_group()
        assert group is not None
        assert set(all_workers) == {
            expected_variables(group, local) for local in range(WORKERS_PER_NODE)
        }
        assert result.return_values == {rank: rank for rank in range(WORKERS_PER_NODE)}

    def test_no_standby_worker_is_left_at_the_end(self, job: AgentJob) -> None:
        scenario = Scenario.of(*[REGROUP] * (2 * WORKERS_PER_NODE))
        node, other = (job.node(scenario, nodes=(2, 2)) for _ in range(2))
        node.start()
        other.start()
        job.harness.wait_until_regrouped(1, 2 * WORKERS_PER_NODE)
        other.handler.shutdown()
        wait_until(
            "workers that have left their group, and are ready for another one",
            lambda: (
                sum(worker.is_ready for worker in node.agent.view().values()) == WORKERS_PER_NODE
            ),
            self.timeout_s,
        )
        node.handler.set_closed()
        results = [node.result(), other.result()]
        assert [result.state for result in results] == [WorkerState.FAILED] * 2
        assert not job.harness.is_running(1)
