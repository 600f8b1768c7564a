"""A state as one run of bytes: what goes in comes out, and no changed byte of its head passes."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.pack import fill, lay_out, read_meta, size_of, unpack
from elasticlib.errors import CheckpointCorrupt, CheckpointError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**100), 2**100),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters()),
    st.binary(),
    st.sampled_from([torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, 3])]),
)
keys = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.sets(st.integers()),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


def packed(state: object, meta: dict[str, Any] | None = None) -> memoryview:
    layout = lay_out(state, meta)
    buffer = torch.zeros(layout.size, dtype=torch.uint8)
    fill(layout, buffer)
    return memoryview(buffer.numpy())


def types_of(value: object) -> object:
    """The shape of a state in types, which `==` does not tell apart."""
    if isinstance(value, dict):
        return type(value), [(types_of(k), types_of(v)) for k, v in value.items()]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value), [types_of(item) for item in value]
    return type(value)


@given(states)
def test_what_is_packed_comes_out_equal_and_of_the_same_types(state: object) -> None:
    found = unpack(packed(state))
    assert found == state
    assert types_of(found) == types_of(state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_keep_their_bits_whatever_their_layout(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 255, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    whole = (bits % 2).bool()[:, :4] if dtype is torch.bool else bits.view(dtype)
    state = {"whole": whole, "turned": whole.t(), "part": whole[1:5:2, 1], "one": whole[0, 0]}
    found = unpack(packed([state, torch.empty(0, 3, dtype=dtype)]))
    for name, tensor in state.items():
        assert found[0][name].dtype is dtype
        assert found[0][name].shape == tensor.shape
        want = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found[0][name].contiguous().reshape(-1).view(torch.uint8), want)
    assert found[1].shape == (0, 3)


def test_a_model_and_its_optimizer_come_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    found = unpack(packed({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    assert found["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(found["model"])
    torch.optim.AdamW(other.parameters()).load_state_dict(found["optimizer"])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_tensor_that_stands_in_two_places_is_packed_once_and_still_is_one() -> None:
    tied = torch.randn(1000)
    pack = packed({"a": tied, "b": [tied]})
    assert len(pack) < 4096 + 2 * 4000
    found = unpack(pack)
    assert found["a"] is found["b"][0]


def test_parameters_and_what_wants_a_gradient_stay_so() -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    found = unpack(packed([torch.nn.Parameter(torch.ones(2)), frozen, torch.ones(1)]))
    assert [type(tensor) for tensor in found[:2]] == [torch.nn.Parameter] * 2
    assert [tensor.requires_grad for tensor in found] == [True, False, False]


def test_a_number_that_is_none_is_still_that() -> None:
    found = unpack(packed([math.nan, -math.inf, -0.0]))
    assert math.isnan(found[0])
    assert found[1] == -math.inf
    assert math.copysign(1, found[2]) == -1


class OnSecond(torch.Tensor):
    device = torch.device("cuda", 1)


def test_each_device_is_waited_for_that_something_is_copied_from() -> None:
    layout = lay_out([torch.ones(3), torch.ones(2), torch.ones(0)])
    here, there, empty = layout.tensors
    other = attrs.evolve(layout, tensors=(here, there.as_subclass(OnSecond), empty))
    buffer, waited = torch.zeros(layout.size, dtype=torch.uint8), list[torch.device]()
    fill(other, buffer, waited.append)
    assert waited == [torch.device("cuda", 1)]
    fill(layout, buffer, waited.append)
    assert len(waited) == 1


def test_views_follow_the_pack_and_copies_do_not() -> None:
    pack = packed(torch.zeros(3))
    view, own = unpack(pack, copy=False), unpack(pack)
    pack[4096] = 1
    assert view[0] != 0
    assert own[0] == 0


def test_what_stands_beside_the_state_is_read_from_the_head_alone() -> None:
    pack = packed(torch.zeros(5000), {"step": 7})
    size, start = size_of(pack)
    assert (size, start) == (len(pack), 4096)
    assert read_meta(pack[:start]) == {"step": 7}


class Odd:
    pass


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [1, Odd()]}, r"state\['a'\]\[1\] is a test_pack.Odd"),
        ({Odd: 1}, r"state.key\(.*\) is a builtins.type"),
        (LOOP, r"state\[0\] contains itself"),
        ({"w": torch.eye(2).to_sparse()}, r"state\['w'\] is a tensor without plain elements"),
        ([torch.ones(1, device="meta")], r"state\[0\] is a tensor without plain elements"),
        ([1 << 9000], r"state\[0\] is an integer of more than 8192 bits"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(state: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        lay_out(state)


def test_a_changed_byte_of_the_head_is_found_and_a_cut_end_too() -> None:
    pack = packed({"a": torch.ones(3), "b": "text"}, {"step": 1})
    outline = int.from_bytes(pack[16:24], "little")
    for at in [*range(32), *range(64, 64 + outline)]:
        for bit in (1, 128):
            changed = bytearray(pack)
            changed[at] ^= bit
            with pytest.raises(CheckpointCorrupt):
                unpack(memoryview(changed))
    for size in (0, 10, 63, 64, 4096, len(pack) - 1):
        with pytest.raises(CheckpointCorrupt):
            unpack(memoryview(bytearray(pack[:size])))


@given(st.binary(max_size=200))
def test_what_is_no_pack_is_refused(noise: bytes) -> None:
    with pytest.raises(CheckpointCorrupt):
        unpack(memoryview(bytearray(noise)))
