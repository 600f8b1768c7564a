"""A restore changes live objects in place, or changes nothing if the state does not fit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from elasticlib.checkpoint.pack import pack_state, unpack
from elasticlib.checkpoint.restore_plan import plan_restore
from elasticlib.errors import CheckpointError, StateMismatchError


def read_back(state: object) -> Any:
    return unpack(pack_state(state), copy=False)


class Counter:
    def __init__(self) -> None:
        self.value: Any = {"n": torch.zeros(2)}

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def create_state(value: float) -> dict[str, Any]:
    torch.manual_seed(int(value))
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.full((1, 3), value)).sum().backward()
    adam.step()
    return {
        "model": model,
        "adam": adam,
        "nested": {"t": torch.full((2,), value), "inner": [Counter(), (torch.tensor(value), "s")]},
        "order": OrderedDict(a=value),
        "step": int(value),
        "none": None,
    }


def test_values_are_restored_in_place_or_replaced_if_they_cannot_be_changed():
    saved, state = create_state(5.0), create_state(1.0)
    saved["nested"]["inner"][0].value = {"n": torch.full((2,), 9.0)}
    saved["none"] = [torch.ones(1)]
    saved_values = read_back(saved)
    nested, inner = state["nested"], state["nested"]["inner"]
    before = [state["model"].weight, nested["t"], nested, inner, inner[0], inner[1][0]]
    plan_restore(state, saved_values)()
    nested, inner = state["nested"], state["nested"]["inner"]
    after = [state["model"].weight, nested["t"], nested, inner, inner[0], inner[1][0]]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert torch.equal(state["model"].weight, saved["model"].weight)
    assert str(state["adam"].state_dict()) == str(saved["adam"].state_dict())
    assert nested["t"].tolist() == [5.0, 5.0]
    assert inner[0].value["n"].tolist() == [9.0, 9.0]
    assert inner[1] == (torch.tensor(5.0), "s")
    assert (state["order"], state["step"], state["none"]) == ({"a": 5.0}, 5, [torch.ones(1)])


def test_restored_values_do_not_share_memory_with_the_pack():
    memory = pack_state(
        {"c": {"n": torch.ones(2)}, "m": {"w": torch.ones(2)}, "free": [torch.ones(1)]}
    )
    state = {"c": Counter(), "m": {"w": torch.zeros(2)}, "free": None}
    plan_restore(state, unpack(memory, copy=False))()
    memory[:] = bytes(len(memory))
    assert state["c"].value["n"].tolist() == [1.0, 1.0]
    assert state["m"]["w"].tolist() == [1.0, 1.0]
    assert state["free"][0].tolist() == [1.0]


def test_copies_preserve_shared_tensors_and_requires_grad():
    shared = torch.ones(2)
    weight = torch.nn.Parameter(torch.ones(1))
    with_gradient = torch.ones(1, requires_grad=True)
    state: dict[str, Any] = {"all": None}
    plan_restore(state, {"all": {"a": shared, "b": [shared], "p": weight, "w": with_gradient}})()
    copy = state["all"]
    assert copy["a"] is copy["b"][0]
    assert copy["a"] is not shared
    assert isinstance(copy["p"], torch.nn.Parameter)
    assert copy["p"].requires_grad
    assert copy["w"].requires_grad
    assert copy["w"].data_ptr() != with_gradient.data_ptr()


def test_a_container_gets_exactly_the_saved_items():
    state: dict[str, Any] = {"d": {"gone": 1, "kept": torch.zeros(1)}, "l": [1, 2, 3], "m": [1]}
    tensor, items = state["d"]["kept"], state["l"]
    saved_values = read_back({"d": {"kept": torch.ones(1), "new": 2}, "l": [9], "m": [1, [2]]})
    plan_restore(state, saved_values)()
    assert state == {"d": {"kept": torch.ones(1), "new": 2}, "l": [9], "m": [1, [2]]}
    assert state["d"]["kept"] is tensor
    assert state["l"] is items


@pytest.mark.parametrize(
    ("state", "saved", "message"),
    [
        ({"a": 1, "b": 1}, {"a": 1}, "nothing was saved under 'b': give the same names, or"),
        ({"a": 1}, {"a": 1, "b": 1}, "the state has no 'b', which was saved: give the same"),
        (
            {"a": [torch.zeros(2)]},
            {"a": [torch.zeros(3)]},
            "state['a'][0] is a tensor of (2,) float32, and a tensor of (3,) float32 was saved",
        ),
        (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(2, dtype=torch.int8)},
            "state['a'] is a tensor of (2,) float32, and a tensor of (2,) int8 was saved",
        ),
        ({"a": torch.zeros(2)}, {"a": 1}, "is a tensor of (2,) float32, and an int was saved"),
        ({"a": {"b": 1}}, {"a": [1]}, "state['a'] is a dict, and a list was saved"),
        ({"a": {"b": Counter()}}, {"a": {}}, "nothing was saved for state['a']['b'], a Counter"),
        ({"a": object()}, {"a": 1}, "state['a'] is an object, which has no load_state_dict"),
        ({"a": 1}, [1], "what was saved is no dict of names, but a list"),
    ],
)
def test_a_mismatch_is_rejected_with_its_path(state, saved, message):
    with pytest.raises(StateMismatchError) as error:
        plan_restore(state, read_back(saved))
    assert message in str(error.value)


class OwnLinear(torch.nn.Linear):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return super().load_state_dict(*args, **options)


def test_a_state_that_an_object_rejects_while_it_loads_it_is_reported_with_its_path():
    small, wide = OwnLinear(2, 1), OwnLinear(3, 1)
    one, two = torch.optim.Adam(small.parameters()), torch.optim.Adam([small.weight])
    one.register_load_state_dict_pre_hook(lambda _optimizer, state: state)
    for live, other, message in (
        (small, wide, "size mismatch for weight"),
        (one, two, "doesn't match the size of optimizer's group"),
    ):
        restore = plan_restore({"it": live}, {"it": other.state_dict()})
        with pytest.raises(
            StateMismatchError, match=r"state\['it'\], an? \w+, could not load"
        ) as error:
            restore()
        assert message in str(error.value)


def test_the_error_for_a_model_saved_with_or_without_ddp_names_the_remedy():
    model = torch.nn.Linear(2, 2)
    wrapped_model = torch.nn.Sequential()
    wrapped_model.module = torch.nn.Linear(
        2, 2
    )  # DistributedDataParallel also has its model as `module`.
    for old, new, with_or_without in (
        (wrapped_model, model, "without"),
        (model, wrapped_model, "with"),
    ):
        with pytest.raises(StateMismatchError) as error:
            plan_restore({"model": old}, read_back({"model": new}))()
        assert f"(saved {with_or_without} DistributedDataParallel?" in str(error.value)
        assert str(error.value).lower().endswith("put model.module into the state)")


def test_a_state_dict_saved_with_or_without_ddp_is_rejected() -> None:
    model, wrapped_model = torch.nn.Linear(2, 2), torch.nn.Sequential()
    wrapped_model.module = torch.nn.Linear(
        2, 2
    )  # DistributedDataParallel also has its model as `module`.
    for old, new, with_or_without in (
        (wrapped_model, model, "without"),
        (model, wrapped_model, "with"),
    ):
        with pytest.raises(
            StateMismatchError, match=rf"\['model'\] has other .*saved {with_or_without} Distrib"
        ):
            plan_restore({"model": old.state_dict()}, read_back({"model": new.state_dict()}))


def test_names_without_a_counterpart_are_ignored_if_not_strict():
    state = {"a": 1, "b": 1}
    saved_values = read_back({"a": 2, "c": 3})
    plan_restore(state, saved_values, strict=False)()
    assert state == {"a": 2, "b": 1}


def test_an_object_that_rejects_its_state_is_reported_with_its_path():
    class RejectingCounter(Counter):
        def load_state_dict(self, state):
            raise RuntimeError(f"no room for {state}")

    restore = plan_restore({"nested": [RejectingCounter()]}, read_back({"nested": [Counter()]}))
    with pytest.raises(
        CheckpointError, match=r"state\['nested'\]\[0\], a .*RejectingCounter, could not load"
    ):
        restore()
