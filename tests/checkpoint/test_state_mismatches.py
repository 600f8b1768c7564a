"""A restore finds all differences to the saved state first, and converts no tensor unasked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sample_states import describe
from sharding import bits, sharded_layers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

from elasticlib import CheckpointManager
from elasticlib.checkpoint.state_tree import to_plain_values
from elasticlib.data.sampler import ElasticDistributedSampler
from elasticlib.errors import StateMismatchError

State = dict[str, Any]


def layers(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    pairs = itertools.pairwise(sizes)
    return torch.nn.Sequential(*(torch.nn.Linear(*pair, dtype=dtype) for pair in pairs))


def with_buffer(values: Iterable[complex], dtype: torch.dtype) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("b", torch.tensor(list(values)).to(dtype))
    return module


def stepped(model: torch.nn.Module, *, groups: int = 1, **options: Any) -> torch.optim.Optimizer:
    """Return an AdamW that has taken a step, with the parameters of a model in some groups."""
    parameters = list(model.parameters())
    given = [{"params": parameters[number::groups]} for number in range(groups)]
    optimizer = torch.optim.AdamW(given, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def fresh(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@attrs.frozen
class Case:
    saved: Callable[[], object]
    live: Callable[[], object]
    message: str


CASES = {
    "missing name": Case(
        lambda: layers(2, 2),
        lambda: layers(2, 2, 2),
        "state['it'], a Sequential, has other names than were saved: nothing was saved for"
        " '1.bias', '1.weight'",
    ),
    "surplus name": Case(
        lambda: layers(2, 2, 2),
        lambda: layers(2, 2),
        "it has no '1.bias', '1.weight', which was saved",
    ),
    "no state of a module": Case(
        lambda: [1], lambda: layers(2, 2), "state['it'] is a Sequential, and a list was saved"
    ),
    "shape": Case(
        lambda: layers(3, 2),
        lambda: layers(2, 2),
        "state['it']['0.weight'] is a tensor of (2, 2) float32, and a tensor of (2, 3) float32 was",
    ),
    "floating type": Case(
        lambda: layers(2, 2),
        lambda: layers(2, 2, dtype=torch.bfloat16),
        "state['it']['0.weight'] is a tensor of (2, 2) bfloat16, and a tensor of (2, 2) float32 was"
        " saved: create it with the saved dtype, or give allow_cast=True to convert it",
    ),
    "integer": Case(
        lambda: with_buffer([300], torch.int64),
        lambda: with_buffer([1], torch.uint8),
        "state['it']['b'] is a tensor of (1,) uint8, and a tensor of (1,) int64 was saved: create"
        " it with the saved dtype, because only floating types can be converted",
    ),
    "complex": Case(
        lambda: with_buffer([1j], torch.complex64),
        lambda: with_buffer([1], torch.float32),
        "and a tensor of (1,) complex64 was saved: create it with the saved dtype, because only",
    ),
    "number of groups": Case(
        lambda: stepped(layers(2, 2), groups=2),
        lambda: fresh(layers(2, 2)),
        "state['it'], an AdamW, has 1 parameter group of 2 parameters, and 2 parameter groups of"
        " 1, 1 parameters were saved",
    ),
    "size of a group": Case(
        lambda: stepped(layers(2, 2)),
        lambda: fresh(layers(2, 2, 2)),
        "has 1 parameter group of 4 parameters, and 1 parameter group of 2 parameters were saved",
    ),
    "no state of an optimizer": Case(
        lambda: {"state": []}, lambda: fresh(layers(2, 2)), "that is not the state of an optimizer"
    ),
    "shape of an average": Case(
        lambda: stepped(layers(3, 2)),
        lambda: fresh(layers(2, 2)),
        "state['it']['state'][0]['exp_avg'] is a tensor of (2, 2) float32, and a tensor of (2, 3)",
    ),
    "type of an average": Case(
        lambda: stepped(layers(2, 2)),
        lambda: stepped(layers(2, 2, dtype=torch.bfloat16)),
        "state['it']['state'][0]['exp_avg'] is a tensor of (2, 2) bfloat16, and a tensor of (2, 2)"
        " float32 was saved",
    ),
    "other dataset": Case(
        lambda: ElasticDistributedSampler(range(9), num_replicas=1, rank=0),
        lambda: ElasticDistributedSampler(range(8), num_replicas=1, rank=0),
        "state['it'], an ElasticDistributedSampler, could not load its state: length is 9",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_state_that_does_not_match_changes_nothing(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    saved_model, model = layers(2, 3), layers(2, 3)
    saved = {"model": saved_model, "optimizer": stepped(saved_model), "it": case.saved()}
    live = {"model": model, "optimizer": stepped(model, lr=0.5), "it": case.live()}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, saved).wait()
        before = describe(to_plain_values(live))
        # Other types than floating ones are not converted even if the caller allows a conversion.
        options = [{}] if "allow_cast" in case.message or "average" in name else [{}, CAST]
        for option in options:
            with pytest.raises(StateMismatchError) as error:
                manager.restore(live, **option)
            assert case.message in str(error.value)
            assert describe(to_plain_values(live)) == before


CAST = {"allow_cast": True}


def test_floating_types_are_converted_if_the_caller_allows_it(tmp_path: Path) -> None:
    model = layers(2, 2)
    saved = {"model": model, "optimizer": stepped(model), "more": [torch.tensor([1 / 3])]}
    small = layers(2, 2, dtype=torch.bfloat16)
    more = torch.zeros(1, dtype=torch.float64)
    live = {"model": small, "optimizer": fresh(small), "more": [more]}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, saved).wait()
        assert manager.restore(live, allow_cast=True).step == 1
    for one, other in zip(small.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16())
        average = live["optimizer"].state[one]["exp_avg"]
        assert torch.equal(average, saved["optimizer"].state[other]["exp_avg"].bfloat16())
    assert live["more"][0] is more
    assert more.item() == torch.tensor(1 / 3).double().item()


class PreciseSGD(torch.optim.Optimizer):
    """An optimizer that keeps an average in a higher precision than its parameters, and a count."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - as torch defines it
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["average"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
                state["count"] = torch.tensor([(1 << 40) + 1])


def test_an_optimizer_gets_its_state_back_in_the_dtypes_that_it_had(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = PreciseSGD([parameter])
    optimizer.step()
    other = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    live = PreciseSGD([other])
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"optimizer": optimizer}).wait()
        manager.restore({"optimizer": live})
    assert describe(dict(live.state[other])) == describe(dict(optimizer.state[parameter]))


