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
from elasticlib.testing.agent_job import Job
from elasticlib.testing.agent_stage import Stage
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.spec import WorkerGroup

Ended = Callable[[int], None]
Fault = type[ElasticAgent] | type[LocalWorkers]
MADE: list[LocalWorkers] = []


def make_workers(kind: type[LocalWorkers] = LocalWorkers) -> LocalWorkers:
    MADE.append(kind(os.environ, start_method="spawn"))
    return MADE[-1]


class NeverSaysWhoEnded(ElasticAgent):
    def start(self, group: WorkerGroup, ended: Ended) -> None:
        del ended
        super().start(group, lambda _: None)


class SaysItOfAnother(ElasticAgent):
    def start(self, group: WorkerGroup, ended: Ended) -> None:
        super().start(group, lambda local_rank: ended(1 - local_rank))


class StartsOneTooFew(ElasticAgent):
    def start(self, group: WorkerGroup, ended: Ended) -> None:
        super().start(attrs.evolve(group, workers=group.workers[:-1]), ended)


class StartsThemAsBefore(ElasticAgent):
    first: WorkerGroup | None = None

    def start(self, group: WorkerGroup, ended: Ended) -> None:
        self.first = self.first or group
        super().start(self.first, ended)


class LetsThemOutOfItsHands(ElasticAgent):
    def start(self, group: WorkerGroup, ended: Ended) -> None:
        line = group.spec.entrypoint
        assert isinstance(line, Command)
        apart = Command("setsid", ("--wait", line.program, *line.args))
        spec = attrs.evolve(group.spec, entrypoint=apart)
        super().start(attrs.evolve(group, spec=spec), ended)


class TellsLocalRanks(ElasticAgent):
    def reap(self, local_rank: int) -> WorkerExit:
        return attrs.evolve(super().reap(local_rank), rank=local_rank)


class CallsFailureSuccess(ElasticAgent):
    def reap(self, local_rank: int) -> WorkerExit:
        return attrs.evolve(super().reap(local_rank), returncode=0)


class DoesNotForgetTheCollected(LocalWorkers):
    def running(self) -> dict[int, str]:
        return super().running() or {0: "the first", 1: "the second"}


class ForgetsWhomItHasAsked(ElasticAgent):
    def start(self, group: WorkerGroup, ended: Ended) -> None:
        ask = self.workers.stop

        def ask_and_forget(local_ranks: Collection[int], *, force: bool = False) -> None:
            ask(local_ranks, force=force)
            self.workers = make_workers()

        self.workers.stop = ask_and_forget  # type: ignore[method-assign]
        super().start(group, ended)


class KillsWithoutAsking(LocalWorkers):
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


class LeavesWhatRuns(LocalWorkers):
    def kill_and_wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class ClosesOnce(LocalWorkers):
    closed = False

    def close(self) -> None:
        super().close()
        if self.closed:
            raise AttributeError("there is nothing left to be closed")
        self.closed = True


class StartsAllAnew(LocalWorkers):
    def regroupable_ranks(self) -> set[int]:
        return set()


class LetsNobodyIn(LocalWorkers):
    def standby_ranks(self) -> dict[int, bool]:
        return {local: ready and local == 1 for local, ready in super().standby_ranks().items()}


class Raises(ElasticAgent):
    def run(self) -> RunResult:
        result = super().run()
        if result.exit_code:
            raise RuntimeError(result.reason)
        return result


class ReturnsNothing(ElasticAgent):
    def run(self) -> RunResult:
        super().run()
        return None  # type: ignore[return-value]


class KnowsNoGroup(ElasticAgent):
    def get_worker_group(self) -> None:
        return None


