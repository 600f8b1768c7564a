"""Steps that an exception interrupts, in a script that continues in the same process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import Interrupter
from torch import Tensor, nn

import elasticlib
from elasticlib import CheckpointManager, ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.errors import CheckpointError

EPOCHS, STEPS = 2, 6  # of 3 batches each, and altogether


class Fault(Exception):
    """Raised by the training at a line that a test chooses."""


class Statistics(nn.Module):
    """A batch norm whose running statistics change without raising `Tensor._version`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.mean, Tensor)
        assert isinstance(self.var, Tensor)
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


class Training:
    """A training whose weights depend on the batches, their order and random numbers."""

    def __init__(
        self,
        manager: CheckpointManager | None = None,
        *,
        keep_copy: bool = True,
        save_every: int = 1,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), Statistics(), nn.Linear(2, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.faults = 1
        self.seen: dict[str, list[int]] = {"indices": []}
        sampler = ElasticDistributedSampler(range(10), 1, 0, tail="exact")
        self.batches = ElasticBatchSampler(sampler, 4)
        self.state = {"model": self.model, "optimizer": self.optimizer, "seen": self.seen}
        self.loop = elasticlib.steps(
            self.batches,
            self.state,
            manager=manager,
            epochs=EPOCHS,
            save_every=0 if manager is None else save_every,
            keep_copy=keep_copy,
        )

    def step(self, indices: list[int], fault: str = "") -> None:
        # A manager does not restore the generators of random numbers, so each step has its own.
        random = torch.Generator().manual_seed(len(self.seen["indices"]))
        x = torch.tensor(indices)[:, None] + torch.randn(len(indices), 2, generator=random)
        self.seen["indices"] += indices
        self.optimizer.zero_grad()
        self.model(x).square().sum().backward()
        if fault == "before the optimizer":
            raise Fault(fault)
        self.optimizer.step()
        if fault == "after the optimizer":
            raise Fault(fault)

    def iterate(self, until: int = STEPS) -> None:
        """Execute the steps up to and including `until`."""
        for attempt in self.loop:
            with attempt as indices:
                self.step(indices)
            if attempt.step == until:
                break

    def result(self) -> list[Any]:
        values = [value for tensor in self.model.state_dict().values() for value in tensor.tolist()]
        return [self.loop.step, self.seen["indices"], self.batches.position, values]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """The result of the training without an interruption."""
    training = Training()
    training.iterate()
    return training.result()


@pytest.fixture(params=[False, True], ids=["no manager", "manager"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointManager | None]:
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(CheckpointManager(tmp_path)) if request.param else None


def catch_in_the_loop(training: Training, fault: str) -> None:
    for attempt in training.loop:
        with contextlib.suppress(Fault), attempt as indices:
            faulty = attempt.step == 4 and training.faults > 0
            training.faults -= faulty
            training.step(indices, fault if faulty else "")


def catch_outside(training: Training, fault: str) -> None:
    training.iterate(3)
    with contextlib.suppress(Fault):
        for attempt in training.loop:
            with attempt as indices:
                training.step(indices, fault)
    assert training.loop.step == 3
    training.iterate()


@pytest.mark.parametrize("fail_and_continue", [catch_in_the_loop, catch_outside])
@pytest.mark.parametrize("fault", ["before the optimizer", "after the optimizer"])
def test_a_step_is_applied_once_if_the_script_catches_its_error(
    expected: list[Any], manager: CheckpointManager | None, fail_and_continue: Any, fault: str
) -> None:
    training = Training(manager)
    fail_and_continue(training, fault)
    assert training.result() == expected


@pytest.mark.parametrize("fault", ["before the optimizer", "after the optimizer"])
def test_without_a_copy_the_manager_restores_the_newest_saved_step(
    expected: list[Any], tmp_path: Path, fault: str
) -> None:
    with CheckpointManager(tmp_path) as manager:
        training = Training(manager, keep_copy=False)
        catch_outside(training, fault)
        assert training.result() == expected


def test_without_a_copy_and_a_saved_step_an_interruption_is_an_error(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        training = Training(manager, keep_copy=False, save_every=0)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"step 4 was interrupted.* give steps a man"):
                catch_outside(training, "before the optimizer")
            assert training.loop.step == 3


def test_iterating_again_continues_after_the_last_step(
    expected: list[Any], manager: CheckpointManager | None
) -> None:
    training = Training(manager)
    for step in range(2, STEPS + 1, 2):
        training.iterate(step)
    assert training.result() == expected


@pytest.mark.long  # The test below interrupts the same step, with a manager.
def test_a_step_interrupted_anywhere_is_applied_once(expected: list[Any]) -> None:
    interrupter = Interrupter("in_place/", "data/")
    is_interrupted = True
    while is_interrupted:
        training = Training()
        training.iterate(2)
        is_interrupted = interrupter.interrupt(partial(training.iterate, 3))
        training.iterate()
        assert training.result() == expected, interrupter.where[-1]
    assert len(interrupter.where) > 50


@pytest.mark.long  # As the test before, while a step is rolled back.
def test_a_rollback_interrupted_anywhere_is_completed(expected: list[Any]) -> None:
    interrupter = Interrupter("in_place/rollback.py")
    is_interrupted = True
    while is_interrupted:
        training = Training()
        training.iterate(3)
        with contextlib.suppress(Fault):
            for attempt in training.loop:
                with attempt as indices:
                    training.step(indices, "after the optimizer")
        is_interrupted = interrupter.interrupt(partial(training.iterate, 4))
        training.iterate()
        assert training.result() == expected, interrupter.where[-1]


# Each interrupted run waits for threads that save, so a busy machine needs minutes.
@pytest.mark.timeout(600)
def test_a_step_interrupted_anywhere_is_restored_by_a_manager(
    expected: list[Any], tmp_path: Path
) -> None:
    interrupter = Interrupter("in_place/step_loop.py")
    is_interrupted = True
    while is_interrupted:
        with CheckpointManager(tmp_path / str(len(interrupter.where))) as manager:
            training = Training(manager)
            training.iterate(2)
            is_interrupted = interrupter.interrupt(partial(training.iterate, 3))
            training.iterate()
            assert training.result() == expected, interrupter.where[-1]
