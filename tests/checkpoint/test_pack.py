"""A state as one run of bytes: what goes in comes out, and no changed byte of its head passes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter, OrderedDict
from typing import Any

import attrs
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.pack import fill, lay_out, unpack
from elasticlib.checkpoint.pack_head import read_meta, size_of
from elasticlib.checkpoint.state import MAX_DEPTH
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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of their indices, as bytes."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    return fresh.copy_(tensor).view(-1).view(torch.uint8)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in all that a kernel may go by: bits, shape, strides, and what is yet to be done."""
    return (
        (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
        and torch.equal(bits(one), bits(other))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_keep_their_bits_and_strides_whatever_their_layout(dtype: torch.dtype) -> None:
    noise = torch.randint(0, 255, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    whole = (noise % 2).bool()[:, :4] if dtype is torch.bool else noise.view(dtype)
    parts = {
        "whole": whole,
        "turned": whole.t(),
        "part": whole[1:5:2, 1],
        "one": whole[0, 0],
        "wide": whole[2].expand(3, 4),
        "both": whole[::2, 1:2].expand(3, 2),
        "none": whole[:0],
    }
    for state in (parts, *({"alone": part} for part in parts.values())):
        found = unpack(packed([state, torch.empty(0, 3, dtype=dtype)]))
        assert all(same(found[0][name], tensor) for name, tensor in state.items()), state.keys()
        assert found[1].shape == (0, 3)


sizes = st.lists(st.integers(0, 3), max_size=4)


@given(sizes, st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(0, 3))
def test_any_view_of_memory_comes_back_as_that_view(
    shape: list[int], steps: list[int], offset: int
) -> None:
    memory = torch.arange(80, dtype=torch.int32)
    view = memory.as_strided(shape, steps[: len(shape)], offset)
    alone = unpack(packed(view))
    assert same(alone, view)
    found = unpack(packed([view, memory, view.view(torch.float32), memory[3:].view(torch.uint8)]))
    assert same(found[0], view)
    assert same(found[1], memory)
    if view.numel():
        found[0].fill_(-1)
        assert (found[1] == -1).sum() == len(set(view.flatten().tolist()))
        assert same(found[2], found[0].view(torch.float32))
        assert torch.equal(found[3], found[1][3:].view(torch.uint8))


def test_conjugates_and_negatives_come_back_as_what_they_were() -> None:
    x = torch.tensor([1 + 2j, -3 + 0.5j, 4 - 1j])
    state = {"x": x, "y": x.conj(), "imag": x.conj().imag, "real": x.conj().real}
    found = unpack(packed(state))
    assert all(same(found[name], tensor) for name, tensor in state.items())
    found["x"].fill_(5 + 5j)
    assert found["y"].tolist() == [5 - 5j] * 3
    assert found["imag"].tolist() == [-5.0] * 3
    for name, tensor in state.items():
        assert same(unpack(packed([tensor]))[0], tensor), name


def test_memory_is_packed_once_and_no_more_of_it_than_is_used() -> None:
    t = torch.randn(1_000_000)
    pack = packed({"all": t, "head": t[:900_000], "tail": t[100_000:]})
    assert len(pack) < 4_010_000
    found = unpack(pack)
    found["all"].zero_()
    assert not found["head"].any()
    assert not found["tail"].any()
    assert found["tail"].data_ptr() - found["all"].data_ptr() == 400_000
    table = torch.randn(1000, 1000)
    # A few elements of it, wherever they lie.
    for small in (table[5], table[:, 5], table[10:12, 10:12], table[5, 5].expand(100)):
        assert len(packed(small)) < 4096 + 4096
    # Parts that have nothing in common are no longer of one memory.
    assert len(packed([table[0], table[999]])) < 4096 + 2 * 4096


def test_tensors_over_one_array_share_it_however_they_were_made() -> None:
    array = numpy.arange(8.0)
    short, long = torch.from_numpy(array[:3]), torch.from_numpy(array)
    found = unpack(packed([short, long]))
    found[1].zero_()
    assert not found[0].any()


def test_one_tensor_is_one_and_its_detached_twin_another() -> None:
    wanted = torch.ones(2, requires_grad=True)
    tied = torch.nn.Parameter(torch.ones(2))
    found = unpack(packed([wanted, wanted.detach(), tied, tied, wanted]))
    assert [tensor.requires_grad for tensor in found] == [True, False, True, True, True]
    assert found[0] is found[4]
    assert found[2] is found[3]
    assert found[0].data_ptr() == found[1].data_ptr()


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


def test_each_device_is_waited_for_that_something_is_copied_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = lay_out([torch.ones(3), torch.ones(2), torch.ones(0)])
    here, (there, *span), empty = layout.parts
    other = attrs.evolve(layout, parts=(here, (there.as_subclass(OnSecond), *span), empty))
    buffer, waited = torch.zeros(layout.size, dtype=torch.uint8), list[torch.device]()
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    fill(other, buffer)
    assert waited == [torch.device("cuda", 1)]
    fill(layout, buffer)
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


def nested(levels: int, width: int) -> list[Any]:
    """A list in a list, so many levels deep; each level holds the next one `width` times."""
    state: list[Any] = []
    for _ in range(levels):
        state = [state] * width
    return state


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [1, Odd()]}, r"state\['a'\]\[1\] is a test_pack.Odd"),
        ({Odd: 1}, r"state.key\(.*\) is a type"),
        (LOOP, r"state\[0\] contains itself"),
        (nested(MAX_DEPTH + 1, 1), rf"(\[0\]){{{MAX_DEPTH}}} is nested deeper than {MAX_DEPTH}"),
        (nested(MAX_DEPTH - 1, 2), "stand in many places"),
        ({"w": torch.eye(2).to_sparse()}, r"state\['w'\] is a tensor without plain elements"),
        ([torch.ones(1, device="meta")], r"state\[0\] is a tensor without plain elements"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(state: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        lay_out(state)


def test_a_changed_byte_of_the_head_is_found_and_a_cut_end_too() -> None:
    pack = packed({"a": torch.ones(3), "b": "text"}, {"step": 1})
    _, start = size_of(pack)
    for at in range(start):
        for bit in (1, 128):
            changed = bytearray(pack)
            changed[at] ^= bit
            with pytest.raises(CheckpointCorrupt):
                unpack(memoryview(changed))
    for size in (0, 10, 127, 128, 4095, 4096, len(pack) - 1):
        with pytest.raises(CheckpointCorrupt):
            unpack(memoryview(bytearray(pack[:size])))


@given(st.binary(max_size=200))
def test_what_is_no_pack_is_refused(noise: bytes) -> None:
    with pytest.raises(CheckpointCorrupt):
        unpack(memoryview(bytearray(noise)))


def test_saved_sets_are_the_same_bytes_in_every_process() -> None:
    """Ranks compare what they hold, and strings have an order of each process's own in a set."""
    outline = "lay_out([set('abcdefgh'), frozenset(('x', n) for n in range(9))]).head.hex()"
    program = f"from elasticlib.checkpoint.pack import lay_out; print({outline})"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
        timeout=100,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.strip() == eval(outline, {"lay_out": lay_out})
