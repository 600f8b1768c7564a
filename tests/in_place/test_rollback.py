"""A step that is interrupted anywhere is undone, whatever it has changed in the state."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import elasticlib
from elasticlib import ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.errors import CheckpointError

STEPS = 3


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


class Training:
    """A model, an optimizer, and a schedule. Subclasses change more values in a step."""

    fused = False

    def __init__(self) -> None:
        torch.manual_seed(1)
        random.seed(1)
        layers = (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.model = nn.Sequential(*layers)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, fused=self.fused)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    def step(self) -> None:
        out = self.model(torch.randn(5, 3) + random.random())
        out.square().sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def batches(self) -> ElasticBatchSampler:
        sampler = ElasticDistributedSampler(range(STEPS), 1, 0, shuffle=False)
        return ElasticBatchSampler(sampler, 1)

    def capture(self) -> Any:
        """Return a copy of everything that a step may have changed."""
        return copy.deepcopy(plain(self.state)), torch.get_rng_state(), random.getstate()


def plain(value: Any) -> Any:
    """Return the values of a state, in plain containers, without graphs."""
    if isinstance(value, nn.Module):
        flags = [(module.training, len(module._modules)) for module in value.modules()]
        return plain(value.state_dict()), flags, [p.requires_grad for p in value.parameters()]
    if hasattr(value, "state_dict"):
        return plain(value.state_dict())
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


def train(training: Training, *, interrupted_at: tuple[int, int] | None = None) -> list[Any]:
    """Run all steps. Return the state before and after each of them.

    Args:
        training: what to train.
        interrupted_at: a step, and the number of the operation at which its first attempt is
            interrupted. If the step has fewer operations, it is interrupted at its end.
    """
    loop, captured = elasticlib.steps(training.batches(), training.state), [training.capture()]
    while loop.step < STEPS:
        with contextlib.suppress(Interruption):
            for attempt in loop:
                with attempt:
                    assert is_equal(training.capture(), captured[-1])
                    if interrupted_at is not None and attempt.step == interrupted_at[0]:
                        at, interrupted_at = interrupted_at[1], None
                        with InterruptAt(at):
                            training.step()
                        raise Interruption
                    training.step()
                captured.append(training.capture())
    return captured


def count_operations(training: Training) -> int:
    for _ in range(STEPS - 1):
        training.step()
    with InterruptAt() as counter:
        training.step()
    return counter.count


class Fused(Training):
    """Uses an optimizer that writes without raising `Tensor._version`."""

    fused = True


@pytest.mark.parametrize("kind", [Training, Fused])
def test_a_step_interrupted_at_any_operation_is_undone(kind: type[Training]) -> None:
    expected = train(kind())
    for at in range(count_operations(kind()) + 1):
        assert is_equal(train(kind(), interrupted_at=(STEPS, at)), expected), at


class Nested(Fused):
    """Has objects in lists and dicts, as a script with several optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"model": self.model, "others": [[self.optimizer], {"rate": self.schedule}]}


class MomentumEncoder(Training):
    """Updates a second model from the first one before the optimizer does, as DINO does."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.state["teacher"] = self.teacher

    def step(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            own.data.mul_(0.5).add_(other.data, alpha=0.5)
        super().step()


class AssignedData(MomentumEncoder):
    """Does the same by assigning `.data`, as MoCo does."""

    def step(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            own.data = own.data * 0.5 + other.data * 0.5
        Training.step(self)


class WeightNoise(Training):
    """Writes to the parameters and to the optimizer's state, through `.data`."""

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
            if state := self.optimizer.state.get(parameter):
                state["exp_avg"].data.mul_(0.5)
        super().step()


class CountsCalls(nn.Module):
    """Has values that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {"calls": 0, "sum": torch.zeros(3)}

    def forward(self, x: Tensor) -> Tensor:
        self.extra["calls"] += 1
        self.extra["sum"] += x.detach().sum(0)
        return x

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


class ExtraState(Training):
    """Has a module with an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(0, CountsCalls())


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


