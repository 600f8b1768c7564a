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
from elasticlib.testing import AgentContract, AgentRequest, KeptWorkersContract
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
    (NeverSaysWhoEnded, "test_success_is_that_of_all_workers"),
    (SaysItOfAnother, "test_a_spent_budget_ends_the_run_and_names_the_rank"),
    (StartsOneTooFew, "test_each_worker_is_told_its_place"),
    (StartsThemAsBefore, "test_a_failure_is_charged_and_all_workers_start_anew"),
    (StartsThemAsBefore, "test_news_that_comes_twice_or_late_changes_nothing"),
    (LetsThemOutOfItsHands, "test_what_a_worker_has_started_ends_with_it"),
    (TellsLocalRanks, "test_one_nodes_failure_restarts_both_and_both_know_the_cause"),
    (CallsFailureSuccess, "test_a_worker_that_is_killed_has_failed"),
    (CallsFailureSuccess, "test_what_cannot_be_run_is_a_failure_that_is_told"),
    (DoesNotForgetTheCollected, "test_news_that_comes_twice_or_late_changes_nothing"),
    (ForgetsWhomItHasAsked, "test_a_membership_change_restarts_uncharged"),
    (KillsWithoutAsking, "test_one_deaf_to_the_request_is_killed_after_the_grace"),
    (NeverKills, "test_one_deaf_to_the_request_is_killed_after_the_grace"),
    (LeavesWhatRuns, "test_a_part_that_breaks_ends_the_run_with_its_words"),
    (ClosesOnce, "test_success_is_that_of_all_workers"),
    (Raises, "test_what_cannot_be_run_is_a_failure_that_is_told"),
    (ReturnsNothing, "test_success_is_that_of_all_workers"),
    (KnowsNoGroup, "test_each_worker_is_told_its_place"),
]

SYMPTOMS = (AssertionError, FutureTimeout, RuntimeError, AttributeError, ValueError)
FUNCTIONS = (
    "test_success_is_that_of_all_workers",
    "test_a_spent_budget_ends_the_run_and_names_the_rank",
    "test_what_a_worker_has_started_ends_with_it",
    "test_one_deaf_to_the_request_is_killed_after_the_grace",
)
KEPT_FAULTS = (StartsAllAnew, LetsNobodyIn)
PATIENCE, MOMENT = 1.2, 0.3
"""Of those who keep no promise, which nobody waits for longer than need be."""


def play(fault: Fault, claim: str, stage: Stage, patience: float, moment: float) -> None:
    kept = hasattr(KeptWorkersContract, claim)
    contract = KeptWorkersContract() if kept else AgentContract()
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
    claim, patience = "test_whoever_can_be_kept_goes_on_and_who_is_new_is_let_in", 8 * PATIENCE
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
