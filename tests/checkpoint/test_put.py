"""A state that was read goes back in place, or it changes nothing."""

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
        self.held: Any = {"n": torch.zeros(2)}

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


def job(value: float) -> dict[str, Any]:
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


def test_all_goes_back_in_place_and_what_cannot_is_replaced():
    saved, state = job(5.0), job(1.0)
    saved["nested"]["inner"][0].held = {"n": torch.full((2,), 9.0)}
    saved["none"] = [torch.ones(1)]
    found = read_back(saved)
    nested, inner = state["nested"], state["nested"]["inner"]
    places = [state["model"].weight, nested["t"], nested, inner, inner[0], inner[1][0]]
    plan_restore(state, found)()
    nested, inner = state["nested"], state["nested"]["inner"]
    after = [state["model"].weight, nested["t"], nested, inner, inner[0], inner[1][0]]
    assert all(one is other for one, other in zip(places, after, strict=True))
    assert torch.equal(state["model"].weight, saved["model"].weight)
    assert str(state["adam"].state_dict()) == str(saved["adam"].state_dict())
    assert nested["t"].tolist() == [5.0, 5.0]
    assert inner[0].held["n"].tolist() == [9.0, 9.0]
    assert inner[1] == (torch.tensor(5.0), "s")
    assert (state["order"], state["step"], state["none"]) == ({"a": 5.0}, 5, [torch.ones(1)])


def test_what_an_object_keeps_is_its_own_and_no_view_of_the_pack():
    memory = pack_state(
        {"c": {"n": torch.ones(2)}, "m": {"w": torch.ones(2)}, "free": [torch.ones(1)]}
    )
    state = {"c": Counter(), "m": {"w": torch.zeros(2)}, "free": None}
    plan_restore(state, unpack(memory, copy=False))()
    memory[:] = bytes(len(memory))
    assert state["c"].held["n"].tolist() == [1.0, 1.0]
    assert state["m"]["w"].tolist() == [1.0, 1.0]
    assert state["free"][0].tolist() == [1.0]


def test_a_copy_keeps_what_is_shared_and_what_wants_a_gradient():
    shared = torch.ones(2)
    weight = torch.nn.Parameter(torch.ones(1))
    wanted = torch.ones(1, requires_grad=True)
    state: dict[str, Any] = {"all": None}
    plan_restore(state, {"all": {"a": shared, "b": [shared], "p": weight, "w": wanted}})()
    copy = state["all"]
    assert copy["a"] is copy["b"][0]
    assert copy["a"] is not shared
    assert isinstance(copy["p"], torch.nn.Parameter)
    assert copy["p"].requires_grad
    assert copy["w"].requires_grad
    assert copy["w"].data_ptr() != wanted.data_ptr()


def test_a_container_becomes_what_was_saved():
    state: dict[str, Any] = {"d": {"gone": 1, "kept": torch.zeros(1)}, "l": [1, 2, 3], "m": [1]}
    kept, short = state["d"]["kept"], state["l"]
    found = read_back({"d": {"kept": torch.ones(1), "new": 2}, "l": [9], "m": [1, [2]]})
    plan_restore(state, found)()
    assert state == {"d": {"kept": torch.ones(1), "new": 2}, "l": [9], "m": [1, [2]]}
    assert state["d"]["kept"] is kept
    assert state["l"] is short


@pytest.mark.parametrize(
    ("state", "saved", "sentence"),
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
def test_what_does_not_fit_is_refused_by_name(state, saved, sentence):
    with pytest.raises(StateMismatchError) as refused:
        plan_restore(state, read_back(saved))
    assert sentence in str(refused.value)


def test_so_is_what_a_module_or_an_optimizer_does_not_take():
    small, wide = (torch.nn.Linear(width, 1) for width in (2, 3))
    one, two = torch.optim.Adam(small.parameters()), torch.optim.Adam([small.weight])
    for mine, other, said in (
        (small, wide, "size mismatch for weight"),
        (one, two, "doesn't match the size of optimizer's group"),
    ):
        put = plan_restore({"it": mine}, {"it": other.state_dict()})
        with pytest.raises(
            StateMismatchError, match=r"state\['it'\], an? \w+, could not load"
        ) as refused:
            put()
        assert said in str(refused.value)


def test_a_state_of_a_model_with_or_without_ddp_says_what_to_save():
    alone = torch.nn.Linear(2, 2)
    wrapped = torch.nn.Sequential()
    wrapped.module = torch.nn.Linear(2, 2)  # as DistributedDataParallel has it
    for old, new, way in ((wrapped, alone, "without"), (alone, wrapped, "with")):
        with pytest.raises(StateMismatchError) as refused:
            plan_restore({"model": old}, read_back({"model": new}))()
        assert f"(saved {way} DistributedDataParallel?" in str(refused.value)
        assert str(refused.value).lower().endswith("put model.module into the state)")


def test_a_state_dict_of_a_model_with_or_without_ddp_is_not_left_as_it_was() -> None:
    alone, wrapped = torch.nn.Linear(2, 2), torch.nn.Sequential()
    wrapped.module = torch.nn.Linear(2, 2)  # as DistributedDataParallel has it
    for old, new, way in ((wrapped, alone, "without"), (alone, wrapped, "with")):
        with pytest.raises(
            StateMismatchError, match=rf"\['model'\] has other .*saved {way} Distrib"
        ):
            plan_restore({"model": old.state_dict()}, read_back({"model": new.state_dict()}))


def test_names_on_one_side_are_left_alone_if_that_is_allowed():
    state = {"a": 1, "b": 1}
    found = read_back({"a": 2, "c": 3})
    plan_restore(state, found, strict=False)()
    assert state == {"a": 2, "b": 1}


def test_an_object_that_refuses_its_state_is_named():
    class Full(Counter):
        def load_state_dict(self, state):
            raise RuntimeError(f"no room for {state}")

    put = plan_restore({"nested": [Full()]}, read_back({"nested": [Counter()]}))
    with pytest.raises(CheckpointError, match=r"state\['nested'\]\[0\], a .*Full, could not load"):
        put()
