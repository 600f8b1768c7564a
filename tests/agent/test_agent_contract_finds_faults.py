"""The contract suite finds faults: each agent here breaks one promise, and its tests fail."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import attrs
import pytest

from elasticlib import Command, ElasticAgent, LocalWorkers, RunResult
from elasticlib.testing import AgentContract, AgentRequest, RegroupContract
from elasticlib.testing.agent_job import AgentJob
from elasticlib.testing.worker_harness import WorkerHarness
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.spec import WorkerGroup

OnExit = Callable[[int], None]
Fault = type[ElasticAgent] | type[LocalWorkers]
CREATED: list[LocalWorkers] = []


def make_workers(kind: type[LocalWorkers] = LocalWorkers) -> LocalWorkers:
    CREATED.append(kind(os.environ, start_method="spawn"))
    return CREATED[-1]


class ReportsNoExit(ElasticAgent):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        del on_exit
        super().start(group, lambda _: None)


class ReportsExitOfOtherWorker(ElasticAgent):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        super().start(group, lambda local_rank: on_exit(1 - local_rank))


class StartsTooFewWorkers(ElasticAgent):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        super().start(attrs.evolve(group, workers=group.workers[:-1]), on_exit)


class StartsFirstGenerationAgain(ElasticAgent):
    first: WorkerGroup | None = None

    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        self.first = self.first or group
        super().start(self.first, on_exit)


class StartsWorkersInOtherSession(ElasticAgent):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        entrypoint = group.spec.entrypoint
        assert isinstance(entrypoint, Command)
        command = Command("setsid", ("--wait", entrypoint.program, *entrypoint.args))
        spec = attrs.evolve(group.spec, entrypoint=command)
        super().start(attrs.evolve(group, spec=spec), on_exit)


class ReportsLocalRanks(ElasticAgent):
    def reap(self, local_rank: int) -> WorkerExit:
        return attrs.evolve(super().reap(local_rank), rank=local_rank)


class ReportsFailureAsSuccess(ElasticAgent):
    def reap(self, local_rank: int) -> WorkerExit:
        return attrs.evolve(super().reap(local_rank), returncode=0)


class KeepsReapedWorkers(LocalWorkers):
    def running(self) -> dict[int, str]:
        return super().running() or {0: "the first", 1: "the second"}


class ForgetsStoppedWorkers(ElasticAgent):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        stop = self.workers.stop

        def stop_and_forget(local_ranks: Collection[int], *, force: bool = False) -> None:
            stop(local_ranks, force=force)
            self.workers = make_workers()

        self.workers.stop = stop_and_forget  # type: ignore[method-assign]
        super().start(group, on_exit)


class KillsWithoutSigterm(LocalWorkers):
    def stop(self, local_ranks: Collection[int], *, force: bool = False) -> None:
        del force
        super().stop(local_ranks, force=True)


class NeverKills(LocalWorkers):
    def stop(self, local_ranks: Collection[int], *, force: bool = False) -> None:
        del force
        super().stop(local_ranks)

    def kill_and_wait(self) -> None:
        self.__class__ = LocalWorkers  # type: ignore[assignment]
        self.kill_and_wait()


class LeavesWorkersRunning(LocalWorkers):
    def kill_and_wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class FailsOnSecondClose(LocalWorkers):
    closed = False

    def close(self) -> None:
        super().close()
        if self.closed:
            raise AttributeError("closed twice")
        self.closed = True


class RestartsAllWorkers(LocalWorkers):
    def regroupable_ranks(self) -> set[int]:
        return set()


class AdmitsNoWorker(LocalWorkers):
    def standby_ranks(self) -> dict[int, bool]:
        return {local: ready and local == 1 for local, ready in super().standby_ranks().items()}


class RaisesOnFailure(ElasticAgent):
    def run(self) -> RunResult:
        result = super().run()
        if result.exit_code:
            raise RuntimeError(result.reason)
        return result


class ReturnsNothing(ElasticAgent):
    def run(self) -> RunResult:
        super().run()
        return None  # type: ignore[return-value]


class ReturnsNoGroup(ElasticAgent):
    def get_worker_group(self) -> None:
        return None


FAULTS = [
    (ReportsNoExit, "test_run_succeeds_if_all_workers_succeed"),
    (ReportsExitOfOtherWorker, "test_run_fails_and_names_the_rank_if_no_restart_is_left"),
    (StartsTooFewWorkers, "test_each_worker_gets_its_ranks_and_addresses"),
    (StartsFirstGenerationAgain, "test_failure_uses_a_restart_and_restarts_all_workers"),
    (StartsFirstGenerationAgain, "test_repeated_or_late_exit_callback_is_ignored"),
    (StartsWorkersInOtherSession, "test_child_processes_that_workers_leave_are_killed_at_the_end"),
    (ReportsLocalRanks, "test_failure_on_one_node_restarts_both_and_both_report_the_cause"),
    (ReportsFailureAsSuccess, "test_killed_worker_counts_as_failed"),
    (ReportsFailureAsSuccess, "test_program_that_does_not_exist_is_reported_as_failure"),
    (KeepsReapedWorkers, "test_repeated_or_late_exit_callback_is_ignored"),
    (ForgetsStoppedWorkers, "test_joining_node_restarts_workers_without_using_a_restart"),
    (KillsWithoutSigterm, "test_worker_that_ignores_sigterm_is_killed_after_the_timeout"),
    (NeverKills, "test_worker_that_ignores_sigterm_is_killed_after_the_timeout"),
    (LeavesWorkersRunning, "test_exception_of_workers_ends_the_run_with_its_message"),
    (FailsOnSecondClose, "test_run_succeeds_if_all_workers_succeed"),
    (RaisesOnFailure, "test_program_that_does_not_exist_is_reported_as_failure"),
    (ReturnsNothing, "test_run_succeeds_if_all_workers_succeed"),
    (ReturnsNoGroup, "test_each_worker_gets_its_ranks_and_addresses"),
]

SYMPTOMS = (AssertionError, FutureTimeout, RuntimeError, AttributeError, ValueError)
TESTS_WITH_FUNCTIONS = (
    "test_run_succeeds_if_all_workers_succeed",
    "test_run_fails_and_names_the_rank_if_no_restart_is_left",
    "test_child_processes_that_workers_leave_are_killed_at_the_end",
    "test_worker_that_ignores_sigterm_is_killed_after_the_timeout",
)
REGROUP_FAULTS = (RestartsAllWorkers, AdmitsNoWorker)
# Short, because a test of a faulty agent often waits until its timeout.
TIMEOUT_S, EXIT_TIMEOUT_S = 1.2, 0.3


def run_contract_test(
    fault: Fault, test: str, harness: WorkerHarness, timeout_s: float, exit_timeout_s: float
) -> None:
    can_regroup = hasattr(RegroupContract, test)
    contract = RegroupContract() if can_regroup else AgentContract()
    contract.timeout_s, contract.exit_timeout_s = timeout_s, exit_timeout_s

    def make(request: AgentRequest) -> ElasticAgent:
        if issubclass(fault, LocalWorkers):
            agent_class, workers = ElasticAgent, make_workers(fault)
        else:
            agent_class, workers = fault, make_workers()
        return agent_class(request.spec, request.handler, workers, **request.settings)

    with contextlib.closing(AgentJob(make, harness, timeout_s, exit_timeout_s)) as job:
        getattr(contract, test)(job)


def kill_processes_that_use(directory: Path) -> None:
    """Stop the threads and processes that a faulty agent has not stopped."""
    for thread in threading.enumerate():
        if thread.name == "contract-agent":
            # The thread may still be in the stop procedure of the same workers.
            thread.join(20.0)
    while CREATED:
        CREATED[-1].__class__ = LocalWorkers  # remove a fault of the workers
        CREATED.pop().close()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            open_files = [os.readlink(link) for link in (process / "fd").iterdir()]
            is_left = any(name.startswith(str(directory)) for name in open_files)
            if is_left and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fault", "test"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_contract_finds_a_fault(fault: Fault, test: str, tmp_path: Path) -> None:
    with contextlib.closing(WorkerHarness(tmp_path, TIMEOUT_S)) as harness:
        try:
            with pytest.raises(SYMPTOMS):
                run_contract_test(fault, test, harness, TIMEOUT_S, EXIT_TIMEOUT_S)
        finally:
            kill_processes_that_use(tmp_path)


@pytest.mark.parametrize("fault", REGROUP_FAULTS)
def test_contract_finds_a_fault_of_workers_that_regroup(fault: Fault, tmp_path: Path) -> None:
    test, timeout_s = "test_surviving_worker_regroups_and_new_worker_is_admitted", 8 * TIMEOUT_S
    harness = WorkerHarness(tmp_path, timeout_s, use_functions=True)
    with contextlib.closing(harness):
        try:
            with pytest.raises(SYMPTOMS):
                run_contract_test(fault, test, harness, timeout_s, EXIT_TIMEOUT_S)
        finally:
            kill_processes_that_use(tmp_path)


@pytest.mark.parametrize("test", TESTS_WITH_FUNCTIONS)
def test_correct_agent_whose_workers_are_functions_passes(test: str, tmp_path: Path) -> None:
    timeout_s, exit_timeout_s = AgentContract.timeout_s, AgentContract.exit_timeout_s
    harness = WorkerHarness(tmp_path, timeout_s, use_functions=True)
    with contextlib.closing(harness):
        run_contract_test(ElasticAgent, test, harness, timeout_s, exit_timeout_s)
