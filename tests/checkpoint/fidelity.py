"""States of the fidelity matrix, and functions that ranks run for `test_fidelity.py`."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from managers import create_manager
from sample_states import describe
from sharding import bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elasticlib import CheckpointManager

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if kind is not torch.optim.Optimizer
}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
MORE_OPTIONS: Mapping[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
}


def accepts(optimizer: str, form: str) -> bool:
    """Return whether an optimizer has this form. Every optimizer has the form `plain`."""
    [option] = OPTIONS[form]
    return form == "plain" or option in inspect.signature(OPTIMIZERS[optimizer]).parameters


FORMS = [(name, form) for name in sorted(OPTIMIZERS) for form in OPTIONS if accepts(name, form)]


class Layouts(torch.nn.Module):
    """Parameters of all memory layouts. Two names refer to the same parameter."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        values = torch.arange(24.0) / 8 + 1
        parameters = {"contiguous": values.view(4, 6), "transposed": values.view(6, 4).t()}
        if optimizer != "Muon":  # Muon accepts matrices only.
            image = values.view(1, 2, 3, 4).to(memory_format=torch.channels_last)
            parameters |= {"channels_last": image, "vector": values.clone(), "scalar": values[0]}
        for name, value in parameters.items():
            # A clone keeps dense strides.
            self.register_parameter(name, torch.nn.Parameter(value.clone()))
        self.tied = self.contiguous
        self.register_buffer("counts", torch.arange(3))


def create_trained(optimizer: str, form: str, steps: int) -> dict[str, Any]:
    """Return a model and its optimizer after some steps."""
    model = Layouts(optimizer)
    [option] = OPTIONS[form]
    options = dict(MORE_OPTIONS.get(optimizer, {}))
    if option in inspect.signature(OPTIMIZERS[optimizer]).parameters:
        options |= OPTIONS[form]
    instance = OPTIMIZERS[optimizer](model.parameters(), lr=0.05, **options)  # type: ignore[call-arg]
    state = {"model": model, "optimizer": instance}
    train(state, range(steps))
    return state


def train(state: dict[str, Any], steps: range) -> None:
    model, optimizer = state["model"], state["optimizer"]
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            gradient = torch.sin(parameter.detach() * (number + 1) + step)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam) and parameter.dim()
            # LBFGS views gradients as vectors.
            gradient = gradient.contiguous() if needs_closure(optimizer) else gradient
            parameter.grad = gradient.to_sparse() if is_sparse else gradient
        if isinstance(optimizer, torch.optim.SparseAdam) and model.scalar.grad is not None:
            model.scalar.grad = None
        optimizer.step(lambda: torch.tensor(1.0)) if needs_closure(optimizer) else optimizer.step()


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.LBFGS)


def create_containers(seed: int) -> dict[str, Any]:
    """Return a state with containers, scalars, arrays and states of random generators."""
    legacy, new = numpy.random.RandomState(seed), numpy.random.default_rng(seed)
    tied = torch.arange(6.0).view(2, 3) + seed
    return {
        "dict": {"a.b": torch.full((1,), float(seed)), "a": {"b": seed}, None: None, 1.5: b"k"},
        "ordered": OrderedDict(b=seed, a=2),
        "counter": Counter("aab" * seed),
        "list": [torch.full((2,), float(seed)), [seed, [torch.zeros(0, 3)]]],
        "tuple": (seed, (torch.full((3,), float(seed)),), ()),
        "set": {seed, "a", None},
        "frozen": frozenset({seed, b"b"}),
        "scalars": [None, True, 10**30 + seed, -0.0, float("nan"), 1j * seed, "é\udc80", b"\0"],
        "arrays": [
            numpy.arange(6.0).reshape(2, 3) + seed,
            numpy.asfortranarray(numpy.arange(6, dtype=">i2").reshape(2, 3) + seed),
            numpy.array(["2026-11-22"], "M8[s]"),
            numpy.float32(seed),
        ],
        "generators": [
            random.Random(seed).getstate(),
            legacy.get_state(),
            new.bit_generator.state,
            torch.Generator().manual_seed(seed).get_state(),
        ],
        "tied": [tied, tied, tied.detach()],
        "dtypes": [torch.full((3,), seed).to(kind) for kind in (torch.bfloat16, torch.int8)],
    }


