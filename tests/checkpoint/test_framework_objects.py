"""Objects of frameworks are saved and restored as they are, or rejected with the remedy."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import sample_states
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from elasticlib import (
    CheckpointManager,
    ElasticDistributedSampler,
    load_checkpoint,
    save_checkpoint,
)
from elasticlib.errors import CheckpointError

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: SWALR(o, 0.05, 3),
}


class ScheduledOptimizer:
    """An optimizer with a scheduler of its learning rate."""

    def __init__(self, kind: str) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        self.scheduler = SCHEDULERS[kind](self.optimizer)

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, steps: int) -> list[float]:
        rates = []
        for step in range(steps):
            self.optimizer.step()
            plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(1.0 + step) if plateau else self.scheduler.step()
            rates.append(self.optimizer.param_groups[0]["lr"])
        return rates


def test_every_scheduler_of_torch_is_tested() -> None:
    kinds = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type)]
    schedulers = {kind.__name__ for kind in kinds if issubclass(kind, lr_scheduler.LRScheduler)}
    assert schedulers - {"LRScheduler", "_LRScheduler", *SCHEDULERS} == set()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_restored_scheduler_continues_with_the_same_learning_rates(
    tmp_path: Path, kind: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the epoch argument.
        first, again = ScheduledOptimizer(kind), ScheduledOptimizer(kind)
        first.step(3)
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, first.state())
            manager.wait()
            assert manager.restore(again.state())
        assert again.step(4) == first.step(4)


def create_averaged_model(value: float) -> AveragedModel:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    instance = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    instance.update_parameters(model)
    return instance


def create_scaler(steps: int) -> torch.amp.GradScaler:
    instance = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        instance.scale(weight.sum()).backward()
        instance.step(optimizer)
        instance.update()
    return instance


def create_loader(num_taken: int, workers: int = 0) -> tuple[StatefulDataLoader, list[Any]]:
    instance = StatefulDataLoader(range(20), batch_size=2, shuffle=True, num_workers=workers)
    batches = iter(instance)
    return instance, [next(batches).tolist() for _ in range(num_taken)]


def create_sampler(num_taken: int) -> ElasticDistributedSampler:
    instance = ElasticDistributedSampler(range(20), 1, 0, seed=3)
    iterator = iter(instance)
    for _ in range(num_taken):
        next(iterator)
    return instance


def create_generator(num_drawn: int) -> torch.Generator:
    instance = torch.Generator().manual_seed(num_drawn)
    torch.rand(num_drawn, generator=instance)
    return instance


def create_python_random(num_drawn: int) -> random.Random:
    instance = random.Random(num_drawn)
    instance.gauss(0, 1)
    return instance


OBJECTS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "EMA": (create_averaged_model, lambda o: sample_states.describe(o.state_dict())),
    "GradScaler": (create_scaler, lambda o: (o.state_dict(), o.get_scale())),
    "no GradScaler": (
        lambda _: torch.amp.GradScaler("cpu", enabled=False),
        lambda o: o.state_dict(),
    ),
    "torch.Generator": (create_generator, lambda o: torch.rand(3, generator=o).tolist()),
    "random.Random": (create_python_random, lambda o: [o.random(), o.gauss(0, 1)]),
    "numpy Generator": (numpy.random.default_rng, lambda o: o.random(3).tolist()),
    "numpy of MT19937": (
        lambda seed: numpy.random.Generator(numpy.random.MT19937(seed)),
        lambda o: o.random(3).tolist(),
    ),
    "RandomState": (numpy.random.RandomState, lambda o: o.rand(3).tolist()),
    "StatefulDistributedSampler": (
        lambda num_taken: [
            instance := StatefulDistributedSampler(range(9), 1, 0),
            instance.load_state_dict({"yielded": num_taken}),
        ][0],
        lambda o: o.state_dict(),
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_frameworks_are_restored_at_any_path(tmp_path: Path, name: str) -> None:
    create, describe = OBJECTS[name]
    saved, fresh = create(5), create(2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"nested": [{"object": saved}, (saved,)]})
        manager.wait()
        assert manager.restore({"nested": [{"object": fresh}, (create(1),)]})
    expected, restored = describe(saved), describe(fresh)
    assert str(restored) == str(expected)
    save_checkpoint(tmp_path / "a.pt", [create(5)])
    assert load_checkpoint(tmp_path / "a.pt") is not None


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_restored_stateful_loader_continues_with_the_remaining_batches(
    tmp_path: Path, workers: int
) -> None:
    torch.manual_seed(3)
    saved, first = create_loader(3, workers)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"loader": saved})
        manager.wait()
        torch.manual_seed(4)
        fresh, _ = create_loader(0, workers)
        assert manager.restore({"loader": fresh})
    rest = [batch.tolist() for batch in fresh]
    assert sorted(one for batch in first + rest for one in batch) == list(range(20))


def test_a_restored_sampler_continues_after_the_samples_that_were_drawn(tmp_path: Path) -> None:
    saved, fresh = create_sampler(7), create_sampler(0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"sampler": saved})
        manager.wait()
        assert manager.restore({"sampler": fresh})
    assert fresh.state_dict() == saved.state_dict()


class ModuleWithExtraState(torch.nn.Module):
    def __init__(self, extra: object) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def test_the_extra_state_of_a_module_is_restored(tmp_path: Path) -> None:
    saved, fresh = ModuleWithExtraState({"epoch": 3, "seen": {1, 2}}), ModuleWithExtraState(None)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": saved})
        manager.wait()
        assert manager.restore({"model": fresh})
    assert fresh.extra == {"epoch": 3, "seen": {1, 2}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (DistributedSampler(range(4), 1, 0), "['object'] is a torch.utils.data.distributed."),
        (
            RandomSampler(range(4)),
            "['object'] is a torch.utils.data.sampler.RandomSampler, which a",
        ),
        (ModuleWithExtraState(object()), "['object']['_extra_state'] is an object"),
        (torch.nn.ParameterList([torch.nn.UninitializedParameter()]), "ParameterList, failed in"),
        (torch.utils.data.DataLoader(range(4)), "DataLoader, which a checkpoint does not hold"),
        (torch.nn.Linear, "['object'] is a type"),
        (random.SystemRandom(), "['object'] is a random.SystemRandom"),
        (iter([1]), "['object'] is a list_iterator"),
    ],
)
def test_an_unsupported_object_is_rejected_before_anything_is_written(
    tmp_path: Path, value: object, message: str
) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError) as error:
            manager.save(1, {"a": torch.ones(2), "object": value})
        assert message in str(error.value)
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path / "a.pt", {"a": torch.ones(2), "object": value})
    assert message in str(error.value)
    written = (".safetensors", ".pt", ".json")
    assert not [one for one in tmp_path.rglob("*") if one.suffix in written]


def create_optimizer_with_momentum() -> torch.optim.Optimizer:
    optimizer = ScheduledOptimizer("StepLR").optimizer
    optimizer.param_groups[0].update(momentum=0.9)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    return optimizer


STATE_DICTS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "optimizer before its first step": (
        "an optimizer",
        lambda: torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).state_dict(),
    ),
    "optimizer after a step": (
        "an optimizer",
        lambda: create_optimizer_with_momentum().state_dict(),
    ),
    "optimizer, parameters by name": (
        "an optimizer",
        lambda: {
            "state": {"weight": {"step": torch.tensor(1.0)}},
            "param_groups": [{"lr": 0.1, "params": ["weight"]}],
        },
    ),
    **{
        kind: (
            "a learning-rate scheduler",
            lambda kind=kind: ScheduledOptimizer(kind).scheduler.state_dict(),
        )
        for kind in SCHEDULERS
    },
    "GradScaler": ("a gradient scaler", lambda: create_scaler(3).state_dict()),
    "sampler": ("a sampler", lambda: create_sampler(3).state_dict()),
    "iterator of a sampler": ("a sampler", lambda: iter(create_sampler(0)).state_dict()),
}


@pytest.mark.parametrize("kind", STATE_DICTS)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.optim.lr_scheduler")
def test_state_dict_given_instead_of_its_object_is_rejected(tmp_path: Path, kind: str) -> None:
    owner, create = STATE_DICTS[kind]
    model = torch.nn.Linear(1, 1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": model, "more": [1]}).wait()
        state = {"model": model.state_dict(), "more": [create()]}
        calls: list[Callable[[], object]] = [
            lambda: manager.save(2, state),
            lambda: manager.snapshot(2, state),
            lambda: manager.restore(state),
        ]
        for call in calls:
            with pytest.raises(CheckpointError) as rejected:
                call()
            message = str(rejected.value)
            assert f"state['more'][0] is the state_dict() of {owner}, which is a copy" in message
            assert f"Put the {owner.split(' ', 1)[1]} itself there" in message
        assert manager.steps() == [1]


@pytest.mark.parametrize(
    "value",
    [
        {"state": {}, "param_groups": []},
        {"state": "running", "param_groups": ["a", "b"]},
        {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}], "step": 1},
        {"last_epoch": 3, "base_lrs": [0.1], "gamma": 0.5},
        {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10},
    ],
)
def test_dict_that_only_resembles_a_state_dict_is_saved_and_restored(
    tmp_path: Path, value: dict[str, Any]
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"mine": value}).wait()
        state: dict[str, Any] = {"mine": {}}
        assert manager.restore(state)
        assert state == {"mine": value}


def test_object_may_hold_the_state_dicts_of_the_objects_it_wraps(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self) -> None:
            self.schedule = ScheduledOptimizer("StepLR")

        def state_dict(self) -> dict[str, Any]:
            return {name: part.state_dict() for name, part in self.schedule.state().items()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            for name, part in self.schedule.state().items():
                part.load_state_dict(state[name])

    saved, fresh = Wrapper(), Wrapper()
    saved.schedule.step(3)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"wrapper": saved}).wait()
        assert manager.restore({"wrapper": fresh})
    assert fresh.state_dict() == saved.state_dict()
