"""The contract suite finds faults: each agent here breaks one promise, and its tests fail."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import attrs
import pytest

from elasticlib import Command, ElasticAgent, LocalWorkers, RunResult
from elasticlib.agent.messages import (
    ComponentFailed,
    Effect,
    Event,
    StartWorkers,
    StopWorkers,
    WorkerExited,
)
from elasticlib.options import WorkerOptions
from elasticlib.testing import AgentContract, AgentRequest, RegroupContract
from elasticlib.testing.agent_job import AgentJob
from elasticlib.testing.worker_harness import WorkerHarness
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import StopHow, WorkerView
from elasticlib.workers.spec import WorkerGroup

OnExit = Callable[[WorkerExit, str], None]
Fault = type[ElasticAgent] | type[LocalWorkers]
CREATED: list[LocalWorkers] = []


def make_workers(kind: type[LocalWorkers] = LocalWorkers) -> LocalWorkers:
    CREATED.append(kind(os.environ, options=WorkerOptions(start_method="spawn")))
    return CREATED[-1]


class ReportsNoExit(LocalWorkers):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        del on_exit
        super().start(group, lambda *_: None)


class ReportsExitOfOtherWorker(LocalWorkers):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        def report(exit_: WorkerExit, unfit: str) -> None:
            other = attrs.evolve(exit_, local_rank=1 - exit_.local_rank, rank=1 - exit_.rank)
            on_exit(other, unfit)

        super().start(group, report)


class StartsTooFewWorkers(LocalWorkers):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        super().start(attrs.evolve(group, workers=group.workers[:-1]), on_exit)


class StartsFirstGenerationAgain(LocalWorkers):
    first: WorkerGroup | None = None

    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        self.first = self.first or group
        super().start(self.first, on_exit)


class StartsWorkersInOtherSession(LocalWorkers):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        entrypoint = group.spec.entrypoint
        assert isinstance(entrypoint, Command)
        command = Command("setsid", ("--wait", entrypoint.program, *entrypoint.args))
        spec = attrs.evolve(group.spec, entrypoint=command)
        super().start(attrs.evolve(group, spec=spec), on_exit)


class ReportsLocalRanks(LocalWorkers):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        def report(exit_: WorkerExit, unfit: str) -> None:
            on_exit(attrs.evolve(exit_, rank=exit_.local_rank), unfit)

        super().start(group, report)


class ReportsFailureAsSuccess(LocalWorkers):
    def start(self, group: WorkerGroup, on_exit: OnExit) -> None:
        super().start(group, lambda exit_, unfit: on_exit(attrs.evolve(exit_, returncode=0), unfit))


class TakesLateExitsForNewOnes(ElasticAgent):
    last_start = 0

    def execute(self, effect: Effect) -> None:
        if isinstance(effect, StartWorkers):
            self.last_start = effect.start
        super().execute(effect)

    def post(self, event: Event) -> None:
        if isinstance(event, WorkerExited):
            event = attrs.evolve(event, start=self.last_start)
        super().post(event)


class ForgetsStoppedWorkers(ElasticAgent):
    start = 0

    def execute(self, effect: Effect) -> None:
        if isinstance(effect, StartWorkers):
            self.start = effect.start
        super().execute(effect)
        if isinstance(effect, StopWorkers):
            for local in effect.local_ranks:
                exit_ = WorkerExit(local, local, 1, -15, stop_was_requested=True)
                self.post(WorkerExited(self.start, exit_))
            self.workers = make_workers()


class KillsWithoutSigterm(LocalWorkers):
    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        del how
        super().stop(local_ranks, StopHow.KILL)


class NeverKills(LocalWorkers):
    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        super().stop(local_ranks, min(how, StopHow.TERM))

    def close(self, grace_s: float = 0.0) -> None:
        self.__class__ = LocalWorkers  # type: ignore[assignment]
        self.close(grace_s)


class LeavesWorkersRunning(LocalWorkers):
    def close(self, grace_s: float = 0.0) -> None:
        pass


class FailsOnSecondClose(LocalWorkers):
    closed = False

    def close(self, grace_s: float = 0.0) -> None:
        super().close(grace_s)
        if self.closed:
            raise AttributeError("closed twice")
        self.closed = True


class GoesOnAfterAnException(ElasticAgent):
    def post(self, event: Event) -> None:
        if not isinstance(event, ComponentFailed):
            super().post(event)


class RestartsAllWorkers(LocalWorkers):
    def view(self) -> Mapping[int, WorkerView]:
        return {n: attrs.evolve(one, can_regroup=False) for n, one in super().view().items()}


class AdmitsNoWorker(LocalWorkers):
    def view(self) -> Mapping[int, WorkerView]:
        return {
            n: attrs.evolve(one, is_ready=one.is_ready and n == 1)
            for n, one in super().view().items()
        }


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
    (TakesLateExitsForNewOnes, "test_repeated_or_late_exit_callback_is_ignored"),
    (ForgetsStoppedWorkers, "test_joining_node_restarts_workers_without_using_a_restart"),
    (KillsWithoutSigterm, "test_worker_that_ignores_sigterm_is_killed_after_the_timeout"),
    (NeverKills, "test_worker_that_ignores_sigterm_is_killed_after_the_timeout"),
    (LeavesWorkersRunning, "test_child_processes_that_workers_leave_are_killed_at_the_end"),
    (GoesOnAfterAnException, "test_exception_of_an_effect_ends_the_run_with_its_message"),
    (StartsTooFewWorkers, "test_start_that_fails_halfway_uses_a_restart_and_leaves_no_process"),
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