def create_matrix(steps: int) -> dict[str, Any]:
    """Return a state with the whole matrix."""
    states = {f"{name} {form}": create_trained(name, form, steps) for name, form in FORMS}
    return {"containers": create_containers(steps + 1), **states}


def describe_objects(state: Any) -> Any:
    """Describe a state with objects in a form that `==` compares."""
    if isinstance(state, torch.nn.Module | torch.optim.Optimizer):
        return describe(state.state_dict())
    if isinstance(state, dict):
        return {key: describe_objects(value) for key, value in state.items()}
    return describe(state)


def restore_matrix(folder: Path) -> tuple[bool, str]:
    """Restore into a new state, and return whether it is equal, and the source."""
    state = create_matrix(0)
    place = {"run": "job", "rank": dist.get_rank(), "world": dist.get_world_size()}
    with create_manager(folder / "checkpoints", place) as manager:
        result = manager.restore(state)
    return describe_objects(state) == describe_objects(create_matrix(2)), result.source


# -- sharded states --------------------------------------------------------------------------------


def create_sharded(optimizer: str, form: str, steps: int) -> dict[str, Any]:
    """Return an FSDP2 model with tied weights and its optimizer after some steps."""
    torch.manual_seed(0)
    biases = (False, optimizer != "Muon")  # Muon accepts matrices only.
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5, bias=b) for b in biases))
    model[1].weight = model[0].weight
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    options = {**MORE_OPTIONS.get(optimizer, {}), **(OPTIONS[form] if form != "plain" else {})}
    instance = OPTIMIZERS[optimizer](model.parameters(), lr=0.05, **options)  # type: ignore[call-arg]
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.sin(parameter.detach() + step)
        instance.step()
    return {"model": model, "optimizer": instance}


def save_sharded(folder: Path) -> Any:
    """Save all sharded states, and leave them in memory. Return their bits."""
    states = {}
    for name, form in FORMS:
        # Some optimizers cannot be used with DTensors.
        with contextlib.suppress(NotImplementedError, RuntimeError, TypeError):
            states[f"{name} {form}"] = create_sharded(name, form, 2)
    memory = folder / f"memory{dist.get_rank()}" / "1"
    memory.mkdir(parents=True)
    os.environ.update(
        ELASTICLIB_SNAPSHOTS=str(memory),
        ELASTICLIB_GENERATION="1",
        ELASTICLIB_INCARNATION="launch",
        LOCAL_RANK="0",
    )
    with CheckpointManager(folder / "checkpoints") as manager:
        manager.save(1, states).wait()
        assert manager.snapshot(2, states)
    return {name: bits([*state.values()]) for name, state in states.items()}


def restore_sharded(folder: Path, names: list[str], memories: list[str]) -> tuple[str, Any]:
    """Restore all sharded states from disk, or from the memory of this rank's node."""
    states = {name: create_sharded(*name.split(), 0) for name in names}
    for variable in ("ELASTICLIB_SNAPSHOTS", "ELASTICLIB_GENERATION", "ELASTICLIB_INCARNATION"):
        os.environ.pop(variable, None)
    if memories:
        memory = folder / memories[dist.get_rank()] / "2"
        memory.mkdir(parents=True)
        os.environ.update(ELASTICLIB_SNAPSHOTS=str(memory), ELASTICLIB_GENERATION="2")
        os.environ["ELASTICLIB_INCARNATION"] = "launch"
    with CheckpointManager(folder / "checkpoints") as manager:
        source = manager.restore(states).source
    return source, {name: bits([*state.values()]) for name, state in states.items()}
