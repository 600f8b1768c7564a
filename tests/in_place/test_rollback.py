"""A step that is interrupted at any of its operations is rolled back exactly, or reported."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from elasticlib.checkpoint.state_tree import to_plain_values
from elasticlib.in_place.rollback import StateRollback


class Interruption(Exception):
    """Represents the loss of a peer."""


class InterruptAt(TorchDispatchMode):
    """Raises Interruption before the operation number `at`, and counts operations."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self._at, self.count = at, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.count == self._at:
            raise Interruption(function)
        self.count += 1
        return function(*args, **(kwargs or {}))


class WritesThroughData(torch.optim.SGD):
    """Writes parameters through `.data`, which does not raise `Tensor._version`."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


class Training:
    """A model, an optimizer and every kind of value that a step may change."""

    def __init__(self, kind: str, steps: int = 0) -> None:
        torch.manual_seed(1)
        random.seed(1)
        layers = (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.model = nn.Sequential(*layers)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = {
            "adam": lambda: torch.optim.AdamW(parameters, foreach=False),
            "foreach": lambda: torch.optim.AdamW(parameters, foreach=True),
            "data": lambda: WritesThroughData(parameters, lr=0.1),
        }[kind]()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.average = torch.zeros(())
        self.counts = {"steps": 0, "seen": [0]}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "average": self.average,
            "counts": self.counts,
        }
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        out = self.model(torch.randn(5, 3) + random.random())
        self.average.mul_(0.9).add_(out.detach().mean())
        self.counts["seen"].append(1)  # type: ignore[attr-defined]
        out.square().sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.counts["steps"] += 1  # type: ignore[operator]

    def capture(self) -> Any:
        values = copy.deepcopy(to_plain_values(self.state))
        return values, torch.get_rng_state(), random.getstate()


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize(("kind", "before"), [("adam", 0), ("foreach", 2), ("data", 0)])
def test_a_step_interrupted_anywhere_is_rolled_back_or_reported(kind: str, before: int) -> None:
    expected = Training(kind, before)
    before_step = expected.capture()
    with InterruptAt() as counter:
        expected.step()
    after_step = expected.capture()
    for at in range(counter.count):
        training = Training(kind, before)
        rollback = StateRollback(training.state)
        with rollback.watch_optimizers():
            rollback.begin()
            with pytest.raises(Interruption), InterruptAt(at):
                training.step()
            was_rolled_back = rollback.roll_back()
        if was_rolled_back:
            assert is_equal(training.capture(), before_step), f"interrupted before operation {at}"
            assert all(one.grad is None for one in training.model.parameters())
            training.step()
            assert is_equal(training.capture(), after_step), f"interrupted before operation {at}"
        else:
            assert training.optimizer.state or kind == "data"


def test_a_step_whose_optimizer_has_started_cannot_be_rolled_back() -> None:
    training = Training("adam")
    rollback = StateRollback(training.state)
    with rollback.watch_optimizers():
        rollback.begin()
        training.model(torch.randn(5, 3)).sum().backward()
        assert rollback.roll_back()
        rollback.begin()
        training.model(torch.randn(5, 3)).sum().backward()
        training.optimizer.step()
        assert not rollback.roll_back()
    rollback.begin()
    with torch.no_grad():
        next(training.model.parameters()).add_(1)
    assert not rollback.roll_back()


class FunctionalNorm(nn.Module):
    """A batch norm whose running statistics change without raising `Tensor._version`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.mean, Tensor)
        assert isinstance(self.var, Tensor)
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


class WritesData(nn.Module):
    """Counts its calls through `.data`, which does not raise `Tensor._version`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls.data.add_(1)
        return x


@pytest.mark.parametrize("layer", [FunctionalNorm(3), WritesData(), nn.BatchNorm1d(3)], ids=str)
def test_buffers_return_to_their_values_before_the_last_step(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Linear(3, 1))
    rollback = StateRollback({"model": model})
    for _ in range(3):
        rollback.begin()
        before = copy.deepcopy(model.state_dict())
        model(torch.randn(5, 3) + 1)
    assert rollback.roll_back()
    assert is_equal(model.state_dict(), before)


def test_objects_below_the_top_level_of_the_state_are_rolled_back() -> None:
    training = Training("adam", 1)
    rollback = StateRollback({"all": training.state})
    rollback.begin()
    before_step = training.capture()
    training.model(torch.randn(5, 3)).sum().backward()
    training.optimizer.step()
    assert rollback.roll_back()
    assert is_equal(training.capture()[0], before_step[0])
    assert all(one.grad is None for one in training.model.parameters())


def test_a_scaler_may_unscale_again() -> None:
    training, scaler = Training("adam", 1), torch.amp.GradScaler("cpu")
    rollback = StateRollback({**training.state, "scaler": scaler})
    for _ in range(2):
        rollback.begin()
        scaler.scale(training.model(torch.randn(5, 3)).sum()).backward()
        scaler.unscale_(training.optimizer)
        assert rollback.roll_back()