FAULTS = [
    (NeverSaysWhoEnded, "test_run_succeeds_if_all_workers_succeed"),
    (SaysItOfAnother, "test_run_fails_and_names_the_rank_if_no_restart_is_left"),
    (StartsOneTooFew, "test_each_worker_gets_its_ranks_and_addresses"),
    (StartsThemAsBefore, "test_failure_uses_a_restart_and_restarts_all_workers"),
    (StartsThemAsBefore, "test_repeated_or_late_exit_callback_is_ignored"),
    (LetsThemOutOfItsHands, "test_child_processes_of_a_worker_are_killed_with_it"),
    (TellsLocalRanks, "test_failure_on_one_node_restarts_both_and_both_report_the_cause"),
    (CallsFailureSuccess, "test_killed_worker_counts_as_failed"),
    (CallsFailureSuccess, "test_program_that_does_not_exist_is_reported_as_failure"),
    (DoesNotForgetTheCollected, "test_repeated_or_late_exit_callback_is_ignored"),
    (ForgetsWhomItHasAsked, "test_joining_node_restarts_workers_without_using_a_restart"),
    (KillsWithoutAsking, "test_worker_that_ignores_sigterm_is_killed_after_the_timeout"),
    (NeverKills, "test_worker_that_ignores_sigterm_is_killed_after_the_timeout"),
    (LeavesWhatRuns, "test_exception_of_workers_ends_the_run_with_its_message"),
    (ClosesOnce, "test_run_succeeds_if_all_workers_succeed"),
    (Raises, "test_program_that_does_not_exist_is_reported_as_failure"),
    (ReturnsNothing, "test_run_succeeds_if_all_workers_succeed"),
    (KnowsNoGroup, "test_each_worker_gets_its_ranks_and_addresses"),
]

SYMPTOMS = (AssertionError, FutureTimeout, RuntimeError, AttributeError, ValueError)
FUNCTIONS = (
    "test_run_succeeds_if_all_workers_succeed",
    "test_run_fails_and_names_the_rank_if_no_restart_is_left",
    "test_child_processes_of_a_worker_are_killed_with_it",
    "test_worker_that_ignores_sigterm_is_killed_after_the_timeout",
)
KEPT_FAULTS = (StartsAllAnew, LetsNobodyIn)
PATIENCE, MOMENT = 1.2, 0.3
"""Of those who keep no promise, which nobody waits for longer than need be."""


def play(fault: Fault, claim: str, stage: Stage, patience: float, moment: float) -> None:
    kept = hasattr(RegroupContract, claim)
    contract = RegroupContract() if kept else AgentContract()
    contract.patience, contract.moment = patience, moment

    def make(request: AgentRequest) -> ElasticAgent:
        agents, runners = (
            (ElasticAgent, fault) if issubclass(fault, LocalWorkers) else (fault, LocalWorkers)
        )
        workers = make_workers(runners)
        return agents(request.spec, request.handler, workers, **request.settings)

    with contextlib.closing(Job(make, stage, patience, moment)) as job:
        getattr(contract, claim)(job)


def end_all_who_use(folder: Path) -> None:
    """Whatever the fault is, nothing of it outlives its test."""
    for thread in threading.enumerate():
        if thread.name == "contract-agent":
            # It may still be on its way up the ladder, with the same workers.
            thread.join(20.0)
    while MADE:
        # Without the fault, if it is one of those who run the workers.
        MADE[-1].__class__ = LocalWorkers
        MADE.pop().close()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            opened = [os.readlink(link) for link in (process / "fd").iterdir()]
            ours = any(name.startswith(str(folder)) for name in opened)
            if ours and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fault", "claim"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_contract_finds(fault: Fault, claim: str, tmp_path: Path) -> None:
    with contextlib.closing(Stage(tmp_path, PATIENCE)) as stage:
        try:
            with pytest.raises(SYMPTOMS):
                play(fault, claim, stage, PATIENCE, MOMENT)
        finally:
            end_all_who_use(tmp_path)


@pytest.mark.parametrize("fault", KEPT_FAULTS)
def test_and_those_of_workers_that_are_kept(fault: Fault, tmp_path: Path) -> None:
    claim, patience = "test_surviving_worker_regroups_and_new_worker_is_admitted", 8 * PATIENCE
    with contextlib.closing(Stage(tmp_path, patience, functions=True)) as stage:
        try:
            with pytest.raises(SYMPTOMS):
                play(fault, claim, stage, patience, MOMENT)
        finally:
            end_all_who_use(tmp_path)


@pytest.mark.parametrize("claim", FUNCTIONS)
def test_and_finds_none_in_our_own_whose_workers_are_functions(claim: str, tmp_path: Path) -> None:
    patience, moment = AgentContract.patience, AgentContract.moment
    with contextlib.closing(Stage(tmp_path, patience, functions=True)) as stage:
        play(ElasticAgent, claim, stage, patience, moment)