class Renaming(torch.nn.Linear):
    """A module that loads the names of an earlier version of itself."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel").t()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Counting(torch.nn.Linear):
    """A module with a state that is no tensor."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def rename_kernel(_module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel").t()


def test_modules_that_load_in_a_way_of_their_own_are_restored(tmp_path: Path) -> None:
    saved_kernel = {"kernel": torch.arange(6.0).view(2, 3), "bias": torch.ones(3)}
    hooked = torch.nn.Sequential(torch.nn.Linear(2, 3))
    hooked[0].register_load_state_dict_pre_hook(rename_kernel)
    counting = Counting(2, 2)
    counting.count = 7
    normed = parametrizations.weight_norm(torch.nn.Linear(2, 2))
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    tied.append(tied[0])
    saved: State = {
        "renaming": saved_kernel,
        "hooked": {f"0.{name}": value for name, value in saved_kernel.items()},
        "lazy": torch.nn.Linear(2, 3),
        "counting": counting,
        "normed": normed,
        "tied": tied,
    }
    live_tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    live_tied.append(live_tied[0])
    live: State = {
        "renaming": Renaming(2, 3),
        "hooked": hooked,
        "lazy": torch.nn.LazyLinear(3),
        "counting": Counting(2, 2),
        "normed": parametrizations.weight_norm(torch.nn.Linear(2, 2)),
        "tied": live_tied,
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, saved).wait()
        assert manager.restore(live).step == 1
    for weight in (live["renaming"].weight, hooked[0].weight):
        assert weight.tolist() == saved_kernel["kernel"].t().tolist()
    assert live["counting"].count == 7
    for name in ("lazy", "normed", "tied"):
        assert bits(dict(live[name].state_dict())) == bits(dict(saved[name].state_dict()))


def sharded(dtype: torch.dtype, *, steps: int) -> State:
    torch.manual_seed(steps)
    model = sharded_layers(init_device_mesh("cpu", (dist.get_world_size(),))).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 5, dtype=dtype)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_sharded(folder: Path) -> None:
    with CheckpointManager(folder) as manager:
        manager.save(1, sharded(torch.float32, steps=1))


def convert_sharded(folder: Path) -> tuple[str, Mapping[str, bool]]:
    """Restore sharded tensors of another dtype. Return the error, and what was as expected."""
    live, message = sharded(torch.bfloat16, steps=2), ""
    before = bits(live)
    with CheckpointManager(folder) as manager:
        try:
            manager.restore(live)
        except StateMismatchError as error:
            message = str(error)
        is_unchanged = bits(live) == before
        loaded = manager.load(like=live)
        manager.restore(live, allow_cast=True)
        saved = manager.load()
    expected = {name: value.bfloat16() for name, value in saved["model"].items()}
    return message, {
        "unchanged": is_unchanged,
        "load converts nothing": bits(loaded["model"]) == bits(dict(saved["model"])),
        "converted": bits(dict(live["model"].state_dict())) == bits(expected),
    }


def test_sharded_tensors_are_converted_only_if_the_caller_allows_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save_sharded, 2, tmp_path)
    for world_size in (2, 1):
        for message, expected in ranks.run(convert_sharded, world_size, tmp_path):
            assert "state['model']['0.weight'] is a sharded tensor of bfloat16, and a" in message
            assert "tensor of float32 was saved: create it with the saved dtype, or give" in message
            assert all(expected.values()), expected