class Buffers(Training):
    """Has a module whose buffers a functional operation writes."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(0, FunctionalNorm(3))


class Replaces(Training):
    """Replaces an object in the state, and one in the model."""

    def step(self) -> None:
        super().step()
        self.state["schedule"] = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.schedule = self.state["schedule"]
        self.model[3].bias = nn.Parameter(torch.randn(1))
        self.model.append(nn.Linear(1, 1))
        self.state[f"name {len(self.state)}"] = 1

    def capture(self) -> Any:
        self.schedule = self.state["schedule"]  # A script reads it there as well.
        return super().capture()


class Grows(Training):
    """Has containers that grow and shrink, sets, and a leaf that becomes a part of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, Any] = {"losses": [torch.zeros(())], "seen": {0}}
        self.history |= {"average": torch.zeros(()), "bytes": bytearray(b"0")}
        self.state["history"] = self.history

    def step(self) -> None:
        loss = self.model(torch.randn(5, 3)).sum()
        self.history["losses"].append(loss)
        self.history["losses"] = self.history["losses"][-3:]
        self.history[f"key {len(self.history)}"] = loss.detach()
        self.history["seen"].add(len(self.history))
        self.history["bytes"] += b"1"
        self.history["average"] *= 0.9
        self.history["average"] += loss.detach()
        self.state["loss"] = loss  # a value with a graph
        super().step()


class Flags(Training):
    """Changes between training and evaluation, and which parameters are trained."""

    def step(self) -> None:
        self.model[0].requires_grad_(requires_grad=not self.model[0].weight.requires_grad)
        self.model.train(not self.model.training)
        super().step()


class CountingOptimizer(torch.optim.SGD):
    """Has a value of its own in its state dict."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state.pop("num_steps")
        super().load_state_dict(state)


class OwnOptimizer(Training):
    """Uses an optimizer with a state dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = CountingOptimizer(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.state |= {"optimizer": self.optimizer, "schedule": self.schedule}


KINDS = [
    *(Nested, MomentumEncoder, AssignedData, WeightNoise, ExtraState, Buffers),
    *(Replaces, Grows, Flags, OwnOptimizer),
]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_step_has_changed_in_the_state_is_undone(kind: type[Training]) -> None:
    expected = train(kind())
    num_operations = count_operations(kind())
    for step, at in itertools.product((1, STEPS), (num_operations // 4, 10_000)):
        assert is_equal(train(kind(), interrupted_at=(step, at)), expected), (step, at)


def test_objects_keep_their_identity_and_have_no_gradients() -> None:
    training = Training()
    objects = [*training.model.parameters(), *training.model.buffers(), training.schedule]
    train(training, interrupted_at=(2, 10_000))
    assert all(
        one is other
        for one, other in zip(
            [*training.model.parameters(), *training.model.buffers(), training.state["schedule"]],
            objects,
            strict=True,
        )
    )
    assert all(parameter.grad is None for parameter in training.model.parameters())


def unsupported_object() -> dict[str, Any]:
    return {"odd": iter([1, 2])}


def lazy_module() -> dict[str, Any]:
    return {"net": nn.LazyLinear(2)}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (unsupported_object, r"state\['odd'\] is a list_iterator"),
        (lazy_module, r"state\['net'\] has lazy parameters"),
    ],
)
def test_what_cannot_be_undone_is_refused_before_another_attempt(
    make: Callable[[], dict[str, Any]], reason: str
) -> None:
    loop, attempts = elasticlib.steps(Training().batches(), make()), 0

    def iterate() -> None:
        nonlocal attempts
        for attempt in loop:
            with attempt:
                attempts += 1
                if attempt.step == 1:
                    raise Interruption

    with pytest.raises(Interruption):
        iterate()
    with pytest.raises(CheckpointError, match=rf"step 1 was interrupted.*{reason}"):
        iterate()
    assert attempts == 1


def test_a_scaler_may_unscale_again() -> None:
    training, scaler = Training(), torch.amp.GradScaler("cpu")
    loop = elasticlib.steps(training.batches(), {**training.state, "scaler": scaler})
    for _ in range(2):
        with contextlib.suppress(Interruption):
            for attempt in loop:
                with attempt:
                    scaler.scale(training.model(torch.randn(5, 3)).sum()).backward()
                    scaler.unscale_(training.optimizer)
                    raise Interruption
